"""Reading a LoRA adapter's folder: what it says, and what is refused by its name."""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from shoal.errors import ModelUnavailable
from shoal.ipc.messages import AdapterSpec
from shoal.runtimes.adapters import CONFIG, WEIGHTS, AdapterConfig, read_adapter
from shoal.runtimes.patterns import MAX_STEPS, Patterns, Refused

QUERY, VALUE = "encoder.layer.0.query", "encoder.layer.1.value"
USUAL = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["query", "value"]}


def halves(module, rank=2, out=5, width=3, dtype=np.float32):
    """Both matrices of a pair, as PEFT names them."""
    rng = np.random.default_rng((rank, out, width))
    at = f"base_model.model.{module}"
    return {
        f"{at}.lora_A.weight": rng.normal(size=(rank, width)).astype(dtype),
        f"{at}.lora_B.weight": rng.normal(size=(out, rank)).astype(dtype),
    }


def saved(folder, tensors=None, **config):
    """An adapter's folder, as its spec."""
    folder.mkdir(exist_ok=True)
    save_file(halves(QUERY) if tensors is None else tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(USUAL | config))
    return AdapterSpec("m@a@1", str(folder))


def config_of(**fields):
    return AdapterConfig(USUAL | fields, "m@a@1")


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_pair_has_its_scale_multiplied_in(tmp_path, dtype):
    """A is as stored, B times alpha over rank, float32 whatever the file has."""
    tensors = halves(QUERY, dtype=dtype)
    pair = read_adapter(saved(tmp_path, tensors)).pairs[QUERY]
    a, b = (tensors[f"base_model.model.{QUERY}.lora_{half}.weight"] for half in "AB")
    assert pair.a.dtype == pair.b.dtype == np.float32
    assert np.array_equal(pair.a, a)
    assert pair.b == pytest.approx(3 * b.astype(np.float64))


def test_rank_and_scale_follow_the_patterns_of_a_module():
    """The first pattern that ends a module's name counts; rslora divides by the rank's root."""
    config = config_of(
        use_rslora=True,
        rank_pattern={"value": 4, r"layer\.\d\.value": 8},
        alpha_pattern={"^encoder.layer.1.value": 10},
    )
    assert (config.rank(QUERY), config.rank(VALUE)) == (2, 4)
    assert config.scale(QUERY) == pytest.approx(6 / math.sqrt(2))
    assert config.scale(VALUE) == pytest.approx(10 / 2)


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({}, {QUERY, VALUE}),
        ({"target_modules": ["uery", VALUE]}, {VALUE}),
        ({"target_modules": r".*\.(query|key)"}, {QUERY}),
        ({"target_modules": "all-linear"}, {QUERY, VALUE}),
        ({"target_modules": None}, set()),
        ({"exclude_modules": ["query"]}, {VALUE}),
        ({"exclude_modules": r".*value"}, {QUERY}),
        ({"layers_to_transform": [1]}, {VALUE}),
        ({"layers_to_transform": 0}, {QUERY}),
        ({"layers_to_transform": 0, "layers_pattern": "layer"}, {QUERY}),
        ({"layers_to_transform": 0, "layers_pattern": "encoder.layer"}, {QUERY}),
        ({"layers_to_transform": [0, 1], "layers_pattern": ["block"]}, set()),
    ],
)
def test_config_means_the_modules_that_peft_would(fields, meant):
    """Names, endings of names, patterns, exclusions and numbers of layers."""
    config = config_of(**fields)
    assert {name for name in (QUERY, VALUE) if config.targets(name)} == meant


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; LORA"),
        ({"use_dora": True}, "use_dora is not supported"),
        ({"modules_to_save": ["classifier"]}, "modules_to_save is not supported"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"r": 3}, r"lora_A is \(2, 3\), lora_B is \(5, 2\), .* says rank 3"),
        ({"r": "2"}, "the rank of .*query is '2'"),
        ({"lora_alpha": None}, "lora_alpha of .*query is no number"),
        ({"lora_alpha": 10**400}, "lora_alpha of .*query is no number"),
        ({"rank_pattern": [2]}, "rank_pattern is no object"),
        ({"alpha_pattern": {"(": 2}}, "is no pattern"),
        ({"rank_pattern": {"(a)(?(1)b|c)": 2}}, r"\(\?\(1 is not supported in patterns"),
        ({"alpha_pattern": {r"(?<=\.)query": 2}}, r"\(\?<= is not supported in patterns"),
    ],
)
def test_config_that_is_no_plain_lora_is_refused(tmp_path, fields, said):
    """The field at fault is named."""
    with pytest.raises(ModelUnavailable, match=f"m@a@1.*{said}"):
        read_adapter(saved(tmp_path, **fields))


@pytest.mark.parametrize("pattern", ["([a-z0-9.]+)+!", "(a|[a-z.0-9])*!", ".*" * 20 + "!"])
@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_pattern_that_could_be_read_in_many_ways_is_not_tried_in_each(tmp_path, field, pattern):
    """Trying them would take longer than anyone waits."""
    module = QUERY.replace("query", "query" * 20)
    spec = saved(tmp_path, halves(module), **{field: {pattern: 2}})
    assert set(read_adapter(spec).pairs) == {module}
    assert not config_of(target_modules=pattern).targets(module)
    assert config_of(target_modules=[module], exclude_modules=pattern).targets(module)


def test_layers_are_named_not_described():
    """PEFT's own word for them is a name; a pattern in its place is refused."""
    config = config_of(layers_to_transform=[0], layers_pattern="(.*)*!")
    with pytest.raises(ModelUnavailable, match="is not the name of a list of layers"):
        config.targets(QUERY)


def test_config_with_too_many_names_is_refused():
    """All that a config describes modules with has a bound together."""
    config = config_of(target_modules=["x"] * (MAX_STEPS + 1))
    with pytest.raises(ModelUnavailable, match=f"m@a@1.*more than {MAX_STEPS} steps"):
        config.targets(QUERY)


@pytest.mark.parametrize("pattern", ["(.*){99999}" * 9, "((.*)*)*" * 9, "(?=.*)" * 99, "a" * 999])
def test_patterns_may_take_a_number_of_steps_together(pattern):
    """Whatever it is that takes them, the next pattern is refused."""
    patterns = Patterns(max_steps=10_000)

    def compared():
        return [patterns.ending(pattern, "." * letters) for letters in range(100)]

    with pytest.raises(Refused, match="more than 10000 steps"):
        compared()


def patterns():
    """Patterns of what names are described with."""
    unit = st.sampled_from(
        ["a", "b", r"\.", ".", r"\d", "[ab]", "[^a.]", r"\b", "^", "$", r"\w", "ab"]
    )
    times = st.sampled_from(
        ["*", "+", "?", "*?", "+?", "??", "{2}", "{,2}", "{1,}", "{1,3}", "{0}"]
    )
    return st.recursive(
        unit,
        lambda inner: st.one_of(
            st.builds("(?:{}){}".format, inner, times),
            st.builds("({}|{})".format, inner, inner),
            st.builds("{}{}".format, inner, inner),
            st.builds("(?={}){}".format, inner, inner),
            st.builds("(?!{}){}".format, inner, inner),
        ),
        max_leaves=6,
    )


@given(patterns(), st.text("ab.1", max_size=6))
def test_patterns_match_the_names_that_re_matches(pattern, name):
    """All of a name, or all that stands behind a dot."""
    assert Patterns().whole(pattern, name) == bool(re.fullmatch(pattern, name))
    assert Patterns().ending(pattern, name) == bool(re.match(rf"(.*\.)?({pattern})$", name))


NAN = {name: values * np.float32(np.nan) for name, values in halves(QUERY).items()}
HUGE = {name: values * np.float32(1e38) for name, values in halves(QUERY).items()}
LONG = {name: values.astype(np.int64) for name, values in halves(QUERY).items()}


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, "is empty"),
        (dict(list(halves(QUERY).items())[:1]), "query is half a pair: it has no lora_B"),
        (dict(list(halves(QUERY).items())[1:]), "query is half a pair: it has no lora_A"),
        ({"base_model.model.words.lora_embedding_A": np.ones((2, 9))}, "words.lora_embedding_A is"),
        (halves(QUERY) | {"base_model.model.head.weight": np.ones(3)}, "head.weight is no half"),
        (NAN, "query.lora_A holds numbers that are not finite"),
        (HUGE, "query.lora_B holds numbers that are not finite"),
        (LONG, "query.lora_A is no matrix of floating-point numbers"),
    ],
)
def test_weights_that_are_no_pairs_are_refused(tmp_path, tensors, said):
    """The tensor at fault is named."""
    with pytest.raises(ModelUnavailable, match=f"m@a@1.*{said}"):
        read_adapter(saved(tmp_path, tensors))


def test_folder_that_lacks_a_file_is_refused(tmp_path):
    """What is missing is named, and a config that cannot be read says so."""
    spec = saved(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(ModelUnavailable, match=f"has no {WEIGHTS}"):
        read_adapter(spec)
    for content, said in (("{", "is no JSON:"), ("[]", "is no JSON object")):
        (tmp_path / CONFIG).write_text(content)
        with pytest.raises(ModelUnavailable, match=said):
            read_adapter(spec)
    (tmp_path / CONFIG).unlink()
    with pytest.raises(ModelUnavailable, match=f"has no {CONFIG}"):
        read_adapter(spec)


def test_weights_that_are_cut_short_are_refused(tmp_path):
    """Wherever the file ends early."""
    spec = saved(tmp_path)
    whole = save(halves(QUERY))
    for end in range(0, len(whole), 7):
        (tmp_path / WEIGHTS).write_bytes(whole[:end])
        with pytest.raises(ModelUnavailable):
            read_adapter(spec)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text("a(.*[5", max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("q(", max_size=2), inner),
    max_leaves=3,
)
FIELDS = (
    *("peft_type", "r", "lora_alpha", "bias", "rank_pattern", "alpha_pattern", "target_modules"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "use_rslora"),
)


@given(st.sampled_from(FIELDS), JUNK)
def test_config_of_any_form_is_read_or_refused(field, junk):
    """No value of a field raises anything but `ModelUnavailable`."""
    config = config_of(**{"layers_to_transform": [1]} | {field: junk})
    for ask in (config.check, lambda: config.scale(QUERY), lambda: config.targets(QUERY)):
        with suppress(ModelUnavailable):
            ask()
