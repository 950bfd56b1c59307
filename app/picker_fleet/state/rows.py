"""Rows of what an operator reads, as `lua/view.lua` writes them: fields parted by byte 31.

Ages and what is left of a time are counted by Redis's clock, at the moment of the read. Named tuples, since a
thousand are made at a time, in the event loop that decides: a frozen dataclass takes three times as long.
"""

from typing import NamedTuple

from picker_fleet.state.keys import BETWEEN

PARKED = 3  # groups from here on hold parked lanes: band + 3


class Lane(NamedTuple):
    """What a band orders: a flow, or '' for the whole band.

    Its oldest request speaks for the others; under `edf` the one served next.
    """

    group: int  # its band; plus 3 while its flow is at its limit
    name: str
    start: float  # start tag
    queued: int
    oldest_s: float
    weight: float
    share: float  # what serving one request adds to the tag
    in_flight: int | None  # None: not counted, since the flow has no limit

    @property
    def band(self) -> int:
        return self.group % PARKED

    @property
    def place(self) -> tuple[int, float, bytes]:
        """Lanes are in their order by it."""
        return self.group, self.start, self.name.encode()

    @property
    def parked(self) -> bool:
        return self.group >= PARKED


class Score(NamedTuple):
    """Parts of a request's score under `ordering: workload-aware`; the rate's part is not above 0."""

    wait: float
    criticality: float
    rate: float


class Entry(NamedTuple):
    """A request that waits or runs. `endpoints` are best first, empty until it is placed."""

    id: str
    state: str  # queued, held, granted, placed
    owner: str
    flow: str
    band: int
    workload: str  # '' for an anonymous one
    model: str
    criticality: int
    cost: float
    age_s: float
    deadline_in_s: float
    overdue_in_s: float
    overdue: bool
    endpoints: tuple[str, ...]
    limit: int
    score: Score | None


class WorkloadRow(NamedTuple):
    id: str
    total: int
    active: int
    dispatched: int
    average_wait_s: float
    last_request_s_ago: float
    rate: float  # requests/s


def lane(row: str, now_us: float) -> Lane:
    group, name, start, queued, oldest_us, weight, share, in_flight = row.split(BETWEEN)
    return Lane(
        int(group),
        name,
        float(start),
        int(queued),
        _age_s(now_us, oldest_us),
        float(weight),
        float(share),
        int(in_flight) if in_flight else None,
    )


def entry(row: str, now_us: float) -> Entry:
    (
        request_id, state, owner, flow, band, workload, model, criticality, cost, arrived_us,
        deadline_ms, due_ms, overdue, endpoints, limit, wait, for_criticality, rate,
    ) = row.split(BETWEEN)  # fmt: skip
    now_s = now_us / 1e6
    return Entry(
        request_id,
        state,
        owner,
        flow,
        int(band),
        workload,
        model,
        int(criticality),
        float(cost),
        _age_s(now_us, arrived_us),
        float(deadline_ms) / 1e3 - now_s,
        float(due_ms) / 1e3 - now_s,
        overdue == "1",
        tuple(endpoints.split(",")) if endpoints else (),
        int(float(limit)),
        Score(float(wait), float(for_criticality), float(rate)) if wait else None,
    )


def workload(row: str, now_us: float) -> WorkloadRow:
    name, total, active, dispatched, wait_ms, last_ms, rate = row.split(BETWEEN)
    return WorkloadRow(
        name,
        int(float(total)),
        int(float(active)),
        int(float(dispatched)),
        float(wait_ms) / 1e3,
        max(0.0, now_us / 1e6 - float(last_ms) / 1e3),
        float(rate),
    )


def _age_s(now_us: float, then_us: str) -> float:
    return max(0.0, (now_us - float(then_us)) / 1e6)
