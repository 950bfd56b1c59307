"""An endpoint with a limit of its own (`discovery.static[].max_inflight`): not passed, no bar to others."""

import asyncio
from collections import Counter

from script_fleet import Fleet, OpenFleet, Replica, addresses, ask, ended, until

from picker_fleet.request import Endpoint

A, B, C = addresses(3)
ROOM = 1000  # of the stock, so that the endpoints' limits are what decides


def limited(address: str, most: int) -> Endpoint:
    return Endpoint(address, max_inflight=most)


async def blocked(it: Fleet) -> list[str]:
    """The state of flow queues that wait for an endpoint."""
    return sorted(await it.redis.keys(it.keys.prefix + "block*"))


async def take(it: Replica, request_id: str, **fields: object) -> str:
    """Admit; a grant is placed at once. What came of it in the end."""
    verdict = await it.admit(request_id, **fields)
    if ("granted", request_id) in it.notifications:
        it.notifications.remove(("granted", request_id))
        return (await it.place(request_id, **fields)).status
    return verdict.status


async def test_of_a_hundred_at_once_exactly_five_are_placed(fleet: OpenFleet) -> None:
    # Given two replicas, and room for far more than the one endpoint's limit of 5
    async with fleet("a", "b", upper_per=ROOM, listening=True) as it:
        await it.replicas[0].publish(limited(A, 5), upper_per=ROOM)
        placed: Counter[str] = Counter()
        most = 0
        release = asyncio.Event()

        async def one(number: int) -> None:
            nonlocal most
            gate = it.replicas[number % 2].gate
            placement = await gate.admit(ask(f"r{number}", flow=f"flow{number % 7}"), stream_owned=False)
            placed[placement.endpoints[0]] += 1
            most = max(most, placed[A])
            await release.wait()
            placed[A] -= 1
            gate.settle(ended(f"r{number}"))

        # When 100 come at once
        async with asyncio.TaskGroup() as tasks:
            for number in range(100):
                tasks.create_task(one(number))

            async def all_known() -> bool:
                stock, queued, _ = await it.counts()
                return placed[A] == 5 and stock + queued == 100

            await until(all_known)
            # Then exactly 5 run and the others wait
            assert await it.counts() == (5, 95, [5])
            # When they end, then all are served, never more than 5 at once
            release.set()
        assert most == 5
        await until(it.at_rest)
        assert (await it.ledger()).started == {f"r{number}": 1 for number in range(100)}


async def test_a_hot_prefix_does_not_pile_up_on_one_endpoint(fleet: OpenFleet) -> None:
    # Given an endpoint that has everybody's prefix, by a score that no load outweighs, and a limit of 2
    async with fleet("a", upper_per=ROOM) as (it, a):
        await a.publish(limited(A, 2), Endpoint(B), Endpoint(C), upper_per=ROOM)
        verdicts = [await a.admit(f"r{i}", candidates=f"{A}=100,{B}=0,{C}=0") for i in range(6)]
        # Then two are there, and the others where there is room; no answer names it as a fallback either
        assert [verdict.status for verdict in verdicts] == ["placed"] * 6
        assert (await it.state())["in_flight"] == {A: 2, B: 2, C: 2}
        assert not any(A in verdict.detail for verdict in verdicts[2:])


async def test_a_request_for_a_full_endpoint_waits_and_blocks_nobody(fleet: OpenFleet) -> None:
    # Given one that fills the only endpoint some may go to
    async with fleet("a", upper_per=ROOM) as (it, a):
        await a.publish(limited(A, 1), Endpoint(B), upper_per=ROOM)
        assert await take(a, "first", subset=(A,), flow="x") == "placed"
        # When two more flows come that may go nowhere else, then they wait
        for name in ("x2", "y1"):
            assert await take(a, name, subset=(A,), flow=name[0]) == "queued"
        # And others go on, before them and with a queue
        for name in ("z1", "z2", "z3"):
            assert await take(a, name, flow="z") == "placed"
        # When the first ends, then the same call grants who has waited longest, and no other
        await a.settle("first")
        assert [what for what in a.notifications if what[0] == "granted"] == [("granted", "x2")]
        assert (await a.place("x2", subset=(A,))).status == "placed"
        assert (await it.counts())[1] == 1
        # When that ends, then the last; and nothing is kept of their waiting
        await a.settle("x2")
        assert (await a.place("y1", subset=(A,))).status == "placed"
        assert await blocked(it) == []
        await a.settle("y1", "z1", "z2", "z3")
        assert await it.at_rest()
        await it.ledger()


async def test_a_request_that_leaves_while_it_waits_for_an_endpoint_is_forgotten(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=ROOM) as (it, a):
        await a.publish(limited(A, 1), limited(B, 1), Endpoint(C), upper_per=ROOM)
        for name in (A, B):
            await take(a, name, subset=(name,))
        # Given one that waits for either of two
        assert await take(a, "waits", subset=(A, B), flow="w") == "queued"
        assert len(await blocked(it)) == 3
        # When its client leaves, then nothing of it is left
        await a.store.cancel("waits", 1, "cancelled")
        assert await blocked(it) == []
        await a.settle(A, B)
        assert await it.at_rest()


async def test_a_grant_that_is_not_placed_yet_counts_against_the_limits(fleet: OpenFleet) -> None:
    # Given two endpoints with one place each; one request runs, another was queued behind a pause and granted
    async with fleet("a", upper_per=ROOM) as (it, a):
        await a.publish(limited(A, 1), limited(B, 1), upper_per=ROOM)
        await a.admit("runs")
        await a.store.set_live_config({"paused": 1}, {})
        await a.admit("granted")
        await a.store.set_live_config({"paused": None}, {})
        assert ("granted", "granted") in a.notifications
        # When a third comes, then it does not take the last place, though the queue is empty
        assert (await a.admit("late")).status == "queued"
        assert (await a.place("granted")).status == "placed"
        assert (await it.counts())[1:] == (1, [1, 1])


async def test_a_limit_that_is_lowered_or_lifted_holds_from_the_next_decision_on(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=ROOM) as (it, a):
        await a.publish(limited(A, 3), upper_per=ROOM)
        for i in range(3):
            await a.admit(f"r{i}")
        # When it is lowered below what runs, then nothing new goes there until enough have ended
        await a.publish(limited(A, 2), upper_per=ROOM)
        assert (await a.admit("waits")).status == "queued"
        await a.settle("r0")
        assert (await it.counts())[1] == 1
        # When it is lifted, then the one that waits is let go at once
        await a.publish(Endpoint(A), upper_per=ROOM)
        assert ("granted", "waits") in a.notifications
        assert [each.max_inflight for each in await a.store.endpoints()] == [None]


async def test_a_limit_that_discovery_reports_is_in_force_on_all_replicas(fleet: OpenFleet) -> None:
    # Given two replicas that have joined a pool whose endpoint has no limit
    joined = {"leases": {"heartbeat": "100ms"}, "request_queue_controller": {"watermark_per_backend": ROOM}}
    async with fleet("a", "b", joined=joined, listening=True) as it:
        # When discovery reports one, to both
        for replica in it.replicas:
            assert replica.membership is not None
            replica.membership.discovered([limited(A, 2)])

        async def known() -> bool:
            return all(
                [each.max_inflight for each in replica.cell.current.endpoints] == [2]
                for replica in it.replicas
            )

        await until(known)
        # Then two are placed, at any replica, and the third waits for one of them
        placed = [await it.replicas[i].gate.admit(ask(f"r{i}"), stream_owned=True) for i in range(2)]
        assert [each.endpoints for each in placed] == [(A,), (A,)]
        third = asyncio.create_task(it.replicas[0].gate.admit(ask("third"), stream_owned=True))

        async def waits() -> bool:
            return (await it.counts())[1:] == (1, [2])

        await until(waits)
        it.replicas[1].gate.settle(ended("r1"))
        assert (await third).endpoints == (A,)
        it.replicas[0].gate.settle(ended("r0"))
        it.replicas[0].gate.settle(ended("third"))
        await until(it.at_rest)
