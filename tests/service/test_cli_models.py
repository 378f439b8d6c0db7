"""`shoal models` against a real `shoal serve`, as an operator and an engineer use it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self

import httpx
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from shoal.catalog.load import load
from shoal.catalog.resolve import resolve_source
from shoal.cli.main import app
from shoal.errors import CatalogError, ShoalError, UnknownModel
from tests.support.pace import limit_s
from tests.support.shoal_process import NULL_ENTRY, Serve

pytestmark = pytest.mark.slow

FINE_TUNE = load(None).resolve("sre-minilm")


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    server = Serve(
        tmp_path_factory.mktemp("models"),
        *("--devices", "cpu:1"),
        models={"base": "{mib: 4}", "other": "{}", "steady": "{}"},
    )
    yield server
    assert server.leave() == 0, server.output


class Models:
    """The command on the served folder. `code` is its last exit code, `errors` its last stderr."""

    def __init__(self, server) -> None:
        self.server = server
        self.where = ["--data-dir", str(server.folder / "data")]
        self.code = 0
        self.errors = ""

    def __call__(self, *arguments: object) -> str:
        words = ["models", *map(str, arguments), *self.where]
        result = CliRunner().invoke(app, words)
        if isinstance(result.exception, ShoalError):
            raise result.exception
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        self.code, self.errors = result.exit_code, result.stderr
        return result.stdout

    def rows(self) -> dict[str, dict]:
        return {row["model"]: row for row in json.loads(self("list", "--json"))["models"]}

    def dim(self, model: str) -> int:
        answer = self.server.post("/v1/encode", {"model": model, "inputs": ["a text"]})
        assert answer.status_code == 200, answer.text
        return len(answer.json()["dense"][0])


@pytest.fixture
def models(serve):
    return Models(serve)


def like_base(name: str, dim: int, *more: str) -> list[str]:
    """The words that add a null model with vectors of another length."""
    sets = ("--set", f"options.dim={dim}", "--set", f"outputs.dense.dim={dim}")
    return ["add", name, "--source", "file:///", "--like", "base", *sets, *more]


def test_models_load_and_evict_until_the_workers_say_so(models):
    """Each waits for what it asked for, says when there is nothing to do, and list shows it."""
    assert "resident on" in models("load", "base")
    row = models.rows()["base@1"]
    assert row["state"] == "resident on 1"
    assert row["memory_mib"] == pytest.approx(4, abs=0.25)  # what the process grew by
    assert row["load_s"] > 0
    assert row["idle_s"] >= 0
    table = models("list")
    assert re.search(r"base@1 .*resident on 1 .*4 MiB", table)
    assert re.search(r"1 device, host \d+ of \d+ MiB", table)
    assert "resident on" in models("load", "base")
    assert models("evict", "base").splitlines() == ["base@1: evicted"]
    assert models.rows()["base@1"]["state"] == "cold"
    assert models("evict", "base").splitlines() == ["base@1: is not loaded"]
    assert models.code == 0
    assert "there is no worker `nobody`" in models("load", "base", "--worker", "nobody")
    assert models.code == 1
    assert "asked for" in models("load", "base", "--no-wait")


def test_models_pin_keeps_a_model_until_it_is_unpinned(models):
    """A pinned model is loaded by itself and not evicted; pinning twice changes nothing."""
    assert "pinned: false -> true" in models("pin", "other")
    deadline = time.monotonic() + limit_s(10)
    while models.rows()["other@1"]["state"] != "resident on 1":
        assert time.monotonic() < deadline
    assert "nothing to do" in models("pin", "other")
    assert "it is pinned" in models("evict", "other")
    assert models.code == 1
    assert re.search(r"other@1 .* pinned", models("list"))
    assert "pinned: true -> false" in models("unpin", "other")
    assert "evicted" in models("evict", "other")
    assert models.code == 0


def test_models_names_are_guessed_everywhere(models):
    """A mistyped name is an error with the near name, and nothing has been done."""
    for command in ("show", "remove", "pin", "unpin", "load", "evict"):
        with pytest.raises(UnknownModel, match="did you mean `steady`"):
            models(command, "staedy")
    assert "steady@1" in models.rows()


def test_models_bad_entry_is_refused_and_harms_nothing(models, tmp_path):
    """A fault is told with file and line, by add and by apply; the catalog stays as it was."""
    before = models.rows().keys()
    (tmp_path / "good.yaml").write_text(NULL_ENTRY.format(id="good", options="{}"))
    (tmp_path / "bad.yaml").write_text(NULL_ENTRY.format(id="bad", options="{}") + "poling: cls\n")
    with pytest.raises(CatalogError, match=r"bad\.yaml:8: unknown key `poling`"):
        models("add", tmp_path / "good.yaml", tmp_path / "bad.yaml")
    assert "bad.yaml:8: unknown key `poling`" in models("apply", tmp_path, "--yes")
    assert models.code == 2
    (tmp_path / "bad.yaml").write_text(NULL_ENTRY.format(id="bad", options="{}"))
    taken = NULL_ENTRY.format(id="good", options="{}") + "aliases: [steady]\n"
    (tmp_path / "good.yaml").write_text(taken)
    models("apply", tmp_path, "--yes")
    assert "the name `steady` is taken" in models.errors
    assert models.code == 1
    assert models.rows().keys() == before


def test_models_add_waits_for_the_first_answer_or_the_reason(models):
    """A model that loads is there to be asked; one that does not is exit code 1 with the reason."""
    assert "nothing was written" in models(*like_base("fresh", 5, "--dry-run"))
    assert "fresh@1" not in models.rows()
    said = models(*like_base("fresh", 5, "--wait"))
    assert said.startswith("+ fresh@1")
    assert f"try: curl -s {models.server.url}" in said
    assert models.rows()["fresh@1"]["state"] == "resident on 1"
    assert models.dim("fresh") == 5
    assert "nothing to do" in models(*like_base("fresh", 5))
    said = models(*like_base("lost", 5, "--set", "options.load_fails=missing", "--wait"))
    assert "unavailable; lost@1: the load was told to find no weights" in said
    assert models.code == 1
    assert "lost@1: the load was told to find no weights" in models("list").splitlines()[-1]


def test_models_show_has_the_entry_its_versions_and_where_it_is(models):
    """What show prints can be read as an entry; the versions tell who wrote what."""
    models(*like_base("shown", 5, "--pin", "--wait"))
    models(*like_base("shown", 6, "--revision", "2"))
    page = models("show", "shown")
    entry, _, rest = page.partition("versions\n")
    assert yaml.safe_load(entry)["outputs"]["dense"] == {"dim": 6}
    versions, _, workers = rest.partition("workers\n")
    assert re.findall(r"revision \d, by a \w+", versions) == [
        "revision 1, by a command",
        "revision 2, by a command",
    ]
    assert "shown@2" in workers
    assert "revision 1, by a folder" in models("show", "steady")
    assert yaml.safe_load(models("show", "BAAI/bge-m3"))["id"] == "baai/bge-m3"
    assert "`shoal models add BAAI/bge-m3`" in models.errors


def test_models_other_weights_need_another_revision(models):
    """The same revision with other options is refused with the reason; a new one is taken."""
    models(*like_base("weights", 5))
    models(*like_base("weights", 6))
    assert "needs another `revision` than `1`" in models.errors
    assert models.code == 1
    assert models.dim("weights") == 5
    assert '"1" -> "2"' in models(*like_base("weights", 6, "--revision", "2"))
    assert models.dim("weights") == 6


def test_models_remove_is_told_once_and_forgets(models):
    """What is in line for a removed model is answered; new requests for it are 404.

    Removing it again is no error, and says so.
    """
    models(*like_base("brief", 5, "--set", "options.sleep_s=0.2", "--wait"))
    assert "- brief@1" in models("remove", "brief", "--dry-run")
    answers: list[httpx.Response] = []
    body = {"model": "brief", "inputs": [f"text {n}" for n in range(300)]}
    asking = threading.Thread(target=lambda: answers.append(models.server.post("/v1/encode", body)))
    asking.start()
    waiting = re.compile(r"^shoal_gateway_waiting_items [1-9]", re.MULTILINE)
    deadline = time.monotonic() + limit_s(10)
    while not waiting.search(httpx.get(f"{models.server.url}/metrics").text):
        assert time.monotonic() < deadline
    assert "- brief@1" in models("remove", "brief")
    assert models.server.post("/v1/encode", body).status_code == 404
    asking.join(30)
    assert [answer.status_code for answer in answers] == [200]
    assert "is not there any more" in models("remove", "brief")
    assert models.code == 0


def test_models_apply_makes_the_difference_and_nothing_else(models, tmp_path):
    """The difference is shown, made, and then there is none; only --prune removes."""
    for name, options in {"one": "{dim: 3}", "two": "{dim: 3}"}.items():
        text = NULL_ENTRY.format(id=name, options=options).replace("dim: 8", "dim: 3")
        (tmp_path / f"{name}.yaml").write_text(text)
    shown = models("apply", tmp_path, "--dry-run")
    assert {"+ one@1", "+ two@1"} <= {line[:7] for line in shown.splitlines()}
    assert "one@1" not in models.rows()
    assert "+ one@1" in models("apply", tmp_path, "--yes")
    assert "nothing to do" in models("apply", tmp_path, "--yes")
    assert models.dim("one") == 3
    with (tmp_path / "one.yaml").open("a") as file:
        file.write("pinned: true\n")
    (tmp_path / "two.yaml").unlink()
    said = models("apply", tmp_path, "--yes")
    assert "pinned: false -> true" in said
    assert "left as they are without --prune" in said
    assert "two@1" in models.rows()
    pruned = models("apply", tmp_path, "--prune", "--dry-run")
    assert {"- two@1", "- steady@1"} <= set(pruned.splitlines())


def test_models_apply_yields_to_who_was_faster(models, tmp_path):
    """A model that somebody changes while the question stands is not overwritten."""
    models(*like_base("shared", 5))
    text = models("show", "shared").partition("versions\n")[0]
    (tmp_path / "shared.yaml").write_text(f"{text.strip()}\nweight: 2.0\n")
    command = [sys.executable, "-m", "shoal", "models", "apply", str(tmp_path), *models.where]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = ""
        while "weight" not in line:
            line = process.stdout.readline()
            assert line, process.stderr and process.stderr.read()
        models("pin", "shared")
        _, errors = process.communicate("y\n", timeout=limit_s(30))
    assert process.returncode == 1
    assert "model `shared` was changed by someone else meanwhile" in errors
    assert models.rows()["shared@1"]["entry"]["pinned"] is True
    assert "weight" not in models.rows()["shared@1"]["entry"]


class Asking:
    """Requests in a thread, one after another, for as long as the block runs."""

    def __init__(self, url: str, model: str) -> None:
        self.dims: list[int] = []
        self.failed: list[str] = []
        self._url, self._model = url, model
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def _ask(self) -> None:
        with httpx.Client(timeout=limit_s(30)) as client:
            while not self._stop.is_set():
                body = {"model": self._model, "inputs": ["a text"]}
                answer = client.post(f"{self._url}/v1/encode", json=body)
                if answer.is_success:
                    self.dims.append(len(answer.json()["dense"][0]))
                else:
                    self.failed.append(answer.text)

    def more(self, dim: int, timeout_s: float = 15) -> None:
        """Waits for another answer of this length."""
        seen, give_up = len(self.dims), time.monotonic() + timeout_s
        while dim not in self.dims[seen:]:
            assert not self.failed, self.failed[0]
            assert time.monotonic() < give_up, self.dims[-5:]
            time.sleep(0.01)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(40)


def test_models_change_under_load_without_a_failed_request(models):
    """Added, rolled, pinned, evicted and removed while requests run: every one is answered.

    A model that rolls answers first as the old revision and then as the new one, never back.
    """
    models(*like_base("rolling", 5, "--wait"))
    url = models.server.url
    with Asking(url, "rolling") as rolling, Asking(url, "steady") as steady:
        rolling.more(5)
        models(*like_base("guest", 4, "--wait"))
        models(*like_base("rolling", 6, "--revision", "2", "--wait"))
        rolling.more(6)
        models("pin", "steady")
        models("unpin", "steady")
        models("evict", "steady", "--no-wait")
        steady.more(8)
        models("remove", "guest")
        steady.more(8)
        rolling.more(6)
    assert not rolling.failed + steady.failed
    assert rolling.dims == sorted(rolling.dims)
    assert set(rolling.dims) == {5, 6}
    assert set(steady.dims) == {8}


def test_models_add_serves_a_fine_tune_from_its_folder_alone(models):
    """One command from a folder of weights to the vectors that its training made.

    What the folder says is what the built-in entry of the same weights says.
    """
    folder = resolve_source(FINE_TUNE.source, None)
    said = models("add", "my-tune", "--source", folder, "--wait")
    assert models.code == 0
    assert "resident on" in said
    entry = models.rows()["my-tune@1"]["entry"]
    assert entry["source"] == f"file://{Path(folder).resolve()}"
    shown = models("show", "my-tune").partition("versions\n")[0]
    made = yaml.safe_load(shown)
    assert made["max_tokens"] == FINE_TUNE.max_tokens
    assert made["outputs"] == {"dense": {"dim": FINE_TUNE.outputs["dense"].dim}}
    texts = ["mean time to recover", "MTTR", "a shoal of fish"]
    answer = models.server.post("/v1/encode", {"model": "my-tune", "inputs": texts})
    vectors = np.array(answer.json()["dense"])
    same, other = vectors[1] @ vectors[0], vectors[2] @ vectors[0]
    assert same > 0.9 > other
