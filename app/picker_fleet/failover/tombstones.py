"""The ends that a replica has heard lately, in every mode, and how the others come to know them (G6, G8;
docs/without-redis.md, "The way back").

A replica that was without the shared state brings back, on its return, what it saw running lately. What has
ended since it does not know if another replica heard the end. So every replica remembers each end for longer
than anyone's sign of life counts (`outbox.unseen_s`), and tells the shared state of them, as tombstones, once
it sees in the heartbeats that another one is without it. From then on it tells of each end at once. The one
that returns waits until the others say that they have done so.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from picker_fleet.errors import ScriptFailed, StateFault
from picker_fleet.failover.journal import MOST, unseen_s
from picker_fleet.request import Outcome
from picker_fleet.state.store import Store

_AT_ONCE = 512  # ends; the link sends 16 a call
_LONGEST_WAIT_S = 2.0  # for those who have gone, or not come back themselves; they tell when they do
_NOT_TOLD = ""


class Tombstones:
    """Of the replica called `replica`; `report_s` is how often the access log gives a sign of life. One event
    loop.

    `may_tell` says whether this replica has the shared state, `may_free` whether it has also told it of
    everything that it let go without it. `heartbeat_now` makes the heartbeat come now.
    """

    def __init__(
        self,
        store: Store,
        replica: str,
        *,
        report_s: float,
        may_tell: Callable[[], bool],
        may_free: Callable[[], bool],
        heartbeat_now: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._store, self._replica = store, replica
        self._keep_s = 2 * unseen_s(report_s)
        self._may_tell, self._may_free, self._heartbeat_now, self._clock = (
            may_tell,
            may_free,
            heartbeat_now,
            clock,
        )
        # When each end was heard, and the life of the shared state that has been told of it.
        self._ends: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self._back: set[str] = set()  # of them, those that another replica has brought back
        self._away = False  # another replica is without the shared state, or has not told what runs yet
        self._returns: frozenset[str] = frozenset()  # the last return of each of the others
        self._answered: frozenset[str] = frozenset()  # of them, those for which all ends have been told
        self._told_life = _NOT_TOLD
        self._about: Mapping[str, Mapping[str, Any]] = {}
        self._own_returns = 0
        self._due, self._heard = asyncio.Event(), asyncio.Event()

    def heard(self, request_id: str) -> None:
        """The end of a request has been heard."""
        now_s, ends = self._clock(), self._ends
        ends[request_id] = now_s, _NOT_TOLD
        ends.move_to_end(request_id)
        while len(ends) > MOST or now_s - next(iter(ends.values()))[0] > self._keep_s:
            ends.popitem(last=False)
        if self._away and self._may_tell():
            self._bury(request_id, now_s)

    def knows(self, request_id: str) -> bool:
        """Whether its end has been heard here, lately."""
        return request_id in self._ends

    def anew(self, request_id: str) -> None:
        """A request of this id is let go now: an end heard before is not its own."""
        self._ends.pop(request_id, None)

    def says(self) -> dict[str, Any]:
        """What the other replicas are told with the heartbeat: how often this one has come back, and the
        returns of others for which it has told the ends that it had heard."""
        return {"returns": self._own_returns, "told": sorted(self._answered)}

    def peers(self, about: Mapping[str, Mapping[str, Any]]) -> None:
        """What each live replica says of itself."""
        self._about = about
        others = [(name, said) for name, said in about.items() if name != self._replica]
        self._away = any(said.get("degraded") for _, said in others)
        self._returns = frozenset(
            _mark(name, said["returns"]) for name, said in others if said.get("returns")
        )
        self._answered &= self._returns
        # Also one that is over: what was heard meanwhile its replica may have brought back.
        lost = self._told_life != self._life() and (self._away or bool(self._returns))
        if self._returns - self._answered or lost:
            self._due.set()
        self._heard.set()

    async def run(self) -> None:
        """Tell of what was heard whenever others need to know it, until cancelled."""
        while True:
            await self._due.wait()
            with contextlib.suppress(StateFault):  # the next heartbeat asks for it again
                await self.answer()

    async def answer(self) -> None:
        """Tell of what was heard, so that those on their way back can go on. Raises as `tell`."""
        self._due.clear()
        if not self._may_tell():
            return
        returns = self._returns
        await self.tell()
        if self._may_free():
            self.free()
        self._answered |= returns & self._returns
        self._heartbeat_now()

    def begin_return(self) -> None:
        """This replica is on its way back, perhaps again."""
        self._own_returns += 1

    async def tell(self) -> None:
        """Tell the shared state of all ends that its present life has not been told of.

        Raises:
            StateUnavailable: it does not answer.
            WritesRefused: it takes no writes for now.
        """
        life = self._life()
        due = [request_id for request_id, (_, told) in self._ends.items() if told != life]
        for at in range(0, len(due), _AT_ONCE):
            batch = [name for name in due[at : at + _AT_ONCE] if name in self._ends]
            answers = [self._bury(name, self._ends[name][0]) for name in batch]
            for name, answer in zip(batch, answers, strict=True):
                with contextlib.suppress(ScriptFailed):  # of this one; the others do not wait for it
                    if await answer == "back":
                        self._back.add(name)
        self._told_life = life

    def free(self) -> None:
        """Give back the places of what has ended and was brought back all the same."""
        back, self._back = self._back, set()
        for request_id in back & self._ends.keys():
            answer = self._store.settle(request_id, Outcome.COMPLETED)
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def others_told(self, live: tuple[str, ...]) -> None:
        """Wait until all replicas `live` have told of the ends that they had heard when this return began.

        Bounded: one that has gone, or has not come back itself, may never do it.
        """
        mark = _mark(self._replica, self._own_returns)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST_WAIT_S):
                while not all(self._has_told(name, mark) for name in live):
                    self._heard.clear()
                    await self._heard.wait()

    def _has_told(self, name: str, mark: str) -> bool:
        said = self._about.get(name, {"told": ()})
        # A version that does not know of this tells of its ends within the first half second, or not at all.
        return name == self._replica or "told" not in said or mark in said["told"]

    def _bury(self, request_id: str, heard_s: float) -> asyncio.Future[str]:
        life = self._life()

        def answered(answer: asyncio.Future[str]) -> None:
            if answer.cancelled() or answer.exception() is not None:
                return
            if self._ends.get(request_id, (None,))[0] == heard_s:
                self._ends[request_id] = heard_s, life

        answer = self._store.bury(request_id, self._clock() - heard_s)
        answer.add_done_callback(answered)
        return answer

    def _life(self) -> str:
        """Which life of the shared state this is, and by which connection: another server may lack some."""
        return f"{self._store.born} {self._store.lives}"


def _mark(replica: str, number: object) -> str:
    return f"{replica}:{number}"
