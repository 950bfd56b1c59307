"""Watches the connection that carries decisions: whether Redis is away, or only that connection stuck.

What silence proves is decided in state/silence.py; this module lets time pass, and probes.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

import hiredis

from picker_fleet.state import cancelling
from picker_fleet.state.awake import TICK_S, AwakeClock
from picker_fleet.state.silence import Silence, Verdict
from picker_fleet.state.wire import DOWN, Wire

_PROBE_PAUSE_S = 0.25  # between two probes of one silence, each of which has a connection of its own
_MOST_PROBES = 8  # at a time; the oldest makes room

Connect = Callable[[Callable[[Any], None], Callable[[str], None]], Awaitable[Wire]]


class Watched(Protocol):
    """The connection that is watched. Times are the event loop's."""

    @property
    def heard_s(self) -> float:
        """When the last reply came."""
        ...

    @property
    def waits(self) -> bool:
        """Whether anything waits for Redis."""
        ...

    def stuck(self) -> None:
        """It is silent, and others are not."""

    def away(self) -> None:
        """Redis is silent."""


class Detector:
    """Looks each tick; `connect` makes another connection to the same server. One event loop."""

    def __init__(
        self,
        watched: Watched,
        silence: Silence,
        awake: AwakeClock,
        connect: Connect,
        on_tick: Callable[[], None],
    ) -> None:
        self._watched, self._silence, self._awake = watched, silence, awake
        self._connect, self._on_tick = connect, on_tick
        self._loop = asyncio.get_running_loop()
        self._looked_s = self._loop.time()
        self._probes: deque[asyncio.Task[None]] = deque()
        self._probed_s = 0.0
        self._answered = False
        self.answered_s = 0.0  # when a probe was answered last

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            while True:
                await asyncio.sleep(TICK_S)
                self._look()
                self._on_tick()
        finally:
            self._stop_probes()

    def _look(self) -> None:
        awake_s = self._awake.tick(closely=self._silence.suspected)
        now_s, watched = self._loop.time(), self._watched
        heard, self._looked_s = watched.heard_s > self._looked_s, now_s
        answered, self._answered = self._answered, False
        verdict = self._silence.look(now_s, awake_s, waits=watched.waits, heard=heard, answered=answered)
        if verdict is not Verdict.SUSPECT:
            self._stop_probes()
        elif now_s - self._probed_s >= _PROBE_PAUSE_S:
            self._probed_s = now_s
            if len(self._probes) == _MOST_PROBES:
                self._probes.popleft().cancel()
            self._probes.append(asyncio.create_task(self._probe(), name="redis-probe"))
        if verdict is Verdict.STUCK:
            watched.stuck()
        elif verdict is Verdict.AWAY:
            watched.away()

    async def _probe(self) -> None:
        """Ask for a sign of life; an error is one as well."""
        done = asyncio.Event()

        def take(reply: Any) -> None:
            self._answered, self.answered_s = True, self._loop.time()
            done.set()

        with suppress(*DOWN):
            async with asyncio.timeout(_PROBE_PAUSE_S * _MOST_PROBES):
                wire = await self._connect(take, lambda why: done.set())
                try:
                    ping: tuple[Any, ...] = ("PING",)
                    wire.write(hiredis.pack_command(ping))
                    await done.wait()
                finally:
                    await wire.close()
        cancelling.heed()

    def _stop_probes(self) -> None:
        self._answered = False
        while self._probes:
            self._probes.popleft().cancel()
