"""A simulated shared queue that writes a decision log. The simulator adds stock, endpoints and limits to the
local fair queue, which tests/model compares with the queue of the Lua scripts. Each rule is one method, so
that each class in `faulty_queues` breaks one rule only.
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from picker_fleet.admission.fair_queue import BandQueue, Context, FairQueue, Policy, QueueFull
from picker_fleet.domain.bands import NAMED, Bands

START_US = 1_700_000_000_000_000
POLICY: dict[str, Any] = {
    "total_capacity": 100, "flow_capacity": 10**6, "max_flows": 10**6, "fairness": "weighted-fair",
    "ordering": "fcfs", "overload": "preempt", "band_policy": "strict",
    "guard_share": 0.1, "starvation_ms": 1000, "weights": {}, "wait_signal": "request", "wait_weight": 0,
    "criticality_weight": 0, "rate_weight": 0, "wait_cap_ms": 1, "rate_cap": 1,
}  # fmt: skip


@dataclass(eq=False)
class Request:
    id: str
    flow: str = ""
    band: int = 1
    cost: float = 1.0
    weight: float = 1.0
    limit: int = 0
    arrived: int = 0
    deadline_ms: int = 0
    owner: str = "a"
    due_ms: float = 0
    state: str = "new"
    endpoint: str = ""
    taken: float = 0.0
    tag: float = -1.0
    workload: str = ""
    criticality: int = 3
    flow_queue: str = ""
    body_bytes: int = 0
    early_ms: int = 0

    @property
    def priority(self) -> int:
        return NAMED[self.band].priority


NOBODY = Request("", band=0, cost=0, owner="")


def raw_entry(
    event: str, r: Request, numbers: Mapping[str, float], fields: Mapping[str, str]
) -> dict[str, str]:
    """An entry of the decision log. `numbers` are the pool's numbers after the event; `fields` may have the
    keys tag, by and note."""
    own = ("band", "priority", "cost", "weight", "arrived", "deadline_ms", "limit")
    numbers = {**numbers, **{name: getattr(r, name) for name in own}}
    return {
        **{name: f"{number:.17g}" for name, number in numbers.items()},
        **fields,
        "event": event,
        "request": r.id,
        "due_ms": f"{r.due_ms:.17g}" if r.due_ms else "",
        "bytes": str(r.body_bytes),
        **{name: getattr(r, name) for name in ("flow", "workload", "owner", "endpoint")},
    }


class QueueSimulator:
    """The list `log` has the entries as the Redis stream holds them. Only `advance_ms` moves the clock."""

    fair_queue: type[FairQueue[Request]] = FairQueue

    def __init__(self, endpoints: int = 2, **settings: Any) -> None:
        self.settings = {**POLICY, "upper_per": 2, "lower_per": 2, "paused": 0, "log_max": 1000, **settings}
        self.endpoints = [f"10.0.0.{i + 1}:8000" for i in range(endpoints)]
        self.log: list[dict[str, str]] = []
        self.requests: dict[str, Request] = {}
        self.now_us = START_US
        self.stock = 0.0
        self._arrival = 0
        self._context = Context(self.policy, lambda: self.now_us, cast(Any, None))
        self.queue = self.fair_queue(self._context, itertools.count(1).__next__)
        for band in NAMED:
            self.queue.band(band.priority)
        self.write("tuned", note=json.dumps(self.settings))

    # Methods that tests call to act on the queue

    def advance_ms(self, ms: float) -> None:
        self.now_us += int(ms * 1000)

    def admit(self, name: str, flow: str = "flow", *, ttl_ms: int = 60_000, **fields: Any) -> None:
        """Admit the request `name`, or adopt it if it is known."""
        known = self.requests.get(name)
        if known is not None:
            known.owner = fields.get("owner", known.owner)
            tag = self.enter(known) if known.state == "orphaned" else None
            self.write("adopted", known, tag=tag)
            self.dispatch()
            return
        self._arrival = max(self._arrival + 1, self.now_us)
        r = Request(name, flow, arrived=self._arrival, deadline_ms=self.now_us // 1000 + ttl_ms, **fields)
        if self.queued == 0 and self.has_room(r) and not self.flow_full(r) and self.place(r):
            self.take(r)
            self.write("bypassed", r)
        else:
            self.wait(r)
        self.dispatch()

    def admit_many(self, name: str, count: int, flows: int = 1, **fields: Any) -> None:
        """Admit `count` requests `name0`, `name1`, …, which belong to `flow0`, `flow1`, … in turn."""
        for i in range(count):
            self.admit(f"{name}{i}", f"flow{i % flows}", **fields)

    def place_granted(self) -> None:
        for r in [r for r in self.requests.values() if r.state == "granted"]:
            assert self.place(r)
            self.write("placed", r)

    def settle(self, name: str, actual: float | None = None) -> None:
        r = self.requests[name]
        if actual is not None and r.tag >= 0:
            share = self.queue.share(r)
            change, band = (actual - r.cost) * share / r.cost, self.queue.bands[r.priority]
            if r.flow_queue in band.queues:
                self.queue.charge(band, r.flow_queue, change)
            else:  # a flow's forgotten finish tag was at most the virtual time v
                charged = band.finish.get(r.flow_queue, min(r.tag + share, band.v))
                band.finish[r.flow_queue] = charged + change
            self.write("corrected", r, tag=self.tag_of(band, r.flow_queue), note=f"{change:.17g}")
        self.end(r, "completed")
        self.dispatch()

    def cancel(self, name: str) -> None:
        self.end(self.requests[name], "cancelled")
        self.dispatch()

    def orphan(self, name: str) -> None:
        """Orphan a queued request, as if its replica were silent."""
        r = self.requests[name]
        self.queue.remove(r)
        r.state = "orphaned"
        self.write("orphaned", r)

    def sweep(self) -> None:
        for r in [r for r in self.requests.values() if r.state in ("queued", "orphaned")]:
            if self.is_late(r):
                self.end(r, "expired" if r.state == "queued" else "abandoned")
        self.queue.forget_finish_tags(at_rest=self.stock == 0 and self.queued == 0)

    def change_settings(self, **changes: Any) -> None:
        self.settings |= changes
        self._context.policy = self.policy
        self.write("tuned", note=json.dumps(self.settings))
        self.dispatch()

    def run_dry(self) -> None:
        """Serve and complete every request."""
        while self.requests:
            self.place_granted()
            self.settle(next(r.id for r in self.requests.values() if r.state == "placed"))

    # The rules, each of which a class in `faulty_queues` may break.

    @property
    def policy(self) -> Policy:
        return Policy(bands=Bands(), **{name: self.settings[name] for name in POLICY})

    @property
    def queued(self) -> int:
        return len(self.queue)

    @property
    def upper(self) -> float:
        return float(self.settings["upper_per"] * len(self.endpoints))

    @property
    def lower(self) -> float:
        return float(self.settings["lower_per"] * len(self.endpoints))

    def has_room(self, r: Request) -> bool:
        return self.stock + min(r.cost, self.upper) <= self.upper

    def in_flight(self, flow: str, endpoint: str | None = None) -> int:
        return sum(
            r.flow == flow and r.state in ("granted", "placed") and endpoint in (None, r.endpoint)
            for r in self.requests.values()
        )

    def flow_full(self, r: Request) -> bool:
        return r.limit > 0 and self.in_flight(r.flow) >= r.limit * len(self.endpoints)

    def endpoint_full(self, r: Request, endpoint: str) -> bool:
        return r.limit > 0 and self.in_flight(r.flow, endpoint) >= r.limit

    def place(self, r: Request) -> bool:
        free = [each for each in self.endpoints if not self.endpoint_full(r, each)]
        load = {each: sum(o.endpoint == each for o in self.requests.values()) for each in free}
        if free:
            r.endpoint, r.state = min(free, key=lambda each: load[each]), "placed"
        return bool(free)

    def next_turn(self) -> tuple[Request, bool] | None:
        """The request to serve next, and whether the starvation guard chose that request."""
        return self.queue.next_turn()

    def is_late(self, r: Request) -> bool:
        return r.deadline_ms * 1000 <= self.now_us

    # State transitions of requests, which apply the rules.

    def tag_of(self, band: BandQueue[Request], name: str) -> float:
        return band.tag_of(name) if name in band.queues else band.finish[name]

    def wait(self, r: Request) -> None:
        try:
            preempted = self.queue.make_room(r)
        except QueueFull as full:
            self.write("refused", r, note=full.reason)
            return
        if preempted is not None:
            self.end(preempted, "preempted")
        self.write("queued", r, tag=self.enter(r))

    def enter(self, r: Request) -> float | None:
        self.queue.insert(r)
        r.state = "queued"
        self.requests[r.id] = r
        return self.tag_of(self.queue.bands[r.priority], r.flow_queue) if self.queue.length(r) == 1 else None

    def dispatch(self) -> None:
        for r in self.queue.requests():
            if r.due_ms * 1000 <= self.now_us and r not in self.queue.overdue:
                self.queue.mark_overdue(r)
        while self.stock < self.lower and (turn := self.next_turn()) is not None:
            r, by_guard = turn
            band = self.queue.bands[r.priority]
            if self.is_late(r):
                self.end(r, "expired")
            elif self.flow_full(r):
                self.queue.throttle(r, r.flow_queue)
                self.write_throttling("throttled", r.band, r.flow_queue, self.tag_of(band, r.flow_queue))
            elif not self.has_room(r):
                return
            else:
                self.grant(r, by_guard)

    def grant(self, r: Request, by_guard: bool) -> None:
        share, r.tag, r.state = self.queue.share(r), self.queue.serve(r, by_guard), "granted"
        self.take(r)
        self.write("granted", r, tag=r.tag, by="guard" if by_guard else "turn", note=f"{share:.17g}")

    def take(self, r: Request) -> None:
        r.taken = min(r.cost, self.upper)
        self.stock += r.taken
        self.requests[r.id] = r

    def give_back(self, r: Request) -> None:
        self.stock = max(0.0, self.stock - r.taken)

    def end(self, r: Request, event: str) -> None:
        ran = r.state in ("granted", "placed")
        if r.state == "queued":
            self.queue.remove(r)
        elif ran:
            self.give_back(r)
        del self.requests[r.id]
        self.write(event, r)
        for number, band in enumerate(self.queue.bands.values()):
            if ran and r.limit and self.queue.unthrottle(NAMED[number].priority, r.flow):
                self.write_throttling("unthrottled", number, r.flow, band.tag_of(r.flow))

    def write_throttling(self, event: str, band: int, name: str, tag: float) -> None:
        self.write(event, Request("", name, band), tag=tag)

    def write(
        self, event: str, r: Request = NOBODY, *, tag: float | None = None, by: str = "", note: str = ""
    ) -> None:
        fields = {"tag": "" if tag is None else f"{tag:.17g}", "by": by, "note": note}
        numbers = {
            "seq": len(self.log) + 1, "time_us": self.now_us, "v": self.queue.bands[r.priority].v,
            "stock": self.stock, "queued": self.queued, "upper": self.upper, "lower": self.lower,
        }  # fmt: skip
        self.log.append(raw_entry(event, r, numbers, fields))
