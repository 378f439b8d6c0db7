"""How a settings object comes about: flag, else environment, else file, else default.

Owns precedence, conversion, the messages for what is wrong, and hiding secrets. Does not own the
settings themselves (`settings`) or the parsing of a command line (`cli`).

A settings file is TOML: keys are field names; a table `[serve]`, `[gateway]` or `[worker]` holds
what differs for that command. Relative paths in a file are relative to the file. An empty
environment variable counts as not set, since many launchers cannot leave one out.
"""

from __future__ import annotations

import ipaddress
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from inspect import get_annotations
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from shoal.core.spelling import did_you_mean
from shoal.errors import SettingsError
from shoal.settings import PREFIX, GatewaySettings, QueueSettings, ServeSettings, WorkerSettings
from shoal.telemetry import without_password

KINDS: dict[str, type[QueueSettings]] = {
    "serve": ServeSettings,
    "gateway": GatewaySettings,
    "worker": WorkerSettings,
}
OTHER_VARIABLES: dict[str, str] = {
    "SHOAL_CONFIG": "TOML file with settings.",
    "SHOAL_URL": "Address of the server that the client and `shoal run` speak to.",
}
# Kubernetes describes each Service to every container of its namespace; one that is called
# "shoal" or "shoal-<x>" must not be taken for a setting.
_SERVICE_LINK = re.compile(
    r"SHOAL(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
)

S = TypeVar("S", bound=QueueSettings)


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting as people meet it: `owner` is the class that defines it."""

    name: str
    hint: Any
    default: Any
    description: str
    owner: type[QueueSettings]

    @property
    def flag(self) -> str:
        """Its option on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return f"{PREFIX}{self.name.upper()}"


def knobs(kind: type[QueueSettings]) -> dict[str, Knob]:
    """Every setting of a process, by name, in the order of definition."""
    hints = get_type_hints(kind, include_extras=True)
    found: dict[str, Knob] = {}
    for each in fields(kind):
        metas = get_args(hints[each.name])[1:] if get_origin(hints[each.name]) is Annotated else ()
        texts = [m.description for m in metas if isinstance(m, Meta) and m.description]
        owner = next(c for c in kind.__mro__ if each.name in get_annotations(c))
        found[each.name] = Knob(each.name, hints[each.name], each.default, " ".join(texts), owner)
    return found


def load(
    kind: type[S],
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Path | None = None,
) -> S:
    """The settings of one process: flag, else environment, else file, else default.

    flags: by field name; None counts as not given. environ: as `environment` returns it.
    file: overrides `SHOAL_CONFIG`. Raises `SettingsError` that names every fault and its place.
    """
    variables = {k: v for k, v in environ.items() if k.startswith(PREFIX) and v}
    path = file or (Path(variables["SHOAL_CONFIG"]) if "SHOAL_CONFIG" in variables else None)
    faults: list[str] = []
    values: dict[str, Any] = _from_file(kind, path, faults) if path else {}
    values |= _from_environment(kind, variables, faults)
    for name, knob in knobs(kind).items():
        if flags.get(name) is not None:
            _put(values, knob, flags[name], knob.flag, faults)
    if not faults:
        settings = kind(**values)
        faults += _contradictions(settings)
    if faults:
        raise SettingsError("; ".join(dict.fromkeys(faults)))
    return settings


def public(settings: QueueSettings) -> dict[str, Any]:
    """The settings for a log or a page: secrets are replaced by `***`."""
    shown = {each.name: getattr(settings, each.name) for each in fields(settings)}
    if settings.nats_token:
        shown["nats_token"] = "***"  # noqa: S105 that is the point
    if settings.nats_url:
        shown["nats_url"] = without_password(settings.nats_url)
    return shown


def _from_environment(
    kind: type[QueueSettings], variables: Mapping[str, str], faults: list[str]
) -> dict[str, Any]:
    every = {knob.variable: knob for knob in knobs(ServeSettings).values()}
    own = {knob.variable: knob for knob in knobs(kind).values()}
    values: dict[str, Any] = {}
    for variable, text in variables.items():
        service_link = _SERVICE_LINK.fullmatch(variable) or text.startswith("tcp://")
        if variable in OTHER_VARIABLES or service_link:
            continue
        if variable in own:
            _put(values, own[variable], text, variable, faults)
        elif variable not in every:
            guess = did_you_mean(variable, [*every, *OTHER_VARIABLES])
            faults.append(f"unknown environment variable {variable}{guess}")
    return values


def _from_file(kind: type[QueueSettings], path: Path, faults: list[str]) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        faults.append(f"settings file {path}: {error.strerror}")
        return {}
    except (ValueError, RecursionError) as error:
        faults.append(f"settings file {path}: {error}")
        return {}
    tables = {name: document.pop(name) for name in KINDS if isinstance(document.get(name), dict)}
    base = path.resolve().parent
    values = _from_table(ServeSettings, document, str(path), base, faults)
    for name, table in tables.items():
        own = _from_table(KINDS[name], table, f"{path}: [{name}]", base, faults)
        if KINDS[name] is kind:
            values |= own
    return {name: value for name, value in values.items() if name in knobs(kind)}


def _from_table(
    kind: type[QueueSettings], table: Mapping[str, Any], place: str, base: Path, faults: list[str]
) -> dict[str, Any]:
    known = knobs(kind)
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name in known:
            _put(values, known[name], value, f"{place} {name}", faults, base=base)
        else:
            guess = did_you_mean(name, [*known, *KINDS])
            faults.append(f"{place}: unknown key `{name}`{guess}")
    return values


def _put(  # noqa: PLR0917 one call for each of the three places a value comes from
    values: dict[str, Any],
    knob: Knob,
    value: Any,
    place: str,
    faults: list[str],
    base: Path | None = None,
) -> None:
    """Converts one value into `values`; a text from a flag or a variable has no `base`."""

    def path(kind: type, text: Any) -> Any:
        if kind is not Path or not isinstance(text, str | Path) or not str(text):
            raise ValueError("expected a path")
        return (base or Path()) / Path(text).expanduser()

    try:
        got = msgspec.convert(value, knob.hint, strict=base is not None, dec_hook=path)
    except (msgspec.ValidationError, RuntimeError) as error:
        said = str(error).replace(" | null", "").replace("got `str`", f"got `{value}`")
        faults.append(f"{place}: {_choices(knob, value) or said}")
        return
    if isinstance(got, float) and not math.isfinite(got):
        faults.append(f"{place}: expected a finite number")
        return
    values[knob.name] = got


def _choices(knob: Knob, value: Any) -> str:
    literal = get_args(knob.hint)[0]
    if get_origin(literal) is not Literal:
        return ""
    known = [str(choice) for choice in get_args(literal)]
    return f"`{value}` is none of {', '.join(known)}{did_you_mean(str(value), known)}"


def _contradictions(settings: QueueSettings) -> Iterable[str]:
    if not isinstance(settings, GatewaySettings):
        return
    if settings.default_deadline_s > settings.max_deadline_s:
        yield "default_deadline_s is larger than max_deadline_s"
    if not settings.insecure and not _is_loopback(settings.host):
        yield (
            f"{settings.host or 'an empty host'} can be reached from other machines, and anyone "
            "there could use this server: listen on 127.0.0.1, or allow it with --insecure"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
