"""What a job's inputs are expected to cost, in tokens.

Owns the estimate: made from bytes, before anything is tokenised, and from what the texts of a model
have had until now. Does not own the cuts that follow from it (`shoal.core.split`) or whether there
is time for it (`backlog`).
"""

from __future__ import annotations

from typing import Final

from shoal.gateway.jobs import Job
from shoal.wire.generation import ChatMessage, Generated
from shoal.wire.media import cost_tokens

_SPECIAL_TOKENS = 2
# What a chat template puts around each turn.
_TURN_TOKENS = 4
# Of a continuation, before any has been seen.
EXPECTED_TOKENS: Final = 256
MAX_LEARNT: Final = 1_000
_MEMORY_TEXTS = 20


class TextLengths:
    """How many tokens the texts of each model usually have, by the model's key.

    A moving average. Of more models than `MAX_LEARNT` the one that was silent longest is forgotten.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def usual_tokens(self, model: str) -> int:
        """What a further text of a model may be expected to have."""
        seen = self._seen.get(model)
        return EXPECTED_TOKENS if seen is None else max(1, round(seen[1]))

    def learn(self, model: str, text: Generated) -> None:
        """A text is whole. One that its bound has cut short says only that it was no shorter."""
        n, mean = self._seen.pop(model, (0, float(EXPECTED_TOKENS)))
        if text.finish_reason != "length" or text.tokens > mean:
            n = min(n + 1, _MEMORY_TEXTS)
            mean += (text.tokens - mean) / n
        self._seen[model] = n, mean
        if len(self._seen) > MAX_LEARNT:
            del self._seen[next(iter(self._seen))]


def costs(job: Job, bytes_per_token: float, usual_tokens: int) -> tuple[list[int], int]:
    """Estimated tokens of each input, and what each costs besides (a query that all share).

    usual_tokens: of a continuation.
    """
    inputs = job.inputs
    if inputs.ids:
        return [len(ids) for ids in inputs.ids], 0
    if inputs.blobs:
        return [cost_tokens(blob, job.entry.inputs) for blob in inputs.blobs], 0
    if job.task == "generate":
        return _texts_to_come(job, bytes_per_token, usual_tokens), 0
    read = [int(_size_bytes(text) / bytes_per_token) + _SPECIAL_TOKENS for text in inputs.texts]
    if inputs.firsts:
        firsts = [int(_size_bytes(text) / bytes_per_token) for text in inputs.firsts]
        read = [a + b for a, b in zip(read, firsts, strict=True)]
    joint = inputs.query is not None and job.entry.scorer == "joint"
    shared = int(_size_bytes(inputs.query or "") / bytes_per_token) if joint else 0
    return read, shared


def _texts_to_come(job: Job, bytes_per_token: float, usual_tokens: int) -> list[int]:
    """Of each prompt what is read of it, and what may be expected to follow."""
    asked = job.params.generation
    most = None if asked is None else asked.max_tokens
    expected = usual_tokens if most is None else min(most, usual_tokens)
    prompts = [int(_size_bytes(text) / bytes_per_token) for text in job.inputs.texts]
    turns = [_chat_tokens(chat, bytes_per_token) for chat in job.inputs.chats]
    return [tokens + expected for tokens in prompts or turns]


def _chat_tokens(chat: list[ChatMessage], bytes_per_token: float) -> int:
    size_bytes = sum(_size_bytes(turn.content) for turn in chat)
    return int(size_bytes / bytes_per_token) + _TURN_TOKENS * len(chat)


def _size_bytes(text: str) -> int:
    """Bytes of UTF-8, without making them where the text is plain."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
