"""Texts that grow all the time while something else is measured.

They are asked for and read in a process of their own, so that reading them does not delay the calls
that are measured. Owns that process and counting tokens. A text that is refused, that fails, or
that never grows ends the benchmark: nothing was measured beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import count
from multiprocessing.connection import Connection

import httpx
import uvloop

TOKENS = 48
FIRST_S = 60.0


@dataclass(slots=True)
class Grown:
    """What texts grew by, known at the end."""

    tokens_per_s: float = 0.0


@contextlib.contextmanager
def growing(url: str, models: Sequence[str]) -> Iterator[Grown]:
    """One text after another grows on each of `models`, from the first token of each on.

    Raises `SystemExit` where one fails, and where none has grown until the end.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_grow, args=(url, list(models), theirs), daemon=True)
    process.start()
    theirs.close()
    grown = Grown()
    try:
        _heard(ours)  # texts grow on all
        begun_s = time.monotonic()
        yield grown
        with contextlib.suppress(BrokenPipeError):  # they may have failed: then they said so
            ours.send("end")
        grown.tokens_per_s = _heard(ours) / (time.monotonic() - begun_s)
        if not grown.tokens_per_s:
            raise SystemExit("no text has grown beside what was measured")
    finally:
        ours.close()
        process.terminate()
        process.join()


def _heard(pipe: Connection) -> int:
    """A number from the process of the texts. Raises `SystemExit` with its words, or at its end."""
    try:
        said = pipe.recv()
    except EOFError:
        said = "its process has ended"
    if not isinstance(said, int):
        raise SystemExit(f"no text grows beside what is measured: {said}")
    return said


def _grow(url: str, models: Sequence[str], pipe: Connection) -> None:
    """In a process of its own: keeps texts growing until it is told to end."""
    try:
        said: int | str = uvloop.run(_keep_growing(url, models, pipe))
    except* (httpx.HTTPError, RuntimeError, TimeoutError) as errors:
        said = "; ".join(repr(error) for error in errors.exceptions)
    with contextlib.suppress(BrokenPipeError):
        pipe.send(said)


async def _keep_growing(url: str, models: Sequence[str], pipe: Connection) -> int:
    """How much texts grew by after the first of each had begun, until the other end says so.

    Raises a group of what goes wrong.
    """
    grown, prompts = 0, (f"Number {n}: describe a harbour at dawn." for n in count())
    begun, told = [asyncio.Event() for _ in models], asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), told.set)

    async def follow(client: httpx.AsyncClient, model: str, first: asyncio.Event) -> None:
        nonlocal grown
        while True:
            async for _ in _pieces(client, url, model, next(prompts)):
                first.set()
                grown += 1  # a piece is a token, mostly

    async with httpx.AsyncClient(timeout=FIRST_S) as client, asyncio.TaskGroup() as group:
        follows = [
            group.create_task(follow(client, model, first))
            for model, first in zip(models, begun, strict=True)
        ]
        async with asyncio.timeout(FIRST_S):
            await asyncio.gather(*(first.wait() for first in begun))
        before = grown
        pipe.send(0)
        await told.wait()
        grown -= before
        for task in follows:
            task.cancel()
    return grown


async def _pieces(
    client: httpx.AsyncClient, url: str, model: str, prompt: str
) -> AsyncIterator[str]:
    """What one text grows by. Raises `RuntimeError` where it is refused or fails."""
    body = {"model": model, "inputs": prompt, "max_tokens": TOKENS, "stream": True}
    async with client.stream("POST", f"{url}/v1/generate", json=body) as answer:
        if answer.status_code != HTTPStatus.OK:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()[:300]}")
        async for line in answer.aiter_lines():
            event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            if "text" in event:
                yield event["text"]
