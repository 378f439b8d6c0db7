"""Packed weights that are unpacked once, in a process of their own, and kept in the model's cache.

Owns the place of the result, making it whole or not at all, and how many are kept. Does not own
what is in it: that is the module's that unpacks (`candle.unpack`, `sglang.gguf`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

from shoal.errors import ModelUnavailable
from shoal.ipc.child import Command
from shoal.settings import other_environment

log = logging.getLogger(__name__)

MAX_UNPACKED = 4
UNPACK_S = 1800.0
_TAIL_CHARS = 400


def unpacked(key: str, file: Path, cache_dir: Path, module: str, *options: str) -> Path:
    """The folder that a file was, or now is, unpacked into by `python -m module FILE FOLDER ...`.

    Raises `ModelUnavailable` with the end of what that says.
    """
    about = file.stat()
    facts = f"{file.resolve()} {about.st_size} {about.st_mtime_ns} {module} {options}"
    folder = cache_dir / "unpacked" / hashlib.sha256(facts.encode()).hexdigest()[:24]
    if folder.is_dir():
        keep_last(folder)
        return folder
    log.info("%s: unpacking %s", key, file)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(mkdtemp(dir=folder.parent, prefix="half-"))
    try:
        done = subprocess.run(  # noqa: S603 - our own command
            Command("unpack", [str(file), str(made), *options], module=module).argv(),
            check=False,
            capture_output=True,
            timeout=UNPACK_S,
            env=other_environment({"HF_HUB_OFFLINE": "1"}),
        )
        if done.returncode != 0:
            said = done.stderr.decode("utf-8", "replace").strip()[-_TAIL_CHARS:]
            raise ModelUnavailable(f"{key}: {file} cannot be unpacked: {said}")
        with suppress(OSError):  # another process was faster
            made.replace(folder)
        if not folder.is_dir():
            raise ModelUnavailable(f"{key}: {folder} cannot be made")
    except subprocess.TimeoutExpired as error:
        raise ModelUnavailable(f"{key}: unpacking took more than {UNPACK_S:.0f} s") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    keep_last(folder)
    return folder


def keep_last(folder: Path) -> None:
    """Marks what was unpacked as used now, and removes what of its kind was not for longest."""
    os.utime(folder)
    with suppress(FileNotFoundError):  # another process removes as well
        by_use = sorted(folder.parent.iterdir(), key=lambda one: one.stat().st_mtime_ns)
        for old in by_use[:-MAX_UNPACKED]:
            shutil.rmtree(old, ignore_errors=True)
