"""Watches an endpoint source in tests, and collects the source's log lines."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from background import running

from picker_fleet.domain.request import Endpoint
from picker_fleet.endpoints.discovery import Source


@asynccontextmanager
async def watching(source: Source, report: Callable[[tuple[Endpoint, ...]], None]) -> AsyncIterator[None]:
    """Let `source` pass each endpoint list to the function `report` until the block ends."""
    async with running(source.watch(report)):
        yield


class Lines(logging.Handler):
    """A log handler; its method `saying` waits for a log line that contains `text`."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: asyncio.Queue[str] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.put_nowait(record.getMessage())

    async def saying(self, text: str) -> str:
        async with asyncio.timeout(20):
            while text not in (line := await self._lines.get()):
                pass
        return line
