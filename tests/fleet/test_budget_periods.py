"""A budget's period ends while requests run, with and without Redis: whole replicas on a simulated clock."""

import asyncio
import datetime
from typing import Any

import pytest
from extproc_client import body, converse, headers
from redis_servers import Server
from time_lapse import BEGIN_S, entry_of, fleet, message_of, time_lapse

from picker_fleet.ingress.ext_proc.exchange import Exchange

BEFORE = datetime.datetime(2028, 2, 29, 23, 59, tzinfo=datetime.UTC)  # a leap day's last minute
ASK = b'{"model": "llama", "prompt": "hi", "max_tokens": 10}'
TENANTS = {
    "prices": {"*": {"prompt": 0}},
    "nodes": [{"path": "llama", "over_limit": "reject", "budget": {"units": 120, "period": "month"}}],
}


async def begin(replica: Any, number: int) -> Any:
    """Send a request of 10 units; return its access-log entry, None if the budget refuses it."""
    exchange = Exchange(replica.pool.context)
    said = await converse(exchange, headers("lean", {"x-request-id": f"request-{number}"}), body(ASK))
    exchange.close()
    if said[-1].HasField("immediate_response"):
        assert b"over_limit" in said[-1].immediate_response.body
        return None
    return entry_of(f"request-{number}", said)


def end(replica: Any, entry: Any, answer: int) -> None:
    entry.common_properties.access_log_type = "DownstreamEnd"
    entry.response.response_code.value = 200
    usage = entry.common_properties.metadata.filter_metadata["picker.usage"]
    usage.update({"prompt_tokens": 5, "completion_tokens": answer})
    replica._log.on_message(message_of(entry))


@pytest.mark.parametrize("outage", [False, True], ids=["with Redis", "without Redis"])
def test_a_new_period_begins_with_a_whole_budget_at_midnight_in_utc(
    valkey: Server, monkeypatch: pytest.MonkeyPatch, outage: bool
) -> None:
    async def serve(some: Any, first: int) -> int:
        """How many of 24 requests, at all replicas in turn, the budget allows."""
        served = 0
        for number in range(first, first + 24):
            replica = some.replicas[number % 3]
            if entry := await begin(replica, number):
                end(replica, entry, 10)
                served += 1
        await asyncio.sleep(1.0)
        return served

    async def left(some: Any) -> float:
        (row,) = await some.replicas[0].pool.store.reads.tenants(["llama"])
        (limit,) = row.limits
        return float(limit.left)

    async def life() -> None:
        async with fleet(valkey.url, "lean", 3, {"tenants": TENANTS}) as some:
            await asyncio.sleep(5.0)
            assert await serve(some, 1) == 12
            await some.replicas[0].pool.store.top_up_tenant("llama", "budget", "month", 10)
            await asyncio.sleep(57.0 - lapse.time())
            across = await begin(some.replicas[0], 0)
            assert await left(some) == 0
            if outage:
                lapse.server.close()
                valkey.kill()
            await asyncio.sleep(4.0)
            end(some.replicas[0], across, 35)
            await asyncio.sleep(3.0)
            # The 25 units above the estimate are charged to the new period; without Redis they are not.
            assert await serve(some, 100) == (12 if outage else 9)
            if outage:
                valkey.revive()
                lapse.server.connect()
                lapse.server.set_clock(lapse.time())
                await asyncio.sleep(60.0)
            assert await left(some) == (0 if outage else 5)
            assert await serve(some, 200) == 0

    with time_lapse(valkey.url, monkeypatch) as lapse:
        lapse.server.step_s = BEFORE.timestamp() - BEGIN_S
        lapse.server.set_clock(0.0)
        lapse.run_until_complete(asyncio.wait_for(life(), 3600.0))
