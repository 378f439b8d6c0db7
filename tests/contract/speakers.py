"""What each runtime that generates is checked with: a model, prompts, and one that fails.

Owns the prompts and the references. Makes no call and holds no claim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.catalog.schema import Entry
from shoal.ipc.messages import RunItem
from shoal.wire.generation import ChatMessage


@dataclass(frozen=True, slots=True)
class Speaker:
    """What one runtime that generates is checked with.

    prompts: of unlike lengths; each is continued for `tokens` tokens at least. poison: an item that
    the runtime itself has to refuse. chat: a conversation, and the prompt that the model's template
    makes of it. weights: the file whose second half goes missing. reference: what the makers' own
    code says to `prompts`, with no chance, in `tokens` tokens.
    """

    runtime: str
    entry: Entry
    prompts: Sequence[str]
    poison: RunItem
    chat: tuple[list[ChatMessage], str]
    tokens: int = 16
    weights: str = ""
    reference: Callable[[], list[str]] | None = None
    schema: str = field(
        default='{"type":"object","properties":{"city":{"type":"string","maxLength":12}},'
        '"required":["city"],"additionalProperties":false}'
    )


def speaker(runtime: str) -> Speaker:
    """What a runtime is checked with. Skips where a package with weights is missing."""
    return {"null": _null}[runtime]()


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
