"""What is written: the adapter in PEFT's form, and a card that says how it came to be.

Owns the folder and the card. Does not own the training, or how an adapter is registered.
"""

from __future__ import annotations

import hashlib
import shutil
import stat
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from tempfile import TemporaryDirectory

import msgspec

from shoal import __version__
from shoal.errors import OperatorError
from shoal.train.encoder import Encoder
from shoal.train.loop import End, Plan, Run
from shoal.train.measures import Measures

CARD = "card.json"
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_BASE_FILES = ("*.safetensors", "config.json", "tokenizer.json")


class Card(msgspec.Struct, frozen=True):
    """How an adapter came to be. Digests are SHA-256, by file; times are seconds.

    The step that is kept was chosen by the held-out pairs, so `after` is a little flattered.
    """

    base: str
    base_revision: str
    base_digests: dict[str, str]
    digests: dict[str, str]
    pairs_digest: str
    trained_pairs: int
    before: Measures
    after: Measures
    kept_step: int
    steps: int
    end: End
    rank: int
    alpha: int
    plan: Plan
    trained_s: float
    price_per_hour: float | None
    cost: float | None
    threads: int
    versions: dict[str, str]


def refuse_full(folder: Path) -> None:
    """Raises `OperatorError` where there is something already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OperatorError(f"{folder} is there already; name a new folder with --out")


def write(
    folder: Path,
    encoder: Encoder,
    pairs: Path,
    plan: Plan,
    run: Run,
    *,
    trained_pairs: int,
    price_per_hour: float | None,
) -> Card:
    """Writes the adapter of the encoder's network, and the card, all of it or nothing."""
    if run.best is None:
        raise OperatorError("no state was measured, so there is none to be written")
    import torch

    config = encoder.network.peft_config["default"]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as made:
        # The hub would be asked whether the base's vocabulary has grown.
        encoder.network.save_pretrained(made, save_embedding_layers=False)
        settle(Path(made))
        card = Card(
            base=encoder.entry.id,
            base_revision=encoder.entry.revision,
            base_digests=digests(
                path for kind in _BASE_FILES for path in encoder.folder.glob(kind)
            ),
            digests=digests([Path(made) / CONFIG, Path(made) / WEIGHTS]),
            pairs_digest=digests([pairs])[pairs.name],
            trained_pairs=trained_pairs,
            before=run.before,
            after=run.best.measures,
            kept_step=run.best.step.number,
            steps=run.best.step.of,
            end=run.end,
            rank=config.r,
            alpha=config.lora_alpha,
            plan=plan,
            trained_s=run.trained_s,
            price_per_hour=price_per_hour,
            cost=cost(run.trained_s, price_per_hour),
            threads=torch.get_num_threads(),
            versions={"shoal": __version__, "python": python_version()}
            | {name: version(name) for name in ("torch", "transformers", "peft")},
        )
        text = msgspec.json.format(msgspec.json.encode(card), indent=2)
        (Path(made) / CARD).write_bytes(text + b"\n")
        # What PEFT writes for people speaks of a hub.
        (Path(made) / "README.md").unlink(missing_ok=True)
        folder.mkdir(exist_ok=True)
        for path in Path(made).iterdir():
            shutil.move(path, folder / path.name)
    return card


def settle(folder: Path) -> None:
    """Orders the names in the folder's `adapter_config.json`, and lets others read the weights.

    PEFT writes a set, whose order differs from process to process: equal adapters would have
    unequal files. safetensors writes a temporary file and leaves it with that file's mode; the
    config beside it has the one that new files have here.
    """
    path = folder / CONFIG
    config = msgspec.json.decode(path.read_bytes())
    config["target_modules"] = sorted(config["target_modules"])
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")
    (folder / WEIGHTS).chmod(stat.S_IMODE(path.stat().st_mode))


def cost(seconds: float, price_per_hour: float | None) -> float | None:
    """What so many seconds cost."""
    return None if price_per_hour is None else seconds / 3600 * price_per_hour


def digests(paths: Iterable[Path]) -> dict[str, str]:
    """The SHA-256 of files, by name."""
    found = {}
    for path in sorted(paths):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
