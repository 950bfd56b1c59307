"""When a client leaves, in any phase, everything that its request holds is released (G6).

Mode `lean` is not tested: it decides like `standard` and ends requests like `http`. A lease lasts 15 s, so a
release within SOON_S is caused by the disconnect, not by the lease's end.
"""

import asyncio
import contextlib
from functools import partial
from typing import Any

import httpx
import pytest
from fleet_load import Caller, at_rest, decisions
from whole_fleet import suspended

SOON_S = 10.0
PLACED_AND_CANCELLED = ["bypassed", "cancelled"]
TRIES = 30
REPLICAS = 3
STOPPED_S = 4.5  # Envoy sends a ping within 2 s, and waits 5 s for its answer
CONFIG = {"request_queue_controller": {"watermark_per_backend": 1}}


@pytest.fixture(params=["standard", "http"], scope="module")
def slow(request: pytest.FixtureRequest, shared_fleet: Any) -> Any:
    """A fleet with one endpoint that takes one request at a time and streams slowly."""
    options = ("--replicas", str(REPLICAS), "--endpoints", "1", "--sim-ttft", "20", "--sim-itl", "20")
    return shared_fleet("--mode", request.param, *options, config=CONFIG)


async def streaming(fleet: Any) -> Caller:
    """A client whose answer takes 20 s to stream."""
    caller = await Caller.ask(fleet.url, tokens=1000)
    assert b"200 OK" in await caller.first_bytes()
    return caller


async def test_a_client_that_leaves_while_streaming_frees_its_endpoint(slow: Any) -> None:
    await (await streaming(slow)).leave()
    await at_rest(slow, within_s=SOON_S)


async def test_queued_requests_whose_clients_leave_make_room_for_other_requests(slow: Any) -> None:
    running = await streaming(slow)
    waiting = [await Caller.ask(slow.url, tokens=1) for _ in range(5)]
    await slow.until_state(queued=5)
    for caller in waiting[:3]:
        await caller.leave()
    await slow.until_state(queued=2, within_s=SOON_S)
    await running.leave()
    for caller in waiting[3:]:
        assert b"200 OK" in await caller.first_bytes()
        await caller.leave()
    await at_rest(slow, within_s=SOON_S)


async def test_a_request_is_cancelled_if_its_client_leaves_during_placement(slow: Any) -> None:
    async def events_of_one() -> list[str]:
        before = len(await decisions(slow))
        calls, resets = await calls_of_replicas(slow)

        with suspended(slow.child("valkey-server")):  # Redis does not reply to the admission
            caller = await Caller.ask(slow.url, tokens=1000)
            seen = partial(slow.eventually, lambda: calls_of_replicas(slow))
            await seen(lambda now: now[0] > calls, what="Envoy's call to a replica")
            await caller.leave()
            await seen(lambda now: now[1] > resets, what="Envoy's reset of its call")
        await at_rest(slow, within_s=SOON_S)
        return [entry.event for entry in (await decisions(slow))[before:]]

    # A disconnect before the admission leaves no log entry; a disconnect after Redis's reply ends a running
    # request. So the test repeats until the log shows a cancelled placement.
    seen: list[list[str]] = []
    while PLACED_AND_CANCELLED not in seen:
        assert len(seen) < TRIES, seen
        seen.append(await events_of_one())
    await at_rest(slow, within_s=SOON_S)


async def calls_of_replicas(fleet: Any) -> tuple[int, int]:
    """How many calls Envoy has made to replicas, and how many of them it has reset (HTTP/1.1: closed)."""
    lines = (await fleet.envoy_admin("/stats?filter=^cluster.picker.*upstream_(rq|cx)_")).text.splitlines()
    found = dict(line.removeprefix("cluster.").rsplit(": ", 1) for line in lines)
    cluster, reset = "picker", "rq_tx_reset"
    if "picker-http.upstream_rq_total" in found:
        cluster, reset = "picker-http", "cx_destroy_local_with_active_rq"
    return int(found[f"{cluster}.upstream_rq_total"]), int(found[f"{cluster}.upstream_{reset}"])


async def test_envoy_keeps_its_streams_to_replicas_that_are_suspended_for_some_seconds(slow: Any) -> None:
    running = await streaming(slow)
    waiting = await Caller.ask(slow.url, tokens=1)
    await slow.until_state(queued=1)
    with contextlib.ExitStack() as stack:
        for index in range(REPLICAS):
            stack.enter_context(suspended(slow.replica(index)))
        await asyncio.sleep(STOPPED_S)  # a fixed time: the suspension is what is tested
    await running.leave()
    assert b"200 OK" in await waiting.first_bytes()
    await waiting.leave()
    await at_rest(slow, within_s=SOON_S)
    healthy = partial(slow.envoy_admin, "/stats?filter=^cluster.picker.*membership_healthy$")
    await slow.eventually(healthy, are_healthy, what="health of the replicas in Envoy")
    # Envoy's workers know a change of health as soon as its statistics have it.
    served = await Caller.ask(slow.url, tokens=1)
    assert b"200 OK" in await served.first_bytes()
    await served.leave()


def are_healthy(stats: httpx.Response) -> bool:
    counts = {int(line.rsplit(": ", 1)[1]) for line in stats.text.splitlines()}
    return counts == {REPLICAS}  # an empty set means that the filter matches no statistic
