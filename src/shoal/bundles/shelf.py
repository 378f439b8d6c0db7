"""The bundles of a machine: which runtime starts where, and having its environment built.

Owns where builds lie, one build at a time for all who wait, the memory of a failed one, and older
builds. Does not own the steps (`build`) or the processes.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.bundles.build import OnStep, build, is_built, log_path, python_of
from shoal.bundles.definition import Bundle, read
from shoal.clock import monotonic
from shoal.errors import RuntimeUnavailable, SettingsError
from shoal.settings import WorkerSettings, other_environment

RETRY_S = 60.0
MAX_BUILDS_KEPT = 2


@dataclass(frozen=True, slots=True)
class Home:
    """Where a runtime process starts: an interpreter, and the environment variables for it."""

    python: str
    environment: Mapping[str, str]


@dataclass(slots=True)
class _Work:
    """A build that several may wait for. told: who is told its steps."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    told: list[OnStep] = field(default_factory=list)
    step: str = ""

    def on_step(self, step: str) -> None:
        self.step = step
        for tell in self.told:
            tell(step)


class Shelf:
    """Bundles and their builds in `folder`. may_build: whether `home` builds what is missing."""

    def __init__(self, folder: Path, bundles: Sequence[Bundle], *, may_build: bool = True) -> None:
        self._folder = folder.absolute()
        self.bundles = list(bundles)
        self._may_build = may_build
        self._here: frozenset[str] = frozenset()
        self._faults: dict[Path, tuple[str, float]] = {}
        self._work: dict[Path, _Work] = {}

    def named(self, name: str) -> Bundle:
        """A bundle by its name. Raises `SettingsError`."""
        for bundle in self.bundles:
            if bundle.name == name:
                return bundle
        known = ", ".join(bundle.name for bundle in self.bundles)
        raise SettingsError(f"there is no bundle `{name}`; known: {known}")

    def of(self, runtime: str) -> Bundle | None:
        """The bundle that a runtime starts in; None where it needs none, or nothing has it."""
        if runtime in self._here:
            return None
        return next((b for b in self.bundles if runtime in b.definition.runtimes), None)

    def place(self, bundle: Bundle) -> Path:
        """Where the build of a bundle lies, or will."""
        return self._folder / f"{bundle.name}-{bundle.stamp()}"

    def is_built(self, bundle: Bundle) -> bool:
        """Whether it can be used at once."""
        return is_built(self.place(bundle))

    def complete(self, found: Mapping[str, str | None]) -> dict[str, str | None]:
        """What the default environment can run, with what bundles can: name -> None or why not.

        What the default environment has starts there from now on.
        """
        runtimes = dict(found)
        self._here = frozenset(name for name, why_not in found.items() if why_not is None)
        for bundle in self.bundles:
            for runtime in bundle.definition.runtimes:
                if runtimes.get(runtime, "unknown") is not None:
                    runtimes[runtime] = self._why_not(bundle)
        return runtimes

    def _why_not(self, bundle: Bundle) -> str | None:
        if self._may_build or self.is_built(bundle):
            return None
        return f"the bundle `{bundle.name}` is not built: {self.cure(bundle)}"

    def cure(self, bundle: Bundle) -> str:
        """The command that builds a bundle, or builds it anew."""
        return f"shoal bundles build {bundle.name} --cache-dir {self._folder.parent}"

    async def home(self, bundle: Bundle, on_step: OnStep) -> Home:
        """Where its runtimes start, once it is built.

        Raises `RuntimeUnavailable`: it is not built and may not be, or the build fails, or has
        failed a short while ago.
        """
        place = self.place(bundle)
        work = self._work.setdefault(place, _Work())
        work.told.append(on_step)
        if work.lock.locked() and work.step:
            on_step(work.step)
        try:
            async with work.lock:
                if not is_built(place):
                    self._check(bundle, place)
                    await self.build(bundle, work.on_step)
        finally:
            work.told.remove(on_step)
        environment = other_environment(bundle.definition.environment)
        return Home(str(python_of(place)), environment)

    def _check(self, bundle: Bundle, place: Path) -> None:
        """Raises `RuntimeUnavailable` for a build that is not allowed, or failed just now."""
        why_not = self._why_not(bundle)
        if why_not is not None:
            raise RuntimeUnavailable(why_not)
        fault, until_s = self._faults.get(place, ("", 0.0))
        if monotonic() < until_s:
            raise RuntimeUnavailable(fault)

    async def build(self, bundle: Bundle, on_step: OnStep, *, again: bool = False) -> Path:
        """Builds a bundle unless it is; its folder. Raises `RuntimeUnavailable`."""
        place = self.place(bundle)
        try:
            await build(bundle, place, on_step, again=again)
        except RuntimeUnavailable as error:
            fault = f"{error.message}; once that is mended: {self.cure(bundle)}"
            self._faults[place] = (fault, monotonic() + RETRY_S)
            raise RuntimeUnavailable(fault) from error
        self._remove_old(bundle, place)
        return place

    def _remove_old(self, bundle: Bundle, place: Path) -> None:
        """Keeps the latest builds only; the one before may still be at work somewhere."""
        others = [
            marker.parent
            for marker in self._folder.glob(f"{bundle.name}-*/built")
            if marker.parent != place
            and len(marker.parent.name) == len(place.name)  # not of `<name>-<more>`
        ]
        others.sort(key=lambda each: each.stat().st_mtime, reverse=True)
        for each in others[MAX_BUILDS_KEPT - 1 :]:
            shutil.rmtree(each, ignore_errors=True)
            log_path(each).unlink(missing_ok=True)


def shelf_of(settings: WorkerSettings) -> Shelf:
    """The bundles that a worker with these settings has. Raises `SettingsError`."""
    return Shelf(
        settings.cache_dir / "bundles",
        read(settings.bundles_dir),
        may_build=settings.build_bundles,
    )


def size_bytes(folder: Path) -> int:
    """What a build takes on the disk; what it points to elsewhere is not counted."""
    files = (path for path in folder.rglob("*") if not path.is_symlink() and path.is_file())
    return sum(path.stat().st_size for path in files)
