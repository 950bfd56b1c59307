"""A model server's metrics page for tests; the server records requests and misbehaves on demand."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from background import until

PAGE = b'vllm:num_requests_waiting{model_name="m"} 3\nvllm:num_requests_running{model_name="m"} 2\n'
PAGE += b'vllm:engine_sleep_state{sleep_state="awake"} 1\n'


def answered(body: bytes, *extra: str, status: str = "200 OK") -> bytes:
    """An HTTP response with a Content-Length."""
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *extra])
    return f"{head}\r\n\r\n".encode() + body


class PageServer:
    """A server that answers every request with the bytes `answer`, or calls the function `act` if `act` is
    set."""

    def __init__(self) -> None:
        self.address = ""
        self.answer = answered(PAGE)
        self.health: bytes | None = None  # answer at the path /health; None: `answer`
        self.act: Callable[[asyncio.StreamWriter], Awaitable[None]] | None = None
        self.requests: list[str] = []
        self.connections = 0
        self.open = 0
        self._released = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def hang(self, _: asyncio.StreamWriter) -> None:
        """A function for `act` that sends nothing until `release` is called."""
        await self._released.wait()

    def cut(self, part: bytes) -> Callable[[asyncio.StreamWriter], Awaitable[None]]:
        """A function for `act` that sends the bytes `part` and ends the connection."""

        async def act(writer: asyncio.StreamWriter) -> None:
            writer.write(part)
            await writer.drain()
            writer.close()

        return act

    def release(self) -> None:
        self.act = None
        self._released.set()

    async def start(
        self, port: int = 0, host: str = "127.0.0.1", *, tls: ssl.SSLContext | None = None
    ) -> None:
        self._server = await asyncio.start_server(self._serve, host, port, ssl=tls)
        host, bound = self._server.sockets[0].getsockname()[:2]
        self.address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"

    def stop(self) -> None:
        """Accept no new connections."""
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while not writer.is_closing():
                    request = await reader.readuntil(b"\r\n\r\n")
                    self.requests.append(request.decode())
                    if self.act is None:
                        is_health = self.health and request.startswith(b"GET /health ")
                        writer.write(self.health if is_health and self.health else self.answer)
                    else:
                        await self.act(writer)
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def serving(host: str = "127.0.0.1") -> AsyncIterator[PageServer]:
    """A page server on a free port of the loopback."""
    server = PageServer()
    await server.start(host=host)
    try:
        yield server
    finally:
        server.stop()
        server.release()
        await until(lambda: server.open == 0)
