import socket
from pathlib import Path

import pytest

from shoal.bundles.build import MARKER, python_of
from shoal.bundles.definition import read
from shoal.bundles.shelf import Shelf
from shoal.cli.doctor import checks, examine
from shoal.runtimes.registry import available

NO_BUNDLES = Shelf(Path(), [])


@pytest.fixture
def taken():
    """A port of this machine that somebody listens on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield held.getsockname()[1]


def test_doctor_fails_when_the_port_is_taken(taken, capsys):
    """A port in use stops `serve`: exit code 1, and the line says what to do."""
    assert examine(None, "127.0.0.1", taken) == 1
    assert "choose another with --port" in capsys.readouterr().out


def test_doctor_fails_when_no_model_can_run(tmp_path, capsys):
    """A catalog whose only model lacks its package is fatal, and the command is named."""
    (tmp_path / "a.yaml").write_text(
        "id: tiny\ntasks: [encode]\nsource: package://no_such_package\n"
        "outputs: {dense: {dim: 4}}\nrequires: [no-such-package==1.0]\n"
    )
    assert examine(tmp_path, "127.0.0.1", 0) == 1
    assert "pip install --no-deps no-such-package==1.0" in capsys.readouterr().out


def test_doctor_fails_on_a_broken_catalog(tmp_path):
    """A folder that does not load is a fatal check with the loader's own words."""
    fatal = [c for c in checks(tmp_path, "127.0.0.1", 0, NO_BUNDLES) if c.fatal and not c.good]
    assert any("there is no *.yaml file in it" in check.found for check in fatal)


def test_doctor_finds_python_and_broker():
    """The checks of this environment's Python and nats-server pass."""
    found = {check.what: check for check in checks(None, "127.0.0.1", 0, NO_BUNDLES)}
    assert found["Python"].good
    assert found["broker"].good
    assert "nats-server" in found["broker"].found


def test_doctor_finds_the_runtime_of_a_bundle(tmp_path):
    """A runtime whose bundle is built is ready; else the command that builds it is named."""
    bundles = Shelf(tmp_path, read(None))
    bundle = bundles.named("sglang")
    assert available("sglang") is not None

    def found():
        told = checks(None, "127.0.0.1", 0, bundles)
        return next(check for check in told if check.what == "runtime sglang")

    assert not found().good
    assert bundles.cure(bundle) in found().found
    python = python_of(bundles.place(bundle))
    python.parent.mkdir(parents=True)
    python.touch()
    (bundles.place(bundle) / MARKER).touch()
    assert found().good
    assert str(bundles.place(bundle)) in found().found
