"""A TCP proxy with fault injection: between a replica and Redis, an endpoint, or another loopback server.

The proxy's attributes and methods take effect at once, on old and new connections:

    async with proxy(port) as between:      # clients connect to between.port
        between.delay_s = 0.05              # replies arrive this many seconds later
        between.stalled = True              # both directions stall; no data is lost
        between.hold(True)                  # replies wait until hold(False) or pass_one(); requests pass
        between.vanished = True             # half-open: drops data in both directions, closes nothing
        between.vanished_for = b"vm-1"      # the same for connections on which this text is sent
        between.refusing = True             # new connections are closed at once
        between.lose_replies = 3            # drop each of the next replies and reset its connection,
                                            # after the server has executed the command
        between.lose_script_replies = 3     # the same for replies to script calls, on connections that
                                            # have already delivered `spared` such replies
        between.refuse("OOM full", times=3) # answer 3 commands (None: all) with this error
        between.drop_messages = True        # drop published messages only
        between.cut()                       # reset every connection
        between.strand()                    # make every open connection half-open for good; new ones work
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any
from urllib.parse import urlsplit

import hiredis

LOOPBACK = "127.0.0.1"
_CHUNK = 65536
_SUBSCRIBE = b"SUBSCRIBE"
_CALL = b"FCALL\r\n"
_MESSAGES = (b"message", b"pmessage", b"smessage")


class Proxy:
    """Counts replies dropped (`lost`), published messages dropped (`dropped`), and `connections` accepted."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.port = 0
        self.delay_s = 0.0
        self.vanished = self.refusing = False
        self.vanished_for = b""
        self.lose_replies = self.lose_script_replies = self.spared = 0
        self.drop_messages = False
        self.connections = self.lost = self.dropped = 0
        self.requests_flow, self.replies_flow = asyncio.Event(), asyncio.Event()
        self.stalled = False
        self.error, self.errors_left = "", 0.0
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """URL of a Redis behind the proxy."""
        return f"redis://{LOOPBACK}:{self.port}/0"

    @property
    def stalled(self) -> bool:
        return not self.requests_flow.is_set()

    @stalled.setter
    def stalled(self, on: bool) -> None:
        self.hold(on)
        self.requests_flow.clear() if on else self.requests_flow.set()

    def hold(self, on: bool) -> None:
        """Hold replies, or let replies pass."""
        self._passes_one = False
        self.replies_flow.clear() if on else self.replies_flow.set()

    def pass_one(self) -> None:
        """Let one of the held replies pass."""
        self.hold(False)
        self._passes_one = True

    async def passing(self) -> None:
        """Wait until the proxy may forward a held reply."""
        await self.replies_flow.wait()
        if self._passes_one:
            self.hold(True)

    def refuse(self, error: str, times: int | None = None) -> None:
        """Answer the next `times` commands (None: all commands) with `error`, without forwarding them."""
        self.error, self.errors_left = error, math.inf if times is None else times

    def cut(self) -> None:
        """Reset every connection."""
        for link in list(self._links):
            link.cut()

    def strand(self) -> None:
        """Drop all data of the open connections in both directions, and never close them."""
        for link in self._links:
            link.stranded = True

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        link: _Link | None = None
        try:
            with contextlib.suppress(OSError):
                if self.refusing:
                    return
                self.connections += 1
                link = _Link(self, (reader, writer), await asyncio.open_connection(LOOPBACK, self._target))
                self._links.add(link)
                await link.carry()
        except asyncio.CancelledError:
            pass  # the proxy is closing; no other task awaits this task
        finally:
            self._tasks.discard(task)
            if link is not None:
                self._links.discard(link)
                link.cut()
            writer.transport.abort()

    async def close(self) -> None:
        await _cancelled(*self._tasks)


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Link:
    """One connection from a client, and the connection to the server that belongs to it."""

    def __init__(self, proxy: Proxy, client: Ends, server: Ends) -> None:
        self._proxy = proxy
        self._client, self._server = client, server
        self._subscribed = self._calls = self._is_chosen = False
        self._called = 0
        self._replies_read = hiredis.Reader()  # parses the server's replies to a subscriber
        self.stranded = False

    @property
    def _gone(self) -> bool:
        return self.stranded or self._proxy.vanished or (self._is_chosen and self._proxy.vanished_for != b"")

    def cut(self) -> None:
        self._client[1].transport.abort()
        self._server[1].transport.abort()

    async def carry(self) -> None:
        """Forward data in both directions until client or server closes its connection."""
        ways = {asyncio.ensure_future(self._requests()), asyncio.ensure_future(self._replies())}
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancelled(*ways)

    async def _requests(self) -> None:
        reader, writer = self._client[0], self._server[1]
        refused = hiredis.Reader()  # commands and replies have the same wire format
        while data := await reader.read(_CHUNK):
            await self._proxy.requests_flow.wait()
            chosen = self._proxy.vanished_for
            self._is_chosen = self._is_chosen or (chosen != b"" and chosen in data)
            if self._proxy.errors_left > 0:
                refused.feed(data)
                while refused.gets() is not False:
                    self._proxy.errors_left -= 1
                    self._client[1].write(f"-{self._proxy.error}\r\n".encode())
            elif not self._gone:
                self._subscribed = self._subscribed or _SUBSCRIBE in data.upper()
                self._calls = _CALL in data.upper()
                writer.write(data)
        await self._stay_if_vanished()

    async def _replies(self) -> None:
        """Forward each chunk `delay_s` after it arrives, so order and spacing of chunks stay the same."""
        reader, loop = self._server[0], asyncio.get_running_loop()
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        passing = asyncio.ensure_future(self._pass(late))
        try:
            while data := await reader.read(_CHUNK):
                if not self._gone and self._is_to_lose():
                    self._proxy.lost += 1
                    self.cut()
                    return
                if self._subscribed:
                    data = self._without_messages(data)
                if data:
                    late.put_nowait((loop.time() + self._proxy.delay_s, data))
            await late.join()
            await self._stay_if_vanished()
        finally:
            await _cancelled(passing)

    def _is_to_lose(self) -> bool:
        if self._proxy.lose_replies > 0:
            self._proxy.lose_replies -= 1
            return True
        if self._calls and self._called >= self._proxy.spared and self._proxy.lose_script_replies > 0:
            self._proxy.lose_script_replies -= 1
            return True
        self._called += self._calls
        return False

    async def _pass(self, late: asyncio.Queue[tuple[float, bytes]]) -> None:
        writer, loop = self._client[1], asyncio.get_running_loop()
        while True:
            due, data = await late.get()
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
            await self._proxy.passing()
            if not self._gone:
                writer.write(data)
            late.task_done()

    async def _stay_if_vanished(self) -> None:
        """If the peer has vanished, wait forever: a vanished peer never closes its connection."""
        if self._gone:
            await asyncio.Event().wait()

    def _without_messages(self, data: bytes) -> bytes:
        """Parse the server's replies to a subscriber; drop published messages if `drop_messages` is set."""
        self._replies_read.feed(data)
        passed = []
        while (reply := self._replies_read.gets()) is not False:
            if self._proxy.drop_messages and isinstance(reply, list) and reply[0] in _MESSAGES:
                self._proxy.dropped += 1
            else:
                passed.append(_resp2(reply))
        return b"".join(passed)


async def _cancelled(*tasks: "asyncio.Future[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _resp2(reply: Any) -> bytes:
    """The value `reply` in RESP2's wire format."""
    match reply:
        case list():
            return b"*%d\r\n%b" % (len(reply), b"".join(map(_resp2, reply)))
        case int():
            return b":%d\r\n" % reply
        case None:
            return b"$-1\r\n"
        case Exception():
            return b"-%b\r\n" % str(reply).encode()
    return b"$%d\r\n%b\r\n" % (len(reply), reply)


def proxy_to(url: str) -> AbstractAsyncContextManager[Proxy]:
    """A `Proxy` to the Redis at `url`."""
    return proxy(urlsplit(url).port or 6379)


@contextlib.asynccontextmanager
async def proxy(port: int) -> AsyncIterator[Proxy]:
    """A `Proxy` to `port` on the loopback, run by this event loop."""
    between = Proxy(port)
    listener = await asyncio.start_server(between.accept, LOOPBACK, 0)
    between.port = listener.sockets[0].getsockname()[1]
    try:
        yield between
    finally:
        listener.close()
        await between.close()
        await listener.wait_closed()
