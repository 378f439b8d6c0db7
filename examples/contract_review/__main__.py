"""`python -m examples.contract_review`: draws contracts, reviews them, prints what was found.

Owns the options and the report.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from examples.contract_review import timeline
from examples.contract_review.agent import review_all
from examples.contract_review.calls import Desk, write_workload
from examples.contract_review.documents import Contract, contracts
from examples.contract_review.findings import Findings, compare
from shoal.cli.endpoint import server_url
from shoal.client import AsyncClient
from shoal.errors import ShoalError

# The first calls wait for twelve models to load, and the last for all the others.
_TIMEOUT_S = 600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; returns the exit status."""
    options = _options(arguments)
    drawn = contracts(options.documents, options.seed)
    try:
        found, desk = asyncio.run(_reviewed(drawn, options))
    except (ShoalError, ExceptionGroup) as error:
        print(f"{_first(error)}\nIs there a server with the demo models? README.md says how.")
        return 1
    for one in found:
        print(_told(one), end="\n\n")
    print(timeline.as_text(desk.calls))
    wall_s = max(call.end_s for call in desk.calls)
    print(f"\n{len(found)} documents in {wall_s:.1f} s: {60 * len(found) / wall_s:.1f} a minute")
    if options.check:
        print(_checked(drawn, found))
    if options.svg:
        options.svg.write_text(timeline.as_svg(desk.calls), encoding="utf-8")
    if options.record:
        write_workload(desk.calls, options.record)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.contract_review")
    parser.add_argument(
        "--url",
        help="a server with the demo models; else SHOAL_URL, or the one of this folder's .shoal",
    )
    parser.add_argument("--documents", type=int, default=12, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sequential", action="store_true", help="one call after another")
    parser.add_argument("--check", action="store_true", help="compare with what was drawn")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw which model ran when")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the calls, JSON lines")
    return parser.parse_args(arguments)


async def _reviewed(
    drawn: Sequence[Contract], options: argparse.Namespace
) -> tuple[list[Findings], Desk]:
    files = {contract.name: contract.blob for contract in drawn}
    async with AsyncClient(server_url(options.url), timeout_s=_TIMEOUT_S) as client:
        return await review_all(client, files, max_in_flight=1 if options.sequential else 64)


def _first(error: Exception) -> ShoalError:
    """The fault of the first step that failed; anything but a server's fault is raised again."""
    first = error
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    if not isinstance(first, ShoalError):
        raise error
    return first


def _told(found: Findings) -> str:
    guard = "" if found.image is None else f", image guard: {found.image}"
    lines = [f"{found.document} ({found.file_type}{guard})"]
    lines.append(f"  parties: {', '.join(found.parties)}")
    lines.append(f"  personal data: {', '.join(text for _, text in found.pii)}")
    for match in found.risky:
        lines.append(f"  risky, {match.score:.2f} like `{match.clause.name}`:")
        lines.append(f"    {textwrap.shorten(match.text, 90)}")
    lines += [f"  instructs its reader: {textwrap.shorten(t, 72)}" for t in found.suspicious]
    return "\n".join([*lines, f"  summary: {found.summary}"])


def _checked(drawn: Sequence[Contract], found: Sequence[Findings]) -> str:
    quality = compare(list(zip(drawn, found, strict=True)))
    rows = [f"{kind:16} {one.precision:9.3f} {one.recall:9.3f}" for kind, one in quality.items()]
    return "\n".join([f"\n{'':16} {'precision':>9} {'recall':>9}", *rows])


if __name__ == "__main__":
    sys.exit(main())
