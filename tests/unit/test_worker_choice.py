"""What a worker makes of entries with several runtimes: at start, at faults, with adapters."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.bundles.definition import read
from shoal.bundles.shelf import Shelf
from shoal.catalog.schema import Alternative, Entry, Profile
from shoal.core.choice import MARGIN
from shoal.core.cost import Work
from shoal.errors import ModelLoading, ModelUnavailable, OutOfMemory, RuntimeUnavailable
from shoal.ipc.facts import Adapts, Facts
from shoal.worker.choice import Choices
from shoal.worker.costs import CostBook
from shoal.worker.device import Device, Loaded, Loading
from shoal.worker.faults import LoadFaults, blames_runtime
from shoal.worker.servable import Installed

WORK = Work(2_048, 2_048 * 64)


class Worker:
    """The rooms that a choice is made in, without processes. switched: what `on_switch` got."""

    def __init__(self, folder, *, devices=("cpu#0", "cpu#1")):
        shelf = Shelf(folder, [])
        self.costs = CostBook(folder / "costs.json", "cpux1")
        self.devices = [Device(name) for name in devices]
        self.installed = Installed(devices)
        found = {
            "onnx": Facts(),
            "torch": Facts(adapts=Adapts()),
            "candle": Facts(devices=["cpu"]),
            "absent": Facts("absent is not installed"),
            "texts": Facts(tasks=["generate"]),
        }
        self.installed.take(found, shelf)
        self.adapted = set()
        self.switched = []
        self.choices = Choices(self.installed, self.devices, self.costs)
        self.choices.on_switch = self.switched.append
        self.choices.has_adapters = self.adapted.__contains__

    def measure(self, entry, token_s):
        for _ in range(20):
            self.costs.model(entry).observe(WORK, WORK.padded_tokens * token_s)


@pytest.fixture
def worker(tmp_path):
    return Worker(tmp_path)


@pytest.fixture
def entry(tmp_path):
    """An entry whose files are here, with three runtimes."""
    (tmp_path / "model.safetensors").write_bytes(b"")
    return Entry(
        id="m",
        tasks=["encode"],
        source=tmp_path.as_uri(),
        tokenizer=tmp_path.as_uri(),
        runtime="onnx",
        alternatives=[Alternative("torch"), Alternative("candle")],
    )


def load(device, entry):
    device.loading[entry.key] = Loading(entry, 0.0)


def test_choices_leave_an_entry_without_alternatives_alone(worker, entry):
    """It is served as it stands, whatever is installed."""
    plain = msgspec.structs.replace(entry, runtime="absent", alternatives=[])
    assert worker.choices.served(plain) is plain
    assert not worker.choices.has_choice(plain.key)
    assert not worker.choices.take_over(plain, ModelUnavailable("broken"))


def test_choices_pass_over_what_is_not_installed(worker, entry, caplog):
    """The next one that is serves it, under the same key, and the log says why."""
    caplog.set_level("INFO")
    listed = msgspec.structs.replace(entry, runtime="absent")
    served = worker.choices.served(listed)
    assert (served.runtime, served.key, served.alternatives) == ("torch", listed.key, [])
    assert worker.choices.others(listed.key)["absent"] == "absent is not installed"
    assert "is served by torch: absent: absent is not installed;" in caplog.text


def test_choices_pass_over_what_does_not_compute_on_the_devices(tmp_path, entry):
    """A runtime of CPUs serves no worker of GPUs, and its class says so."""
    worker = Worker(tmp_path, devices=("cuda:0",))
    listed = msgspec.structs.replace(entry, runtime="candle", alternatives=[Alternative("torch")])
    assert worker.choices.served(listed).runtime == "torch"
    assert "computes on cpu" in worker.choices.others(listed.key)["candle"]


def test_choices_build_nothing_for_an_alternative(worker, tmp_path, entry):
    """A bundle that is not built counts where it is the entry's own runtime's only."""
    absent = Facts("not installed")
    worker.installed.take({"onnx": absent, "candle": absent}, Shelf(tmp_path, read()))
    own = msgspec.structs.replace(entry, runtime="candle", alternatives=[Alternative("onnx")])
    assert worker.choices.served(own).runtime == "candle"
    worker.choices.forget(own.key)
    listed = msgspec.structs.replace(entry, alternatives=[Alternative("candle")])
    assert worker.choices.served(listed).runtime == "onnx"
    assert "shoal bundles build candle" in worker.choices.others(listed.key)["candle"]


def test_choices_follow_what_was_measured_at_the_next_start(tmp_path, entry):
    """What was found dearer gives way when a worker starts, and not while it serves."""
    first = Worker(tmp_path)
    onnx = first.choices.served(entry)
    torch = msgspec.structs.replace(onnx, runtime="torch")
    first.measure(torch, 1e-5)
    first.measure(onnx, 2 * MARGIN * 1e-5)
    assert first.choices.served(entry).runtime == "onnx"
    first.costs.save()
    assert Worker(tmp_path).choices.served(entry).runtime == "torch"


def test_choices_follow_a_declared_profile_where_nothing_was_measured(worker, entry):
    """A profile that was written for a runtime is believed until there is something better."""
    listed = msgspec.structs.replace(
        entry,
        profile=Profile(tokens_per_s=1_000.0),
        alternatives=[Alternative("torch", profile=Profile(tokens_per_s=9_000.0))],
    )
    assert worker.choices.served(listed).runtime == "torch"


def test_choices_take_over_one_after_the_other_and_then_rest(worker, entry):
    """Each runtime that does not load gives way once; after the last there is a fault and a pause.

    Then the first is next again, and the reasons of all are shown.
    """
    faults = LoadFaults()
    faults.take_over = worker.choices.take_over
    served = worker.choices.served(entry)
    for runtime in ("torch", "candle"):
        assert faults.on_fault(served, ModelUnavailable("does not fit")) is None
        assert faults.current(entry.key) is None
        served = worker.choices.served(entry)
        assert served.runtime == worker.switched[-1].runtime == runtime
    assert faults.on_fault(served, RuntimeUnavailable("no build")) is not None
    assert faults.current(entry.key) is not None
    assert worker.choices.served(entry).runtime == worker.switched[-1].runtime == "onnx"
    assert worker.choices.others(entry.key) == {"torch": "does not fit", "candle": "no build"}


def test_choices_stay_while_a_copy_is_loaded_or_another_load_decides(worker, entry):
    """What runs on one device is not broken; of two loads the last one to fail decides."""
    one, two = worker.devices
    served, error = worker.choices.served(entry), ModelUnavailable("does not fit")
    load(one, served)
    load(two, served)
    assert worker.choices.take_over(served, error)
    assert not worker.switched
    del one.loading[entry.key], two.loading[entry.key]
    two.resident[entry.key] = Loaded(served, 1, 0.0, 0.0)
    load(one, served)
    assert not worker.choices.take_over(served, error)
    assert not worker.switched


def test_choices_pass_over_the_failure_of_what_serves_no_more(worker, entry):
    """A load that began before the switch and fails after it changes nothing."""
    served = worker.choices.served(entry)
    worker.choices.take_over(served, ModelUnavailable("broken"))
    assert worker.choices.take_over(served, ModelUnavailable("broken"))
    assert [one.runtime for one in worker.switched] == ["torch"]


def test_choices_blame_no_runtime_for_memory_or_time():
    """Want of memory, and a load that takes long, are no reasons to change the runtime."""
    assert blames_runtime(ModelUnavailable("m"))
    assert not blames_runtime(OutOfMemory("m"))
    assert not blames_runtime(ModelLoading("m"))


def test_choices_wait_for_copies_to_go_before_adapters_move_a_model(worker, entry):
    """A runtime without adapters gives way once there are some, and no copy is loaded any more."""
    device = worker.devices[0]
    served = worker.choices.served(entry)
    device.resident[entry.key] = Loaded(served, 1, 0.0, 0.0)
    worker.adapted.add("m")
    assert worker.choices.served(entry).runtime == "onnx"
    assert [one.key for one in worker.choices.due] == [entry.key]
    worker.choices.switch_due()
    assert not worker.switched
    del device.resident[entry.key]
    worker.choices.switch_due()
    assert [one.runtime for one in worker.switched] == ["torch"]
    assert worker.choices.due == []
    assert "adapters" in worker.choices.others(entry.key)["onnx"]


def test_choices_leave_a_runtime_of_adapters_that_does_not_load(worker, entry):
    """What served before serves again, and stays: a model without its adapters is better than none.

    Where that fails, too, there is a fault, and the one with adapters is next again.
    """
    served = worker.choices.served(entry)
    worker.adapted.add("m")
    worker.choices.served(entry)
    worker.choices.switch_due()
    torch = worker.switched[-1]
    assert torch.runtime == "torch"
    assert worker.choices.take_over(torch, ModelUnavailable("broken"))
    assert worker.choices.served(entry) == served == worker.switched[-1]
    assert worker.choices.due == []
    assert worker.choices.others(entry.key)["torch"] == "broken"
    assert worker.choices.take_over(served, ModelUnavailable("broken, too"))
    candle = worker.choices.served(entry)
    assert candle.runtime == "candle"
    assert not worker.choices.take_over(candle, ModelUnavailable("all broken"))
    assert worker.choices.served(entry).runtime == "torch"


def test_choices_ask_each_entry_whether_it_takes_adapters(worker, entry):
    """It depends on the weights, the tasks and the options, and not on the runtime alone."""
    adapts = Adapts(tasks=["generate"], bare_weights=[".gguf"], usual=0)
    worker.installed.take({"engine": Facts(adapts=adapts)}, Shelf(Path(), []))

    def most(**fields):
        return worker.installed.most_adapters(msgspec.structs.replace(text, **fields))

    text = msgspec.structs.replace(
        entry, runtime="engine", tasks=["generate"], options={"max_adapters": 3}
    )
    assert most() == 3
    assert most(options={}) == adapts.usual
    assert most(tasks=["encode"]) == most(weights="model.gguf") == most(source="hf://m.gguf") == 0
    assert most(runtime="elsewhere") == 0


@pytest.mark.parametrize("option", ["many", True, -1, 1.5])
def test_choices_refuse_a_number_of_adapters_that_is_none(worker, entry, option):
    """The model cannot be served, and the reason names the option."""
    torch = msgspec.structs.replace(entry, runtime="torch", options={"max_adapters": option})
    assert "max_adapters" in worker.installed.why_not(torch)


def test_choices_pass_over_a_runtime_of_other_tasks(worker, entry):
    """A runtime that does not serve what an entry is for is not loaded to find that out."""
    listed = msgspec.structs.replace(entry, runtime="texts")
    assert worker.choices.served(listed).runtime == "torch"
    assert "does not serve encode" in worker.choices.others(listed.key)["texts"]


def test_choices_stay_where_no_runtime_has_adapters(worker, entry):
    """The model itself goes on being served."""
    worker.adapted.add("m")
    listed = msgspec.structs.replace(entry, alternatives=[Alternative("candle")])
    assert worker.choices.served(listed).runtime == "onnx"
    assert worker.choices.due == []


def test_costs_that_another_process_wrote_are_kept(tmp_path, entry):
    """A bakeoff beside a worker is remembered, though the worker writes its book afterwards."""
    torch = msgspec.structs.replace(entry, runtime="torch", alternatives=[])
    onnx = msgspec.structs.replace(entry, alternatives=[])
    worker, bakeoff = Worker(tmp_path), Worker(tmp_path)
    bakeoff.measure(torch, 1e-5)
    bakeoff.costs.save()
    worker.measure(onnx, 2e-5)
    worker.costs.save()
    again = Worker(tmp_path).costs
    assert 0.0 < again.known_token_s(torch) < again.known_token_s(onnx)
