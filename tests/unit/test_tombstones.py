"""Tombstones: a replica keeps ends of requests for resyncing peers, and waits for peers in its own resync."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import pytest
from background import running, until
from scripted_store import ScriptedStore, answered

from picker_fleet.admission.ledger import Ledger
from picker_fleet.admission.outage import unseen_s
from picker_fleet.admission.peers import PeerState
from picker_fleet.admission.tombstones import Tombstones
from picker_fleet.domain.errors import StateUnavailable
from picker_fleet.domain.request import Completion, Outcome
from picker_fleet.state.store import Store

REPORT_S = 5.0
CALM: Mapping[str, Any] = {"degraded": False, "resyncs": 0, "answered": []}
RESYNCING = {"degraded": True, "resyncs": 1}


class TombstoneStore(ScriptedStore):
    """A store that replies BACK to tombstones of request ids in `restored`, and fails while `away` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.restored: set[str] = set()
        self.away = False

    def tombstone(self, request_id: str, ago_s: float = 0.0) -> asyncio.Future[str]:
        super().tombstone(request_id, ago_s)
        verdict = "back" if request_id in self.restored else "stored"
        return answered(StateUnavailable("away") if self.away else verdict)


class Bench:
    """The tombstones of the replica `a`, whose peers are the replicas `b` and `c`."""

    def __init__(self, wait_s: float = 30.0) -> None:
        self.now_s = 100.0
        self.shared = self.free = True
        self.heartbeats = 0
        self.store = TombstoneStore()
        self.ledger = Ledger(lambda: self.now_s, 2 * unseen_s(REPORT_S))
        self.ends = Tombstones(
            cast(Store, self.store), "a", self.ledger, may_publish=lambda: self.shared,
            may_settle=lambda: self.free, heartbeat_now=self._count_heartbeat, peers_wait_s=wait_s,
            clock=lambda: self.now_s,
        )  # fmt: skip

    def _count_heartbeat(self) -> None:
        self.heartbeats += 1

    def end(self, name: str) -> None:
        """Let the replica receive the end of the request `name`."""
        end = Completion(name, Outcome.COMPLETED, 200, None, None, None, 1.0, 0.1)
        self.ends.add(self.ledger.finish(end, "token"))

    def say(self, **others: Mapping[str, Any]) -> None:
        """Let the replica receive heartbeats whose fields are given by the name of each replica."""
        told = {name: {**CALM, **others.get(name, {})} for name in "abc"}
        self.ends.update_peers({name: PeerState.read(about) for name, about in told.items()})

    async def resync_of_b(self) -> None:
        """Let `b` resync; wait until `a` has published its ends of requests and asks for a heartbeat."""
        self.say(b=RESYNCING)
        await until(lambda: self.heartbeats)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """A bench whose background task of tombstones runs."""
    made = Bench()
    async with running(made.ends.run()):
        yield made


async def test_without_an_outage_ends_of_requests_stay_local_and_are_forgotten_in_time(bench: Bench) -> None:
    bench.end("early")
    bench.say()
    bench.now_s += 2 * unseen_s(REPORT_S) + 0.1
    bench.end("late")
    assert bench.store.tombstones == []
    # A peer fails over and resyncs: this replica stores its recent ends in Redis.
    await bench.resync_of_b()
    assert bench.store.tombstones == ["late"]
    assert bench.ends.heartbeat_fields() == {"resyncs": 0, "answered": ["b:1"]}


async def test_during_a_peers_outage_each_end_of_a_request_is_stored_in_redis_once(bench: Bench) -> None:
    bench.say(b={"degraded": True})
    await until(lambda: bench.heartbeats)
    bench.end("x")
    assert bench.store.tombstones == ["x"]
    bench.say(b=RESYNCING)
    await until(lambda: bench.heartbeats > 1)
    assert bench.store.tombstones == ["x"]
    # Redis loses all data, and the shared state is empty.
    bench.store.epoch = "another life"
    bench.say(b=RESYNCING)
    await until(lambda: bench.store.tombstones == ["x", "x"])


async def test_requests_restored_after_their_end_are_settled_once_the_resync_is_done(bench: Bench) -> None:
    bench.free = False
    bench.end("x")
    bench.store.restored = {"x"}
    await bench.resync_of_b()
    assert bench.store.settled == []
    bench.ends.settle_restored()
    assert [name for name, _, _ in bench.store.settled] == ["x"]


async def test_a_request_that_a_resynced_peer_had_restored_after_its_end_is_settled(bench: Bench) -> None:
    # This replica had received the end of the request.
    bench.end("x")
    bench.store.restored = {"x"}
    bench.say(b={"resyncs": 1})
    await until(lambda: bench.store.settled)
    assert [name for name, _, _ in bench.store.settled] == ["x"]


async def test_a_replica_without_redis_answers_no_resync_until_redis_is_back(bench: Bench) -> None:
    bench.shared = False
    bench.end("x")
    bench.say(b=RESYNCING)
    for _ in range(10):
        await asyncio.sleep(0)
    assert (bench.store.tombstones, bench.ends.heartbeat_fields()["answered"]) == ([], [])
    bench.shared = True
    bench.say(b=RESYNCING)
    await until(lambda: bench.ends.heartbeat_fields()["answered"] == ["b:1"])
    assert bench.store.tombstones == ["x"]


async def test_tombstones_that_redis_refused_are_sent_again_with_the_next_heartbeat(bench: Bench) -> None:
    bench.end("x")
    bench.store.away = True
    bench.say(b=RESYNCING)
    await until(lambda: bench.store.tombstones)
    assert bench.ends.heartbeat_fields()["answered"] == []
    bench.store.away = False
    bench.say(b=RESYNCING)
    await until(lambda: bench.ends.heartbeat_fields()["answered"] == ["b:1"])


async def test_a_request_id_that_is_placed_again_gets_no_tombstone(bench: Bench) -> None:
    bench.end("x")
    bench.ledger.place("x", "2", "token", "10.0.0.1:8000", owned=False)
    await bench.resync_of_b()
    assert bench.store.tombstones == []


async def test_a_resync_waits_until_every_peer_has_answered() -> None:
    bench = Bench()
    bench.say()
    bench.ends.begin_resync()
    waiting = asyncio.create_task(bench.ends.wait_for_peers(("a", "b", "c")))
    for fields in (
        {"b": {"answered": ["a:1"]}},
        {"b": {"answered": ["a:1"]}, "c": {"answered": ["a:0", "b:1"]}},
    ):
        bench.say(**fields)
        await asyncio.sleep(0)
        assert not waiting.done()
    bench.say(b={"answered": ["a:1"]}, c={"answered": ["a:1"]})
    await waiting


async def test_a_resync_waits_for_limited_time_and_not_for_peers_of_versions_that_never_answer() -> None:
    bench = Bench(wait_s=0.01)
    bench.ends.begin_resync()
    bench.ends.update_peers({"a": PeerState.read(CALM), "b": PeerState()})
    await bench.ends.wait_for_peers(("a", "b"))
    await bench.ends.wait_for_peers(("a", "b", "gone"))
