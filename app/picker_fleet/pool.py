"""One pool of a replica: builds the tree of the pool's parts and starts the background tasks.

`serve.py` makes a `Pool` for each configured pool, and then the servers that the pools share. Pools
share these servers, the budget for request bodies and the event loop, and nothing else.
"""

import asyncio
import contextvars
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from picker_fleet.admin.api import OperatedPool
from picker_fleet.admin.changes import FleetControls
from picker_fleet.admin.events import Events, SnapshotReader
from picker_fleet.admin.fleet_state import FleetStateCache
from picker_fleet.admin.tenants import TenantTree
from picker_fleet.admin.usage import UsageExport
from picker_fleet.admin.views import FleetView
from picker_fleet.admission import budget_transfer
from picker_fleet.admission.admission import Admission
from picker_fleet.admission.failover import FailoverTimes
from picker_fleet.admission.ledger import ServiceMeter
from picker_fleet.admission.origins import Origins
from picker_fleet.background import Work, count_failures
from picker_fleet.domain.budgets import BodyBudget
from picker_fleet.domain.config import Settings
from picker_fleet.domain.errors import StartupError
from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.domain.sections import Kubernetes as KubernetesPool
from picker_fleet.endpoints.discovery import source_of
from picker_fleet.endpoints.kv_events import KvEventReader
from picker_fleet.endpoints.readings import MetricsCache
from picker_fleet.endpoints.scraping import ScrapingTask
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.endpoints.stages import serving
from picker_fleet.fleet.endpoint_health import Probes
from picker_fleet.fleet.heartbeat import HeartbeatTrigger, Membership
from picker_fleet.fleet.info import ReplicaInfo
from picker_fleet.fleet.limits import LimitKeeper
from picker_fleet.fleet.tenant_nodes import nodes_file
from picker_fleet.fleet.usage import UsageMeter
from picker_fleet.grpc.certificates import Certificates
from picker_fleet.grpc.transport import Handler
from picker_fleet.ingress.context import (
    AllowedPaths,
    ExchangeContext,
    OpenRequests,
    new_flow_limit,
    read_limit,
)
from picker_fleet.ingress.ext_proc import eds
from picker_fleet.ingress.ext_proc.accesslog import Account
from picker_fleet.ingress.headers import selected_endpoints
from picker_fleet.ingress.intake import Intake
from picker_fleet.scheduling.cache_feedback import CacheWatch
from picker_fleet.scheduling.chooser import EndpointChooser
from picker_fleet.scheduling.extension_calls import Extensions
from picker_fleet.scheduling.route_stream import RouteStream
from picker_fleet.scheduling.token_prefixes import TokenPrefixes
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
_GOODBYE_S = 1.0  # seconds that a stopping replica gives its last calls to Redis and to the trace collector

_log = logging.getLogger(__name__)

Start = Callable[[Work, str], None]


class Pool:
    """One pool with all its parts, for the servers of the process. Create a `Pool` in the event loop in which
    the pool will run.

    The constructor builds the parts from the lowest up and passes to each part the parts that it calls.
    The ext_proc and HTTP servers use a pool's `context`, the admin server its `operated`.
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
        """`bodies` is the pool's budget for request bodies; `open_requests` counts the process's open
        requests; replicas use `certificates` among each other; `is_alone` says that the process has one pool.

        Raises:
            StartupError: tracing is configured but not installed, or an extension cannot be made.
        """
        self.settings, self.replica = settings, replica
        # Metrics and log lines of a process with only one pool have no label `pool`.
        self._labels = {} if is_alone else {"pool": settings.pool}
        clock, url = asyncio.get_running_loop().time, settings.redis.url
        bands = settings.fair_request_queue.bands

        # Create the data that several parts of the pool share.
        self.fleet, self.heartbeat_now = KnownFleet(settings), HeartbeatTrigger()
        # Send a heartbeat when an Envoy acknowledges endpoints: the fleet's leader may wait for this.
        self.endpoints = SnapshotCell(on_acknowledged=partial(self.heartbeat_now, full=False))
        self.signing = Keyring()
        self.readings = MetricsCache(settings.scraping.stale_after, clock)
        self.metrics = Metrics((model.name for model in settings.models), self._labels, bands)
        self.metrics.follow_bodies(bodies)

        # Create the parts that speak Redis.
        self.traces = _tracing(settings, replica)
        pause_detector = PauseDetector()
        failure_detector = FailureDetector(settings.redis.silence, settings.leases.inflight / 2)
        self.store = Store(
            url,
            pool=settings.pool,
            replica=replica,
            failure_detector=failure_detector,
            pause_detector=pause_detector,
            connect_timeout_s=settings.redis.connect_timeout,
            metrics=self.metrics,
            signing=self.signing,
            bands=bands,
        )

        # Create the parts for endpoints, scraping and scheduling.
        self.routes = RouteStream(url, stream=self.store.keys.routes, replica=replica, clock=clock)
        caches = CacheWatch(self.routes, self.readings)
        port = settings.scheduling.kv_events_port
        self.tokens = None if port is None else TokenPrefixes(self.routes, settings.scraping, clock)
        self.scraping = ScrapingTask(
            url,
            settings.pool,
            replica,
            scraping=settings.scraping,
            heartbeat_s=settings.leases.heartbeat,
            fleet=self.fleet,
            endpoints=self.endpoints,
            readings=self.readings,
            meter=Probes(self.store, self.endpoints, self.metrics, self.readings, self.fleet, clock, caches),
            kv_events=None if port is None or self.tokens is None else KvEventReader(port, self.tokens),
        )
        extensions = Extensions(settings, self.metrics.extension_fault)
        self.chooser = EndpointChooser(
            self.fleet,
            self.endpoints,
            readings=self.readings,
            routes=self.routes,
            keys=self.signing,
            clock=clock,
            extensions=extensions,
        )
        self.metrics.follow_scores(self.chooser.scores)

        # Create the parts for admission.
        service = ServiceMeter()
        tenants = settings.tenants
        usage = UsageMeter(self.store, tenants.prices) if tenants is not None else None
        self.admission = Admission(
            self.store,
            replica=replica,
            fleet=self.fleet,
            metrics=self.metrics,
            endpoints=self.endpoints,
            chooser=self.chooser,
            keys=self.signing,
            failure_detector=failure_detector,
            pause_detector=pause_detector,
            heartbeat_now=self.heartbeat_now,
            peer_client=budget_transfer.GrpcPeers(settings.pool, self.signing, certificates),
            times=FailoverTimes(settings.leases.access_log_interval),
            record_cost=service.record,
            record_usage=None if usage is None else usage.count,
            traces=self.traces,
        )
        self.origins = Origins(self.store, self.signing, clock)
        if settings.admin.reference_metrics:
            named = settings.discovery.kubernetes
            ReferenceMetrics(
                named.pool if named is not None else settings.pool,
                self.metrics,
                readings=self.readings.snapshot,
                running=self.admission.ledger.running_by_model,
            )

        # Create the parts for heartbeats and fleet membership.
        self.replica_info = ReplicaInfo(self.admission.queue, service, clock)
        self.membership = Membership(
            self.store,
            self.admission.queue,
            settings,
            endpoints=self.endpoints,
            metrics=self.metrics,
            replica_info=self.replica_info,
            fleet=self.fleet,
            failover=self.admission.failover,
            heartbeat_now=self.heartbeat_now,
            limits=LimitKeeper(self.store, self.fleet, self.readings, self.routes.model, clock, self.metrics),
            on_config=self.chooser.follow,
            on_suspects=self.scraping.suspect,
            usage=usage,
        )
        self._source = source_of(settings.discovery)

        # Create the parts that read requests.
        selected = None
        if settings.extproc.conformance:
            _log.warning("extproc.conformance is on: any client can choose endpoints")
            selected = partial(selected_endpoints, self.endpoints)
        self.context = ExchangeContext(
            settings=settings,
            paths=AllowedPaths(settings.extproc.paths, passes=settings.extproc.unknown_paths == "pass"),
            reads=read_limit(settings.extproc, clock),
            bodies=bodies,
            new_flows=new_flow_limit(settings, clock),
            intake=Intake(
                settings,
                new_id=_ids().__next__,
                keys=self.signing,
                prefixes=self.chooser,
                served_models=self.readings.models,
                prompt_line=self.fleet.prompt_line,
                estimate_cost=extensions.cost,
            ),
            gate=self.admission,
            chooser=self.chooser,
            origins=self.origins,
            open_requests=open_requests,
            metrics=self.metrics,
            lines=DecisionLines(clock, self.chooser.explain, **self._labels),
            clock=clock,
            fill=self.admission.fill,
            selected=selected,
            tokens=self.tokens,
        )

        # Create the parts of the admin API.
        self._fleet_state = FleetStateCache(self.store, settings.leases.replica_silence)
        view = FleetView(
            self.store,
            self.membership,
            self.readings,
            self.routes.latencies,
            self._fleet_state,
            self.chooser,
            replica=replica,
            pool=settings.pool,
        )
        snapshots = SnapshotReader(view, self.store.reads, decision_log=settings.decision_log.enabled)
        controls = FleetControls(self.store, self.membership, settings)
        self.operated = OperatedPool(
            settings.pool,
            view,
            controls,
            Events(snapshots),
            self.metrics,
            TenantTree(self.store, self._fleet_state, self.fleet, self.membership.follow_tenants),
            UsageExport(self.store, settings.leases),
        )

    @property
    def account(self) -> Account:
        """The parts that process the pool's access-log entries."""
        return Account(self.admission, self.metrics, self.signing, self.origins)

    def services(self) -> Mapping[str, Handler]:
        """The pool's gRPC handlers by path, besides exchanges and access logs."""
        failover = self.admission.failover
        return {
            **eds.handlers(self.endpoints),
            **budget_transfer.handlers(
                self.settings.pool,
                failover.transfer_budget,
                self.signing,
                self.replica_info.grpc_address,
                count=failover.outage_count,
                ended_before=failover.ended_before,
                ended=failover.ended,
                redis_use=failover.redis_use,
            ),
        }

    def start(self, start: Start) -> None:
        """Start each background task of this pool by calling `start`."""
        contextvars.copy_context().run(self._start, start)  # makes the tasks' log lines name the pool

    def _start(self, start: Start) -> None:
        if self._labels:
            POOL.set(self.settings.pool)
        settings = self.settings
        count_failures(self.metrics.background_failure)
        start(self.store.run, "redis-link")
        wake_ups = self.store.keys.wake(self.replica)
        start(partial(listen, settings.redis.url, wake_ups, self.admission.failover.on_event), "wake-ups")
        scheduling = settings.scheduling
        report = serving(scheduling.endpoint_labels, scheduling.stages, self.membership.discovered)
        start(partial(self._source.watch, report), "discovery")
        if (nodes := nodes_file(settings)) is not None:
            start(partial(nodes.watch, self.membership.tenants_found), "tenants")
        if settings.discovery.kubernetes is not None:
            start(partial(self._follow_objects, settings.discovery.kubernetes), "objects")
        start(self.membership.run, "membership")
        start(self.admission.failover.run, "redis-watch")
        start(self.scraping.run, "scraping")
        start(self._fleet_state.run, "fleet-state")
        start(self.operated.events.run, "events")
        start(self.routes.run, "routes")
        if self.tokens is not None:
            start(self.tokens.run, "tokenize")

    async def _follow_objects(self, named: KubernetesPool) -> None:
        """Keep the request intake up to date with the objectives and model rewrites in the Kubernetes API."""
        from picker_kubernetes.objects import InferenceObjects  # needs picker-fleet[kubernetes]

        at = urlsplit(self.settings.redis.url)  # user and password are left out below
        await InferenceObjects(
            named.pool,
            named.namespace,
            fleet=f"{self.settings.pool} {at.netloc.rpartition('@')[2]} {at.path}",
            report=self.context.intake.use_live,
            publishes=self.membership.leads,
        ).run()

    async def leave(self) -> None:
        """Report to the fleet that this replica leaves."""
        await self.membership.leave(_GOODBYE_S)

    async def stop(self) -> None:
        """Export the last trace spans."""
        if self.traces is not None:
            await self.traces.stop(_GOODBYE_S)


def _ids() -> Iterator[str]:
    """Random UUIDs (RFC 9562, version 4), with one system call for the random bytes of many ids."""
    while True:
        random = secrets.token_hex(16 * _IDS_AT_A_TIME)
        for at in range(0, len(random), 32):
            digits = random[at : at + 32]
            variant = "89ab"[int(digits[16], 16) & 3]
            yield f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


def _tracing(settings: Settings, replica: str) -> "Traces | None":
    """The exporter of spans; None if tracing is not configured (OpenTelemetry is then never imported)."""
    if not settings.tracing.enabled:
        return None
    try:
        from picker_fleet.telemetry.tracing import Traces
    except ImportError as fault:
        raise StartupError(f"tracing needs picker-fleet[tracing], which is not installed: {fault}") from None
    return Traces.to_collector(settings.tracing, replica=replica, pool=settings.pool)
