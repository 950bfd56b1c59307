"""The state of the pool, rebuilt from the log: what is queued, held and running, lanes, settings in force.

A log that does not begin with the pool's first decision is joined on the way: requests whose beginning is
not in it are ignored, and what depends on them is not judged until the last has left.
"""

import math

from picker_tools.audit.entry import LANES, Entry
from picker_tools.audit.lanes import Lanes
from picker_tools.audit.life import FROM, Life, Place, Step, place_after
from picker_tools.audit.rules import Rules


def same(left: float, right: float) -> bool:
    """Equal but for rounding."""
    return math.isclose(left, right, rel_tol=1e-12, abs_tol=1e-9)


class Replay:
    """What is known after the entries so far. `advance` after the checks have seen the step.

    lives: request → where it is. lanes: of the queue. rules: in force; None while unknown.
    waiting, held, running: how many requests are known to be so.
    stock, queued: as the last entry has them; None before any.
    mixed: requests that waited when the order was changed. The sweep files them anew at moments the log does
    not tell, so nothing is said about order while one of them waits.
    """

    def __init__(self, rules: Rules | None = None) -> None:
        self.lives: dict[str, Life] = {}
        self.lanes = Lanes()
        self.rules = rules
        self.mixed: set[str] = set()
        self.held = 0
        self.stock: float | None = None
        self.queued: int | None = None
        self.last: Entry | None = None
        self.complete = False  # from the pool's first decision on
        self.waiting = 0
        self._in_use = 0.0  # stock of those known
        self._strangers_wait = True  # requests are queued whose beginning is not in the log
        self._strangers_run = True

    @property
    def settled(self) -> bool:
        """Whether lanes and order are known, so that they can be judged."""
        return self.rules is not None and not self.mixed and not self._strangers_wait

    @property
    def running(self) -> int:
        return len(self.lives) - self.waiting - self.held

    @property
    def has_strangers(self) -> bool:
        """Whether a request may be in the pool whose beginning is not in the log."""
        return self._strangers_wait or self._strangers_run

    def step(self, entry: Entry) -> Step:
        """What `entry` means. An event that cannot befall a request where it is leaves it there."""
        if self.last is None:
            self._join(entry)
        if not entry.request:
            return Step(entry, None, Place.NOWHERE, Place.NOWHERE)
        life = self.lives.get(entry.request)
        was = life.place if life else Place.NOWHERE
        if life is None and self._is_stranger_entering(entry):
            now = Place.QUEUED
        elif was in FROM[entry.event] or life:
            now = place_after(entry.event, was)
            if was not in FROM[entry.event] and now is not Place.NOWHERE:
                now = was
        else:
            now = was
        if life is None and now is not Place.NOWHERE:
            life = Life(entry, Place.NOWHERE, self._lane(entry))
        return Step(entry, life, was, now)

    def stock_after(self, step: Step) -> float | None:
        """What the stock must be after `step`; None where that cannot be known."""
        if self.stock is None:
            return None
        if step.takes:
            return self.stock + self._taken_by(step.entry)
        if step.gives_back and step.life:
            return None if step.life.taken is None else max(0.0, self.stock - step.life.taken)
        if step.life is None and step.entry.request and self._strangers_run:
            return None  # the end of one of them
        return self.stock

    def queued_after(self, step: Step) -> int | None:
        """How many must be queued after `step`; None where that cannot be known."""
        if self.queued is None or (step.life is None and step.entry.request and self._strangers_wait):
            return None
        return self.queued + step.enters_queue - step.leaves_queue

    def advance(self, step: Step) -> None:
        """Take `step` into the state."""
        entry, life = step.entry, step.life
        was_settled = self.settled
        if entry.event == "tuned":
            self._tune(Rules.parse(entry.note))
        elif entry.event in LANES:
            self.lanes.park(self.lanes.at(entry.band, entry.flow), entry.event == "parked")
        elif life is not None:
            self._move(step, life)
        self.stock, self.queued, self.last = entry.stock, entry.queued, entry
        if self._strangers_wait and self.waiting == entry.queued:
            self._strangers_wait = False
        if self._strangers_run and not self._strangers_wait and same(self._in_use, entry.stock):
            self._strangers_run = False
        if self.settled and not was_settled:
            self.lanes.unpark_empty()

    def lose(self, request: str) -> None:
        """Forget a request that the pool has lost."""
        life = self.lives.pop(request)
        if life.place is Place.QUEUED:
            self._leave(request, life)
        self._in_use -= life.taken or 0.0

    def _taken_by(self, entry: Entry) -> float:
        """What the request of `entry` takes of the stock."""
        rules = self.rules or Rules()
        if not rules.queues:
            return 0.0
        return entry.cost if entry.event == "restored" else min(entry.cost, rules.claim_share * entry.upper)

    def _join(self, entry: Entry) -> None:
        """`entry` is the first: is it what an empty pool would make of it?"""
        first = Step(entry, None, Place.NOWHERE, place_after(entry.event, Place.NOWHERE))
        stock = self._taken_by(entry) if first.takes else 0.0
        if entry.seq == 1 and same(entry.stock, stock) and entry.queued == first.enters_queue:
            self.complete = True
            self._strangers_wait = self._strangers_run = False
            self.stock, self.queued = 0.0, 0

    def _is_stranger_entering(self, entry: Entry) -> bool:
        """A held or granted request of which nothing is known comes (back) into the queue: now it is."""
        return (
            not self.complete
            and entry.event in ("adopted", "requeued")
            and self.queued is not None
            and entry.queued == self.queued + 1
        )

    def _lane(self, entry: Entry) -> str:
        return self.rules.lane(entry.flow) if self.rules else entry.flow

    def _tune(self, rules: Rules) -> None:
        if not rules.orders_like(self.rules):
            self.mixed = {name for name, life in self.lives.items() if life.place is Place.QUEUED}
            if self.mixed:
                self.lanes.clear()
        self.rules = rules

    def _move(self, step: Step, life: Life) -> None:
        entry = step.entry
        if step.leaves_queue:
            self._leave(entry.request, life)
        if step.gives_back:
            self._in_use -= life.taken or 0.0
            life.taken, life.endpoint = 0.0, ""
        if step.takes:
            told = None if self.stock is None else entry.stock - self.stock
            taken = self._taken_by(entry)
            life.taken = taken if told is None or same(told, taken) else told
            self._in_use += life.taken
        if step.enters_queue:
            self._enter(entry, life)
        if entry.event == "granted":
            life.granted = entry
        if step.now is Place.PLACED and entry.event in ("bypassed", "placed", "restored", "moved"):
            life.endpoint = entry.endpoint
        self.held += (step.now is Place.HELD) - (step.was is Place.HELD)
        life.place = step.now
        if step.now is Place.NOWHERE:
            self.lives.pop(entry.request, None)
        else:
            self.lives[entry.request] = life
        if not self.running:
            self._in_use = 0.0  # without what rounding has left

    def _enter(self, entry: Entry, life: Life) -> None:
        life.lane = self._lane(entry)
        lane = self.lanes.at(entry.band, life.lane)
        if entry.tag is not None and entry.event != "requeued":
            self.lanes.park(lane, False)  # it has just become backlogged
        self.lanes.wait(lane, 1)
        self.waiting += 1

    def _leave(self, request: str, life: Life) -> None:
        self.waiting -= 1
        if request in self.mixed:
            self.mixed.discard(request)
            return
        lane = self.lanes.at(life.begun.band, life.lane)
        self.lanes.wait(lane, -1)
        if not lane.waiting and self.settled:
            self.lanes.park(lane, False)
