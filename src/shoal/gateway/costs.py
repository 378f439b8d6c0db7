"""What a job's inputs are expected to cost, in tokens.

Owns the estimate: made from bytes, before anything is tokenised. Does not own the cuts that follow
from it (`shoal.core.split`) or whether there is time for it (`backlog`).
"""

from __future__ import annotations

from typing import Final

from shoal.gateway.jobs import Job
from shoal.wire.generation import ChatMessage
from shoal.wire.media import cost_tokens

_SPECIAL_TOKENS = 2
# What a chat template puts around each turn.
_TURN_TOKENS = 4
# Few continuations are longer, whatever their caller allows.
EXPECTED_TOKENS: Final = 256


def costs(job: Job, bytes_per_token: float) -> tuple[list[int], int]:
    """Estimated tokens of each input, and what each costs besides (a query that all share)."""
    inputs = job.inputs
    if inputs.ids:
        return [len(ids) for ids in inputs.ids], 0
    if inputs.blobs:
        return [cost_tokens(blob, job.entry.inputs) for blob in inputs.blobs], 0
    if job.task == "generate":
        return _texts_to_come(job, bytes_per_token), 0
    read = [int(_size_bytes(text) / bytes_per_token) + _SPECIAL_TOKENS for text in inputs.texts]
    if inputs.firsts:
        firsts = [int(_size_bytes(text) / bytes_per_token) for text in inputs.firsts]
        read = [a + b for a, b in zip(read, firsts, strict=True)]
    joint = inputs.query is not None and job.entry.scorer == "joint"
    shared = int(_size_bytes(inputs.query or "") / bytes_per_token) if joint else 0
    return read, shared


def _texts_to_come(job: Job, bytes_per_token: float) -> list[int]:
    """Of each prompt what is read of it, and what may be expected to follow."""
    asked = job.params.generation
    most = None if asked is None else asked.max_tokens
    expected = EXPECTED_TOKENS if most is None else min(most, EXPECTED_TOKENS)
    prompts = [int(_size_bytes(text) / bytes_per_token) for text in job.inputs.texts]
    turns = [_chat_tokens(chat, bytes_per_token) for chat in job.inputs.chats]
    return [tokens + expected for tokens in prompts or turns]


def _chat_tokens(chat: list[ChatMessage], bytes_per_token: float) -> int:
    size_bytes = sum(_size_bytes(turn.content) for turn in chat)
    return int(size_bytes / bytes_per_token) + _TURN_TOKENS * len(chat)


def _size_bytes(text: str) -> int:
    """Bytes of UTF-8, without making them where the text is plain."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
