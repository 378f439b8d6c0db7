"""`make chaos`: breaks everything, in an order that a seed decides, and prints the account.

Environment: SEED (a text; made up when left out), CHAOS_S (120), STORAGE (file or memory). Exit
status 0 only when nothing was lost, crossed, answered twice or left unclear.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from pathlib import Path

from tests.chaos.run import run


def main() -> int:
    """One run; returns the exit status."""
    seed = os.environ.get("SEED") or secrets.token_hex(3)
    length_s = float(os.environ.get("CHAOS_S") or 120)
    storage = os.environ.get("STORAGE") or "file"
    say = sys.stdout.write
    say(f"chaos: SEED={seed} CHAOS_S={length_s:g} STORAGE={storage}\n")
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        story = run(Path(folder), seed=seed, length_s=length_s, storage=storage)
    if not story.clean:
        say("schedule:\n" + "\n".join(map(str, story.faults)) + f"\n{story.output}\n")
    say(f"{len(story.faults)} faults\n{story.ledger}\n")
    say("".join(f"complaint: {each}\n" for each in story.complaints))
    say(f"SEED={seed}: {'clean' if story.clean else 'NOT CLEAN'}\n")
    return 0 if story.clean else 1


if __name__ == "__main__":
    sys.exit(main())
