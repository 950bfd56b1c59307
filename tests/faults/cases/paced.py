"""An open loop of requests at a steady pace: a slow fleet gets no fewer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from picker_tools.load.client_history import ClientRecord, ClientRequest, send_request


class Paced:
    """The requests and answers so far. One event loop."""

    def __init__(self, url: str, per_s: float) -> None:
        self.history: list[ClientRecord] = []
        self._one_more = asyncio.Condition()
        self._url = url
        self._pause_s = 1 / per_s

    async def answered(self, count: int) -> None:
        """Wait until `count` more have been answered than now."""
        goal = len(self.history) + count
        async with self._one_more:
            await self._one_more.wait_for(lambda: len(self.history) >= goal)

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Send until cancelled; a late request is sent at once."""
        loop, number = asyncio.get_running_loop(), 0
        began_s = loop.time()
        while True:
            await asyncio.sleep(began_s + number * self._pause_s - loop.time())
            number += 1
            tasks.create_task(self._one(number))

    async def _one(self, number: int) -> None:
        record = await send_request(self._url, ClientRequest(f"request {number}", 1))
        async with self._one_more:
            self.history.append(record)
            self._one_more.notify_all()


@asynccontextmanager
async def paced(url: str, per_s: float) -> AsyncIterator[Paced]:
    """`per_s` requests a second until the block ends; then all that were asked are answered."""
    load = Paced(url, per_s)
    async with asyncio.TaskGroup() as tasks:
        pacing = tasks.create_task(load.run(tasks))
        try:
            yield load
        finally:
            pacing.cancel()
