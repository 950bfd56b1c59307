"""A body that ends with trailers reaches its model server once, whole, however its messages come."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import h2.config
import h2.connection
import h2.events
import httpx
import pytest
import pytest_asyncio
from counting_servers import CountingServers, counting_servers
from fleet_load import at_rest
from whole_fleet import started

SMALL = json.dumps({"model": "llama", "prompt": "x"}).encode()
LARGE = json.dumps({"model": "llama", "prompt": "x" * 3_000_000}).encode()
HEAD = [
    (":method", "POST"),
    (":path", "/v1/completions"),
    (":scheme", "http"),
    (":authority", "x"),
    ("content-type", "application/json"),
]
TRAILERS = [("x-checksum", "7")]


class Upload:
    """One request over HTTP/2 on a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._h2.initiate_connection()
        self._status = ""
        self._over = False

    async def head(self, fields: list[tuple[str, str]]) -> None:
        self._h2.send_headers(1, [*HEAD, *fields])
        await self._flush()

    async def data(self, body: bytes) -> None:
        """All of `body`, as fast as the other side takes it."""
        while body:
            while not (room := min(self._h2.local_flow_control_window(1), 16_384, len(body))):
                await self._hear()
            self._h2.send_data(1, body[:room])
            body = body[room:]
            await self._flush()

    async def trailers(self) -> None:
        self._h2.send_headers(1, TRAILERS, end_stream=True)
        await self._flush()

    async def answered(self) -> str:
        """The status, once the answer is whole."""
        while not self._over:
            await self._hear()
        return self._status

    async def _flush(self) -> None:
        self._writer.write(self._h2.data_to_send())
        await self._writer.drain()

    async def _hear(self) -> None:
        data = await self._reader.read(65536)
        assert data, "Envoy hung up"
        for event in self._h2.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived):
                self._status = dict(event.headers)[":status"]
            if isinstance(event, h2.events.StreamReset):
                self._status, self._over = f"reset {event.error_code}", True
            self._over = self._over or isinstance(event, h2.events.StreamEnded)
        await self._flush()


@asynccontextmanager
async def upload(url: str) -> AsyncIterator[Upload]:
    at = httpx.URL(url)
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(at.host, at.port)
        try:
            yield Upload(reader, writer)
        finally:
            writer.transport.abort()


@pytest_asyncio.fixture(params=["lean", "standard"], scope="module", loop_scope="module")
async def behind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Any, CountingServers]]:
    async with counting_servers(1, 0.0) as servers:
        config = {"discovery": {"static": [{"address": each} for each in servers.addresses]}}
        options = ("--mode", request.param, "--endpoints", "0", "--replicas", "1")
        folder = tmp_path_factory.mktemp("trailers")
        here = await asyncio.to_thread(lambda: started(folder, options, config))
        try:
            yield here, servers
        finally:
            await asyncio.to_thread(here.stop)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("sized", [False, True], ids=["unsized", "sized"])
@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["small", "large"])
async def test_a_body_with_trailers_reaches_its_model_server_once(
    behind: tuple[Any, CountingServers], body: bytes, sized: bool
) -> None:
    here, servers = behind
    before = servers.served
    async with upload(here.url) as client:
        # When a client ends its body with trailers
        await client.head([("content-length", str(len(body)))] if sized else [])
        await client.data(body)
        await client.trailers()
        # Then it is answered, and its model server has had the body once
        assert await client.answered() == "200"
    assert servers.last_body == body
    assert servers.served == before + 1
    await at_rest(here)
