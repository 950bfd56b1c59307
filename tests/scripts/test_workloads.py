"""The workload registry (spec 001): what is counted, for how long; what clients name is bounded."""

import asyncio
import itertools
import math
from dataclasses import dataclass

import pytest
from packed import doubles
from script_fleet import Fleet, OpenFleet, addresses, until

from picker_fleet.request import Outcome


@dataclass(frozen=True, slots=True)
class Entry:
    """A workload's metrics, as `lua/lib/registry.lua` keeps them. `arrivals`: seven counts, newest first."""

    total: int
    active: int
    dispatched: int
    ema_ms: float
    last_ms: int
    slot: int
    arrivals: tuple[int, ...]


async def entry(it: Fleet, workload: str) -> Entry | None:
    text = await it.redis.hget(it.keys.prefix + "workloads", workload)
    if text is None:
        return None
    total, active, dispatched, ema_ms, last_ms, slot, *arrivals = doubles(text)
    counts = tuple(int(count) for count in arrivals)
    return Entry(int(total), int(active), int(dispatched), ema_ms, int(last_ms), int(slot), counts)


async def test_a_workloads_requests_are_counted_through_their_lives(fleet: OpenFleet) -> None:
    # Given room for one
    async with fleet("a", "b", upper_per=1, flow_capacity=2) as (it, a, b):
        # When its requests come by two replicas, then all are active and one is dispatched
        await a.admit("r1", workload="w")
        await b.admit("r2", workload="w")
        await a.admit("r3", workload="w")
        found = await entry(it, "w")
        assert found is not None
        assert (found.total, found.active, found.dispatched) == (3, 3, 1)
        assert sum(found.arrivals) == 3
        # When one is adopted, then it is not counted again
        await a.admit("r2", attempt=5, workload="w")
        assert await entry(it, "w") == found
        # When one ends and one leaves, then the other has been dispatched and is the only active one
        await a.settle("r1")
        await a.store.cancel("r3", 1, "cancelled")
        found = await entry(it, "w")
        assert found is not None
        assert (found.total, found.active, found.dispatched) == (3, 1, 2)
        await a.settle("r2")
        found = await entry(it, "w")
        assert found is not None
        assert found.active == 0
        assert found.last_ms <= await it.now_ms()


async def test_a_request_that_is_sent_back_to_the_queue_counts_as_dispatched_once(fleet: OpenFleet) -> None:
    # Given a flow with its one request on the first endpoint, and a workload's that must go there too
    async with fleet("a", endpoints=2, upper_per=10) as (it, a):
        first, _ = addresses(2)
        await a.admit("x0", flow="x", limit=1, subset=(first,))
        await a.admit("x1", flow="x", limit=1, subset=(first,), workload="w")
        # When its grant comes to nothing, then none of the workload's requests has been dispatched
        assert (await a.place("x1", subset=(first,))).status == "queued"
        found = await entry(it, "w")
        assert found is not None
        assert (found.total, found.active, found.dispatched) == (1, 1, 0)
        # And when it is placed in the end, then one has, after the wait that it really had
        await it.after(40)
        await a.settle("x0")
        assert (await a.place("x1", subset=(first,))).status == "placed"
        found = await entry(it, "w")
        assert found is not None
        assert found.dispatched == 1
        assert found.ema_ms >= 40


async def test_the_average_wait_follows_new_waits_by_a_fifth(fleet: OpenFleet) -> None:
    # Given a first request that waited 2.5 s, which is the average
    async with fleet("a") as (it, a):
        await a.admit("r1", workload="w", age_s=2.5)
        found = await entry(it, "w")
        assert found is not None
        assert found.ema_ms == pytest.approx(2500)
        # When the next waited 1.8 s, then it is 2.36 s, the specification's example
        await a.admit("r2", workload="w", age_s=1.8)
        found = await entry(it, "w")
        assert found is not None
        assert found.ema_ms == pytest.approx(2360)


async def test_a_queued_requests_wait_counts_from_its_arrival(fleet: OpenFleet) -> None:
    # Given one that waits, 10 s old when it came
    async with fleet("a", upper_per=1) as (it, a):
        await a.admit("runs")
        before_ms = await it.now_ms()
        await a.admit("r", workload="w", age_s=10)
        # When it is granted, then its wait is its age and its time in the queue
        await a.settle("runs")
        waited_ms = await it.now_ms() - before_ms
        found = await entry(it, "w")
        assert found is not None
        assert 10_000 <= found.ema_ms <= 10_000 + waited_ms + 1


async def test_arrivals_are_counted_by_sixths_of_a_sliding_window(fleet: OpenFleet) -> None:
    # Given a window of 240 ms: slots of 40 ms
    async with fleet("a", window_ms=240, upper_per=100) as (it, a):
        model: dict[int, int] = {}
        for i in range(100):
            # When requests keep coming, then each slot counts those that came in it, and old ones fall off
            await a.admit(f"r{i}", workload="w")
            found = await entry(it, "w")
            assert found is not None
            assert found.slot == math.floor(found.last_ms / 40)
            model[found.slot] = model.get(found.slot, 0) + 1
            assert found.arrivals == tuple(model.get(found.slot - ago, 0) for ago in range(7))
            assert found.total == i + 1
            if len(model) > 8:
                break
            await it.after(10)
        assert len(model) > 8


async def test_a_long_silence_empties_the_window(fleet: OpenFleet) -> None:
    # Given a window of 60 ms, long past
    async with fleet("a", window_ms=60) as (it, a):
        await a.admit("r1", workload="w")
        await it.after(80)
        # When the next comes, then it is the only one in the window
        await a.admit("r2", workload="w")
        found = await entry(it, "w")
        assert found is not None
        assert (found.total, found.arrivals) == (2, (1, 0, 0, 0, 0, 0, 0))


async def test_an_idle_workload_is_forgotten_and_a_busy_one_is_not(fleet: OpenFleet) -> None:
    # Given 250 workloads that have ended and one that has a request running
    async with fleet("a", upper_per=1000) as (it, a):
        await asyncio.gather(*(a.admit(f"r{i}", workload=f"w{i}") for i in range(250)))
        await a.settle(*(f"r{i}" for i in range(250)))
        await a.admit("runs", workload="busy")
        await it.after(10)
        # When they have been idle too short, then the sweep keeps them
        await a.sweep(idle_s=300)
        assert await it.redis.hlen(it.keys.prefix + "workloads") == 251

        async def forgotten() -> bool:
            await a.sweep(idle_s=0.005)
            return await it.redis.hkeys(it.keys.prefix + "workloads") == ["busy"]

        # When long enough, then a few calls of the sweep forget all but the busy one
        await until(forgotten)


async def test_an_anonymous_request_leaves_no_entry(fleet: OpenFleet) -> None:
    # Given requests without a workload, when they run, wait and end, then the registry is empty
    async with fleet("a", upper_per=1) as (it, a):
        await a.admit("r1")
        await a.admit("r2")
        await a.settle("r1", "r2")
        assert await it.redis.exists(it.keys.prefix + "workloads") == 0
        assert {line.workload for line in await it.log()} == {""}


@pytest.mark.parametrize("reason", ["full", "too old", "no endpoints"])
async def test_a_request_that_is_turned_away_counts_as_an_arrival_and_is_not_active(
    fleet: OpenFleet, reason: str
) -> None:
    # Given a workload with one request running, and no room, or nowhere to go
    async with fleet("a", upper_per=1, total_capacity=0) as (it, a):
        await a.admit("runs", workload="w")
        if reason == "no endpoints":
            await a.publish(upper_per=1)
        # When it brings more, then each counts in its total and its rate, and the one is active
        for number in range(1, 4):
            late = reason == "too old"
            verdict = await a.admit(
                f"more-{number}", workload="w", **({"ttl_s": 1, "age_s": 2} if late else {})
            )
            assert verdict.status == ("expired" if late else "refused")
            found = await entry(it, "w")
            assert found is not None
            assert (found.total, found.active, found.dispatched) == (1 + number, 1, 1)
            assert sum(found.arrivals) == 1 + number


async def test_a_refusal_that_is_sent_twice_leaves_nothing_but_its_arrivals(fleet: OpenFleet) -> None:
    # Given a queue without room
    async with fleet("a", upper_per=1, total_capacity=0) as (it, a):
        await a.admit("runs", workload="w")
        # When the same request is brought twice, then it is refused twice, and nothing is kept by its id
        for _ in range(2):
            assert (await a.admit("r", workload="w")).status == "refused"
        assert await it.redis.hkeys(it.keys.prefix + "requests") == ["runs"]
        await a.settle("runs")
        found = await entry(it, "w")
        assert found is not None
        assert (found.total, found.active) == (3, 0)
        assert await it.at_rest()


async def test_requests_that_are_refused_push_a_workload_behind(fleet: OpenFleet) -> None:
    # Given two workloads of one flow with a request waiting each, the greedy one's first, and no more room
    rates = {"rate_weight": 0.9, "rate_cap": 0.1, "guard_share": 0}
    async with fleet("a", upper_per=1, total_capacity=2, ordering="workload-aware", **rates) as (_, a):
        await a.admit("runs")
        await a.admit("greedy", workload="greedy")
        await a.admit("modest", workload="modest")
        # When the greedy one goes on asking, and the sweep has come by
        for number in range(5):
            assert (await a.admit(f"again-{number}", workload="greedy")).status == "refused"
        await a.sweep()
        # Then the other is served first
        await a.settle("runs")
        assert a.notifications[-1] == ("granted", "modest")


async def test_workloads_beyond_the_most_are_served_and_leave_nothing(fleet: OpenFleet) -> None:
    # Given room for everybody and a registry for two
    async with fleet("a", upper_per=100, max_workloads=2) as (it, a):
        # When three workloads come, two of them again
        for request, workload in enumerate(("w1", "w2", "w3", "w1", "w3")):
            assert (await a.admit(f"r{request}", workload=workload)).status == "placed"
        # Then all are served, and two are known
        assert sorted(await it.redis.hkeys(it.keys.prefix + "workloads")) == ["w1", "w2"]
        await a.settle(*(f"r{request}" for request in range(5)))
        assert sorted(await it.redis.hkeys(it.keys.prefix + "workloads")) == ["w1", "w2"]


async def test_workloads_of_one_batch_are_counted_before_they_are_written(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=100, max_workloads=2) as (it, a):
        # When ten new workloads arrive at once
        await asyncio.gather(*(a.admit(f"r{n}", workload=f"w{n}") for n in range(10)))
        # Then two have been registered
        assert await it.redis.hlen(it.keys.prefix + "workloads") == 2


async def test_refused_requests_of_new_workloads_fill_no_more_than_half_of_the_registry(
    fleet: OpenFleet,
) -> None:
    # Given no room in the queue, and a registry for four
    async with fleet("a", upper_per=1, total_capacity=0, max_workloads=4) as (it, a):
        await a.admit("runs", workload="served")
        # When a client brings a new workload with each request, one by one and at once
        for number in range(10):
            assert (await a.admit(f"r{number}", workload=f"new-{number}")).status == "refused"
        await asyncio.gather(*(a.admit(f"s{number}", workload=f"newer-{number}") for number in range(10)))
        # Then half of it is left to those that are served
        registry = it.keys.prefix + "workloads"
        assert sorted(await it.redis.hkeys(registry)) == ["new-0", "served"]
        await a.settle("runs")
        for number in range(3):
            assert (await a.admit(f"t{number}", workload=f"late-{number}")).status == "placed"
            await a.settle(f"t{number}")
        assert sorted(await it.redis.hkeys(registry)) == ["late-0", "late-1", "new-0", "served"]


async def test_requests_of_an_unregistered_workload_are_ordered_like_anonymous_ones(fleet: OpenFleet) -> None:
    # Given a registry that is full, and one slot that is taken
    async with fleet("a", upper_per=1, ordering="workload-aware", max_workloads=1) as (it, a):
        await a.admit("runs", workload="known")
        # When requests of workloads wait that found no room, and leave in any order
        for n in range(6):
            await a.admit(f"r{n}", workload=f"w{n % 2}", criticality=1 + n % 5)
        await a.store.cancel("r3", 1, "cancelled")
        await a.settle("runs")
        for _ in range(5):
            ((what, request),) = a.notifications[-1:]
            assert what == "granted"
            await a.place(request)
            await a.settle(request)
        # Then nothing of them is left
        for kind in ("line", "growing", "static", "queue"):
            assert await it.redis.keys(f"{it.keys.prefix}{kind}*") == []


async def test_means_of_answers_are_kept_of_no_more_flows_than_workloads(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=100, max_workloads=2) as (it, a):
        for n in range(5):
            await a.admit(f"r{n}", flow=f"flow{n}")
            await a.store.settle(f"r{n}", Outcome.COMPLETED, None, 10)
        assert await it.redis.hlen(it.keys.prefix + "answers") == 2


async def test_finish_tags_of_flows_that_come_once_are_bounded(fleet: OpenFleet) -> None:
    # Given a pool that is never at rest, and more idle flow queues with tags above v than are kept
    async with fleet("a", upper_per=1) as (it, a):
        await a.admit("runs")
        await a.admit("waits")
        tags = {f"once-{n}": 1 + n / 1e6 for n in range(12_500)}
        finish = it.keys.prefix + "finish:1"
        await it.redis.zadd(finish, tags)
        # When the sweep has come by
        while (await a.sweep()).more:
            pass
        # Then those that are owed least have been forgotten
        assert await it.redis.zcard(finish) == 10_000
        assert (await it.redis.zrange(finish, 0, 0)) == ["once-2500"]


async def test_a_client_with_a_new_flow_for_each_request_does_not_starve_the_others(
    fleet: OpenFleet,
) -> None:
    # Given one slot, a flow with five requests, and twenty waiting requests with a flow each
    async with fleet("a", upper_per=1, guard_share=0, log_max=0) as (_, a):
        await a.admit("runs", flow="z-steady")
        for n in range(5):
            await a.admit(f"steady-{n}", flow="z-steady")
        for n in range(20):
            await a.admit(f"once-{n}", flow=f"once-{n}")
        # When for each that is served the client brings another
        running, served = "runs", []
        for n in range(20, 300):
            await a.admit(f"once-{n}", flow=f"once-{n}")
            await a.settle(running)
            running = a.notifications[-1][1]
            served.append(running)
            await a.place(running)
        # Then, past the first hundred that are taken for newcomers, the flow has its turn in each round
        turns = [at for at, request in enumerate(served) if request.startswith("steady")]
        assert len(turns) == 5
        assert max(after - before for before, after in itertools.pairwise(turns[1:])) <= 2 * 21
