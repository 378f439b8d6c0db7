"""Bundles built for real: their processes, their faults, and that a fault stays theirs."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest

import shoal
from shoal.bundles.build import log_path
from shoal.bundles.definition import Bundle, Definition, read
from shoal.bundles.shelf import Shelf
from shoal.errors import RuntimeUnavailable
from shoal.ipc.messages import RunItem
from shoal.wire.envelope import Result
from tests.conftest import run, until
from tests.support.bundle_builds import ECHO, built, sha256, started, wheel
from tests.support.shoal_process import Serve, ShoalProcess

pytestmark = pytest.mark.slow


def definition(requirement, **fields):
    lines = "".join(f"{name}: {value}\n" for name, value in fields.items())
    return f"name: echo\nruntimes: [echo]\nrequirements:\n  - {requirement}\n{lines}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A person's folder of bundles, with one that brings a runtime of its own and a shim."""
    folder = tmp_path_factory.mktemp("bundles")
    made = wheel(folder, "echo_runtime", ECHO, "[shoal.runtimes]\necho = echo_runtime:Echo\n")
    hashed = f"echo-runtime @ {made.as_uri()} --hash=sha256:{sha256(made)}"
    text = definition(hashed, environment="{WORD: shoal}", shim="shim.py")
    (folder / "echo.yaml").write_text(text)
    (folder / "shim.py").write_text("import sys\nsys.shim = 'here'\n")
    return folder


@pytest.fixture(scope="module")
def shelf(folder, tmp_path_factory):
    """Two shelves on one folder wait for one build; the first of them, and what each was told."""
    place = tmp_path_factory.mktemp("cache") / "bundles"
    shelves = [Shelf(place, read(folder)) for _ in range(2)]
    told = []

    async def both():
        told.extend(await asyncio.gather(*(built(s, s.named("echo")) for s in shelves)))

    run(both(), timeout_s=110)
    return shelves[0], told


def test_bundle_is_built_once_for_all_who_wait(shelf):
    """Of two that need it at once, one builds and the other waits for it."""
    _, told = shelf
    assert [steps for steps in told if set(steps) == {"being built"}]
    assert [steps for steps in told if any("installing" in step for step in steps)]


def test_bundle_runs_a_runtime_that_only_it_has(shelf, monkeypatch):
    """Its process has the bundle's packages, variables and shim, and none of ours.

    The package in it registers the runtime `echo`, which answers with what it finds: the variable
    of the definition, no setting of ours, the shim's mark, and no torch even where PYTHONPATH
    would lead to one.
    """
    monkeypatch.setenv("PYTHONPATH", str(Path(msgspec.__file__).parents[1]))
    monkeypatch.setenv("SHOAL_SECRET", "secret")
    bundles, _ = shelf

    async def main():
        async with started(bundles, bundles.named("echo"), "echo") as (process, connection):
            assert process.hello.runtime == "echo"
            assert process.hello.version == "7"
            (done,) = (await connection.run("m@1", [RunItem("i", "classify", [1])])).items
            labels = msgspec.msgpack.decode(done.result, type=Result).labels
            assert labels == ["shoal", "None", "here", "None"]

    run(main())


def test_bundle_commands_build_look_and_mend(shelf, folder, tmp_path):
    """`list` names state and place; `check` hears a hello, or says what is missing and the cure."""
    bundles, _ = shelf
    place = bundles.place(bundles.named("echo"))
    cache = tmp_path / "cache"
    copy = cache / "bundles" / place.name
    shutil.copytree(place, copy, symlinks=True)
    flags = ("--cache-dir", str(cache), "--bundles-dir", str(folder))

    def said(*words):
        command = ShoalProcess("bundles", *words, *flags)
        return command.ended(110), command.output

    status, output = said("list")
    assert status == 0
    assert str(copy) in output
    assert {"echo", "built"} <= set(output.split())
    assert said("check")[0] == 0
    status, output = said("build", "echo")
    assert status == 0
    assert "starts in" in output
    assert "installing" not in output  # it is whole
    (found,) = copy.glob("lib/python*/site-packages/echo_runtime.py")
    found.unlink()
    status, output = said("check", "echo")
    assert status == 1
    assert "No module named 'echo_runtime'" in output


def test_bundle_points_to_this_very_shoal(shelf):
    """Both ends of the socket run the same code: it is linked, not installed a second time."""
    bundles, _ = shelf
    (code,) = bundles.place(bundles.named("echo")).glob("lib/python*/site-packages/shoal")
    assert code.is_symlink()
    assert code.samefile(Path(shoal.__file__).parent)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"requirements": ["none @ file:///nowhere/none-1.0-py3-none-any.whl"]}, "ERROR"),
        ({"python": "/nowhere/python3"}, "needs Python /nowhere/python3"),
        ({"python": "<3.10"}, "needs Python <3.10"),
        ({"requirements": ["WHEEL --hash=sha256:" + 64 * "0"]}, "HASHES"),
    ],
    ids=["absent", "interpreter", "version", "hash"],
)
def test_bundle_that_cannot_be_built_says_why(tmp_path, fields, what):
    """The error ends with the cure, nothing half made stays, and it is not tried at once again."""
    made = wheel(tmp_path, "echo_runtime", "")
    lines = [
        line.replace("WHEEL", f"echo-runtime @ {made.as_uri()}")
        for line in fields.get("requirements", [])
    ]
    # Each fails before anything would be fetched: wheels with hashes, or without, in that order.
    lines += [f"{name} @ {made.as_uri()}" for name in ("msgspec", "numpy", "psutil")]
    bundle = Bundle(Definition("bad", ["bad"], **(fields | {"requirements": lines})))
    shelf = Shelf(tmp_path / "bundles", [bundle])
    steps = []

    async def main():
        for _ in range(2):
            with pytest.raises(RuntimeUnavailable, match="shoal bundles build bad") as caught:
                await shelf.home(bundle, steps.append)
            assert what in caught.value.message

    run(main(), timeout_s=60)
    assert steps.count("looking for Python") == 1
    assert not shelf.place(bundle).exists()
    assert log_path(shelf.place(bundle)).is_file()


def test_bundle_whose_module_cannot_be_imported_says_what_to_do(tmp_path):
    """The error has Python's own word and the definition's cure, and the build does not count."""
    names = ("msgspec", "numpy", "psutil")
    lines = [f"{name} @ {wheel(tmp_path, name, '').as_uri()}" for name in names]
    imports = {"numpy": "not said", "sunken": "dive for it"}
    bundle = Bundle(Definition("bad", ["bad"], requirements=lines, imports=imports))
    shelf = Shelf(tmp_path / "bundles", [bundle])
    said = "No module named 'sunken'.*; dive for it; .*shoal bundles build bad"
    with pytest.raises(RuntimeUnavailable, match=said) as caught:
        run(shelf.home(bundle, lambda _: None), timeout_s=60)
    assert "not said" not in caught.value.message
    assert not shelf.place(bundle).exists()


def test_bundle_whose_build_is_given_up_leaves_nothing(tmp_path):
    """A cancelled build ends what it had started, and its folder is gone."""
    bundle = Bundle(Definition("slow", ["slow"], ["slow @ file:///dev/stdin"]))
    shelf = Shelf(tmp_path / "bundles", [bundle])
    mark = str(shelf.place(bundle))

    def at_work():
        found = []
        for each in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it has just ended
                if "install" in (line := each.cmdline()) and mark in str(line):
                    found.append(each)
        return found

    async def main():
        building = asyncio.create_task(shelf.home(bundle, lambda _: None))
        await until(at_work, 30)
        building.cancel()
        with pytest.raises(asyncio.CancelledError):
            await building

    run(main())
    assert not shelf.place(bundle).exists()
    assert not at_work()


def test_bundle_that_is_broken_harms_no_other_model(tmp_path):
    """Its model is a 503 with pip's words and the cure; the model beside it answers."""
    bundles = tmp_path / "bundles"
    bundles.mkdir()
    text = definition("none @ file:///nowhere/none-1.0-py3-none-any.whl --hash=sha256:" + 64 * "0")
    (bundles / "echo.yaml").write_text(text)
    catalog = tmp_path / "catalog"
    catalog.mkdir()
    (catalog / "broken.yaml").write_text(
        "id: broken\ntasks: [encode]\nsource: file:///\nruntime: echo\noutputs: {dense: {dim: 8}}\n"
    )
    flags = ("--bundles-dir", str(bundles), "--devices", "cpu:1")
    server = Serve(tmp_path, *flags, models={"well": "{}"})
    try:
        broken = server.post("/v1/embeddings", {"model": "broken", "input": "a"})
        well = server.post("/v1/embeddings", {"model": "well", "input": "a"})
        assert broken.status_code == 503, broken.text
        error = broken.json()["error"]
        assert error["code"] == "runtime_unavailable"
        assert "the bundle `echo` cannot be built" in error["message"]
        assert "shoal bundles build echo" in error["message"]
        assert well.status_code == 200, well.text
    finally:
        assert server.leave() == 0, server.output
