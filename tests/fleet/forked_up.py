"""`picker up` and its parts, forked from a process that has imported what they need.

Two of three CPU seconds of a fleet's start are imports, and Envoy's first bootstrap. Here one process does
both once, and forks itself for each fleet. Replicas and model servers are forks of their `picker up`:
children that die with it, in a session and with a log of their own. What is not Python is executed, and so is
everything where the kernel has no pidfd. tests/fleet/test_up.py starts `picker up` as its user does.
"""

import asyncio
import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NoReturn

from picker_tools.local_fleet import processes
from picker_tools.local_fleet.die_with_parent import die_with_parent
from picker_tools.local_fleet.processes import Process, picker_command

_LONGEST_COMMAND = 1 << 20
_executed = processes.start_process


async def fork_process(command: Sequence[str], output: IO[bytes], environment: Mapping[str, str]) -> Process:
    """In place of `picker_tools.local_fleet.processes.start_process`."""
    ours = picker_command()
    if list(command[: len(ours)]) != ours or not hasattr(os, "pidfd_open"):
        return await _executed(command, output, environment)
    sys.stdout.flush()  # else the fork would write it too
    here = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(lambda: _part(output.fileno(), here), list(command[len(ours) :]), environment)
    return _Forked(pid)


class _Forked:
    """A `processes.Process`. One event loop."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    def send_signal(self, number: int) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()


def _become(prepare: Callable[[], None], words: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Run `picker WORDS…` in this fork after `prepare`, then exit."""
    from picker_fleet import cli

    status: int | str | None = 1
    try:
        prepare()
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # it may depend on the former environment
        status = cli.main(words)
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status or 0)


def _part(output: int, parent: int) -> None:
    """Detach from the `picker up` that forked this, with `output` for both streams."""
    os.setsid()
    die_with_parent(parent)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for to, fd in enumerate((nothing, output, output)):
        os.dup2(fd, to)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    asyncio._set_running_loop(None)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


class ForkedUp:
    """A running `picker up`, with the part of `subprocess.Popen` that the tests use."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        output_in, output_out = os.pipe()
        status_in, status_out = os.pipe()
        command = json.dumps([list(arguments), dict(environment)]).encode()
        socket.send_fds(_forking_process(), [command], [output_out, status_out])
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
def _forking_process() -> socket.socket:
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


def _serve(commands: socket.socket) -> None:
    from picker_fleet import serve  # noqa: F401 - what each part is to find imported
    from picker_fleet.config import Settings
    from picker_tools.local_fleet import envoy, up_command  # noqa: F401 - and each fleet
    from picker_tools.simulator import command  # noqa: F401

    processes.start_process = fork_process

    nowhere = ("127.0.0.1", 0)
    envoy.build_bootstrap(Settings(), mode="lean", listen=nowhere, admin=nowhere, pickers=[nowhere])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # each fleet's keeper waits for it
    while True:
        line, fds, *_ = socket.recv_fds(commands, _LONGEST_COMMAND, 2)
        if not line:
            return
        if os.fork() == 0:
            commands.close()
            _keep(*json.loads(line), *fds)
        for fd in fds:
            os.close(fd)


def _keep(arguments: list[str], environment: dict[str, str], output_out: int, status_out: int) -> NoReturn:
    """Run a fleet; write its process id, and its status when it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(status_out)
        _become(lambda: _redirect_output(output_out), ["up", *arguments], environment)
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
    _serve(socket.socket(fileno=int(sys.argv[1])))
