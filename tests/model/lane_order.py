"""One lane of the queue, and which of its requests is served first (specs 001, 003)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Moment:
    """What every decision may look at: the time, and the settings in force (docs/redis-schema.md)."""

    now_us: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def now_ms(self) -> int:
        return self.now_us // 1000


@dataclass(slots=True)
class Request:
    """A request as the pool knows it. `taken`: of the stock; `tag`: its lane's when it was granted."""

    id: str
    owner: str
    attempt: str
    flow: str
    band: int
    weight: float
    cost: float
    workload: str
    criticality: int
    model: str
    limit: int
    arrived: int = 0  # us; orders a lane
    deadline_ms: int = 0
    due_ms: int = 0  # becomes overdue
    timer_ms: int = 0  # when its next thing is due
    overdue: bool = False
    state: str = "new"  # queued, held, granted, placed
    lane: str = ""  # where it stands while queued
    endpoints: str = ""
    taken: float = 0.0
    tag: float | None = None
    lease_ms: int = 0


@dataclass(slots=True)
class Workload:
    """One workload of the registry. `counts`: arrivals in each sixth of the window, newest first."""

    active: int = 0
    dispatched: int = 0
    ema_ms: float = 0.0
    last_ms: int = 0
    slot: int = 0
    counts: list[float] = field(default_factory=lambda: [0.0] * 7)
    total: int = 0


class Workloads:
    """The registry. An anonymous request (workload '') leaves nothing here."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        self.known: dict[str, Workload] = {}

    def _slid(self, name: str) -> Workload:
        workload = self.known.setdefault(name, Workload())
        slot = int(self._moment.now_ms // (self._moment.settings["window_ms"] / 6))
        passed = min(slot - workload.slot, 7)
        workload.counts = ([0.0] * passed + workload.counts)[:7]
        workload.slot = slot
        return workload

    def arrivals(self, name: str) -> list[float]:
        """In this sixth of the window and the six before it."""
        return self._slid(name).counts

    def rate(self, name: str) -> float:
        """Arrivals a second over the sliding window."""
        if name not in self.known:
            return 0.0
        counts, window_ms = self._slid(name).counts, self._moment.settings["window_ms"]
        left = 1 - (self._moment.now_ms % (window_ms / 6)) / (window_ms / 6)
        return float((sum(counts[:6]) + counts[6] * left) / (window_ms / 1000))

    def wait_ms(self, name: str) -> float:
        return self.known[name].ema_ms if name in self.known else 0.0

    def arrived(self, name: str) -> None:
        if name:
            self._slid(name).counts[0] += 1
            self.known[name].total += 1
            self._active(name, 1)

    def dispatched(self, name: str, wait_ms: float) -> None:
        if name:
            workload, alpha = self.known.setdefault(name, Workload()), self._moment.settings["ema_alpha"]
            first = workload.dispatched == 0
            workload.ema_ms = wait_ms if first else alpha * wait_ms + (1 - alpha) * workload.ema_ms
            workload.dispatched += 1

    def sent_back(self, name: str) -> None:
        """A dispatch that came to nothing: it counts again, and the average keeps its wait."""
        if name:
            self.known[name].dispatched -= 1

    def restored(self, name: str) -> None:
        if name:
            self._active(name, 1)

    def ended(self, name: str) -> None:
        if name:
            self._active(name, -1)

    def _active(self, name: str, change: int) -> None:
        workload = self.known.setdefault(name, Workload())
        workload.active, workload.last_ms = max(workload.active + change, 0), self._moment.now_ms

    def forget_idle(self, idle_ms: int) -> None:
        for name, workload in list(self.known.items()):
            if workload.active == 0 and self._moment.now_ms - workload.last_ms > idle_ms:
                del self.known[name]


@dataclass(frozen=True, slots=True)
class Filed:
    """A workload's head, under the score it had when it was filed; the least `key` is served first."""

    grows: bool
    key: float


class Lane:
    """The waiting requests of one lane. `tag` is its start tag; a parked lane takes no turn."""

    def __init__(self, moment: Moment, workloads: Workloads, tag: float) -> None:
        self._moment, self._workloads = moment, workloads
        self.tag = tag
        self.parked = False
        self.blocked: dict[str, float] = {}  # endpoint that it waits for -> its tag then
        self.requests: dict[str, Request] = {}
        self.filed: dict[str, Filed] = {}

    def insert(self, r: Request) -> None:
        self.requests[r.id] = r
        if self._by_workload:
            self._file_head(r)

    def remove(self, r: Request) -> None:
        del self.requests[r.id]
        if self.filed.pop(r.id, None) and self._by_workload and r.workload:
            self._file_head(r)

    def head(self) -> Request:
        """Who is served next."""
        if self._by_workload:
            return self.requests[self._best_filed()]
        return min(self.requests.values(), key=self._order)

    def newest(self) -> Request:
        """Who gives way first: under `edf`, the latest deadline."""
        return max(self.requests.values(), key=self._order)

    @property
    def _order(self) -> Callable[[Request], tuple[int, str]]:
        return by_deadline if self._moment.settings["ordering"] == "edf" else by_arrival

    def refile(self, registered_only: bool = False) -> None:
        """File the heads anew: rates slide without arrivals too, and policies change."""
        if not registered_only:
            self.filed.clear()
        for r in self.requests.values():
            if self._by_workload and (r.workload or not registered_only):
                self._file_head(r)

    @property
    def _by_workload(self) -> bool:
        return bool(self._moment.settings["ordering"] == "workload-aware")

    def _file_head(self, of: Request) -> None:
        """File the oldest of the workload of `of`, and none other of it. Who is anonymous stands alone."""
        line = [r for r in self.requests.values() if r.workload == of.workload] if of.workload else [of]
        for r in line:
            self.filed.pop(r.id, None)
        if line:
            head = min(line, key=by_arrival)
            self.filed[head.id] = self._file(head)

    def _file(self, r: Request) -> Filed:
        s, now_us = self._moment.settings, self._moment.now_us
        rate = self._workloads.rate(r.workload) if r.workload else 0.0
        g = s["criticality_weight"] * r.criticality / 5 - s["rate_weight"] * min(rate / s["rate_cap"], 1)
        if s["wait_signal"] == "workload_average" and r.workload:
            waited = min(self._workloads.wait_ms(r.workload) / s["wait_cap_ms"], 1)
        elif s["wait_weight"] == 0 or now_us - r.arrived >= s["wait_cap_ms"] * 1000:
            waited = 1.0
        else:
            # Below the cap all scores grow alike: arrival, less what g is worth, orders them for good.
            return Filed(True, r.arrived - s["wait_cap_ms"] * 1000 / s["wait_weight"] * g)
        return Filed(False, -(s["wait_weight"] * waited + g))

    def _best_filed(self) -> str:
        s, now_us = self._moment.settings, self._moment.now_us
        cap_us = s["wait_cap_ms"] * 1000
        while True:
            growing, static = self._top(grows=True), self._top(grows=False)
            if growing is None:
                assert static is not None
                return static[1]
            key, id = growing
            if now_us - self.requests[id].arrived >= cap_us:
                self.filed[id] = self._file(self.requests[id])
                continue
            score = (now_us - key) / cap_us * s["wait_weight"]
            return static[1] if static and -static[0] >= score else id

    def _top(self, grows: bool) -> tuple[float, str] | None:
        return min(
            ((filed.key, id) for id, filed in self.filed.items() if filed.grows == grows), default=None
        )


def by_arrival(r: Request) -> tuple[int, str]:
    return r.arrived, r.id


def by_deadline(r: Request) -> tuple[int, str]:
    return r.deadline_ms * 1000 + r.arrived % 1000, r.id
