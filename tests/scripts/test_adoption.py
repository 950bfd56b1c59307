"""A request outlives its replica: the next replica that gets the request's id adopts the request (G7)."""

import asyncio

import pytest
from decision_ledger import events_of
from script_fleet import OpenFleet, asked, waiting

from picker_fleet.domain.errors import ClientGone, ExpiredTtl, RequestIdTaken
from picker_fleet.state.replies import name_of


async def test_repeated_sweeps_orphan_all_waiting_requests_of_a_silent_replica(fleet: OpenFleet) -> None:
    async with fleet("a", "b", full=True) as (it, a, b):
        await asyncio.gather(*(a.admit(f"q{i}") for i in range(125)))
        await asyncio.gather(*(b.admit(f"b{i}") for i in range(10)))
        await asyncio.gather(*(a.admit(f"q{i}") for i in range(125, 250)))
        await a.store.leave()
        # Each sweep scans a bounded number of requests, and says whether more remain.
        calls = 1
        while (await b.sweep()).more:
            calls += 1
        assert calls >= 3
        last = {entry.request: entry.event for entry in await it.log()}
        expected = {f"q{i}": "orphaned" for i in range(250)} | {f"b{i}": "queued" for i in range(10)}
        assert expected.items() <= last.items()


async def test_a_heartbeat_of_a_silent_replica_stops_the_orphaning_of_its_requests(fleet: OpenFleet) -> None:
    async with fleet("a", "b", full=True) as (it, a, b):
        await asyncio.gather(*(a.admit(f"q{i}") for i in range(120)))
        await a.store.leave()
        assert (await b.sweep()).more
        assert not (await a.beat()).was_known
        assert not await it.has("orphan_cursors")
        assert name_of(await a.admit("q0")) == "queued"
        assert (await a.beat()).was_known


async def test_a_retry_on_a_new_stream_takes_over_the_queued_request(fleet: OpenFleet) -> None:
    async with fleet("a", full=True) as (it, a):
        first, second = await waiting(it, a, "q"), asked(a, "q")
        with pytest.raises(ClientGone):
            await first
        assert a.gate.queue.waiting == 1
        await a.settle("runs")
        assert (await second).endpoints == ("10.0.0.1:8000",)
        await it.ends(a, "q")
        assert (await it.ledger()).started["q"] == 1


async def test_the_expiry_timer_of_a_former_owner_does_not_end_an_adopted_request(fleet: OpenFleet) -> None:
    async with fleet("a", "b", full=True) as (it, a, b):
        waiter = await waiting(it, a, "q", ttl_s=0.8)
        await b.admit("q", "99.")
        # When the TTL has passed, the former owner answers its client; the request stays with the adopter.
        with pytest.raises(ExpiredTtl):
            await waiter
        assert events_of(await it.log(), "q")[:2] == ["queued", "adopted"]
        await b.sweep()
        assert await b.store.cancel("q", "99.", "cancelled") in ("ended", "unknown")


FIRST = {"flow": "gold", "model": "llama", "digest": "of-its-body"}
STRANGERS: list[dict[str, str]] = [{"flow": "other"}, {"model": "other"}, {"digest": "of-another"}]


@pytest.mark.parametrize("stranger", STRANGERS, ids=str)
async def test_a_request_with_a_known_id_but_another_flow_model_or_body_is_refused(
    fleet: OpenFleet, stranger: dict[str, str]
) -> None:
    async with fleet("a", "b", full=True) as (it, a, b):
        waiter = await waiting(it, a, "q", **FIRST)

        async def is_refused_everywhere() -> None:
            for replica in (a, b):
                with pytest.raises(RequestIdTaken):
                    await asked(replica, "q", **(FIRST | stranger))

        await is_refused_everywhere()
        assert not waiter.done()
        # A retry by Envoy still adopts the waiting request.
        retry = asked(b, "q", **FIRST)
        await it.until_logged("adopted", "q")
        await a.settle("runs")
        await b.beat()
        placed = await retry
        # While the request is in flight, only a further retry gets the request's accounting token.
        await is_refused_everywhere()
        assert (await asked(b, "q", **FIRST)).accounting_token == placed.accounting_token
        assert events_of(await it.log(), "q") == ["queued", "adopted", "granted", "placed", "adopted"]
        waiter.cancel()


async def test_a_refused_request_with_the_same_id_cancels_no_admission_in_flight(fleet: OpenFleet) -> None:
    async with fleet("a", full=True) as (it, a):
        waiter = asked(a, "q", **FIRST)
        await asyncio.sleep(0)
        with pytest.raises(RequestIdTaken):
            await asked(a, "q", **(FIRST | {"digest": "of-another"}))
        await a.settle("runs")
        assert (await waiter).endpoints
        await it.ends(a, "q")


async def test_a_concurrent_request_with_the_same_id_does_not_block_a_retry(fleet: OpenFleet) -> None:
    # A different request's admission with the same id is in flight when Envoy's retry arrives.
    async with fleet("a", "b", full=True) as (it, a, b):
        waiter = await waiting(it, a, "q", **FIRST)
        stranger = asked(b, "q", **(FIRST | {"digest": "of-another"}))
        await asyncio.sleep(0)
        retry = asked(b, "q", **FIRST)
        with pytest.raises(RequestIdTaken):
            await stranger
        await it.until_logged("adopted", "q")
        await a.settle("runs")
        await b.beat()
        await retry
        waiter.cancel()
