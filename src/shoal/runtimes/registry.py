"""Which runtimes are installed, and making one by its name.

Runtimes register through the entry-point group `shoal.runtimes`; each class may declare `needs`,
the import names of the libraries it cannot do without, each with the command that installs it,
`devices`, the kinds of device that it computes on if not on all, `tasks`, those that it serves,
and `adapts`, which models it takes adapters for if not for all.
Owns finding and checking. Imports no runtime library: a runtime imports its own when it is made.
Does not own processes (`shoal.runtimes.host`).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

from shoal.core.spelling import near
from shoal.core.types import TASKS
from shoal.errors import RuntimeUnavailable
from shoal.ipc.facts import Adapts, Facts
from shoal.runtimes.interface import Runtime, RuntimeFactory

GROUP = "shoal.runtimes"


def names() -> list[str]:
    """The names of all registered runtimes, sorted; whether they can run is `available`'s word."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def available(name: str) -> str | None:
    """None when the runtime can be made here, or the reason why not, with the cure.

    Raises `RuntimeUnavailable` for a name that no installed package registers.
    """
    return _missing(name, _factory(name))


def facts(name: str) -> Facts:
    """What is known of a runtime before it has ever run.

    Raises `RuntimeUnavailable` as `available` does.
    """
    factory = _factory(name)
    adapts = getattr(factory, "adapts", Adapts()) if hasattr(factory, "load_adapter") else None
    served = [task for task in TASKS if task != "generate" or hasattr(factory, "start")]
    return Facts(
        _missing(name, factory),
        list(getattr(factory, "devices", ())),
        list(getattr(factory, "tasks", served)),
        adapts,
    )


def create(name: str, device: str, threads: int) -> Runtime:
    """A runtime with nothing loaded, for `device` (`cpu` or `cuda:<n>`) and so many threads.

    Raises `RuntimeUnavailable` for an unknown name and where a library or the device is missing.
    """
    factory = _factory(name)
    reason = _missing(name, factory)
    if reason is not None:
        raise RuntimeUnavailable(reason)
    return factory(device=device, threads=threads)


def _factory(name: str) -> RuntimeFactory:
    try:
        factory: RuntimeFactory = _point(name).load()
    except (ImportError, AttributeError) as error:
        raise RuntimeUnavailable(f"runtime {name!r} cannot be imported: {error}") from error
    return factory


def _point(name: str) -> EntryPoint:
    for point in entry_points(group=GROUP, name=name):
        return point
    known = names()
    close = near(name, known)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
    raise RuntimeUnavailable(f"no runtime is called {name!r}; {hint}")


def _missing(name: str, factory: RuntimeFactory) -> str | None:
    needs: Mapping[str, str] = getattr(factory, "needs", {})
    for library, cure in needs.items():
        if find_spec(library) is None:
            return f"runtime {name!r}: {library} is not installed: {cure}"
    return None
