"""The ends that a replica has received lately, in every state, and how they keep other replicas from
restoring what has ended (G6, G8; docs/redis.md, "The way back").

A replica that was without Redis restores, when it resyncs, the requests it saw running lately. Another
replica may have received the end of one since. So every replica remembers each end for longer than a sign of
life counts. When a heartbeat shows that another replica is degraded, it publishes these ends to Redis as
tombstones, and each further end at once. The replica that resyncs waits until the others say that they have
done so.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from picker_fleet.admission.shared_gate import Recent
from picker_fleet.errors import ScriptFailed, StateFault
from picker_fleet.failover.peers import PeerState
from picker_fleet.request import Outcome
from picker_fleet.state.store import Store

_CHUNK = 512  # ends on their way at a time; the store sends 16 a call
_UNPUBLISHED = ""


class Tombstones:
    """Publishes the ends received by `replica`. One event loop.

    `ends` are those received lately, each with the epoch of the shared state that has its tombstone. The
    gate, which has them too, takes out a request that it places again: the end received before belongs to an
    earlier one of that id.
    `may_publish` says whether Redis is in use. `may_settle` says whether Redis also has all that this replica
    placed without it. `heartbeat_now` sends a heartbeat at once.
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
        self._restored: set[str] = set()  # those that another replica has restored after their end
        self._peer_degraded = False
        self._peer_resyncs: frozenset[str] = frozenset()  # the last resync of each of the others
        self._answered: frozenset[str] = frozenset()  # those before which all ends are published
        self._published_epoch = _UNPUBLISHED
        self._peers: Mapping[str, PeerState] = {}
        self._resyncs = 0
        self._due, self._peers_updated = asyncio.Event(), asyncio.Event()

    def save(self) -> tuple[Any, ...]:
        """All that it remembers, comparable."""
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
        """Whether another replica waits for the ends."""
        return self._due.is_set()

    def add(self, request_id: str) -> None:
        now_s = self._ends.note(request_id, _UNPUBLISHED)
        if self._peer_degraded and self._may_publish():
            self._publish_end(request_id, now_s)

    def heartbeat_fields(self) -> dict[str, object]:
        """For the other replicas: how often this one has begun to resync, and the resyncs of others before
        whose begin it has published all ends."""
        return {"resyncs": self._resyncs, "answered": sorted(self._answered)}

    def update_peers(self, replicas: Mapping[str, PeerState]) -> None:
        self._peers = replicas
        others = [(name, state) for name, state in replicas.items() if name != self._replica]
        self._peer_degraded = any(state.degraded for _, state in others)
        self._peer_resyncs = frozenset(_mark(name, state.resyncs) for name, state in others if state.resyncs)
        self._answered &= self._peer_resyncs
        # A resync that is over counts too: it may have restored what ended meanwhile.
        lost = self._published_epoch != self._epoch() and (self._peer_degraded or bool(self._peer_resyncs))
        if self._peer_resyncs - self._answered or lost:
            self._due.set()
        self._peers_updated.set()

    async def run(self) -> None:
        """Publish the ends whenever another replica needs them, until cancelled."""
        while True:
            await self._due.wait()
            with contextlib.suppress(StateFault):  # the next heartbeat asks again
                await self.answer_peers()

    async def answer_peers(self) -> None:
        """Publish the ends, so that replicas that resync can go on. Raises as `publish`."""
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
        """Make a tombstone of each end that the present epoch of the shared state lacks.

        Raises:
            StateUnavailable: Redis does not answer.
            WritesRefused: it takes no writes for now.
        """
        epoch = self._epoch()
        due = [request_id for request_id, (_, published) in self._ends.items() if published != epoch]
        for at in range(0, len(due), _CHUNK):
            chunk = [name for name in due[at : at + _CHUNK] if name in self._ends]
            answers = [self._publish_end(name, self._ends[name][0]) for name in chunk]
            for name, answer in zip(chunk, answers, strict=True):
                with contextlib.suppress(ScriptFailed):  # of this end only
                    if await answer == "back":
                        self._restored.add(name)
        self._published_epoch = epoch

    def settle_restored(self) -> None:
        restored, self._restored = self._restored, set()
        for request_id in restored & self._ends.keys():
            answer = self._store.settle(request_id, Outcome.COMPLETED)
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def wait_for_peers(self, live: tuple[str, ...]) -> None:
        """Wait until all replicas `live` have published the ends that they received before this resync.

        At most `peers_wait_s`: a replica that is gone never does it, one that is degraded itself does it when
        it returns.
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

    def _publish_end(self, request_id: str, received_s: float) -> asyncio.Future[str]:
        epoch = self._epoch()

        def published(answer: asyncio.Future[str]) -> None:
            if answer.cancelled() or answer.exception() is not None:
                return
            if self._ends.get(request_id, (None,))[0] == received_s:
                self._ends[request_id] = received_s, epoch

        answer = self._store.tombstone(request_id, self._clock() - received_s)
        answer.add_done_callback(published)
        return answer

    def _epoch(self) -> str:
        """The epoch of the shared state and of the connection: another server may lack some tombstones."""
        return f"{self._store.epoch} {self._store.connection_epoch}"


def _mark(replica: str, number: int) -> str:
    return f"{replica}:{number}"
