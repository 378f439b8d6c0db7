"""A small Llama of random weights, which says letters: what makers' own code says with it, too.

Owns making it in a folder, and running it by transformers and PEFT. Holds no claim.
"""

from __future__ import annotations

import string
import warnings
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shoal.catalog.schema import Entry
from tests.support.lazy import Lazy

torch = Lazy("torch")
transformers = Lazy("transformers")

WIDTH, LAYERS, CONTEXT = 64, 2, 1024
_SPECIAL = ("<unk>", "<s>", "</s>")
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} says {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant says {% endif %}"
)


def small_llama(folder: Path, runtime: str) -> Entry:
    """Makes one, whose tokens are letters, so that every piece is a text of its own."""
    letters = [*string.ascii_letters, *string.digits, "Ġ"]
    vocabulary = {token: at for at, token in enumerate((*_SPECIAL, *letters))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **dict(zip(("unk_token", "bos_token", "eos_token"), _SPECIAL, strict=True)),
    )
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return Entry(
        id="small-llama",
        tasks=["generate"],
        source=folder.as_uri(),
        runtime=runtime,
        max_tokens=CONTEXT,
        options={"slots": 4},
    )


def shapes() -> dict[str, tuple[int, int]]:
    """What goes in and comes out of the layers that adapters change."""
    found = {}
    for at in range(LAYERS):
        layer = f"model.layers.{at}"
        found[f"{layer}.self_attn.q_proj"] = (WIDTH, WIDTH)
        found[f"{layer}.self_attn.v_proj"] = (WIDTH, WIDTH // 2)
        found[f"{layer}.mlp.down_proj"] = (2 * WIDTH, WIDTH)
    return found


def continued(
    folder: Path, prompts: Sequence[str], tokens: int, adapter: Path | None = None
) -> list[str]:
    """What transformers says to each prompt without chance, with an adapter through PEFT."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT reads a name that will go
            model = PeftModel.from_pretrained(model, adapter)
    found = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            made = model.eval().generate(
                **ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0
            )
        found.append(
            tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        )
    return found
