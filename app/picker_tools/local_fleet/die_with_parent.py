"""`die_with_parent.py PARENT_PID SIGNAL COMMAND…` runs a command that gets the signal when its parent dies.

`picker up` starts its parts by this program, so that no part survives even if `picker up` is killed. The
Makefile starts `picker up` by this program, so that the fleet stops with `make`. Linux sends the signal to a
child that has requested it by prctl. A pre-exec hook would run Python between fork and exec, in a process
that may have copied locks of other threads. So this program requests the signal only once it runs, and then
execs COMMAND, which inherits the request. On systems other than Linux the program only execs COMMAND.
The program imports nothing of the package, so that it starts without site-packages in a few milliseconds.
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
    """Let Linux send signal `number` to this process when `parent` dies. SystemExit if `parent` is dead."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
            sys.exit(f"cannot be tied to its parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # the parent died before the request
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
