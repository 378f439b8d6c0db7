"""What the rest of Shoal knows of the queue.

Owns the contract, which one suite of tests checks on every implementation:

- `submit` puts an item into the bounded line of its (model, lane). The call returns when the bytes
  are on their way; a refusal comes later, through `on_refused`, as a `QueueFull` or a
  `QueueUnavailable`. The same `item_id` twice is one item.
- `pull` asks once for up to n items of one line. Deliveries come through `on_delivery`, at most n,
  until the pull is full or has expired; then `on_end` is called once.
- A delivery that is neither acked nor extended within `ack_wait_s` comes back with a higher
  attempt, as does one that is naked, after its delay. One that is naked untouched, or comes while
  nobody pulls any more, comes back as the same attempt.
- Outcomes and control messages are not stored: who does not listen misses them.

Does not own what the bytes mean, retries of failed work (`shoal.core.delivery`) or admission.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from shoal.core.types import Lane
from shoal.errors import ShoalError
from shoal.wire.envelope import DeadLetter, PayloadRef

Control = Literal["cancel", "status", "backlog", "missing", "back", "nudge"]
OnRefused = Callable[[ShoalError], None]
OnBytes = Callable[[bytes], None]


class Delivery(Protocol):
    """One item in this worker's hands."""

    data: bytes
    attempt: int

    async def ack(self) -> None:
        """The item is done; it leaves the queue."""

    async def nak(self, delay_s: float = 0.0, *, untouched: bool = False) -> None:
        """The item is given back; another attempt may begin after `delay_s`.

        untouched: nothing was done with it, so this was no attempt.
        """

    async def in_progress(self) -> None:
        """The item is being worked on: ack_wait begins anew."""


OnDelivery = Callable[[Delivery], None]


class Payloads(Protocol):
    """Bodies and results that are too large for the queue."""

    async def ensure(self) -> None:
        """Makes the store; idempotent."""

    async def put(self, data: bytes) -> PayloadRef:
        """Keeps `data` for a bounded time. Raises `QueueUnavailable`."""

    async def get(self, ref: PayloadRef) -> bytes:
        """The bytes again, their digest checked. Raises `QueueUnavailable` when gone or broken."""

    async def delete(self, ref: PayloadRef) -> None:
        """Forgets it; nothing happens when it is gone already."""


@dataclass(frozen=True, slots=True)
class Buried:
    """A dead letter and its number, which is how it is named afterwards."""

    number: int
    letter: DeadLetter


class DeadLetters(Protocol):
    """Items that cannot be served; bounded by number, size and age, the oldest go first."""

    async def ensure(self) -> None:
        """Makes the store; idempotent."""

    async def bury(self, letter: DeadLetter) -> None:
        """Keeps a letter. Raises `QueueUnavailable`."""

    async def read(self, first: int = 0, most: int = 1000) -> list[Buried]:
        """Up to `most` letters with numbers from `first` upwards. Raises `QueueUnavailable`."""

    async def drop(self, number: int) -> bool:
        """Forgets a letter; False when there is none of that number."""


@dataclass(frozen=True, slots=True)
class KeptRecord:
    """Bytes under a key; every change of them is a new revision."""

    data: bytes
    revision: int


class Kept(Protocol):
    """Records by key, each for a time of its own; a full store refuses, it never forgets early.

    A key is of letters, digits, `-` and `_`. Times are kept in whole seconds, rounded up. Every
    method raises `QueueUnavailable` where the store cannot be reached or is full.
    """

    async def ensure(self) -> None:
        """Makes the store; idempotent."""

    async def claim(self, key: str, data: bytes, ttl_s: float) -> int | None:
        """Keeps `data` where the key has no record; its revision, else None."""

    async def get(self, key: str) -> KeptRecord | None:
        """The record of a key, if there is one."""

    async def replace(self, key: str, data: bytes, ttl_s: float, revision: int) -> int | None:
        """Keeps `data` where the record still is of that revision; the new one, else None."""

    async def delete(self, key: str, revision: int) -> None:
        """Forgets the record where it still is of that revision."""


@dataclass(frozen=True, slots=True)
class ShelfRecord:
    """A version of a record on a shelf. data: None where it was removed. at_s: wall-clock."""

    key: str
    data: bytes | None
    revision: int
    at_s: float


OnRecord = Callable[[ShelfRecord], None]


class Shelf(Protocol):
    """Records by key that stay until they are removed, with their last versions; all pools' own.

    A key is of letters, digits, `-`, `_`, `=` and `/`. Every method raises `QueueUnavailable` where
    the store cannot be reached or is full.
    """

    async def ensure(self) -> None:
        """Makes the store; idempotent."""

    async def read(self) -> list[ShelfRecord]:
        """The newest version of every record that is there, in no particular order."""

    async def versions(self, key: str) -> list[ShelfRecord]:
        """The kept versions of a record, removals included, the oldest first."""

    async def put(self, key: str, data: bytes, revision: int | None = None) -> int | None:
        """A new version; its revision.

        With `revision`: only where that is the newest (0: where there is no record), else None.
        """

    async def remove(self, key: str, revision: int | None = None) -> bool:
        """Removes a record; False where it is not there, or is of another revision."""

    async def follow(self, on_record: OnRecord) -> None:
        """Calls `on_record` for every record that is there, and for every version from now on.

        Returns when those that were there have been told, a removed one by its removal. Goes on by
        itself after the broker was away: of the versions that were missed the newest of each record
        is told. Never is an older one told after a newer.
        """


class Queue(Protocol):
    """The shared queue of one pool.

    catalog: the models of all pools. leases: short-lived claims among workers.
    """

    payloads: Payloads
    answers: Payloads
    dead: DeadLetters
    kept: Kept
    catalog: Shelf
    leases: Kept
    inbox: str

    @property
    def connected(self) -> bool:
        """Whether the broker can be reached now."""

    async def remove_lines(self, models: Iterable[str]) -> list[str]:
        """Removes the lines of these models where nothing waits; those that were removed.

        Where something waits, or the broker is away, the line is there as before; to try again
        later is the caller's. Raises `QueueUnavailable`, with some of them removed.
        """

    async def counts(self) -> dict[tuple[str, Lane], int]:
        """Items of each line that has some, delivered and unfinished ones included.

        One question to the broker, however many lines there are. Raises `QueueUnavailable`.
        """

    async def submit(
        self,
        model: str,
        lane: Lane,
        data: bytes,
        *,
        item_id: str,
        ttl_s: float,
        on_refused: OnRefused,
    ) -> None:
        """Puts an item in line. Raises `QueueUnavailable` when that is known at once."""

    async def pull(
        self,
        model: str,
        lane: Lane,
        *,
        max_items: int,
        expires_s: float,
        on_delivery: OnDelivery,
        on_end: Callable[[], None],
    ) -> None:
        """Asks once for items; see the module. Raises `QueueUnavailable`."""

    async def withdraw(self, model: str, lane: Lane) -> None:
        """Ends the open pull of a line, if there is one, at once; its `on_end` is called."""

    async def listen(self, on_outcome: OnBytes) -> None:
        """Opens this process's `inbox` for outcomes."""

    async def reply(self, inbox: str, data: bytes) -> None:
        """Sends an outcome to an inbox."""

    async def tell(self, control: Control, data: bytes) -> None:
        """Sends a control message to every process of the pool that hears it."""

    async def hear(self, control: Control, on_message: OnBytes) -> None:
        """Listens to control messages."""

    def when_back(self, on_back: Callable[[], Awaitable[None]]) -> None:
        """Calls `on_back` after every time that the broker was away, once the lines are there.

        What was sent or should have come meanwhile, and is not stored, may be lost.
        """

    async def stop_pulling(self) -> None:
        """Withdraws every open pull; nothing is delivered afterwards."""

    async def close(self) -> None:
        """Sends what is on its way and leaves."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The bounds of a pool's queue.

    line_rest_s: after so long without a pull a line's consumer is removed. duplicate_window_s: how
    long the same item id is recognised. payload_ttl_s: how long a payload
    that nobody deleted is kept. answers_*: the bounds of large kept answers, apart from the
    payloads of work that is under way. dead_*: the bounds of the dead letters, past which the
    oldest go. kept_*, leases_*, untouched_*, catalog_*: the bounds of the kept records, of
    the leases, of the counts of what was given back untouched, and of the catalog with its earlier
    versions, past which new ones are refused.
    """

    max_queued_per_line: int = 20_000
    max_queued_bytes: int = 512 * 1024**2
    ack_wait_s: float = 10.0
    line_rest_s: float = 3_600.0
    max_held_per_line: int = 4_096
    max_waiting_pulls: int = 512
    duplicate_window_s: float = 60.0
    payload_ttl_s: float = 3_600.0
    payload_max_bytes: int = 1024**3
    answers_ttl_s: float = 600.0
    answers_max_bytes: int = 256 * 1024**2
    publish_timeout_s: float = 20.0
    dead_max_letters: int = 10_000
    dead_max_bytes: int = 256 * 1024**2
    dead_max_age_s: float = 7 * 86_400.0
    kept_max_bytes: int = 256 * 1024**2
    kept_max_age_s: float = 2 * 3_600.0
    leases_max_bytes: int = 4 * 1024**2
    leases_max_age_s: float = 3_600.0
    untouched_max_bytes: int = 4 * 1024**2
    untouched_max_age_s: float = 3_600.0
    catalog_max_bytes: int = 64 * 1024**2
    catalog_max_record_bytes: int = 256 * 1024
