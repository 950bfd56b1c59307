"""What a replica decides with, put together: shared state, the gates before it, the choice of endpoints."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from picker_fleet.admission.gate import Gate
from picker_fleet.admission.shared_gate import SharedGate
from picker_fleet.config import Settings
from picker_fleet.endpoints.metrics_page import engine_of
from picker_fleet.endpoints.scraping import ScrapingTask
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.errors import StartupError
from picker_fleet.extproc import budget_transfer
from picker_fleet.failover.gate import FailoverGate
from picker_fleet.replica.endpoint_health import Probes
from picker_fleet.replica.heartbeat import HeartbeatTrigger, KnownFleet, Membership
from picker_fleet.replica.info import ReplicaInfo, ServiceMeter
from picker_fleet.scheduling.chooser import ScoringChooser, SessionTokens, with_in_flight
from picker_fleet.scheduling.endpoint_history import LatencyTracker, PrefixIndex
from picker_fleet.scheduling.route_stream import RouteStream
from picker_fleet.scheduling.scheduler import Scheduler
from picker_fleet.scheduling.scorers import SCRAPED_SCORERS, LatencyWeights
from picker_fleet.signing import Keyring
from picker_fleet.state.failure_detector import FailureDetector, PauseDetector
from picker_fleet.state.store import Store
from picker_fleet.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from picker_fleet.telemetry.tracing import Traces


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a replica, none of which runs yet. `gate` is what requests come to: it stands before
    `failover`, which stands before `shared`. `routes` runs in `follow_routes`.
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

    async def follow_routes(self) -> None:
        """Share routes with the other replicas, from when the chooser first needs them, until cancelled."""
        await self.chooser.routes_needed()
        await self.routes.run()


def assemble(settings: Settings, replica: str) -> Parts:
    """The parts of `replica`, each knowing those it needs. To be called in the event loop that runs them.

    Raises:
        StartupError: tracing is configured and not installed.
    """
    fleet = KnownFleet(settings)
    heartbeat_now = HeartbeatTrigger()
    metrics = Metrics(model.name for model in settings.models)
    endpoints = SnapshotCell()
    signing = Keyring()
    traces = _tracing(settings, replica)
    pause_detector = PauseDetector()
    failure_detector = FailureDetector(settings.redis.silence, settings.leases.inflight / 2)
    make_store: Callable[..., Store] = Store
    gate_of: Callable[[Gate], Gate] = _as_it_is
    if traces is not None:
        make_store, gate_of = _traced(traces)
    store: Store = make_store(
        settings.redis.url,
        pool=settings.pool,
        replica=replica,
        failure_detector=failure_detector,
        pause_detector=pause_detector,
        connect_timeout_s=settings.redis.connect_timeout,
        metrics=metrics,
        on_notification=lambda what, request_id: shared.on_notification(what, request_id),
        on_dequeued=metrics.dequeued,
        on_adopted=metrics.adopted,
        on_away=lambda cause, why: failover.redis_lost(cause, why),
        signing=signing,
    )
    scraping: ScrapingTask = ScrapingTask(
        settings.redis.url,
        settings.pool,
        replica,
        scraping=settings.scraping,
        engine=engine_of(settings.scraping.engine, settings.scraping.series),
        heartbeat_s=settings.leases.heartbeat,
        picked_by=lambda: any(
            scorer.weight and scorer.name in SCRAPED_SCORERS
            for scorer in fleet.config.settings.scheduling.scorers
        ),
        busy=lambda: any(fleet.in_flight.values()),
        live=lambda: fleet.live,
        endpoints=endpoints,
        meter=Probes(store, endpoints, metrics, lambda: scraping.readings.snapshot()),
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
        in_flight=lambda: fleet.in_flight,
        index=index,
        latencies=latencies,
        routes=routes,
        clock=clock,
        adapters=settings.scheduling.adapters,
        latency_weights=LatencyWeights(**settings.scheduling.latency.model_dump()),
        sessions=SessionTokens(signing, endpoints),
    )
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
        peer_client=budget_transfer.GrpcPeers(settings.pool, signing),
    )
    replica_info = ReplicaInfo(shared, service, clock)

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
        gate_of(failover), replica_info, membership, signing,
    )  # fmt: skip


def _scheduler(settings: Settings) -> Scheduler | None:
    """What ranks endpoints under `settings`; None where no scorer does."""
    weights = {scorer.name: scorer.weight for scorer in settings.scheduling.scorers}
    return Scheduler(with_in_flight(weights)) if weights else None


def _tracing(settings: Settings, replica: str) -> "Traces | None":
    """Where spans go; None, and nothing of OpenTelemetry imported, unless they are configured."""
    if not settings.tracing.enabled:
        return None
    try:
        from picker_fleet.telemetry.tracing import Traces
    except ImportError as fault:
        raise StartupError(f"tracing needs picker-fleet[tracing], which is not installed: {fault}") from None
    return Traces.to_collector(settings.tracing, replica=replica, pool=settings.pool)


def _traced(traces: "Traces") -> "tuple[Callable[..., Store], Callable[[Gate], Gate]]":
    """What makes the store, and what is put around the gate, where requests are traced."""
    from picker_fleet.admission.traced import TracedGate, TracedStore

    return partial(TracedStore, traces=traces), partial(TracedGate, traces=traces)


def _as_it_is(gate: Gate) -> Gate:
    return gate
