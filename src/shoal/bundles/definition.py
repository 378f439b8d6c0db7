"""What a bundle is: a named environment in which runtime processes start.

Owns the fields of a definition (a YAML file; those of this package lie in `data/`), reading a
folder of them, and the stamp that changes whenever what would be built changes. Does not own
building (`build`) or where builds lie (`shelf`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

import shoal
from shoal.errors import SettingsError

BUILTIN = Path(__file__).parent / "data"
MAX_BUNDLES = 64
MAX_DEFINITION_BYTES = 65_536
# What a runtime process imports before it knows its runtime.
HOST_NEEDS = ("msgspec", "numpy", "psutil")
_STAMP_DIGITS = 12

Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=64)]
Line = Annotated[str, Meta(min_length=1, max_length=4000, pattern=r"^[^\n]+$")]


class Definition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A bundle as it is written in YAML."""

    name: Annotated[Name, Meta(description="Name of the bundle, and of its file.")]
    runtimes: Annotated[
        list[Name], Meta(min_length=1, max_length=16, description="Runtimes that start in it.")
    ]
    requirements: Annotated[
        list[Line],
        Meta(
            max_length=500,
            description="All its packages, as pip takes them; what they ask for themselves is not "
            "installed. A line may end in `--hash=sha256:...`, once for each file that will do.",
        ),
    ] = []
    python: Annotated[
        str,
        Meta(
            pattern=r"^(/.+|(>=|<)3\.\d+(,(>=|<)3\.\d+)*)$",
            description="Versions of Python that it can use, or the path of an interpreter.",
        ),
    ] = ">=3.11"
    environment: Annotated[
        dict[str, str], Meta(description="Environment variables of its processes.")
    ] = {}
    shim: Annotated[
        Annotated[str, Meta(pattern=r"^[A-Za-z0-9_]+\.py$")] | None,
        Meta(
            description="Python file beside the definition that runs at the start of each process.",
        ),
    ] = None
    imports: Annotated[
        dict[Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*$")], str],
        Meta(
            max_length=16,
            description="Modules without which a build does not count, each with what to do where "
            "it cannot be imported.",
        ),
    ] = {}
    description: Annotated[str, Meta(description="One line for people.")] = ""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A definition and what it points to. shim: the text of its file."""

    definition: Definition
    shim: str = ""

    @property
    def name(self) -> str:
        """Its name."""
        return self.definition.name

    def requirements(self) -> list[str]:
        """What is installed: its own, and what a runtime process needs, as it is installed here."""
        own = list(self.definition.requirements)
        named = {_project(line) for line in own}
        return own + [f"{name}=={version(name)}" for name in HOST_NEEDS if name not in named]

    def stamp(self) -> str:
        """Changes with the definition, the shim, and the Shoal that the environment points to.

        `imports` are looked at and change nothing that is built.
        """
        defined = msgspec.to_builtins(self.definition)
        del defined["imports"]
        parts = (
            msgspec.json.encode(defined, order="sorted"),
            self.shim.encode(),
            "\n".join(self.requirements()).encode(),
            str(own_folder()).encode(),
            entry_points_text().encode(),
        )
        digest = hashlib.sha256()
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()[:_STAMP_DIGITS]


def own_folder() -> Path:
    """Where the code of this very Shoal lies."""
    return Path(shoal.__file__).resolve().parent


def entry_points_text() -> str:
    """The entry points of this Shoal, as its installation has them."""
    try:
        return distribution("shoal").read_text("entry_points.txt") or ""
    except PackageNotFoundError:
        return ""


def read(folder: Path | None = None) -> list[Bundle]:
    """The bundles of this package, and those of a folder, which may replace them by name.

    Sorted by name. Raises `SettingsError` that names the file at fault.
    """
    found = {bundle.name: bundle for bundle in _read_folder(BUILTIN)}
    if folder is not None:
        if not folder.is_dir():
            raise SettingsError(f"bundles_dir: {folder} is no folder")
        found |= {bundle.name: bundle for bundle in _read_folder(folder)}
    serving: dict[str, str] = {}
    for bundle in found.values():
        for runtime in bundle.definition.runtimes:
            other = serving.setdefault(runtime, bundle.name)
            if other != bundle.name:
                raise SettingsError(
                    f"the bundles `{other}` and `{bundle.name}` both serve runtime `{runtime}`"
                )
    return [found[name] for name in sorted(found)]


def _read_folder(folder: Path) -> Sequence[Bundle]:
    paths = sorted(folder.glob("*.yaml"))
    if len(paths) > MAX_BUNDLES:
        raise SettingsError(f"{folder} has {len(paths)} bundles; at most {MAX_BUNDLES}")
    return [parse(path) for path in paths]


def parse(path: Path) -> Bundle:
    """A definition and its shim. Raises `SettingsError`."""
    try:
        if path.stat().st_size > MAX_DEFINITION_BYTES:
            raise SettingsError(f"{path} is larger than {MAX_DEFINITION_BYTES} bytes")
        definition = msgspec.yaml.decode(path.read_bytes(), type=Definition)
        shim = definition.shim and (path.parent / definition.shim).read_text("utf-8")
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise SettingsError(f"{path} is no bundle: {error}") from error
    if definition.name != path.stem:
        raise SettingsError(f"{path}: its name is {definition.name}, unlike the file's")
    return Bundle(definition, shim or "")


def _project(line: str) -> str:
    """The project that a requirement names, as it is compared."""
    end = next((i for i, c in enumerate(line) if not (c.isalnum() or c in "-_.")), len(line))
    return line[:end].lower().replace("_", "-")
