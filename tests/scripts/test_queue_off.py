"""`request_queue_controller.enabled: false`: requests are placed as they come, and nobody waits."""

from script_fleet import OpenFleet, addresses

from picker_fleet.endpoints.snapshot import Endpoint
from picker_tools.audit.auditor import audit

A, B = addresses(2)


async def test_without_a_queue_all_are_placed_at_once_where_the_load_is_least(fleet: OpenFleet) -> None:
    # Given bounds of two requests, and no queue
    async with fleet("a", "b", endpoints=2, upper_per=1, queue_enabled=0) as it:
        a, b = it.replicas
        # When fifty come through either replica, of any flow and band
        for i in range(50):
            verdict = await (a, b)[i % 2].admit(f"r{i}", flow=f"flow{i % 3}", band=i % 3, cost=1 + i % 4)
            assert verdict.what == "placed"
        # Then each endpoint has half, all have a lease, and nothing is taken of the stock
        assert await it.counts() == (0, 0, [25, 25])
        assert (await it.state())["leases"] == 50
        # And one that is sent again keeps its place
        assert (await b.admit("r0")).what == "placed"
        assert await it.counts() == (0, 0, [25, 25])
        # When they end, then nothing is left, and by the log nothing was broken
        await a.settle(*(f"r{i}" for i in range(50)))
        assert await it.at_rest()
        report = audit([fields for _, fields in await it.redis.xrange(it.keys.log)])
        assert report.violations == 0, report.as_json()["promises"]


async def test_the_queue_goes_off_and_on_while_requests_wait(fleet: OpenFleet) -> None:
    # Given a full fleet and more who wait than one call serves
    async with fleet("a", endpoints=1, upper_per=1) as it:
        (a,) = it.replicas
        for i in range(60):
            await a.admit(f"r{i}")
        assert await it.counts() == (1, 59, [1])
        # When the queue is switched off, then they are let go, a part by each call
        await a.store.tune({"queue_enabled": 0}, {})
        while (await it.counts())[1]:
            await a.beat()
        for i in range(1, 60):
            assert (await a.place(f"r{i}")).what == "placed"
        assert (await a.admit("straight")).what == "placed"
        assert await it.counts() == (1, 0, [61])
        # When it is on again, then what was let go without it is not counted; the bound holds for the rest
        await a.store.tune({"queue_enabled": None}, {})
        assert (await a.admit("waits")).what == "queued"
        await a.settle(*(f"r{i}" for i in range(60)), "straight")
        assert (await a.place("waits")).what == "placed"
        await a.settle("waits")
        assert await it.at_rest()
        report = audit([fields for _, fields in await it.redis.xrange(it.keys.log)])
        assert report.violations == 0, report.as_json()["promises"]


async def test_without_a_queue_limits_hold_and_who_finds_none_below_its_own_is_refused(
    fleet: OpenFleet,
) -> None:
    async with fleet("a") as it:
        (a,) = it.replicas
        await a.publish(Endpoint(A, max_inflight=1), Endpoint(B, max_inflight=1), queue_enabled=0)
        assert [(await a.admit(f"r{i}")).what for i in range(2)] == ["placed"] * 2
        verdict = await a.admit("third")
        assert (verdict.what, verdict.detail.split()[0]) == ("refused", "saturated")
        # While it is paused, requests are held all the same: that is an operator's wish
        await a.settle("r0", "r1")
        await a.store.tune({"paused": 1}, {})
        assert (await a.admit("held")).what == "queued"
        await a.store.tune({"paused": None}, {})
        assert (await a.place("held")).what == "placed"
