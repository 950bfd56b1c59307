"""A server that answers any path and method, as the conformance suite's does, and has no metrics page."""

import asyncio
import json
from collections import Counter

_LIMIT_BYTES = 1 << 20


class EchoServer:
    """Echoes the headers of requests in JSON. `served` counts requests by the address that got them."""

    def __init__(self) -> None:
        self.served: Counter[str] = Counter()
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.StreamWriter] = set()

    async def listen(self, host: str, port: int) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._connections.add(writer)
            try:
                while await self._answer(f"{host}:{port}", reader, writer):
                    pass
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

    async def _answer(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        path = first.split(" ")[1]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("transfer-encoding") == "chunked":
            while size := int(await reader.readline(), 16):
                await reader.readexactly(size + 2)
            await reader.readline()
        elif length := int(headers.get("content-length", 0)):
            await reader.readexactly(length)
        found = path != "/metrics"
        if found:
            self.served[address] += 1
        body = json.dumps({"path": path, "headers": headers}).encode()
        status = "200 OK" if found else "404 Not Found"
        writer.write(
            f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nx-served-by: {address}\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await writer.drain()
        return True
