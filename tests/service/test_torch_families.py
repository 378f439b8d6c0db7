"""Every family of the torch runtime against transformers, on tiny random models of its kind."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shoal.errors import ModelUnavailable, RunFailed
from shoal.runtimes.families import families
from shoal.runtimes.registry import create
from shoal.runtimes.sequences import TokenSequence
from shoal.runtimes.torch.families import FAMILIES
from shoal.runtimes.torch.layout import packs_better
from shoal.runtimes.torch.runtime import TorchRuntime
from tests.support.lazy import Lazy
from tests.support.runtime_models import (
    MINILM,
    apart,
    array,
    cosines,
    dense_rows,
    item,
    package_path,
    random_ids,
    reference_mean,
    run_one,
    save_tiny,
    sparse_rows,
    spec,
    tiny_ids,
)

torch = Lazy("torch")
transformers = Lazy("transformers")
maps = Lazy("shoal.runtimes.torch.linear")
networks = Lazy("shoal.runtimes.torch.network")

LAST_PAD = {"pad_token_id": 1}
SHARED_KEYS = {"num_key_value_heads": 2, "pad_token_id": 0}
MODERN = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
# Class of transformers, without its ending -> (family, what its configuration needs). Windows are
# narrower than the sequences, MPNet's reach past the distances that it tells apart.
KINDS = {
    "Bert": ("bert", {}),
    "Roberta": ("roberta", LAST_PAD | {"type_vocab_size": 1}),
    "XLMRoberta": ("roberta", LAST_PAD | {"type_vocab_size": 1}),
    "Camembert": ("roberta", LAST_PAD),
    "MPNet": ("mpnet", LAST_PAD | {"max_position_embeddings": 200}),
    "DistilBert": ("distilbert", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}),
    "ModernBert": ("modernbert", MODERN | {"num_hidden_layers": 4, "local_attention": 8}),
    "NomicBert": ("nomic-bert", {}),
    "Gte": ("gte", LAST_PAD),
    "EuroBert": ("eurobert", SHARED_KEYS | {"bos_token_id": 1, "eos_token_id": 2}),
    "Llama": (
        "llama",
        SHARED_KEYS
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "Mistral": ("llama", SHARED_KEYS | {"sliding_window": 6}),
    "Qwen2": ("qwen2", SHARED_KEYS),
    "Qwen3": ("qwen3", SHARED_KEYS | {"head_dim": 16}),
    "Gemma3Text": (
        "gemma3",
        SHARED_KEYS
        | {
            "head_dim": 16,
            "num_hidden_layers": 7,
            "sliding_window": 6,
            "query_pre_attn_scalar": 20,
        },
    ),
}
CLASSIFIERS = ("Bert", "Roberta", "MPNet", "DistilBert", "ModernBert", "Gte", "Llama", "Qwen3")
TAGGERS = ("Bert", "Roberta", "MPNet", "DistilBert", "ModernBert", "Gte")
SPARSE = ("Roberta", "MPNet", "DistilBert", "ModernBert")
LENGTHS = (3, 1, 20, 5, 5, 47)


def save_kind(name, ending, folder, **changes):
    """Saves a tiny random model of a kind; with it, the model that was saved."""
    cls = getattr(transformers, f"{name}{ending}")
    save_tiny(cls, folder, **KINDS[name][1] | changes)
    return cls.from_pretrained(folder, dtype=torch.float32).eval()


def network(folder, *, packs=True, dtype=torch.float32, **fields):
    return networks.TorchTransformer(
        folder / "model.safetensors",
        spec(folder, folder, **fields),
        device="cpu",
        linear=maps.STOCK,
        packs=packs,
        dtype=dtype,
    )


def sequences_of(ids):
    return [TokenSequence(np.array(one, "<u2").tobytes(), 2) for one in ids]


@pytest.mark.parametrize("name", KINDS)
def test_family_equals_the_reference_in_either_layout(tmp_path, name):
    """Each token's vector in a mixed batch, packed or padded, is the reference's run alone."""
    model = save_kind(name, "Model", tmp_path)
    lengths = (
        (*LENGTHS, 190)
        if name == "MPNet"
        else LENGTHS[: -1 if KINDS[name][0] == "roberta" else None]
    )
    ids = sorted(tiny_ids(*lengths), key=len)
    with torch.inference_mode():
        expected = [model(torch.tensor([one])).last_hidden_state[0].numpy() for one in ids]
    for packs in (True, False):
        hidden = network(tmp_path, packs=packs).hidden(sequences_of(ids))
        for at, theirs in enumerate(expected):
            assert apart(hidden.rows(at), theirs) < 1e-5


def test_gemma_reads_both_ways_where_its_config_says_so(tmp_path):
    """EmbeddingGemma's windows reach half as far, to both sides."""
    model = save_kind("Gemma3Text", "Model", tmp_path, use_bidirectional_attention=True)
    (ids,) = tiny_ids(30)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).last_hidden_state[0].numpy()
    ours = network(tmp_path).hidden(sequences_of([ids])).rows(0)
    assert apart(ours, expected) < 1e-5


@pytest.mark.parametrize("name", CLASSIFIERS)
@pytest.mark.parametrize("labels", [1, 3])
def test_sequence_classifiers_equal_the_reference(tmp_path, name, labels):
    """A reranker's one logit, and three classes, whatever the family puts before them."""
    model = save_kind(name, "ForSequenceClassification", tmp_path, num_labels=labels)
    runtime = create("torch", "cpu", 1)
    task = "score" if labels == 1 else "classify"
    runtime.load(spec(tmp_path, tmp_path, tasks=[task]))
    ids = tiny_ids(9, 4, 30)
    ours = array(run_one(runtime, item("i", ids, task=task)), "logits").reshape(len(ids), labels)
    with torch.inference_mode():
        for row, one in zip(ours, ids, strict=True):
            assert row == pytest.approx(model(torch.tensor([one])).logits[0].numpy(), abs=1e-4)


@pytest.mark.parametrize("name", TAGGERS)
def test_token_classifiers_equal_the_reference(tmp_path, name):
    """Every token's logits, in a mixed batch."""
    model = save_kind(name, "ForTokenClassification", tmp_path, num_labels=5)
    ids = sorted(tiny_ids(3, 20, 9), key=len)
    ours = network(tmp_path, tasks=["extract"]).token_logits(sequences_of(ids))
    with torch.inference_mode():
        for logits, one in zip(ours, ids, strict=True):
            theirs = model(torch.tensor([one])).logits[0].numpy()
            assert logits == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("name", SPARSE)
def test_masked_language_heads_give_the_reference(tmp_path, name):
    """SPLADE vectors of each family's own language head."""
    model = save_kind(name, "ForMaskedLM", tmp_path)
    runtime = create("torch", "cpu", 1)
    runtime.load(spec(tmp_path, tmp_path, outputs=["sparse"]))
    ids = tiny_ids(9, 30)
    ours = sparse_rows(run_one(runtime, item("i", ids)), 120)
    with torch.inference_mode():
        for row, one in zip(ours, ids, strict=True):
            logits = model(torch.tensor([one])).logits[0]
            theirs = torch.log1p(torch.relu(logits)).amax(dim=0).numpy()
            assert row == pytest.approx(theirs, abs=1e-4)


def test_decoder_embedder_pools_the_last_real_token(tmp_path):
    """Last-token vectors of a ragged batch are those of each text alone."""
    model = save_kind("Qwen3", "Model", tmp_path)
    runtime = create("torch", "cpu", 1)
    ids = tiny_ids(*LENGTHS)
    for packing in (True, False):
        chosen = {"packing": packing}
        runtime.load(spec(tmp_path, tmp_path, pooling="last", normalize=False, options=chosen))
        ours = dense_rows(runtime.run("m@1", [item("i", ids)]))
        with torch.inference_mode():
            for vector, one in zip(ours, ids, strict=True):
                theirs = model(torch.tensor([one])).last_hidden_state[0, -1].numpy()
                assert vector == pytest.approx(theirs, abs=1e-4)


def test_forced_family_is_taken_and_an_unknown_one_lists_the_known(tmp_path):
    """`family` overrules the files; a name that is none of them says which there are."""
    save_tiny(transformers.BertModel, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["SomebodysBert"], "model_type": "somebody"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    network(tmp_path, family="bert")
    for family, what in ((None, "SomebodysBert"), ("whale", "family whale")):
        with pytest.raises(ModelUnavailable, match=f"{what} is not supported; known: bert, rob"):
            network(tmp_path, family=family)


def test_all_families_are_listed_for_the_catalog():
    """The union names every family of this runtime, and each has a model in these tests."""
    assert families().keys() >= FAMILIES.keys()
    assert {family for family, _ in KINDS.values()} == FAMILIES.keys()


def test_lower_precision_stays_near_float32(tmp_path):
    """bfloat16 and float16 vectors of MiniLM have a cosine of .9999 with the reference."""
    runtime = create("torch", "cpu", 1)
    folder = package_path(MINILM)
    ids = [random_ids(length) for length in (3, 17, 40)]
    theirs = [reference_mean(folder, one) for one in ids]
    for dtype in ("bfloat16", "float16"):
        runtime.load(spec(folder, tmp_path, options={"dtype": dtype, "packing": True}))
        ours = dense_rows(runtime.run("m@1", [item("i", ids)]))
        assert cosines(ours, theirs).min() >= 0.9999
        assert runtime.memory()["m@1"] < 0.6 * (folder / "model.safetensors").stat().st_size


def test_what_overflows_in_float16_is_run_in_float32(tmp_path):
    """An item with a word too large for float16 gets float32's vector; NaN stays that item's."""
    save_tiny(transformers.BertModel, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][99] *= 1e6
    weights["embeddings.word_embeddings.weight"][98] = np.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    items = [item("a", [[5, 6, 7]]), item("b", [[5, 99, 7]]), item("c", [[5, 98, 7]])]
    runtime = create("torch", "cpu", 1)
    runtime.load(spec(tmp_path, tmp_path))
    exact = runtime.run("m@1", items).outcomes
    runtime.load(spec(tmp_path, tmp_path, options={"dtype": "float16"}))
    ours = runtime.run("m@1", items).outcomes
    assert array(ours[0], "dense") == pytest.approx(array(exact[0], "dense"), abs=5e-3)
    assert array(ours[1], "dense") == pytest.approx(array(exact[1], "dense"), abs=1e-5)
    assert isinstance(ours[2], RunFailed)


def test_precision_is_read_from_the_config_or_refused(tmp_path):
    """`auto` takes what config.json says; a precision that is none is refused."""
    save_tiny(transformers.BertModel, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    runtime = create("torch", "cpu", 1)
    sizes = []
    for dtype in ("float32", "bfloat16"):
        (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
        runtime.load(spec(tmp_path, tmp_path, options={"dtype": "auto"}))
        sizes.append(runtime.memory()["m@1"])
    assert sizes[1] < 0.7 * sizes[0]
    with pytest.raises(ModelUnavailable, match="dtype is auto, float32, bfloat16, float16"):
        runtime.load(spec(tmp_path, tmp_path, options={"dtype": "int4"}))


def test_sharded_and_pickled_weights_give_the_same_vectors(tmp_path):
    """Two shards with an index, and a torch checkpoint, which needs allow_pickle."""
    whole = save_tiny(transformers.BertModel, tmp_path / "whole")
    weights = load_file(whole / "model.safetensors")
    names = sorted(weights)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for folder in ("sharded", "pickled"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_bytes((whole / "config.json").read_bytes())
    for file, chosen in halves.items():
        save_file({name: weights[name] for name in chosen}, tmp_path / "sharded" / file)
    places = {name: file for file, chosen in halves.items() for name in chosen}
    index = tmp_path / "sharded" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    state = {name: torch.from_numpy(values) for name, values in weights.items()}
    torch.save(state, tmp_path / "pickled" / "pytorch_model.bin")

    runtime = create("torch", "cpu", 1)
    sent = item("i", tiny_ids(7, 12))

    def vectors(folder, **fields):
        runtime.load(spec(tmp_path / folder, tmp_path, **fields))
        return dense_rows(runtime.run("m@1", [sent]))

    expected = vectors("whole")
    assert np.array_equal(vectors("sharded"), expected)
    assert np.array_equal(vectors("pickled", allow_pickle=True), expected)
    with pytest.raises(ModelUnavailable, match="allow_pickle"):
        vectors("pickled")
    for broken in ({"x": "../whole/model.safetensors"}, {"x": "a.safetensors"}, {"x": "c"}, 3):
        index.write_text(json.dumps({"weight_map": broken}))
        with pytest.raises(ModelUnavailable, match=r"index\.json"):
            vectors("sharded")


class Clocked:
    """A network whose layouts take a set time, by sleeping."""

    def __init__(self, inner, slow):
        self.packs, self.limits, self._inner, self._slow, self.runs = (
            True,
            inner.limits,
            inner,
            slow,
            0,
        )

    def hidden(self, group):
        self.runs += 1
        self._inner.packs = self.packs
        tokens = sum(len(sequence) for sequence in group)
        torch.zeros(1)
        if self.packs == self._slow:
            time.sleep(tokens * 1e-4)
        return self._inner.hidden(group)


@pytest.mark.parametrize("slow", [True, False], ids=["packed-slow", "padded-slow"])
def test_the_faster_layout_is_measured_once(tmp_path, slow):
    """The layout that is made slow is not chosen, and the choice is kept for the next load."""
    save_tiny(transformers.BertModel, tmp_path)
    clocked = Clocked(network(tmp_path), slow)
    assert packs_better(clocked, 1024, tmp_path / "cache", "here") is not slow
    ran = clocked.runs
    assert packs_better(clocked, 1024, tmp_path / "cache", "here") is not slow
    assert clocked.runs == ran
    assert packs_better(clocked, 1024, tmp_path / "cache", "elsewhere") is not slow
    assert clocked.runs > ran


def test_importing_the_families_loads_no_torch():
    """The catalog's check of families needs no torch."""
    program = "import sys, shoal.runtimes.families; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert TorchRuntime.needs
