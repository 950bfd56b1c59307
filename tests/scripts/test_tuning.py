"""Changes to a running queue: every replica's next call is under them, and nothing that waits is lost."""

import itertools

import pytest
from decision_ledger import order_of
from script_fleet import OpenFleet

from picker_fleet.request import Band


async def test_a_raised_bound_dispatches_at_once(fleet: OpenFleet) -> None:
    async with fleet("a", "b", upper_per=1) as it:
        a, b = it.replicas
        await a.admit("runs")
        await a.admit("waits")
        assert await b.store.tune({"upper_per": 2, "lower_per": 2}, {"watermark": 2}) == "1"
        assert order_of(await it.log()) == ["waits"]
        # And what was changed is kept over a publication, until it is taken back
        await a.publish("10.0.0.1:8000", upper_per=1)
        assert (await a.beat()).upper == 2
        assert await a.store.tuned() == ("1", {"upper_per": 2, "lower_per": 2}, {"watermark": 2})
        await a.store.tune({"upper_per": None, "lower_per": None}, {"watermark": None})
        assert (await b.beat()).upper == 1
        assert await b.store.tuned() == ("2", {}, {})


async def test_room_without_an_end_is_filled_reading_a_few_flows_and_not_all(
    valkey_fleet: OpenFleet,
) -> None:
    async with valkey_fleet("a", upper_per=1) as it:
        # Given many flows that wait
        (a,) = it.replicas
        await a.admit("runs")
        for i in range(100):
            await a.admit(f"r{i}", flow=f"flow-{i}")
        # When bounds are raised, then each call looks at the front of the flows, however many there are
        async with it.redis.monitor() as said:
            await a.store.tune({"upper_per": 3, "lower_per": 3}, {"watermark": 3})
            await it.redis.echo("the end")
            asked = []
            while "the end" not in (command := (await said.next_command())["command"]):
                asked.append(command.split())
        fronts = [words for words in asked if words[0] == "ZRANGE" and ":flows:" in words[1]]
        assert fronts
        assert all(0 <= int(words[3]) < 100 for words in fronts)
        assert order_of(await it.log()) == ["r0", "r1"]


async def test_a_paused_pool_queues_and_expires_but_serves_nobody(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=2) as it:
        (a,) = it.replicas
        await a.store.tune({"paused": 1}, {"paused": True})
        assert (await a.beat()).paused
        assert (await a.admit("waits")).what == "queued"
        assert (await a.admit("brief", ttl_s=0.02)).what == "queued"
        await it.after(30)
        await a.sweep()
        assert a.news == [("expired", "brief")]
        await a.store.tune({"paused": None}, {"paused": None})
        assert ("granted", "waits") in a.news


async def test_a_flows_weight_counts_for_what_already_waits(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1, guard_share=0) as it:
        (a,) = it.replicas
        await a.admit("runs")
        for i in range(12):
            for flow in "xy":
                await a.admit(f"{flow}{i}", flow=flow)
        # When one flow's weight is trebled, then it has three of four
        await a.store.tune({"weights": {"y": 3}}, {"weights": {"y": 3}})
        await a.settle("runs")
        for _ in range(11):
            await a.settle(order_of(await it.log())[-1])
        order = order_of(await it.log())
        assert len(order) == 12
        assert sum(name.startswith("y") for name in order) == 9


POLICIES = [
    {"fairness": fairness, "ordering": ordering}
    for fairness in ("weighted-fair", "round-robin", "none")
    for ordering in ("fcfs", "edf", "workload-aware")
]


@pytest.mark.parametrize(
    ("before", "after"),
    [pair for pair in itertools.product(POLICIES, POLICIES) if pair[0] != pair[1]][::5],
)
async def test_policies_change_while_requests_wait(
    fleet: OpenFleet, before: dict[str, str], after: dict[str, str]
) -> None:
    # Given requests of several flows, bands and workloads, named or not, that wait under one policy
    async with fleet("a", upper_per=1, guard_share=0, **before) as it:
        (a,) = it.replicas
        await a.admit("runs")
        for i in range(24):
            await a.admit(
                f"q{i:02}", flow=f"f{i % 3}", band=Band(i % 2), workload=f"w{i % 4}" if i % 4 else "",
                ttl_s=60 - i, criticality=1 + i % 5,
            )  # fmt: skip
        # When another is chosen, and the sweep has filed them anew
        await a.store.tune(dict(after), dict(after))
        while (await a.sweep()).more:
            pass
        # Then the order is the same as if they had come under it
        await a.settle("runs")
        for _ in range(23):
            await a.settle(order_of(await it.log())[-1])
        got = order_of(await it.log())
        assert sorted(got) == [f"q{i:02}" for i in range(24)]
        assert got[:12] == sorted(got[:12], key=lambda name: int(name[1:]) % 2)
        if after == {"fairness": "none", "ordering": "fcfs"}:
            assert got[:12] == sorted(got[:12])
        if after == {"fairness": "none", "ordering": "edf"}:
            assert got[:12] == sorted(got[:12], reverse=True)
        await a.settle(got[-1])
        # And nothing of the former order is left
        assert await it.at_rest()
        for kind in ("queue", "line", "growing", "static", "flows"):
            assert await it.redis.keys(f"{it.keys.prefix}{kind}:*") == []
