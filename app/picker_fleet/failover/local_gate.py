"""Admission by one replica alone, within its part of the bound (G8). One event loop."""

import asyncio
from collections import deque
from dataclasses import dataclass

from picker_fleet.admission.waiting import Wait, time_up
from picker_fleet.errors import ClientGone, Preempted, RequestError
from picker_fleet.failover.budget import Purse
from picker_fleet.failover.local_queue import LocalQueue, Rules, Waiting
from picker_fleet.request import InferenceRequest
from picker_fleet.telemetry.metrics import Metrics


@dataclass(slots=True)
class _Queued:
    waiting: Waiting
    turn: asyncio.Future[bool]  # True: paid for; False: ask the shared state
    queue: LocalQueue  # of its outage; another may have begun before it leaves


@dataclass(slots=True)
class _Ask:
    """Another replica's question for `least`."""

    least: float
    given: asyncio.Future[float]


class LocalGate:
    """A purse and a queue; `open` before use. `needy` is set while requests wait.

    What becomes free goes round: to the own queue, then to each replica that has asked, by turns.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.needy = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._purse = Purse(0.0)
        self._bound = self._claim = 0.0  # the latter is the most that one request takes
        self._paused = False
        self._queue: LocalQueue | None = None
        self._queued: dict[str, _Queued] = {}
        self._by_place: dict[Waiting, _Queued] = {}
        self._line: deque[_Ask | None] = deque([None])  # whose turn it is; None: the own queue's

    @property
    def free(self) -> float:
        """What may still be spent, in the stock's unit."""
        return self._purse.free

    @property
    def waiting(self) -> int:
        return len(self._queued)

    @property
    def fill(self) -> float:
        """The queue's part that is taken, 0 to 1."""
        return min(len(self._queue) / self._queue.capacity, 1.0) if self._queue is not None else 0.0

    def lengths(self) -> dict[str, int]:
        """Queued requests by band."""
        return self._queue.lengths() if self._queue is not None else {}

    def open(self, free: float, bound: float, rules: Rules, *, paused: bool = False) -> None:
        """Begin with `free` to spend; no request costs more than `bound`, and no more is ever kept.

        While `paused` nothing is let go.
        """
        self._paused = paused
        self._purse, self._bound, self._claim = Purse(min(free, bound)), bound, rules.claim_share * bound
        self._queue = LocalQueue(rules)

    def keep(self, most: float) -> None:
        """Keep no more than `most`, which may be a debt; the rest is not this replica's any more."""
        self._purse.earn(min(most - self._purse.free, 0.0))

    def cost_of(self, cost: float) -> float:
        """What a request of `cost` is charged, as the scripts do."""
        return min(cost, self._claim)

    async def admit(self, request: InferenceRequest, cost: float, wait: Wait, *, alone: bool = True) -> bool:
        """True once `cost` is paid for; False if there is a shared state again, to be asked instead. Unless
        this gate decides `alone`, the shared one is asked as well, and counts who goes past the queue.
        `wait` is told that the request is queued.

        Raises:
            Dropped: refused, preempted or expired.
            DeadlineExceeded: its client's own deadline passed.
            ClientGone: its stream has been taken over by a newer one.
        """
        assert self._queue is not None
        former = self._queued.get(request.id)
        if former is not None and not former.turn.done():
            former.turn.set_exception(ClientGone("taken over by a newer stream"))
        if not self._paused and not len(self._queue) and self._purse.spend(cost):
            if alone and not wait.queued:
                self._metrics.bypassed(request.model, request.target_model)
            return True
        if wait.arrived_s + request.ttl_s <= self._loop.time():
            raise self._late(request)
        queued = self._enter(request, cost, wait.arrived_s)
        wait.queued = True
        return await self._wait(queued)

    def _enter(self, request: InferenceRequest, cost: float, arrived_s: float) -> _Queued:
        assert self._queue is not None
        try:
            place, victim = self._queue.offer(request, cost, arrived_s)
        except RequestError as error:
            self._metrics.push_error(request.model, error.code, request.target_model)
            raise
        if victim is not None:
            why = Preempted("had to make room for a higher band", retry_after_s=1)
            self._tell(self._by_place[victim], why)
            self._metrics.preempted(victim.request.band)
        queued = _Queued(place, self._loop.create_future(), self._queue)
        self._queued[request.id] = queued
        self._by_place[place] = queued
        self.needy.set()
        self._dispatch()
        return queued

    async def _wait(self, queued: _Queued) -> bool:
        place, request = queued.waiting, queued.waiting.request
        labels = request.model, request.target_model
        self._metrics.waiting(*labels, 1)
        timer = self._loop.call_at(place.deadline_s, self._tell, queued, None)
        try:
            return await queued.turn
        except asyncio.CancelledError:
            if _is_paid(queued.turn):
                self.earn(place.cost)
            raise
        finally:
            timer.cancel()
            self._metrics.waiting(*labels, -1)
            self._leave(queued)

    def earn(self, amount: float) -> None:
        """A place has become free. What is kept never passes the bound."""
        self._purse.earn(min(amount, max(self._bound - self._purse.free, 0.0)))
        self._dispatch()

    def wanted(self) -> tuple[float, float]:
        """What the next request lacks, and what all who wait do; 0 if nobody waits."""
        turn = self._queue.turn(self._loop.time()) if self._queue is not None else None
        if turn is None:
            return 0.0, 0.0
        every = sum(queued.waiting.cost for queued in self._queued.values())
        return max(turn[0].cost - max(self._purse.free, 0.0), 0.0), every

    async def lend(self, least: float, most: float, wait_s: float) -> float:
        """Part with `least`, or as much of `most` as nobody needs, within `wait_s`; else with nothing."""
        self._line = deque(each for each in self._line if each is None or not each.given.done())
        if not self._queued and len(self._line) == 1 and self._purse.free >= least:
            given = min(most, self._purse.free)
            self._purse.spend(given)
            return given
        ask = _Ask(least, self._loop.create_future())
        self._line.append(ask)
        try:
            await asyncio.wait((ask.given,), timeout=wait_s)
        except asyncio.CancelledError:
            if ask.given.done():
                self.earn(ask.least)
            raise
        finally:
            ask.given.cancel()  # the line passes it over, unless it has been given
            self._dispatch()
        return ask.given.result() if not ask.given.cancelled() else 0.0

    def release_all(self) -> None:
        """Everyone who waits asks the shared state."""
        for queued in [self._by_place[place] for place in self._queue.all()] if self._queue else ():
            if not queued.turn.done():
                queued.turn.set_result(False)

    def _dispatch(self) -> None:
        """Spend what there is, by turns."""
        if self._paused:
            return
        passed = 0  # in a row that had no use for it
        while passed < len(self._line):
            ask = self._line[0]
            if ask is None:
                served = self._serve_one()
                if served is None:
                    return  # it is the own queue's turn, and there is not enough yet
                self._line.rotate(-1)
                passed = 0 if served else passed + 1
            elif ask.given.done():
                self._line.popleft()
            elif not self._purse.spend(ask.least):
                return
            else:
                self._line.popleft()
                ask.given.set_result(ask.least)
                passed = 0

    def _serve_one(self) -> bool | None:
        """Whether one of the own queue was served; None if the next one cannot be paid for yet."""
        queue, now_s = self._queue, self._loop.time()
        while queue is not None and (turn := queue.turn(now_s)) is not None:
            place, by_guard = turn
            queued = self._by_place[place]
            if queued.turn.done():
                queue.remove(place)
            elif place.deadline_s <= now_s:
                self._tell(queued, None)
            elif self._purse.spend(place.cost):
                queue.serve(place, by_guard)
                queued.turn.set_result(True)
                self._metrics.dequeued(1, 1)
                return True
            else:
                return None
        return False

    def _tell(self, queued: _Queued, error: RequestError | None) -> None:
        """End its wait; None: its time is up."""
        queued.queue.remove(queued.waiting)
        if not queued.turn.done():
            queued.turn.set_exception(error or self._late(queued.waiting.request))

    def _late(self, request: InferenceRequest) -> RequestError:
        if not request.by_client:
            self._metrics.expired(request.model, request.target_model)
        return time_up(request, retry_after_s=1)

    def _leave(self, queued: _Queued) -> None:
        queued.queue.remove(queued.waiting)
        self._by_place.pop(queued.waiting, None)
        if self._queued.get(queued.waiting.request.id) is queued:
            del self._queued[queued.waiting.request.id]
        if not self._queued:
            self.needy.clear()


def _is_paid(turn: asyncio.Future[bool]) -> bool:
    return turn.done() and not turn.cancelled() and turn.exception() is None and turn.result()
