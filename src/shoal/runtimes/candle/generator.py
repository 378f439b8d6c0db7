"""Generators on Candle, through the library `mistralrs`, with LoRA adapters.

A model is a folder with safetensors, computed in float32, or a GGUF file. Options of a model:

    slots        how many texts grow at once, 16 when left out
    kv_tokens    how many tokens all of them have together, prompts included; 0: no such bound
    max_adapters how many adapters are loaded at once, 32 when left out
    unpack       `float16` or `float32`: a GGUF file's weights are brought into this form once, and
                 computed in float32; as they are, words may differ by processor

Owns the engine: what it is given, one prompt at a time, and its errors as ours. The engine's
random numbers cannot be seeded on CPUs, so a seed is refused wherever chance is at play. Does not
own prompts (`prompts`), or what becomes of a text's tokens (`growth`).
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shoal.core.adapters import MAX_RESIDENT_ADAPTERS
from shoal.errors import (
    InputTooLong,
    InvalidRequest,
    ModelUnavailable,
    OutOfMemory,
    RunFailed,
    ShoalError,
)
from shoal.ipc.messages import AdapterSpec, ModelSpec, RunItem
from shoal.runtimes.candle import unpack
from shoal.runtimes.candle.config import config_of
from shoal.runtimes.candle.gguf import read_fields
from shoal.runtimes.candle.growth import Growth
from shoal.runtimes.candle.maps import check, linear_maps
from shoal.runtimes.checkpoint import INDEX, locate
from shoal.runtimes.generating import own_sampling, whole_number
from shoal.runtimes.interface import Capacity, Emit
from shoal.runtimes.prompts import of_folder, of_gguf
from shoal.runtimes.unpacked import unpacked

log = logging.getLogger(__name__)

SLOTS = 16
MAX_ADAPTERS = 1024
_LOST = 70
_USUAL = ("model.safetensors", f"model{INDEX}")
_ALSO = ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json")
# What a folder means that names only its kind, as one has that was made from a GGUF file.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_DEFAULTS = ("temperature", "top_p", "top_k")
# What may stand behind a whole text of a schema: the engine's grammars know the end of a text by
# these names, also where the model has another, and the engine would fill the text up with them.
_ENDS = (
    "</s>",
    "<eos>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)


class TextGenerator:
    """One model. Raises `ModelUnavailable` for what it could not serve."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self.capacity = Capacity(
            whole_number(spec, "slots", SLOTS, 1), whole_number(spec, "kv_tokens", 0, 0)
        )
        weights = locate(spec, _USUAL)
        self._takes_adapters = weights.suffix != ".gguf"
        self._maps: frozenset[str] = frozenset()
        self._defaults: dict[str, Any] = {}
        with TemporaryDirectory(prefix="shoal-candle-") as folder:
            view = Path(folder)
            # The template is applied here, so that the prompt is exactly what is counted.
            (view / "identity.jinja").write_text("{{ messages[0]['content'] }}", "utf-8")
            if self._takes_adapters:
                parts = _fill(view, weights, spec)
                self.memory_bytes = sum(part.stat().st_size for part in parts)
                self._maps = linear_maps(parts)
                self._prompts = of_folder(spec.key, weights.parent)
                self._defaults = own_sampling(weights.parent, _DEFAULTS)
            else:
                self._prompts = of_gguf(spec.key, read_fields(weights))
                weights = _unpacked(spec, weights)
                self.memory_bytes = weights.stat().st_size
            self._engine = self._open(view, weights)
        most = self._engine.max_sequence_length()
        if most is not None and most < spec.max_tokens:
            raise ModelUnavailable(
                f"{spec.key}: max_tokens is {spec.max_tokens}, and the network takes {most}"
            )
        self._texts: set[Growth] = set()
        # The engine's methods bear one caller at a time. And of several prompts that it reads in
        # one step, all are lost where the network's last layer is quantised: they queue here.
        self._calling = threading.Lock()
        self._prompting = threading.Lock()
        self._ends = [end for end in _ENDS if self._count(end) == 1]

    def _open(self, view: Path, weights: Path) -> Any:
        import mistralrs

        if self._takes_adapters:
            room = whole_number(self._spec, "max_adapters", MAX_RESIDENT_ADAPTERS, 1, MAX_ADAPTERS)
            which = mistralrs.Which.Lora(
                str(view), adapters=[], max_adapters=room, dtype=mistralrs.ModelDType.F32
            )
        else:
            which = mistralrs.Which.GGUF(
                str(weights.parent), weights.name, dtype=mistralrs.ModelDType.F32
            )
        try:
            return mistralrs.Runner(
                which,
                max_seqs=self.capacity.slots,
                prefix_cache_n=0,  # nothing of a text stays once it has ended
                token_source="none",  # noqa: S106 - no hub is asked
                jinja_explicit=str(view / "identity.jinja"),
            )
        except ValueError as error:
            raise ModelUnavailable(f"{self._spec.key}: {_first_line(error)}") from error

    def start(self, item: RunItem, emit: Emit) -> None:
        """Begins a text; what is wrong with it is raised here or is its end."""
        if item.adapter and not self._takes_adapters:
            raise _none_on_gguf(item.adapter)
        prompt = self._prompts.prompt(item)
        text = Growth(item, emit)
        self._texts.add(text)
        threading.Thread(
            target=self._follow, args=(text, prompt), name=f"text {item.item}", daemon=True
        ).start()

    def _count(self, text: str) -> int:
        """Tokens of a text; the engine counts between two of its steps."""
        with self._calling:
            return len(self._engine.tokenize_text(text, False, None))

    def _request(self, text: Growth, prompt: str) -> Any:
        """What the engine is asked for. Raises `InputTooLong` or `InvalidRequest`."""
        import mistralrs

        asked, prompt_tokens = text.asked, text.prompt_tokens
        room = self._spec.max_tokens - prompt_tokens
        if room < 1:
            raise InputTooLong(
                f"the prompt has {prompt_tokens} tokens, and {self._spec.key} has a context of "
                f"{self._spec.max_tokens}"
            )
        if prompt_tokens < 1:
            raise InvalidRequest("the prompt is empty")
        own = {name: self._defaults.get(name) for name in _DEFAULTS}
        own |= {name: had for name in _DEFAULTS if (had := getattr(asked, name)) is not None}
        if asked.seed is not None and own["temperature"] != 0 and own["top_k"] != 1:
            raise InvalidRequest(
                f"{self._spec.key} cannot repeat what chance has chosen: leave `seed` out, or set "
                "`temperature` to 0",
                param="seed",
            )
        return mistralrs.ChatCompletionRequest(
            prompt,
            "default",
            stream=True,
            max_tokens=min(asked.max_tokens or room, room),
            frequency_penalty=asked.frequency_penalty or None,
            presence_penalty=asked.presence_penalty or None,
            logprobs=True,  # without them, tokens that end within a character have no chunk
            top_logprobs=asked.logprobs or 0,
            grammar=asked.schema,
            grammar_type=None if asked.schema is None else "json_schema",
            stop_seqs=None if asked.schema is None else self._ends,
            adapter=text.item.adapter or None,
            **own,
        )

    def _follow(self, text: Growth, prompt: str) -> None:
        there = False
        try:
            there = text.follow(lambda: self._begin(text, prompt))
        except Exception as error:  # task root
            log.exception("a text does not grow")
            text.fail(RunFailed(f"{type(error).__name__}: {error}"))
            there = True
        finally:  # a panic of the engine's is no `Exception`
            self._texts.discard(text)
            if not there:
                log.critical("%s: the engine is lost", self._spec.key)
                os._exit(_LOST)

    def _begin(self, text: Growth, prompt: str) -> tuple[Any, Iterator[Any]] | None:
        """The first chunk of a text, and the others; None for one that ended while it waited."""
        with self._prompting:
            if text.ended:
                return None
            # Not sooner: the engine counts nothing while it reads another's prompt.
            text.prompt_tokens = self._count(prompt)
            chunks = self._chunks(text.item, self._request(text, prompt))
            return next(chunks), chunks

    def _chunks(self, item: RunItem, request: Any) -> Iterator[Any]:
        """What the engine says; raises what is wrong with the item."""
        try:
            with self._calling:
                chunks = self._engine.send_chat_completion_request(request)
            yield from chunks
        except ValueError as error:
            raise self._fault(item, _first_line(error)) from error

    def _fault(self, item: RunItem, said: str) -> ShoalError:
        """What the engine says, by whose fault it is; what its parser does not bear is no one's."""
        if said.startswith("Invalid grammar"):
            return InvalidRequest(f"the schema cannot be met: {said}", param="schema")
        if said.startswith("Failed to parse JSON schema"):
            return InvalidRequest(f"the schema is none: {said}", param="schema")
        if said == "NoExtensionBias":
            return InvalidRequest(
                f"{self._spec.key} cannot keep to this schema: it has no tokens that continue "
                "such a text",
                param="schema",
            )
        if item.adapter and item.adapter in said:
            return ModelUnavailable(f"{item.adapter} is not loaded")
        return RunFailed(f"{self._spec.key}: {said}")

    def stop(self, item: str) -> None:
        """Ends an item early; the engine drops it at its next token."""
        for text in list(self._texts):
            if text.item.item == item:
                text.cancel()

    def close(self) -> None:
        """Ends every text."""
        for text in list(self._texts):
            text.cancel()

    def load_adapter(self, adapter: AdapterSpec) -> int:
        """Makes an adapter ready, in the place of one of the same key; its bytes.

        Raises `ModelUnavailable` or `OutOfMemory`.
        """
        import mistralrs

        if not self._takes_adapters:
            raise _none_on_gguf(adapter.key)
        check(adapter, self._maps)
        try:
            with self._calling:
                loaded = self._engine.load_lora_adapter(
                    adapter.key, adapter.path, load_inplace=True
                )
        except mistralrs.LoraAdapterError as error:
            kind = OutOfMemory if "limit_exceeded" in error.code else ModelUnavailable
            raise kind(f"{adapter.key}: {_first_line(error)}") from error
        return int(loaded.bytes)

    def unload_adapter(self, adapter: str) -> None:
        """Forgets an adapter; texts that grow with it keep it to their end."""
        import mistralrs

        try:
            with self._calling:
                self._engine.unload_lora_adapter(adapter)
        except mistralrs.LoraAdapterError as error:
            if error.code != "lora_adapter_not_found":
                raise


def _none_on_gguf(adapter: str) -> ModelUnavailable:
    return ModelUnavailable(f"{adapter}: adapters need safetensors, and its base is a GGUF file")


def _first_line(error: Exception) -> str:
    """What a library says, without its trace."""
    return str(error).partition("\n")[0]


def _unpacked(spec: ModelSpec, weights: Path) -> Path:
    """The GGUF file that the engine reads. Raises `ModelUnavailable`."""
    form = spec.options.get("unpack")
    if form is None:
        return weights
    if form not in unpack.FORMS:
        raise ModelUnavailable(
            f"{spec.key}: option unpack is {' or '.join(unpack.FORMS)}, not {form!r}"
        )
    folder = unpacked(spec.key, weights, Path(spec.cache_dir), unpack.MODULE, str(form))
    return folder / unpack.WEIGHTS


def _fill(view: Path, weights: Path, spec: ModelSpec) -> list[Path]:
    """Makes the folder that the engine reads; returns the files of the weights.

    Nothing but these files is in it: of a folder with a pickle, that is not seen. The tokenizer
    adds nothing by itself there: prompts have all that belongs to them.
    """
    folder = weights.parent
    if not (folder / "tokenizer.json").is_file():
        raise ModelUnavailable(f"{spec.key}: {folder} has no tokenizer.json")
    if weights.name.endswith(INDEX):
        parts = sorted(folder.glob("*.safetensors"))
        links = {f"model{INDEX}": weights, **{part.name: part for part in parts}}
    elif weights.suffix == ".safetensors":
        parts = [weights]
        links = {"model.safetensors": weights}
    else:
        raise ModelUnavailable(f"{spec.key}: {weights} is neither safetensors nor GGUF")
    links |= {name: folder / name for name in _ALSO if (folder / name).is_file()}
    for name, target in links.items():
        (view / name).symlink_to(target.resolve())
    config = config_of(folder)
    usual = _ARCHITECTURES.get(str(config.get("model_type")))
    if usual is not None and not config.get("architectures"):
        config["architectures"] = [usual]
    (view / "config.json").write_text(json.dumps(config), "utf-8")
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    tokenizer["post_processor"] = None
    (view / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    return parts
