"""G5: nothing is dispatched past its deadline, and what waits past it has its answer within a second."""

import heapq

from picker_tools.audit.entry import Entry
from picker_tools.audit.finding import Finding
from picker_tools.audit.life import Place, Step
from picker_tools.audit.replay import Replay

ANSWER_MS = 1000  # from the deadline to the client's answer
_WAITING = (Place.QUEUED, Place.HELD)


class Deadline:
    """A request is late that still waits at the end of a decision more than a second past its deadline. While
    nothing is decided at all, nobody is there to expire it, and nothing is held against the queue.
    """

    TITLE = "nothing past its deadline is dispatched or left waiting"

    def __init__(self, finding: Finding, replay: Replay) -> None:
        self._finding = finding
        self._replay = replay
        self._ends: list[tuple[int, str]] = []  # deadline_ms, request; of those that waited when they came in
        self._last: Entry | None = None

    def see(self, step: Step) -> None:
        entry = step.entry
        if self._last is not None and entry.time_us != self._last.time_us:
            self._judge_waiting(self._last)  # that decision is over
        self._last = entry
        if entry.event in ("granted", "bypassed"):
            self._finding.checked += 1
            if entry.time_us > entry.deadline_ms * 1000:
                late_ms = entry.time_us / 1000 - entry.deadline_ms
                self._finding.blame(f"{entry.request} dispatched {late_ms:g} ms past its deadline", entry)
        if step.enters_queue and step.was is Place.NOWHERE:
            heapq.heappush(self._ends, (entry.deadline_ms, entry.request))
            self._compact()
        if entry.event in ("expired", "abandoned"):
            self._finding.checked += 1

    def close(self) -> None:
        if self._last is not None:
            self._judge_waiting(self._last)

    def _judge_waiting(self, entry: Entry) -> None:
        while self._ends and self._ends[0][0] + ANSWER_MS < entry.now_ms:
            deadline_ms, request = heapq.heappop(self._ends)
            life = self._replay.lives.get(request)
            if life and life.place in _WAITING and life.begun.deadline_ms == deadline_ms:
                what = f"is still {life.place.value} {entry.now_ms - deadline_ms} ms past its deadline"
                self._finding.blame(f"{request} {what}", life.begun, entry)

    def _compact(self) -> None:
        """Those that have left would stay until their deadline: drop them while they are the most."""
        lives = self._replay.lives
        if len(self._ends) > 2 * len(lives) + 64:
            self._ends = [each for each in self._ends if each[1] in lives]
            heapq.heapify(self._ends)
