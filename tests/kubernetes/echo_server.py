"""A server that answers any path and method, as the conformance suite's does, and has no metrics page."""

import asyncio
import json

from counting_servers import read_request

_LIMIT_BYTES = 1 << 20


class EchoServer:
    """Echoes the headers of requests in JSON, and says which address got them."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.StreamWriter] = set()

    async def listen(self, host: str, port: int) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._connections.add(writer)
            try:
                while True:
                    await self._answer(f"{host}:{port}", reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass  # the peer is gone
            finally:
                self._connections.discard(writer)
                writer.close()

        self._servers.append(await asyncio.start_server(serve, host, port, limit=_LIMIT_BYTES))

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for writer in tuple(self._connections):
            writer.close()

    async def _answer(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, headers, _ = await read_request(reader)
        path = first.split(" ")[1]
        status = "404 Not Found" if path == "/metrics" else "200 OK"
        body = json.dumps({"path": path, "headers": headers}).encode()
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
        more = f"x-served-by: {address}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write((head + more).encode() + body)
        await writer.drain()
