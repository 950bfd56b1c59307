"""An endpoint's own limit (`discovery.static[].max_inflight`) is never exceeded and does not limit others."""

import asyncio

from script_fleet import OpenFleet, addresses, ask, asked, config, ended, until, until_is

from picker_fleet.domain.request import Endpoint

(A,) = addresses(1)
ROOM = 1000  # stock per endpoint, in requests: so large that only the endpoints' limits matter


async def test_of_100_concurrent_requests_exactly_5_run_on_an_endpoint_with_limit_5(fleet: OpenFleet) -> None:
    # Two replicas share one endpoint with a limit of 5; the stock has room for 1000 requests.
    async with fleet("a", "b", upper_per=ROOM, listening=True) as it:
        await it.replicas[0].publish(Endpoint(A, max_inflight=5), upper_per=ROOM)
        running: list[int] = []
        counts: list[int] = []
        release = asyncio.Event()

        async def one(number: int) -> None:
            gate = it.replicas[number % 2].gate
            placement = await gate.admit(ask(f"r{number}", flow=f"flow{number % 7}"), stream_owned=False)
            assert placement.endpoints == (A,)
            running.append(number)
            counts.append(len(running))
            await release.wait()
            running.remove(number)
            gate.settle(ended(f"r{number}"))

        # 100 requests arrive at once.
        async with asyncio.TaskGroup() as tasks:
            for number in range(100):
                tasks.create_task(one(number))
            # Exactly 5 requests are in flight, and the others wait.
            await until_is(it.counts, (5, 95, [5]))
            await until(lambda: len(running) == 5)
            # As requests end, all 100 requests are served, never more than 5 at once.
            release.set()
        assert max(counts) == 5
        await until(it.at_rest)
        assert (await it.ledger()).started == {f"r{number}": 1 for number in range(100)}


async def test_a_limit_that_discovery_reports_is_in_force_on_all_replicas(fleet: OpenFleet) -> None:
    # Two replicas have joined a pool whose endpoint has no limit.
    async with fleet("a", "b", joined=config(ROOM, "100ms"), listening=True) as it:
        # Discovery reports a limit of 2 requests to both replicas.
        for replica in it.replicas:
            replica.membership.discovered([Endpoint(A, max_inflight=2)])
        for replica in it.replicas:
            await until(lambda now=replica.cell: [each.max_inflight for each in now.current.endpoints] == [2])
        # Two requests are placed, through either replica, and a third request waits until one of these ends.
        placed = [await it.replicas[i].gate.admit(ask(f"r{i}"), stream_owned=True) for i in range(2)]
        assert [each.endpoints for each in placed] == [(A,), (A,)]
        third = asked(it.replicas[0], "third")
        await until_is(it.counts, (2, 1, [2]))
        it.replicas[1].gate.settle(ended("r1"))
        assert (await third).endpoints == (A,)
        await it.ends(it.replicas[0], "r0", "third")
