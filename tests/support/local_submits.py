"""Jobs answered in process: an implementation of `Submits` without a queue or a model.

Numbers and records follow from each input alone (crc32), so a crossed or reordered answer shows.
Texts that begin with `fail:<code>` raise that error, `hold` waits until it is cancelled. Files that
end in `broken` are at fault themselves, and the text `crash` alone takes its runtime down. The
classifier of files gives no logits.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator

import numpy as np

from shoal.catalog.schema import Entry, Output
from shoal.catalog.snapshot import Snapshot
from shoal.errors import InputTooLong, InvalidRequest, RuntimeCrashed, ShoalError, from_code
from shoal.gateway.jobs import Answer, Grown, Job
from shoal.ipc.messages import HeadSpec
from shoal.runtimes.null_records import LABELS as FOUND
from shoal.runtimes.null_records import record
from shoal.wire.arrays import Array
from shoal.wire.envelope import Failure, ModelState, Result, Timing
from shoal.wire.generation import pack as pack_text
from shoal.wire.records import pack
from tests.support.local_texts import generated, grow, prompts

DIM = 8
LABELS = ["red", "green", "blue"]


def head(kind: str) -> HeadSpec:
    return HeadSpec(kind=kind, file="heads.safetensors", prefix="h.", labels=LABELS)


CATALOG = Snapshot(
    [
        Entry(
            id="dense",
            tasks=["encode", "score"],
            source="file:///nowhere",
            aliases=["org/Dense-Model"],
            outputs={"dense": Output(DIM)},
            prompts={"query": "query: "},
            max_tokens=64,
            description="Dense vectors.",
        ),
        Entry(
            id="org/both",
            tasks=["encode"],
            source="file:///nowhere",
            revision="2",
            outputs={"dense": Output(DIM), "sparse": Output(1000)},
        ),
        Entry(id="sparse", tasks=["encode"], source="file:///x", outputs={"sparse": Output(1000)}),
        Entry(
            id="colours", tasks=["classify"], source="file:///x", heads={"classify": head("linear")}
        ),
        Entry(id="pairs", tasks=["classify"], source="file:///x", heads={"classify": head("pair")}),
        Entry(
            id="guard", tasks=["classify"], source="file:///x", aliases=["omni-moderation-latest"]
        ),
        Entry(
            id="tokens", tasks=["encode"], source="file:///x", outputs={"multivector": Output(DIM)}
        ),
        Entry(
            id="pictures",
            tasks=["encode", "classify"],
            source="file:///x",
            inputs=["image"],
            outputs={"dense": Output(DIM)},
            labels=LABELS,
        ),
        Entry(
            id="names",
            tasks=["extract"],
            source="file:///x",
            extracts=["entities"],
            labels=list(FOUND),
        ),
        Entry(
            id="pages",
            tasks=["extract"],
            source="file:///x",
            inputs=["document"],
            extracts=["text", "layout"],
        ),
        Entry(id="files", tasks=["classify"], source="file:///x", inputs=["file"]),
        Entry(
            id="sounds",
            tasks=["transcribe", "extract"],
            source="file:///x",
            inputs=["audio"],
            extracts=["speech"],
        ),
        Entry(
            id="writer",
            tasks=["generate"],
            source="file:///x",
            aliases=["org/Writer"],
            max_tokens=30_000,
        ),
    ]
)


def vector(given: str | bytes, dim: int = DIM) -> np.ndarray:
    """float32 [dim], of length 1, that belongs to the text or file."""
    data = given.encode() if isinstance(given, str) else given
    rng = np.random.default_rng(zlib.crc32(data))
    values = rng.standard_normal(DIM).astype(np.float32)[:dim]
    return values / np.linalg.norm(values)


def token_vectors(text: str) -> np.ndarray:
    """float32 [words, dim]: a vector for each word of the text."""
    return np.stack([vector(word) for word in text.split()])


def sparse(text: str) -> tuple[np.ndarray, np.ndarray]:
    """Indices and values: one for each of the text's words."""
    words = sorted({zlib.crc32(word.encode()) % 1000 for word in text.split()})
    return np.array(words, np.uint32), np.arange(1, len(words) + 1, dtype=np.float32) / 7


def logit(query: str, text: str) -> float:
    """A score far outside the range in which a sigmoid tells scores apart."""
    return 100.0 + zlib.crc32(f"{query}|{text}".encode()) % 1000


class LocalSubmits:
    """`Submits` for tests. `jobs` has the last jobs; `cancelled` the ids of withdrawn ones."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.cancelled: list[str] = []
        self.not_ready: str | None = None

    def ready(self) -> str | None:
        return self.not_ready

    def model_states(self) -> dict[str, ModelState]:
        return {"dense@1": ModelState("dense@1", "resident", memory_bytes=1000)}

    async def stream(self, job: Job) -> AsyncGenerator[Grown, None]:
        self.jobs = [*self.jobs[-9:], job]
        if job.inputs.texts and job.inputs.texts[0].startswith(("fail", "hold", "boom")):
            await self._special(job, job.inputs.texts[0])
        async for grown in grow(job, self.cancelled):
            yield grown

    async def run(self, job: Job) -> Answer:
        self.jobs = [*self.jobs[-9:], job]
        inputs = job.inputs
        if inputs.texts and inputs.texts[0].startswith(("fail", "hold", "boom")):
            await self._special(job, inputs.texts[0])
        if job.task == "generate":
            return self._texts(job)
        given = inputs.texts or inputs.blobs or [" ".join(map(str, ids)) for ids in inputs.ids]
        lengths = [len(one.split()) + 2 for one in given]
        failures = {}
        for i, one in enumerate(given):
            fault = self._fault(job, one, lengths[i], i)
            if fault is not None and not job.params.partial:
                raise fault
            if fault is not None:
                failures[i] = Failure.of(fault)
        well = [one for i, one in enumerate(given) if i not in failures]
        if not well:
            raise failures[0].error()
        timing = Timing(queue_s=0.001, load_s=0.0, run_s=0.002)
        return Answer(self._result(job, well), sum(lengths), timing, failures)

    def _texts(self, job: Job) -> Answer:
        asked = job.params.generation
        texts = [generated(prompt, asked, i) for i, prompt in enumerate(prompts(job))]
        return Answer(Result(records=list(map(pack_text, texts))), 7, Timing(run_s=0.002))

    def _fault(self, job: Job, one: str | bytes, length: int, i: int) -> ShoalError | None:
        if isinstance(one, bytes):
            broken = one.endswith(b"broken")
            param = f"inputs[{i}]"
            return InvalidRequest("it is broken", param=param, input_index=i) if broken else None
        if one == "crash":
            return RuntimeCrashed("the runtime went away", input_index=i)
        if job.params.truncate or length <= job.entry.max_tokens:
            return None
        return InputTooLong(
            f"`inputs[{i}]` has {length} tokens; `{job.entry.id}` reads {job.entry.max_tokens}",
            param=f"inputs[{i}]",
            input_index=i,
        )

    def _result(self, job: Job, well: list) -> Result:
        if job.task in ("extract", "transcribe"):
            wanted = job.params.outputs or ["transcript"]
            return Result(records=[pack(record(one, wanted, job.params)) for one in well])
        labels = []
        if job.task == "classify":
            labels = ["safe", "attack", "odd"] if job.entry.id == "guard" else LABELS
        return Result(getattr(self, f"_{job.task}")(job, well), labels)

    async def _special(self, job: Job, text: str) -> None:
        if text.startswith("fail:"):
            _, code, *after = text.split(":")
            raise from_code(code, "told to fail", retry_after_s=float(after[0]) if after else None)
        if text == "boom":
            raise RuntimeError("a bug in the submit path")
        if text == "hold":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.append(job.request_id)
                raise

    def _encode(self, job: Job, texts: list[str]) -> dict[str, Array]:
        arrays = {}
        prompt = job.entry.prompts[job.params.prompt] if job.params.prompt else ""
        if "dense" in job.params.outputs:
            dim = job.params.dimensions or DIM
            given = [one if isinstance(one, bytes) else prompt + one for one in texts]
            block = np.stack([vector(one, dim) for one in given])
            if job.params.dtype != "float32":
                block = (block * 100).astype(job.params.dtype)
            arrays["dense"] = Array.of(block)
        if "multivector" in job.params.outputs:
            rows = [token_vectors(text) for text in texts]
            counts = np.array([len(row) for row in rows], np.uint32)
            arrays["multivector_counts"] = Array.of(counts)
            arrays["multivector"] = Array.of(np.concatenate(rows))
        if "sparse" in job.params.outputs:
            pairs = [sparse(prompt + text) for text in texts]
            counts = np.array([len(indices) for indices, _ in pairs], np.uint32)
            arrays["sparse_counts"] = Array.of(counts)
            arrays["sparse_indices"] = Array.of(np.concatenate([i for i, _ in pairs]))
            arrays["sparse_values"] = Array.of(np.concatenate([v for _, v in pairs]))
        return arrays

    def _score(self, job: Job, texts: list[str]) -> dict[str, Array]:
        assert job.inputs.query is not None
        logits = np.array([logit(job.inputs.query, text) for text in texts], np.float32)
        with np.errstate(over="ignore"):
            scores = (1 / (1 + np.exp(-logits))).astype(np.float32)
        return {"scores": Array.of(scores), "logits": Array.of(logits)}

    def _classify(self, job: Job, texts: list[str]) -> dict[str, Array]:
        firsts = job.inputs.firsts
        whole = [a + b for a, b in zip(firsts, texts, strict=True)] if firsts else texts
        logits = np.stack([vector(one, 3) for one in whole]) * 4
        powers = np.exp(logits)
        scores = (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)
        arrays = {"scores": Array.of(scores), "logits": Array.of(logits.astype(np.float32))}
        if job.entry.id == "files":
            del arrays["logits"]
        return arrays
