"""A server that says far more than a pipe holds, then leaves with status 3, or is killed.

python -m tests.support.talking_server ... [--says LAST] [--killed]
"""

from __future__ import annotations

import os
import signal
import sys

LINES = 100_000

if __name__ == "__main__":
    sys.stdout.writelines(f"line {number}\n" for number in range(LINES))
    if "--says" in sys.argv:
        print(sys.argv[sys.argv.index("--says") + 1])  # noqa: T201
    sys.stdout.flush()
    if "--killed" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(3)
