"""Limits of endpoints hold at every moment: limits from discovery, and limits that the fleet finds."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from decision_ledger import order_of
from script_fleet import OpenFleet, Replica, addresses, ask, ended, until, until_is

from picker_fleet.domain.request import Endpoint
from picker_fleet.state.pool_state import FoundLimit

A, B = addresses(2)
ROOM = 1000  # stock per endpoint, in requests: so large that only the limits matter
FOUND: Mapping[str, Any] = {"adaptive": 1, "limit_initial": 8, "limit_min": 1, "limit_max": 1000}
IN_TOKENS = {**FOUND, "unit": "tokens", "limit_initial": 100, "largest_claim": 0.25}


async def set_limits(replica: Replica, limits: Mapping[str, int], unit: str = "requests") -> None:
    found = {each: FoundLimit(limit, "test", 0, unit=unit) for each, limit in limits.items()}
    await replica.store.set_limits(found)


@pytest.mark.parametrize("source", ["discovery", "the fleet"])
async def test_of_100_concurrent_requests_exactly_as_many_run_as_the_limits_allow(
    fleet: OpenFleet, source: str
) -> None:
    settings = FOUND if source == "the fleet" else {"upper_per": ROOM}
    async with fleet("a", "b", endpoints=2, listening=True, **settings) as it:
        if source == "the fleet":
            await set_limits(it.replicas[0], {A: 5, B: 3})
        else:
            listed = Endpoint(A, max_inflight=5), Endpoint(B, max_inflight=3)
            await it.replicas[0].publish(*listed, **settings)
        running: Counter[str] = Counter()
        most: Counter[str] = Counter()
        release = asyncio.Event()

        async def one(number: int) -> None:
            gate = it.replicas[number % 2].gate
            placement = await gate.admit(ask(f"r{number}", flow=f"flow{number % 7}"), stream_owned=False)
            endpoint = placement.endpoints[0]
            running[endpoint] += 1
            most[endpoint] = max(most[endpoint], running[endpoint])
            await release.wait()
            running[endpoint] -= 1
            gate.settle(ended(f"r{number}"))

        # 100 requests arrive at once: 5 run on one endpoint, 3 on the other, and 92 wait.
        async with asyncio.TaskGroup() as tasks:
            for number in range(100):
                tasks.create_task(one(number))
            await until_is(it.counts, (8, 92, [5, 3]))
            await until(lambda: running == {A: 5, B: 3})
            release.set()
        assert most == {A: 5, B: 3}
        await until(it.at_rest)
        assert (await it.ledger()).started == {f"r{number}": 1 for number in range(100)}


async def test_a_pool_that_changes_the_mode_of_its_limits_loses_no_waiting_request(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1, **{**FOUND, "adaptive": 0, "limit_initial": 3}) as (it, a):
        names = [f"r{number}" for number in range(8)]
        for name in names:
            await a.admit(name)
        # In the mode `static` the pool stores found limits, but does not apply them.
        await set_limits(a, {A: 5})
        assert await it.counts() == (1, 7, [1])
        await a.store.set_live_config({"adaptive": 1}, {})
        assert await it.counts() == (5, 3, [5])
        await a.store.set_live_config({"adaptive": None}, {})
        assert (await it.state()).limits == {}
        await a.settle(*names[:4])
        assert await it.counts() == (1, 3, [1])
        for name in names[4:]:
            await a.settle(name)
        assert order_of(await it.log()) == names[1:]
        assert await it.at_rest()


async def test_the_only_endpoint_below_its_limit_is_found_among_40_endpoints(fleet: OpenFleet) -> None:
    small, large = addresses(40)[:-1], addresses(40)[-1]
    async with fleet("a", endpoints=40, **FOUND) as (it, a):
        # Endpoint `large` has the most requests of all 40, yet only this endpoint is below its limit.
        await set_limits(a, {**dict.fromkeys(small, 1), large: 20})
        for number in range(60):
            await a.admit(f"r{number}")
        state = await it.state()
        assert (state.stock, state.queued) == (59, 1)
        assert state.in_flight == {**dict.fromkeys(small, 1), large: 20}


async def test_tokens_in_flight_are_counted_from_the_records_after_a_mode_change_and_a_lost_key(
    fleet: OpenFleet,
) -> None:
    settings = {**IN_TOKENS, "adaptive": 0, "upper_per": 1000}
    async with fleet("a", checked=False, **settings) as (it, a):  # the rebuilt pool begins a new log
        for number in range(3):
            await a.admit(f"r{number}", cost=30)
        assert (await it.state()).amounts == {}
        assert not await it.has("limits")
        await a.store.set_live_config({"adaptive": 1}, {})
        assert (await it.state()).amounts == {A: 90}
        # The key is lost: the sweep ends the epoch, and the next publication counts the tokens again.
        await it.redis.delete(it.keys.prefix + "limits")
        await a.sweep()
        await a.publish(A, **settings)
        assert (await it.state()).amounts == {A: 90}
        await a.store.set_live_config({"adaptive": None}, {})
        assert not await it.has("limits")


async def test_endpoints_whose_limits_still_double_get_equal_loads(fleet: OpenFleet) -> None:
    async with fleet("a", endpoints=2, **FOUND) as (it, a):
        await set_limits(a, {A: 8, B: 16})
        for number in range(6):
            await a.admit(f"r{number}")
        assert (await it.state()).in_flight == {A: 3, B: 3}
