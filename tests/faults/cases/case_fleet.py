"""The configuration of the fault suite's fleets, and helpers that read every count of requests."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import httpx
from crowd import http_client
from fleet_load import at_rest, total
from whole_fleet import Fleet, exact_bounds

from picker_fleet.state.keys import Keys
from picker_tools.load.generator import Answer, Request, send_request

LEASE_S = 3.0
SWEEP_S = 1.0  # `request_queue_controller.expiry_cleanup_interval`: a sweep ends expired leases
MACHINE_S = 6.0  # extra seconds to wait, because the test machine is busy
REAP_S = SWEEP_S + MACHINE_S
TERMS = f"lease {LEASE_S:g} s, a sweep every {SWEEP_S:g} s"
KEYS = Keys.of("default")


def config(
    *, lease_s: float = LEASE_S, per_endpoint: float = 4, **sections: dict[str, Any]
) -> dict[str, Any]:
    """Configuration with short leases, up to `per_endpoint` requests per endpoint, and further `sections`."""
    return {
        "leases": {
            "inflight": f"{lease_s:g}s", "access_log_interval": "1s", "replica_silence": "2s",
            "heartbeat": "500ms", "adoption_grace": "3s",
        },
        "request_queue_controller": exact_bounds(per_endpoint),
        "fair_request_queue": {"total_capacity": 20_000, "flow_capacity": 20_000, "queue_ttl": "60s"},
        **sections,
    }  # fmt: skip


async def log_of(fleet: Fleet) -> list[dict[str, str]]:
    """The entries of the decision log so far."""
    entries: list[dict[str, str]] = []
    last = "-"
    async with fleet.redis() as client:
        while page := await client.xrange(KEYS.log, min=last, count=5000):
            entries += [fields for _, fields in page]
            last = f"({page[-1][0]}"
    return entries


async def model_servers(fleet: Fleet) -> list[int]:
    """Running and waiting requests on each simulator's metrics page; -1 if the simulator does not answer."""

    async def busy(address: str) -> int:
        try:
            page = (await client.get(f"http://{address}/metrics")).text
        except httpx.TransportError:
            return -1
        return int(total(page, "vllm:num_requests_running") + total(page, "vllm:num_requests_waiting"))

    async with http_client(timeout=5.0) as client:
        addresses = [endpoint["address"] for endpoint in fleet.state["endpoints"]]
        return list(await asyncio.gather(*map(busy, addresses)))


async def rests(fleet: Fleet, within_s: float = LEASE_S + REAP_S) -> None:
    """Wait until every count of requests in Redis, the replicas and the simulators is exactly 0.

    The default of the argument `within_s` is a lease, a sweep and MACHINE_S together.
    """
    end_s = time.monotonic() + within_s
    await at_rest(fleet, within_s=within_s)
    left_s = max(end_s - time.monotonic(), MACHINE_S)
    await fleet.eventually(
        lambda: model_servers(fleet), lambda busy: not any(busy), within_s=left_s, what="idle model servers"
    )


async def ready(fleet: Fleet, replicas: Sequence[int] = (0, 1, 2)) -> None:
    """Wait until each of `replicas` reports readiness and passes Envoy's health checks."""

    async def look() -> bool:
        try:
            pages = [await fleet.admin("/readyz", replica) for replica in replicas]
            return all(page.is_success for page in pages) and await _healthy(fleet) >= len(replicas)
        except (httpx.TransportError, ValueError):
            return False  # a replica or Envoy is starting

    await fleet.eventually(look, within_s=30, what="ready replicas")


async def envoy_stats(fleet: Fleet, *names: str) -> list[int]:
    """Values of Envoy's counters and gauges called `names`, in this order."""
    lines = (await fleet.envoy_admin("/stats")).text.splitlines()
    found = dict(line.split(": ", 1) for line in lines if ": " in line)
    return [int(found[name]) for name in names]


def cluster_of(mode: str) -> str:
    """The name of the Envoy cluster of pickers that receives requests in `mode`."""
    return "picker-http" if mode == "http" else "picker"


async def _healthy(fleet: Fleet) -> int:
    """Number of replicas that Envoy considers healthy: the minimum over Envoy's clusters of pickers."""
    lines = (await fleet.envoy_admin("/stats?filter=cluster.picker.*membership_healthy")).text.splitlines()
    return min(int(line.rsplit(" ", 1)[1]) for line in lines)


def sent(fleet: Fleet, prompt: str, tokens: int, **how: Any) -> "asyncio.Task[Answer]":
    """Send a request without waiting for an answer; the arguments `how` are other fields of Request."""
    return asyncio.create_task(send_request(fleet.url, Request(prompt, tokens, **how)))


async def replace(fleet: Fleet, part: str, index: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send signal `number` to a process of `part` (`replicas` or `endpoints`); wait for a new process."""

    def pid() -> int:
        return int(fleet.state[part][index]["pid"])

    former = pid()
    os.kill(former, number)
    await fleet.eventually(pid, lambda now: now != former, within_s=40, what="another process")
