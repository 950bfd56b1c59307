"""One replica: every part, put together and run in one event loop until it is told to go."""

import asyncio
import contextlib
import logging
import random
import secrets
import signal
import socket
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from app.admin import api
from app.admin import server as admin_server
from app.admin.events import Events
from app.admin.fleet_controls import FleetControls
from app.admin.fleet_lists import FleetLists
from app.admin.fleet_view import FleetView
from app.admin.snapshot import Snapshots
from app.admin.standing import Lookout
from app.admission.gate import Gate
from app.admission.introduction import Introduction
from app.admission.membership import Membership
from app.admission.probes import Probes
from app.admission.service import ServiceMeter
from app.admission.shared import SharedGate
from app.admission.sturdy import SturdyGate
from app.config import Settings, split_host_port
from app.endpoints.discovery import source_of
from app.endpoints.snapshot import SnapshotCell
from app.errors import StartupError
from app.extproc import accesslog, eds, shares
from app.extproc.door import Door
from app.extproc.exchange import Desk
from app.extproc.server import Server
from app.extproc.service import Service
from app.intake import Intake
from app.scheduling.chooser import Chooser, LeastLoaded, weights_of
from app.scheduling.feed import RouteFeed
from app.scheduling.latency import LatencyBook
from app.scheduling.prefix import PrefixIndex
from app.scheduling.scheduler import Scheduler
from app.scraping.engines import engine_of
from app.scraping.task import ScrapingTask
from app.state.store import Store
from app.state.wakeups import listen
from app.telemetry.decisions import DecisionLines
from app.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from app.telemetry.tracing import Traces

_log = logging.getLogger(__name__)
_GOODBYE_S = 1.0


@dataclass(frozen=True, slots=True)
class Bound:
    """Where a replica listens."""

    id: str
    grpc: str  # host:port
    admin: str  # http://host:port


async def serve(settings: Settings, replica: str, on_bound: Callable[[Bound], None]) -> None:
    """Run one replica until SIGTERM or SIGINT, then drain and return.

    `on_bound` is called once both listeners are bound. Redis may be away: the replica starts, says that it
    is not ready, and joins when Redis comes.

    Raises:
        StartupError: a listener cannot be bound, or discovery has no list to begin with.
    """
    metrics = Metrics(model.name for model in settings.models)
    endpoints = SnapshotCell()
    traces = _tracing(settings, replica)
    make_store: Callable[..., Store] = Store
    gate_of: Callable[[Gate], Gate] = _as_it_is
    if traces is not None:
        make_store, gate_of = _traced(traces)
    store: Store = make_store(
        settings.redis.url,
        pool=settings.pool,
        replica=replica,
        call_timeout_s=settings.redis.call_timeout,
        connect_timeout_s=settings.redis.connect_timeout,
        metrics=metrics,
        on_news=lambda what, request_id: gate.hear(what, request_id),
        on_dequeued=metrics.dequeued,
        on_adopted=metrics.adopted,
    )
    scraping = ScrapingTask(
        settings.redis.url,
        settings.pool,
        replica,
        scraping=settings.scraping,
        engine=engine_of(settings.scraping.engine, settings.scraping.series),
        heartbeat_s=settings.leases.heartbeat,
        live=lambda: membership.live,
        endpoints=endpoints,
        meter=Probes(store, endpoints, metrics),
    )
    index, latencies = PrefixIndex(), LatencyBook()
    names = {scorer.name: scorer.weight for scorer in settings.scheduling.scorers}
    feed = None
    if names.keys() & {"prefix-affinity", "latency"}:
        feed = RouteFeed(
            settings.redis.url, stream=store.keys.routes, replica=replica, index=index, latencies=latencies
        )
    chooser = LeastLoaded(endpoints)
    if names:
        chooser = Chooser(
            Scheduler(weights_of(names)),
            endpoints,
            readings=scraping.board.snapshot,
            in_flight=lambda: membership.in_flight,
            index=index,
            latencies=latencies,
            feed=feed,
            clock=asyncio.get_running_loop().time,
            adapters=settings.scheduling.adapters,
        )
    in_tokens = settings.request_queue_controller.unit == "tokens"
    service = ServiceMeter()
    gate: SharedGate = SharedGate(
        store,
        metrics=metrics,
        endpoints=endpoints,
        fallbacks=settings.scheduling.fallbacks,
        on_unknown_pool=lambda: membership.poke(),
        answer_tokens=settings.fair_request_queue.default_answer_tokens if in_tokens else None,
        chooser=chooser,
        service=service,
    )
    sturdy = SturdyGate(
        store,
        gate,
        replica=replica,
        metrics=metrics,
        endpoints=endpoints,
        chooser=chooser,
        budget_s=settings.redis.decision_budget,
        report_s=settings.leases.access_log_interval,
        effective=lambda: membership.effective,
        load=lambda: membership.in_flight,
        poke=lambda: membership.poke(),
        glance=lambda: membership.glance(),
        via=shares.GrpcPeers(settings.pool),
    )
    clock = asyncio.get_running_loop().time
    about = Introduction(gate, service, clock)
    membership: Membership = Membership(
        store, gate, settings, endpoints=endpoints, metrics=metrics, about=about, watch=sturdy
    )
    outer = gate_of(sturdy)
    door = Door(outer)
    intake = Intake(settings, new_id=lambda: str(uuid.uuid4()), choose=random.random)
    desk = Desk(
        settings=settings,
        intake=intake,
        gate=outer,
        door=door,
        metrics=metrics,
        lines=DecisionLines(clock),
        clock=clock,
    )
    grpc_server = Server(
        Service(desk),
        door,
        settings.extproc,
        extra=(
            accesslog.handler(outer, metrics),
            eds.handler(endpoints),
            shares.handler(settings.pool, sturdy.lend),
        ),
    )
    lookout = Lookout(store, settings.leases.replica_silence)
    view = FleetView(
        store, membership, scraping.board, latencies, lookout, replica=replica, pool=settings.pool
    )
    lists = FleetLists(store, membership, lookout, chooser, replica)
    controls = FleetControls(store, membership, settings)
    snapshots = Snapshots(view, lists, store.reads, logging=settings.decision_log.enabled)
    events = Events(snapshots)
    stopping = _on_signal()
    source = source_of(settings.discovery)

    port = await grpc_server.start()
    try:
        api_app = api.create(view, lists, controls, metrics, settings, events)
        async with admin_server.serving(api_app, settings.admin.listen) as admin:
            host, _ = split_host_port(settings.extproc.listen)
            about.reached(admin=f"http://{admin}", grpc=f"{host}:{port}")
            on_bound(Bound(replica, f"{host}:{port}", f"http://{admin}"))
            async with _background() as start:
                start(store.run(), "redis-link")
                start(listen(settings.redis.url, store.keys.wake(replica), gate.hear), "wake-ups")
                start(source.watch(membership.discovered), "discovery")
                start(membership.run(), "membership")
                start(sturdy.run(), "redis-watch")
                start(scraping.run(), "scraping")
                start(events.run(), "events")
                if feed is not None:
                    start(feed.run(), "routes")
                if isinstance(chooser, Chooser):
                    start(_tell_scores(chooser, metrics, settings.leases.heartbeat), "scores")
                start(_announce(membership, grpc_server), "readiness")
                await stopping.wait()
                _log.info("draining")
                await grpc_server.drain()
                await membership.leave(_GOODBYE_S)
    finally:
        await grpc_server.stop()
        if traces is not None:
            await traces.stop(_GOODBYE_S)


def _tracing(settings: Settings, replica: str) -> "Traces | None":
    """Where spans go; None, and nothing of OpenTelemetry imported, unless they are configured."""
    if not settings.tracing.enabled:
        return None
    try:
        from app.telemetry.tracing import Traces
    except ImportError as fault:
        raise StartupError(f"tracing needs picker-fleet[tracing], which is not installed: {fault}") from None
    return Traces.to_collector(settings.tracing, replica=replica, pool=settings.pool)


def _traced(traces: "Traces") -> "tuple[Callable[..., Store], Callable[[Gate], Gate]]":
    """What makes the store, and what is put around the gate, where requests are traced."""
    from app.admission.traced import TracedGate, TracedStore

    return partial(TracedStore, traces=traces), partial(TracedGate, traces=traces)


def _as_it_is(gate: Gate) -> Gate:
    return gate


async def _announce(membership: Membership, server: Server) -> None:
    """Readiness follows the first contact with a pool that may admit."""
    await membership.known()
    await server.set_ready(True)
    _log.info("ready")
    await asyncio.Event().wait()


async def _tell_scores(chooser: Chooser, metrics: Metrics, interval_s: float) -> None:
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
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping


def new_incarnation() -> str:
    """An id no replica has had: the host's name and a random part, fresh at each start."""
    return f"{socket.gethostname()[:40]}-{secrets.token_hex(4)}"
