"""What the streams in OpenAI's shape have in common: options, the frame of a chunk, the last one.

Owns the options, and the id, the date and the count of tokens of a stream. Does not own what a
chunk says of a text (`chat`, `completions`) or how it is sent (`stream`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from shoal.clock import wall
from shoal.errors import InvalidRequest
from shoal.gateway.generation import GenerationUsage, Unused, usage_of
from shoal.gateway.jobs import Job
from shoal.wire.generation import Generated


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """include_usage: one more event before the end, with the numbers of tokens."""

    include_usage: bool | None = None
    include_obfuscation: Unused = None


def check_options(options: StreamOptions | None, *, stream: bool) -> None:
    """Raises `InvalidRequest` for options of a stream that is none."""
    if options is not None and not stream:
        raise InvalidRequest("`stream_options` needs `stream` to be true", param="stream_options")


class _Chunk(Protocol):
    usage: GenerationUsage | UnsetType | None


Chunk = TypeVar("Chunk", bound=_Chunk)
Choice = TypeVar("Choice")


class OpenAITelling(Generic[Chunk, Choice]):
    """A stream in OpenAI's chunks, each made by `shape`; a subclass says what is in them."""

    done = b"data: [DONE]\n\n"

    def __init__(
        self, shape: Callable[..., Chunk], name: str, job: Job, options: StreamOptions | None
    ) -> None:
        self._shape = shape
        self._id = name
        self._job = job
        self._usage = options is not None and bool(options.include_usage)
        self._created = int(wall())

    def chunk(self, choices: Sequence[Choice]) -> Chunk:
        """A chunk of some choices."""
        return self._shape(
            id=self._id,
            created=self._created,
            model=self._job.model,
            choices=list(choices),
            usage=None if self._usage else UNSET,
        )

    def last(self, texts: Sequence[Generated]) -> Sequence[Chunk]:
        """The numbers of tokens, where they were asked for."""
        if not self._usage:
            return []
        chunk = self.chunk([])
        chunk.usage = usage_of(self._job, texts)
        return [chunk]
