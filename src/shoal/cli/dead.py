"""`shoal dead`: the command's options.

Owns names and meanings of the options, and what must be given together. Does not own what is done
with the letters (`letters`, `replay`), which is imported when it runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.options import DataDir, Pool, Url
from shoal.errors import SettingsError

dead_app = typer.Typer(
    help="See, send again or drop items that could not be served.", no_args_is_help=True
)

Numbers = Annotated[
    list[int] | None, typer.Argument(metavar="NUMBER", help="Numbers, as `list` shows them.")
]
Model = Annotated[str | None, typer.Option(help="Only letters of this model.")]
Code = Annotated[str | None, typer.Option(help="Only letters of this cause, such as run_failed.")]
Since = Annotated[
    str | None,
    typer.Option(metavar="WHEN", help="Only letters not older: 90s, 15m, 1h, 2d, or a date."),
]
Until = Annotated[str | None, typer.Option(metavar="WHEN", help="Only letters at least as old.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only so many, the latest.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything, as JSON.")]


@dead_app.command("list")
def list_(
    *,
    model: Model = None,
    code: Code = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[int, typer.Option(min=1, help="Only so many, the latest.")] = 100,
    as_json: AsJson = False,
    nats_url: Url = None,
    pool: Pool = None,
    data_dir: DataDir = None,
) -> None:
    """List items that could not be served, the oldest first."""
    from shoal.cli.letters import Filters, list_letters
    from shoal.cli.reach import Reach

    filters = Filters.of(model, code, since, until)
    raise typer.Exit(list_letters(Reach(nats_url, pool, data_dir), filters, limit, as_json=as_json))


@dead_app.command("show")
def show(
    number: Annotated[int, typer.Argument(help="Number, as `list` shows it.")],
    *,
    as_json: AsJson = False,
    nats_url: Url = None,
    pool: Pool = None,
    data_dir: DataDir = None,
) -> None:
    """Show one item whole: what was asked, its inputs, and why it failed."""
    from shoal.cli.letters import show_letter
    from shoal.cli.reach import Reach

    raise typer.Exit(show_letter(Reach(nats_url, pool, data_dir), number, as_json=as_json))


@dead_app.command("replay")
def replay(
    numbers: Numbers = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="All that the filters let through.")] = False,
    model: Model = None,
    code: Code = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0.001, help="Time for each item.")
    ] = 60.0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep what was served, too.")] = False,
    nats_url: Url = None,
    pool: Pool = None,
    data_dir: DataDir = None,
) -> None:
    """Send items back into their lines; those that are served now are dropped here."""
    from shoal.cli.letters import Filters
    from shoal.cli.reach import Reach
    from shoal.cli.replay import replay_letters

    filters = Filters.of(model, code, since, until)
    if bool(numbers) == every or (numbers and (filters.any or limit)):
        raise SettingsError("replay: give numbers, or --all (with filters, where wanted)")
    reach = Reach(nats_url, pool, data_dir)
    raise typer.Exit(
        replay_letters(reach, numbers or filters, limit, timeout_s=timeout_s, keep=keep)
    )


@dead_app.command("drop")
def drop(
    numbers: Numbers = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="All that the filters let through.")] = False,
    model: Model = None,
    code: Code = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    nats_url: Url = None,
    pool: Pool = None,
    data_dir: DataDir = None,
) -> None:
    """Forget items, by number or by filter."""
    from shoal.cli.letters import Filters, drop_letters
    from shoal.cli.reach import Reach

    filters = Filters.of(model, code, since, until)
    if bool(numbers) == (every or filters.any) or (numbers and limit):
        raise SettingsError("drop: give numbers, or filters, or --all")
    reach = Reach(nats_url, pool, data_dir)
    raise typer.Exit(drop_letters(reach, numbers or filters, limit, yes=yes))
