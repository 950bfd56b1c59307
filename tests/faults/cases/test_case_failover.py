"""Redis fails over to another server under load, with Sentinels and as a Cluster (G1, G6, G8)."""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from counted_fleet import (
    LEASE_S,
    REPLICAS,
    REST_S,
    all_at_rest,
    all_shared,
    counted,
    refused_with_retry_after,
)
from fault_case import FULL, Case
from model_servers import CountingServers
from redis_clustered import Cluster, clustered
from redis_servers import Server, debian, wait
from redis_watched import Watched, watched

from picker_tools.load.generator import closed_loop, requests_of_flows

SERVERS, EACH = 4, 3
BOUND = SERVERS * EACH
MOST = 2 * BOUND  # the new Redis server may know none of the requests in flight
CLIENTS = 40
SERVICE_S = 0.4
LOOKS, LOOK_S = 10, 0.03
IN_STEP_S = 60.0  # time for a former primary to get in sync; Sentinels also delay a second failover
KINDS = {
    "sentinel": ("Sentinels, Redis 7: the primary is", watched),
    "cluster": ("Cluster of six: the slot's owner is", clustered),
    "cluster_7": (
        "Cluster of six, Redis 7: the slot's owner is",
        lambda folder: clustered(folder, debian("redis-server")),
    ),
}


@dataclass(slots=True)
class Seen:
    """For each kill: peaks of requests in flight before and after the kill, and seconds until each event."""

    before: list[int] = field(default_factory=list)
    replaced_s: list[float] = field(default_factory=list)
    shared_s: list[float] = field(default_factory=list)
    agreed_s: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)


@pytest.mark.parametrize("kind", KINDS if FULL else ["sentinel", "cluster"])
async def test_replicas_use_the_new_primary_after_a_primary_is_killed(
    faulty: Callable[..., Any], case: Case, tmp_path: Path, kind: str
) -> None:
    kills, seen = case.size(1, 5), Seen()
    what, starting = KINDS[kind]
    case.describe(f"{what} killed under load, {kills} times")
    with starting(tmp_path) as redis:
        size = {"servers": SERVERS, "each": EACH, "service_s": SERVICE_S}
        async with counted(faulty, redis.url, **size) as (here, servers):
            async with closed_loop(here.url, clients=CLIENTS, make_request=requests_of_flows(3)) as load:
                for number in range(kills):
                    await load.wait_for_served(2 * BOUND)
                    await here.eventually(lambda: _full(here, servers), within_s=60, what="a full pool")
                    seen.before.append(servers.peak)
                    servers.forget_peak()
                    # Kill the Redis server that has the shared state; its replica is promoted.
                    former = await asyncio.to_thread(_serving, redis)
                    await asyncio.to_thread(former.kill)
                    # Within a lease and a sweep every replica shares the queue and counts all requests.
                    await _converge(here, servers, redis, former, seen)
                    await load.wait_for_served(2 * BOUND)
                    seen.peaks.append(servers.peak)
                    if number == kills - 1:
                        break
                    await asyncio.to_thread(former.revive)
                    await asyncio.to_thread(wait, redis.is_whole, "the old primary in sync", IN_STEP_S)
            since = time.monotonic()
            await all_at_rest(here, servers)
            rested_s = time.monotonic() - since
            await case.check(here, load.history, served_without_redis=True)
    # At most as many requests are admitted in excess as were in flight when the server was killed.
    case.report(f"highest in flight {_joined(seen.before)} before, {_joined(seen.peaks)} after")
    case.report(f"bound {BOUND}, limit during a failover {MOST}")
    assert max(seen.peaks) <= MOST
    # Every refusal has a header retry-after, and no two clients get the same answer.
    refused = refused_with_retry_after(load.history)
    case.report(f"{len(refused)} of {len(load.history)} requests answered 503, no other error")
    case.report(
        f"another server after {_joined(seen.replaced_s)} s, "
        f"all replicas share the queue after {_joined(seen.shared_s)} s, "
        f"Redis's counts agree with the model servers after {_joined(seen.agreed_s)} s (lease {LEASE_S:g} s)"
    )
    case.report(f"all counts 0 {rested_s:.1f} s after the last answer")


async def _converge(
    here: Any, servers: CountingServers, redis: Watched | Cluster, former: Server, seen: Seen
) -> None:
    killed_s = time.monotonic()
    await here.eventually(
        lambda: asyncio.to_thread(_serving, redis, former),
        lambda serving: serving is not former,
        within_s=IN_STEP_S,
        what="another server",
    )
    seen.replaced_s.append(time.monotonic() - killed_s)
    await here.eventually(lambda: all_shared(here), within_s=REST_S, what="shared operation")
    seen.shared_s.append(time.monotonic() - killed_s)
    await here.eventually(
        lambda: _miscounted(here, servers),
        lambda wrong: wrong == 0,
        within_s=REST_S,
        what="counts that agree",
    )
    seen.agreed_s.append(time.monotonic() - killed_s)


async def _full(here: Any, servers: CountingServers) -> bool:
    """Whether the requests in flight are between half of the bound and the bound, and every replica counts
    right.

    On a slow machine Redis may seem slow while all clients start, so that replicas fail over to their local
    budgets (docs/redis.md).
    """
    servers.forget_peak()
    counted_right = await _miscounted(here, servers) == 0
    return counted_right and BOUND / 2 < servers.peak <= BOUND and await all_shared(here)


async def _miscounted(here: Any, servers: CountingServers) -> float:
    """The requests in flight that replicas report, minus the requests in flight at the model servers.

    Redis counts a request before the endpoint gets it and until after its end. Thus the counted stock may
    briefly be too high, but never too low: the least of several readings is the error.
    """
    found: list[float] = []
    for look in range(LOOKS):
        before = servers.in_flight
        state = await here.get("state", REPLICAS[look % len(REPLICAS)])
        found.append(state["stock"] - min(before, servers.in_flight))
        await asyncio.sleep(LOOK_S)
    return min(found)


def _serving(redis: Watched | Cluster, former: Server | None = None) -> Server:
    """The Redis server that has the fleet's state; `former` has it until another server is promoted."""
    if isinstance(redis, Watched):
        return redis.primary()
    found = redis.owner("default", but=[former] if former else [])
    assert found or former, "no node owns the pool's slot"
    return found or former


def _joined(figures: Iterable[float]) -> str:
    return ", ".join(f"{figure:.1f}".removesuffix(".0") for figure in figures)
