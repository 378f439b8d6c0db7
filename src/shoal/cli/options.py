"""Options of a command, derived from the settings of its process.

Owns the step from a `Knob` to a flag with its help, and the options by which an operator's command
is told which cluster it is for. Does not own names, types, defaults or
meanings (`shoal.settings`), nor conversion and precedence (`shoal.configuration`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer

from shoal.configuration import Knob, knobs, load
from shoal.settings import (
    GatewaySettings,
    QueueSettings,
    ServeSettings,
    WorkerSettings,
    environment,
)

# What a person sets first; everything else stands in the panel of the class that owns it.
MAIN = ("host", "port", "data_dir", "catalog", "devices", "nats_url", "log_level", "insecure")
PANELS: dict[type[QueueSettings], str] = {
    ServeSettings: "Main options",
    GatewaySettings: "HTTP edge",
    WorkerSettings: "Worker",
    QueueSettings: "Queue",
}
CONFIG_HELP = "TOML file with settings; keys are named like the options, with `_`."

Url = Annotated[
    str | None,
    typer.Option(
        "--nats-url",
        help="Address of the NATS server; its token is read from SHOAL_NATS_TOKEN "
        "[dim](SHOAL_NATS_URL)[/dim].",
    ),
]
Pool = Annotated[str | None, typer.Option(help="Pool of workers [dim](SHOAL_POOL)[/dim].")]
DataDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of a `shoal serve` of this machine, where its broker is found when no "
        "address is given [dim](SHOAL_DATA_DIR, default .shoal)[/dim]."
    ),
]
CatalogFolder = Annotated[
    Path | None,
    typer.Option("--catalog", help="Folder of catalog entries; the built-in demo when left out."),
]

S = TypeVar("S", bound=QueueSettings)


def settings_command(kind: type[S], run: Callable[[S], int], help_text: str) -> Callable[..., None]:
    """A typer command whose options are the knobs of `kind`; `run` gets the settings.

    Every option is text for typer: conversion is done once, by `configuration.load`, so that a
    flag, a variable and a file key are checked alike. The number that `run` returns is the exit
    code.
    """
    known = knobs(kind)
    first = [known[name] for name in MAIN if name in known]
    rest = sorted(
        (knob for knob in known.values() if knob.name not in MAIN),
        key=lambda knob: list(PANELS).index(knob.owner),
    )
    config = typer.Option(
        "--config",
        metavar="PATH",
        help=_help(CONFIG_HELP, "SHOAL_CONFIG"),
        rich_help_panel="Main options",
    )
    parameters = [_parameter(knob, "Main options") for knob in first]
    parameters.append(
        Parameter(
            "config",
            Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, config],
        )
    )
    parameters += [_parameter(knob, PANELS[knob.owner]) for knob in rest]

    def command(**values: Any) -> None:
        file = values.pop("config")
        settings = load(kind, values, environment(), Path(file) if file else None)
        raise typer.Exit(run(settings))

    command.__doc__ = help_text
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return command


def default_text(knob: Knob) -> str:
    """A knob's default as help shows it; empty where there is none."""
    if knob.default is None or isinstance(knob.default, bool):
        return ""
    if isinstance(knob.default, int) and knob.default >= 100_000 and knob.default % 1024 == 0:
        mebibytes, odd = divmod(knob.default, 1024 * 1024)
        return f"{knob.default // 1024} KiB" if odd else f"{mebibytes} MiB"
    if isinstance(knob.default, Path) and knob.default.is_relative_to(tempfile.gettempdir()):
        return f"<temporary folder>/{knob.default.relative_to(tempfile.gettempdir())}"
    return f"{knob.default:g}" if isinstance(knob.default, float) else str(knob.default)


def _parameter(knob: Knob, panel: str) -> Parameter:
    flag = isinstance(knob.default, bool)
    option = typer.Option(
        f"{knob.flag}/--no-{knob.flag[2:]}" if flag else knob.flag,
        metavar=None if flag else _metavar(knob),
        help=_help(knob.description, knob.variable, default_text(knob)),
        show_default=False,
        rich_help_panel=panel,
    )
    return Parameter(
        knob.name,
        Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[bool | None if flag else str | None, option],
    )


def _help(text: str, variable: str, default: str = "") -> str:
    note = f"{variable}, default {default}" if default else variable
    return f"{text} [dim]({note})[/dim]"


def _metavar(knob: Knob) -> str:
    hint = get_args(knob.hint)[0]
    if get_origin(hint) is Literal:
        return "|".join(get_args(hint))
    kinds = [arm for arm in get_args(hint) or (hint,) if arm is not type(None)]
    if knob.name.endswith("_s"):
        return "SECONDS"
    return {int: "N", Path: "PATH", str: "TEXT"}.get(kinds[0], "N")
