"""Streams that last longer than a lease, and clients that leave at any moment (G6)."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from case_fleet import TERMS, cluster_of, config, envoy_stats, ready, rests, sent
from fault_case import Case
from fleet_load import Caller
from whole_fleet import suspended

from picker_tools.load.generator import Kind, Load, Request, closed_loop, mixed_request

ITL_S = 0.02
AT_ONCE = 100


async def test_a_stream_that_outlives_its_lease_is_complete(faulty: Callable[..., Any], case: Case) -> None:
    lease_s = case.size(3, 2)  # seconds: longer than the access-log interval of 1 s
    times = case.size(2, 10)
    case.describe(f"a stream {times} times longer than its lease")
    # Some streams last many times as long as a lease, while other clients send requests.
    options = ("--sim-ttft", "20", "--sim-itl", f"{ITL_S * 1000:g}")
    here = faulty(*options, config=config(lease_s=lease_s))
    tokens = int(times * lease_s / ITL_S)
    async with closed_loop(here.url, clients=case.size(2, 10)) as load:
        asked = [sent(here, f"long {n}", tokens, streamed=True) for n in range(6)]
        streams = await asyncio.gather(*asked)
    await rests(here)
    lasted_s = min(stream.done_s - stream.sent_s for stream in streams)
    assert [stream for stream in streams if not stream.served] == []
    assert lasted_s >= times * lease_s
    case.report(f"6 streams of {lasted_s:.0f} s, lease {lease_s:g} s")
    found = await case.check(here, [*streams, *load.history])
    case.report(f"{found.ends['reclaimed']} leases expired")
    case.all_served(load)


@pytest.mark.short_form("http")  # tests/fleet/test_disconnects.py has `lean`
async def test_requests_of_disconnected_clients_are_released(faulty: Callable[..., Any], case: Case) -> None:
    count = case.size(200, 10_000)
    case.describe(f"{count} clients leave in random phases of their requests")
    # Count the open connections after the fleet has served some requests.
    here = faulty("--sim-ttft", "20", "--sim-itl", "10", config=config(lease_s=15))
    async with closed_loop(here.url, clients=10) as before:
        await before.wait_for_served(50)
    await rests(here)
    baseline = await _open(here, case.mode)
    # Clients leave before placement, while queued, before the answer's first byte, and during the answer.
    async with closed_loop(here.url, clients=AT_ONCE, seed=3, make_request=_fickle) as load:
        await load.wait_until(lambda: _left(load) >= count)
    since = time.monotonic()
    await rests(here, within_s=5.0)
    # Every count of requests is 0 long before a lease could expire, and no connection stays open.
    case.report(f"{_left(load)} clients left; all counts 0 after {time.monotonic() - since:.1f} s")
    assert _left(load) >= count
    case.all_served(load)
    now = await here.eventually(
        lambda: _open(here, case.mode),
        lambda now: all(now[what] <= most for what, most in baseline.items()),
        what=f"the baseline {baseline}",
    )
    case.report(f"connections and requests open as before: {now}, before {baseline}")
    await case.check(here, load.history)


@pytest.mark.short_form("http")
async def test_requests_end_if_clients_leave_before_an_answer(faulty: Callable[..., Any], case: Case) -> None:
    times = case.size(1, 10)
    case.describe(f"clients leave before Envoy has read the picker's answer, {times} times")
    # Requests wait in the queue because admission is paused.
    here = faulty("--sim-ttft", "20", "--sim-itl", "10", config=config(lease_s=30))
    for _ in range(times):
        await here.post("pause")
        callers = [await Caller.ask(here.url, 20) for _ in range(3)]
        await here.until_state(queued=3)
        # While Envoy is stopped, clients leave and requests are placed; Envoy's access log gets no tokens.
        with suspended(here.child("envoy")):
            for caller in callers:
                await caller.leave()
            await here.post("resume")
            await here.until_state(queued=0)
        since = time.monotonic()
        # No endpoint runs these requests, so a sweep releases them long before their leases expire.
        await rests(here, within_s=15.0)
        case.report(f"all counts 0 after {time.monotonic() - since:.1f} s, lease 30 s")
    await case.check(here)


async def test_a_killed_envoys_requests_are_released(faulty: Callable[..., Any], case: Case) -> None:
    kills = case.size(1, 10)
    case.describe(f"SIGKILL of Envoy, {kills} times")
    # Streams fill the pool, and further requests wait in the queue.
    here = faulty("--sim-ttft", "20", "--sim-itl", "20", config=config())
    longest_s = 0.0
    for _ in range(kills):
        streams = [sent(here, "long", 3000, streamed=True) for _ in range(40)]
        await here.until_state(stock=16, queued=24)
        here.child("envoy").kill()
        since = time.monotonic()
        # Once the leases of the killed Envoy's requests have expired, a sweep releases the requests.
        await rests(here)
        longest_s = max(longest_s, time.monotonic() - since)
        assert not any(record.served for record in await asyncio.gather(*streams))
        await ready(here)
    async with closed_loop(here.url, clients=10) as load:
        await load.wait_for_served(50)
    await rests(here)
    case.report(f"all counts 0 within {longest_s:.1f} s ({TERMS})")
    case.all_served(load)
    await case.check(here, load.history)


def _fickle(dice: random.Random, number: int) -> Request:
    """Send a request of a random kind; three of four clients leave before they have the whole answer."""
    request = mixed_request(dice, number)
    leaves_s = dice.uniform(0, 0.6) if dice.random() < 0.75 else None
    return replace(request, tokens=60, leaves_s=leaves_s)


def _left(load: Load) -> int:
    return load.ended[Kind.LEFT]


async def _open(here: Any, mode: str) -> dict[str, int]:
    """Envoy's open connections and requests, by counter, and the number of files that replicas have open,
    except connections from Envoy.
    """
    pickers = f"cluster.{cluster_of(mode)}"
    names = (f"http.{mode}.downstream_cx_active", f"{pickers}.upstream_rq_active")
    names += ("cluster.pool.upstream_rq_active",)
    *values, kept = await envoy_stats(here, *names, f"{pickers}.upstream_cx_active")
    files = sum(here.replica(index).num_fds() for index in range(3)) - kept
    return {**dict(zip(names, values, strict=True)), "files": files}
