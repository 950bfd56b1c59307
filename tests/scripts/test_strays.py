"""Entries of the shared state without what they stand for: dropped and counted, and in nobody's way."""

import re

import pytest
from metrics_page import page_of
from script_fleet import Fleet, OpenFleet, until

from picker_fleet.request import Outcome

MANY = 40
STRAYS = [f"stray-{number}" for number in range(MANY)]
LONG_AGO = 1.0
FIRST = -1.0


async def life(it: Fleet, name: str) -> None:
    """One request is placed, one waits and expires, one waits and is served when the first has ended."""
    (a,) = it.replicas
    assert (await a.admit(f"{name} first")).what == "placed"
    assert (await a.admit(f"{name} expires", ttl_s=0.05, flow="other")).what == "queued"
    assert (await a.admit(f"{name} waits", ttl_s=60)).what == "queued"

    async def expired() -> bool:
        await a.sweep()
        return ("expired", f"{name} expires") in a.news

    await until(expired)
    for _ in range(MANY):  # a call drops so many at most, and then goes on without
        await a.sweep()
    await a.settle(f"{name} first")

    async def granted() -> bool:
        await a.sweep()
        return ("granted", f"{name} waits") in a.news

    await until(granted)
    assert (await a.place(f"{name} waits")).what == "placed"
    assert await a.settle(f"{name} waits") == ["settled llama"]


@pytest.mark.parametrize("kind", [
    "inflight", "timers", "overdue", "flows:1", "parked:1", "queue:1:flow", "queue:1:gone", "growing:1:flow",
    "static:1:flow", "line:1:flow\x1fw", "victims:1", "preempted:1", "finish:1", "replicas", "buried", "load",
])  # fmt: skip
@pytest.mark.parametrize("ordering", ["fcfs", "workload-aware"])
async def test_given_strays_in_a_sorted_set_then_requests_are_served_expire_and_end(
    fleet: OpenFleet, kind: str, ordering: str
) -> None:
    async with fleet("a", upper_per=1, lower_per=1, ordering=ordering, lease_ms=2000) as it:
        (a,) = it.replicas
        # Given ids, lanes, replicas and endpoints that nothing stands behind
        await it.redis.zadd(it.keys.prefix + kind, dict.fromkeys(STRAYS, LONG_AGO))
        if kind == "load":
            await a.publish("10.0.0.1:8000", upper_per=1, lower_per=1, ordering=ordering)
        # When requests come and go, then they are served as ever
        await life(it, "r")
        # And what nobody comes upon goes by and by
        await a.sweep()
        await a.sweep()
        if kind in ("inflight", "timers", "overdue", "flows:1", "parked:1"):
            assert await it.redis.zcard(it.keys.prefix + kind) == 0


@pytest.mark.parametrize("kind", ["inflight", "timers", "flows:1", "queue:1:flow", "victims:1"])
async def test_strays_are_counted(valkey_fleet: OpenFleet, kind: str) -> None:
    async with valkey_fleet("a", upper_per=1, lower_per=1, total_capacity=1) as it:
        (a,) = it.replicas
        await a.admit("first")
        await a.admit("waits", band=1)
        await it.redis.zadd(it.keys.prefix + kind, dict.fromkeys(STRAYS[:3], FIRST))
        await a.publish("10.0.0.1:8000", upper_per=1, lower_per=1, total_capacity=1)  # nothing is remembered
        await a.sweep()
        await a.admit("urgent", band=0)  # it looks for a victim
        await a.settle("first")
        await a.place("urgent")
        await a.settle("urgent")
        await a.sweep()
        told = re.search(r"^epp_strays_total (\S+)$", page_of(a.metrics).decode(), re.MULTILINE)
        assert told is not None
        assert float(told[1]) >= 3


@pytest.mark.parametrize(("kind", "value"), [
    ("inbox:a", "granted"), ("inbox:a", "expired"), ("marks", "x"), ("limits", "x"), ("workloads", "x"),
    ("answers", "short"), ("requests", "\x02short"), ("requests", "\x63"), ("about", "{"), ("orphans", "7"),
    ("metrics", "{"),
])  # fmt: skip
async def test_given_damaged_entries_of_a_hash_then_requests_are_served_expire_and_end(
    fleet: OpenFleet, kind: str, value: str
) -> None:
    async with fleet("a", upper_per=1, lower_per=1, lease_ms=2000, default_answer=1) as it:
        (a,) = it.replicas
        # Given entries that can't be read, some of them under names that requests come with
        names = [*STRAYS[:3], "flow", "other", "w", "down\x1f10.0.0.1:8000", "r gone"]
        await it.redis.hset(it.keys.prefix + kind, mapping=dict.fromkeys(names, value))
        await it.redis.zadd(it.keys.prefix + "inflight", {"stray-0": LONG_AGO})
        await a.beat()
        # When requests come and go, of flows with a limit, workloads and costs that are learned, too
        await life(it, "r")
        for name in ("s", "t"):
            await a.admit(name, workload="w", limit=1, learn=True)
            await a.store.settle(name, Outcome.COMPLETED, 3, 2)
        assert (await a.beat()).live == 1
        # Then what a replica is told of again and again has gone, and all counts are 0
        if kind == "inbox:a":
            assert await it.redis.hlen(it.keys.prefix + kind) == 0
        state = await it.state()
        assert (state["stock"], state["queued"], state["leases"]) == (0, 0, 0)
