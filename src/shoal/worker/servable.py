"""What this worker's environment can serve.

Owns asking which runtimes are installed (in a process of its own, for they import their libraries)
and why an entry cannot be served here. Downloads nothing. Does not own what is loaded.
"""

from __future__ import annotations

import asyncio
import json
import sys

from shoal.catalog.resolve import why_absent
from shoal.catalog.schema import Entry
from shoal.errors import OperatorError

PROBE_S = 60.0


async def probe_runtimes() -> dict[str, str | None]:
    """Which runtimes this environment can run; see `shoal.runtimes.probe`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "shoal.runtimes.probe"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(PROBE_S):
        output, _ = await process.communicate()
    if process.returncode != 0:
        raise OperatorError("the runtimes of this environment cannot be listed")
    found: dict[str, str | None] = json.loads(output)
    return found


def why_not(entry: Entry, runtimes: dict[str, str | None]) -> str | None:
    """Why this worker cannot serve an entry; None when it can (as far as is known unloaded)."""
    if entry.runtime not in runtimes:
        return f"runtime `{entry.runtime}` is unknown here; known are {', '.join(runtimes)}"
    if runtimes[entry.runtime]:
        return runtimes[entry.runtime]
    return why_absent(entry)
