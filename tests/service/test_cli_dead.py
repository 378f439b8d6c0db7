"""`shoal dead` against a real `shoal serve`: what failed is kept, shown, replayed and dropped."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from typer.testing import CliRunner

from shoal.cli.access import read_access
from shoal.cli.main import app
from shoal.errors import NotFound, QueueUnavailable, SettingsError, ShoalError
from shoal.queue.interface import QueueLimits
from shoal.queue.jetstream import JetStreamQueue
from shoal.queue.topology import Topology
from shoal.wire.envelope import DeadLetter, Failure
from tests.support.pace import limit_s
from tests.support.shoal_process import Serve, ShoalProcess

pytestmark = pytest.mark.slow

FLAGS = ("--devices", "cpu:1", "--ack-wait-s", str(limit_s(2)), "--inline-max-bytes", "150")
POISON = "the poison \x1b[31m"


def start(folder, *, healed=False):
    options = "{}" if healed else f"{{poison: {json.dumps(POISON)}, crash: 'the crash'}}"
    models = {"frail": options, "other": "{poison: 'the poison'}"}
    return Serve(folder, *FLAGS, models=models)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    server = start(tmp_path_factory.mktemp("dead"))
    yield server
    assert server.leave() == 0, server.output


@pytest.fixture
def serve(running):
    """A server without dead letters."""
    Dead(running.folder)("drop", "--all", "--yes")
    return running


class Dead:
    """The command on one data folder. `code` is its last exit code."""

    def __init__(self, folder) -> None:
        self.where = ["--data-dir", str(folder / "data")]
        self.code = 0

    def __call__(self, *arguments: str, answer: str | None = None) -> str:
        result = CliRunner().invoke(app, ["dead", *arguments, *self.where], input=answer)
        if isinstance(result.exception, ShoalError):
            raise result.exception
        assert result.exception is None or isinstance(result.exception, SystemExit)
        self.code = result.exit_code
        return result.stdout

    def listed(self, *arguments: str) -> list[dict]:
        return json.loads(self("list", "--json", *arguments))


def spoil(serve, model="frail", text=POISON, **more):
    answer = serve.post("/v1/encode", {"model": model, "inputs": text, **more})
    assert answer.status_code in (500, 503), answer.text
    return answer.json()


def test_dead_letter_has_the_whole_item_and_its_cause(serve):
    """The client is told at once; list and show have the item, its inputs and the same cause."""
    dead = Dead(serve.folder)
    assert "no dead letters" in dead("list")
    begun = time.monotonic()
    told = spoil(serve, text=[POISON], truncate=True)
    assert time.monotonic() - begun < limit_s(5)
    [row] = dead.listed()
    assert (row["cause"]["code"], row["model"], row["attempts"]) == ("run_failed", "frail", 1)
    assert row["cause"]["message"] == told["message"]
    assert row["inputs"]["texts"] == [POISON]
    assert row["envelope"]["params"]["truncate"] is True
    table = dead("list")
    for cell in ("run_failed", "frail", "encode", row["worker"], told["message"]):
        assert cell in table
    page = dead("show", str(row["number"]))
    assert "the poison \\x1b[31m" in page
    assert "\x1b" not in page
    assert told["message"] in page
    assert row["envelope"]["request"] in page


def test_dead_letter_replay_fails_again_and_succeeds_when_the_fault_is_gone(tmp_path):
    """A replay that fails keeps its one letter; after the model was mended it is served and gone.

    The letters outlive the serve that buried them. Inputs that had been in the payload store are in
    the letter, and are sent again. While there is no serve its address is gone, and the command
    says so.
    """
    dead = Dead(tmp_path)
    server = start(tmp_path)
    large = ["x" * 70, POISON, "y" * 70]  # one item, and over the limit for what is inline
    try:
        told = spoil(server)
        [row] = dead.listed()
        number = str(row["number"])
        said = dead("replay", number)
        assert dead.code == 1
        assert f"run_failed: {told['message']}; kept" in said
        assert [r["number"] for r in dead.listed()] == [row["number"]]
        spoil(server, text=large)
        address = read_access(tmp_path / "data")
    finally:
        assert server.leave() == 0, server.output
    assert_nobody_is_there(dead, address)
    server = start(tmp_path, healed=True)
    try:
        first, second = dead.listed()
        assert (first["number"], second["inputs"]["texts"]) == (row["number"], large)
        assert "kept" in dead("replay", number, "--keep")
        assert dead.code == 0
        assert [r["number"] for r in dead.listed()] == [row["number"], second["number"]]
        assert "1 of 1 served" in dead("replay", number)
        assert "1 of 1 served" in dead("replay", "--all", "--code", "run_failed")
        assert dead.listed() == []
    finally:
        assert server.leave() == 0, server.output


def assert_nobody_is_there(dead, address):
    """What the command says when the serve of its folder has left."""
    with pytest.raises(SettingsError, match="--nats-url"):
        dead("list")
    with pytest.raises(QueueUnavailable, match="no broker answers"):
        dead("list", "--nats-url", address.url)
    command = ShoalProcess("dead", "list", *dead.where)
    assert command.ended(20) == 2
    assert command.output.startswith("shoal: no `shoal serve`")
    assert command.output.count("\n") == 1


def test_dead_letters_are_dropped_by_filter_and_by_number(serve):
    """Filters choose by model, cause and age; drop asks first, and forgets what is meant only."""
    dead = Dead(serve.folder)
    spoil(serve)
    spoil(serve, "other", "the poison")
    spoil(serve, text="the crash")
    assert [r["cause"]["code"] for r in dead.listed()] == [
        "run_failed",
        "run_failed",
        "runtime_crashed",
    ]
    assert [r["model"] for r in dead.listed("--model", "other")] == ["other"]
    assert len(dead.listed("--since", "1h")) == 3
    assert dead.listed("--until", "1h") == dead.listed("--since", "2200-01-01") == []
    assert [r["cause"]["code"] for r in dead.listed("--limit", "1")] == ["runtime_crashed"]
    assert "Drop 1 dead letter" in dead("drop", "--model", "other", answer="n\n")
    assert dead.code == 1
    assert len(dead.listed()) == 3
    assert "dropped 1 dead letter" in dead("drop", "--model", "other", answer="y\n")
    assert "dropped 1 dead letter" in dead("drop", "--code", "runtime_crashed", "--yes")
    [row] = dead.listed()
    assert "dropped 1 dead letter" in dead("drop", str(row["number"]), "--yes")
    with pytest.raises(NotFound, match="no dead letter"):
        dead("drop", str(row["number"]), "--yes")
    assert dead.listed() == []


def test_dead_letter_that_is_no_envelope_is_shown_and_not_replayed(serve):
    """Bytes that no worker can read are listed, shown as hex, refused by replay, and dropped."""
    dead = Dead(serve.folder)
    address = read_access(serve.folder / "data")

    async def bury():
        topology = Topology("default", "file", 1, QueueLimits(), ("interactive", "bulk"))
        queue = await JetStreamQueue.open(address, topology, name="test")
        cause = Failure("unreadable", "no envelope")
        await queue.dead.bury(DeadLetter(b"\x00garbage" * 200, cause, 1, "w", time.time()))
        await queue.close()

    asyncio.run(bury())
    assert "unreadable" in dead("list")
    [row] = dead.listed()
    page = dead("show", str(row["number"]))
    assert "00 67 61 72 62" in page
    assert "512 of 1600 bytes" in page
    assert "cannot be replayed" in dead("replay", str(row["number"]))
    assert dead.code == 1
    dead("drop", "--all", "--yes")
    assert dead.listed() == []


def test_dead_finds_the_broker_of_a_serve(serve):
    """The address is readable by its owner only; who has it can name the broker, with its token."""
    dead = Dead(serve.folder)
    file = serve.folder / "data" / "nats" / "access.json"
    assert file.stat().st_mode & 0o777 == 0o600
    address = read_access(serve.folder / "data")
    with pytest.raises(SettingsError, match="no pool `typo`"):
        dead("list", "--pool", "typo")
    for arguments in (["replay"], ["drop"], ["drop", "1", "--all"], ["replay", "1", "--code", "x"]):
        with pytest.raises(SettingsError, match="give numbers"):
            dead(*arguments)
    with pytest.raises(SettingsError, match="--since"):
        dead("list", "--since", "yesterday")
    several = f"nats://127.0.0.1:1,{address.url}"
    token = ShoalProcess("dead", "list", "--nats-url", several, SHOAL_NATS_TOKEN=address.token)
    assert token.ended(20) == 0, token.output
    other = ShoalProcess("dead", "list", "--nats-url", address.url, SHOAL_NATS_TOKEN="wrong")  # noqa: S106
    assert other.ended(20) == 1
    assert "no broker answers" in other.output
    assert "wrong" not in other.output
