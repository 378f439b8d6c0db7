"""What each runtime that generates is checked with: a model, prompts, and one that fails.

Owns the prompts and the references. Makes no call and holds no claim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from shoal.catalog.schema import Entry
from shoal.ipc.messages import RunItem
from shoal.wire.envelope import Params
from shoal.wire.generation import ChatMessage, Generation
from tests.contract.small import small_llama
from tests.contract.subjects import demo


@dataclass(frozen=True, slots=True)
class Speaker:
    """What one runtime that generates is checked with.

    prompts: of unlike lengths; each is continued for `tokens` tokens at least. poison: an item that
    the runtime itself has to refuse. chat: a conversation, and the prompt that the model's template
    makes of it. weights: the file whose second half goes missing. exact: makes a model in a folder
    of which the runtime has to say what the makers' own code says.
    """

    runtime: str
    entry: Entry
    prompts: Sequence[str]
    poison: RunItem
    chat: tuple[list[ChatMessage], str]
    tokens: int = 16
    weights: str = ""
    exact: Callable[[Path], Entry] | None = None


def speaker(runtime: str) -> Speaker:
    """What a runtime is checked with. Skips where a package with weights is missing."""
    return {
        "candle": lambda: _smollm2("candle", unpack="float16"),
        "sglang": lambda: _smollm2("sglang"),
        "null": _null,
    }[runtime]()


def _smollm2(runtime: str, **options: int | str) -> Speaker:
    """SmolLM2, of which four texts grow at once."""
    entry = demo("smollm2-135m-instruct")
    chat = [ChatMessage("system", "Be brief."), ChatMessage("user", "Who are you?")]
    rendered = "".join(f"<|im_start|>{one.role}\n{one.content}<|im_end|>\n" for one in chat)
    return Speaker(
        runtime,
        replace(entry, runtime=runtime, options={"slots": 4} | options),
        prompts=[
            "Once upon a time, there was a little fish who",
            "The capital of France is",
            "1, 2, 3, 4,",
            "Dear Sir or Madam, " + "I write to you about the shoal in the harbour. " * 6 + "It",
            "def add(a, b):",
        ],
        poison=RunItem(
            *("i", "generate", [1]),
            texts=["a"],
            params=Params(generation=Generation(schema='{"type":"nothing"}')),
        ),
        chat=(chat, f"{rendered}<|im_start|>assistant\n"),
        tokens=10,
        weights="SmolLM2-135M-Instruct.Q4_1.gguf",
        exact=lambda folder: small_llama(folder, runtime),
    )


def _null() -> Speaker:
    """Words that mean nothing, a few hundred a second."""
    prompts = [f"{'so ' * (3 * at)}say {at}" for at in range(6)]
    entry = Entry(
        id="null-words",
        tasks=["generate"],
        source="file:///",
        runtime="null",
        max_tokens=256,
        options={"poison": "poison", "mib": 16, "slots": 3, "tokens": 200, "token_s": 0.002},
    )
    chat = [ChatMessage("system", "Be brief."), ChatMessage("user", "Who are you?")]
    return Speaker(
        "null",
        entry,
        prompts,
        poison=RunItem("i", "generate", [1], texts=["poison"]),
        chat=(chat, "system: Be brief.\nuser: Who are you?"),
    )
