"""What a worker and a runtime process say to each other.

Owns the message structs and their one codec. Every call carries a `seq` that its answer repeats;
a runtime process answers calls in any order. Does not own sockets (`client`, `server`).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shoal.core.types import Task
from shoal.wire.envelope import EMPTY, Failure, Params, UnreadableMessage
from shoal.wire.generation import ChatMessage, Generated, Piece


class Traits(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a runtime can do; the worker schedules by it.

    accepts_ids: it takes token ids (else it takes texts and tokenises itself).
    packing: it runs ragged sequences without padding.
    tasks: the tasks it serves. host_tier: what it unloads with `keep` is loaded again sooner.
    lora: it runs models with adapters, several of them in one batch. streams: it generates, and
    takes `Start` and `Stop` for that.
    """

    accepts_ids: bool
    tasks: list[Task]
    packing: bool = False
    lora: bool = False
    streams: bool = False
    thread_safe: bool = False
    host_tier: bool = False


class HeadSpec(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A small network over pooled vectors, or over a pair of them.

    Written in catalog entries as it is here, hence the descriptions. The pair features are those
    of InferSent (Conneau et al. 2017).
    """

    kind: Annotated[
        Literal["linear", "pair"],
        Meta(
            description="`linear`: layers over the vector of one text; `pair`: layers over "
            "[a; b; |a-b|; a*b] of two."
        ),
    ]
    file: Annotated[
        str, Meta(description="Weights beside the model's own: safetensors, or a checkpoint.")
    ]
    prefix: Annotated[
        str,
        Meta(description="Where its weights begin in the file: `<prefix>net.<n>.weight`."),
    ]
    labels: Annotated[
        list[str], Meta(description="Names of the classes, in the order of the logits.")
    ]
    positive: Annotated[
        str | None,
        Meta(description="The label whose probability is the score (heads of `score` only)."),
    ] = None
    activation: Annotated[
        Literal["relu", "tanh", "gelu"], Meta(description="What stands between its layers.")
    ] = "relu"
    allow_pickle: Annotated[
        bool,
        Meta(
            description="Read a checkpoint that is no safetensors file; only tensors and plain "
            "containers are accepted from it."
        ),
    ] = False


class ModelSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything a runtime needs to load one model; paths are local and exist.

    key: `id@revision`, unique in the process. path: the model's folder or file.
    cache_dir: where a runtime may keep what it derives from the weights. family: the code path
    that runs it; None: found from the files. extracts: what `extract` finds. labels: class names,
    where the files have none. allow_pickle: a checkpoint that is a pickle may be read.
    """

    key: str
    path: str
    cache_dir: str
    tasks: list[Task]
    weights: str | None = None
    pooling: Literal["mean", "cls", "last", "none"] = "mean"
    normalize: bool = True
    outputs: list[str] = msgspec.field(default_factory=lambda: ["dense"])
    max_tokens: int = 512
    batch_tokens: int = 1024
    heads: dict[str, HeadSpec] = {}
    options: dict[str, bool | int | float | str] = {}
    family: str | None = None
    extracts: list[str] = []
    labels: list[str] = []
    allow_pickle: bool = False
    scorer: Literal["similarity", "maxsim", "head", "joint"] = "similarity"


class RunItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """One item of a batch, tokenised where the runtime accepts ids.

    ids: the token ids of all its sequences end to end, little-endian, `id_bytes` (2 or 4) each.
    lengths: the number of ids of each sequence.
    second_at: for sequences that hold a pair, where the second text begins (0: not a pair).
    layout: what the sequences are. `single`: one per input. `shared`: the first is the query,
    the others the documents it is scored against. `pairs`: a, b, a, b, ...
    texts: the same sequences as texts, for a runtime that does not accept ids.
    owners: for `extract` on texts, the input that each sequence is a window of, in order; empty:
    each sequence is one input. offsets: for `extract`, where the word of each id lies in its input:
    uint32 start and end in characters for every id of every sequence, little-endian; 0, 0 for
    special tokens. For other tasks they only say which ids are special, where a model's option
    `special_tokens` is off.
    blobs: inputs that are no texts, one per input; `lengths` then has an estimate of each one's
    cost in tokens.
    chat: for `generate`, the conversation to be continued; else the prompt is `texts[0]`.
    adapter: the key of the adapter to run it with, which is loaded; empty: the bare model.
    """

    item: str
    task: Task
    lengths: list[int]
    layout: Literal["single", "shared", "pairs"] = "single"
    ids: bytes = b""
    id_bytes: int = 2
    second_at: list[int] = []
    texts: list[str] = []
    params: Params = Params()
    owners: list[int] = []
    offsets: bytes = b""
    blobs: list[bytes] = []
    chat: list[ChatMessage] = []
    adapter: str = ""


class AdapterSpec(msgspec.Struct, frozen=True):
    """A LoRA adapter in PEFT's form: a local folder with its config and its safetensors file.

    key: `base@name@revision`, unique in the process.
    """

    key: str
    path: str


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Load a model. Answered by `Loaded` or `Failed`."""

    seq: int
    spec: ModelSpec


class Unload(msgspec.Struct, frozen=True, tag="unload", omit_defaults=True):
    """Forget a model and give its memory back. Answered by `Memory`.

    keep: what makes its next load quick may stay, in memory that the system can reclaim.
    """

    seq: int
    key: str
    keep: bool = False


class Run(msgspec.Struct, frozen=True, tag="run"):
    """Run items of one model. Answered by `Ran`, one outcome per item.

    block_tokens: the most padded tokens of one forward pass; 0: all of them as one padded pass;
    None: what the model's own profile says.
    """

    seq: int
    key: str
    items: list[RunItem]
    block_tokens: int | None = None


class AskMemory(msgspec.Struct, frozen=True, tag="ask_memory"):
    """Answered by `Memory`."""

    seq: int


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Generate for one item. Answered by any number of `Grown`, then by `Finished` or `Failed`.

    `Grown` come only where the item's `Generation.stream` asks for them.
    """

    seq: int
    key: str
    item: RunItem


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Stop what the `Start` of this `seq` began: its slot is wanted. It has no answer of its own.

    The `Start` ends as ever, as a rule with the reason `cancelled`.
    """

    seq: int


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Load an adapter of a loaded model. Answered by `Loaded` or `Failed`."""

    seq: int
    key: str
    adapter: AdapterSpec


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """Forget an adapter (by its key). Answered by `Memory`."""

    seq: int
    key: str
    adapter: str


Call = Load | Unload | Run | AskMemory | Start | Stop | LoadAdapter | UnloadAdapter


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of a runtime process."""

    runtime: str
    version: str
    pid: int
    traits: Traits


class Loaded(msgspec.Struct, frozen=True, tag="loaded", omit_defaults=True):
    """The model, or the adapter, is ready. memory_bytes is measured, before against after.

    warm: it was still kept from an earlier load. Of a model that generates: slots is how many
    texts may grow at once, kv_tokens how many tokens all of them may have together, prompts
    included (0: the slots are the only bound).
    """

    seq: int
    memory_bytes: int
    load_s: float
    warm: bool = False
    slots: int = 0
    kv_tokens: int = 0


class ItemDone(msgspec.Struct, frozen=True, omit_defaults=True):
    """One item's end: `result` (MessagePack of `shoal.wire.envelope.Result`) or `failure`.

    failures: inputs that failed alone, by their index in the `RunItem`; the result is that of the
    others, empty where none is left. Only where `Params.partial` asked for it.
    """

    item: str
    result: msgspec.Raw = EMPTY
    failure: Failure | None = None
    failures: dict[int, Failure] = {}


class Ran(msgspec.Struct, frozen=True, tag="ran", omit_defaults=True):
    """A batch's end. run_s is device time; padded_tokens what the device computed."""

    seq: int
    items: list[ItemDone]
    run_s: float
    padded_tokens: int = 0


class Grown(msgspec.Struct, frozen=True, tag="grown"):
    """A text has grown."""

    seq: int
    piece: Piece


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """A text is whole."""

    seq: int
    generated: Generated


class Memory(msgspec.Struct, frozen=True, tag="memory", omit_defaults=True):
    """Bytes that the process holds with its children, and those of each loaded model.

    device_bytes: what the process has of its device's own memory; 0 where that is host memory.
    device_free_bytes, device_total_bytes: of the device's own memory, all processes counted.
    """

    seq: int
    process_bytes: int
    models: dict[str, int] = {}
    device_bytes: int = 0
    device_free_bytes: int = 0
    device_total_bytes: int = 0


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A call failed as a whole (a load, or a model that is not there).

    With `seq` NO_CALL: the process cannot serve at all and is about to leave.
    """

    seq: int
    failure: Failure


NO_CALL = 0

Answer = Hello | Loaded | Ran | Grown | Finished | Memory | Failed

encode = msgspec.msgpack.Encoder().encode
_calls = msgspec.msgpack.Decoder(Call)
_answers = msgspec.msgpack.Decoder(Answer)


def decode_call(data: bytes) -> Call:
    """A call from its bytes. Raises `UnreadableMessage`."""
    try:
        return _calls.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableMessage(f"call: {error}") from error


def decode_answer(data: bytes) -> Answer:
    """An answer from its bytes. Raises `UnreadableMessage`."""
    try:
        return _answers.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableMessage(f"answer: {error}") from error
