"""A small simulated queue that writes a correct decision log: strict bands, weighted fair flows, first come
first served, guard, throttling, preemption, corrections, adoption. Each rule is a method of its own, so that
`faulty_queues` breaks one rule and nothing else.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

START_US = 1_700_000_000_000_000


@dataclass
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
    due_ms: int = 0
    state: str = "new"
    endpoint: str = ""
    taken: float = 0.0
    tag: float = -1.0


NOBODY = Request("", band=0, cost=0, owner="")


def raw_entry(
    event: str, r: Request, numbers: Mapping[str, float], fields: Mapping[str, str]
) -> dict[str, str]:
    """`numbers` are the pool's after the event; `fields` are tag, by and note."""
    numbers = {
        **numbers, "band": r.band, "cost": r.cost, "weight": r.weight, "arrived": r.arrived,
        "deadline_ms": r.deadline_ms, "limit": r.limit,
    }  # fmt: skip
    return {
        **{name: f"{number:.17g}" for name, number in numbers.items()},
        **fields,
        "event": event,
        "request": r.id,
        "flow": r.flow,
        "workload": "",
        "owner": r.owner,
        "endpoint": r.endpoint,
        "due_ms": str(r.due_ms) if r.due_ms else "",
    }


@dataclass
class FlowQueue:
    tag: float = 0.0
    waiting: dict[str, Request] = field(default_factory=dict)
    throttled: bool = False


class QueueSimulator:
    """`log` has the entries as the stream holds them. Only `advance_ms` moves the clock."""

    def __init__(self, endpoints: int = 2, **settings: Any) -> None:
        self.settings = {
            "upper_per": 2, "lower_per": 2, "total_capacity": 100, "fairness": "weighted-fair",
            "ordering": "fcfs", "band_policy": "strict", "guard_share": 0.1, "starvation_ms": 1000,
            "weights": {}, "paused": 0, "log_max": 1000, **settings,
        }  # fmt: skip
        self.endpoints = [f"10.0.0.{i + 1}:8000" for i in range(endpoints)]
        self.log: list[dict[str, str]] = []
        self.requests: dict[str, Request] = {}
        self.flow_queues: dict[tuple[int, str], FlowQueue] = {}
        self.v = [0.0, 0.0, 0.0]
        self.new_flows = [0.0, 0.0, 0.0]
        self.now_us = START_US
        self.stock = 0.0
        self.credit = 1.0
        self._arrival = 0
        self.write("tuned", note=json.dumps(self.settings))

    # Calls from outside.

    def advance_ms(self, ms: float) -> None:
        self.now_us += int(ms * 1000)

    def admit(self, name: str, flow: str = "flow", *, ttl_ms: int = 60_000, **fields: Any) -> None:
        """A request arrives, or a known one is adopted."""
        known = self.requests.get(name)
        if known is not None:
            known.owner = fields.get("owner", known.owner)
            tag = self.enter(known) if known.state == "held" else None
            self.write("adopted", known, tag=tag)
            self.dispatch()
            return
        self._arrival = max(self._arrival + 1, self.now_us)
        r = Request(name, flow, arrived=self._arrival, deadline_ms=self.now_us // 1000 + ttl_ms, **fields)
        if self.queued == 0 and self.has_room(r) and not self.flow_full(r) and self.place(r):
            self.take(r)
            self.write("bypassed", r)
        elif self.queued < self.settings["total_capacity"] or self.preempt(r):
            self.write("queued", r, tag=self.enter(r))
        else:
            self.write("refused", r, note="total-capacity")
        self.dispatch()

    def place_granted(self) -> None:
        for r in [r for r in self.requests.values() if r.state == "granted"]:
            assert self.place(r)
            self.write("placed", r)

    def settle(self, name: str, actual: float | None = None) -> None:
        r = self.requests[name]
        if actual is not None and r.tag >= 0:
            change = (actual - r.cost) * self.share(r) / r.cost
            charged = min(
                r.tag + self.share(r), self.v[r.band]
            )  # a flow queue without a tag had none above v
            flow_queue = self.flow_queues.setdefault((r.band, r.flow), FlowQueue(charged))
            flow_queue.tag += change
            self.write("corrected", r, tag=flow_queue.tag, note=f"{change:.17g}")
        self.end(r, "completed")
        self.dispatch()

    def cancel(self, name: str) -> None:
        self.end(self.requests[name], "cancelled")
        self.dispatch()

    def orphan(self, name: str) -> None:
        """The request's replica is silent."""
        r = self.requests[name]
        self.leave(r)
        r.state = "held"
        self.write("held", r)

    def sweep(self) -> None:
        for r in [r for r in self.requests.values() if r.state in ("queued", "held")]:
            if self.is_late(r):
                self.end(r, "expired" if r.state == "queued" else "abandoned")
        for (band, _), flow_queue in self.flow_queues.items():
            if self.stock == 0 and self.queued == 0:
                self.v[band] = max(self.v[band], flow_queue.tag)
        self.flow_queues = {
            (b, f): flow_queue
            for (b, f), flow_queue in self.flow_queues.items()
            if flow_queue.waiting or flow_queue.tag > self.v[b]
        }

    def change_settings(self, **changes: Any) -> None:
        self.settings |= changes
        self.write("tuned", note=json.dumps(self.settings))
        self.dispatch()

    def run_dry(self) -> None:
        """Serve and complete every request."""
        while self.requests:
            self.place_granted()
            placed = [r.id for r in self.requests.values() if r.state == "placed"]
            self.settle(placed[0])

    # The rules.

    @property
    def queued(self) -> int:
        return sum(len(flow_queue.waiting) for flow_queue in self.flow_queues.values())

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

    def band_in_turn(self) -> int | None:
        return min(
            (
                b
                for (b, _), flow_queue in self.flow_queues.items()
                if flow_queue.waiting and not flow_queue.throttled
            ),
            default=None,
        )

    def flow_in_turn(self, band: int) -> str:
        able = [
            (b, name)
            for (b, name), flow_queue in self.flow_queues.items()
            if flow_queue.waiting and not flow_queue.throttled
        ]
        return min((self.flow_queues[band, name].tag, name) for b, name in able if b == band)[1]

    def head(self, flow_queue: FlowQueue) -> Request:
        return min(flow_queue.waiting.values(), key=lambda r: r.arrived)

    def guard_may(self) -> bool:
        return self.credit >= 1 - 1e-9 and self.settings["guard_share"] > 0

    def most_credit(self) -> float:
        """Credit beyond a whole dispatch is kept for the next one."""
        return 1 + float(self.settings["guard_share"])

    def overdue(self) -> list[Request]:
        """The requests the guard may serve, longest overdue first."""
        waiting = [
            r
            for flow_queue in self.flow_queues.values()
            if not flow_queue.throttled
            for r in flow_queue.waiting.values()
        ]
        late = [r for r in waiting if r.due_ms * 1000 <= self.now_us]
        return sorted(late, key=lambda r: (r.due_ms, r.arrived % 1000, r.id))

    def guards_choice(self) -> Request:
        return self.overdue()[0]

    def share(self, r: Request) -> float:
        return r.cost / self.settings["weights"].get(r.flow, r.weight)

    def next_tag(self, tag: float, share: float) -> float:
        return tag + share

    def is_late(self, r: Request) -> bool:
        return r.deadline_ms * 1000 <= self.now_us

    # What the rules are applied to.

    def dispatch(self) -> None:
        while self.stock < self.lower and (band := self.band_in_turn()) is not None:
            by = "guard" if self.overdue() and self.guard_may() else "turn"
            r = (
                self.guards_choice()
                if by == "guard"
                else self.head(self.flow_queues[band, self.flow_in_turn(band)])
            )
            flow_queue = self.flow_queue(r)
            if self.is_late(r):
                self.end(r, "expired")
            elif self.flow_full(r):
                flow_queue.throttled = True
                self.write_throttling("parked", r.band, r.flow, flow_queue.tag)
            elif not self.has_room(r):
                return
            else:
                self.grant(r, flow_queue, by)

    def grant(self, r: Request, flow_queue: FlowQueue, by: str) -> None:
        share, r.tag = self.share(r), flow_queue.tag
        del flow_queue.waiting[r.id]
        if by == "turn":
            self.v[r.band] = max(self.v[r.band], flow_queue.tag)
        flow_queue.tag = self.next_tag(flow_queue.tag, share)
        r.state = "granted"
        self.take(r)
        self.credit += self.settings["guard_share"] - (by == "guard")
        self.credit = min(self.credit, self.most_credit())
        self.write("granted", r, tag=r.tag, by=by, note=f"{share:.17g}")

    def take(self, r: Request) -> None:
        r.taken = min(r.cost, self.upper)
        self.stock += r.taken
        self.requests[r.id] = r

    def give_back(self, r: Request) -> None:
        self.stock = max(0.0, self.stock - r.taken)

    def preempt(self, r: Request) -> bool:
        lower = [
            o
            for flow_queue in self.flow_queues.values()
            for o in flow_queue.waiting.values()
            if o.band > r.band
        ]
        if lower:
            self.end(max(lower, key=lambda o: (o.band, o.arrived)), "preempted")
        return bool(lower)

    def flow_queue(self, r: Request) -> FlowQueue:
        return self.flow_queues.setdefault((r.band, r.flow), FlowQueue())

    def enter(self, r: Request) -> float | None:
        flow_queue = self.flow_queue(r)
        patience_ms = self.settings["starvation_ms"] or (r.deadline_ms - r.arrived // 1000) // 2
        r.due_ms = min(r.arrived // 1000 + patience_ms, r.deadline_ms)
        r.state = "queued"
        self.requests[r.id] = flow_queue.waiting[r.id] = r
        if len(flow_queue.waiting) > 1:
            return None
        flow_queue.tag = self.start(r, flow_queue.tag)
        return flow_queue.tag

    def start(self, r: Request, finish: float) -> float:
        v, share = self.v[r.band], self.share(r)
        if finish > v:
            return finish
        start = max(self.new_flows[r.band], v)
        if start - v >= 100 * share:
            return v + share
        self.new_flows[r.band] = start + share
        return v

    def leave(self, r: Request) -> None:
        flow_queue = self.flow_queue(r)
        del flow_queue.waiting[r.id]
        flow_queue.throttled = flow_queue.throttled and bool(flow_queue.waiting)

    def end(self, r: Request, event: str) -> None:
        ran = r.state in ("granted", "placed")
        if r.state == "queued":
            self.leave(r)
        elif ran:
            self.give_back(r)
        del self.requests[r.id]
        self.write(event, r)
        for (band, name), flow_queue in self.flow_queues.items():
            if ran and r.limit and name == r.flow and flow_queue.throttled:
                flow_queue.throttled, flow_queue.tag = False, max(self.v[band], flow_queue.tag)
                self.write_throttling("unparked", band, name, flow_queue.tag)

    def write_throttling(self, event: str, band: int, name: str, tag: float) -> None:
        self.write(event, Request("", name, band), tag=tag)

    def write(
        self, event: str, r: Request = NOBODY, *, tag: float | None = None, by: str = "", note: str = ""
    ) -> None:
        fields = {"tag": "" if tag is None else f"{tag:.17g}", "by": by, "note": note}
        numbers = {
            "seq": len(self.log) + 1, "time_us": self.now_us, "v": self.v[r.band], "stock": self.stock,
            "queued": self.queued, "upper": self.upper, "lower": self.lower,
        }  # fmt: skip
        self.log.append(raw_entry(event, r, numbers, fields))
