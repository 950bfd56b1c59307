"""ASGI helpers for a simulated model server: read bodies, write answers, and detect disconnects."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from picker_fleet.domain.errors import ClientGone
from picker_tools.simulator.request import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BODY_BYTES = 32 * 1024 * 1024
READ_TIMEOUT_S = 60.0  # for a whole body
WRITE_TIMEOUT_S = 60.0  # for one write to a client that does not read

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
TEXT = b"text/plain; version=0.0.4; charset=utf-8"


async def read_body(receive: Receive) -> bytes:
    """Read the whole body.

    Raises:
        ApiError: 413 if the body exceeds `MAX_BODY_BYTES`, 408 if it takes longer than `READ_TIMEOUT_S`.
        ClientGone: the client disconnected first.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone("disconnected before its body was complete")
                body += message["body"]
                if len(body) > MAX_BODY_BYTES:
                    raise ApiError(
                        f"the body is larger than {MAX_BODY_BYTES} bytes",
                        status=413,
                        code="payload_too_large",
                    )
                if not message["more_body"]:
                    return bytes(body)
    except TimeoutError:
        raise ApiError("the body did not arrive in time", status=408, code="request_timeout") from None


async def watch(receive: Receive) -> None:
    """Wait for the client to disconnect. Call it once the whole body is read.

    Raises:
        ClientGone: the client disconnected.
    """
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone("disconnected before its answer was complete")


class Reply:
    """Sends the answer to one request. A write longer than `WRITE_TIMEOUT_S` raises TimeoutError."""

    def __init__(self, send: Send, *, served_by: bytes) -> None:
        self._send = send
        self._served_by = served_by
        self.started = False

    async def start(self, status: int, media: bytes, *extra: tuple[bytes, bytes]) -> None:
        headers = [(b"content-type", media), (b"x-served-by", self._served_by), *extra]
        self.started = True
        await self._write({"type": "http.response.start", "status": status, "headers": headers})

    async def body(self, part: bytes, *, more: bool) -> None:
        await self._write({"type": "http.response.body", "body": part, "more_body": more})

    async def whole(self, status: int, media: bytes, body: bytes, *extra: tuple[bytes, bytes]) -> None:
        await self.start(status, media, (b"content-length", str(len(body)).encode()), *extra)
        await self.body(body, more=False)

    async def _write(self, message: MutableMapping[str, Any]) -> None:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await self._send(message)
