"""A placed request whose end was not reported is reclaimed once its endpoint no longer runs the request."""

import pytest
from msgspec.structs import replace
from script_fleet import SETTINGS, UNKNOWN_END, Fleet, OpenFleet, Replica, addresses, ask

from picker_fleet.endpoints.readings import EndpointMetrics, encode_reading
from picker_fleet.state import accounting_token

UNSEEN_S = 1.0
(E1,) = addresses(1)


async def counted(fleet: Fleet) -> set[str]:
    """Ids of the requests that still have a record."""
    return set(await fleet.redis.hkeys(fleet.keys.prefix + "requests"))


async def seen(fleet: Fleet, *ids: str, ago_s: float) -> None:
    """Set the leases of the requests `ids` as if their last renewal had come `ago_s` seconds ago."""
    lease_ends_ms = await fleet.now_ms() - ago_s * 1000 + SETTINGS["lease_ms"]
    await fleet.redis.zadd(fleet.keys.prefix + "inflight", dict.fromkeys(ids, lease_ends_ms))


async def found(a: Replica, unseen_s: float = 1e6) -> tuple[int, tuple[str, ...]]:
    """The number of requests that a sweep reclaims, and the endpoints whose metrics pages the sweep wants."""
    swept = await a.sweep(unseen_s=unseen_s)
    return swept.given_up, swept.suspects


async def report(
    fleet: Fleet,
    running: int,
    *,
    ago_s: float = 0.1,
    before: tuple[float, int] | None = None,
    at_ms: float | None = None,
) -> None:
    """Store a reading of the endpoint's last metrics page, which counts `running` requests; `before`: age (s)
    and load of the page before. Ages count from `at_ms`, by default from now."""
    now_ms = int(at_ms or await fleet.now_ms())
    page = EndpointMetrics(now_ms - int(ago_s * 1000), waiting=0.0, running=float(running))
    if before is not None:
        page = replace(page, before_ms=now_ms - int(before[0] * 1000), before_load=float(before[1]))
    await fleet.redis.hset(fleet.keys.prefix + "metrics", E1, encode_reading(page, 0))


async def test_the_oldest_requests_are_reclaimed_if_two_metrics_pages_count_fewer(fleet: OpenFleet) -> None:
    names = [f"r{i}" for i in range(6)]
    async with fleet("a", upper_per=10) as (it, a):
        for name in names:
            await a.admit(name)
        await seen(it, *names[4:], ago_s=4)  # r4 and r5 were renewed last, but before both pages
        for age, name in enumerate(reversed(names[:4])):
            await seen(it, name, ago_s=10 + age)  # request r0 is the oldest

        # One metrics page after the last lease, or an older page that counts all, reclaims no request.
        for before in (None, (11.0, 0), (1.0, 6)):
            await report(it, 3, before=before)
            assert await found(a, UNSEEN_S) == (0, (E1,))

        # Of 6 requests the older page counts 4, the newer page 3: two requests are on neither page.
        await report(it, 3, before=(1.0, 4))
        swept = await a.sweep(unseen_s=UNSEEN_S)
        assert (swept.given_up, swept.reclaimed) == (2, 0)
        assert await counted(it) == set(names[2:])
        assert (await it.state()).stock == 4.0
        assert [entry.note for entry in await it.log() if entry.event == "reclaimed"] == ["ghost"] * 2

        # A late end changes nothing, and no request is reclaimed while both pages count all requests.
        assert await a.settle("r1") == [UNKNOWN_END]
        await report(it, 4, before=(1.0, 4))
        assert (await a.sweep(unseen_s=UNSEEN_S)).given_up == 0


async def test_a_reclaimed_request_whose_answer_goes_on_is_restored(fleet: OpenFleet) -> None:
    async with fleet("a") as (it, a):

        async def renewed() -> set[str]:
            a.gate.queue.renew_owned_streams(is_due=True)
            await a.store.renew("other", None, "", "")  # this call is answered after the renewals
            return await counted(it)

        await a.gate.admit(ask("r"), stream_owned=True)
        a.gate.ledger.grow("r", 1)
        await renewed()
        await seen(it, "r", ago_s=4)
        assert await renewed() == {"r"}
        await report(it, 0, before=(1.0, 0))
        assert (await a.sweep(unseen_s=UNSEEN_S)).given_up == 1
        assert await renewed() == set()
        a.gate.ledger.grow("r", 2)
        assert await renewed() == {"r"}


async def test_no_request_is_reclaimed_because_of_a_request_newer_than_both_pages(
    fleet: OpenFleet,
) -> None:
    async with fleet("a", upper_per=10) as (it, a):
        await a.admit("alive")
        await seen(it, "alive", ago_s=10)  # long not renewed, but both pages count it
        await report(it, 1, before=(0.5, 1))
        await a.admit("new")  # request `new` arrives after both metrics pages
        assert await found(a, UNSEEN_S) == (0, (E1,))
        assert await counted(it) == {"alive", "new"}


async def test_invalid_pages_and_pages_from_the_future_reclaim_no_request(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=10) as (it, a):
        await a.admit("r")
        await seen(it, "r", ago_s=10)
        old = '{"at":1,"before":2,"before_load":0,"waiting":0,"running":0}'
        for text in ("", "x", "[]", '{"at":1}', old):
            await it.redis.hset(it.keys.prefix + "metrics", E1, text)
            assert (await a.sweep(unseen_s=UNSEEN_S)).given_up == 0
        await report(it, 0, ago_s=-3600, before=(-3000.0, 0))  # metrics pages from the future
        assert (await a.sweep(unseen_s=UNSEEN_S)).given_up == 0
        assert await counted(it) == {"r"}
        # Without suspect requests the sweep asks for no page.
        await seen(it, "r", ago_s=0.1)
        assert (await a.sweep(unseen_s=UNSEEN_S)).suspects == ()


async def test_a_suspect_request_is_reclaimed_once_a_newer_metrics_page_lacks_it(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1) as (it, a):
        # A report without an accounting token says that the client of a placed request has gone.
        assert await a.store.report_client_gone("r") == "unknown"
        await a.admit("r")
        await a.admit("next")
        assert await a.store.report_client_gone("next") == "waiting"
        await a.store.cancel("next", 1, "cancelled")
        assert await a.store.report_client_gone("r") == "suspected"
        await it.redis.zadd(it.keys.prefix + "suspects", {"long over": 1})
        at_ms = await seen(it, "r", ago_s=3)
        # Not reclaimed: the last page is older or only 50 ms newer, or the page before it counts the request.
        for ago_s, before in ((3.5, (4.0, 0)), (2.95, (4.0, 0)), (2.0, (2.5, 1))):
            await report(it, 0, ago_s=ago_s, before=before, at_ms=at_ms)
            assert await found(a) == (0, (E1,))
        await report(it, 0, ago_s=2.0, before=(4.0, 0), at_ms=at_ms)
        assert (await a.sweep()).given_up == 1
        assert await counted(it) == set()
        await a.sweep()
        assert not await it.has("suspects")


async def test_a_renewed_request_is_no_longer_suspected_to_have_ended(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=10) as (it, a):
        await a.admit("r")
        await a.store.report_client_gone("r")
        await it.redis.zincrby(it.keys.prefix + "suspects", -5000, "r")
        assert await a.store.renew("r", 1, "", "") == "renewed"
        await report(it, 0, before=(1.0, 0))
        assert await found(a) == (0, ())
        assert not await it.has("suspects")
        assert await counted(it) == {"r"}


@pytest.mark.parametrize(
    ("calls", "stays"),
    [
        (["settle y"], {"x", "new"}),  # y has ended, so x was running: x is restored
        (["settle x", "settle y"], {"new"}),  # x and y have both ended: neither is restored
        (["renew y", "settle y"], {"new"}),  # y still ran after the page, so x was the ended request
        (["renew x", "settle y"], {"x", "new"}),  # the renewal of x has already restored x
        (["settle y", "settle x"], {"new"}),
    ],
)
async def test_a_late_end_of_one_request_restores_the_running_request_that_was_reclaimed_instead(
    fleet: OpenFleet, calls: list[str], stays: set[str]
) -> None:
    async with fleet("a", upper_per=2) as (it, a):
        for name in ("x", "y"):
            await a.admit(name)
        await seen(it, "x", ago_s=10)
        await seen(it, "y", ago_s=8)
        await report(it, 1, before=(1.0, 1))
        assert await found(a, UNSEEN_S) == (1, (E1,))
        assert await counted(it) == {"y"}
        await a.admit("new")
        for call in calls:
            what, name = call.split()
            if what == "settle":
                await a.settle(name)
            else:
                await a.store.renew(name, None, "", accounting_token.write(ask(name), E1))
        assert await counted(it) == stays
        assert (await it.state()).stock == len(stays)
        await a.settle("x", "y", "new")
        assert await counted(it) == set()
        assert not await it.has("ghosts")


@pytest.mark.parametrize("ended", ["x", "y"])
async def test_of_two_reclaimed_requests_the_running_one_is_restored(fleet: OpenFleet, ended: str) -> None:
    async with fleet("a", upper_per=3) as (it, a):
        for age_s, name in ((10, "x"), (9, "y"), (8, "z")):
            await a.admit(name)
            await seen(it, name, ago_s=age_s)
        await report(it, 1, before=(1.0, 1))  # one of x, y, z runs: z has ended, and x or y
        assert await found(a, UNSEEN_S) == (2, (E1,))
        assert await counted(it) == {"z"}
        await a.settle("z")
        await a.settle(ended)
        assert await counted(it) == {"x", "y"} - {ended}


async def test_an_unacknowledged_placement_of_a_silent_replica_is_reclaimed_first(fleet: OpenFleet) -> None:
    async with fleet("a", "b", upper_per=2) as (it, a, b):
        await a.admit("first")
        await a.admit("runs")
        await b.admit("never taken")
        await a.settle("first")  # grants and places `never taken`, which b does not acknowledge
        assert await counted(it) == {"runs", "never taken"}
        silent_ms = await it.now_ms() - SETTINGS["silence_ms"] - 1
        (name,) = [n for n in await it.redis.zrange(it.keys.prefix + "replicas", 0, -1) if n.startswith("b")]
        await it.redis.zadd(it.keys.prefix + "replicas", {name: silent_ms})
        await seen(it, "runs", ago_s=10)
        await seen(it, "never taken", ago_s=8)
        await a.sweep()
        await report(it, 1, before=(1.0, 1))
        assert await found(a, UNSEEN_S) == (1, (E1,))
        assert await counted(it) == {"runs"}
