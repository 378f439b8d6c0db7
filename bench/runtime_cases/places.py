"""Where runtimes start on this machine, what their environments take, and processes of them.

Builds are kept in one folder from run to run; one that `make check-engines` has made is taken from
where it lies. Owns that folder, which runtimes may take part, and
starting one with a model. Does not own what is measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

from shoal.bundles.definition import read
from shoal.bundles.shelf import Home, Shelf, size_bytes
from shoal.catalog.resolve import model_spec
from shoal.catalog.schema import Entry
from shoal.ipc.client import RuntimeConnection
from shoal.ipc.messages import Loaded, Traits
from shoal.runtimes.probe import probe
from shoal.worker.supervise import RuntimeProcess

DATA = Path(tempfile.gettempdir()) / "shoal-bench-runtimes"
CACHE = DATA / "cache"
ENGINES = Path(__file__).parents[2] / ".shoal" / "engines"

# What of the installation each runtime of the default environment needs, as an extra of it.
_EXTRAS = {"torch": "torch", "files": "vision", "whisper": "audio", "spacy": "spacy"}
_BUILT_WHEN_NEEDED = ("candle",)


def shelf() -> Shelf:
    """The bundles; what `make check-engines` has built of them is linked into our own folder."""
    folder = CACHE / "bundles"
    folder.mkdir(parents=True, exist_ok=True)
    found = Shelf(folder, read(None))
    engines = Shelf(ENGINES / "bundles", found.bundles)
    for bundle in found.bundles:
        place = found.place(bundle)
        if place.is_symlink():  # to a build that may have gone
            place.unlink()
        if engines.is_built(bundle) and not place.exists():
            place.symlink_to(engines.place(bundle))
    found.complete(probe())
    return found


def why_not(runtime: str) -> str | None:
    """Why a runtime takes no part; None where it does."""
    bundles = shelf()
    missing = bundles.complete(probe()).get(runtime, f"no runtime is called `{runtime}`")
    bundle = bundles.of(runtime)
    if bundle is None or bundles.is_built(bundle) or bundle.name in _BUILT_WHEN_NEEDED:
        return missing
    return f"its bundle is not built: {bundles.cure(bundle)}"


def environment_bytes(runtime: str) -> int:
    """What the environment takes on the disk: a bundle's build, or the packages that are needed."""
    bundles = shelf()
    bundle = bundles.of(runtime)
    if bundle is not None:
        return size_bytes(bundles.place(bundle))
    return sum(_bytes(each) for each in _needed("shoal", _EXTRAS.get(runtime), {}).values())


def _needed(
    name: str, extra: str | None, found: dict[str, Distribution]
) -> dict[str, Distribution]:
    """A package with all that it requires, as far as it is installed."""
    try:
        here = distribution(name)
    except PackageNotFoundError:
        return found
    found[name.lower()] = here
    for line in here.requires or ():
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra or ""}):
            continue
        if wanted.name.lower() not in found:
            _needed(wanted.name, next(iter(wanted.extras), None), found)
    return found


def _bytes(installed: Distribution) -> int:
    paths = (Path(str(each.locate())) for each in installed.files or ())
    return sum(path.stat().st_size for path in paths if path.is_file())


@asynccontextmanager
async def running(
    entry: Entry, threads: int = 1
) -> AsyncIterator[tuple[RuntimeConnection, Loaded, Traits]]:
    """A process of an entry's runtime with its model loaded."""
    bundles = shelf()

    async def home() -> Home | None:
        bundle = bundles.of(entry.runtime)
        return None if bundle is None else await bundles.home(bundle, lambda _: None)

    process = RuntimeProcess(
        entry.runtime, device="cpu#0", threads=threads, on_lost=lambda: None, home=home
    )
    try:
        connection = await process.connection()
        loaded = await connection.load(model_spec(entry, CACHE))
        hello = await connection.hello
        yield connection, loaded, hello.traits
    finally:
        await process.stop()
