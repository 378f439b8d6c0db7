"""`shoal lora train`: what it learns, what it writes, and how it ends.

What is learnt is which docstring of Python's standard library belongs to which name. Runs of the
command are `long`: each imports torch and PEFT, which takes longer than the rest of a test.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec import structs
from tokenizers import Tokenizer, models, pre_tokenizers

from shoal.catalog.load import load
from shoal.catalog.schema import Entry, Output
from shoal.errors import OperatorError
from shoal.ipc.messages import AdapterSpec
from shoal.train.card import CARD, Card, digests, write
from shoal.train.encoder import open_encoder
from shoal.train.loop import Measured, Plan, Step, Training
from shoal.train.measures import measure
from shoal.train.pairs import Pair, Split, read, split
from shoal.wire.envelope import Inputs
from tests.support.lazy import Lazy
from tests.support.pace import limit_s
from tests.support.prepared import Prepared
from tests.support.runtime_models import (
    MINILM,
    array,
    cosines,
    package_path,
    run_one,
    save_tiny,
)
from tests.support.standard_library import names_and_docs

torch = Lazy("torch")
peft = Lazy("peft")
transformers = Lazy("transformers")

# PEFT asks transformers for a name that transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

BASE = "all-minilm-l6-v2-torch"
PAIRS = 320
HELD_OUT = 0.4


def shoal(*arguments):
    command = [sys.executable, "-W", "error", "-m", "shoal", "lora", "train", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=limit_s(115)
    )


def written(path, pairs):
    path.write_text("".join(json.dumps({"anchor": a, "positive": b}) + "\n" for a, b in pairs))
    return path


@dataclass
class Trained:
    """A run of the command on MiniLM."""

    pairs: Path
    folder: Path
    printed: str
    card: Card


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    package_path(MINILM)
    folder = tmp_path_factory.mktemp("trained")
    pairs = written(folder / "pairs.jsonl", names_and_docs(PAIRS))
    out = folder / "stdlib"
    done = shoal(
        BASE, pairs, "--out", out, "--held-out", HELD_OUT, "--epochs", 1, "--batch-size", 16,
        "--lr", 1e-3, "--price-per-hour", 0.5,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    card = msgspec.json.decode((out / CARD).read_bytes(), type=Card)
    return Trained(pairs, out, done.stdout, card)


@pytest.mark.long
def test_training_finds_more_of_the_pairs_that_were_held_out(trained):
    """Recall and MRR of pairs that it was not trained on rise, and the card counts them all."""
    before, after = trained.card.before, trained.card.after
    assert after.mrr > before.mrr + 0.03
    assert after.recall_at_1 > before.recall_at_1
    assert before.pairs == after.pairs == round(HELD_OUT * PAIRS)
    assert trained.card.trained_pairs + after.pairs == PAIRS
    assert trained.card.cost == pytest.approx(trained.card.trained_s / 3600 * 0.5)


@pytest.mark.long
def test_training_is_measured_on_the_same_pairs_before_and_after(trained, tmp_path):
    """The base's and PEFT's vectors of the held-out pairs give the card's figures again."""
    encoder = open_encoder(load(None).resolve(BASE), tmp_path, threads=1)
    parts = split(trained.pairs, read(trained.pairs), HELD_OUT, seed=0)
    names = [pair.anchor for pair in parts.held_out]
    docs = [pair.positive for pair in parts.held_out]
    right = [{n} for n in range(len(names))]

    def found():
        return measure(encoder.encode(names).numpy(), encoder.encode(docs).numpy(), right)

    assert structs.astuple(found()) == pytest.approx(structs.astuple(trained.card.before), abs=1e-5)
    encoder.network = peft.PeftModel.from_pretrained(encoder.network, str(trained.folder))
    assert structs.astuple(found()) == pytest.approx(structs.astuple(trained.card.after), abs=1e-5)


@pytest.mark.long
def test_trained_adapter_is_the_same_in_the_torch_runtime_and_in_peft(trained, tmp_path):
    """Equal vectors, far from the base's; the files are those that the command names."""
    texts = [text for pair in names_and_docs(20) for text in pair]
    entry = load(None).resolve(BASE)
    served = Prepared(entry, tmp_path)
    key = f"{BASE}@stdlib@1"
    served.runtime.load_adapter(entry.key, AdapterSpec(key, str(trained.folder)))
    bare = served.item("encode", Inputs(texts=texts))
    ours = array(run_one(served.runtime, structs.replace(bare, adapter=key), entry.key), "dense")
    encoder = open_encoder(entry, tmp_path, threads=1)
    base = encoder.encode(texts).numpy()
    encoder.network = peft.PeftModel.from_pretrained(encoder.network, str(trained.folder))
    theirs = encoder.encode(texts).numpy()
    assert cosines(ours, theirs).min() > 0.99999
    assert cosines(ours, base).min() < 0.95
    words = shlex.split(trained.printed[trained.printed.index("shoal lora add") :])
    assert words[3] == f"{BASE}@stdlib"
    assert words[words.index("--source") + 1] == trained.folder.as_uri()
    assert "will be refused" not in trained.printed
    named = dict(word.split("=") for word in words if word.startswith("adapter_"))
    assert named == digests(trained.folder.glob("adapter_*")) == trained.card.digests


@pytest.mark.long
def test_training_refuses_what_it_cannot_do(tmp_path):
    """A folder that is taken, a text that is too long, and a base that is no embedder: exit 2."""
    long = [*names_and_docs(60), ("long", "word " * 300)]
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").touch()
    pairs = written(tmp_path / "pairs.jsonl", long)
    for base, out, what in (
        (BASE, taken, f"{taken} is there already"),
        (BASE, tmp_path / "new", f"{pairs}:61: a text of 302 tokens"),
        ("whisper-tiny-en", tmp_path / "new", "gives no dense vectors"),
        ("all-minilm-l6-v2-int8", tmp_path / "new", "cannot be trained"),
    ):
        done = shoal(base, pairs, "--out", out)
        assert done.returncode == 2
        assert what in done.stderr
        assert not (tmp_path / "new").exists()


WORDS = [f"w{n}" for n in range(100)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """An entry of a random BERT that hardly looks at the order of words, of which it knows few."""
    folder = save_tiny(transformers.BertModel, tmp_path_factory.mktemp("tiny"))
    network = transformers.BertModel.from_pretrained(folder)
    with torch.no_grad():
        network.embeddings.position_embeddings.weight.zero_()
        network.embeddings.word_embeddings.weight.mul_(100)
    network.save_pretrained(folder)
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    return Entry(
        "tiny", ["encode"], folder.as_uri(), runtime="torch", max_tokens=32,
        outputs={"dense": Output(32)}, prompts={"query": "w1 ", "document": "w2 w3 "},
    )  # fmt: skip


def word_pairs():
    """The same words in another order, which a mean of token vectors finds."""
    rng = np.random.default_rng(0)
    drawn = [[WORDS[n] for n in rng.permutation(100)[:8]] for _ in range(60)]
    return [
        Pair(" ".join(words), " ".join(reversed(words)), (), n) for n, words in enumerate(drawn)
    ]


def train(entry, cache, plan, *, stopped=lambda: False, pairs=None):
    """The encoder, the run and what was told."""
    told = []
    encoder = open_encoder(entry, cache, threads=1)
    pairs = word_pairs() if pairs is None else pairs
    run = Training(encoder, plan, told.append, stopped).run(
        cache / "pairs.jsonl", Split(pairs[20:], pairs[:20]), rank=4, alpha=8
    )
    return encoder, run, told


def test_training_is_the_same_for_the_same_seed(tiny, tmp_path):
    """Twice the same files for one seed, others for another; the base's weights stay."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.touch()
    made = []
    for number, seed in enumerate((0, 0, 1)):
        plan = Plan(epochs=2, batch_pairs=8, rate=1e-3, seed=seed)
        encoder, run, _ = train(tiny, tmp_path, plan)
        folder = tmp_path / str(number)
        card = write(folder, encoder, pairs, plan, run, trained_pairs=40, price_per_hour=None)
        assert (folder / CARD).is_file()
        made.append(card.digests)
        assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    assert made[0] == made[1] != made[2]
    with encoder.network.disable_adapter():
        base = open_encoder(tiny, tmp_path, threads=1)
        assert np.array_equal(encoder.encode(WORDS), base.encode(WORDS))


def test_training_puts_prompts_before_texts_and_cuts_them_when_told(tiny, tmp_path):
    """A query has the query's, its documents the documents'; what is too long is a fault."""
    encoder = open_encoder(tiny, tmp_path, threads=1)
    made = encoder.ids(Pair("w9", "w8", ("w7",)), truncate=False)
    assert (made.anchor, made.positive, made.negatives) == ([2, 10], [3, 4, 9], ([3, 4, 8],))
    long = Pair("w9", "w8 " * 31, (), 7)
    assert encoder.ids(long, truncate=False).line == 7
    assert len(encoder.ids(long, truncate=True).positive) == 32
    plan = Plan(epochs=1, batch_pairs=8, rate=1e-3, seed=0)
    with pytest.raises(OperatorError, match="jsonl:7: a text of 33 tokens"):
        train(tiny, tmp_path, plan, pairs=[*word_pairs(), long])


def test_training_that_is_interrupted_keeps_the_best_so_far(tiny, tmp_path):
    """The step that runs ends, is measured, and the best of all states is left in the network."""
    asked = []

    def stopped():
        asked.append(None)
        return len(asked) == 7

    plan = Plan(epochs=9, batch_pairs=8, rate=1e-3, seed=0)
    _, run, told = train(tiny, tmp_path, plan, stopped=stopped)
    assert run.end == "interrupted"
    assert [each.step.number for each in told if isinstance(each, Measured)] == [5, 7]
    assert len([each for each in told if isinstance(each, Step)]) == 7
    best = max(run.measured, key=lambda each: each.measures.mrr)
    assert run.best.measures.mrr == best.measures.mrr


def test_training_ends_when_its_time_is_over(tiny, tmp_path):
    """No step begins after the limit, and what was reached is measured."""
    _, run, told = train(tiny, tmp_path, Plan(9, 8, 1e-3, 0, limit_s=0.0))
    assert run.end == "time"
    assert [each.step.number for each in run.measured] == [1]
    assert len(told) == 2


@pytest.mark.parametrize("rate", [3.0, 1e30])
def test_training_that_collapses_ends_and_is_no_success(tiny, tmp_path, rate):
    """Far too high a rate: pairs that the base found are lost, or numbers overflow; it says so."""
    _, run, _ = train(tiny, tmp_path, Plan(epochs=50, batch_pairs=4, rate=rate, seed=0))
    assert run.before.mrr > 0.5
    assert run.end == "collapsed"
    assert not run.better
    assert len(run.measured) < 50


@pytest.mark.long
def test_training_that_makes_it_worse_fails_unless_told_otherwise(tiny, tmp_path):
    """Exit 1 and nothing is written; with --accept-worse the best state is, and exit 0."""
    catalog = tmp_path / "catalog"
    catalog.mkdir()
    fields = {"id": "tiny", "tasks": ["encode"], "source": tiny.source, "runtime": "torch"}
    fields |= {"max_tokens": 32, "outputs": {"dense": {"dim": 32}}}
    (catalog / "tiny.yaml").write_text(json.dumps(fields))
    # The base finds every pair, for each has the same text twice: nothing can be better.
    pairs = written(tmp_path / "pairs.jsonl", [(each.anchor,) * 2 for each in word_pairs()])
    common = ["tiny", pairs, "--catalog", catalog, "--lr", 0.5, "--batch-size", 4, "--out"]
    done = shoal(*common, tmp_path / "a")
    assert done.returncode == 1, done.stdout
    assert "no better than its base in rank" in done.stdout
    assert "AFTER is the best of" in done.stdout
    assert not (tmp_path / "a").exists()
    done = shoal(*common, tmp_path / "b", "--accept-worse")
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "b" / CARD).is_file()


@pytest.mark.long
def test_extracted_adapter_is_near_the_fine_tuned_model(tmp_path):
    """The example's adapter in the torch runtime: cosine .985 and more, where the base is far."""
    out = tmp_path / "sre"
    command = [sys.executable, "-W", "error", "-m", "examples.lora_from_finetune", "--out", out]
    for place in (MINILM, "sre_embedding_model/model_weights"):
        package_path(place)
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=False, timeout=limit_s(100)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1
    from examples.lora_from_finetune.compare import TEXTS

    catalog = load(None)
    entry = catalog.resolve(BASE)
    base = Prepared(entry, tmp_path)
    tuned = Prepared(structs.replace(catalog.resolve("sre-minilm"), runtime="torch"), tmp_path)
    meant = array(tuned.run("encode", Inputs(texts=list(TEXTS))), "dense")
    item = base.item("encode", Inputs(texts=list(TEXTS)))
    base.runtime.load_adapter(entry.key, AdapterSpec("a", str(out)))
    bare, adapted = (
        array(run_one(base.runtime, structs.replace(item, adapter=name), entry.key), "dense")
        for name in ("", "a")
    )
    assert cosines(adapted, meant).mean() >= 0.985
    assert cosines(bare, meant).mean() < 0.35
    printed = [float(figure) for figure in re.findall(r"(?:-torch|adapter) (0\.\d+)", done.stdout)]
    found = [cosines(each, meant).mean() for each in (bare, adapted)]
    assert printed == pytest.approx(found, abs=1e-4)
