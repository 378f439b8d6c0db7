"""What `shoal lora add` looks at before an adapter is written down."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from shoal.catalog.schema import Adapter, Entry
from shoal.catalog.snapshot import Snapshot
from shoal.cli.lora import Wish, proposal
from shoal.errors import CatalogError, ModelUnavailable, WeightsMissing
from tests.support.lora import MODULE, WIDTH, write_adapter

PLAIN = {"id": "base", "tasks": ["encode"], "outputs": {"dense": {"dim": WIDTH}}}


def anything(entry, runtime):
    """A machine that has every runtime."""
    del entry, runtime


def base(folder: Path, *, stored: str = f"{MODULE}.weight", **more) -> Entry:
    """A model of torch with one matrix."""
    save_file({stored: np.zeros((WIDTH, WIDTH), np.float32)}, folder / "model.safetensors")
    fields = PLAIN | {"source": folder.as_uri(), "runtime": "torch"}
    return msgspec.convert(fields | more, Entry)


def proposed(entry: Entry, folder: Path, here=anything, adapters=(), name="legal"):
    wish = Wish(f"base@{name}", str(folder), None, [], None, None)
    return proposal(wish, Snapshot([entry], adapters), here)


@pytest.fixture
def adapter(tmp_path):
    return write_adapter(tmp_path / "legal")


@pytest.mark.parametrize(
    "stored", [f"{MODULE}.weight", f"bert.{MODULE}.weight", f"{MODULE.split('.', 1)[1]}.weight"]
)
def test_lora_add_finds_the_map_of_each_module(tmp_path, adapter, stored):
    """The checkpoint's name may have a prefix more, or one fewer, than PEFT's."""
    made, notes = proposed(base(tmp_path, stored=stored), adapter)
    assert (made.id, notes) == ("base@legal", [])


def test_lora_add_refuses_modules_that_the_base_has_not(tmp_path, adapter):
    """An adapter of another kind of network is told by its names, as by its shapes."""
    entry = base(tmp_path, stored="layers.0.q_proj.weight")
    with pytest.raises(ModelUnavailable, match=f"{MODULE} is no linear map of `base`"):
        proposed(entry, adapter)


@pytest.mark.parametrize(
    ("more", "runtimes"),
    [
        ({"family": "efficientnet"}, "torch"),
        ({"family": "nanochat"}, "torch"),
        ({"runtime": "onnx"}, "onnx"),
        ({"runtime": "candle", "weights": "model.gguf", "tasks": ["generate"]}, "candle"),
    ],
)
def test_lora_add_refuses_models_that_take_none(tmp_path, adapter, more, runtimes):
    """Whole families, runtimes and kinds of weights have no adapters."""
    with pytest.raises(CatalogError, match=f"runs on {runtimes}, which takes no adapters for it"):
        proposed(base(tmp_path, **more), adapter)


def test_lora_add_says_that_the_model_moves(tmp_path, adapter):
    """A model whose own runtime takes none moves to an alternative, with its first adapter."""
    entry = base(tmp_path, runtime="onnx", alternatives=[{"runtime": "torch"}])
    _, notes = proposed(entry, adapter)
    assert notes == ["base moves from onnx to torch, which takes adapters"]
    other = Adapter(name="other", base="base", source=adapter.as_uri())
    assert proposed(entry, adapter, adapters=[other])[1] == []


def test_lora_add_refuses_where_the_runtime_with_adapters_is_not_installed(tmp_path, adapter):
    """On the workers' own machine that is known, with the cure; elsewhere it is not."""
    entry = base(tmp_path, runtime="onnx", alternatives=[{"runtime": "torch"}])

    def lacking(entry, runtime):
        del entry
        return "pip install torch" if runtime == "torch" else None

    with pytest.raises(CatalogError, match="torch would take them: pip install torch"):
        proposed(entry, adapter, lacking)
    assert proposed(entry, adapter, None)[0].id == "base@legal"


def test_lora_add_refuses_a_folder_that_is_not_there(tmp_path):
    """A slip of the pen is told where the workers read the same disk, and noted elsewhere."""
    entry = base(tmp_path)
    with pytest.raises(WeightsMissing, match="no such file or folder"):
        proposed(entry, tmp_path / "leagl")
    (note,) = proposed(entry, tmp_path / "leagl", None)[1]
    assert note.startswith("its files cannot be looked at from here")


def test_lora_add_says_in_words_what_a_name_must_be(tmp_path, adapter):
    """A bad name is told without a pattern."""
    with pytest.raises(CatalogError) as refused:
        proposed(base(tmp_path), adapter, name="my adapter!")
    assert refused.value.message == (
        "name: `my adapter!` must be a letter or digit, then letters, digits, `.`, `_` and `-`; 64 "
        "characters at most"
    )
