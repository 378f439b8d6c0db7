"""`shoal models bakeoff`: one model on several runtimes, each in its own process."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from shoal.bundles.shelf import shelf_of
from shoal.catalog.load import load
from shoal.catalog.schema import Alternative, Entry
from shoal.catalog.variants import on_runtime
from shoal.cli.bakeoff import STARTS, Setup, _measured
from shoal.cli.bakeoff import bakeoff as measure
from shoal.cli.bakeoff_encode import ragged_lengths
from shoal.cli.bakeoff_generate import STREAMS, same_share
from shoal.cli.bundles import settings_of
from shoal.cli.main import app
from shoal.errors import ModelUnavailable, SettingsError
from shoal.runtimes.null_texts import SLOTS
from shoal.worker.costs import CostBook
from tests.support.lazy import Lazy
from tests.support.runtime_models import save_tiny

transformers = Lazy("transformers")

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
    weights = save_tiny(transformers.BertModel, folder / "weights")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(120)}, unk_token="w1"))  # noqa: S106
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(weights / "tokenizer.json"))
    for name, output in (("tiny", "dense"), ("spare", "sparse")):
        text = ENTRY.format(name=name, source=weights.as_uri(), output=output)
        (folder / f"{name}.yaml").write_text(text)
    talker = 'id: talker\ntasks: [generate]\nsource: file:///\nruntime: "null"\noptions: {}\n'
    (folder / "talker.yaml").write_text(talker.format("{token_s: 0.005}"))
    return folder


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """A data folder of its own."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def bakeoff(catalog, data_dir):
    """Runs the command."""

    def invoke(*words):
        every = ["--catalog", str(catalog), "--data-dir", str(data_dir), "--seconds", "0.02"]
        return CliRunner().invoke(app, ["models", "bakeoff", *words, *every])

    return invoke


@pytest.fixture(scope="module")
def rows(bakeoff):
    """The rows of the small encoder on two runtimes that run it and one that does not."""
    done = bakeoff("tiny", "--runtimes", "torch,spacy,onnx", "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_bakeoff_measures_each_runtime_and_compares_their_vectors(rows):
    """In the order that was asked for; one that cannot load the model says why, and has no numbers.

    The same network on two runtimes gives the same vectors, so the least cosine is one.
    """
    torch, spacy, onnx = rows
    assert [row["runtime"] for row in (torch, spacy, onnx)] == ["torch", "spacy", "onnx"]
    assert "no spaCy pipeline" in spacy["why_not"]
    assert spacy["found"] is None
    for row in (torch, onnx):
        assert row["why_not"] is None
        assert row["found"]["cosine"] >= 0.99999
        assert row["found"]["uniform_tokens_per_s"] > 0
        assert row["found"]["ragged_tokens_per_s"] > 0
        assert 0 < row["model_bytes"] < row["process_bytes"]
        assert row["starts"] == STARTS
        assert 0 < row["start_s"] < row["first_answer_s"]
        assert 0 < row["load_s"] < row["first_answer_s"]


def test_bakeoff_times_each_start_to_the_end_of_its_answer(tmp_path):
    """Each is a process of its own, and making its inputs ready, which takes 0.2 s, is no gap."""
    seen = []

    class Run:
        """Keeps which processes it saw."""

        def make_ready(self, entry, traits, cache_dir):
            time.sleep(0.2)

        async def first(self, connection):
            seen.append((await connection.hello).pid)

        async def measure(self, connection, loaded):
            return (await connection.hello).pid

    async def home():
        return None

    entry = Entry(id="cold", tasks=["encode"], source="file:///", runtime="null")
    row = asyncio.run(_measured(entry, Run(), home, Setup(1, 0.01, tmp_path)))
    assert len(set(seen)) == row.starts == STARTS
    assert row.found == seen[-1]
    assert row.first_answer_s >= max(row.start_s, row.load_s) + 0.2


@pytest.mark.usefixtures("rows")
def test_bakeoff_starts_find_nothing_derived_and_leave_nothing(data_dir):
    """What a load derives and keeps lies in a folder of that start, which goes with it."""
    assert [path.name for path in (data_dir / "cache").iterdir()] == ["costs.json"]


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


def test_bakeoff_of_a_generator_lets_texts_grow_side_by_side(bakeoff):
    """Four texts at once take about as long as one, so they have more tokens per second.

    More than the runtime has slots for wait, and give no more.
    """
    done = bakeoff("talker", "--json")
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)
    found = row["found"]
    assert (row["runtime"], found["slots"], found["same"]) == ("null", SLOTS, 1.0)
    rates = [found["tokens_per_s"][str(streams)] for streams in STREAMS]
    assert rates[1] > 2 * rates[0]
    assert rates[2] < 2 * rates[1]
    assert found["first_token_s"] > 0
    assert "SLOTS" in bakeoff("talker").stdout


def test_bakeoff_compares_texts_from_their_beginning_on():
    """A text that parts from the other in its middle is half the same."""
    assert same_share(["abcd", "abcd"], ["abcd", "abxx"]) == pytest.approx(0.75)
    assert same_share(["ab"], ["abcd"]) == pytest.approx(0.5)


@pytest.mark.usefixtures("rows")
def test_bakeoff_teaches_workers_what_batches_cost(catalog, data_dir):
    """The book of costs that a worker of the same data folder reads has both runtimes."""
    costs, guesses = (CostBook(data_dir / name, "cpux1") for name in ("cache/costs.json", "none"))
    entry = load(catalog).resolve("tiny")
    for each in (entry, on_runtime(entry, "torch")):
        assert costs.model(each).state() != guesses.model(each).state()


def test_bakeoff_lengths_are_ragged_and_within_the_model():
    """Short and long ones, none longer than the model takes, and the same each time."""
    lengths = ragged_lengths(100)
    assert max(lengths) <= 100
    assert max(lengths) > 4 * min(lengths)
    assert lengths == ragged_lengths(100)


def test_bakeoff_builds_no_bundle_unasked(tmp_path):
    """The bundle of another runtime than the entry's own is named with its command, not built."""
    entry = Entry(
        id="talker",
        tasks=["generate"],
        source="file:///",
        runtime="null",
        options={"tokens": 4, "max_adapters": 0},
        alternatives=[Alternative("candle", options={})],
    )
    settings = settings_of(tmp_path)
    rows = measure(entry, None, shelf_of(settings), Setup(1, 0.01, settings.cache_dir))
    assert [(row.runtime, row.found is not None) for row in rows] == [
        *(("null", True), ("candle", False))
    ]
    assert "shoal bundles build candle" in rows[1].why_not
    assert not (settings.cache_dir / "bundles").exists()
