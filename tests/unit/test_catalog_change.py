"""Records of the catalog, the difference of two, and what is refused."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import fields, replace

from shoal.catalog.change import (
    LIVE_FIELDS,
    Record,
    clashes,
    decode_record,
    difference,
    encode_record,
    not_live,
    refusals,
    shelf_id,
    shelf_key,
)
from shoal.catalog.load import load
from shoal.catalog.schema import Adapter, Entry, Output, Profile, Sampling
from shoal.errors import CatalogError


def _entry(name="a", **more):
    plain = {"tasks": ["encode"], "source": "file:///w", "outputs": {"dense": Output(8)}}
    return Entry(id=name, **(plain | more))


@pytest.fixture(scope="module")
def builtin():
    return load(None).entries


def test_record_comes_back_as_it_was(builtin):
    """Every built-in entry survives its record, which has no field at its default."""
    for entry in builtin:
        data = encode_record(Record(entry, "folder"))
        assert decode_record(shelf_key(entry.id), data) == Record(entry, "folder")
    plain = msgspec.json.decode(encode_record(Record(_entry(profile=Profile(2048)), "command")))
    assert plain == {
        "entry": {
            "id": "a",
            "tasks": ["encode"],
            "source": "file:///w",
            "outputs": {"dense": {"dim": 8}},
            "profile": {"batch_tokens": 2048},
        },
        "origin": "command",
    }


def test_record_keys_are_keys_and_differ():
    """Ids of every allowed kind have keys of a shelf's own characters, no two the same."""
    ids = ["a", "a.b", "a_b", "a-b", "org/a.b", "org/a", "org/a..b", "org/a.-b"]
    keys = [shelf_key(each) for each in ids]
    assert len(set(keys)) == len(ids)
    assert not any(set(key) - set("abcdefghijklmnopqrstuvwxyz-_=/2E") for key in keys)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no valid JSON"),
        (b"\xff\x00", "no valid JSON"),
        (b"[" * 100_000, "no valid JSON"),
        (b"[]", "no record"),
        (b'{"entry":{}}', "no record"),
        (b'{"entry":{},"origin":"elsewhere"}', "no record"),
        (b'{"entry":{"id":"a"},"origin":"folder"}', "`source` is missing"),
        (b'{"entry":3,"origin":"folder"}', "must be a mapping"),
    ],
)
def test_record_that_cannot_be_read_says_why(data, says):
    """Bytes that are no record are one error with the reason."""
    with pytest.raises(CatalogError, match=says):
        decode_record("a", data)


def test_record_that_makes_no_sense_says_why():
    """An unknown (newer) field, a contradiction and another model's key are told by name."""
    plain = msgspec.json.decode(encode_record(Record(_entry(), "folder")))
    plain["newer"] = plain["entry"]["newer"] = 1
    with pytest.raises(CatalogError, match="unknown key `newer`"):
        decode_record("a", msgspec.json.encode(plain))
    del plain["entry"]["newer"]
    assert decode_record("a", msgspec.json.encode(plain)).entry == _entry()
    with pytest.raises(CatalogError, match="key of another entry"):
        decode_record("b", msgspec.json.encode(plain))
    del plain["entry"]["outputs"]
    with pytest.raises(CatalogError, match="`encode` needs an output"):
        decode_record("a", msgspec.json.encode(plain))


def test_difference_names_what_differs():
    """Added, changed (with the fields), removed and same entries are told apart."""
    present = [_entry("a"), _entry("b"), _entry("c", pinned=True)]
    wanted = [_entry("d"), _entry("c", profile=Profile(64)), _entry("b")]
    changes = difference(wanted, present)
    assert [entry.id for entry in changes.added] == ["d"]
    assert [entry.id for entry in changes.removed] == ["a"]
    assert [entry.id for entry in changes.same] == ["b"]
    (pair,) = changes.changed
    assert (pair.before.pinned, pair.after.pinned) == (True, False)
    told = {field.name: (field.before, field.after) for field in pair.fields}
    assert told.keys() == {"pinned", "profile"}
    assert told["pinned"] == (True, False)
    assert changes
    assert not difference(present, present)


def _other(value):
    """A value of the same kind that is another one."""
    if value is None:
        return "x"
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, Sampling):
        return Sampling(top_k=7)
    return [*value, "x"] if isinstance(value, list) else {**value, "x": "x"}


def test_change_of_what_runs_needs_another_revision():
    """Of every field but the live ones a change is refused unless the revision changes as well."""
    before = _entry()
    names = {field.name for field in fields(Entry)}
    assert names > LIVE_FIELDS
    for name in names - {"id", "revision", "profile"}:
        after = replace(before, **{name: _other(getattr(before, name))})
        reasons = not_live(difference([after], [before]))
        if name in LIVE_FIELDS:
            assert reasons == []
        else:
            assert len(reasons) == 1
            assert name in reasons[0]
        assert not not_live(difference([replace(after, revision="2")], [before]))
    (reason,) = refusals(difference([_entry(normalize=False)], [before]))
    assert "a change of normalize needs another `revision` than `1`" in reason


def test_change_that_makes_no_sense_or_takes_a_name_is_refused():
    """Sense and names are checked over all that will be there; what goes frees its names."""
    a, b = _entry("a"), _entry("b", aliases=["bee"])
    assert refusals(difference([a, b], [a])) == []
    assert "needs an output" in refusals(difference([replace(a, outputs={})], []))[0]
    taker = _entry("c", aliases=["bee"])
    assert "`bee` is taken by `b`" in refusals(difference([a, b, taker], [a, b]))[0]
    assert "`bee` is taken by `b`" in refusals(difference([taker], []), others=[b])[0]
    assert refusals(difference([a, taker], [a, b])) == []
    assert refusals(difference([a, taker], [a, b]), others=[b]) == []


def test_clash_leaves_out_the_later_one_only():
    """The first to have a name keeps it, and what is left out takes nobody's name."""
    entries = [_entry("a"), _entry("b", aliases=["a", "c"]), _entry("c"), _entry("c")]
    assert list(clashes(entries)) == ["b", "c"]
    assert "`a` is taken by `a`" in clashes(entries)["b"]
    assert clashes(entries[::2]) == {}


def _adapter(name="x", base="a", **more):
    return Adapter(name=name, base=base, source="file:///x", **more)


def test_record_of_an_adapter_stands_under_its_own_key():
    """It comes back as it was, its key is none that a model has, and it is checked like one."""
    adapter = _adapter("X.1", base="org/a.b", digests={"adapter_config.json": "0" * 64})
    key = shelf_key(adapter.id)
    assert key == "org/a=2Eb=40X=2E1"
    assert shelf_id(key) == adapter.id == "org/a.b@X.1"
    data = encode_record(Record(adapter, "command"))
    assert decode_record(key, data) == Record(adapter, "command")
    with pytest.raises(CatalogError, match="`tasks` is missing"):
        decode_record(shelf_key("a"), data)
    with pytest.raises(CatalogError, match="key of another entry"):
        decode_record(shelf_key("a@x"), data)
    strange = encode_record(Record(_adapter(digests={"model.bin": "0" * 64}), "command"))
    with pytest.raises(CatalogError, match=r"`model\.bin` is none of adapter_config\.json"):
        decode_record(shelf_key("a@x"), strange)


def test_adapter_needs_its_model_and_a_name_of_its_own():
    """One of no model, or with its model's revision as its name, is left out, also by a change.

    A model cannot go before its adapters.
    """
    a = _entry("a", aliases=["alias"])
    assert clashes([_adapter(), a]) == {}
    assert "no model of the catalog has the id `b`" in clashes([a, _adapter(base="b")])["b@x"]
    assert "the name of revision `1` of `a`" in clashes([a, _adapter("1")])["a@1"]
    assert refusals(difference([_adapter()], []), others=[a]) == []
    assert refusals(difference([], [a]), others=[_adapter()]) == [
        "model `a` still has an adapter; before it: shoal lora remove a@x"
    ]
    many = [_adapter(f"t{n}") for n in range(30)]
    (said,) = refusals(difference([], [a]), others=many)
    assert "still has 30 adapters; before it: shoal lora remove a@t0 a@t1 " in said
    assert said.endswith(" ...")
    assert refusals(difference([], [a, *many])) == []
    rolled = difference([replace(a, revision="x")], [a])
    assert "the name of revision `x`" in refusals(rolled, others=[_adapter()])[0]


def test_change_of_an_adapter_needs_a_revision_where_answers_change():
    """Its files are bound to a revision; what people read is not."""
    told = difference([_adapter(description="new", licence="MIT")], [_adapter()])
    assert not_live(told) == []
    moved = difference([_adapter(digests={"adapter_config.json": "0" * 64})], [_adapter()])
    assert "adapter `a@x`: a change of digests needs another `revision`" in not_live(moved)[0]
    assert not_live(difference([_adapter(revision="2")], [_adapter()])) == []
