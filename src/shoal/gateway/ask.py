"""The part of a request that every task route shares: headers in, checked inputs out, a Job made.

Owns the meaning of `X-Shoal-Lane`, `X-Shoal-Tenant`, `X-Shoal-Deadline-Ms`, `X-Request-Id` and
`traceparent`, the limits on inputs, and the choice of the model. Does not own the fields of any one
route, and believes a tenant's name: nothing is proved by it.
"""

from __future__ import annotations

import itertools
import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, cast

import msgspec
from msgspec import Meta, structs

from shoal import clock
from shoal.catalog.schema import Entry
from shoal.catalog.snapshot import Snapshot
from shoal.core.types import Lane, Task
from shoal.errors import InputTooLong, InvalidRequest
from shoal.gateway.jobs import Job
from shoal.settings import GatewaySettings
from shoal.wire.envelope import Failure, Inputs, Params

MAX_TOKEN_ID: Final = 2**32 - 1
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
Text = str
TextsOrIds = str | list[str | TokenId | list[TokenId]]
ModelName = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=256,
        description="Id or alias of a model, either with `@revision`, and any of them with the "
        "`@name` of an adapter.",
    ),
]

ENDPOINTS: Final[Mapping[Task, tuple[str, ...]]] = {
    "encode": ("/v1/embeddings", "/v1/encode"),
    "score": ("/v1/score", "/v1/rerank"),
    "classify": ("/v1/classify", "/v1/moderations"),
    "extract": ("/v1/extract",),
    "transcribe": ("/v1/audio/transcriptions",),
    "generate": ("/v1/chat/completions", "/v1/completions", "/v1/generate"),
}


_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_TENANT = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
# A number is cheaper than a random id per request, and as unique behind a random prefix.
_prefix = secrets.token_hex(6)
_numbers = itertools.count(1)


def request_id(header: bytes | None) -> str:
    """The caller's request id where it is sane (short, plain ASCII), else a new one."""
    if header is not None and _REQUEST_ID.fullmatch(header):
        return header.decode("ascii")
    return f"{_prefix}-{next(_numbers):x}"


def endpoints(entry: Entry) -> list[str]:
    """The task routes that a model serves."""
    paths = [path for task in entry.tasks for path in ENDPOINTS[task]]
    if "dense" not in entry.outputs:
        paths = [path for path in paths if path != "/v1/embeddings"]
    if takes_pairs(entry):
        paths = [path for path in paths if path != "/v1/moderations"]
    return paths


def takes_pairs(entry: Entry) -> bool:
    """Whether the entry classifies pairs of texts, and nothing else."""
    head = entry.heads.get("classify")
    return head is not None and head.kind == "pair"


def outputs_of(
    wanted: Sequence[str] | None, known: Sequence[str], fault: Callable[[str], str]
) -> list[str]:
    """The outputs that a request names, each once; the model's first where it names none.

    fault: what to say of one that the model does not have. Raises `InvalidRequest`.
    """
    if wanted is None:
        return [str(name) for name in known[:1]]
    if not wanted:
        raise InvalidRequest("`outputs` is empty", param="outputs")
    for i, name in enumerate(wanted):
        if name not in known:
            raise InvalidRequest(fault(name), param=f"outputs[{i}]")
    return [str(name) for name in dict.fromkeys(wanted)]


class Ask(msgspec.Struct, frozen=True):
    """What surrounds the body of one request."""

    request_id: str
    lane: Lane
    tenant: str | None
    deadline_s: float
    traceparent: str | None
    catalog: Snapshot
    limits: GatewaySettings

    def entry(self, model: str, task: Task) -> Entry:
        """The catalog entry that serves `task` under a name.

        Raises `UnknownModel`, or `InvalidRequest` where the model serves other tasks.
        """
        entry = self.catalog.find(model).entry
        if task not in entry.tasks:
            raise InvalidRequest(
                f"model `{entry.id}` does not serve this endpoint; it serves "
                f"{', '.join(endpoints(entry))}",
                param="model",
            )
        return entry

    def adapted(self, job: Job, body: Any) -> Job:
        """The job with the adapter, if the body's `model` names one.

        Only such a name is looked up a second time: routes know of models alone.
        """
        if "@" not in body.model:
            return job
        adapter = self.catalog.find(body.model).adapter
        return job if adapter is None else structs.replace(job, adapter=adapter.key)

    def job(
        self,
        task: Task,
        entry: Entry,
        inputs: Inputs,
        params: Params,
        refused: dict[int, Failure] | None = None,
    ) -> Job:
        """The job of this request. Raises `InvalidRequest` where the model lacks the prompt."""
        if params.prompt is not None and params.prompt not in entry.prompts:
            known = ", ".join(entry.prompts) or "it has none"
            raise InvalidRequest(
                f"model `{entry.id}` has no prompt `{params.prompt[:100]}`; known: {known}",
                param="prompt",
            )
        return Job(
            self.request_id,
            task,
            entry,
            inputs,
            params,
            self.lane,
            self.deadline_s,
            self.traceparent,
            self.tenant,
            refused or {},
        )

    def texts_or_ids(self, value: TextsOrIds, field: str) -> Inputs:
        """Inputs from any of the four OpenAI shapes: a text, texts, token ids, lists of them."""
        if isinstance(value, str):
            self._text(value, field)
            return Inputs(texts=[value])
        if not value:
            raise InvalidRequest(f"`{field}` is empty", param=field)
        first = value[0]
        if isinstance(first, str):
            return Inputs(texts=self.texts(value, field))
        if isinstance(first, int):
            _same_kind(value, int, "token ids", field)
            self._ids(cast("list[int]", value), field)
            return Inputs(ids=[cast("list[int]", value)])
        self.count(value, field)
        _same_kind(value, list, "lists of token ids", field)
        ids = cast("list[list[int]]", value)
        for i, sequence in enumerate(ids):
            self._ids(sequence, f"{field}[{i}]")
        return Inputs(ids=ids)

    def texts(self, value: Sequence[object], field: str) -> list[str]:
        """A list of texts, checked for number, kind and length."""
        if not value:
            raise InvalidRequest(f"`{field}` is empty", param=field)
        self.count(value, field)
        limit = self.limits.max_input_chars
        for i, text in enumerate(value):
            # One test for the good case; the rest only says what was wrong.
            if type(text) is not str or not 0 < len(text) <= limit:
                _same_kind(value, str, "texts", field)
                self._text(cast("str", text), f"{field}[{i}]")
        return cast("list[str]", value)

    def text(self, value: str, field: str) -> str:
        """One text, checked for length."""
        self._text(value, field)
        return value

    def count(self, value: Sequence[object], field: str) -> None:
        """Raises `InvalidRequest` where there are more inputs than one request may have."""
        if len(value) > self.limits.max_inputs:
            raise InvalidRequest(
                f"`{field}` has {len(value)} entries; at most {self.limits.max_inputs} are "
                "allowed in one request",
                param=field,
            )

    def _text(self, text: str, field: str) -> None:
        if not text:
            raise InvalidRequest(f"`{field}` is an empty string", param=field)
        if len(text) > self.limits.max_input_chars:
            raise InputTooLong(
                f"`{field}` has {len(text)} characters; at most {self.limits.max_input_chars} "
                "are allowed",
                param=field,
            )

    def _ids(self, ids: list[int], field: str) -> None:
        if not ids:
            raise InvalidRequest(f"`{field}` is empty", param=field)
        if len(ids) > self.limits.max_input_chars:
            raise InputTooLong(
                f"`{field}` has {len(ids)} token ids; at most {self.limits.max_input_chars} are "
                "allowed",
                param=field,
            )


def ask(
    headers: Mapping[bytes, bytes],
    request: str,
    catalog: Snapshot,
    limits: GatewaySettings,
    lanes: Sequence[Lane],
) -> Ask:
    """Reads the headers that steer a request. Raises `InvalidRequest` that names the header.

    lanes: the names that `X-Shoal-Lane` may have, the default first.
    """
    lane = headers.get(b"x-shoal-lane")
    tenant = headers.get(b"x-shoal-tenant")
    deadline = headers.get(b"x-shoal-deadline-ms")
    trace = headers.get(b"traceparent")
    return Ask(
        request,
        lanes[0] if lane is None else _lane(lane, lanes),
        None if tenant is None else _tenant(tenant),
        clock.wall()
        + (limits.default_deadline_s if deadline is None else _time_s(deadline, limits)),
        trace.decode("ascii") if trace is not None and _TRACEPARENT.fullmatch(trace) else None,
        catalog,
        limits,
    )


def _lane(header: bytes, lanes: Sequence[Lane]) -> Lane:
    name = header.strip().lower().decode("latin-1")
    for lane in lanes:
        if name == lane:
            return lane
    raise InvalidRequest(
        f"X-Shoal-Lane is {name[:50]!r}; it must be one of {', '.join(lanes)}",
        param="X-Shoal-Lane",
    )


def _tenant(header: bytes) -> str:
    name = header.strip()
    if not _TENANT.fullmatch(name):
        raise InvalidRequest(
            f"X-Shoal-Tenant is {name[:80].decode('latin-1')!r}; it must be 1 to 64 letters, "
            "digits, `.`, `_` and `-`",
            param="X-Shoal-Tenant",
        )
    return name.decode("ascii")


def _time_s(header: bytes, limits: GatewaySettings) -> float:
    try:
        time_s = float(header) / 1e3
    except ValueError:
        time_s = math.nan
    if not 0 < time_s < math.inf:
        raise InvalidRequest(
            f"X-Shoal-Deadline-Ms is {header[:50].decode('latin-1')!r}; it must be a positive "
            "number of milliseconds",
            param="X-Shoal-Deadline-Ms",
        )
    return min(time_s, limits.max_deadline_s)


def _same_kind(value: Sequence[object], kind: type, what: str, field: str) -> None:
    for i, entry in enumerate(value):
        if type(entry) is not kind:
            raise InvalidRequest(
                f"`{field}[{i}]` is of another kind than the entries before it; `{field}` takes "
                f"{what} or one other kind, not a mixture",
                param=f"{field}[{i}]",
            )
