"""A network's own classifier over single texts: which labels, and what their scores are."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.errors import InvalidRequest, ModelUnavailable
from shoal.runtimes.registry import create
from tests.support.lazy import Lazy
from tests.support.runtime_models import array, item, run_one, save_tiny, spec, tiny_ids

torch = Lazy("torch")
transformers = Lazy("transformers")

SENT = tiny_ids(5, 9, 30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(
        transformers.BertForSequenceClassification, tmp_path_factory.mktemp("tiny"), num_labels=3
    )


@pytest.fixture(scope="module")
def logits(folder):
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        return np.concatenate([model(torch.tensor([ids])).logits.numpy() for ids in SENT])


@pytest.fixture(params=["onnx", "torch"])
def runtime(request):
    return create(request.param, "cpu", 1)


def test_texts_are_classified_by_the_network_itself(runtime, folder, logits, tmp_path):
    """No head and no cross-encoder: softmax over the checkpoint's classes, named by the entry."""
    runtime.load(spec(folder, tmp_path, tasks=["classify"], labels=["a", "b", "c"]))
    result = run_one(runtime, item("i", SENT, "classify"))
    assert result.labels == ["a", "b", "c"]
    np.testing.assert_allclose(array(result, "logits"), logits, atol=1e-4)
    want = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(array(result, "scores"), want, atol=1e-4)


def test_labels_that_do_not_exclude_each_other_have_scores_apart(runtime, folder, logits, tmp_path):
    """The option makes each label's score the sigmoid of its own logit."""
    runtime.load(spec(folder, tmp_path, tasks=["classify"], options={"multi_label": True}))
    result = run_one(runtime, item("i", SENT, "classify"))
    assert result.labels == ["LABEL_0", "LABEL_1", "LABEL_2"]
    np.testing.assert_allclose(array(result, "scores"), 1 / (1 + np.exp(-logits)), atol=1e-4)


def test_only_wanted_labels_come_back(runtime, folder, logits, tmp_path):
    """Their scores are those among all labels; an unknown one is refused with a near one."""
    runtime.load(spec(folder, tmp_path, tasks=["classify"], labels=["news", "sport", "art"]))
    sent = item("i", SENT, "classify", params={"labels": ["art", "news"]})
    result = run_one(runtime, sent)
    assert result.labels == ["news", "art"]
    np.testing.assert_allclose(array(result, "logits"), logits[:, [0, 2]], atol=1e-4)
    with pytest.raises(InvalidRequest, match="did you mean `sport`") as caught:
        run_one(runtime, item("i", SENT, "classify", params={"labels": ["sports"]}))
    assert caught.value.param == "labels"


def test_labels_of_another_number_are_refused_at_the_load(runtime, folder, tmp_path):
    """An entry that names two labels for three classes would answer with wrong names."""
    with pytest.raises(ModelUnavailable, match="2 labels are named for 3 classes"):
        runtime.load(spec(folder, tmp_path, tasks=["classify"], labels=["a", "b"]))
