"""The workload registry (spec 001): its counts, how long the registry keeps workloads, and its size limit."""

import asyncio
import itertools

import pytest
from script_fleet import Fleet, OpenFleet, until

from picker_fleet.domain.request import Outcome
from picker_fleet.state.replies import name_of


async def test_an_idle_workload_is_forgotten_and_a_busy_one_is_not(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1000) as (it, a):
        await asyncio.gather(*(a.admit(f"r{i}", workload=f"w{i}") for i in range(250)))
        await a.settle(*(f"r{i}" for i in range(250)))
        await a.admit("runs", workload="busy")
        await it.after(10)
        await a.sweep(idle_s=300)
        assert len(await registered(it)) == 251

        async def forgotten() -> bool:
            await a.sweep(idle_s=0.005)
            return await registered(it) == ["busy"]

        await until(forgotten)


async def test_a_request_without_a_workload_id_is_not_registered(fleet: OpenFleet) -> None:
    async with fleet("a", full=True) as (it, a):
        await a.admit("waits")
        await a.settle("runs", "waits")
        assert not await it.has("workloads")
        assert {line.workload for line in await it.log()} == {""}


async def registered(it: Fleet) -> list[str]:
    return sorted(await it.redis.hkeys(it.keys.prefix + "workloads"))


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "in one batch"])
async def test_workloads_beyond_the_limit_are_not_registered(fleet: OpenFleet, at_once: bool) -> None:
    async with fleet("a", upper_per=100, max_workloads=2) as (it, a):
        arriving = [a.admit(f"r{n}", workload=name) for n, name in enumerate(("w1", "w2", "w3", "w1", "w3"))]
        verdicts = await asyncio.gather(*arriving) if at_once else [await each for each in arriving]
        assert {name_of(each) for each in verdicts} == {"placed"}
        assert await registered(it) == ["w1", "w2"]
        await a.settle(*(f"r{n}" for n in range(5)))
        assert await registered(it) == ["w1", "w2"]


async def test_refused_requests_of_new_workloads_fill_at_most_half_of_the_registry(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1, total_capacity=0, max_workloads=4) as (it, a):
        await a.admit("runs", workload="served")
        # Each request of a client has a new workload id; the requests come one by one, and then all at once.
        for number in range(10):
            assert name_of(await a.admit(f"r{number}", workload=f"new-{number}")) == "refused"
        await asyncio.gather(*(a.admit(f"s{number}", workload=f"newer-{number}") for number in range(10)))
        # Half of the registry remains for workloads whose requests are served.
        assert await registered(it) == ["new-0", "served"]
        await a.settle("runs")
        for number in range(3):
            assert name_of(await a.admit(f"t{number}", workload=f"late-{number}")) == "placed"
            await a.settle(f"t{number}")
        assert await registered(it) == ["late-0", "late-1", "new-0", "served"]


async def test_requests_of_unregistered_workloads_are_ordered_as_without_workload(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1, ordering="workload-aware", max_workloads=1) as (it, a):
        await a.admit("runs", workload="known")
        for n in range(6):
            await a.admit(f"r{n}", workload=f"w{n % 2}", criticality=1 + n % 5)
        await a.store.cancel("r3", 1, "cancelled")
        await a.settle("runs")
        for _ in range(5):
            what, request = a.notifications[-1]
            assert what == "placed"
            await a.settle(request)
        for kind in ("line", "growing", "static", "queue"):
            assert await it.redis.keys(f"{it.keys.prefix}{kind}*") == []


async def test_mean_answer_lengths_are_kept_for_at_most_max_workloads_flows(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=100, max_workloads=2) as (it, a):
        for n in range(5):
            await a.admit(f"r{n}", flow=f"flow{n}")
            await a.store.settle(f"r{n}", Outcome.COMPLETED, None, 10)
        assert await it.redis.hlen(it.keys.prefix + "answers") == 2


async def test_at_most_10000_finish_tags_of_idle_flows_are_kept(fleet: OpenFleet) -> None:
    async with fleet("a", full=True) as (it, a):
        await a.admit("waits")
        tags = {f"once-{n}": 1 + n / 1e6 for n in range(12_500)}
        finish = it.keys.prefix + "finish:1"
        await it.redis.zadd(finish, tags)
        while (await a.sweep()).more:
            pass
        assert await it.redis.zcard(finish) == 10_000
        assert (await it.redis.zrange(finish, 0, 0)) == ["once-2500"]


async def test_a_client_with_a_new_flow_for_each_request_starves_no_other_flow(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1, guard_share=0, log_max=0) as (_, a):
        await a.admit("runs", flow="z-steady")
        for n in range(5):
            await a.admit(f"steady-{n}", flow="z-steady")
        for n in range(20):
            await a.admit(f"once-{n}", flow=f"once-{n}")
        running, served = "runs", []
        for n in range(20, 300):
            await a.admit(f"once-{n}", flow=f"once-{n}")
            await a.settle(running)
            running = a.notifications[-1][1]
            served.append(running)
            await a.place(running)
        # After the first hundred new flows, the steady flow gets a turn in each round of 20 new flows.
        turns = [at for at, request in enumerate(served) if request.startswith("steady")]
        assert len(turns) == 5
        assert max(after - before for before, after in itertools.pairwise(turns[1:])) <= 2 * 21
