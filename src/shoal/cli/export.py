"""`shoal models export`: a model of the catalog as an ONNX file, with what it costs in quality.

Owns the folder that is written (graph, tokenizer, catalog entry) and the table. Does not own the
texts that both models are compared on (`samples`), the graph or the comparison
(`shoal.runtimes.onnx.export`).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec
import yaml
from msgspec import structs
from rich.console import Console
from rich.table import Table

from shoal.catalog.change import Record, encode_record
from shoal.catalog.load import load
from shoal.catalog.resolve import model_spec, tokenizer_path
from shoal.catalog.schema import Entry
from shoal.cli.samples import encode_item, sentences
from shoal.errors import ModelUnavailable
from shoal.ipc.messages import ModelSpec, RunItem, Traits
from shoal.runtimes.checkpoint import locate
from shoal.runtimes.interface import Runtime
from shoal.runtimes.registry import create
from shoal.worker.tokenise import Tokeniser

if TYPE_CHECKING:
    from shoal.runtimes.onnx.export import Comparison

_TEXTS_PER_ITEM = 16
# What says how a model is read, whatever computes it; other options are the source's runtime's.
_KEPT_OPTIONS = ("positive", "multi_label", "special_tokens")


def export(model: str, catalog: Path | None, out: Path, *, int8: bool) -> None:
    """Writes `<out>/<new id>/` and the entry beside it, and prints how it compares with its source.

    Raises `UnknownModel` and `ModelUnavailable`.
    """
    from shoal.runtimes.onnx.export import compare
    from shoal.runtimes.onnx.export import export as write_graph

    entry = load(catalog).resolve(model)
    with TemporaryDirectory() as cache:
        source = model_spec(entry, Path(cache))
        weights = locate(source, ("model.safetensors",))
        exported = _exported(entry, int8=int8)
        made = Path(cache) / "model.onnx"
        write_graph(weights, source, made, int8=int8)
        folder = out.resolve() / exported.id
        folder.mkdir(parents=True, exist_ok=True)
        path = Path(shutil.move(made, folder / "model.onnx"))
        for beside in (tokenizer_path(entry), weights.parent / "config.json"):
            shutil.copyfile(beside, folder / beside.name)
        for head in entry.heads.values():
            shutil.copyfile(weights.parent / head.file, folder / head.file)
        exported = structs.replace(exported, source=folder.as_uri())
        written = folder.parent / f"{exported.id}.yaml"
        written.write_text(_yaml(exported), "utf-8")
        sizes = [weights.stat().st_size, path.stat().st_size]
        comparison = None
        if "dense" in exported.outputs:
            runtimes = [
                _loaded(model_spec(one, Path(cache)), one.runtime) for one in (entry, exported)
            ]
            items = _items(entry, Tokeniser(tokenizer_path(entry), entry.max_tokens))
            comparison = compare(runtimes[0], runtimes[1], items)
    _print(entry, exported, sizes, comparison)
    Console(highlight=False).print(f"Catalog entry: {written}", soft_wrap=True)


def _print(entry: Entry, exported: Entry, sizes: list[int], comparison: Comparison | None) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column(entry.id, justify="right")
    table.add_column(exported.id, justify="right")
    table.add_row("weights", *(f"{size / 1e6:.1f} MB" for size in sizes))
    if comparison:
        speeds = (comparison.source_tokens_per_s, comparison.tokens_per_s)
        table.add_row("speed, one thread", *(f"{speed:,.0f} tokens/s" for speed in speeds))
        table.add_row("mean cosine", "1", f"{comparison.mean_cosine:.4f}")
        table.add_row("worst cosine", "1", f"{comparison.worst_cosine:.4f}")
        table.add_row("same nearest text", "100 %", f"{comparison.same_neighbour:.1%}")
    console = Console(highlight=False)
    console.print(table)
    if comparison:
        console.print(f"\nCompared on {comparison.texts} sentences of Shoal's own documentation.")


def _exported(entry: Entry, *, int8: bool) -> Entry:
    """The entry of the exported model; its source is filled in later."""
    if entry.runtime not in ("onnx", "torch"):
        raise ModelUnavailable(f"`{entry.id}` runs on {entry.runtime}; there is no graph of it")
    tier = "int8" if int8 else "onnx"
    if "encode" in entry.tasks and not set(entry.outputs) - {"sparse"}:
        raise ModelUnavailable(f"`{entry.id}` gives sparse vectors alone; those are not exported")
    # Its own classifier is in the graph, whose logits are then all that is read of it.
    own = entry.scorer == "joint" or ("classify" in entry.tasks and "classify" not in entry.heads)
    if own and "encode" in entry.tasks:
        raise ModelUnavailable(
            f"`{entry.id}` encodes and has a classifier of its own; a graph does one of the two"
        )
    options = {name: entry.options[name] for name in _KEPT_OPTIONS if name in entry.options}
    return structs.replace(
        entry,
        id=f"{entry.id}-{tier}",
        aliases=[],
        description=f"{entry.id} exported to ONNX" + (", with 8-bit weights." if int8 else "."),
        runtime="onnx",
        family="graph",
        verified="family",
        weights="model.onnx",
        tokenizer=None,
        pooling="none" if own else entry.pooling,
        options=options | {"output": "logits"} if own else options,
        outputs={name: shape for name, shape in entry.outputs.items() if name != "sparse"},
        digests={},
        pinned=False,
        requires=[],
    )


def _yaml(entry: Entry) -> str:
    plain = msgspec.json.decode(encode_record(Record(entry, "folder")))["entry"]
    text: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=100)
    return text


def _loaded(spec: ModelSpec, runtime: str) -> tuple[Runtime, str]:
    made = create(runtime, "cpu", 1)
    made.load(spec)
    return made, spec.key


def _items(entry: Entry, tokeniser: Tokeniser) -> list[RunItem]:
    texts = sentences()
    traits = Traits(accepts_ids=True, tasks=["encode"])
    return [
        encode_item(entry, traits, tokeniser, texts[at : at + _TEXTS_PER_ITEM])
        for at in range(0, len(texts), _TEXTS_PER_ITEM)
    ]
