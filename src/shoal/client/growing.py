"""A text that is read as it grows, from a connection that is closed when it is left.

Owns the connection: closing it early tells the server to stop the text. Does not own the events
(`texts`), or the request (`core`) and its retries: a text that has begun is not asked for again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Self

import httpx

from shoal.client.exchange import Lost, lost_error
from shoal.client.texts import Generated, Reading
from shoal.errors import ShoalError


class _Growing:
    """What both forms of a growing text share."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._reading = Reading()

    @property
    def generated(self) -> Generated:
        """The whole text with its numbers, once all its parts were read."""
        return self._reading.generated


class Growing(_Growing):
    """A text as it grows: an iterator over its parts; `generated` has the whole afterwards.

    Leave a `with` block, or call `close`, to stop it early.
    """

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(response)
        self._parts = self._read()

    def _read(self) -> Iterator[str]:
        try:
            for data in self._response.iter_raw():
                yield from self._reading.feed(data)
            self._reading.end()
        except httpx.TransportError as error:
            raise _lost(error) from error
        finally:
            self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        return next(self._parts)

    def close(self) -> None:
        """Ends it; the server stops a text that has not ended."""
        self._response.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncGrowing(_Growing):
    """As `Growing`, with `async for` and `async with`."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(response)
        self._parts = self._read()

    async def _read(self) -> AsyncIterator[str]:
        try:
            async for data in self._response.aiter_raw():
                for part in self._reading.feed(data):
                    yield part
            self._reading.end()
        except httpx.TransportError as error:
            raise _lost(error) from error
        finally:
            await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        return await anext(self._parts)

    async def close(self) -> None:
        """Ends it; the server stops a text that has not ended."""
        await self._response.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _lost(error: httpx.TransportError) -> ShoalError:
    late = isinstance(error, httpx.TimeoutException)
    return lost_error(Lost(f"{type(error).__name__}: {error}", timed_out=late))
