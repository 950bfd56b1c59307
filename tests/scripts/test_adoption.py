"""A request outlives the replica it came by: the replica that brings its id next takes it over (G7)."""

import asyncio

import pytest
from decision_ledger import events_of, order_of
from script_fleet import OpenFleet, ask, ended, until

from picker_fleet.errors import ClientGone, ExpiredTtl
from picker_fleet.state.store import Decision


async def test_an_adopted_queued_request_keeps_its_place(fleet: OpenFleet) -> None:
    # Given three waiting by one replica
    async with fleet("a", "b", upper_per=1) as (it, a, b):
        await a.admit("runs")
        for name in ("q0", "q1", "q2"):
            await a.admit(name)
        # When another replica brings the second and the first of them
        assert (await b.admit("q1", attempt=5)).status == "queued"
        assert (await b.admit("q0", attempt=6)).status == "queued"
        assert (a.adopted, b.adopted) == (0, 2)
        # Then they are served in their old order, and the adopter hears of it
        for ends in ("runs", "q0", "q1"):
            await b.settle(ends)
        assert order_of(await it.log()) == ["q0", "q1", "q2"]
        assert b.notifications == [("granted", "q0"), ("granted", "q1")]
        await a.beat()
        assert a.notifications == [("granted", "q2")]
        assert (await it.ledger()).started == dict.fromkeys(("runs", "q0", "q1", "q2"), 1)


async def test_an_adopted_granted_request_is_placed_at_once(fleet: OpenFleet) -> None:
    # Given a request granted to a replica that has not placed it
    async with fleet("a", "b", upper_per=1) as (it, a, b):
        await a.admit("runs")
        await a.admit("r")
        await a.settle("runs")
        # When another brings it, then it has the endpoint, and the stock is taken once
        assert await b.admit("r", attempt=5) == Decision("placed", "10.0.0.1:8000")
        assert await it.counts() == (1, 0, [1])
        # And the old owner's grant is worth nothing
        assert (await a.place("r")).status == "gone"
        assert await it.redis.exists(it.keys.prefix + "inbox:a") == 0
        await it.ledger()


async def test_an_adopted_granted_request_without_an_endpoint_is_refused(fleet: OpenFleet) -> None:
    # Given a granted request, when its adopter asks for endpoints that do not exist, then it is over
    async with fleet("a", "b", upper_per=1) as (it, a, b):
        await a.admit("runs")
        await a.admit("r")
        await a.settle("runs")
        assert await b.admit("r", subset=("10.9.9.9:1",)) == Decision("refused", "no-endpoints 1")
        await it.ledger()
        assert await it.at_rest()


async def test_an_adopted_placed_request_stays_where_it_is(fleet: OpenFleet) -> None:
    # Given a placed request on one of many endpoints
    async with fleet("a", "b", endpoints=4) as (it, a, b):
        placed = await a.admit("r")
        # When another replica brings it, then it is told the same endpoints in the same order
        assert await b.admit("r", attempt=5) == placed
        # And neither can take it back: Envoy may still have it from the other
        assert await a.store.cancel("r", 1, "withdrawn") == "foreign"
        assert await b.store.cancel("r", 5, "cancelled") == "foreign"
        assert sum((await it.counts())[2]) == 1
        # When its end is told, then it is over
        await b.settle("r")
        assert await it.at_rest()


async def test_an_admission_that_is_repeated_can_be_cancelled(fleet: OpenFleet) -> None:
    # Given a request that was placed, when the reply is lost and the same stream asks again
    async with fleet("a", endpoints=4) as (it, a):
        placed = await a.admit("r", attempt=3)
        assert await a.admit("r", attempt=3) == placed
        # Then it is still that stream's own
        assert await a.store.cancel("r", 3, "cancelled") == "ended"
        assert await it.at_rest()


async def test_a_late_cancel_of_the_old_owner_harms_no_queued_request(fleet: OpenFleet) -> None:
    # Given a queued request that was adopted, by another replica or a newer stream of the same
    async with fleet("a", "b", upper_per=1) as (it, a, b):
        await a.admit("runs")
        for name, adopter in (("q0", b), ("q1", a)):
            await a.admit(name, attempt=1)
            await adopter.admit(name, attempt=2)
            # When the old stream is cancelled or runs out of time, then nothing happens to it
            assert await a.store.cancel(name, 1, "cancelled") == "foreign"
            assert await a.store.cancel(name, 1, "expired") == "foreign"
        assert (await it.counts())[1] == 2


async def test_a_silent_replicas_requests_are_orphaned_and_adopted_in_their_old_place(
    fleet: OpenFleet,
) -> None:
    # Given a request of a replica that falls silent, and a younger one of another
    async with fleet("a", "b", upper_per=1) as (it, a, b):
        await b.admit("runs")
        await a.admit("old", ttl_s=3600)
        await b.admit("young")
        await a.store.leave()
        await b.sweep()
        # When its id is brought to the live replica during the grace of a minute
        verdict = await b.admit("old", attempt=5, ttl_s=3600)
        # Then it has its own time to live, not the grace, and is served before the younger one
        assert verdict.status == "queued"
        assert float(verdict.detail) > 600_000
        await b.settle("runs")
        assert order_of(await it.log()) == ["old"]
        await it.ledger()
        # And nothing is left of the silent one
        for name in ("inbox:a", "orphans"):
            assert await it.redis.exists(it.keys.prefix + name) == 0
        assert await it.redis.hkeys(it.keys.prefix + "about") == ["b"]
        assert await it.redis.zrange(it.keys.replicas, 0, -1) == ["b"]


async def test_an_orphaned_request_nobody_brings_is_abandoned(fleet: OpenFleet) -> None:
    # Given a held request
    async with fleet("a", "b", upper_per=1, silence_ms=200) as (it, a, b):
        await b.admit("runs")
        await a.admit("q")

        async def abandoned() -> bool:
            await b.beat(silence_s=0.2)
            await b.sweep(grace_s=0.1)
            return "abandoned" in events_of(await it.log(), "q")

        # When its grace is over, then it is removed, and never granted
        await until(abandoned)
        assert events_of(await it.log(), "q") == ["queued", "held", "abandoned"]
        await b.settle("runs")
        await it.ledger()
        assert await it.at_rest()
        # And nothing is told to a replica that will not ask
        assert await it.redis.exists(it.keys.prefix + "inbox:a") == 0


async def test_notifications_for_a_replica_that_is_gone_are_not_kept(fleet: OpenFleet) -> None:
    # Given a replica that was swept away, and a late admission of it
    async with fleet("a", "b", upper_per=1) as (it, a, b):
        await b.admit("runs")
        await a.admit("q")
        await a.store.leave()
        await b.sweep()
        assert (await a.admit("late", ttl_s=0.05)).status == "queued"
        await it.after(60)
        # When that expires, then no inbox is begun that nobody would empty
        await b.sweep()
        assert events_of(await it.log(), "late") == ["queued", "expired"]
        assert await it.redis.exists(it.keys.prefix + "inbox:a") == 0


async def test_nothing_is_granted_to_a_silent_replica(fleet: OpenFleet) -> None:
    # Given a silent replica's request at the head of the queue, before any sweep
    async with fleet("a", "b", upper_per=1) as (it, a, b):
        await b.admit("runs")
        await a.admit("dead")
        await b.admit("alive")
        await a.store.leave()
        # When capacity comes free, then the live replica's request is served
        await b.settle("runs")
        log = await it.log()
        assert (order_of(log), events_of(log, "dead")) == (["alive"], ["queued", "held"])
        await it.ledger()


async def test_more_waiting_requests_than_one_sweep_scans_are_all_orphaned(fleet: OpenFleet) -> None:
    # Given 250 waiting by a replica that falls silent, and ten of another among them
    async with fleet("a", "b", upper_per=1) as (it, a, b):
        await b.admit("runs")
        await asyncio.gather(*(a.admit(f"q{i}") for i in range(125)))
        await asyncio.gather(*(b.admit(f"b{i}") for i in range(10)))
        await asyncio.gather(*(a.admit(f"q{i}") for i in range(125, 250)))
        await a.store.leave()
        # When the sweep runs until it has no more to do, then at its own word, a bounded part a call
        calls = 1
        while (await b.sweep()).more:
            calls += 1
        assert calls >= 3
        ledger = await it.ledger()
        assert set(ledger.orphaned) == {f"q{i}" for i in range(250)}
        assert set(ledger.queued) == {f"b{i}" for i in range(10)}


async def test_a_replica_that_comes_back_learns_that_it_was_away(fleet: OpenFleet) -> None:
    # Given a replica whose waiting request was held, its walk half done
    async with fleet("a", "b", upper_per=1) as (it, a, b):
        await b.admit("runs")
        await asyncio.gather(*(a.admit(f"q{i}") for i in range(120)))
        await a.store.leave()
        assert (await b.sweep()).more
        # When it beats again, then it is told, is swept no further, and may register what it holds
        assert not (await a.beat()).was_known
        assert await it.redis.exists(it.keys.prefix + "orphans") == 0
        assert (await a.admit("q0")).status == "queued"
        assert (await a.beat()).was_known
        await it.ledger()


async def test_a_newer_stream_of_the_same_request_takes_over_its_wait(fleet: OpenFleet) -> None:
    # Given a request that waits, and comes again to the same replica over a new stream
    async with fleet("a", upper_per=1) as (it, a):
        await a.admit("runs")
        first = asyncio.create_task(a.gate.admit(ask("q"), stream_owned=False))
        await it.until_queued(1)
        second = asyncio.create_task(a.gate.admit(ask("q"), stream_owned=False))
        # Then the first has no client any more, and the second has the turn
        with pytest.raises(ClientGone):
            await first
        assert a.gate.waiting == 1
        await a.settle("runs")
        assert (await second).endpoints == ("10.0.0.1:8000",)
        a.gate.settle(ended("q"))
        await until(it.at_rest)
        assert (await it.ledger()).started["q"] == 1


async def test_an_old_owner_whose_time_is_up_leaves_the_adopter_alone(fleet: OpenFleet) -> None:
    # Given a waiter whose request was adopted elsewhere
    async with fleet("a", "b", upper_per=1) as (it, a, b):
        await a.admit("runs")
        waiter = asyncio.create_task(a.gate.admit(ask("q", ttl_s=0.8), stream_owned=False))
        await it.until_queued(1)
        await b.admit("q", attempt=99)
        # When its own timer ends, then its client has an answer, and the queue decides about the request
        with pytest.raises(ExpiredTtl):
            await waiter
        assert events_of(await it.log(), "q")[:2] == ["queued", "adopted"]
        await b.sweep()
        assert await b.store.cancel("q", 99, "cancelled") in ("ended", "unknown")
        await it.ledger()
