"""Runs a command that dies with the process that asked for it: `die_with_parent.py PARENT_PID COMMAND…`.

`picker up` must leave nothing behind even if it is killed outright. Linux sends a child a signal when its
parent dies, but the child itself has to ask for that. A pre-exec hook would run Python between fork and
exec, in a process that may have copied locks of other threads; this small program runs after its own exec
instead, asks, and becomes COMMAND: same process id, and the request survives. Elsewhere it only becomes
COMMAND. It stands alone, so that it starts without site-packages in a few milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    parent, command = int(arguments[0]), arguments[1:]
    die_with_parent(parent)
    try:
        os.execv(command[0], command)
    except OSError as fault:
        sys.exit(f"{command[0]}: {fault.strerror}")


def die_with_parent(parent: int) -> None:
    """From now on this process dies with its parent; SystemExit where it can't, or the parent has died."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            sys.exit(f"cannot be tied to its parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before it could be watched
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
