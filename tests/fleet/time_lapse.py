"""Runs whole replicas and their Valkey on one simulated clock, which skips idle time.

Simulating a day takes minutes. A busy machine changes no result: simulated time stands still while a replica
computes, sends or awaits data. The replicas run in this process (`picker_fleet.serve`); tests act as Envoy.
"""

import asyncio
import collections
import contextlib
import contextvars
import itertools
import random
import selectors
import socket
from asyncio import selector_events
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import redis
from check_client import BODY, Connection, Reply, check
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from extproc_client import body, converse, headers, response_body, response_headers
from own_replica import served_here
from page_server import answered, serving
from timed_server import library_with_time

from picker_fleet import serve
from picker_fleet.ingress.ext_proc import accesslog
from picker_fleet.ingress.ext_proc.exchange import Exchange
from picker_fleet.pool import Pool
from picker_fleet.serve import Bound
from picker_fleet.state import batching, subscriptions

BEGIN_S = 1_800_000_000.0
_CLOCK = "test-clock"
_TIME = ("HMGET", _CLOCK, "seconds", "microseconds")
NO_LOAD = b'vllm:num_requests_waiting{model_name="m"} 0\nvllm:num_requests_running{model_name="m"} 0\n'
_LEAST_JUMP_S = 0.001
_MOST_TURNS = 10_000  # turns of the event loop at one simulated time; more show an endless loop
HOUR_S = 3600.0
SERVICE_S = 2.0  # seconds of service of a request
BOUND = 4  # the pool's upper bound: requests in flight at both model servers


class Server:
    """A blocking connection to a Valkey with a simulated clock.

    While `away` is true, Valkey is down and the connection sends nothing. Valkey's clock is `step_s` seconds
    ahead of the event loop's. `refuses` names the setting that makes Valkey refuse writes, or is empty.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self.away, self.step_s, self.refuses, self.is_busy = True, 0.0, "", True
        self.connect()

    def connect(self) -> None:
        self._socket = socket.create_connection(self._address)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.away = False

    def catch_up(self) -> None:
        """Wait until Valkey has answered all earlier commands: it serves its connections in turn. If no
        command is new (`is_busy` is false), return at once."""
        for _ in range(2 if self.is_busy and not self.away else 0):
            self._ask(b"PING\r\n")
        self.is_busy = False

    def set_clock(self, now_s: float) -> None:
        if self.away:
            return
        seconds, microseconds = divmod(round((BEGIN_S + self.step_s + now_s) * 1e6), 1_000_000)
        if self.refuses:
            self.set(self.refuses, 0)
        self._ask(f"HSET {_CLOCK} seconds {seconds} microseconds {microseconds}\r\n".encode())
        if self.refuses:
            self.set(self.refuses, 1)

    def set(self, setting: str, value: int) -> None:
        self._ask(f"CONFIG SET {setting} {value}\r\n".encode())

    def cut_others(self) -> None:
        """Close all connections except this one."""
        self._ask(b"CLIENT KILL TYPE normal SKIPME yes\r\n")
        self._ask(b"CLIENT KILL TYPE pubsub\r\n")

    def close(self) -> None:
        self._socket.close()
        self.away = True

    def _ask(self, command: bytes) -> None:
        self._socket.sendall(command)
        reply = self._socket.recv(256)
        assert reply[:1] in b"+:", reply


PROCESS: contextvars.ContextVar[str] = contextvars.ContextVar("PROCESS", default="")
"""The name of the simulated process that runs a task; a new task inherits the name."""


class _Ready(collections.deque[asyncio.Handle]):
    """A loop's queue of ready callbacks; callbacks of a stopped process wait until the process continues."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped: dict[str, list[asyncio.Handle]] = {}

    def process(self, handle: asyncio.Handle | None) -> str:
        return handle._context.get(PROCESS, "") if handle is not None else ""  # type: ignore[attr-defined]

    def append(self, handle: asyncio.Handle) -> None:
        kept = self.stopped.get(self.process(handle)) if self.stopped else None
        (super() if kept is None else kept).append(handle)


class _JumpingSelector(selectors.EpollSelector):
    """Instead of waiting for the loop's next timer, advances the simulated clock to it."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.now_s = 0.0
        self._turns = 0  # turns of the event loop since the clock's last advance
        self._server = server
        self.ready = _Ready()

    def _events(self, timeout: float) -> list[tuple[selectors.SelectorKey, int]]:
        found, stopped = sorted(super().select(timeout), key=lambda event: event[0].fd), self.ready.stopped
        if not stopped:
            return found
        # A file descriptor belongs to the process that reads it, or, without a reader, to its writer.
        return [
            each for each in found if self.ready.process(each[0].data[0] or each[0].data[1]) not in stopped
        ]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._turns += 1
        if self._turns > _MOST_TURNS:
            self._turns = 0
            raise AssertionError(f"at {self.now_s:.3f} s the replicas never become idle")
        if timeout is not None and timeout <= 0:
            return []  # callbacks that are ready run first
        self._server.catch_up()  # so that events do not depend on the machine's speed
        found = self._events(0)
        if found:
            return found
        if timeout is None:
            return self._events(0.001)
        self.now_s += max(timeout, _LEAST_JUMP_S)
        self._turns = 0
        self._server.set_clock(self.now_s)
        return []


class TimeLapseLoop(asyncio.SelectorEventLoop):
    def __init__(self, server: Server) -> None:
        self.server = server
        self._jumping = _JumpingSelector(server)
        super().__init__(self._jumping)
        self._ready = self._jumping.ready  # `_ready` is the name that the base class uses

    def stop_process(self, name: str) -> None:
        """Run no callback of process `name` until `continue_process` is called, as after SIGSTOP."""
        self._jumping.ready.stopped[name] = []

    def continue_process(self, name: str) -> None:
        self._jumping.ready.extend(self._jumping.ready.stopped.pop(name, ()))

    def time(self) -> float:
        return self._jumping.now_s

    def add_signal_handler(self, *_: Any) -> None:
        """Ignore a replica's handler: a signal to this process is for the tests, not for one replica."""


class _TimedCommands(subscriptions.CommandClient):
    """A client of Redis that reads the simulated clock instead of TIME."""

    async def execute(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        return await super().execute([_TIME if command == ("TIME",) else command for command in commands])


@contextlib.contextmanager
def time_lapse(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[TimeLapseLoop]:
    """Make an event loop that runs a fleet in simulated time on the Valkey at `url`."""
    from picker_fleet.endpoints import metrics_channel
    from picker_fleet.scheduling import route_stream

    library = library_with_time(f"redis.call('HMGET', '{_CLOCK}', 'seconds', 'microseconds')")
    monkeypatch.setattr(batching, "load_library", lambda: library)
    monkeypatch.setattr(metrics_channel, "CommandClient", _TimedCommands)
    monkeypatch.setattr(route_stream, "CommandClient", _TimedCommands)
    with redis.Redis.from_url(url) as client:
        settings = client.connection_pool.connection_kwargs
    server = Server(settings["host"], settings["port"])
    server.set_clock(0.0)
    write = selector_events._SelectorSocketTransport.write

    def noted(connection: Any, data: bytes) -> None:
        server.is_busy = True
        write(connection, data)

    monkeypatch.setattr(selector_events._SelectorSocketTransport, "write", noted)
    loop = TimeLapseLoop(server)
    asyncio.set_event_loop(loop)
    try:
        yield loop
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
        asyncio.set_event_loop(None)
        server.close()


class Replica:
    """A replica, and for each mode a method that sends a request as Envoy does."""

    def __init__(self, pool: Pool, bound: Bound) -> None:
        self.pool, self.bound = pool, bound
        self._log = accesslog.Collector([pool.account])

    async def lean(self, request_id: str, seconds: float) -> None:
        exchange = Exchange(self.pool.context)
        said = await converse(exchange, headers("lean", {"x-request-id": request_id}), body(BODY))
        exchange.close()
        await self._runs(entry_of(request_id, said), seconds)

    async def standard(self, request_id: str, seconds: float) -> None:
        exchange = Exchange(self.pool.context)
        await converse(exchange, headers("standard", {"x-request-id": request_id}), body(BODY))
        await asyncio.sleep(seconds)
        await converse(exchange, response_headers(200), response_body(b"{}", ended=True))
        exchange.close()

    async def http(self, request_id: str, seconds: float) -> None:
        assert self.bound.http is not None
        reply, entry = await checked(self.bound.http, BODY, {"x-request-id": request_id})
        assert reply.status == 200, reply
        await self._runs(entry, seconds)

    async def _runs(self, entry: Any, seconds: float) -> None:
        """Report the access-log entries of a request that runs for `seconds`."""
        every_s = self.pool.settings.leases.access_log_interval
        while seconds > every_s:
            await asyncio.sleep(every_s)
            seconds -= every_s
            entry.common_properties.access_log_type = "DownstreamPeriodic"
            self._log.on_message(message_of(entry))
        await asyncio.sleep(seconds)
        entry.common_properties.access_log_type = "DownstreamEnd"
        entry.response.response_code.value = 200
        self._log.on_message(message_of(entry))


async def checked(address: str, said: bytes, named: Mapping[str, str]) -> tuple[Reply, Any]:
    """A replica's reply to a check with the body `said` and the headers `named`, and Envoy's access-log entry
    of the request."""
    connection = Connection(*await asyncio.open_connection(*address.split(":")))
    try:
        connection.send(check(body=said, **named))
        reply = await connection.reply()
    finally:
        connection.leave()
    entry = accesslog_pb2.HTTPAccessLogEntry(request={"request_id": named["x-request-id"]})
    check_result = entry.common_properties.metadata.filter_metadata[accesslog.EXT_AUTHZ]
    check_result.update(
        {name: reply.headers[name] for name in accesslog.METADATA_HEADERS if name in reply.headers}
    )
    return reply, entry


def entry_of(request_id: str, answers: Iterable[Any]) -> accesslog_pb2.HTTPAccessLogEntry:
    """Envoy's access-log entry of a request, with the dynamic metadata of the replica's answers."""
    metadata = next(answer.dynamic_metadata for answer in answers if answer.HasField("dynamic_metadata"))
    entry = accesslog_pb2.HTTPAccessLogEntry(request={"request_id": request_id})
    for name, value in metadata.fields.items():
        entry.common_properties.metadata.filter_metadata[name].CopyFrom(value.struct_value)
    return entry


def message_of(entry: Any) -> bytes:
    """A message of Envoy's access log with this entry."""
    return als_pb2.StreamAccessLogsMessage(http_logs={"log_entry": [entry]}).SerializeToString()


class Fleet:
    def __init__(self, replicas: Sequence[Replica], mode: str) -> None:
        self.replicas = replicas
        self._mode = mode
        self._ids = itertools.count(1)
        self._random = random.Random(1)
        self.served = 0

    async def ask(self, seconds: float) -> None:
        """Send one request that takes its model server `seconds`."""
        replica = self._random.choice(self.replicas)
        await getattr(replica, self._mode)(f"request-{next(self._ids)}", seconds)
        self.served += 1

    async def burst(self, count: int, seconds: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                tasks.create_task(self.ask(seconds))


@contextlib.contextmanager
def noted_pools(note: Callable[[Pool], None]) -> Iterator[None]:
    """Call `note` with each replica's Pool as the replica starts, until the block ends."""

    class Noted(Pool):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            note(self)

    with mock.patch.object(serve, "Pool", Noted):
        yield


@contextlib.asynccontextmanager
async def fleet(url: str, mode: str, replicas: int, config: Mapping[str, Any]) -> AsyncIterator[Fleet]:
    """Runs `replicas` replicas in front of two model servers; fails if a replica ends by itself."""
    made: list[Pool] = []
    with noted_pools(made.append):
        async with contextlib.AsyncExitStack() as stack:
            pages = [await stack.enter_async_context(serving()) for _ in range(2)]
            for page in pages:
                page.answer = answered(NO_LOAD)
                page.requests = collections.deque(maxlen=1)  # the model server keeps only its last request
            tree = {
                "extproc": {"drain_grace": "0s"},
                "discovery": {"static": [{"address": page.address} for page in pages]},
                "http": {"listen": "127.0.0.1:0" if mode == "http" else None},
                **config,
                "redis": {**config.get("redis", {}), "url": url},
            }
            bound = [await stack.enter_async_context(served_here(tree)) for _ in range(replicas)]
            for pool in made:
                await pool.membership.known()
            yield Fleet([Replica(*pair) for pair in zip(made, bound, strict=True)], mode)


async def light_load(some: Fleet, seconds: float, every_s: float) -> None:
    """Send one request at a time, `every_s` seconds after the previous request has ended."""
    until_s = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < until_s:
        await some.ask(SERVICE_S)
        await asyncio.sleep(every_s)


async def at_rest(some: Any, client: redis.Redis, lasts_s: float = 60.0) -> None:
    """After `lasts_s` seconds, assert that every count is 0 and every other figure in its range."""
    await asyncio.sleep(lasts_s)
    for replica in some.replicas:
        pool = replica.pool
        assert pool.admission.failover.outage is None
        state = await pool.store.state(60.0)
        assert (state.stock, state.queued, state.leases, state.overdue) == (0, 0, 0, 0)
        assert set(state.in_flight.values()) | set(state.prefill_in_flight.values()) <= {0}
        assert set(state.queue_bytes.values()) == {0}
        assert 0 <= state.guard_credit <= 1.1
        assert 0 <= state.drain_rate < 100
        assert 1 <= state.retry_after_s <= 60
        assert 1 <= pool.admission.queue.retry_after_s <= 60
        assert all(0 <= tag < 2**53 for tag in state.virtual_times.values())
        assert len(state.replicas) == len(some.replicas)
        assert pool.admission.queue.places_are_awaited is False
    prefix = "epp:{default}:"
    empty = (
        "requests",
        "inflight",
        "timers",
        "overdue",
        "limits",
        "suspects",
        "blockers",
        "prefills",
        "budget_waits",
    )
    for name in empty:
        assert not client.exists(prefix + name), name
    balances = client.hgetall(f"{prefix}balances")
    assert not any(float(balances[name]) for name in balances if name.endswith(b"\x1fparallel")), balances
    assert not list(client.scan_iter(f"{prefix}queue:*"))
    for name in client.scan_iter(f"{prefix}finish:*"):
        assert client.zcard(name) <= 1
