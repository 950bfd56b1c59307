"""Runs a command that is signalled when its parent dies: `die_with_parent.py PARENT_PID SIGNAL COMMAND…`.

`picker up` starts its parts with it, so that none is left even if `picker up` is killed; the Makefile starts
`picker up` with it, so that the fleet stops with `make`. Linux sends the signal if the child has asked for
it. A pre-exec hook would run Python between fork and exec, in a process that may have copied locks of other
threads. This program asks after its own exec and then becomes COMMAND: the process id stays, and so does the
request. On other systems it only becomes COMMAND. It imports nothing of the package, so that it starts
without site-packages in a few milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    parent, name, *command = arguments
    die_with_parent(int(parent), signal.Signals[name])
    try:
        os.execv(command[0], command)
    except OSError as fault:
        sys.exit(f"{command[0]}: {fault.strerror}")


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have `number` sent to this process when `parent` dies. SystemExit if it has died already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
            sys.exit(f"cannot be tied to its parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before the request
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
