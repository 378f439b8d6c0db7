"""Sparse vectors, heads and cross-encoders on every runtime, against their torch originals."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shoal.errors import InvalidRequest, ModelUnavailable, RunFailed
from shoal.ipc.messages import HeadSpec, Run
from shoal.runtimes.host import Host
from shoal.runtimes.registry import create
from shoal.wire.envelope import decode_result
from tests.support.lazy import Lazy
from tests.support.runtime_models import (
    SPLADE,
    array,
    dense_rows,
    ids_of,
    item,
    package_path,
    random_ids,
    reference,
    reference_hidden,
    run_one,
    save_tiny,
    sparse_rows,
    spec,
    tiny_ids,
)

torch = Lazy("torch")
transformers = Lazy("transformers")

RUNTIMES = ["onnx", "torch"]
RELEVANCE = HeadSpec(
    "pair", "heads.pt", "relevance.", ["relevant", "irrelevant"], "relevant", allow_pickle=True
)
RELATION = HeadSpec(
    "linear",
    "heads.pt",
    "relation_type.",
    ["causal", "temporal", "spatial", "attributive", "none"],
    allow_pickle=True,
)
NLI = HeadSpec(
    "pair", "heads.pt", "nli.", ["entailment", "neutral", "contradiction"], allow_pickle=True
)
TEXTS = [
    "Toyota invests in batteries.",
    "Toyota said it will spend three billion dollars on battery plants.",
    "The cat sleeps on the sofa.",
    "Rain",
]


@pytest.fixture(params=RUNTIMES)
def runtime(request):
    return create(request.param, "cpu", 1)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def torch_heads():
    """The heads as the package that trained them defines them: layers of its checkpoint."""
    return torch.load(package_path(SPLADE) / "heads.pt", weights_only=True)


def stack(state: dict, x: torch.Tensor) -> torch.Tensor:
    numbers = sorted(int(name.split(".")[1]) for name in state if name.endswith("weight"))
    for at, n in enumerate(numbers):
        x = torch.nn.functional.linear(
            torch.relu(x) if at else x, state[f"net.{n}.weight"], state[f"net.{n}.bias"]
        )
    return x


def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([a, b, (a - b).abs(), a * b], dim=-1)


def test_sparse_vectors_equal_the_masked_language_model(runtime, cache_dir):
    """log(1 + relu(max over tokens of the logits)) of transformers, solo and in a mixed batch."""
    folder = package_path(SPLADE)
    runtime.load(spec(folder, cache_dir, pooling="cls", outputs=["sparse", "dense"]))
    sequences = [random_ids(length) for length in (1, 2, 40, 128, 129, 257)]
    result = run_one(runtime, item("i", sequences, params={"outputs": ["sparse", "dense"]}))
    rows = sparse_rows(result, 30522)
    for n, ids in enumerate(sequences):
        with torch.inference_mode():
            logits = reference(folder)(torch.tensor([ids])).logits[0]
        expected = torch.log1p(torch.relu(logits)).amax(dim=0).numpy()
        assert np.abs(rows[n] - expected).max() < 2e-4
        assert (array(result, "sparse_values") > 0).all()
        hidden = reference_hidden(folder, ids)[0]
        assert array(result, "dense")[n] == pytest.approx(hidden / np.linalg.norm(hidden), abs=1e-4)
        alone = run_one(runtime, item("i", [ids]))
        assert np.abs(sparse_rows(alone, 30522)[0] - rows[n]).max() < 1e-4


def test_pair_head_scores_equal_its_torch_definition(runtime, cache_dir, torch_heads):
    """`shared`: the head over [q; d; |q-d|; q*d]; scores are probabilities, logits margins."""
    folder = package_path(SPLADE)
    runtime.load(
        spec(folder, cache_dir, tasks=["score"], pooling="cls", heads={"score": RELEVANCE})
    )
    ids = ids_of(folder, *TEXTS)
    result = run_one(runtime, item("i", ids, task="score", layout="shared"))
    first, *others = (torch.tensor(reference_hidden(folder, one)[0]) for one in ids)
    logits = stack(torch_heads["relevance"], torch.stack([pair(first, b) for b in others]))
    assert array(result, "scores") == pytest.approx(logits.softmax(dim=1)[:, 0].numpy(), abs=1e-4)
    margins = (logits[:, 0] - logits[:, 1]).numpy()
    assert array(result, "logits") == pytest.approx(margins, abs=1e-3)
    assert array(result, "scores").argmax() == 0


def test_linear_head_classes_equal_its_torch_definition(runtime, cache_dir, torch_heads):
    """A linear head gives a row of probabilities for each text, with its labels."""
    folder = package_path(SPLADE)
    runtime.load(
        spec(folder, cache_dir, tasks=["classify"], pooling="cls", heads={"classify": RELATION})
    )
    ids = ids_of(folder, *TEXTS)
    result = run_one(runtime, item("i", ids, task="classify"))
    vectors = torch.stack([torch.tensor(reference_hidden(folder, one)[0]) for one in ids])
    logits = stack(torch_heads["relation_type"], vectors)
    assert result.labels == RELATION.labels
    assert array(result, "scores") == pytest.approx(logits.softmax(dim=1).numpy(), abs=1e-4)
    assert array(result, "logits") == pytest.approx(logits.numpy(), abs=1e-3)


def test_pair_head_classifies_pairs(runtime, cache_dir, torch_heads):
    """`pairs`: a, b, a, b; a text that stands in several pairs is computed once."""
    folder = package_path(SPLADE)
    runtime.load(
        spec(folder, cache_dir, tasks=["classify"], pooling="cls", heads={"classify": NLI})
    )
    a, b, c, _ = ids_of(folder, *TEXTS)
    sent = item("i", [a, b, a, c, c, a], task="classify", layout="pairs")
    ran = runtime.run("m@1", [sent])
    x, y, z = (torch.tensor(reference_hidden(folder, one)[0]) for one in (a, b, c))
    logits = stack(torch_heads["nli"], torch.stack([pair(x, y), pair(x, z), pair(z, x)]))
    assert array(ran.outcomes[0], "logits") == pytest.approx(logits.numpy(), abs=1e-3)
    assert ran.padded_tokens < sum(sent.lengths)
    (wrong,) = runtime.run("m@1", [item("i", [a], task="classify")]).outcomes
    assert isinstance(wrong, InvalidRequest)


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_joint_cross_encoder_equals_transformers(runtime, cache_dir, tmp_path, classes):
    """Pairs read at once, token types included: one logit, the second of two, or a named class."""
    folder = save_tiny(transformers.BertForSequenceClassification, tmp_path, num_labels=classes)
    options = {"positive": "LABEL_2"} if classes == 3 else {}
    tasks = ["score", "classify"]
    runtime.load(spec(folder, cache_dir, tasks=tasks, options=options))
    sequences = tiny_ids(7, 12, 30, 3)
    second_at = [3, 6, 20, 2]
    scored = run_one(runtime, item("i", sequences, task="score", second_at=second_at))
    classified = run_one(runtime, item("i", sequences, task="classify", second_at=second_at))
    for n, ids in enumerate(sequences):
        types = [int(place >= second_at[n]) for place in range(len(ids))]
        with torch.inference_mode():
            logits = reference(folder)(
                torch.tensor([ids]), token_type_ids=torch.tensor([types])
            ).logits[0]
        assert array(classified, "logits")[n] == pytest.approx(logits.numpy(), abs=1e-4)
        if classes == 1:
            score, margin = logits.sigmoid()[0], logits[0]
        else:
            place = classes - 1
            others = torch.cat([logits[:place], logits[place + 1 :]])
            score, margin = logits.softmax(dim=0)[place], logits[place] - others.logsumexp(dim=0)
        assert array(scored, "scores")[n] == pytest.approx(score.item(), abs=1e-5)
        assert array(scored, "logits")[n] == pytest.approx(margin.item(), abs=1e-4)
    assert classified.labels == [f"LABEL_{i}" for i in range(classes)]


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu", "silu", "tanh"])
def test_hidden_activations_equal_transformers(runtime, cache_dir, tmp_path, activation):
    """Every activation that is accepted is the one transformers means by its name."""
    folder = save_tiny(transformers.BertModel, tmp_path, hidden_act=activation)
    runtime.load(spec(folder, cache_dir, normalize=False))
    sequences = tiny_ids(4, 9, 48)
    for ids, ours in zip(
        sequences, dense_rows(runtime.run("m@1", [item("i", sequences)])), strict=True
    ):
        expected = reference_hidden(folder, ids).mean(axis=0)
        assert ours == pytest.approx(expected, abs=2e-5)


def test_token_types_of_a_classifier_do_not_leak_between_items(runtime, cache_dir, tmp_path):
    """The same ids as a pair and as one text are two different sequences in one batch."""
    folder = save_tiny(transformers.BertForSequenceClassification, tmp_path, num_labels=1)
    runtime.load(spec(folder, cache_dir, tasks=["score"]))
    (ids,) = tiny_ids(10)
    together = runtime.run(
        "m@1",
        [
            item("a", [ids], task="score", second_at=[4]),
            item("b", [ids], task="score"),
            item("c", [ids], task="score", second_at=[7]),
        ],
    )
    scores = [float(array(outcome, "logits")[0]) for outcome in together.outcomes]
    assert len({round(score, 4) for score in scores}) == 3


def test_untied_decoder_and_half_precision_weights_are_read(runtime, cache_dir, tmp_path):
    """A decoder of its own is used, and float16 weights are computed in float32."""
    folder = save_tiny(transformers.BertForMaskedLM, tmp_path, tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(1)
    weights["cls.predictions.decoder.weight"] = rng.normal(size=(120, 32)).astype(np.float32)
    halves = {name: values.astype(np.float16) for name, values in weights.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    runtime.load(spec(folder, cache_dir, outputs=["sparse"]))
    (ids,) = tiny_ids(11)
    ours = sparse_rows(run_one(runtime, item("i", [ids])), 120)[0]
    with torch.inference_mode():
        logits = reference(folder)(torch.tensor([ids])).logits[0]
    assert ours == pytest.approx(torch.log1p(torch.relu(logits)).amax(dim=0).numpy(), abs=1e-4)


def test_a_sequence_of_numbers_that_are_not_finite_fails_alone(runtime, cache_dir, tmp_path):
    """NaN in one row of the word table: the inputs that have that word fail, and are named."""
    folder = save_tiny(transformers.BertForMaskedLM, tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["bert.embeddings.word_embeddings.weight"][99] = np.nan
    # Tied, the decoder would spread the NaN to one word of every answer.
    rng = np.random.default_rng(1)
    weights["cls.predictions.decoder.weight"] = rng.normal(size=(120, 32)).astype(np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    runtime.load(spec(folder, cache_dir, outputs=["dense", "sparse"]))
    good, fine = [[5, 6, 7, 8]], [[9, 10, 11, 12, 13, 14]]
    for outputs in (["dense"], ["sparse"]):
        params = {"outputs": outputs}
        ran = runtime.run(
            "m@1",
            [
                item("a", good, params=params),
                item("b", [[20, 21, 22], [30, 99, 31, 32]], params=params),
                item("c", fine, params=params),
            ],
        )
        assert isinstance(ran.outcomes[1], RunFailed)
        assert ran.outcomes[1].input_index == 1
        partial = item("p", [*good, [30, 99, 31], *fine], params=params | {"partial": True})
        (parted,) = Host(runtime).handle(Run(1, "m@1", [partial])).items
        assert [(at, one.code) for at, one in parted.failures.items()] == [(1, RunFailed.code)]
        counts = {
            name: found.shape[0] for name, found in decode_result(parted.result).arrays.items()
        }
        assert counts["dense" if outputs == ["dense"] else "sparse_counts"] == 2
        for at, sequences in ((0, good), (2, fine)):
            alone = run_one(runtime, item("i", sequences, params=params))
            name = "dense" if outputs == ["dense"] else "sparse_values"
            assert array(ran.outcomes[at], name) == pytest.approx(array(alone, name), abs=1e-5)


def broken_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["WhaleModel"]}, "WhaleModel is not supported; known: "),
        ({"hidden_act": "laplace"}, "'laplace' is not supported; known: gelu"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"is_decoder": True}, "decoder"),
        ({"hidden_size": 64}, "is \\(120, 32\\), config.json: \\(120, 64\\)"),
        ({"num_hidden_layers": 3}, "lacks encoder.layer.2"),
        ({"num_attention_heads": 5}, "do not divide"),
        ({"vocab_size": None}, "no number"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_computed_is_refused_by_name(runtime, cache_dir, tmp_path, changes, says):
    """An unknown architecture, activation or a checkpoint that does not fit says what is known."""
    folder = save_tiny(transformers.BertModel, tmp_path)
    broken_config(folder, **changes)
    with pytest.raises(ModelUnavailable, match=says):
        runtime.load(spec(folder, cache_dir))


def test_damaged_weights_are_refused(runtime, cache_dir, tmp_path):
    """Cut short, no safetensors at all, or gone: ModelUnavailable, and nothing stays loaded."""
    folder = save_tiny(transformers.BertModel, tmp_path)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for data in (whole[:-100], whole[:40], b"\xff" * 500, b""):
        path.write_bytes(data)
        with pytest.raises(ModelUnavailable, match=r"model\.safetensors"):
            runtime.load(spec(folder, cache_dir))
    path.unlink()
    with pytest.raises(ModelUnavailable, match="holds no"):
        runtime.load(spec(folder, cache_dir))
    with pytest.raises(ModelUnavailable, match="not loaded"):
        runtime.run("m@1", [item("i", [[1, 2]])])
    assert runtime.memory() == {}


def test_what_a_model_lacks_is_found_at_its_load(runtime, cache_dir, tmp_path):
    """Sparse without a language head, classify without a classifier, a head of another width."""
    folder = save_tiny(transformers.BertModel, tmp_path)
    with pytest.raises(ModelUnavailable, match="masked-language"):
        runtime.load(spec(folder, cache_dir, outputs=["sparse"]))
    with pytest.raises(ModelUnavailable, match="classify"):
        runtime.load(spec(folder, cache_dir, tasks=["classify"]))
    with pytest.raises(ModelUnavailable, match="pooling none"):
        runtime.load(spec(folder, cache_dir, pooling="none"))
    save_file(
        {"net.0.weight": np.ones((2, 99), np.float32), "net.0.bias": np.ones(2, np.float32)},
        folder / "head.safetensors",
    )
    head = HeadSpec("linear", "head.safetensors", "", ["a", "b"])
    with pytest.raises(ModelUnavailable, match="reads 99 numbers, not 32"):
        runtime.load(spec(folder, cache_dir, tasks=["classify"], heads={"classify": head}))


def test_a_model_can_go_and_come_back(runtime, cache_dir, tmp_path):
    """Load, unload, load: the same vectors; unloaded it cannot run, and unloading again is fine."""
    folder = save_tiny(transformers.BertModel, tmp_path)
    sent = item("i", tiny_ids(6, 9))
    runtime.load(spec(folder, cache_dir))
    before = dense_rows(runtime.run("m@1", [sent]))
    assert runtime.memory()["m@1"] >= (folder / "model.safetensors").stat().st_size * 0.8
    runtime.unload("m@1")
    runtime.unload("m@1")
    assert runtime.memory() == {}
    with pytest.raises(ModelUnavailable):
        runtime.run("m@1", [sent])
    runtime.load(spec(folder, cache_dir))
    assert np.array_equal(before, dense_rows(runtime.run("m@1", [sent])))
