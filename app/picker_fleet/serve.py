"""One replica: every part, put together and run in one event loop until it is told to go."""

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
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from picker_fleet.admin import api
from picker_fleet.admin import server as admin_server
from picker_fleet.admin.changes import FleetControls
from picker_fleet.admin.events import Events, SnapshotReader
from picker_fleet.admin.fleet_state import FleetStateCache
from picker_fleet.admin.views import FleetLists, FleetView
from picker_fleet.allowlist import AllowedPaths
from picker_fleet.assembly import assemble
from picker_fleet.config import Settings, load
from picker_fleet.endpoints.discovery import source_of
from picker_fleet.extproc import accesslog, budget_transfer, eds
from picker_fleet.extproc.context import DrainGate, ExchangeContext
from picker_fleet.extproc.limits import BodyBudget, UploadDeadlines, new_flow_limit, read_limit
from picker_fleet.extproc.server import ExchangeService, Server
from picker_fleet.intake import Intake
from picker_fleet.replica.heartbeat import Membership
from picker_fleet.scheduling.chooser import ScoringChooser
from picker_fleet.state.subscriptions import listen
from picker_fleet.telemetry import logs
from picker_fleet.telemetry.logs import DecisionLines
from picker_fleet.telemetry.metrics import Metrics
from picker_fleet.units import is_loopback, split_host_port

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
            hashes=lambda: parts.chooser.needs_prefix_hashes,
        ),
        gate=parts.gate,
        drain_gate=drain_gate,
        metrics=parts.metrics,
        lines=DecisionLines(clock, parts.chooser.explain),
        clock=clock,
        fill=parts.failover.fill,
    )
    uploads = UploadDeadlines(clock, settings.extproc.body_timeout)
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
                settings.pool, parts.failover.transfer_budget, parts.signing, lambda: parts.replica_info.grpc
            ),
        },
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
    try:
        api_app = api.create(view, lists, controls, parts.metrics, settings, events)
        async with admin_server.serving(api_app, settings.admin.listen) as admin:
            host, _ = split_host_port(settings.extproc.listen)
            parts.replica_info.reached(admin=f"http://{admin}", grpc=f"{host}:{port}")
            if settings.admin.token is None and not is_loopback(split_host_port(admin)[0]):
                _log.warning("no admin.token: a proxy on this machine could change the fleet for anyone")
            on_bound(Bound(replica, f"{host}:{port}", f"http://{admin}"))
            async with _background() as start:
                start(store.run(), "redis-link")
                start(
                    listen(settings.redis.url, store.keys.wake(replica), parts.shared.on_notification),
                    "wake-ups",
                )
                start(source.watch(membership.discovered), "discovery")
                start(membership.run(), "membership")
                start(parts.failover.run(), "redis-watch")
                start(parts.scraping.run(), "scraping")
                start(fleet_state.run(), "fleet-state")
                start(events.run(), "events")
                start(uploads.run(), "uploads")
                start(parts.follow_routes(), "routes")
                start(_tell_scores(parts.chooser, parts.metrics, settings.leases.heartbeat), "scores")
                start(_announce(membership, grpc_server), "readiness")
                await stopping.wait()
                _log.info("draining")
                await grpc_server.drain()
                await membership.leave(_GOODBYE_S)
    finally:
        await grpc_server.stop()
        if parts.traces is not None:
            await parts.traces.stop(_GOODBYE_S)


async def _announce(membership: Membership, server: Server) -> None:
    """Readiness follows the first contact with a pool that may admit."""
    await membership.known()
    server.set_ready(True)
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
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping


def new_incarnation() -> str:
    """An id no replica has had: the end of the host's name and a random part, fresh at each start.

    Each waiting request's record in Redis has it, so it is short; `about` tells the whole name.
    """
    return f"{socket.gethostname().rsplit('-', 1)[-1][:8]}-{secrets.token_hex(4)}"


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGE_BLOCK_BYTES = 512 * 1024  # larger than what honest requests are made of, smaller than what hurts
_KEPT_BYTES = 8 * 1024 * 1024  # of free memory at the heap's end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="configuration (YAML)")
    levels = ("DEBUG", "INFO", "WARNING", "ERROR")
    parser.add_argument("--log-level", choices=levels, help="in place of the configuration's")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 after a drain. Prints one JSON line once the listeners are bound."""
    settings = load(args.config, os.environ)
    replica = new_incarnation()
    level = args.log_level or settings.logging.level
    logs.setup(level, style=settings.logging.format, replica=replica, pool=settings.pool)
    # Collecting seldom is worth a few per cent, since requests leave few cycles.
    gc.set_threshold(10_000, 20, 20)
    _give_large_blocks_back()
    uvloop.run(serve(settings, replica, _report))
    return 0


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
