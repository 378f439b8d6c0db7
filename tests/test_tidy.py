"""The style of the house, as a test: what a reviewer should never have to say twice.

Every rule is a function from a source file to (line, message) pairs; the suite runs each over the
whole tree, and over a planted fault to show that it can fail.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 70
MAX_CONSTRUCTOR_PARAMETERS = 8

# Who may import whom: the rooms of `shoal`, and what each may use beside itself, `shoal.errors`
# and the version in `shoal`. A dotted name allows that one module only.
SHELL = {"settings", "telemetry", "clock"}
IMPORTS: dict[str, set[str]] = {
    "errors": set(),
    "clock": set(),
    "telemetry": set(),
    "settings": {"core.lanes"},  # the default lanes are written where they are read
    "configuration": {"settings", "telemetry", "core"},
    "core": set(),
    "wire": {"core"},
    "catalog": {"core", "ipc.messages", "clock"},  # a head is in YAML what a runtime is told
    "queue": {"wire", "core"} | SHELL,
    "ipc": {"wire", "core"} | SHELL,
    "gateway": {"queue", "catalog", "core", "wire"} | SHELL,
    "bundles": {"ipc"} | SHELL,
    "worker": {"queue", "ipc", "bundles", "catalog", "core", "wire"} | SHELL,
    "runtimes": {"ipc", "core", "wire"} | SHELL,
    "client": {"wire", "core", "clock"},
    "dashboard": {"wire", "core"} | SHELL,
    "sim": {"core", "catalog"},
    "bench": {"client"},
    "eval": {"client"},
    "train": {"catalog", "clock"},
    "tune": {"sim", "bench", "catalog"},
    "__init__": {"client"},
    "__main__": {"cli"},
}
WIRES_EVERYTHING = "cli"
HEAVY = {"torch", "onnxruntime", "onnx", "transformers", "sentence_transformers", "safetensors"}

PURE = ("core", "wire")
IMPURE_MODULES = {
    "asyncio",
    "socket",
    "ssl",
    "select",
    "os",
    "time",
    "logging",
    "nats",
    "threading",
}
EMPTY_WORDS = {"manager", "helper", "helpers", "util", "utils", "misc"}
BOUNDED_QUEUES = {"Queue": 0, "LifoQueue": 0, "PriorityQueue": 0, "deque": 1}
# A library that raises plain Exception leaves no narrower choice; such a line says so.
BROAD_HANDLER_MARK = re.compile(r"#.*(task root|raises plain Exception)")
# Written so that this file does not match itself.
WORKPLACE = re.compile(
    r"/wor[k]/|\.\./share[d]|\b(DESIG[N]|STYL[E]|PITFALL[S]|SCHEDULIN[G]|RUNTIME[S]|MODEL[S])\.md"
    r"|pypi\.or[g]|pythonhosted\.or[g]|download\.pytorch\.or[g]|registry\.npmjs\.or[g]"
)

Fault = tuple[int, str]


@dataclass(frozen=True)
class Source:
    """A Python file: its path from the root of the repository, its text and its syntax nodes."""

    path: str
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text)))

    @property
    def room(self) -> str | None:
        """The part of `shoal` that it belongs to, or None outside of src."""
        if not self.path.startswith("src/shoal/"):
            return None
        return self.path.removeprefix("src/shoal/").split("/")[0].removesuffix(".py")


@cache
def tracked() -> list[str]:
    """Files that git tracks or would track."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in sorted(set(done.stdout.splitlines())) if (ROOT / name).is_file()]


def sources() -> Iterator[Source]:
    for name in tracked():
        if name.endswith(".py"):
            yield Source(name, (ROOT / name).read_text(encoding="utf-8"))


def sizes(source: Source) -> Iterator[Fault]:
    lines = source.text.count("\n")
    if lines > MAX_MODULE_LINES:
        yield 1, f"a module of {lines} lines; at most {MAX_MODULE_LINES}"
    for node in source.nodes:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield node.lineno, f"`{node.name}` has {length} lines; at most {MAX_FUNCTION_LINES}"
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs][1:]
        count = len(parameters) if node.name == "__init__" else 0
        if count > MAX_CONSTRUCTOR_PARAMETERS:
            most = MAX_CONSTRUCTOR_PARAMETERS
            yield node.lineno, f"a constructor of {count} parameters; at most {most}"


def imported(source: Source) -> Iterator[tuple[int, str]]:
    """Every imported module by its full name; `from a import b` gives both a and a.b."""
    package = source.path.removeprefix("src/").split("/")[:-1]
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def import_graph(source: Source) -> Iterator[Fault]:
    room = source.room
    if room is None or room == WIRES_EVERYTHING:
        return
    if room not in IMPORTS:
        yield 1, f"`{room}` is no room of the import graph; add it there with what it may use"
        return
    for line, name in imported(source):
        parts = name.split(".")
        other = parts[1] if parts[0] == "shoal" and len(parts) > 1 else room
        if other in (room, "errors", "__version__"):
            continue
        if other not in IMPORTS[room] and ".".join(parts[1:3]) not in IMPORTS[room]:
            yield line, f"`{room}` must not import `{other}`"


def sans_io(source: Source) -> Iterator[Fault]:
    if source.room not in PURE:
        return
    for line, name in imported(source):
        if name.split(".")[0] in IMPURE_MODULES:
            yield line, f"`{source.room}` is pure: no `{name.split('.')[0]}` (time is an argument)"
    for node in source.nodes:
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            yield node.lineno, f"`{source.room}` is pure: nothing asynchronous"


def telling_names(source: Source) -> Iterator[Fault]:
    names = [(1, part.removesuffix(".py")) for part in source.path.split("/")]
    names += [
        (node.lineno, node.name)
        for node in source.nodes
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for line, name in names:
        words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
        empty = EMPTY_WORDS & {word.lower() for word in words}
        if empty or name == "process_data":
            yield line, f"`{name}` says nothing; name what it does"


def bounded(source: Source) -> Iterator[Fault]:
    if source.room is None:
        return
    for node in source.nodes:
        if not isinstance(node, ast.Call):
            continue
        name = _last_name(node.func)
        if name == "SimpleQueue":
            yield node.lineno, "SimpleQueue has no bound"
        elif name in BOUNDED_QUEUES and not _has_bound(node, BOUNDED_QUEUES[name]):
            yield node.lineno, f"`{name}` without a bound"
        factories = [*node.args, *(k.value for k in node.keywords if k.arg == "default_factory")]
        if name in ("field", "defaultdict") and any(
            _last_name(each) in BOUNDED_QUEUES for each in factories
        ):
            yield node.lineno, "a factory of queues without a bound"


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):  # asyncio.Queue[int](...)
        return _last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _has_bound(call: ast.Call, position: int) -> bool:
    bounds = call.args[position : position + 1]
    bounds += [k.value for k in call.keywords if k.arg in ("maxsize", "maxlen")]
    return any(not (isinstance(b, ast.Constant) and b.value in (0, None)) for b in bounds)


def narrow_handlers(source: Source) -> Iterator[Fault]:
    if source.room is None:
        return
    lines = source.text.splitlines()
    for node in source.nodes:
        if not isinstance(node, ast.ExceptHandler):
            continue
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        broad = any(k is None or _last_name(k) in ("Exception", "BaseException") for k in kinds)
        if broad and not BROAD_HANDLER_MARK.search(lines[node.lineno - 1]):
            yield node.lineno, "catches everything; only a line marked `# task root` may"


def one_place_for_environment(source: Source) -> Iterator[Fault]:
    if source.room in (None, "settings"):
        return
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"):
            yield node.lineno, "the environment is read in settings.py only"
    for line, name in imported(source):
        if name in ("os.environ", "os.getenv"):
            yield line, "the environment is read in settings.py only"


def silent(source: Source) -> Iterator[Fault]:
    if source.room in (None, WIRES_EVERYTHING):
        return
    for node in source.nodes:
        if isinstance(node, ast.Call) and _last_name(node.func) in ("print", "pprint"):
            yield node.lineno, "only the command line prints; others log"


RULES: list[Callable[[Source], Iterator[Fault]]] = [
    sizes,
    import_graph,
    sans_io,
    telling_names,
    bounded,
    narrow_handlers,
    one_place_for_environment,
    silent,
]


@pytest.fixture(scope="module")
def faults():
    """What each rule says of all source files; each file is parsed once."""
    said = {rule: [] for rule in RULES}
    for source in sources():
        for rule, found in said.items():
            found += [f"{source.path}:{line}: {what}" for line, what in rule(source)]
    return said


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_tidy_rule_holds_everywhere(rule, faults):
    """Every source file keeps the rule."""
    assert not faults[rule], "\n" + "\n".join(faults[rule])


def long_function(lines: int) -> str:
    return "def f():\n" + "    x = 1\n" * (lines - 1)


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (sizes, "src/shoal/core/a.py", "x = 1\n" * 401),
        (sizes, "src/shoal/core/a.py", long_function(71)),
        (sizes, "src/shoal/core/a.py", "class A:\n def __init__(s,a,b,c,d,e,f,g,*,h,i): pass\n"),
        (import_graph, "src/shoal/core/a.py", "from shoal.wire import envelope"),
        (import_graph, "src/shoal/gateway/a.py", "import shoal.worker.pull"),
        (import_graph, "src/shoal/worker/a.py", "def f():\n    from shoal.runtimes import x"),
        (import_graph, "src/shoal/worker/a.py", "from shoal import cli"),
        (import_graph, "src/shoal/worker/a.py", "from ..gateway import app"),
        (import_graph, "src/shoal/catalog/a.py", "from shoal.ipc.client import Client"),
        (import_graph, "src/shoal/new/a.py", ""),
        (sans_io, "src/shoal/core/a.py", "import time"),
        (sans_io, "src/shoal/wire/a.py", "from asyncio import sleep"),
        (sans_io, "src/shoal/wire/a.py", "async def f(): pass"),
        (telling_names, "src/shoal/core/a.py", "class QueueManager: pass"),
        (telling_names, "src/shoal/core/a.py", "def process_data(): pass"),
        (telling_names, "src/shoal/core/string_utils.py", ""),
        (bounded, "src/shoal/worker/a.py", "q = asyncio.Queue()"),
        (bounded, "src/shoal/worker/a.py", "q = queue.Queue(0)"),
        (bounded, "src/shoal/worker/a.py", "q = asyncio.Queue[int](maxsize=0)"),
        (bounded, "src/shoal/worker/a.py", "q = collections.deque([])"),
        (bounded, "src/shoal/worker/a.py", "q = deque([], None)"),
        (bounded, "src/shoal/worker/a.py", "q: deque = field(default_factory=deque)"),
        (bounded, "src/shoal/worker/a.py", "q = SimpleQueue()"),
        (narrow_handlers, "src/shoal/worker/a.py", "try: f()\nexcept Exception: pass"),
        (narrow_handlers, "src/shoal/worker/a.py", "try: f()\nexcept: pass"),
        (narrow_handlers, "src/shoal/worker/a.py", "try: f()\nexcept (A, BaseException): pass"),
        (one_place_for_environment, "src/shoal/worker/a.py", "x = os.environ['A']"),
        (one_place_for_environment, "src/shoal/cli/a.py", "from os import getenv"),
        (silent, "src/shoal/worker/a.py", "print('x')"),
    ],
)
def test_tidy_rule_sees_a_fault(rule, path, text):
    """Each rule names a planted fault with a line."""
    found = list(rule(Source(path, text)))
    assert found
    assert all(line >= 1 and what for line, what in found)


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (sizes, "src/shoal/core/a.py", long_function(70)),
        (import_graph, "src/shoal/gateway/a.py", "from shoal import __version__\nimport msgspec"),
        (import_graph, "src/shoal/catalog/a.py", "from shoal.ipc.messages import HeadSpec"),
        (import_graph, "src/shoal/cli/a.py", "from shoal.worker.run import run"),
        (bounded, "src/shoal/worker/a.py", "q = asyncio.Queue(maxsize=n)\nd = deque(maxlen=3)"),
        (narrow_handlers, "src/shoal/worker/a.py", "try: f()\nexcept Exception:  # task root\n x"),
        (silent, "src/shoal/cli/a.py", "print('x')"),
    ],
)
def test_tidy_rule_lets_good_code_pass(rule, path, text):
    """A rule is quiet where there is nothing to say."""
    assert not list(rule(Source(path, text)))


def test_tidy_no_file_speaks_of_a_workplace_or_a_registry_host():
    """No tracked text names a private path, a document that is not here, or a package host."""
    faults = []
    for name in tracked():
        data = (ROOT / name).read_bytes()
        if b"\0" in data:
            continue
        for number, line in enumerate(data.decode("utf-8").splitlines(), 1):
            if WORKPLACE.search(line):
                faults.append(f"{name}:{number}: {line.strip()[:120]}")
    assert not faults, "\n" + "\n".join(faults)


@pytest.mark.parametrize("room", ["gateway", "worker", "client", "catalog", "queue"])
def test_tidy_importing_a_room_loads_no_runtime_library(room):
    """Every module of the room is imported in a fresh process; no heavy library comes along."""
    program = (
        "import importlib, pkgutil, sys\n"
        f"import shoal.{room} as room\n"
        "for found in pkgutil.walk_packages(room.__path__, room.__name__ + '.'):\n"
        "    importlib.import_module(found.name)\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
