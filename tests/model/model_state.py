"""The model's time and settings, requests, and workload registry."""

import re
from dataclasses import dataclass, field
from typing import Any

from picker_fleet.domain.tenants import Tree
from picker_fleet.state.connection import smoothed
from picker_fleet.state.keys import joined


@dataclass(slots=True)
class Moment:
    """The present time, and the settings in force (docs/redis-schema.md)."""

    now_us: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    tree: Tree = field(default_factory=lambda: Tree([]))  # the tree of tenants in force

    @property
    def now_ms(self) -> int:
        return self.now_us // 1000


@dataclass(slots=True, eq=False)
class Request:
    """The record of a request; `taken`: the stock that it takes, `tag`: its flow queue's tag at its grant."""

    id: str
    owner: str
    attempt: str
    flow: str
    priority: int
    weight: float
    cost: float
    workload: str
    criticality: int
    model: str
    limit: int
    body_bytes: int = 0
    prompt_tokens: float = 0.0
    answer_tokens: float = 0.0
    any_endpoint: bool = False  # with candidates `*` the grant also places the request
    arrived: int = 0  # time of arrival, µs
    deadline_ms: int = 0
    due_ms: float = 0  # time when the request becomes overdue
    timer_ms: float = 0  # time when the request's next timer runs
    state: str = "new"  # "new", "queued", "orphaned", "granted" or "placed"
    flow_queue: str = ""  # name of the request's flow queue while the request is queued
    endpoints: str = ""
    prefillers: str = ""  # 'x,y' while endpoint x computes the prompt (fallback: y)
    prefill_lease_ms: int = 0
    taken: float = 0.0
    tag: float | None = None
    blocker: str = ""  # the request was granted for a slot of this full endpoint; '' once placed or queued
    lease_ms: int = 0

    @property
    def early_ms(self) -> int:
        """EARLY_MS of `attempt` (NUMBER-EARLY_MS.DIGEST): by how much `edf` advances the deadline."""
        found = re.match(r"\d+-(\d+)", self.attempt)
        return int(found[1]) if found else 0


@dataclass(slots=True)
class Workload:
    """A workload of the workload registry. `counts`: arrivals in sixths of the rate window, newest first."""

    active: int = 0
    dispatched: int = 0
    ema_ms: float = 0.0
    last_ms: int = 0
    slot: int = 0
    counts: list[float] = field(default_factory=lambda: [0.0] * 7)
    total: int = 0


class Registry:
    """A registry of workloads by name."""

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
        """The arrivals in the present sixth of the rate window and in each of the six sixths before."""
        return self._slid(name).counts

    def rate(self, name: str) -> float:
        """The rate of arrivals (1/s) over the sliding window."""
        if name not in self.known:
            return 0.0
        counts, window_ms = self._slid(name).counts, self._moment.settings["window_ms"]
        left = 1 - (self._moment.now_ms % (window_ms / 6)) / (window_ms / 6)
        return float((sum(counts[:6]) + counts[6] * left) / (window_ms / 1000))

    def wait_ms(self, name: str) -> float:
        return self.known[name].ema_ms if name in self.known else 0.0

    def count_arrival(self, name: str) -> None:
        self._slid(name).counts[0] += 1
        self.known[name].total += 1
        self.known[name].last_ms = self._moment.now_ms

    def count_dispatch(self, name: str, wait_ms: float) -> None:
        workload, alpha = self.known.setdefault(name, Workload()), self._moment.settings["ema_alpha"]
        first = workload.dispatched == 0
        workload.ema_ms = wait_ms if first else smoothed(workload.ema_ms, wait_ms, alpha)
        workload.dispatched += 1

    def forget_idle(self, idle_ms: int) -> None:
        for name, workload in list(self.known.items()):
            if workload.active == 0 and self._moment.now_ms - workload.last_ms > idle_ms:
                del self.known[name]


class Workloads(Registry):
    """The registry of workloads by id. Under the ordering `workload-aware` the registry `in_flows` counts
    each workload by flow, too. Requests without a workload id ('') are not counted."""

    def __init__(self, moment: Moment) -> None:
        super().__init__(moment)
        self.in_flows = Registry(moment)

    @property
    def _scored(self) -> bool:
        return bool(self._moment.settings["ordering"] == "workload-aware")

    def rate_of(self, flow: str, name: str) -> float:
        return self.in_flows.rate(joined(flow, name))

    def wait_ms_of(self, flow: str, name: str) -> float:
        return self.in_flows.wait_ms(joined(flow, name))

    def arrived(self, flow: str, name: str) -> None:
        if not name:
            return
        self.count_arrival(name)
        self.active(name, 1)
        if self._scored:
            self.in_flows.count_arrival(joined(flow, name))

    def dispatched(self, flow: str, name: str, wait_ms: float) -> None:
        if not name:
            return
        self.count_dispatch(name, wait_ms)
        if self._scored and joined(flow, name) in self.in_flows.known:
            self.in_flows.count_dispatch(joined(flow, name), wait_ms)

    def sent_back(self, name: str) -> None:
        """Subtract a dispatch whose request was requeued; the average wait keeps its value."""
        if name:
            self.known[name].dispatched -= 1

    def active(self, name: str, change: int) -> None:
        """Add `change` to the workload's number of active requests."""
        if name:
            workload = self.known.setdefault(name, Workload())
            workload.active, workload.last_ms = max(workload.active + change, 0), self._moment.now_ms

    def forget_idle(self, idle_ms: int) -> None:
        super().forget_idle(idle_ms)
        self.in_flows.forget_idle(idle_ms)
