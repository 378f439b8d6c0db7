"""A text that a server lets grow: what it is asked for, and what becomes of what it sends.

Owns the sampling parameters, the limits of a prompt, and reading the server's chunks. Does not own
the connection (`contract`), the prompt (`prompts`), or what is told of a text
(`shoal.runtimes.texts`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.errors import InputTooLong, InvalidRequest, RunFailed
from shoal.runtimes.sglang.contract import Chunk, Meta, failure
from shoal.runtimes.texts import GrowingText
from shoal.wire.generation import Generation, TokenLogprob

# What a model's own generation_config.json decides where a request does not.
OWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


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


class Text(GrowingText):
    """One text as it grows."""

    def take(self, chunk: Chunk) -> None:
        """Takes what the server sent; tells what is certain of it, and the end where it is one."""
        if self.ended:
            return
        meta = chunk.meta_info
        finish = meta.finish_reason
        if chunk.error is not None:
            self.fail(failure(chunk.error.code, chunk.error.message))
            return
        if finish is not None and finish.type == "abort":
            self.fail(failure(finish.status_code, finish.message or "the text was given up"))
            return
        at_length = finish is not None and finish.type == "length"
        tokens = meta.completion_tokens - self.tokens
        self.grow(chunk.text, tokens, self._logprobs_of(meta), at_length=at_length)
        if finish is not None or self.stopped:
            self.end("length" if at_length and not self.stopped else "stop")

    def _logprobs_of(self, meta: Meta) -> list[TokenLogprob]:
        if self.asked.logprobs is None:
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
