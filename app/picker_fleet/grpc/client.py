"""One gRPC call to another replica, which budget transfers make (admission/budget_transfer.py).

The requests are signed, so TLS need not check the replica's certificate; grpcio's client cannot omit this
check. Each connection carries one call. A request fits into one frame, so no flow-control window limits the
request; the receive window, which is opened once, limits the response.
"""

import asyncio
import ssl
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from picker_fleet.domain.units import split_host_port
from picker_fleet.grpc import frames
from picker_fleet.grpc.frames import frame
from picker_fleet.grpc.headers import literal

LONGEST_QUESTION: Final = 16 * 1024 - 5  # maximum bytes of a request, to fit in one frame (RFC 9113, 4.2)
LONGEST_ANSWER: Final = 16 * 1024 * 1024  # maximum bytes of a response; `Count` lists each running request
# SETTINGS_INITIAL_WINDOW_SIZE opens the stream's window, and _MORE the connection's, to `LONGEST_ANSWER`.
_WIDE_SETTINGS: Final = frames.SETTING.pack(frames.INITIAL_WINDOW, LONGEST_ANSWER)
_MORE: Final = (LONGEST_ANSWER - frames.DEFAULT_WINDOW).to_bytes(4, "big")


async def call(
    address: str,
    path: str,
    message: bytes,
    context: ssl.SSLContext | None,
    timeout_s: float,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """Call the gRPC method `path` at `address` with `message`, of at most `LONGEST_QUESTION` bytes, over TLS
    if `context` is given. Returns the response's bytes; empty if the method answers with an error.

    Raises:
        OSError: the call gets no answer; it is a TimeoutError after `timeout_s`.
    """
    host, port = split_host_port(address)
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host.strip("[]"), port, ssl=context)
        try:
            fields = (
                (b":method", b"POST"),
                (b":scheme", b"http" if context is None else b"https"),
                (b":path", path.encode()),
                (b":authority", address.encode()),
                (b"content-type", b"application/grpc"),
                (b"te", b"trailers"),
                *((name.encode(), value.encode()) for name, value in metadata.items()),
            )
            block = b"".join(literal(*field) for field in fields)
            body = b"\0" + len(message).to_bytes(4, "big") + message
            writer.write(
                frames.PREFACE
                + frame(frames.SETTINGS, 0, 0, _WIDE_SETTINGS)
                + frame(frames.WINDOW_UPDATE, 0, 0, _MORE)
            )
            writer.write(frame(frames.HEADERS, frames.END_HEADERS, 1, block))
            writer.write(frame(frames.DATA, frames.END_STREAM, 1, body))
            return await _answer(reader, writer)
        except asyncio.IncompleteReadError as fault:
            raise ConnectionError("the connection ended before the answer") from fault
        finally:
            writer.transport.abort()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    answer = bytearray()
    while True:
        head = await reader.readexactly(frames.HEADER_BYTES)
        kind, flags, stream_id = head[3], head[4], int.from_bytes(head[5:9], "big")
        payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
        if kind in (frames.SETTINGS, frames.PING) and not flags & frames.ACK:
            writer.write(frame(kind, frames.ACK, 0, payload if kind == frames.PING else b""))
        elif kind == frames.GOAWAY:
            raise ConnectionError("the called replica ended the connection")
        elif stream_id == 1 and kind == frames.RST_STREAM:
            raise ConnectionError("the called replica reset the stream")
        elif stream_id == 1 and kind == frames.DATA:
            answer += payload
            if len(answer) > LONGEST_ANSWER:
                raise ConnectionError("the called replica's answer is too long")
        if stream_id == 1 and kind in (frames.HEADERS, frames.DATA) and flags & frames.END_STREAM:
            return bytes(answer[5:])
