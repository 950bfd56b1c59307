"""A process that has slept (SIGSTOP, a frozen machine): what it holds may be another replica's by now."""

import asyncio
import math

# A loop that is so late with its looks has slept. What it has not heard meanwhile says nothing of Redis; and
# Envoy has brought its requests to other replicas, which it is about to learn.
_SLEPT_S = 1.0
_WAKING_S = 1.0
_PAUSE_S = 0.05


class Waking:
    """Whether the process has just woken. One event loop; `look` comes many times a second."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._looked_s = math.inf
        self._woke_s = -math.inf

    def look(self) -> None:
        """Note that the loop runs."""
        now_s = self._clock()
        self._notice(now_s)
        self._looked_s = now_s

    @property
    def now(self) -> bool:
        """Whether it woke within the last second."""
        now_s = self._clock()
        self._notice(now_s)
        return now_s - self._woke_s < _WAKING_S

    async def pause(self) -> None:
        """Let what came while it slept be read first: a stream's beginning has come, and its end as well."""
        await asyncio.sleep(_PAUSE_S)

    def _notice(self, now_s: float) -> None:
        if now_s - self._looked_s > _SLEPT_S:
            self._woke_s = now_s
