"""The command `shoal`.

Owns the list of commands and the exit codes: 0 done, 1 it did not work, 2 wrong settings, catalog
or usage. What a command needs is imported when it runs, so `shoal --help` is quick. Does not own
what the commands do.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from shoal.cli.bundles_app import DataDir as BuildsIn
from shoal.cli.bundles_app import bundles_app
from shoal.cli.dead import dead_app
from shoal.cli.lora_app import lora_app
from shoal.cli.models_app import models_app
from shoal.cli.options import CatalogFolder, settings_command
from shoal.cli.processes import gateway, plainly, serve, worker
from shoal.core.residency_rank import RANKINGS, RankingName
from shoal.settings import GatewaySettings, ServeSettings, WorkerSettings

if TYPE_CHECKING:
    from shoal.client import GenerationOptions

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
    """Runs one command."""
    sys.exit(plainly(app))


app.command("serve")(
    settings_command(ServeSettings, serve, "Start everything on this machine: broker, API, models.")
)
app.command("gateway")(
    settings_command(GatewaySettings, gateway, "Start an HTTP gateway against a NATS server.")
)
app.command("worker")(
    settings_command(
        WorkerSettings, worker, "Start a worker of this machine against a NATS server."
    )
)
app.add_typer(models_app, name="models")
app.add_typer(lora_app, name="lora")
app.add_typer(bundles_app, name="bundles")
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
    *,
    query: Annotated[
        str | None, typer.Option(help="Score the texts against this one instead.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="encode, score, classify, extract, transcribe, generate; the first that fits if "
            "left out."
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="What a model that generates is told before each text.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens of each text that is generated.", show_default="256"),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 takes the likeliest token each time.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same text, if the engine can.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Server [dim](SHOAL_URL)[/dim].",
            show_default="that of the data folder, else http://127.0.0.1:8080",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a `shoal serve` of this machine, where its address is found when none "
            "is given [dim](SHOAL_DATA_DIR, default .shoal)[/dim]."
        ),
    ] = None,
) -> None:
    """Send texts or files to a running server and show the answer; a generated text as it grows."""
    from shoal.cli.endpoint import server_url
    from shoal.cli.request import send

    address = server_url(url, data_dir)
    asked = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    options = cast("GenerationOptions", {k: v for k, v in asked.items() if v is not None})
    send(model, inputs, query=query, task=task, url=address, system=system, options=options)


@app.command("doctor")
def doctor(
    catalog: CatalogFolder = None,
    host: Annotated[str, typer.Option(help="Address that `serve` would listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port that `serve` would listen on.")] = 8080,
    data_dir: BuildsIn = None,
) -> None:
    """Check what `shoal serve` needs on this machine, and name what is missing."""
    from shoal.cli.doctor import examine

    raise typer.Exit(examine(catalog, host, port, data_dir=data_dir))


@app.command("plan")
def plan(
    *,
    memory_mib: Annotated[
        int, typer.Option(min=1, metavar="N", help="Memory for models on each device, in MiB.")
    ],
    catalog: CatalogFolder = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Requests: CSV or JSON lines of `time_s` and `model`."),
    ] = None,
    zipf: Annotated[
        float, typer.Option(min=0.0, help="Without a trace: how uneven the popularity is.")
    ] = 0.9,
    rate: Annotated[
        float, typer.Option(min=0.001, help="Without a trace: requests per second.")
    ] = 20.0,
    minutes: Annotated[float, typer.Option(min=0.01, help="Without a trace: how long.")] = 10.0,
    drift: Annotated[
        float,
        typer.Option(min=0.0, help="Share of models whose popularity changes in each minute."),
    ] = 0.02,
    seed: Annotated[int, typer.Option(help="Of the traffic that is made up.")] = 0,
    devices: Annotated[int, typer.Option(min=1, max=64, help="Devices.")] = 1,
    policy: Annotated[RankingName, typer.Option(help="What decides which model goes.")] = "density",
    compare: Annotated[bool, typer.Option("--compare", help="Compare all policies.")] = False,
    measured: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Sizes and load times of a worker: its `memory.json`."),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE", help="Draw what is loaded when, as an SVG."),
    ] = None,
) -> None:
    """Say what stays loaded on a machine, what loads cost, and what more memory would buy."""
    from shoal.cli.plan import Setup, plan
    from shoal.sim.workload import Popularity

    traffic = trace or Popularity(zipf, rate, minutes, drift)
    rankings = RANKINGS if compare else (policy,)
    setup = Setup(memory_mib, devices)
    plan(catalog, traffic, setup, rankings=rankings, measured=measured, svg=svg, seed=seed)


@app.command("version")
def version() -> None:
    """Print the version."""
    from shoal import __version__

    typer.echo(f"shoal {__version__} (Python {sys.version.split()[0]})")


if __name__ == "__main__":
    main()
