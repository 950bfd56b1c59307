"""A fleet whose model servers run in the test's process and count requests in flight exactly."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from case_fleet import REAP_S
from fleet_load import at_rest, metric
from model_servers import CountingServers, counting_servers, static
from whole_fleet import Fleet, exact_bounds

from picker_tools.load.generator import Answer, quantile

REPLICAS = (0, 1, 2)
LEASE_S = 15.0  # `leases.inflight`
REST_S = LEASE_S + REAP_S


@asynccontextmanager
async def counted(
    faulty: Callable[..., Fleet],
    redis_url: str,
    *,
    servers: int,
    each: float,
    service_s: float,
    **sections: dict[str, Any],
) -> AsyncIterator[tuple[Fleet, CountingServers]]:
    """Start three replicas on the Redis at `redis_url`, and `servers` model servers of `service_s`.

    At most `each` requests run on each server; the argument `sections` overrides other settings. The fleet is
    stopped at the end of the block, while Redis still runs.
    """
    async with counting_servers(servers, service_s) as counting:
        config = {
            "discovery": static(counting.addresses),
            # Without metrics pages the fleet would need long trials to find the bound.
            "request_queue_controller": {**exact_bounds(each), "initial_per_backend": int(each)},
            **sections,
        }
        options = ("--endpoints", "0", "--redis", redis_url, "--no-restart")
        here = await asyncio.to_thread(lambda: faulty(*options, config=config))
        yield here, counting
        await asyncio.to_thread(here.stop)


async def all_shared(here: Fleet) -> bool:
    """Whether every replica uses the shared queue."""
    states = await asyncio.gather(*(here.get("state", replica) for replica in REPLICAS))
    return all(state["degraded"] is False for state in states)


async def departures(here: Fleet) -> int:
    """The number of failovers to the local queue, over all replicas."""
    return int(await metric(here, "epp_failover_transitions_total", to="local"))


async def all_at_rest(here: Fleet, servers: CountingServers) -> None:
    """Wait until every replica counts exactly 0 requests; assert that no model server runs a request."""
    for replica in REPLICAS:
        await at_rest(here, replica, within_s=REST_S)
    assert servers.in_flight == 0


def refused_with_retry_after(history: Iterable[Answer]) -> list[Answer]:
    """The answers to unserved requests; asserts that each is a 503 with a retry-after of at least 1 s."""
    failed = [record for record in history if record.unserved]
    assert [record for record in failed if record.status != 503 or not record.retry_after] == []
    assert all(int(record.retry_after) >= 1 for record in failed)
    return failed


def format_ms(times_s: Iterable[float]) -> str:
    """Median, 99th percentile and maximum of `times_s` as text."""
    ordered = sorted(times_s)
    if not ordered:
        return "none"
    median_s, p99_s = quantile(ordered, 0.5), quantile(ordered, 0.99)
    return f"p50 {median_s * 1000:.0f}, p99 {p99_s * 1000:.0f}, max {ordered[-1] * 1000:.0f} ms"
