"""Token vectors, late interaction, static vectors and number formats on real weights."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import numpy as np
import pytest
from msgspec import structs

from shoal.errors import InvalidRequest, ModelUnavailable
from shoal.runtimes.registry import create
from shoal.wire.envelope import Inputs
from tests.support.prepared import Prepared, demo
from tests.support.runtime_models import MINILM, array, package_path, reference_hidden, spec

TEXTS = [
    "A man is eating a piece of bread.",
    "A cheetah is running behind its prey.",
    "How do I reset my password?",
    "Restart the pod when it runs out of memory, and look at its limits.",
    "The new movie is awesome.",
]
QUERIES = {
    "Someone is having some food": 0,
    "a fast animal hunts": 1,
    "I forgot my login": 2,
    "container was OOM killed": 3,
    "I liked the film": 4,
}


@pytest.fixture(scope="module")
def late(tmp_path_factory):
    return demo("all-minilm-l6-v2-maxsim", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def static(tmp_path_factory):
    return demo("tokenlearn-static", tmp_path_factory.mktemp("cache"))


def token_vectors(result) -> list[np.ndarray]:
    counts = array(result, "multivector_counts")
    return np.split(array(result, "multivector"), np.cumsum(counts)[:-1])


def test_token_vectors_are_the_reference_hidden_states(late):
    """Each token's hidden state, of length 1, without the special tokens at both ends."""
    folder = package_path(MINILM)
    result = late.run("encode", Inputs(texts=TEXTS), outputs=["multivector"])
    for text, ours in zip(TEXTS, token_vectors(result), strict=True):
        ids = late.tokeniser.whole(text).ids
        theirs = reference_hidden(folder, ids)[1:-1]
        theirs /= np.linalg.norm(theirs, axis=1, keepdims=True)
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_special_tokens_have_vectors_by_default(late, tmp_path):
    """Without the option a text has a vector for every id, and so has a list of ids."""
    entry = structs.replace(late.entry, options={})
    whole = Prepared(entry, tmp_path).run("encode", Inputs(texts=TEXTS), outputs=["multivector"])
    ids = [late.tokeniser.whole(text).ids for text in TEXTS]
    assert array(whole, "multivector_counts").tolist() == [len(one) for one in ids]
    given = late.run("encode", Inputs(ids=ids), outputs=["multivector"])
    assert array(given, "multivector_counts").tolist() == [len(one) for one in ids]


def test_maxsim_ranks_what_is_meant_first(late):
    """The right text comes first for each query; the logit is the sum, the score the mean."""
    for query, best in QUERIES.items():
        result = late.run("score", Inputs(texts=TEXTS, query=query))
        logits, scores = array(result, "logits"), array(result, "scores")
        assert logits.argmax() == best
        tokens = len(late.tokeniser.whole(query).ids) - 2
        np.testing.assert_allclose(logits, scores * tokens, rtol=1e-6)
        assert scores.max() <= 1


def test_maxsim_is_that_of_the_token_vectors_and_equal_texts_tie(late):
    """What a caller would compute from `multivector`; copies of a text have one score exactly."""
    query = next(iter(QUERIES))
    vectors = late.run("encode", Inputs(texts=[query, *TEXTS]), outputs=["multivector"])
    ours, *theirs = token_vectors(vectors)
    by_hand = [(ours @ document.T).max(axis=1).sum() for document in theirs]
    result = late.run("score", Inputs(texts=[*TEXTS, *TEXTS], query=query))
    logits = array(result, "logits")
    np.testing.assert_allclose(logits[: len(TEXTS)], by_hand, rtol=1e-5)
    assert np.array_equal(logits[: len(TEXTS)], logits[len(TEXTS) :])


def test_maxsim_needs_a_document_and_token_vectors(late, tmp_path):
    """A query alone is the caller's fault; a model that pools by itself cannot be loaded for it."""
    with pytest.raises(InvalidRequest) as caught:
        late.run("score", Inputs(query="anything"))
    assert caught.value.param == "documents"
    from tests.service.test_runtime_onnx import pooled_graph

    pooled_graph(tmp_path / "model.onnx")
    with pytest.raises(ModelUnavailable, match="no token vectors"):
        create("onnx", "cpu", 1).load(
            spec(tmp_path, tmp_path, tasks=["score"], pooling="none", scorer="maxsim")
        )


@dataclass(frozen=True)
class Format:
    """A number format: what comes, and how a caller compares two of its vectors."""

    dtype: str
    width: int

    def compare(self, queries: np.ndarray, texts: np.ndarray) -> np.ndarray:
        if self.dtype == "uint8":
            queries, texts = (np.unpackbits(one, axis=1) * 2.0 - 1 for one in (queries, texts))
        a, b = queries.astype(np.float32), texts.astype(np.float32)
        return (a / np.linalg.norm(a, axis=1, keepdims=True)) @ (
            b / np.linalg.norm(b, axis=1, keepdims=True)
        ).T


FORMATS = {
    "float16": Format("float16", 384),
    "int8": Format("int8", 384),
    "binary": Format("uint8", 48),
}


@pytest.mark.parametrize("name", FORMATS)
def test_number_formats_keep_the_ranking(late, name):
    """Every query finds its text in each format; for token vectors the format is the same."""
    form = FORMATS[name]
    texts = late.run("encode", Inputs(texts=TEXTS), outputs=["dense"], dtype=name)
    queries = late.run("encode", Inputs(texts=list(QUERIES)), outputs=["dense"], dtype=name)
    assert texts.arrays["dense"].dtype == form.dtype
    assert texts.arrays["dense"].shape == [len(TEXTS), form.width]
    likeness = form.compare(array(queries, "dense"), array(texts, "dense"))
    assert likeness.argmax(axis=1).tolist() == list(QUERIES.values())
    tokens = late.run("encode", Inputs(texts=TEXTS), outputs=["multivector"], dtype=name)
    assert tokens.arrays["multivector"].dtype == form.dtype
    assert tokens.arrays["multivector"].shape[1] == form.width


def test_dimensions_come_before_the_format(late):
    """Shortened, scaled to length 1, then put into bytes."""
    short = late.run("encode", Inputs(texts=TEXTS), outputs=["dense"], dimensions=100)
    bits = late.run(
        "encode", Inputs(texts=TEXTS), outputs=["dense"], dimensions=100, dtype="binary"
    )
    assert np.linalg.norm(array(short, "dense"), axis=1) == pytest.approx(1, abs=1e-6)
    unpacked = np.unpackbits(array(bits, "dense"), axis=1)[:, :100]
    assert np.array_equal(unpacked, array(short, "dense") > 0)


def test_static_vectors_are_those_of_the_package(static):
    """The package's own code gives the same directions, for every script and length."""
    texts = [*TEXTS, "Der Hund schläft 🙂.", "x", "word " * 400]
    ours = array(static.run("encode", Inputs(texts=texts)), "dense")
    theirs = np.array(_package_code().get_embeddings(texts), np.float32)
    theirs /= np.linalg.norm(theirs, axis=1, keepdims=True)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def _package_code():
    package_path("static_model")
    found = importlib.util.find_spec("static_model")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_static_vectors_are_refused_where_the_table_does_not_fit(tmp_path):
    """A file without a table, or with a mapping that leads out of it, fails at the load."""
    from safetensors.numpy import save_file

    table = np.eye(4, dtype=np.float32)
    cases = {
        "no table": {"weight": table},
        "leads out": {"embeddings": table, "mapping": np.array([0, 4])},
        "one for each": {"embeddings": table, "weights": np.ones(3, np.float32)},
    }
    for message, tensors in cases.items():
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ModelUnavailable, match=message):
            create("onnx", "cpu", 1).load(spec(tmp_path, tmp_path, family="static"))


def test_unknown_family_is_refused_with_a_near_name(tmp_path):
    """The message lists what the runtime has."""
    with pytest.raises(ModelUnavailable, match=r"did you mean `static`.*bert, graph, static"):
        create("onnx", "cpu", 1).load(spec(package_path(MINILM), tmp_path, family="statics"))
