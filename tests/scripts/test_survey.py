"""One replica at a time reads all flow queues for the fleet, and only while operators ask for the queue."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from script_fleet import Fleet, OpenFleet, Replica, until

from picker_fleet.admin.fleet_state import FleetStateCache
from picker_fleet.domain.request import Outcome
from picker_fleet.state.reads import CHUNK, FlowQueueRow, QueueSnapshots, SnapshotTimes
from picker_fleet.state.replies import name_of

FLOWS = 2 * CHUNK + 10
MOST = 2000
FOREVER_MS = 600_000


def without_end(it: Fleet) -> None:
    """Let snapshots of the flow queues, and claims to read the queues, outlive the test."""
    times = SnapshotTimes(FOREVER_MS, FOREVER_MS / 1000, FOREVER_MS / 1000)
    for each in it.replicas:
        store = each.store
        store.queue_snapshots = QueueSnapshots(store._client, store.reads, it.keys.queue_snapshot, times)


async def wait_in_line(it: Fleet, flows: int = FLOWS) -> None:
    """Place one request, and queue one request of each of `flows` flows."""
    a = it.replicas[0]
    assert name_of(await a.admit("runs")) == "placed"
    verdicts = await asyncio.gather(*(a.admit(f"q{i}", flow=f"f{i:03d}") for i in range(flows)))
    assert {name_of(verdict) for verdict in verdicts} == {"queued"}


async def queues_of(replica: Replica) -> list[FlowQueueRow]:
    return (await replica.store.queue_snapshots.read(MOST)).page.queues


def names(queues: list[FlowQueueRow]) -> set[str]:
    return {queue.name for queue in queues}


async def is_left(it: Fleet) -> bool:
    """Whether Redis has a snapshot of the flow queues, or a replica's claim to make one."""
    return bool(await it.redis.exists(it.keys.queue_snapshot))


@contextlib.asynccontextmanager
async def watched(replica: Replica) -> AsyncIterator[FleetStateCache]:
    """The replica's cache of the fleet state, refreshed in the background."""
    cache = FleetStateCache(replica.store, 60.0)
    running = asyncio.create_task(cache.run())
    try:
        yield cache
    finally:
        running.cancel()


async def test_of_five_concurrent_replicas_one_reads_the_flow_queues_for_all(fleet: OpenFleet) -> None:
    async with fleet(*"abcde", upper_per=1) as it:
        without_end(it)
        await wait_in_line(it)
        first, *others = await asyncio.gather(*map(queues_of, it.replicas))
        assert len(first) == FLOWS
        assert others == [first] * 4


async def test_a_replica_that_dies_while_it_reads_does_not_block_the_others(fleet: OpenFleet) -> None:
    async with fleet("a", "b", "c", upper_per=1) as (it, a, b, c):
        await wait_in_line(it)
        assert await a.store._client.call("claim_queue_snapshot", SnapshotTimes().claim_ms) == ["", 0]
        assert await it.redis.pttl(it.keys.queue_snapshot) <= SnapshotTimes().claim_ms
        for queues in await asyncio.gather(queues_of(b), queues_of(c)):
            assert len(queues) == FLOWS


async def test_once_a_snapshot_has_expired_the_flow_queues_are_read_again(fleet: OpenFleet) -> None:
    async with fleet("a", "b", upper_per=1) as (it, a, b):
        await wait_in_line(it)
        await queues_of(a)
        await a.admit("late", flow="late")

        async def seen() -> bool:
            return "late" in names(await queues_of(b))

        await until(seen)


async def test_a_few_flow_queues_are_read_without_a_snapshot(fleet: OpenFleet) -> None:
    async with fleet("a", "b", upper_per=1) as (it, a, b):
        without_end(it)
        # With few flow queues each replica reads for itself: both replicas see a new request at once, and
        # store no snapshot.
        for waiting in (0, 3):
            if waiting:
                await wait_in_line(it, waiting)
            for each in (a, b):
                assert len(await queues_of(each)) == waiting
                assert not await is_left(it)


async def test_a_snapshot_of_another_version_or_a_damaged_one_is_ignored(fleet: OpenFleet) -> None:
    fields = json.dumps(FlowQueueRow._fields)
    others = ('{"fields": ["group", "name"], "flow_queues": [[1, "x"]], "totals": []}', '{"rows": []}')
    damaged = (
        "{",
        "[]",
        "7",
        f'{{"fields": {fields}, "flow_queues": [[1]], "totals": []}}',
        f'{{"fields": {fields}}}',
    )
    async with fleet("a", upper_per=1) as (it, a):
        await wait_in_line(it)
        for other in (*others, *damaged):
            await it.redis.set(it.keys.queue_snapshot, other, px=FOREVER_MS)
            assert len(await queues_of(a)) == FLOWS
            assert await it.redis.get(it.keys.queue_snapshot) == other


async def test_the_fleet_state_cache_reads_nothing_while_no_operator_asks(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1) as (it, a):
        await wait_in_line(it)
        async with watched(a) as cache:
            await it.after(100)
            assert cache.last.queues == ()
            assert not await is_left(it)
            first = await cache.get()
            await cache.get()
            await until(lambda: cache.last is not first)
            assert len(cache.last.queues) == FLOWS

            async def no_more() -> bool:
                last = cache.last
                await it.after(500)
                return cache.last is last and not await is_left(it)

            await until(no_more)


async def test_a_flow_queue_that_moves_while_it_is_read_is_listed_once(
    fleet: OpenFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet("a", upper_per=1) as (it, a):
        await wait_in_line(it)
        first, *_, last = (await a.store.reads.flow_queues(MOST)).queues

        # While the flow queues are read, the first flow queue is served and moves to the end.
        async def moving(name: str, *args: Any) -> Any:
            monkeypatch.undo()
            found = await a.store._client.call(name, *args)
            await a.settle("runs")
            assert name_of(await a.place("q0")) == "placed"
            await a.store.settle("q0", Outcome.COMPLETED, actual=FLOWS)
            assert name_of(await a.admit("again", flow=first.name)) == "queued"
            return found

        monkeypatch.setattr(a.store._client, "call", moving)
        found = (await a.store.reads.flow_queues(MOST)).queues
        assert len(found) == FLOWS
        assert len(names(found)) == FLOWS
        assert found[-1].name == first.name
        assert found[-1].start > last.start
        # FleetStateCache lists the flow queue there, too; one flow fewer waits, since its request was served.
        state = await FleetStateCache(a.store, 60.0).get()
        assert state.queues[-1][:4] == found[-1][:4]
        assert state.weights(first.priority, even=True) == len(state.queues) == FLOWS - 1
        assert state.page(1, first.group, (repr(last.start), last.name), None) == [state.queues[-1]]
