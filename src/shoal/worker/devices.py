"""The devices of this machine, as the worker names them.

Owns reading the `devices` setting. A CPU core is a device: runtime processes of one thread each
serve more than one process of many threads. Does not own processes or models.
"""

from __future__ import annotations

import os
import re

from shoal.errors import SettingsError

_CPU = re.compile(r"^cpu(?::([1-9]\d*))?$")
_CUDA = re.compile(r"^cuda:\d+$")


def parse(devices: str, *, threads: int) -> list[str]:
    """Names of the devices: `cpu#0`, `cpu#1`, `cuda:0`, ... Raises `SettingsError`.

    `cpu` alone is as many devices as the usable cores have room for at `threads` threads each.
    """
    names: list[str] = []
    for part in (p.strip() for p in devices.split(",")):
        cpu = _CPU.match(part)
        if cpu:
            count = int(cpu[1]) if cpu[1] else max(1, usable_cores() // threads)
            names += [f"cpu#{i}" for i in range(len(names), len(names) + count)]
        elif _CUDA.match(part):
            names.append(part)
        else:
            raise SettingsError(f"devices: `{part}` is none of `cpu`, `cpu:N`, `cuda:N`")
    if len(set(names)) != len(names):
        raise SettingsError(f"devices: `{devices}` names a device twice")
    return names


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
