"""A request outlives the replica it came by: the replica that brings its id next takes it over (G7)."""

import asyncio

import pytest
from decision_ledger import events_of
from script_fleet import OpenFleet, asked, waiting

from picker_fleet.errors import ClientGone, ExpiredTtl


async def test_more_waiting_requests_than_one_sweep_scans_are_all_orphaned(fleet: OpenFleet) -> None:
    # 250 waiting by a replica that falls silent, and ten of another among them.
    async with fleet("a", "b", full=True) as (it, a, b):
        await asyncio.gather(*(a.admit(f"q{i}") for i in range(125)))
        await asyncio.gather(*(b.admit(f"b{i}") for i in range(10)))
        await asyncio.gather(*(a.admit(f"q{i}") for i in range(125, 250)))
        await a.store.leave()
        # When the sweep runs until it has no more to do, at its own word, a bounded part a call.
        calls = 1
        while (await b.sweep()).more:
            calls += 1
        assert calls >= 3
        last = {entry.request: entry.event for entry in await it.log()}
        expected = {f"q{i}": "orphaned" for i in range(250)} | {f"b{i}": "queued" for i in range(10)}
        assert expected.items() <= last.items()


async def test_a_replica_that_comes_back_learns_that_it_was_away(fleet: OpenFleet) -> None:
    # A replica whose waiting request was held, its walk half done.
    async with fleet("a", "b", full=True) as (it, a, b):
        await asyncio.gather(*(a.admit(f"q{i}") for i in range(120)))
        await a.store.leave()
        assert (await b.sweep()).more
        # When it beats again, it is told, is swept no further, and may register what it holds.
        assert not (await a.beat()).was_known
        assert not await it.has("orphan_cursors")
        assert (await a.admit("q0")).status == "queued"
        assert (await a.beat()).was_known


async def test_a_newer_stream_of_the_same_request_takes_over_its_wait(fleet: OpenFleet) -> None:
    # A request that waits, and comes again to the same replica over a new stream.
    async with fleet("a", full=True) as (it, a):
        first, second = await waiting(it, a, "q"), asked(a, "q")
        # The first has no client any more, and the second has the turn.
        with pytest.raises(ClientGone):
            await first
        assert a.gate.waiting == 1
        await a.settle("runs")
        assert (await second).endpoints == ("10.0.0.1:8000",)
        await it.ends(a, "q")
        assert (await it.ledger()).started["q"] == 1


async def test_an_old_owner_whose_time_is_up_leaves_the_adopter_alone(fleet: OpenFleet) -> None:
    # A waiter whose request was adopted elsewhere.
    async with fleet("a", "b", full=True) as (it, a, b):
        waiter = await waiting(it, a, "q", ttl_s=0.8)
        await b.admit("q", attempt=99)
        # When its own timer ends, its client has an answer, and the queue decides about the request.
        with pytest.raises(ExpiredTtl):
            await waiter
        assert events_of(await it.log(), "q")[:2] == ["queued", "adopted"]
        await b.sweep()
        assert await b.store.cancel("q", 99, "cancelled") in ("ended", "unknown")
