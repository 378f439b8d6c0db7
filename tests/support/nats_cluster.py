"""A real NATS cluster on this machine: nodes with routes and JetStream, to be killed one by one."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import nats

from shoal.queue.server import find_binary
from tests.support.pace import limit_s
from tests.support.ports import free_port

TOKEN = "cluster-token"  # noqa: S105


class NatsCluster:
    """`size` nodes; each keeps its ports and its store over restarts."""

    def __init__(self, folder: Path, size: int = 3) -> None:
        self._folder = folder
        self._ports = [free_port() for _ in range(size)]
        self._routes = [free_port() for _ in range(size)]
        self._nodes = [self._start(i) for i in range(size)]

    @property
    def url(self) -> str:
        """All nodes, as `--nats-url` takes them."""
        return ",".join(f"nats://127.0.0.1:{port}" for port in self._ports)

    def _start(self, i: int) -> subprocess.Popen[bytes]:
        folder = self._folder / f"node-{i}"
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "server_name": f"node-{i}",
            "listen": f"127.0.0.1:{self._ports[i]}",
            "authorization": {"token": TOKEN},
            "jetstream": {"store_dir": str(folder)},
            "max_payload": 8 * 1024 * 1024,
            "logfile": str(folder / "nats.log"),
            "cluster": {
                "name": "shoal-test",
                "listen": f"127.0.0.1:{self._routes[i]}",
                "routes": [f"nats://127.0.0.1:{port}" for port in self._routes],
            },
        }
        (folder / "nats.conf").write_text(json.dumps(config))
        return subprocess.Popen([find_binary(), "-c", str(folder / "nats.conf")])

    async def ready(self, timeout_s: float = 30.0) -> None:
        """Waits until the nodes have elected a leader and take orders. Raises TimeoutError."""
        async with asyncio.timeout(limit_s(timeout_s)):
            client = await nats.connect(self.url.split(","), token=TOKEN, error_cb=_quiet)
            while True:
                try:
                    await client.jetstream(timeout=limit_s(1)).account_info()
                    break
                except (nats.errors.Error, TimeoutError):
                    await asyncio.sleep(0.1)
            await client.close()

    async def leader(self, stream: str) -> int:
        """The node that leads a stream."""
        client = await nats.connect(self.url.split(","), token=TOKEN, error_cb=_quiet)
        info = await client.jetstream().stream_info(stream)
        await client.close()
        return int(info.cluster.leader.removeprefix("node-"))

    async def in_sync(self, stream: str, timeout_s: float = 30.0) -> None:
        """Waits until every node has all of a stream. Raises TimeoutError."""
        async with asyncio.timeout(limit_s(timeout_s)):
            client = await nats.connect(self.url.split(","), token=TOKEN, error_cb=_quiet)
            while True:
                try:
                    cluster = (await client.jetstream().stream_info(stream)).cluster
                    if cluster.leader and all(r.current for r in cluster.replicas):
                        break
                except (nats.errors.Error, TimeoutError):
                    pass
                await asyncio.sleep(0.1)
            await client.close()

    def kill(self, i: int) -> None:
        """SIGKILL."""
        self._nodes[i].kill()
        self._nodes[i].wait()

    def start(self, i: int) -> None:
        """Starts a node again that was killed."""
        self._nodes[i] = self._start(i)

    def close(self) -> None:
        """Ends all nodes."""
        for i in range(len(self._nodes)):
            self.kill(i)


async def _quiet(_: Exception) -> None:
    """Nodes are away on purpose."""
