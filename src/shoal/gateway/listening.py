"""Where a gateway listens: the socket, its address, and writing that down.

Owns which addresses are allowed without API keys. Does not own what is answered there.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from pathlib import Path

from shoal.errors import SettingsError
from shoal.settings import GatewaySettings

_BACKLOG = 2048


def listen(settings: GatewaySettings) -> socket.socket:
    """The listening socket. Raises `SettingsError` when the address is taken or not allowed."""
    if not settings.insecure and not _is_loopback(settings.host):
        raise SettingsError(
            f"host: {settings.host} can be reached by others and there are no API keys yet; "
            "say `--insecure` if that is meant"
        )
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"port: cannot listen on {settings.host}:{settings.port}: {error.strerror}; "
            "`--port 0` takes a free one"
        ) from error
    listener.listen(_BACKLOG)
    return listener


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url_of(listener: socket.socket) -> str:
    """Where the socket listens, as a URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def write_endpoint(file: Path, url: str) -> None:
    """Writes the address down, in one piece: a reader never sees half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    part.replace(file)
