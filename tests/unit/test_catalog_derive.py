"""What is read from the folder of a model, and what is asked for."""

import json

import pytest

from shoal.catalog.derive import MAX_CONFIG_BYTES, derive
from shoal.errors import CatalogError

BERT = {
    "architectures": ["BertModel"],
    "hidden_size": 384,
    "model_type": "bert",
    "max_position_embeddings": 512,
    "vocab_size": 30522,
}
SENTENCES = ("Transformer", "Pooling", "Normalize")
OLD_POOLING = {
    "word_embedding_dimension": 384,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": True,
    "include_prompt": True,
}
CODE = ("onnx", "bert")


def folder(path, config=BERT, modules=(), pooling=None, **files):
    """A folder as training libraries write it; files: others, by stem."""
    listed = []
    for index, kind in enumerate(modules):
        place = f"{index}_{kind}" if index else ""
        (path / place).mkdir(exist_ok=True)
        listed.append({"idx": index, "name": str(index), "path": place, "type": f"library.{kind}"})
        if pooling is not None and kind.endswith("Pooling"):
            (path / place / "config.json").write_text(json.dumps(pooling))
    if modules:
        files["modules"] = listed
    for name, value in {"config": config, "tokenizer": {}, **files}.items():
        if value is not None:
            (path / f"{name}.json").write_text(json.dumps(value))
    (path / "model.safetensors").write_bytes(b"\0" * 2**20)
    return path


def of(path):
    return derive(path, lambda _: CODE)


@pytest.mark.parametrize(
    ("pooling", "mode"),
    [
        (OLD_POOLING, "mean"),
        ({"pooling_mode": "mean", "include_prompt": True}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_derive_reads_an_embedder_of_either_form(tmp_path, pooling, mode):
    """Pooling is read as older and newer libraries write it; the other fields come with it."""
    found = of(
        folder(
            tmp_path,
            modules=SENTENCES,
            pooling=pooling,
            sentence_bert_config={"max_seq_length": 256},
            tokenizer_config={"model_max_length": 512},
            config_sentence_transformers={"prompts": {"query": "query: ", "document": ""}},
        )
    )
    assert not found.gaps
    assert not found.notes
    assert found.fields["pooling"] == mode
    assert found.fields["normalize"] is True
    assert found.fields["outputs"] == {"dense": {"dim": 384}}
    assert found.fields["tasks"] == ["encode", "score"]
    assert found.fields["prompts"] == {"query": "query: "}
    assert found.fields["max_tokens"] == 256
    assert (found.fields["runtime"], found.fields["family"]) == CODE
    assert list(found.fields["digests"]) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("config", "modules", "expected"),
    [
        (
            {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}},
            (),
            {"tasks": ["score"], "scorer": "joint"},
        ),
        (
            {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"}},
            (),
            {"tasks": ["classify"]},
        ),
        (
            {"architectures": ["BertForTokenClassification"]},
            (),
            {"tasks": ["extract"], "extracts": ["entities"]},
        ),
        (
            {"architectures": ["BertForMaskedLM"]},
            ("MLMTransformer", "SpladePooling"),
            {"tasks": ["encode"], "outputs": {"sparse": {"dim": 30522}}},
        ),
    ],
)
def test_derive_knows_a_network_by_its_last_layer(tmp_path, config, modules, expected):
    """Scorers, classifiers, taggers and sparse encoders say what they are; nothing is asked."""
    found = of(folder(tmp_path, BERT | config, modules))
    assert not found.gaps
    assert found.fields | expected == found.fields


def test_derive_asks_for_what_no_file_says(tmp_path):
    """An encoder alone does not say how it is pooled, nor anything where its tokenizer lies."""
    found = of(folder(tmp_path, tokenizer=None))
    assert set(found.gaps) == {"pooling", "tokenizer"}
    (tmp_path / "config.json").unlink()
    assert {"runtime", "tasks", "max_tokens"} <= set(of(tmp_path).gaps)


def test_derive_takes_the_shortest_of_the_lengths(tmp_path):
    """A table of positions that begins behind the one of padding holds two tokens less."""
    config = {"model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1}
    found = of(folder(tmp_path, BERT | config, tokenizer_config={"model_max_length": 10**30}))
    assert found.fields["max_tokens"] == 512


def test_derive_counts_half_precision_twice(tmp_path):
    """Weights are widened to float32 when they are loaded, and so is the estimate."""
    one = of(folder(tmp_path)).fields["memory_mib"]
    two = of(folder(tmp_path, BERT | {"dtype": "bfloat16"})).fields["memory_mib"]
    assert two > one


def test_derive_leaves_out_scores_that_would_be_others(tmp_path):
    """A model that compares by dot product without unit vectors is not asked for cosines."""
    library = {"similarity_fn_name": "dot", "default_prompt_name": "query"}
    found = of(
        folder(
            tmp_path,
            modules=SENTENCES[:2],
            pooling=OLD_POOLING,
            config_sentence_transformers=library,
        )
    )
    assert found.fields["tasks"] == ["encode"]
    assert found.fields["normalize"] is False
    assert len(found.notes) == 2


@pytest.mark.parametrize(
    ("modules", "pooling", "said"),
    [
        (("Transformer", "Pooling", "Dense"), OLD_POOLING, "Dense"),
        (SENTENCES, {"pooling_mode": "max"}, "max"),
        (SENTENCES, OLD_POOLING | {"include_prompt": False}, "prompt"),
        (("Transformer", "SpladePooling"), {"pooling_strategy": "sum"}, "sum"),
    ],
)
def test_derive_refuses_what_no_runtime_computes(tmp_path, modules, pooling, said):
    """A network that would give other numbers here is an error that names the cause."""
    with pytest.raises(CatalogError, match=said):
        of(folder(tmp_path, modules=modules, pooling=pooling))


def test_derive_refuses_a_pickle_and_an_empty_folder(tmp_path):
    """Weights in a pickle are named as such; without weights there is no model."""
    folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CatalogError, match="pickle"):
        of(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(CatalogError, match="no weights"):
        of(tmp_path)
    with pytest.raises(CatalogError, match="no folder"):
        of(tmp_path / "none")
    with pytest.raises(CatalogError, match="cannot be read"):
        of(tmp_path / ("a" * 300))


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": ' + "[" * 100_000])
def test_derive_names_a_file_that_is_not_what_it_should_be(tmp_path, text):
    """Nonsense in a file is a CatalogError with its path, and never a traceback."""
    folder(tmp_path)
    for name in ("config.json", "modules.json"):
        before = (tmp_path / name).read_bytes() if (tmp_path / name).exists() else b"[]"
        (tmp_path / name).write_text(text)
        with pytest.raises(CatalogError, match=name):
            of(tmp_path)
        (tmp_path / name).write_bytes(before)


def test_derive_reads_no_file_over_the_limit(tmp_path):
    """A configuration of more than its bound is refused before it is parsed."""
    folder(tmp_path)
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MAX_CONFIG_BYTES + 1)
    with pytest.raises(CatalogError, match="larger than"):
        of(tmp_path)
