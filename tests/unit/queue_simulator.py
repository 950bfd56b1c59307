"""A small shared queue that writes a right decision log: strict bands, weighted fair flows, first come first
served, guard, parking, preemption, corrections, adoption. What decides is in methods of its own, so that a
test can break one rule and nothing else.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from raw_entries import NOBODY, Request, raw_entry

START_US = 1_700_000_000_000_000


@dataclass
class Lane:
    tag: float = 0.0
    waiting: dict[str, Request] = field(default_factory=dict)
    parked: bool = False


class QueueSimulator:
    """`log` is what a stream would hold. Time stands still unless `wait_ms` is called."""

    def __init__(self, endpoints: int = 2, **settings: Any) -> None:
        self.settings = {
            "upper_per": 2, "lower_per": 2, "total_capacity": 100, "fairness": "weighted-fair",
            "ordering": "fcfs", "band_policy": "strict", "guard_share": 0.1, "starvation_ms": 1000,
            "weights": {}, "paused": 0, "log_max": 1000, **settings,
        }  # fmt: skip
        self.endpoints = [f"10.0.0.{i + 1}:8000" for i in range(endpoints)]
        self.log: list[dict[str, str]] = []
        self.requests: dict[str, Request] = {}
        self.lanes: dict[tuple[int, str], Lane] = {}
        self.v = [0.0, 0.0, 0.0]
        self.newcomers = [0.0, 0.0, 0.0]
        self.now_us = START_US
        self.stock = 0.0
        self.credit = 1.0
        self._arrival = 0
        self.write("tuned", note=json.dumps(self.settings))

    # What happens from outside.

    def wait_ms(self, wait_ms: float) -> None:
        self.now_us += int(wait_ms * 1000)

    def admit(self, name: str, flow: str = "flow", *, ttl_ms: int = 60_000, **about: Any) -> None:
        """An arrival, or the adoption of a request that is known."""
        known = self.requests.get(name)
        if known is not None:
            known.owner = about.get("owner", known.owner)
            tag = self.enter(known) if known.state == "held" else None
            self.write("adopted", known, tag=tag)
            self.dispatch()
            return
        self._arrival = max(self._arrival + 1, self.now_us)
        r = Request(name, flow, arrived=self._arrival, deadline_ms=self.now_us // 1000 + ttl_ms, **about)
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
            charged = min(r.tag + self.share(r), self.v[r.band])  # a lane without a tag has had none above v
            lane = self.lanes.setdefault((r.band, r.flow), Lane(charged))
            lane.tag += change
            self.write("corrected", r, tag=lane.tag, note=f"{change:.17g}")
        self.end(r, "completed")
        self.dispatch()

    def cancel(self, name: str) -> None:
        self.end(self.requests[name], "cancelled")
        self.dispatch()

    def hold(self, name: str) -> None:
        """Its replica is silent."""
        r = self.requests[name]
        self.leave(r)
        r.state = "held"
        self.write("held", r)

    def sweep(self) -> None:
        for r in [r for r in self.requests.values() if r.state in ("queued", "held")]:
            if self.is_late(r):
                self.end(r, "expired" if r.state == "queued" else "abandoned")
        for (band, _), lane in self.lanes.items():
            if self.stock == 0 and self.queued == 0:
                self.v[band] = max(self.v[band], lane.tag)
        self.lanes = {
            (b, f): lane for (b, f), lane in self.lanes.items() if lane.waiting or lane.tag > self.v[b]
        }

    def tune(self, **changes: Any) -> None:
        self.settings |= changes
        self.write("tuned", note=json.dumps(self.settings))
        self.dispatch()

    def run_dry(self) -> None:
        """Serve everything that waits, and end it."""
        while self.requests:
            self.place_granted()
            placed = [r.id for r in self.requests.values() if r.state == "placed"]
            self.settle(placed[0])

    # What decides.

    @property
    def queued(self) -> int:
        return sum(len(lane.waiting) for lane in self.lanes.values())

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
            (b for (b, _), lane in self.lanes.items() if lane.waiting and not lane.parked), default=None
        )

    def lane_in_turn(self, band: int) -> str:
        able = [(b, name) for (b, name), lane in self.lanes.items() if lane.waiting and not lane.parked]
        return min((self.lanes[band, name].tag, name) for b, name in able if b == band)[1]

    def head(self, lane: Lane) -> Request:
        return min(lane.waiting.values(), key=lambda r: r.arrived)

    def guard_may(self) -> bool:
        return self.credit >= 1 - 1e-9 and self.settings["guard_share"] > 0

    def most_credit(self) -> float:
        """What is over when a credit is whole is not lost: the next begins with it."""
        return 1 + float(self.settings["guard_share"])

    def overdue(self) -> list[Request]:
        """Those the guard may serve, longest overdue first."""
        waiting = [r for lane in self.lanes.values() if not lane.parked for r in lane.waiting.values()]
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

    # What follows.

    def dispatch(self) -> None:
        while self.stock < self.lower and (band := self.band_in_turn()) is not None:
            by = "guard" if self.overdue() and self.guard_may() else "turn"
            r = (
                self.guards_choice()
                if by == "guard"
                else self.head(self.lanes[band, self.lane_in_turn(band)])
            )
            lane = self.lane(r)
            if self.is_late(r):
                self.end(r, "expired")
            elif self.flow_full(r):
                lane.parked = True
                self.write_lane("parked", r.band, r.flow, lane.tag)
            elif not self.has_room(r):
                return
            else:
                self.grant(r, lane, by)

    def grant(self, r: Request, lane: Lane, by: str) -> None:
        share, r.tag = self.share(r), lane.tag
        del lane.waiting[r.id]
        if by == "turn":
            self.v[r.band] = max(self.v[r.band], lane.tag)
        lane.tag = self.next_tag(lane.tag, share)
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
        lower = [o for lane in self.lanes.values() for o in lane.waiting.values() if o.band > r.band]
        if lower:
            self.end(max(lower, key=lambda o: (o.band, o.arrived)), "preempted")
        return bool(lower)

    def lane(self, r: Request) -> Lane:
        return self.lanes.setdefault((r.band, r.flow), Lane())

    def enter(self, r: Request) -> float | None:
        lane = self.lane(r)
        patience_ms = self.settings["starvation_ms"] or (r.deadline_ms - r.arrived // 1000) // 2
        r.due_ms = min(r.arrived // 1000 + patience_ms, r.deadline_ms)
        r.state = "queued"
        self.requests[r.id] = lane.waiting[r.id] = r
        if len(lane.waiting) > 1:
            return None
        lane.tag = self.start(r, lane.tag)
        return lane.tag

    def start(self, r: Request, finish: float) -> float:
        v, share = self.v[r.band], self.share(r)
        if finish > v:
            return finish
        ahead = max(self.newcomers[r.band], v)
        if ahead - v >= 100 * share:
            return v + share
        self.newcomers[r.band] = ahead + share
        return v

    def leave(self, r: Request) -> None:
        lane = self.lane(r)
        del lane.waiting[r.id]
        lane.parked = lane.parked and bool(lane.waiting)

    def end(self, r: Request, event: str) -> None:
        ran = r.state in ("granted", "placed")
        if r.state == "queued":
            self.leave(r)
        elif ran:
            self.give_back(r)
        del self.requests[r.id]
        self.write(event, r)
        for (band, name), lane in self.lanes.items():
            if ran and r.limit and name == r.flow and lane.parked:
                lane.parked, lane.tag = False, max(self.v[band], lane.tag)
                self.write_lane("unparked", band, name, lane.tag)

    def write_lane(self, event: str, band: int, name: str, tag: float) -> None:
        self.write(event, Request("", name, band), tag=tag)

    def write(
        self, event: str, r: Request = NOBODY, *, tag: float | None = None, by: str = "", note: str = ""
    ) -> None:
        about = {"tag": "" if tag is None else f"{tag:.17g}", "by": by, "note": note}
        numbers = {
            "seq": len(self.log) + 1, "time_us": self.now_us, "v": self.v[r.band], "stock": self.stock,
            "queued": self.queued, "upper": self.upper, "lower": self.lower,
        }  # fmt: skip
        self.log.append(raw_entry(event, r, numbers, about))
