"""When a Redis that says nothing counts as away. Pure; seconds are of awake time (state/failure_detector.py).

Silence is time in which something waits for Redis and nothing at all comes from it; any answer ends it. So a
Redis that is slow, but answers, is waited for. A silent one is suspected after the time that its replies
really take: the retransmission timeout of RFC 6298, SRTT + 4 RTTVAR. It is then probed on other connections.
Where those are answered, the connection is stuck, and made anew. Where they are not for `proof_s`, Redis is
away: `floor_s`, or the retransmission timeout if that is longer, and twice as long each time this replica
has left again within `CALM_S` of having returned, up to `ceiling_s`. The answered heartbeats in a row after
which it returns double likewise, from two to sixteen. So no Redis, however slow, makes a replica go to and
fro.
"""

import asyncio
import contextlib
import enum
import math
import os
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

import hiredis

from picker_fleet.state.connection import DOWN, RedisConnection, raise_if_cancelled

TICK_S = 0.1
# A reply that was sent, or a stream that was begun, before so long a stand-still may be another replica's by
# now: Envoy has given up on this one. Shorter than the shortest lease, 2 s.
LONG_PAUSE_S = 1.0
_WOKEN_S = 1.0  # for how long a process counts as just woken
_PAUSE_S = 0.05


class PauseDetector:
    """`clock` tells seconds that only rise, `delayed` for how long, in all, the kernel kept this thread from
    running. `tick` comes each `TICK_S`; all else may be asked at any time. One event loop."""

    def __init__(
        self, clock: Callable[[], float] | None = None, delayed: Callable[[], float] | None = None
    ) -> None:
        self._clock = clock or asyncio.get_running_loop().time
        self._delayed = delayed or KernelDelay().read
        self._ticked_s = math.inf
        self._woke_s = -math.inf
        self._stood_s = 0.0
        self._delayed_s: float | None = None  # as of the last tick; None: it was not asked

    @property
    def paused_s(self) -> float:
        """Seconds in which it stood still, in all."""
        return self.paused_until(self._clock())

    def paused_until(self, now_s: float) -> float:
        """The same, where the clock's time is known."""
        late_s = now_s - self._ticked_s - TICK_S
        return self._stood_s + late_s if late_s > 0.0 else self._stood_s

    @property
    def resumed_recently(self) -> bool:
        """Whether it stood still for long, and that less than a second ago."""
        now_s = self._clock()
        if now_s - self._ticked_s > TICK_S + LONG_PAUSE_S:
            self._woke_s = now_s
        return now_s - self._woke_s < _WOKEN_S

    async def wait_for_backlog(self) -> None:
        """Let what came while it stood still be read first: a stream's beginning has come, and its end."""
        await asyncio.sleep(_PAUSE_S)

    def tick(self, *, closely: bool = False) -> float:
        """Seconds awake since the last tick; `closely` asks the kernel, too."""
        now_s = self._clock()
        elapsed_s = max(now_s - self._ticked_s, 0.0)
        lost_s = max(elapsed_s - TICK_S, 0.0)
        if lost_s > LONG_PAUSE_S:
            self._woke_s = now_s
        before_s, self._delayed_s = self._delayed_s, self._delayed() if closely else None
        if before_s is not None and self._delayed_s is not None:
            lost_s = min(max(lost_s, self._delayed_s - before_s), elapsed_s)
        self._stood_s += lost_s
        self._ticked_s = now_s
        return elapsed_s - lost_s

    def mark_resumed(self) -> None:
        """It stood still for long, in all."""
        self._woke_s = self._clock()


class KernelDelay:
    """What Linux tells of a thread that was ready to run and did not; 0 where it does not tell."""

    def __init__(self, schedstat: str = "/proc/thread-self/schedstat", stat: str = "/proc/stat") -> None:
        self._schedstat, self._stat = schedstat, stat

    def read(self) -> float:
        """Seconds in all, of the thread that asks: its run-queue delay, and each core's mean steal."""
        delayed_s = 0.0
        with contextlib.suppress(OSError, ValueError, IndexError):
            delayed_s += _run_queue_s(_text(self._schedstat))
        with contextlib.suppress(OSError, ValueError, IndexError):
            delayed_s += _steal_s(_text(self._stat))
        return delayed_s


def _text(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read(4096)


def _run_queue_s(schedstat: str) -> float:
    """Its fields: time on the core, time waited for one (both ns), and how often (proc_pid_schedstat(5))."""
    return int(schedstat.split()[1]) / 1e9


def _steal_s(stat: str) -> float:
    """Of the line `cpu`, in ticks: user nice system idle iowait irq softirq steal (proc_stat(5))."""
    return int(stat.split("\n", 1)[0].split()[8]) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)


CALM_S = 30.0
_ALPHA, _BETA, _K = 1 / 8, 1 / 4, 4  # RFC 6298, section 2
_SUSPECTED = 0.1  # of the floor, at least
_STUCK = 0.25  # of the floor, at least, for a connection that is silent while probes are answered
_MOST_REPEATS = 4


class Health(enum.Enum):
    """What is thought of a connection. SUSPECT: probe Redis. STUCK: make it anew. AWAY: give Redis up."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    STUCK = "stuck"
    UNAVAILABLE = "unavailable"


class RetransmissionTimeout:
    """The retransmission timeout of RFC 6298 over the replies that came, between two limits."""

    def __init__(self, least_s: float, most_s: float) -> None:
        self._least_s, self._most_s = least_s, most_s
        self._mean_s: float | None = None  # SRTT
        self._deviation_s = 0.0  # RTTVAR

    def record(self, seconds: float) -> None:
        """A reply came after so long."""
        if self._mean_s is None:
            self._mean_s, self._deviation_s = seconds, seconds / 2
            return
        off_s = seconds - self._mean_s
        self._deviation_s += _BETA * (abs(off_s) - self._deviation_s)
        self._mean_s += _ALPHA * off_s

    @property
    def timeout_s(self) -> float:
        """How long a reply may take before it is missed."""
        found_s = 0.0 if self._mean_s is None else self._mean_s + _K * self._deviation_s
        return min(max(found_s, self._least_s), self._most_s)


class FailureDetector:
    """`look` regularly; a verdict other than WELL and SUSPECT begins the observation anew. `floor_s` and
    `ceiling_s` limit the proof."""

    def __init__(self, floor_s: float, ceiling_s: float) -> None:
        self._floor_s, self._ceiling_s = floor_s, max(floor_s, ceiling_s)
        self._replies = RetransmissionTimeout(_SUSPECTED * floor_s, self._ceiling_s)
        self.record_reply_time = self._replies.record
        self._repeats = 0  # times it left in a row
        self._returned_s = -math.inf
        self._begin()

    def _begin(self) -> None:
        self._silent_s = 0.0
        self._unanswered_s: float | None = None  # since the first probe; None: not suspected
        self._answered_s: float | None = None  # since a probe was answered
        self._due = False  # the time was up at the last look; what waited in the socket has been read since

    @property
    def suspected(self) -> bool:
        return self._unanswered_s is not None

    @property
    def heartbeats_to_recover(self) -> int:
        """Answered heartbeats in a row after which a replica that has left returns."""
        return 1 << max(self._repeats, 1)

    def unavailable_after_s(self, now_s: float) -> float:
        """For how long probes must go unanswered."""
        repeats = self._repeats if now_s - self._returned_s < CALM_S else 0
        return min(max(self._floor_s, self._replies.timeout_s) * 2.0**repeats, self._ceiling_s)

    def record_failover(self, now_s: float) -> None:
        """This replica goes on without Redis."""
        again = now_s - self._returned_s < CALM_S
        self._repeats = min(self._repeats + 1, _MOST_REPEATS) if again else 1

    def record_recovery(self, now_s: float) -> None:
        """It is back."""
        self._returned_s = now_s

    def observe(self, now_s: float, awake_s: float, *, waits: bool, heard: bool, answered: bool) -> Health:
        """What is thought now. Since the last look this replica was awake for `awake_s`; something `waits`
        for an answer; the connection was `heard`; a probe was `answered`.
        """
        if heard or not waits:
            self._begin()
            return Health.HEALTHY
        self._silent_s += awake_s
        if self._unanswered_s is None:
            if self._silent_s < self._replies.timeout_s:
                return Health.HEALTHY
            self._unanswered_s = 0.0
            return Health.SUSPECT
        self._unanswered_s += awake_s
        if answered and self._answered_s is None:
            self._answered_s = 0.0
        elif self._answered_s is not None:
            self._answered_s += awake_s
        return self._judge(now_s)

    def _judge(self, now_s: float) -> Health:
        assert self._unanswered_s is not None
        if self._answered_s is not None:
            stuck_s = max(_STUCK * self._floor_s, self._replies.timeout_s)
            verdict, up = Health.STUCK, self._answered_s >= stuck_s
        else:
            verdict, up = Health.UNAVAILABLE, self._unanswered_s >= self.unavailable_after_s(now_s)
        due, self._due = self._due, up
        if not (due and up):
            return Health.SUSPECT
        self._begin()
        return verdict


_PROBE_PAUSE_S = 0.25  # between two probes of one silence, each of which has a connection of its own
_MOST_PROBES = 8  # at a time; the oldest makes room

Connect = Callable[[Callable[[Any], None], Callable[[str], None]], Awaitable[RedisConnection]]


class Watched(Protocol):
    """The connection that is watched. Times are the event loop's."""

    @property
    def last_reply_s(self) -> float:
        """When the last reply came."""
        ...

    @property
    def waiting(self) -> bool:
        """Whether anything waits for Redis."""
        ...

    def on_stuck(self) -> None:
        """This connection is silent while probes on others are answered."""

    def on_silent(self) -> None:
        """Redis is silent on every connection."""


class ConnectionMonitor:
    """Looks each tick; `connect` makes another connection to the same server. One event loop."""

    def __init__(
        self,
        watched: Watched,
        failure_detector: FailureDetector,
        pause_detector: PauseDetector,
        connect: Connect,
        on_tick: Callable[[], None],
    ) -> None:
        self._watched, self._failure_detector, self._pause_detector = (
            watched,
            failure_detector,
            pause_detector,
        )
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
        awake_s = self._pause_detector.tick(closely=self._failure_detector.suspected)
        now_s, watched = self._loop.time(), self._watched
        heard, self._looked_s = watched.last_reply_s > self._looked_s, now_s
        answered, self._answered = self._answered, False
        health = self._failure_detector.observe(
            now_s, awake_s, waits=watched.waiting, heard=heard, answered=answered
        )
        if health is not Health.SUSPECT:
            self._stop_probes()
        elif now_s - self._probed_s >= _PROBE_PAUSE_S:
            self._probed_s = now_s
            if len(self._probes) == _MOST_PROBES:
                self._probes.popleft().cancel()
            self._probes.append(asyncio.create_task(self._probe(), name="redis-probe"))
        if health is Health.STUCK:
            watched.on_stuck()
        elif health is Health.UNAVAILABLE:
            watched.on_silent()

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
        raise_if_cancelled()

    def _stop_probes(self) -> None:
        self._answered = False
        while self._probes:
            self._probes.popleft().cancel()
