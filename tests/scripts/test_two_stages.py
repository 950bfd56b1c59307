"""Replicas that split requests at the same time, on a pool of four decode and four prefill endpoints."""

import asyncio
import random
from collections import Counter
from itertools import product
from operator import attrgetter

from script_fleet import Fleet, OpenFleet, addresses, asked, ended, until

from picker_fleet.domain.request import Endpoint
from picker_fleet.state.pool_state import PREFILL as PREFILL_NAME
from picker_fleet.state.pool_state import FoundLimit

REPLICAS, REQUESTS = ("a", "b", "c", "d"), 1000
DECODE, PREFILL = addresses(4), tuple(f"10.0.1.{i}:8000" for i in range(1, 5))
DECODE_LIMIT, PREFILL_LIMIT = 3, 2
STAGES = (
    *(Endpoint(each, max_inflight=DECODE_LIMIT) for each in DECODE),
    *(Endpoint(each, max_inflight=PREFILL_LIMIT, prefills=True, decodes=False) for each in PREFILL),
)


async def test_a_thousand_simultaneous_splits_pass_no_limit_of_either_stage(
    fleet: OpenFleet, splitting: None
) -> None:
    async with fleet(
        *REPLICAS, endpoints=STAGES, listening=True, upper_per=8, total_capacity=REQUESTS,
        flow_capacity=REQUESTS, log_max=100_000,
    ) as (it, *replicas):  # fmt: skip
        dice = random.Random(50)
        decoding, prefilling, most = Counter[str](), Counter[str](), Counter[str]()

        async def serve(number: int) -> None:
            replica, name = replicas[number % len(REPLICAS)], f"r{number}"
            placement = await asked(replica, name, flow=f"f{number % 7}", ttl_s=300.0)
            endpoint, prefiller = placement.endpoints[0], placement.prefillers[0]
            decoding[endpoint] += 1
            prefilling[prefiller] += 1
            most[endpoint], most[prefiller] = (
                max(most[endpoint], decoding[endpoint]), max(most[prefiller], prefilling[prefiller])
            )  # fmt: skip
            await asyncio.sleep(dice.uniform(0, 0.01))
            prefilling[prefiller] -= 1
            if number % 3:
                replica.gate.prefilled(name)  # without this report the prefill ends with the request
            await asyncio.sleep(dice.uniform(0, 0.01))
            decoding[endpoint] -= 1
            replica.gate.settle(ended(name))

        await asyncio.gather(*map(serve, range(REQUESTS)))
        # Every endpoint served, and none ran more than its limit; the audit at the end checks each decision.
        assert {each: most[each] <= DECODE_LIMIT for each in most if each in DECODE} == dict.fromkeys(
            DECODE, True
        )
        assert {each: most[each] <= PREFILL_LIMIT for each in most if each in PREFILL} == dict.fromkeys(
            PREFILL, True
        )
        await until(it.at_rest)
        await assert_no_reservation_is_left(it)
        assert await audited_peaks(it) == (DECODE_LIMIT, PREFILL_LIMIT)


async def assert_no_reservation_is_left(it: Fleet) -> None:
    assert not await it.has("prefills")
    assert (await it.state()).prefill_in_flight == dict.fromkeys(PREFILL, 0)


async def audited_peaks(it: Fleet) -> tuple[int, int]:
    """The most requests at once on a decode endpoint, and the most prefills at once on a prefill endpoint."""
    running: dict[str, tuple[str, str]] = {}
    peaks = [0, 0]
    for entry in await it.log():
        if entry.event in ("placed", "bypassed"):
            running[entry.request] = entry.endpoint, entry.prefill
        elif entry.event == "prefilled":
            running[entry.request] = entry.endpoint, ""
        elif entry.event == "completed":
            del running[entry.request]
        for stage in range(2):
            counts = Counter(each[stage] for each in running.values() if each[stage])
            peaks[stage] = max(peaks[stage], *counts.values(), 0)
    return peaks[0], peaks[1]


async def test_limits_that_the_fleet_finds_are_used_in_full_in_both_stages(fleet: OpenFleet) -> None:
    bounds = {"adaptive": 1, "limit_initial": 5, "limit_min": 1, "limit_max": 20, "unit": "requests"}
    endpoints = (
        Endpoint("10.0.0.1:8000", prefills=True),
        Endpoint("10.0.1.1:8000", prefills=True, decodes=False),
    )
    async with fleet("a", endpoints=endpoints, **bounds) as (it, a):
        found = {"10.0.0.1:8000": 7, f"{PREFILL_NAME}10.0.0.1:8000": 2, f"{PREFILL_NAME}10.0.1.1:8000": 3}
        await a.store.set_limits({name: FoundLimit(limit, "test", 0) for name, limit in found.items()})
        assert {name: each.limit for name, each in (await a.store.found_limits()).items()} == found
        state = await it.state()
        assert (state.upper, state.ready_backends, state.limits["10.0.0.1:8000"]) == (7, 1, 7)
        assert state.prefill_limits == {"10.0.0.1:8000": 2, "10.0.1.1:8000": 3}


async def test_every_replica_reads_the_stages_that_one_replica_published(fleet: OpenFleet) -> None:
    endpoints = tuple(
        Endpoint(
            f"10.0.0.{number + 10}:8000",
            {"zone": "ü"},
            draining,
            max_inflight=number or None,
            decodes=decodes,
            prefills=prefills,
            encodes=encodes,
        )
        for number, (draining, decodes, prefills, encodes) in enumerate(product((False, True), repeat=4))
        if decodes or prefills or encodes
    )
    async with fleet("a", endpoints=endpoints) as (it, a):
        assert sorted(await a.store.endpoints(), key=attrgetter("address")) == list(endpoints)
        assert (await it.state()).ready_backends == sum(each.decodes and each.ready for each in endpoints)
        await a.store.mark_endpoint(endpoints[0].address, "down", True)
        assert [each.down for each in await a.store.endpoints()].count(True) == 1
