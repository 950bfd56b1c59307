"""A batch in which a script comes upon an error: only the item whose fault it is fails."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from decision_ledger import events_of
from script_fleet import Fleet, OpenFleet, Replica

from picker_fleet.errors import ScriptFailed
from picker_fleet.request import Outcome

BAD = "queue:1:bad"  # the queue of flow `bad` in the band of all requests here


async def in_one_message(*calls: Any) -> Sequence[Any]:
    """The results of `calls`, exceptions too. All but the first, which keeps the link busy, go together."""
    return await asyncio.gather(*calls, return_exceptions=True)


async def answer_of(call: Callable[..., "asyncio.Future[str]"], *args: Any) -> str:
    """Make `call` when the loop comes to it, which puts it into one message with its neighbours."""
    return await call(*args)


async def broken(it: Fleet, name: str) -> bytes | None:
    """Make a key one of another type; its former value."""
    kept = await it.redis.dump(it.keys.prefix + name)
    await it.redis.set(it.keys.prefix + name, "text")
    return kept


async def mended(it: Fleet, name: str, kept: bytes | None) -> None:
    await it.redis.delete(it.keys.prefix + name)
    if kept is not None:
        await it.redis.restore(it.keys.prefix + name, 0, kept)


async def served(replica: Replica, *request_ids: str) -> None:
    """Each is granted in turn, placed, and ends."""
    for request_id in request_ids:
        await replica.beat()
        assert (await replica.place(request_id)).status == "placed"
        await replica.settle(request_id)


async def test_arrivals_beside_one_whose_flow_is_broken_are_queued(valkey_fleet: OpenFleet) -> None:
    # A full pool, and a flow whose queue is of another type.
    async with valkey_fleet("a", full=True) as (it, a):
        kept = await broken(it, BAD)
        # Requests of it and of others arrive in one message.
        _, *others, refused = await in_one_message(
            a.beat(),
            a.admit("g1", flow="good"),
            a.admit("b", flow="bad"),
            a.admit("g2", flow="good"),
            a.admit("h", flow="other"),
            a.admit("b2", flow="bad"),
        )
        # Its own fail in words, and the others wait, each once.
        assert isinstance(refused, ScriptFailed)
        assert "refused admit" in str(refused)
        assert isinstance(others.pop(1), ScriptFailed)
        assert [verdict.status for verdict in others] == ["queued"] * 3
        assert await it.counts() == (1, 3, [1])
        # And are served in their order
        await mended(it, BAD, kept)
        await a.settle("runs")
        await served(a, "g1", "h", "g2")
        assert await it.at_rest()


async def test_an_end_takes_effect_although_its_admission_was_sent_again(valkey_fleet: OpenFleet) -> None:
    # A broken flow.
    async with valkey_fleet("a", full=True) as (it, a):
        kept = await broken(it, BAD)
        # When one arrives beside one of that flow, and leaves in the same message
        await in_one_message(
            a.beat(),
            a.admit("g", flow="good"),
            a.admit("b", flow="bad"),
            answer_of(a.store.cancel, "g", 1, "cancelled"),
        )
        # It has left.
        await mended(it, BAD, kept)
        assert events_of(await it.log(), "g")[-1] == "cancelled"
        await a.settle("runs")
        assert await it.at_rest()


@pytest.mark.parametrize("how", ["cancel", "settle"])
async def test_requests_leave_the_queue_beside_one_whose_flow_is_broken(
    valkey_fleet: OpenFleet, how: str
) -> None:
    # Two of a flow in the queue, and one of a flow that breaks then.
    async with valkey_fleet("a", full=True) as (it, a):
        for name, flow in (("g1", "good"), ("g2", "good"), ("b", "bad")):
            await a.admit(name, flow=flow)
        kept = await broken(it, BAD)
        # When one of each leaves, in one message
        if how == "cancel":
            leaving = [answer_of(a.store.cancel, name, 1, "cancelled") for name in ("g1", "b")]
        else:
            leaving = [answer_of(a.store.settle, name, Outcome.CLIENT_GONE) for name in ("g1", "b")]
        _, left, refused = await in_one_message(a.beat(), *leaving)
        # Only that of the broken flow fails.
        assert left == ("ended" if how == "cancel" else "left llama")
        assert isinstance(refused, ScriptFailed)
        await mended(it, BAD, kept)
        assert await it.counts() == (1, 2, [1])
        # And who stays is served
        await a.settle("runs")
        await served(a, "b", "g2")
        assert await it.at_rest()


async def test_an_admission_that_failed_halfway_does_not_stop_the_queue(valkey_fleet: OpenFleet) -> None:
    # A script that failed after it had put a request into its queue, and is not asked again.
    async with valkey_fleet("a", full=True) as (it, a):
        await a.admit("first", flow="good")
        await it.redis.zadd(it.keys.prefix + "queue:1:good", {"stray": 1})
        await it.redis.zadd(it.keys.prefix + "queue:1:lone", {"stray": 1})
        await it.redis.zadd(it.keys.prefix + "flows:1", {"lone": -1})
        # When its turn comes, it is taken out, and the next one has it.
        await a.settle("runs")
        await served(a, "first")
        assert await it.at_rest()


async def test_a_batch_refused_for_one_item_costs_each_a_second_call_at_most(valkey_fleet: OpenFleet) -> None:
    # A broken flow.
    async with valkey_fleet("a", full=True) as (it, a):
        await broken(it, BAD)
        await it.redis.config_resetstat()
        # Every item of a batch is of it.
        _, *answers = await in_one_message(a.beat(), *(a.admit(f"b{n}", flow="bad") for n in range(16)))
        # All fail, after one call together and one each.
        assert all(isinstance(answer, ScriptFailed) for answer in answers)
        calls = (await it.redis.info("commandstats"))["cmdstat_fcall"]["calls"]
        assert calls == 1 + 16 + 1
        # And the connection goes on
        assert (await a.admit("g", flow="good")).status == "queued"
