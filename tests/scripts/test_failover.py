"""Replicas lose a real Redis and resync: no replica restores a request that has ended (G6, G8)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from members import member_of
from script_fleet import Fleet, OpenFleet, Replica, addresses, ask, config, ended, until

from picker_fleet.admission.failover import FailoverState
from picker_fleet.domain.config import parse
from picker_fleet.domain.errors import StateUnavailable
from picker_fleet.domain.request import Alive, Endpoint, Placement

(E1,) = addresses(1)


class FailoverReplica:
    """A replica whose gate and membership fail over and resync."""

    def __init__(self, replica: Replica) -> None:
        self.gate = replica.gate
        replica.fails_over()
        self.membership = replica.membership = member_of(
            replica.store, self.gate.queue, parse(config(8, "200ms")), replica.cell, replica.metrics,
            failover=self.gate.failover,
        )  # fmt: skip
        self.membership.discovered([Endpoint(E1)])

    async def shared(self) -> None:
        """Wait until this replica uses the shared state again."""
        await until(lambda: self.gate.failover.state is FailoverState.SHARED)

    def leave(self) -> None:
        self.gate.failover.redis_lost("silence", "the test says so")

    async def start_locally(self, request_id: str) -> Placement:
        return await self.gate.admit(ask(request_id), stream_owned=False)

    def end(self, request_id: str, placement: Placement) -> None:
        self.gate.settle(ended(request_id)._replace(accounting_token=placement.accounting_token))


@asynccontextmanager
async def failover_replicas(it: Fleet) -> AsyncIterator[list[FailoverReplica]]:
    """Run the fleet's replicas with failover; yield when all replicas know each other."""
    those = [FailoverReplica(replica) for replica in it.replicas]
    async with asyncio.TaskGroup() as tasks:
        works = [work for one in those for work in (one.gate.failover.run(), one.membership.run())]
        background = [tasks.create_task(work) for work in works]
        try:
            await until(lambda: all(len(one.gate.failover._peers.live) == len(those) for one in those))
            yield those
        finally:
            for task in background:
                task.cancel()


async def test_a_returning_replica_does_not_restore_requests_whose_end_other_replicas_reported(
    fleet: OpenFleet,
) -> None:
    async with fleet("a", "b", "c") as it, failover_replicas(it) as (away, here, other):
        for number in range(2):
            # Redis places two requests; a replica that has lost Redis places a third request locally.
            kept, gone, alone = (f"{what}-{number}" for what in ("kept", "gone", "alone"))
            placements = {kept: await here.start_locally(kept), gone: await away.start_locally(gone)}
            away.leave()
            placements[alone] = await away.start_locally(alone)
            for name, placement in placements.items():
                away.gate.renew(Alive(name, E1, placement.accounting_token))
            # Replicas with Redis receive a renewal of the third request, and then the ends of two requests.
            here.gate.renew(Alive(alone, E1, placements[alone].accounting_token))
            await until(lambda those={kept, gone, alone}: _in_flight(it, those))
            for name in (alone, gone):
                other.end(name, placements[name])
            await until(lambda those={kept}: _in_flight(it, those))
            await away.shared()
            assert await _in_flight(it, {kept})
            here.end(kept, placements[kept])
            await until(it.at_rest)
        restored = [entry.request for entry in await it.log() if entry.event == "restored"]
        assert restored == ["alone-0", "alone-1"]


@pytest.mark.parametrize("empty", [False, True])
async def test_an_end_reported_to_a_replica_without_redis_counts_after_its_resync(
    fleet: OpenFleet, empty: bool
) -> None:
    async with fleet("a", "b") as it, failover_replicas(it) as (one, other):
        # Both replicas have lost Redis; `other` receives the end of a request that replica `one` placed.
        other.leave()
        one.leave()
        placement = await one.start_locally("x")
        running = await other.start_locally("runs")
        other.end("x", placement)
        if empty:
            await it.redis.flushall()
        # Both replicas resync, and replica `one` fails over once more.
        await one.shared()
        one.leave()
        await asyncio.gather(one.shared(), other.shared())
        await until(lambda: _in_flight(it, {"runs"}))
        one.end("runs", running)
        await until(it.at_rest)


async def test_a_replica_keeps_resyncing_while_a_peer_that_redis_lists_has_no_replies(
    fleet: OpenFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both replicas lose Redis. Replica `late` gets no replies, so its old replica info stays in Redis.
    async with fleet("a", "b") as it, failover_replicas(it) as (one, late):
        heartbeat = it.replicas[1].store.heartbeat

        async def unanswered(*_: object) -> None:
            raise StateUnavailable("no reply")

        monkeypatch.setattr(it.replicas[1].store, "heartbeat", unanswered)
        for each in (one, late):
            each.leave()
        await until(lambda: one.gate.failover.outage is None or _resyncs_for(one, 2.5))
        assert one.gate.failover.state is FailoverState.RESYNCING
        monkeypatch.setattr(it.replicas[1].store, "heartbeat", heartbeat)
        await asyncio.gather(one.shared(), late.shared())


def _resyncs_for(replica: FailoverReplica, seconds: float) -> bool:
    outage = replica.gate.failover.outage
    assert outage is not None
    return outage.resync is not None and outage.clock() - outage.resync.began_s > seconds


async def test_a_running_request_is_restored_even_if_its_id_was_used_before(fleet: OpenFleet) -> None:
    async with fleet("a", "b") as it, failover_replicas(it) as (away, here):
        here.end("x", await here.start_locally("x"))
        await until(it.at_rest)
        await it.after(2_100)
        away.leave()
        placement = await away.start_locally("x")
        await away.shared()
        await until(lambda: _in_flight(it, {"x"}))
        here.end("x", placement)
        await until(it.at_rest)


async def _in_flight(it: Fleet, wanted: set[str]) -> bool:
    return set(await it.redis.zrange(it.keys.prefix + "inflight", 0, -1)) == wanted
