"""Calls, a connection to Redis, and failure detection: tells apart an unavailable Redis, a slow Redis, a
stuck connection, and a pause of this replica itself.

- Call is a script call or command, and the items that its reply answers; DelayedCalls keeps calls to retry.
- RedisConnection writes messages and passes on replies.
- PauseDetector measures for how long this process did not run.
- FailureDetector judges a silence of Redis. Pure; the detector counts only time in which this replica was
awake.
- ConnectionMonitor runs both detectors for state/batching.py: it ticks them, and probes Redis on other
connections.

Silence is time in which a call waits for Redis and nothing is read from the connection. Any reply ends a
silence, so the replica waits for a Redis that is slow, but answers. Redis is SUSPECT when a silence outlasts
the retransmission timeout of RFC 6298 (SRTT + 4 RTTVAR of its replies). The monitor then probes Redis on
other connections. If Redis answers probes, the connection is STUCK and gets replaced. If all probes stay
unanswered for `unavailable_after_s`, Redis is UNAVAILABLE. The time `unavailable_after_s` is the longer of
`floor_s` and the retransmission timeout; this time doubles, up to `ceiling_s`, with each failover within
`CALM_S` of a recovery. The number of answered heartbeats that recovery needs (2 to 16) doubles in the same
way. So a slow Redis causes no flapping."""

import asyncio
import contextlib
import enum
import math
import os
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Protocol, cast

import hiredis
import msgspec
from redis import exceptions as redis_errors
from redis.asyncio.connection import Connection, ConnectionPool

from picker_fleet.domain.errors import StateFault
from picker_fleet.state.primary import raise_if_cancelled

Reply = Any
Argument = str | int | float | bytes

HEAD = 4  # number of leading elements of a batched reply: epoch, notifications, attempts, served
_REPEATABLE = ("view_", "claim_queue_snapshot")  # prefixes of scripts that may run repeatedly

DOWN = (redis_errors.RedisError, OSError, TimeoutError, EOFError)
TICK_S = 0.1
# After a pause this long, requests granted here or streams begun here may belong to another replica, since
# Envoy has given up on this replica. LONG_PAUSE_S is below the shortest lease, 2 s.
LONG_PAUSE_S = 1.0
_RECENT_S = 1.0  # seconds for which a process counts as recently resumed
_BACKLOG_S = 0.05
CALM_S = 30.0
_ALPHA, _BETA, _K = 1 / 8, 1 / 4, 4  # RFC 6298, section 2
_SMALLEST = 1e-9  # moving averages below this become 0
_SUSPECTED = 0.1  # part of `floor_s`: the shortest silence before Redis is SUSPECT
_STUCK = 0.25  # fraction of `floor_s`: the shortest silence, after an answered probe, before STUCK
_MAX_REPEATS = 4
_PROBE_PAUSE_S = 0.25  # interval of probes during a silence; each probe opens a connection
_MAX_PROBES = 8  # concurrent probes; a further probe replaces the oldest


class Item(msgspec.Struct, eq=False):
    """One submission. `durable`: the item is resent until Redis has accepted it. `tried`: Redis may have
    received the item. The function `parse` converts the reply into the answer."""

    args: tuple[Argument, ...]
    answer: asyncio.Future[Any]
    durable: bool
    parse: Callable[[Any], Any] | None = None
    tried: bool = False


class Call(msgspec.Struct, eq=False):
    """One function call or plain command, and the items that the reply answers: none, one, or a batch."""

    name: str
    command: tuple[Any, ...]
    items: list[Item]
    batched: bool = False
    head: int = 0  # number of words in `command` before the items' arguments
    denied: bool = False  # Redis has already denied this call once

    @property
    def answered(self) -> bool:
        return all(item.answer.done() for item in self.items)

    @property
    def repeatable(self) -> bool:
        """Whether the call may run any number of times: it is a view, whose caller has a deadline."""
        return self.name.startswith(_REPEATABLE)

    def answer(self, reply: Reply, on_batch: Callable[[Sequence[Any]], None]) -> None:
        """Give each item its part of `reply`; then pass the head of a batched reply to `on_batch`."""
        parts = reply[HEAD:] if self.batched else [reply] * len(self.items)
        for item, part in zip(self.items, parts, strict=True):
            if not item.answer.done():
                item.answer.set_result(part if item.parse is None else item.parse(part))
        if self.batched:
            on_batch(reply[:HEAD])

    def split(self) -> list["Call"]:
        head = self.command[: self.head]
        return [
            Call(self.name, (*head, *item.args), [item], self.batched, self.head, self.denied)
            for item in self.items
            if not item.answer.done()
        ]

    def drop_renewals(self, ended: Collection[Argument]) -> None:
        """Answer the renewals of the requests `ended`, which must not be sent: a renewal after its request's
        end would restore the request."""
        for item in self.items:
            if self.name == "renew" and item.args[0] in ended and not item.answer.done():
                item.answer.set_result("unknown")

    def mark_tried(self) -> None:
        for item in self.items:
            item.tried = True

    def fail(self, fault: type[StateFault], why: str) -> None:
        for item in self.items:
            if not item.answer.done():
                item.answer.set_exception(fault(why, retry_after_s=1))
                item.answer.exception()  # asyncio must not warn if the caller has gone


class DelayedCalls:
    """Collects calls; `delay_s` after the first call, passes unanswered calls to `on_due`."""

    def __init__(self, delay_s: float, on_due: Callable[[list[Call]], None]) -> None:
        self._delay_s, self._on_due = delay_s, on_due
        self._calls: list[Call] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, *calls: Call) -> None:
        self._calls += calls
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._delay_s, self._due)

    def drop_renewals(self, ended: Collection[Argument]) -> None:
        for call in self._calls:
            call.drop_renewals(ended)

    def take(self) -> list[Call]:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        calls, self._calls = self._calls, []
        return calls

    def _due(self) -> None:
        if calls := [call for call in self.take() if not call.answered]:
            self._on_due(calls)


class RedisConnection(asyncio.Protocol):
    """An open connection that passes on each reply the moment it is read.

    First, redis-py connects (addresses, TLS, authentication, database). Then RedisConnection takes over the
    transport, because a coroutine that waits for each reply costs a turn of the event loop and about 60 µs a
    message (docs/decisions.md). The callback `on_reply` gets each reply in order, errors as
    `hiredis.ReplyError`; the callback `on_lost` is called once if the connection ends other than by
    `close`."""

    def __init__(
        self,
        connection: Connection,
        on_reply: Callable[[Any], None],
        on_lost: Callable[[str], None],
        *,
        text: bool,
    ) -> None:
        self._connection = connection
        self._on_reply = on_reply
        self._on_lost = on_lost
        self._reader = hiredis.Reader(encoding="utf-8", errors="replace") if text else hiredis.Reader()
        self._closed = False
        self.made_s = asyncio.get_running_loop().time()
        self._transport = cast(asyncio.Transport, connection._writer.transport)  # type: ignore[union-attr]
        self._transport.set_protocol(self)

    @classmethod
    async def connect(
        cls,
        pool: ConnectionPool,
        on_reply: Callable[[Any], None],
        on_lost: Callable[[str], None],
        *,
        text: bool = True,
    ) -> "RedisConnection":
        """Open a connection of `pool`, whose protocol must be RESP2. Replies are str if `text` is set, else
        bytes.

        Raises:
            one of DOWN, if the connection cannot be made.
        """
        connection: Connection = pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
            raise_if_cancelled()
        except BaseException:
            with contextlib.suppress(*DOWN):
                await connection.disconnect(nowait=True)
            raise
        return cls(connection, on_reply, on_lost, text=text)

    @property
    def server(self) -> tuple[str, int]:
        """Host and port of the server; the host of a Unix socket is ''."""
        return getattr(self._connection, "host", ""), int(getattr(self._connection, "port", 0))

    def write(self, message: bytes) -> None:
        self._transport.write(message)

    async def close(self) -> None:
        """End the connection at once; no callback follows."""
        self._closed = True
        self._transport.abort()
        with contextlib.suppress(*DOWN):
            await self._connection.disconnect(nowait=True)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while not self._closed:
            try:
                reply = self._reader.gets()
            except hiredis.ProtocolError as fault:
                self._lose(f"not a Redis reply: {fault}")
                return
            if reply is False:  # incomplete: RESP2 has no booleans
                return
            self._on_reply(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(str(exc) if exc else "the connection was closed")

    def _lose(self, why: str) -> None:
        if not self._closed:
            self._closed = True
            self._transport.abort()
            self._on_lost(why)


class PauseDetector:
    """Measures for how long this process was paused: its event loop was late (SIGSTOP, a frozen machine, a
    long callback), another process had the core (the kernel's run-queue delay), or the hypervisor ran another
    machine (steal). A late tick shows the first kind of pause. The kernel reports the other two kinds; it is
    asked only while Redis is suspected.

    `clock` returns monotonic seconds, `delayed` the total seconds for which the kernel kept this thread
    waiting. Call `tick` every `TICK_S`, the other methods at any time. One event loop."""

    def __init__(
        self, clock: Callable[[], float] | None = None, delayed: Callable[[], float] | None = None
    ) -> None:
        self._clock = clock or asyncio.get_running_loop().time
        self._delayed = delayed or KernelDelay().read
        self._last_tick_s = math.inf
        self._resumed_s = -math.inf
        self._total_s = 0.0
        self._delayed_s: float | None = None  # kernel's total at the last tick; None: not read

    @property
    def paused_s(self) -> float:
        """Total seconds of all pauses so far."""
        return self.paused_until(self._clock())

    def paused_until(self, now_s: float) -> float:
        """The total seconds of all pauses when the clock reads `now_s`."""
        late_s = now_s - self._last_tick_s - TICK_S
        return self._total_s + late_s if late_s > 0.0 else self._total_s

    @property
    def resumed_recently(self) -> bool:
        """Whether a long pause ended less than a second ago."""
        now_s = self._clock()
        if now_s - self._last_tick_s > TICK_S + LONG_PAUSE_S:
            self._resumed_s = now_s
        return now_s - self._resumed_s < _RECENT_S

    async def wait_for_backlog(self) -> None:
        """After a long pause, let the event loop first read its input: streams may have begun and ended."""
        if self.resumed_recently:
            await asyncio.sleep(_BACKLOG_S)

    def tick(self, *, closely: bool = False) -> float:
        """Record a tick. Returns the awake seconds since the last tick, if `closely` also by the kernel."""
        now_s = self._clock()
        elapsed_s = max(now_s - self._last_tick_s, 0.0)
        lost_s = max(elapsed_s - TICK_S, 0.0)
        if lost_s > LONG_PAUSE_S:
            self._resumed_s = now_s
        before_s, self._delayed_s = self._delayed_s, self._delayed() if closely else None
        if before_s is not None and self._delayed_s is not None:
            lost_s = min(max(lost_s, self._delayed_s - before_s), elapsed_s)
        self._total_s += lost_s
        self._last_tick_s = now_s
        return elapsed_s - lost_s

    def mark_resumed(self) -> None:
        """Record a long pause that the caller has found in another way."""
        self._resumed_s = self._clock()


class KernelDelay:
    """Reads how long this thread was ready to run but did not run, by Linux's counters; else 0."""

    def __init__(self, schedstat: str = "/proc/thread-self/schedstat", stat: str = "/proc/stat") -> None:
        self._schedstat, self._stat = schedstat, stat

    def read(self) -> float:
        """Total seconds: the run-queue delay of the calling thread, plus the mean steal per core."""
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
    """Seconds waited for a core: the second field of `schedstat`, in ns (proc_pid_schedstat(5))."""
    return int(schedstat.split()[1]) / 1e9


def _steal_s(stat: str) -> float:
    """Mean steal per core, the 8th figure of line `cpu` in `stat`, in ticks of all cores (proc_stat(5))."""
    return int(stat.split("\n", 1)[0].split()[8]) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)


class Health(enum.Enum):
    """SUSPECT: probe Redis. STUCK: replace the connection. UNAVAILABLE: fail over."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    STUCK = "stuck"
    UNAVAILABLE = "unavailable"


def smoothed(mean: float, figure: float, alpha: float) -> float:
    """An exponential moving average; 0 below 1e-9, as in lua/lib/pool.lua, so that quotients stay finite."""
    found = alpha * figure + (1.0 - alpha) * mean
    return 0.0 if found < _SMALLEST else found


class RetransmissionTimeout:
    """The retransmission timeout of RFC 6298 from observed reply times, between `least_s` and `most_s`."""

    def __init__(self, least_s: float, most_s: float) -> None:
        self._least_s, self._most_s = least_s, most_s
        self._mean_s: float | None = None  # SRTT
        self._deviation_s = 0.0  # RTTVAR

    def record(self, seconds: float) -> None:
        if self._mean_s is None:
            self._mean_s, self._deviation_s = seconds, seconds / 2
            return
        self._deviation_s = smoothed(self._deviation_s, abs(seconds - self._mean_s), _BETA)
        self._mean_s = smoothed(self._mean_s, seconds, _ALPHA)

    @property
    def timeout_s(self) -> float:
        """How long a reply may take before Redis is suspected."""
        found_s = 0.0 if self._mean_s is None else self._mean_s + _K * self._deviation_s
        return min(max(found_s, self._least_s), self._most_s)


class FailureDetector:
    """Judges whether a silent Redis is lost. Call `observe` at each tick; observation restarts once `observe`
    has returned STUCK or UNAVAILABLE. The arguments `floor_s` and `ceiling_s` limit `unavailable_after_s`."""

    def __init__(self, floor_s: float, ceiling_s: float) -> None:
        self._floor_s, self._ceiling_s = floor_s, max(floor_s, ceiling_s)
        self._replies = RetransmissionTimeout(_SUSPECTED * floor_s, self._ceiling_s)
        self.record_reply_time = self._replies.record
        self._repeats = 0  # number of failovers in a row
        self._recovered_s = -math.inf
        self._begin()

    def _begin(self) -> None:
        self._silent_s = 0.0
        self._unanswered_s: float | None = None  # awake seconds since the first probe, if any
        self._answered_s: float | None = None  # awake seconds since the first answered probe
        self._due = False  # whether the last `observe` found the silence too long; the next acts

    @property
    def suspected(self) -> bool:
        return self._unanswered_s is not None

    @property
    def heartbeats_to_recover(self) -> int:
        """The number of heartbeats in a row that Redis must answer before this replica recovers."""
        return 1 << max(self._repeats, 1)

    def unavailable_after_s(self, now_s: float) -> float:
        """The time without an answered probe after which Redis is UNAVAILABLE."""
        repeats = self._repeats if now_s - self._recovered_s < CALM_S else 0
        return min(max(self._floor_s, self._replies.timeout_s) * 2.0**repeats, self._ceiling_s)

    def record_failover(self, now_s: float) -> None:
        again = now_s - self._recovered_s < CALM_S
        self._repeats = min(self._repeats + 1, _MAX_REPEATS) if again else 1

    def record_recovery(self, now_s: float) -> None:
        self._recovered_s = now_s

    def observe(
        self, now_s: float, awake_s: float, *, waiting: bool, received: bool, answered: bool
    ) -> Health:
        """Judge the time since the last call: this replica was awake for `awake_s`; something is `waiting`
        for Redis; a reply was `received` on the connection; a probe was `answered`."""
        if received or not waiting:
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
        return self._suspicion(now_s)

    def _suspicion(self, now_s: float) -> Health:
        assert self._unanswered_s is not None
        if self._answered_s is not None:
            stuck_s = max(_STUCK * self._floor_s, self._replies.timeout_s)
            health, up = Health.STUCK, self._answered_s >= stuck_s
        else:
            health, up = Health.UNAVAILABLE, self._unanswered_s >= self.unavailable_after_s(now_s)
        due, self._due = self._due, up
        if not (due and up):
            return Health.SUSPECT
        self._begin()
        return health


Connect = Callable[[Callable[[Any], None], Callable[[str], None]], Awaitable[RedisConnection]]


class Watched(Protocol):
    """The client whose connection ConnectionMonitor watches. Times are read from the event loop's clock."""

    @property
    def last_reply_s(self) -> float:
        """The time of the last reply."""
        ...

    @property
    def waiting(self) -> bool:
        """Whether any call waits for a reply or a connection."""
        ...

    def on_stuck(self) -> None:
        """Called when this connection is silent while Redis answers probes on other connections."""

    def on_silent(self) -> None:
        """Called when Redis is silent on every connection."""


class ConnectionMonitor:
    """Ticks both detectors, and probes the server on new connections, made by `connect`. One event loop."""

    def __init__(
        self,
        watched: Watched,
        failure_detector: FailureDetector,
        pause_detector: PauseDetector,
        connect: Connect,
        on_tick: Callable[[], None],
    ) -> None:
        self._watched, self._connect, self._on_tick = watched, connect, on_tick
        self._failure_detector, self._pause_detector = failure_detector, pause_detector
        self._loop = asyncio.get_running_loop()
        self._looked_s = self._loop.time()
        self._probes: deque[asyncio.Task[None]] = deque()
        self._probed_s = 0.0
        self._answered = False
        self.answered_s = 0.0  # when Redis last answered a probe

    async def run(self) -> None:
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
        received, self._looked_s = watched.last_reply_s > self._looked_s, now_s
        answered, self._answered = self._answered, False
        health = self._failure_detector.observe(
            now_s, awake_s, waiting=watched.waiting, received=received, answered=answered
        )
        if health is not Health.SUSPECT:
            self._stop_probes()
        elif now_s - self._probed_s >= _PROBE_PAUSE_S:
            self._probed_s = now_s
            if len(self._probes) == _MAX_PROBES:
                self._probes.popleft().cancel()
            self._probes.append(asyncio.create_task(self._probe(), name="redis-probe"))
        if health is Health.STUCK:
            watched.on_stuck()
        elif health is Health.UNAVAILABLE:
            watched.on_silent()

    async def _probe(self) -> None:
        """Send PING on a new connection; an error reply counts as an answer."""
        done = asyncio.Event()

        def take(reply: Any) -> None:
            self._answered, self.answered_s = True, self._loop.time()
            done.set()

        with contextlib.suppress(*DOWN):
            async with asyncio.timeout(_PROBE_PAUSE_S * _MAX_PROBES):
                connection = await self._connect(take, lambda why: done.set())
                try:
                    ping: tuple[Any, ...] = ("PING",)
                    connection.write(hiredis.pack_command(ping))
                    await done.wait()
                finally:
                    await connection.close()
        raise_if_cancelled()

    def _stop_probes(self) -> None:
        self._answered = False
        while self._probes:
            self._probes.popleft().cancel()
