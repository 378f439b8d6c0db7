"""The three processes that go on until they are told to leave: serve, gateway, worker.

Owns running one with its settings, and what is printed of an error that ends a command. A launcher
gives its settings by environment and no options (`shoal gateway`, as `shoal serve` and containers
do): then no parser of options is imported, which starts a process a tenth faster. Does not own
options (`main`) or what these processes do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from shoal.configuration import load
from shoal.errors import OperatorError, ShoalError
from shoal.settings import GatewaySettings, ServeSettings, WorkerSettings, environment
from shoal.telemetry import setup_logging


def serve(settings: ServeSettings) -> int:
    """Runs everything on this machine; its exit code."""
    from shoal.cli.serve import serve

    setup_logging(settings.log_level, "serve")
    return serve(settings)


def gateway(settings: GatewaySettings) -> int:
    """Runs a gateway until it is told to leave."""
    from shoal.gateway.run import run

    setup_logging(settings.log_level, "gateway")
    run(settings)
    return 0


def worker(settings: WorkerSettings) -> int:
    """Runs a worker until it is told to leave."""
    from shoal.worker.run import run

    setup_logging(settings.log_level, "worker")
    run(settings)
    return 0


def plainly(run: Callable[[], int]) -> int:
    """Runs a command; an error that was foreseen is one line, not a traceback."""
    try:
        return run()
    except OperatorError as error:
        print(f"shoal: {error.message}", file=sys.stderr)
        return 2
    except ShoalError as error:
        print(f"shoal: {error.message} ({error.code})", file=sys.stderr)
        return 1


def main() -> None:
    """The command `shoal`, whatever its arguments."""
    match sys.argv[1:]:
        case ["gateway"]:
            sys.exit(plainly(lambda: gateway(load(GatewaySettings, {}, environment(), None))))
        case ["worker"]:
            sys.exit(plainly(lambda: worker(load(WorkerSettings, {}, environment(), None))))
        case _:
            from shoal.cli.main import main as parse

            parse()
