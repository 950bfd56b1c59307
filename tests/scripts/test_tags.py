"""Weights, costs and tags stay within floating-point precision; entries without a request are dropped."""

import math
from collections import Counter

import pytest
from metrics_page import samples
from script_fleet import SETTLED, Fleet, OpenFleet, Replica, doubles, until

from picker_fleet.domain.bands import Band
from picker_fleet.domain.config import parse
from picker_fleet.domain.errors import ConfigError
from picker_fleet.domain.request import Outcome
from picker_fleet.fleet import live_config
from picker_fleet.state.replies import name_of

HUGE = 1e308


async def serve(it: Fleet, turns: int, swept: bool = False) -> list[str]:
    """Place and end `turns` requests in the order of their grants; return the requests' ids."""
    (a,) = it.replicas
    served = []
    for _ in range(turns):
        if swept:
            await a.sweep()
        served.append(a.notifications[-1][1])
        await a.place(served[-1])
        await a.settle(served[-1])
    return served


async def tags_are_finite(it: Fleet) -> bool:
    kept = [
        tag
        for kind in ("flows:1", "finish:1")
        for _, tag in await it.redis.zrange(it.keys.prefix + kind, 0, -1, withscores=True)
    ]
    return all(map(math.isfinite, [*kept, *doubles(await it.redis.hget(it.keys.pool, "counters"))]))


@pytest.mark.parametrize("weight", [1e-308, 1e-12, HUGE])
async def test_tags_stay_finite_and_flows_take_turns_beside_a_flow_with_a_weight_out_of_bounds(
    fleet: OpenFleet, weight: float
) -> None:
    async with fleet("a", weights={"bad": weight}, checked=False, full=True) as (it, a):
        for number in range(2):
            await a.admit(f"bad {number}", flow="bad")
            await a.admit(f"good {number}", flow="good")
        await a.settle("runs")
        served = await serve(it, 4, swept=True)
        assert [name for name in served if name.startswith("good")] == ["good 0", "good 1"]
        assert len(served) == 4
        assert await tags_are_finite(it)


async def test_the_sweep_rebases_tags_so_that_heavy_flows_have_their_shares_again(fleet: OpenFleet) -> None:
    async with fleet("a", full=True) as (it, a):
        # The flow of least weight has requests of the highest cost; one of these requests still waits.
        for number in range(3):
            await a.admit(f"light {number}", flow="light", weight=1e-3, cost=1e9)
        await a.settle("runs")
        await serve(it, 1)
        # A turn of the heaviest flow adds 1e-6 to its tag; in floating point 1e12 + 1e-6 is 1e12.
        assert (await it.state()).virtual_times["Default"] == 1e12
        assert 1e12 + 1e-6 == 1e12
        await a.sweep()
        assert (await it.state()).virtual_times["Default"] == 2**20
        for number in range(40):
            await a.admit(f"half {number}", flow="half", weight=5e5)
            await a.admit(f"whole {number}", flow="whole", weight=1e6)
        assert await serve(it, 1) == ["light 1"]
        assert Counter(name.split()[0] for name in await serve(it, 60)) == {"half": 20, "whole": 40}


@pytest.mark.parametrize("weight", [1e-308, 9e-4, 2e6, HUGE, math.inf, math.nan])
def test_weights_out_of_bounds_are_refused_in_the_configuration_and_live(weight: float) -> None:
    trees = [{section: [{"name": "x", "weight": weight}]} for section in ("models", "objectives")]
    for tree in (*trees, {"fair_request_queue": {"band_weights": {"Default": weight}}}):
        with pytest.raises(ConfigError, match="weight"):
            parse(tree)
    with pytest.raises(ConfigError, match="gold: must be a number from"):
        live_config.applied(parse({}), {"weights.gold": weight})


def test_a_watermark_too_large_for_the_stock_is_refused() -> None:
    with pytest.raises(ConfigError, match="watermark_per_backend"):
        parse({"request_queue_controller": {"watermark_per_backend": 1e10}})


STRAYS = [f"stray-{number}" for number in range(40)]
LONG_AGO = 1.0


async def until_notified(replica: Replica, what: str, request: str) -> None:
    """Sweep until the replica has the notification called `what` about the request."""

    async def is_told() -> bool:
        await replica.sweep()
        return (what, request) in replica.notifications

    await until(is_told)


async def life(it: Fleet, name: str) -> None:
    """Assert that a request is placed, a second one waits and expires, a third waits and is served."""
    (a,) = it.replicas
    assert name_of(await a.admit(f"{name} first")) == "placed"
    assert name_of(await a.admit(f"{name} expires", ttl_s=0.05, flow="other")) == "queued"
    assert name_of(await a.admit(f"{name} waits", ttl_s=60)) == "queued"
    await until_notified(a, "expired", f"{name} expires")
    for _ in STRAYS:  # a call drops only a bounded number of stray entries
        await a.sweep()
    await a.settle(f"{name} first")
    await until_notified(a, "placed", f"{name} waits")
    assert name_of(await a.place(f"{name} waits")) == "placed"
    assert await a.settle(f"{name} waits") == [SETTLED]


@pytest.mark.parametrize("kind", [
    "inflight", "timers", "overdue", "flows:1", "throttled:1", "queue:1:flow", "queue:1:gone",
    "growing:1:flow", "static:1:flow", "line:1:flow\x1fw", "candidates:1", "preempted:1", "finish:1",
    "replicas", "tombstones", "load",
])  # fmt: skip
async def test_requests_are_served_and_expire_despite_stray_entries_in_a_sorted_set(
    fleet: OpenFleet, kind: str
) -> None:
    ordering = "fcfs" if kind.startswith("queue") else "workload-aware"
    async with fleet("a", upper_per=1, lower_per=1, ordering=ordering, lease_ms=2000) as (it, a):
        await it.redis.zadd(it.keys.prefix + kind, dict.fromkeys(STRAYS, LONG_AGO))
        if kind == "load":
            await a.publish("10.0.0.1:8000", upper_per=1, lower_per=1, ordering=ordering)
        await life(it, "r")
        # Sweeps drop the stray entries that no dispatch has met.
        await a.sweep()
        await a.sweep()
        if kind in ("inflight", "timers", "overdue", "flows:1", "throttled:1"):
            assert not await it.has(kind)


@pytest.mark.parametrize("kind", ["inflight", "timers", "flows:1", "queue:1:flow", "candidates:1"])
async def test_a_metric_counts_dropped_index_entries_without_request(fleet: OpenFleet, kind: str) -> None:
    async with fleet("a", upper_per=1, lower_per=1, total_capacity=1) as (it, a):
        await a.admit("first")
        await a.admit("waits", band=1)
        await it.redis.zadd(it.keys.prefix + kind, dict.fromkeys(STRAYS[:3], -1.0))
        await a.publish("10.0.0.1:8000", upper_per=1, lower_per=1, total_capacity=1)  # clears cached state
        await a.sweep()
        await a.admit("urgent", band=0)  # this call looks for a preemption candidate
        await a.settle("first")
        await a.place("urgent")
        await a.settle("urgent")
        await a.sweep()
        assert samples(a.metrics)["epp_strays_total",] >= 3


async def test_flows_missing_from_the_preemption_candidates_are_preempted_too(fleet: OpenFleet) -> None:
    # The set of preemption candidates names an empty flow queue, and lacks all flow queues that wait.
    async with fleet("a", total_capacity=3, full=True) as (it, a):
        for name in ("x", "y", "z"):
            await a.admit(name, flow=name, band=Band.SHEDDABLE)
        candidates = it.keys.prefix + "candidates:2"
        await it.redis.delete(candidates)
        await it.redis.zadd(candidates, {"gone": 0})
        assert name_of(await a.admit("c1", flow="c", band=Band.CRITICAL)) == "queued"
        (first,) = [entry.request for entry in await it.log() if entry.event == "preempted"]
        # After a sweep the set of candidates is complete.
        await a.sweep()
        assert set(await it.redis.zrange(candidates, 0, -1)) == {"x", "y", "z"} - {first}


@pytest.mark.parametrize(("kind", "value"), [
    ("inbox:a", "granted"), ("inbox:a", "expired"), ("marks", "x"), ("limits", "x"), ("workloads", "x"),
    ("answers", "short"), ("prompts", "short"), ("requests", "\x02short"), ("requests", "\x63"),
    ("replica_info", "{"), ("orphan_cursors", "7"), ("metrics", "{"),
])  # fmt: skip
async def test_requests_are_served_and_expire_despite_damaged_entries_of_a_hash(
    fleet: OpenFleet, kind: str, value: str
) -> None:
    async with fleet("a", upper_per=1, lower_per=1, lease_ms=2000, default_answer=1) as (it, a):
        # The hash has unreadable entries, some of them under names that the test's requests use.
        used = ["flow", "other", "w", "llama", "flow\x1fllama", "down\x1f10.0.0.1:8000"]
        names = [*STRAYS[:3], *used, "r gone"]
        await it.redis.hset(it.keys.prefix + kind, mapping=dict.fromkeys(names, value))
        await it.redis.zadd(it.keys.prefix + "inflight", {"stray-0": LONG_AGO})
        await a.beat()
        # Requests come and go, also with flow limits, workloads and learned costs.
        await life(it, "r")
        for name in ("s", "t"):
            await a.admit(name, workload="w", limit=1, learn=True)
            await a.store.settle(name, Outcome.COMPLETED, 3, 2, 100)
        assert (await a.beat()).live_replicas == 1
        if kind == "inbox:a":
            assert not await it.has(kind)
        state = await it.state()
        assert (state.stock, state.queued, state.leases) == (0, 0, 0)
