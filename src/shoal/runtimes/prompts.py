"""From an item to the text that a model continues: a conversation by its template, a bare prompt.

Templates are Jinja, rendered as transformers renders them, in a sandbox. Owns finding a model's
template and its special tokens, in its folder or in its GGUF file. Does not own tokenising (the
engine's), which adds nothing of its own: the text has all that the model is to read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from shoal.errors import InvalidRequest, ModelUnavailable
from shoal.ipc.messages import RunItem
from shoal.wire.generation import ChatMessage

_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class Prompts:
    """The prompts of one model.

    template: Jinja, None where the model has none. tokens: special tokens by the name that
    templates use. prefix: what stands before a bare prompt.
    """

    def __init__(
        self, key: str, template: str | None, tokens: Mapping[str, str], prefix: str
    ) -> None:
        self._key = key
        self._tokens = tokens
        self._prefix = prefix
        self._template = None if template is None else _compiled(key, template)

    def prompt(self, item: RunItem) -> str:
        """The whole text that is continued. Raises `InvalidRequest`."""
        if item.chat:
            return self._conversation([_turn(turn) for turn in item.chat])
        if len(item.texts) != 1:
            raise InvalidRequest(f"{self._key} continues a conversation or one text")
        text = item.texts[0]
        return text if text.startswith(self._prefix) else self._prefix + text

    def _conversation(self, turns: list[dict[str, str]]) -> str:
        from jinja2 import TemplateError

        if self._template is None:
            raise InvalidRequest(
                f"{self._key} has no chat template: send a prompt instead", param="messages"
            )
        try:
            return str(
                self._template.render(
                    messages=turns,
                    tools=None,
                    documents=None,
                    add_generation_prompt=True,
                    **self._tokens,
                )
            )
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"{self._key}: its chat template refuses this conversation: {error}",
                param="messages",
            ) from error


def _turn(message: ChatMessage) -> dict[str, str]:
    named = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": message.content, **named}


def _compiled(key: str, template: str) -> Any:
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def now(form: str) -> str:
        return datetime.now().astimezone().strftime(form)

    def as_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    rules = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    rules.filters["tojson"] = as_json
    rules.globals |= {"raise_exception": refuse, "strftime_now": now}
    try:
        return rules.from_string(template)
    except TemplateError as error:
        raise ModelUnavailable(f"{key}: its chat template cannot be read: {error}") from error


def of_folder(key: str, folder: Path) -> Prompts:
    """The prompts of a folder with `tokenizer.json`. Raises `ModelUnavailable`."""
    from tokenizers import Tokenizer

    config = _json(folder / "tokenizer_config.json")
    tokens = {name: text for name in _TOKENS if (text := _content(config.get(name)))}
    path = folder / "chat_template.jinja"
    template = path.read_text("utf-8") if path.is_file() else _default(config, folder)
    encoding = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a")
    first = next((at for at, special in enumerate(encoding.special_tokens_mask) if not special), 0)
    return Prompts(key, template, tokens, "".join(encoding.tokens[:first]))


def of_gguf(key: str, fields: Mapping[str, Any]) -> Prompts:
    """The prompts of a GGUF file, by what it says of itself."""
    texts = fields.get("tokenizer.ggml.tokens", [])
    ids = {name: fields.get(f"tokenizer.ggml.{name}_id") for name in _TOKENS}
    ids["unk_token"] = fields.get("tokenizer.ggml.unknown_token_id")
    ids["pad_token"] = fields.get("tokenizer.ggml.padding_token_id")
    tokens = {name: texts[at] for name, at in ids.items() if at is not None and at < len(texts)}
    begins = fields.get("tokenizer.ggml.add_bos_token", False)
    prefix = tokens.get("bos_token", "") if begins else ""
    return Prompts(key, fields.get("tokenizer.chat_template"), tokens, prefix)


def _default(config: Mapping[str, Any], folder: Path) -> str | None:
    """The template of a tokenizer's config; of several named ones, the default."""
    found = config.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        found = {one.get("name"): one.get("template") for one in found}.get("default")
    return found if isinstance(found, str) else None


def _content(token: Any) -> str | None:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where the file is not there. Raises `ModelUnavailable`."""
    try:
        found = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"{path} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}
