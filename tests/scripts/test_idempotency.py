"""Every script call may be repeated (G6): after a lost reply, or because Envoy or another replica retries."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from proxy import proxy_to
from script_fleet import SETTINGS, UNKNOWN_END, Fleet, OpenFleet, Replica, addresses, ask, doubles

from picker_fleet.state import accounting_token
from picker_fleet.state.store import parse_verdict

Call = Callable[[Replica], Awaitable[object]]
TOKEN = accounting_token.write(ask("gone", workload="w"), "10.0.0.1:8000")

THREE = {**SETTINGS, "upper_per": 3}
# Requests `placed`, `granted` and `queued` are in the state of their name. Request `untaken` was placed by
# its grant, without an acknowledgement. Redis does not know the request `gone`.
CALLS: dict[str, Call] = {
    "admit, in flight": lambda a: a.admit("placed", workload="w"),
    "admit, queued": lambda a: a.admit("queued", workload="w"),
    "admit, new": lambda a: a.admit("new", workload="w"),
    "admit, expired": lambda a: a.admit("new", ttl_s=1, age_s=2, workload="w"),
    "admit, refused": lambda a: a.admit("new", flow="full", workload="w"),
    "place": lambda a: a.place("granted"),
    "admit, untaken": lambda a: a.admit("untaken", workload="w"),
    "place, untaken": lambda a: a.place("untaken"),
    "place, gone": lambda a: a.place("gone"),
    "acknowledge": lambda a: a.store.acknowledge("untaken", 1),
    "acknowledge, gone": lambda a: a.store.acknowledge("gone", 1),
    "settle, untaken": lambda a: a.settle("untaken"),
    "cancel, unclaimed": lambda a: a.store.return_grant("untaken"),
    "settle, in flight": lambda a: a.settle("placed"),
    "settle, granted": lambda a: a.settle("granted"),
    "settle, queued": lambda a: a.settle("queued"),
    "cancel, in flight": lambda a: a.store.cancel("placed", 1, "withdrawn"),
    "cancel, granted": lambda a: a.store.cancel("granted", 1, "cancelled"),
    "cancel, queued": lambda a: a.store.cancel("queued", 1, "expired"),
    "cancel, expired too late": lambda a: a.store.cancel("placed", 1, "expired"),
    "cancel, foreign": lambda a: a.store.cancel("queued", 7, "cancelled"),
    "renew": lambda a: a.store.renew("placed", 1, "", ""),
    "renew, served elsewhere": lambda a: a.store.renew("placed", None, "10.0.0.2:8000", ""),
    "renew, restored": lambda a: a.store.renew("gone", None, "", TOKEN),
    "renew, unknown": lambda a: a.store.renew("gone", None, "", ""),
    "renew, waiting": lambda a: a.store.renew("queued", 1, "", TOKEN),
    "heartbeat": lambda a: a.beat(),
    "publish": lambda a: a.store.publish(THREE, (), config_version="c", endpoints_version="e"),
    "sweep": lambda a: a.sweep(),
    "state": lambda a: a.store.state(60),
    "endpoints": lambda a: a.store.endpoints(),
}
# A rejected request has no record, so a repetition counts as another arrival of the request's workload.
TURNED_AWAY = frozenset(("admit, expired", "admit, refused"))
# Calls whose reply is lost: at least one call for each way in which a connection repeats a call.
LOST = ("admit, new", "place", "settle, in flight", "cancel, granted", "renew, restored", "publish", "sweep")


@asynccontextmanager
async def one_of_each(fleet: OpenFleet, **options: object) -> AsyncIterator[Fleet]:
    """A fleet for three requests: the requests `placed`, `granted` and `untaken` (placed by its grant) are
    in flight, `queued` and `other` wait."""
    async with fleet("a", endpoints=3, upper_per=1, lower_per=1, flow_capacity=3, **options) as (it, a):
        for name, workload in (("placed", "w"), ("ends", ""), ("ends too", "")):
            await a.admit(name, workload=workload)
        await a.admit("granted", workload="w", candidates=",".join(addresses(3)))
        await a.admit("untaken", workload="w")
        await a.settle("ends", "ends too")
        assert a.notifications == [("granted", "granted"), ("placed", "untaken")]
        await a.admit("queued", workload="w")
        await a.admit("other", flow="other")
        for i in range(3):
            await a.admit(f"full{i}", flow="full")
        yield it


@pytest.mark.parametrize("name", CALLS)
async def test_a_repeated_script_call_changes_nothing(fleet: OpenFleet, name: str) -> None:
    async with one_of_each(fleet) as (it, a):
        await CALLS[name](a)
        before = await it.dump()
        await CALLS[name](a)
        after = await it.dump()
        if name in TURNED_AWAY:
            (total, *others), (total_after, *others_after) = (_workload(dump) for dump in (before, after))
            assert (total_after, others_after) == (total + 1, others)
            del before["workloads"], after["workloads"]
        assert after == before


@pytest.mark.parametrize("name", LOST)
async def test_a_script_call_whose_reply_is_lost_takes_effect_once(
    fleet: OpenFleet, valkey_url: str, pool: str, name: str
) -> None:
    async with one_of_each(fleet) as (it, a):
        await CALLS[name](a)
        expected = await it.dump()
        await it.redis.delete(*await it.redis.keys(it.keys.prefix + "*"))
    async with proxy_to(valkey_url) as between, one_of_each(fleet, through={"a": between.url}) as (it, a):
        # The reply is lost after the script ran, and the connection sends the call again.
        between.lose_replies = 1
        await CALLS[name](a)
        assert between.lost == 1
        assert _counts(await it.dump()) == _counts(expected)


def _workload(dump: dict[str, Any]) -> list[float]:
    """The counters of workload `w` that do not depend on time: total, active and dispatched requests."""
    return doubles(dump["workloads"]["w"])[:3]


def _counts(dump: dict[str, Any]) -> dict[str, Any]:
    """The parts of a dump that a lost reply must not change: all except epochs, versions and times."""
    exact = ("stock", "queued", "queued:0", "queued:1", "queued:2", "ready", "dispatches", "ended")
    counted: dict[str, Any] = {name: dump["pool"]["counters"][name] for name in exact}
    counted["load"] = sum(dump["load"].values())  # requests may go to other endpoints
    counted["workloads"] = {id: doubles(text)[:3] for id, text in dump.get("workloads", {}).items()}
    for name in ("requests", "inflight", "timers", "flows:1", "inbox:a"):
        counted[name] = sorted(dump.get(name, ()))
    return counted


async def test_a_request_whose_grant_reply_was_lost_is_placed_once(fleet: OpenFleet, valkey_url: str) -> None:
    async with proxy_to(valkey_url) as between, fleet("a", full=True, through={"a": between.url}) as (it, a):
        await a.admit("waits")
        between.lose_replies = 1
        assert await a.settle("runs") == [UNKNOWN_END]
        assert a.notifications == []
        # The notification of the grant is still in the inbox: a heartbeat delivers it, and `waits` is placed.
        await a.beat()
        assert a.notifications == [("granted", "waits")]
        assert [await a.place("waits"), await a.place("waits")] == [parse_verdict("placed 10.0.0.1:8000")] * 2
        assert await it.counts() == (1, 0, [1])
        await a.beat()
        assert a.notifications == [("granted", "waits")]
