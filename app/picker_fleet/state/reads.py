"""The admin API's reads of Redis, one typed method per script; state/store.py constructs `Reads`, admin/
calls it.

No call returns more than CHUNK rows, so no call blocks Redis for long, however long the queue is. Ages and
remaining times are computed from Redis's clock at the time of the read."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import orjson

from picker_fleet.domain.bands import MOST_PRIORITY
from picker_fleet.domain.errors import StateFault
from picker_fleet.state.batching import BatchingClient
from picker_fleet.state.keys import BETWEEN, Keys
from picker_fleet.state.schema import VIEW_LIMIT

CHUNK = VIEW_LIMIT  # rows per call
MAX_REPLICAS = 256
THROTTLED = 2**32  # added to the group of a throttled flow queue
_MAX_SCANS = 10  # maximum Redis calls for one page of workloads
_SHARED_PART = 0.7  # fraction of a snapshot's maximum age after which a replica reads a new one
_POLL_S = 0.02  # interval at which a replica looks for the snapshot that another replica is making
_FIELDS_AT_ONCE = 500  # fields of a hash that one call reads, in less than a millisecond
_MARK = "\x1e"  # first byte of the field with a replica's mark; no flow has this byte
_PARSED_AT_ONCE = 250  # number of queues of a shared snapshot parsed between two pauses


class FlowQueueRow(NamedTuple):
    """A flow queue of one band; `name` is the flow, or '' where the whole band is one queue.

    `oldest_s` and `weight` are the age and weight of the queue's oldest request; under `edf`, of the queue's
    next request."""

    group: int  # rank of the band, highest priority first; plus THROTTLED while dispatch skips the queue
    name: str
    start: float  # start tag
    queued: int
    oldest_s: float
    weight: float
    share: float  # added to the start tag when one request is served
    in_flight: int | None  # None: not counted, because the flow has no limit

    @property
    def priority(self) -> int:
        """The priority of the flow queue's band."""
        return MOST_PRIORITY - self.group % THROTTLED

    @property
    def order_key(self) -> tuple[int, float, bytes]:
        return self.group, self.start, self.name.encode()

    @property
    def throttled(self) -> bool:
        return self.group >= THROTTLED


class Score(NamedTuple):
    """The parts of a request's score under `ordering: workload-aware`; `rate` is 0 or negative."""

    wait: float
    criticality: float
    rate: float


class RequestRow(NamedTuple):
    """A request that waits or runs. The `endpoints` are best first, empty until the request is placed. The
    `prefillers` are endpoints of the stage prefill, set while the first of them computes the prompt."""

    id: str
    state: str  # one of queued, orphaned, granted, placed
    owner: str
    flow: str
    priority: int
    workload: str  # '' for an anonymous workload
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
    prefillers: tuple[str, ...] = ()


class Usage(NamedTuple):
    """The usage of ended requests. `unreported`: served requests whose usage the model server did not report;
    no further figure except `requests` counts them. `prompt_tokens` include `cached_tokens`. `cost` is in
    the units of `tenants.prices`."""

    requests: int
    unreported: int
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    cost: float

    @classmethod
    def parse(cls, text: str) -> "Usage":
        *counts, cost = text.split()
        return cls(*map(int, counts), float(cost))  # type: ignore[call-arg]


class UsageMark(NamedTuple):
    """The last batch of usage that a replica sent for an hour. `left`: the replica has since left. The mark
    for a replica named '' says when a replica noticed that Redis had lost usage."""

    sent_ms: int
    left: bool


@dataclass(frozen=True, slots=True)
class UsageHour:
    """The usage counted in an hour by (leaf, model), and the marks of the replicas that counted. The row
    ('', '') is the sum of leaves beyond the bound (lua/count_usage.lua)."""

    rows: dict[tuple[str, str], Usage]
    marks: dict[str, UsageMark]


class LimitRow(NamedTuple):
    """A limit of a tenant's node. `per`: ms as text; the period of a budget; `0` for requests in flight.
    `reset_s`: seconds until the whole limit is free again, or until the budget's period ends."""

    unit: str
    per: str
    amount: float
    burst: float
    left: float
    reset_s: float


class TenantRow(NamedTuple):
    """A node's settings in force (JSON; lua/lib/tenants.lua) and balances. `of`: the path to which the
    settings belong, '' without settings. `waits_s`: how long the node's requests wait for the balance (0:
    until a request ends); None: no request waits. `served`: the cost served; None: not counted."""

    path: str
    is_live: bool
    of: str
    settings: str
    served: float | None
    waits_s: float | None
    limits: tuple[LimitRow, ...]


class WorkloadRow(NamedTuple):
    id: str
    total: int
    active: int
    dispatched: int
    average_wait_s: float
    last_request_s_ago: float
    rate: float  # requests/s


def group_of(priority: int, throttled: bool = False) -> int:
    """The sort key of flow queues: by band, the highest priority first; throttled queues after all others."""
    return MOST_PRIORITY - priority + THROTTLED * throttled


def flow_queue_row(row: str, now_us: float) -> FlowQueueRow:
    throttled, priority, name, start, queued, oldest_us, weight, share, in_flight = row.split(BETWEEN)
    return FlowQueueRow(
        group_of(int(priority), throttled == "1"),
        name,
        float(start),
        int(queued),
        _age_s(now_us, oldest_us),
        float(weight),
        float(share),
        int(in_flight) if in_flight else None,
    )


def request_row(row: str, now_us: float) -> RequestRow:
    (
        request_id, state, owner, flow, priority, workload, model, criticality, cost, arrived_us,
        deadline_ms, due_ms, overdue, endpoints, limit, wait, for_criticality, rate,
        prefillers,
    ) = row.split(BETWEEN)  # fmt: skip
    now_s = now_us / 1e6
    return RequestRow(
        request_id,
        state,
        owner,
        flow,
        int(priority),
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
        tuple(prefillers.split(",")) if prefillers else (),
    )


def workload_row(row: str, now_us: float) -> WorkloadRow:
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


@dataclass(frozen=True, slots=True)
class FlowQueuePage:
    """Flow queues in order, each once; `totals` has pairs (group in use, its number of queues)."""

    queues: list[FlowQueueRow]
    totals: tuple[tuple[int, int], ...]


class RankRange(NamedTuple):
    """The ranks `first` to `last`, inclusive, of a flow queue."""

    priority: int
    name: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request in flight; `lease_ms` is the end of its lease, as text from Redis."""

    entry: RequestRow
    lease_ms: str
    lease_in_s: float


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """The state of one request: while the request is queued, its flow queue and rank there; while it is in
    flight, its lease."""

    entry: RequestRow
    rank: int | None
    queue: FlowQueueRow | None
    lease_in_s: float | None


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    id: str
    heartbeat_s_ago: float
    about: str  # JSON objects, one per line


async def fields_of(client: BatchingClient, key: str) -> AsyncIterator[tuple[str, str]]:
    """The fields of a hash, and their values."""
    cursor = ""
    while cursor != "0":
        cursor, flat = await client.command("HSCAN", key, cursor or "0", "COUNT", _FIELDS_AT_ONCE)
        for pair in zip(flat[::2], flat[1::2], strict=True):
            yield pair


class Reads:
    """The reads of one pool. Every method raises StateFault if Redis does not answer (state/batching.py)."""

    def __init__(self, client: BatchingClient, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def flow_queues(
        self,
        limit: int,
        *,
        group: int = 0,
        behind: tuple[str, str] | None = None,
        priority: int | None = None,
        pause_s: float = 0.0,
    ) -> FlowQueuePage:
        """At most `limit` queues from `group` on; in `group`, only queues after the position `behind` (start
        tag, name); with `priority`, only queues of that band. Sleeps `pause_s` between calls."""
        found: list[FlowQueueRow] = []
        totals: tuple[tuple[int, int], ...] = ()
        while True:
            wanted = min(CHUNK, limit - len(found))
            tag, name = behind or ("", "")
            now, counts, *page = await self._client.call(
                "view_flows",
                group // THROTTLED,
                MOST_PRIORITY - group % THROTTLED,
                tag,
                name,
                wanted,
                "" if priority is None else priority,
            )
            totals = tuple(
                (group_of(of, throttled == 1), count)
                for throttled, of, count in zip(counts[::3], counts[1::3], counts[2::3], strict=True)
            )
            found += [flow_queue_row(row, float(now)) for row in page]
            if len(page) < wanted or len(found) >= limit:
                return FlowQueuePage(_each_once(found), totals)
            await asyncio.sleep(pause_s)
            group, behind = found[-1].group, (repr(found[-1].start), found[-1].name)

    async def flow_queue(self, name: str) -> list[FlowQueueRow]:
        """The flow queue of flow `name` in each band where the flow has waiting requests."""
        now, *page = await self._client.call("view_flow", name)
        return [flow_queue_row(row, float(now)) for row in page]

    async def queued(self, ranges: Sequence[RankRange]) -> list[list[RequestRow]]:
        """The requests in each range of ranks; incomplete if the queue changed between two calls."""
        found: list[list[RequestRow]] = [[] for _ in ranges]
        for batch in _batches(ranges):
            args = [
                part for _, each in batch for part in (each.priority, each.name, each.first, each.last)
            ]  # fmt: skip
            now, *pages = await self._client.call("view_queue", *args)
            for (at, _), page in zip(batch, pages, strict=True):
                found[at] += [request_row(row, float(now)) for row in page]
        return found

    async def in_flight(
        self, limit: int, behind: tuple[str, str] | None = None
    ) -> tuple[list[RunningRequest], int]:
        """At most `limit` requests in flight, ordered by the end of their leases, after the position `behind`
        (lease, id); and the total number."""
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
                    found.append(RunningRequest(request_row(row, now_us), lease_ms, left_s))
            if len(page) < 2 * wanted or len(found) >= limit:
                return found, total

    async def request(self, request_id: str) -> RequestStatus | None:
        """The status of a request; None if the pool does not know it."""
        now, *fields = await self._client.call("view_request", request_id)
        if not fields:
            return None
        now_us = float(now)
        row, rank, queue, lease_ms = fields
        return RequestStatus(
            request_row(row, now_us),
            None if rank == "" else int(rank),
            flow_queue_row(queue, now_us) if queue else None,
            float(lease_ms) / 1e3 - now_us / 1e6 if lease_ms else None,
        )

    async def workloads(
        self, limit: int, cursor: str = "0", skip: int = 0
    ) -> tuple[list[WorkloadRow], int, tuple[str, int] | None]:
        """At most `limit` workloads of the registry, unordered, and the total number.

        The third value is the `cursor` and `skip` of the next page; None at the end. A workload that is added
        or removed between pages may be missed or listed twice.
        """
        found: list[WorkloadRow] = []
        for _ in range(_MAX_SCANS):
            now, total, following, *page = await self._client.call(
                "view_workloads", cursor, min(CHUNK, limit + skip - len(found))
            )
            fresh = [workload_row(row, float(now)) for row in page[skip:]]
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
        return workload_row(page[0], float(now)) if page else None

    async def replicas(self) -> list[ReplicaRow]:
        now, *fields = await self._client.call("view_replicas", MAX_REPLICAS)
        now_s = float(now) / 1e6
        return [
            ReplicaRow(replica, max(0.0, now_s - float(last_ms) / 1e3), about)
            for replica, last_ms, about in zip(fields[::3], fields[1::3], fields[2::3], strict=True)
        ]

    async def tenants(self, paths: Sequence[str]) -> list[TenantRow]:
        """The settings and balances of tenants' nodes, in the order of `paths`."""
        found = []
        for at in range(0, len(paths), CHUNK):
            _, *rows = await self._client.call("view_tenants", *paths[at : at + CHUNK])
            found += [_tenant_row(row) for row in rows]
        return found

    async def usage_hours(self) -> list[int]:
        """The hours that have usage, in hours since 1970, the earliest first."""
        return sorted(map(int, await self._client.command("HKEYS", self._keys.usage_hours)))

    async def usage(self, hour: int) -> UsageHour:
        found = UsageHour({}, {})
        async for field, text in fields_of(self._client, self._keys.usage(hour)):
            if field.startswith(_MARK):
                _, sent_ms, left = text.split()
                found.marks[field.removeprefix(_MARK)] = UsageMark(int(sent_ms), left == "1")
            else:
                leaf, _, model = field.partition(BETWEEN)
                found.rows[leaf, model] = Usage.parse(text)
        return found

    async def decisions(self, limit: int) -> list[dict[str, str]]:
        """The last `limit` entries of the decision log, oldest first (docs/redis-schema.md lists fields)."""
        page = await self._client.command("XREVRANGE", self._keys.log, "+", "-", "COUNT", limit)
        return [dict(zip(fields[::2], fields[1::2], strict=True)) for _, fields in reversed(page)]


def _tenant_row(row: Sequence[str | int]) -> TenantRow:
    path, source, of, settings, served, waits_ms, *limits = map(str, row)
    return TenantRow(
        path,
        source == "1",
        of,
        settings,
        float(served) if served else None,
        float(waits_ms) / 1000 if waits_ms else None,
        tuple(
            LimitRow(unit, per, float(amount), float(burst), float(left), float(reset_ms) / 1000)
            for unit, per, amount, burst, left, reset_ms in zip(*[iter(limits)] * 6, strict=True)
        ),
    )


def _each_once(queues: list[FlowQueueRow]) -> list[FlowQueueRow]:
    """Remove duplicates: a queue that moved between two calls was read twice; keep the last position."""
    last = {(group % THROTTLED, name): at for at, (group, name, *_) in enumerate(queues)}
    return queues if len(last) == len(queues) else [queues[at] for at in sorted(last.values())]


def _batches(ranges: Sequence[RankRange]) -> list[list[tuple[int, RankRange]]]:
    """Split the ranges of ranks into calls of at most CHUNK rows; each part has the index of its range."""
    batches: list[list[tuple[int, RankRange]]] = []
    room = 0
    for at, each in enumerate(ranges):
        first = each.first
        while first <= each.last:
            if not room:
                batches.append([])
                room = CHUNK
            last = min(each.last, first + room - 1)
            batches[-1].append((at, RankRange(each.priority, each.name, first, last)))
            room -= last - first + 1
            first = last + 1
    return batches


_FIELDS = list(FlowQueueRow._fields)


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """`fresh_s`: for how long no replica reads a newer snapshot; `good_s`: how long replicas may use it."""

    page: FlowQueuePage
    fresh_s: float
    good_s: float


@dataclass(frozen=True, slots=True)
class SnapshotTimes:
    """`claim_ms`: how long replicas wait for the replica that reads; then another replica reads, too.

    The maximum age of a snapshot of n queues is the lesser of `max_age_s` and n · `max_age_per_queue_s`,
    because a short list of queues is quick to read."""

    claim_ms: int = 500
    max_age_s: float = 1.0
    max_age_per_queue_s: float = 0.001


class QueueSnapshots:
    """Reads all flow queues once for the whole fleet.

    A thousand queues take twenty calls. So a replica first asks for a snapshot that another replica has
    stored in `key` (lua/claim_queue_snapshot.lua). If there is no snapshot, the replica claims the read,
    reads, and stores the snapshot with an expiry. The other replicas wait at most until the claim expires,
    since the claiming replica may have died. If Redis accepts no writes, or the snapshot is malformed or by
    another version, each replica reads for itself. One event loop."""

    def __init__(
        self, client: BatchingClient, reads: Reads, key: str, times: SnapshotTimes = SnapshotTimes()
    ) -> None:
        self._client = client
        self._times = times
        self._reads = reads
        self._key = key
        self._few = False  # whether the last read fitted into one call
        self._clock = asyncio.get_running_loop().time

    async def read(self, limit: int, *, pause_s: float = 0.0) -> QueueSnapshot:
        """At most `limit` queues in order; sleeps `pause_s` between calls, so that decisions can run.

        Raises:
            StateFault: there is no answer from Redis.
        """
        found = await (self._read(limit, pause_s) if self._few else self._shared(limit, pause_s))
        self._few = len(found.page.queues) <= CHUNK
        return found

    async def _shared(self, limit: int, pause_s: float) -> QueueSnapshot:
        while True:
            try:
                text, left_ms = await self._client.call("claim_queue_snapshot", self._times.claim_ms)
            except StateFault:
                if self._client.fault is not None:
                    raise
                return await self._read(limit, pause_s)  # Redis may accept no writes, and still allow reads
            if text:
                until_s = self._clock() + left_ms / 1000
                page = await _parsed(text, pause_s)
                if page is None:
                    return await self._read(limit, pause_s)
                fresh_s = until_s - self._clock()
                return QueueSnapshot(page, fresh_s, fresh_s + (1 - _SHARED_PART) * self._max_age_s(page))
            if not left_ms:
                found = await self._read(limit, pause_s)
                await asyncio.sleep(pause_s)
                self._share(found)
                return found
            await asyncio.sleep(min(_POLL_S, left_ms / 1000))

    def _share(self, found: QueueSnapshot) -> None:
        """Store the snapshot for the other replicas, without waiting for the reply."""
        left_ms = int(found.fresh_s * 1000)
        if left_ms > 0:
            self._client.command("SET", self._key, _text(found.page), "PX", left_ms)
        else:
            self._client.command("DEL", self._key)

    async def _read(self, limit: int, pause_s: float) -> QueueSnapshot:
        begun_s = self._clock()
        page = await self._reads.flow_queues(limit, pause_s=pause_s)
        max_age_s, took_s = self._max_age_s(page), self._clock() - begun_s
        return QueueSnapshot(page, _SHARED_PART * max_age_s - took_s, max_age_s - took_s)

    def _max_age_s(self, page: FlowQueuePage) -> float:
        return min(self._times.max_age_s, self._times.max_age_per_queue_s * len(page.queues))


def _text(page: FlowQueuePage) -> bytes:
    rows = [tuple(queue) for queue in page.queues]
    return orjson.dumps({"fields": _FIELDS, "totals": page.totals, "flow_queues": rows})


async def _parsed(text: str, pause_s: float) -> FlowQueuePage | None:
    """Parse a shared snapshot; None if it is malformed or has another version's fields."""
    queues = list[FlowQueueRow]()
    try:
        snapshot = orjson.loads(text)
        if snapshot["fields"] != _FIELDS:
            return None
        rows = snapshot["flow_queues"]
        for at in range(0, len(rows), _PARSED_AT_ONCE):
            await asyncio.sleep(pause_s)
            queues += map(FlowQueueRow._make, rows[at : at + _PARSED_AT_ONCE])
        return FlowQueuePage(queues, tuple((group, count) for group, count in snapshot["totals"]))
    except (ValueError, TypeError, KeyError):
        return None
