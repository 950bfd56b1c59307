"""The admin port under slow, greedy and foreign clients, over real connections to the real server."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from admin_client import api, asking, problem
from background import until
from clocks import Clock
from fastapi import FastAPI
from metrics_page import page_of
from starlette import requests
from tls_files import Pair, authority, signed

from picker_fleet.admin.protection import BURST_S, CHANGE_COST, RateLimit, Refused
from picker_fleet.admin.server import ConnectionLimits, serving
from picker_fleet.domain.config import parse
from picker_fleet.domain.sections import Tls
from picker_fleet.grpc import certificates as tls_port
from picker_fleet.grpc.certificates import Certificates
from picker_fleet.telemetry.metrics import Metrics

GET = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
CHUNKED = b"PATCH /api/v1/config HTTP/1.1\r\nhost: %b\r\ntransfer-encoding: chunked\r\n\r\n"
PATIENT_S = 20.0
STRICT = ConnectionLimits(connections=40, request_s=0.05, stalled_s=0.05, pipelined=4)


class Port:
    """A running admin API with raw connections, which the exit stack `opened` closes."""

    def __init__(self, address: str, opened: contextlib.ExitStack) -> None:
        self._address, self._opened = address.split(":"), opened

    async def connect(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection and send `data`."""
        reader, writer = await asyncio.open_connection(*self._address, limit=1024)
        self._opened.callback(lambda: writer.transport.abort())  # this reference keeps the writer alive
        writer.write(data)
        return reader, writer

    async def answer(self, data: bytes) -> bytes:
        """Send `data`; return all bytes that the server sends before it ends the connection."""
        return await read_to_end((await self.connect(data))[0])

    def connections(self) -> int:
        """The number of connections that the server has open, from the kernel."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()][1:]
        port = f"{int(self._address[1]):04X}"
        return sum(row[1].endswith(f":{port}") and row[3] == "01" for row in rows)


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    """Read until the server ends the connection; TimeoutError after 20 s."""
    data = b""
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionResetError):
            while part := await reader.read(65536):
                data += part
    return data


@contextlib.asynccontextmanager
async def port(limits: ConnectionLimits = STRICT, app: FastAPI | None = None) -> AsyncIterator[Port]:
    async with serving(app or api(), "127.0.0.1:0", limits) as address:
        with contextlib.ExitStack() as opened:
            yield Port(address, opened)


HALF_SENT = {
    "nothing": b"",
    "blank lines": b"\r\n\r\n",
    "half a line": b"GET /heal",
    "half the headers": b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx-half: ",
    "half a body": b"PATCH /api/v1/config HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{",
    "a body nobody reads": b"GET /healthz HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{",
    "half a chunk": CHUNKED % b"x" + b"5\r\n{",
    "the next half-sent": GET + b"GET /",
}


async def test_a_connection_with_an_incomplete_request_is_closed() -> None:
    async with port() as here:
        answers = map(here.answer, HALF_SENT.values())
        ends = await asyncio.gather(*answers, return_exceptions=True)
    assert not [name for name, end in zip(HALF_SENT, ends, strict=True) if isinstance(end, TimeoutError)]


async def test_a_connection_whose_request_arrives_byte_by_byte_is_closed() -> None:
    async with port() as here:
        reader, writer = await here.connect(b"GET /healthz HTTP/1.1\r\nx: ")
        ended = asyncio.create_task(read_to_end(reader))
        while not ended.done():
            writer.write(b"y")
            await asyncio.sleep(0.01)
        await ended


async def test_a_client_that_does_not_read_its_answers_is_disconnected() -> None:
    metrics = Metrics()
    for number in range(1000):
        metrics.answered("lean", f"model-{number:0100d}", "ok", 0.01)
        metrics.waited(f"model-{number:0100d}", 0.01, success=True)
    assert len(page_of(metrics)) > 2_000_000  # more bytes than sockets buffer
    async with port(app=api(metrics=metrics)) as here:
        reader, _ = await here.connect(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n" * 3)
        await reader.readline()
        await until(lambda: not here.connections())


async def test_at_the_connection_limit_the_longest_idle_connection_closes_and_event_streams_stay() -> None:
    async with port(ConnectionLimits(connections=4)) as here:
        listener, _ = await here.connect(b"GET /api/v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert await listener.readline() == b"HTTP/1.1 200 OK\r\n"
        idle, _ = await here.connect()
        second, _ = await here.connect(GET)
        assert await second.readline() == b"HTTP/1.1 200 OK\r\n"
        assert await read_to_end(idle) == b""
        assert not listener.at_eof()


LARGE = {
    "a header": b"GET /healthz HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 3_000_000,
    "headers": b"GET /healthz HTTP/1.1\r\n" + b"x: y\r\n" * 500_000,
    "a path": b"GET /" + b"y" * 3_000_000,
    "pipelined requests": GET * 20_000,
    "chunk extensions": CHUNKED % b"localhost" + b"1;" + b"x" * 200 + b"\r\n \r\n" * 20_000,
}


async def test_a_connection_is_closed_after_a_request_with_large_headers_or_framing() -> None:
    async with port(ConnectionLimits(request_s=600)) as here:
        for name, data in LARGE.items():
            assert (await here.answer(data)).count(b"HTTP/1.1 200") <= 2000, name


GREEDY = {
    "empty headers": b"GET /api/v1/endpoints HTTP/1.1\r\nhost: localhost\r\n" + b"a:\r\n" * 3000 + b"\r\n",
    "an encoded path": b"GET /" + b"%41" * 20_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "query fields": b"GET /api/v1/endpoints?" + b"a&" * 32 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
}


async def test_a_request_of_many_tiny_parts_is_refused() -> None:
    async with port(ConnectionLimits(request_s=0.5)) as here:
        for name, data in GREEDY.items():
            assert (await here.answer(data)).startswith(b"HTTP/1.1 400"), name


async def test_cookies_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "cookie_parser", lambda text: pytest.fail(text))
    async with port() as here:
        ask = b"GET /api/v1/endpoints HTTP/1.1\r\nhost: localhost\r\ncookie: a=b\r\n\r\n"
        assert (await here.answer(ask)).startswith(b"HTTP/1.1 200")


OWN_NAMES = [
    "localhost", "LocalHost:8081", "127.0.0.1:8081", "[::1]:8081", "127.8.8.8", "picker.inference.svc",
    "picker.inference.svc.:8081", "a.ops.example.org",
]  # fmt: skip
OTHER_NAMES = [
    "ops.example.org", "evil-ops.example.org", "rebound.example", "localhost.rebound.example",
    "127.0.0.1.rebound.example", "127.0.0.1@rebound.example", "203.0.113.7", "",
]  # fmt: skip


async def test_a_read_is_answered_only_if_its_host_header_names_the_replica() -> None:
    settings = parse({"admin": {"hosts": ["Picker.inference.svc", "*.ops.example.org"], "rate": 1e6}})
    async with asking(api(settings=settings)) as client:
        for host in (*OWN_NAMES, *OTHER_NAMES):
            known, headers = host in OWN_NAMES, {"host": host}
            for path in ("/", "/static/app.js", "/docs", "/api/v1/state", "/api/v1/nonsense"):
                answer = await client.get(path, headers=headers)
                assert (answer.status_code != 421) is known, (host, path)
            if not known:
                assert problem(answer, 421)["code"] == "unknown_host"
            for path in ("/healthz", "/readyz", "/metrics"):  # probes and scrapers may use any host name
                assert (await client.get(path, headers=headers)).status_code == 200, (host, path)
        assert (await client.get("/openapi.json", headers={"host": "rebound.example"})).status_code == 421


ANSWERS: list[tuple[str, str, dict[str, str], int]] = [
    ("GET", "/api/v1/state", {}, 200),
    ("GET", "/metrics", {}, 200),
    ("GET", "/nonsense", {}, 404),
    ("TRACE", "/api/v1/state", {}, 405),
    ("GET", "/api/v1/state", {"host": "rebound.example"}, 421),
    ("GET", "/", {}, 200),
]


async def test_every_answer_of_the_admin_port_has_the_security_headers() -> None:
    async with asking(api()) as client:
        for method, path, headers, status in ANSWERS:
            answer = await client.request(method, path, headers=headers)
            assert answer.status_code == status, (method, path)
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            for part in ("default-src 'none'", "base-uri 'none'", "frame-ancestors 'none'"):
                assert part in answer.headers["content-security-policy"], (method, path)
            assert answer.headers["cache-control"] == ("no-cache" if path == "/" else "no-store")


async def test_a_request_to_the_admin_port_needs_exactly_one_host_header() -> None:
    async with port() as here:
        for hosts in (b"", b"host: localhost\r\nhost: rebound.example\r\n"):
            request = b"GET /api/v1/state HTTP/1.1\r\nconnection: close\r\n" + hosts + b"\r\n"
            assert (await here.answer(request)).startswith(b"HTTP/1.1 421")


async def no_delay(_: float) -> None: ...


def limit(per_s: float, clock: Clock | None = None) -> RateLimit:
    return RateLimit(per_s, clock or Clock(), no_delay)


async def passes(rate_limit: RateLimit, host: str = "10.0.0.1", method: str = "GET") -> bool:
    request: Any = SimpleNamespace(client=SimpleNamespace(host=host), method=method)
    try:
        await rate_limit(request)
    except Refused as refusal:
        return refusal.code != "too_many_calls"
    return True


async def test_after_a_burst_admin_calls_pass_at_the_configured_rate() -> None:
    clock = Clock()
    rate_limit = limit(10, clock)
    assert [await passes(rate_limit) for _ in range(25)] == [True] * int(10 * BURST_S) + [False] * 5
    clock.now_s += 0.1
    assert [await passes(rate_limit) for _ in range(3)] == [True, False, False]
    assert await passes(rate_limit, "10.0.0.2")  # each client address has a rate limit of its own


async def test_a_change_counts_as_ten_calls_and_a_first_change_passes_at_any_rate() -> None:
    rate_limit = limit(10)
    passed = [await passes(rate_limit, method=method) for method in ("POST", "PATCH", "GET")]
    assert (passed, CHANGE_COST) == ([True, True, False], 10)
    assert await passes(limit(0.1), method="POST")


async def test_the_rate_limit_charges_a_list_call_by_its_number_of_rows() -> None:
    for query, pages in (
        ("", 6),
        ("?limit=20", 20),
        ("?limit=200", 4),
        ("?limit=1&limit=1000", 4),
        ("?limit=x", 6),
    ):
        settings = parse({"admin": {"rate": 10}})
        async with asking(api(settings=settings, rate_limit=limit)) as client:
            answers = [await client.get(f"/no/such/flows{query}") for _ in range(21)]
        assert [answer.status_code != 429 for answer in answers] == [True] * pages + [False] * (21 - pages)


async def test_the_refusal_of_a_change_says_when_ten_calls_are_available() -> None:
    async with asking(api(settings=parse({"admin": {"rate": 2}}), rate_limit=limit)) as client:
        await client.post("/api/v1/pause")
        answer = await client.post("/api/v1/pause")
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "5"


CALLS: list[tuple[str, str, dict[str, str]]] = [
    *(("GET", f"/api/v1/{path}", {}) for path in ("state", "flows", "config", "events")),
    ("GET", "/nonsense", {}),
    ("GET", "/api/v1/nonsense", {}),
    ("POST", "/api/v1/state", {}),
    ("GET", "/api/v1/state", {"host": "rebound.example"}),
    ("GET", "/api/v1/state", {"host": "["}),
    ("GET", "/api/v1/state", {"authorization": "Bearer wrong"}),
]


async def test_a_client_above_its_rate_gets_429_and_health_and_metrics_still_answer() -> None:
    settings, clock = parse({"admin": {"rate": 1, "token": "s3cret-!"}}), Clock()
    async with asking(api(settings=settings, rate_limit=lambda per_s: limit(per_s, clock))) as client:
        for method, path, headers in CALLS:
            clock.now_s += 3600
            # Each call counts towards the rate limit, whatever its answer.
            assert (await client.request(method, path, headers=headers)).status_code != 429, (method, path)
            for _ in range(CHANGE_COST):
                answer = await client.request(method, path, headers=headers)
            assert problem(answer, 429)["code"] == "too_many_calls", (method, path)
            assert int(answer.headers["retry-after"]) >= 1
        for free in ("/healthz", "/readyz", "/metrics"):
            assert (await client.get(free)).status_code == 200


async def test_the_admin_port_speaks_tls_with_the_current_certificate(tmp_path: Path) -> None:
    trusted = authority(tmp_path, "ours")
    first, second = signed(tmp_path, "first", trusted), signed(tmp_path, "second", trusted)
    used = Pair(tmp_path / "used.crt", tmp_path / "used.key")

    def use(pair: Pair) -> None:
        used.cert.write_bytes(pair.cert.read_bytes())
        used.key.write_bytes(pair.key.read_bytes())

    use(first)
    certificates = Certificates(Tls(cert=used.cert, key=used.key), "admin.tls", "http/1.1")
    context = ssl.create_default_context(cafile=trusted.cert)
    async with serving(api(), "127.0.0.1:0", certificates=certificates) as address:
        for name in ("first", "second"):
            reader, writer = await asyncio.open_connection(*address.split(":"), ssl=context)
            writer.write(GET)
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            assert (("commonName", name),) in writer.get_extra_info("peercert")["subject"]
            writer.transport.abort()
            use(second)
            certificates.reload()
        # A client without TLS gets no answer.
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(GET)
        assert b"200" not in await read_to_end(reader)
        writer.transport.abort()


async def test_unfinished_tls_handshakes_end_when_new_ones_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_port, "_HANDSHAKES", 8)
    trusted = authority(tmp_path, "ours")
    pair = signed(tmp_path, "admin", trusted)
    certificates = Certificates(Tls(cert=pair.cert, key=pair.key), "admin.tls", "http/1.1")
    context = ssl.create_default_context(cafile=trusted.cert)
    port = serving(api(), "127.0.0.1:0", certificates=certificates)
    async with port as address, asyncio.timeout(PATIENT_S):
        silent = [await asyncio.open_connection(*address.split(":")) for _ in range(20)]
        for reader, _ in silent[:12]:
            assert await read_to_end(reader) == b""
        reader, writer = await asyncio.open_connection(*address.split(":"), ssl=context)
        writer.write(GET)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        for _, each in [*silent, (reader, writer)]:
            each.transport.abort()
