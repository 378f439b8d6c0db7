"""Making a bundle's environment: an interpreter, its packages, and this very Shoal.

Owns the steps, their log, the lock against two builds at once, and the errors. The environment is
made where it will lie, for programs in it know their path; it counts once its last file, the
marker, is there, and what has no marker is removed before the next try. Shoal itself is not
installed but pointed to, so that both ends of a socket are always of one version. Does not own
which bundles there are (`definition`) or who waits for one (`shelf`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from shoal import __version__
from shoal.bundles.definition import Bundle, entry_points_text, own_folder
from shoal.errors import RuntimeUnavailable
from shoal.ipc.child import Command

OnStep = Callable[[str], None]

MARKER = "built"
BUILD_S = 1800.0
_LOCK_LOOK_S = 0.2
_TAIL_LINES = 6
_TAIL_CHARS = 800
_PYTHONS = ("python3", "python3.14", "python3.13", "python3.12", "python3.11")
_LEAST_PYTHON = (3, 11)


def log_path(folder: Path) -> Path:
    """The log of a build; it outlives a failed one."""
    return folder.with_name(f"{folder.name}.log")


def python_of(folder: Path) -> Path:
    """The interpreter of an environment."""
    return folder / "bin" / "python"


def is_built(folder: Path) -> bool:
    """Whether an environment is whole, its interpreter there included."""
    return (folder / MARKER).is_file() and python_of(folder).exists()


async def build(bundle: Bundle, folder: Path, on_step: OnStep, *, again: bool = False) -> None:
    """Makes the environment unless it is there; waits for another process that does so.

    again: what is there is removed first. Raises `RuntimeUnavailable` with the end of pip's output.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    async with _locked(folder.with_name(f"{bundle.name}.lock"), on_step):
        if is_built(folder) and not again:
            return
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        try:
            await _make(bundle, folder, on_step)
        except BaseException:  # task root: a cancelled build, too, leaves nothing
            shutil.rmtree(folder, ignore_errors=True)
            raise


async def _make(bundle: Bundle, folder: Path, on_step: OnStep) -> None:
    if find_spec("pip") is None:
        raise _failed(bundle, "pip is not installed beside Shoal: python -m ensurepip")
    with log_path(folder).open("wb") as log:
        on_step("looking for Python")
        python = await _interpreter(bundle)
        on_step("making the environment")
        await _run(bundle, [python, "-m", "venv", "--without-pip", str(folder)], log)
        packages = next(folder.glob("lib/python*/site-packages"))
        _point_to_shoal(packages)
        if bundle.shim:
            _place_shim(bundle, packages)
        requirements = bundle.requirements()
        on_step(f"installing {len(requirements)} packages")
        # pip wants hashes for every line of a file or for none.
        hashed = [line for line in requirements if "--hash=" in line]
        for lines, options in (
            (hashed, ["--require-hashes"]),
            ([line for line in requirements if line not in hashed], []),
        ):
            if lines:
                await _install(bundle, folder, lines, options, log)
        for module, cure in bundle.definition.imports.items():
            on_step(f"importing {module}")
            await _import(bundle, folder, module, cure, log)
    (folder / MARKER).write_text(f"{bundle.name} {__version__}\n", "utf-8")


async def _install(
    bundle: Bundle, folder: Path, lines: Sequence[str], options: Sequence[str], log: IO[bytes]
) -> None:
    wanted = folder / "requirements.txt"
    wanted.write_text("\n".join(lines) + "\n", "utf-8")
    arguments = [
        *("--python", str(python_of(folder)), "--disable-pip-version-check", "--no-input"),
        *("install", "--no-deps", "--progress-bar", "off", *options, "-r", str(wanted)),
    ]
    await _run(bundle, Command("pip", arguments, module="pip").argv(), log)


async def _import(bundle: Bundle, folder: Path, module: str, cure: str, log: IO[bytes]) -> None:
    """Raises `RuntimeUnavailable` with the cure where a module cannot be imported."""
    try:
        await _run(bundle, [str(python_of(folder)), "-I", "-c", f"import {module}"], log)
    except RuntimeUnavailable as error:
        raise RuntimeUnavailable(f"{error.message}; {cure}") from error


async def _run(bundle: Bundle, argv: Sequence[str], log: IO[bytes]) -> None:
    """Runs a step to its end; a step that is given up ends with all that it started."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(BUILD_S):
            status = await process.wait()
    except (asyncio.CancelledError, TimeoutError) as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if isinstance(error, TimeoutError):
            raise _failed(bundle, f"it took more than {BUILD_S:.0f} s") from error
        raise
    if status != 0:
        path = Path(str(log.name))
        raise _failed(bundle, tail(path), path)


def tail(log: Path) -> str:
    """The end of a log, errors first, as one line."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines()]
    told = [line for line in lines if line.startswith("ERROR")] or [line for line in lines if line]
    return "; ".join(told[-_TAIL_LINES:])[-_TAIL_CHARS:]


def _failed(bundle: Bundle, why: str, log: Path | None = None) -> RuntimeUnavailable:
    where = f" (all of it: {log})" if log else ""
    return RuntimeUnavailable(f"the bundle `{bundle.name}` cannot be built: {why}{where}")


@contextlib.asynccontextmanager
async def _locked(path: Path, on_step: OnStep) -> AsyncIterator[None]:
    """Holds a file that one process, or one task, can hold at a time."""
    with path.open("wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                on_step("being built")
                await asyncio.sleep(_LOCK_LOOK_S)
        yield


def _point_to_shoal(packages: Path) -> None:
    """This Shoal's code, and the runtimes that it registers, for another interpreter."""
    (packages / "shoal").symlink_to(own_folder())
    about = packages / f"shoal-{__version__}.dist-info"
    about.mkdir()
    about.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: shoal\nVersion: {__version__}\n", "utf-8"
    )
    about.joinpath("entry_points.txt").write_text(entry_points_text(), "utf-8")


def _place_shim(bundle: Bundle, packages: Path) -> None:
    name = f"shoal_bundle_{bundle.name.replace('-', '_')}"
    packages.joinpath(f"{name}.py").write_text(bundle.shim, "utf-8")
    packages.joinpath(f"{name}.pth").write_text(f"import {name}\n", "utf-8")


async def _interpreter(bundle: Bundle) -> str:
    """The interpreter that a bundle asks for: the named one, ours where it will do, or another.

    Raises `RuntimeUnavailable`.
    """
    asked = bundle.definition.python
    named = asked.startswith("/")
    paths = [asked] if named else [sys.executable, *filter(None, map(shutil.which, _PYTHONS))]
    seen = []
    for path in paths:
        version = await _version(path)
        if version >= _LEAST_PYTHON and (named or _fits(version, asked)):
            return path
        seen.append(f"{path} is {'.'.join(map(str, version)) or 'none'}")
    raise _failed(bundle, f"it needs Python {asked}, and {', '.join(seen)}")


async def _version(path: str) -> tuple[int, ...]:
    """Major and minor of an interpreter; empty where it does not run."""
    program = "import sys; print(*sys.version_info[:2])"
    try:
        process = await asyncio.create_subprocess_exec(
            *(path, "-I", "-c", program),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        output, _ = await process.communicate()
        return tuple(int(part) for part in output.split())
    except (OSError, ValueError):
        return ()


def _fits(version: tuple[int, ...], asked: str) -> bool:
    """Whether a version is within bounds such as `>=3.11,<3.14`."""
    for sign, minor in re.findall(r"(>=|<)3\.(\d+)", asked):
        bound = (3, int(minor))
        if version < bound if sign == ">=" else version >= bound:
            return False
    return True
