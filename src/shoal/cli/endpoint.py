"""Which HTTP server a program of this machine speaks to.

Owns the order: what was said, SHOAL_URL, the `shoal serve` of the data folder by the address that
its gateway has written down (`endpoint.json`), and the usual port. Does not own writing that file
(`shoal.gateway`) or the way to the broker (`access`).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from shoal.configuration import load
from shoal.errors import SettingsError
from shoal.settings import GatewaySettings, OperatorSettings, environment

FILE = "endpoint.json"
# Where a gateway listens that was not told otherwise.
DEFAULT_URL = f"http://{GatewaySettings.host}:{GatewaySettings.port}"


class _Endpoint(msgspec.Struct, frozen=True):
    url: str
    pid: int


def server_url(url: str | None = None, data_dir: Path | None = None) -> str:
    """The address of the server that is meant.

    url, data_dir: None where nothing was said. Raises `SettingsError` where the server of the
    data folder has left without a word.
    """
    said = url or (None if data_dir else environment().get("SHOAL_URL"))
    if said:
        return said
    settings = load(OperatorSettings, {"data_dir": data_dir}, environment())
    return served_url(settings.data_dir) or DEFAULT_URL


def served_url(data_dir: Path) -> str | None:
    """The address of the `shoal serve` of a folder; None where none has run or it was stopped.

    Raises `SettingsError` for one that is gone although its address is still there.
    """
    import psutil

    file = data_dir / FILE
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_Endpoint)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise SettingsError(f"{file} cannot be read: {error}") from error
    if not psutil.pid_exists(found.pid):
        raise SettingsError(
            f"the `shoal serve` of {data_dir} ({found.url}) is not running any more: start it "
            "again, or name another server with --url"
        )
    return found.url
