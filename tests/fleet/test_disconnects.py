"""Clients that leave, at every phase, in every mode: what they held is free again (G6).

A lease runs 15 s; what is free long before has been released because its client left.
"""

import asyncio
import random
from typing import Any

import pytest
from fleet_load import Caller, at_rest, shared

MODES = ["lean", "standard", "headers"]
SOON_S = 5.0
CONFIG = {"request_queue_controller": {"watermark_per_backend": 1}}


@pytest.fixture(params=MODES, scope="module")
def slow(request: pytest.FixtureRequest, shared_fleet: Any) -> Any:
    """One endpoint that takes one request at a time and streams for long."""
    options = ("--endpoints", "1", "--sim-ttft", "20", "--sim-itl", "20")
    return shared_fleet("--mode", request.param, *options, config=CONFIG)


async def test_leaving_while_streaming(slow: Any) -> None:
    # Given an answer that would stream for 20 s
    caller = await Caller.ask(slow.url, tokens=1000)
    assert b"200 OK" in await caller.first_bytes()
    # When its client leaves
    await caller.leave()
    # Then its place is free
    await at_rest(slow, within_s=SOON_S)


async def test_leaving_while_queued(slow: Any) -> None:
    # Given one that runs and five that wait
    running = await Caller.ask(slow.url, tokens=1000)
    assert b"200 OK" in await running.first_bytes()
    waiting = [await Caller.ask(slow.url, tokens=1) for _ in range(5)]

    async def queued(count: int) -> bool:
        return bool((await shared(slow))["queued"] == count)

    await slow.eventually(lambda: queued(5), what="5 queued")
    # When three of the waiting leave
    for caller in waiting[:3]:
        await caller.leave()
    # Then two are left in the queue
    await slow.eventually(lambda: queued(2), within_s=SOON_S, what="2 queued")
    # And when the one that runs leaves too, they are served
    await running.leave()
    for caller in waiting[3:]:
        assert b"200 OK" in await caller.first_bytes()
        await caller.leave()
    await at_rest(slow, within_s=SOON_S)


async def test_leaving_at_random_moments(slow: Any) -> None:
    # Given clients that come and leave at any moment: before, while or after they are placed
    chance = random.Random(7)

    async def visit() -> None:
        caller = await Caller.ask(slow.url, tokens=1)
        await asyncio.sleep(chance.uniform(0, 0.15))
        await caller.leave()

    # When 100 of them have come and gone
    for _ in range(5):
        await asyncio.gather(*(visit() for _ in range(20)))
    # Then nothing of them is left
    await at_rest(slow, within_s=SOON_S)
