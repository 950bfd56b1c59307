"""A client of ZeroMQ sockets over TCP, by ZMTP 3.0 without encryption (https://rfc.zeromq.org/spec/23/).

libzmq hands over a message only when the last part has arrived, and bounds neither the number of parts nor
their sum: a peer that sends parts without end fills the memory, whatever ZMQ_RCVHWM and ZMQ_MAXMSGSIZE are.
This client bounds the whole message, and reads no message that the caller has not asked for.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Final

from picker_fleet.state.primary import keepalive_options

_MOST_MESSAGE_BYTES = 512 * 1024  # enough for a step of the engine that stores about 70 000 tokens
_PART_BYTES = 1024  # added to the size of each part, so that the limit also bounds the number of parts
_ANSWER_S = 5.0
_COMMAND_PAUSE_S = 0.002  # pause after a command, such as a heartbeat
_BYTES_A_S = 10 * 1024 * 1024  # read no faster: an engine sends far less, and a flood takes CPU
_MORE, _LONG, _COMMAND = 1, 2, 4  # flags of a frame
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY, _PING, _PONG = b"\x05READY", b"\x04PING", b"\x04PONG"
_PING_CONTEXT = slice(7, 23)  # bytes of a PING that the PONG repeats


@contextlib.asynccontextmanager
async def connected(host: str, port: int, kind: bytes) -> AsyncIterator["Connection"]:
    """A connection to a ZeroMQ socket, as a socket of `kind`, such as b"SUB".

    Raises:
        ConnectionError: no ZeroMQ socket answers.
    """
    with contextlib.ExitStack() as stack:
        try:
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_connection(host, port)
                stack.callback(writer.transport.abort)
                connection = Connection(reader, writer)
                await connection.greet(kind)
        except (OSError, EOFError, ValueError):
            raise ConnectionError(f"no answer on port {port}") from None
        yield connection


class Connection:
    """Sends and receives messages of ZeroMQ: lists of parts. One event loop.

    Each method raises EOFError or OSError if the peer ends the connection.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in keepalive_options().items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    async def greet(self, kind: bytes) -> None:
        """Begin the connection. Raises ValueError if the peer speaks another protocol."""
        self._writer.write(_GREETING)
        await self._reader.readexactly(len(_GREETING))
        self._write(_COMMAND, _READY + b"\x0bSocket-Type" + len(kind).to_bytes(4) + kind)
        flags = await self._reader.readexactly(1)
        if not (await self._body(flags[0], _MOST_MESSAGE_BYTES)).startswith(_READY):
            raise ValueError("the peer is not ready")

    async def send(self, *parts: bytes) -> None:
        """Send a message of `parts`, of at most 255 bytes each."""
        for part in parts[:-1]:
            self._write(_MORE, part)
        self._write(0, parts[-1])
        await self._writer.drain()

    async def receive(self, idle_s: float) -> list[bytes] | None:
        """The parts of the next message; None if none begins within `idle_s` seconds.

        Raises:
            ValueError: the message is too large, or malformed.
            TimeoutError: the message does not end in time.
        """
        until_s = asyncio.get_running_loop().time() + idle_s
        while True:
            try:
                async with asyncio.timeout_at(until_s):
                    (flags,) = await self._reader.readexactly(1)
            except TimeoutError:
                return None
            is_command = flags & _COMMAND != 0
            async with asyncio.timeout(_ANSWER_S):
                if is_command:
                    parts = [await self._body(flags, _MOST_MESSAGE_BYTES)]
                else:
                    parts = await self._parts(flags)
                if is_command and parts[0].startswith(_PING):
                    self._write(_COMMAND, _PONG + parts[0][_PING_CONTEXT])
                    await self._writer.drain()
            pause_s = sum(len(part) + _PART_BYTES for part in parts) / _BYTES_A_S
            await asyncio.sleep(max(pause_s, is_command * _COMMAND_PAUSE_S))
            if not is_command:
                return parts

    async def _parts(self, flags: int) -> list[bytes]:
        """The parts of a message, whose first part has `flags`."""
        parts, left = [await self._body(flags, _MOST_MESSAGE_BYTES)], _MOST_MESSAGE_BYTES
        while flags & _MORE:
            left -= len(parts[-1]) + _PART_BYTES
            (flags,) = await self._reader.readexactly(1)
            parts.append(await self._body(flags, left))
        return parts

    async def _body(self, flags: int, most: int) -> bytes:
        length = await self._reader.readexactly(8 if flags & _LONG else 1)
        if int.from_bytes(length) > most:
            raise ValueError(f"a message has more than {_MOST_MESSAGE_BYTES} bytes")
        return await self._reader.readexactly(int.from_bytes(length))

    def _write(self, flags: int, body: bytes) -> None:
        self._writer.write(bytes((flags, len(body))) + body)
