"""Replicas on one pool, assembled for tests: store, gate and, if wanted, membership and wake-ups."""

import asyncio
import contextlib
import itertools
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx
from admission_bench import admission_over
from choosers import chooser_of
from decision_ledger import Ledger
from members import member_of
from redis import exceptions as redis_errors
from redis.asyncio import Redis

from picker_fleet.domain.bands import NAMED, Band, Bands
from picker_fleet.domain.config import parse
from picker_fleet.domain.request import Completion, Endpoint, InferenceRequest, Outcome, Placement, Workload
from picker_fleet.endpoints.snapshot import Snapshot, SnapshotCell
from picker_fleet.fleet.heartbeat import Membership
from picker_fleet.state.accounting_token import Keyring
from picker_fleet.state.connection import FailureDetector, PauseDetector
from picker_fleet.state.keys import Keys
from picker_fleet.state.pool_state import PoolState
from picker_fleet.state.primary import client
from picker_fleet.state.replies import (
    AnyVerdict,
    Dispatched,
    Event,
    HeartbeatReply,
    Notification,
    SettleReply,
    SweepReply,
    name_of,
)
from picker_fleet.state.schema import COUNTERS
from picker_fleet.state.store import Store
from picker_fleet.state.subscriptions import listen
from picker_fleet.telemetry.metrics import Metrics
from picker_tools.audit.auditor import Report, audit
from picker_tools.audit.log import Entry

DEADLINE_S = 30.0  # tests fail if they wait longer than this for an event
SILENCE_S = 5.0
SETTINGS: Mapping[str, Any] = {
    "upper_per": 2, "lower_per": 2, "total_capacity": 1000, "flow_capacity": 1000, "lease_ms": 60_000,
    "silence_ms": 60_000, "fallbacks": 2, "log_max": 100_000, "window_ms": 60_000, "ema_alpha": 0.2,
    "band_policy": "strict", "band_weights": [70, 20, 10], "fairness": "weighted-fair", "ordering": "fcfs",
    "overload": "preempt", "guard_share": 0.1, "starvation_ms": 0, "weights": {}, "paused": 0,
    "wait_signal": "request", "wait_weight": 0.4, "criticality_weight": 0.4, "rate_weight": 0.2,
    "wait_cap_ms": 60_000, "rate_cap": 100, "default_answer": 256, "answer_alpha": 0.2, "live_weight": 0.5,
    "eject_ms": 1000, "eject_most_ms": 8000, "eject_percent": 50,
}  # fmt: skip
_COUNTED = itertools.count(1)

SETTLED, UNKNOWN_END = SettleReply("settled", "llama"), SettleReply("unknown")


def config(watermark: float, heartbeat: str = "50ms", **sections: Any) -> dict[str, Any]:
    """Configuration of replicas that join a pool, with a decision log and a watermark per endpoint."""
    return {
        "leases": {"heartbeat": heartbeat},
        "decision_log": {"enabled": True},
        "request_queue_controller": {"watermark_per_backend": watermark},
        **sections,
    }


def settings_with(changes: Mapping[str, Any]) -> dict[str, Any]:
    """SETTINGS updated with `changes`, where `lower_per` is `upper_per` unless given."""
    bounds = {"lower_per": changes["upper_per"]} if "upper_per" in changes else {}
    return {**SETTINGS, **bounds, **changes}


def addresses(count: int) -> tuple[str, ...]:
    return tuple(f"10.0.0.{i}:8000" for i in range(1, count + 1))


def ask(
    request_id: str, *, band: Band | int = Band.DEFAULT, priority: int | None = None, workload: str = "",
    criticality: int = 3, **fields: Any,
) -> InferenceRequest:  # fmt: skip
    """A request for the model llama; `band`: a band or a named band's number; `priority` overrides both."""
    band = NAMED[band] if isinstance(band, int) else band
    if priority is not None:
        band = Bands().of(priority)
    who = Workload(workload, criticality)
    usual = InferenceRequest(request_id, "llama", "llama", False, "flow", band, 1.0, who, 1.0, 60.0, None)
    return usual._replace(**fields)


def ended(request_id: str, outcome: Outcome = Outcome.COMPLETED) -> Completion:
    return Completion(request_id, outcome, 200, None, 1, 1, 0.1, 0.1)


def doubles(packed: str) -> list[float]:
    """The numbers that a script packed with Lua's `struct`, decoded by a client with `surrogateescape`."""
    raw = packed.encode("utf-8", "surrogateescape")
    return list(struct.unpack(f"<{len(raw) // 8}d", raw))


def counters(packed: str) -> dict[str, float]:
    """The pool's counters by name."""
    return dict(zip(COUNTERS, doubles(packed), strict=True))


async def until(condition: Callable[[], Any], within_s: float = DEADLINE_S) -> Any:
    """Poll `condition`, which may be asynchronous, for its first true value; fail at the deadline.

    Connection errors and timeouts of a busy machine count as false.
    """
    loop = asyncio.get_running_loop()
    end, fault = loop.time() + within_s, None
    while loop.time() < end:
        try:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
        except (redis_errors.ConnectionError, redis_errors.TimeoutError, httpx.TransportError) as error:
            found, fault = None, error
        if found:
            return found
        await asyncio.sleep(0.005)
    raise AssertionError(f"not true within {within_s} s: {condition}") from fault


async def until_is(call: Callable[[], Awaitable[Any]], wanted: Any) -> None:
    """Wait until the function `call` returns `wanted`."""

    async def is_wanted() -> bool:
        return await call() == wanted

    await until(is_wanted)


async def in_turn(call: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    """Make `call` in a task, so that the call shares a message with other calls of the same loop turn."""
    return await call(*args)


class PatientPauseDetector(PauseDetector):
    """A detector that reports no pause, so the store accepts replies that a busy machine reads late."""

    def paused_until(self, now_s: float) -> float:
        return 0.0


class Replica:
    """A replica without servers. `notifications` lists the notifications from its store, `lost` the reasons
    for which its store declared Redis lost."""

    def __init__(self, url: str, pool: str, name: str, *, silence_s: float = SILENCE_S) -> None:
        self.name = name
        self.notifications: list[tuple[str, str]] = []
        self._by_hand: set[str] = set()  # requests sent past the gate by the test
        self.lost: list[str] = []
        self.metrics = Metrics()
        self.cell = SnapshotCell()
        self.keys = Keyring()  # signs accounting tokens
        self.membership: Membership | None = None
        self.store = Store(
            url, pool=pool, replica=name, failure_detector=FailureDetector(silence_s, silence_s),
            pause_detector=PatientPauseDetector() if silence_s >= SILENCE_S else PauseDetector(),
            connect_timeout_s=max(1.0, silence_s),  # a busy machine connects slowly
            metrics=self.metrics,
        )  # fmt: skip
        self.gate = admission_over(
            self.store, self.metrics, self.cell, replica=name, keys=self.keys, heartbeat_now=self._beat_now
        )
        self.store.on_event = self._on_event

    def _beat_now(self, **how: bool) -> None:
        if self.membership is not None:
            self.membership.heartbeat_now(**how)

    def fails_over(self) -> None:
        """Let the gate react to the store's events. A gate without this call never fails over."""
        self.store.on_event = self.gate.failover.on_event

    def route(self, subset: tuple[str, ...] | None, **first: str) -> tuple[str, ...]:
        """The endpoint and the two fallbacks of a request that needs no admission."""
        return chooser_of(self.cell).route(subset, **first).endpoints

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Notification):
            self.notified(event)
        elif isinstance(event, Dispatched):
            self.metrics.dequeued(event.attempts, event.successes)
        else:
            self.lost.append(event.cause)

    def notified(self, notification: Notification) -> None:
        self.notifications.append((name_of(notification.verdict), notification.request_id))
        if notification.request_id not in self._by_hand:
            self.gate.queue.notified(notification)

    async def beat(self, silence_s: float = 60.0) -> HeartbeatReply:
        return await self.store.heartbeat('{"host":"test"}', silence_s)

    async def publish(self, *endpoints: Endpoint | str, **settings: Any) -> None:
        """Publish `endpoints`, and SETTINGS updated with `settings`."""
        listed = [Endpoint(each) if isinstance(each, str) else each for each in endpoints]
        version = f"v{next(_COUNTED)}"
        await self.store.publish(
            settings_with(settings), listed, config_version="test", endpoints_version=version
        )
        self.cell.publish(Snapshot(version, tuple(listed)))

    async def admit(
        self, request_id: str, attempt: int | str = 1, age_s: float = 0.0, **fields: Any
    ) -> AnyVerdict:
        self._by_hand.add(request_id)
        candidates, prefill = fields.pop("candidates", None), fields.pop("prefill", "")
        request = ask(request_id, **fields)
        candidates = candidates or ("*" if request.subset is None else ",".join(request.subset))
        return await self.store.admit(request, str(attempt), candidates, age_s, prefill)

    async def place(
        self, request_id: str, attempt: int = 1, candidates: str = "*", prefill: str = ""
    ) -> AnyVerdict:
        return await self.store.place(request_id, attempt, candidates, prefill)

    async def settle(self, *request_ids: str) -> list[SettleReply]:
        return await asyncio.gather(*(self.store.settle(each, Outcome.COMPLETED) for each in request_ids))

    async def sweep(
        self, *, grace_s: float = 60.0, idle_s: float = 300.0, unseen_s: float = 1e6
    ) -> SweepReply:
        """Sweep now, even if the last sweep was less than an interval ago."""
        return await self.store.sweep(interval_s=0, grace_s=grace_s, idle_s=idle_s, unseen_s=unseen_s)


class Fleet:
    """The replicas of one pool, and queries to its state in Redis; iterates over itself, then replicas."""

    def __init__(self, redis: Redis, pool: str, replicas: tuple[Replica, ...]) -> None:
        self.redis = redis
        self.pool = pool
        self.keys = Keys.of(pool)
        self.replicas = replicas

    def __iter__(self) -> Iterator[Any]:
        return iter((self, *self.replicas))

    async def log(self, last: int | None = None) -> list[Entry]:
        """The decision log, oldest entry first: all entries, or the last `last` entries."""
        found = await self.redis.xrevrange(self.keys.log, count=last)
        return [Entry.parse(fields) for _, fields in reversed(found)]

    async def ledger(self) -> Ledger:
        return Ledger.replay(await self.log())

    async def audit(self) -> Report:
        return audit([fields for _, fields in await self.redis.xrange(self.keys.log)])

    async def state(self) -> PoolState:
        return await self.replicas[0].store.state(60)

    async def until_queued(self, count: int) -> None:
        """Wait until `count` requests are queued."""
        await until_is(self.queued, count)

    async def queued(self) -> int:
        return (await self.state()).queued

    async def until_logged(self, event: str, request_id: str) -> None:
        """Wait until the decision log has an entry `event` for the request."""

        async def is_logged() -> bool:
            return any((entry.event, entry.request) == (event, request_id) for entry in await self.log())

        await until(is_logged)

    async def counts(self) -> tuple[float, int, list[int]]:
        """The stock, the queue length, and the requests in flight at each endpoint, in order of address."""
        state = await self.state()
        return state.stock, state.queued, [load for _, load in sorted(state.in_flight.items())]

    async def at_rest(self) -> bool:
        """Whether every count of requests is exactly 0 (G6)."""
        state = await self.state()
        counts = (state.stock, state.queued, state.leases, state.active_flows)
        waiting = [await self.has(name) for name in ("requests", "timers")]
        loads = (*state.in_flight.values(), *state.prefill_in_flight.values())
        return not any(counts) and not any(waiting) and not any(loads)

    async def ends(self, replica: Replica, *request_ids: str) -> None:
        """Settle the requests through `replica`, and wait until the fleet is at rest."""
        for each in request_ids:
            replica.gate.settle(ended(each))
        await until(self.at_rest)

    async def has(self, key: str) -> bool:
        """Whether the pool has the key named `key`."""
        return bool(await self.redis.exists(self.keys.prefix + key))

    async def now_ms(self) -> float:
        """The Redis server's clock in milliseconds."""
        seconds, micros = await self.redis.time()
        return seconds * 1000 + micros / 1000

    async def after(self, wait_ms: float) -> None:
        """Wait until the pool's clock has advanced by `wait_ms`. The pool's clock stands still while no
        script runs for a second (lua/lib/pool.lua); on a busy machine the server's clock would be ahead."""
        end_us = (await self.state()).now_us + wait_ms * 1000

        async def has_passed() -> bool:
            return (await self.state()).now_us > end_us

        await until(has_passed)

    async def dump(self) -> dict[str, Any]:
        """Every key of the pool and its value, without timestamps and without counters of log entries."""
        found: dict[str, Any] = {}
        for key in await self.redis.keys(self.keys.prefix + "*"):
            name, kind = key.removeprefix(self.keys.prefix), await self.redis.type(key)
            if kind == "hash":
                found[name] = await self.redis.hgetall(key)
            elif kind == "zset":
                found[name] = dict(map(tuple, await self.redis.zrange(key, 0, -1, withscores=True)))
        pool = found.get("pool", {})
        for mark in ("swept_ms", "clock"):
            pool.pop(mark, None)
        if "counters" in pool:
            pool["counters"] = counters(pool["counters"])
            for mark in ("seq", "log_seq", "moved"):  # `moved` also counts saves of the clock
                del pool["counters"][mark]
        for leases in ("inflight", "replicas"):
            if leases in found:
                found[leases] = sorted(found[leases])
        return found


OpenFleet = Callable[..., contextlib.AbstractAsyncContextManager[Fleet]]


@contextlib.asynccontextmanager
async def running(
    url: str,
    pool: str,
    *names: str,
    endpoints: int | Sequence[Endpoint] = 1,
    listening: bool = False,
    joined: Mapping[str, Any] | None = None,
    silence_s: float = SILENCE_S,
    through: Mapping[str, str] | None = None,
    full: bool = False,
    checked: bool = True,
    **settings: Any,
) -> AsyncIterator[Fleet]:
    """Run replicas called `names` on a pool with the `endpoints`, or as many as `endpoints` says.

    If `joined` is a configuration, each replica runs a membership, which publishes this configuration.
    Without `joined` nothing runs in the background: at the start the first replica publishes SETTINGS updated
    with `settings`, and each replica sends a heartbeat. With `listening`, all replicas receive wake-ups.
    `through` gives replicas another Redis URL by name; only these replicas use `silence_s`; the others stay
    patient on a busy machine. If `full`, the last replica has placed a request, `runs`, which fills the only
    place. If `checked`, the decision log is audited at the end: each guarantee (G1 to G6) must hold.
    """
    if full:
        settings = {"upper_per": 1, **settings}
    listed = tuple(map(Endpoint, addresses(endpoints))) if isinstance(endpoints, int) else endpoints
    through = through or {}
    patience_s = dict.fromkeys(through, silence_s)
    timeouts = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), DEADLINE_S)
    reading = {"decode_responses": True, "encoding_errors": "surrogateescape"}
    async with (
        client(url, Keys.of(pool).pool, **timeouts, **reading) as redis,
        asyncio.TaskGroup() as tasks,
    ):
        replicas = tuple(
            Replica(through.get(name, url), pool, name, silence_s=patience_s.get(name, SILENCE_S))
            for name in names
        )
        fleet = Fleet(redis, pool, replicas)
        background = [tasks.create_task(replica.store.run()) for replica in replicas]
        try:
            if joined is None:
                await replicas[0].publish(*listed, **settings)
                for replica in replicas:
                    await replica.beat()
            if listening:
                # A long `check_s` keeps silent connections open on a busy machine. If such a connection
                # closed, a test without heartbeats would miss wake-ups.
                background += [
                    tasks.create_task(
                        listen(url, fleet.keys.wake(each.name), each.notified, check_s=DEADLINE_S)
                    )
                    for each in replicas
                ]
                await until(lambda: _listen(fleet))
            if joined is not None:
                members = [_member(replica, joined, listed) for replica in replicas]
                background += [tasks.create_task(member.run()) for member in members]
                async with asyncio.timeout(DEADLINE_S):
                    await asyncio.gather(*(member.known() for member in members))
            if full:
                assert name_of(await replicas[-1].admit("runs")) == "placed"
            yield fleet
            if checked:
                report = await fleet.audit()
                assert report.violations == 0, report.findings
        finally:
            for task in background:
                task.cancel()


def _member(replica: Replica, joined: Mapping[str, Any], endpoints: Sequence[Endpoint]) -> Membership:
    member = member_of(replica.store, replica.gate.queue, parse(joined), replica.cell, replica.metrics)
    member.discovered(endpoints)
    replica.membership = member
    return member


def asked(replica: Replica, request_id: str, **fields: Any) -> "asyncio.Task[Placement]":
    return asyncio.create_task(replica.gate.admit(ask(request_id, **fields), stream_owned=False))


async def waiting(it: Fleet, replica: Replica, request_id: str, **fields: Any) -> "asyncio.Task[Placement]":
    """Send a request, and wait until the request is queued."""
    task = asked(replica, request_id, **fields)
    await it.until_logged("queued", request_id)
    return task


async def _listen(fleet: Fleet) -> bool:
    channels = [fleet.keys.wake(replica.name) for replica in fleet.replicas]
    return all(count for _, count in await fleet.redis.pubsub_numsub(*channels))
