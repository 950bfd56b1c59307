"""Sends one HTTP/2 request with any headers and trailers, on its own connection."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import h2.config
import h2.connection
import h2.events
import h2.settings
import httpx

Fields = Sequence[tuple[str, str]]
_HEAD = [(":method", "POST"), (":path", "/v1/completions"), (":scheme", "http"), (":authority", "x")]
_HEAD.append(("content-type", "application/json"))


class Upload:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, window: int) -> None:
        self._reader, self._writer = reader, writer
        # A hostile client sends headers that h2 would refuse, such as the same name twice.
        config = h2.config.H2Configuration(header_encoding="utf-8", validate_outbound_headers=False)
        self._h2 = h2.connection.H2Connection(config)
        sizes = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
        self._h2.local_settings = h2.settings.Settings(client=True, initial_values=sizes)
        self._h2.initiate_connection()
        self._status = ""
        self._over = False

    async def send(self, body: bytes, fields: Fields = (), trailers: Fields = ()) -> None:
        """Send headers, all of `body` as fast as flow control allows, and trailers, if any."""
        await self.send_open(body, fields)
        if self._over:
            return
        if trailers:
            self._h2.send_headers(1, trailers, end_stream=True)
        else:
            self._h2.end_stream(1)
        await self._flush()

    async def send_open(self, body: bytes, fields: Fields = ()) -> None:
        """Send headers and all of `body`, but do not end the stream. Stop if the server ends the stream."""
        self._h2.send_headers(1, [*_HEAD, *fields])
        await self._flush()
        at = 0
        while at < len(body):
            while not (room := min(self._h2.local_flow_control_window(1), 16_384, len(body) - at)):
                await self._receive()
                if self._over:
                    return
            self._h2.send_data(1, body[at : at + room])
            at += room
            await self._flush()

    async def send_invalid(self) -> None:
        """Send another request, on stream 3, with a header that HTTP/2 forbids."""
        self._h2.send_headers(3, [*_HEAD, ("te", "gzip")], end_stream=True)
        await self._flush()

    async def end(self) -> None:
        """End the stream of the request."""
        self._h2.end_stream(1)
        await self._flush()

    async def open_window(self, size: int) -> None:
        """Allow Envoy to send `size` bytes more of the answer."""
        self._h2.increment_flow_control_window(size, stream_id=1)
        await self._flush()

    async def answered(self) -> str:
        """The response status, after the end of the answer."""
        while not self._over:
            await self._receive()
        return self._status

    async def _flush(self) -> None:
        self._writer.write(self._h2.data_to_send())
        await self._writer.drain()

    async def _receive(self) -> None:
        data = await self._reader.read(65536)
        assert data, "Envoy closed the connection"
        for event in self._h2.receive_data(data):
            if getattr(event, "stream_id", 1) == 3:
                continue
            if isinstance(event, h2.events.ResponseReceived):
                self._status = dict(event.headers)[":status"]
            if isinstance(event, h2.events.StreamReset):
                self._over = True
                if event.error_code or not self._status:  # else: Envoy needs no more of the request's body
                    self._status = f"reset {event.error_code}"
            self._over = self._over or isinstance(event, h2.events.StreamEnded)
        await self._flush()


@asynccontextmanager
async def upload(url: str, window: int = 65_535) -> AsyncIterator[Upload]:
    """Connect to `url`; Envoy may send `window` bytes of each answer until the client allows more."""
    at = httpx.URL(url)
    async with asyncio.timeout(90):
        reader, writer = await asyncio.open_connection(at.host, at.port)
        try:
            yield Upload(reader, writer, window)
        finally:
            writer.transport.abort()
