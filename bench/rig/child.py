"""A child process that is controlled over its pipes, a line at a time."""

import asyncio
import contextlib
import sys

_ENDS_S = 5.0
_ORDER_S = 3600.0
_LINE_BYTES = 16 * 1024 * 1024  # an outcome of a load has every latency


class ChildFailed(Exception):
    """A child printed another line than the expected one; the message says which."""


class Child:
    """A running `python -m MODULE`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process

    @classmethod
    async def started(cls, name: str, module: str, *arguments: str) -> "Child":
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
        )
        return cls(name, process)

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    async def line(self, within_s: float) -> str:
        """The next line that it prints.

        Raises:
            ChildFailed: it ends.
            TimeoutError: it prints nothing.
        """
        assert self._process.stdout is not None
        async with asyncio.timeout(within_s):
            said = (await self._process.stdout.readline()).decode().strip()
        if not said:
            raise ChildFailed(f"{self.name} printed nothing and ended (its error is above)")
        return said

    async def expect(self, wanted: str, within_s: float) -> None:
        """Wait until it prints `wanted`; ChildFailed if it prints another line, else as `line`."""
        if (said := await self.line(within_s)) != wanted:
            raise ChildFailed(f"{self.name} printed {said!r} instead of {wanted!r}")

    async def end(self) -> None:
        """Close its stdin, which ends it; SIGKILL if it does not."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ENDS_S):
                await self._process.wait()
        await self.kill()

    async def kill(self) -> None:
        """SIGKILL, if it has not ended by itself; returns when it is gone."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


class Orders:
    """What a child reads of its stdin, a line at a time."""

    def __init__(self, lines: asyncio.StreamReader) -> None:
        self._lines = lines

    @classmethod
    async def of_stdin(cls) -> "Orders":
        lines = asyncio.StreamReader(limit=_LINE_BYTES)
        protocol = asyncio.StreamReaderProtocol(lines)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
        return cls(lines)

    async def next(self) -> str:
        """The next order; '' at the end. TimeoutError if none comes for an hour."""
        async with asyncio.timeout(_ORDER_S):
            return (await self._lines.readline()).decode().strip()
