"""The stream of routes on a real Valkey: replicas that follow the stream have equal prefix indexes."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from background import running, until
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis
from redis_servers import Server, redis_server

from picker_fleet.scheduling import route_stream
from picker_fleet.scheduling.endpoint_history import block_hashes
from picker_fleet.scheduling.latency_model import Load
from picker_fleet.scheduling.route_stream import (
    CompletionRecord,
    EvidenceRecord,
    FollowedRecord,
    LossRecord,
    ObservationRecord,
    PlacementRecord,
    Record,
    RemovedRecord,
    RouteRecord,
    StoredRecord,
    TokensRecord,
    pack,
    unpack,
)

A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "[fd00::1]:8000"
_STREAMS = itertools.count(1)

addresses = st.text(max_size=40)
hashes = st.lists(st.binary(min_size=8, max_size=8), max_size=9).map(tuple)
kinds = st.sampled_from([RouteRecord, StoredRecord, RemovedRecord, TokensRecord])
routes = st.builds(lambda kind, *parts: kind(*parts), kinds, addresses, hashes)
amounts = st.floats(min_value=0, max_value=1e6)
observed = st.builds(
    ObservationRecord, addresses, addresses, st.builds(Load, *[amounts] * 4), amounts, amounts
)
others = (
    st.builds(CompletionRecord, addresses, amounts)
    | st.builds(PlacementRecord, addresses, amounts, amounts)
    | st.builds(EvidenceRecord, addresses, amounts, amounts, amounts)
    | st.builds(LossRecord, addresses)
    | st.builds(FollowedRecord, addresses, amounts)
)


class Replica:
    """One replica's connection to the stream of routes, with the replica's prefix index."""

    def __init__(self, url: str, stream: str, name: str) -> None:
        self.routes = route_stream.RouteStream(url, stream=stream, replica=name)
        self.index, self.latencies = self.routes.index, self.routes.latencies
        self.routes.share()

    def completions(self, address: str) -> int:
        stats = self.latencies.stats(address)
        return stats.count if stats else 0


@contextlib.asynccontextmanager
async def following(*replicas: Replica, caught_up: bool = True) -> AsyncIterator[None]:
    """Let `replicas` follow the stream; with `caught_up`, the block begins once all have caught up."""
    async with running(*(replica.routes.run() for replica in replicas)):
        if caught_up:
            await wait_caught_up(*replicas)
        yield


async def wait_caught_up(*replicas: Replica) -> None:
    async with asyncio.timeout(20):
        for replica in replicas:
            await replica.routes.caught_up.wait()


def prompt(name: str, blocks: int = 4) -> tuple[bytes, ...]:
    return block_hashes(name, b"x" * (256 * blocks))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server.url


class Fleet:
    """Replicas that follow one stream, and a Redis client of the same server."""

    def __init__(self, url: str) -> None:
        self.url, self.client = url, Redis.from_url(url)
        self.stream = f"epp:{{pool-{next(_STREAMS)}}}:routes"

    def replica(self, name: str = "r") -> Replica:
        return Replica(self.url, self.stream, name)

    async def add(self, record: Record | bytes, **more: Any) -> None:
        """Write a stream entry as another replica does."""
        body = record if isinstance(record, bytes) else pack(record)
        await self.client.xadd(self.stream, {"by": "x", "body": body}, **more)


@pytest.fixture
async def fleet(url: str) -> AsyncIterator[Fleet]:
    fleet = Fleet(url)
    async with fleet.client:
        yield fleet


@given(st.lists(routes | others | observed), st.integers(min_value=1, max_value=200))
def test_packed_route_records_are_unpacked_unchanged(records: list[Record], most_bytes: int) -> None:
    packed = [pack(record) for record in records]
    entries = list(route_stream.join_records(packed, most_bytes))

    assert [record for body in entries for record in unpack(body)] == records
    assert all(len(body) <= max(most_bytes, *map(len, packed)) for body in entries)


@given(st.binary(max_size=80) | (routes | others | observed).map(pack).map(lambda body: body[:-1]))
def test_a_malformed_stream_entry_is_refused_and_a_valid_one_packs_to_the_same_bytes(body: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert b"".join(map(pack, unpack(body))) == body


async def test_three_replicas_that_follow_the_stream_have_equal_indexes(fleet: Fleet) -> None:
    replicas = [fleet.replica(f"r{n}") for n in range(3)]
    async with following(*replicas):
        for n, replica in enumerate(replicas):
            for turn in range(50):
                replica.routes.add_route((A, B, C)[(n + turn) % 3], prompt(f"{n}-{turn}"))
                replica.routes.add(CompletionRecord(A, n + turn / 100))
                replica.routes.add(ObservationRecord(A, "llama", Load(turn, n), 0.1 + turn / 100, 0.01))
            replica.routes.add_placement(B, 100.0 * (n + 1), 1e6)
            replica.routes.add(CompletionRecord(f"the last of {n}", 1.0))

        await until(
            lambda: all(
                len(one.index) == 600 and all(one.completions(f"the last of {n}") for n in range(3))
                for one in replicas
            )
        )

    for n in range(3):
        for turn in range(50):
            found = [one.index.match(prompt(f"{n}-{turn}")) for one in replicas]
            assert found == [{(A, B, C)[(n + turn) % 3]: 4}] * 3
    assert len({one.latencies.stats(A) for one in replicas}) == 1
    forecasts = {one.routes.model.forecast("llama", A, Load(20, 1)) for one in replicas}
    assert len(forecasts) == 1
    assert forecasts.pop().ttft is not None
    now_s = time.monotonic()
    assert {round(one.routes.backlogs.tokens(B, now_s)) for one in replicas} == {600}


async def test_a_restarted_replica_catches_up_with_the_route_stream(fleet: Fleet) -> None:
    one, other = fleet.replica("one"), fleet.replica("other")
    async with following(other):
        async with following(one):
            one.routes.add_route(A, prompt("by one"))
            assert one.index.match(prompt("by one")) == {A: 4}  # a replica knows its own routes at once
            one.routes.add(CompletionRecord(A, 1.5))
            await until(lambda: other.completions(A) == 1 and len(other.index) == 4)
        other.routes.add_route(B, prompt("by other"))
        other.routes.add(CompletionRecord(A, 2.5))
        await until(lambda: other.completions(A) == 2)

        again = fleet.replica("one, second life")
        async with following(again):
            pass

    assert again.index.match(prompt("by one")) == {A: 4}
    assert again.index.match(prompt("by other")) == {B: 4}
    assert again.latencies.stats(A) == other.latencies.stats(A)


async def test_only_recent_stream_entries_are_read_and_malformed_entries_are_skipped(fleet: Fleet) -> None:
    # One entry is an hour old and one is new, with malformed entries between them.
    now_s, _ = await fleet.client.time()
    await fleet.add(RouteRecord(A, prompt("m")), id=f"{(now_s - 3600) * 1000}-0")
    await fleet.add(b"Rubbish")
    await fleet.client.xadd(fleet.stream, {"something": "else"})
    await fleet.add(RouteRecord(B, prompt("m")))
    late = fleet.replica("late")
    async with following(late):
        assert late.index.match(prompt("m")) == {B: 4}


async def test_a_replica_that_falls_behind_the_stream_misses_only_trimmed_entries(fleet: Fleet) -> None:
    writer, slow = fleet.replica("writer"), fleet.replica("slow")
    async with following(writer):
        async with following(slow):
            writer.routes.add(CompletionRecord(A, 1.0))
            await until(lambda: slow.completions(A) == 1)
        for count, address in enumerate((B, C), start=1):
            writer.routes.add(CompletionRecord(address, 1.0))
            await until(lambda count=count: sum(map(writer.completions, (B, C))) == count)
        await fleet.client.xtrim(fleet.stream, maxlen=1, approximate=False)

        async with following(slow, caught_up=False):
            await until(lambda: slow.completions(C) == 1)

    assert (slow.completions(A), slow.completions(B), slow.completions(C)) == (1, 0, 1)


async def test_replicas_follow_the_route_stream_across_broken_connections(fleet: Fleet) -> None:
    one, other = fleet.replica("one"), fleet.replica("other")
    async with following(one, other):
        for n in range(5):
            address = f"10.0.0.{n}:80"
            one.routes.add(CompletionRecord(address, 1.0))
            other.routes.add_route(address, prompt(address))
            await until(
                lambda address=address: (
                    other.completions(address) > 0 and one.index.match(prompt(address)) == {address: 4}
                )
            )
            assert await fleet.client.client_kill_filter(_type="normal", skipme=True) >= 2


async def test_replicas_follow_a_stream_that_was_deleted_and_created_again(fleet: Fleet) -> None:
    now_s, _ = await fleet.client.time()
    replica = fleet.replica()
    await fleet.add(CompletionRecord(A, 1.0), id=f"{(now_s + 9000) * 1000}-0")
    async with following(replica, caught_up=False):
        await until(lambda: replica.completions(A) == 1)
    await fleet.client.delete(fleet.stream)
    await fleet.add(CompletionRecord(B, 1.0))

    async with following(replica, caught_up=False):
        await until(lambda: replica.completions(B) == 1)


async def test_a_replica_without_redis_learns_its_own_picks_then_follows_the_stream(valkey: Server) -> None:
    valkey.kill()
    one, other = map(Fleet(valkey.url).replica, ("one", "other"))
    async with following(one, other, caught_up=False):
        one.routes.add_route(A, prompt("m"))
        one.routes.add(CompletionRecord(A, 1.0))
        await until(lambda: one.completions(A) == 1)
        assert other.completions(A) == 0

        await asyncio.to_thread(valkey.revive)
        await wait_caught_up(one, other)
        one.routes.add(CompletionRecord(B, 1.0))
        await until(lambda: other.completions(B) >= 1)
        one.routes.add_route(B, prompt("n"))
        await until(lambda: other.index.match(prompt("n")) == {B: 4})


async def test_many_routes_make_few_stream_entries_and_the_stream_stays_short(fleet: Fleet) -> None:
    async with fleet.client.pipeline(transaction=False) as pipeline:
        for _ in range(2 * route_stream.MAX_ENTRIES):
            pipeline.xadd(fleet.stream, {"by": "x", "body": b""})
        await pipeline.execute()
    replica = fleet.replica()
    async with following(replica):
        last = (await fleet.client.xrevrange(fleet.stream, count=1))[0][0]
        for n in range(100):
            replica.routes.add_route(A, prompt(str(n), 100))
        replica.routes.add(CompletionRecord(A, 1.0))
        await until(lambda: replica.completions(A) == 1)

    entries = await fleet.client.xrange(fleet.stream, min=b"(" + last)
    assert sum(len(unpack(fields[b"body"])) for _, fields in entries) == 101
    assert len(entries) <= 5
    assert all(len(fields[b"body"]) <= route_stream.MAX_ENTRY_BYTES for _, fields in entries)
    assert await fleet.client.xlen(fleet.stream) <= route_stream.MAX_ENTRIES + 100


async def test_without_redis_only_the_latest_completions_are_kept() -> None:
    replica = Fleet("redis://127.0.0.1:1/0").replica()
    for n in range(5000):
        replica.routes.add_route(A, prompt(str(n), 1))
        replica.routes.add(CompletionRecord(A, float(n)))

    async with following(replica, caught_up=False):
        await until(lambda: replica.completions(A) == 100)

    stats = replica.latencies.stats(A)
    assert stats is not None
    assert stats.mean_s == pytest.approx(4949.5)
    assert len(replica.index) == 5000
