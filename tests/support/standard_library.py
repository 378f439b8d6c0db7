"""Pairs to train on that every machine has: functions of Python and what is said of them.

Owns reading the standard library's own files. Holds no assertions.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_MODULES = (
    "argparse ast asyncio/streams asyncio/tasks calendar codecs configparser datetime difflib "
    "email/message email/utils fractions ftplib heapq http/client http/cookiejar imaplib inspect "
    "ipaddress logging/__init__ mailbox multiprocessing/pool os pathlib pathlib/__init__ random "
    "shutil smtplib socket ssl statistics subprocess tarfile tempfile textwrap threading tokenize "
    "traceback typing unittest/case urllib/parse urllib/request xml/dom/minidom zipfile "
    "zipfile/__init__"
)
_LENGTHS = range(21, 101)  # characters


def names_and_docs(count: int) -> list[tuple[str, str]]:
    """(full name, first paragraph of its docstring), no docstring twice; the same in each run."""
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[str, str] = {}
    for module in _MODULES.split():
        path = root / f"{module}.py"
        if path.is_file():
            name = module.removesuffix("/__init__").replace("/", ".")
            found |= {doc: full for full, doc in _public(ast.parse(path.read_text("utf-8")), name)}
    pairs = [(full, doc) for doc, full in found.items() if len(doc) in _LENGTHS]
    random.Random(0).shuffle(pairs)
    return pairs[:count]


def _public(tree: ast.Module | ast.ClassDef, within: str) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            doc = ast.get_docstring(node)
            if doc and not node.name.startswith("_"):
                yield f"{within}.{node.name}", " ".join(doc.split("\n\n")[0].split())
            if isinstance(node, ast.ClassDef):
                yield from _public(node, f"{within}.{node.name}")
