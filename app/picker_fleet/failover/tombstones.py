"""Tombstones of the ends that a replica received recently, which keep other replicas from restoring ended
requests (G6, G8; docs/redis.md, "The way back").

A replica that was without Redis restores, when it resyncs, the requests it saw running recently. Another
replica may have received the end of such a request since then. So every replica remembers each end for longer
than a sign of life counts. When a heartbeat shows that a peer is degraded, the replica publishes these ends
to Redis as tombstones, and each further end at once. The resyncing replica waits until its peers confirm in
their heartbeats that they have published their ends.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from picker_fleet.admission.shared_gate import Recent
from picker_fleet.errors import ScriptFailed, StateFault
from picker_fleet.failover.peers import PeerState
from picker_fleet.request import Outcome
from picker_fleet.state.store import Store, TombstoneReply

_CHUNK = 512  # tombstones in flight at a time; the store sends 16 in a call
_UNPUBLISHED = ""


class Tombstones:
    """Publishes the ends received by `replica`. Uses one event loop.

    `ends` has the ends received recently, each with the epoch of the shared state that has its tombstone. The
    gate shares `ends`, and removes the end of a request that it places again: that end belongs to an earlier
    request of the same id.
    `may_publish` returns whether Redis is in use; `may_settle`, whether Redis also has every request that
    this replica placed during the outage. `heartbeat_now` sends a heartbeat at once.
    """

    def __init__(
        self,
        store: Store,
        replica: str,
        ends: Recent[str],
        *,
        may_publish: Callable[[], bool],
        may_settle: Callable[[], bool],
        heartbeat_now: Callable[[], None],
        peers_wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._replica, self._ends = store, replica, ends
        self._may_publish, self._may_settle = may_publish, may_settle
        self._heartbeat_now, self._peers_wait_s, self._clock = heartbeat_now, peers_wait_s, clock
        self._restored: set[str] = set()  # ended requests that another replica restored
        self._peer_degraded = False
        self._peer_resyncs: frozenset[str] = frozenset()  # the last resync of each peer
        self._answered: frozenset[str] = frozenset()  # peers' resyncs for which all ends are published
        self._published_epoch = _UNPUBLISHED
        self._peers: Mapping[str, PeerState] = {}
        self._resyncs = 0
        self._due, self._peers_updated = asyncio.Event(), asyncio.Event()

    def save(self) -> tuple[Any, ...]:
        """A comparable copy of the state."""
        return (
            tuple(self._ends.items()), frozenset(self._restored), tuple(self._peers.items()), self.is_due,
            self._peer_degraded, self._peer_resyncs, self._answered, self._published_epoch, self._resyncs,
        )  # fmt: skip

    def restore(self, saved: tuple[Any, ...]) -> None:
        ends, restored, peers, due, *rest = saved
        self._restored, self._peers = set(restored), dict(peers)
        self._ends.clear()
        self._ends.update(ends)
        self._due.set() if due else self._due.clear()
        (
            self._peer_degraded, self._peer_resyncs, self._answered, self._published_epoch, self._resyncs,
        ) = rest  # fmt: skip

    @property
    def is_due(self) -> bool:
        """Whether a peer waits until this replica has published its ends."""
        return self._due.is_set()

    def add(self, request_id: str) -> None:
        now_s = self._ends.note(request_id, _UNPUBLISHED)
        if self._peer_degraded and self._may_publish():
            self._publish_end(request_id, now_s)

    def heartbeat_fields(self) -> dict[str, object]:
        """Fields for peers: how often this replica has begun to resync, and the peers' resyncs for which it
        has published all ends received before them."""
        return {"resyncs": self._resyncs, "answered": sorted(self._answered)}

    def update_peers(self, replicas: Mapping[str, PeerState]) -> None:
        self._peers = replicas
        others = [(name, state) for name, state in replicas.items() if name != self._replica]
        self._peer_degraded = any(state.degraded for _, state in others)
        self._peer_resyncs = frozenset(_mark(name, state.resyncs) for name, state in others if state.resyncs)
        self._answered &= self._peer_resyncs
        # A completed resync counts too: it may have restored requests that have ended.
        lost = self._published_epoch != self._epoch() and (self._peer_degraded or bool(self._peer_resyncs))
        if self._peer_resyncs - self._answered or lost:
            self._due.set()
        self._peers_updated.set()

    async def run(self) -> None:
        """Publish the ends whenever a peer needs them, until cancelled."""
        while True:
            await self._due.wait()
            with contextlib.suppress(StateFault):  # the next heartbeat asks again
                await self.answer_peers()

    async def answer_peers(self) -> None:
        """Publish the ends, and confirm it to the peers that resync. Raises as `publish`."""
        self._due.clear()
        if not self._may_publish():
            return
        resyncs = self._peer_resyncs
        await self.publish()
        if self._may_settle():
            self.settle_restored()
        self._answered |= resyncs & self._peer_resyncs
        self._heartbeat_now()

    def begin_resync(self) -> None:
        self._resyncs += 1

    async def publish(self) -> None:
        """Write a tombstone for each end that has none in the current epoch of the shared state.

        Raises:
            StateUnavailable: Redis does not answer.
            WritesRefused: Redis takes no writes for now.
        """
        epoch = self._epoch()
        due = [request_id for request_id, (_, published) in self._ends.items() if published != epoch]
        for at in range(0, len(due), _CHUNK):
            chunk = [name for name in due[at : at + _CHUNK] if name in self._ends]
            answers = [self._publish_end(name, self._ends[name][0]) for name in chunk]
            for name, answer in zip(chunk, answers, strict=True):
                with contextlib.suppress(ScriptFailed):  # the failure concerns this end only
                    if await answer is TombstoneReply.BACK:
                        self._restored.add(name)
        self._published_epoch = epoch

    def settle_restored(self) -> None:
        restored, self._restored = self._restored, set()
        for request_id in restored & self._ends.keys():
            answer = self._store.settle(request_id, Outcome.COMPLETED)
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def wait_for_peers(self, live: tuple[str, ...]) -> None:
        """Wait until all `live` replicas have published the ends that they received before this resync.

        Waits at most `peers_wait_s`: a dead replica never publishes its ends, and a degraded one publishes
        them when it resyncs itself.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._peers_wait_s):
                while not self.peers_answered(live):
                    self._peers_updated.clear()
                    await self._peers_updated.wait()

    def peers_answered(self, live: tuple[str, ...]) -> bool:
        mark = _mark(self._replica, self._resyncs)
        return all(self._has_answered(name, mark) for name in live)

    def _has_answered(self, name: str, mark: str) -> bool:
        if name == self._replica:
            return True
        return name in self._peers and mark in self._peers[name].answered

    def _publish_end(self, request_id: str, received_s: float) -> asyncio.Future[TombstoneReply]:
        epoch = self._epoch()

        def published(answer: asyncio.Future[TombstoneReply]) -> None:
            if answer.cancelled() or answer.exception() is not None:
                return
            if self._ends.get(request_id, (None,))[0] == received_s:
                self._ends[request_id] = received_s, epoch

        answer = self._store.tombstone(request_id, self._clock() - received_s)
        answer.add_done_callback(published)
        return answer

    def _epoch(self) -> str:
        """The epochs of the shared state and of the connection: a new server may lack tombstones."""
        return f"{self._store.epoch} {self._store.connection_epoch}"


def _mark(replica: str, number: int) -> str:
    return f"{replica}:{number}"
