"""Settings: one frozen, typed object per process.

Owns every knob: its name, type, default and meaning. The environment is read here and nowhere
else. Does not own precedence and conversion (`configuration`) or the flags, which the CLI derives
from these structs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from shoal.core.lanes import DEFAULT_LANES

PREFIX = "SHOAL_"
Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class QueueSettings:
    """What every process that speaks to the queue needs."""

    nats_url: Annotated[
        str | None,
        Meta(
            description="Address of the NATS server or cluster; when left out, `shoal serve` "
            "starts one of its own and the other commands use nats://127.0.0.1:4222."
        ),
    ] = field(default=None, repr=False)  # an address may have a password in it
    nats_token: Annotated[str | None, Meta(description="Token of the NATS server.")] = field(
        default=None, repr=False
    )
    nats_creds: Annotated[Path | None, Meta(description="NATS credentials file (JWT and key).")] = (
        None
    )
    catalog: Annotated[
        Path | None,
        Meta(description="Folder of catalog entries (*.yaml); the built-in demo when left out."),
    ] = None
    pool: Annotated[str, Meta(description="Pool of workers to serve or to send to.")] = "default"
    lanes: Annotated[
        str,
        Meta(
            description="Lanes as name:weight:quantum:age, the default first: share of device "
            "time, longest batch, and the wait that counts as one quantum."
        ),
    ] = DEFAULT_LANES
    storage: Annotated[
        Literal["file", "memory"], Meta(description="Where the broker keeps queued work.")
    ] = "file"
    replicas: Annotated[Count, Meta(le=5, description="Copies of the queue in a NATS cluster.")] = 1
    max_queued_per_model: Annotated[
        Count, Meta(description="Items that may wait per model and lane; one more is 429.")
    ] = 20_000
    max_queued_bytes: Annotated[
        Count,
        Meta(description="Bytes that the queue of all models may hold; one item more is 429."),
    ] = 512 * 1024 * 1024
    ack_wait_s: Annotated[
        Seconds, Meta(description="Time after which a vanished worker's items come back.")
    ] = 5.0
    max_attempts: Annotated[
        Count, Meta(description="Attempts at an item before it is given up.")
    ] = 4
    inline_max_bytes: Annotated[
        Count, Meta(description="Larger bodies and results go through the payload store.")
    ] = 512 * 1024
    log_level: Annotated[LogLevel, Meta(description="Least severe message to print.")] = "info"


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(QueueSettings):
    """The HTTP edge."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="Port to listen on; 0 takes a free one.")] = 8080
    insecure: Annotated[
        bool, Meta(description="Allow a public address although there are no API keys yet.")
    ] = False
    endpoint_file: Annotated[
        Path | None, Meta(description="File to write the chosen address to, as JSON.")
    ] = None
    max_connections: Annotated[
        Count, Meta(description="Connections that are open at the same time; one more is 503.")
    ] = 10_000
    head_timeout_s: Annotated[
        Seconds, Meta(description="Time for the headers of a request to arrive.")
    ] = 10.0
    write_timeout_s: Annotated[
        Seconds, Meta(description="Time in which a reader must take a part of its answer.")
    ] = 30.0
    max_unsent_bytes: Annotated[
        Count,
        Meta(description="Bytes of answers that slow readers leave; the slowest are cut off."),
    ] = 256 * 1024 * 1024
    max_body_bytes: Annotated[Count, Meta(description="Larger request bodies are 413.")] = (
        32 * 1024 * 1024
    )
    body_timeout_s: Annotated[Seconds, Meta(description="Time for a request body to arrive.")] = (
        30.0
    )
    max_open_requests: Annotated[
        Count, Meta(description="Requests that are answered at the same time; one more is 429.")
    ] = 10_000
    max_open_bytes: Annotated[
        Count, Meta(description="Bytes of the bodies of those requests together; more is 429.")
    ] = 1024 * 1024 * 1024
    max_inputs: Annotated[Count, Meta(description="Inputs that one request may carry.")] = 2048
    max_input_chars: Annotated[Count, Meta(description="Characters that one input may have.")] = (
        65_536
    )
    default_deadline_s: Annotated[
        Seconds, Meta(description="Time for an answer when a request names none.")
    ] = 60.0
    max_deadline_s: Annotated[Seconds, Meta(description="Longest time a request may ask for.")] = (
        600.0
    )
    item_tokens: Annotated[
        Count, Meta(description="Larger requests are split into items of about this cost.")
    ] = 1024
    item_inputs: Annotated[Count, Meta(description="Inputs that one item may carry.")] = 64
    admission: Annotated[
        bool,
        Meta(description="Refuse at once (429) what could not be answered by its deadline."),
    ] = True
    idempotency_ttl_s: Annotated[
        Seconds,
        Meta(le=3600, description="How long an answer is kept for a retry with the same key."),
    ] = 600.0
    max_in_flight_items: Annotated[
        Count, Meta(description="Items that this gateway waits for; one more is 429.")
    ] = 50_000
    shutdown_s: Annotated[
        Seconds, Meta(description="Time for open requests to finish on shutdown.")
    ] = 10.0


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(QueueSettings):
    """One machine's worker."""

    name: Annotated[
        str | None, Meta(description="Name of the worker; made from the host when left out.")
    ] = None
    devices: Annotated[
        str, Meta(description="`cpu` (a runtime process per core), `cpu:N`, or `cuda:0,cuda:1`.")
    ] = "cpu"
    threads: Annotated[Count, Meta(description="Threads of each runtime process.")] = 1
    cache_dir: Annotated[Path, Meta(description="Where graphs derived from weights are kept.")] = (
        Path(tempfile.gettempdir()) / "shoal-cache"
    )
    window_items: Annotated[
        Count, Meta(description="Items held per model and lane to form batches from.")
    ] = 256
    policy: Annotated[
        Literal["fair", "oldest", "fifo32", "window64", "buckets"],
        Meta(description="How batches are chosen; all but `fair` are there to be compared with."),
    ] = "fair"
    memory_mib: Annotated[
        Count | None,
        Meta(
            description="MiB that the models of a memory (the host's, or a GPU's) may take, their "
            "processes included; when left out, `memory_share` of it."
        ),
    ] = None
    memory_share: Annotated[
        float, Meta(gt=0, le=1, description="Share of a memory that models may take.")
    ] = 0.7
    residency: Annotated[
        Literal["density", "lru", "gdsf"],
        Meta(
            description="What stays loaded when memory is short; all but `density` are there to be "
            "compared with."
        ),
    ] = "density"
    load_timeout_s: Annotated[Seconds, Meta(description="Longest time a model may load.")] = 300.0
    bundles_dir: Annotated[
        Path | None,
        Meta(description="Folder of bundles (*.yaml) beside the built-in ones."),
    ] = None
    build_bundles: Annotated[
        bool,
        Meta(description="Build a bundle when a model first needs it; else `shoal bundles build`."),
    ] = True
    run_timeout_s: Annotated[
        Seconds, Meta(description="A runtime that takes longer over one batch is started anew.")
    ] = 120.0
    drain_s: Annotated[Seconds, Meta(description="Time for held items to finish on shutdown.")] = (
        10.0
    )
    metrics_port: Annotated[
        Port | None, Meta(description="Port for this worker's /metrics; none when left out.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ServeSettings(GatewaySettings, WorkerSettings):
    """Everything on one machine."""

    data_dir: Annotated[
        Path, Meta(description="Folder for the queue, caches, logs and endpoint.json.")
    ] = Path(".shoal")


@dataclass(frozen=True, kw_only=True)
class OperatorSettings(QueueSettings):
    """A command that looks into a running cluster."""

    data_dir: Annotated[
        Path, Meta(description="Folder of a `shoal serve` of this machine, to find its broker.")
    ] = Path(".shoal")


def environment() -> dict[str, str]:
    """The variables of this process that are Shoal's."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}


def other_environment(more: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process of another Python environment.

    Ours, without settings (and their secrets) and without what would lead its interpreter to the
    packages of this one.
    """
    ours = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX) and k not in ours}
    return kept | dict(more)


def runtime_environment(threads: int, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of a runtime process that computes with so many threads: `given`, else ours.

    Libraries of linear algebra make their threads when they are imported, before a runtime can
    tell them: one for each core, unless these variables say otherwise.
    """
    pools = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return dict(os.environ if given is None else given) | dict.fromkeys(pools, str(threads))


def let_threads_sleep() -> None:
    """Has threads of linear algebra sleep while they wait, unless the environment says otherwise.

    By default they turn in place, which on cores that others use as well takes several times the
    work itself. It is read when such a library is first imported, so this comes before.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def child_environment(
    settings: ServeSettings, kind: type[GatewaySettings | WorkerSettings], **more: str
) -> dict[str, str]:
    """The environment of a child process that is to run with these settings.

    Every setting of `kind` is spelled out, so nothing of ours (a settings file, a flag's default)
    is read a second time; secrets travel here and not in the process's arguments, which others
    can see.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    for name in (f.name for f in fields(kind)):
        value = getattr(settings, name)
        if value is not None:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            environ[f"{PREFIX}{name.upper()}"] = text
    return environ | more
