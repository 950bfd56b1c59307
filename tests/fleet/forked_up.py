"""`picker up` and its child processes, forked from a process that has already imported their modules.

Imports and Envoy's first bootstrap take two of the three CPU seconds of a fleet's start. The fork server of
`multiprocessing` does this work once (preloaded.py), and each `picker up` is a fork of this server. Replicas
and model servers are forks of their `picker up` and die with it; each has its own session and log. Programs
other than Python are executed; without pidfd in the kernel, all programs are.
tests/fleet/test_up.py starts `picker up` as users do.
"""

import asyncio
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, NoReturn
from unittest import mock

from picker_tools.local_fleet import processes
from picker_tools.local_fleet.die_with_parent import die_with_parent
from picker_tools.local_fleet.processes import Process, picker_command

_executed = processes.start_process


class ForkedUp:
    """A running `picker up`, with the subset of `subprocess.Popen` that the tests use."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        received, sent = multiprocessing.Pipe(duplex=False)
        with received, sent:
            self._process = _fork_server().Process(
                target=_up, args=(list(arguments), dict(environment), sent), daemon=True
            )
            self._process.start()
            self.stdout: IO[str] = open(os.dup(received.fileno()), encoding="utf-8")  # noqa: SIM115
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit status (after a signal, minus the signal's number); None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process's exit status. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("picker up", timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def _fork_server() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    # The fork server finds modules only through PYTHONPATH.
    found = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with mock.patch.dict(os.environ, PYTHONPATH=found.rstrip(os.pathsep)):
        forkserver.ensure_running()
    return context


def _up(arguments: list[str], environment: dict[str, str], output: Connection) -> None:
    with output:
        _redirect(output.fileno())
    processes.start_process = fork_process
    sys.exit(_picker(["up", *arguments], environment))


async def fork_process(command: Sequence[str], output: IO[bytes], environment: Mapping[str, str]) -> Process:
    """Replaces `picker_tools.local_fleet.processes.start_process`; forks if `command` runs `picker`."""
    ours = picker_command()
    if list(command[: len(ours)]) != ours or not hasattr(os, "pidfd_open"):
        return await _executed(command, output, environment)
    sys.stdout.flush()  # without this flush the fork would write the buffered output again
    here = os.getpid()
    pid = os.fork()
    if pid == 0:
        _part(list(command[len(ours) :]), environment, output.fileno(), here)
    return _Forked(pid)


class _Forked:
    """A forked child with the interface of `processes.Process`, for one event loop."""

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


def _part(words: list[str], environment: Mapping[str, str], output: int, parent: int) -> NoReturn:
    """In the child: detach from `picker up`, and run `picker WORDS…` with stdout and stderr to `output`."""
    status = 1
    try:
        os.setsid()
        die_with_parent(parent)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        _redirect(output)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        asyncio._set_running_loop(None)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        status = _picker(words, environment)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _picker(words: list[str], environment: Mapping[str, str]) -> int:
    """Run `picker WORDS…` in this process; return its exit status."""
    from picker_fleet import cli

    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))  # for extensions
    tempfile.tempdir = None  # the cached folder may be of another Python environment
    try:
        return cli.main(words)
    except SystemExit as end:
        if not isinstance(end.code, str):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1


def _redirect(output: int) -> None:
    os.dup2(output, 1)
    os.dup2(output, 2)
