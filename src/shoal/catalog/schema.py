"""A catalog entry, as it is written in YAML: typed, documented, unknown keys refused.

Owns the fields, their meaning and their checks. Does not own files (`load`), names
(`snapshot`) or where weights lie (`resolve`). `docs/catalog.md` is generated from this module.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shoal.core.types import Task
from shoal.ipc.messages import HeadSpec

ID_PATTERN = r"^[a-z0-9][a-z0-9._-]*(/[a-z0-9][a-z0-9._-]*)?$"

ModelId = Annotated[
    str,
    Meta(
        pattern=ID_PATTERN,
        max_length=128,
        extra={"expected": "lower-case letters, digits and `.`, `_`, `-`, with at most one `/`"},
    ),
]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Revision = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=64,
        extra={
            "expected": "a letter or digit, then letters, digits, `.`, `_` and `-`; 64 characters "
            "at most"
        },
    ),
]
Source = Annotated[
    str,
    Meta(
        pattern=r"^(package|file|hf|s3|gs|az)://.+$",
        extra={
            "expected": "`package://...`, `file:///...`, `hf://...@<revision>`, or `s3://...`, "
            "`gs://...`, `az://...`"
        },
    ),
]
Digest = Annotated[
    str, Meta(pattern=r"^[0-9a-f]{64}$", extra={"expected": "64 lower-case hexadecimal digits"})
]
Link = Annotated[
    str, Meta(pattern=r"^https://\S+$", max_length=400, extra={"expected": "an https:// address"})
]
Pool = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9][a-z0-9-]*$",
        max_length=32,
        extra={"expected": "lower-case letters, digits and `-`, 32 characters at most"},
    ),
]
Positive = Annotated[int, Meta(ge=1)]


class Output(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of output of an encoder."""

    dim: Annotated[Positive, Meta(description="Length of each vector.")]


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tuned numbers of one model; the defaults are safe everywhere."""

    batch_tokens: Annotated[
        Positive, Meta(description="Most padded tokens in one forward pass.")
    ] = 1024
    max_batch_tokens: Annotated[
        Positive,
        Meta(description="Most padded tokens in one batch, whatever the lane's quantum allows."),
    ] = 65_536
    tokens_per_s: Annotated[
        float,
        Meta(gt=0, description="First guess of a device's speed, until batches were measured."),
    ] = 5_000.0
    launch_ms: Annotated[
        float,
        Meta(ge=0, description="First guess of what a forward pass costs before its tokens."),
    ] = 3.0
    max_token_ms: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="Of a generator: how long a further token of a text may take; fewer texts "
            "grow at once where it takes longer."
        ),
    ] = None
    bytes_per_token: Annotated[
        float,
        Meta(gt=0, description="Bytes of UTF-8 text per token: the gateway estimates cost by it."),
    ] = 4.0


# Fields of an entry, and of the requests that generate.
Temperature = Annotated[
    Annotated[float, Meta(ge=0, le=2)] | None,
    Meta(description="0 takes the likeliest token each time."),
]
TopP = Annotated[
    Annotated[float, Meta(gt=0, le=1)] | None,
    Meta(description="Choose among the likeliest tokens of so much probability together."),
]
TopK = Annotated[
    Annotated[int, Meta(ge=1)] | None,
    Meta(description="Choose among so many of the likeliest tokens."),
]


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a generator goes on where a request does not say."""

    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None


class Alternative(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another runtime that serves the same model; what is left out is as in the entry."""

    runtime: Annotated[Name, Meta(description="Runtime that can execute it as well.")]
    source: Annotated[
        Source | None, Meta(description="Where the weights lie in the form that it reads.")
    ] = None
    digests: Annotated[
        dict[str, Digest], Meta(description="SHA-256 of files of that source, by path.")
    ] = {}
    family: Annotated[Name | None, Meta(description="Code path of that runtime.")] = None
    options: Annotated[
        dict[str, bool | int | float | str], Meta(description="Settings of that runtime.")
    ] = {}
    weights: Annotated[Name | None, Meta(description="File inside the source.")] = None
    memory_mib: Annotated[
        Positive | None, Meta(description="Estimate of the memory it needs there.")
    ] = None
    profile: Annotated[Profile | None, Meta(description="Tuned numbers for that runtime.")] = None


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model: what it is called, where its weights lie, what it can do and how it is run."""

    id: Annotated[ModelId, Meta(description="Name of the model in requests.")]
    tasks: Annotated[
        list[Task],
        Meta(
            min_length=1,
            description="What it serves: encode, score, classify, extract, transcribe; or "
            "generate, alone.",
        ),
    ]
    source: Annotated[
        Source,
        Meta(
            description="Where the weights lie: `package://<import name>/<path>` in an installed "
            "Python package, `file:///<path>`, `hf://<org>/<name>@<revision>`, or a folder of an "
            "object store: `s3://<bucket>/<path>`, `gs://...`, `az://...`."
        ),
    ]
    digests: Annotated[
        dict[str, Digest],
        Meta(description="SHA-256 of files of the source, by path; others are refused."),
    ] = {}
    revision: Annotated[
        Revision, Meta(description="Version of the weights; requests may name `id@revision`.")
    ] = "1"
    aliases: Annotated[list[Name], Meta(description="Other names of the model.")] = []
    runtime: Annotated[Name, Meta(description="Runtime that executes it.")] = "onnx"
    alternatives: Annotated[
        list[Alternative],
        Meta(
            description="Other runtimes that can, where that one cannot or is slower: each worker "
            "chooses by what is installed, its devices and what was measured."
        ),
    ] = []
    family: Annotated[
        Name | None,
        Meta(description="Code path of its runtime that runs it; else found from the files."),
    ] = None
    verified: Annotated[
        Literal["weights", "family", "none"],
        Meta(
            description="What has been tried: these `weights`, only their `family` (its code path, "
            "on other or random weights), or `none` of it."
        ),
    ] = "none"
    inputs: Annotated[
        list[Literal["text", "image", "document", "audio", "file"]],
        Meta(min_length=1, description="What an input may be; `document` is an image or a PDF."),
    ] = msgspec.field(default_factory=lambda: ["text"])
    extracts: Annotated[
        list[Literal["entities", "text", "layout", "speech"]],
        Meta(description="What `extract` can return; the first is the default."),
    ] = []
    labels: Annotated[
        list[Name], Meta(description="Class names in the order of the logits, if no file has them.")
    ] = []
    allow_pickle: Annotated[
        bool,
        Meta(
            description="Read weights or a tokenizer that are a pickle: only tensors or tokens are "
            "taken from it, and none of its code runs."
        ),
    ] = False
    options: Annotated[
        dict[str, bool | int | float | str],
        Meta(description="Settings of that runtime, as its documentation names them."),
    ] = {}
    weights: Annotated[
        Name | None,
        Meta(description="File inside the source; found by its usual name when left out."),
    ] = None
    tokenizer: Annotated[
        Source | None,
        Meta(
            description="Where `tokenizer.json` lies when it is not beside the weights; or the "
            "pickle of a tiktoken encoding (`*.pkl`), whose texts begin with the option "
            "`first_token`."
        ),
    ] = None
    pooling: Annotated[
        Literal["mean", "cls", "last", "none"],
        Meta(description="How token vectors become one vector; `none` where the graph does it."),
    ] = "mean"
    normalize: Annotated[
        bool, Meta(description="Scale dense vectors to length 1 unless a request says otherwise.")
    ] = True
    sampling: Annotated[
        Sampling,
        Meta(
            description="Of a generator: what holds where a request does not say; what is left "
            "out here, too, is as the weights' own files say, or the engine."
        ),
    ] = Sampling()
    prompts: Annotated[
        dict[str, str],
        Meta(description="Texts put before an input, by name (`query`, `document`)."),
    ] = {}
    max_tokens: Annotated[
        Positive,
        Meta(
            description="Longest input in tokens, special tokens included; of a generator the "
            "context, what it generates included."
        ),
    ] = 512
    outputs: Annotated[
        dict[Literal["dense", "sparse", "multivector"], Output],
        Meta(description="What `encode` can return; the first is the default."),
    ] = {}
    scorer: Annotated[
        Literal["similarity", "maxsim", "head", "joint"],
        Meta(
            description="How `score` is computed: cosine `similarity` of dense vectors, `maxsim` "
            "of token vectors, a `head` over the two vectors, or `joint`, a cross-encoder that "
            "reads both texts at once."
        ),
    ] = "similarity"
    heads: Annotated[
        dict[Literal["score", "classify"], HeadSpec],
        Meta(description="Small networks over the pooled vectors, by the task they serve."),
    ] = {}
    memory_mib: Annotated[
        Positive | None,
        Meta(
            description="Estimate of the memory it needs, until it is measured; when left out, by "
            "the size of its weights, or 256 where they are still to be fetched."
        ),
    ] = None
    profile: Annotated[Profile, Meta(description="Tuned numbers.")] = Profile()
    weight: Annotated[
        float, Meta(gt=0, description="Share of device time beside other models that want some.")
    ] = 1.0
    pool: Annotated[Pool, Meta(description="Pool of workers that serves it.")] = "default"
    pinned: Annotated[
        bool,
        Meta(description="Loaded before the first request, and never evicted to make room."),
    ] = False
    min_replicas: Annotated[
        int,
        Meta(ge=0, le=64, description="Copies that the pool keeps loaded; a pinned model has 1."),
    ] = 0
    idle_timeout_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Evict it after so long without a request, room or no room."),
    ] = None
    requires: Annotated[
        list[Name],
        Meta(description="Packages that carry the weights, as pip requirements (for messages)."),
    ] = []
    licence: Annotated[
        str | None, Meta(description="Licence of the weights: its SPDX name where it has one.")
    ] = None
    kind: Annotated[
        Literal[
            "dense",
            "sparse",
            "multivector",
            "rerank",
            "extraction",
            "ocr",
            "layout",
            "classification",
            "guard",
            "vision",
            "audio",
            "generation",
        ]
        | None,
        Meta(description="The shelf that people look for it on; nothing is decided by it."),
    ] = None
    facts: Annotated[
        list[Link], Meta(description="Where what is stated here can be looked up.")
    ] = []
    description: Annotated[str, Meta(description="One line for people.")] = ""

    @property
    def key(self) -> str:
        """`id@revision`: what is loaded, cached and named in messages."""
        return f"{self.id}@{self.revision}"

    @property
    def generates(self) -> bool:
        """Whether it is a generator: its items take slots and not places in a batch."""
        return "generate" in self.tasks

    @property
    def process(self) -> str:
        """Which of a device's processes it is loaded in: its runtime's, or one of its own.

        A generator computes for as long as it has texts, so it has its own, which gives way to
        others; and what an engine leaves behind goes with it.
        """
        return f"{self.runtime}:{self.key}" if self.generates else self.runtime

    @property
    def unpinned(self) -> bool:
        """Whether its source is a hub's model without a revision, which cannot be loaded."""
        return self.source.startswith("hf://") and "@" not in self.source


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter of a model; requests name it `base@name`."""

    name: Annotated[
        Revision, Meta(description="Name of the adapter; `base@name` in the `model` of requests.")
    ]
    base: Annotated[ModelId, Meta(description="Id of the model that it was made for.")]
    source: Annotated[
        Source,
        Meta(
            description="Where its folder lies: `adapter_config.json` and "
            "`adapter_model.safetensors`, as PEFT writes them."
        ),
    ]
    revision: Annotated[
        Revision, Meta(description="Version of the adapter: each is loaded as another one.")
    ] = "1"
    digests: Annotated[
        dict[str, Digest], Meta(description="SHA-256 of its files, by path; others are refused.")
    ] = {}
    licence: Annotated[str | None, Meta(description="Licence of the adapter.")] = None
    description: Annotated[str, Meta(description="One line for people.")] = ""

    @property
    def id(self) -> str:
        """`base@name`: its name in requests, and on the shelf."""
        return f"{self.base}@{self.name}"

    @property
    def key(self) -> str:
        """`base@name@revision`: what is loaded and named in messages."""
        return f"{self.id}@{self.revision}"


# What stands on the shelf, each under its id.
AnyEntry = Entry | Adapter
