"""Bodies that are under way, and the end of those that stand still.

A client that vanishes amid its upload leaves no trace: Envoy has no deadline for it, since one would count
the wait in the queue too. Each would hold its part of `extproc.max_body_bytes` for ever, and every drain up.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc

from app.extproc.exchange import Exchange

STALLED_S = 30.0  # without a byte; whoever uploads slowly sends some
_LOOKS = 6  # within that time
_WRITE_S = 5.0  # for Envoy to take the refusal


class Uploads:
    """Exchanges that wait for more of a body, each with its gRPC context. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float], stalled_s: float = STALLED_S) -> None:
        self._clock, self._stalled_s = clock, stalled_s
        self._waiting: dict[Exchange, tuple[float, Any]] = {}

    def wait(self, exchange: Exchange, context: Any) -> None:
        """`exchange` is about to read more of its body."""
        self._waiting[exchange] = self._clock(), context

    def came(self, exchange: Exchange) -> None:
        """It has read something, or is over."""
        self._waiting.pop(exchange, None)

    async def run(self) -> None:
        """Refuse what stands still, until cancelled."""
        while True:
            await asyncio.sleep(self._stalled_s / _LOOKS)
            latest_s = self._clock() - self._stalled_s
            stalled = [(each, context) for each, (at_s, context) in self._waiting.items() if at_s < latest_s]
            for exchange, context in stalled:
                self.came(exchange)
                await self._refuse(exchange, context)

    async def _refuse(self, exchange: Exchange, context: Any) -> None:
        answers = exchange.give_up()
        exchange.told()
        # Its handler still reads; Envoy ends the stream once it has this. One that has left is no fault.
        with suppress(grpc.aio.BaseError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(_WRITE_S):
                for answer in answers:
                    await context.write(answer.SerializeToString())
