"""Model servers in the test's own process, so their requests in flight are counted exactly."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

_ANSWER = json.dumps(
    {"choices": [{"text": "ok"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}
).encode()


class CountingServers:
    """`in_flight` over all of them, and its `peak` since `forget_peak`. A request takes `service_s`.

    `last_body` is the body of the last request.
    """

    def __init__(self, service_s: float) -> None:
        self.service_s = service_s
        self.in_flight = 0
        self.peak = 0
        self.served = 0
        self._one_served = asyncio.Condition()
        self.last_body = b""
        self.addresses: list[str] = []

    def forget_peak(self) -> None:
        self.peak = self.in_flight

    async def until_served(self, more: int, within_s: float = 60.0) -> None:
        """Wait until `more` requests have been served after this call."""
        goal = self.served + more
        async with asyncio.timeout(within_s), self._one_served:
            await self._one_served.wait_for(lambda: self.served >= goal)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A connection that is open at the end of the test is cancelled.
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            await _answer(writer, b"", b"text/plain")
            return True
        lines = head.decode("latin-1").lower().split("\r\n")
        lengths = [int(line.split(":")[1]) for line in lines if line.startswith("content-length:")]
        if lengths:
            self.last_body = await reader.readexactly(lengths[0])
        else:  # bodies that pass through the picker are chunked
            chunks = []
            while size := int(await reader.readuntil(b"\r\n"), 16):
                chunks.append((await reader.readexactly(size + 2))[:-2])
            while await reader.readuntil(b"\r\n") != b"\r\n":  # trailers
                pass
            self.last_body = b"".join(chunks)
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            await asyncio.sleep(self.service_s)
        finally:
            self.in_flight -= 1
        async with self._one_served:
            self.served += 1
            self._one_served.notify_all()
        await _answer(writer, _ANSWER, b"application/json")
        return True


async def _answer(writer: asyncio.StreamWriter, body: bytes, kind: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (kind, len(body))
    writer.write(head + body)
    await writer.drain()


@contextlib.asynccontextmanager
async def counting_servers(count: int, service_s: float) -> AsyncIterator[CountingServers]:
    """`count` of them on free ports of the loopback."""
    servers = CountingServers(service_s)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            # Envoy opens a connection for each request in flight.
            server: Any = await asyncio.start_server(servers.handle, "127.0.0.1", 0, backlog=512)
            await stack.enter_async_context(server)
            servers.addresses.append(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        yield servers
