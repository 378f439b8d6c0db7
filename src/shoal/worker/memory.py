"""The memories of this machine: what models may use, and what they do.

Owns the budgets (a setting, or a share of what there is), measuring what the runtime processes
hold, and how far others' use of the machine cuts a budget. All CPU devices share the host's
memory; each GPU has its own. Does not own what is done about it (`residency`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from shoal.core.residency import Memory

HOST = "host"
_MIB = 1024 * 1024
_UNKNOWN_GPU_BYTES = 1 << 40  # a load that does not fit says so
_CGROUP = Path("/sys/fs/cgroup")
# Of the machine's memory: what is left to everything else, however little others seem to use.
_RESERVED_SHARE = 0.05


def memory_of(device: str) -> str:
    """The name of a device's memory: `host`, or the GPU's own."""
    return device if device.startswith("cuda") else HOST


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The host's memory in bytes, within the limit of this process's control group."""

    total_bytes: int
    available_bytes: int


def host_memory(cgroup: Path = _CGROUP) -> HostMemory:
    """What there is and what is free of it; page cache that can be given up counts as free."""
    machine = psutil.virtual_memory()
    total_bytes, available_bytes = int(machine.total), int(machine.available)
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is not None and used is not None and limit < total_bytes:
        cached = _field(cgroup / "memory.stat", "inactive_file")
        return HostMemory(limit, min(available_bytes, max(0, limit - used + cached)))
    return HostMemory(total_bytes, available_bytes)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no control group, or `max`
        return None


def _field(file: Path, name: str) -> int:
    try:
        for line in file.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0


@dataclass(slots=True)
class GpuMemory:
    """A GPU's memory as its runtime processes last reported it. held_bytes: theirs, together."""

    total_bytes: int = 0
    free_bytes: int = 0
    held_bytes: int = 0


class Memories:
    """Budgets and use. budget_mib: of each memory; None: `share` of what the memory has."""

    def __init__(self, devices: Sequence[str], *, budget_mib: int | None, share: float) -> None:
        self._devices: dict[str, list[str]] = {}
        for device in devices:
            self._devices.setdefault(memory_of(device), []).append(device)
        self._budget_mib = budget_mib
        self._share = share
        self._gpus = {name: GpuMemory() for name in self._devices if name != HOST}

    def on_gpu(self, name: str, memory: GpuMemory) -> None:
        """What the processes on a GPU have reported; nothing, where none of them runs."""
        if not memory.total_bytes:
            total_bytes = self._gpus[name].total_bytes
            memory = GpuMemory(total_bytes, total_bytes, 0)
        self._gpus[name] = memory

    def state(self, pids: Iterable[int]) -> tuple[Memory, ...]:
        """All memories now. pids: of the runtime processes, which hold host memory all of them."""
        found: list[Memory] = []
        for name, devices in self._devices.items():
            if name == HOST:
                host, used_bytes = host_memory(), resident_bytes(pids)
                total_bytes, free_bytes = host.total_bytes, host.available_bytes
            else:
                gpu = self._gpus[name]
                total_bytes, free_bytes = gpu.total_bytes, gpu.free_bytes
                if not total_bytes:  # no process has spoken yet: the first load will make one
                    total_bytes = free_bytes = _UNKNOWN_GPU_BYTES
                used_bytes = gpu.held_bytes
            budget_bytes = self._budget(total_bytes, free_bytes, used_bytes)
            found.append(Memory(name, budget_bytes, used_bytes, tuple(devices)))
        return tuple(found)

    def _budget(self, total_bytes: int, free_bytes: int, used_bytes: int) -> int:
        """The setting or the share, or less, where others leave less."""
        if self._budget_mib is not None:
            budget_bytes = self._budget_mib * _MIB
        else:
            budget_bytes = int(total_bytes * self._share)
        left_bytes = used_bytes + free_bytes - int(total_bytes * _RESERVED_SHARE)
        return max(0, min(budget_bytes, left_bytes))


def resident_bytes(pids: Iterable[int]) -> int:
    """The resident sets of these processes together; one that is gone has none."""
    total_bytes = 0
    for pid in pids:
        try:
            total_bytes += int(psutil.Process(pid).memory_info().rss)
        except psutil.Error:
            continue
    return total_bytes
