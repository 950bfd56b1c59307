"""Redis is unavailable under load, for all replicas or for one (G8)."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from counted_fleet import REPLICAS, all_at_rest, all_shared, counted, format_ms, refused_with_retry_after
from fault_case import Case
from fleet_load import metric, one_token
from proxy import Proxy
from redis_servers import Server
from whole_fleet import Fleet

from picker_tools.load.generator import Answer, closed_loop, requests_of_flows

SERVERS, EACH = 4, 3
BOUND = SERVERS * EACH
CLIENTS = 40
SERVICE_S = 0.4
# The queue's capacity and the TTL are so small that some requests are refused as saturated and some expire.
TTL_S = 0.6
ROOM = {"total_capacity": 18, "flow_capacity": 18, "queue_ttl": f"{TTL_S:g}s"}
REFUSED_WITHIN_S = 1.0  # a refusal comes at most this long after the TTL
PAUSE_S = 0.25
SHARED_S = 5.0  # seconds from Redis's answer until all replicas use the shared queue
LOSSES: dict[str, tuple[str, Callable[[Server], None], Callable[[Server], None]]] = {
    "killed": ("SIGKILL of Redis, which restarts empty", Server.kill, Server.revive),
    "stopped": ("SIGSTOP of Redis, then SIGCONT", Server.freeze, Server.thaw),
}


@pytest.mark.parametrize("loss", LOSSES)
async def test_the_bound_holds_while_redis_is_unavailable(
    faulty: Callable[..., Any], case: Case, valkey: Server, loss: str
) -> None:
    fault, lose, end_loss = LOSSES[loss]
    away_s, beside_s = 60, 15
    case.describe(f"{fault} after {away_s} s")
    size = {"servers": SERVERS, "each": EACH, "service_s": SERVICE_S}
    async with counted(faulty, valkey.url, **size, fair_request_queue=ROOM) as (here, servers):
        # The clients outnumber the queue's capacity.
        async with closed_loop(
            here.url, clients=CLIENTS, make_request=requests_of_flows(3), pause_s=PAUSE_S
        ) as load:
            await load.wait_for_served(2 * BOUND)
            began_s = time.monotonic()
            await asyncio.sleep(beside_s)
            lost_s, before = time.monotonic(), servers.peak
            lose(valkey)
            servers.forget_peak()
            await asyncio.sleep(away_s)
            await asyncio.to_thread(end_loss, valkey)
            back_s, meanwhile = time.monotonic(), servers.peak
            servers.forget_peak()
            await here.eventually(lambda: all_shared(here), within_s=30, what="shared operation")
            shared_s = time.monotonic() - back_s
            await asyncio.sleep(beside_s)
            await load.wait_for_served(2 * BOUND)
            ended_s = time.monotonic()
        # Requests in flight never exceed the bound.
        peaks = before, meanwhile, servers.peak
        case.report(
            f"highest in flight {peaks[0]} before, {peaks[1]} in the outage, {peaks[2]} after, of {BOUND}"
        )
        assert max(peaks) <= BOUND
        refused_with_retry_after(load.history)
        case.report(
            f"answers a second {_rate(load.history, began_s, lost_s)} before, "
            f"{_rate(load.history, lost_s, back_s)} in outage, {_rate(load.history, back_s, ended_s)} after"
        )
        case.report(_refusals("in the outage", load.history, lost_s, back_s))
        case.report(_refusals("before", load.history, began_s, lost_s))
        assert any(record.served for record in load.history if lost_s < record.sent_s < back_s)
        expired = [record for record in load.history if record.reason == "rejected-ttl-expired"]
        assert expired
        assert max(record.took_s for record in expired) <= TTL_S + REFUSED_WITHIN_S
        # All replicas use the shared queue again, and then every count of requests returns to 0.
        case.report(f"all shared again {shared_s:.1f} s after Redis answered")
        assert shared_s <= SHARED_S
        await all_at_rest(here, servers)


async def test_requests_are_served_while_one_replica_loses_redis(
    faulty: Callable[..., Any], case: Case, between: Proxy
) -> None:
    away_s, service_s = 16, 24.0  # the outage outlasts two leases of 6 s
    case.describe(f"one replica, which gets Envoy's access log, loses Redis for {away_s} s")
    leases = {"inflight": "6s", "access_log_interval": "2s", "replica_silence": "3s"}
    size = {"servers": SERVERS, "each": EACH, "service_s": service_s, "leases": leases}
    async with counted(faulty, between.url, **size) as (here, servers):
        async with closed_loop(here.url, clients=CLIENTS, make_request=one_token) as load:
            logged = await here.eventually(lambda: _logged(here), any, within_s=30, what="log entries")
            between.vanished_for = here.state["replicas"][logged.index(max(logged))]["id"].encode()
            await asyncio.sleep(away_s)
            servers.service_s = SERVICE_S
            between.vanished_for = b""
            between.cut()
            await here.eventually(lambda: all_shared(here), within_s=30, what="shared operation")
            await load.wait_for_served(2 * BOUND)
        case.report(f"highest in flight {servers.peak} of {BOUND}")
        assert servers.peak <= 2 * BOUND  # the replica may admit its share beyond the bound (docs/redis.md)
        case.report(f"{len(refused_with_retry_after(load.history))} of {len(load.history)} requests refused")
        await all_at_rest(here, servers)
        await case.check(here, load.history, served_without_redis=True)


async def _logged(here: Fleet) -> list[float]:
    """The access-log entries of running requests that each replica has received."""
    return [await metric(here, "epp_access_log_entries_total", each, kind="alive") for each in REPLICAS]


def _rate(history: list[Answer], from_s: float, to_s: float) -> str:
    served = sum(record.served and from_s <= record.done_s < to_s for record in history)
    return f"{served / (to_s - from_s):.0f}"


def _refusals(when: str, history: list[Answer], from_s: float, to_s: float) -> str:
    """Text: for each reason, the number and the delays of refusals of requests sent in the interval."""
    kinds: dict[str, list[float]] = defaultdict(list)
    for record in history:
        if record.unserved and from_s <= record.sent_s < to_s:
            kinds[record.reason.removeprefix("rejected-") or "no reason given"].append(record.took_s)
    parts = [f"{len(times)} {kind} ({format_ms(times)})" for kind, times in sorted(kinds.items())]
    return f"refused {when}: {', '.join(parts) or 'none'}"
