"""Texts for commands that try models without a cluster, and the items that a worker makes of them.

Owns which texts those are: they travel with the code, so that everybody compares on the same. Does
not own tokenising (`shoal.worker.tokenise`) or what is run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import shoal
from shoal.catalog.schema import Entry
from shoal.errors import Bug
from shoal.ipc.messages import RunItem, Traits
from shoal.wire.envelope import Envelope, Inputs, Params
from shoal.worker.tokenise import Tokeniser, prepare

TEXTS = 200
_WORDS = range(4, 41)


def encode_item(
    entry: Entry, traits: Traits, tokeniser: Tokeniser | None, texts: Sequence[str], name: str = ""
) -> RunItem:
    """An item of `encode` as a worker makes it for a runtime. Raises `CallerError`."""
    inputs = Inputs(texts=list(texts))
    return make_item(entry, traits, tokeniser, inputs, Params(truncate=True), name=name)


def make_item(
    entry: Entry,
    traits: Traits,
    tokeniser: Tokeniser | None,
    inputs: Inputs,
    params: Params,
    *,
    name: str = "",
) -> RunItem:
    """An item of `encode` or `generate` as a worker makes it. Raises `CallerError`."""
    envelope = Envelope(
        item=name,
        request="",
        index=0,
        of=1,
        task="generate" if entry.generates else "encode",
        model=entry.id,
        revision=entry.revision,
        lane="",
        cost_tokens=0,
        n_inputs=len(inputs.texts) or len(inputs.chats),
        deadline_s=0.0,
        submitted_s=0.0,
        reply="",
        params=params,
    )
    item = prepare(entry, traits, tokeniser, envelope, inputs).run_item
    if item is None:
        raise Bug(f"no item was made of {envelope.n_inputs} texts")
    return item


def sentences() -> list[str]:
    """The first `TEXTS` different sentences of this package's docstrings, by file name.

    Text that travels with the code, so that everybody compares on the same.
    """
    root = Path(shoal.__file__).parent
    found: dict[str, None] = {}
    for path in sorted(root.rglob("*.py")):
        for text in _docstrings(ast.parse(path.read_text("utf-8"))):
            for sentence in re.split(r"(?<=[.:;])\s", " ".join(text.split())):
                if len(sentence.split()) in _WORDS:
                    found[sentence] = None
        if len(found) >= TEXTS:
            break
    return list(found)[:TEXTS]


def _docstrings(tree: ast.Module) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text
