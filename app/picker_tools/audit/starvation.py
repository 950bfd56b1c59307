"""G3: what has waited past its time is served at the guard's share of dispatches, longest overdue first.

Checked at every dispatch, of which the guard may have `guard_share`:

- the guard serves the request with the least due time whose lane is not parked;
- over any run of n dispatches it has at most share·n + 1, and over any run in which it could see somebody
  overdue at least ⌊share·n⌋ − 1;
- a request with k others overdue for longer is served, or ends, within ⌈(k + 1)/share⌉ dispatches at which
  the guard could see somebody. The count begins anew when its lane is unparked. Where the share changes,
  what counts at a dispatch is the share of the dispatch before: that is what the guard had to spend.

The guard sees the 16 that are overdue longest, less those of parked lanes, as in `lua/lib/queue.lua`.
"""

import bisect
import heapq

from picker_tools.audit.entry import GUARD, LANES, Entry
from picker_tools.audit.finding import Finding
from picker_tools.audit.life import Life, Step
from picker_tools.audit.replay import Replay

_SEEN = 16
_ROUNDING = 1e-9

_Key = tuple[int, str]  # due, with the order of arrival within one ms; request


class Starvation:
    TITLE = "what is overdue has the guard's share, longest first"

    def __init__(self, finding: Finding, replay: Replay) -> None:
        self._finding = finding
        self._replay = replay
        self._coming: list[_Key] = []  # a heap: waiting, not yet overdue
        self._overdue: list[_Key] = []  # sorted
        self._keys: dict[str, _Key] = {}  # of all that wait
        self._lanes: dict[tuple[int, str], set[str]] = {}  # the overdue of each
        self._credit = 0.0  # of each dispatch at which the guard saw somebody, the share of the one before
        self._limits: dict[str, float] = {}  # of `credit`, until an overdue request is to be served
        self._bounds: list[tuple[float, str]] = []  # the same as a heap
        # Guard dispatches less shares, over the run where that is most. No more than 1 + share is saved up:
        # so a run has at most 1 more than the shares in force at the dispatches before each of its own.
        self._excess = 0.0
        self._share_before: float | None = None
        self._want = self._least_want = 0.0  # shares less guard dispatches, while somebody is overdue
        self._lapsed = False
        self._run: Entry | None = None  # the first dispatch of that time

    def see(self, step: Step) -> None:
        entry, life = step.entry, step.life
        if entry.event in LANES:
            self._park(entry)
        if life is None:
            return
        granted = entry.event == "granted" and step.leaves_queue
        if granted and self._replay.rules is not None:
            self._promote(entry)
            self._judge(entry, self._replay.rules.guard_share)
        if step.leaves_queue:
            self._leave(entry.request, life)
        if granted:
            self._judge_bounds(entry)
        if step.enters_queue:
            self._enter(entry)

    def close(self) -> None:
        """Who still waits has been judged at each dispatch."""

    def _enter(self, entry: Entry) -> None:
        rules = self._replay.rules
        if entry.due_ms is None or rules is None:
            return
        if self._replay.settled and entry.due_ms != rules.due_ms(entry):
            self._finding.blame(f"{entry.request} is due at {entry.due_ms}, not {rules.due_ms(entry)}", entry)
        key = (entry.due_ms * 1000 + entry.arrived % 1000, entry.request)
        self._keys[entry.request] = key
        heapq.heappush(self._coming, key)
        if len(self._coming) > 2 * len(self._keys) + 64:
            self._coming = [each for each in self._coming if self._keys.get(each[1]) == each]
            heapq.heapify(self._coming)

    def _leave(self, request: str, life: Life) -> None:
        key = self._keys.pop(request, None)
        if key is None:
            return
        at = bisect.bisect_left(self._overdue, key)
        if at < len(self._overdue) and self._overdue[at] == key:
            del self._overdue[at]
            lane = (life.begun.band, life.lane)
            self._lanes[lane].discard(request)
            if not self._lanes[lane]:
                del self._lanes[lane]
            self._limits.pop(request, None)

    def _promote(self, entry: Entry) -> None:
        """Those whose time has come are overdue."""
        while self._coming and self._coming[0][0] // 1000 <= entry.now_ms:
            key = heapq.heappop(self._coming)
            request = key[1]
            at = bisect.bisect_left(self._overdue, key)
            life = self._replay.lives.get(request)
            if life is None or self._keys.get(request) != key or self._overdue[at : at + 1] == [key]:
                continue
            self._overdue.insert(at, key)
            self._lanes.setdefault((life.begun.band, life.lane), set()).add(request)
            for _, behind in self._overdue[at + 1 :]:  # one more is ahead of them
                if behind in self._limits:
                    self._bind(behind, self._limits[behind] + 1)
            if self._can_be_served(request):
                self._bind(request, self._credit + at + 1)

    def _bind(self, request: str, limit: float) -> None:
        self._limits[request] = limit
        heapq.heappush(self._bounds, (limit, request))

    def _park(self, entry: Entry) -> None:
        for request in self._lanes.get((entry.band, entry.flow), ()):
            if entry.event == "parked":
                self._limits.pop(request, None)
            else:
                self._bind(request, self._credit + bisect.bisect_left(self._overdue, self._keys[request]) + 1)

    def _begin_anew(self) -> None:
        """The order is known again: what was counted before says nothing about what comes."""
        self._lapsed = False
        self._run = None
        self._excess, self._share_before = 0.0, None
        for at, (_, request) in enumerate(self._overdue):
            if self._can_be_served(request):
                self._bind(request, self._credit + at + 1)

    def _can_be_served(self, request: str) -> bool:
        life = self._replay.lives.get(request)
        lane = self._replay.lanes.find(life.begun.band, life.lane) if life else None
        return lane is not None and not lane.parked

    def _visible(self) -> str | None:
        """The request the guard would serve."""
        return next((request for _, request in self._overdue[:_SEEN] if self._can_be_served(request)), None)

    def _judge(self, entry: Entry, share: float) -> None:
        if not self._replay.settled:
            self._lapsed = True
            self._limits.clear()
            return
        if self._lapsed:
            self._begin_anew()
        first, by_guard = self._visible(), entry.by == GUARD
        if by_guard or first is not None:
            self._finding.checked += 1
        if by_guard:
            self._judge_choice(entry, first, share)
        earned = share if self._share_before is None else self._share_before
        self._excess += by_guard - earned
        if self._excess > 1 + _ROUNDING:
            self._finding.blame(f"the guard had more than its share of {share:g}", entry)
            self._excess = 0.0
        self._excess, self._share_before = max(0.0, self._excess), share
        if first is None or share == 0:
            self._run = None
            return
        self._credit += earned
        if self._run is None:
            self._run, self._want, self._least_want = entry, 0.0, 0.0
        self._want += share - by_guard
        if self._want - self._least_want >= 2 - _ROUNDING:
            what = f"the guard had less than its share of {share:g} while {first} waited overdue"
            self._finding.blame(what, self._run, self._replay.lives[first].begun, entry)
            self._run = None
        self._least_want = min(self._least_want, self._want)

    def _judge_choice(self, entry: Entry, first: str | None, share: float) -> None:
        if share == 0:
            self._finding.blame("a dispatch by the guard, which has no share", entry)
        key = self._keys.get(entry.request)
        at = bisect.bisect_left(self._overdue, key) if key else 0
        if key is None or self._overdue[at : at + 1] != [key]:
            self._finding.blame(f"the guard served {entry.request}, which is not overdue", entry)
        elif first is not None and self._keys[first] < key:
            what = f"the guard served {entry.request} while {first} was overdue for longer"
            self._finding.blame(what, self._replay.lives[first].begun, entry)

    def _judge_bounds(self, entry: Entry) -> None:
        """After a dispatch: is anybody still here who should have been served by now?"""
        while self._bounds and self._bounds[0][0] <= self._credit + _ROUNDING:
            limit, request = heapq.heappop(self._bounds)
            life = self._replay.lives.get(request)
            if life is not None and self._limits.get(request) == limit:
                del self._limits[request]
                what = f"{request} is overdue and was not served within the dispatches it takes"
                self._finding.blame(what, life.begun, entry)
