"""What can be asked of a server: arguments in, a `Call` out.

Owns every method of both clients, written once. Sans-io, but that a file which an argument names by
its path is read at once. Does not own the answers (`answers`), retries (`exchange`) or the sending
(`shells`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack
from urllib.parse import quote

from shoal.client import answers, texts
from shoal.client.answers import (
    Classification,
    Encoding,
    Extraction,
    Floats,
    Model,
    Ranked,
    SparseVector,
    Transcript,
)
from shoal.client.exchange import Call, Reply
from shoal.client.texts import Generated

# A text is a str; a file is its bytes, or a path to it.
File = bytes | Path
Inputs = str | File | Sequence[str | File] | Sequence[Sequence[int]]
OutputName = Literal["dense", "sparse", "multivector"]
ExtractName = Literal["entities", "text", "layout", "speech"]
Dtype = Literal["float32", "float16", "int8", "binary"]


class Options(TypedDict, total=False):
    """What every call takes besides its own arguments.

    lane: a lane of the server's (`interactive` and `bulk`, unless it is told otherwise); left out,
    the server decides. timeout_s: time for the call with all its tries.
    deadline_s: time after which the server may drop the work; the timeout when left out.
    idempotency_key: a name of this request, for the server to run it once, however often it is
    tried; `auto` makes one for each call. Left out, none is sent: every call can be repeated, and
    a key costs the server a record.
    """

    lane: str
    idempotency_key: str
    timeout_s: float
    deadline_s: float


class Turn(TypedDict):
    """A turn of a conversation. role: `system`, `user` or `assistant`."""

    role: str
    content: str


class GenerationOptions(Options, total=False):
    """How a text is continued; what is left out is as the model's own files say.

    max_tokens: of the continuation; left out, up to the end of the context. temperature: 0 takes
    the likeliest token each time. stop: texts that end it and are no part of it. schema: a JSON
    schema that it has to fit.
    """

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: Sequence[str]
    seed: int
    schema: Mapping[str, Any]


_GENERATION = GenerationOptions.__annotations__.keys() - Options.__annotations__.keys()


class Core:
    """The methods of both clients, as calls. `options` are the client's own defaults."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def encode(
        self,
        inputs: Inputs,
        model: str,
        *,
        prompt: str | None = None,
        truncate: bool = False,
        dimensions: int | None = None,
        normalize: bool | None = None,
        dtype: Dtype | None = None,
        **options: Unpack[Options],
    ) -> Call[Floats]:
        """Dense vectors of texts, token ids or images: [n, d], float32 unless `dtype` says else.

        prompt: name of one of the model's prompts. truncate: cut an over-long text instead of
        refusing it. dimensions: keep so many leading dimensions. normalize: overrules the model's
        entry. Further arguments are those of `Options`. Raises `InputsFailed` where some inputs
        failed and others did not.
        """
        body = _body(
            model=model,
            inputs=_inputs(inputs),
            outputs=["dense"],
            prompt=prompt,
            truncate=truncate or None,
            dimensions=dimensions,
            normalize=normalize,
            dtype=dtype,
        )
        return self._post("/v1/encode", body, answers.dense, options)

    def encode_sparse(
        self,
        inputs: Inputs,
        model: str,
        *,
        prompt: str | None = None,
        truncate: bool = False,
        **options: Unpack[Options],
    ) -> Call[list[SparseVector]]:
        """Sparse vectors of texts. Arguments as in `encode`."""
        body = _body(
            model=model,
            inputs=_inputs(inputs),
            outputs=["sparse"],
            prompt=prompt,
            truncate=truncate or None,
        )
        return self._post("/v1/encode", body, answers.sparse, options)

    def encode_outputs(
        self,
        inputs: Inputs,
        model: str,
        outputs: Sequence[OutputName] = ("dense", "sparse"),
        *,
        prompt: str | None = None,
        truncate: bool = False,
        dtype: Dtype | None = None,
        **options: Unpack[Options],
    ) -> Call[Encoding]:
        """Several outputs of one pass, with the number of tokens. Arguments as in `encode`."""
        body = _body(
            model=model,
            inputs=_inputs(inputs),
            outputs=list(outputs),
            prompt=prompt,
            truncate=truncate or None,
            dtype=dtype,
        )
        return self._post("/v1/encode", body, answers.encoding, options)

    def score(
        self,
        query: str,
        texts: Sequence[str],
        model: str,
        *,
        truncate: bool = False,
        **options: Unpack[Options],
    ) -> Call[Floats]:
        """How well each text answers the query, in the order of the texts: float32 [n]."""
        body = _body(model=model, query=query, texts=list(texts), truncate=truncate or None)
        return self._post("/v1/score", body, answers.scores, options)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        model: str,
        *,
        top_n: int | None = None,
        truncate: bool = False,
        **options: Unpack[Options],
    ) -> Call[list[Ranked]]:
        """The documents, best first; only `top_n` of them where it is given."""
        texts = list(documents)
        body = _body(
            model=model, query=query, documents=texts, top_n=top_n, truncate=truncate or None
        )

        def parse(reply: Reply) -> list[Ranked]:
            return answers.ranked(reply, texts)

        return self._post("/v1/rerank", body, parse, options)

    def classify(
        self,
        inputs: str | File | Sequence[str | File] | Sequence[tuple[str, str]],
        model: str,
        *,
        truncate: bool = False,
        top_k: int | None = None,
        multi_label: bool = False,
        threshold: float | None = None,
        **options: Unpack[Options],
    ) -> Call[list[Classification]]:
        """The labels of texts, pairs of texts, images or files, in their order.

        top_k: only so many of the best. multi_label: judge each label by itself; `labels` has those
        of at least `threshold`. Raises `InputsFailed` where some inputs failed and others did not.
        """
        body = _body(
            model=model,
            inputs=_inputs(inputs),
            truncate=truncate or None,
            top_k=top_k,
            multi_label=multi_label or None,
            threshold=threshold,
        )
        return self._post("/v1/classify", body, answers.classes, options)

    def extract(
        self,
        inputs: str | File | Sequence[str | File],
        model: str,
        *,
        outputs: Sequence[ExtractName] | None = None,
        labels: Sequence[str] | None = None,
        threshold: float | None = None,
        **options: Unpack[Options],
    ) -> Call[list[Extraction]]:
        """Entities of texts; text and layout of images and documents; speech in sounds.

        outputs: left out, the first that the model finds. labels: only entities or regions with
        these. threshold: only what scores so much. Raises `InputsFailed` where some inputs failed
        and others did not.
        """
        body = _body(
            model=model,
            inputs=_inputs(inputs),
            outputs=None if outputs is None else list(outputs),
            labels=None if labels is None else list(labels),
            threshold=threshold,
        )
        return self._post("/v1/extract", body, answers.extractions, options)

    def transcribe(
        self, sound: File, model: str, *, language: str | None = None, **options: Unpack[Options]
    ) -> Call[Transcript]:
        """What is said in a sound. language: as ISO 639-1; left out, the model finds it."""
        body = _body(
            model=model, file=_file(sound), language=language, response_format="verbose_json"
        )
        return self._post("/v1/audio/transcriptions", body, answers.transcript, options)

    def generate(
        self, prompts: str | Sequence[str], model: str, **options: Unpack[GenerationOptions]
    ) -> Call[list[Generated]]:
        """Continuations of prompts, in their order. Arguments as in `GenerationOptions`."""
        body = {"model": model, "inputs": [prompts] if isinstance(prompts, str) else list(prompts)}
        return self._generation(body, texts.whole, options)

    def chat(
        self, messages: str | Sequence[Turn], model: str, **options: Unpack[GenerationOptions]
    ) -> Call[Generated]:
        """The next turn of a conversation; a text is a user's first. Arguments as in `generate`."""
        body = {"model": model, "messages": _turns(messages)}
        return self._generation(body, texts.first, options)

    def generate_stream(
        self, prompt: str, model: str, **options: Unpack[GenerationOptions]
    ) -> Call[None]:
        """The continuation of a prompt as it grows: iterate over its parts. As in `generate`.

        Leaving it early, by its `with` block or `close`, stops it at the server.
        """
        body = {"model": model, "inputs": [prompt], "stream": True}
        return self._generation(body, _begun, options)

    def chat_stream(
        self, messages: str | Sequence[Turn], model: str, **options: Unpack[GenerationOptions]
    ) -> Call[None]:
        """The next turn of a conversation as it grows. As in `chat` and `generate_stream`."""
        body = {"model": model, "messages": _turns(messages), "stream": True}
        return self._generation(body, _begun, options)

    def models(self) -> Call[list[Model]]:
        """All models of the server, by id."""
        return Call("GET", "/v1/models", answers.models)

    def model(self, name: str) -> Call[Model]:
        """One model, by id, alias, or either with `@revision`. Raises `UnknownModel`."""
        path = f"/v1/models/{quote(name, safe='/@')}"
        return Call("GET", path, answers.model)

    def ready(self) -> Call[bool]:
        """Whether the server takes work. Raises `Unreachable` where none answers."""
        return Call(
            "GET", "/readyz", lambda reply: reply.status == 200, retry=False, good=(200, 503)
        )

    def _generation(self, body: dict[str, Any], parse: Any, options: Any) -> Call[Any]:
        how = {name: options[name] for name in options.keys() & _GENERATION}
        if "stop" in how:
            how["stop"] = list(how["stop"])
        others = {name: value for name, value in options.items() if name not in how}
        if "stream" in body:  # a stream cannot be kept for a retry
            others = {"idempotency_key": None} | others
        return self._post("/v1/generate", body | how, parse, others)

    def _post(self, path: str, body: dict[str, Any], parse: Any, options: Any) -> Call[Any]:
        unknown = set(options) - Options.__annotations__.keys()
        if unknown:
            raise TypeError(f"unexpected argument {min(unknown)!r}")
        return Call("POST", path, parse, body, **{**self._options, **options})


def _turns(messages: str | Sequence[Turn]) -> list[Turn]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return list(messages)


def _begun(_: Reply) -> None:
    """A text that grows is read by who asked for it."""


def _body(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _inputs(inputs: Any) -> Any:
    if isinstance(inputs, str | bytes | Path):
        return _file(inputs)
    return [_file(one) for one in inputs]


def _file(one: Any) -> Any:
    """A file as it is sent; anything else as it is."""
    if isinstance(one, Path):
        one = one.read_bytes()
    return {"data": one} if isinstance(one, bytes) else one
