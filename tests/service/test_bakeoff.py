"""`shoal models bakeoff`: one model on several runtimes, each in its own process."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertModel
from typer.testing import CliRunner

from shoal.cli.bakeoff import ragged_lengths
from shoal.cli.main import app
from shoal.errors import ModelUnavailable, SettingsError
from tests.support.runtime_models import save_tiny

pytestmark = pytest.mark.slow

ENTRY = """\
id: {name}
tasks: [encode]
source: {source}
runtime: onnx
max_tokens: 40
outputs: {{{output}: {{dim: 32}}}}
"""


@pytest.fixture(scope="module")
def catalog(tmp_path_factory):
    """A catalog with a small random BERT, as an embedder and as a sparse encoder."""
    folder = tmp_path_factory.mktemp("catalog")
    weights = save_tiny(BertModel, folder / "weights")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(120)}, unk_token="w1"))  # noqa: S106
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(weights / "tokenizer.json"))
    for name, output in (("tiny", "dense"), ("spare", "sparse")):
        text = ENTRY.format(name=name, source=weights.as_uri(), output=output)
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.fixture(scope="module")
def bakeoff(catalog, tmp_path_factory):
    """Runs the command in a data folder of its own."""
    data_dir = tmp_path_factory.mktemp("data")

    def invoke(*words):
        every = ["--catalog", str(catalog), "--data-dir", str(data_dir), "--seconds", "0.02"]
        return CliRunner().invoke(app, ["models", "bakeoff", *words, *every])

    return invoke


def test_bakeoff_measures_each_runtime_and_compares_their_vectors(bakeoff):
    """In the order that was asked for; one that cannot load the model says why, and has no numbers.

    The same network on two runtimes gives the same vectors, so the least cosine is one.
    """
    done = bakeoff("tiny", "--runtimes", "torch,spacy,onnx", "--json")
    assert done.exit_code == 0, done.output
    torch, spacy, onnx = json.loads(done.stdout)
    assert [row["runtime"] for row in (torch, spacy, onnx)] == ["torch", "spacy", "onnx"]
    assert "no spaCy pipeline" in spacy["why_not"]
    assert spacy["found"] is None
    for row in (torch, onnx):
        assert row["why_not"] is None
        assert row["found"]["cosine"] >= 0.99999
        assert row["found"]["uniform_tokens_per_s"] > 0
        assert row["found"]["ragged_tokens_per_s"] > 0
        assert 0 < row["found"]["model_bytes"] < row["found"]["process_bytes"]


def test_bakeoff_prints_a_table_and_fails_where_nothing_runs(bakeoff):
    """A row for the runtime, the words of another under it; exit code 1 without a single row."""
    done = bakeoff("tiny", "--runtimes", "onnx,whisper")
    assert done.exit_code == 0, done.output
    assert [line.split()[0] for line in done.stdout.splitlines()[:2]] == ["RUNTIME", "onnx"]
    assert "whisper: tiny@1" in done.stdout
    assert bakeoff("tiny", "--runtimes", "whisper").exit_code == 1


def test_bakeoff_refuses_what_it_cannot_compare(bakeoff):
    """A runtime that nothing has, with a near name; a model without dense vectors."""
    unknown = bakeoff("tiny", "--runtimes", "tourch").exception
    assert isinstance(unknown, SettingsError)
    assert "`torch`" in unknown.message
    assert isinstance(bakeoff("spare").exception, ModelUnavailable)


def test_bakeoff_lengths_are_ragged_and_within_the_model():
    """Short and long ones, none longer than the model takes, and the same each time."""
    lengths = ragged_lengths(100)
    assert max(lengths) <= 100
    assert max(lengths) > 4 * min(lengths)
    assert lengths == ragged_lengths(100)
