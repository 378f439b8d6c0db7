"""Which text may begin to grow, and where: the slots of a model that generates.

A generator batches by itself, token by token, so a worker gives it no batches: it hands it one text
when a slot is free. A copy has room for a text while it has a slot, while the tokens of all its
texts (prompts and what they are expected to grow to) fit its key-value memory, and while a further
token takes no longer than it may. The busiest copy with room is chosen: a step of a full copy
computes many tokens for little more than one, so spreading texts makes every step dear.

A lane gets slots in proportion to its weight when several want them (stride scheduling, Waldspurger
and Weihl 1995), and one slot of each copy is kept for the lanes before it: a text that is under way
cannot be moved, and whoever is in a hurry must not wait for one to end. A text that has waited for
its lane's age and lacks nothing but memory has a copy kept for it: smaller ones pass it no more.

Owns that choice. Does not own the queue, the engine, or time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shoal.core.lanes import LaneRule
from shoal.core.types import Lane

FIRST_GUESS_TOKENS = 256
_SMOOTHING = 0.1
_MARGIN = 1.5
_WELL_WITHIN = 0.8


@dataclass(frozen=True, slots=True)
class Text:
    """A text that wants a slot. prompt_tokens: an estimate. max_tokens: the most it grows by."""

    item: str
    lane: Lane
    prompt_tokens: int
    max_tokens: int
    arrived_s: float


@dataclass(slots=True)
class _Copy:
    """A loaded copy. limit: the slots that are used, where all of them are too slow together."""

    slots: int
    kv_tokens: int
    limit: int
    texts: dict[str, tuple[Lane, int]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.texts.values())

    def fits(self, tokens: int) -> bool:
        """Whether it has room for a text; an empty copy takes any: it is the engine's to refuse."""
        if not self.texts:
            return True
        return len(self.texts) < self.limit and (
            not self.kv_tokens or self.tokens + tokens <= self.kv_tokens
        )


class Slots:
    """The copies of one model in one worker. max_token_s: what a further token may take, or None.

    Copies go by a name (their device's).
    """

    def __init__(self, lanes: Iterable[LaneRule], max_token_s: float | None = None) -> None:
        self._rules = {rule.name: rule for rule in lanes}
        self._urgent = list(self._rules)
        self.max_token_s = max_token_s
        self._copies: dict[str, _Copy] = {}
        self._places: dict[str, str] = {}
        self._passed: dict[Lane, float] = dict.fromkeys(self._rules, 0.0)
        self._mean_tokens = 0.0
        self._mean_room_tokens = 0.0

    def open(self, copy: str, slots: int, kv_tokens: int = 0) -> None:
        """A copy has been loaded. Texts that an earlier one of the name had are gone."""
        self.close(copy)
        slots = max(1, slots)
        self._copies[copy] = _Copy(slots, kv_tokens, slots)

    def close(self, copy: str) -> None:
        """A copy is gone, and its texts with it."""
        gone = self._copies.pop(copy, None)
        for item in gone.texts if gone else ():
            self._places.pop(item, None)

    def texts(self, copy: str) -> int:
        """How many grow on a copy."""
        return len(self._copies[copy].texts) if copy in self._copies else 0

    @property
    def active(self) -> int:
        """How many texts grow."""
        return len(self._places)

    def at_once(self, copy: str) -> int:
        """How many texts a copy has at once when there are plenty, if they are like those before.

        0 where there is no such copy.
        """
        found = self._copies.get(copy)
        return 0 if found is None else len(found.texts) + self._room(found, 0)

    def room(self, lane: Lane, open_copies: Mapping[str, bool] | None = None) -> int:
        """How many more texts of a lane could begin now, if they are like those before."""
        return sum(
            self._room(copy, self._kept(lane, copy))
            for name, copy in self._copies.items()
            if open_copies is None or open_copies.get(name, False)
        )

    def _kept(self, lane: Lane, copy: _Copy) -> int:
        """How many slots of a copy the lane leaves to those before it."""
        return 1 if self._urgent.index(lane) and copy.limit > 1 else 0

    def _room(self, copy: _Copy, kept: int) -> int:
        by_slots = copy.limit - len(copy.texts) - kept
        if not copy.kv_tokens or not copy.texts:
            return max(0, by_slots)
        usual_tokens = self._mean_room_tokens or FIRST_GUESS_TOKENS
        return max(0, min(by_slots, int((copy.kv_tokens - copy.tokens) / usual_tokens)))

    def expected_tokens(self, text: Text) -> int:
        """What a text is expected to take in the end, its prompt included."""
        guess = self._mean_tokens * _MARGIN or FIRST_GUESS_TOKENS
        return text.prompt_tokens + min(text.max_tokens, int(guess) + 1)

    def choose(
        self,
        waiting: Iterable[Text],
        now_s: float,
        open_copies: Mapping[str, bool] | None = None,
    ) -> tuple[Text, str] | None:
        """The text that begins next, and on which copy; None where none can.

        open_copies: False for a copy that gets nothing more; None: all may.
        """
        first: dict[Lane, Text] = {}
        for text in waiting:
            other = first.get(text.lane)
            if other is None or text.arrived_s < other.arrived_s:
                first[text.lane] = text
        least = min((self._passed[lane] for lane in first), default=0.0)
        for lane in self._passed.keys() - first.keys():  # who wants nothing saves nothing up
            self._passed[lane] = max(self._passed[lane], least)
        may = {name for name in self._copies if open_copies is None or open_copies.get(name)}
        for lane in sorted(first, key=lambda lane: (self._passed[lane], self._urgent.index(lane))):
            text = first[lane]
            with_slot = {
                name: copy
                for name in may
                if len((copy := self._copies[name]).texts) + self._kept(lane, copy) < copy.limit
            }
            tokens = self.expected_tokens(text)
            fitting = [(len(c.texts), n) for n, c in with_slot.items() if c.fits(tokens)]
            if fitting:
                return text, max(fitting)[1]
            if with_slot and now_s - text.arrived_s > self._rules[lane].age_s:
                may.discard(min(with_slot, key=lambda name: with_slot[name].tokens))
        return None

    def take(self, text: Text, copy: str) -> None:
        """A text begins on a copy."""
        tokens, before = self.expected_tokens(text), self._mean_room_tokens
        self._copies[copy].texts[text.item] = (text.lane, tokens)
        self._places[text.item] = copy
        self._mean_room_tokens += (tokens - before) * (_SMOOTHING if before else 1.0)
        self._passed[text.lane] += 1.0 / self._rules[text.lane].weight

    def give(self, item: str, *, tokens: int | None = None, token_s: float = 0.0) -> None:
        """A text has ended: after so many tokens of its own, a further one of which took so long.

        tokens: None where it did not come to its own end, which teaches nothing.
        """
        copy = self._copies.get(self._places.pop(item, ""))
        if copy is None:
            return
        active = len(copy.texts)
        copy.texts.pop(item, None)
        if tokens is not None:
            before = self._mean_tokens
            self._mean_tokens += (tokens - before) * (_SMOOTHING if before else 1.0)
        if self.max_token_s is None or not token_s:
            return
        if token_s > self.max_token_s:
            copy.limit = max(1, min(copy.limit, active) - 1)
        elif token_s < _WELL_WITHIN * self.max_token_s and active >= copy.limit:
            copy.limit = min(copy.slots, copy.limit + 1)
