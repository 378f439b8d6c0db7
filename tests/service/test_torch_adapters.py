"""LoRA adapters of the torch runtime against PEFT, on tiny random models, and at their faults."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shoal.errors import ModelUnavailable, RunFailed
from shoal.ipc.messages import AdapterSpec
from shoal.runtimes.adapters import CONFIG, WEIGHTS, read_adapter
from shoal.runtimes.registry import create
from tests.service.test_torch_families import KINDS, save_kind
from tests.support.lazy import Lazy
from tests.support.runtime_models import (
    apart,
    array,
    cosines,
    dense_rows,
    item,
    run_one,
    save_tiny,
    spec,
    tiny_ids,
)

peft = Lazy("peft")
torch = Lazy("torch")
transformers = Lazy("transformers")

# PEFT asks transformers for a name that transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

ONE_OF_EACH = {family: name for name, (family, _) in reversed(KINDS.items())}
# One text for each adapter and the bare model, then ragged ones.
IDS = [*tiny_ids(9) * 6, *tiny_ids(3, 1, 20, 5, 5, 17, 40, 9, 5, 20, 2, 33)]
QUERY = "encoder.layer.0.attention.self.query"


def adapted(model, folder, *configs):
    """PEFT's model with a random adapter `a0`, `a1`, ... of each config, saved in the folder."""
    torch.manual_seed(3)
    for number, fields in enumerate(configs):
        config = peft.LoraConfig(**fields)
        if number:
            model.add_adapter(f"a{number}", config)
        else:
            model = peft.get_peft_model(model, config, adapter_name="a0")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    return model.eval()


def referred(model, adapter, ids):
    """What PEFT's model gives for one sequence, alone; adapter "" is the bare model."""
    with torch.inference_mode():
        if adapter:
            model.set_adapter(adapter)
            return model(torch.tensor([ids]))
        with model.disable_adapter():
            return model(torch.tensor([ids]))


def five_configs(model):
    """All of what a config may say of a model whose layers are alike."""
    linear = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    ends = sorted({name.rsplit(".", 1)[1] for name in linear if ".0." in name})
    pattern = next(name for name in linear if ".0." in name).split(".0.")[0].rsplit(".", 1)[-1]
    some = {"rank_pattern": {ends[0]: 5}, "alpha_pattern": {ends[-1]: 11}}
    first = {"layers_to_transform": [0], "layers_pattern": pattern}
    return (
        {"target_modules": "all-linear", "r": 4, "lora_alpha": 6},
        {"target_modules": ends[:1], "r": 2, "lora_alpha": 3},
        {"target_modules": rf".*\.1\..*({'|'.join(ends)})", "r": 3},
        {"target_modules": ends, "r": 3, "lora_alpha": 4, "use_rslora": True},
        {"target_modules": ends, "r": 2, **some, **first},
    )


def take(runtime, folder, name, key="m@1"):
    return runtime.load_adapter(key, AdapterSpec(name, str(folder / name)))


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_five_adapters_in_one_batch_equal_peft_run_alone(tmp_path, family):
    """Every token of every text, packed or padded, beside other adapters and the bare model."""
    base = save_kind(ONE_OF_EACH[family], "Model", tmp_path)
    model = adapted(base, tmp_path / "adapters", *five_configs(base))
    names = ["a0", "a1", "a2", "a3", "a4", ""]
    sent = [
        item(str(at), [ids], adapter=names[at % 6], params={"outputs": ["multivector", "dense"]})
        for at, ids in enumerate(IDS)
    ]
    expected = [
        referred(model, one.adapter, ids).last_hidden_state[0].numpy()
        for one, ids in zip(sent, IDS, strict=True)
    ]
    means = [states.mean(axis=0) for states in expected]
    runtime = create("torch", "cpu", 1)
    given = {"outputs": ["multivector", "dense"], "normalize": False}
    for packing in (True, False):
        runtime.load(spec(tmp_path, tmp_path, options={"packing": packing}, **given))
        for name in names[:5]:
            take(runtime, tmp_path / "adapters", name)
        ran = runtime.run("m@1", sent, block_tokens=100)
        for one, outcome, theirs in zip(sent, ran.outcomes, expected, strict=True):
            assert apart(array(outcome, "multivector"), theirs) < 1e-5
            assert apart(array(run_one(runtime, one), "multivector"), theirs) < 1e-5
        assert cosines(dense_rows(ran), means).min() > 1 - 1e-5
        # The texts are the same in the first six: only adapters set them apart.
        six = dense_rows(ran)[:6]
        assert all(apart(six[i], six[j]) > 1e-3 for i in range(6) for j in range(i))


def test_bfloat16_model_stays_near_peft_in_float32(tmp_path):
    """The adapter is in the base's precision; beside it, what float32 needs is kept and counted."""
    base = save_kind("Bert", "Model", tmp_path)
    model = adapted(base, tmp_path / "adapters", {"target_modules": "all-linear"})
    runtime = create("torch", "cpu", 1)
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        runtime.load(spec(tmp_path, tmp_path, options={"dtype": dtype}))
        sizes[dtype] = take(runtime, tmp_path / "adapters", "a0")
    kept = read_adapter(AdapterSpec("a0", str(tmp_path / "adapters" / "a0")))
    assert sizes["bfloat16"] == sizes["float32"] / 2 + kept.nbytes
    ours = dense_rows(runtime.run("m@1", [item("i", IDS, adapter="a0")]))
    theirs = [referred(model, "a0", ids).last_hidden_state[0].numpy().mean(axis=0) for ids in IDS]
    assert cosines(ours, theirs).min() > 0.999


def test_adapter_that_overflows_float16_is_run_in_float32(tmp_path):
    """Its items get the numbers of float32, and the bare ones beside them stay as they are.

    They are those of the adapter that was loaded, whatever becomes of its folder.
    """
    base = save_kind("Bert", "Model", tmp_path)
    fields = {"target_modules": ["output.dense"], "lora_alpha": 4e5}
    model = adapted(base, tmp_path / "adapters", fields)
    runtime = create("torch", "cpu", 1)
    runtime.load(spec(tmp_path, tmp_path, normalize=False, options={"dtype": "float16"}))
    take(runtime, tmp_path / "adapters", "a0")
    sent = [item("i", IDS[:1], adapter="a0"), item("j", IDS[:1])]
    assert isinstance(runtime._models["m@1"].run(sent).outcomes[0], RunFailed)
    shutil.rmtree(tmp_path / "adapters")
    ran = runtime.run("m@1", sent)
    for ours, adapter in zip(dense_rows(ran), ("a0", ""), strict=True):
        theirs = referred(model, adapter, IDS[0]).last_hidden_state[0].numpy().mean(axis=0)
        assert cosines([ours], [theirs]).min() > 0.999
    by_hand(tmp_path / "large", {QUERY: pair(32, 32)}, lora_alpha=1e7)
    with pytest.raises(ModelUnavailable, match=r"query has numbers too large for torch\.float16"):
        take(runtime, tmp_path, "large")


@pytest.mark.parametrize("ending", ["SequenceClassification", "TokenClassification"])
def test_checkpoint_heads_read_adapted_vectors(tmp_path, ending):
    """Logits of a classifier are PEFT's, with an adapter and without, in one batch."""
    base = save_kind("Bert", f"For{ending}", tmp_path, num_labels=3)
    model = adapted(
        base, tmp_path / "adapters", {"target_modules": ["query", "intermediate.dense"]}
    )
    runtime = create("torch", "cpu", 1)
    task = "classify" if ending.startswith("Seq") else "extract"
    runtime.load(spec(tmp_path, tmp_path, tasks=[task]))
    take(runtime, tmp_path / "adapters", "a0")
    loaded = runtime._models["m@1"]
    for adapter in ("a0", ""):
        theirs = [referred(model, adapter, ids).logits[0].numpy() for ids in IDS]
        sent = item("i", IDS, task=task, adapter=adapter)
        if task == "classify":
            ours = array(run_one(runtime, sent), "logits")
            assert apart(ours, np.stack(theirs)) < 1e-5
            continue
        work = {}
        plan = loaded._plan(sent, work)
        loaded._forward(plan.need, work[plan.need], 100)
        for row, logits in zip(plan.rows, theirs, strict=True):
            assert apart(work[plan.need].tokens[row], logits) < 1e-5


def test_scores_by_similarity_and_by_tokens_are_of_adapted_vectors(tmp_path):
    """A score with an adapter is that of a checkpoint with the adapter merged into it."""
    base = save_kind("Bert", "Model", tmp_path / "base")
    model = adapted(base, tmp_path / "adapters", {"target_modules": ["query", "output.dense"]})
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    runtime = create("torch", "cpu", 1)
    for scorer in ("similarity", "maxsim"):
        asked = {"task": "score", "layout": "shared"}
        for key in ("base", "merged"):
            fields = {"tasks": ["score"], "scorer": scorer, "outputs": ["dense", "multivector"]}
            runtime.load(spec(tmp_path / key, tmp_path, key=key, **fields))
        take(runtime, tmp_path / "adapters", "a0", "base")
        ours = array(run_one(runtime, item("i", IDS, adapter="a0", **asked), "base"), "logits")
        theirs = array(run_one(runtime, item("i", IDS, **asked), "merged"), "logits")
        bare = array(run_one(runtime, item("i", IDS, **asked), "base"), "logits")
        assert apart(ours, theirs) < 1e-5
        assert apart(ours, bare) > 1e-3


def pair(out, width, rank=2):
    rng = np.random.default_rng((out, width))
    return [rng.normal(0, 0.2, size).astype(np.float32) for size in ((rank, width), (out, rank))]


def by_hand(folder, pairs, **fields):
    """An adapter's folder, of module -> (A, B)."""
    folder.mkdir(exist_ok=True, parents=True)
    tensors = {
        f"base_model.model.{name}.lora_{half}.weight": values
        for name, both in pairs.items()
        for half, values in zip("AB", both, strict=True)
    }
    save_file(tensors, folder / WEIGHTS)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": list(pairs)}
    (folder / CONFIG).write_text(json.dumps(config | fields))


@pytest.mark.parametrize(
    ("kind", "module"),
    [("NomicBert", "encoder.layers.1.attn.Wqkv"), ("Gte", "encoder.layer.0.mlp.up_gate_proj")],
)
def test_adapter_may_name_the_matrices_of_the_file(tmp_path, kind, module):
    """A fused matrix with its pair gives what the checkpoint with the product added gives."""
    save_kind(kind, "Model", tmp_path / "base")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    name = next(name for name in weights if name.endswith(f"{module}.weight"))
    a, b = pair(*weights[name].shape)
    by_hand(tmp_path / "adapter", {module: (a, b)})
    (tmp_path / "merged").mkdir()
    save_file(weights | {name: weights[name] + b @ a}, tmp_path / "merged" / "model.safetensors")
    config = (tmp_path / "base" / "config.json").read_bytes()
    (tmp_path / "merged" / "config.json").write_bytes(config)
    runtime = create("torch", "cpu", 1)
    for key in ("base", "merged"):
        runtime.load(spec(tmp_path / key, tmp_path, key=key, normalize=False))
    bare = dense_rows(runtime.run("base", [item("i", IDS)]))
    take(runtime, tmp_path, "adapter", "base")
    ours = dense_rows(runtime.run("base", [item("i", IDS, adapter="adapter")]))
    theirs = dense_rows(runtime.run("merged", [item("i", IDS)]))
    for at in range(len(IDS)):
        assert apart(ours[at], theirs[at]) < 1e-5 < apart(ours[at], bare[at])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny(transformers.BertModel, tmp_path_factory.mktemp("base"))


@pytest.fixture
def runtime(base, tmp_path):
    made = create("torch", "cpu", 1)
    made.load(spec(base, tmp_path))
    return made


@pytest.mark.parametrize(
    ("pairs", "fields", "said"),
    [
        (
            {QUERY: (48, 48)},
            {},
            r"query is made for a map of \(48, 48\), the model's is \(32, 32\)",
        ),
        ({"layers.0.self_attn.q_proj": (32, 32)}, {}, "q_proj is no linear map of the model"),
        ({"embeddings.LayerNorm": (32, 32)}, {}, "LayerNorm is no linear map of the model"),
        ({QUERY: (32, 32), f"bert.{QUERY}": (32, 32)}, {}, "names a module twice"),
        ({"pooler.dense": (32, 32)}, {}, "adapts nothing that the model computes"),
        (
            {QUERY: (32, 32)},
            {"target_modules": ["query"]},
            r"half an adapter: it has no pair for encoder\.layer\.1\.attention\.self\.query",
        ),
    ],
)
def test_adapter_that_does_not_fit_is_refused_and_leaves_nothing(
    runtime, tmp_path, pairs, fields, said
):
    """The module is named, both shapes where they differ, and the model answers as before."""
    by_hand(tmp_path / "bad", {name: pair(*size) for name, size in pairs.items()}, **fields)
    before, sent = runtime.memory(), item("i", IDS)
    expected = dense_rows(runtime.run("m@1", [sent]))
    with pytest.raises(ModelUnavailable, match=f"^bad: .*{said}"):
        take(runtime, tmp_path, "bad")
    assert runtime.memory() == before
    failed, whole = runtime.run("m@1", [item("j", IDS, adapter="bad"), sent]).outcomes
    assert isinstance(failed, ModelUnavailable)
    assert np.array_equal(array(whole, "dense"), np.stack(expected))


def test_pair_of_a_map_that_nothing_reads_is_passed_over(tmp_path):
    """BERT's pooler counts for a classifier only, and there it is refused by its name."""
    save_kind("Bert", "ForSequenceClassification", tmp_path, num_labels=3)
    by_hand(tmp_path / "a", {QUERY: pair(32, 32), "pooler.dense": pair(32, 32)})
    by_hand(tmp_path / "b", {f"bert.{QUERY}": pair(32, 32), "bert.pooler.dense": pair(32, 32)})
    runtime = create("torch", "cpu", 1)
    for folder in "ab":
        runtime.load(spec(tmp_path, tmp_path, tasks=["classify"]))
        with pytest.raises(ModelUnavailable, match=r"pooler\.dense is of a head, and heads take"):
            take(runtime, tmp_path, folder)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    runtime.load(spec(tmp_path, tmp_path))
    assert take(runtime, tmp_path, "a") == 2 * 2 * 32 * 4


def test_adapters_are_apart_fresh_and_gone_when_unloaded(runtime, base, tmp_path):
    """A key that is loaded again is the new one; another key stays; bytes come back."""
    by_hand(tmp_path / "a", {QUERY: pair(32, 32)})
    by_hand(tmp_path / "b", {QUERY: pair(32, 32)}, lora_alpha=40)
    own = runtime.memory()["m@1"]

    def vector(adapter):
        return dense_rows(runtime.run("m@1", [item("i", IDS[:1], adapter=adapter)]))[0]

    sizes = [take(runtime, tmp_path, name) for name in "ab"]
    assert runtime.memory()["m@1"] == own + sum(sizes)
    bare, first, other = (vector(name) for name in ("", "a", "b"))
    by_hand(tmp_path / "a", {QUERY: pair(32, 32)}, lora_alpha=-3)
    assert np.array_equal(vector("a"), first)  # the file is read at the load, not later
    take(runtime, tmp_path, "a")
    assert runtime.memory()["m@1"] == own + sum(sizes)
    assert apart(vector("a"), first) > 1e-4
    assert np.array_equal(vector("b"), other)
    assert np.array_equal(vector(""), bare)
    runtime.unload_adapter("m@1", "b")
    runtime.unload_adapter("m@1", "nobody")
    with pytest.raises(ModelUnavailable, match="b is not loaded"):
        vector("b")
    runtime.load(spec(base, tmp_path))
    assert runtime.memory()["m@1"] == own
    with pytest.raises(ModelUnavailable, match="a is not loaded"):
        vector("a")
    runtime.unload("m@1")
    with pytest.raises(ModelUnavailable, match="m@1 is not loaded"):
        take(runtime, tmp_path, "a")


def test_adapter_whose_numbers_overflow_fails_its_own_items(runtime, tmp_path):
    """NaN from one adapter stays with its items, in the very same pass."""
    a, b = pair(32, 32)
    by_hand(tmp_path / "a", {"encoder.layer.1.output.dense": pair(32, 64)})
    by_hand(tmp_path / "huge", {QUERY: (a * np.float32(1e30), b * np.float32(1e30))})
    for name in ("a", "huge"):
        take(runtime, tmp_path, name)
    names = ("a", "huge", "", "huge")
    sent = [item(str(at), IDS[:2], adapter=name) for at, name in enumerate(names)]
    outcomes = runtime.run("m@1", sent).outcomes
    assert [isinstance(one, RunFailed) for one in outcomes] == [False, True, False, True]
    for at in (0, 2):
        alone = array(run_one(runtime, sent[at]), "dense")
        assert apart(array(outcomes[at], "dense"), alone) < 1e-5
