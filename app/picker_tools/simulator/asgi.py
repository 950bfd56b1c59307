"""The few pieces of ASGI that a simulated server needs: bodies in, answers out, clients that leave."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from picker_fleet.errors import ClientGone
from picker_tools.simulator.refusal import Refusal

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BODY_BYTES = 32 * 1024 * 1024
READ_TIMEOUT_S = 60.0  # a whole body
WRITE_TIMEOUT_S = 60.0  # one write to a client that does not read

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
TEXT = b"text/plain; version=0.0.4; charset=utf-8"


async def read_body(receive: Receive) -> bytes:
    """The whole body.

    Raises:
        Refusal: 413 past `MAX_BODY_BYTES`, 408 if it takes longer than `READ_TIMEOUT_S`.
        ClientGone: the client left first.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone("left before its body was complete")
                body += message["body"]
                if len(body) > MAX_BODY_BYTES:
                    raise Refusal(
                        f"the body is larger than {MAX_BODY_BYTES} bytes",
                        status=413,
                        code="payload_too_large",
                    )
                if not message["more_body"]:
                    return bytes(body)
    except TimeoutError:
        raise Refusal("the body did not come in time", status=408, code="request_timeout") from None


async def watch(receive: Receive) -> None:
    """Wait for the client to leave. Starts after the whole body.

    Raises:
        ClientGone: it has.
    """
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone("left before its answer was complete")


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
