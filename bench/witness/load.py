"""A closed loop of clients, each of which asks again as soon as it has its answer, and their memory."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from bench.witness.asking import Asked, Wish, ask

LONGEST_BODY_BYTES = 60_000  # what Envoy can ask again of another replica
_WAITS_S = 120.0
_PAUSE_S = 0.05  # of a client that was turned away
_FLOWS = 6


def mixed(dice: random.Random, number: int) -> Wish:
    """Short and middling answers, half of them streamed, six flows, a few bodies near the limit."""
    return Wish(
        prompt=f"request {number} ",
        tokens=dice.choice((1, 3, 10, 30)),
        streamed=dice.random() < 0.5,
        pad_bytes=dice.choice((0, 0, 200, 2000, LONGEST_BODY_BYTES - 500 if dice.random() < 0.2 else 0)),
        headers=(("x-gateway-inference-fairness-id", f"flow-{dice.randrange(_FLOWS)}"),),
    )


class Load:
    """What the clients have asked so far. One event loop."""

    def __init__(
        self, url: str, seed: int, wish: Callable[[random.Random, int], Wish], pause_s: float = _PAUSE_S
    ) -> None:
        self.history: list[Asked] = []
        self._url = url
        self._dice = random.Random(seed)
        self._wish = wish
        self._pause_s = pause_s
        self._count = 0
        self._more = asyncio.Condition()

    @property
    def served(self) -> int:
        return sum(asked.served for asked in self.history)

    @property
    def failed(self) -> list[Asked]:
        """Those whose client waited and was not served."""
        return [asked for asked in self.history if asked.failed]

    async def client(self, stopping: asyncio.Event) -> None:
        """Ask until `stopping`, and finish what was asked."""
        while not stopping.is_set():
            self._count += 1
            asked = await ask(self._url, self._wish(self._dice, self._count))
            self.history.append(asked)
            async with self._more:
                self._more.notify_all()
            if asked.failed:
                await asyncio.sleep(self._pause_s)

    async def more(self, count: int) -> None:
        """Wait until `count` more have been served than now. TimeoutError if they are not."""
        goal = self.served + count
        async with asyncio.timeout(_WAITS_S), self._more:
            await self._more.wait_for(lambda: self.served >= goal)


@asynccontextmanager
async def loaded(
    url: str,
    *,
    clients: int,
    seed: int = 1,
    wish: Callable[[random.Random, int], Wish] = mixed,
    pause_s: float = _PAUSE_S,
) -> AsyncIterator[Load]:
    """`clients` that ask until the block ends; then each finishes what it has asked. One that was turned away
    comes again after `pause_s`.
    """
    load, stopping = Load(url, seed, wish, pause_s), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(load.client(stopping))
        try:
            yield load
        finally:
            stopping.set()
