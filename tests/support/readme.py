"""Code blocks of a Markdown page that are promised to run.

A block runs when `<!-- run: PATTERN -->` stands on a line of its own right before it, and what it
prints then holds the regular expression. Owns finding blocks and pointing them at a server. Does
not own the server.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.pace import limit_s

WRITTEN_URL = "http://127.0.0.1:8080"
_BLOCK = re.compile(
    r"^<!-- run: (?P<says>[^\n]+) -->[ \t]*\n+(?P<fence>`{3,})(?P<language>\w*)[^\n]*\n"
    r"(?P<code>.*?)^(?P=fence)[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
_MARK = re.compile(r"^<!-- run", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One block: `language` is python or bash; `line` is where its code begins.

    says: a regular expression that what it prints holds.
    """

    page: str
    line: int
    language: str
    code: str
    says: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def run(self, url: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Runs the block in `folder`; the address that the page shows becomes `url`."""
        code = self.code.replace(WRITTEN_URL, url)
        code = code.replace(WRITTEN_URL.removeprefix("http://"), url.removeprefix("http://"))
        commands = {
            "python": [sys.executable, "-W", "error", "-c", code],
            "bash": ["bash", "-euo", "pipefail", "-c", code],
        }
        beside = Path(sys.executable).parent
        environ = os.environ | {
            "SHOAL_URL": url,
            "PATH": f"{beside}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        return subprocess.run(
            commands[self.language],
            check=False,
            capture_output=True,
            text=True,
            timeout=limit_s(60),
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
        )


def runnable_blocks(page: Path) -> list[Block]:
    """The blocks of a page that are marked to run, in order.

    Raises ValueError for a mark without a block of Python or Bash behind it.
    """
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    blocks = [
        Block(
            page.name,
            text.count("\n", 0, match.start("code")) + 1,
            {"sh": "bash", "shell": "bash"}.get(match["language"], match["language"]),
            match["code"],
            match["says"],
        )
        for match in _BLOCK.finditer(text)
    ]
    wrong = [str(block) for block in blocks if block.language not in ("python", "bash")]
    if wrong or len(blocks) != len(_MARK.findall(text)):
        raise ValueError(f"{page.name}: a `run` mark without a pattern, or without code: {wrong}")
    return blocks
