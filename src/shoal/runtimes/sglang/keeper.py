"""Stands between a runtime process and its server, and lets nothing of the server outlive either.

    python -m shoal.runtimes.sglang.keeper FOLDER MODULE [ARGUMENT ...]

A server starts processes of its own, which tie themselves to it only once they have loaded their
libraries: until then, one whose server is killed would stay. So the server has a process group to
itself, and all of it is killed when the server ends, and when the other end of our standard input
closes, as it does when the runtime process ends in whatever way; the server's private folder goes
with it. Leaves with the server's status, 128 more than its number where a signal ended it. Does not
own when a server is started.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading

from shoal.ipc.child import Command


def main(folder: str, module: str, arguments: list[str]) -> int:
    """Keeps one server; its status."""
    server = subprocess.Popen(  # noqa: S603 - the caller's own command
        Command(module, arguments, module=module).argv(),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    threading.Thread(target=_end_with_input, args=(server.pid,), daemon=True).start()
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    _kill_group(server.pid)  # while its number is still its own
    status = server.wait()
    shutil.rmtree(folder, ignore_errors=True)
    return status if status >= 0 else 128 - status


def _end_with_input(group: int) -> None:
    os.read(0, 1)  # nothing is ever written; a file object would hold a lock at our exit
    _kill_group(group)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
