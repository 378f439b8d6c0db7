"""How a command finds the broker of a `shoal serve` on this machine: `<data-dir>/nats/access.json`.

Owns that file: who may read it, and that it is never seen half written. Does not own the broker
(`shoal.queue.server`) or the connection.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from shoal.errors import SettingsError
from shoal.queue.connection import Address


class _Access(msgspec.Struct, frozen=True):
    url: str
    token: str | None = None


def _file(data_dir: Path) -> Path:
    return data_dir / "nats" / "access.json"


def write_access(data_dir: Path, address: Address) -> None:
    """Writes down where the broker is, for the owner of the folder only."""
    file = _file(data_dir)
    part = file.with_suffix(f".{os.getpid()}.part")
    part.unlink(missing_ok=True)
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as out:
        out.write(msgspec.json.encode(_Access(address.url, address.token)))
    part.replace(file)


def forget_access(data_dir: Path) -> None:
    """Removes what was written; nothing happens when there is nothing."""
    _file(data_dir).unlink(missing_ok=True)


def read_access(data_dir: Path) -> Address:
    """Where the broker of that folder is. Raises `SettingsError` when none is there."""
    file = _file(data_dir)
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_Access)
    except FileNotFoundError as error:
        raise SettingsError(
            f"no `shoal serve` with a broker of its own runs in {data_dir}: name its folder with "
            "--data-dir, or the NATS server with --nats-url"
        ) from error
    except (OSError, msgspec.DecodeError) as error:
        raise SettingsError(f"{file} cannot be read: {error}") from error
    return Address(found.url, found.token)
