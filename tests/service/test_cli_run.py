"""`shoal run` against a real gateway: what is sent and what is shown."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from shoal.cli.main import app
from shoal.cli.request import USUAL_TOKENS
from shoal.clock import monotonic
from shoal.errors import InvalidRequest, SettingsError, ShoalError, UnknownModel, Unreachable
from shoal.runtimes.null_records import record
from shoal.wire.envelope import Params
from tests.support.bad_files import WAV, png_header
from tests.support.gateway_server import gateway_server
from tests.support.local_submits import logit
from tests.support.local_texts import words_of
from tests.support.pace import limit_s
from tests.support.ports import free_port


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
        (["dense", "a", ""], InvalidRequest, r"inputs\[1\] is empty"),
        (["writer", ""], InvalidRequest, r"inputs\[0\] is empty"),
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


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data folder, and no server by the environment."""
    monkeypatch.delenv("SHOAL_URL", raising=False)
    return tmp_path


def served_from(folder, url, pid):
    (folder / "endpoint.json").write_text(json.dumps({"url": url, "pid": pid}))


def run_in(folder, *arguments):
    result = CliRunner().invoke(app, ["run", *arguments, "--data-dir", str(folder)])
    if isinstance(result.exception, ShoalError):
        raise result.exception
    return result


def test_run_finds_the_server_of_the_data_folder(url, folder, monkeypatch):
    """Its address is read where its gateway wrote it; with SHOAL_DATA_DIR, too. --url wins."""
    served_from(folder, url, os.getpid())
    assert run_in(folder, "dense", "one").exit_code == 0
    monkeypatch.setenv("SHOAL_DATA_DIR", str(folder))
    assert CliRunner().invoke(app, ["run", "dense", "one"]).exit_code == 0
    nobody = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(Unreachable):
        run_in(folder, "dense", "one", "--url", nobody)


def test_run_says_that_the_server_of_the_folder_has_left(folder):
    """An address whose process is gone is named with its folder, and nobody else is asked."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    served_from(folder, "http://127.0.0.1:8187", gone.pid)
    with pytest.raises(SettingsError, match=rf"{folder} \(http://127.0.0.1:8187\) is not running"):
        run_in(folder, "dense", "one")


def test_run_names_the_address_that_nobody_answers_at(folder):
    """The error has the address, and comes at the first try."""
    nobody = f"http://127.0.0.1:{free_port()}"
    served_from(folder, nobody, os.getpid())
    begun_s = monotonic()
    with pytest.raises(Unreachable, match=nobody):
        run_in(folder, "dense", "one")
    assert monotonic() - begun_s < limit_s(1.0)


def test_run_bounds_a_text_that_would_go_on(url):
    """Without --max-tokens a text has the usual number at most, which the help says."""
    result = CliRunner().invoke(app, ["run", "--url", url, "writer", "long"])
    expected = "".join(words_of("user: long", USUAL_TOKENS))
    assert result.stdout == expected + "\n"
    assert f"cut off after {USUAL_TOKENS} tokens" in result.stderr
    assert f"({USUAL_TOKENS})" in CliRunner().invoke(app, ["run", "--help"]).output


def test_run_says_that_it_sends_the_name_of_a_file(url, tmp_path):
    """A model of texts is sent what stands there, and a person who meant the file is told."""
    file = tmp_path / "README.md"
    file.touch()
    named, other = (
        CliRunner().invoke(app, ["run", "--url", url, "dense", text]) for text in (str(file), "a")
    )
    assert f"note: `{file}` is sent as these letters" in named.stderr
    assert other.stderr == ""
