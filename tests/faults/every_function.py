"""One replica calls every Redis function and command, under every queue policy."""

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

from script_fleet import Fleet, ask, until

from picker_fleet.domain.bands import Band
from picker_fleet.domain.request import Fault, Outcome
from picker_fleet.state.pool_state import FoundLimit
from picker_fleet.state.reads import RankRange, Reads
from picker_fleet.state.store import Store

POLICIES: tuple[Mapping[str, Any], ...] = (
    {},
    {"band_policy": "weighted", "fairness": "round-robin", "ordering": "edf"},
    {"ordering": "workload-aware", "fairness": "none", "wait_signal": "workload_average"},
    {"ordering": "workload-aware", "starvation_ms": 1, "total_capacity": 4, "flow_capacity": 4},
)
_NUMBERS = itertools.count(1)


async def use_everything(fleet: Fleet, store: Store) -> None:
    """Make every call of `store`, the store of the first of two replicas, until no request is counted."""
    me, other = fleet.replicas
    assert store is me.store
    for policy in POLICIES:
        await me.publish("10.0.0.1:8000", "10.0.0.2:8000", upper_per=1, **policy)
        await _requests(fleet)
    assert await store.mark_endpoint("10.0.0.1:8000", "down", True) == "marked"
    assert await store.mark_endpoint("10.0.0.1:8000", "down", False) == "marked"
    assert not await store.publish_changes("another", "next", {})
    assert await store.set_live_config({"paused": 1}, {"paused": True})
    await store.set_live_config({"paused": None}, {"paused": None})
    await store.live_config()
    await store.set_limits({"10.0.0.1:8000": FoundLimit(4, "test", 0)})
    await store.found_limits()
    await store.endpoints()
    await store.notifications()
    await store.state(60)
    await store.evict("nobody")
    await asyncio.gather(*(each.store.queue_snapshots.read(10) for each in (me, other)))  # one reader waits
    await _many_notifications(fleet)
    await _flows_without_end(fleet)
    await until(fleet.at_rest)
    await store.leave()
    await other.sweep(idle_s=0)


async def _many_notifications(fleet: Fleet) -> None:
    """Store more notifications than one heartbeat returns, and send heartbeats until all are read."""
    me, _ = fleet.replicas
    notifications = {f"gone-{n}": "evicted" for n in range(300)}
    await fleet.redis.hset(fleet.keys.inbox(me.name), mapping=notifications)
    while await fleet.redis.hlen(fleet.keys.inbox(me.name)):
        await me.beat()


async def _flows_without_end(fleet: Fleet) -> None:
    """Sweep a pool with more idle flows than a pool may keep, while a request is in flight."""
    me, _ = fleet.replicas
    name = f"r{next(_NUMBERS)}"
    await me.admit(name)
    tags = {f"idle-{n}": 1e6 + n for n in range(10_001)}
    await fleet.redis.zadd(fleet.keys.prefix + "finish:1", tags)
    await me.sweep()
    await me.settle(name)


async def _reads(reads: Reads, request_id: str) -> None:
    """Read every list of the admin API, also with page cursors that name an ended flow or request."""
    await reads.flow_queues(10)
    await reads.flow_queues(10, behind=("1", "gone"))
    await reads.flow_queue("low")
    await reads.queued([RankRange(1, "flow", 0, 9)])
    await reads.in_flight(10)
    await reads.in_flight(10, ("1", "gone"))
    await reads.request(request_id)
    await reads.workloads(10)
    await reads.workload("w1")
    await reads.replicas()
    await reads.decisions(10)


async def _requests(fleet: Fleet) -> None:
    """Run requests of every kind to every outcome, on two endpoints with room for one request each."""
    me, other = fleet.replicas
    names = [f"r{next(_NUMBERS)}" for _ in range(9)]
    kinds: tuple[dict[str, Any], ...] = (
        {"workload": "w1", "limit": 1}, {"limit": 1}, {"workload": "w2", "flow": "two"}, {"learn": True},
        {"band": Band.SHEDDABLE, "flow": "low"}, {"band": Band.CRITICAL, "flow": "high"}, {"limit": 1},
        {"band": Band.CRITICAL, "workload": "w1"}, {"band": Band.SHEDDABLE, "flow": "low"},
    )  # fmt: skip
    for name, kind in zip(names, kinds, strict=True):
        await me.admit(name, **kind)
    for name in names:
        await _reads(me.store.reads, name)
    theirs = f"r{next(_NUMBERS)}"
    await other.admit(theirs, band=Band.CRITICAL, flow="theirs")
    await me.store.renew(names[0], 1, "10.0.0.2:8000", "")
    await me.store.renew("lost", None, "", "f\t1\t1\t1\tw1\t3\tllama\t10.0.0.1:8000\t0")
    await me.store.settle("lost", Outcome.COMPLETED)
    await me.store.tombstone("over")
    await me.store.prefilled("over")
    for name, flow in ((names[0], ""), ("over", "f"), ("gone", "g")):
        for why in ("500", "full", "connect"):
            await me.store.report_fault(Fault(name, "10.0.0.1:8000", why, ""), flow)
    for what in ("ejected", "stuck"):
        await me.store.mark_endpoint("10.0.0.1:8000", what, True)
    await me.store.mark_endpoint("10.0.0.1:8000", "down", False)
    await me.store.return_grant(names[5])
    await me.store.cancel(names[4], 1, "cancelled")
    # Redis loses the set of preemption candidates.
    await fleet.redis.delete(fleet.keys.prefix + "candidates:1")
    for name in names:
        await me.beat()
        await me.store.settle(name, Outcome.COMPLETED, 2.0, 7)
        for granted in await me.store.notifications():
            await me.place(granted.request_id)
        await me.sweep()
        await other.beat()
    await other.settle(theirs)
    await me.store.admit(ask(names[0], ttl_s=0.0), "1", "*")
