"""How often one client may call the admin API: what it asks for takes time that decisions need."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

from fastapi import Request

from picker_fleet.admin.problems import Refused
from picker_fleet.rates import Rates

BURST_S = 2.0  # what has not been asked for in this time is lost
CHANGE = 10  # calls that a change counts for: it is a few scripts, and every replica follows
_MOST_CLIENTS = 1024
_HELD_S = 1.0  # a refusal is: who does not wait when told to would be refused as often as it likes
_READS = ("GET", "HEAD")


class Rate:
    """A dependency of routes: `per_s` calls a second from one address, as a token bucket."""

    def __init__(
        self,
        per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._per_s = per_s
        self._rates = Rates(per_s, max(per_s * BURST_S, CHANGE), _MOST_CLIENTS, clock)
        self._sleep = sleep

    async def __call__(self, request: Request) -> None:
        """Pass, or raise Refused 429 a second later."""
        host = request.client.host if request.client is not None else ""
        wait_s = self._rates.take(host, 1 if request.method in _READS else CHANGE)
        if wait_s:
            await self._sleep(_HELD_S)
            raise Refused(
                429,
                "too_many_calls",
                f"more than {self._per_s:g} calls a second from one client (a change counts as {CHANGE})",
                retry_after_s=max(1, math.ceil(wait_s)),
            )
