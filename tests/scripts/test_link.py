"""The connection to Redis: batches, lost functions, an unavailable server, unsent ends of requests (G8)."""

import asyncio

import pytest
from proxy import proxy_to
from script_fleet import (
    DEADLINE_S,
    SETTLED,
    UNKNOWN_END,
    OpenFleet,
    Replica,
    addresses,
    ask,
    in_turn,
    until,
)

from picker_fleet.domain.errors import StateUnavailable, WritesRefused
from picker_fleet.domain.request import Outcome
from picker_fleet.state import accounting_token
from picker_fleet.state.replies import name_of
from picker_fleet.state.scripts import load_library

E1 = addresses(1)[0]


async def test_more_items_than_a_call_carries_are_each_answered_in_order(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=150) as (it, a):
        verdicts = await asyncio.gather(*(a.admit(f"r{i}") for i in range(200)))
        assert [name_of(verdict) for verdict in verdicts] == ["placed"] * 150 + ["queued"] * 50
        replies = await a.settle(*(f"r{i}" for i in range(200)), "nobody")
        assert replies[:150] == [SETTLED] * 150
        assert replies[200] == UNKNOWN_END
        assert await it.at_rest()


async def test_a_library_flushed_before_every_call_is_loaded_again(fleet: OpenFleet) -> None:
    async with fleet("a", "b", upper_per=1) as (it, a, b):
        calls = (
            a.beat, lambda: a.publish(E1, upper_per=1), lambda: a.admit("r1"), lambda: b.admit("r2"),
            lambda: a.store.renew("r1", 1, "", ""), lambda: a.settle("r1"), lambda: b.place("r2"),
            lambda: b.store.cancel("r2", 1, "withdrawn"), b.sweep, lambda: b.store.state(60),
        )  # fmt: skip
        for call in calls:
            await it.redis.function_flush()
            await call()
        assert await it.at_rest()
        assert (await it.ledger()).ends == {"completed": 1, "withdrawn": 1}


async def test_calls_in_one_message_keep_their_order_if_the_library_is_lost(fleet: OpenFleet) -> None:
    async with fleet("a", endpoints=2, upper_per=1) as (it, a):
        for name in ("runs", "ends", "granted", "queued"):
            await a.admit(name)
        await a.settle("ends")
        await it.redis.function_flush()
        # All scripts are called in one loop turn, and answer as if the library had not been lost. The renewal
        # is not sent again after its request's end.
        renewed, settled, admitted, placed, cancelled, pulse, swept = await asyncio.gather(
            in_turn(a.store.renew, "runs", 1, "", ""), in_turn(a.store.settle, "runs", Outcome.COMPLETED),
            a.admit("new"), a.place("granted"), in_turn(a.store.cancel, "new", 1, "cancelled"),
            a.beat(), a.sweep(),
        )  # fmt: skip
        assert (renewed, settled, name_of(admitted)) == ("unknown", SETTLED, "queued")
        assert (name_of(placed), cancelled) == ("placed", "ended")
        assert (pulse.stock, swept.ran) == (2, True)
        assert ("placed", "queued") in a.notifications


async def test_a_renewal_is_not_retried_after_the_end_of_its_request(fleet: OpenFleet) -> None:
    # The library lacks the script `renew` only, as if another replica loaded the library between two calls.
    async with fleet("a", upper_per=2) as (it, a):
        token = accounting_token.write(ask("ends"), E1, 1000)
        library = load_library()
        for name in ("runs", "ends"):
            await a.admit(name)
        lacking = library.source.replace(library.function("renew"), "lacking")
        await it.redis.function_load(lacking, replace=True)
        # The renewal of the running request is retried; the renewal of the request that ends is not.
        renewed, ended, settled = await asyncio.gather(
            in_turn(a.store.renew, "runs", 1, "", ""), in_turn(a.store.renew, "ends", 1, "", token),
            in_turn(a.store.settle, "ends", Outcome.COMPLETED),
        )  # fmt: skip
        assert (renewed, ended, settled) == ("renewed", "unknown", SETTLED)
        await a.settle("runs")
        assert await it.at_rest()
        assert (await it.ledger()).ends == {"completed": 2}


async def test_while_the_server_is_silent_calls_time_out_and_ends_of_requests_are_kept(
    fleet: OpenFleet, valkey_url: str
) -> None:
    async with (
        proxy_to(valkey_url) as between,
        fleet("a", "b", upper_per=1, through={"a": between.url}, silence_s=1.0) as (it, a, b),
    ):
        # A request is in flight; the server accepts all data and never replies.
        await a.admit("r1")
        between.vanished = True
        # Each call fails within the deadline, but the replica keeps the end of the request.
        settled = a.store.settle("r1", Outcome.COMPLETED)
        for _ in range(2):
            for call in (asyncio.create_task(a.beat()), asyncio.create_task(a.admit("r2"))):
                async with asyncio.timeout(DEADLINE_S):
                    with pytest.raises(StateUnavailable):
                        await call
        assert not settled.done()
        assert name_of(await b.admit("r3")) == "queued"
        between.vanished = False
        assert await settled == SETTLED
        await b.beat()
        assert b.notifications == [("granted", "r3")]
        await b.settle("r3")
        assert await it.at_rest()


async def test_unanswered_calls_fail_at_once_when_a_replica_stops(fleet: OpenFleet, valkey_url: str) -> None:
    async with proxy_to(valkey_url) as between:
        async with fleet("b", "a", through={"a": between.url}) as it:
            a = it.replicas[1]
            between.vanished = True
            waiting = asyncio.create_task(a.admit("r1"))
            settled = a.store.settle("r0", Outcome.COMPLETED)
        for call in (waiting, settled):
            with pytest.raises(StateUnavailable, match="stopped"):
                await call


async def test_a_requests_end_is_kept_until_redis_takes_writes(valkey_url: str, fleet: OpenFleet) -> None:
    # A request is in flight; then the server refuses writes because it cannot write its AOF file.
    async with proxy_to(valkey_url) as between, fleet("a", through={"a": between.url}) as (it, a):
        await a.admit("r")
        between.refuse("MISCONF Errors writing to the AOF file")
        settling = asyncio.ensure_future(a.store.settle("r", Outcome.COMPLETED))
        await asyncio.sleep(0)
        with pytest.raises(WritesRefused, match="MISCONF"):
            await a.admit("new")
        assert not settling.done()
        between.refuse("", times=0)
        assert await settling == SETTLED
        assert await it.at_rest()


async def sleep_while_in_flight(replica: Replica) -> None:
    """Wait until a call is in flight; make it look as if the process had paused for 10 s after the call."""
    link = replica.store._client
    while not link._in_flight:  # noqa: ASYNC110 - a call is sent in the loop turn that submits it
        await asyncio.sleep(0)
    link._in_flight[0].sent_s -= 10
    link._in_flight[0].paused_s -= 10


async def test_a_redis_reply_that_is_read_after_a_pause_is_ignored(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1) as (it, a):
        admission = asyncio.ensure_future(a.admit("r1"))
        # After a pause the replica reads the reply before its pause detector has run.
        await sleep_while_in_flight(a)
        # The replica ignores a late reply, because another replica may have adopted the request.
        with pytest.raises(StateUnavailable):
            await admission
        assert name_of(await a.admit("r1")) == "placed"
        await a.settle("r1")
        assert await it.at_rest()


async def test_a_view_is_read_again_if_its_reply_is_read_after_a_pause(fleet: OpenFleet) -> None:
    async with fleet("a") as (_, a):
        link = a.store._client
        epoch = link.connection_epoch
        listed = asyncio.ensure_future(a.store.reads.flow_queues(10))
        await sleep_while_in_flight(a)
        # The replica repeats the read on a new connection, because reading twice does no harm.
        async with asyncio.timeout(DEADLINE_S):
            assert list((await listed).queues) == []
        assert link.connection_epoch > epoch


async def test_unsent_ends_omit_ends_that_may_have_reached_redis(fleet: OpenFleet, valkey_url: str) -> None:
    async with (
        proxy_to(valkey_url) as between,
        fleet("a", through={"a": between.url}, silence_s=1.0) as (it, a),
    ):
        await a.admit("r1")
        await a.admit("r2")
        # The server accepts all data and never replies; the end of request r1 is in flight.
        between.vanished = True
        first = a.store.settle("r1", Outcome.COMPLETED)
        deciding = asyncio.create_task(a.admit("r3"))
        await until(lambda: a.store._client.waiting and not a.store.unsent_ends())
        # Request r2 ends: this end has not been sent, so it cannot have reached the server.
        second = a.store.settle("r2", Outcome.COMPLETED)
        assert a.store.unsent_ends() == ["r2"]
        # The end of r2 is still unsent when the end of r1 is queued again for a retry.
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(StateUnavailable):
                await deciding
        assert a.store.unsent_ends() == ["r2"]
        assert a.lost == ["silence"]
        # The end of r2 stays unsent on a new connection to the silent server, even after an admission there.
        epoch = a.store.connection_epoch
        await until(lambda: a.store.connection_epoch > epoch)
        deciding = asyncio.create_task(a.admit("r4"))
        with pytest.raises(StateUnavailable):
            await deciding
        assert a.store.unsent_ends() == ["r2"]
        between.vanished = False
        async with asyncio.timeout(DEADLINE_S):
            assert [await first, await second] == [SETTLED] * 2
        assert a.store.unsent_ends() == []
        for undecided in ("r3", "r4"):
            await a.store.cancel(undecided, 1, "cancelled")
        assert await it.at_rest()


async def test_an_admission_whose_caller_has_gone_is_not_sent_again(fleet: OpenFleet) -> None:
    async with fleet("a") as (it, a):
        await it.redis.function_flush()
        gone, wanted = a.store.admit(ask("gone"), "1", "*"), a.store.admit(ask("wanted"), "1", "*")
        await asyncio.sleep(0)  # lets the client send the message
        gone.cancel()
        assert name_of(await wanted) == "placed"
        assert await it.redis.hkeys(it.keys.prefix + "requests") == ["wanted"]
        await a.settle("wanted")
        assert await it.at_rest()


async def test_the_library_has_room_for_further_names(fleet: OpenFleet) -> None:
    # docs/contributing.md adds an ordering and a script; a Lua chunk may have 200 locals.
    async with fleet("a") as (it, _):
        shebang, body = load_library().source.split("\n", 1)
        names = "".join(f"local name_{n} = {n}\n" for n in range(6))
        await it.redis.function_load(f"{shebang}\n{names}{body}", replace=True)
