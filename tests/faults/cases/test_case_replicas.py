"""Replicas are killed, stopped and replaced under load, and no client gets an error (G1, G4, G6, G7)."""

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from case_fleet import REAP_S, TERMS, cluster_of, config, envoy_stats, model_servers, ready, replace, rests
from fault_case import FULL, TTFT_MS, Case
from whole_fleet import suspended

from picker_tools.load.generator import Request, closed_loop, send_request

CLIENTS = 40
OPTIONS = ("--sim-ttft", TTFT_MS, "--sim-itl", "5")
ENDS = ("completed", "reclaimed")


@pytest.mark.skipif(not FULL, reason="tests/fleet/test_replica_loss.py is its short form")
async def test_no_client_notices_killed_replicas(faulty: Callable[..., Any], case: Case) -> None:
    kills = 20
    case.describe(f"SIGKILL of a replica, {kills} times, at random moments")
    # The load on three replicas has streamed answers, and request bodies of up to 60 KB.
    here, dice = faulty(*OPTIONS, config=config()), random.Random(11)
    async with closed_loop(here.url, clients=CLIENTS) as load:
        for _ in range(kills):
            await load.wait_for_served(dice.randrange(20, 120))
            await ready(here)
            here.replica(dice.randrange(3)).kill()
        await load.wait_for_served(50)
    case.all_served(load)
    since = time.monotonic()
    await rests(here)
    rested_s = time.monotonic() - since
    # The decision log breaks no promise. If only the killed replica received the end of a request, the lease
    # ends the request.
    case.report(f"all counts 0 after {rested_s:.1f} s ({TERMS})")
    found = await case.check(here, load.history, may_end=ENDS)
    case.report(f"{found.ends['reclaimed']} requests ended by their lease")


@pytest.mark.short_form("http")
async def test_a_replica_stopped_for_longer_than_its_leases_keeps_the_bound(
    faulty: Callable[..., Any], case: Case
) -> None:
    stops, lease_s = case.size(1, 10), float(case.size(5, 10))
    case.describe(f"SIGSTOP of a replica beyond its lease, then SIGCONT, {stops} times")
    # The clients keep as many requests running as the pool may; three replicas serve it.
    here, dice, highest = faulty(*OPTIONS, config=config(lease_s=lease_s)), random.Random(5), 0
    async with closed_loop(here.url, clients=CLIENTS) as load:
        for _ in range(stops):
            await load.wait_for_served(dice.randrange(30, 90))
            await ready(here)
            # A replica is stopped for longer than the lease of every request it owns, and then continues.
            with suspended(here.replica(dice.randrange(3))):
                until_s = time.monotonic() + lease_s + 1
                while time.monotonic() < until_s:
                    highest = max(highest, sum(await model_servers(here)))
                    await asyncio.sleep(0.05)
            for _ in range(40):
                highest = max(highest, sum(await model_servers(here)))
                await asyncio.sleep(0.02)
    await rests(here, lease_s + REAP_S)
    # The stopped replica's stale grants admit no request beyond the bound of 16 requests.
    case.report(f"{len(load.unserved)} client errors in {len(load.history)}, {highest} at the model servers")
    found = await case.check(here, load.history, may_end=ENDS, may_resume=True)
    case.report(f"{found.resumed} requests were admitted twice: a stopped replica had also ended them")
    case.report(f"highest stock {found.highest_stock:g} of 16")
    assert found.highest_stock <= 16
    assert highest <= 16


@pytest.mark.skipif(not FULL, reason="only in `make faults`; test_format.py changes only libraries")
async def test_a_rolling_restart_with_another_library_fails_no_request(
    faulty: Callable[..., Any], case: Case, two_versions: Any
) -> None:
    rounds = 4
    case.describe(f"rolling restart with old and new script versions side by side, {rounds} × 3 replicas")
    graceful = config(extproc={"drain_grace": "1s"})
    how = {"config": graceful, "environment": two_versions.environment, "spawned": True}
    here = faulty(*OPTIONS, **how)
    async with closed_loop(here.url, clients=CLIENTS) as load:
        await load.wait_for_served(100)
        for number in range(rounds):
            # The scripts change, and the replicas are replaced one by one.
            two_versions.change(f"version {number}")
            for index in range(3):
                await replace(here, "replicas", index, signal.SIGTERM)
                await ready(here)
                await load.wait_for_served(30)
        async with here.redis() as client:
            libraries = len(await client.function_list())
    # Old and new versions of the scripts run side by side, and no client gets an error.
    case.report(f"{libraries} libraries loaded")
    assert libraries == rounds + 1
    case.all_served(load)
    await rests(here)
    await case.check(here, load.history, may_end=ENDS)


async def test_envoy_refuses_requests_while_no_replica_runs(faulty: Callable[..., Any], case: Case) -> None:
    case.describe("all replicas down, `extproc.on_failure: deny`")
    # With the option `--no-restart` the supervisor does not restart killed replicas.
    here = faulty("--no-restart", *OPTIONS, config=config())
    statuses = await _without_replicas(here, case, 503)
    case.report(f"answers then {statuses}")
    assert statuses == {503: 60}


@pytest.mark.short_form("http")
async def test_envoy_balances_requests_while_no_replica_runs(faulty: Callable[..., Any], case: Case) -> None:
    case.describe("all replicas down, `extproc.on_failure: balance`")
    # Envoy may route without pickers, and the supervisor does not restart killed pickers.
    here = faulty("--no-restart", *OPTIONS, config=config(extproc={"on_failure": "balance"}))
    statuses = await _without_replicas(here, case, 200)
    # Once Envoy sees no healthy replica, Envoy chooses the endpoints itself.
    case.report(f"answers then {statuses}")
    assert statuses == {200: 60}


async def _without_replicas(here: Any, case: Case, settled: int) -> dict[int, int]:
    """Kill all replicas under load. Wait until Envoy, without a healthy replica, answers with status
    `settled`. Return the statuses of 60 more requests; every third has a body of 60 KB.
    """
    async with closed_loop(here.url, clients=8) as load:
        await load.wait_for_served(30)
        for index in range(3):
            here.replica(index).kill()
    since = time.monotonic()

    async def seen() -> tuple[list[int], int]:
        healthy = await envoy_stats(here, f"cluster.{cluster_of(case.mode)}.membership_healthy")
        return healthy, (await send_request(here.url, Request("first ", tokens=1))).status

    await here.eventually(seen, lambda found: found == ([0], settled), what=f"{settled} without replicas")
    statuses = dict(Counter(record.status for record in load.history if record.status != 200))
    assert set(statuses) <= {503}
    case.report(f"answers while replicas died: {statuses}; settled {time.monotonic() - since:.1f} s later")
    asks = [
        Request(f"alone {n} ", tokens=2, streamed=n % 3 == 1, pad_bytes=59_000 * (n % 3 == 2))
        for n in range(60)
    ]
    answers = await asyncio.gather(*(send_request(here.url, request) for request in asks))
    return dict(Counter(answer.status for answer in answers if answer.served or answer.status != 200))
