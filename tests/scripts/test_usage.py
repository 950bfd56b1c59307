"""Usage is counted once, by hour, leaf and model, and exported with a note wherever it may be missing."""

import asyncio
from typing import Any

import pytest
from script_fleet import OpenFleet, Replica

from picker_fleet.admin.usage import UsageExport
from picker_fleet.domain.errors import ScriptFailed
from picker_fleet.domain.request import Completion, Outcome
from picker_fleet.domain.sections import Leases
from picker_fleet.domain.tenants import Price
from picker_fleet.fleet.usage import HOUR_MS, UsageMeter
from picker_fleet.state.reads import Usage, UsageHour

FILL = r"for n = 0, ARGV[1] - 1 do redis.call('HSET', KEYS[1], 't' .. n .. '\031llama', '1 0 1 0 1 2') end"
PRICES = {"llama": Price(prompt=2, cached=0.5, answer=3)}


def served(prompt: int | None, answer: int | None, cached: int = 0, **more: Any) -> Completion:
    end = Completion("r", Outcome.COMPLETED, 200, None, prompt, answer, 0.1, 0.1, cached_tokens=cached)
    return end._replace(**more)


async def exported(a: Replica) -> list[dict[str, Any]]:
    export = UsageExport(a.store, Leases())
    hours = await export.hours()
    parts = [part for hour in hours async for part in export.rows(hour, is_followed=hour + 1 in hours)]
    return [row.fields() for part in parts for row in part]


async def test_a_usage_batch_whose_reply_was_lost_is_sent_again_and_counts_once(fleet: OpenFleet) -> None:
    async with fleet("a", "b") as (_, a, b):
        await a.beat()
        await b.beat()
        one, other = UsageMeter(a.store, PRICES), UsageMeter(b.store, PRICES)
        one.count(served(100, 10, 60), "acme/search", "llama")
        one.count(served(None, None), "acme/search", "llama")
        one.count(served(None, None, status=503), "acme/search", "llama")  # a refused request used no tokens
        other.count(served(5, 5), "acme/search", "llama")
        other.count(served(1, 1), "acme/chat", "unpriced")
        sent = a.store.count_usage

        async def lost(*args: Any, **named: Any) -> None:
            await sent(*args, **named)
            raise ScriptFailed("the reply was lost")

        a.store.count_usage = lost  # type: ignore[method-assign]
        with pytest.raises(ScriptFailed):
            await one.flush()
        a.store.count_usage = sent  # type: ignore[method-assign]
        one.count(served(1, 0), "acme/search", "llama")  # this usage goes into the next batch
        await one.flush()
        await one.flush()
        await other.flush()
        (hour,) = await a.store.reads.usage_hours()
        found = await b.store.reads.usage(hour)
        assert found.rows == {
            ("acme/search", "llama"): Usage(
                4, 1, 106, 60, 15, 40 * 2 + 60 * 0.5 + 10 * 3 + 2 + 5 * 2 + 5 * 3
            ),
            ("acme/chat", "unpriced"): Usage(1, 0, 1, 0, 1, 2.0),
        }


async def test_the_export_names_each_replica_that_stopped_without_leaving(fleet: OpenFleet) -> None:
    async with fleet("a", "dead", "left", "goes-on") as (it, a, _, left, _):
        for replica in it.replicas:
            await replica.beat()
            await UsageMeter(replica.store, {}).flush(leaves=replica is left)
        hour = a.store.now_ms() // HOUR_MS
        now_ms = int(await it.now_ms())
        # In the hour before, replica `goes-on` sent its last mark early, but it has a mark in this hour, too.
        early = f"7 {(hour - 1) * HOUR_MS + 1000} 0"
        before = it.keys.usage(hour - 1)
        await it.redis.hset(before, mapping={"\x1edead": early, "\x1egoes-on": early})
        await it.redis.hset(it.keys.usage_hours, str(hour - 1), 2)
        await it.redis.hset(it.keys.usage(hour), "\x1edead", f"8 {now_ms - 6000} 0")
        notes = [row["note"] for row in await exported(a)]
        assert ["dead" in note for note in notes] == [False, True]
        assert notes[0] == "the hour has not ended"
        await it.redis.hdel(it.keys.usage(hour), "\x1edead")
        assert "replica dead stopped" in (await exported(a))[0]["note"]


async def test_the_export_says_before_which_time_redis_lost_usage(fleet: OpenFleet) -> None:
    async with fleet("a", "b") as (it, a, b):
        meters = {a: UsageMeter(a.store, {}), b: UsageMeter(b.store, {})}
        await a.beat()
        hour = a.store.now_ms() // HOUR_MS
        for replica, hours in ((a, 1), (b, 0), (b, 0), (a, 0), (a, 0), (b, 1), (a, 1)):
            replica.store.now_ms = lambda hours=hours: (hour + hours) * HOUR_MS  # type: ignore[method-assign]
            await meters[replica].flush()
        assert not [row for row in await exported(a) if "lost" in row["note"]]
        # A replica of Redis that takes over may lack the last writes.
        await it.redis.hset(it.keys.usage(hour + 1), "\x1ea", "2 0 0")
        await meters[a].flush()
        notes = [row["note"] for row in await exported(a)]
        assert [note[:30] for note in notes if "lost" in note] == ["Redis lost data: usage before "]
        await it.redis.delete(it.keys.usage(hour), it.keys.usage(hour + 1), it.keys.usage_hours)
        await meters[b].flush()
        assert any("Redis lost data" in row["note"] for row in await exported(a))


async def test_the_usage_of_a_large_hour_is_exported_in_parts_and_in_order(fleet: OpenFleet) -> None:
    async with fleet("a") as (it, a):
        hour = a.store.now_ms() // HOUR_MS
        await it.redis.eval(FILL, 1, it.keys.usage(hour), 1000)
        parts = [part async for part in UsageExport(a.store, Leases()).rows(hour, is_followed=False)]
        assert max(map(len, parts)) <= 250
        names = [row.tenant for part in parts for row in part if row.tenant]
        assert names == sorted(f"t{number}" for number in range(1000))


async def test_at_most_two_usage_exports_read_an_hour_at_once(fleet: OpenFleet) -> None:
    async with fleet("a") as (it, a):
        hour = a.store.now_ms() // HOUR_MS
        await it.redis.eval(FILL, 1, it.keys.usage(hour), 1000)
        export, read = UsageExport(a.store, Leases()), []
        usage = a.store.reads.usage

        async def counted(hour: int) -> UsageHour:
            read.append(hour)
            return await usage(hour)

        a.store.reads.usage = counted  # type: ignore[method-assign]
        exports = [export.rows(hour, is_followed=False) for _ in range(5)]
        waiting = [asyncio.create_task(anext(each)) for each in exports]
        done: set[asyncio.Task[Any]] = set()
        while len(done) < 2:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=10)
        assert len(read) == 2
        for each, task in zip(exports, waiting, strict=True):  # its client leaves
            await task
            await each.aclose()
        assert len(read) == 5


async def test_stored_hours_and_rows_of_usage_are_bounded_and_the_oldest_go_first(fleet: OpenFleet) -> None:
    async with fleet("a") as (it, a):
        await a.beat()
        hour = a.store.now_ms() // HOUR_MS
        await it.redis.eval(FILL, 1, it.keys.usage(hour), 100_000)
        ages = {hour - 841: 10, hour - 840 + 1: 900_000, hour - 2: 5}
        await it.redis.hset(it.keys.usage_hours, mapping=ages)
        for each in ages:
            await it.redis.hset(it.keys.usage(each), "a\x1fllama", "1 0 1 0 1 2")
        meter = UsageMeter(a.store, {})
        for leaf in ("new", "t0", "newer"):
            meter.count(served(1, 1), leaf, "llama")
        await meter.flush()
        # The two new leaves share a row. The oldest hours are gone, so that the others are within the bounds.
        assert await a.store.reads.usage_hours() == [hour - 2, hour]
        assert not await it.redis.exists(it.keys.usage(hour - 841), it.keys.usage(hour - 839))
        found = await a.store.reads.usage(hour)
        assert (found.rows["", ""].requests, found.rows["t0", "llama"].requests) == (2, 2)
        assert ("new", "llama") not in found.rows
