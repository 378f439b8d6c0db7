from dataclasses import fields
from pathlib import Path

import pytest

from shoal.configuration import KINDS, knobs, load, public
from shoal.errors import SettingsError
from shoal.settings import GatewaySettings, ServeSettings, WorkerSettings


def write(folder: Path, text: str) -> Path:
    path = folder / "shoal.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_load_precedence_is_flag_environment_table_file_default(tmp_path):
    """Each place overrides those after it, and a table overrides the top level of the file."""
    file = write(tmp_path, "port = 1\nmax_inputs = 1\nitem_inputs = 1\n[gateway]\nmax_inputs = 2\n")
    got = load(GatewaySettings, {"port": "4"}, {"SHOAL_PORT": "3", "SHOAL_ITEM_TOKENS": "3"}, file)
    assert (got.port, got.item_tokens, got.max_inputs, got.item_inputs) == (4, 3, 2, 1)
    assert got.max_body_bytes == GatewaySettings().max_body_bytes


def test_load_takes_the_file_that_the_environment_names(tmp_path):
    """SHOAL_CONFIG names the file; a flag for another file wins over it."""
    one, other = write(tmp_path, "port = 1\n"), tmp_path / "other.toml"
    other.write_text("port = 2\n")
    environ = {"SHOAL_CONFIG": str(one)}
    assert load(GatewaySettings, {}, environ).port == 1
    assert load(GatewaySettings, {}, environ, other).port == 2


def test_load_ignores_what_belongs_to_another_command(tmp_path):
    """One file and one environment serve all commands: a worker's knobs do not stop a gateway."""
    file = write(tmp_path, "threads = 2\n[worker]\nthreads = 3\n[serve]\nport = 7\n")
    assert load(GatewaySettings, {}, {"SHOAL_THREADS": "4"}, file) == GatewaySettings()
    assert load(WorkerSettings, {}, {}, file).threads == 3
    assert load(ServeSettings, {}, {}, file).port == 7


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"SHOAL_PROT": "1"}, ["SHOAL_PROT", "did you mean `SHOAL_PORT`?"]),
        ({"SHOAL_PORT": "http"}, ["SHOAL_PORT", "`http`"]),
        ({"SHOAL_PORT": "65536"}, ["SHOAL_PORT", "65535"]),
        ({"SHOAL_ACK_WAIT_S": "inf"}, ["SHOAL_ACK_WAIT_S", "finite"]),
        ({"SHOAL_ACK_WAIT_S": "nan"}, ["SHOAL_ACK_WAIT_S"]),
        ({"SHOAL_INSECURE": "perhaps"}, ["SHOAL_INSECURE", "perhaps"]),
        ({"SHOAL_STORAGE": "fil"}, ["SHOAL_STORAGE", "file, memory", "did you mean `file`?"]),
        ({"SHOAL_MAX_INPUTS": "0"}, ["SHOAL_MAX_INPUTS", ">= 1"]),
        ({"SHOAL_REPLICAS": "6"}, ["SHOAL_REPLICAS", "<= 5"]),
        ({"SHOAL_CONFIG": "/nowhere/shoal.toml"}, ["/nowhere/shoal.toml", "No such file"]),
    ],
)
def test_load_names_the_variable_at_fault(environ, said):
    """A wrong or unknown variable is an error that names it and what would be right."""
    with pytest.raises(SettingsError) as caught:
        load(ServeSettings, {}, environ)
    assert all(text in caught.value.message for text in said), caught.value.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", ["unknown key `prot`", "did you mean `port`?"]),
        ("[gateway]\nthreads = 1", ["[gateway]", "unknown key `threads`"]),
        ("[gatway]\nport = 1", ["unknown key `gatway`", "did you mean `gateway`?"]),
        ("port = '1'", ["port", "Expected `int`"]),
        ("port = true", ["port", "Expected `int`"]),
        ("insecure = 1", ["insecure", "Expected `bool`"]),
        ("catalog = 3", ["catalog", "path"]),
        ("[worker]\nthreads = 0", ["[worker] threads", ">= 1"]),
        ("port = ", ["shoal.toml", "Invalid value"]),
    ],
)
def test_load_names_the_key_at_fault(tmp_path, text, said):
    """A wrong or unknown key of the file is an error, also in the table of another command."""
    with pytest.raises(SettingsError) as caught:
        load(ServeSettings, {}, {}, write(tmp_path, text))
    assert all(part in caught.value.message for part in said), caught.value.message


def test_load_reports_every_fault_at_once():
    """Two faults are two clauses of one message."""
    with pytest.raises(SettingsError, match=r"SHOAL_A.*--port"):
        load(ServeSettings, {"port": "x"}, {"SHOAL_A": "1"})


def test_load_takes_paths_of_a_file_relative_to_it(tmp_path, monkeypatch):
    """A settings file means the same from every working directory, and ~ is the home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file = write(tmp_path, "catalog = 'models'\ncache_dir = '~/cache'\n")
    got = load(ServeSettings, {"data_dir": "here"}, {}, file)
    assert got.catalog == tmp_path / "models"
    assert got.cache_dir == tmp_path / "home" / "cache"
    assert got.data_dir == Path("here")


def test_load_passes_over_empty_variables_and_service_links():
    """Variables that a launcher sets by itself are not taken for settings."""
    environ = {
        "SHOAL_HOST": "",
        "SHOAL_PORT": "tcp://10.0.0.1:8080",
        "SHOAL_SERVICE_HOST": "10.0.0.1",
        "SHOAL_GATEWAY_SERVICE_PORT_HTTP": "80",
        "SHOAL_PORT_8080_TCP_ADDR": "10.0.0.1",
    }
    assert load(ServeSettings, {}, environ) == ServeSettings()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org", ""])  # noqa: S104
def test_load_refuses_a_public_address_unless_told(host):
    """A server without keys listens beyond this machine only when somebody says so."""
    with pytest.raises(SettingsError, match="--insecure"):
        load(GatewaySettings, {"host": host}, {})
    assert load(GatewaySettings, {"host": host, "insecure": True}, {}).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_load_allows_every_loopback_address(host):
    """An address that only this machine reaches needs no permission."""
    assert load(GatewaySettings, {"host": host}, {}).host == host


def test_load_refuses_a_default_deadline_over_the_longest():
    """Two settings that contradict each other are an error at start-up."""
    with pytest.raises(SettingsError, match="max_deadline_s"):
        load(GatewaySettings, {"default_deadline_s": 10, "max_deadline_s": 5}, {})


def test_settings_never_show_a_secret():
    """Neither repr nor the public view of settings has the token or the password of a URL."""
    flags = {"nats_token": "t0ken", "nats_url": "nats://ann:pa55@queue:4222"}
    settings = load(WorkerSettings, flags, {})
    shown = repr(settings) + repr(public(settings))
    assert "t0ken" not in shown
    assert "pa55" not in shown
    assert public(settings)["nats_url"] == "nats://***@queue:4222"


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_knobs_describe_every_setting(kind):
    """Each setting has a description, and its default is one that the loader accepts."""
    known = knobs(kind)
    assert list(known) == [f.name for f in fields(kind)]
    assert all(knob.description for knob in known.values())
    defaults = {name: knob.default for name, knob in known.items()}
    assert load(kind, defaults, {}) == kind()
