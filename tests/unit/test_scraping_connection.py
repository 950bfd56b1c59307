"""One page over one kept connection: every way an answer can come, and every way it can fail."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from page_server import PAGE, PageServer, answered, serving

from picker_fleet.endpoints.metrics_page import Connection, FetchError


@pytest.fixture
async def server() -> AsyncIterator[PageServer]:
    async with serving() as server:
        yield server


@pytest.fixture
async def connection(server: PageServer) -> AsyncIterator[Connection]:
    connection = Connection(server.address, "/metrics", max_page_bytes=1000)
    yield connection
    connection.close()


async def fetch(connection: Connection) -> bytes:
    async with asyncio.timeout(20):
        return await connection.fetch()


async def test_pages_come_over_one_connection(server: PageServer, connection: Connection) -> None:
    pages = [await fetch(connection) for _ in range(3)]
    assert pages == [PAGE] * 3
    assert server.connections == 1
    assert server.requests[0].startswith(f"GET /metrics HTTP/1.1\r\nHost: {server.address}\r\n")


async def test_a_chunked_page_is_put_together(server: PageServer, connection: Connection) -> None:
    server.answer = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n"
    )
    assert [await fetch(connection) for _ in range(2)] == [b"abcde"] * 2
    assert server.connections == 1


async def test_a_page_may_end_with_its_connection(server: PageServer, connection: Connection) -> None:
    async def act(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nabc")
        await writer.drain()
        writer.close()

    server.act = act
    assert [await fetch(connection) for _ in range(2)] == [b"abc"] * 2
    assert server.connections == 2


async def test_a_server_that_closes_after_each_answer_is_no_fault(
    server: PageServer, connection: Connection
) -> None:
    server.answer = answered(PAGE, "Connection: close")
    assert [await fetch(connection) for _ in range(2)] == [PAGE] * 2
    assert server.connections == 2


async def test_an_interim_answer_is_passed_over(server: PageServer, connection: Connection) -> None:
    server.answer = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + answered(b"abc")
    assert await fetch(connection) == b"abc"


async def test_a_connection_closed_while_idle_costs_nothing(
    server: PageServer, connection: Connection
) -> None:
    async def act(writer: asyncio.StreamWriter) -> None:
        if len(server.requests) == 2:
            writer.transport.abort()
        else:
            writer.write(answered(PAGE))

    server.act = act
    assert [await fetch(connection) for _ in range(2)] == [PAGE] * 2
    assert server.connections == 2
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (answered(b"no", status="503 Service Unavailable"), "status", "answered 503"),
        (answered(b"", "Location: /metrics/", status="307 Temporary Redirect"), "status", "answered 307"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "page", "no HTTP answer"),
        (answered(b"x" * 1001), "page", "more than 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "page", "no HTTP answer"),
    ],
)
async def test_a_wrong_answer_is_a_fault_and_ends_its_connection(
    server: PageServer, connection: Connection, answer: bytes, kind: str, said: str
) -> None:
    server.answer = answer
    with pytest.raises(FetchError, match=said) as raised:
        await fetch(connection)
    assert raised.value.kind == kind
    server.answer = answered(PAGE)
    assert await fetch(connection) == PAGE
    assert server.connections == 2


@pytest.mark.parametrize("part", [b"", b"HTTP/1.1 200 OK\r\nContent-Le", answered(PAGE)[:-1]])
async def test_an_answer_cut_short_is_a_fault(
    server: PageServer, connection: Connection, part: bytes
) -> None:
    async def act(writer: asyncio.StreamWriter) -> None:
        writer.write(part)
        await writer.drain()
        writer.close()

    server.act = act
    with pytest.raises(FetchError, match="closed before the page was complete") as raised:
        await fetch(connection)
    assert raised.value.kind == "connection"


async def test_nobody_there_is_a_fault(server: PageServer, connection: Connection) -> None:
    server.stop()
    with pytest.raises(FetchError, match="no connection") as raised:
        await fetch(connection)
    assert raised.value.kind == "connection"


async def test_a_fetch_that_is_given_up_ends_its_connection(
    server: PageServer, connection: Connection
) -> None:
    server.act = server.hang
    task = asyncio.create_task(connection.fetch())
    await server.until(lambda: len(server.requests) == 1)
    task.cancel()
    await asyncio.wait((task,), timeout=10)
    assert task.cancelled()
    server.release()
    await server.until(lambda: server.open == 0)
    assert await fetch(connection) == PAGE
