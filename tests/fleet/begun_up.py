"""`picker up` forked from a process that has imported what it needs.

Importing Envoy's types and making the first bootstrap takes 1.5 s of CPU, a quarter of a fleet's start. Here
one process does so once, and forks itself for each fleet. tests/fleet/test_up.py starts `picker up` as its
user does.
"""

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, NoReturn

_LONGEST_ASK = 1 << 20


class BegunUp:
    """A running `picker up`, with the part of `subprocess.Popen` that the tests use."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        output_in, output_out = os.pipe()
        status_in, status_out = os.pipe()
        ask = json.dumps([list(arguments), dict(environment)]).encode()
        socket.send_fds(_nursery(), [ask], [output_out, status_out])
        os.close(output_out)
        os.close(status_out)
        self.stdout: IO[str] = open(output_in, encoding="utf-8")  # noqa: SIM115 - closed by its user
        self._status_in = open(status_in, encoding="ascii")  # noqa: SIM115 - closed with its last line
        self.pid = int(self._status_in.readline())
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its exit status (minus the signal that ended it); None while it runs."""
        if self._status is None and select.select([self._status_in], [], [], 0)[0]:
            self._end()
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status. Raises subprocess.TimeoutExpired."""
        if self._status is None and not select.select([self._status_in], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("picker up", timeout or 0)
        return self._status if self._status is not None else self._end()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _end(self) -> int:
        self._status = int(self._status_in.readline())
        self._status_in.close()
        return self._status


@functools.cache
def _nursery() -> socket.socket:
    """The socket of the process that forks fleets, which ends with this one."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        command = [sys.executable, "-P", __file__, str(there.fileno())]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()])

    def end() -> None:
        here.close()
        child.wait()

    atexit.register(end)
    return here


def _serve(asked: socket.socket) -> None:
    import begun_part

    from picker_fleet import serve  # noqa: F401 - what each part is to find imported
    from picker_fleet.config import Settings
    from picker_tools.local_fleet import envoy, processes, up_command  # noqa: F401 - and each fleet
    from picker_tools.simulator import command  # noqa: F401

    processes.start_process = begun_part.begin

    nowhere = ("127.0.0.1", 0)
    envoy.build_bootstrap(Settings(), mode="lean", listen=nowhere, admin=nowhere, pickers=[nowhere])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # each fleet's keeper waits for it
    while True:
        ask, fds, *_ = socket.recv_fds(asked, _LONGEST_ASK, 2)
        if not ask:
            return
        if os.fork() == 0:
            asked.close()
            _keep(*json.loads(ask), *fds)
        for fd in fds:
            os.close(fd)


def _keep(arguments: list[str], environment: dict[str, str], output_out: int, status_out: int) -> NoReturn:
    """Run a fleet; write its process id, and its status when it has ended."""
    import begun_part

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(status_out)
        begun_part.become(lambda: _redirect_output(output_out), ["up", *arguments], environment)
    os.close(output_out)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the fleet
    os.write(status_out, f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    os.write(status_out, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _redirect_output(output_out: int) -> None:
    os.dup2(output_out, 1)
    os.dup2(output_out, 2)
    os.close(output_out)


if __name__ == "__main__":
    sys.path.append(os.path.dirname(__file__))  # which -P has left out
    _serve(socket.socket(fileno=int(sys.argv[1])))
