"""Time to live: no request is dispatched after its TTL, and the request's client gets an answer (G5)."""

import asyncio
import json

import pytest
from decision_ledger import events_of
from proxy import proxy_to
from script_fleet import OpenFleet, ask, asked, until, waiting

from picker_fleet.domain.errors import DeadlineExceeded, ExpiredTtl, OverLimit


async def test_the_sweep_ends_expired_requests(fleet: OpenFleet) -> None:
    async with fleet("a", "b", full=True) as (it, a, b):
        await asyncio.gather(*(b.admit(f"q{i}", ttl_s=0.6) for i in range(50)))
        await it.after(650)
        # Another replica sweeps; each call ends at most 32 requests.
        swept = await a.sweep()
        assert (swept.ran, swept.expired, swept.more) == (True, 32, True)
        assert await it.queued() == 18
        swept = await a.sweep()
        assert (swept.expired, swept.more) == (18, False)
        await b.beat()
        assert sorted(b.notifications) == sorted(("expired", f"q{i}") for i in range(50))
        assert not await it.has("inbox:b")


async def test_a_waiting_request_is_answered_at_its_ttl(fleet: OpenFleet) -> None:
    async with fleet("a", full=True) as (it, a):
        with pytest.raises(ExpiredTtl) as answer:
            await a.gate.admit(ask("q", ttl_s=0.1), stream_owned=False)
        assert (answer.value.status, answer.value.reason) == (503, "rejected-ttl-expired")
        with pytest.raises(DeadlineExceeded) as raised:
            await a.gate.admit(ask("own", ttl_s=0.1)._replace(by_client=True), stream_owned=False)
        assert raised.value.status == 504
        assert events_of(await it.log(), "q") == ["queued", "expired"]
        await a.settle("runs")
        assert await it.at_rest()
        assert a.gate.queue.waiting == 0


@pytest.mark.parametrize("learns", ["by a notification", "by its own timer"])
async def test_the_answer_to_a_request_that_waited_its_ttl_for_a_limit_names_the_limit(
    fleet: OpenFleet, learns: str
) -> None:
    limit = {"unit": "requests", "amount": 1, "per_ms": 3_600_000}
    async with fleet("a", "b", upper_per=9, tenants={"separator": "/"}) as (it, a, b):
        await a.store.set_tenants("tenants", {"acme co": json.dumps({"limits": [limit]})})
        await a.admit("runs", flow="acme co/x")
        expired = [await waiting(it, a, "q", flow="acme co/y", ttl_s=0.3)]
        expired.append(asked(a, "own", flow="acme co/y", ttl_s=0.3, by_client=True))
        if learns == "by a notification":
            await it.after(301)
            await b.sweep()
        told, own = await asyncio.gather(*expired, return_exceptions=True)
        assert isinstance(told, OverLimit)
        assert (told.status, told.reason, str(told.quota).rpartition(",")[0]) == (
            429,
            "over-limit",
            "requests=1,0",
        )
        assert str(told) == f"acme co: its limit of requests is used up; retry in {told.retry_after_s} s"
        assert told.retry_after_s in (3599, 3600)
        assert isinstance(own, DeadlineExceeded)
        assert events_of(await it.log(), "q")[-2:] == ["queued", "expired"]
        await a.settle("runs")
        await until(it.at_rest)


async def test_a_waiting_request_is_answered_at_its_ttl_while_redis_does_not_reply(
    fleet: OpenFleet, valkey_url: str
) -> None:
    async with (
        proxy_to(valkey_url) as between,
        fleet("a", "b", full=True, through={"a": between.url}, silence_s=0.75) as (it, a, b),
    ):
        waiter = await waiting(it, a, "q", ttl_s=0.3)
        await until(lambda: not a.store._client._in_flight)  # the replica now knows that the request waits
        between.vanished = True
        # At its TTL the request is answered; Redis gets the expiry once it replies again.
        with pytest.raises(ExpiredTtl):
            await waiter
        between.vanished = False
        await it.until_logged("expired", "q")
        await b.settle("runs")
        await until(it.at_rest)


async def test_the_expiry_timer_finds_a_grant_that_the_replica_has_missed(fleet: OpenFleet) -> None:
    # The request's replica receives no wake-ups.
    async with fleet("a", "b", full=True) as (it, a, b):
        waiter = await waiting(it, a, "q", ttl_s=0.8)
        # The grant comes before the TTL, but the replica does not learn of the grant.
        await b.settle("runs")
        assert (await waiter).endpoints == ("10.0.0.1:8000",)
        assert events_of(await it.log(), "q") == ["queued", "granted", "placed"]
