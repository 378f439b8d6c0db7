"""The models of the field: every entry is sound, honest about what was tried, and has its facts."""

import re

import pytest
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from shoal.catalog.load import FIELD, field, load
from shoal.catalog.resolve import resolve_source
from shoal.cli.docs import field_page
from shoal.errors import CatalogError, ModelUnavailable, UnknownModel
from shoal.gateway.classify import HARMLESS
from shoal.runtimes import registry
from shoal.runtimes.families import families

NAMED_LICENCES = {
    "AI Pubs OpenRAIL-M (modified)",
    "Gemma",
    "Llama 3.2 Community License",
    "Llama 4 Community License",
}
KINDS = {
    "audio",
    "classification",
    "dense",
    "extraction",
    "generation",
    "guard",
    "layout",
    "multivector",
    "ocr",
    "rerank",
    "sparse",
    "vision",
}
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{7}")

pytestmark = pytest.mark.slow  # the first look reads some two hundred files


@pytest.fixture(scope="module")
def entries():
    return field().entries


def is_spdx(licence: str) -> bool:
    try:
        return canonicalize_license_expression(licence) == licence
    except InvalidLicenseExpression:
        return False


def test_field_entries_have_shape_and_sense(entries):
    """Every file of the field is a sound entry, named by its id, and no two share a name."""
    names = {f"{entry.id.replace('/', '--')}.yaml" for entry in entries}
    assert names == {path.name for path in FIELD.iterdir()}


def test_field_knows_more_than_a_hundred_models_of_every_kind(entries):
    """There are entries for each shelf, and at least as many in all as were promised."""
    assert {entry.kind for entry in entries} == KINDS
    assert len(entries) >= 110
    for kind in KINDS:
        assert sum(entry.kind == kind for entry in entries) >= 5, kind


def test_field_says_tried_only_of_code_paths_that_exist(entries):
    """An entry whose family was tried names one that a runtime has; the others claim nothing."""
    tried = [entry for entry in entries if entry.verified != "none"]
    assert tried
    assert {entry.family for entry in tried} <= set(families())
    assert {entry.runtime for entry in tried} <= set(registry.names())
    # These very weights were tried only where the demo catalog has them: nothing is fetched here.
    sources = {entry.source for entry in load(None).entries}
    assert all(entry.source in sources for entry in entries if entry.verified == "weights")


def test_field_pins_a_commit_or_says_that_none_is_known(entries):
    """A source has a commit, whose beginning is the revision, or none at all: never a branch."""
    for entry in entries:
        repo, _, commit = entry.source.removeprefix("hf://").partition("@")
        assert repo.lower() == entry.id
        assert entry.unpinned == (not commit)
        if commit:
            assert COMMIT.fullmatch(commit), entry.id
            assert commit.startswith(entry.revision), entry.id


def test_field_entry_without_a_revision_cannot_be_loaded(entries):
    """Resolving it says what is missing, before anything is fetched."""
    unpinned = next(entry for entry in entries if entry.unpinned)
    with pytest.raises(ModelUnavailable, match="needs a pinned revision"):
        resolve_source(unpinned.source, None)


def test_field_entry_without_a_revision_is_no_entry_to_serve(entries, tmp_path):
    """The same file in a catalog that is served is refused with the reason."""
    unpinned = next(entry for entry in entries if entry.unpinned)
    name = f"{unpinned.id.replace('/', '--')}.yaml"
    (tmp_path / name).write_bytes((FIELD / name).read_bytes())
    with pytest.raises(CatalogError, match="needs a pinned revision"):
        load(tmp_path)


def test_field_entry_with_a_revision_can_be_copied_into_a_catalog(entries, tmp_path):
    """Every pinned entry is a sound entry of a served catalog."""
    wanted = [each for each in entries if not each.unpinned]
    for entry in wanted:
        name = f"{entry.id.replace('/', '--')}.yaml"
        (tmp_path / name).write_bytes((FIELD / name).read_bytes())
    assert len(load(tmp_path)) == len(wanted) > 100


def test_field_licences_are_spdx_or_named(entries):
    """A licence that is stated is a canonical SPDX expression, or one of a few with a name."""
    stated = {entry.licence for entry in entries if entry.licence is not None}
    assert {licence for licence in stated if not is_spdx(licence)} <= NAMED_LICENCES


def test_field_entries_say_where_their_facts_stand(entries):
    """Each entry has an address, and what people look for: a kind and a line of description."""
    for entry in entries:
        assert entry.facts, entry.id
        assert entry.kind is not None, entry.id
        assert entry.description.endswith("."), entry.id


def test_field_states_the_pooling_of_every_text_embedder(entries):
    """No embedder of texts is left to the default: its file has the line."""
    for entry in entries:
        if "dense" in entry.outputs:
            text = (FIELD / f"{entry.id.replace('/', '--')}.yaml").read_text(encoding="utf-8")
            assert "\npooling: " in text, entry.id


def test_field_names_the_classes_of_guards_whose_files_do_not(entries):
    """Of these the entry says which class is harmless, by a name that moderations know."""
    unnamed = [entry for entry in entries if "/llama-prompt-guard-2" in entry.id]
    assert [entry.labels for entry in unnamed] == [["benign", "malicious"]] * 2
    assert "benign" in HARMLESS


@pytest.mark.parametrize("name", ["BAAI/bge-m3", "baai/bge-m3", "bge-m3"])
def test_field_finds_a_model_by_any_of_its_names(name):
    """The hub's spelling, the id and the bare name lead to one entry."""
    assert field().resolve(name).id == "baai/bge-m3"


def test_field_suggests_near_names():
    """A mistyped name is answered with the names that look most like it."""
    with pytest.raises(UnknownModel, match=r"did you mean `bge-m3`"):
        field().resolve("bge-m33")


def test_field_page_has_a_row_for_every_entry(entries):
    """The page names each model once, and shows no revision where none is known."""
    rows = [row for row in field_page().splitlines() if row.startswith("| `")]
    assert len(rows) == len(entries)
    for entry in entries:
        (row,) = [row for row in rows if row.startswith(f"| `{entry.id}` |")]
        assert (f"`{entry.revision}`" in row) == (not entry.unpinned)
