"""The texts that are asked of an SGLang server when it is recorded, and when it is replayed."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.ipc.messages import RunItem
from shoal.wire.envelope import Params
from shoal.wire.generation import ChatMessage, Generation

KEY = "tiny@1"
ADAPTER = "tiny@words@1"
STUCK = "tiny@stuck@1"  # the replayed server does not unload it
OPTIONS = {"slots": 2, "kv_tokens": 1024, "max_adapters": 2, "adapter_rank": 8}


@dataclass(frozen=True)
class Case:
    """A text. stop_after: so many pieces end it early. dies_after: the replayed server, too."""

    prompt: str = "shoal"
    how: dict[str, object] = field(default_factory=dict)
    adapter: str = ""
    chat: bool = False
    stop_after: int = 0
    dies_after: int = 0


CASES = {
    "plain": Case(how={"max_tokens": 8}),
    "stop": Case(how={"max_tokens": 8, "stop": ["EBQ"]}),
    "chat": Case("hello", {"max_tokens": 4}, chat=True),
    "likely": Case(how={"max_tokens": 3, "logprobs": 2}),
    "adapted": Case(how={"max_tokens": 8}, adapter=ADAPTER),
    "schema": Case(how={"max_tokens": 40, "schema": '{"type": "integer"}'}),
    "whale": Case(how={"schema": '{"type": "whale"}'}),
    "cold": Case(how={"temperature": -1.0}),
    "long": Case("long", {}, stop_after=3),
    "dies": Case("dies", {"max_tokens": 6}, dies_after=3),
}

# What no recording has: streams of a server that is at fault, by the names of the texts.
WRITTEN = {
    "faulty-numbers": 'data: {"text": "a", "meta_info": {"completion_tokens": 1, '
    '"output_token_logprobs": [[-1.0, 5, "a"], [-1.0, 6, "b"]], "output_top_logprobs": [null]}}'
    "\n\n",
    "faulty-type": 'data: {"text": 5}\n\n',
    "faulty-end": 'data: {"text": "a", "meta_info": {"completion_tokens": 1}}\n\n',
    "faulty-code": 'data: {"error": {"message": "no room", "code": 503}}\n\n',
}
CASES |= {name: Case(how={"logprobs": 1}) for name in WRITTEN}


def case(name: str, **more: object) -> RunItem:
    """The item of a case."""
    found = CASES[name]
    how = Generation(**({"temperature": 0.0, "stream": True} | found.how | more))  # type: ignore[arg-type]
    said = (
        {"chat": [ChatMessage("user", found.prompt)]} if found.chat else {"texts": [found.prompt]}
    )
    return RunItem(
        name, "generate", [1], params=Params(generation=how), adapter=found.adapter, **said
    )
