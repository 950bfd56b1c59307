"""Metrics pages of many model servers, served from this process, and a count of who was asked how often."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from picker_tools.local_fleet.network import LOOPBACK


class Pages:
    """The servers' addresses; since `begin`: requests by address, and the longest time one went unasked."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.counts: dict[str, int] = {}
        self._asked_s: dict[str, float] = {}
        self._longest_s: dict[str, float] = {}
        self._answer = b""
        self._clock = asyncio.get_running_loop().time

    def serve(self, page: bytes) -> None:
        """Make this every server's page."""
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {len(page)}\r\n\r\n"
        self._answer = head.encode() + page

    def begin(self) -> None:
        """Count anew."""
        now_s = self._clock()
        self.counts = dict.fromkeys(self.addresses, 0)
        self._asked_s = dict.fromkeys(self.addresses, now_s)
        self._longest_s = dict.fromkeys(self.addresses, 0.0)

    def longest_gap_s(self) -> float:
        """The longest time that any of them went unasked."""
        now_s = self._clock()
        return max(max(longest, now_s - self._asked_s[one]) for one, longest in self._longest_s.items())

    def asked(self, address: str) -> bytes:
        now_s = self._clock()
        self.counts[address] += 1
        self._longest_s[address] = max(self._longest_s[address], now_s - self._asked_s[address])
        self._asked_s[address] = now_s
        return self._answer


class _Server(asyncio.Protocol):
    """Requests have no body and are not sent ahead, so an empty line ends each."""

    def __init__(self, pages: Pages, address: str) -> None:
        self._pages = pages
        self._address = address
        self._begun = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._begun += data
        if self._begun.endswith(b"\r\n\r\n"):
            self._begun = b""
            self._transport.write(self._pages.asked(self._address))


@asynccontextmanager
async def serving(count: int) -> AsyncIterator[Pages]:
    """`count` servers on free ports of the loopback."""
    pages = Pages()
    loop = asyncio.get_running_loop()
    servers = []
    try:
        for _ in range(count):
            listener = socket.create_server((LOOPBACK, 0), backlog=64)
            address = f"{LOOPBACK}:{listener.getsockname()[1]}"
            servers.append(
                await loop.create_server(lambda address=address: _Server(pages, address), sock=listener)
            )
            pages.addresses.append(address)
        pages.begin()
        yield pages
    finally:
        for server in servers:
            server.close()
