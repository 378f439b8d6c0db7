"""Lanes: classes of service, each with a share, a quantum and an age.

Owns their rules and how the `lanes` setting is read. Does not own what is done with them
(`schedule`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoal.errors import SettingsError

DEFAULT_LANES = "interactive:8:100ms:1s,bulk:2:400ms:5s"
MAX_LANES = 8
_RULE = re.compile(
    r"^(?P<name>[a-z][a-z0-9_]{0,31}):(?P<weight>\d+(\.\d+)?)"
    r":(?P<quantum>\d+)ms:(?P<age>\d+(\.\d+)?)s$"
)


@dataclass(frozen=True, slots=True)
class LaneRule:
    """One lane.

    weight: its share of device time while other lanes want some too.
    quantum_s: the longest that one of its batches may run; what bounds the wait of the others.
    age_s: once a text has waited so long for key-value memory, a copy is kept free for it.
    """

    name: str
    weight: float
    quantum_s: float
    age_s: float


def parse_lanes(text: str) -> tuple[LaneRule, ...]:
    """Reads `name:weight:quantum:age,...`, the default lane first. Raises `SettingsError`.

    >>> parse_lanes("interactive:8:100ms:1s")[0].quantum_s
    0.1
    """
    rules: list[LaneRule] = []
    for part in (p.strip() for p in text.split(",")):
        found = _RULE.match(part)
        if not found:
            raise SettingsError(
                f"lanes: `{part}` is not name:weight:quantum:age, like interactive:8:100ms:1s"
            )
        rule = LaneRule(
            found["name"], float(found["weight"]), int(found["quantum"]) / 1e3, float(found["age"])
        )
        if min(rule.weight, rule.quantum_s, rule.age_s) <= 0:
            raise SettingsError(f"lanes: weight, quantum and age of `{part}` must be above 0")
        rules.append(rule)
    if len({r.name for r in rules}) != len(rules) or len(rules) > MAX_LANES:
        raise SettingsError(f"lanes: names must differ, and there may be {MAX_LANES} at most")
    return tuple(rules)
