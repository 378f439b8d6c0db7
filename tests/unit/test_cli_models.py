from typer.testing import CliRunner

from shoal.cli.main import app
from shoal.errors import CatalogError

GOOD = """\
id: tiny
tasks: [encode]
source: package://no_such_package/model
outputs: {dense: {dim: 4}}
requires: [no-such-package==1.0]
"""


def invoke(*arguments: object):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_models_check_passes_a_sound_folder(tmp_path):
    """A sound folder is exit code 0; a model that cannot run here is a note."""
    (tmp_path / "a.yaml").write_text(GOOD)
    result = invoke("models", "check", tmp_path)
    assert result.exit_code == 0
    assert "1 model, no fault" in result.output
    assert "pip install --no-deps no-such-package==1.0" in result.output


def test_models_check_names_every_fault(tmp_path):
    """Faults are one line each with file and line, and the exit code is 2."""
    (tmp_path / "a.yaml").write_text(GOOD + "poling: mean\n")
    (tmp_path / "b.yaml").write_text("id: b")
    result = invoke("models", "check", tmp_path)
    assert result.exit_code == 2
    assert "a.yaml:6: unknown key `poling`, did you mean `pooling`?" in result.output
    assert result.output.count("b.yaml:1: ") == 2


def test_models_list_shows_the_catalog(tmp_path):
    """Each model is a row; why one cannot run stands below the table."""
    (tmp_path / "a.yaml").write_text(GOOD)
    result = invoke("models", "list", "--catalog", tmp_path)
    assert result.exit_code == 0
    assert "tiny@1" in result.output
    assert "missing" in result.output
    assert "no_such_package" in result.output


def test_models_list_refuses_a_bad_folder(tmp_path):
    """A folder with a fault is a CatalogError, which the command line shows as one line."""
    result = invoke("models", "list", "--catalog", tmp_path / "none")
    assert isinstance(result.exception, CatalogError)
