"""The command `shoal`.

Owns the list of commands and the exit codes: 0 done, 1 it did not work, 2 wrong settings, catalog
or usage. What a command needs is imported when it runs, so `shoal --help` is quick. Does not own
what the commands do.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.dead import dead_app
from shoal.cli.models_app import models_app
from shoal.cli.options import CatalogFolder, settings_command
from shoal.errors import OperatorError, ShoalError
from shoal.settings import GatewaySettings, ServeSettings, WorkerSettings
from shoal.telemetry import setup_logging

app = typer.Typer(
    name="shoal",
    help="Large clusters for small models: one shared queue, workers that batch by cost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Runs one command; an error that was foreseen is one line, not a traceback."""
    try:
        app()
    except OperatorError as error:
        typer.echo(f"shoal: {error.message}", err=True)
        sys.exit(2)
    except ShoalError as error:
        typer.echo(f"shoal: {error.message} ({error.code})", err=True)
        sys.exit(1)


def _serve(settings: ServeSettings) -> int:
    from shoal.cli.serve import serve

    setup_logging(settings.log_level, "serve")
    return serve(settings)


def _gateway(settings: GatewaySettings) -> int:
    from shoal.gateway.run import run

    setup_logging(settings.log_level, "gateway")
    run(settings)
    return 0


def _worker(settings: WorkerSettings) -> int:
    from shoal.worker.run import run

    setup_logging(settings.log_level, "worker")
    run(settings)
    return 0


app.command("serve")(
    settings_command(
        ServeSettings, _serve, "Start everything on this machine: broker, API, models."
    )
)
app.command("gateway")(
    settings_command(GatewaySettings, _gateway, "Start an HTTP gateway against a NATS server.")
)
app.command("worker")(
    settings_command(
        WorkerSettings, _worker, "Start a worker of this machine against a NATS server."
    )
)
app.add_typer(models_app, name="models")
app.add_typer(dead_app, name="dead")


@app.command("run")
def run(
    model: Annotated[str, typer.Argument(help="Model: id, alias, or id@revision.")],
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="TEXT|FILE...", help="Texts to run, or files for a model that takes them."
        ),
    ],
    query: Annotated[
        str | None, typer.Option(help="Score the texts against this one instead.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="encode, score, classify, extract, transcribe; the first that fits if left out."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Server [dim](SHOAL_URL)[/dim].", show_default="http://127.0.0.1:8080"),
    ] = None,
) -> None:
    """Send texts or files to a running server and show the answer."""
    from shoal.cli.request import send
    from shoal.settings import environment

    address = url or environment().get("SHOAL_URL") or "http://127.0.0.1:8080"
    send(model, inputs, query=query, task=task, url=address)


@app.command("doctor")
def doctor(
    catalog: CatalogFolder = None,
    host: Annotated[str, typer.Option(help="Address that `serve` would listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port that `serve` would listen on.")] = 8080,
) -> None:
    """Check what `shoal serve` needs on this machine, and name what is missing."""
    from shoal.cli.doctor import examine

    raise typer.Exit(examine(catalog, host, port))


@app.command("version")
def version() -> None:
    """Print the version."""
    from shoal import __version__

    typer.echo(f"shoal {__version__} (Python {sys.version.split()[0]})")


if __name__ == "__main__":
    main()
