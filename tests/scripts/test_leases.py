"""Leases: a request without renewals is reclaimed; a renewed request never is (G6)."""

import asyncio

import pytest
from script_fleet import (
    SETTINGS,
    SETTLED,
    UNKNOWN_END,
    OpenFleet,
    addresses,
    ask,
    doubles,
    ended,
    until,
    until_is,
)

from picker_fleet.domain.request import Alive, Outcome
from picker_fleet.state import accounting_token
from picker_fleet.state.accounting_token import Keyring
from picker_fleet.state.replies import name_of

E1, E2 = addresses(2)
ONE_RUNS = (1, 0, [1])
MOST_TOMBSTONES = 100_000
FILL = "for n = 0, ARGV[1] - 1 do redis.call('ZADD', KEYS[1], ARGV[2] + n, 'r' .. n) end"


async def test_a_sweep_reclaims_at_most_32_requests(fleet: OpenFleet) -> None:
    async with fleet("a", "b", upper_per=200, lease_ms=50) as (it, a, b):
        await asyncio.gather(*(a.admit(f"r{i}") for i in range(50)))
        await it.after(60)
        # Sweeps run at most once a minute. The first sweep reclaims 32 requests and reports more.
        times = {"interval_s": 60, "grace_s": 60, "idle_s": 60, "unseen_s": 60}
        swept = await a.store.sweep(**times)
        assert (swept.reclaimed, swept.more) == (32, True)
        # The other replica may sweep on at once; a third sweep within the minute does not run.
        swept = await b.store.sweep(**times)
        assert (swept.reclaimed, swept.more) == (18, False)
        assert not (await a.store.sweep(**times)).ran
        assert await it.at_rest()


async def test_a_replica_renews_the_leases_of_its_own_streams(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=3, lease_ms=100) as (it, a):
        stream = await a.gate.admit(ask("streamed"), stream_owned=True)
        logged = await a.gate.admit(ask("logged"), stream_owned=False)
        await a.gate.admit(ask("silent"), stream_owned=False)
        await a.publish(E1, upper_per=3, lease_ms=60_000)
        a.gate.queue.renew_owned_streams()
        a.gate.renew(Alive("logged", E1, logged.accounting_token))
        await it.after(110)
        await a.sweep()
        # Only the request without reports is reclaimed. A withdrawal ends the renewals of a stream's lease.
        assert sorted(await it.redis.hkeys(it.keys.prefix + "requests")) == ["logged", "streamed"]
        a.gate.withdraw("streamed", stream)
        a.gate.queue.renew_owned_streams()
        await until_is(it.counts, ONE_RUNS)


async def test_a_running_request_is_restored_from_its_accounting_token_after_a_loss(fleet: OpenFleet) -> None:
    async with fleet("a", "b", endpoints=2) as (it, a, b):
        request = ask("r", flow="f\u00fc", weight=2.5, cost=1.5, workload="w")
        placed = await a.store.admit(request, "1", "*")
        token = accounting_token.write(request, placed.endpoints[0])
        await it.redis.flushall()
        assert await a.store.renew("r", 1, "", token) == "unknown"
        await a.publish(E1, E2)
        # Two replicas report the request, but Redis counts the request once, with its cost and workload.
        assert await a.store.renew("r", None, E2, token) == "restored"
        assert await b.store.renew("r", None, E2, token) == "renewed"
        state = await it.state()
        assert (state.stock, state.leases, state.in_flight) == (1.5, 1, {E1: 0, E2: 1})
        assert doubles(await it.redis.hget(it.keys.prefix + "workloads", "w"))[:3] == [0, 1, 0]
        assert await a.store.settle("r", Outcome.COMPLETED) == SETTLED
        assert await it.at_rest()
        await it.after(2)
        await a.sweep(idle_s=0.001)
        assert not await it.has("workloads")


async def test_a_replica_that_missed_the_end_of_a_request_does_not_restore_it(fleet: OpenFleet) -> None:
    # Two requests were started without Redis, and one of them has ended.
    async with fleet("a", "b") as (it, a, b):
        tokens = {name: accounting_token.write(ask(name), E1) for name in ("ended", "runs")}
        assert await a.store.tombstone("ended") == "stored"
        answers = [await b.store.renew(name, 1, "", token) for name, token in tokens.items()]
        assert answers == ["unknown", "restored"]
        assert await it.counts() == ONE_RUNS
        # A new request with the id of the ended request is admitted as usual.
        assert name_of(await b.admit("ended")) == "placed"
        assert await a.store.tombstone("ended") == "stored"
        assert await b.store.renew("ended", None, "", tokens["ended"]) == "renewed"
        await a.settle("ended", "runs")
        # The tombstone is deleted one lease and 10 s after the end.
        tombstones = it.keys.prefix + "tombstones"
        await a.sweep()
        assert await it.redis.zcard(tombstones) == 1
        await it.redis.zincrby(tombstones, -SETTINGS["lease_ms"] - 10_000, "ended")
        await it.after(1)
        await a.sweep()
        assert not await it.has("tombstones")
        assert await it.at_rest()


@pytest.mark.parametrize(
    ("ended_s", "seen_s", "answer"),
    # Last seen before the end, or up to 2 s (LATE_MS) after it; if later, the id belongs to a new request.
    [(5, 5.1, "unknown"), (5, 4, "unknown"), (5, 1, "restored"), (5, 0, "restored"), (0, 0, "unknown")],
)
async def test_a_tombstone_blocks_a_renewal_unless_the_request_was_seen_after_its_end(
    fleet: OpenFleet, ended_s: float, seen_s: float, answer: str
) -> None:
    async with fleet("a", "b") as (it, a, b):
        token = accounting_token.write(ask("r"), E1)
        assert await a.store.tombstone("r", ended_s) == "stored"
        # The replica that owns the stream may restore a request that the replica has seen since the end. An
        # access-log report may carry an old accounting token and restores nothing.
        assert await b.store.renew("r", None, "", token, seen_s) == "unknown"
        assert await b.store.renew("r", 1, "", token, seen_s) == answer
        # A repeated tombstone call returns 'back' if the request was restored.
        assert await a.store.tombstone("r", ended_s) == ("back" if answer == "restored" else "stored")
        await a.settle("r")
        assert await it.at_rest()


async def test_a_sweep_deletes_at_most_500_tombstones_beyond_the_limit(fleet: OpenFleet) -> None:
    async with fleet("a") as (it, a):
        tombstones = it.keys.prefix + "tombstones"
        now_ms = await it.now_ms()
        count = MOST_TOMBSTONES + 600
        await it.redis.eval(FILL, 1, tombstones, count, now_ms)
        assert (await a.sweep()).more
        assert await it.redis.zcard(tombstones) == MOST_TOMBSTONES + 100
        assert not (await a.sweep()).more
        assert await it.redis.zcard(tombstones) == MOST_TOMBSTONES
        assert await it.redis.zrange(tombstones, 0, 0) == ["r600"]


async def test_a_request_started_without_redis_is_not_restored_after_its_end(fleet: OpenFleet) -> None:
    async with fleet("a", "b") as (it, a, b):
        token = accounting_token.write(ask("r"), E1)
        b.gate.settle(ended("r")._replace(accounting_token=token))
        await until(lambda: it.redis.zscore(it.keys.prefix + "tombstones", "r"))
        assert await a.store.renew("r", 1, "", token) == "unknown"
        # The end of a request that was refused adds no tombstone.
        b.gate.settle(ended("refused"))
        await b.beat()
        tombstones = it.keys.prefix + "tombstones"
        assert await it.redis.zcard(tombstones) == 1
        # While the tombstone exists, a later report restores no request, and a repeated end changes nothing.
        await it.redis.zincrby(tombstones, -SETTINGS["lease_ms"] - 9_000, "r")
        assert await a.store.renew("r", None, E1, token) == "unknown"
        assert await a.store.settle("r", Outcome.COMPLETED) == UNKNOWN_END
        assert await it.at_rest()


async def test_an_accounting_token_for_an_unknown_endpoint_restores_no_request(fleet: OpenFleet) -> None:
    async with fleet("a", endpoints=1) as (it, a):
        nowhere = "192.0.2.7:80"
        for served in ("", nowhere):
            token = accounting_token.write(ask("r"), nowhere)
            assert await a.store.renew("r", None, served, token) == "unknown"
        # If only the reported serving endpoint is unknown, the request counts at its first endpoint.
        assert await a.store.renew("r", None, nowhere, accounting_token.write(ask("r"), E1)) == "restored"
        assert (await it.state()).in_flight == {E1: 1}
        await a.settle("r")
        assert await it.at_rest()


async def test_a_restored_request_of_an_owned_stream_can_be_withdrawn(fleet: OpenFleet) -> None:
    async with fleet("a") as (it, a):
        placement = await a.gate.admit(ask("r"), stream_owned=True)
        await it.redis.flushall()
        await a.publish(E1)
        a.gate.queue.renew_owned_streams()
        await until_is(it.counts, ONE_RUNS)
        a.gate.withdraw("r", placement)
        await until(it.at_rest)


# Token fields: flow, band, weight, cost, workload, criticality, model, endpoint, limit; tests damage one
WHOLE = ("f", "1", "1.0", "1", "w", "3", "llama", E1, "0")
DAMAGES = {
    1: ("1.5", "7"), 2: ("nan", "x"), 3: ("1e308", "inf", "-5"), 4: ("w\0",), 5: ("x",), 7: ("",),
    8: ("-1", "inf", "65536", "1.5", "more"),
}  # fmt: skip
DAMAGED = [
    (), WHOLE[:1], WHOLE[:8],
    *((*WHOLE[:at], each, *WHOLE[at + 1 :]) for at, those in DAMAGES.items() for each in those),
    *(("f", "9", *WHOLE[2:], f"priority={each}") for each in (2**31, -(2**31) - 1, "7.5", "", "x")),
]  # fmt: skip


async def test_a_damaged_accounting_token_restores_no_request(fleet: OpenFleet) -> None:
    async with fleet("a") as (it, a):
        await a.admit("r")
        for damaged in map("\t".join, DAMAGED):
            for served in ("",) if "llama\t\t" in damaged else ("", E1):
                assert await a.store.renew("x", None, served, damaged) == "unknown", damaged
        assert await it.counts() == ONE_RUNS
        await a.settle("r")
        assert await it.at_rest()


async def test_the_fleet_shares_its_signing_keys_and_replicas_restore_them(fleet: OpenFleet) -> None:
    async with fleet("a", "b") as (it, a, b):

        async def keys() -> list[str]:
            return (await it.redis.hget(it.keys.pool, "signing_keys")).split()

        # After heartbeats of two replicas, the signing key that the first one offered is the fleet's key.
        since_ms, *first = await keys()
        assert len(first) == 1
        text = a.store._signing.sign("p", "text")
        assert b.store._signing.fault("p", "text", text) == ""
        # After a day a new key is made, which signs only after it has been known for a day.
        await it.redis.hset(it.keys.pool, "signing_keys", f"{float(since_ms) - 86_400_000:.0f} {first[0]}")
        await b.beat()
        _, *second = await keys()
        assert second[1:] == first
        assert b.store._signing.sign("p", "text") == text
        # Redis is flushed. A new replica's heartbeat comes first; later heartbeats restore the former keys.
        await it.redis.flushall()
        await a.store._client.call("heartbeat", "c", "{}", 60_000, Keyring().offer())
        await b.beat()
        assert set(second) < set((await keys())[1:])
        await a.beat()
        assert a.store._signing.fault("p", "text", text) == ""
        # At most eight signing keys are kept.
        for _ in range(12):
            await it.redis.hset(it.keys.pool, "signing_keys", " ".join(["1", *(await keys())[1:]]))
            await a.beat()
        assert len(await keys()) == 9


async def test_replicas_keep_their_common_variant_key_over_rotations_and_a_flush(fleet: OpenFleet) -> None:
    async with fleet("a", "b") as (it, a, b):
        keyrings = [each.store._signing for each in (a, b)]
        key = keyrings[0].variant_key
        assert keyrings[1].variant_key == key
        # After a day the fleet has another signing key, but the same variant key.
        _, *signing = (await it.redis.hget(it.keys.pool, "signing_keys")).split()
        for _ in range(9):
            await it.redis.hset(it.keys.pool, "signing_keys", f"1 {' '.join(signing)}")
            await a.beat()
            await b.beat()
            _, *signing = (await it.redis.hget(it.keys.pool, "signing_keys")).split()
        assert [each.variant_key for each in keyrings] == [key, key]
        # Redis is flushed, and a new replica's heartbeat comes first: the replica later gets the variant key.
        await it.redis.flushall()
        stranger = Keyring()
        assert stranger.variant_key not in (key, Keyring().variant_key)

        async def beat() -> None:
            reply = await a.store._client.call(
                "heartbeat", "c", "{}", 60_000, stranger.offer(), stranger.first
            )
            stranger.take(reply[16], reply[18])

        await beat()
        assert stranger.variant_key != key
        await b.beat()
        await beat()
        await a.beat()
        assert [each.variant_key for each in (*keyrings, stranger)] == [key, key, key]


async def test_a_report_of_an_invalid_serving_endpoint_moves_no_request(fleet: OpenFleet) -> None:
    async with fleet("a") as (it, a):
        await a.admit("r")
        for served in ("a\tb", ",", "x,y", "\x01"):
            assert await a.store.renew("r", None, served, "") == "renewed"
            token = accounting_token.write(ask("lost"), E1)
            assert await a.store.renew("lost", None, served, token) in ("restored", "renewed")
        # Both requests count at the endpoints of their placement, and end there.
        assert await it.counts() == (2, 0, [2])
        await a.settle("r", "lost")
        assert await it.at_rest()
