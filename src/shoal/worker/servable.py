"""What this worker's environment can serve.

Owns asking which runtimes are installed (in a process of its own, for they import their libraries)
and why an entry cannot be served here. Downloads nothing. Does not own what is loaded, or which of
an entry's runtimes serves it (`choice`).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Mapping

import msgspec

from shoal.bundles.shelf import Shelf
from shoal.catalog.resolve import why_absent
from shoal.catalog.schema import Entry
from shoal.errors import ModelUnavailable, OperatorError
from shoal.ipc.facts import Facts

PROBE_S = 60.0


class Installed:
    """The runtimes of a worker with these devices (`cpu#0`, `cuda:0`)."""

    def __init__(self, devices: Iterable[str]) -> None:
        kinds = (device.partition("#")[0].partition(":")[0] for device in devices)
        self._kinds = sorted(set(kinds))
        self._runtimes: dict[str, str | None] = {}
        self._facts: dict[str, Facts] = {}
        self._shelf: Shelf | None = None

    async def look(self, shelf: Shelf) -> None:
        """Asks this environment, and adds what bundles have. Raises `OperatorError`."""
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
        self.take(msgspec.json.decode(output, type=dict[str, Facts]), shelf)

    def take(self, found: Mapping[str, Facts], shelf: Shelf) -> None:
        """Takes over what a probe has found."""
        self._shelf = shelf
        self._runtimes = shelf.complete({name: facts.why_not for name, facts in found.items()})
        self._facts = dict(found)
        for name, facts in found.items():
            lacking = [kind for kind in self._kinds if facts.devices and kind not in facts.devices]
            if lacking:
                self._runtimes[name] = (
                    f"runtime `{name}` computes on {', '.join(facts.devices)}, and this worker has "
                    f"{', '.join(lacking)}"
                )

    def why_not(self, entry: Entry) -> str | None:
        """Why an entry cannot be served here; None when it can (as far as is known unloaded)."""
        if entry.runtime not in self._runtimes:
            known = ", ".join(self._runtimes)
            return f"runtime `{entry.runtime}` is unknown here; known are {known}"
        return self._runtimes[entry.runtime] or self._unfit(entry) or why_absent(entry)

    def _unfit(self, entry: Entry) -> str | None:
        """Why its runtime is none for an entry, whatever is installed."""
        facts = self._facts.get(entry.runtime, Facts())
        lacking = [task for task in entry.tasks if facts.tasks and task not in facts.tasks]
        if lacking:
            return f"runtime `{entry.runtime}` does not serve {', '.join(lacking)}"
        try:
            self.most_adapters(entry)
        except ModelUnavailable as error:
            return error.message
        return None

    def unbuilt(self, runtime: str) -> str | None:
        """That a runtime's bundle is still to be built, and how; None where nothing is."""
        bundle = self._shelf.of(runtime) if self._shelf is not None else None
        if self._shelf is None or bundle is None or self._shelf.is_built(bundle):
            return None
        return f"the bundle `{bundle.name}` is not built: {self._shelf.cure(bundle)}"

    def most_adapters(self, entry: Entry) -> int:
        """How many adapters a copy of an entry has at once, as its runtime says; 0: it takes none.

        Raises `ModelUnavailable` where the entry's option is no number.
        """
        adapts = self._facts.get(entry.runtime, Facts()).adapts
        if adapts is None:
            return 0
        weights = entry.weights or entry.source
        return adapts.most(entry.tasks, weights, entry.options, entry.family)
