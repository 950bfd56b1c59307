"""Tombstones of requests whose ends a replica received recently. Tombstones keep other replicas from
restoring ended requests (G6, G8; docs/redis.md, "The way back").

When a replica that was without Redis resyncs, it restores the requests that it saw running recently. Another
replica may have received the end of a restored request meanwhile. So every replica remembers each end for
longer than a resync looks back. When a heartbeat shows that a peer is degraded (has state that Redis lacks),
the replica publishes the remembered ends to Redis as tombstones, and each further end at once. The resyncing
replica waits until its peers confirm in their heartbeats that they have published their ends.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from picker_fleet.admission.ledger import Entry, Ledger, Phase
from picker_fleet.admission.peers import PeerState
from picker_fleet.admission.reports import ignore_loss
from picker_fleet.domain.errors import ScriptFailed, StateFault
from picker_fleet.domain.request import Outcome
from picker_fleet.state.replies import TombstoneReply
from picker_fleet.state.store import Store

_CHUNK = 512  # maximum tombstones in flight at a time; the store sends 16 tombstones in a call


class Tombstones:
    """Publishes the ends of requests that `replica` has received. All calls come from one event loop.

    `ledger` has the recent ends, each with the epoch of the shared state that has its tombstone. The function
    `may_publish` returns whether Redis is in use; `may_settle` returns whether Redis also has every request
    that this replica placed during the outage. The function `heartbeat_now` sends a heartbeat at once.
    """

    def __init__(
        self,
        store: Store,
        replica: str,
        ledger: Ledger,
        *,
        may_publish: Callable[[], bool],
        may_settle: Callable[[], bool],
        heartbeat_now: Callable[[], None],
        peers_wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._replica, self._ledger = store, replica, ledger
        self._may_publish, self._may_settle = may_publish, may_settle
        self._heartbeat_now, self._peers_wait_s, self._clock = heartbeat_now, peers_wait_s, clock
        self._peer_degraded = False
        self._peer_resyncs: frozenset[str] = frozenset()  # the last resync of each peer, as `PEER:NUMBER`
        self._answered: frozenset[str] = frozenset()  # resyncs of peers for which all ends are published
        self._published_epoch = ""
        self._peers: Mapping[str, PeerState] = {}
        self._resyncs = 0
        self._due, self._peers_updated = asyncio.Event(), asyncio.Event()

    def save(self) -> tuple[Any, ...]:
        """A copy of this object's state, to compare or restore."""
        return (
            tuple(self._peers.items()), self.is_due, self._peer_degraded, self._peer_resyncs, self._answered,
            self._published_epoch, self._resyncs,
        )  # fmt: skip

    def restore(self, saved: tuple[Any, ...]) -> None:
        peers, due, *rest = saved
        self._peers = dict(peers)
        self._due.set() if due else self._due.clear()
        (
            self._peer_degraded, self._peer_resyncs, self._answered, self._published_epoch, self._resyncs,
        ) = rest  # fmt: skip

    @property
    def is_due(self) -> bool:
        """Whether a peer waits for this replica to publish the ends that it received."""
        return self._due.is_set()

    def ends(self) -> list[Entry]:
        """The requests that ended within `Ledger.keep_s` seconds, a longer time than a resync looks back."""
        return self._ledger.ended_since(self._clock() - self._ledger.keep_s)

    def add(self, entry: Entry) -> None:
        """Publish the tombstone of an ended request if a peer is degraded (has state that Redis lacks)."""
        if self._peer_degraded and self._may_publish():
            self._publish_end(entry)

    def heartbeat_fields(self) -> dict[str, object]:
        """Heartbeat fields for peers: how often this replica has begun to resync, and the resyncs of peers
        for which it has published all ends that it had received by then."""
        return {"resyncs": self._resyncs, "answered": sorted(self._answered)}

    def update_peers(self, replicas: Mapping[str, PeerState]) -> None:
        self._peers = replicas
        others = [(name, state) for name, state in replicas.items() if name != self._replica]
        self._peer_degraded = any(state.degraded for _, state in others)
        self._peer_resyncs = frozenset(_mark(name, state.resyncs) for name, state in others if state.resyncs)
        self._answered &= self._peer_resyncs
        # A peer's completed resync counts, too: it may have restored requests that have ended.
        lost = self._published_epoch != self._epoch() and (self._peer_degraded or bool(self._peer_resyncs))
        if self._peer_resyncs - self._answered or lost:
            self._due.set()
        self._peers_updated.set()

    async def run(self) -> None:
        """Publish the ends of requests whenever a peer needs the tombstones, until cancelled."""
        while True:
            await self._due.wait()
            with contextlib.suppress(StateFault):  # the next heartbeat leads to a retry
                await self.answer_peers()

    async def answer_peers(self) -> None:
        """Publish the ends of requests, and confirm this to peers that resync. Raises as `publish`."""
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
        """Write a tombstone for each end without a tombstone in the current epoch of the shared state.

        Raises:
            StateUnavailable: there is no answer from Redis.
            WritesRefused: for now, Redis refuses writes.
        """
        epoch = self._epoch()
        due = [entry for entry in self.ends() if entry.published != epoch]
        for at in range(0, len(due), _CHUNK):
            chunk = [entry for entry in due[at : at + _CHUNK] if entry.phase is Phase.ENDED]
            answers = [self._publish_end(entry) for entry in chunk]
            for entry, answer in zip(chunk, answers, strict=True):
                with contextlib.suppress(ScriptFailed):  # the failure concerns this request's end only
                    if await answer == "back":
                        entry.restored = True
        self._published_epoch = epoch

    def settle_restored(self) -> None:
        for entry in self.ends():
            if entry.restored:
                entry.restored = False
                answer = self._store.settle(entry.id, Outcome.COMPLETED)
                ignore_loss(answer)

    async def wait_for_peers(self, live: tuple[str, ...]) -> None:
        """Wait until all `live` replicas have published the ends that they received before this resync.

        Waits at most `peers_wait_s` seconds: a dead replica never publishes its ends, and a degraded replica
        publishes its ends when it resyncs itself.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._peers_wait_s):
                while not self.peers_answered(live):
                    self._peers_updated.clear()
                    await self._peers_updated.wait()

    def peers_answered(self, live: tuple[str, ...]) -> bool:
        mark = _mark(self._replica, self._resyncs)
        others = (name for name in live if name != self._replica)
        return all(name in self._peers and mark in self._peers[name].answered for name in others)

    def _publish_end(self, entry: Entry) -> asyncio.Future[TombstoneReply]:
        epoch, ended_s = self._epoch(), entry.ended_s

        def published(answer: asyncio.Future[TombstoneReply]) -> None:
            if not answer.cancelled() and answer.exception() is None and entry.ended_s == ended_s:
                entry.published = epoch

        answer = self._store.tombstone(entry.id, self._clock() - ended_s)
        answer.add_done_callback(published)
        return answer

    def _epoch(self) -> str:
        """Names Redis's data and the connection: when the name changes, Redis may have lost tombstones."""
        return f"{self._store.epoch} {self._store.connection_epoch}"


def _mark(replica: str, number: int) -> str:
    return f"{replica}:{number}"
