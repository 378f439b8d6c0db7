"""The options of `shoal bundles`.

Owns names and help. What a command needs is imported when it runs. Does not own what it does
(`bundles`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

bundles_app = typer.Typer(
    help="Environments of runtimes whose libraries the default environment lacks.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Bundle.")]
DataDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of a `shoal serve`, which keeps builds in `cache/bundles` "
        "[dim](SHOAL_DATA_DIR, default .shoal)[/dim]."
    ),
]
CacheDir = Annotated[
    Path | None,
    typer.Option(help="Cache folder of a `shoal worker` instead [dim](SHOAL_CACHE_DIR)[/dim]."),
]
BundlesDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of bundles (*.yaml) beside the built-in ones [dim](SHOAL_BUNDLES_DIR)[/dim]."
    ),
]


@bundles_app.command("list")
def list_(
    *, data_dir: DataDir = None, cache_dir: CacheDir = None, bundles_dir: BundlesDir = None
) -> None:
    """Show the bundles: what starts in them, whether they are built, their size and place."""
    from shoal.cli.bundles import shelf, show

    show(shelf(data_dir, cache_dir, bundles_dir))


@bundles_app.command("build")
def build_(
    name: Name,
    *,
    data_dir: DataDir = None,
    cache_dir: CacheDir = None,
    bundles_dir: BundlesDir = None,
) -> None:
    """Build a bundle ahead of need, or anew where it is broken."""
    from shoal.cli.bundles import build, shelf

    raise typer.Exit(build(shelf(data_dir, cache_dir, bundles_dir), name))


@bundles_app.command("check")
def check_(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Bundle; all that are built if left out.")
    ] = None,
    *,
    data_dir: DataDir = None,
    cache_dir: CacheDir = None,
    bundles_dir: BundlesDir = None,
) -> None:
    """Start each runtime of a bundle and hear what it says of itself."""
    from shoal.cli.bundles import check, shelf

    raise typer.Exit(check(shelf(data_dir, cache_dir, bundles_dir), name))
