"""The check of G3: overdue requests get the starvation guard's share of dispatches, longest overdue first.

The guard's share of dispatches is the setting `guard_share`. At every dispatch this module checks:

- The guard serves the request with the least due time among those whose flow queues are not throttled.
- Of any n successive dispatches, the guard makes at most share·n + 1. If the guard sees an overdue request at
each of n dispatches, it makes at least ⌊share·n⌋ − 1 dispatches.
- A request behind k requests that are overdue for longer is served, or ends, within ⌈(k + 1)/share⌉
  dispatches at which the guard sees an overdue request. The count of dispatches restarts when throttling of
  the request's flow ends. If the share changes, each dispatch counts with the share at the dispatch before.

The guard looks at the 16 requests that are overdue for longest and skips throttled flows, as in
`lua/lib/flows.lua`.
"""

import bisect
import heapq

from picker_tools.audit.checks import Check, Finding
from picker_tools.audit.log import GUARD, THROTTLING, Entry
from picker_tools.audit.replay import OpenRequest, Replay, Step

_LOOKS_AT = 16
_ROUNDING = 1e-9

_Key = tuple[int, str]  # a request's due time (µs, with the last three digits of its arrival) and id


class Starvation(Check):
    PROMISE = "G3"
    TITLE = "overdue requests get the guard's share, longest overdue first"

    def __init__(self, finding: Finding, replay: Replay) -> None:
        super().__init__(finding, replay)
        self._not_due: list[_Key] = []  # a heap of waiting requests that are not yet overdue
        self._overdue: list[_Key] = []  # overdue requests, in order of due time
        self._keys: dict[str, _Key] = {}  # id of a waiting request -> its sort key
        self._overdue_of: dict[tuple[int, str], set[str]] = {}  # flow queue -> ids of its overdue requests
        self._credit = 0.0  # sum of `guard_share` over all dispatches that had an overdue request
        self._limits: dict[str, float] = {}  # overdue request -> the `_credit` by which it must be served
        # The guard's dispatches minus its shares, at most over all runs of dispatches that end now; a value
        # above 1 is a violation.
        self._excess = 0.0
        self._share_before: float | None = None
        # Shares minus the guard's dispatches since `_run_start`, while the guard sees an overdue request.
        self._shortfall = self._least_shortfall = 0.0
        self._order_unknown = False
        self._run_start: Entry | None = None

    def check(self, step: Step) -> None:
        entry, request = step.entry, step.request
        if entry.event in THROTTLING:
            self._apply_throttling(entry)
        if request is None:
            return
        granted = entry.event == "granted" and step.leaves_queue
        if granted and self._replay.rules is not None:
            self._promote(entry)
            self._check(entry, self._replay.rules.guard_share)
        if step.leaves_queue:
            self._leave(entry.request, request)
        if granted:
            self._check_limits(entry)
        if step.enters_queue:
            self._enter(entry)

    def _enter(self, entry: Entry) -> None:
        rules = self._replay.rules
        if entry.due_ms is None or rules is None:
            return
        if self._replay.settled and entry.due_ms != rules.due_ms(entry):
            self._finding.add(f"{entry.request} is due at {entry.due_ms}, not {rules.due_ms(entry)}", entry)
        key = (entry.due_ms * 1000 + entry.arrived % 1000, entry.request)
        self._keys[entry.request] = key
        heapq.heappush(self._not_due, key)
        if len(self._not_due) > 2 * len(self._keys) + 64:
            self._not_due = [each for each in self._not_due if self._keys.get(each[1]) == each]
            heapq.heapify(self._not_due)

    def _leave(self, request_id: str, request: OpenRequest) -> None:
        key = self._keys.pop(request_id, None)
        if key is None:
            return
        at = bisect.bisect_left(self._overdue, key)
        if at < len(self._overdue) and self._overdue[at] == key:
            del self._overdue[at]
            queue = request.queue_key
            self._overdue_of[queue].discard(request_id)
            if not self._overdue_of[queue]:
                del self._overdue_of[queue]
            self._limits.pop(request_id, None)

    def _promote(self, entry: Entry) -> None:
        """Move requests whose due time has come to the list `_overdue`."""
        while self._not_due and self._not_due[0][0] // 1000 <= entry.now_ms:
            key = heapq.heappop(self._not_due)
            request_id = key[1]
            at = bisect.bisect_left(self._overdue, key)
            request = self._replay.requests.get(request_id)
            if request is None or self._keys.get(request_id) != key or self._overdue[at : at + 1] == [key]:
                continue
            self._overdue.insert(at, key)
            self._overdue_of.setdefault(request.queue_key, set()).add(request_id)
            for _, behind in self._overdue[at + 1 :]:  # the new request now precedes `behind`
                if behind in self._limits:
                    self._limits[behind] += 1
            if self._can_be_served(request_id):
                self._limits[request_id] = self._credit + at + 1

    def _apply_throttling(self, entry: Entry) -> None:
        """Ignore the overdue requests of a throttled flow queue, or of a throttled tenant's flow queues, and
        restart their counts when the throttling ends."""
        flow_queues = self._replay.flow_queues
        subject = flow_queues.find((entry.band, entry.flow))
        keys = list(self._overdue_of) if subject and subject.is_inner else [(entry.band, entry.flow)]
        for key in keys:
            queue = flow_queues.find(key)
            if queue is None or not any(each is subject for each in queue.chain):
                continue
            other = any(each.throttled and each is not subject for each in queue.chain)
            for request_id in self._overdue_of.get(key, ()):
                if entry.event == "throttled" or other:
                    self._limits.pop(request_id, None)
                else:
                    at = bisect.bisect_left(self._overdue, self._keys[request_id])
                    self._limits[request_id] = self._credit + at + 1

    def _restart(self) -> None:
        """Restart all counts when the order is known again, since earlier counts no longer apply."""
        self._order_unknown = False
        self._run_start = None
        self._excess = 0.0
        for at, (_, request_id) in enumerate(self._overdue):
            if self._can_be_served(request_id):
                self._limits[request_id] = self._credit + at + 1

    def _can_be_served(self, request_id: str) -> bool:
        request = self._replay.requests.get(request_id)
        queue = self._replay.flow_queues.find(request.queue_key) if request else None
        return queue is not None and queue.throttled_by is None

    def _next_overdue(self) -> str | None:
        """The id of the request that the starvation guard must serve next; None without overdue requests."""
        return next(
            (request_id for _, request_id in self._overdue[:_LOOKS_AT] if self._can_be_served(request_id)),
            None,
        )

    def _check(self, entry: Entry, share: float) -> None:
        if not self._replay.settled:
            self._order_unknown, self._share_before = True, share
            self._limits.clear()
            return
        if self._order_unknown:
            self._restart()
        first, by_guard = self._next_overdue(), entry.by == GUARD
        if by_guard or first is not None:
            self._finding.checked += 1
        if by_guard:
            self._check_choice(entry, first, share)
        before = self._share_before  # unknown at the log's first dispatch
        self._excess += by_guard - (share if before is None else before)
        if self._excess > 1 + _ROUNDING:
            self._finding.add(f"the guard had more than its share of {share:g}", entry)
            self._excess = 0.0
        self._excess, self._share_before = max(0.0, self._excess), share
        if first is None or share == 0:
            self._run_start = None
            return
        self._credit += before or 0.0
        if self._run_start is None:
            self._run_start, self._shortfall, self._least_shortfall = entry, 0.0, 0.0
        self._shortfall += share - by_guard
        if self._shortfall - self._least_shortfall >= 2 - _ROUNDING:
            what = f"the guard had less than its share of {share:g} while {first} waited overdue"
            self._finding.add(what, self._run_start, self._replay.requests[first].first_entry, entry)
            self._run_start = None
        self._least_shortfall = min(self._least_shortfall, self._shortfall)

    def _check_choice(self, entry: Entry, first: str | None, share: float) -> None:
        if share == 0:
            self._finding.add("the guard dispatched, but its share is 0", entry)
        key = self._keys.get(entry.request)
        at = bisect.bisect_left(self._overdue, key) if key else 0
        if key is None or self._overdue[at : at + 1] != [key]:
            self._finding.add(f"the guard served {entry.request}, which is not overdue", entry)
        elif first is not None and self._keys[first] < key:
            what = f"the guard served {entry.request} while {first} was overdue for longer"
            self._finding.add(what, self._replay.requests[first].first_entry, entry)

    def _check_limits(self, entry: Entry) -> None:
        """Report overdue requests that should have been served by this dispatch at the latest."""
        late = [each for each, limit in self._limits.items() if limit <= self._credit + _ROUNDING]
        for request_id in late:
            del self._limits[request_id]
            request = self._replay.requests.get(request_id)
            if request is not None:
                what = f"{request_id} is overdue and was not served within the promised number of dispatches"
                self._finding.add(what, request.first_entry, entry)
