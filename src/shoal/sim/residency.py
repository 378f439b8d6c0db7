"""What a residency policy would do on a machine under a trace of requests.

Owns an event-driven model of one worker: devices that do one thing at a time (load a model, or run
a batch), lines of requests, and the policy that decides as it does in the worker. Does not own the
policy (`shoal.core`), traces (`workload`) or how results look.

Left out: the queue, tokenising, and lanes, which take milliseconds where loads take seconds; sizes
and load times are as measured and never vary. A device begins a load when its batch has ended.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shoal.core.residency import Close, Copy, Demand, Evict, Held, Load, Memory, ResidencyPolicy
from shoal.errors import Bug
from shoal.sim.workload import Arrival, SimModel

MOST_STEPS_A_MOMENT = 1000


@dataclass(frozen=True, slots=True)
class Machine:
    """What the models run on.

    memories: with nothing in use yet. A batch of n requests takes `launch_s + n * request_s` and
    has at most `batch_requests`. deadline_s: by which each must have begun to be served; None: the
    policy is told of none.
    """

    memories: tuple[Memory, ...]
    launch_s: float = 0.003
    request_s: float = 0.002
    batch_requests: int = 32
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Stay:
    """A copy in memory, from the begin of its load until its eviction or the end."""

    model: str
    device: str
    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a trace.

    waits_s: from arrival to the begin of the batch, of each request that was served; cold_waits_s:
    of those that came while their model was not loaded. run_s, load_s: device seconds. unserved:
    requests of models that fit nowhere. end_s: when the last was done.
    """

    waits_s: tuple[float, ...]
    cold_waits_s: tuple[float, ...]
    unserved: int
    loads: int
    load_s: float
    run_s: float
    end_s: float
    devices: int
    stays: tuple[Stay, ...]

    @property
    def served(self) -> int:
        """Requests that were served."""
        return len(self.waits_s)

    @property
    def cold_share(self) -> float:
        """Requests that found their model not loaded, as a share of those served."""
        return len(self.cold_waits_s) / max(1, self.served)

    @property
    def load_s_per_1000(self) -> float:
        """Load seconds per 1,000 requests."""
        return 1000.0 * self.load_s / max(1, self.served)

    @property
    def utilisation(self) -> float:
        """Share of the devices' time in which they ran batches."""
        return self.run_s / (self.end_s * self.devices) if self.end_s else 0.0

    def resident_share(self, model: str, device: str | None = None) -> float:
        """Share of the time in which a model was in memory (on any device: copies add up)."""
        stays = (s for s in self.stays if s.model == model and device in (None, s.device))
        return sum(s.to_s - s.from_s for s in stays) / self.end_s if self.end_s else 0.0


def quantile(values: Iterable[float], q: float) -> float:
    """The q-quantile (nearest rank); 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


@dataclass(slots=True)
class _Resident:
    """A copy, or one on its way: since_s is when it was loaded, None before."""

    model: str
    asked_s: float
    since_s: float | None = None
    used_s: float = 0.0


@dataclass(slots=True)
class _Device:
    """A device, what it holds, and what it does: nothing, a batch of a model, or a load."""

    name: str
    held: dict[str, _Resident] = field(default_factory=dict)
    runs: str | None = None
    loads: str | None = None
    to_load: str | None = None
    closed: set[str] = field(default_factory=set)

    @property
    def idle(self) -> bool:
        """Nothing runs, loads or is about to."""
        return self.runs is None and self.loads is None and self.to_load is None


class ResidencySimulation:
    """One run of a policy over a trace. `run` may be called once."""

    def __init__(
        self, machine: Machine, models: Iterable[SimModel], policy: ResidencyPolicy
    ) -> None:
        self._machine = machine
        self._models = {model.model: model for model in models}
        self._policy = policy
        self._devices = [_Device(name) for m in machine.memories for name in m.devices]
        self._lines: dict[str, deque[tuple[float, bool]]] = {}
        self._idle_demands = {m.model: self._demand(m) for m in self._models.values()}
        self._ends: list[tuple[float, int]] = []
        self._look_s = math.inf
        self._now = 0.0
        self._most_waiting = 0
        self._waits_s: list[float] = []
        self._cold_waits_s: list[float] = []
        self._stays: list[Stay] = []
        self._loads = 0
        self._load_s = 0.0
        self._run_s = 0.0

    def run(self, arrivals: Sequence[Arrival]) -> Report:
        """Serves a trace, in order of time, to its end. Raises `KeyError` for an unknown model."""
        position = 0
        self._most_waiting = len(arrivals)
        self._step()
        while True:
            arrival_s = arrivals[position].at_s if position < len(arrivals) else math.inf
            end_s = self._ends[0][0] if self._ends else math.inf
            if math.isinf(min(arrival_s, end_s)) and not any(self._lines.values()):
                break
            next_s = min(arrival_s, end_s, self._look_s)
            if math.isinf(next_s):
                break
            self._now = next_s
            if self._now == end_s:
                self._end(self._devices[heapq.heappop(self._ends)[1]])
            elif self._now == arrival_s:
                self._arrive(arrivals[position].model)
                position += 1
            self._step()
        for device in self._devices:
            for held in device.held.values():
                self._stays.append(Stay(held.model, device.name, held.asked_s, self._now))
        return Report(
            tuple(self._waits_s),
            tuple(self._cold_waits_s),
            sum(len(line) for line in self._lines.values()),
            self._loads,
            self._load_s,
            self._run_s,
            self._now,
            len(self._devices),
            tuple(sorted(self._stays, key=lambda stay: (stay.from_s, stay.model))),
        )

    def _arrive(self, model: str) -> None:
        known = self._models[model].model
        cold = not any(
            known in device.held and device.held[known].since_s is not None
            for device in self._devices
        )
        self._lines.setdefault(known, deque(maxlen=self._most_waiting)).append((self._now, cold))
        self._policy.on_requests(known, 1, self._now)

    def _end(self, device: _Device) -> None:
        """What a device did has ended."""
        if device.loads is not None:
            held = device.held[device.loads]
            held.since_s = held.used_s = self._now
            device.loads = None
        elif device.runs is not None:
            device.held[device.runs].used_s = self._now
            device.runs = None

    def _step(self) -> None:
        """Does what has become possible, until nothing is."""
        for _ in range(MOST_STEPS_A_MOMENT):
            acted = self._act()
            for number, device in enumerate(self._devices):
                self._begin(number, device)
            if not acted:
                self._look()
                return
        raise Bug(f"the policy does not come to rest at {self._now:.3f} s")

    def _act(self) -> bool:
        """Carries out a plan; whether it loaded or evicted something."""
        for device in self._devices:
            device.closed.clear()
        if not self._worth_asking():
            return False
        devices = {device.name: device for device in self._devices}
        moved = False
        for action in self._policy.plan(self._held(), self._now):
            device = devices[action.device]
            if isinstance(action, Close):
                device.closed.add(action.model)
                continue
            moved = True
            if isinstance(action, Evict):
                gone = device.held.pop(action.model)
                if gone.since_s is None or device.runs == action.model:
                    raise Bug(f"{action} is of a copy that loads or is busy")
                self._stays.append(Stay(gone.model, device.name, gone.asked_s, self._now))
            elif isinstance(action, Load):
                if action.model in device.held or device.loads or device.to_load:
                    raise Bug(f"{action} is the second on its device")
                device.held[action.model] = _Resident(action.model, self._now)
                device.to_load = action.model
        return moved

    def _worth_asking(self) -> bool:
        """Whether a plan can say anything: not while all that waits is loaded and one device."""
        if len(self._devices) > 1:
            return True
        held = self._devices[0].held
        wanted = [model.model for model in self._models.values() if model.pinned]
        wanted += [model for model, line in self._lines.items() if line]
        return any(model not in held for model in wanted)

    def _begin(self, number: int, device: _Device) -> None:
        """Gives an idle device its next load or batch."""
        if device.runs is not None or device.loads is not None:
            return
        if device.to_load is not None:
            model, device.loads, device.to_load = device.to_load, device.to_load, None
            self._loads += 1
            self._load_s += self._models[model].load_s
            heapq.heappush(self._ends, (self._now + self._models[model].load_s, number))
            return
        ready = [
            (self._lines[model][0][0], model)
            for model, held in device.held.items()
            if held.since_s is not None and model not in device.closed and self._lines.get(model)
        ]
        if not ready:
            return
        _, model = min(ready)
        line = self._lines[model]
        count = min(len(line), self._machine.batch_requests)
        for _ in range(count):
            arrived_s, cold = line.popleft()
            self._waits_s.append(self._now - arrived_s)
            if cold:
                self._cold_waits_s.append(self._now - arrived_s)
        took_s = self._machine.launch_s + count * self._machine.request_s
        device.runs = model
        self._run_s += took_s
        heapq.heappush(self._ends, (self._now + took_s, number))

    def _look(self) -> None:
        """Notes when the policy wants to be asked again."""
        at_s = self._policy.next_look_s(self._held(), self._now) if self._worth_asking() else None
        self._look_s = math.inf if at_s is None else at_s

    def _held(self) -> Held:
        sizes = {name: model.size_bytes for name, model in self._models.items()}
        used = {device.name: sum(sizes[model] for model in device.held) for device in self._devices}
        memories = tuple(
            Memory(m.name, m.budget_bytes, sum(used[d] for d in m.devices), m.devices)
            for m in self._machine.memories
        )
        copies = tuple(
            Copy(model, d.name, sizes[model], held.since_s, held.used_s, busy=d.runs == model)
            for d in self._devices
            for model, held in d.held.items()
            if held.since_s is not None
        )
        loading = tuple(
            (model, d.name)
            for d in self._devices
            for model, held in d.held.items()
            if held.since_s is None
        )
        waiting = {
            model: self._demand(self._models[model]) for model, line in self._lines.items() if line
        }
        demands = tuple({**self._idle_demands, **waiting}.values())
        idle = frozenset(device.name for device in self._devices if device.idle)
        return Held(memories, copies, demands, loading, idle)

    def _demand(self, model: SimModel) -> Demand:
        line = self._lines.get(model.model, ())
        deadline_s = self._machine.deadline_s
        slack_s = None
        if line and deadline_s is not None:
            slack_s = line[0][0] + deadline_s - model.load_s - self._now
        return Demand(
            model.model,
            model.size_bytes,
            model.load_s,
            measured=True,
            waiting=len(line),
            queued=len(line),
            waited_s=sum(self._now - at_s for at_s, _ in line),
            backlog_s=len(line) * self._machine.request_s,
            slack_s=slack_s,
            pinned=model.pinned,
        )
