"""G4: requests of one lane are served in its order; a lower band only when the higher ones have nobody.

What the guard serves is out of turn by design (G3), and judged there.
"""

import heapq
import itertools

from picker_tools.audit.entry import GUARD, Entry
from picker_tools.audit.finding import Finding
from picker_tools.audit.life import Place, Step
from picker_tools.audit.replay import Replay

_Key = tuple[int, str, str]  # band, lane, workload
_Queue = list[tuple[int, str]]  # a heap of order key and request; those that have left may linger


class Order:
    """`fcfs` is judged by arrival, `edf` by deadline; of `workload-aware`, whose rates are not in the log,
    that requests of one workload are served by arrival within the lane.
    """

    TITLE = "a lane's requests in order, bands by rank"

    def __init__(self, finding: Finding, replay: Replay) -> None:
        self._finding = finding
        self._replay = replay
        self._rules = replay.rules
        self._queues: dict[_Key, _Queue] = {}

    def see(self, step: Step) -> None:
        entry, replay = step.entry, self._replay
        if replay.rules is not self._rules:
            if replay.rules is None or not replay.rules.orders_like(self._rules):
                self._queues.clear()  # whoever still waits is not judged
            self._rules = replay.rules
        if step.enters_queue:
            self._push(entry)
        elif entry.event == "bypassed" and step.takes:
            self._finding.checked += 1
            if replay.queued:
                self._finding.blame(f"{entry.request} bypassed a queue of {replay.queued}", entry)
        elif entry.event == "granted" and step.leaves_queue and replay.settled and entry.by != GUARD:
            self._finding.checked += 1
            self._judge_band(entry)
            self._judge_turn(entry)

    def close(self) -> None:
        """An order is broken by what is served, not by what waits."""

    def _judge_band(self, entry: Entry) -> None:
        replay = self._replay
        if replay.rules is None or replay.rules.band_policy != "strict":
            return
        for band in range(entry.band):
            if replay.lanes.servable(band):
                ahead = (
                    life.begun
                    for life in replay.lives.values()
                    if life.place is Place.QUEUED
                    and life.begun.band == band
                    and replay.lanes.at(band, life.lane).is_servable
                )
                self._finding.blame(
                    f"band {entry.band} served while band {band} waits", *itertools.islice(ahead, 1), entry
                )
                return

    def _judge_turn(self, entry: Entry) -> None:
        key = self._key(entry)
        queue = self._queues.get(key) if key else None
        while key and queue and not self._waits(key, queue[0]):
            heapq.heappop(queue)
        if queue and queue[0][0] < self._rank(entry):
            first = queue[0][1]
            ahead = self._replay.lives[first].begun
            self._finding.blame(
                f"{entry.request} served before {first}, which comes first in its lane", ahead, entry
            )

    def _waits(self, key: _Key, place: tuple[int, str]) -> bool:
        """Whether that request still waits in that place; its id may live anew elsewhere."""
        life = self._replay.lives.get(place[1])
        if life is None or life.place is not Place.QUEUED:
            return False
        return self._key(life.begun) == key and self._rank(life.begun) == place[0]

    def _push(self, entry: Entry) -> None:
        key = self._key(entry)
        if key is None:
            return
        queue = self._queues.setdefault(key, [])
        heapq.heappush(queue, (self._rank(entry), entry.request))
        bound = 2 * len(self._replay.lives) + 64
        if len(queue) > bound:
            queue[:] = [each for each in queue if self._waits(key, each)]
            heapq.heapify(queue)
        if len(self._queues) > bound:
            self._queues = {
                each: queue
                for each, queue in self._queues.items()
                if each == key or any(self._waits(each, place) for place in queue)
            }

    def _key(self, entry: Entry) -> _Key | None:
        """What `entry` stands in line with; None: with nobody."""
        rules = self._replay.rules
        if rules is None:
            return None
        if rules.ordering != "workload-aware":
            return entry.band, rules.lane(entry.flow), ""
        return (entry.band, rules.lane(entry.flow), entry.workload) if entry.workload else None

    def _rank(self, entry: Entry) -> int:
        if self._replay.rules is not None and self._replay.rules.ordering == "edf":
            return entry.deadline_ms * 1000 + entry.arrived % 1000
        return entry.arrived
