"""A runtime without a model, for tests and for measuring everything around a runtime.

It takes texts or files and answers at once with small float32 numbers, or records (`null_records`),
that depend on nothing but each input (or pair of texts), so that answers which reached the wrong
caller are seen. A file that ends in `broken` is at fault itself. Options of a model:

    dim      length of the dense vectors, 8 when left out
    labels   class names, joined by commas; "no,yes" when left out
    sleep_s  time each batch takes
    poison   a text, or a file's end, that makes the whole batch raise, as a broken kernel would
    crash    a text that takes the process down, as a segmentation fault would
    oom      a text that needs more memory than there is
    sick_after  how many batches of it a process serves; later ones raise until it is started anew
    nan      a text whose numbers are not finite: its item fails, its neighbours do not
    mib      memory that a loaded model holds, really allocated and touched
    load_s   time each load takes; a tenth of it when the model was kept
    load_fails  what becomes of a load: `oom`, `missing` or `config`; with a number, as in `oom:2`,
             of so many loads in this process before they succeed
    adapters_fit  how many adapters find memory beside it
    slots, kv_tokens, tokens, token_s  how it generates (`null_texts`): texts at once, their room,
             words of each, and the time of a word. There `crash` comes in the middle of a text.

Owns those answers. Does not own any policy, and computes nothing that means anything.
"""

from __future__ import annotations

import mmap
import os
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.core.types import TASKS
from shoal.errors import (
    InvalidRequest,
    ModelUnavailable,
    OutOfMemory,
    RunFailed,
    ShoalError,
    WeightsMissing,
)
from shoal.ipc.messages import AdapterSpec, ModelSpec, RunItem, Traits
from shoal.runtimes.inputs import fault
from shoal.runtimes.interface import Capacity, Emit, RanItems
from shoal.runtimes.null_records import record
from shoal.runtimes.null_texts import NullTexts
from shoal.wire.arrays import Array
from shoal.wire.envelope import Result
from shoal.wire.records import pack

Floats = npt.NDArray[np.float32]

# An odd multiplier spreads a checksum over the columns (Knuth's multiplicative hashing).
_KNUTH = 2_654_435_761
_OUTPUTS = ("dense", "sparse", "multivector")
_BROKEN = b"broken"
_MIB = 2**20
_NEVER = 2**60
_WARM_SHARE = 0.1
_LOAD_FAULTS: dict[str, Exception] = {
    "oom": MemoryError("the load was told to find no memory"),
    "missing": WeightsMissing("the load was told to find no weights"),
    "config": ModelUnavailable("the load was told to find weights that do not fit"),
}


@dataclass(frozen=True, slots=True)
class _Model:
    spec: ModelSpec
    dim: int
    labels: list[str]
    sleep_s: float
    poison: str | None
    crash: str | None
    oom: str | None
    nan: str | None
    well: int
    pages: mmap.mmap | None


class NullRuntime:
    """Answers with numbers made from checksums of the texts."""

    name = "null"
    version = "1"

    def __init__(self, *, device: str, threads: int) -> None:
        self.traits = Traits(
            accepts_ids=False, tasks=list(TASKS), host_tier=True, lora=True, streams=True
        )
        self.device = device
        self.threads = threads
        self._runs: dict[str, int] = {}
        self._models: dict[str, _Model] = {}
        self._failed_loads: dict[str, int] = {}
        self._kept: set[str] = set()
        self._texts = NullTexts()
        self._adapters: dict[str, set[str]] = {}

    def load(self, spec: ModelSpec) -> bool:
        """Reads the options; no file is opened."""
        options = spec.options
        dim = int(options.get("dim", 8))
        if dim < 1:
            raise ModelUnavailable(f"{spec.key}: option dim is {dim}, at least 1 is needed")
        warm = spec.key in self._kept
        time.sleep(float(options.get("load_s", 0.0)) * (_WARM_SHARE if warm else 1.0))
        self._fail_as_told(spec)
        self.unload(spec.key)
        self._models[spec.key] = _Model(
            spec=spec,
            dim=dim,
            labels=[label.strip() for label in str(options.get("labels", "no,yes")).split(",")],
            sleep_s=float(options.get("sleep_s", 0.0)),
            **{
                fault: str(options[fault]) if fault in options else None
                for fault in ("poison", "crash", "oom", "nan")
            },
            well=int(options.get("sick_after", _NEVER)),
            pages=_touched(int(options.get("mib", 0)) * _MIB),
        )
        return warm

    def _fail_as_told(self, spec: ModelSpec) -> None:
        kind, _, times = str(spec.options.get("load_fails", "")).partition(":")
        failed = self._failed_loads.get(spec.key, 0)
        if not kind or (times and failed >= int(times)):
            return
        self._failed_loads[spec.key] = failed + 1
        if kind not in _LOAD_FAULTS:
            raise ModelUnavailable(f"{spec.key}: load_fails is one of {', '.join(_LOAD_FAULTS)}")
        raise _LOAD_FAULTS[kind]

    def unload(self, key: str, *, keep: bool = False) -> None:
        """Forgets the model; its memory goes back to the system at once."""
        model = self._models.pop(key, None)
        self._adapters.pop(key, None)
        self._kept.discard(key)
        if keep and model is not None:
            self._kept.add(key)
        if model is not None and model.pages is not None:
            model.pages.close()

    def run(
        self,
        key: str,
        items: Sequence[RunItem],
        block_tokens: int | None = None,  # noqa: ARG002 - nothing is computed in passes
    ) -> RanItems:
        """Answers each item from its texts alone. Raises `RunFailed` on the text `poison`."""
        model = self._models.get(key)
        if model is None:
            raise ModelUnavailable(f"{key} is not loaded")
        self._runs[key] = self._runs.get(key, 0) + 1
        if self._runs[key] > model.well:
            raise RunFailed(f"{key}: this process is sick")
        if model.sleep_s:
            time.sleep(model.sleep_s)
        if model.crash is not None and any(model.crash in item.texts for item in items):
            os._exit(66)
        if model.oom is not None and any(model.oom in item.texts for item in items):
            raise MemoryError("the oom text is in the batch")
        if model.poison is not None and any(_has(item, model.poison) for item in items):
            raise RunFailed(f"{key}: the poison text is in the batch")
        tokens = sum(sum(item.lengths) for item in items)
        for item in items:
            self._checked(key, item)
        # One pass over the inputs of the whole batch: per item numpy would cost more than the rest.
        vectors = numbers([one for item in items for one in _inputs(item)], model.dim)
        outcomes: list[Result | ShoalError] = []
        at = 0
        for item in items:
            end = at + len(item.blobs or item.texts)
            outcomes.append(_answer(model, item, vectors[at:end]))
            at = end
        return RanItems(outcomes, tokens)

    def load_adapter(self, key: str, adapter: AdapterSpec) -> int:
        """Takes an adapter; one whose folder ends in `broken` is none. No file is opened."""
        if key not in self._models:
            raise ModelUnavailable(f"{key} is not loaded")
        if adapter.path.endswith("broken"):
            raise ModelUnavailable(f"{adapter.key} is no adapter")
        if adapter.path.endswith("deadly"):  # as what a kernel cannot bear
            os._exit(67)
        held = self._adapters.setdefault(key, set())
        fit = self._models[key].spec.options.get("adapters_fit")
        if fit is not None and len(held | {adapter.key}) > int(fit):
            raise OutOfMemory(f"{key} was told to find no memory for {adapter.key}")
        held.add(adapter.key)
        return _MIB

    def unload_adapter(self, key: str, adapter: str) -> None:
        """Forgets an adapter."""
        self._adapters.get(key, set()).discard(adapter)

    def capacity(self, key: str) -> Capacity:
        """As the model's options say."""
        return self._texts.capacity(self._models[key].spec)

    def start(self, key: str, item: RunItem, emit: Emit) -> None:
        """Begins to generate."""
        checked = self._checked(key, item)
        self._texts.start(self._models[key].spec, checked, emit)

    def stop(self, item: str) -> None:
        """Ends an item early."""
        self._texts.stop(item)

    def _checked(self, key: str, item: RunItem) -> RunItem:
        """The item, whose model and adapter are loaded. Raises `ModelUnavailable`."""
        if key not in self._models:
            raise ModelUnavailable(f"{key} is not loaded")
        if item.adapter and item.adapter not in self._adapters.get(key, ()):
            raise ModelUnavailable(f"{item.adapter} is not loaded")
        return item

    def memory(self) -> dict[str, int]:
        """The bytes of each model's option `mib`."""
        return {key: len(model.pages or b"") for key, model in self._models.items()}


def _touched(size_bytes: int) -> mmap.mmap | None:
    """So much memory of its own pages, each written to, so that it counts as resident."""
    if size_bytes == 0:
        return None
    pages = mmap.mmap(-1, size_bytes)
    for at in range(0, size_bytes, mmap.PAGESIZE):
        pages[at] = 1
    return pages


def _inputs(item: RunItem) -> Sequence[str | bytes]:
    """What the numbers are made of; an adapter changes each text."""
    if item.adapter:
        return [f"{item.adapter}|{text}" for text in item.texts]
    return item.blobs or item.texts


def _has(item: RunItem, mark: str) -> bool:
    return mark in item.texts or any(blob.endswith(mark.encode()) for blob in item.blobs)


def numbers(inputs: Sequence[str | bytes], dim: int) -> Floats:
    """What the runtime makes of inputs: float32 [n, dim] in [-1, 1], the same everywhere."""
    data = (one.encode() if isinstance(one, str) else one for one in inputs)
    sums = np.array([zlib.crc32(one) for one in data], np.uint64).reshape(-1, 1)
    spread = np.arange(1, 2 * dim, 2, dtype=np.uint64) * np.uint64(_KNUTH)
    mixed = (sums * spread + sums) & np.uint64(0xFFFFFFFF)
    return (mixed.astype(np.float32) / np.float32(2**31)) - np.float32(1)


def _answer(model: _Model, item: RunItem, vectors: Floats) -> Result | ShoalError:
    if model.nan is not None and model.nan in item.texts:
        at = item.texts.index(model.nan)
        what, about = fault(item, at)
        return RunFailed(f"{model.spec.key}: {what} gave numbers that are not finite", **about)
    for at, blob in enumerate(item.blobs):
        if blob.endswith(_BROKEN):
            return InvalidRequest("the file is broken", input_index=at)
    if item.task == "encode":
        return _encoded(model, item, vectors)
    if item.task in ("extract", "transcribe"):
        return _recorded(model, item)
    texts = _joined(item)
    if item.task == "score":
        logits = numbers(texts, 1)[:, 0]
        return Result({"scores": Array.of((logits + 1) / 2), "logits": Array.of(logits)})
    logits = numbers(texts, len(model.labels))
    powers = np.exp(logits)
    scores = powers / powers.sum(axis=1, keepdims=True)
    return Result({"scores": Array.of(scores), "logits": Array.of(logits)}, model.labels)


def _encoded(model: _Model, item: RunItem, vectors: Floats) -> Result | ShoalError:
    wanted = item.params.outputs or model.spec.outputs[:1]
    arrays: dict[str, Array] = {}
    for output in wanted:
        if output not in _OUTPUTS:
            return InvalidRequest(f"{model.spec.key} has no output {output!r}", param="outputs")
    n = len(vectors)
    if "sparse" in wanted:
        arrays["sparse_counts"] = Array.of(np.full(n, model.dim, np.uint32))
        arrays["sparse_indices"] = Array.of(np.tile(np.arange(model.dim, dtype=np.uint32), n))
        arrays["sparse_values"] = Array.of(np.abs(vectors).reshape(-1))
    if "dense" in wanted:
        dim = min(item.params.dimensions or model.dim, model.dim)
        arrays["dense"] = Array("float32", [n, dim], vectors[:, :dim].astype("<f4").tobytes())
    if "multivector" in wanted:  # one token vector for each input of an odd length, else two
        counts = np.array([2 - len(one) % 2 for one in item.blobs or item.texts], np.uint32)
        arrays["multivector_counts"] = Array.of(counts)
        arrays["multivector"] = Array.of(np.repeat(vectors, counts, axis=0))
    return Result(arrays)


def _recorded(model: _Model, item: RunItem) -> Result:
    finds = item.params.outputs or model.spec.extracts[:1]
    wanted = ["transcript"] if item.task == "transcribe" else finds
    given = item.blobs or item.texts
    return Result(records=[pack(record(one, wanted, item.params)) for one in given])


def _joined(item: RunItem) -> Sequence[str | bytes]:
    """One text for each answer: a pair becomes both its texts."""
    if item.blobs:
        return item.blobs
    texts = item.texts
    if item.layout == "shared":
        return [f"{texts[0]}\0{text}" for text in texts[1:]]
    if item.layout == "pairs":
        return [f"{a}\0{b}" for a, b in zip(texts[::2], texts[1::2], strict=True)]
    return texts
