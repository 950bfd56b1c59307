"""The command `picker serve`: one replica, put together and run in one event loop until a signal ends it."""

import argparse
import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import random
import secrets
import signal
import socket
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from picker_fleet import chart_flags
from picker_fleet.admin import api
from picker_fleet.admin import server as admin_server
from picker_fleet.admin.changes import FleetControls
from picker_fleet.admin.events import Events, SnapshotReader
from picker_fleet.admin.fleet_state import FleetStateCache
from picker_fleet.admin.views import FleetLists, FleetView
from picker_fleet.admission.gate import Gate
from picker_fleet.admission.shared_gate import ServiceMeter, SharedGate
from picker_fleet.config import Settings, load
from picker_fleet.endpoints.discovery import source_of
from picker_fleet.endpoints.scraping import ScrapingTask
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.errors import ConfigError, StartupError
from picker_fleet.ext_authz.server import CheckServer
from picker_fleet.ext_authz.settle import Placements
from picker_fleet.extproc import accesslog, budget_transfer, eds
from picker_fleet.extproc.certificates import Certificates
from picker_fleet.extproc.context import (
    AllowedPaths,
    BodyBudget,
    DrainGate,
    ExchangeContext,
    OpenRequests,
    UploadDeadlines,
    new_flow_limit,
    read_limit,
)
from picker_fleet.extproc.exchange import ExchangeService
from picker_fleet.extproc.server import Server
from picker_fleet.failover.gate import FailoverGate
from picker_fleet.intake import Intake, selected_endpoints
from picker_fleet.replica.endpoint_health import Probes
from picker_fleet.replica.heartbeat import HeartbeatTrigger, KnownFleet, Membership
from picker_fleet.replica.info import ReplicaInfo
from picker_fleet.scheduling.chooser import ScoringChooser, SessionTokens, with_in_flight
from picker_fleet.scheduling.endpoint_history import LatencyTracker, PrefixIndex
from picker_fleet.scheduling.route_stream import RouteStream
from picker_fleet.scheduling.scheduler import Scheduler
from picker_fleet.scheduling.scorers import SCRAPED_SCORERS, LatencyWeights
from picker_fleet.sections import Kubernetes as KubernetesPool
from picker_fleet.sections import Tls, engine_of
from picker_fleet.state.accounting_token import Keyring
from picker_fleet.state.connection import FailureDetector, PauseDetector
from picker_fleet.state.store import Store
from picker_fleet.state.subscriptions import listen
from picker_fleet.telemetry import logs
from picker_fleet.telemetry.logs import DecisionLines
from picker_fleet.telemetry.metrics import Metrics
from picker_fleet.telemetry.reference_metrics import ReferenceMetrics
from picker_fleet.units import is_loopback, split_host_port

if TYPE_CHECKING:
    from picker_fleet.telemetry.tracing import Traces

_log = logging.getLogger(__name__)
_GOODBYE_S = 1.0


@dataclass(frozen=True, slots=True)
class Bound:
    """Where a replica listens."""

    id: str
    grpc: str  # host:port
    admin: str  # http://host:port
    http: str | None  # host:port of mode `http`, if it is served


async def serve(settings: Settings, replica: str, on_bound: Callable[[Bound], None]) -> None:
    """Run one replica until SIGTERM or SIGINT, then drain and return.

    `on_bound` is called once both listeners are bound. Redis may be away: the replica starts, says that it
    is not ready, and joins when Redis comes.

    Raises:
        StartupError: a listener cannot be bound, or discovery has no list to begin with.
    """
    parts = assemble(settings, replica)
    store, membership = parts.store, parts.membership
    clock = asyncio.get_running_loop().time
    drain_gate = DrainGate(parts.gate)
    bodies = BodyBudget(settings.extproc.max_buffered_bytes)
    parts.metrics.follow_bodies(lambda: bodies.held_bytes)
    context = ExchangeContext(
        settings=settings,
        paths=AllowedPaths(settings.extproc.paths),
        reads=read_limit(settings.extproc, clock),
        bodies=bodies,
        new_flows=new_flow_limit(settings, clock),
        intake=Intake(
            settings,
            new_id=lambda: str(uuid.uuid4()),
            choose=random.random,
            prefixes=parts.chooser,
        ),
        gate=parts.gate,
        drain_gate=drain_gate,
        open_requests=OpenRequests(),
        metrics=parts.metrics,
        lines=DecisionLines(clock, parts.chooser.explain),
        clock=clock,
        fill=parts.failover.fill,
        selected=_selected(parts.endpoints) if settings.extproc.conformance else None,
    )
    uploads = UploadDeadlines(clock, settings.extproc.body_timeout)
    certificates = parts.certificates
    http_certificates = _certificates(settings.http.tls, "http.tls", "http/1.1")
    grpc_server = Server(
        ExchangeService(context, uploads),
        drain_gate,
        settings.extproc,
        services={
            **accesslog.handlers(
                parts.gate, parts.metrics, parts.signing, settings.extproc.metadata_namespace
            ),
            **eds.handlers(parts.endpoints),
            **budget_transfer.handlers(
                settings.pool,
                parts.failover.transfer_budget,
                parts.signing,
                lambda: parts.replica_info.grpc,
                count=parts.failover.outage_count,
                ended_before=parts.failover.ended_before,
            ),
        },
        certificates=certificates,
    )
    fleet_state = FleetStateCache(store, settings.leases.replica_silence)
    view = FleetView(
        store,
        membership,
        parts.scraping.readings,
        parts.latencies,
        fleet_state,
        replica=replica,
        pool=settings.pool,
    )
    lists = FleetLists(store, membership, fleet_state, parts.chooser, replica)
    controls = FleetControls(store, membership, settings)
    snapshots = SnapshotReader(view, lists, store.reads, decision_log=settings.decision_log.enabled)
    events = Events(snapshots)
    source = source_of(settings.discovery)
    stopping = _on_signal()

    port = await grpc_server.start()
    checks: CheckServer | None = None
    if settings.http.listen is not None:
        longest_s = settings.http.longest_request
        placements = Placements(parts.gate, parts.metrics, parts.signing, longest_s, clock)
        checks = CheckServer(context, settings.http.listen, placements, http_certificates)
    try:
        http_port = await checks.start() if checks is not None else 0
        api_app = api.create(view, lists, controls, parts.metrics, settings, events)
        async with admin_server.serving(api_app, settings.admin.listen) as admin:
            host, _ = split_host_port(settings.extproc.listen)
            parts.replica_info.reached(admin=f"http://{admin}", grpc=f"{host}:{port}")
            if settings.admin.token is None and not is_loopback(split_host_port(admin)[0]):
                _log.warning("no admin.token: a proxy on this machine could change the fleet for anyone")
            http_host, _ = split_host_port(settings.http.listen or "-:0")
            http = f"{http_host}:{http_port}" if checks is not None else None
            on_bound(Bound(replica, f"{host}:{port}", f"http://{admin}", http))
            async with _background() as start:
                start(store.run(), "redis-link")
                start(
                    listen(settings.redis.url, store.keys.wake(replica), parts.shared.on_notification),
                    "wake-ups",
                )
                start(source.watch(membership.discovered), "discovery")
                if settings.discovery.kubernetes is not None:
                    start(
                        _follow_objects(settings.discovery.kubernetes, context.intake, membership), "objects"
                    )
                start(membership.run(), "membership")
                start(parts.failover.run(), "redis-watch")
                start(parts.scraping.run(), "scraping")
                start(fleet_state.run(), "fleet-state")
                start(events.run(), "events")
                start(uploads.run(), "uploads")
                start(parts.follow_routes(), "routes")
                start(_tell_scores(parts.chooser, parts.metrics, settings.leases.heartbeat), "scores")
                start(_announce(membership, grpc_server, checks), "readiness")
                if checks is not None:
                    start(checks.run(), "checks")
                for each in filter(None, (certificates, http_certificates)):
                    start(each.run(), "certificates")
                await stopping.wait()
                _log.info("draining")
                if checks is not None:
                    checks.drain()
                await grpc_server.drain()
                await membership.leave(_GOODBYE_S)
    finally:
        if checks is not None:
            await checks.stop()
        await grpc_server.stop()
        if parts.traces is not None:
            await parts.traces.stop(_GOODBYE_S)


async def _follow_objects(named: KubernetesPool, intake: Intake, membership: Membership) -> None:
    """Have `intake` follow the objectives and model rewrites of the API server."""
    from picker_fleet.replica.inference_objects import InferenceObjects  # needs the extra [kubernetes]

    await InferenceObjects(
        named.pool,
        named.namespace,
        report=lambda found: intake.use_live(found.bands, found.splits, found.anything),
        publishes=lambda: membership.pulse is not None and membership.pulse.leader,
    ).run()


def _selected(endpoints: SnapshotCell) -> Callable[[bytes], tuple[str, ...]]:
    """What reads the conformance suite's choice of endpoints."""
    _log.warning("extproc.conformance is on: any client chooses endpoints")
    return lambda choice: selected_endpoints(choice, (each.address for each in endpoints.current.endpoints))


def _certificates(tls: Tls | None, name: str, protocol: str) -> Certificates | None:
    return Certificates(tls, name, protocol) if tls is not None else None


async def _announce(membership: Membership, server: Server, checks: CheckServer | None) -> None:
    """Readiness follows the first contact with a pool that may admit."""
    await membership.known()
    server.set_ready(True)
    if checks is not None:
        checks.set_ready(True)
    _log.info("ready")
    await asyncio.Event().wait()


async def _tell_scores(chooser: ScoringChooser, metrics: Metrics, interval_s: float) -> None:
    """Show how the scorers see the endpoints; worked out here, so that no request pays for it."""
    while True:
        metrics.scores(chooser.scores())
        await asyncio.sleep(interval_s)


@contextlib.asynccontextmanager
async def _background() -> Any:
    """Tasks that live as long as the block; one that fails ends the replica with its own error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks: list[asyncio.Task[None]] = []

            def start(work: Coroutine[Any, Any, None], name: str) -> None:
                tasks.append(group.create_task(work, name=name))

            yield start
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as faults:
        # One part's failure cancels the rest; its own error says what happened.
        raise faults.exceptions[0] from None


def _on_signal() -> asyncio.Event:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_report_fault)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping


def _report_fault(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log a fault that nobody awaits, except that of a name's lookup: a connection that gave up waiting for
    it has its own error."""
    if not isinstance(context.get("exception"), socket.gaierror):
        loop.default_exception_handler(context)


def new_incarnation() -> str:
    """An id no replica has had: the end of the host's name and a random part, fresh at each start.

    Each waiting request's record in Redis has it, so it is short; `about` tells the whole name.
    """
    return f"{socket.gethostname().rsplit('-', 1)[-1][:8]}-{secrets.token_hex(4)}"


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
    certificates: Certificates | None

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
    certificates = _certificates(settings.extproc.tls, "extproc.tls", "h2")
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
        on_unavailable=lambda cause, why: failover.redis_lost(cause, why),
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
        in_flight=partial(getattr, fleet, "in_flight"),
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
            )
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
        gate_of(failover), replica_info, membership, signing, certificates,
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


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGE_BLOCK_BYTES = 512 * 1024  # larger than what honest requests are made of, smaller than what hurts
_KEPT_BYTES = 8 * 1024 * 1024  # of free memory at the heap's end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration (YAML)")
    levels = ("DEBUG", "INFO", "WARNING", "ERROR")
    parser.add_argument("--log-level", choices=levels, help="in place of the configuration's")
    chart_flags.add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 after a drain. Prints one JSON line once the listeners are bound."""
    settings, remarks = _settings(args)
    replica = new_incarnation()
    level = args.log_level or settings.logging.level
    logs.setup(level, style=settings.logging.format, replica=replica, pool=settings.pool)
    for remark in remarks:
        _log.warning("%s", remark)
    # Collecting seldom is worth a few per cent, since requests leave few cycles.
    gc.set_threshold(10_000, 20, 20)
    _give_large_blocks_back()
    uvloop.run(serve(settings, replica, _report))
    return 0


def _settings(args: argparse.Namespace) -> tuple[Settings, Sequence[str]]:
    """The settings, and what is to be said of the flags that they come from."""
    if chart_flags.given(args):
        return chart_flags.settings(args, os.environ)
    if args.config is None:
        raise ConfigError("--config FILE is needed, or --pool-name NAME in Kubernetes")
    if args.unknown:
        raise ConfigError(f"unrecognized arguments: {' '.join(args.unknown)}")
    return load(args.config, os.environ), ()


def _give_large_blocks_back() -> None:
    """Have the C library give large blocks back to the system as soon as they are free.

    By itself glibc keeps blocks of up to 32 MiB once it has seen such, in the heap of whichever thread asked:
    a replica that holds 120 MiB of bodies then has up to 280 MiB more than one that holds none, and with
    this 130 MiB.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library has another heap
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
        # Which else is 128 KiB from now on: each large prompt would take its memory from the system anew, and
        # one of 400 KB cost 40 % more CPU.
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _report(bound: Bound) -> None:
    print(json.dumps({"ready": True, **asdict(bound)}), flush=True)
