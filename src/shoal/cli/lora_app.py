"""`shoal lora`: the commands' options.

Owns names and meanings of the options. Does not own what is done (`lora`), which is imported when
it runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.options import DataDir, Pool, Url

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
    description: Annotated[str, typer.Option(help="One line for people.")] = "",
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
