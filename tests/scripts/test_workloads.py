"""The workload registry (spec 001): what is counted, for how long; what clients name is bounded."""

import asyncio
import itertools

import pytest
from script_fleet import Fleet, OpenFleet, until

from picker_fleet.request import Outcome


async def test_an_idle_workload_is_forgotten_and_a_busy_one_is_not(fleet: OpenFleet) -> None:
    # 250 workloads that have ended and one that has a request running.
    async with fleet("a", upper_per=1000) as (it, a):
        await asyncio.gather(*(a.admit(f"r{i}", workload=f"w{i}") for i in range(250)))
        await a.settle(*(f"r{i}" for i in range(250)))
        await a.admit("runs", workload="busy")
        await it.after(10)
        # When they have been idle too short, the sweep keeps them.
        await a.sweep(idle_s=300)
        assert len(await registered(it)) == 251

        async def forgotten() -> bool:
            await a.sweep(idle_s=0.005)
            return await registered(it) == ["busy"]

        # When long enough, a few calls of the sweep forget all but the busy one.
        await until(forgotten)


async def test_an_anonymous_request_leaves_no_entry(fleet: OpenFleet) -> None:
    # With requests without a workload, when they run, wait and end, the registry is empty.
    async with fleet("a", full=True) as (it, a):
        await a.admit("waits")
        await a.settle("runs", "waits")
        assert not await it.has("workloads")
        assert {line.workload for line in await it.log()} == {""}


async def registered(it: Fleet) -> list[str]:
    return sorted(await it.redis.hkeys(it.keys.prefix + "workloads"))


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "in one batch"])
async def test_workloads_beyond_the_most_are_served_and_leave_nothing(
    fleet: OpenFleet, at_once: bool
) -> None:
    # Room for everybody and a registry for two.
    async with fleet("a", upper_per=100, max_workloads=2) as (it, a):
        # When three workloads come, two of them again
        arriving = [a.admit(f"r{n}", workload=name) for n, name in enumerate(("w1", "w2", "w3", "w1", "w3"))]
        verdicts = await asyncio.gather(*arriving) if at_once else [await each for each in arriving]
        # All are served, and two are known.
        assert {each.status for each in verdicts} == {"placed"}
        assert await registered(it) == ["w1", "w2"]
        await a.settle(*(f"r{n}" for n in range(5)))
        assert await registered(it) == ["w1", "w2"]


async def test_refused_requests_of_new_workloads_fill_no_more_than_half_of_the_registry(
    fleet: OpenFleet,
) -> None:
    # No room in the queue, and a registry for four.
    async with fleet("a", upper_per=1, total_capacity=0, max_workloads=4) as (it, a):
        await a.admit("runs", workload="served")
        # When a client brings a new workload with each request, one by one and at once
        for number in range(10):
            assert (await a.admit(f"r{number}", workload=f"new-{number}")).status == "refused"
        await asyncio.gather(*(a.admit(f"s{number}", workload=f"newer-{number}") for number in range(10)))
        # Half of it is left to those that are served.
        assert await registered(it) == ["new-0", "served"]
        await a.settle("runs")
        for number in range(3):
            assert (await a.admit(f"t{number}", workload=f"late-{number}")).status == "placed"
            await a.settle(f"t{number}")
        assert await registered(it) == ["late-0", "late-1", "new-0", "served"]


async def test_requests_of_an_unregistered_workload_are_ordered_like_anonymous_ones(fleet: OpenFleet) -> None:
    # A registry that is full, and one slot that is taken.
    async with fleet("a", upper_per=1, ordering="workload-aware", max_workloads=1) as (it, a):
        await a.admit("runs", workload="known")
        # When requests of workloads wait that found no room, and leave in any order
        for n in range(6):
            await a.admit(f"r{n}", workload=f"w{n % 2}", criticality=1 + n % 5)
        await a.store.cancel("r3", 1, "cancelled")
        await a.settle("runs")
        for _ in range(5):
            what, request = a.notifications[-1]
            assert what == "placed"
            await a.settle(request)
        # Nothing of them is left.
        for kind in ("line", "growing", "static", "queue"):
            assert await it.redis.keys(f"{it.keys.prefix}{kind}*") == []


async def test_means_of_answers_are_kept_of_no_more_flows_than_workloads(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=100, max_workloads=2) as (it, a):
        for n in range(5):
            await a.admit(f"r{n}", flow=f"flow{n}")
            await a.store.settle(f"r{n}", Outcome.COMPLETED, None, 10)
        assert await it.redis.hlen(it.keys.prefix + "answers") == 2


async def test_finish_tags_of_flows_that_come_once_are_bounded(fleet: OpenFleet) -> None:
    # A pool that is never at rest, and more idle flow queues with tags above v than are kept.
    async with fleet("a", full=True) as (it, a):
        await a.admit("waits")
        tags = {f"once-{n}": 1 + n / 1e6 for n in range(12_500)}
        finish = it.keys.prefix + "finish:1"
        await it.redis.zadd(finish, tags)
        # The sweep has come by.
        while (await a.sweep()).more:
            pass
        # Those that are owed least have been forgotten.
        assert await it.redis.zcard(finish) == 10_000
        assert (await it.redis.zrange(finish, 0, 0)) == ["once-2500"]


async def test_a_client_with_a_new_flow_for_each_request_does_not_starve_the_others(fleet: OpenFleet) -> None:
    # One slot, a flow with five requests, and twenty waiting requests with a flow each.
    async with fleet("a", upper_per=1, guard_share=0, log_max=0) as (_, a):
        await a.admit("runs", flow="z-steady")
        for n in range(5):
            await a.admit(f"steady-{n}", flow="z-steady")
        for n in range(20):
            await a.admit(f"once-{n}", flow=f"once-{n}")
        # For each that is served the client brings another.
        running, served = "runs", []
        for n in range(20, 300):
            await a.admit(f"once-{n}", flow=f"once-{n}")
            await a.settle(running)
            running = a.notifications[-1][1]
            served.append(running)
            await a.place(running)
        # Past the first hundred that are taken for newcomers, the flow has its turn in each round.
        turns = [at for at, request in enumerate(served) if request.startswith("steady")]
        assert len(turns) == 5
        assert max(after - before for before, after in itertools.pairwise(turns[1:])) <= 2 * 21
