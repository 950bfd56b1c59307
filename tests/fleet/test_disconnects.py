"""Clients that leave, at every phase, in every mode: what they held is free again (G6).

A lease runs 15 s; what is free before has been released because its client left. How soon that is on a
machine at leisure (within 30 ms, in 36 departures a mode) is in docs/guarantees.md, G6.
"""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fleet_load import Caller, at_rest, decisions, shared

MODES = ["lean", "standard", "headers"]
SOON_S = 10.0
PLACED_AND_GONE = ["bypassed", "cancelled"]
TRIES = 30
CONFIG = {"request_queue_controller": {"watermark_per_backend": 1}, "decision_log": {"enabled": True}}


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


async def test_leaving_while_being_placed(slow: Any) -> None:
    async def left() -> list[str]:
        known = len(await decisions(slow))
        calls, resets = await calls_of_replicas(slow)

        async def arrived() -> bool:
            return (await calls_of_replicas(slow))[0] > calls

        async def gone() -> bool:
            return (await calls_of_replicas(slow))[1] > resets

        # Given a Redis that stands still, so that a replica that asks it for a place has no answer
        with standing_still(slow):
            caller = await Caller.ask(slow.url, tokens=1000)
            await slow.eventually(arrived, what="the request at a replica")
            # When the client leaves, and Envoy has told the replica
            await caller.leave()
            await slow.eventually(gone, what="the end of the replica's stream")
        # Then its place is free
        await at_rest(slow, within_s=SOON_S)
        return [entry.event for entry in (await decisions(slow))[known:]]

    # And by the log it had one. Who is gone before the replica has asked leaves no trace there, and whose
    # leaving the replica reads after the answer has left a running request: then once more
    seen: list[list[str]] = []
    while PLACED_AND_GONE not in seen:
        assert len(seen) < TRIES, seen
        seen.append(await left())
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


@contextmanager
def standing_still(fleet: Any) -> Iterator[None]:
    """The fleet's Redis does nothing within the block."""
    redis = next(child for child in fleet.children() if "valkey-server" in " ".join(child.cmdline()))
    redis.suspend()
    try:
        yield
    finally:
        redis.resume()


async def calls_of_replicas(fleet: Any) -> tuple[int, int]:
    """Calls that Envoy has made to replicas, and how many of them it has broken off."""
    lines = (await fleet.envoy_admin("/stats?filter=^cluster.picker.upstream_rq_t")).text.splitlines()
    found = dict(line.rsplit(": ", 1) for line in lines)
    calls, resets = (found[f"cluster.picker.upstream_rq_{name}"] for name in ("total", "tx_reset"))
    return int(calls), int(resets)
