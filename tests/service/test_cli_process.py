"""The command as a process: start-up, exit codes and the generated pages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal import __version__
from shoal.cli.docs import main as docs_main
from tests.support.pace import limit_s

ROOT = Path(__file__).resolve().parents[2]
LIGHT = {"torch", "onnxruntime", "onnx", "numpy", "nats", "uvicorn", "httpx", "transformers"}


def shoal(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SHOAL_")} | variables
    command = [sys.executable, "-m", "shoal", *arguments]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=limit_s(30), env=environ
    )


@pytest.mark.slow
def test_cli_help_loads_no_heavy_module():
    """`shoal --help` imports neither a runtime nor the server nor numpy."""
    program = (
        "import sys\nfrom shoal.cli.main import main\nsys.argv = ['shoal', '--help']\n"
        f"try: main()\nexcept SystemExit: print('HEAVY', sorted({LIGHT!r} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert "HEAVY []" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["serve", "--port", "x"], {}, "shoal: --port: Expected `int`, got `x`"),
        (["serve"], {"SHOAL_PROT": "1"}, "did you mean `SHOAL_PORT`?"),
        (["gateway", "--host", "0.0.0.0"], {}, "--insecure"),  # noqa: S104
        (["worker", "--catalog", "/no/such/folder"], {}, "there is no such folder"),
        (["models", "list", "--catalog", "/no/such/folder"], {}, "there is no such folder"),
        (["serve", "--prt", "1"], {}, "--port"),
    ],
)
def test_cli_wrong_settings_are_one_message_and_exit_code_two(arguments, variables, said):
    """A fault of the operator is named without a traceback."""
    done = shoal(*arguments, **variables)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["gateway", "worker"])
def test_cli_says_when_no_broker_answers(command, tmp_path):
    """A broker that is not there is one line and exit code 1, not a wait without end."""
    flags = ["--port", "0"] if command == "gateway" else []
    done = shoal(command, *flags, "--nats-url", "nats://127.0.0.1:1")
    assert done.returncode == 1
    assert "no NATS server answers at nats://127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_cli_version_is_the_package_version():
    """`shoal version` prints what is installed."""
    assert shoal("version").stdout.startswith(f"shoal {__version__} (Python 3.")


@pytest.mark.slow
def test_generated_docs_are_current(capsys):
    """docs/cli.md and docs/catalog.md are what `make docs` would write."""
    assert docs_main(["--check", str(ROOT / "docs")]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_generated_docs_check_sees_a_stale_page(tmp_path, capsys, monkeypatch):
    """A missing page is named; writing it makes the check pass."""
    monkeypatch.setattr("shoal.cli.docs.pages", lambda _: {"page.md": "What there is to say.\n"})
    assert docs_main(["--check", str(tmp_path)]) == 1
    assert "run `make docs`" in capsys.readouterr().out
    assert docs_main([str(tmp_path)]) == 0
    assert docs_main(["--check", str(tmp_path)]) == 0
