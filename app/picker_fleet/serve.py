"""The command `picker serve`: builds one replica and runs it in one event loop until a signal stops it."""

import argparse
import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from picker_fleet.admin import api
from picker_fleet.admin import server as admin_server
from picker_fleet.background import Work, count_failures, keep, report_unhandled
from picker_fleet.domain.budgets import ByPool, allow_many_files, body_budgets
from picker_fleet.domain.config import Settings, load, pools_of
from picker_fleet.domain.errors import ConfigError
from picker_fleet.domain.sections import Tls
from picker_fleet.domain.units import is_loopback, split_host_port
from picker_fleet.grpc.certificates import Certificates
from picker_fleet.grpc.transport import Handler, RpcError, Status, Stream, Streaming
from picker_fleet.ingress.context import OpenRequests, UploadDeadlines
from picker_fleet.ingress.ext_proc import accesslog, eds
from picker_fleet.ingress.ext_proc.exchange import ExchangeService
from picker_fleet.ingress.ext_proc.server import Server
from picker_fleet.ingress.http.server import CheckServer
from picker_fleet.pool import Pool
from picker_fleet.telemetry import logs
from picker_kubernetes import chart_flags

_log = logging.getLogger(__name__)
_LOOK_S = 0.5  # seconds between two checks whether this replica is ready


@dataclass(frozen=True, slots=True)
class Bound:
    """A replica's id and the addresses of its listeners."""

    id: str
    grpc: str  # host:port
    admin: str  # http://host:port or https://host:port
    http: str | None  # host:port for the mode `http`; None if the mode is off


async def serve(settings: Settings, replica: str, on_bound: Callable[[Bound], None]) -> None:
    """Run one replica until SIGTERM, SIGINT or SIGHUP, then drain and return.

    `on_bound` is called once all listeners are bound. While Redis does not answer, the replica is not ready;
    it joins the fleet when Redis answers.

    Raises:
        StartupError: a listener cannot be bound, or discovery has no initial list of endpoints.
    """
    clock = asyncio.get_running_loop().time
    certificates = _certificates(settings.extproc.tls, "extproc.tls", "h2")
    http_certificates = _certificates(settings.http.tls, "http.tls", "http/1.1")
    admin_certificates = _certificates(settings.admin.tls, "admin.tls", "http/1.1")
    uploads = UploadDeadlines(clock, settings.extproc.body_timeout)
    pools = _pools(settings, replica, certificates)
    default = pools[settings.pool]
    count_failures(default.metrics.background_failure)
    accounts = [pool.account for pool in pools.values()]
    unknown = replace(default.context, paths=None)  # requests for an unknown pool: all are refused
    contexts = ByPool({name: pool.context for name, pool in pools.items()}, settings.pool, unknown)
    grpc_server = Server(
        contexts.each(lambda context: ExchangeService(context, uploads)),
        settings.extproc,
        services={
            **accesslog.handlers(accounts, settings.extproc.metadata_namespace),
            **_services(pools, settings.pool),
        },
        certificates=certificates,
        own_listeners={name: pool.listen for name, pool in settings.pools.items() if pool.listen is not None},
    )
    stopping = _on_signal()

    port = await grpc_server.start()
    checks: CheckServer | None = None
    if settings.http.listen is not None:
        checks = CheckServer(contexts, settings.http.listen, http_certificates)
    try:
        http_port = await checks.start() if checks is not None else 0
        operated = [pool.operated for pool in pools.values()]

        def full() -> str:
            return grpc_server.full or (checks.full if checks else "") or _cut_off(pools.values())

        api_app = api.create(operated, settings, full=full)
        async with admin_server.serving(
            api_app, settings.admin.listen, certificates=admin_certificates
        ) as admin:
            host, _ = split_host_port(settings.extproc.listen)
            admin_url = f"{'http' if admin_certificates is None else 'https'}://{admin}"
            for pool in pools.values():
                pool.replica_info.reached(admin=admin_url, grpc=f"{host}:{port}")
            default.replica_info.follow_streams(grpc_server.streams_by_peer)
            has_token = settings.admin.token is not None or settings.admin.tokens
            if not has_token and not is_loopback(split_host_port(admin)[0]):
                _log.warning("admin.token is unset: a local proxy would let anyone change the fleet")
            http_host, _ = split_host_port(settings.http.listen or "-:0")
            http = f"{http_host}:{http_port}" if checks is not None else None
            on_bound(Bound(replica, f"{host}:{port}", admin_url, http))
            async with _background() as start:
                for pool in pools.values():
                    pool.start(start)
                start(uploads.run, "uploads")
                start(partial(_announce, pools.values(), grpc_server, checks), "readiness")
                if checks is not None:
                    start(checks.run, "checks")
                for each in filter(None, (certificates, http_certificates, admin_certificates)):
                    start(each.run, "certificates")
                await stopping.wait()
                _log.info("draining")
                if checks is not None:
                    checks.drain()
                await grpc_server.drain()
                await asyncio.gather(*(pool.leave() for pool in pools.values()))
    finally:
        if checks is not None:
            await checks.stop()
        await grpc_server.stop()
        await asyncio.gather(*(pool.stop() for pool in pools.values()))


def _pools(settings: Settings, replica: str, certificates: Certificates | None) -> dict[str, Pool]:
    """Pool name -> pool; the first is the default pool, for requests that name no pool."""
    each = pools_of(settings)
    budgets = body_budgets(settings.extproc.max_buffered_bytes, each)
    open_requests = OpenRequests()
    return {
        name: Pool(
            its,
            replica,
            bodies=budgets[name],
            open_requests=open_requests,
            certificates=certificates,
            is_alone=len(each) == 1,
        )
        for name, its in each.items()
    }


def _services(pools: Mapping[str, Pool], default: str) -> dict[str, ByPool[Handler]]:
    """gRPC path -> the handlers of all pools for the path."""
    each = {name: pool.services() for name, pool in pools.items()}
    return {
        path: ByPool(
            {name: services[path] for name, services in each.items()},
            default,
            Streaming(_no_pool) if path == eds.STREAM else _no_pool,
        )
        for path in each[default]
    }


async def _no_pool(stream: Stream) -> None:
    raise RpcError(Status.NOT_FOUND, "this replica does not serve the named pool")


def _certificates(tls: Tls | None, name: str, protocol: str) -> Certificates | None:
    return Certificates(tls, name, protocol) if tls is not None else None


def _cut_off(pools: Iterable[Pool]) -> str:
    """The reason why Envoy should use other replicas; '' if this replica can serve."""
    return "only other replicas reach Redis" if all(pool.admission.is_cut_off for pool in pools) else ""


async def _announce(pools: Iterable[Pool], server: Server, checks: CheckServer | None) -> None:
    """Report this replica as ready once it has joined every pool, but not while it is cut off from Redis."""
    for pool in pools:
        await pool.membership.known()
    announced: str | None = None
    while True:
        reason = _cut_off(pools)
        if reason != announced:
            server.set_ready(not reason)
            if checks is not None:
                checks.set_ready(not reason)
            _log.info(reason or "ready")
        announced = reason
        await asyncio.sleep(_LOOK_S)


@contextlib.asynccontextmanager
async def _background() -> Any:
    """Run tasks until the block ends. A task that cannot start ends the replica with that task's error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks: list[asyncio.Task[None]] = []

            def start(work: Work, name: str) -> None:
                tasks.append(group.create_task(keep(name, work), name=name))

            yield start
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as faults:
        # The first failing task cancels all other tasks: raise only the first failure.
        raise faults.exceptions[0] from None


def _on_signal() -> asyncio.Event:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_report_fault)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            loop.add_signal_handler(number, stopping.set)
    return stopping


def _report_fault(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an unhandled error of the event loop, unless a DNS lookup raised it: the connection that needed the
    lookup has already reported an error."""
    if not isinstance(context.get("exception"), socket.gaierror):
        report_unhandled(loop, context)


def new_incarnation() -> str:
    """A unique replica id: the end of the host's name, and a random part that is new at each start.

    The id is short because Redis stores it with each waiting request; heartbeats report the whole host name.
    """
    return f"{socket.gethostname().rsplit('-', 1)[-1][:8]}-{secrets.token_hex(4)}"


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
# Most request bodies are smaller than this; bodies that fill a replica's memory are larger.
_LARGE_BLOCK_BYTES = 512 * 1024
_KEPT_BYTES = 8 * 1024 * 1024  # the heap keeps at most this much free memory at its end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration (YAML)")
    levels = ("DEBUG", "INFO", "WARNING", "ERROR")
    parser.add_argument("--log-level", choices=levels, help="overrides the configuration's level")
    chart_flags.add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run a replica; exit code 0 after a drain. Prints one JSON line once the listeners are bound."""
    settings, remarks = _settings(args)
    replica = new_incarnation()
    level = args.log_level or settings.logging.level
    pool = settings.pool if len(settings.pools) < 2 else ""  # with several pools, each log line names its own
    logs.setup(level, style=settings.logging.format, replica=replica, pool=pool)
    for remark in remarks:
        _log.warning("%s", remark)
    for name, its in pools_of(settings).items():
        if why := its.request_queue_controller.why_static:
            _log.info("pool %s: %s", name, why)
        if ignored := its.request_queue_controller.ignored:
            _log.warning("pool %s: %s have no effect in this mode", name, ", ".join(ignored))
    # Collect garbage seldom to save a few per cent of CPU time: requests leave few reference cycles.
    gc.set_threshold(10_000, 20, 20)
    _give_large_blocks_back()
    allow_many_files()
    uvloop.run(serve(settings, replica, _report))
    return 0


def _settings(args: argparse.Namespace) -> tuple[Settings, Sequence[str]]:
    """The settings, and warnings about the command's flags."""
    if chart_flags.given(args):
        return chart_flags.settings(args, os.environ)
    if args.config is None:
        raise ConfigError("--config FILE is needed, or --pool-name NAME in Kubernetes")
    if args.unknown:
        raise ConfigError(f"unrecognized arguments: {' '.join(args.unknown)}")
    return load(args.config, os.environ), ()


def _give_large_blocks_back() -> None:
    """Make the C library return large blocks to the system as soon as they are freed.

    By default glibc, once it has freed a large block (up to 32 MiB), keeps blocks of that size in the heap of
    the allocating thread. A replica that holds 120 MiB of request bodies then uses up to 280 MiB more memory
    than an idle replica; with this setting it uses 130 MiB more.
    """
    with contextlib.suppress(OSError, AttributeError):  # only glibc has mallopt
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
        # Setting M_MMAP_THRESHOLD alone would lower M_TRIM_THRESHOLD to 128 KiB. Each large prompt would then
        # allocate memory from the system; a prompt of 400 KB would cost 40 % more CPU.
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _report(bound: Bound) -> None:
    print(json.dumps({"ready": True, **asdict(bound)}), flush=True)
