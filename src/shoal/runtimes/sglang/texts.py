"""A text that a server lets grow: what it is asked for, and what becomes of what it sends.

Owns the sampling parameters, the limits of a prompt, cutting at stop texts, and the sums of an
answer. Does not own the connection (`contract`) or the prompt (`prompts`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.clock import monotonic
from shoal.errors import InputTooLong, InvalidRequest, ModelUnavailable, RunFailed, ShoalError
from shoal.runtimes.interface import Emit
from shoal.runtimes.sglang.contract import Chunk, Meta, failure
from shoal.runtimes.stops import StopText
from shoal.wire.generation import FinishReason, Generated, Generation, Piece, TokenLogprob

# What a model's own generation_config.json decides where a request does not.
OWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

_BROKEN = "\ufffd"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a prompt and its text have to fit into. defaults: the model's own settings.

    prompt_tokens: the longest prompt that the server takes.
    """

    key: str
    context_tokens: int
    prompt_tokens: int
    defaults: Mapping[str, Any]
    seeds: bool = False


def own_settings(folder: Path) -> dict[str, Any]:
    """What the model's own `generation_config.json` says of sampling. Raises `ModelUnavailable`."""
    file = folder / "generation_config.json"
    try:
        read = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise ModelUnavailable(f"{file} is no JSON: {error}") from error
    return {name: read[name] for name in OWN if read.get(name) is not None}


def sampling(asked: Generation, prompt_tokens: int, limits: Limits) -> dict[str, Any]:
    """The server's `sampling_params`. Raises `InputTooLong` or `InvalidRequest`."""
    most = min(limits.prompt_tokens, limits.context_tokens - 1)
    if prompt_tokens > most:
        raise InputTooLong(
            f"the prompt has {prompt_tokens} tokens, and {limits.key} takes prompts of {most}"
        )
    if prompt_tokens < 1:
        raise InvalidRequest("the prompt has no tokens")
    room = limits.context_tokens - prompt_tokens
    if asked.max_tokens is not None and asked.max_tokens < 1:
        raise InvalidRequest("max_tokens has to be 1 at least", param="max_tokens")
    given = dict(limits.defaults)
    for name in ("temperature", "top_p", "top_k"):
        if (value := getattr(asked, name)) is not None:
            given[name] = value
    given |= {
        "max_new_tokens": min(asked.max_tokens or room, room),
        "frequency_penalty": asked.frequency_penalty,
        "presence_penalty": asked.presence_penalty,
    }
    stops = [stop for stop in asked.stop if stop]
    if stops:
        # Untrimmed, so that we see where a stop text begins and send nothing of it.
        given |= {"stop": stops, "no_stop_trim": True}
    if asked.schema is not None:
        given["json_schema"] = asked.schema
    if limits.seeds:
        # In this mode the server takes one fixed seed for all who name none.
        given["sampling_seed"] = _seed(asked.seed)
    elif asked.seed is not None and given.get("temperature") != 0:
        raise InvalidRequest(
            f"{limits.key} is served by SGLang, which keeps to a seed only on a GPU and with the "
            "option `seeds`; leave it out, or set temperature to 0",
            param="seed",
        )
    return given


def _seed(asked: int | None) -> int:
    return asked if asked is not None else random.getrandbits(31)


class Text:
    """One text as it grows."""

    def __init__(self, asked: Generation, prompt_tokens: int, emit: Emit) -> None:
        self._asked = asked
        self._prompt_tokens = prompt_tokens
        self._emit = emit
        self._stops = StopText(asked.stop)
        self._begun_s = monotonic()
        self._first_s = 0.0
        self._tokens = 0
        self._parts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self.over = False

    def grow(self, chunk: Chunk) -> None:
        """Takes what the server sent; emits what is certain of it, and the end where it is one."""
        if self.over:
            return
        meta = chunk.meta_info
        finish = meta.finish_reason
        if chunk.error is not None:
            self.fail(failure(chunk.error.code, chunk.error.message))
            return
        if finish is not None and finish.type == "abort":
            self.fail(failure(finish.status_code, finish.message or "the text was given up"))
            return
        self._first_s = self._first_s or monotonic()
        tokens, self._tokens = meta.completion_tokens - self._tokens, meta.completion_tokens
        text = chunk.text
        if finish is not None and finish.type == "length":
            text = text.rstrip(_BROKEN)  # a character whose last bytes were not generated
        self._send(self._stops.feed(text), tokens, self._logprobs_of(meta))
        if finish is not None or self._stops.hit:
            reached = finish is not None and finish.type == "length" and not self._stops.hit
            self.end("length" if reached else "stop")

    def end(self, reason: FinishReason) -> None:
        """Says that it is whole, unless it was over before."""
        if self.over:
            return
        self.over = True
        rest = self._stops.rest()
        if rest:
            self._send(rest, 0, [])
        now_s = monotonic()
        further = self._tokens - 1
        self._emit(
            Generated(
                "".join(self._parts),
                reason,
                self._prompt_tokens,
                self._tokens,
                first_token_s=(self._first_s or now_s) - self._begun_s,
                token_s=(now_s - self._first_s) / further if further > 0 else 0.0,
                logprobs=self._logprobs,
            )
        )

    def fail(self, error: ShoalError) -> None:
        """Ends it by an error, unless it was over before."""
        if not self.over:
            self.over = True
            self._emit(error)

    def _send(self, text: str, tokens: int, logprobs: list[TokenLogprob]) -> None:
        self._parts.append(text)
        self._logprobs += logprobs
        if self._asked.stream and (text or tokens or logprobs):
            self._emit(Piece(text, tokens, logprobs))

    def _logprobs_of(self, meta: Meta) -> list[TokenLogprob]:
        if self._asked.logprobs is None:
            return []
        tops = meta.output_top_logprobs or [None] * len(meta.output_token_logprobs)
        if len(tops) != len(meta.output_token_logprobs):
            raise RunFailed("SGLang gave probabilities of other tokens than it generated")
        return [
            TokenLogprob(
                text or "",
                logprob or 0.0,
                [(word or "", number or 0.0) for number, _, word in top or []],
            )
            for (logprob, _, text), top in zip(meta.output_token_logprobs, tops, strict=True)
        ]
