"""A child process that is controlled over its pipes, a line at a time."""

import asyncio
import sys

_ENDS_S = 5.0


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
        )
        return cls(name, process)

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    async def expect(self, wanted: str, within_s: float) -> None:
        """Wait until it prints `wanted`.

        Raises:
            ChildFailed: it prints another line, or ends.
            TimeoutError: it prints nothing.
        """
        assert self._process.stdout is not None
        async with asyncio.timeout(within_s):
            said = (await self._process.stdout.readline()).decode().strip()
        if said != wanted:
            what = repr(said) if said else "nothing and ended (its error is above)"
            raise ChildFailed(f"{self.name} printed {what} instead of {wanted!r}")

    async def end(self) -> str:
        """Close its stdin, which ends it; SIGKILL if it does not. Returns the rest of its output."""
        assert self._process.stdout is not None
        last = asyncio.create_task(self._process.stdout.read())
        await end(self._process, _ENDS_S)
        return (await last).decode()

    async def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        await kill(self._process)


async def end(process: asyncio.subprocess.Process, within_s: float) -> None:
    """Close its stdin, which ends it; SIGKILL past `within_s`. Returns when it is gone."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(within_s):
            await process.wait()
    except TimeoutError:
        await kill(process)


async def kill(process: asyncio.subprocess.Process) -> None:
    """SIGKILL, if it has not ended by itself; returns when it is gone."""
    if process.returncode is None:
        process.kill()
    await process.wait()
