"""Dense vectors of real models, on every runtime, against transformers in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal.errors import InputTooLong, InvalidRequest
from shoal.runtimes.registry import create
from tests.support.runtime_models import (
    FINE_TUNED,
    INT8,
    MINILM,
    array,
    cosines,
    dense_rows,
    ids_of,
    item,
    package_path,
    random_ids,
    reference_hidden,
    reference_mean,
    run_one,
    spec,
)

# The edges of what tokenizers and kernels like to round to, and the model's last position.
LENGTHS = (1, 2, 9, 30, 127, 128, 129, 255, 256, 257, 512)
VARIANTS = [
    pytest.param(("onnx", {}), id="onnx"),
    pytest.param(("torch", {"packing": True}), id="torch-packed"),
    pytest.param(("torch", {"packing": False}), id="torch-padded"),
]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", params=VARIANTS)
def loaded(request, cache_dir):
    """A runtime with MiniLM (`minilm`) and its fine-tuned sibling (`tuned`) in it."""
    name, options = request.param
    runtime = create(name, "cpu", 1)
    for key, place in (("minilm", MINILM), ("tuned", FINE_TUNED)):
        runtime.load(
            spec(
                package_path(place),
                cache_dir,
                key=key,
                tasks=["encode", "score"],
                max_tokens=256,
                options=options,
            )
        )
    return runtime


@pytest.fixture(scope="module")
def sequences():
    return [random_ids(length) for length in LENGTHS]


@pytest.fixture(scope="module")
def references(sequences):
    return {
        key: [reference_mean(package_path(place), ids) for ids in sequences]
        for key, place in (("minilm", MINILM), ("tuned", FINE_TUNED))
    }


@pytest.mark.parametrize("key", ["minilm", "tuned"])
def test_dense_vectors_equal_the_reference_run_alone(loaded, sequences, references, key):
    """Each sequence run alone gives the reference's vector, at every length."""
    ours = [array(run_one(loaded, item("i", [ids]), key), "dense")[0] for ids in sequences]
    assert cosines(ours, references[key]).min() >= 0.9999


@pytest.mark.parametrize("key", ["minilm", "tuned"])
def test_dense_vectors_equal_the_reference_in_a_mixed_batch(loaded, sequences, references, key):
    """Batch mates of any length do not move a vector: all lengths in one batch, in any order."""
    order = np.random.default_rng(3).permutation(len(sequences))
    items = [item(str(i), [sequences[i]]) for i in order]
    ours = dense_rows(loaded.run(key, items))
    assert cosines(ours, [references[key][i] for i in order]).min() >= 0.9999
    assert np.linalg.norm(np.stack(ours), axis=1) == pytest.approx(1.0, abs=1e-5)


def test_dense_vectors_reach_the_item_they_belong_to(loaded):
    """Thirty items of one to three inputs, repeats among them, get the rows they get alone."""
    rng = np.random.default_rng(5)
    pool = [random_ids(int(rng.integers(3, 40)), seed) for seed in range(12)]
    alone = [array(run_one(loaded, item("i", [ids]), "minilm"), "dense")[0] for ids in pool]
    picks = [rng.integers(0, len(pool), rng.integers(1, 4)).tolist() for _ in range(30)]
    items = [item(str(n), [pool[i] for i in pick]) for n, pick in enumerate(picks)]
    ran = loaded.run("minilm", items)
    for pick, outcome in zip(picks, ran.outcomes, strict=True):
        assert cosines(list(array(outcome, "dense")), [alone[i] for i in pick]).min() > 0.99999


def test_an_overlong_sequence_fails_alone(loaded, sequences, references):
    """One token over the last position is InputTooLong for that item; its neighbours are served."""
    ran = loaded.run(
        "minilm",
        [item("a", [sequences[3]]), item("b", [random_ids(513)]), item("c", [sequences[4]])],
    )
    assert isinstance(ran.outcomes[1], InputTooLong)
    assert "the input has 513 tokens, the model takes 512" in ran.outcomes[1].message
    ours = [array(ran.outcomes[i], "dense")[0] for i in (0, 2)]
    assert cosines(ours, references["minilm"][3:5]).min() >= 0.9999


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (item("b", [[101, 40_000, 102]]), "token id 40000"),
        (item("b", [[101, 102], []]), "the input has no tokens"),
        (item("b", [[101, 102]], params={"dimensions": 385}), "1 to 384 dimensions"),
        (item("b", [[101, 102]], params={"outputs": ["sparse"]}), "no output 'sparse'"),
        (item("b", [[101, 102]], task="classify"), "does not classify"),
        (item("b", [[101, 102]], task="score", layout="shared"), "no documents"),
    ],
    ids=["unknown-token", "empty", "dimensions", "output", "task", "no-documents"],
)
def test_a_wrong_item_fails_alone(loaded, sequences, broken, says):
    """What an item asks wrongly is its own error, and names what is wrong."""
    good = item("a", [sequences[3]])
    ran = loaded.run("minilm", [good, broken])
    assert array(ran.outcomes[0], "dense").shape == (1, 384)
    assert isinstance(ran.outcomes[1], InvalidRequest)
    assert says in ran.outcomes[1].message


def test_dimensions_keep_the_leading_ones_and_normalise_again(loaded, sequences):
    """64 dimensions are the first 64 of the whole vector, of length 1 unless told otherwise."""
    whole = array(run_one(loaded, item("i", [sequences[4]]), "minilm"), "dense")[0]
    params = {"dimensions": 64}
    short = array(run_one(loaded, item("i", [sequences[4]], params=params), "minilm"), "dense")[0]
    assert short == pytest.approx(whole[:64] / np.linalg.norm(whole[:64]), abs=1e-6)
    params = {"dimensions": 64, "normalize": False}
    raw = array(run_one(loaded, item("i", [sequences[4]], params=params), "minilm"), "dense")[0]
    mean = reference_hidden(package_path(MINILM), sequences[4]).mean(axis=0)
    assert raw == pytest.approx(mean[:64], abs=2e-5)


def test_similarity_scores_are_cosines_with_the_query(loaded):
    """Layout `shared` scores each document by its cosine with the query, the first sequence."""
    texts = ["A cat sits on a mat.", "A kitten rests on a rug.", "Markets fell today.", "A cat."]
    ids = ids_of(package_path(MINILM), *texts)
    vectors = [reference_mean(package_path(MINILM), sequence) for sequence in ids]
    result = run_one(loaded, item("i", ids, task="score", layout="shared"), "minilm")
    expected = [float(vectors[0] @ vector) for vector in vectors[1:]]
    assert array(result, "scores") == pytest.approx(expected, abs=1e-5)
    assert array(result, "logits").tolist() == array(result, "scores").tolist()
    assert expected[0] > 0.6
    assert expected[1] < 0.1


def test_padded_tokens_count_what_was_computed(loaded, request):
    """Packed runs compute the useful tokens; padded ones at least those, and near the minimum."""
    lengths = [5, 60, 5, 5, 60]
    ran = loaded.run("minilm", [item(str(n), [random_ids(k, n)]) for n, k in enumerate(lengths)])
    assert ran.padded_tokens == sum(lengths)  # two blocks, of equal lengths each


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
@pytest.mark.parametrize(("name", "options"), [("onnx", {}), ("torch", {})], ids=["onnx", "torch"])
def test_poolings_take_the_real_tokens(cache_dir, sequences, name, options, pooling):
    """cls, last and mean see real tokens alone, though the batch is ragged."""
    runtime = create(name, "cpu", 1)
    folder = package_path(MINILM)
    runtime.load(spec(folder, cache_dir, pooling=pooling, normalize=False, options=options))
    chosen = sequences[1:5]
    ours = dense_rows(runtime.run("m@1", [item("i", chosen)]))
    for ids, vector in zip(chosen, ours, strict=True):
        hidden = reference_hidden(folder, ids)
        expected = {"cls": hidden[0], "last": hidden[-1], "mean": hidden.mean(axis=0)}[pooling]
        assert vector == pytest.approx(expected, abs=5e-5)


def test_an_exported_graph_batches_like_it_runs_alone(cache_dir):
    """The int8 graph gives the vectors of its own session run solo, and MiniLM's nearly."""
    ort = pytest.importorskip("onnxruntime")
    path = package_path(INT8) / "model.onnx"
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    runtime = create("onnx", "cpu", 1)
    runtime.load(spec(path.parent, cache_dir, weights="model.onnx", max_tokens=512))
    chosen = [random_ids(length) for length in (1, 2, 17, 128, 129, 256)]
    theirs = []
    for ids in chosen:
        row = np.array([ids], np.int64)
        feeds = {"input_ids": row, "attention_mask": row * 0 + 1, "token_type_ids": row * 0}
        theirs.append(session.run(["last_hidden_state"], feeds)[0][0].mean(axis=0))
    ours = dense_rows(runtime.run("m@1", [item("i", chosen)]))
    assert cosines(ours, theirs).min() >= 0.9999
    text = ids_of(package_path(MINILM), "The quick brown fox jumps over the lazy dog.")
    near = array(run_one(runtime, item("i", text)), "dense")[0] @ reference_mean(
        package_path(MINILM), text[0]
    )
    assert near > 0.98


def test_sentence_transformers_agrees_on_texts(cache_dir):
    """From the text on, tokenizer included, the vectors are those of sentence-transformers."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder: Path = package_path(MINILM)
    texts = ["Hello", "What is the capital of France?", "naïve café, 漢字 and emoji 🐟", "a " * 300]
    theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(
        texts, normalize_embeddings=True, show_progress_bar=False
    )
    runtime = create("onnx", "cpu", 1)
    runtime.load(spec(folder, cache_dir))
    ours = dense_rows(runtime.run("m@1", [item("i", ids_of(folder, *texts))]))
    assert cosines(ours, list(theirs)).min() >= 0.9999
