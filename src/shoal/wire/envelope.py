"""What travels through the queue: an Item as an Envelope, and its Outcome on the way back.

Owns the versioned structs, their MessagePack codecs and the rule of compatibility: fields that a
newer minor version added are ignored, an unknown major version is refused with its number.
Does not own how the bytes are carried (`shoal.queue`) or what a task's numbers mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import msgspec

from shoal.core.types import Lane, Task
from shoal.errors import Bug, ShoalError, from_code
from shoal.wire.arrays import Array, concat
from shoal.wire.generation import ChatMessage, Generation, Piece

VERSION = 1

# The one empty Raw: a field that holds this very object is left out of the message.
EMPTY = msgspec.Raw(b"")


class UnreadableMessage(ValueError):
    """Bytes that are no message of ours, or one of a major version we do not speak."""


class PayloadRef(msgspec.Struct, frozen=True, omit_defaults=True):
    """A body that was too large for the queue: its place in the payload store and its digest."""

    key: str
    size_bytes: int
    sha256: str


class Inputs(msgspec.Struct, frozen=True, omit_defaults=True):
    """The inputs of one item; exactly one of `texts`, `ids`, `blobs` and `chats` is filled.

    `ids` are token ids that the caller made, special tokens included. `blobs` are the bytes of
    images, PDF documents, sounds or other files, as the caller sent them.
    `query` is the first text of every pair (score); `firsts` has a first text for each entry of
    `texts` (classification of pairs). Neither is set for single texts. `chats` are conversations
    to be continued (`generate`); a prompt to be continued as it is stands in `texts`.
    """

    texts: list[str] = []
    ids: list[list[int]] = []
    query: str | None = None
    firsts: list[str] = []
    blobs: list[bytes] = []
    chats: list[list[ChatMessage]] = []


class Params(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the inputs are to be run. A field that a task does not know is left at its default.

    outputs: what to return of an input (`dense`, `sparse`, `multivector`; `entities`, `text`,
    `layout`, `speech`); empty means the model's own.
    prompt: the name of a prompt of the catalog entry that is put before each text.
    truncate: cut an over-long input (True) or refuse it (False).
    dimensions: keep the leading dimensions of a dense vector and normalise again.
    normalize: None means the catalog entry's word. dtype: of dense vectors and token vectors in
    the answer. labels: the only labels to return. threshold: the least score to return, 0 to 1.
    language: of speech, as ISO 639-1. partial: an input at fault fails alone and is reported in
    `Outcome.failures`; else it fails its whole request. generation: how `generate` goes on.
    """

    outputs: list[str] = []
    prompt: str | None = None
    truncate: bool = False
    dimensions: int | None = None
    normalize: bool | None = None
    dtype: Literal["float32", "float16", "int8", "binary"] = "float32"
    labels: list[str] = []
    threshold: float | None = None
    language: str | None = None
    partial: bool = False
    generation: Generation | None = None


class Envelope(msgspec.Struct, frozen=True, omit_defaults=True):
    """One item on its way to a worker.

    index/of: the item's place among the items of its request. cost_tokens: the gateway's estimate.
    deadline_s: wall-clock seconds since the epoch. reply: the subject that takes the outcome.
    body: MessagePack of `Inputs`, empty where `payload` says where it lies. letter: the number of
    the dead letter that this is a replay of; it is not buried a second time. adapter: the key of
    the adapter that the model is to be run with.
    """

    item: str
    request: str
    index: int
    of: int
    task: Task
    model: str
    revision: str
    lane: Lane
    cost_tokens: int
    n_inputs: int
    deadline_s: float
    submitted_s: float
    reply: str
    params: Params = Params()
    body: msgspec.Raw = EMPTY
    payload: PayloadRef | None = None
    adapter: str | None = None
    tenant: str | None = None
    traceparent: str | None = None
    letter: int | None = None
    v: int = VERSION


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why an item has no result. `code` is one of `shoal.errors`.

    input_index: which of the item's own inputs is at fault.
    """

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    input_index: int | None = None

    @classmethod
    def of(cls, error: ShoalError) -> Failure:
        """The wire form of an error."""
        return cls(error.code, error.message, error.param, error.retry_after_s, error.input_index)

    def error(self) -> ShoalError:
        """The error again, of the class that its code names."""
        return from_code(
            self.code,
            self.message,
            param=self.param,
            retry_after_s=self.retry_after_s,
            input_index=self.input_index,
        )


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """The numbers of one item; the first axis of every array follows the item's inputs.

    dense: float32 [n, d]. sparse: `sparse_counts` uint32 [n] says how many of `sparse_indices`
    (uint32, vocabulary positions) and `sparse_values` (float32) belong to each input, so that
    joining items is joining arrays. multivector: [tokens, d] of all inputs end to end, and
    `multivector_counts` uint32 [n] says how many are of each. scores, logits: float32 [n] or, for
    classes, [n, k]. labels: the k class names. records: for `extract` and `transcribe`, one
    structure of `shoal.wire.records` for each input, as MessagePack; for `generate`, one
    `shoal.wire.generation.Generated`.
    """

    arrays: dict[str, Array] = {}
    labels: list[str] = []
    records: list[msgspec.Raw] = []

    @classmethod
    def join(cls, parts: Sequence[Result]) -> Result:
        """One result of several, their inputs end to end. Raises `Bug` where they do not fit."""
        first = parts[0]
        if any(part.arrays.keys() != first.arrays.keys() for part in parts):
            raise Bug("results with different outputs cannot be one")
        arrays = {name: concat([part.arrays[name] for part in parts]) for name in first.arrays}
        return cls(arrays, first.labels, [record for part in parts for record in part.records])


class Timing(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where an item's time went, in seconds."""

    queue_s: float = 0.0
    load_s: float = 0.0
    run_s: float = 0.0


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """One item's answer: `result` (MessagePack of `Result`), `payload`, `failure`, or a `piece`.

    failures: inputs of the item that failed alone, by their index in it; the rows of the result
    are those of the other inputs, in order. Only where `Params.partial` asked for it.
    piece: this is not the end of the item, but a part of its text, the `at`-th that its worker
    sends, from 0. An outcome without a piece is the end, and its result is the whole.
    """

    item: str
    result: msgspec.Raw = EMPTY
    failure: Failure | None = None
    payload: PayloadRef | None = None
    failures: dict[int, Failure] = {}
    piece: Piece | None = None
    at: int = 0
    tokens: int = 0
    timing: Timing = Timing()
    worker: str = ""
    v: int = VERSION


class Cancel(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request whose caller left: workers drop what they hold of it."""

    request: str
    v: int = VERSION


class Missing(msgspec.Struct, frozen=True, omit_defaults=True):
    """Items whose outcomes `inbox` waits for, and may have missed: whoever sent one sends it again.

    A gateway asks after it, or a worker, has lost its connection.
    """

    inbox: str
    items: list[str]
    v: int = VERSION


class AdapterState(msgspec.Struct, frozen=True, omit_defaults=True):
    """An adapter, by its key, beside the copy of its model on a device. idle_s: since its use."""

    adapter: str
    device: str
    memory_bytes: int = 0
    idle_s: float = 0.0


class ModelState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker can say of one model, named by its key (`id@revision`).

    reason: why it is unavailable, or how far its load is. token_s: device seconds of a useful
    token, padding and launches included. bytes_per_token: what its texts have had. item_s: device
    seconds of an item. full_s: device seconds of a batch that is large enough for the device to run
    at nearly its best rate. devices: those that hold it. memory_bytes: of one copy, as measured.
    load_s: what its loads take. All of these are 0 while unknown. loading_s: for how long it has
    been loading. idle_s: since its last batch. growing: texts of it that grow. at_once: how many do
    in the copies that are loaded when there are plenty. Where the entry lists
    several runtimes: runtime is the one that serves it here, others has the rest, each with why it
    does not. adapters: those loaded beside its copies. adapts: it takes some here. faulty: the keys
    of those that cannot be had here just now.
    """

    model: str
    state: Literal["cold", "loading", "resident", "unavailable"]
    reason: str = ""
    token_s: float = 0.0
    bytes_per_token: float = 0.0
    item_s: float = 0.0
    full_s: float = 0.0
    devices: list[str] = []
    memory_bytes: int = 0
    load_s: float = 0.0
    loading_s: float = 0.0
    idle_s: float = 0.0
    growing: int = 0
    at_once: int = 0
    runtime: str = ""
    others: dict[str, str] = {}
    adapters: list[AdapterState] = []
    adapts: bool = False
    faulty: list[str] = []


class MemoryState(msgspec.Struct, frozen=True, omit_defaults=True):
    """One memory of a worker (`host`, `cuda:0`) in bytes: what models may use, what they do."""

    name: str
    budget_bytes: int
    used_bytes: int


class Status(msgspec.Struct, frozen=True, omit_defaults=True):
    """A worker's heartbeat: for people and for early refusals, never for dispatch."""

    worker: str
    models: list[ModelState]
    devices: int = 1
    held_items: int = 0
    draining: bool = False
    memories: list[MemoryState] = []
    v: int = VERSION


class Nudge(msgspec.Struct, frozen=True, omit_defaults=True):
    """An operator's wish: load a model (by key) now, or evict it where it is idle.

    worker: the one that is meant; empty: for `load` the first that can, for `evict` all of them.
    """

    verb: Literal["load", "evict"]
    model: str
    worker: str = ""
    v: int = VERSION


class Backlog(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a gateway waits for: useful tokens by lane and model. Gateways tell one another.

    items: how many, by model.
    """

    gateway: str
    tokens: dict[Lane, dict[str, int]]
    items: dict[str, int] = {}
    v: int = VERSION


class DeadLetter(msgspec.Struct, frozen=True, omit_defaults=True):
    """An item that cannot be served, whole, and why.

    envelope: the message as it was pulled. body: its inputs where they had been in the payload
    store, which forgets. cause: the error of its last attempt. buried_s: wall-clock seconds.
    """

    envelope: bytes
    cause: Failure
    attempts: int
    worker: str
    buried_s: float
    model: str = ""
    item: str = ""
    body: bytes = b""
    v: int = VERSION


class _Version(msgspec.Struct):
    v: int = VERSION


# What reading foreign bytes may raise; the last of them where they are nested without end.
_NONSENSE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_encoder = msgspec.msgpack.Encoder()
_version = msgspec.msgpack.Decoder(_Version)


def encode(message: msgspec.Struct) -> bytes:
    """MessagePack of any struct of this module."""
    return _encoder.encode(message)


M = TypeVar("M", bound=msgspec.Struct)


def _decoder(kind: type[M]) -> Callable[[bytes], M]:
    typed = msgspec.msgpack.Decoder(kind)

    def decode(data: bytes) -> M:
        try:
            message = typed.decode(data)
        except _NONSENSE as error:
            raise UnreadableMessage(f"{kind.__name__}: {error}{_foreign_version(data)}") from error
        if getattr(message, "v", VERSION) != VERSION:
            raise UnreadableMessage(f"{kind.__name__}:{_foreign_version(data)}")
        return message

    return decode


def _foreign_version(data: bytes) -> str:
    """A remark on the major version of `data` where it is not ours; else an empty string."""
    try:
        v = _version.decode(data).v
    except _NONSENSE:
        return ""
    return "" if v == VERSION else f" (written in version {v}, this build speaks {VERSION})"


decode_envelope = _decoder(Envelope)
decode_outcome = _decoder(Outcome)
decode_result = _decoder(Result)
decode_inputs = _decoder(Inputs)
decode_cancel = _decoder(Cancel)
decode_missing = _decoder(Missing)
decode_status = _decoder(Status)
decode_dead_letter = _decoder(DeadLetter)
decode_backlog = _decoder(Backlog)
decode_nudge = _decoder(Nudge)
