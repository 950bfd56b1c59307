"""Model servers are killed: before the first byte, during the answer, again and again (G6, G9)."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from case_fleet import config, log_of, rests
from fault_case import TTFT_MS, Case

from picker_tools.load.client_history import ClientRequest, closed_loop

ENDS = ("completed", "upstream_failed")


@pytest.mark.short_form("http")
async def test_endpoint_killed_before_first_byte(faulty: Callable[..., Any], case: Case) -> None:
    kills = case.size(2, 20)
    case.describe(f"an endpoint killed before the first byte, {kills} times")
    # The first byte comes with the whole answer, so any moment is before it.
    here = faulty("--sim-ttft", "100", "--sim-itl", "5", config=config())
    dice = random.Random(2)
    async with closed_loop(here.url, clients=30, make_request=_plain) as load:
        for _ in range(kills):
            await load.wait_for_served(dice.randrange(20, 80))
            # One of the four is killed and comes back.
            await _kill_and_return(here, dice.randrange(4))
    case.report(f"{len(load.failed)} errors in {len(load.history)} requests")
    assert load.failed == []
    await rests(here)
    found = case.check(load.history, await log_of(here), may_end=ENDS)
    assert found.faults == ()


async def test_endpoint_killed_amid_answers(faulty: Callable[..., Any], case: Case) -> None:
    kills = case.size(2, 20)
    case.describe(f"an endpoint killed amid its answers, {kills} times")
    here = faulty("--sim-ttft", "10", "--sim-itl", "20", config=config())
    dice = random.Random(3)
    async with closed_loop(here.url, clients=30, make_request=_streamed) as load:
        for _ in range(kills):
            await load.wait_for_served(dice.randrange(20, 80))
            await _kill_and_return(here, dice.randrange(4))
    # Only answers that had begun are cut: per kill, at most as many as one endpoint may have.
    cut = [record for record in load.failed if record.status == 200]
    case.report(f"{len(cut)} begun answers cut in {kills} kills, {len(load.failed) - len(cut)} other errors")
    assert [record for record in load.failed if record.status != 200] == []
    assert len(cut) <= 4 * kills
    # The cut requests are released, and no count is negative.
    await rests(here)
    found = case.check(load.history, await log_of(here), may_end=ENDS)
    assert found.faults == ()


async def test_endpoint_flaps(faulty: Callable[..., Any], case: Case) -> None:
    flaps = case.size(3, 30)
    case.describe(f"an endpoint that dies as soon as it is back, {flaps} times")
    # The state is polled under load all the while.
    here = faulty("--sim-ttft", TTFT_MS, "--sim-itl", "5", config=config())
    lowest = 0.0
    done = asyncio.Event()

    async def look() -> None:
        nonlocal lowest
        while not done.is_set():
            state = (await here.admin("/api/v1/state")).json()
            lowest = min(lowest, state["stock"], state["queued"], *state["in_flight"].values())
            await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(look())
        async with closed_loop(here.url, clients=30, make_request=_plain) as load:
            for _ in range(flaps):
                await _kill_and_return(here, 0)
            await load.wait_for_served(30)
        done.set()
    # No client sees an error, and no count is below 0.
    await rests(here)
    log = await log_of(here)
    lowest = min(lowest, *(min(float(entry["stock"]), int(entry["queued"])) for entry in log))
    case.report(f"{len(load.failed)} errors in {len(load.history)} requests, lowest count {lowest:g}")
    assert load.failed == []
    assert lowest == 0
    assert case.check(load.history, log, may_end=ENDS).faults == ()


def _plain(dice: random.Random, number: int) -> ClientRequest:
    return ClientRequest(f"plain {number}", dice.randrange(1, 20))


def _streamed(dice: random.Random, number: int) -> ClientRequest:
    return ClientRequest(f"streamed {number}", dice.randrange(10, 60), streamed=True)


async def _kill_and_return(here: Any, index: int) -> None:
    """SIGKILL to a simulator; returns when the supervisor's next one is there."""
    before = here.state["endpoints"][index]["pid"]
    here.kill_endpoint(index)

    async def back() -> bool:
        return bool(here.state["endpoints"][index]["pid"] != before)

    await here.eventually(back, within_s=40, what="another process")
