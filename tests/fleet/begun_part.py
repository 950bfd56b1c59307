"""Replicas and model servers forked from a `picker up` that has imported what they need.

Two of three CPU seconds of a fleet's start are imports, the same in each of its processes. Here a part is a
fork of `picker up` that then runs the command: its child, which dies with it, in a session and with a log of
its own. What is not Python is executed, and so is everything where the kernel has no pidfd.
"""

import asyncio
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NoReturn

from picker_tools.local_fleet import processes
from picker_tools.local_fleet.die_with_parent import die_with_parent
from picker_tools.local_fleet.processes import Process, picker_command

_executed = processes.start_process


async def begin(command: Sequence[str], output: IO[bytes], environment: Mapping[str, str]) -> Process:
    """In place of `picker_tools.local_fleet.processes.start_process`."""
    ours = picker_command()
    if list(command[: len(ours)]) != ours or not hasattr(os, "pidfd_open"):
        return await _executed(command, output, environment)
    sys.stdout.flush()  # else the fork would write it too
    here = os.getpid()
    pid = os.fork()
    if pid == 0:
        become(lambda: _part(output.fileno(), here), list(command[len(ours) :]), environment)
    return _Forked(pid)


class _Forked:
    """A `processes.Process`. One event loop."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._end_told = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._end_told, self._end)

    def send_signal(self, number: int) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._end_told)
        os.close(self._end_told)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()


def become(prepare: Callable[[], None], words: list[str], environment: Mapping[str, str]) -> NoReturn:
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
