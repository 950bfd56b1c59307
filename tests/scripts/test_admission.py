"""Admission cases that tests/model lacks: the gate's errors, long queues, arrivals in one message."""

import asyncio

import pytest
import redis
from decision_ledger import order_of
from direct_calls import ClockedPool
from script_fleet import OpenFleet, asked

from picker_fleet.domain.errors import InsufficientFlowCapacity, NoEndpoints, TooManyFlows, TotalCapacity
from picker_fleet.state.replies import name_of


async def test_each_exceeded_queue_limit_raises_its_documented_error(fleet: OpenFleet) -> None:
    async with fleet("a", total_capacity=2, flow_capacity=1, max_flows=2, full=True) as (_, a):
        await a.admit("x0", flow="x")
        with pytest.raises(InsufficientFlowCapacity):
            await asked(a, "x1", flow="x")
        await a.admit("y0", flow="y")
        with pytest.raises(TooManyFlows):
            await asked(a, "z0", flow="z")
        await a.store.set_live_config({"max_flows": 9}, {})
        with pytest.raises(TotalCapacity):
            await asked(a, "z0", flow="z")
        await a.publish()
        with pytest.raises(NoEndpoints):
            await asked(a, "n0", flow="n")
        assert a.gate.queue.waiting == 0


async def test_an_admission_before_the_first_publish_is_answered_unknown_pool(fleet: OpenFleet) -> None:
    async with fleet("a") as (it, a):
        await it.redis.delete(*await it.redis.keys(it.keys.prefix + "*"))
        assert name_of(await a.admit("r")) == "unknown-pool"
        pulse = await a.beat()
        assert (pulse.epoch, pulse.was_known) == ("0", False)
        assert not (await a.sweep()).ran


async def test_requests_registered_again_in_one_message_keep_their_order(fleet: OpenFleet) -> None:
    # Three requests that first arrived within 1 ms are admitted again, the oldest last. The ids of the two
    # requests of equal age sort in reverse.
    async with fleet("a", full=True) as (it, a):
        ages_s = {"b": 0.0501, "a": 0.0501, "z": 0.0505}
        await asyncio.gather(a.beat(), *(a.admit(name, age_s=age_s) for name, age_s in ages_s.items()))
        # The oldest request is served first; requests of equal age are served in the order of the message.
        await a.settle("runs")
        for _ in range(2):
            await a.settle(order_of(await it.log())[-1])
        assert order_of(await it.log()) == ["z", "b", "a"]


def test_a_call_moves_at_most_256_requests_that_reached_the_wait_cap(client: redis.Redis, pool: str) -> None:
    direct = ClockedPool(client, pool)
    direct.publish("e:1", upper_per=1, ordering="workload-aware", wait_cap_ms=5000)
    direct.call("heartbeat", "a", "{}", 60_000)
    for number in range(300):
        direct.admit(f"r{number}", workload="", criticality=4 if number == 100 else 3)
    assert client.zcard(f"{direct.prefix}growing:1:flow") == 299
    direct.passes(6000)
    # The call moves 256 requests and grants the most critical request; the next call moves the others.
    direct.settle("r0")
    assert client.zcard(f"{direct.prefix}growing:1:flow") == 299 - 256
    assert client.hkeys(f"{direct.prefix}inbox:a") == [b"r100"]
    direct.settle("r100")
    assert client.zcard(f"{direct.prefix}growing:1:flow") == 0
