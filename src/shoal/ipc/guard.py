"""Runs a command that must not outlive the process that started it.

    python -m shoal.ipc.guard PARENT_PID module NAME [ARG ...]
    python -m shoal.ipc.guard PARENT_PID program PATH [ARG ...]

On Linux the kernel kills the command when its parent dies (prctl PR_SET_PDEATHSIG), also when the
parent is killed with SIGKILL. Elsewhere this process stays between the two and watches.
A module runs in this very interpreter; a program replaces it. Does not own starting or stopping.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import time

from shoal.ipc.priority import stand_back_alike

_PR_SET_PDEATHSIG = 1
_WATCH_S = 0.25


def _die_with_parent(parent_pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # it died before the kernel knew of the bond
        os._exit(1)


def _watch(command: list[str], parent_pid: int) -> int:
    """Runs `command` as a child, passes signals on and kills it once the parent is gone."""
    child = subprocess.Popen(command)  # noqa: S603 - the caller's own command
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _frame: child.send_signal(got))
    while child.poll() is None:
        if os.getppid() != parent_pid:
            child.kill()
        time.sleep(_WATCH_S)
    return child.returncode


def main(argv: list[str]) -> int:
    """Runs what `argv` says; see the module."""
    parent_pid, kind, name, arguments = int(argv[0]), argv[1], argv[2], argv[3:]
    stand_back_alike()
    if sys.platform != "linux":
        start = [sys.executable, "-m", name] if kind == "module" else [name]
        return _watch([*start, *arguments], parent_pid)
    _die_with_parent(parent_pid)
    if kind == "program":
        os.execv(name, [name, *arguments])  # noqa: S606 - the caller's own command
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
