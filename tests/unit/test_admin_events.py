"""The event stream: one look for all, only while somebody listens; nobody is waited for."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable

import pytest
from admin_client import api, asking, problem
from pydantic import BaseModel
from scripted_store import until

from picker_fleet.admin.events import MAX_LISTENERS, MAX_UNREAD, Event, Events, Listener
from picker_fleet.admin.server import serving
from picker_fleet.errors import StateUnavailable


class Said(BaseModel):
    number: int
    name: str


class Look:
    """Counts the looks; each tells of its number, unless there is a fault."""

    def __init__(self) -> None:
        self.count = 0
        self.fault: Exception | None = None
        self.name = "a\nb"

    async def read(self) -> list[Event]:
        self.count += 1
        if self.fault is not None:
            raise self.fault
        return [Event("snapshot", Said(number=self.count, name=self.name))]

    def recent(self) -> list[Event]:
        return []


@pytest.fixture
def look() -> Look:
    return Look()


@pytest.fixture
async def events(look: Look) -> AsyncIterator[Events]:
    """Running, with little pause between two looks."""
    made = Events(look, interval_s=0.005)
    running = asyncio.create_task(made.run())
    yield made
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def told(stream: AsyncIterator[bytes], count: int) -> list[bytes]:
    async with asyncio.timeout(10):
        return [await anext(stream) for _ in range(count)]


async def met(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


async def test_given_no_listener_then_nobody_looks(events: Events, look: Look) -> None:
    for _ in range(20):
        await asyncio.sleep(0)
    assert look.count == 0
    # When one comes and goes again, then looking ends with it
    listener = events.join()
    assert listener is not None
    await until(lambda: look.count > 1)
    events.leave(listener)
    seen = look.count
    await asyncio.sleep(0.05)  # ten looks' time
    assert look.count <= seen + 1


async def test_given_two_listeners_then_both_are_sent_the_same_bytes(events: Events) -> None:
    first, second = events.join(), events.join()
    assert first is not None
    assert second is not None
    one, other = await asyncio.gather(told(first.stream(), 3), told(second.stream(), 3))
    assert one[0].startswith(b"retry:")
    assert one == other
    assert one[1] == Event("snapshot", Said(number=1, name="a\nb")).encode()
    assert one[1].count(b"\n") == 3


async def test_given_a_listener_that_does_not_read_then_it_is_dropped_and_others_go_on(
    events: Events,
) -> None:
    slow, quick = events.join(), events.join()
    assert slow is not None
    assert quick is not None
    stream = quick.stream()
    await told(stream, MAX_UNREAD + 3)
    assert slow.dropped.is_set()
    assert not quick.dropped.is_set()


async def test_given_a_lost_state_then_listeners_are_told(events: Events, look: Look) -> None:
    look.fault = StateUnavailable("the shared state cannot be reached: refused")
    listener = events.join()
    assert listener is not None
    _, said = await told(listener.stream(), 2)
    assert said.startswith(b"event: unavailable\n")
    assert b"refused" in said


async def test_given_silence_then_a_comment_keeps_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("picker_fleet.admin.events._PING_S", 0.01)
    assert await told(Listener().stream(), 3) == [b"retry: 1000\n\n", b": ping\n\n", b": ping\n\n"]


async def test_given_the_end_of_the_replica_then_streams_end_and_none_begins(look: Look) -> None:
    events = Events(look)
    running = asyncio.create_task(events.run())
    listener = events.join()
    assert listener is not None
    await until(lambda: look.count == 1)
    running.cancel()
    async with asyncio.timeout(10):
        said = [each async for each in listener.stream()]
    assert len(said) == 2
    assert events.join() is None
    await asyncio.gather(running, return_exceptions=True)


async def test_given_as_many_listeners_as_may_be_when_one_more_comes_then_it_is_told_so(
    events: Events,
) -> None:
    async with asking(api(events=events)) as http:
        joined = [events.join() for _ in range(MAX_LISTENERS)]
        assert all(joined)
        assert problem(await http.get("/api/v1/events"), 503)["code"] == "too_many_listeners"
        events.leave(joined[0])  # type: ignore[arg-type]
        async with http.stream("GET", "/api/v1/events") as response:
            assert response.status_code == 200
            assert events.listening == MAX_LISTENERS


async def test_given_a_client_that_goes_then_its_place_is_free(events: Events) -> None:
    async with asking(api(events=events)) as http:
        async with http.stream("GET", "/api/v1/events") as response:
            assert response.headers["cache-control"] == "no-store"
            lines = response.aiter_lines()
            async with asyncio.timeout(10):
                name = await anext(line async for line in lines if line.startswith("data"))
            assert json.loads(name.removeprefix("data: "))["number"] >= 1
        # A turn of the loop may pass between the client's going and its being seen
        await until(lambda: not events.listening)


async def test_given_an_open_stream_when_the_replica_ends_then_the_server_does_not_wait(look: Look) -> None:
    # Given a client that listens
    events = Events(look)
    running = asyncio.create_task(events.run())
    async with asking(api(events=events)) as http, http.stream("GET", "/api/v1/events") as response:
        lines = response.aiter_lines()
        await anext(lines)
        # When the replica ends its parts
        running.cancel()
        # Then the stream ends well, without the server's being forced
        async with asyncio.timeout(10):
            rest = [line async for line in lines]
        assert rest[-1] == ""
    await asyncio.gather(running, return_exceptions=True)


async def test_given_a_client_that_never_reads_then_its_stream_is_given_up(
    events: Events, look: Look
) -> None:
    # Given events far larger than what a connection takes in, and a client that asks and reads nothing
    look.name = "x" * 4_000_000
    async with serving(api(events=events), "127.0.0.1:0") as address:
        host, port = address.split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(b"GET /api/v1/events HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        await met(lambda: events.listening == 1)
        # Then it is dropped, though the connection never takes the rest
        await met(lambda: events.listening == 0)
        writer.transport.abort()
