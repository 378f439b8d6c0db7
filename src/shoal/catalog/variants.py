"""An entry as one of its runtimes runs it.

Owns what an alternative takes over from its entry. Does not own the choice (`shoal.core.choice`).
"""

from __future__ import annotations

from msgspec import structs

from shoal.catalog.schema import Alternative, Entry


def runtimes_of(entry: Entry) -> list[str]:
    """The runtimes that an entry names, its own first."""
    return [entry.runtime, *(other.runtime for other in entry.alternatives)]


def on_runtime(entry: Entry, runtime: str) -> Entry:
    """The entry for one runtime alone, with the same key and without alternatives.

    A runtime that the entry does not name gets what its own has.
    """
    alone = structs.replace(entry, runtime=runtime, alternatives=[])
    for other in entry.alternatives:
        if other.runtime == runtime:
            return _with(alone, other)
    return alone


def declared_token_s(entry: Entry, runtime: str) -> float:
    """Device seconds of a token by a profile that was written for this runtime; 0 without one."""
    profiles = {other.runtime: other.profile for other in entry.alternatives}
    profile = profiles.get(runtime) if runtime in profiles else entry.profile
    if profile is None or profile.tokens_per_s == type(profile)().tokens_per_s:
        return 0.0
    return 1.0 / profile.tokens_per_s


def _with(entry: Entry, other: Alternative) -> Entry:
    """What the alternative says; digests and the name of a file belong to their source."""
    elsewhere = other.source is not None
    return structs.replace(
        entry,
        source=other.source or entry.source,
        digests=other.digests or ({} if elsewhere else entry.digests),
        weights=other.weights or (None if elsewhere else entry.weights),
        family=other.family or entry.family,
        options=other.options or entry.options,
        memory_mib=other.memory_mib or entry.memory_mib,
        profile=other.profile or entry.profile,
    )
