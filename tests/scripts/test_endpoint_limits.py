"""An endpoint with a limit of its own (`discovery.static[].max_inflight`): not passed, no bar to others."""

import asyncio
from collections import Counter

from script_fleet import OpenFleet, addresses, ask, ended, until

from picker_fleet.request import Endpoint

A, B, C = addresses(3)
ROOM = 1000  # of the stock, so that the endpoints' limits are what decides


def limited(address: str, most: int) -> Endpoint:
    return Endpoint(address, max_inflight=most)


async def test_of_a_hundred_at_once_exactly_five_are_placed(fleet: OpenFleet) -> None:
    # Two replicas, and room for far more than the one endpoint's limit of 5.
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

        # 100 come at once.
        async with asyncio.TaskGroup() as tasks:
            for number in range(100):
                tasks.create_task(one(number))

            async def all_known() -> bool:
                stock, queued, _ = await it.counts()
                return placed[A] == 5 and stock + queued == 100

            await until(all_known)
            # Exactly 5 run and the others wait.
            assert await it.counts() == (5, 95, [5])
            # When they end, all are served, never more than 5 at once.
            release.set()
        assert most == 5
        await until(it.at_rest)
        assert (await it.ledger()).started == {f"r{number}": 1 for number in range(100)}


async def test_a_limit_that_discovery_reports_is_in_force_on_all_replicas(fleet: OpenFleet) -> None:
    # Two replicas that have joined a pool whose endpoint has no limit.
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
        # Two are placed, at any replica, and the third waits for one of them.
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
