import pytest

from shoal.catalog.schema import Entry
from shoal.catalog.snapshot import Snapshot
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
        ("minilm@2", "has no revision `2`; there is `minilm@1`"),
        ("e5@1", "has no revision `1`; there is `e5@v2`"),
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
