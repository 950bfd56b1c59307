"""Starts a child process that a bench controls by lines over pipes."""

import asyncio
import contextlib
import sys

_ENDS_S = 5.0
_ORDER_S = 3600.0
_LINE_BYTES = 16 * 1024 * 1024  # length limit in bytes of a line


class ChildFailed(Exception):
    """A child process exited or printed an unexpected line; the message says which."""


class Child:
    """A running child process `python -m MODULE`."""

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
        """Read the next line that the child prints.

        Raises:
            ChildFailed: raised if the child exited.
            TimeoutError: raised if the child printed nothing in time.
        """
        assert self._process.stdout is not None
        async with asyncio.timeout(within_s):
            said = (await self._process.stdout.readline()).decode().strip()
        if not said:
            raise ChildFailed(f"{self.name} exited (its error is above)")
        return said

    async def expect(self, wanted: str, within_s: float) -> None:
        """Read a line as the method `line` does; raise ChildFailed if the line is not `wanted`."""
        if (said := await self.line(within_s)) != wanted:
            raise ChildFailed(f"{self.name} printed {said!r} instead of {wanted!r}")

    async def end(self) -> None:
        """Close the child's stdin, so that the child exits; kill the child after _ENDS_S."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ENDS_S):
                await self._process.wait()
        await self.kill()

    async def kill(self) -> None:
        """Send SIGKILL to the child unless it has exited, and wait for its exit."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


class Orders:
    """Used in the child process: reads orders from stdin, one per line."""

    def __init__(self, lines: asyncio.StreamReader) -> None:
        self._lines = lines

    @classmethod
    async def of_stdin(cls) -> "Orders":
        lines = asyncio.StreamReader(limit=_LINE_BYTES)
        protocol = asyncio.StreamReaderProtocol(lines)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
        return cls(lines)

    async def next(self) -> str:
        """Read the next order; '' at the end of stdin. Raises TimeoutError if no order comes for an hour."""
        async with asyncio.timeout(_ORDER_S):
            return (await self._lines.readline()).decode().strip()
