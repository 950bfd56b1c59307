"""One pool of a replica: builds its parts and starts their background tasks.

`serve.py` makes a `Pool` for each configured pool, and the servers of the process around the pools. Pools
share these servers, the budget for request bodies and the event loop, and nothing else.
"""

import asyncio
import contextvars
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from picker_fleet.admin.api import OperatedPool
from picker_fleet.admin.changes import FleetControls
from picker_fleet.admin.events import Events, SnapshotReader
from picker_fleet.admin.fleet_state import FleetStateCache
from picker_fleet.admin.views import FleetLists, FleetView
from picker_fleet.admission import budget_transfer
from picker_fleet.admission.failover import FailoverGate
from picker_fleet.admission.gate import Gate
from picker_fleet.admission.ledger import Ledger
from picker_fleet.admission.origins import Origins
from picker_fleet.admission.outage import unseen_s
from picker_fleet.admission.shared_gate import ServiceMeter, SharedGate
from picker_fleet.background import Work, count_failures
from picker_fleet.domain.budgets import BodyBudget
from picker_fleet.domain.config import Settings
from picker_fleet.domain.errors import StartupError
from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.domain.scorer_names import LatencyWeights
from picker_fleet.domain.sections import Kubernetes as KubernetesPool
from picker_fleet.endpoints.discovery import serving, source_of
from picker_fleet.endpoints.scraping import ScrapingTask
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.fleet.endpoint_health import Probes
from picker_fleet.fleet.heartbeat import HeartbeatTrigger, Membership
from picker_fleet.fleet.info import ReplicaInfo
from picker_fleet.grpc.certificates import Certificates
from picker_fleet.grpc.transport import Handler
from picker_fleet.ingress.context import (
    AllowedPaths,
    DrainGate,
    ExchangeContext,
    OpenRequests,
    new_flow_limit,
    read_limit,
)
from picker_fleet.ingress.ext_proc import eds
from picker_fleet.ingress.ext_proc.accesslog import Account
from picker_fleet.ingress.intake import Intake, selected_endpoints
from picker_fleet.scheduling.chooser import ScoringChooser, SessionTokens, with_in_flight
from picker_fleet.scheduling.endpoint_history import LatencyTracker, PrefixIndex
from picker_fleet.scheduling.route_stream import RouteStream
from picker_fleet.scheduling.scheduler import Scheduler
from picker_fleet.scheduling.scorers import SCRAPED_SCORERS
from picker_fleet.state.accounting_token import Keyring
from picker_fleet.state.connection import FailureDetector, PauseDetector
from picker_fleet.state.store import Store
from picker_fleet.state.subscriptions import listen
from picker_fleet.telemetry.logs import POOL, DecisionLines
from picker_fleet.telemetry.metrics import Metrics
from picker_fleet.telemetry.reference_metrics import ReferenceMetrics

if TYPE_CHECKING:
    from picker_fleet.telemetry.tracing import Traces

_IDS_AT_A_TIME = 64
_GOODBYE_S = 1.0  # deadline of the last calls to Redis and to a trace collector

_log = logging.getLogger(__name__)

Start = Callable[[Work, str], None]


class Pool:
    """One pool as the servers of the process see it. Create it in the event loop that runs it.

    Servers of requests use `context`, the admin server uses `operated`. `bodies` is the pool's budget for
    request bodies; `open_requests` counts the process's open requests. `is_alone`: the process has one pool.

    Raises:
        StartupError: tracing is configured but not installed.
    """

    def __init__(
        self,
        settings: Settings,
        replica: str,
        *,
        bodies: BodyBudget,
        open_requests: OpenRequests,
        certificates: Certificates | None = None,
        is_alone: bool = True,
    ) -> None:
        self.settings = settings
        self._replica = replica
        # A process with one pool has no label `pool` in metrics and log lines.
        self._labels = {} if is_alone else {"pool": settings.pool}
        self.parts = parts = assemble(settings, replica, certificates, self._labels)
        parts.metrics.follow_bodies(lambda: bodies.held_bytes)
        clock = asyncio.get_running_loop().time
        self.context = ExchangeContext(
            settings=settings,
            paths=AllowedPaths(settings.extproc.paths, passes=settings.extproc.unknown_paths == "pass"),
            reads=read_limit(settings.extproc, clock),
            bodies=bodies,
            new_flows=new_flow_limit(settings, clock),
            intake=Intake(
                settings,
                new_id=_ids().__next__,
                variant_key=lambda: parts.signing.variant_key,
                prefixes=parts.chooser,
                served_models=lambda: parts.scraping.readings.snapshot().models(),
            ),
            gate=parts.gate,
            origins=parts.origins,
            drain_gate=DrainGate(parts.gate),
            open_requests=open_requests,
            metrics=parts.metrics,
            lines=DecisionLines(clock, parts.chooser.explain, **self._labels),
            clock=clock,
            fill=parts.failover.fill,
            selected=_selected(parts.endpoints) if settings.extproc.conformance else None,
        )
        store, membership = parts.store, parts.membership
        self._fleet_state = FleetStateCache(store, settings.leases.replica_silence)
        view = FleetView(
            store,
            membership,
            parts.scraping.readings,
            parts.latencies,
            self._fleet_state,
            replica=replica,
            pool=settings.pool,
        )
        lists = FleetLists(store, membership, self._fleet_state, parts.chooser, replica)
        snapshots = SnapshotReader(
            view,
            lists,
            store.reads,
            decision_log=settings.decision_log.enabled,
            bands=settings.fair_request_queue.bands,
        )
        self.operated = OperatedPool(
            settings.pool, view, lists, FleetControls(store, membership, settings), Events(snapshots)
        )
        self._source = source_of(settings.discovery)

    @property
    def account(self) -> Account:
        """The parts that process the pool's access-log entries."""
        return Account(self.parts.gate, self.parts.metrics, self.parts.signing, self.parts.origins)

    def services(self) -> Mapping[str, Handler]:
        """The pool's gRPC handlers by path, besides exchanges and access logs."""
        failover, signing = self.parts.failover, self.parts.signing
        return {
            **eds.handlers(self.parts.endpoints),
            **budget_transfer.handlers(
                self.settings.pool,
                failover.transfer_budget,
                signing,
                lambda: self.parts.replica_info.grpc,
                count=failover.outage_count,
                ended_before=failover.ended_before,
            ),
        }

    def start(self, start: Start) -> None:
        """Pass each task that runs until the replica ends to `start`."""
        contextvars.copy_context().run(self._start, start)  # log lines of the tasks name the pool

    def _start(self, start: Start) -> None:
        if self._labels:
            POOL.set(self.settings.pool)
        settings, parts = self.settings, self.parts
        store, membership = parts.store, parts.membership
        count_failures(parts.metrics.background_failure)
        start(store.run, "redis-link")
        wake_ups = store.keys.wake(self._replica)
        start(partial(listen, settings.redis.url, wake_ups, parts.failover.on_event), "wake-ups")
        report = serving(settings.scheduling.endpoint_labels, membership.discovered)
        start(partial(self._source.watch, report), "discovery")
        if settings.discovery.kubernetes is not None:
            at = urlsplit(settings.redis.url)  # user and password are left out below
            fleet = f"{settings.pool} {at.netloc.rpartition('@')[2]} {at.path}"
            kubernetes, intake = settings.discovery.kubernetes, self.context.intake
            start(partial(_follow_objects, kubernetes, intake, membership, fleet), "objects")
        start(membership.run, "membership")
        start(parts.failover.run, "redis-watch")
        start(parts.scraping.run, "scraping")
        start(self._fleet_state.run, "fleet-state")
        start(self.operated.events.run, "events")
        start(parts.follow_routes, "routes")

    async def leave(self) -> None:
        """Report to the fleet that this replica leaves."""
        await self.parts.membership.leave(_GOODBYE_S)

    async def stop(self) -> None:
        """Send the last spans."""
        if self.parts.traces is not None:
            await self.parts.traces.stop(_GOODBYE_S)


async def _follow_objects(named: KubernetesPool, intake: Intake, membership: Membership, fleet: str) -> None:
    """Keep `intake` up to date with the API server's objectives and model rewrites."""
    from picker_kubernetes.objects import InferenceObjects  # needs the extra [kubernetes]

    await InferenceObjects(
        named.pool,
        named.namespace,
        fleet=fleet,
        report=lambda found: intake.use_live(found.priorities, found.splits, found.anything),
        publishes=lambda: membership.pulse is not None and membership.pulse.leader,
    ).run()


def _selected(endpoints: SnapshotCell) -> Callable[[bytes], tuple[str, ...]]:
    """The parser of the conformance suite's header that selects endpoints."""
    _log.warning("extproc.conformance is on: any client chooses endpoints")
    return lambda choice: selected_endpoints(choice, (each.address for each in endpoints.current.endpoints))


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a pool, not yet running. Requests call `gate`: `failover`, wrapped for tracing if that is
    configured. `failover` calls `shared` while Redis answers. `follow_routes` runs `routes`.
    """

    metrics: Metrics
    traces: "Traces | None"
    endpoints: SnapshotCell
    store: Store
    scraping: ScrapingTask
    latencies: LatencyTracker
    routes: RouteStream
    chooser: ScoringChooser
    shared: SharedGate
    failover: FailoverGate
    gate: Gate
    replica_info: ReplicaInfo
    membership: Membership
    signing: Keyring
    origins: Origins

    async def follow_routes(self) -> None:
        """Wait until the chooser first needs routes, then share them with other replicas until cancelled."""
        await self.chooser.routes_needed()
        await self.routes.run()


def assemble(
    settings: Settings,
    replica: str,
    certificates: Certificates | None = None,
    labels: Mapping[str, str] = MappingProxyType({}),
) -> Parts:
    """Build the parts of `replica` and connect them. Call it in the event loop that runs them.

    Replicas use `certificates` for TLS between each other; every metric has `labels`.

    Raises:
        StartupError: tracing is configured but not installed.
    """
    fleet = KnownFleet(settings)
    heartbeat_now = HeartbeatTrigger()
    bands = settings.fair_request_queue.bands
    metrics = Metrics((model.name for model in settings.models), labels, bands)
    endpoints = SnapshotCell()
    signing = Keyring()
    traces = _tracing(settings, replica)
    pause_detector = PauseDetector()
    failure_detector = FailureDetector(settings.redis.silence, settings.leases.inflight / 2)
    make_store: Callable[..., Store] = Store
    traced_gate: Callable[[Gate], Gate] | None = None
    if traces is not None:
        from picker_fleet.admission.traced import TracedGate, TracedStore

        make_store, traced_gate = partial(TracedStore, traces=traces), partial(TracedGate, traces=traces)
    store: Store = make_store(
        settings.redis.url,
        pool=settings.pool,
        replica=replica,
        failure_detector=failure_detector,
        pause_detector=pause_detector,
        connect_timeout_s=settings.redis.connect_timeout,
        metrics=metrics,
        signing=signing,
        bands=bands,
    )
    probes = Probes(
        store,
        endpoints,
        metrics,
        readings=lambda: scraping.readings.snapshot(),
        in_flight=lambda: fleet.in_flight,
        ejected=metrics.endpoint_ejected,
    )
    scraping: ScrapingTask = ScrapingTask(
        settings.redis.url,
        settings.pool,
        replica,
        scraping=settings.scraping,
        heartbeat_s=settings.leases.heartbeat,
        picked_by=lambda: not SCRAPED_SCORERS.isdisjoint(fleet.config.settings.scheduling.scorers),
        busy=lambda: fleet.busy,
        live=lambda: fleet.live,
        endpoints=endpoints,
        meter=probes,
    )
    index, latencies = PrefixIndex(), LatencyTracker()
    clock = asyncio.get_running_loop().time
    routes = RouteStream(
        settings.redis.url, stream=store.keys.routes, replica=replica, index=index, latencies=latencies
    )
    chooser = ScoringChooser(
        _scheduler(settings),
        endpoints,
        readings=scraping.readings.snapshot,
        in_flight=partial(getattr, fleet, "in_flight"),
        index=index,
        latencies=latencies,
        routes=routes,
        clock=clock,
        adapters=settings.scheduling.adapters,
        latency_weights=LatencyWeights(**settings.scheduling.latency.model_dump()),
        sessions=SessionTokens(signing, endpoints),
        fallbacks=settings.scheduling.fallbacks,
    )
    metrics.follow_scores(chooser.scores)
    in_tokens = settings.request_queue_controller.unit == "tokens"
    service = ServiceMeter()
    shared: SharedGate = SharedGate(
        store,
        metrics=metrics,
        endpoints=endpoints,
        fallbacks=settings.scheduling.fallbacks,
        on_unknown_pool=heartbeat_now,
        answer_tokens=settings.fair_request_queue.default_answer_tokens if in_tokens else None,
        chooser=chooser,
        record_cost=service.record,
        keys=signing,
        pause_detector=pause_detector,
        ledger=Ledger(clock, 2 * unseen_s(settings.leases.access_log_interval)),
    )
    failover: FailoverGate = FailoverGate(
        store,
        shared,
        replica=replica,
        metrics=metrics,
        endpoints=endpoints,
        chooser=chooser,
        failure_detector=failure_detector,
        report_s=settings.leases.access_log_interval,
        fleet=fleet,
        heartbeat_now=heartbeat_now,
        peer_client=budget_transfer.GrpcPeers(settings.pool, signing, certificates),
    )
    replica_info = ReplicaInfo(shared, service, clock)
    if settings.admin.reference_metrics:
        named = settings.discovery.kubernetes
        metrics.add(
            ReferenceMetrics(
                named.pool if named is not None else settings.pool,
                metrics,
                readings=scraping.readings.snapshot,
                running=shared.running_by_model,
            ).families
        )

    membership = Membership(
        store,
        shared,
        settings,
        endpoints=endpoints,
        metrics=metrics,
        replica_info=replica_info,
        fleet=fleet,
        failover=failover,
        heartbeat_now=heartbeat_now,
        on_config=lambda config: chooser.use_scheduler(_scheduler(config.settings)),
        on_suspects=scraping.suspect,
    )
    return Parts(
        metrics, traces, endpoints, store, scraping, latencies, routes, chooser, shared, failover,
        traced_gate(failover) if traced_gate else failover, replica_info, membership, signing,
        Origins(store, signing, clock),
    )  # fmt: skip


def _ids() -> Iterator[str]:
    """Random UUIDs (RFC 9562, version 4), with one system call for the random bytes of many ids."""
    while True:
        random = secrets.token_hex(16 * _IDS_AT_A_TIME)
        for at in range(0, len(random), 32):
            digits = random[at : at + 32]
            variant = "89ab"[int(digits[16], 16) & 3]
            yield f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


def _scheduler(settings: Settings) -> Scheduler | None:
    """The scheduler that ranks endpoints under `settings`; None without scorers."""
    weights = settings.scheduling.scorers
    return Scheduler(with_in_flight(weights)) if weights else None


def _tracing(settings: Settings, replica: str) -> "Traces | None":
    """The exporter of spans; None, without an import of OpenTelemetry, unless tracing is configured."""
    if not settings.tracing.enabled:
        return None
    try:
        from picker_fleet.telemetry.tracing import Traces
    except ImportError as fault:
        raise StartupError(f"tracing needs picker-fleet[tracing], which is not installed: {fault}") from None
    return Traces.to_collector(settings.tracing, replica=replica, pool=settings.pool)
