"""The runtimes, and what each does not support, by the name of the claim, and why.

A claim that is not declared here is checked. Imports nothing that pytest would want to see first.
"""

from __future__ import annotations

from typing import Any

RUNTIMES = ("onnx", "torch", "candle", "files", "whisper", "spacy", "null")

# Claims that no runtime makes yet; there is no test of them.
PLANNED = {
    "cancellation": "An item that was given to the runtime can be taken back while it runs.",
    "streaming": "A long answer arrives in parts, in order.",
    "adapters": "LoRA adapters of one model share a batch, and none reaches another item.",
}

_YET = dict.fromkeys(PLANNED, "not yet")
_NO_TIER = {"warm_reload": "keeps nothing of an unloaded model"}
_NO_CUT = {"truncate": "an input is taken whole or refused"}

UNSUPPORTED: dict[str, dict[str, str]] = {
    "onnx": _YET,
    "torch": _YET | _NO_TIER,
    "candle": _YET | _NO_TIER,
    "files": _YET | _NO_TIER | _NO_CUT,
    "whisper": _YET
    | _NO_TIER
    | _NO_CUT
    | {"non_finite": "answers with words, and the library chooses those"},
    "spacy": _YET
    | _NO_TIER
    | _NO_CUT
    | {"non_finite": "answers with decisions; its scores are all 1"},
    "null": _YET
    | _NO_CUT
    | {
        "parity": "its numbers mean nothing",
        "over_long": "reads no tokens, so no input is too long",
        "threads": "computes nothing",
    },
}


def runtime_of(item: Any) -> str | None:
    """The runtime that a test is of; None for a test of something else."""
    call = getattr(item, "callspec", None)
    return call.params.get("hosted") if call is not None else None
