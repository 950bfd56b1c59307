"""Orders across bands, flows and requests: what each policy serves next."""

import struct

from decision_ledger import order_of
from script_fleet import Fleet, OpenFleet, Replica

from picker_fleet.request import Band, Outcome


async def served(it: Fleet, a: Replica, count: int) -> list[str]:
    """Free one place after another; the requests that got them, in order."""
    await a.settle("runs")
    for _ in range(count):
        await a.settle(order_of(await it.log())[-1])
    await it.ledger()
    return order_of(await it.log())


async def test_weighted_bands_share_by_weight(fleet: OpenFleet) -> None:
    # Given twenty waiting in each band
    async with fleet("a", upper_per=1, band_policy="weighted", guard_share=0) as (it, a):
        await a.admit("runs")
        for i in range(20):
            for band in Band:
                await a.admit(f"{band.name}{i}", band=band, flow=f"flow{band}")
        # When ten are served, then seven, two and one are theirs
        first = (await served(it, a, 9))[:10]
        counts = [sum(name.startswith(band.name) for name in first) for band in Band]
        assert counts == [7, 2, 1]


async def test_strict_bands_serve_a_lower_one_only_when_the_higher_are_empty(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1) as (it, a):
        await a.admit("runs")
        for name, band in (("s", 2), ("d", 1), ("c", 0), ("d2", 1)):
            await a.admit(name, band=Band(band), flow=name)
        assert await served(it, a, 4) == ["c", "d", "d2", "s"]


async def test_round_robin_gives_each_flow_one_a_round_whatever_it_costs(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=100, lower_per=1, fairness="round-robin") as (it, a):
        await a.admit("runs", cost=100)
        for name in ("x1", "x2", "y1", "y2", "z1"):
            await a.admit(name, flow=name[0], cost=9 if name[0] == "x" else 1, weight=5)
        assert await served(it, a, 5) == ["x1", "y1", "z1", "x2", "y2"]


async def test_no_fairness_is_one_order_for_the_band(fleet: OpenFleet) -> None:
    # Given a flow with many requests before another's one, and a part of the queue for each flow
    async with fleet("a", upper_per=1, fairness="none", flow_capacity=2) as (it, a):
        await a.admit("runs")
        for name in ("x1", "x2", "x3", "y1", "x4"):
            await a.admit(name, flow=name[0])
        # When they are served, then as they came, and no flow's part was asked for
        assert await served(it, a, 5) == ["x1", "x2", "x3", "y1", "x4"]


async def test_earliest_deadline_first_within_a_flow(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1, ordering="edf") as (it, a):
        await a.admit("runs")
        for name, ttl_s in (("late", 50), ("soon", 20), ("middle", 30)):
            await a.admit(name, ttl_s=ttl_s)
        # When one leaves and the rest are served, then by deadline
        await a.store.cancel("middle", 1, "cancelled")
        await a.admit("sooner", ttl_s=25)
        assert await served(it, a, 3) == ["soon", "sooner", "late"]
        assert await it.redis.keys(it.keys.prefix + "queue:*") == []


async def test_a_higher_criticality_goes_first_and_a_workload_is_served_in_its_order(
    fleet: OpenFleet,
) -> None:
    # Given two workloads' requests, the more critical ones later
    async with fleet("a", upper_per=1, ordering="workload-aware", rate_weight=0) as (it, a):
        await a.admit("runs")
        for name, criticality in (("low1", 1), ("low2", 5), ("high1", 4), ("high2", 4)):
            await a.admit(name, workload=name[:-1], criticality=criticality)
        # When they are served, then low2 waits for low1, whose score counts for both
        assert await served(it, a, 4) == ["high1", "high2", "low1", "low2"]
        for kind in ("line", "growing", "static"):
            assert await it.redis.keys(f"{it.keys.prefix}{kind}*") == []


async def test_a_workload_that_asks_often_goes_behind(fleet: OpenFleet) -> None:
    # Given a workload with a high rate, and one that asks once
    async with fleet("a", upper_per=1, ordering="workload-aware", window_ms=1000, rate_cap=10) as (it, a):
        await a.admit("runs")
        for i in range(8):
            await a.admit(f"often{i}", workload="often")
        await a.admit("once", workload="once")
        # When one is served, then the one that came last but asks seldom
        assert (await served(it, a, 0)) == ["once"]


async def test_past_the_cap_a_longer_wait_counts_no_more(fleet: OpenFleet) -> None:
    # Given a cap of 50 ms that an uncritical request has long passed
    async with fleet("a", upper_per=1, ordering="workload-aware", wait_cap_ms=50) as (it, a):
        await a.admit("runs")
        await a.admit("old", workload="old", criticality=2)
        await it.after(120)
        await a.admit("young", workload="young", criticality=4)
        await it.after(60)
        # When one is served, then the more critical, which has reached the cap too
        assert await served(it, a, 1) == ["young", "old"]


async def test_the_workloads_average_wait_can_be_the_signal(fleet: OpenFleet) -> None:
    # Given a workload that has waited on average, and one that never has
    async with fleet(
        "a", upper_per=1, ordering="workload-aware", wait_signal="workload_average", wait_cap_ms=1000
    ) as it:
        (a,) = it.replicas
        await a.admit("runs")
        await a.admit("w0", workload="waited")
        await it.after(150)
        await a.settle("runs")
        # When both have one waiting, the other's the older
        await a.admit("n1", workload="new")
        await a.admit("w1", workload="waited")
        await a.settle("w0")
        # Then the average decides
        assert order_of(await it.log()) == ["w0", "w1"]


async def test_real_costs_correct_what_a_flow_was_charged(fleet: OpenFleet) -> None:
    # Given two flows whose estimates are equal, though one's requests cost a hundred times as much
    async with fleet("a", upper_per=10, lower_per=10, flow_capacity=1000, guard_share=0) as (it, a):
        await a.admit("runs", cost=10)
        for i in range(120):
            await a.admit(f"dear{i}", flow="dear", cost=10)
            await a.admit(f"cheap{i}", flow="cheap", cost=10)
        await a.settle("runs")
        spent = {"dear": 0.0, "cheap": 0.0}
        # When each is settled with what it cost
        while spent["cheap"] < 100:
            name = order_of(await it.log(8))[-1]
            real = 100.0 if name.startswith("dear") else 1.0
            spent[name.rstrip("0123456789")] += real
            await a.store.settle(name, Outcome.COMPLETED, real, None)
        # Then both get as much, within one request of each
        assert abs(spent["dear"] - spent["cheap"]) <= 101


async def test_a_charge_below_nothing_is_corrected_like_any_other(fleet: OpenFleet) -> None:
    # Given a flow that was charged one for its turn, and is then given back nine by another policy
    async with fleet("a", upper_per=10, lower_per=1, fairness="round-robin", guard_share=0) as (it, a):
        await a.admit("runs", cost=10)
        for name in ("x1", "x2", "x3"):
            await a.admit(name, flow="x", cost=10)
        await a.settle("runs")
        await a.store.set_live_config({"fairness": "weighted-fair"}, {"fairness": "weighted-fair"})
        await a.sweep()
        await a.store.settle("x1", Outcome.COMPLETED, 1.0, None)
        # When the next, whose tag is below 0, is settled with what it cost
        await a.store.settle("x2", Outcome.COMPLETED, 5.0, None)
        # Then that is given back, too
        corrected = [(entry.request, entry.note) for entry in await it.log() if entry.event == "corrected"]
        assert corrected == [("x1", "-9"), ("x2", "-5")]


# spec 001: average wait s, requests in the window of 60 s, criticality -> score, waits rounded there
EXAMPLES = {
    "batch-job-123": (2.36, 2, 4, 0.3355),
    "interactive-user-456": (0.8, 150, 5, 0.4002),
    "low-priority-789": (15.0, 6, 2, 0.2598),
}


async def test_the_specifications_worked_examples(valkey_fleet: OpenFleet) -> None:
    # Given workloads with the history of the examples, all but the request at hand
    async with valkey_fleet(
        "a", upper_per=1, ordering="workload-aware", wait_signal="workload_average"
    ) as it:
        (a,) = it.replicas
        await a.admit("runs", flow="other")
        slot = await it.now_ms() // 10_000
        for name, (wait_s, arrivals, _, _) in EXAMPLES.items():
            numbers = [arrivals - 1, 0, 1, wait_s * 1000, 0, slot, arrivals - 1, *[0] * 6]
            await it.redis.hset(it.keys.prefix + "workloads", name, struct.pack("<13d", *numbers))
        # When each has a request waiting
        for name, (_, _, criticality, _) in EXAMPLES.items():
            await a.admit(name, workload=name, criticality=criticality)
        # Then its score is the example's, and so is the order
        scores = dict(await it.redis.zrange(it.keys.prefix + "static:1:flow", 0, -1, withscores=True))
        for name, (_, _, _, expected) in EXAMPLES.items():
            assert abs(-scores[name] - expected) < 2e-4
        assert await served(it, a, 2) == ["interactive-user-456", "batch-job-123", "low-priority-789"]
