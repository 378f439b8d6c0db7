"""What README promises, done against a real server."""

import re
from pathlib import Path

import pytest

from tests.support.readme import Block, runnable_blocks

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = [block for name in ("README.md",) for block in runnable_blocks(ROOT / name)]


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_readme_block_runs(block: Block, live_server: str, tmp_path: Path):
    """Every block that is marked to run succeeds, and prints the answer that it should."""
    done = block.run(live_server, tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert re.search(block.says, done.stdout), done.stdout
