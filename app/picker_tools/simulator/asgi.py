"""The parts of ASGI that a simulated server needs: bodies, answers, and clients that disconnect."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from picker_fleet.errors import ClientGone
from picker_tools.simulator.request import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BODY_BYTES = 32 * 1024 * 1024
READ_TIMEOUT_S = 60.0  # of a whole body
WRITE_TIMEOUT_S = 60.0  # one write to a client that does not read

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
TEXT = b"text/plain; version=0.0.4; charset=utf-8"


async def read_body(receive: Receive) -> bytes:
    """The whole body.

    Raises:
        Refusal: 413 past `MAX_BODY_BYTES`, 408 if it takes longer than `READ_TIMEOUT_S`.
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
    """Wait for the client to disconnect, after its whole body was read.

    Raises:
        ClientGone: it disconnected.
    """
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone("disconnected before its answer was complete")


class Reply:
    """One answer to one request. Every write has `WRITE_TIMEOUT_S`, then raises TimeoutError."""

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
