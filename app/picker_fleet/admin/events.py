"""The event stream (server-sent events) that the dashboard and other clients follow.

While a replica has listeners, `SnapshotReader` reads the shared state once a second, and `Events` sends the
same bytes to all listeners. A listener with MAX_UNREAD unread events is dropped when the next event arrives.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple, Protocol

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from picker_fleet.admin import models
from picker_fleet.admin.fleet_state import PAUSE_S
from picker_fleet.admin.views import FleetView
from picker_fleet.domain.bands import Bands
from picker_fleet.domain.errors import RequestError
from picker_fleet.state.reads import Reads

MAX_LISTENERS = 64
MAX_AT_ADDRESS = 48  # maximum listeners at one address; clients behind a proxy share an address
MAX_UNREAD = 4
_ROWS = 50
_MAX_DECISIONS = 100
_INTERVAL_S = 1.0
_READ_S = 2.0
_PING_S = 10.0
_IDLE_S = 5.0  # after this many seconds without a read the next read starts afresh
_GREETING = b"retry: 1000\n\n"
_PING = b": ping\n\n"


class Event(NamedTuple):
    name: str
    data: BaseModel

    def encode(self) -> bytes:
        """The event in the server-sent events format."""
        return f"event: {self.name}\ndata: {self.data.model_dump_json()}\n\n".encode()


class EventSource(Protocol):
    """Supplies the events that `Events` sends."""

    async def read(self) -> list[Event]:
        """The next events. Raises RequestError if the events cannot be read."""
        ...

    def recent(self) -> list[Event]:
        """The events that a new listener gets at once, while other listeners are connected."""
        ...


class SnapshotReader:
    """Reads snapshots, and also decisions if the setting `decision_log` is on."""

    def __init__(
        self,
        view: FleetView,
        reads: Reads,
        *,
        decision_log: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._reads = reads
        self._decision_log = decision_log
        self._clock = clock
        self._decisions: list[models.Decision] | None = None  # the decisions last read; None: none yet
        self._read_at_s = -math.inf

    async def read(self) -> list[Event]:
        if self._is_idle():
            self._decisions = None
        self._read_at_s = self._clock()
        state = await self._view.state()
        await asyncio.sleep(PAUSE_S)
        flows = await self._view.flows(_ROWS, None, None)
        await asyncio.sleep(PAUSE_S)
        workloads = await self._view.busiest(_ROWS)
        await asyncio.sleep(PAUSE_S)
        snapshot = models.Snapshot(
            at=state.now_us / 1e6,
            state=state,
            flows=flows.flows,
            flows_total=flows.total,
            workloads=workloads.workloads,
            workloads_total=workloads.total,
            endpoints=await self._view.endpoints(),
            replicas=(await self._view.replicas()).replicas,
        )
        events = [Event("snapshot", snapshot)]
        await asyncio.sleep(PAUSE_S)
        if self._decision_log:
            events.append(Event("decisions", await self._new_decisions()))
            await asyncio.sleep(PAUSE_S)
        return events

    def recent(self) -> list[Event]:
        if self._is_idle() or not self._decisions:
            return []
        return [Event("decisions", models.Decisions(entries=self._decisions, skipped=0))]

    async def _new_decisions(self) -> models.Decisions:
        bands = self._view.bands
        found = [_decision(fields, bands) for fields in await self._reads.decisions(_MAX_DECISIONS)]
        before, self._decisions = self._decisions, found
        last, newest = _newest(before or []), _newest(found)
        if before is None or newest < last:  # first read of decisions, or a new epoch of the pool
            return models.Decisions(entries=found, skipped=0)
        entries = [entry for entry in found if entry.seq > last]
        return models.Decisions(entries=entries, skipped=newest - last - len(entries))

    def _is_idle(self) -> bool:
        return self._clock() - self._read_at_s > _IDLE_S


def _newest(entries: Sequence[models.Decision]) -> int:
    return entries[-1].seq if entries else 0


def _decision(fields: dict[str, str], bands: Bands) -> models.Decision:
    names = ("request", "flow", "workload", "endpoint", "by")
    return models.Decision(
        seq=int(fields["seq"]),
        at=float(fields["time_us"]) / 1e6,
        event=fields["event"],
        band=bands.of(int(fields["priority"])).name if fields["flow"] else None,
        stock=float(fields["stock"]),
        queued=int(float(fields["queued"])),
        note=fields["note"],
        **{name: fields[name] or None for name in names},
    )


class Listener:
    """The open event stream of one client. `dropped` is set when the stream must end at once, even while the
    client does not read."""

    def __init__(self, ping_s: float = _PING_S, address: str = "") -> None:
        self.address = address
        self._ping_s = ping_s
        self._unread: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_UNREAD + 1)
        self.dropped = asyncio.Event()

    def put(self, data: bytes | None) -> None:
        """Queue an event (None ends the stream); drop a listener that has MAX_UNREAD unread events."""
        if data is not None and self._unread.qsize() >= MAX_UNREAD:
            self.dropped.set()
        if not self.dropped.is_set():
            self._unread.put_nowait(data)

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the stream's bytes until its end; after `ping_s` without an event, yield a comment."""
        yield _GREETING
        while True:
            try:
                async with asyncio.timeout(self._ping_s):
                    data = await self._unread.get()
            except TimeoutError:
                yield _PING
                continue
            if data is None:
                return
            yield data


class Events:
    """Sends the events that `source` reads to all listeners of one replica."""

    def __init__(self, source: EventSource, interval_s: float = _INTERVAL_S) -> None:
        self._source = source
        self._interval_s = interval_s
        self._listeners: dict[Listener, None] = {}  # oldest first
        self._wanted = asyncio.Event()
        self._closed = False

    @property
    def listening(self) -> int:
        return len(self._listeners)

    def join(self, address: str = "") -> Listener | None:
        """Add a listener; None if `address` has MAX_AT_ADDRESS listeners or the replica is stopping.

        At MAX_LISTENERS, the address with the most listeners loses its newest listener if it would still have
        at least as many as `address`; otherwise no listener is added.
        """
        counts = Counter(each.address for each in self._listeners)
        if self._closed or counts[address] >= MAX_AT_ADDRESS:
            return None
        if len(self._listeners) >= MAX_LISTENERS:
            most, count = counts.most_common(1)[0]
            if count <= counts[address] + 1:
                return None
            newest = next(each for each in reversed(self._listeners) if each.address == most)
            newest.dropped.set()
            self.leave(newest)
        listener = Listener(address=address)
        if recent := _encode(self._source.recent()):
            listener.put(recent)
        self._listeners[listener] = None
        self._wanted.set()
        return listener

    def leave(self, listener: Listener) -> None:
        self._listeners.pop(listener, None)
        if not self._listeners:
            self._wanted.clear()

    async def run(self) -> None:
        """Send events to all listeners until cancelled; then end every stream."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._wanted.wait()
                started_s = loop.time()
                self._put(await self._read())
                await asyncio.sleep(max(0.0, started_s + self._interval_s - loop.time()))
        finally:
            self._closed = True
            self._put(None)

    async def _read(self) -> bytes:
        try:
            async with asyncio.timeout(_READ_S):
                return _encode(await self._source.read())
        except TimeoutError:
            detail = f"the shared state did not answer within {_READ_S:g} s"
        except RequestError as fault:
            detail = str(fault)
        return Event("unavailable", models.Unavailable(at=time.time(), detail=detail)).encode()

    def _put(self, data: bytes | None) -> None:
        for listener in tuple(self._listeners):
            listener.put(data)


def _encode(events: Sequence[Event]) -> bytes:
    return b"".join(event.encode() for event in events)


class EventStream(Response):
    """Sends a listener's events until the client disconnects, the listener is dropped, the replica stops, or
    `may_go_on` returns False."""

    media_type = "text/event-stream"

    def __init__(self, events: Events, listener: Listener, may_go_on: Callable[[], bool]) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._listener = listener
        self._may_go_on = may_go_on

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks = [
            asyncio.create_task(work, name=f"events-{name}")
            for name, work in (
                ("send", self._send(send)),
                ("disconnect", _disconnected(receive)),
                ("dropped", self._listener.dropped.wait()),
            )
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._events.leave(self._listener)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._listener.stream():
            if not self._may_go_on():
                break
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
