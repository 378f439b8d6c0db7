"""Damage: what a careless peer, a broken disk or an attacker makes of a good message."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

# Reproducible, and bounded in time: the seed is the test's own source.
FUZZ = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def _deep(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


NASTY: list[Any] = [
    *(None, True, False, 0, -1, 1, 255, 2**31, 2**32, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1),
    *(0.0, -0.0, 1.5, 1e308, -1e308, 5e-324),
    *(
        "",
        "\0",
        "a" * 3000,
        "\U0001f41f",
        "\u202e",
        "dense",
        "0",
        "null",
        "../../etc",
        "a@b",
        "a/b",
    ),
    *([], {}, [None], [[]], [{}], {"": None}, [""] * 3, [[1], ["a"]], _deep(60), _deep(900)),
]
BINARY: list[Any] = [b"", b"\0", b"\xff" * 9, float("nan"), float("inf"), float("-inf")]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every node of plain data."""
    found = [path]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found += places(inner, (*path, index))
    return found


def _put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    inner = value
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = new
    return value


@st.composite
def values(draw: st.DrawFn, good: Sequence[Any], nasty: Sequence[Any] = NASTY) -> Any:
    """Plain data with one to three nodes replaced, dropped or renamed."""
    value = copy.deepcopy(draw(st.sampled_from(good)))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(value)))
        how = draw(st.sampled_from(["put", "put", "put", "rename"]))
        if how == "rename" and path and isinstance(path[-1], str):
            holder = value
            for step in path[:-1]:
                holder = holder[step]
            holder[draw(st.text(max_size=8))] = holder.pop(path[-1])
        else:
            value = _put(value, path, copy.deepcopy(draw(st.sampled_from(nasty))))
    return value


@st.composite
def damaged(draw: st.DrawFn, good: Sequence[bytes]) -> bytes:
    """Bytes with bits flipped, pieces cut out, doubled, swapped or put in."""
    data = bytearray(draw(st.sampled_from(good)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        size = draw(st.integers(0, 16))
        how = draw(st.sampled_from(["flip", "cut", "double", "insert", "end", "runaway"]))
        if how == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "cut":
            del data[at : at + size]
        elif how == "double":
            data[at:at] = data[at : at + size]
        elif how == "insert":
            data[at:at] = draw(st.binary(max_size=16))
        elif how == "end":
            del data[at:]
        else:
            data[at:at] = draw(st.sampled_from([b"\x91", b"\x81\xa1a", b"[", b'{"a":'])) * 2000
    return bytes(data)
