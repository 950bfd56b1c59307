"""Model servers in the test's own process, so that their requests in flight are counted exactly."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

_ANSWER = json.dumps(
    {"choices": [{"text": "ok"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}
).encode()


async def read_request(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes]:
    """Read one request: its first line, its headers by lower-case name, and its body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") != "chunked":
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    else:  # bodies that pass through the picker are chunked
        chunks = []
        while size := int(await reader.readline(), 16):
            chunks.append((await reader.readexactly(size + 2))[:-2])
        while await reader.readline() != b"\r\n":  # trailers
            pass
        body = b"".join(chunks)
    return first, headers, body


class CountingServers:
    """Counts `in_flight` over all servers, and its `peak` since `forget_peak`. A request takes `service_s`.

    `last_body` and `last_headers` are the last request's. Each answer is `answer`, of content type `kind`.
    """

    def __init__(self, service_s: float) -> None:
        self.service_s = service_s
        self.in_flight = 0
        self.peak = 0
        self.served = 0
        self._one_served = asyncio.Condition()
        self.last_body, self.last_headers = b"", dict[str, str]()
        self.answer, self.kind = _ANSWER, b"application/json"
        self.addresses: list[str] = []

    def forget_peak(self) -> None:
        self.peak = self.in_flight

    async def until_served(self, more: int, within_s: float = 60.0) -> None:
        """Wait until `more` requests have been served after this call."""
        goal = self.served + more
        async with asyncio.timeout(within_s), self._one_served:
            await self._one_served.wait_for(lambda: self.served >= goal)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The end of the test cancels the handlers of open connections.
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                await self._one(reader, writer)
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, headers, body = await read_request(reader)
        if first.startswith("GET"):
            await _answer(writer, b"", b"text/plain")
            return
        self.last_body, self.last_headers = body, headers
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            await asyncio.sleep(self.service_s)
        finally:
            self.in_flight -= 1
        async with self._one_served:
            self.served += 1
            self._one_served.notify_all()
        await _answer(writer, self.answer, self.kind)


async def _answer(writer: asyncio.StreamWriter, body: bytes, kind: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (kind, len(body))
    writer.write(head + body)
    await writer.drain()


@contextlib.asynccontextmanager
async def counting_servers(count: int, service_s: float) -> AsyncIterator[CountingServers]:
    """Start `count` servers on free ports of the loopback."""
    servers = CountingServers(service_s)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            # Envoy opens one connection for each request in flight.
            server: Any = await asyncio.start_server(servers.handle, "127.0.0.1", 0, backlog=512)
            await stack.enter_async_context(server)
            servers.addresses.append(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        yield servers
