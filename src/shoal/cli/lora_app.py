"""`shoal lora`: the commands' options.

Owns names and meanings of the options. Does not own what is done (`lora`), which is imported when
it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import CatalogFolder, DataDir, Pool, Url

lora_app = typer.Typer(
    help="See and change the LoRA adapters of a running cluster.", no_args_is_help=True
)

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would change, and stop.")]


@lora_app.command("add")
def add(
    name: Annotated[
        str,
        typer.Argument(
            metavar="BASE@NAME", help="The model, and what its adapter is to be called."
        ),
    ],
    *,
    source: Annotated[
        str,
        typer.Option(help="Where its folder lies: a path, package://, hf://...@commit, s3://."),
    ],
    revision: Annotated[
        str | None,
        typer.Option(help="Version of the adapter.", show_default="by its content"),
    ] = None,
    digests: Annotated[
        list[str] | None,
        typer.Option("--digest", metavar="FILE=SHA256", help="What a file of it must be."),
    ] = None,
    licence: Annotated[str | None, typer.Option(help="Licence of the adapter.")] = None,
    description: Annotated[str | None, typer.Option(help="One line for people.")] = None,
    dry_run: DryRun = False,
    nats_url: Url = None,
    pool: Pool = None,
    data_dir: DataDir = None,
) -> None:
    """Add an adapter to a model of a running cluster, or a new revision of one that is there."""
    from shoal.cli.lora import Wish
    from shoal.cli.lora import add as change
    from shoal.cli.reach import Reach

    wish = Wish(name, source, revision, digests or [], licence, description)
    raise typer.Exit(change(Reach(nats_url, pool, data_dir), wish, dry_run=dry_run))


@lora_app.command("list")
def list_(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything, as JSON.")] = False,
    nats_url: Url = None,
    pool: Pool = None,
    data_dir: DataDir = None,
) -> None:
    """List the adapters of a running cluster: where each is loaded, what it takes, its last use."""
    from shoal.cli.lora import list_adapters
    from shoal.cli.reach import Reach

    raise typer.Exit(list_adapters(Reach(nats_url, pool, data_dir), as_json=as_json))


@lora_app.command("remove")
def remove(
    names: Annotated[
        list[str], typer.Argument(metavar="BASE@NAME...", help="Adapters, as `list` shows them.")
    ],
    *,
    dry_run: DryRun = False,
    nats_url: Url = None,
    pool: Pool = None,
    data_dir: DataDir = None,
) -> None:
    """Take adapters out of a running cluster; what is in line for them is still served."""
    from shoal.cli.models_change import remove as change
    from shoal.cli.reach import Reach

    raise typer.Exit(change(Reach(nats_url, pool, data_dir), names, dry_run=dry_run))


@lora_app.command("train")
def train_(
    base: Annotated[str, typer.Argument(metavar="BASE", help="Embedder of the catalog.")],
    pairs: Annotated[
        Path,
        typer.Argument(
            metavar="PAIRS",
            help="Texts that belong together: .jsonl, .csv or .tsv with `anchor`, `positive` and, "
            "for texts that only look so, `negative`.",
        ),
    ],
    *,
    out: Annotated[Path, typer.Option(help="Folder to be made for the adapter.")],
    rank: Annotated[int, typer.Option(min=1, max=256, help="Rank of the adapter.")] = 16,
    epochs: Annotated[int, typer.Option(min=1, max=1000, help="Times each pair is seen.")] = 3,
    batch_size: Annotated[
        int, typer.Option(min=2, max=1024, help="Pairs of a step; each is told from the others.")
    ] = 32,
    rate: Annotated[
        float, typer.Option("--lr", min=1e-7, max=1.0, help="Learning rate, at its highest.")
    ] = 5e-4,
    max_minutes: Annotated[
        float | None, typer.Option(min=0.0, help="End after so long, with the best state.")
    ] = None,
    held_out: Annotated[
        float, typer.Option(min=0.01, max=0.9, help="Share of the pairs that is measured with.")
    ] = 0.2,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut texts that are longer than the model takes.")
    ] = False,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0.0, help="Of this machine; the cost is shown.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    accept_worse: Annotated[
        bool, typer.Option("--accept-worse", help="Write an adapter that is no better, too.")
    ] = False,
    catalog: CatalogFolder = None,
) -> None:
    """Train an adapter of an embedder on pairs of texts; needs the extras torch and train."""
    from shoal.cli.lora_train import Wish, train
    from shoal.train.loop import Plan

    limit_s = None if max_minutes is None else 60 * max_minutes
    plan = Plan(epochs, batch_size, rate, seed, limit_s, truncate)
    wish = Wish(base, pairs, out, catalog, rank, held_out, price_per_hour, accept_worse)
    raise typer.Exit(train(wish, plan))
