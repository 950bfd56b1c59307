"""HTTP/2 of the native gRPC transport: malformed frames, flow control, byte budget, limits and shutdown.

The test peer writes each frame itself, and so can send frames that no client library sends.
"""

import asyncio
import contextlib
import itertools
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from unittest.mock import Mock

import hpack
import pytest
from background import until
from hypothesis import given
from hypothesis import strategies as st
from tables import cases

from picker_fleet.domain.budgets import BodyBudget
from picker_fleet.domain.errors import BufferFull
from picker_fleet.grpc import frames, http2, streams
from picker_fleet.grpc.frames import ACK, DATA, END_HEADERS, END_STREAM, HEADERS, PING, SETTINGS, frame
from picker_fleet.grpc.headers import literal
from picker_fleet.grpc.native import NativeTransport
from picker_fleet.grpc.transport import Handler, Limits, RpcError, Status, Stream

BUDGET_BYTES = 1024 * 1024
MESSAGE_BYTES = 4 * 1024 * 1024
GRPC = ("content-type", "application/grpc")
FIELDS = [(":method", "POST"), (":scheme", "http"), (":path", "/test/Echo"), ("te", "trailers"), GRPC]
ASK = b"\0\0\0\0\2hi"
PING_FRAME = frame(PING, 0, 0, b"12345678")


def window_setting(size: int) -> bytes:
    return frame(SETTINGS, 0, 0, struct.pack(">HL", 4, size))


CANCEL = frames.CANCEL.to_bytes(4, "big")


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def code(self) -> int:
        """The error code of an RST_STREAM or GOAWAY frame."""
        at = 4 if self.kind == frames.GOAWAY else 0
        return int.from_bytes(self.payload[at : at + 4], "big")


class Peer:
    """A client connection that writes and reads single frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.encoder = hpack.Encoder()

    async def send(self, *sent: bytes) -> None:
        self._writer.write(b"".join(sent))
        await self._writer.drain()

    def headers(
        self, stream: int, fields: list[tuple[str, str]] | None = None, flags: int = END_HEADERS
    ) -> bytes:
        block = self.encoder.encode(FIELDS if fields is None else fields)
        return frame(HEADERS, flags, stream, block)

    def request(self, stream: int, data: bytes = ASK, flags: int = END_STREAM) -> bytes:
        """A HEADERS and a DATA frame; by default the two frames are a whole request."""
        return self.headers(stream) + frame(DATA, flags, stream, data)

    async def read(self) -> Frame | None:
        """The next frame from the server; None at the connection's end."""
        try:
            async with asyncio.timeout(30):
                head = await self._reader.readexactly(9)
                high, low, kind, flags, stream = struct.unpack(">BHBBL", head)
                return Frame(kind, flags, stream, await self._reader.readexactly(high << 16 | low))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def until(self, wanted: Callable[[Frame], object]) -> Frame:
        while True:
            got = await self.read()
            assert got is not None, "the connection ended before the wanted frame"
            if wanted(got):
                return got

    async def next(self, kind: int) -> Frame:
        return await self.until(lambda got: got.kind == kind)

    async def reset(self) -> tuple[int, int]:
        """Stream id and error code of the next RST_STREAM frame."""
        got = await self.next(frames.RST_STREAM)
        return got.stream, got.code

    async def served(self) -> int:
        """The id of the next stream whose trailers arrive."""
        return (await self.until(lambda got: got.kind == HEADERS and got.flags & END_STREAM)).stream

    async def ping(self) -> None:
        """Wait until the server answers a ping, and so has read everything sent so far."""
        await self.send(PING_FRAME)
        await self.until(lambda got: got.kind == PING and got.flags & ACK)

    async def ended(self) -> int:
        """The error code of the last GOAWAY before the connection closes."""
        last = await self.next(frames.GOAWAY)
        while (got := await self.read()) is not None:
            last = got if got.kind == frames.GOAWAY else last
        return last.code

    async def answer(self, stream: int) -> list[Frame]:
        """The frames of a stream up to its END_STREAM flag or reset."""
        got: list[Frame] = []
        while not got or not (got[-1].flags & END_STREAM or got[-1].kind == frames.RST_STREAM):
            got.append(await self.until(lambda each: each.stream == stream))
        return got

    async def fields(self, stream: int) -> dict[str, str]:
        """All header fields of a stream until the stream's end."""
        decode = hpack.Decoder().decode
        answer = await self.answer(stream)
        return dict(pair for got in answer if got.kind == HEADERS for pair in decode(got.payload))

    async def data(self, stream: int) -> bytes:
        """The data of a stream until the stream's end."""
        return b"".join(got.payload for got in await self.answer(stream) if got.kind == DATA)

    def cut(self) -> None:
        self._writer.close()


class Server(NamedTuple):
    port: int
    transport: NativeTransport
    budget: BodyBudget

    @asynccontextmanager
    async def peer(self, window: int = 65_535, address: str = "127.0.0.1") -> AsyncIterator[Peer]:
        opened = asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))
        peer = Peer(*await opened)
        await peer.send(frames.PREFACE, window_setting(window))
        try:
            yield peer
        finally:
            peer.cut()


async def echo(stream: Stream) -> bytes | None:
    """Answer a stream with its first message, or with nothing if the stream ends without a message."""
    return await stream.read()


class Held:
    """An echo handler that answers once the event `release` is set."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.waiting = self.cancelled = 0

    async def __call__(self, stream: Stream) -> bytes | None:
        try:
            message = await stream.read()
            self.waiting += 1
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return message


async def deaf(stream: Stream) -> bytes | None:
    """A handler that reads nothing and never answers."""
    await asyncio.Event().wait()
    return None


@asynccontextmanager
async def serving(handler: Handler = echo, **options: Any) -> AsyncIterator[Server]:
    """Run a `NativeTransport` with `options`; at the end the transport's byte budget must be empty."""
    budget = BodyBudget(BUDGET_BYTES)
    transport = NativeTransport({"/test/Echo": handler}, {handler: budget}, MESSAGE_BYTES, **options)
    port = await transport.start("127.0.0.1:0")
    try:
        yield Server(port, transport, budget)
    finally:
        await transport.stop(None)
    assert budget.held_bytes == 0, "every ended stream returns its bytes to the budget"


async def works(server: Server) -> None:
    """Assert that the server answers a request on a new connection."""
    async with server.peer() as peer:
        await peer.send(peer.request(1))
        assert await peer.data(1) == ASK


async def test_a_request_is_answered_with_its_status_in_the_trailers() -> None:
    async with serving() as server, server.peer() as peer:
        await peer.send(peer.request(1))
        start, data, end = await peer.answer(1)
        assert hpack.Decoder().decode(start.payload) == [(":status", "200"), GRPC]
        assert (data.payload, end.kind) == (ASK, HEADERS)
        assert hpack.Decoder().decode(end.payload) == [("grpc-status", "0")]


async def test_a_stream_that_the_server_ends_first_gets_no_error_reset_and_ignores_later_frames() -> None:
    async with serving() as server, server.peer() as peer:
        await peer.send(peer.request(1, flags=0))
        await peer.answer(1)
        assert await peer.reset() == (1, frames.NO_ERROR)
        await peer.send(frame(DATA, END_STREAM, 1, ASK), PING_FRAME)
        assert (await peer.until(lambda got: got.kind != SETTINGS)).kind == PING


PROTOCOL, SIZE, FLOW = frames.PROTOCOL_ERROR, frames.FRAME_SIZE_ERROR, frames.FLOW_CONTROL_ERROR
HPACK, CALM = frames.COMPRESSION_ERROR, frames.ENHANCE_YOUR_CALM
WHOLE = frame(HEADERS, END_HEADERS, 1, hpack.Encoder().encode(FIELDS))
RESET_OF_1 = frame(frames.RST_STREAM, 0, 1, CANCEL)
TOO_MUCH_WINDOW = b"\x7f\xff\xff\xff"


@cases("code, sent", {
    "data of no stream": (PROTOCOL, frame(DATA, 0, 1, ASK)),
    "data of stream 0": (PROTOCOL, frame(DATA, 0, 0, ASK)),
    "an even stream": (PROTOCOL, frame(HEADERS, END_HEADERS, 2, b"\x82")),
    "headers of stream 0": (PROTOCOL, frame(HEADERS, END_HEADERS, 0, b"\x82")),
    "bad HPACK": (HPACK, frame(HEADERS, END_HEADERS, 1, b"\xff" * 20)),
    "an unknown HPACK index": (HPACK, frame(HEADERS, END_HEADERS, 1, b"\xfe")),
    "cut HPACK": (HPACK, frame(HEADERS, END_HEADERS, 1, b"\x00\x7f")),
    "padding over headers": (PROTOCOL, frame(HEADERS, frames.PADDED, 1, b"\x09ab")),
    "no padding length": (PROTOCOL, frame(HEADERS, frames.PADDED, 1, b"")),
    "a cut priority": (PROTOCOL, frame(HEADERS, frames.PRIORITISED, 1, b"\0")),
    "cut headers": (PROTOCOL, frame(HEADERS, 0, 1, b"\x82") + PING_FRAME),
    "a continuation without headers": (PROTOCOL, frame(frames.CONTINUATION, 0, 1, b"")),
    "endless headers": (CALM, frame(HEADERS, 0, 1) + frame(frames.CONTINUATION, 0, 1, b"\x82" * 16_384) * 3),
    "padding over data": (PROTOCOL, WHOLE + frame(DATA, frames.PADDED, 1, b"\x09ab")),
    "a large frame": (SIZE, frame(DATA, 0, 1, b"x" * 16_385)),
    "a push": (PROTOCOL, frame(frames.PUSH_PROMISE, 0, 1, b"\0\0\0\2")),
    "a short ping": (SIZE, frame(PING, 0, 0, b"1")),
    "a ping of a stream": (PROTOCOL, frame(PING, 0, 1, b"12345678")),
    "cut settings": (SIZE, frame(SETTINGS, 0, 0, b"1")),
    "a settings ACK with content": (SIZE, frame(SETTINGS, ACK, 0, b"123456")),
    "settings of a stream": (PROTOCOL, frame(SETTINGS, 0, 3)),
    "a bad setting": (PROTOCOL, frame(SETTINGS, 0, 0, struct.pack(">HL", 2, 2))),
    "a huge window": (FLOW, window_setting(2**31)),
    "a window update of 0": (PROTOCOL, frame(frames.WINDOW_UPDATE, 0, 0, b"\0\0\0\0")),
    "a cut window": (SIZE, frame(frames.WINDOW_UPDATE, 0, 0, b"\0")),
    "too much window": (FLOW, frame(frames.WINDOW_UPDATE, 0, 0, TOO_MUCH_WINDOW)),
    "a window update of an idle stream": (PROTOCOL, frame(frames.WINDOW_UPDATE, 0, 5, b"\0\0\0\1")),
    "a reset of an idle stream": (PROTOCOL, frame(frames.RST_STREAM, 0, 5, b"\0\0\0\1")),
    "a cut reset": (SIZE, frame(frames.RST_STREAM, 0, 1, b"\0")),
    "a priority of stream 0": (PROTOCOL, frame(frames.PRIORITY, 0, 0, b"12345")),
    "a priority of four bytes": (SIZE, frame(frames.PRIORITY, 0, 1, b"\0\0\0\1")),
    "a cut GOAWAY": (SIZE, frame(frames.GOAWAY, 0, 0, b"1")),
    "a closed stream": (frames.STREAM_CLOSED, WHOLE + RESET_OF_1 + WHOLE),
})  # fmt: skip
async def test_a_connection_that_breaks_the_protocol_ends_with_an_error_code(code: int, sent: bytes) -> None:
    async with serving() as server:
        async with server.peer() as peer:
            await peer.send(sent)
            assert await peer.ended() == code
        await works(server)


@pytest.mark.parametrize(
    "first",
    [b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", frames.PREFACE[:9] + b"x" * 20, frames.PREFACE + PING_FRAME],
)
async def test_a_connection_that_does_not_begin_with_preface_and_settings_is_closed(first: bytes) -> None:
    async with serving() as server:
        peer = Peer(*await asyncio.open_connection("127.0.0.1", server.port))
        await peer.send(first)
        assert await peer.ended() == PROTOCOL
        peer.cut()
        await works(server)


@cases("code, fields, after", {
    "no pseudo-headers": (PROTOCOL, [("x", "y")], b""),
    "a pseudo-header at the end": (PROTOCOL, [*FIELDS, (":path", "/test/Echo")], b""),
    "a name in capitals": (PROTOCOL, [*FIELDS, ("Upper", "x")], b""),
    "a header of the connection": (PROTOCOL, [*FIELDS, ("connection", "close")], b""),
    "another length": (PROTOCOL, [*FIELDS, ("content-length", "9")], frame(DATA, END_STREAM, 1, ASK)),
    "trailers that do not end the stream": (PROTOCOL, FIELDS, WHOLE),
    "a window update of 0": (PROTOCOL, FIELDS, frame(frames.WINDOW_UPDATE, 0, 1, b"\0\0\0\0")),
    "too much window": (FLOW, FIELDS, frame(frames.WINDOW_UPDATE, 0, 1, TOO_MUCH_WINDOW)),
})  # fmt: skip
async def test_a_protocol_error_within_one_stream_resets_only_that_stream(
    code: int, fields: list[tuple[str, str]], after: bytes
) -> None:
    async with serving(Held()) as server, server.peer() as peer:
        await peer.send(peer.headers(1, fields), after)
        assert await peer.reset() == (1, code)
        await peer.ping()


@cases("changes, data, status, grpc_status", {
    "another path": ({":path": "/other/Method"}, ASK, "200", "12"),
    "another method": ({":method": "GET"}, ASK, "415", None),
    "another type": ({"content-type": "text/html"}, ASK, "415", None),
    "a compressed message": ({}, b"\1\0\0\0\1x", "200", "12"),
    "too large a message": ({}, b"\0\xff\xff\xff\xff", "200", "8"),
    "a message cut by the end of the stream": ({}, b"\0\0\0\0\5ab", "200", "13"),
})  # fmt: skip
async def test_an_unsupported_grpc_request_is_answered_with_an_error_status(
    changes: dict[str, str], data: bytes, status: str, grpc_status: str | None
) -> None:
    async with serving() as server, server.peer() as peer:
        headers = peer.headers(1, list({**dict(FIELDS), **changes}.items()))
        await peer.send(headers, frame(DATA, END_STREAM, 1, data))
        found = await peer.fields(1)
        assert (found[":status"], found.get("grpc-status")) == (status, grpc_status)


FRAMES = st.builds(frame, st.integers(0, 11), st.integers(0, 255), st.integers(0, 9), st.binary(max_size=24))
VALID = st.sampled_from([WHOLE, frame(DATA, 0, 1, ASK), frame(DATA, END_STREAM, 1, b"\0\0\0"), PING_FRAME])


@given(st.lists(st.binary(max_size=40) | FRAMES | VALID, max_size=12), st.integers(1, 30))
def test_after_random_frames_the_byte_budget_is_empty_and_a_new_connection_is_served(
    sent: list[bytes], size: int
) -> None:
    async def play() -> None:
        async with serving() as server:
            async with server.peer() as peer:
                whole = b"".join(sent)
                for at in range(0, len(whole), size * 7):
                    await peer.send(whole[at : at + size * 7])
            await works(server)

    asyncio.run(play())


async def test_a_message_in_any_number_of_frames_arrives_whole_and_leaves_the_byte_budget_empty() -> None:
    reading = 0

    async def second(stream: Stream) -> bytes | None:
        nonlocal reading
        await stream.read()
        reading += 1
        message = await stream.read()
        assert server.budget.held_bytes == 0
        return message

    async with serving(second) as server:
        message = bytes(range(256)) * 40
        data = b"\0" + len(message).to_bytes(4, "big") + message
        for times, size in enumerate((1, 4, 5, 6, 1000, 16_384)):
            async with server.peer(2**24) as peer:
                await peer.send(peer.request(1, flags=0))
                await until(lambda times=times: reading == times + 1)
                await peer.send(
                    *(frame(DATA, 0, 1, data[at : at + size]) for at in range(0, len(data), size))
                )
                assert await peer.data(1) == data


async def test_padding_of_http2_frames_is_not_part_of_a_message() -> None:
    async with serving() as server, server.peer() as peer:
        await peer.send(peer.request(1, b"\x02" + ASK + b"xx", frames.PADDED | END_STREAM))
        assert await peer.data(1) == ASK


async def test_a_reset_or_a_closed_connection_cancels_the_handler() -> None:
    handler = Held()
    async with serving(handler) as server, server.peer() as peer:
        await peer.send(peer.request(1, flags=0))
        await until(lambda: handler.waiting == 1)
        await peer.send(RESET_OF_1)
        await peer.ping()
        assert handler.cancelled == 1
        await peer.send(peer.request(3, flags=0))
        await until(lambda: handler.waiting == 2)
        peer.cut()
        await until(lambda: handler.cancelled == 2)


async def test_a_handler_that_cancels_itself_resets_its_stream() -> None:
    async def gives_up(stream: Stream) -> bytes | None:
        raise asyncio.CancelledError

    async with serving(gives_up) as server, server.peer() as peer:
        await peer.send(peer.request(1, flags=0))
        assert await peer.reset() == (1, frames.CANCEL)
        await peer.ping()


async def test_unread_messages_close_the_streams_window_and_count_in_the_byte_budget() -> None:
    reads = asyncio.Semaphore(0)

    async def slow(stream: Stream) -> bytes | None:
        while True:
            await reads.acquire()
            if await stream.read() is None:
                return b""

    async with serving(slow) as server, server.peer() as peer:
        size = 16_384
        piece = b"\0" + (size - 5).to_bytes(4, "big") + b"x" * (size - 5)
        count = streams.WINDOW_BYTES // size
        await peer.send(peer.headers(1), *[frame(DATA, 0, 1, piece)] * count)
        kept = count * (size - 5 + streams.MESSAGE_COST) - streams.FREE_BYTES
        await until(lambda: server.budget.held_bytes == kept)
        # Once all messages are read, the window reopens in full; one byte beyond it is a flow-control error.
        for _ in range(count):
            reads.release()
        credit = await peer.until(lambda got: got.kind == frames.WINDOW_UPDATE and got.stream == 1)
        assert int.from_bytes(credit.payload, "big") == streams.WINDOW_BYTES
        assert server.budget.held_bytes == 0
        await peer.send(*[frame(DATA, 0, 1, piece)] * count, frame(DATA, 0, 1, b"x"))
        assert await peer.reset() == (1, FLOW)


async def test_a_message_beyond_the_byte_budget_is_dropped_and_its_handler_gets_buffer_full() -> None:
    async def patient(stream: Stream) -> bytes | None:
        try:
            return await stream.read()
        except BufferFull:
            return b"full"

    async with serving(patient) as server, server.peer(2**24) as peer:
        # Three streams send parts of messages; together the parts exceed the byte budget.
        start = b"\0" + MESSAGE_BYTES.to_bytes(4, "big")[:1] + b"\x08\0\0"
        for stream in (1, 3, 5):
            rest = [frame(DATA, 0, stream, b"x" * 16_384)] * (400 * 1024 // 16_384)
            await peer.send(peer.request(stream, start, flags=0), *rest)
        assert (await peer.data(5))[5:] == b"full"
        assert 0 < server.budget.held_bytes <= BUDGET_BYTES


async def test_a_client_that_reads_slowly_makes_its_handler_wait() -> None:
    written = 0

    async def pour(stream: Stream) -> bytes | None:
        nonlocal written
        for _ in range(100):
            await stream.write(b"x" * 10_000)
            written += 1
        return b"last"

    async with serving(pour) as server, server.peer(window=25_000) as peer:
        await peer.send(peer.request(1))
        await until(lambda: written == 2)
        received = b""
        while not received.endswith(b"last"):
            got = await peer.next(DATA)
            received += got.payload
            assert written * 10_005 <= len(received) + 25_000 + 10_005
            credit = len(got.payload).to_bytes(4, "big")
            if got.payload:
                await peer.send(
                    frame(frames.WINDOW_UPDATE, 0, 1, credit), frame(frames.WINDOW_UPDATE, 0, 0, credit)
                )
        assert len(received) == 100 * 10_005 + 9


async def test_relayed_answers_arrive_in_order_and_wait_for_a_client_that_reads_slowly() -> None:
    answered = 0

    async def relayed(stream: Stream) -> bytes | None:
        def answer(message: bytes) -> tuple[list[bytes], bool]:
            nonlocal answered
            answered += 1
            return [message * 1000, message * 1000], answered == 20

        return await stream.relay(answer)

    names = b"abcdefghijklmnopqrstuvwxyz"
    async with serving(relayed) as server, server.peer(window=5000) as peer:
        sent = [frame(DATA, 0, 1, b"\0\0\0\0\1" + names[at : at + 1]) for at in range(20)]
        await peer.send(peer.headers(1), sent[0])
        await until(lambda: answered == 1)  # the handler waits in `relay` for other messages
        await peer.send(*sent[1:])
        await until(lambda: answered == 3)
        data = b""
        while not (got := await peer.until(lambda each: each.stream == 1)).flags & END_STREAM:
            if got.kind == DATA:
                data += got.payload
                assert answered <= 3 + len(data) // 2010  # more answers wait until the client has read more
                await peer.send(frame(frames.WINDOW_UPDATE, 0, 1, len(got.payload).to_bytes(4, "big")))
    head = b"\0" + (1000).to_bytes(4, "big")
    assert data == b"".join(head + names[at : at + 1] * 1000 for at in range(20) for _ in range(2))


async def test_a_relay_of_answers_ends_with_its_stream_or_with_an_error_of_the_answer_function() -> None:
    async def relayed(stream: Stream) -> bytes | None:
        def answer(message: bytes) -> tuple[list[bytes], bool]:
            if message == b"?":
                raise RpcError(Status.NOT_FOUND, "no answer")
            return [message], False

        return await stream.relay(answer)

    async with serving(relayed) as server, server.peer() as peer:
        await peer.send(peer.request(1, b"\0\0\0\0\1a"))
        assert (await peer.data(1))[5:] == b"a"
        await peer.send(peer.request(3, b"\0\0\0\0\1?", flags=0))
        assert (await peer.fields(3))["grpc-status"] == "5"


async def test_a_changed_initial_window_size_applies_to_open_streams_too() -> None:
    async with serving() as server, server.peer(window=0) as peer:
        await peer.send(peer.request(1))
        await peer.ping()
        await peer.send(window_setting(100))
        assert await peer.data(1) == ASK


async def test_thousands_of_streams_can_wait_on_one_connection() -> None:
    handler, ids = Held(), range(1, 6001, 2)
    async with serving(handler) as server, server.peer() as peer:
        for stream in ids:
            await peer.send(peer.request(stream))
        await until(lambda: handler.waiting == len(ids))
        await peer.send(frame(frames.WINDOW_UPDATE, 0, 0, (2**20).to_bytes(4, "big")))
        handler.release.set()
        ended: set[int] = set()
        while len(ended) < len(ids):
            ended.add(await peer.served())


async def test_streams_beyond_the_limit_over_all_connections_are_reset_with_refused_stream() -> None:
    async with serving(limits=Limits(streams=2)) as server, server.peer() as one, server.peer() as two:
        await one.send(*(one.headers(stream) for stream in (1, 3, 5)))
        assert await one.reset() == (5, frames.REFUSED_STREAM)
        await two.send(two.headers(1))
        assert await two.reset() == (1, frames.REFUSED_STREAM)
        # A stream that ends or is reset makes room for a new stream.
        await one.send(frame(DATA, END_STREAM, 1, ASK), frame(frames.RST_STREAM, 0, 3, CANCEL))
        await one.answer(1)
        await two.send(two.request(3))
        assert await two.data(3) == ASK


async def test_a_connection_beyond_the_limit_of_connections_replaces_only_an_idle_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handler = Held()
    async with serving(handler, limits=Limits(connections=3)) as server, server.peer() as busy:
        await busy.send(busy.request(1))
        await until(lambda: handler.waiting == 1)
        async with server.peer() as used, server.peer() as unused:
            await used.send(used.headers(1), RESET_OF_1)
            await used.ping()
            await unused.ping()
            async with server.peer() as third:
                await third.send(third.request(1))
                await until(lambda: handler.waiting == 2)
                assert await unused.read() is None
                async with server.peer() as fourth:
                    await fourth.send(fourth.request(1))
                    await until(lambda: handler.waiting == 3)
                    assert await used.read() is None
                    assert server.transport.full == "all 3 connections of the gRPC port are taken"
                    async with server.peer() as fifth:
                        assert await fifth.read() is None
                    handler.release.set()
                    for peer in (busy, third, fourth):
                        assert await peer.data(1) == ASK
    assert len([line for line in caplog.messages if "connections of the gRPC port are taken" in line]) == 3


async def test_one_address_cannot_take_all_connections() -> None:
    handler = Held()
    async with (
        contextlib.AsyncExitStack() as opened,
        serving(handler, limits=Limits(connections=8)) as server,
    ):
        peers = [await opened.enter_async_context(server.peer()) for _ in range(6)]
        for number, peer in enumerate(peers, 1):
            await peer.send(peer.request(1))
            await until(lambda number=number: handler.waiting == number)
        async with server.peer() as seventh, server.peer(address="127.0.0.2") as other:
            assert await seventh.read() is None
            assert server.transport.full == ""
            await other.send(other.request(1))
            await until(lambda: handler.waiting == 7)
            handler.release.set()
            assert await other.data(1) == ASK
            # A new connection of an address replaces an idle one of this address, never another address's.
            assert await peers[0].data(1) == ASK
            async with server.peer() as eighth:
                await eighth.send(eighth.request(1))
                assert await eighth.data(1) == ASK
                await other.ping()
    assert not server.transport.peers.connections._by_address


async def test_small_unread_messages_count_with_their_memory_overhead_in_the_byte_budget() -> None:
    async with serving(deaf) as server, server.peer() as peer:
        tiny = b"\0\0\0\0\2hi" * 1000
        await peer.send(peer.request(1, tiny, flags=0))
        await until(
            lambda: server.budget.held_bytes == 1000 * (2 + streams.MESSAGE_COST) - streams.FREE_BYTES
        )
        # More bytes exhaust the byte budget before the window; the stream then releases all its bytes.
        await peer.send(*[frame(DATA, 0, 1, tiny)] * 60)
        await until(lambda: server.budget.held_bytes == 0)


RESIZED = b"\x20\x3f\xe1\x1f" + hpack.Encoder().encode(FIELDS)


IDLE_FRAMES = {
    "settings": window_setting(1),
    "pings": PING_FRAME,
    "unsolicited ping ACKs": frame(PING, ACK, 0, b"12345678"),
    "priorities": frame(frames.PRIORITY, 0, 1, b"\0\0\0\3\0"),
    "window updates": frame(frames.WINDOW_UPDATE, 0, 0, b"\0\0\0\1"),
    "window updates of a stream": frame(frames.WINDOW_UPDATE, 0, 1, b"\0\0\0\1"),
    "empty data": frame(DATA, 0, 1),
    "padding": frame(DATA, frames.PADDED, 1, b"\0"),
    "unknown frames": frame(99, 0, 0),
    "GOAWAYs": frame(frames.GOAWAY, 0, 0, b"\0" * 8),
    "resets of a closed stream": RESET_OF_1,
    "empty headers": frame(HEADERS, 0, 3),
}


@pytest.mark.parametrize("sent", IDLE_FRAMES.values(), ids=IDLE_FRAMES)
async def test_a_flood_of_empty_frames_ends_only_its_own_connection(sent: bytes) -> None:
    async with serving(Held()) as server, server.peer() as peer:
        rest = frame(frames.CONTINUATION, 0, 3) if sent[3] == HEADERS else sent
        await peer.send(peer.request(1, flags=0), sent, rest * 2500)
        assert await peer.ended() == CALM


async def test_a_changed_initial_window_size_counts_as_one_frame_for_each_open_stream() -> None:
    async with serving(Held()) as server, server.peer() as peer:
        await peer.send(*(peer.request(stream, flags=0) for stream in range(1, 2001, 2)))
        await peer.send(*(window_setting(100_000 + change) for change in range(20)))
        assert await peer.ended() == CALM


async def test_too_many_resizes_of_the_header_table_end_the_connection() -> None:
    async with serving() as server:
        async with server.peer() as peer:
            await peer.send(*(frame(HEADERS, END_HEADERS, stream, RESIZED) for stream in range(1, 300, 2)))
            assert await peer.ended() == CALM
        async with server.peer() as peer:
            await peer.send(frame(HEADERS, END_HEADERS, 1, b"\x20" + RESIZED))
            assert await peer.ended() == HPACK


def connected(limits: Limits = Limits()) -> tuple[http2.Connection, Mock]:  # noqa: B008
    """An HTTP/2 connection after preface and settings, and the mock transport that receives its output."""
    transport = Mock(spec=asyncio.Transport)
    connection = http2.Connection(lambda fields: b"", streams.Peers(limits))
    connection.connection_made(transport)
    connection.data_received(frames.PREFACE + frame(SETTINGS, 0, 0))
    return connection, transport


async def test_a_window_update_wakes_no_more_writers_than_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    woken = 0
    wake = streams.GrpcStream.wake_writer

    def counted(stream: streams.GrpcStream) -> None:
        nonlocal woken
        woken += 1
        wake(stream)

    monkeypatch.setattr(streams.GrpcStream, "wake_writer", counted)
    async with serving() as server, server.peer(2**20) as peer:
        message = b"\0" + (2995).to_bytes(4, "big") + b"x" * 2995
        await peer.send(*(peer.request(stream, message) for stream in range(1, 201, 2)))
        connection = next(iter(server.transport.peers.connections.all))
        await until(lambda: len(connection.blocked) == 100 - 65_535 // 3000)
        for _ in range(60):
            await peer.send(frame(frames.WINDOW_UPDATE, 0, 0, b"\0\0\0\1"))
            await peer.ping()
        assert woken <= 130
        await peer.send(frame(frames.WINDOW_UPDATE, 0, 0, (2**20).to_bytes(4, "big")))
        await until(lambda: server.transport.peers.count == 0)


async def test_answers_that_the_peer_does_not_read_count_in_the_byte_budget_until_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "_WRITE_S", 0.5)
    size = 600_000

    async def large(stream: Stream) -> bytes | None:
        await stream.read()
        return b"x" * size

    async with serving(large) as server, server.peer(window=0) as peer:
        await peer.send(peer.request(1), peer.request(3))
        # The byte budget has room for one of the two answers.
        assert (await peer.fields(3))["grpc-status"] == str(Status.RESOURCE_EXHAUSTED)
        assert server.budget.held_bytes == 5 + size - streams.FREE_BYTES
        assert (await peer.fields(1))["grpc-status"] == str(Status.UNAVAILABLE)
        assert server.budget.held_bytes == 0


async def test_a_peer_that_does_not_read_replies_to_its_frames_is_disconnected() -> None:
    connection, transport = connected(Limits(unsent_replies=100))
    connection.pause_writing()
    for _ in range(200):
        connection.data_received(PING_FRAME)
    assert transport.abort.called or transport.close.called
    assert transport.write.call_count < 110


async def test_a_stopping_server_lets_open_streams_end_and_refuses_new_streams() -> None:
    handler = Held()
    async with serving(handler) as server, server.peer() as peer:
        await peer.send(peer.request(1))
        await until(lambda: handler.waiting)
        stopping = asyncio.create_task(server.transport.stop(30))
        first = await peer.next(frames.GOAWAY)
        assert int.from_bytes(first.payload[:4], "big") == 2**31 - 1
        # The server accepts new streams until the peer answers the ping, and later refuses new streams.
        ping = await peer.next(PING)
        await peer.send(peer.request(3), frame(PING, ACK, 0, ping.payload))
        second = await peer.next(frames.GOAWAY)
        assert int.from_bytes(second.payload[:4], "big") == 3
        await peer.send(peer.headers(5))
        assert await peer.reset() == (5, frames.REFUSED_STREAM)
        handler.release.set()
        assert sorted([await peer.served() for _ in range(2)]) == [1, 3]
        await stopping
        assert await peer.ended() == frames.NO_ERROR


async def test_a_grpc_path_set_to_be_refused_gets_no_new_stream_while_open_streams_finish() -> None:
    handler = Held()
    async with serving(handler) as server, server.peer() as peer:
        await peer.send(peer.request(1))
        await until(lambda: handler.waiting)
        server.transport.refuse("/test/Echo")
        async with server.peer() as other:
            for late, stream in ((peer, 3), (other, 1)):
                await late.send(late.request(stream, flags=0))
                assert await late.reset() == (stream, frames.REFUSED_STREAM)
                # Data that the peer sends before reading the reset does not count as a flood of empty frames.
                await late.send(*[frame(DATA, 0, stream, ASK)] * 2500)
                await late.ping()
        handler.release.set()
        assert await peer.data(1) == ASK


# Frames with which a peer abandons a request: a reset, or an error for which the server resets the stream.
GIVING_UP: dict[str, Callable[[int], bytes]] = {
    "reset": lambda stream: frame(frames.RST_STREAM, 0, stream, CANCEL),
    "an empty window update": lambda stream: frame(frames.WINDOW_UPDATE, 0, stream, b"\0\0\0\0"),
    "a second end": lambda stream: frame(DATA, END_STREAM, stream) * 2,
}


@pytest.mark.parametrize("how", GIVING_UP.values(), ids=GIVING_UP)
async def test_a_flood_of_abandoned_requests_starts_few_handlers_and_does_not_end_the_connection(
    how: Callable[[int], bytes],
) -> None:
    handler = Held()
    async with serving(handler) as server, server.peer() as peer:
        await peer.send(peer.request(1))
        await until(lambda: handler.waiting == 1)
        for first in range(3, 8_003, 1000):
            await peer.send(
                *(peer.request(each, flags=0) + how(each) for each in range(first, first + 1000, 2))
            )
        await peer.ping()
        assert handler.waiting <= 500  # only requests whose reset came in a later socket read start a handler
        handler.release.set()
        assert await peer.served() == 1


async def test_each_step_of_the_event_loop_starts_a_limited_number_of_requests() -> None:
    handler = Held()
    limits = Limits(step_work=48, strangers_work=10**6)
    async with serving(handler, limits=limits) as server, server.peer() as greedy, server.peer() as modest:
        steps: list[int] = []

        def look() -> None:
            steps.append(handler.waiting)
            if handler.waiting < 101:
                asyncio.get_running_loop().call_soon(look)

        await greedy.send(*(greedy.request(stream) for stream in range(1, 201, 2)))
        await modest.send(modest.request(1))
        look()
        await until(lambda: handler.waiting == 101)
        assert max(after - before for before, after in itertools.pairwise(steps)) <= 3
        handler.release.set()
        assert await modest.data(1) == ASK


@pytest.mark.parametrize("relays", [False, True])
@pytest.mark.parametrize("waits", [False, True])
async def test_each_step_of_the_event_loop_handles_a_limited_number_of_tiny_messages(
    relays: bool, waits: bool
) -> None:
    handled: list[bytes] = []
    release = asyncio.Event()

    async def handler(stream: Stream) -> bytes | None:
        handled.append(await stream.read() or b"")
        if waits:
            await release.wait()  # further messages are queued during this wait
        if relays:
            await stream.relay(lambda message: ((), handled.append(message) is not None))
        else:
            while (message := await stream.read()) is not None:
                handled.append(message)
        return b"all"

    steps: list[int] = []

    def look() -> None:
        steps.append(len(handled))
        asyncio.get_running_loop().call_soon(look)

    names = [number.to_bytes(2, "big") for number in range(9000)]
    data = b"".join(b"\0\0\0\0\2" + name for name in names)
    async with serving(handler) as server, server.peer() as peer:
        await peer.send(peer.headers(1), frame(DATA, 0, 1, b"\0\0\0\0\0"))
        await until(lambda: handled == [b""])
        look()
        await peer.send(*(frame(DATA, 0, 1, data[at : at + 16_000]) for at in range(0, len(data), 16_000)))
        await peer.send(frame(DATA, END_STREAM, 1))
        await peer.ping()
        release.set()
        assert (await peer.data(1))[5:] == b"all"
    assert handled[1:] == names
    assert max(after - before for before, after in itertools.pairwise(steps)) <= 200


@pytest.mark.parametrize("is_first", [True, False])
async def test_each_step_of_the_event_loop_hands_over_a_limited_number_of_large_messages(
    is_first: bool,
) -> None:
    handled: list[int] = []

    async def handler(stream: Stream) -> bytes | None:
        for _ in range(1 if is_first else 2):
            message = await stream.read() or b""
        handled.append(len(message))
        return b""

    steps: list[int] = []

    def look() -> None:
        steps.append(len(handled))
        asyncio.get_running_loop().call_soon(look)

    large = b"\0" + (40_000).to_bytes(4, "big") + bytes(40_000)
    parts, last = (large[:16_000], large[16_000:32_000]), large[32_000:]
    async with serving(handler) as server, server.peer() as peer:
        for stream in range(1, 41, 2):
            begun = b"" if is_first else frame(DATA, 0, stream, b"\0\0\0\0\0")
            await peer.send(peer.headers(stream), begun, *(frame(DATA, 0, stream, part) for part in parts))
        await peer.ping()
        look()
        await peer.send(*(frame(DATA, END_STREAM, stream, last) for stream in range(1, 41, 2)))
        await until(lambda: handled == [40_000] * 20)
    assert max(after - before for before, after in itertools.pairwise(steps)) <= 7


async def test_a_stream_that_its_handler_ends_gets_no_further_message_of_a_frame() -> None:
    handled: list[bytes] = []

    async def handler(stream: Stream) -> bytes | None:
        return await stream.relay(lambda message: ((), handled.append(message) is None and len(handled) == 9))

    async with serving(handler) as server, server.peer() as peer:
        await peer.send(peer.headers(1), frame(DATA, 0, 1, b"\0\0\0\0\0" * 3000))
        assert await peer.served() == 1
        await peer.send(peer.request(3, b"\0\0\0\0\0"))
        assert await peer.served() == 3
    assert len(handled) == 10


@pytest.mark.parametrize("is_trusted", [False, True])
async def test_a_connection_with_few_requests_is_served_before_one_with_many(is_trusted: bool) -> None:
    order: list[int] = []

    async def handler(stream: Any) -> bytes | None:
        order.append(stream.id)
        return await echo(stream)

    limits = Limits(step_work=64, trusted_s=60.0 if is_trusted else 0.0)
    async with serving(handler, limits=limits) as server, server.peer() as greedy, server.peer() as modest:
        for peer in (greedy, modest):
            await peer.send(peer.request(1))
            await peer.data(1)
        await greedy.send(*(greedy.request(stream) for stream in range(3, 803, 2)))
        await modest.send(modest.request(1001))
        assert await modest.served() == 1001
        assert order.index(1001) < 50


async def test_a_flood_on_a_new_connection_waits_while_connections_with_earlier_answers_are_served() -> None:
    limits = Limits(strangers_work=1)
    async with serving(limits=limits) as server, server.peer() as gateway, server.peer() as stranger:
        await gateway.send(gateway.request(1))
        assert await gateway.data(1) == ASK
        await stranger.send(*(stranger.headers(stream) for stream in range(1, 2001, 2)))
        for stream in range(3, 103, 2):
            await gateway.send(gateway.request(stream))
            assert await gateway.data(stream) == ASK
        assert 0 < server.transport.peers.count < 100


async def test_each_header_of_a_request_counts_as_work(monkeypatch: pytest.MonkeyPatch) -> None:
    read, decoded = http2.HeaderReader.read, [0]

    def counted(reader: Any, block: bytes) -> Any:
        decoded[0] += block == small
        return read(reader, block)

    monkeypatch.setattr(http2.HeaderReader, "read", counted)
    small = (
        b"\x40\x01a\x01b" + b"\xbe" * 300
    )  # a header that joins the dynamic table, and 300 references to it
    limits = Limits(strangers_work=1)
    async with serving(limits=limits) as server, server.peer() as gateway, server.peer() as stranger:
        await gateway.send(gateway.request(1))
        assert await gateway.data(1) == ASK
        await stranger.send(*(frame(HEADERS, END_HEADERS, stream, small) for stream in range(1, 101, 2)))
        for stream in range(3, 103, 2):
            await gateway.send(gateway.request(stream))
            assert await gateway.data(stream) == ASK
    assert 1 <= decoded[0] <= 2


async def test_a_connection_never_answered_is_closed_if_too_much_of_its_data_waits_unread() -> None:
    limits = Limits(strangers_work=1, unread_bytes=64 * 1024)
    async with serving(limits=limits) as server, server.peer() as gateway, server.peer() as first:
        await gateway.send(gateway.request(1))
        assert await gateway.data(1) == ASK
        peers = server.transport.peers
        async with server.peer() as second:
            for stranger in (first, second):
                await stranger.send(*(stranger.headers(stream) for stream in range(1, 6001, 2)))
            await until(lambda: len(peers.connections.all) == 2)
        await gateway.send(gateway.request(3))
        assert await gateway.data(3) == ASK


async def test_only_connections_that_were_answered_may_use_the_last_quarter_of_the_streams() -> None:
    handler = Held()
    handler.release.set()
    async with (
        serving(handler, limits=Limits(streams=8)) as server,
        server.peer() as gateway, server.peer() as one, server.peer() as two, server.peer() as three,
    ):  # fmt: skip
        await gateway.send(gateway.request(1))
        await gateway.answer(1)
        handler.release.clear()
        await one.send(*(one.request(stream) for stream in (1, 3, 5, 7)))
        await until(lambda: handler.waiting == 5)
        await two.send(two.request(1), two.request(3))
        await until(lambda: handler.waiting == 7)
        await three.send(three.request(1))
        assert await three.reset() == (1, frames.REFUSED_STREAM)
        await gateway.send(gateway.request(3))
        await until(lambda: handler.waiting == 8)
        handler.release.set()


async def test_streams_that_send_no_first_message_are_limited_in_number_and_time() -> None:
    limits = Limits(streams=12, silent=4, silent_here=3, silent_s=1.0)
    async with serving(limits=limits) as server, server.peer() as one, server.peer() as two:
        await one.send(*(one.headers(stream) for stream in (1, 3, 5, 7)))
        assert await one.reset() == (7, frames.REFUSED_STREAM)
        # Above the limit over all connections, the oldest stream without a message is refused.
        await two.send(two.headers(1), two.headers(3))
        assert await one.reset() == (1, frames.REFUSED_STREAM)
        await works(server)
        assert {await one.reset(), await one.reset()} == {(each, frames.REFUSED_STREAM) for each in (3, 5)}
        await one.send(frame(DATA, END_STREAM, 3, ASK), one.request(9))
        assert await one.data(9) == ASK


async def test_one_connection_cannot_take_all_streams_and_a_full_replica_reports_the_limit() -> None:
    handler = Held()
    handler.release.set()
    async with (
        serving(handler, limits=Limits(streams=9)) as server,
        server.peer() as greedy, server.peer() as other, server.peer() as third,
    ):  # fmt: skip
        for peer in (greedy, other, third):
            await peer.send(peer.request(1))
            await peer.answer(1)
        handler.release.clear()
        await greedy.send(*(greedy.request(stream) for stream in range(3, 21, 2)))
        assert await greedy.reset() == (15, frames.REFUSED_STREAM)
        await other.send(*(other.request(stream) for stream in (3, 5)))
        await until(lambda: handler.waiting == 3 + 8)
        assert server.transport.full == ""
        await third.send(third.request(3))
        await until(lambda: handler.waiting == 3 + 9)
        assert server.transport.full == "all 9 streams are taken"
        handler.release.set()


async def test_a_peer_is_disconnected_unless_it_answers_keepalive_pings() -> None:
    # The peer runs on this event loop, too. After a pause of `pause_s` the server disconnects no peer.
    limits = Limits(silence_s=0.05, answer_s=0.3, pause_s=0.02)
    async with serving(limits=limits) as server, server.peer() as silent:
        await silent.next(PING)
        while await silent.read() is not None:
            pass
        async with server.peer() as alive:
            for _ in range(3):
                ping = await alive.until(lambda got: got.kind == PING and not got.flags & ACK)
                await alive.send(frame(PING, ACK, 0, ping.payload))


async def test_headers_are_decoded_while_the_dynamic_table_changes() -> None:
    async with serving() as server, server.peer() as peer:
        for stream in range(1, 77, 2):
            path = "/test/Echo" if stream % 4 == 1 else "/test/Other"
            fields = {**dict(FIELDS), ":path": path, "x-number": str(stream // 8)}
            if stream % 3 == 0:
                peer.encoder.header_table_size = 100 + stream
            await peer.send(peer.headers(stream, list(fields.items())), frame(DATA, 0, stream, ASK))
            answer = await peer.answer(stream)
            assert (ASK in [got.payload for got in answer]) is (path == "/test/Echo")


async def test_a_header_block_that_repeats_after_a_dynamic_table_change_is_decoded_anew() -> None:
    def block(path: bytes) -> bytes:
        return b"\x83\x86" + path + literal(b"content-type", b"application/grpc")  # POST, http

    def added(path: bytes) -> bytes:
        return b"\x44" + bytes((len(path),)) + path  # the header `:path`, added to the dynamic table

    newest = b"\xbe"  # index of the dynamic table's newest entry
    async with serving() as server, server.peer() as peer:
        statuses = []
        for at, path in enumerate((added(b"/test/Echo"), newest, added(b"/test/Other"), newest)):
            sent = frame(HEADERS, END_HEADERS, 2 * at + 1, block(path))
            await peer.send(sent, frame(DATA, END_STREAM, 2 * at + 1, ASK))
            statuses.append((await peer.fields(2 * at + 1))["grpc-status"])
        assert statuses == ["0", "0", "12", "12"]
