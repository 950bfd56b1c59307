"""No starvation (G3): what is overdue is served at the guard's share, whatever bands and scores say."""

from collections.abc import Sequence

from decision_ledger import Entry, order_of
from script_fleet import OpenFleet

from picker_fleet.request import Band


def by_guard(entries: Sequence[Entry]) -> list[str]:
    return [entry.request for entry in entries if entry.event == "granted" and entry.by == "guard"]


async def test_one_dispatch_in_ten_goes_to_the_most_overdue(fleet: OpenFleet) -> None:
    # Given overdue sheddable requests beside many critical ones
    async with fleet("a", upper_per=1, starvation_ms=30, flow_capacity=100) as it:
        (a,) = it.replicas
        await a.admit("runs")
        for i in range(5):
            await a.admit(f"shed{i}", band=Band.SHEDDABLE, flow="shed")
        await it.after(40)
        for i in range(60):
            await a.admit(f"crit{i}", band=Band.CRITICAL, flow="crit")
        # When 41 are served while the critical ones are not yet overdue for longer
        await a.settle("runs")
        for _ in range(40):
            await a.settle(order_of(await it.log())[-1])
        log = await it.log()
        # Then the overdue got the first and each tenth after it, oldest first
        order = order_of(log)
        assert by_guard(log) == [f"shed{i}" for i in range(5)]
        assert [order.index(f"shed{i}") for i in range(5)] == [0, 10, 20, 30, 40]
        await it.ledger()


async def test_without_a_share_nobody_is_served_out_of_turn(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1, starvation_ms=1, guard_share=0) as it:
        (a,) = it.replicas
        await a.admit("runs")
        await a.admit("shed", band=Band.SHEDDABLE)
        await it.after(5)
        await a.admit("crit", band=Band.CRITICAL)
        await a.settle("runs")
        await a.settle("crit")
        assert order_of(await it.log()) == ["crit", "shed"]
        assert by_guard(await it.log()) == []


async def test_by_default_half_the_ttl_is_patience(fleet: OpenFleet) -> None:
    # Given a short-lived and a long-lived request of equal age
    async with fleet("a", upper_per=1) as it:
        (a,) = it.replicas
        await a.admit("runs")
        await a.admit("long", band=Band.SHEDDABLE, flow="l", ttl_s=60)
        await a.admit("short", band=Band.SHEDDABLE, flow="s", ttl_s=10, age_s=6)
        await a.admit("crit", band=Band.CRITICAL)
        # When a place comes free, then the one past half its time has it
        await a.settle("runs")
        assert order_of(await it.log()) == ["short"]
        assert (await it.state())["guard_dispatches_total"] == 1


async def test_what_ends_while_overdue_is_forgotten(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1, starvation_ms=1) as it:
        (a,) = it.replicas
        await a.admit("runs")
        for name in ("one", "two"):
            await a.admit(name)
        await it.after(5)
        await a.sweep()
        assert (await it.state())["overdue"] == 2
        await a.store.cancel("one", 1, "cancelled")
        await a.settle("runs", "two")
        assert (await it.state())["overdue"] == 0
        assert await it.at_rest()


async def test_a_share_that_does_not_divide_one_is_kept_all_the_same(fleet: OpenFleet) -> None:
    # Given overdue requests enough, beside a higher band, and a share of 0.3
    async with fleet("a", upper_per=1, starvation_ms=30, flow_capacity=200, guard_share=0.3) as it:
        (a,) = it.replicas
        await a.admit("runs")
        for i in range(40):
            await a.admit(f"shed{i}", band=Band.SHEDDABLE, flow="shed")
        await it.after(40)
        for i in range(80):
            await a.admit(f"crit{i}", band=Band.CRITICAL, flow="crit")
        # When a hundred are served
        await a.settle("runs")
        for _ in range(99):
            await a.settle(order_of(await it.log())[-1])
        # Then thirty were served by the guard, and the one it had saved up for
        assert len(by_guard(await it.log())) == 30
        await it.ledger()
