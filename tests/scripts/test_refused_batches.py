"""After a script error within a batch, only the item that causes the error fails."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from script_fleet import Fleet, OpenFleet, Replica, in_turn

from picker_fleet.domain.errors import ScriptFailed
from picker_fleet.domain.request import Outcome
from picker_fleet.state.replies import SettleReply, name_of


async def in_one_message(*calls: Any) -> Sequence[Any]:
    """The results or exceptions of `calls`; while the first is in flight, others gather in one message."""
    return await asyncio.gather(*calls, return_exceptions=True)


@contextlib.asynccontextmanager
async def broken(it: Fleet) -> AsyncIterator[None]:
    """Within the block, the queue key of flow `bad` in the Default band has the wrong type."""
    key = it.keys.prefix + "queue:1:bad"
    kept = await it.redis.dump(key)
    await it.redis.set(key, "text")
    yield
    await it.redis.delete(key)
    if kept is not None:
        await it.redis.restore(key, 0, kept)


async def served(replica: Replica, *request_ids: str) -> None:
    """Deliver each grant by a heartbeat, place the request and settle it, in this order."""
    for request_id in request_ids:
        await replica.beat()
        assert name_of(await replica.place(request_id)) == "placed"
        await replica.settle(request_id)


async def test_a_batch_queues_all_arrivals_except_arrivals_of_a_broken_flow(fleet: OpenFleet) -> None:
    # The stock is full, and the queue key of one flow has the wrong type.
    async with fleet("a", full=True) as (it, a):
        async with broken(it):
            arrivals = {"g1": "good", "b": "bad", "g2": "good", "h": "other", "b2": "bad"}
            arriving = (a.admit(name, flow=flow) for name, flow in arrivals.items())
            _, g1, b, g2, h, b2 = await in_one_message(a.beat(), *arriving)
            for refused in (b, b2):
                assert isinstance(refused, ScriptFailed)
                assert "refused admit" in str(refused)
            assert {name_of(verdict) for verdict in (g1, g2, h)} == {"queued"}
            assert await it.counts() == (1, 3, [1])
        await a.settle("runs")
        await served(a, "g1", "h", "g2")
        assert await it.at_rest()


@pytest.mark.parametrize(
    ("how", "args", "answer"),
    [
        ("cancel", (1, "cancelled"), "ended"),
        ("settle", (Outcome.CLIENT_GONE,), SettleReply("left", "llama")),
    ],
    ids=["cancel", "settle"],
)
async def test_a_broken_flow_does_not_keep_other_requests_in_the_queue(
    fleet: OpenFleet, how: str, args: tuple[Any, ...], answer: object
) -> None:
    # Two requests of a good flow wait, and one request of a flow whose key then gets the wrong type.
    async with fleet("a", full=True) as (it, a):
        for name, flow in (("g1", "good"), ("g2", "good"), ("b", "bad")):
            await a.admit(name, flow=flow)
        async with broken(it):
            leaving = [in_turn(getattr(a.store, how), name, *args) for name in ("g1", "b")]
            _, left, refused = await in_one_message(a.beat(), *leaving)
        assert left == answer
        assert isinstance(refused, ScriptFailed)
        assert await it.counts() == (1, 2, [1])
        await a.settle("runs")
        await served(a, "b", "g2")
        assert await it.at_rest()


async def test_the_items_of_a_failed_batch_are_sent_again_once_each(fleet: OpenFleet) -> None:
    async with fleet("a", full=True) as (it, a), broken(it):
        await it.redis.config_resetstat()
        _, *answers = await in_one_message(a.beat(), *(a.admit(f"b{n}", flow="bad") for n in range(16)))
        # All items fail, after one call with the whole batch and one call for each item.
        assert all(isinstance(answer, ScriptFailed) for answer in answers)
        assert (await it.redis.info("commandstats"))["cmdstat_fcall"]["calls"] == 1 + 16 + 1
        assert name_of(await a.admit("g", flow="good")) == "queued"
