"""A model server in the benchmark's process, so that one clock times server and load."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import cast

import httptools

from picker_tools.local_fleet.network import LOOPBACK

_ANSWER = json.dumps(
    {"object": "text_completion", "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 1}}
).encode()


class ModelServer(asyncio.Protocol):
    """Serves one connection. A completion takes `served_s()` seconds; every other request, such as a scrape,
    gets `page` at once."""

    page = b""

    def __init__(self, served_s: Callable[[], float]) -> None:
        self._served_s, self._path = served_s, b""
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_message_complete(self) -> None:
        if self._path == b"/v1/completions":
            self.arrived()
            asyncio.get_running_loop().call_later(self._served_s(), self._end)
        else:
            self._answer(self.page)

    def arrived(self) -> None:
        """Hook: called when a completion request has arrived completely."""

    def ended(self) -> None:
        """Hook: called when the answer to a completion request has been written."""

    def _end(self) -> None:
        self._answer(_ANSWER)
        self.ended()

    def _answer(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % len(body) + body)


@contextlib.asynccontextmanager
async def model_server(serve: Callable[[], ModelServer]) -> AsyncIterator[str]:
    """Run a server that calls the function `serve` for each connection; yields the server's `ip:port`."""
    server = await asyncio.get_running_loop().create_server(serve, LOOPBACK, 0)
    async with server:
        yield f"{LOOPBACK}:{server.sockets[0].getsockname()[1]}"
