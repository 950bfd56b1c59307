"""Model servers are killed repeatedly, before the first byte of answers and during answers (G6, G9)."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from case_fleet import config, log_of, replace, rests
from fault_case import FULL, TTFT_MS, Case

from picker_tools.load.generator import Load, MakeRequest, Request, closed_loop

ENDS = ("completed", "upstream_failed")


@pytest.mark.skipif(not FULL, reason="only in `make faults`; test_one_queue.py kills an endpoint")
async def test_endpoints_killed_before_a_byte_fail_no_request(faulty: Callable[..., Any], case: Case) -> None:
    kills = 20
    case.describe(f"an endpoint killed before the first byte, {kills} times")
    # Model servers do not stream, so every kill comes before the first byte of an answer.
    here = faulty("--sim-ttft", "100", "--sim-itl", "5", config=config())
    load = await _killed_amid_load(here, kills, _plain, seed=2)
    case.all_served(load)
    await rests(here)
    await case.check(here, load.history, may_end=ENDS)


async def test_a_killed_endpoint_cuts_only_begun_answers(faulty: Callable[..., Any], case: Case) -> None:
    kills = case.size(2, 20)
    case.describe(f"an endpoint killed during its answers, {kills} times")
    here = faulty("--sim-ttft", "10", "--sim-itl", "20", config=config())
    load = await _killed_amid_load(here, kills, _streamed, seed=3)
    # Only answers that had begun are cut: by each kill at most as many as may run on one endpoint.
    cut = [record for record in load.unserved if record.status == 200]
    case.report(
        f"{kills} kills cut {len(cut)} answers that had begun; other errors: {len(load.unserved) - len(cut)}"
    )
    assert [record for record in load.unserved if record.status != 200] == []
    assert len(cut) <= 4 * kills
    # The requests whose answers were cut are released, and no count of requests is negative.
    await rests(here)
    await case.check(here, load.history, may_end=ENDS)


@pytest.mark.skipif(not FULL, reason="only in `make faults`; test_one_queue.py kills an endpoint once")
async def test_endpoints_killed_at_each_start_fail_no_request(faulty: Callable[..., Any], case: Case) -> None:
    flaps = 30
    case.describe(f"an endpoint killed as soon as it has restarted, {flaps} times")
    # Under load, read the shared state every 50 ms, and record the lowest count of requests.
    here = faulty("--sim-ttft", TTFT_MS, "--sim-itl", "5", config=config())
    lowest = 0.0
    done = asyncio.Event()

    async def look() -> None:
        nonlocal lowest
        while not done.is_set():
            state = await here.get("state")
            lowest = min(lowest, state["stock"], state["queued"], *state["in_flight"].values())
            await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(look())
        async with closed_loop(here.url, clients=30, make_request=_plain) as load:
            for _ in range(flaps):
                await replace(here, "endpoints", 0)
            await load.wait_for_served(30)
        done.set()
    # No client gets an error, and no count of requests is ever negative.
    await rests(here)
    log = await log_of(here)
    lowest = min(lowest, *(min(float(entry["stock"]), int(entry["queued"])) for entry in log))
    case.report(f"lowest count {lowest:g}")
    case.all_served(load)
    assert lowest == 0
    await case.check(here, load.history, may_end=ENDS)


async def _killed_amid_load(here: Any, kills: int, make_request: MakeRequest, seed: int) -> Load:
    """Run load; `kills` times, kill a random endpoint of four, which is then restarted."""
    dice = random.Random(seed)
    async with closed_loop(here.url, clients=30, make_request=make_request) as load:
        for _ in range(kills):
            await load.wait_for_served(dice.randrange(20, 80))
            await replace(here, "endpoints", dice.randrange(4))
    return load


def _plain(dice: random.Random, number: int) -> Request:
    return Request(f"plain {number}", dice.randrange(1, 20))


def _streamed(dice: random.Random, number: int) -> Request:
    return Request(f"streamed {number}", dice.randrange(10, 60), streamed=True)
