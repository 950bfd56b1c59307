"""The ends that a replica remembers, whom it tells of them, and for whom it waits."""

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
from picker_fleet.state.store import Store, TombstoneReply

REPORT_S = 5.0
CALM: Mapping[str, Any] = {"degraded": False, "resyncs": 0, "answered": []}
RESYNCING = {"degraded": True, "resyncs": 1}


class Told(ScriptedStore):
    """A store that says of the ends named in `restored` that they have come back; `away`, it takes none."""

    def __init__(self) -> None:
        super().__init__()
        self.restored: set[str] = set()
        self.away = False

    def tombstone(self, request_id: str, ago_s: float = 0.0) -> asyncio.Future[str]:
        super().tombstone(request_id, ago_s)
        verdict = TombstoneReply.BACK if request_id in self.restored else TombstoneReply.STORED
        return answered(StateUnavailable("away") if self.away else verdict)


class Bench:
    """The replica `a` beside `b` and `c`."""

    def __init__(self, wait_s: float = 30.0) -> None:
        self.now_s = 100.0
        self.shared = self.free = True
        self.pokes = 0
        self.store = Told()
        self.ledger = Ledger(lambda: self.now_s, 2 * unseen_s(REPORT_S))
        self.ends = Tombstones(
            cast(Store, self.store), "a", self.ledger, may_publish=lambda: self.shared,
            may_settle=lambda: self.free, heartbeat_now=self._poked, peers_wait_s=wait_s,
            clock=lambda: self.now_s,
        )  # fmt: skip

    def _poked(self) -> None:
        self.pokes += 1

    def end(self, name: str) -> None:
        """Receive the end of a request."""
        end = Completion(name, Outcome.COMPLETED, 200, None, None, None, 1.0, 0.1)
        self.ends.add(self.ledger.finish(end, "token"))

    def say(self, **others: Mapping[str, Any]) -> None:
        """What the heartbeats of the others tell."""
        told = {name: {**CALM, **others.get(name, {})} for name in "abc"}
        self.ends.update_peers({name: PeerState.read(about) for name, about in told.items()})

    async def told_of_return(self) -> None:
        """`b` resyncs, and has been told of the ends."""
        self.say(b=RESYNCING)
        await until(lambda: self.pokes)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """It runs."""
    made = Bench()
    async with running(made.ends.run()):
        yield made


async def test_while_nobody_is_away_ends_cost_redis_nothing_and_are_forgotten_in_time(bench: Bench) -> None:
    bench.end("early")
    bench.say()
    bench.now_s += 2 * unseen_s(REPORT_S) + 0.1
    bench.end("late")
    assert bench.store.tombstones == []
    # Another replica fails over and resyncs: Redis gets the ends that are not too old.
    await bench.told_of_return()
    assert bench.store.tombstones == ["late"]
    assert bench.ends.heartbeat_fields() == {"resyncs": 0, "answered": ["b:1"]}


async def test_while_another_is_away_each_end_is_told_at_once_and_once(bench: Bench) -> None:
    bench.say(b={"degraded": True})
    await until(lambda: bench.pokes)
    bench.end("x")
    assert bench.store.tombstones == ["x"]
    bench.say(b=RESYNCING)
    await until(lambda: bench.pokes > 1)
    assert bench.store.tombstones == ["x"]
    # The shared state comes back empty.
    bench.store.epoch = "another life"
    bench.say(b=RESYNCING)
    await until(lambda: bench.store.tombstones == ["x", "x"])


async def test_requests_restored_after_their_end_are_settled_once_the_resync_is_done(bench: Bench) -> None:
    bench.free = False
    bench.end("x")
    bench.store.restored = {"x"}
    await bench.told_of_return()
    assert bench.store.settled == []
    bench.ends.settle_restored()
    assert [name for name, _, _ in bench.store.settled] == ["x"]


async def test_a_request_restored_by_one_that_has_resynced_already_is_settled(bench: Bench) -> None:
    # Its end was received here.
    bench.end("x")
    bench.store.restored = {"x"}
    bench.say(b={"resyncs": 1})
    await until(lambda: bench.store.settled)
    assert [name for name, _, _ in bench.store.settled] == ["x"]


async def test_one_that_is_away_itself_answers_nobody_until_it_is_back(bench: Bench) -> None:
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


async def test_ends_that_redis_did_not_take_are_told_with_the_next_heartbeat(bench: Bench) -> None:
    bench.end("x")
    bench.store.away = True
    bench.say(b=RESYNCING)
    await until(lambda: bench.store.tombstones)
    assert bench.ends.heartbeat_fields()["answered"] == []
    bench.store.away = False
    bench.say(b=RESYNCING)
    await until(lambda: bench.ends.heartbeat_fields()["answered"] == ["b:1"])


async def test_an_id_that_is_let_go_anew_is_not_told_as_ended(bench: Bench) -> None:
    bench.end("x")
    bench.ledger.place("x", "2", "token", "10.0.0.1:8000", owned=False)
    await bench.told_of_return()
    assert bench.store.tombstones == []


async def test_a_return_waits_until_each_of_the_others_has_told_for_it() -> None:
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


async def test_a_return_does_not_wait_for_ever_nor_for_a_version_that_does_not_answer() -> None:
    bench = Bench(wait_s=0.01)
    bench.ends.begin_resync()
    bench.ends.update_peers({"a": PeerState.read(CALM), "b": PeerState()})
    await bench.ends.wait_for_peers(("a", "b"))
    await bench.ends.wait_for_peers(("a", "b", "gone"))
