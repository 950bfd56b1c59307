"""Fetching metrics pages: kept connections, encodings, redirects, TLS, labels and faults."""

import asyncio
import gzip
import ssl
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from background import until
from page_server import PAGE, PageServer, answered, serving
from tables import cases
from tls_files import authority

from picker_fleet.domain.engines import ENGINES
from picker_fleet.domain.request import Endpoint
from picker_fleet.domain.scraping import Scraping
from picker_fleet.endpoints.page_fetch import Access, Connection, FetchError, Page, place_of

NO_ACCESS = Access(Scraping())


@pytest.fixture
async def server() -> AsyncIterator[PageServer]:
    async with serving() as server:
        yield server


@pytest.fixture
async def page(server: PageServer) -> AsyncIterator[Page]:
    connection = Connection(server.address)
    yield Page(connection, "/metrics", NO_ACCESS)
    connection.close()


async def fetch(page: Page) -> bytes:
    parts: list[bytes] = []
    async with asyncio.timeout(20):
        await page.read(lambda part: parts.append(part) is None)
    assert all(len(part) <= 32 * 1024 for part in parts)
    return b"".join(parts)


def encoded(body: bytes, encoding: str) -> bytes:
    return answered(body, f"Content-Encoding: {encoding}")


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n"
INTERIM = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
LONG = PAGE * 20_000


@cases("answer, page_bytes, connections", {
    "a length": (answered(PAGE), PAGE, 1),
    "chunks": (CHUNKED, b"abcde", 1),
    "an interim answer": (INTERIM + answered(b"abc"), b"abc", 1),
    "a server that closes": (answered(PAGE, "Connection: close"), PAGE, 2),
    "HTTP/1.0": (answered(PAGE).replace(b"HTTP/1.1", b"HTTP/1.0"), PAGE, 2),
    "two megabytes": (answered(LONG), LONG, 1),
    "gzip": (encoded(gzip.compress(LONG), "gzip"), LONG, 1),
    "deflate": (encoded(zlib.compress(PAGE), "Deflate"), PAGE, 1),
    "deflate without its header": (encoded(zlib.compress(PAGE, wbits=-15), "deflate"), PAGE, 1),
    "the encoding identity": (encoded(PAGE, "identity"), PAGE, 1),
})  # fmt: skip
async def test_metrics_pages_are_fetched_over_one_connection_unless_the_server_closes_it(
    server: PageServer, page: Page, answer: bytes, page_bytes: bytes, connections: int
) -> None:
    server.answer = answer
    assert [await fetch(page) for _ in range(2)] == [page_bytes] * 2
    assert server.connections == connections
    assert server.requests[0].startswith(f"GET /metrics HTTP/1.1\r\nHost: {server.address}\r\n")


async def test_a_page_without_content_length_ends_with_its_connection(server: PageServer, page: Page) -> None:
    server.act = server.cut(b"HTTP/1.0 200 OK\r\n\r\nabc")
    assert [await fetch(page) for _ in range(2)] == [b"abc"] * 2
    assert server.connections == 2


async def test_a_metrics_page_is_fetched_over_ipv6() -> None:
    async with serving("::1") as server:
        connection = Connection(server.address)
        assert await fetch(Page(connection, "/metrics", NO_ACCESS)) == PAGE
        connection.close()


async def test_an_idle_connection_that_the_server_closes_is_no_fault(server: PageServer, page: Page) -> None:
    async def act(writer: asyncio.StreamWriter) -> None:
        if len(server.requests) == 2:
            writer.transport.abort()
        else:
            writer.write(answered(PAGE))

    server.act = act
    assert [await fetch(page) for _ in range(2)] == [PAGE] * 2
    assert (server.connections, len(server.requests)) == (2, 3)


def moved(location: str) -> bytes:
    return answered(b"", f"Location: {location}", status="307 Temporary Redirect")


@pytest.mark.parametrize("location", ["/metrics/", "http://ADDRESS/metrics/"])
async def test_a_metrics_pages_redirect_within_the_server_is_followed_and_remembered(
    server: PageServer, page: Page, location: str
) -> None:
    async def act(writer: asyncio.StreamWriter) -> None:
        has_moved = "GET /metrics/ " in server.requests[-1]
        writer.write(server.answer if has_moved else moved(location.replace("ADDRESS", server.address)))

    server.act = act
    assert [await fetch(page) for _ in range(2)] == [PAGE] * 2
    assert (server.connections, len(server.requests)) == (1, 3)


@cases("answer, kind, said", {
    "an error": (answered(b"no", status="503 Service Unavailable"), "status", "answered 503"),
    "a redirect without end": (moved("/other"), "status", "answered 307, the second redirect"),
    "a redirect to another server": (moved("http://10.0.0.1:80/metrics"), "status", "only another path"),
    "a redirect to another scheme": (moved("https://ADDRESS/metrics"), "status", "only another path"),
    "a redirect to nowhere": (moved(""), "status", "only another path"),
    "another protocol": (b"SSH-2.0-OpenSSH_9.6\r\n", "page", "no HTTP answer"),
    "a long head": (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000, "page", "head of the answer has more than"),
    "interim answers without end": (INTERIM * 2000, "page", "head of the answer has more than"),
    "a bad chunk": (CHUNKED[: CHUNKED.index(b"3\r")] + b"xyz\r\n", "page", "no HTTP answer"),
    "another encoding": (encoded(PAGE, "br"), "page", "encoded as 'br'; gzip and deflate are known"),
    "no gzip": (encoded(PAGE, "gzip"), "page", "is no gzip"),
    "a cut gzip": (encoded(gzip.compress(PAGE)[:-9], "gzip"), "page", "gzip data is truncated"),
})  # fmt: skip
async def test_an_unusable_answer_is_a_fault_and_the_next_answer_is_read(
    server: PageServer, page: Page, answer: bytes, kind: str, said: str
) -> None:
    server.answer = answer.replace(b"ADDRESS", server.address.encode())
    with pytest.raises(FetchError, match=said) as raised:
        await fetch(page)
    assert raised.value.kind == kind
    server.answer = answered(PAGE)
    assert await fetch(page) == PAGE


@cases("part, kind, said", {
    "no byte": (b"", "connection", "closed without an answer"),
    "a part of the head": (b"HTTP/1.1 200 OK\r\nContent-Le", "page", "before the page was complete"),
    "a part of the page": (answered(PAGE)[:-1], "page", "before the page was complete"),
    "no server": (None, "connection", "no connection"),
})  # fmt: skip
async def test_a_server_counts_as_down_only_if_a_new_connection_fails_or_brings_no_byte(
    server: PageServer, page: Page, part: bytes | None, kind: str, said: str
) -> None:
    if part is None:
        server.stop()
    else:
        server.act = server.cut(part)
    with pytest.raises(FetchError, match=said) as raised:
        await fetch(page)
    assert raised.value.kind == kind


async def test_cancelling_a_fetch_closes_its_connection(server: PageServer, page: Page) -> None:
    server.act = server.hang
    task = asyncio.create_task(fetch(page))
    await until(lambda: len(server.requests) == 1)
    task.cancel()
    await asyncio.wait((task,), timeout=10)
    assert task.cancelled()
    server.release()
    await until(lambda: server.open == 0)
    assert await fetch(page) == PAGE


async def test_a_gzip_bomb_is_decoded_only_up_to_the_readers_limit(server: PageServer, page: Page) -> None:
    server.answer = encoded(gzip.compress(bytes(50_000_000), 1), "gzip")
    sizes: list[int] = []
    async with asyncio.timeout(20):
        await page.read(lambda part: sizes.append(len(part)) is None and sum(sizes) < 1_000_000)
    assert sum(sizes) < 1_100_000


@pytest.mark.parametrize("encoding", ["deflate", "gzip"])
async def test_an_encoded_page_may_arrive_byte_by_byte(server: PageServer, page: Page, encoding: str) -> None:
    body = zlib.compress(PAGE) if encoding == "deflate" else gzip.compress(PAGE)

    async def act(writer: asyncio.StreamWriter) -> None:
        head = encoded(body, encoding).removesuffix(body)
        for byte in (head, body[:1], body[1:2], body[2:]):
            writer.write(byte)
            await asyncio.sleep(0.02)

    server.act = act
    assert await fetch(page) == PAGE
    body = body[:1]
    with pytest.raises(FetchError, match="data is truncated"):
        await fetch(page)


def endpoint(**labels: str) -> Endpoint:
    return Endpoint("[fd00::1]:8000", {f"picker-fleet/metrics-{key}": value for key, value in labels.items()})


@cases("labels, settings, expected", {
    "as configured": ({}, {}, ("[fd00::1]:8000", "http", "/metrics")),
    "a port for all": ({}, {"port": 9100, "scheme": "https"}, ("[fd00::1]:9100", "https", "/metrics")),
    "labels": ({"port": "9101", "path": "/m", "scheme": "https"}, {"port": 9100},
               ("[fd00::1]:9101", "https", "/m")),
    "labels with invalid values": ({"port": "080000", "path": "m", "scheme": "ftp"}, {},
                                ("[fd00::1]:8000", "http", "/metrics")),
})  # fmt: skip
def test_labels_of_an_endpoint_give_port_scheme_and_path_of_the_metrics_page(
    labels: dict[str, str], settings: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    place = place_of(endpoint(**labels), (ENGINES["vllm"],), Scraping(**settings))
    assert (place.page_address, place.page_scheme, *place.page_paths) == expected
    assert place.address == "[fd00::1]:8000"


async def test_a_fetch_over_https_uses_the_configured_authority_and_sends_the_token(tmp_path: Path) -> None:
    own, other, token = authority(tmp_path, "own"), authority(tmp_path, "other"), tmp_path / "token"
    token.write_text("secret\n")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(own.cert, own.key)
    server = PageServer()
    await server.start(tls=tls)
    pages = []
    for ca in (None, own.cert, other.cert):
        access = Access(Scraping(scheme="https", ca=ca, token_file=token))
        connection = Connection(server.address, tls=access.context)
        try:
            pages.append(await fetch(Page(connection, "/metrics", access)))
        except FetchError as fault:
            pages.append(f"{fault.kind}: {fault}".encode())
        connection.close()
    server.stop()
    assert pages[:2] == [PAGE, PAGE]
    assert pages[2].startswith(b"page: no TLS: ")  # fault `page`, as the server accepts connections
    assert all("\r\nAuthorization: Bearer secret\r\n" in request for request in server.requests)
    token.write_text("two words")
    with pytest.raises(FetchError, match="has no token"):
        Access(Scraping(token_file=token)).header()
