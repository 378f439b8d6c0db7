import json

import pytest
from rich.text import Text
from typer.main import get_command
from typer.testing import CliRunner

from shoal.catalog.load import load
from shoal.cli.main import app
from shoal.cli.options import MAIN, default_text, settings_command
from shoal.cli.serve import examples
from shoal.configuration import KINDS, knobs
from shoal.errors import SettingsError
from shoal.settings import GatewaySettings, ServeSettings


@pytest.fixture
def alone(monkeypatch):
    """No variable of this machine's environment is Shoal's."""
    monkeypatch.setattr("shoal.cli.options.environment", dict)


def run_with(kind, *arguments: str):
    """What the command made of the arguments, and its exit code."""
    import typer

    seen = []

    def keep(settings) -> int:
        seen.append(settings)
        return 3

    probe = typer.Typer()
    probe.command()(settings_command(kind, keep, "Probe."))
    result = CliRunner().invoke(probe, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return seen, result.exit_code


def test_command_without_options_has_the_default_settings(alone):
    """Nothing given means the defaults, and the exit code is the one that the command returns."""
    assert run_with(ServeSettings) == ([ServeSettings()], 3)


def test_command_turns_options_into_settings(alone):
    """Every kind of knob is converted: number, path, choice, switch, text."""
    arguments = ["--port", "0", "--data-dir", "d", "--storage", "memory", "--insecure"]
    (settings,), _ = run_with(ServeSettings, *arguments, "--ack-wait-s", "2.5")
    assert (settings.port, str(settings.data_dir), settings.storage) == (0, "d", "memory")
    assert (settings.insecure, settings.ack_wait_s) == (True, 2.5)


def test_command_reads_the_settings_file(alone, tmp_path):
    """--config names a file; an option wins over it."""
    (tmp_path / "s.toml").write_text("port = 5\nmax_inputs = 6\n")
    (settings,), _ = run_with(GatewaySettings, "--config", str(tmp_path / "s.toml"), "--port", "7")
    assert (settings.port, settings.max_inputs) == (7, 6)


def test_command_refuses_a_wrong_value_by_the_name_of_the_option(alone):
    """A value out of range is an error that names the option."""
    with pytest.raises(SettingsError, match=r"--port: .*65535"):
        run_with(GatewaySettings, "--port", "70000")


@pytest.mark.parametrize(("name", "kind"), KINDS.items(), ids=KINDS)
def test_help_shows_every_setting_with_variable_and_default(name, kind, monkeypatch):
    """Help names each option, its variable and its default, the few that matter first."""
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 400)
    text = CliRunner().invoke(app, [name, "--help"]).output
    for knob in knobs(kind).values():
        assert f"{knob.flag} " in text
        assert knob.variable in text
        assert default_text(knob) in text
    first = [text.index(f"--{main.replace('_', '-')} ") for main in MAIN if main in knobs(kind)]
    others = [text.index(f"{k.flag} ") for k in knobs(kind).values() if k.name not in MAIN]
    assert max(first) < min(others)


def helps(command):
    """Every text of a command's help, and of those below it."""
    yield command.help or ""
    yield from (each.help or "" for each in command.params if hasattr(each, "help"))
    for below in getattr(command, "commands", {}).values():
        yield from helps(below)


def test_help_loses_nothing_between_brackets():
    """The only markup of a help text is `dim`: other words in brackets would not be shown."""
    texts = list(helps(get_command(app)))
    tags = {str(span.style) for text in texts for span in Text.from_markup(text).spans}
    assert len(texts) > 200
    assert tags == {"dim"}


def test_help_hides_no_command():
    """Every command is listed with a line of its own."""
    text = CliRunner().invoke(app, ["--help"]).output
    for name in ("serve", "gateway", "worker", "models", "run", "doctor", "version"):
        assert f" {name} " in text


def test_serve_shows_requests_that_its_models_take():
    """The requests to copy have texts in them, and go to models that read texts."""
    catalog = load(None)
    bodies = [json.loads(command.split("'")[-2]) for command in examples(catalog, "http://x")]
    assert bodies
    assert all("text" in catalog.resolve(body["model"]).inputs for body in bodies)
