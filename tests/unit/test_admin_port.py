"""The admin port under clients that mean harm: over real connections to the real server."""

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from admin_client import api, asking, problem
from fastapi import FastAPI
from metrics_page import page_of

from picker_fleet.admin.documents import MAX_METRICS_READS, METRICS_INTERVAL_S, MetricsText
from picker_fleet.admin.protection import Refused
from picker_fleet.admin.server import ConnectionLimits, serving
from picker_fleet.config import parse
from picker_fleet.errors import ConfigError
from picker_fleet.request import Completion, Outcome
from picker_fleet.telemetry.metrics import Metrics
from picker_fleet.telemetry.series import OTHER

GET = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
SOON = ConnectionLimits(connections=40, request_s=0.05, stalled_s=0.05, pipelined=4)


class Port:
    """A served API, and raw connections to it."""

    def __init__(self, address: str) -> None:
        self.host, port = address.split(":")
        self.port = int(port)
        self._open: list[asyncio.StreamWriter] = []

    async def connect(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which `data` is sent."""
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1024)
        self._open.append(writer)
        writer.write(data)
        return reader, writer

    async def says(self, data: bytes) -> bytes:
        """What comes back for `data` until the server ends the connection."""
        return await until_end((await self.connect(data))[0])

    def close(self) -> None:
        for writer in self._open:
            writer.transport.abort()


async def until_end(reader: asyncio.StreamReader) -> bytes:
    """What is read until the other side has ended the connection, which it must."""
    said = b""
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionResetError):
            while part := await reader.read(65536):
                said += part
    return said


@contextlib.asynccontextmanager
async def port(limits: ConnectionLimits = SOON, served: FastAPI | None = None) -> AsyncIterator[Port]:
    async with serving(served or api(), "127.0.0.1:0", limits) as address:
        opened = Port(address)
        try:
            yield opened
        finally:
            opened.close()


HALF_SENT = {
    "nothing": b"",
    "blank lines": b"\r\n\r\n",
    "half a line": b"GET /heal",
    "half the headers": b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx-half: ",
    "half a body": b"PATCH /api/v1/config HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{",
    "a body nobody reads": b"GET /healthz HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{",
    "half a chunk": b"PATCH /api/v1/config HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{",
    "the next half-sent": GET + b"GET /",
}


@pytest.mark.parametrize("data", HALF_SENT.values(), ids=HALF_SENT.keys())
async def test_a_request_that_is_only_begun_is_ended(data: bytes) -> None:
    async with port() as here:
        await here.says(data)


async def test_a_request_that_comes_byte_by_byte_is_ended_too() -> None:
    async with port() as here:
        reader, writer = await here.connect(b"GET /healthz HTTP/1.1\r\nx: ")

        async def trickle() -> None:
            while not writer.transport.is_closing():
                writer.write(b"y")
                await asyncio.sleep(0.01)

        async with asyncio.TaskGroup() as group:
            trickling = group.create_task(trickle())
            await until_end(reader)
            trickling.cancel()


async def test_a_client_that_does_not_read_its_answers_is_ended() -> None:
    # Given an answer that no socket takes in whole
    metrics = Metrics()
    for number in range(1000):
        metrics.answered("lean", f"model-{number:0100d}", "ok", 0.01)
        metrics.waited(f"model-{number:0100d}", 0.01, success=True)
    assert len(page_of(metrics)) > 2_000_000
    async with port(served=api(metrics=metrics)) as here:
        reader, _ = await here.connect(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n" * 3)
        await reader.readline()
        # When it is not read, Then the connection ends before its last byte
        async with asyncio.timeout(20):
            while held(here):  # noqa: ASYNC110 - the kernel tells nobody
                await asyncio.sleep(0.05)


def held(here: Port) -> int:
    """How many connections the server holds, as the kernel tells."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()][1:]
    return sum(int(row[1].split(":")[1], 16) == here.port and row[3] == "01" for row in rows)


async def test_fifteen_hundred_half_sent_requests_leave_room_for_an_honest_one() -> None:
    # Given clients that send half of their headers, and never end
    async with port(ConnectionLimits()) as here:
        async with asyncio.TaskGroup() as group:
            for _ in range(1500):
                group.create_task(here.connect(HALF_SENT["half the headers"]))
        # When somebody asks, Then there is an answer at once, and far fewer are held than came
        assert (await here.connect(GET))[0]
        reader, _ = await here.connect(GET)
        async with asyncio.timeout(10):
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        assert held(here) <= ConnectionLimits().connections // 2 + 2


async def test_what_waits_longest_makes_room_and_what_is_answered_is_kept() -> None:
    async with port(ConnectionLimits(connections=4)) as here:
        # Given a listener, and as many as may be beside it
        listener, _ = await here.connect(b"GET /api/v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert await listener.readline() == b"HTTP/1.1 200 OK\r\n"
        first, _ = await here.connect()
        # When more come, Then the oldest of those that wait goes
        second, _ = await here.connect(GET)
        assert await second.readline() == b"HTTP/1.1 200 OK\r\n"
        assert await until_end(first) == b""
        assert not listener.at_eof()


@pytest.mark.parametrize(
    "data",
    [
        b"GET /healthz HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 3_000_000,
        b"GET /healthz HTTP/1.1\r\n" + b"x: y\r\n" * 500_000,
        b"GET /" + b"y" * 3_000_000,
        GET * 20_000,
        b"PATCH /api/v1/config HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        + b"1;" + b"x" * 200 + b"\r\n \r\n" * 20_000,
    ],
    ids=["a header", "headers", "a path", "pipelined requests", "chunk extensions"],
)  # fmt: skip
async def test_a_request_that_is_large_besides_its_body_ends_the_connection(data: bytes) -> None:
    async with port(ConnectionLimits(request_s=600)) as here:
        said = await here.says(data)
        assert said.count(b"HTTP/1.1 200") <= 2000


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("localhost", True),
        ("LocalHost:8081", True),
        ("127.0.0.1:8081", True),
        ("[::1]:8081", True),
        ("127.8.8.8", True),
        ("picker.inference.svc", True),
        ("picker.inference.svc.:8081", True),
        ("a.ops.example.org", True),
        ("ops.example.org", False),
        ("evil-ops.example.org", False),
        ("rebound.example", False),
        ("localhost.rebound.example", False),
        ("127.0.0.1.rebound.example", False),
        ("127.0.0.1@rebound.example", False),
        ("203.0.113.7", False),
        ("", False),
        ("[", False),
    ],
)
async def test_only_a_replicas_own_names_may_be_read_by(host: str, known: bool) -> None:
    settings = parse({"admin": {"hosts": ["Picker.inference.svc", "*.ops.example.org"]}})
    async with asking(api(settings=settings)) as client:
        for path in ("/", "/static/app.js", "/docs", "/openapi.json", "/api/v1/state", "/api/v1/nonsense"):
            answer = await client.get(path, headers={"host": host})
            assert (answer.status_code != 421) is known, path
        if not known:
            assert problem(answer, 421)["code"] == "unknown_host"
        # And who looks after replicas may call them anything
        for spared in ("/healthz", "/readyz", "/metrics"):
            assert (await client.get(spared, headers={"host": host})).status_code == 200


async def test_two_hosts_or_none_are_no_name() -> None:
    async with port() as here:
        for hosts in (b"", b"host: localhost\r\nhost: rebound.example\r\n"):
            asked = b"GET /api/v1/state HTTP/1.1\r\nconnection: close\r\n" + hosts + b"\r\n"
            assert (await here.says(asked)).startswith(b"HTTP/1.1 421")


@pytest.mark.parametrize("name", ["picker:8081", "http://picker", "*", "*.", "a..b", "", "a b", 7])
def test_a_name_that_no_host_can_have_is_refused_at_the_start(name: object) -> None:
    with pytest.raises(ConfigError, match=r"admin\.hosts\.0: "):
        parse({"admin": {"hosts": [name]}})


async def test_no_page_loads_anything_from_elsewhere() -> None:
    async with asking(api()) as client:
        for path in ("/", "/docs"):
            page = await client.get(path)
            assert page.status_code == 200
            assert not re.search(r"(?:src|href|url\()\W*(?:https?:)?//", page.text)
            assert "default-src 'none'" in page.headers["content-security-policy"]
        assert (await client.get("/redoc")).status_code == 404
        # And the page of the API has each of its calls
        described = (await client.get("/openapi.json")).json()
        for route, calls in described["paths"].items():
            for method in calls:
                assert f"<code>{method.upper()} {route}</code>" in page.text


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_page_is_made_once_a_second_however_many_read_it() -> None:
    made = Counter[str]()

    class Counted(Metrics):
        def pieces(self):  # type: ignore[no-untyped-def]
            made["pages"] += 1
            return super().pieces()

    metrics, clock = Counted(), Clock()
    pages = MetricsText(metrics, clock)
    # When many read at once, and others within the second, Then they have the same page
    first = set(await asyncio.gather(*(pages.read(f"10.0.0.{n}") for n in range(50))))
    metrics.adopted()
    clock.now_s += METRICS_INTERVAL_S - 0.01
    first.add(await pages.read("10.0.1.1"))
    assert len(first) == made["pages"] == 1
    # When the second is over, Then the next one is made
    clock.now_s += 0.02
    assert b"epp_adoptions_total 1.0" in await pages.read("10.0.0.1")
    assert made["pages"] == 2


async def test_who_reads_again_and_again_waits_for_the_next_page() -> None:
    metrics = Metrics()
    pages = MetricsText(metrics)
    page = await pages.read("a")
    for _ in range(MAX_METRICS_READS - 1):
        assert await pages.read("a") is page
    waiting = [asyncio.create_task(pages.read("a")) for _ in range(MAX_METRICS_READS + 2)]
    assert await pages.read("b") is page
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    # And no more of them than have had this one get it
    assert all(each is not page for each in answers)
    assert sum(isinstance(each, bytes) for each in answers) == MAX_METRICS_READS
    assert [each.code for each in answers if isinstance(each, Refused)] == ["too_many_calls"] * 2


async def test_a_large_page_is_made_in_slices_between_which_requests_have_their_turn() -> None:
    metrics, turns = Metrics(), 0
    for number in range(100):
        metrics.answered("lean", f"model-{number}", "ok", 0.01)
    making = asyncio.create_task(MetricsText(metrics, slice_s=0.0).read("a"))
    while not making.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 100


def filled(models: int, statuses: int = 1) -> Metrics:
    """Metrics after requests of so many models that a client invented."""
    metrics = Metrics()
    for number in range(models):
        name = f"model-{number}"
        for code in ("ok", "queue_ttl", "total_capacity"):
            metrics.answered("lean", name, code, 0.01, f"variant-{number}")
        for success in (True, False):
            metrics.waited(name, 0.1, success, f"variant-{number}")
        for status in range(200, 200 + statuses):
            ended = Completion("id", Outcome.COMPLETED, status, None, 1, 1, 1.0, 0.1)
            metrics.completed(ended, name)
        metrics.scraped(f"10.{number >> 8}.{number & 255}.1:80", 0.01)
    return metrics


@pytest.mark.parametrize(("models", "statuses"), [(3000, 1), (1000, 300)])
def test_labels_that_others_choose_cannot_make_the_page_large(models: int, statuses: int) -> None:
    page = page_of(filled(models, statuses)).decode()
    assert len(page) < 12_000_000
    values: dict[str, set[str]] = {}
    for label, value in set(re.findall(r'(\w+)="([^"]*)"', page)):
        values.setdefault(label, set()).add(value)
    for label, seen in values.items():
        assert len(seen) <= 1002, label
    if models > 1000:
        assert OTHER in values["model"]
        assert OTHER in values["endpoint"]
    # And a page of which little has changed is mostly kept
    assert max(Counter(line.split("{")[0] for line in page.splitlines()).values()) <= 2_501 * 16


def test_of_a_page_only_what_has_changed_is_written_anew() -> None:
    metrics = filled(100)
    pieces = list(metrics.pieces())
    metrics.answered("lean", "model-7", "ok", 0.01, "variant-7")
    again = list(metrics.pieces())
    anew = [new for old, new in zip(pieces, again, strict=True) if new is not old and old[:1] != b"#"]
    assert len(anew) == 2  # the count and the time of a decision
