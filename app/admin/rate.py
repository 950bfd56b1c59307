"""How often one client may call the admin API: what it asks for takes time that decisions need."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from fastapi import Request

from app.admin.problems import Refused

BURST_S = 2.0  # what has not been asked for in this time is lost
CHANGE = 10  # calls that a change counts for: it is a few scripts, and every replica follows
_MOST_CLIENTS = 1024
_READS = ("GET", "HEAD")


class Rate:
    """A dependency of routes: `per_s` calls a second from one address, as a token bucket."""

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._most = max(per_s * BURST_S, CHANGE)
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # calls left, as of when

    async def __call__(self, request: Request) -> None:
        """Pass, or raise Refused 429."""
        host = request.client.host if request.client is not None else ""
        now_s = self._clock()
        left, as_of_s = self._left.pop(host, (self._most, now_s))
        left = min(self._most, left + (now_s - as_of_s) * self._per_s)
        cost = 1 if request.method in _READS else CHANGE
        passes = left >= cost
        self._left[host] = left - cost if passes else left, now_s
        if len(self._left) > _MOST_CLIENTS:
            self._left.popitem(last=False)
        if not passes:
            raise Refused(
                429,
                "too_many_calls",
                f"more than {self._per_s:g} calls a second from one client (a change counts as {CHANGE})",
                retry_after_s=max(1, math.ceil((cost - left) / self._per_s)),
            )
