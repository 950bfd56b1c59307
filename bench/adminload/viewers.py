"""Five dashboards that are open or not, as the measurement wants."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Literal

from bench.rig.ending import end

DASHBOARDS = 5
_READY_S = 600.0
_ENDS_S = 20.0


class Viewers:
    """The process of `bench.adminload.pages` or `streams`. `gaps_ms`: of every page, of all turns."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.gaps_ms: list[float] = []

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """All pages are open and have figures while in here."""
        if await self._said("open") != "open":
            raise RuntimeError("the dashboards did not open; why is told above")
        yield
        told: list[list[float]] = json.loads(await self._said("close"))
        if not all(told):
            raise RuntimeError("a dashboard was never updated")
        self.gaps_ms += [gap for page in told for gap in page]

    async def _said(self, word: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{word}\n".encode())
        async with asyncio.timeout(_READY_S):
            return (await self._process.stdout.readline()).decode().strip()


@contextlib.asynccontextmanager
async def viewers(
    urls: Sequence[str], priority: str, kind: Literal["pages", "streams"] = "pages"
) -> AsyncIterator[Viewers]:
    """Viewers of the dashboards at `urls` (`http://host:port`), in a process of this priority."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"bench.adminload.{kind}", priority, str(DASHBOARDS)),
        *(f"{url}/" for url in urls),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Viewers(process)
    finally:
        await end(process, _ENDS_S)
