"""Definitions of bundles, their stamps, and which runtime starts where."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from pathlib import Path

import pytest
from msgspec import structs

from shoal.bundles.build import MARKER, _fits, is_built, python_of, tail
from shoal.bundles.definition import (
    HOST_NEEDS,
    MAX_BUNDLES,
    MAX_DEFINITION_BYTES,
    Bundle,
    Definition,
    read,
)
from shoal.bundles.shelf import MAX_BUILDS_KEPT, Shelf
from shoal.errors import RuntimeUnavailable, SettingsError


def bundle(name="tiny", runtime="tiny", **fields):
    shim = fields.pop("shim_text", "")
    return Bundle(Definition(name, [runtime], **fields), shim)


def pretend_built(place: Path) -> Path:
    """A folder that counts as a build, with an interpreter that is a mere file."""
    python_of(place).parent.mkdir(parents=True)
    python_of(place).touch()
    (place / MARKER).touch()
    return place


def test_bundle_candle_is_built_in():
    """The package's own folder defines the bundle of the runtime `candle`, its wheel by digest."""
    (candle,) = [each for each in read() if each.name == "candle"]
    assert candle.definition.runtimes == ["candle"]
    assert any("candding" in line and "--hash=sha256:" in line for line in candle.requirements())
    assert not any("torch" in line for line in candle.requirements())


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("name: other\nruntimes: [r]", "unlike the file's"),
        ("name: one\nruntimes: []", "runtimes"),
        ("name: one\nruntimes: [r]\npackages: [x]", "packages"),
        ("name: one\nruntimes: [r]\npython: '2.7'", "python"),
        ("name: one\nruntimes: [r]\nshim: ../x.py", "shim"),
        ("name: one\nruntimes: [r]\nshim: none.py", "none.py"),
        ("name: one\nruntimes: [r]\nimports: {'a; b': c}", "imports"),
        ("name: one\nruntimes: [candle]", "both serve runtime `candle`"),
        ("[", "no bundle"),
        ("#" * (MAX_DEFINITION_BYTES + 1), "larger than"),
    ],
)
def test_bundle_definition_at_fault_is_refused(tmp_path, text, what):
    """The message names the file, or the two bundles, and what is wrong."""
    (tmp_path / "one.yaml").write_text(text)
    with pytest.raises(SettingsError, match=what) as caught:
        read(tmp_path)
    assert "one" in caught.value.message


def test_bundle_folders_are_bounded(tmp_path):
    """One definition more than the bound is an error, and so is a folder that is not there."""
    for i in range(MAX_BUNDLES + 1):
        (tmp_path / f"b{i}.yaml").write_text(f"name: b{i}\nruntimes: [r{i}]")
    with pytest.raises(SettingsError, match="at most"):
        read(tmp_path)
    with pytest.raises(SettingsError, match="no folder"):
        read(tmp_path / "none")


def test_bundle_stamp_changes_with_what_would_be_built():
    """Equal definitions have one stamp; a requirement, a variable or the shim's text changes it.

    What a build is looked at for changes nothing in it.
    """
    plain = bundle(requirements=["a==1"])
    assert plain.stamp() == bundle(requirements=["a==1"]).stamp()
    assert plain.stamp() == bundle(requirements=["a==1"], imports={"a": "get it"}).stamp()
    others = [
        bundle(requirements=["a==2"]),
        bundle(requirements=["a==1"], environment={"A": "1"}),
        bundle(requirements=["a==1"], shim_text="x = 1"),
        Bundle(structs.replace(plain.definition, python=">=3.12")),
    ]
    assert len({each.stamp() for each in (plain, *others)}) == 1 + len(others)


def test_bundle_gets_what_a_runtime_process_needs_in_the_versions_used_here():
    """Both ends of the socket have the same codec, unless the definition names another."""
    assert bundle().requirements() == [f"{name}=={version(name)}" for name in HOST_NEEDS]
    own = bundle(requirements=["NumPy>=1,<2", "msgspec @ file:///x.whl"]).requirements()
    assert [line for line in own if "numpy" in line.lower()] == ["NumPy>=1,<2"]
    assert sum(line.startswith("msgspec") for line in own) == 1


def test_bundle_serves_what_the_default_environment_lacks():
    """A runtime that is here needs no bundle; one that is not starts in its bundle."""
    shelf = Shelf(Path("x"), [bundle("one", "a"), bundle("two", "b")])
    found = shelf.complete({"a": "not installed", "b": None, "c": "not installed"})
    assert found == {"a": None, "b": None, "c": "not installed"}
    assert shelf.of("a") is shelf.named("one")
    assert shelf.of("b") is None
    assert shelf.of("c") is None
    with pytest.raises(SettingsError, match="known: one, two"):
        shelf.named("three")


def test_bundle_that_may_not_be_built_is_missing_with_the_command(tmp_path):
    """Without leave to build, only what was built ahead is served; the reason has the cure."""
    shelf = Shelf(tmp_path / "cache" / "bundles", [bundle()], may_build=False)
    reason = shelf.complete({"tiny": "not installed"})["tiny"]
    assert reason is not None
    assert f"shoal bundles build tiny --cache-dir {tmp_path / 'cache'}" in reason
    with pytest.raises(RuntimeUnavailable, match="not built"):
        asyncio.run(shelf.home(bundle(), print))
    place = pretend_built(shelf.place(bundle()))
    assert shelf.complete({"tiny": "not installed"}) == {"tiny": None}
    home = asyncio.run(shelf.home(bundle(), print))
    assert home.python == str(python_of(place))


def test_bundle_without_its_interpreter_is_not_built(tmp_path):
    """A build whose interpreter has gone with its Python is none, and so is one half made."""
    place = pretend_built(tmp_path / "b")
    assert is_built(place)
    python_of(place).unlink()
    python_of(place).symlink_to("/nowhere/python")
    assert not is_built(place)
    (other := pretend_built(tmp_path / "c") / MARKER).unlink()
    assert not is_built(other.parent)


def test_bundle_keeps_the_latest_builds_only(tmp_path):
    """Older builds of a bundle go, with their logs; those of a longer name are another's."""
    shelf = Shelf(tmp_path, [bundle()])
    place = pretend_built(shelf.place(bundle()))
    old = [pretend_built(tmp_path / f"tiny-{i:012d}") for i in range(MAX_BUILDS_KEPT + 1)]
    other = pretend_built(tmp_path / "tiny-two-000000000000")
    shelf._remove_old(bundle(), place)
    assert place.exists()
    assert other.exists()
    assert sum(each.exists() for each in (place, *old)) == MAX_BUILDS_KEPT


@pytest.mark.parametrize(
    ("python", "asked", "fits"),
    [((3, 11), ">=3.11", True), ((3, 14), ">=3.11,<3.14", False), ((3, 10), ">=3.11", False)],
)
def test_bundle_python_is_within_its_bounds(python, asked, fits):
    """Bounds are compared as numbers: 3.9 is below 3.11."""
    assert _fits(python, asked) is fits
    assert not _fits((3, 9), ">=3.11")


def test_bundle_build_error_is_what_pip_called_one(tmp_path):
    """Of a log, the lines that pip calls errors are told; without any, the last ones."""
    log = tmp_path / "log"
    log.write_text("Collecting a\nERROR: no a\n  more\nERROR: no b\nbye\n")
    assert tail(log) == "ERROR: no a; ERROR: no b"
    log.write_text("one\n\ntwo\n")
    assert tail(log) == "one; two"
