"""What an operator reads of the shared state, as typed methods, one a script; state/store.py has the
rest. Each call looks at no more than CHUNK rows, so that none holds Redis up, however long the queue is.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import orjson

from picker_fleet.errors import StateFault
from picker_fleet.state.batching import BatchingClient
from picker_fleet.state.keys import BETWEEN
from picker_fleet.state.schema import VIEW_LIMIT

PARKED = 3  # groups from here on hold parked lanes: band + 3


class FlowQueueRow(NamedTuple):
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
    def order_key(self) -> tuple[int, float, bytes]:
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


class RequestRow(NamedTuple):
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


def lane_of(row: str, now_us: float) -> FlowQueueRow:
    group, name, start, queued, oldest_us, weight, share, in_flight = row.split(BETWEEN)
    return FlowQueueRow(
        int(group),
        name,
        float(start),
        int(queued),
        _age_s(now_us, oldest_us),
        float(weight),
        float(share),
        int(in_flight) if in_flight else None,
    )


def entry_of(row: str, now_us: float) -> RequestRow:
    (
        request_id, state, owner, flow, band, workload, model, criticality, cost, arrived_us,
        deadline_ms, due_ms, overdue, endpoints, limit, wait, for_criticality, rate,
    ) = row.split(BETWEEN)  # fmt: skip
    now_s = now_us / 1e6
    return RequestRow(
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


def workload_of(row: str, now_us: float) -> WorkloadRow:
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


CHUNK = VIEW_LIMIT  # rows a call
MOST_REPLICAS = 256
_MOST_SCANS = 10  # calls that one page of workloads may take


@dataclass(frozen=True, slots=True)
class FlowQueuePage:
    """Lanes in their order, each once; how many each group has in all: bands 0 to 2, then those parked."""

    queues: list[FlowQueueRow]
    totals: tuple[int, ...]


class RankRange(NamedTuple):
    """Ranks `first` to `last`, both with, of a lane."""

    band: int
    lane: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request in flight; `lease_ms` is when its lease ends, as Redis spells it."""

    entry: RequestRow
    lease_ms: str
    lease_in_s: float


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """One request, with its lane and its rank in it while it is queued, and its lease while it runs."""

    entry: RequestRow
    rank: int | None
    queue: FlowQueueRow | None
    overdue_rank: int | None
    lease_in_s: float | None


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    id: str
    heartbeat_s_ago: float
    about: str  # JSON objects, one a line


class Reads:
    """Every method raises StateFault where Redis does not answer it in time (state/batching.py)."""

    def __init__(self, link: BatchingClient, log: str) -> None:
        self._client = link
        self._log = log

    async def flow_queues(
        self,
        limit: int,
        *,
        group: int = 0,
        behind: tuple[str, str] | None = None,
        band: int | None = None,
        pause_s: float = 0.0,
    ) -> FlowQueuePage:
        """At most `limit` lanes from `group` on, behind a (start tag, name) in it; `band`: of that one.

        `pause_s` between the calls, of which each brings at most CHUNK.
        """
        found: list[FlowQueueRow] = []
        totals: tuple[int, ...] = (0,) * 6
        while True:
            wanted = min(CHUNK, limit - len(found))
            tag, name = behind or ("", "")
            now, counts, *page = await self._client.call(
                "view_flows", group, tag, name, wanted, "" if band is None else int(band)
            )
            totals = tuple(counts)
            found += [lane_of(row, float(now)) for row in page]
            if len(page) < wanted or len(found) >= limit:
                return FlowQueuePage(_each_once(found), totals)
            await asyncio.sleep(pause_s)
            group, behind = found[-1].group, (repr(found[-1].start), found[-1].name)

    async def flow_queue(self, name: str) -> list[FlowQueueRow]:
        """The lane of each band that has waiting requests under this name."""
        now, *page = await self._client.call("view_flow", name)
        return [lane_of(row, float(now)) for row in page]

    async def queued(self, stretches: Sequence[RankRange]) -> list[list[RequestRow]]:
        """The requests of each stretch; some are missing if the queue has moved on meanwhile."""
        found: list[list[RequestRow]] = [[] for _ in stretches]
        for batch in _batches(stretches):
            args = [
                part for _, each in batch for part in (int(each.band), each.lane, each.first, each.last)
            ]  # fmt: skip
            now, *pages = await self._client.call("view_queue", *args)
            for (at, _), page in zip(batch, pages, strict=True):
                found[at] += [entry_of(row, float(now)) for row in page]
        return found

    async def in_flight(
        self, limit: int, behind: tuple[str, str] | None = None
    ) -> tuple[list[RunningRequest], int]:
        """At most `limit` in flight, behind a (lease, id), by when their leases end; and the total."""
        found: list[RunningRequest] = []
        while True:
            wanted = min(CHUNK, limit - len(found))
            now, total, *page = await self._client.call("view_inflight", *(behind or ("", "")), wanted)
            now_us = float(now)
            for row, lease_ms in zip(page[::2], page[1::2], strict=True):
                request_id, _, known = row.partition(BETWEEN)
                behind = (lease_ms, request_id)
                if known:
                    left_s = float(lease_ms) / 1e3 - now_us / 1e6
                    found.append(RunningRequest(entry_of(row, now_us), lease_ms, left_s))
            if len(page) < 2 * wanted or len(found) >= limit:
                return found, total

    async def request(self, request_id: str) -> RequestStatus | None:
        """Where a request is; None if the pool knows nothing of it."""
        now, *told = await self._client.call("view_request", request_id)
        if not told:
            return None
        now_us = float(now)
        row, rank, lane, overdue, lease_ms = told
        return RequestStatus(
            entry_of(row, now_us),
            None if rank == "" else int(rank),
            lane_of(lane, now_us) if lane else None,
            None if overdue == "" else int(overdue),
            float(lease_ms) / 1e3 - now_us / 1e6 if lease_ms else None,
        )

    async def workloads(
        self, limit: int, cursor: str = "0", skip: int = 0
    ) -> tuple[list[WorkloadRow], int, tuple[str, int] | None]:
        """At most `limit` workloads of the registry, in no order, and their total.

        The third tells where to go on, as `cursor` and how many of what it gives have been given: None at
        the end. A workload that comes or goes meanwhile may be missed or come twice.
        """
        found: list[WorkloadRow] = []
        for _ in range(_MOST_SCANS):
            now, total, following, *page = await self._client.call(
                "view_workloads", cursor, min(CHUNK, limit + skip - len(found))
            )
            fresh = [workload_of(row, float(now)) for row in page[skip:]]
            room = limit - len(found)
            found += fresh[:room]
            if len(fresh) > room:
                return found, total, (cursor, skip + room)
            if following == "0":
                return found, total, None
            cursor, skip = following, 0
            if len(found) == limit:
                break
        return found, total, (cursor, 0)

    async def workload(self, workload_id: str) -> WorkloadRow | None:
        now, *page = await self._client.call("view_workload", workload_id)
        return workload_of(page[0], float(now)) if page else None

    async def replicas(self) -> list[ReplicaRow]:
        """Replicas that are known, live or silent."""
        now, *told = await self._client.call("view_replicas", MOST_REPLICAS)
        now_s = float(now) / 1e6
        return [
            ReplicaRow(replica, max(0.0, now_s - float(last_ms) / 1e3), about)
            for replica, last_ms, about in zip(told[::3], told[1::3], told[2::3], strict=True)
        ]

    async def decisions(self, limit: int) -> list[dict[str, str]]:
        """The last entries of the decision log, at most `limit`, oldest first; fields of
        docs/redis-schema.md."""
        page = await self._client.command("XREVRANGE", self._log, "+", "-", "COUNT", limit)
        return [dict(zip(fields[::2], fields[1::2], strict=True)) for _, fields in reversed(page)]


def _each_once(lanes: list[FlowQueueRow]) -> list[FlowQueueRow]:
    """In their order. One that moved on while they were read has come twice; it stands where it was last."""
    last = {(group % PARKED, name): at for at, (group, name, *_) in enumerate(lanes)}
    return lanes if len(last) == len(lanes) else [lanes[at] for at in sorted(last.values())]


def _batches(stretches: Sequence[RankRange]) -> list[list[tuple[int, RankRange]]]:
    """The stretches, cut so that no call brings more than CHUNK rows; each with its own place."""
    batches: list[list[tuple[int, RankRange]]] = []
    room = 0
    for at, stretch in enumerate(stretches):
        first = stretch.first
        while first <= stretch.last:
            if not room:
                batches.append([])
                room = CHUNK
            last = min(stretch.last, first + room - 1)
            batches[-1].append((at, RankRange(stretch.band, stretch.lane, first, last)))
            room -= last - first + 1
            first = last + 1
    return batches


CLAIM_MS = 500  # more than reading takes; on a machine so busy that it does not, two read
_GOOD_S = 1.0  # how old lanes may be
_LANE_S = 0.001  # and no older than this for each: a few are read in no time
_FRESH = 0.7  # of that time they are left to others, so that newer ones can be had before they are too old
_LOOK_S = 0.02  # between looks whether another has read them
_PIECE = 250  # lanes of what was left that are taken over at a time
_FIELDS = list(FlowQueueRow._fields)


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """`fresh_s`: for how long nobody reads newer ones; `good_s`: for how long these will do. From now on."""

    page: FlowQueuePage
    fresh_s: float
    good_s: float


class QueueSnapshots:
    """`key` is where lanes are left. One event loop."""

    def __init__(self, link: BatchingClient, reads: Reads, key: str) -> None:
        self._client = link
        self._reads = reads
        self._key = key
        self._few = False  # one call has brought them all, the last time
        self._clock = asyncio.get_running_loop().time

    async def read(self, limit: int, *, pause_s: float = 0.0) -> QueueSnapshot:
        """At most `limit` lanes in their order; decisions have their turn in the pauses.

        Raises:
            StateFault: as Reads does.
        """
        found = await (self._read(limit, pause_s) if self._few else self._shared(limit, pause_s))
        self._few = len(found.page.queues) <= CHUNK
        return found

    async def _shared(self, limit: int, pause_s: float) -> QueueSnapshot:
        while True:
            try:
                text, left_ms = await self._client.call("claim_queue_snapshot", CLAIM_MS)
            except StateFault:
                if self._client.fault is not None:
                    raise
                return await self._read(limit, pause_s)  # what takes no writes can be read still
            if text:
                until_s = self._clock() + left_ms / 1000
                lanes = await _parsed(text, pause_s)
                if lanes is None:
                    return await self._read(limit, pause_s)
                fresh_s = until_s - self._clock()
                return QueueSnapshot(lanes, fresh_s, fresh_s + (1 - _FRESH) * _longest_s(lanes))
            if not left_ms:
                found = await self._read(limit, pause_s)
                await asyncio.sleep(pause_s)
                self._leave(found)
                return found
            await asyncio.sleep(min(_LOOK_S, left_ms / 1000))

    def _leave(self, found: QueueSnapshot) -> None:
        """Nobody waits for the answer."""
        left_ms = int(found.fresh_s * 1000)
        if left_ms > 0:
            self._client.command("SET", self._key, _text(found.page), "PX", left_ms)
        else:
            self._client.command("DEL", self._key)

    async def _read(self, limit: int, pause_s: float) -> QueueSnapshot:
        begun_s = self._clock()
        lanes = await self._reads.flow_queues(limit, pause_s=pause_s)
        longest_s, took_s = _longest_s(lanes), self._clock() - begun_s
        return QueueSnapshot(lanes, _FRESH * longest_s - took_s, longest_s - took_s)


def _longest_s(page: FlowQueuePage) -> float:
    return min(_GOOD_S, _LANE_S * len(page.queues))


def _text(page: FlowQueuePage) -> bytes:
    rows = [tuple(lane) for lane in page.queues]
    return orjson.dumps({"fields": _FIELDS, "totals": page.totals, "lanes": rows})


async def _parsed(text: str, pause_s: float) -> FlowQueuePage | None:
    """None: it is of another version's shape."""
    told = orjson.loads(text)
    if told.get("fields") != _FIELDS:
        return None
    lanes: list[FlowQueueRow] = []
    for at in range(0, len(told["lanes"]), _PIECE):
        await asyncio.sleep(pause_s)
        lanes += map(FlowQueueRow._make, told["lanes"][at : at + _PIECE])
    return FlowQueuePage(lanes, tuple(told["totals"]))
