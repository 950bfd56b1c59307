"""One child process: its log, its end, and the line by which it says that it is ready."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol, TypeVar

from picker_fleet.errors import StartupError
from picker_tools.local_fleet import guard

Found = TypeVar("Found")

_POLL_S = 0.02
_TAIL_LINES = 15


class Process(Protocol):
    """Of a process that was begun, what is used; `returncode` is None until it has ended."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def send_signal(self, signal: int) -> None: ...

    async def wait(self) -> int: ...


async def begin(command: Sequence[str], output: IO[bytes], environment: Mapping[str, str]) -> Process:
    """Run `command`, tied to this process' life (see `local_fleet.guard`), in a session of its own."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), *command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        start_new_session=True,
    )


class Child:
    """A started process whose output, both streams, goes to the end of `log`. One event loop."""

    def __init__(self, name: str, log: Path, process: Process, log_start: int) -> None:
        self.name = name
        self.log = log
        self._process = process
        self._log_start = log_start  # where this process' own output begins; earlier ones wrote before it

    @classmethod
    async def start(cls, name: str, command: Sequence[str], log: Path) -> "Child":
        """Run `command`. Ctrl-C reaches `picker up` alone, which then stops each in its turn."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PICKER_")}
        with log.open("ab") as output:
            log_start = output.tell()
            return cls(name, log, await begin(command, output, environment), log_start)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ended(self) -> str:
        """Wait for its end; how it ended, in words."""
        return _in_words(await self._process.wait())

    def check(self) -> None:
        """Raise StartupError, with the end of its log, if it has ended: it should not have so early."""
        code = self._process.returncode
        if code is not None:
            raise StartupError(self.fault(f"{_in_words(code)} before the fleet was ready"))

    async def until(
        self, look: Callable[[], Awaitable[Found | None]], *, within_s: float, what: str
    ) -> Found:
        """The first thing `look` finds that is not None; it is asked again and again.

        Raises:
            StartupError: the process ended before that, or `within_s` passed; the message names the part
                and ends with the end of its log.
        """
        try:
            async with asyncio.timeout(within_s):
                while True:
                    found = await look()
                    if found is not None:
                        return found
                    self.check()
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise StartupError(self.fault(f"{what} did not come within {within_s:g} s")) from None

    def lines(self) -> list[str]:
        """The whole lines this process has written so far."""
        with self.log.open("rb") as output:
            output.seek(self._log_start)
            text = output.read().decode(errors="replace")
        return text.split("\n")[:-1]

    def fault(self, what: str) -> str:
        """`name: what`, and the end of its log below."""
        tail = [f"    {line}" for line in self.lines()[-_TAIL_LINES:]]
        return "\n".join([f"{self.name}: {what}", *tail])

    async def stop(self, grace_s: float) -> None:
        """TERM, and KILL after `grace_s`; returns when it is gone."""
        if self.alive:
            self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        if self.alive:
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        try:
            self._process.send_signal(number)
        except ProcessLookupError:
            return  # it ended a moment ago


def _in_words(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
