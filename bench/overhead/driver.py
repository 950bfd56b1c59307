"""The client's other end: starts it, gives it loads, reads what came of them."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from bench.overhead.client import Load, Outcome, WrongAnswer
from bench.rig.child import end

_STARTS_S = 30.0
_MARGIN_S = 5.0  # past its own limit, before it counts as hung
_ENDS_S = 5.0
_LINE_BYTES = 16 * 1024 * 1024  # an outcome names every latency


class Driver:
    """One client process. Loads run one at a time: `prepare`, then `go`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._limit_s = 0.0

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls) -> AsyncIterator["Driver"]:
        """A client that lives as long as the block."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.overhead.client"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
        )
        try:
            yield cls(process)
        finally:
            await end(process, _ENDS_S)

    async def prepare(self, load: Load) -> None:
        """Have the connections open and warm.

        Raises:
            WrongAnswer: the client says what went wrong.
        """
        self._limit_s = load.limit_s
        self._say(json.dumps(asdict(load)))
        await self._hear(_STARTS_S + load.limit_s)

    async def go(self) -> Outcome:
        """Send the prepared load. Raises WrongAnswer as `prepare` does."""
        self._say("go")
        return Outcome(**await self._hear(self._limit_s))

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    async def _hear(self, within_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(within_s + _MARGIN_S):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise WrongAnswer("the client hangs") from None
        if not line:
            raise WrongAnswer("the client ended; its error is above")
        said: dict[str, Any] = json.loads(line)
        if "fault" in said:
            raise WrongAnswer(said["fault"])
        return said
