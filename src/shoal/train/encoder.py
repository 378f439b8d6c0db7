"""A base model as the trainer runs it: texts in, vectors out, with or without an adapter.

Owns reading a catalog entry's folder with transformers, tokenising, prompts and pooling as the
entry says, and putting a fresh adapter on its linear layers with PEFT. Does not own the training
(`loop`) or the files that are written (`card`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from shoal.catalog.resolve import model_spec, tokenizer_path
from shoal.catalog.schema import Entry
from shoal.errors import ModelUnavailable, OperatorError
from shoal.train.pairs import Fault, Pair

_BATCH_TOKENS = 4096  # of a pass without gradients
# What pools for tasks that are not ours; no vector that is served depends on it.
_UNUSED = "pooler"


@dataclass(frozen=True, slots=True)
class Ids:
    """A pair as token ids, prompts and special tokens included."""

    anchor: list[int]
    positive: list[int]
    negatives: tuple[list[int], ...] = ()


class Encoder:
    """A network and its tokenizer; vectors are float32 [n, d] of length 1.

    network: of transformers, in float32, perhaps with an adapter around it.
    """

    def __init__(self, entry: Entry, folder: Path, network: Any, tokenizer: Tokenizer) -> None:
        self.entry = entry
        self.folder = folder
        self.network = network
        self._tokenizer = tokenizer

    def ids(self, pair: Pair, *, truncate: bool) -> Ids | Fault:
        """A pair's ids, or which of its texts is longer than the model takes."""
        texts = [_prompted(self.entry, "query", pair.anchor)]
        texts += [_prompted(self.entry, "document", text) for text in pair.texts[1:]]
        made = []
        for text in texts:
            found = self._ids(text, truncate=truncate)
            if len(found) > self.entry.max_tokens:
                return Fault(
                    pair.line,
                    f"a text of {len(found)} tokens, and {self.entry.id} takes "
                    f"{self.entry.max_tokens}: shorten it, or add --truncate",
                )
            made.append(found)
        return Ids(made[0], made[1], tuple(made[2:]))

    def _ids(self, text: str, *, truncate: bool) -> list[int]:
        if truncate:
            self._tokenizer.enable_truncation(self.entry.max_tokens)
        else:
            self._tokenizer.no_truncation()
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def encode(self, texts: Sequence[str]) -> Any:
        """The vectors of texts without a prompt, cut to the model's length; no gradients."""
        return self.measured([self._ids(text, truncate=True) for text in texts])

    def measured(self, sequences: Sequence[Sequence[int]]) -> Any:
        """The vectors of sequences, without gradients or dropout, in passes of like lengths."""
        import torch

        self.network.eval()
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
        made: dict[int, Any] = {}
        with torch.inference_mode():
            while order:
                longest = len(sequences[order[-1]])
                count = max(1, _BATCH_TOKENS // max(longest, 1))
                chosen, order = order[-count:], order[:-count]
                vectors = self.vectors([sequences[index] for index in chosen])
                made |= dict(zip(chosen, vectors, strict=True))
        return torch.stack([made[index] for index in range(len(sequences))])

    def vectors(self, sequences: Sequence[Sequence[int]]) -> Any:
        """The vectors of sequences in one padded pass, with gradients where they are on."""
        import torch

        longest = max(len(each) for each in sequences)
        ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
        mask = torch.zeros(len(sequences), longest, dtype=torch.int64)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, : len(sequence)] = 1
        states = self.network(input_ids=ids, attention_mask=mask).last_hidden_state
        return torch.nn.functional.normalize(_pooled(states, mask, self.entry.pooling), dim=-1)

    def adapted(self, rank: int, alpha: int) -> Any:
        """Puts a fresh adapter, which changes nothing yet, around the network; its weights.

        The weights are drawn from torch's own generator.
        """
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            target_modules=linear_layers(self.network),
        )
        with warnings.catch_warnings():
            # PEFT asks the network about names that its library is to drop.
            warnings.simplefilter("ignore", FutureWarning)
            self.network = get_peft_model(self.network, config)
        # Instead of a folder of this machine.
        self.network.peft_config["default"].base_model_name_or_path = self.entry.id
        return [weights for weights in self.network.parameters() if weights.requires_grad]


def open_encoder(entry: Entry, cache_dir: Path, *, threads: int) -> Encoder:
    """The entry's model, computing with so many threads.

    Raises `OperatorError` where it is no embedder that can be trained, and `ModelUnavailable` for
    files that are not there or not what they should be.
    """
    why_not = _why_not(entry)
    if why_not:
        raise OperatorError(f"`{entry.id}` cannot be trained: {why_not}")
    try:
        import peft  # noqa: F401 it is wanted later, and said to be missing now
        import torch
        from transformers import AutoModel
        from transformers.utils import logging
    except ImportError as error:
        raise OperatorError(
            f"{error}; what training needs comes with the extras torch and train: in Shoal's "
            "folder `make install EXTRAS=\"torch train\"`, or `pip install -e '.[torch,train]'`"
        ) from error
    folder = Path(model_spec(entry, cache_dir).path)
    if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
        raise OperatorError(
            f"`{entry.id}` cannot be trained: {folder} has no config.json with safetensors; "
            "train on the entry that an exported model was made of"
        )
    torch.set_num_threads(threads)
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        network = AutoModel.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, dtype="float32"
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelUnavailable(f"transformers cannot read {folder}: {error}") from error
    tokenizer = Tokenizer.from_file(str(tokenizer_path(entry, cache_dir)))
    tokenizer.no_padding()
    return Encoder(entry, folder, network, tokenizer)


def linear_layers(network: Any) -> list[str]:
    """The linear layers that an adapter is for, each kind once, by the last parts of its name."""
    from torch import nn

    names = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    kinds = {".".join(name.split(".")[-2:]) for name in names if _UNUSED not in name}
    return sorted(kinds)


def _why_not(entry: Entry) -> str | None:
    if "encode" not in entry.tasks or "dense" not in entry.outputs:
        return "it gives no dense vectors"
    if entry.pooling == "none":
        return "its pooling is inside its graph"
    if entry.inputs != ["text"]:
        return "it does not read texts"
    return None


def _prompted(entry: Entry, name: str, text: str) -> str:
    """As `score` puts a query beside documents."""
    return entry.prompts.get(name, "") + text


def _pooled(states: Any, mask: Any, kind: str) -> Any:
    """[n, longest, d] to [n, d], as a runtime pools."""
    if kind == "cls":
        return states[:, 0]
    if kind == "last":
        return states[range(len(states)), mask.sum(1) - 1]
    weights = mask.unsqueeze(-1).to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1)
