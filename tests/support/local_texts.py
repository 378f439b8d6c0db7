"""Texts generated in process: the streaming half of `Submits` without a queue or a model.

A text is the words of `words_of`, which follow from the prompt and the seed alone, so a crossed or
reordered answer shows. A prompt that ends in `cut` fails after three words, one that ends in `stay`
goes on until it is cancelled; `long` has many words.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator

from shoal.errors import InvalidRequest, RuntimeCrashed
from shoal.gateway.jobs import End, Grew, Grown, Job
from shoal.wire.envelope import Timing
from shoal.wire.generation import Generated, Generation, Piece, TokenLogprob

WORDS = 6
LONG_WORDS = 6_000
PROMPT_TOKENS = 5
TIMING = Timing(queue_s=0.001, load_s=0.0, run_s=0.002)


def prompts(job: Job) -> list[str]:
    """Each input of a job as one text."""
    chats = [
        "\n".join(f"{turn.role}: {turn.content}" for turn in chat) for chat in job.inputs.chats
    ]
    return job.inputs.texts or chats


def words_of(prompt: str, n: int = WORDS, seed: int = 0) -> list[str]:
    """The tokens that continue a prompt."""
    return [f"{zlib.crc32(f'{prompt}|{seed}|{at}'.encode()) % 1000} " for at in range(n)]


def _tokens(prompt: str, asked: Generation, choice: int) -> list[str]:
    if asked.schema is not None:
        raise InvalidRequest("this model keeps to no `schema`", param="schema")
    words = LONG_WORDS if prompt.endswith("long") else WORDS
    seed = (asked.seed or 0) + choice % asked.n
    return words_of(prompt, min(asked.max_tokens or words, words), seed)


def _logprobs(token: str, asked: Generation) -> list[TokenLogprob]:
    if asked.logprobs is None:
        return []
    return [TokenLogprob(token, -0.25, [(token, -0.25)] * min(1, asked.logprobs))]


def generated(prompt: str, asked: Generation, choice: int) -> Generated:
    """The whole text of one choice."""
    tokens = _tokens(prompt, asked, choice)
    return Generated(
        "".join(tokens),
        "length" if len(tokens) == asked.max_tokens else "stop",
        PROMPT_TOKENS,
        len(tokens),
        first_token_s=0.003,
        token_s=0.004,
        logprobs=[one for token in tokens for one in _logprobs(token, asked)],
    )


async def grow(job: Job, cancelled: list[str]) -> AsyncGenerator[Grown, None]:
    """All texts of a job, side by side."""
    asked = job.params.generation
    assert asked is not None
    texts = [(prompt, _tokens(prompt, asked, i)) for i, prompt in enumerate(prompts(job))]
    try:
        for at in range(max(len(tokens) for _, tokens in texts)):
            for index, (prompt, tokens) in enumerate(texts):
                if prompt.endswith("cut") and at == 3:
                    raise RuntimeCrashed("the engine went away")
                if prompt.endswith("stay") and at == 3:
                    await asyncio.Event().wait()
                if at < len(tokens):
                    yield index, Grew(Piece(tokens[at], 1, _logprobs(tokens[at], asked)), TIMING)
            await asyncio.sleep(0)
        for index, (prompt, _) in enumerate(texts):
            yield index, End(generated(prompt, asked, index), TIMING)
    except (asyncio.CancelledError, GeneratorExit):
        cancelled.append(job.request_id)
        raise
