"""`shoal doctor`: what `shoal serve` needs on this machine, and the command for what is missing.

Owns the list of checks. Changes nothing and starts nothing that outlives it.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from shoal.bundles.shelf import Shelf
from shoal.catalog.load import BUILTIN, load
from shoal.cli.bundles import shelf
from shoal.cli.models import why_unusable
from shoal.errors import CatalogError, OperatorError, RuntimeUnavailable
from shoal.queue.server import find_binary
from shoal.runtimes.registry import available, names

MIN_PYTHON = (3, 11)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. A failed check that is not `fatal` only narrows what runs."""

    what: str
    found: str
    good: bool
    fatal: bool = False


def examine(catalog: Path | None, host: str, port: int, *, data_dir: Path | None = None) -> int:
    """Prints every check; the exit code is 1 when `shoal serve` could not work."""
    console = Console(highlight=False)
    failed = False
    for check in checks(catalog, host, port, shelf(data_dir, None, None)):
        failed = failed or (check.fatal and not check.good)
        mark = "[green]ok  [/]" if check.good else "[red]FAIL[/]" if check.fatal else "note"
        console.print(f"{mark} {check.what}: ", end="")
        console.print(check.found, markup=False, soft_wrap=True)
    console.print("shoal serve cannot work yet" if failed else "shoal serve can start")
    return 1 if failed else 0


def checks(catalog: Path | None, host: str, port: int, bundles: Shelf) -> Iterator[Check]:
    """All checks, in the order in which they would stop `shoal serve`.

    bundles: those that it would start runtimes in.
    """
    version = ".".join(map(str, sys.version_info[:3]))
    yield Check("Python", version, sys.version_info >= MIN_PYTHON, fatal=True)
    yield _broker()
    yield from _runtimes(bundles)
    yield from _models(catalog)
    yield _port(host, port)


def _broker() -> Check:
    try:
        binary = find_binary()
        done = subprocess.run(  # noqa: S603 our own dependency's binary
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OperatorError, OSError, subprocess.SubprocessError) as error:
        return Check("broker", str(error), good=False, fatal=True)
    return Check("broker", f"{done.stdout.strip()} ({binary})", good=True, fatal=True)


def _runtimes(bundles: Shelf) -> Iterator[Check]:
    for name in names():
        try:
            reason = available(name)
        except RuntimeUnavailable as error:
            reason = error.message
        bundle = bundles.of(name)
        if reason is None or bundle is None:
            yield Check(f"runtime {name}", reason or "installed", reason is None)
        elif bundles.is_built(bundle):
            yield Check(f"runtime {name}", f"in its bundle, {bundles.place(bundle)}", good=True)
        else:
            when = "the first model that names it as its own has it built, or"
            found = f"its bundle is not built yet: {when} {bundles.cure(bundle)}"
            yield Check(f"runtime {name}", found, good=False)


def _models(catalog: Path | None) -> Iterator[Check]:
    try:
        entries = load(catalog).entries
    except CatalogError as error:
        yield Check("catalog", error.message, good=False, fatal=True)
        return
    usable = 0
    for entry in entries:
        reason = why_unusable(entry)
        usable += reason is None
        yield Check(f"model {entry.id}", reason or "ready", reason is None)
    where = "the built-in demo" if catalog in (None, BUILTIN) else str(catalog)
    found = f"{usable} of {len(entries)} models of {where} can run here"
    yield Check("catalog", found, usable > 0, fatal=True)


def _port(host: str, port: int) -> Check:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            cure = "stop what listens there, or choose another with --port"
            return Check(f"port {port}", f"{error.strerror}; {cure}", good=False, fatal=True)
    return Check(f"port {port}", f"free on {host}", good=True, fatal=True)
