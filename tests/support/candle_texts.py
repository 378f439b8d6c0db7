"""Generators on Candle for tests: a process that stays, items, and a tiny model with its reference.

Holds no assertions.
"""

from __future__ import annotations

import asyncio
import json
import threading
import warnings
from collections.abc import Coroutine
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from shoal.bundles.definition import read
from shoal.bundles.shelf import Shelf
from shoal.ipc.client import RuntimeConnection
from shoal.ipc.messages import RunItem
from shoal.wire.envelope import Params
from shoal.wire.generation import ChatMessage, Generated, Generation, Piece
from tests.support.bundle_builds import started
from tests.support.lazy import Lazy

peft = Lazy("peft")
torch = Lazy("torch")
transformers = Lazy("transformers")

# The reference does not begin a conversation with the token that begins a bare prompt.
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
WIDTH = 64


class Held:
    """A process in the bundle `candle` and the loop that its connection lives in."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.connection: RuntimeConnection
        self.pid = 0

    def run(self, main: Coroutine[Any, Any, Any], timeout_s: float = 60.0) -> Any:
        return asyncio.run_coroutine_threadsafe(main, self._loop).result(timeout_s)

    def all(self, key: str, *items: RunItem) -> list[Generated]:
        """What becomes of items that grow together."""

        async def together():
            return await asyncio.gather(*(self.connection.generate(key, one) for one in items))

        return self.run(together(), 110)

    def pieces(self, key: str, item: RunItem) -> tuple[list[Piece], Generated]:
        """The pieces of one item, and its whole."""
        pieces: list[Piece] = []
        whole = self.run(self.connection.generate(key, item, pieces.append))
        return pieces, whole


@contextmanager
def held(cache: Path):
    """A process that stays for several tests, in the bundle that is built in `cache`."""
    shelf = Shelf(cache / "bundles", read())
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    process = Held(loop)
    ready, leave = threading.Event(), asyncio.Event()

    async def live():
        async with started(shelf, shelf.named("candle"), "candle") as (runtime, connection):
            process.connection, process.pid = connection, runtime.pid
            ready.set()
            await leave.wait()

    living = asyncio.run_coroutine_threadsafe(live(), loop)
    living.add_done_callback(lambda _: ready.set())
    try:
        ready.wait(110)
        if living.done():
            living.result()
        yield process
        loop.call_soon_threadsafe(leave.set)
        living.result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def text(prompt: str, *, name: str = "i", adapter: str = "", **how: Any) -> RunItem:
    """An item that continues a bare prompt, greedily unless told otherwise."""
    params = Params(generation=Generation(**({"temperature": 0.0} | how)))
    return RunItem(name, "generate", [1], texts=[prompt], params=params, adapter=adapter)


def chat(*turns: str, **how: Any) -> RunItem:
    """An item that continues a conversation of the user with the assistant."""
    params = Params(generation=Generation(**({"temperature": 0.0} | how)))
    roles = ("user", "assistant")
    said = [ChatMessage(roles[at % 2], content) for at, content in enumerate(turns)]
    return RunItem("i", "generate", [1], chat=said, params=params)


class Tiny:
    """A Llama of random weights in float32 that reads letters, and never ends by itself."""

    def __init__(self, folder: Path, *, width: int = WIDTH) -> None:
        self.folder = folder
        plain = _letters()
        ends = {"bos_token": "<s>", "eos_token": "</s>"}
        self.tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=plain, chat_template=TEMPLATE, **ends
        )
        self._config = transformers.LlamaConfig(
            vocab_size=plain.get_vocab_size(),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            bos_token_id=0,
            eos_token_id=1,
            initializer_range=0.3,
        )
        self.network().save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def network(self) -> transformers.LlamaForCausalLM:
        torch.manual_seed(0)
        network = transformers.LlamaForCausalLM(self._config).eval()
        with torch.no_grad():
            network.lm_head.weight[:2] = 0.0
        return network

    def adapter(self, folder: Path, seed: int, **fields: Any) -> torch.nn.Module:
        """An adapter of random weights, written to `folder`; the network with it."""
        modules = ["q_proj", "v_proj", "down_proj"]
        config = peft.LoraConfig(
            r=4, lora_alpha=16, target_modules=modules, task_type="CAUSAL_LM", **fields
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers in an old way
            network = peft.get_peft_model(self.network(), config)
        torch.manual_seed(seed)
        for name, values in network.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(values, std=0.3)
        network.save_pretrained(folder)
        return network.eval()

    def greedy(self, network: torch.nn.Module, ids: list[int], most: int) -> str:
        """What the reference continues a prompt with."""
        with torch.inference_mode():
            found = network.generate(
                input_ids=torch.tensor([ids]), max_new_tokens=most, do_sample=False, pad_token_id=1
            )
        return self.tokenizer.decode(found[0, len(ids) :])


def _letters() -> Tokenizer:
    """A token for each character of ASCII."""
    letters = [*map(chr, range(0x21, 0x7F)), "\u0120", "\u010a"]  # ..., space, end of line
    vocabulary = {token: at for at, token in enumerate(["<s>", "</s>", *letters])}
    plain = Tokenizer(models.BPE(vocabulary, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(["<s>", "</s>"])
    plain.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return plain


def without_template(folder: Path, source: Path) -> Path:
    """A copy of a model's folder that has no chat template, and does not name its class."""
    folder.mkdir()
    for path in source.iterdir():
        if path.name == "tokenizer_config.json":
            config = json.loads(path.read_text())
            config.pop("chat_template", None)
            (folder / path.name).write_text(json.dumps(config))
        elif path.name == "config.json":  # as of a folder that was made from a GGUF file
            config = json.loads(path.read_text())
            config.pop("architectures")
            (folder / path.name).write_text(json.dumps(config))
        elif path.name != "chat_template.jinja":
            (folder / path.name).symlink_to(path)
    return folder


def words_only(path: Path) -> None:
    """Writes a tokenizer of as many tokens as the tiny model's, each a word, in its place."""
    size = Tokenizer.from_file(str(path)).get_vocab_size()
    words = ["<s>", "</s>", "<unk>", *(f"w{at}" for at in range(size - 3))]
    whole = models.WordLevel({word: at for at, word in enumerate(words)}, words[2])
    plain = Tokenizer(whole)
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(["<s>", "</s>"])
    path.unlink()
    plain.save(str(path))
