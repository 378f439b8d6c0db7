"""`shoal models`: the commands' options.

Owns names and meanings of the options, and which may be given together. Does not own what is done
(`models`, `models_list`, `models_change`, `models_wait`, `export`, `bakeoff`), which is imported
when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.bundles_app import DataDir as BuildsIn
from shoal.cli.options import CatalogFolder, DataDir, Pool, Url
from shoal.errors import SettingsError

models_app = typer.Typer(
    help="See and change the models of a running cluster, and check a catalog.",
    no_args_is_help=True,
)

Names = Annotated[
    list[str], typer.Argument(metavar="MODEL...", help="Ids, aliases, or id@revision.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would change, and stop.")]
Worker = Annotated[str | None, typer.Option(help="Only on this worker.")]
NoWait = Annotated[
    bool, typer.Option("--no-wait", help="Do not wait until the workers' states show it.")
]


@models_app.command("list")
def list_(
    *,
    catalog: CatalogFolder = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="List the folder, although a cluster may run.")
    ] = False,
    the_field: Annotated[
        bool, typer.Option("--field", help="List the models that can be added by their name.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything, as JSON.")] = False,
    nats_url: Url = None,
    pool: Pool = None,
    data_dir: DataDir = None,
) -> None:
    """List the models of a running cluster: where each is loaded, what it takes, what is wrong.

    Without one, and with --catalog or --offline, list those of a folder, and whether their weights
    are here.
    """
    from shoal.cli.models import show, show_field
    from shoal.cli.models_list import is_reachable, list_models
    from shoal.cli.reach import Reach

    reach = Reach(nats_url, pool, data_dir)
    if the_field:
        show_field()
    elif catalog is None and not offline and is_reachable(reach):
        raise typer.Exit(list_models(reach, as_json=as_json))
    elif as_json:
        raise SettingsError("list: --json is of a running cluster, and there is none")
    else:
        if catalog is None and not offline:
            where = reach.settings().data_dir
            typer.echo(f"no `shoal serve` runs in {where}: the built-in catalog", err=True)
        show(catalog)


@models_app.command("show")
def show_(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Id, alias, id@revision, or model@adapter.")
    ],
    *,
    nats_url: Url = None,
    pool: Pool = None,
    data_dir: DataDir = None,
) -> None:
    """Show a model's entry as a file would have it, its versions, and its state on each worker."""
    from shoal.cli.models_list import show_model
    from shoal.cli.reach import Reach

    raise typer.Exit(show_model(Reach(nats_url, pool, data_dir), model))


@models_app.command("add")
def add(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Entries (*.yaml), models of the field by name, or the id of one of your own.",
        ),
    ],
    *,
    source: Annotated[
        str | None,
        typer.Option(help="Where its weights lie: a folder, package://, hf://...@commit, s3://."),
    ] = None,
    like: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Run it as that one is run.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Version of the weights; another one rolls over.")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="A field of the entry, as in YAML."),
    ] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Load it now, and never evict it.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Load it now, and wait until it is loaded.")
    ] = False,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0.1, help="Longest wait.")] = 600.0,
    dry_run: DryRun = False,
    nats_url: Url = None,
    pool: Pool = None,
    data_dir: DataDir = None,
) -> None:
    """Add models to a running cluster, or a new revision of one that is there."""
    from shoal.cli.models_change import How
    from shoal.cli.models_change import add as change
    from shoal.cli.models_entry import Wish
    from shoal.cli.reach import Reach

    wish = Wish(names, source, like, revision, sets or [], pin)
    how = How(dry_run=dry_run, wait_s=timeout_s if wait else None)
    raise typer.Exit(change(Reach(nats_url, pool, data_dir), wish, how))


@models_app.command("remove")
def remove(
    names: Names,
    *,
    dry_run: DryRun = False,
    nats_url: Url = None,
    pool: Pool = None,
    data_dir: DataDir = None,
) -> None:
    """Take models out of a running cluster; what is in line for them is still served."""
    from shoal.cli.models_change import remove as change
    from shoal.cli.reach import Reach

    raise typer.Exit(change(Reach(nats_url, pool, data_dir), names, dry_run=dry_run))


@models_app.command("pin")
def pin(names: Names, *, nats_url: Url = None, pool: Pool = None, data_dir: DataDir = None) -> None:
    """Load models now, and never evict them."""
    from shoal.cli.models_change import pin as change
    from shoal.cli.reach import Reach

    raise typer.Exit(change(Reach(nats_url, pool, data_dir), names, pinned=True))


@models_app.command("unpin")
def unpin(
    names: Names, *, nats_url: Url = None, pool: Pool = None, data_dir: DataDir = None
) -> None:
    """Let models be evicted again when memory is short."""
    from shoal.cli.models_change import pin as change
    from shoal.cli.reach import Reach

    raise typer.Exit(change(Reach(nats_url, pool, data_dir), names, pinned=False))


@models_app.command("load")
def load(
    names: Names,
    *,
    worker: Worker = None,
    no_wait: NoWait = False,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0.1, help="Longest wait.")] = 600.0,
    nats_url: Url = None,
    pool: Pool = None,
    data_dir: DataDir = None,
) -> None:
    """Load models now, before anybody asks for them."""
    from shoal.cli.models_wait import Asked, load_models
    from shoal.cli.reach import Reach

    asked = Asked(names, worker, 0.0 if no_wait else timeout_s)
    raise typer.Exit(load_models(Reach(nats_url, pool, data_dir), asked))


@models_app.command("evict")
def evict(
    names: Names,
    *,
    worker: Worker = None,
    no_wait: NoWait = False,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0.1, help="Longest wait.")] = 30.0,
    nats_url: Url = None,
    pool: Pool = None,
    data_dir: DataDir = None,
) -> None:
    """Evict models where they are idle; a request for one loads it again."""
    from shoal.cli.models_wait import Asked, evict_models
    from shoal.cli.reach import Reach

    asked = Asked(names, worker, 0.0 if no_wait else timeout_s)
    raise typer.Exit(evict_models(Reach(nats_url, pool, data_dir), asked))


@models_app.command("apply")
def apply(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of catalog entries.")],
    *,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove models that are not in the folder.")
    ] = False,
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    nats_url: Url = None,
    pool: Pool = None,
    data_dir: DataDir = None,
) -> None:
    """Make the catalog of a running cluster that of a folder; show the difference first."""
    from shoal.cli.models_change import How
    from shoal.cli.models_change import apply as change
    from shoal.cli.reach import Reach

    how = How(dry_run=dry_run, yes=yes)
    raise typer.Exit(change(Reach(nats_url, pool, data_dir), folder, how, prune=prune))


@models_app.command("check")
def check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of catalog entries.")],
) -> None:
    """Check a folder of catalog entries; every fault is named."""
    from shoal.cli.models import check as examine

    raise typer.Exit(examine(folder))


@models_app.command("export")
def export(
    model: Annotated[str, typer.Argument(help="Model of the catalog: id, alias, or id@revision.")],
    *,
    to: Annotated[str, typer.Option("--to", help="Format to write; `onnx` is the one there is.")],
    int8: Annotated[bool, typer.Option("--int8", help="Quantise the weights to 8 bits.")] = False,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the model's folder and its entry are put.")
    ] = Path(),
    catalog: CatalogFolder = None,
) -> None:
    """Export a model, compare it with its source, and write its catalog entry."""
    from shoal.cli.export import export as export_model

    if to != "onnx":
        raise SettingsError(f"export: {to!r} is no format; there is onnx")
    export_model(model, catalog, out, int8=int8)


@models_app.command("bakeoff")
def bakeoff(
    model: Annotated[str, typer.Argument(help="Model of the catalog: id, alias, or id@revision.")],
    *,
    runtimes: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Runtimes in this order; the entry's, and all text encoders, by default.",
        ),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each runtime.")] = 1,
    seconds: Annotated[
        float, typer.Option(min=0.01, help="How long each size of batch is measured.")
    ] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    catalog: CatalogFolder = None,
    data_dir: BuildsIn = None,
) -> None:
    """Measure a model on each runtime that can run it: start, load, speed, memory, parity.

    A bundle is built for the entry's own runtime, and for those that --runtimes names. Workers of
    the same data folder remember what batches cost, and choose by it.
    """
    import msgspec

    from shoal.bundles.shelf import shelf_of
    from shoal.catalog.load import load
    from shoal.cli.bakeoff import Setup, show
    from shoal.cli.bakeoff import bakeoff as measure
    from shoal.cli.bundles import settings_of

    entry = load(catalog).resolve(model)
    settings = settings_of(data_dir)
    chosen = [name.strip() for name in runtimes.split(",")] if runtimes else None
    setup = Setup(threads, seconds, settings.cache_dir)
    rows = measure(entry, chosen, shelf_of(settings), setup)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())
    else:
        show(entry, rows)
    raise typer.Exit(0 if any(row.found for row in rows) else 1)
