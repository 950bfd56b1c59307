"""Bands and lanes: start-time fair queueing with one tag a lane (Goyal, Vin, Cheng, 1996; SFQ(D), 2004).

A lane that becomes backlogged starts at S = max(v, F); its turn sets v = S and F = S + share. Of those that
are owed nothing (F ≤ v) only so many start at v; the others start a share later.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from lane_order import Lane, Moment, Request, Workloads

BANDS = (0, 1, 2)  # Critical, Default, Sheddable
GUARD_LOOKS_AT = 16
NEWCOMERS = 100
REBASED_AT, REBASED_TO = 2.0**26, 2.0**20


@dataclass(slots=True)
class Band:
    v: float = 0.0  # virtual time: the greatest start tag served by turn
    newcomers: float = 0.0  # what those were charged that started at v
    tag: float = 0.0  # of the band itself, where bands are weighted
    lanes: dict[str, Lane] = field(default_factory=dict)  # the backlogged ones
    finish: dict[str, float] = field(default_factory=dict)  # idle lane -> its last tag
    preempted: dict[str, int] = field(default_factory=dict)  # lane, idle ones too -> when last

    @property
    def queued(self) -> int:
        return sum(len(lane.requests) for lane in self.lanes.values())


class FairLanes:
    """Who waits where. `log(event, about)` is told of lanes that are parked and come back."""

    def __init__(self, moment: Moment, workloads: Workloads, log: Callable[[str, str], None]) -> None:
        self._moment, self._workloads, self._log = moment, workloads, log
        self.bands = [Band() for _ in BANDS]
        self.bv = 0.0  # virtual time across bands
        self.pressed = False

    @property
    def queued(self) -> int:
        return sum(band.queued for band in self.bands)

    def requests(self) -> Iterator[Request]:
        for band in self.bands:
            for lane in band.lanes.values():
                yield from lane.requests.values()

    def name_of(self, r: Request) -> str:
        return "" if self._moment.settings["fairness"] == "none" else r.flow

    def length(self, r: Request) -> int:
        lane = self.bands[r.band].lanes.get(self.name_of(r))
        return len(lane.requests) if lane else 0

    def flows(self) -> int:
        """Lanes with something waiting, in all bands."""
        return sum(bool(lane.requests) for band in self.bands for lane in band.lanes.values())

    def share(self, r: Request) -> float:
        """What serving r costs its lane."""
        settings = self._moment.settings
        if settings["fairness"] == "round-robin":
            return 1.0
        if settings["fairness"] == "none":
            return r.cost
        return float(r.cost / settings["weights"].get(r.flow, r.weight))

    def insert(self, r: Request) -> None:
        """Put r in at its place. It is overdue after half of its TTL, or after `starvation_ms`."""
        band, r.lane = self.bands[r.band], self.name_of(r)
        patience_ms = self._moment.settings["starvation_ms"] or (r.deadline_ms - r.arrived // 1000) // 2
        r.timer_ms = r.due_ms = min(r.arrived // 1000 + patience_ms, r.deadline_ms)
        r.state, r.overdue = "queued", False
        if r.lane not in band.lanes:
            self._join(band)
            tag = self._start(band, band.finish.get(r.lane, 0.0), self.share(r))
            band.lanes[r.lane] = Lane(self._moment, self._workloads, tag)
        band.lanes[r.lane].insert(r)

    def _join(self, band: Band) -> None:
        """A lane comes into the order: a band that had none in it has no claim to the turns it missed."""
        if all(lane.parked for lane in band.lanes.values()):
            band.tag = max(band.tag, self.bv)

    def _start(self, band: Band, finish: float, share: float) -> float:
        if finish > band.v:
            return finish
        ahead = max(band.newcomers, band.v)
        if ahead - band.v >= NEWCOMERS * share:
            return band.v + share
        band.newcomers = ahead + share
        return band.v

    def remove(self, r: Request) -> None:
        """Take r out unserved: its lane's tag stays as it is."""
        band = self.bands[r.band]
        lane = band.lanes[r.lane]
        lane.remove(r)
        r.overdue = False
        if not lane.requests:
            band.finish[r.lane] = lane.tag
            del band.lanes[r.lane]

    def serve(self, r: Request, by: str) -> None:
        """Take r out and charge its lane. What the guard serves out of turn does not move v."""
        band = self.bands[r.band]
        lane = band.lanes[r.lane]
        r.tag = lane.tag
        lane.tag += self.share(r)
        self.remove(r)
        if by == "turn":
            band.v = max(band.v, r.tag)
        if self._moment.settings["band_policy"] == "weighted":
            if by == "turn":
                self.bv = max(self.bv, band.tag)
            self.charge_band(r, r.cost)

    def correct(self, r: Request, change: float, floor: float) -> None:
        """Change what r's lane has been charged; `floor` is its tag where none is kept."""
        band, name = self.bands[r.band], self.name_of(r)
        if name in band.lanes:
            band.lanes[name].tag += change
        else:
            band.finish[name] = band.finish.get(name, min(floor, band.v)) + change

    def charge_band(self, r: Request, cost: float) -> None:
        """Its band is charged `cost` more, where bands have shares; negative, it gets that back."""
        settings = self._moment.settings
        if settings["band_policy"] == "weighted":
            self.bands[r.band].tag += cost / settings["band_weights"][r.band]

    def turn(self) -> Request | None:
        """Whose turn it is: bands strict or by their tags, in them the least lane, in it the head."""
        for number in self._bands_in_turn():
            lanes = self.bands[number].lanes
            open_lanes = [(lane.tag, name) for name, lane in lanes.items() if not lane.parked]
            if open_lanes:
                return lanes[min(open_lanes)[1]].head()
        return None

    def _bands_in_turn(self) -> list[int]:
        numbers = list(BANDS)
        if self._moment.settings["band_policy"] == "weighted":
            numbers.sort(key=lambda number: (self.bands[number].tag, number))
        return numbers

    def most_overdue(self) -> Request | None:
        overdue = [(overdue_since(r), r.id, r) for r in self.requests() if r.overdue]
        for _, _, r in sorted(overdue, key=lambda it: it[:2])[:GUARD_LOOKS_AT]:
            if not self.bands[r.band].lanes[r.lane].parked:
                return r
        return None

    def park(self, r: Request) -> None:
        """r's flow is at its limit: its lane leaves the order, with its tag."""
        self.bands[r.band].lanes[r.lane].parked = True
        self._log("parked", r.lane)

    def block(self, r: Request, closed: Iterable[str]) -> None:
        """r's lane, parked, waits for a place on one of these endpoints."""
        lane = self.bands[r.band].lanes[r.lane]
        lane.blocked |= dict.fromkeys(closed, lane.tag)

    def unblock(self, address: str) -> None:
        """The endpoint has a place: for the band and lane whose turn is next of those that wait for it."""
        for number in self._bands_in_turn():
            lanes = self.bands[number].lanes
            waiting = [
                (lane.blocked[address], name) for name, lane in lanes.items() if address in lane.blocked
            ]
            if waiting:
                self.unpark(number, min(waiting)[1])
                return

    def unpark(self, number: int, name: str) -> None:
        """It comes back, without a claim to what it missed."""
        band = self.bands[number]
        if name in band.lanes and band.lanes[name].parked:
            self._join(band)
            band.lanes[name].parked = False
            band.lanes[name].blocked = {}
            band.lanes[name].tag = max(band.v, band.lanes[name].tag)
            self._log("unparked", name)

    def unpark_all(self) -> None:
        for number, band in enumerate(self.bands):
            for name in sorted(band.lanes, key=lambda name: (band.lanes[name].tag, name)):
                self.unpark(number, name)

    def victim(self, r: Request, next_arrival: Callable[[], int]) -> Request | None:
        """Who gives way to r: the newest of the least recently preempted lane of the lowest band below."""
        for band in reversed(self.bands[r.band + 1 :]):
            if band.lanes:
                self.pressed = True
                name = min(band.lanes, key=lambda name, last=band.preempted: (last.get(name, 0), name))
                band.preempted[name] = next_arrival()
                return band.lanes[name].newest()
        return None

    def relax(self) -> None:
        """The memory of who was preempted ends with the pressure."""
        if self.pressed and self.queued < 0.9 * self._moment.settings["total_capacity"]:
            self.pressed = False
            for band in self.bands:
                band.preempted = {}

    def refile(self, policy_changed: bool) -> None:
        """The sweep's walk: stand where the policy in force puts each request, by rates as they are now."""
        if policy_changed:
            for r in list(self.requests()):
                if r.lane != self.name_of(r):
                    self.remove(r)
                    self.insert(r)
        for band in self.bands:
            for lane in band.lanes.values():
                lane.refile(registered_only=not policy_changed)

    def age_tags(self, at_rest: bool) -> None:
        for band in self.bands:
            if at_rest and band.finish:
                band.v = max(band.v, *band.finish.values())
            band.finish = {name: tag for name, tag in band.finish.items() if tag > band.v}

    def rebase(self) -> None:
        """When virtual time has come far, all tags are less by one amount."""
        for band in self.bands:
            if band.v < REBASED_AT:
                continue
            by = band.v - REBASED_TO
            band.v, band.newcomers = band.v - by, max(band.newcomers - by, 0.0)
            band.finish = {name: tag - by for name, tag in band.finish.items()}
            for lane in band.lanes.values():
                lane.tag -= by
                lane.blocked = {address: tag - by for address, tag in lane.blocked.items()}
            self._log("rebased", "")
        if self.bv >= REBASED_AT:
            by = self.bv - REBASED_TO
            self.bv -= by
            for band in self.bands:
                band.tag -= by


def overdue_since(r: Request) -> int:
    """What orders the overdue; those of one ms as they arrived."""
    return r.due_ms * 1000 + r.arrived % 1000
