import pytest

from shoal.catalog.schema import Adapter, Entry
from shoal.catalog.snapshot import MAX_COMPARED, Snapshot
from shoal.errors import CatalogError, UnknownModel


def entry(name: str, *aliases: str, revision: str = "1") -> Entry:
    return Entry(
        id=name, tasks=["encode"], source="package://x/y", aliases=list(aliases), revision=revision
    )


SNAPSHOT = Snapshot([entry("minilm", "MiniLM-L6"), entry("e5", revision="v2"), entry("a/b")])


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("minilm", "minilm"),
        ("MiniLM-L6", "minilm"),
        ("minilm@1", "minilm"),
        ("MiniLM-L6@1", "minilm"),
        ("e5@v2", "e5"),
        ("a/b", "a/b"),
    ],
)
def test_resolve_finds_an_entry_by_each_of_its_names(name, found):
    """Id and alias, each with or without the revision, stand for the entry."""
    assert SNAPSHOT.resolve(name).id == found
    assert SNAPSHOT.get(name) is SNAPSHOT.resolve(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("minlm", "did you mean `minilm`"),
        ("minilm-l6", "`MiniLM-L6`"),
        ("minlm@1", "did you mean `minilm`"),
        ("minilm@2", "has no revision or adapter `2`; there is `minilm@1`"),
        ("e5@1", "has no revision or adapter `1`; there is `e5@v2`"),
        ("", "unknown model ``"),
        ("@", "unknown model `@`"),
        ("quite different", "/v1/models lists the models"),
        ("x" * 100_000, "unknown model `xxx"),
    ],
)
def test_resolve_of_an_unknown_name_says_what_there_is(name, said):
    """An unknown name or revision is an `UnknownModel` of field `model` with near names in it."""
    with pytest.raises(UnknownModel, match="model") as caught:
        SNAPSHOT.resolve(name)
    assert said in caught.value.message
    assert caught.value.param == "model"
    assert len(caught.value.message) < 300
    assert SNAPSHOT.get(name) is None


def test_entries_are_sorted_by_id():
    """The order of entries does not depend on the order of files."""
    assert [e.id for e in SNAPSHOT.entries] == ["a/b", "e5", "minilm"]
    assert len(SNAPSHOT) == 3


def test_snapshot_refuses_a_name_with_two_owners():
    """Two entries with one name never silently hide each other."""
    with pytest.raises(CatalogError, match="`x` names both"):
        Snapshot([entry("x"), entry("y", "x")])


def adapter(name: str, base: str = "minilm") -> Adapter:
    return Adapter(name=name, base=base, source="file:///a")


ADAPTED = Snapshot(SNAPSHOT.entries, [adapter("legal"), adapter("legal", "e5"), adapter("mail")])


@pytest.mark.parametrize(
    "name", ["minilm@legal", "MiniLM-L6@legal", "minilm@1@legal", "MiniLM-L6@1@legal"]
)
def test_find_knows_an_adapter_by_each_name_of_its_model(name):
    """Any name of the model with the adapter's behind it is the model with the adapter.

    It is no name of the bare model.
    """
    found = ADAPTED.find(name)
    assert (found.entry.id, found.adapter.key) == ("minilm", "minilm@legal@1")
    assert ADAPTED.get(name) is None
    with pytest.raises(UnknownModel):
        ADAPTED.resolve(name)


def test_find_knows_bare_models_beside_their_adapters():
    """`model@revision` keeps its meaning."""
    for name in ("minilm", "minilm@1", "MiniLM-L6@1"):
        assert ADAPTED.find(name).adapter is None
        assert ADAPTED.find(name).entry is ADAPTED.resolve(name)
    assert ADAPTED.find("e5@legal").adapter.key == "e5@legal@1"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("minilm@lega", "model `minilm` has no revision or adapter `lega`, did you mean `legal`?"),
        ("minilm@1@mial", "did you mean `mail`?"),
        ("minilm@2@legal", "has no revision or adapter `2@legal`"),
        ("minilm@quite-different", "/v1/models lists its adapters"),
        ("a/b@legal", "has no revision or adapter `legal`; there is `a/b@1`"),
        ("minlm@legal", "unknown model `minlm@legal`, did you mean `minilm`"),
    ],
)
def test_find_of_an_unknown_adapter_says_what_there_is(name, said):
    """An unknown adapter is an `UnknownModel` with near names of its model's adapters in it."""
    with pytest.raises(UnknownModel) as caught:
        ADAPTED.find(name)
    assert said in caught.value.message
    assert caught.value.param == "model"


def test_find_compares_a_wrong_name_with_few_of_many():
    """Of more adapters than are compared, those that stand near a wrong name are still found."""
    many = Snapshot(SNAPSHOT.entries, [adapter(f"t{n:04}") for n in range(10 * MAX_COMPARED)])
    assert many.find("minilm@t0500").adapter.name == "t0500"
    with pytest.raises(UnknownModel, match="did you mean `t0500`"):
        many.find("minilm@t0500x")


def test_snapshot_refuses_an_adapter_that_nobody_could_ask_for():
    """One of no model, and one with the name of its model's revision."""
    with pytest.raises(CatalogError, match="of no model"):
        Snapshot([entry("x")], [adapter("a", "y")])
    with pytest.raises(CatalogError, match="two meanings"):
        Snapshot([entry("x", revision="r")], [adapter("r", "x")])
