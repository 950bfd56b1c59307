"""The admin API's event stream: one read of the state serves all listeners; a slow listener delays no
other."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import cast
from unittest.mock import AsyncMock

import pytest
from admin_client import STATE, api, asking, problem
from background import running, until
from clocks import Clock
from pydantic import BaseModel

from picker_fleet.admin import models
from picker_fleet.admin.events import (
    MAX_AT_ADDRESS,
    MAX_LISTENERS,
    MAX_UNREAD,
    Event,
    Events,
    Listener,
    SnapshotReader,
)
from picker_fleet.admin.server import serving
from picker_fleet.admin.views import FleetView
from picker_fleet.domain.errors import StateUnavailable
from picker_fleet.state.reads import Reads


class Numbered(BaseModel):
    number: int
    name: str


class CountingSource:
    """A source of the state that counts reads; each read returns its number, or raises `fault` if set."""

    reads, name = 0, "a\nb"
    fault: Exception | None = None

    async def read(self) -> list[Event]:
        self.reads += 1
        if self.fault is not None:
            raise self.fault
        return [Event("snapshot", Numbered(number=self.reads, name=self.name))]

    def recent(self) -> list[Event]:
        return []


@pytest.fixture
def source() -> CountingSource:
    return CountingSource()


@pytest.fixture
async def events(source: CountingSource) -> AsyncIterator[Events]:
    """A running event stream with a short interval between reads."""
    made = Events(source, interval_s=0.005)
    async with running(made.run()):
        yield made


def joined(events: Events, address: str = "") -> Listener:
    listener = events.join(address)
    assert listener is not None
    return listener


async def first(stream: AsyncIterator[bytes], count: int) -> list[bytes]:
    async with asyncio.timeout(30):
        return [await anext(stream) for _ in range(count)]


async def test_the_event_stream_reads_the_state_only_while_a_client_listens(source: CountingSource) -> None:
    async def reads() -> int:
        """The number of reads of the state after fifty steps of the event loop."""
        for _ in range(50):
            await asyncio.sleep(0)
        return source.reads

    events = Events(source, interval_s=0.0)
    async with running(events.run()):
        assert await reads() == 0
        listener = joined(events)
        await until(lambda: source.reads > 1)
        events.leave(listener)
        seen = source.reads
        assert await reads() <= seen + 1


async def test_all_listeners_of_the_event_stream_get_the_same_bytes(events: Events) -> None:
    one, other = await asyncio.gather(*(first(joined(events).stream(), 3) for _ in range(2)))
    assert one[0].startswith(b"retry:")
    assert one == other
    assert one[1] == Event("snapshot", Numbered(number=1, name="a\nb")).encode()
    assert one[1].count(b"\n") == 3


async def test_a_listener_that_does_not_read_is_dropped_and_others_continue(events: Events) -> None:
    slow, quick = joined(events), joined(events)
    await first(quick.stream(), MAX_UNREAD + 3)
    assert slow.dropped.is_set()
    assert not quick.dropped.is_set()


async def test_listeners_get_an_event_if_the_state_is_unreachable(
    events: Events, source: CountingSource
) -> None:
    source.fault = StateUnavailable("Redis cannot be reached: refused")
    _, event = await first(joined(events).stream(), 2)
    assert event.startswith(b"event: unavailable\n")
    assert b"refused" in event


async def test_an_sse_comment_keeps_a_silent_connection_open() -> None:
    sent = await first(Listener(ping_s=0.01).stream(), 3)
    assert sent == [b"retry: 1000\n\n", b": ping\n\n", b": ping\n\n"]


async def test_event_streams_end_and_none_starts_when_the_replica_stops(source: CountingSource) -> None:
    events = Events(source, interval_s=3600.0)  # the interval allows only one read in the test
    listener = joined(events)
    async with asking(api(events=events)) as http, http.stream("GET", "/api/v1/events") as response:
        lines = response.aiter_lines()
        await anext(lines)
        async with running(events.run()):
            await until(lambda: source.reads == 1)
        async with asyncio.timeout(30):  # the server must end the stream by itself
            assert [line async for line in lines][-1] == ""
            assert len([each async for each in listener.stream()]) == 2
        assert events.join() is None


async def test_a_listener_above_the_limit_is_refused_until_another_client_disconnects(events: Events) -> None:
    async with asking(api(events=events)) as http:
        listeners = [joined(events, "127.0.0.1") for _ in range(MAX_AT_ADDRESS - 1)]
        async with http.stream("GET", "/api/v1/events") as response:
            assert response.headers["cache-control"] == "no-store"
            async with asyncio.timeout(30):
                data = await anext(line async for line in response.aiter_lines() if line.startswith("data"))
            assert json.loads(data.removeprefix("data: "))["number"] >= 1
            assert events.listening == MAX_AT_ADDRESS
            assert problem(await http.get("/api/v1/events"), 503)["code"] == "too_many_listeners"
        await until(lambda: events.listening == len(listeners))


def test_an_address_gets_a_stream_though_other_addresses_take_all_streams(source: CountingSource) -> None:
    events = Events(source)
    greedy = [joined(events, "10.0.0.1") for _ in range(MAX_AT_ADDRESS)]
    assert events.join("10.0.0.1") is None
    others = [joined(events, "10.0.0.2") for _ in range(MAX_LISTENERS - MAX_AT_ADDRESS)]
    late = joined(events, "10.0.0.3")
    assert [each.dropped.is_set() for each in greedy] == [False] * (MAX_AT_ADDRESS - 1) + [True]
    assert not any(each.dropped.is_set() for each in (*others, late))
    assert events.listening == MAX_LISTENERS


async def test_a_client_that_never_reads_is_disconnected(events: Events, source: CountingSource) -> None:
    source.name = "x" * 4_000_000  # more bytes than a connection buffers
    async with serving(api(events=events), "127.0.0.1:0") as address:
        _, writer = await asyncio.open_connection(*address.split(":"), limit=1024)
        writer.write(b"GET /api/v1/events HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        await until(lambda: events.listening == 1)
        await until(lambda: events.listening == 0)
        writer.transport.abort()


class LoggedDecisions:
    """A shared state that has only a decision log of `logged` entries."""

    logged = 0

    def reader(self, clock: Clock) -> SnapshotReader:
        view = AsyncMock(FleetView)
        view.state.return_value = models.State.model_validate(STATE)
        view.endpoints.return_value = []
        view.flows.return_value = models.Flows(flows=[], total=0, cursor=None)
        view.busiest.return_value = models.Workloads(workloads=[], total=0, cursor=None)
        view.replicas.return_value = models.Replicas(replicas=[])
        return SnapshotReader(view, cast(Reads, self), decision_log=True, clock=clock)

    async def decisions(self, most: int) -> list[dict[str, str]]:
        entry = dict.fromkeys(("event", "request", "flow", "workload", "endpoint", "by", "note"), "")
        zeros = dict.fromkeys(("time_us", "band", "stock", "queued"), "0")
        oldest = max(self.logged - most, 0)
        return [{**entry, **zeros, "seq": str(seq)} for seq in range(oldest + 1, self.logged + 1)]


def counted(events: list[Event]) -> tuple[int, int]:
    """The number of decisions in `events`, and the number of skipped decisions."""
    decisions = dict(events)["decisions"]
    assert isinstance(decisions, models.Decisions)
    return len(decisions.entries), decisions.skipped


async def test_each_decision_is_sent_once_and_a_new_listener_gets_recent_decisions() -> None:
    shared, clock = LoggedDecisions(), Clock()
    reader = shared.reader(clock)
    assert reader.recent() == []
    for logged, sent in ((3, (3, 0)), (5, (2, 0)), (205, (100, 100))):
        shared.logged = logged
        assert counted(await reader.read()) == sent
        assert counted(reader.recent()) == (min(logged, 100), 0)
    # Decisions made while no client listened do not count as skipped.
    clock.now_s, shared.logged = 3600.0, 5000
    assert reader.recent() == []
    assert counted(await reader.read()) == (100, 0)
