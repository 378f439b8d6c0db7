"""What was asked, what came of it, and the account of both.

An `Ask` is one request with contents of its own, so its answer can be checked against the null
runtime's arithmetic. A `Row` is one attempt at it. `Ledger` adds rows up; the verdicts `lost`,
`crossed`, `duplicate` and `unclear` are faults, everything else may happen when things break.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from shoal.runtimes.null import numbers
from tests.support.connection import Reply
from tests.support.pace import limit_s

DIM = 8
# Said before anything was queued; `queue_unavailable` is, too, when it is said at once.
REFUSALS = {"overloaded", "queue_full", "no_worker"}
FAST_S = 1.0
# What may become of a good request while parts die: each with its documented status.
FAILURES = {
    "queue_unavailable": 503,
    "deadline_exceeded": 504,
    "model_loading": 503,
    "shutting_down": 503,
    "runtime_crashed": 503,
    "runtime_unavailable": 503,
}
FAULTS = ("lost", "crossed", "duplicate", "unclear")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. expects: the code that its contents deserve, None for an answer.

    dim: the length of the model's vectors. manner: how the caller behaves, for those who send it.
    """

    name: str
    model: str
    texts: list[str]
    deadline_s: float
    lane: str = "interactive"
    expects: str | None = None
    dim: int = DIM
    manner: str = "plain"

    @property
    def headers(self) -> dict[str, str]:
        """The request's own headers."""
        return {
            "x-request-id": self.name,
            "x-shoal-lane": self.lane,
            "x-shoal-deadline-ms": str(int(self.deadline_s * 1e3)),
        }

    @property
    def body(self) -> bytes:
        """The request's body."""
        return json.dumps({"model": self.model, "inputs": self.texts}).encode()


@dataclass(slots=True)
class Row:
    """One attempt. verdict: see `judge`; took_s: from the first byte sent to the last received."""

    ask: Ask
    gateway: int
    begun_s: float
    verdict: str = "open"
    took_s: float = 0.0
    detail: str = ""


def judge(ask: Ask, reply: Reply, took_s: float) -> tuple[str, str]:
    """The verdict on an answer, and what to print of it.

    answered, refused:CODE, failed:CODE (clearly); crossed (another's contents), unclear (an error
    that says nothing true).
    """
    if "x-request-id" not in reply.headers:
        return "unclear", f"{reply.status} without a request id: {reply.body[:200]!r}"
    if reply.headers["x-request-id"] != ask.name:
        return "crossed", f"the answer is for {reply.headers.get('x-request-id')}"
    if reply.status == 200:
        return _checked(ask, reply)
    said = json.loads(reply.body)
    code, detail = said["code"], f"{reply.status} {said['code']}: {said['message']}"
    if code in REFUSALS or (code == "queue_unavailable" and took_s < limit_s(FAST_S)):
        good = reply.status in (429, 503) and int(reply.headers["retry-after"]) >= 1
        return (f"refused:{code}" if good else "unclear"), detail
    if code == ask.expects or FAILURES.get(code) == reply.status:
        return f"failed:{code}", detail
    return "unclear", detail


def _checked(ask: Ask, reply: Reply) -> tuple[str, str]:
    """An answer, of which some inputs may have failed in their places."""
    said = json.loads(reply.body)
    rows = said["dense"]
    if len(rows) != len(ask.texts):
        return "crossed", f"{len(rows)} rows for {len(ask.texts)} inputs"
    good = [n for n, row in enumerate(rows) if row is not None]
    got = np.array([rows[n] for n in good], np.float32).reshape(len(good), -1)
    expected = numbers([ask.texts[n] for n in good], ask.dim)
    if got.shape != expected.shape:
        return "crossed", f"the answer has the shape {got.shape}, not {expected.shape}"
    wrong = np.flatnonzero(np.abs(got - expected).max(axis=1, initial=0.0) > 1e-6)
    if wrong.size:
        return "crossed", f"inputs {wrong[:5]} have other numbers"
    return _failed_in_place(ask, said.get("errors", []), len(rows) - len(good))


def _failed_in_place(ask: Ask, errors: list[dict[str, object]], failed: int) -> tuple[str, str]:
    codes = {str(error["code"]) for error in errors}
    if len(errors) != failed or not codes <= FAILURES.keys() | {ask.expects}:
        return "unclear", f"{failed} inputs failed, with {sorted(codes)}"
    if ask.expects is not None and not codes:
        return "unclear", f"an answer where {ask.expects} was due"
    return (f"failed:{min(codes)}", "in place") if codes else ("answered", "")


@dataclass(slots=True)
class Ledger:
    """All attempts. stray_bytes: what came on connections without being asked for."""

    rows: list[Row] = field(default_factory=list)
    stray_bytes: int = 0

    def of(self, prefix: str) -> list[Row]:
        """The attempts whose verdict begins with `prefix`."""
        return [row for row in self.rows if row.verdict.startswith(prefix)]

    def counts(self) -> Counter[str]:
        """Attempts by verdict."""
        return Counter(row.verdict for row in self.rows)

    @property
    def faults(self) -> list[Row]:
        """Attempts that must not be."""
        return [row for row in self.rows if row.verdict in FAULTS or row.verdict == "open"]

    @property
    def clean(self) -> bool:
        """Whether nothing was lost, crossed, answered twice or left unclear."""
        return not self.faults and not self.stray_bytes

    def report(self) -> str:
        """The account, for people."""
        n = self.counts()
        failed = {v.partition(":")[2]: c for v, c in sorted(n.items()) if v.startswith("failed:")}
        refused = {v.partition(":")[2]: c for v, c in sorted(n.items()) if v.startswith("refused:")}
        away = n["unreachable"] + n["unread"]
        refused |= {"no connection": away} if away else {}
        accepted = len(self.rows) - sum(refused.values())
        lines = [
            f"sent                       {len(self.rows)}",
            f"refused before acceptance  {sum(refused.values())}  {refused}",
            f"accepted                   {accepted}",
            f"  answered                 {n['answered']}",
            f"  failed clearly           {sum(failed.values())}  {failed}",
            f"  client left              {n['left']}",
            f"  gateway died             {n['severed']}",
            f"unclear                    {n['unclear'] + n['open']}",
            f"duplicates                 {n['duplicate']} (and {self.stray_bytes} stray bytes)",
            f"lost                       {n['lost']}",
            f"crossed                    {n['crossed']}",
        ]
        return "\n".join(lines + [f"    {_line(row)}" for row in self.faults[:20]])

    def __str__(self) -> str:
        return self.report()


def _line(row: Row) -> str:
    ask = row.ask
    return (
        f"{row.verdict}: {ask.name} of {ask.model} ({len(ask.texts)} texts, {ask.lane}, "
        f"{ask.deadline_s:.1f} s) to gateway {row.gateway} at {row.begun_s:.2f} s, "
        f"after {row.took_s:.2f} s: {row.detail}"
    )
