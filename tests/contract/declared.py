"""The runtimes, and what each does not support, by the name of the claim, and why.

Claims are grouped by what a runtime does at all: a runtime stands in a group, and each claim of
that group is checked of it or declared here. What it does not do is declared as the group that it
is not in; `traits` checks that this is what the runtime says of itself. Imports nothing that pytest
would want to see first.
"""

from __future__ import annotations

from typing import Any

BATCHES, GENERATION, ADAPTERS = "batches", "generation", "adapters"

GROUPS = {
    BATCHES: ("onnx", "torch", "candle", "files", "whisper", "spacy", "null", "sglang"),
    GENERATION: ("candle", "sglang", "null"),
    ADAPTERS: ("torch", "candle", "sglang", "null"),
}
# The fixture that has the process of a group.
FIXTURES = {"hosted": BATCHES, "speaking": GENERATION, "adapted": ADAPTERS}
# What these need is too large to be installed everywhere: they are checked where it is built
# (`shoal bundles build NAME --cache-dir DIR`, then tests with `TEST_CACHE=DIR`).
OPTIONAL = ("sglang",)
RUNTIMES = tuple(dict.fromkeys(name for names in GROUPS.values() for name in names))

_NO_TIER = {"warm_reload": "keeps nothing of an unloaded model"}
_NO_CUT = {"truncate": "an input is taken whole or refused"}

UNSUPPORTED: dict[str, dict[str, dict[str, str]]] = {
    BATCHES: {
        "onnx": {},
        "torch": _NO_TIER,
        "candle": _NO_TIER,
        "files": _NO_TIER | _NO_CUT,
        "whisper": _NO_TIER
        | _NO_CUT
        | {"non_finite": "answers with words, and the library chooses those"},
        "spacy": _NO_TIER
        | _NO_CUT
        | {"non_finite": "answers with decisions; its scores are all 1"},
        "null": _NO_CUT
        | {
            "parity": "its numbers mean nothing",
            "over_long": "reads no tokens, so no input is too long",
            "threads": "computes nothing",
        },
        "sglang": _NO_TIER
        | {
            "cycles": "each load starts another server, and an unload ends it: nothing stays",
            "threads": "its server computes, in processes of its own",
        },
    },
    GENERATION: {
        "candle": {
            "seeds": "its random numbers cannot be seeded on CPUs; a seed with chance is refused",
        },
        "sglang": {
            "seeds": "keeps to no seed on a CPU; a seed with chance is refused",
        },
        "null": {
            "generated_parity": "its words mean nothing",
            "schema": "cannot keep to a schema",
            "generator_broken_load": "opens no file",
        },
    },
    ADAPTERS: {
        "torch": {},
        "candle": {},
        "sglang": {},
        "null": {"adapter_parity": "its answers mean nothing"},
    },
}


def claim_of(name: str) -> str:
    """The claim that a test function is of."""
    return name.removeprefix("test_contract_")


def about(item: Any) -> tuple[str, str] | None:
    """The group and the runtime that a test is of; None for a test of something else."""
    call = getattr(item, "callspec", None)
    params = call.params if call is not None else {}
    return next(
        ((FIXTURES[name], params[name]) for name in FIXTURES if params.get(name) in RUNTIMES), None
    )
