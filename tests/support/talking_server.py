"""A server that says far more than a pipe holds, then leaves with status 3."""

from __future__ import annotations

import sys

LINES = 100_000

if __name__ == "__main__":
    sys.stdout.writelines(f"line {number}\n" for number in range(LINES))
    sys.exit(3)
