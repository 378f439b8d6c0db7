"""`shoal run` against a real gateway: what is sent and what is shown."""

import pytest
from typer.testing import CliRunner

from shoal.cli.main import app
from shoal.errors import InvalidRequest, ShoalError, UnknownModel
from shoal.runtimes.null_records import record
from shoal.wire.envelope import Params
from tests.support.bad_files import WAV, png_header
from tests.support.gateway_server import gateway_server
from tests.support.local_submits import logit


@pytest.fixture(scope="module")
def url():
    with gateway_server() as served:
        yield served.url


def shown(url: str, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["run", "--url", url, *arguments])
    if isinstance(result.exception, ShoalError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_run_encodes_with_every_output_of_the_model(url):
    """An encoder's dense and sparse vectors are shown, each text compared with the first."""
    text = shown(url, "org/both", "one", "two")
    assert "dense 8: " in text
    assert "sparse " in text
    assert "COSINE TO THE FIRST" in text
    assert "1.0000" in text
    assert "COSINE" not in shown(url, "sparse", "one")


def test_run_with_a_query_scores_and_sorts(url):
    """With --query the texts are ranked, best first."""
    texts = ["one", "two", "three"]
    words = shown(url, "dense", *texts, "--query", "q").split()
    best = sorted(texts, key=lambda text: logit("q", text), reverse=True)
    assert words[:2] == ["SCORE", "TEXT"]
    assert words[3::2] == best


def test_run_classifies_texts_and_pairs(url):
    """A classifier's label stands beside each text; --query makes pairs."""
    assert "LABEL PROBABILITY INPUT" in shown(url, "colours", "one")
    assert "LABEL" in shown(url, "pairs", "one", "--query", "two", "--task", "classify")


def test_run_sends_files_to_models_that_take_them(url, tmp_path):
    """An argument that names a file is that file; each task has a table of its own."""
    picture, document, sound = (tmp_path / name for name in ("a.png", "b.pdf", "c.wav"))
    picture.write_bytes(png_header(3, 4))
    document.write_bytes(b"%PDF-1.7")
    sound.write_bytes(WAV)
    page = record(b"%PDF-1.7", ["text", "layout"], Params()).pages[0]
    assert "dense 8: " in shown(url, "pictures", str(picture))
    assert "LABEL PROBABILITY INPUT" in shown(url, "pictures", str(picture), "--task", "classify")
    found = shown(url, "pages", str(document))
    assert page.lines[0].text in found
    assert f"{page.regions[0].label} {page.regions[0].score:.4f} page 1" in found
    assert record(WAV, ["transcript"], Params()).text in shown(url, "sounds", str(sound))
    assert "speech 0.00-" in shown(url, "sounds", str(sound), "--task", "extract")
    assert "Lovelace" in shown(url, "names", "Ada Lovelace")


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (["none", "x"], UnknownModel, "unknown model `none`"),
        (["dense", "x", "--task", "encod"], InvalidRequest, "did you mean `encode`?"),
        (["dense", "x", "--task", "score"], InvalidRequest, "--query"),
        (["dense", "x", "--task", "encode", "--query", "y"], InvalidRequest, "--query"),
        (["dense", ""], InvalidRequest, r"inputs\[0\]"),
        (["pages", "none.pdf"], InvalidRequest, "'none.pdf' is no file"),
    ],
)
def test_run_names_what_is_wrong(url, arguments, error, said):
    """A wrong model, task or text is an error of its kind with a clear message."""
    with pytest.raises(error, match=said):
        shown(url, *arguments)


def test_run_takes_the_server_from_the_environment(url, monkeypatch):
    """SHOAL_URL names the server when --url is left out."""
    monkeypatch.setenv("SHOAL_URL", url)
    result = CliRunner().invoke(app, ["run", "dense", "one"])
    assert result.exit_code == 0, result.output
