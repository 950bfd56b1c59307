"""The read side of the admin API: reads the fleet's state and returns it as the models in models.py.

`FleetView` returns the state, endpoints and health, and lists page by page, at a cost that does not grow with
the queue. The routes (api.py) and the event stream (events.py) call the view.
"""

import base64
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import AfterValidator, Field, TypeAdapter

from picker_fleet.admin import models
from picker_fleet.admin.fleet_state import MAX_FLOWS, FleetState, FleetStateCache, ReplicaReport, total
from picker_fleet.admin.protection import Refused
from picker_fleet.admin.queue_order import (
    Position,
    PredictedRequest,
    count_before,
    predicted_order,
    predicted_tag,
    request_status,
)
from picker_fleet.domain.bands import Bands
from picker_fleet.domain.config import Settings
from picker_fleet.domain.errors import BadRequest
from picker_fleet.domain.request import Ejection, Endpoint
from picker_fleet.domain.tenants import Tree
from picker_fleet.endpoints.readings import MetricsCache, Reading
from picker_fleet.fleet.heartbeat import Membership
from picker_fleet.scheduling.chooser import EndpointChooser
from picker_fleet.scheduling.endpoint_history import LatencyTracker
from picker_fleet.state.pool_state import PREFILL, FoundLimit, why_limited
from picker_fleet.state.reads import FlowQueueRow, RankRange, RequestRow, RequestStatus, WorkloadRow
from picker_fleet.state.store import Store

_Row = TypeVar("_Row")
_Parts = TypeVar("_Parts")
_MAX_CURSOR_CHARS = 4096
_NO_LIST = "discovery has no list yet; the log says why"
_MAX_SCANNED_WORKLOADS = 200  # the method `busiest` reads at most this many workloads
_FLOW_ORDER = "in dispatch order: flows by start tag, each request at its predicted start tag"
_BAND_ORDER = {
    "strict": "band after band",
    "weighted": "band after band, though bands take turns by their weights",
}
_ORDER_IN_FLOW = {
    "fcfs": "in a flow by arrival",
    "edf": "in a flow by deadline",
    "workload-aware": "in a flow by arrival, and its requests on one page by score",
}


class BadBand(BadRequest):
    """Raised if no band has the given name or priority."""

    status = 422
    code = "bad_band"


class BadCursor(BadRequest):
    """Raised if another list, or none, returned the given cursor."""

    code = "bad_cursor"

    def __init__(self) -> None:
        super().__init__(
            "cursor: this list did not return it; use `cursor` of the previous page, or leave it out"
        )


def encode_cursor(name: str, *parts: str | int | float) -> str:
    """An opaque cursor into the list `name`; `decode_cursor` recovers `parts`."""
    return base64.urlsafe_b64encode(orjson.dumps([name, *parts])).rstrip(b"=").decode()


def decode_cursor(text: str, form: TypeAdapter[_Parts]) -> _Parts:
    """The parts that `encode_cursor` put into `text`. Raises BadCursor for a cursor of another `form`."""
    with contextlib.suppress(ValueError):  # the text is no base64, no UTF-8 or no JSON
        if len(text) <= _MAX_CURSOR_CHARS:
            packed = text.encode() + b"=" * (-len(text) % 4)
            return form.validate_json(base64.b64decode(packed, altchars=b"-_", validate=True))
    raise BadCursor


def finite_score(text: str) -> str:
    """`text`, stripped. Raises ValueError unless `text` is a finite number as Redis writes scores."""
    if not text.isascii() or "_" in text or not math.isfinite(float(text)):
        raise ValueError("no finite number")
    return text.strip()


# The form of each list's cursors.
_Index = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
_Score = Annotated[str, AfterValidator(finite_score)]
OF_FLOWS = TypeAdapter(tuple[Literal["flows"], _Index, _Score, str])
OF_QUEUE = TypeAdapter(tuple[Literal["queue"], _Index, _Score, str])
OF_IN_FLIGHT = TypeAdapter(tuple[Literal["inflight"], _Score, str])
# A cursor of Redis's SCAN, and the number of rows to skip from there.
OF_WORKLOADS = TypeAdapter(
    tuple[
        Literal["workloads"],
        Annotated[int, Field(ge=0, lt=2**64)],
        Annotated[int, Field(strict=True, ge=0, le=10_000)],
    ]
)


def _page(
    name: str, rows: Sequence[_Row], limit: int, position: Callable[[_Row], tuple[str | int, ...]]
) -> tuple[Sequence[_Row], str | None]:
    """The first `limit` of `rows`, and the cursor of the next page (None: no further page)."""
    page = rows[:limit]
    return page, encode_cursor(name, *position(page[-1])) if len(rows) > limit else None


class FleetView:
    """The fleet's state, its endpoints and lists, and this replica's health. Methods raise StateFault if
    Redis cannot be read, BadCursor for a cursor of another list, and Refused (404) for an unknown name.

    A replica becomes ready with its first heartbeat to an existing pool. A replica that loses Redis stays
    ready while it admits requests; its health reports the fault to operators.
    """

    def __init__(
        self,
        store: Store,
        membership: Membership,
        readings: MetricsCache,
        latencies: LatencyTracker,
        cache: FleetStateCache,
        chooser: EndpointChooser,
        *,
        replica: str,
        pool: str,
    ) -> None:
        self._store = store
        self._membership = membership
        self._readings = readings
        self._latencies = latencies
        self._cache = cache
        self._chooser = chooser  # explains how this replica chose endpoints
        self._identity = {"replica": replica, "pool": pool}
        # The found limits as last read, and the limits then in force; empty in mode `static`.
        self._found: Mapping[str, FoundLimit] = {}
        self._in_force: Mapping[str, int] = {}

    async def state(self) -> models.State:
        """The shared state at one moment; while Redis is unavailable, the state last read."""
        state = await self._membership.state()
        pool, outage = state.pool, state.outage
        fleet = await self._cache.get() if outage is None else self._cache.last
        settings = self._membership.effective.settings
        queue = settings.fair_request_queue
        configured = queue.bands
        bands = [
            models.BandState(
                band=name,
                priority=band.priority,
                queued=pool.queue_length[name],
                queued_bytes=pool.queue_bytes[name],
                virtual_time=pool.virtual_times[name],
                active_flows=fleet.total(band.priority),
                oldest_s=fleet.oldest_s(band.priority),
                weight=band.weight if queue.band_policy == "weighted" else None,
                capacity=band.capacity,
                bytes=band.bytes,
            )
            for name in pool.queue_length
            if (band := configured.find(name)) is not None
        ]
        fields = asdict(pool)
        for name in ("about", "limits", "prefill_in_flight", "prefill_limits"):
            del fields[name]  # fields that the rows of endpoints show
        bounds = models.Bounds(
            lower=fields.pop("lower"), watermark=state.watermark, upper=fields.pop("upper")
        )
        if outage is not None:
            fields["local"] = asdict(outage)
        return models.State(
            **self._identity,
            **fields,
            bounds=bounds,
            queue_fill=state.queue_fill,
            degraded=outage is not None,
            unit=settings.request_queue_controller.unit,
            mode="adaptive" if settings.request_queue_controller.is_adaptive else "static",
            queue_enabled=settings.request_queue_controller.enabled,
            tenants=settings.tenants is not None,
            bands=bands,
            pool_age_s=max(0.0, (pool.now_us - pool.born_us) / 1e6) if pool.born_us else 0.0,
        )

    async def endpoints(self) -> list[models.Endpoint]:
        state = await self._membership.state()
        controller = self._membership.effective.settings.request_queue_controller
        if not controller.is_adaptive:
            self._found = {}
        elif state.outage is None:
            self._found, self._in_force = await self._store.found_limits(), state.pool.limits_by_name
        limits = state.pool.limits_by_name
        readings = self._readings.snapshot()
        rows = []
        for each in await self._membership.endpoints():
            name = each.address if each.decodes else PREFILL + each.address
            limit = limits.get(name)
            pinned = controller.is_adaptive and each.address in controller.pinned
            # In an outage, another limit may be in force than when the found limits were read.
            found = self._found.get(name) if self._in_force.get(name) == limit else None
            reason, changed_s = why_limited(each, limit, found, controller.max_per_backend, state.pool.now_us)
            tokens = state.pool.amounts.get(each.address)
            loads = {
                "limit": state.pool.limits.get(each.address),
                "limit_reason": "pinned" if pinned else reason,
                "limit_changed_s": None if pinned else changed_s,
                "pinned": pinned,
                "in_flight": state.pool.in_flight.get(each.address, 0),
                "in_flight_tokens": None if tokens is None else round(tokens),
            }
            if each.prefills:
                loads["prefills"] = state.pool.prefill_in_flight.get(each.address, 0)
                loads["prefill_limit"] = state.pool.prefill_limits.get(each.address)
            rows.append(self._endpoint(each, loads, readings.get(each.address)))
        return rows

    def _endpoint(
        self, endpoint: Endpoint, loads: Mapping[str, Any], reading: Reading | None
    ) -> models.Endpoint:
        marks = {
            "down": endpoint.down,
            "drained": endpoint.drained,
            "draining": endpoint.draining,
            "ejected": endpoint.ejected,
        }
        figures: dict[str, Any] = {}
        if reading is not None:
            metrics = reading.metrics
            figures = {
                "waiting": metrics.waiting,
                "running": metrics.running,
                "kv_utilisation": metrics.kv_utilisation,
                "adapters": sorted(metrics.active_adapters | metrics.idle_adapters),
                "waiting_adapters": sorted(metrics.waiting_adapters),
                "max_adapters": metrics.max_adapters,
                "scraped_s_ago": round(reading.age_s, 3),
                "scrape_fault": metrics.fault,
                "scrape_remark": metrics.remark,
                "unready": metrics.unready,
            }
        if (latency := self._latencies.stats(endpoint.address)) is not None:
            figures |= {"latency_mean_s": latency.mean_s, "latency_std_s": latency.std_s}
        return models.Endpoint(
            address=endpoint.address,
            labels=endpoint.labels,
            status=next((name for name, is_set in marks.items() if is_set), "ready"),
            ejected=_ejected(endpoint.ejected),
            max_inflight=endpoint.max_inflight,
            stages=[
                *["decode"] * endpoint.decodes,
                *["prefill"] * endpoint.prefills,
                *["encode"] * endpoint.encodes,
            ],
            **loads,
            **figures,
        )

    def ready(self) -> tuple[bool, dict[str, str]]:
        """Whether this replica should get traffic, and for each component `ok` or its fault."""
        member, pulse = self._membership, self._membership.pulse
        joined = pulse is not None and pulse.epoch != "0"
        endpoints = pulse.ready_endpoints if pulse is not None else 0
        return joined, {
            "redis": self._store.fault or member.unfit or "ok",
            "pool": member.status if joined else member.refusal or "not joined yet",
            "endpoints": ("ok" if endpoints else "none is ready") if member.has_list else _NO_LIST,
        }

    def health(self, status: str, components: dict[str, str]) -> models.Health:
        return models.Health(status=status, components=components, **self._identity)

    @property
    def bands(self) -> Bands:
        """The configured bands."""
        return self._membership.effective.settings.fair_request_queue.bands

    def priority_of(self, band: str | None) -> int | None:
        """The priority of the band that a client names; None (all bands) if `band` is None.

        Raises:
            BadBand: the text `band` is neither the name of a configured band nor a priority.
        """
        if band is None:
            return None
        bands = self.bands
        found = bands.find(band)
        if found is None:
            names = ", ".join(each.name for each in bands)
            raise BadBand(f"query.band: {band[:40]!r} is no band; valid: {names}, or a priority (int32)")
        return found.priority

    async def flows(self, limit: int, cursor: str | None, band: str | None) -> models.Flows:
        priority = self.priority_of(band)
        group, after = 0, None
        if cursor is not None:
            _, group, tag, name = decode_cursor(cursor, OF_FLOWS)
            after = tag, name
        fleet = await self._cache.get()
        queues, totals = fleet.page(limit + 1, group, after, priority), fleet.totals
        if queues is None:
            found = await self._store.reads.flow_queues(
                limit + 1, group=group, behind=after, priority=priority
            )
            queues, totals = found.queues, found.totals
        page, following = _page(
            "flows", queues, limit, lambda last: (last.group, repr(last.start), last.name)
        )
        return models.Flows(flows=self._flows(page, fleet), total=total(totals, priority), cursor=following)

    async def flow(self, name: str) -> models.FlowDetail:
        queues = await self._store.reads.flow_queue(name)
        fleet = await self._cache.get()
        bands = self.bands
        priorities = {band.priority for band in bands} | {
            each for each, flow in fleet.served.flows if flow == name
        }
        served = {
            bands.of(each).name: round(fleet.served_per_s(each, name) or 0.0, 6)
            for each in sorted(priorities, reverse=True)
        }
        if not queues and not any(served.values()):
            raise Refused(404, "unknown_flow", "no request of this flow waits, and none was served lately")
        effective = self._membership.effective
        return models.FlowDetail(
            flow=name,
            bands=self._flows(queues, fleet),
            served_cost_per_s=served,
            weight_override=effective.weights.get(name),
            flow_capacity=effective.settings.fair_request_queue.flow_capacity,
        )

    async def queue(self, limit: int, cursor: str | None, band: str | None, flow: str | None) -> models.Queue:
        priority, after = self.priority_of(band), None
        if cursor is not None:
            _, group, tag, name = decode_cursor(cursor, OF_QUEUE)
            after = Position(group, float(tag), name)
        queues: Sequence[FlowQueueRow]
        if flow is None:
            fleet = await self._cache.get()
            queues = fleet.queues if priority is None else fleet.band(priority).queues
            length = fleet.queued(priority) if fleet.complete else await self._queue_length(priority)
        else:
            queues = [
                each
                for each in await self._store.reads.flow_queue(flow)
                if priority is None or each.priority == priority
            ]
            length = sum(each.queued for each in queues)
        page, following = _page(
            "queue",
            predicted_order(queues, after, limit + 1),
            limit,
            lambda last: (last.queue.group, repr(last.tag), last.queue.name),
        )
        return models.Queue(
            requests=await self._queued(page), total=length, cursor=following, order=self._order()
        )

    async def in_flight(self, limit: int, cursor: str | None) -> models.Inflight:
        after = None
        if cursor is not None:
            _, lease_ms, request_id = decode_cursor(cursor, OF_IN_FLIGHT)
            after = lease_ms, request_id
        found, total = await self._store.reads.in_flight(limit + 1, after)
        page, following = _page("inflight", found, limit, lambda last: (last.lease_ms, last.entry.id))
        bands = self.bands
        rows = [models.Running(**_placed(each.entry, bands), lease_in_s=each.lease_in_s) for each in page]
        return models.Inflight(requests=rows, total=total, cursor=following)

    async def request(self, request_id: str) -> models.RequestStatus:
        explained = self._chooser.explain(request_id)
        explanation = None if explained is None else explained.to_dict()
        found = await self._store.reads.request(request_id)
        if found is None:
            if explanation is None:
                detail = "neither the pool nor this replica knows of the request"
                raise Refused(404, "unknown_request", detail)
            why = (
                "this replica placed it; it has ended since, or the pool has lost it"
                if explanation["chosen"]
                else "this replica refused it: there was no endpoint for it"
            )
            return models.RequestStatus(
                id=request_id, state="unknown-to-the-pool", why=why, explanation=explanation
            )
        state, settings = (await self._membership.state()).pool, self._membership.effective.settings
        before: int | None = None
        if found.entry.state in ("queued", "orphaned"):
            before, tag = await self._predicted(found)
            position = None if before is None else before + 1
            fields = _queued(found.entry, position, tag, self.bands).model_dump()
        else:
            fields = _placed(found.entry, self.bands)
        return models.RequestStatus(
            **fields,
            lease_in_s=None if found.lease_in_s is None else round(found.lease_in_s, 6),
            why=request_status(found, state, before, settings.claim_share, await self._short_limit(found)),
            explanation=explanation,
        )

    async def _short_limit(self, found: RequestStatus) -> str:
        """Which tenant's limit does not suffice for a waiting request; '' if none."""
        tenants = self._membership.effective.settings.tenants
        if tenants is None or found.queue is None or not found.queue.throttled:
            return ""
        for row in await self._store.reads.tenants(Tree((), tenants.separator).paths(found.entry.flow)):
            if row.waits_s is not None and row.limits:
                until = f"for {row.waits_s:.1f} s" if row.waits_s else "until a request ends"
                return f"a limit of tenant {row.path} does not suffice {until}"
        return ""

    async def _predicted(self, found: RequestStatus) -> tuple[int | None, float | None]:
        """How many requests are served before this request, and its start tag; None if no flow queue has the
        request."""
        queue = found.queue
        if queue is None or found.rank is None:
            return None, None
        tag = predicted_tag(queue, found.rank)
        others = [
            each
            for each in (await self._cache.get()).queues
            if (each.group, each.name) != (queue.group, queue.name)
        ]
        return found.rank + count_before(others, Position(queue.group, tag, queue.name)), tag

    async def workloads(self, limit: int, cursor: str | None) -> models.Workloads:
        start: tuple[str, int] = ("0", 0)
        if cursor is not None:
            _, scan, skip = decode_cursor(cursor, OF_WORKLOADS)
            start = (str(scan), skip)
        found, total, following = await self._store.reads.workloads(limit, *start)
        return models.Workloads(
            workloads=[self._workload(row) for row in found],
            total=total,
            cursor=following and encode_cursor("workloads", *following),
        )

    async def busiest(self, limit: int) -> models.Workloads:
        """The workloads with the most active requests, among at most `_MAX_SCANNED_WORKLOADS`."""
        found, total, _ = await self._store.reads.workloads(_MAX_SCANNED_WORKLOADS)
        found.sort(key=lambda row: (-row.active, row.last_request_s_ago))
        return models.Workloads(
            workloads=[self._workload(row) for row in found[:limit]], total=total, cursor=None
        )

    async def workload(self, workload_id: str) -> models.Workload:
        row = await self._store.reads.workload(workload_id)
        if row is None:
            raise Refused(404, "unknown_workload", "no such workload has sent a request lately")
        return self._workload(row)

    async def replicas(self) -> models.Replicas:
        silence_s = self._membership.effective.settings.leases.replica_silence
        reports = (await self._cache.get()).replicas
        found = [_replica(each, this=self._identity["replica"], silence_s=silence_s) for each in reports]
        return models.Replicas(replicas=sorted(found, key=lambda each: (not each.live, each.id)))

    def _flows(self, queues: Sequence[FlowQueueRow], fleet: FleetState) -> list[models.Flow]:
        even = self._membership.effective.settings.fair_request_queue.fairness == "round-robin"
        priorities, bands = {queue.priority for queue in queues}, self.bands
        weights = {each: fleet.weights(each, even=even) for each in priorities}
        return [
            _flow(queue, fleet, bands.of(queue.priority).name, weights[queue.priority], even=even)
            for queue in queues
        ]

    async def _queue_length(self, priority: int | None) -> int:
        state = (await self._membership.state()).pool
        return state.queued if priority is None else state.queue_length.get(self.bands.of(priority).name, 0)

    async def _queued(self, requests: Sequence[PredictedRequest]) -> list[models.Queued]:
        by_queue: dict[tuple[int, str], list[PredictedRequest]] = {}
        for request in requests:
            by_queue.setdefault((request.queue.group, request.queue.name), []).append(request)
        ranges = [
            RankRange(each[0].queue.priority, each[0].queue.name, each[0].rank, each[-1].rank)
            for each in by_queue.values()
        ]
        found: dict[str, tuple[PredictedRequest, RequestRow]] = {}
        for places, entries in zip(by_queue.values(), await self._store.reads.queued(ranges), strict=True):
            if len(entries) > 1:  # among a flow's requests on one page, the best score is served first
                entries.sort(key=lambda entry: -sum(entry.score or ()))
            for place, entry in zip(places, entries, strict=False):
                found[entry.id] = place, entry
        rows, bands = sorted(found.values(), key=lambda row: row[0].number), self.bands
        return [_queued(entry, place.number, place.tag, bands) for place, entry in rows]

    def _order(self) -> str:
        queue = self._membership.effective.settings.fair_request_queue
        order = f"{_FLOW_ORDER}; {_BAND_ORDER[queue.band_policy]}; {_ORDER_IN_FLOW[queue.ordering]}"
        guard = f"; up to {queue.guard_share:.0%} of dispatches go to the most overdue before all others"
        return order + guard + f"; flows at their limit last; of the first {MAX_FLOWS} flows"

    def _workload(self, row: WorkloadRow) -> models.Workload:
        """The workload, with the score that a request arriving now would have, criticality excluded."""
        settings = self._membership.effective.settings
        return models.Workload(**row._asdict(), score=_arrival_score(row, settings))


def _ejected(ejection: Ejection | None) -> models.Ejected | None:
    if ejection is None:
        return None
    return models.Ejected(reason=ejection.reason, until=datetime.fromtimestamp(ejection.until_ms / 1000, UTC))


def _arrival_score(row: WorkloadRow, settings: Settings) -> models.Score | None:
    policy = settings.workloads
    if settings.fair_request_queue.ordering != "workload-aware":
        return None
    wait = 0.0
    if policy.wait_signal == "workload_average":
        wait = policy.wait_weight * min(row.average_wait_s / policy.wait_cap, 1)
    rate = -policy.rate_weight * min(row.rate / policy.rate_cap, 1)
    return models.Score(wait=wait, criticality=None, rate=rate, total=None)


def _flow(
    queue: FlowQueueRow, fleet: FleetState, band: str, weights: float | None, *, even: bool
) -> models.Flow:
    """`weights` is the sum over the band's waiting flows; `even` means that the fairness policy ignores
    weights (`round-robin`)."""
    served = fleet.served_per_s(queue.priority, queue.name)
    all_served = fleet.served.bands.get(queue.priority)
    return models.Flow(
        flow=queue.name,
        band=band,
        queued=queue.queued,
        oldest_s=queue.oldest_s,
        start_tag=queue.start,
        weight=queue.weight,
        throttled=queue.throttled,
        in_flight=queue.in_flight,
        served_cost_per_s=served,
        share=None if served is None or not all_served else min(served / all_served, 1.0),
        fair_share=(1.0 if even else queue.weight) / weights if weights else None,
    )


def _queued(entry: RequestRow, position: int | None, start_tag: float | None, bands: Bands) -> models.Queued:
    score = entry.score
    return models.Queued(
        **_request(entry, bands),
        position=position,
        deadline_in_s=entry.deadline_in_s,
        overdue=entry.overdue,
        overdue_in_s=entry.overdue_in_s,
        score=None if score is None else models.Score(**score._asdict(), total=sum(score)),
        start_tag=start_tag,
    )


def _placed(entry: RequestRow, bands: Bands) -> dict[str, Any]:
    endpoint, *fallbacks = entry.endpoints or (None,)
    prefiller = entry.prefillers[0] if entry.prefillers else None
    return {**_request(entry, bands), "endpoint": endpoint, "fallbacks": fallbacks, "prefiller": prefiller}


def _request(entry: RequestRow, bands: Bands) -> dict[str, Any]:
    names = ("id", "state", "flow", "model", "criticality", "cost", "owner")
    return {
        **{name: getattr(entry, name) for name in names},
        "band": bands.of(entry.priority).name,
        "workload": entry.workload or None,
        "age_s": round(entry.age_s, 6),
    }


def _replica(report: ReplicaReport, *, this: str, silence_s: float) -> models.Replica:
    names = ("id", "host", "degraded", "waiting", "admin", "grpc", "version")
    return models.Replica(
        **{name: getattr(report, name) for name in names},
        live=report.heartbeat_s_ago < silence_s,
        heartbeat_s_ago=round(report.heartbeat_s_ago, 3),
        started_s_ago=None if report.up_s is None else round(report.up_s + report.heartbeat_s_ago, 3),
        this=report.id == this,
    )
