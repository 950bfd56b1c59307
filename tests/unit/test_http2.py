"""The native transport's HTTP/2: damaged frames, flow control both ways, its byte budget, and the way down.

Peers are written frame by frame, so that they can send what no client library would.
"""

import asyncio
import contextlib
import itertools
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker_fleet.errors import BufferFull
from picker_fleet.extproc import http2, native
from picker_fleet.extproc.context import BodyBudget
from picker_fleet.extproc.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITISED,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_BYTES,
    WINDOW_UPDATE,
    frame,
)
from picker_fleet.extproc.native import NativeTransport
from picker_fleet.extproc.transport import Handler, Stream

BUDGET_BYTES = 1024 * 1024
MESSAGE_BYTES = 4 * 1024 * 1024
FIELDS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test/Echo"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]
ASK = b"\0\0\0\0\2hi"


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def code(self) -> int:
        """The error code of a reset or a GOAWAY."""
        at = 4 if self.kind == GOAWAY else 0
        return int.from_bytes(self.payload[at : at + 4], "big")


class Peer:
    """One connection, written and read frame by frame."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.encoder = hpack.Encoder()

    async def send(self, *frames: bytes) -> None:
        self._writer.write(b"".join(frames))
        await self._writer.drain()

    def headers(
        self, stream: int, fields: list[tuple[str, str]] | None = None, flags: int = END_HEADERS
    ) -> bytes:
        block = self.encoder.encode(FIELDS if fields is None else fields)
        return frame(HEADERS, flags, stream, block)

    async def read(self) -> Frame | None:
        """The next frame; None at the connection's end."""
        try:
            async with asyncio.timeout(30):
                head = await self._reader.readexactly(9)
                high, low, kind, flags, stream = struct.unpack(">BHBBL", head)
                return Frame(kind, flags, stream, await self._reader.readexactly(high << 16 | low))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def until(self, wanted: Callable[[Frame], bool]) -> Frame:
        while True:
            got = await self.read()
            assert got is not None, "the connection ended before"
            if wanted(got):
                return got

    async def ended(self) -> Frame:
        """The GOAWAY with which the connection ends."""
        last = await self.until(lambda got: got.kind == GOAWAY)
        while (got := await self.read()) is not None:
            last = got if got.kind == GOAWAY else last
        return last

    async def answer(self, stream: int) -> list[Frame]:
        """The frames of a stream until its end."""
        frames = []
        while not frames or not (frames[-1].flags & END_STREAM or frames[-1].kind == RST_STREAM):
            frames.append(await self.until(lambda got: got.stream == stream))
        return frames

    def cut(self) -> None:
        self._writer.close()


class Server(NamedTuple):
    port: int
    transport: NativeTransport
    budget: BodyBudget

    @asynccontextmanager
    async def peer(self, window: int = 65_535) -> AsyncIterator[Peer]:
        peer = Peer(*await asyncio.open_connection("127.0.0.1", self.port))
        await peer.send(PREFACE, frame(SETTINGS, 0, 0, struct.pack(">HL", 4, window)))
        try:
            yield peer
        finally:
            peer.cut()


async def echo(stream: Stream) -> bytes | None:
    """Answers the first message with itself, and the end of the stream with nothing."""
    return await stream.read()


@asynccontextmanager
async def serving(handler: Callable[[Stream], Awaitable[bytes | None]] = echo) -> AsyncIterator[Server]:
    budget = BodyBudget(BUDGET_BYTES)
    handlers: dict[str, Handler] = {"/test/Echo": handler}
    transport = NativeTransport(handlers, {handler: budget}, MESSAGE_BYTES)
    port = await transport.start("127.0.0.1:0")
    try:
        yield Server(port, transport, budget)
    finally:
        await transport.stop(None)
    assert budget.held_bytes == 0, "every end of a stream gives back what it took"


async def works(server: Server) -> None:
    """Others are served as ever."""
    async with server.peer() as peer:
        await peer.send(peer.headers(1), frame(DATA, END_STREAM, 1, ASK))
        assert [got.payload for got in await peer.answer(1) if got.kind == DATA] == [ASK]


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - it is a plain condition, not an event
            await asyncio.sleep(0.005)


async def test_a_request_is_answered_with_its_status_in_the_trailers() -> None:
    async with serving() as server, server.peer() as peer:
        await peer.send(peer.headers(1), frame(DATA, END_STREAM, 1, ASK))
        start, data, end = await peer.answer(1)
        assert hpack.Decoder().decode(start.payload) == [
            (":status", "200"),
            ("content-type", "application/grpc"),
        ]
        assert (data.payload, end.kind) == (ASK, HEADERS)
        assert hpack.Decoder().decode(end.payload) == [("grpc-status", "0")]


async def test_a_stream_that_this_side_ends_first_is_reset_without_an_error_and_its_rest_ignored() -> None:
    async with serving() as server, server.peer() as peer:
        await peer.send(peer.headers(1), frame(DATA, 0, 1, ASK))
        await peer.answer(1)
        reset = await peer.until(lambda got: got.kind == RST_STREAM)
        assert (reset.stream, reset.code) == (1, http2.NO_ERROR)
        await peer.send(frame(DATA, END_STREAM, 1, ASK), frame(PING, 0, 0, b"12345678"))
        assert (await peer.until(lambda got: got.kind != SETTINGS)).kind == PING


PING_FRAME = frame(PING, 0, 0, b"12345678")
WHOLE = http2.frame(HEADERS, END_HEADERS, 1, hpack.Encoder().encode(FIELDS))


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        pytest.param([frame(DATA, 0, 1, ASK)], http2.PROTOCOL_ERROR, id="data of no stream"),
        pytest.param([frame(DATA, 0, 0, ASK)], http2.PROTOCOL_ERROR, id="data of stream 0"),
        pytest.param([frame(HEADERS, END_HEADERS, 2, b"\x82")], http2.PROTOCOL_ERROR, id="an even stream"),
        pytest.param(
            [frame(HEADERS, END_HEADERS, 0, b"\x82")], http2.PROTOCOL_ERROR, id="headers of stream 0"
        ),
        pytest.param([frame(HEADERS, END_HEADERS, 1, b"\xff" * 20)], http2.COMPRESSION_ERROR, id="bad HPACK"),
        pytest.param([frame(HEADERS, END_HEADERS, 1, b"\xfe")], http2.COMPRESSION_ERROR, id="no such entry"),
        pytest.param([frame(HEADERS, END_HEADERS, 1, b"\x00\x7f")], http2.COMPRESSION_ERROR, id="cut HPACK"),
        pytest.param([frame(HEADERS, PADDED, 1, b"\x09ab")], http2.PROTOCOL_ERROR, id="padding over headers"),
        pytest.param([frame(HEADERS, PADDED, 1, b"")], http2.PROTOCOL_ERROR, id="no padding length"),
        pytest.param([frame(HEADERS, PRIORITISED, 1, b"\0")], http2.PROTOCOL_ERROR, id="a cut priority"),
        pytest.param(
            [frame(HEADERS, PRIORITISED, 1, b"\0\0\0\1\0")], http2.PROTOCOL_ERROR, id="a stream on itself"
        ),
        pytest.param([frame(HEADERS, 0, 1, b"\x82"), PING_FRAME], http2.PROTOCOL_ERROR, id="cut headers"),
        pytest.param([frame(CONTINUATION, 0, 1, b"")], http2.PROTOCOL_ERROR, id="nothing to continue"),
        pytest.param(
            [frame(HEADERS, 0, 1), *[frame(CONTINUATION, 0, 1, b"\x82" * 16_384)] * 3],
            http2.ENHANCE_YOUR_CALM,
            id="endless headers",
        ),
        pytest.param([frame(DATA, 0, 1, b"x" * 16_385)], http2.FRAME_SIZE_ERROR, id="a large frame"),
        pytest.param([frame(PUSH_PROMISE, 0, 1, b"\0\0\0\2")], http2.PROTOCOL_ERROR, id="a push"),
        pytest.param([frame(PING, 0, 0, b"1")], http2.FRAME_SIZE_ERROR, id="a short ping"),
        pytest.param([frame(PING, 0, 1, b"12345678")], http2.PROTOCOL_ERROR, id="a ping of a stream"),
        pytest.param([frame(SETTINGS, 0, 0, b"1")], http2.FRAME_SIZE_ERROR, id="cut settings"),
        pytest.param([frame(SETTINGS, ACK, 0, b"123456")], http2.FRAME_SIZE_ERROR, id="a filled ACK"),
        pytest.param([frame(SETTINGS, 0, 3)], http2.PROTOCOL_ERROR, id="settings of a stream"),
        pytest.param(
            [frame(SETTINGS, 0, 0, struct.pack(">HL", 2, 2))], http2.PROTOCOL_ERROR, id="a bad setting"
        ),
        pytest.param(
            [frame(SETTINGS, 0, 0, struct.pack(">HL", 4, 2**31))],
            http2.FLOW_CONTROL_ERROR,
            id="a huge window",
        ),
        pytest.param([frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\0")], http2.PROTOCOL_ERROR, id="no window"),
        pytest.param([frame(WINDOW_UPDATE, 0, 0, b"\0")], http2.FRAME_SIZE_ERROR, id="a cut window"),
        pytest.param(
            [frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff")], http2.FLOW_CONTROL_ERROR, id="too much window"
        ),
        pytest.param([frame(WINDOW_UPDATE, 0, 5, b"\0\0\0\1")], http2.PROTOCOL_ERROR, id="an idle window"),
        pytest.param([frame(RST_STREAM, 0, 5, b"\0\0\0\1")], http2.PROTOCOL_ERROR, id="an idle reset"),
        pytest.param([frame(RST_STREAM, 0, 1, b"\0")], http2.FRAME_SIZE_ERROR, id="a cut reset"),
        pytest.param([frame(PRIORITY, 0, 0, b"12345")], http2.PROTOCOL_ERROR, id="a priority of nothing"),
        pytest.param([frame(GOAWAY, 0, 0, b"1")], http2.FRAME_SIZE_ERROR, id="a cut GOAWAY"),
        pytest.param(
            [WHOLE, frame(RST_STREAM, 0, 1, b"\0\0\0\x08"), WHOLE], http2.STREAM_CLOSED, id="a closed stream"
        ),
    ],
)
async def test_a_connection_that_breaks_the_protocol_ends_with_its_error(
    frames: list[bytes], code: int
) -> None:
    async with serving() as server:
        async with server.peer() as peer:
            await peer.send(*frames)
            assert (await peer.ended()).code == code
        await works(server)


@pytest.mark.parametrize(
    "first", [b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", PREFACE[:9] + b"x" * 20, PREFACE + PING_FRAME]
)
async def test_a_peer_that_speaks_something_else_is_sent_away(first: bytes) -> None:
    async with serving() as server:
        peer = Peer(*await asyncio.open_connection("127.0.0.1", server.port))
        await peer.send(first)
        assert (await peer.ended()).code == http2.PROTOCOL_ERROR
        peer.cut()
        await works(server)


@pytest.mark.parametrize(
    ("fields", "flags", "after", "code"),
    [
        ([("x", "y")], END_HEADERS, [], http2.PROTOCOL_ERROR),
        ([*FIELDS, (":path", "/test/Echo")], END_HEADERS, [], http2.PROTOCOL_ERROR),
        ([*FIELDS, ("Upper", "x")], END_HEADERS, [], http2.PROTOCOL_ERROR),
        ([*FIELDS, ("connection", "close")], END_HEADERS, [], http2.PROTOCOL_ERROR),
        (
            [*FIELDS, ("content-length", "9")],
            END_HEADERS,
            [frame(DATA, END_STREAM, 1, ASK)],
            http2.PROTOCOL_ERROR,
        ),
        (FIELDS, END_HEADERS, [WHOLE], http2.PROTOCOL_ERROR),  # trailers that do not end the stream
        (FIELDS, END_HEADERS, [frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\0")], http2.PROTOCOL_ERROR),
        (FIELDS, END_HEADERS, [frame(WINDOW_UPDATE, 0, 1, b"\x7f\xff\xff\xff")], http2.FLOW_CONTROL_ERROR),
        (FIELDS, END_HEADERS, [frame(PRIORITY, 0, 1, b"\0\0\0\1\0")], http2.PROTOCOL_ERROR),
    ],
)
async def test_a_stream_that_breaks_the_protocol_is_reset_and_no_other(
    fields: list[tuple[str, str]], flags: int, after: list[bytes], code: int
) -> None:
    async def wait(stream: Stream) -> bytes | None:
        while await stream.read() is not None:
            pass
        await asyncio.Event().wait()
        return None

    async with serving(wait) as server, server.peer() as peer:
        await peer.send(peer.headers(1, fields, flags), *after)
        reset = await peer.until(lambda got: got.kind == RST_STREAM)
        assert (reset.stream, reset.code) == (1, code)
        await peer.send(PING_FRAME)
        assert (await peer.until(lambda got: got.kind == PING)).flags & ACK


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ([(name, "/other/Method" if name == ":path" else value) for name, value in FIELDS], "12"),
        ([(name, "GET" if name == ":method" else value) for name, value in FIELDS], None),
        ([(name, "text/html" if name == "content-type" else value) for name, value in FIELDS], None),
    ],
)
async def test_what_is_no_known_method_is_answered_so(
    fields: list[tuple[str, str]], status: str | None
) -> None:
    async with serving() as server, server.peer() as peer:
        await peer.send(peer.headers(1, fields))
        (answer,) = await peer.answer(1)
        found = dict(hpack.Decoder().decode(answer.payload))
        assert (found[":status"], found.get("grpc-status")) == ("200" if status else "415", status)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\1\0\0\0\1x", "12"),  # compressed
        (b"\0\xff\xff\xff\xff", "8"),  # too large
        (b"\0\0\0\0\5ab", "13"),  # cut by the end of the stream
    ],
)
async def test_what_is_no_message_ends_its_stream_with_a_status(data: bytes, status: str) -> None:
    async with serving() as server, server.peer() as peer:
        await peer.send(peer.headers(1), frame(DATA, END_STREAM, 1, data))
        answer = (await peer.answer(1))[-1]
        assert dict(hpack.Decoder().decode(answer.payload))["grpc-status"] == status


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.builds(
                frame, st.integers(0, 11), st.integers(0, 255), st.integers(0, 9), st.binary(max_size=24)
            ),
            st.sampled_from(
                [WHOLE, frame(DATA, 0, 1, ASK), frame(DATA, END_STREAM, 1, b"\0\0\0"), PING_FRAME]
            ),
        ),
        max_size=12,
    ),
    st.integers(1, 30),
)
@settings(max_examples=200, deadline=None)
def test_whatever_comes_no_byte_stays_counted_and_the_next_connection_is_served(
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


async def test_a_message_in_any_number_of_frames_arrives_whole() -> None:
    async with serving() as server:
        message = bytes(range(256)) * 40
        data = b"\0" + len(message).to_bytes(4, "big") + message
        for size in (1, 4, 5, 6, 1000, 16_384):
            async with server.peer(2**24) as peer:
                frames = [frame(DATA, 0, 1, data[at : at + size]) for at in range(0, len(data), size)]
                await peer.send(peer.headers(1), *frames)
                answer = await peer.answer(1)
                assert b"".join(got.payload for got in answer if got.kind == DATA) == data


async def test_a_reset_cancels_its_handler_within_milliseconds() -> None:
    cancelled: list[float] = []
    started = asyncio.Event()
    clock = asyncio.get_running_loop().time

    async def wait(stream: Stream) -> bytes | None:
        await stream.read()
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(clock())
        return None

    async with serving(wait) as server, server.peer() as peer:
        await peer.send(peer.headers(1), frame(DATA, 0, 1, ASK))
        await started.wait()
        before = clock()
        await peer.send(frame(RST_STREAM, 0, 1, b"\0\0\0\x08"))
        await until(lambda: cancelled)
        assert cancelled[0] - before < 0.25  # a busy machine included
        # So does a connection that ends.
        started.clear()
        await peer.send(peer.headers(3), frame(DATA, 0, 3, ASK))
        await started.wait()
        peer.cut()
        await until(lambda: len(cancelled) == 2)


async def test_unread_messages_close_their_streams_window_and_count_in_the_budget() -> None:
    reads = asyncio.Semaphore(0)

    async def slow(stream: Stream) -> bytes | None:
        while True:
            await reads.acquire()
            if await stream.read() is None:
                return b""

    async with serving(slow) as server, server.peer() as peer:
        size = 16_384
        piece = b"\0" + (size - 5).to_bytes(4, "big") + b"x" * (size - 5)
        count = WINDOW_BYTES // size
        await peer.send(peer.headers(1), *[frame(DATA, 0, 1, piece)] * count)
        kept = count * (size - 5 + native._MESSAGE_COST)
        await until(lambda: server.budget.held_bytes == kept)
        # No more is allowed: the next byte breaks the peer's window.
        for _ in range(count):
            reads.release()
        credit = await peer.until(lambda got: got.kind == WINDOW_UPDATE and got.stream == 1)
        assert int.from_bytes(credit.payload, "big") == WINDOW_BYTES
        assert server.budget.held_bytes == 0
        await peer.send(*[frame(DATA, 0, 1, piece)] * count, frame(DATA, 0, 1, b"x"))
        reset = await peer.until(lambda got: got.kind == RST_STREAM)
        assert reset.code == http2.FLOW_CONTROL_ERROR


async def test_bytes_beyond_the_budget_are_not_kept_and_the_handler_says_so() -> None:
    async def patient(stream: Stream) -> bytes | None:
        try:
            return await stream.read()
        except BufferFull:
            return b"full"

    async with serving(patient) as server, server.peer(2**24) as peer:
        # Three streams send parts of messages: more than the budget together.
        start = b"\0" + MESSAGE_BYTES.to_bytes(4, "big")[:1] + b"\x08\0\0"
        for stream in (1, 3, 5):
            rest = [frame(DATA, 0, stream, b"x" * 16_384)] * (400 * 1024 // 16_384)
            await peer.send(peer.headers(stream), frame(DATA, 0, stream, start), *rest)
        answer = await peer.answer(5)
        assert [got.payload[5:] for got in answer if got.kind == DATA] == [b"full"]
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
        await peer.send(peer.headers(1))
        await until(lambda: written == 2)
        received = b""
        while not received.endswith(b"last"):
            got = await peer.until(lambda got: got.kind == DATA)
            received += got.payload
            assert written * 10_005 <= len(received) + 25_000 + 10_005
            credit = len(got.payload).to_bytes(4, "big")
            if got.payload:
                await peer.send(frame(WINDOW_UPDATE, 0, 1, credit), frame(WINDOW_UPDATE, 0, 0, credit))
        assert len(received) == 100 * 10_005 + 9


async def test_a_smaller_window_setting_holds_for_open_streams_too() -> None:
    async with serving() as server, server.peer(window=0) as peer:
        await peer.send(peer.headers(1), frame(DATA, END_STREAM, 1, ASK), PING_FRAME)
        await peer.until(lambda got: got.kind == PING)
        await peer.send(frame(SETTINGS, 0, 0, struct.pack(">HL", 4, 100)))
        assert ASK in [got.payload for got in await peer.answer(1)]


async def test_ten_thousand_streams_wait_on_one_connection() -> None:
    release = asyncio.Event()
    waiting = 0

    async def hold(stream: Stream) -> bytes | None:
        nonlocal waiting
        message = await stream.read()
        waiting += 1
        await release.wait()
        return message

    async with serving(hold) as server, server.peer() as peer:
        ids = range(1, 20_001, 2)
        for stream in ids:
            await peer.send(peer.headers(stream), frame(DATA, END_STREAM, stream, ASK))
        await until(lambda: waiting == len(ids))
        await peer.send(frame(WINDOW_UPDATE, 0, 0, (2**20).to_bytes(4, "big")))
        release.set()
        ended: set[int] = set()
        while len(ended) < len(ids):
            got = await peer.until(lambda got: got.flags & END_STREAM and got.kind == HEADERS)
            ended.add(got.stream)


async def test_streams_beyond_the_limit_are_refused_so_that_they_can_go_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http2, "STREAMS", 2)
    async with serving() as server, server.peer() as peer:
        await peer.send(*(peer.headers(stream) for stream in (1, 3, 5)))
        reset = await peer.until(lambda got: got.kind == RST_STREAM)
        assert (reset.stream, reset.code) == (5, http2.REFUSED_STREAM)


async def test_the_limit_of_streams_is_one_for_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "STREAMS", 2)
    async with serving() as server, server.peer() as one, server.peer() as other:
        await one.send(one.headers(1), one.headers(3))
        await one.send(PING_FRAME)
        await one.until(lambda got: got.kind == PING)
        await other.send(other.headers(1))
        assert (await other.until(lambda got: got.kind == RST_STREAM)).code == http2.REFUSED_STREAM
        # A stream that ends, or is reset, makes room.
        await one.send(frame(DATA, END_STREAM, 1, ASK), frame(RST_STREAM, 0, 3, b"\0\0\0\x08"))
        await one.answer(1)
        await other.send(other.headers(3), frame(DATA, END_STREAM, 3, ASK))
        assert [got.payload for got in await other.answer(3) if got.kind == DATA] == [ASK]


async def test_connections_beyond_the_limit_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "CONNECTIONS", 1)
    async with serving() as server, server.peer() as first:
        await first.until(lambda got: got.kind == SETTINGS)
        async with server.peer() as second:
            assert await second.read() is None
        await first.send(PING_FRAME)
        await first.until(lambda got: got.kind == PING)


async def test_small_unread_messages_count_with_what_they_cost_in_memory() -> None:
    async def deaf(stream: Stream) -> bytes | None:
        await asyncio.Event().wait()
        return None

    async with serving(deaf) as server, server.peer() as peer:
        tiny = b"\0\0\0\0\2hi" * 1000
        await peer.send(peer.headers(1), frame(DATA, 0, 1, tiny))
        await until(lambda: server.budget.held_bytes == 1000 * (2 + native._MESSAGE_COST))
        # The budget ends long before the stream's window does.
        await peer.send(*[frame(DATA, 0, 1, tiny)] * 60)
        await until(lambda: server.budget.held_bytes == 0)


async def test_settings_that_change_without_end_close_the_connection() -> None:
    changes = [frame(SETTINGS, 0, 0, struct.pack(">HL", 4, size)) for size in range(http2._SETTINGS + 1)]
    async with serving() as server, server.peer() as peer:
        await peer.send(*changes)
        assert (await peer.ended()).code == http2.ENHANCE_YOUR_CALM
        await works(server)


async def test_many_window_updates_in_one_read_wake_each_waiting_writer_once() -> None:
    woken = 0

    class Blocked:
        def wake_writer(self) -> None:
            nonlocal woken
            woken += 1

    class Transport:
        def set_write_buffer_limits(self, high: int) -> None: ...

        def get_extra_info(self, name: str) -> tuple[str, int]:
            return ("10.0.0.9", 1)

        def write(self, data: bytes) -> None: ...

    connection = http2.Connection({}, native.GrpcStream, set(), http2.OpenStreams(lambda: 0.0))
    connection.connection_made(Transport())
    connection.blocked[1] = Blocked()  # type: ignore[assignment]
    credit = frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1")
    connection.data_received(PREFACE + frame(SETTINGS, 0, 0) + credit * 1000)
    await asyncio.sleep(0)
    assert woken == 1


async def test_a_stop_lets_open_streams_end_and_refuses_new_ones() -> None:
    release = asyncio.Event()

    async def hold(stream: Stream) -> bytes | None:
        message = await stream.read()
        await release.wait()
        return message

    async with serving(hold) as server, server.peer() as peer:
        await peer.send(peer.headers(1), frame(DATA, END_STREAM, 1, ASK))
        await until(lambda: server.budget.held_bytes == 0)
        stopping = asyncio.create_task(server.transport.stop(30))
        first = await peer.until(lambda got: got.kind == GOAWAY)
        assert int.from_bytes(first.payload[:4], "big") == 2**31 - 1
        # One that was on its way is still taken; what comes after the peer knows is refused.
        ping = await peer.until(lambda got: got.kind == PING)
        await peer.send(peer.headers(3), frame(DATA, END_STREAM, 3, ASK), frame(PING, ACK, 0, ping.payload))
        second = await peer.until(lambda got: got.kind == GOAWAY)
        assert int.from_bytes(second.payload[:4], "big") == 3
        await peer.send(peer.headers(5))
        reset = await peer.until(lambda got: got.kind == RST_STREAM)
        assert (reset.stream, reset.code) == (5, http2.REFUSED_STREAM)
        release.set()
        ended = [
            (await peer.until(lambda got: got.kind == HEADERS and got.flags & END_STREAM)).stream
            for _ in range(2)
        ]
        assert sorted(ended) == [1, 3]
        await stopping
        assert (await peer.ended()).code == http2.NO_ERROR


async def test_a_refused_path_is_refused_on_every_connection_and_others_go_on() -> None:
    begun, release = asyncio.Event(), asyncio.Event()

    async def hold(stream: Stream) -> bytes | None:
        message = await stream.read()
        begun.set()
        await release.wait()
        return message

    async with serving(hold) as server, server.peer() as peer:
        await peer.send(peer.headers(1), frame(DATA, END_STREAM, 1, ASK))
        await begun.wait()
        server.transport.refuse("/test/Echo")
        async with server.peer() as other:
            for late, stream in ((peer, 3), (other, 1)):
                await late.send(late.headers(stream), frame(DATA, END_STREAM, stream, ASK))
                reset = await late.until(lambda got: got.kind == RST_STREAM)
                assert (reset.stream, reset.code) == (stream, http2.REFUSED_STREAM)
        release.set()
        assert [got.payload for got in await peer.answer(1) if got.kind == DATA] == [ASK]


RESET = http2.CANCEL.to_bytes(4, "big")
# How a peer ends a request that it has just begun: by its reset, or by a fault for which this side resets.
GIVING_UP = {
    "reset": lambda stream: frame(RST_STREAM, 0, stream, RESET),
    "an empty window update": lambda stream: frame(WINDOW_UPDATE, 0, stream, b"\0\0\0\0"),
    "a second end": lambda stream: frame(DATA, END_STREAM, stream) * 2,
}


async def give_up(peer: Peer, streams: range, how: Callable[[int], bytes]) -> None:
    """Begin requests and end them at once, without reading what comes back."""
    for stream in streams:
        await peer.send(peer.headers(stream), frame(DATA, 0, stream, ASK), how(stream))


@pytest.mark.parametrize("how", GIVING_UP.values(), ids=GIVING_UP)
async def test_an_address_that_gives_up_requests_without_end_is_sent_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: Callable[[int], bytes]
) -> None:
    monkeypatch.setattr(http2, "_GIVEN_UP_AT_ONCE", 50.0)
    monkeypatch.setattr(http2, "_GIVEN_UP_PER_S", 0.001)

    async def wait(stream: Stream) -> bytes | None:
        await asyncio.Event().wait()
        return None

    async with serving(wait) as server:
        for streams in (range(1, 200, 2), range(1, 5, 2)):  # a new connection begins with nothing
            async with server.peer() as peer:
                with contextlib.suppress(ConnectionError):
                    await give_up(peer, streams, how)
                assert (await peer.ended()).code == http2.ENHANCE_YOUR_CALM
    assert len([line for line in caplog.messages if "gives up too many requests" in line]) == 1


async def test_any_number_of_clients_may_leave_that_have_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "_GIVEN_UP_AT_ONCE", 50.0)
    monkeypatch.setattr(http2, "_GIVEN_UP_PER_S", 0.001)
    monkeypatch.setattr(http2, "YOUNG_S", 0.0)
    async with serving() as server:
        async with server.peer() as peer:
            await give_up(peer, range(1, 2001, 2), GIVING_UP["reset"])
            await peer.send(PING_FRAME)
            await peer.until(lambda got: got.kind == PING)
        await works(server)


async def test_a_peer_that_answers_no_ping_is_cut_and_one_that_does_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "_KEEPALIVE_S", 0.05)
    # The peer shares this event loop: where the loop stands still for longer, nobody is cut.
    monkeypatch.setattr(native, "_ANSWER_S", 0.3)
    monkeypatch.setattr(native, "_PAUSE_S", 0.02)
    async with serving() as server, server.peer() as silent:
        await silent.until(lambda got: got.kind == PING)
        while await silent.read() is not None:
            pass
        async with server.peer() as alive:
            for _ in range(3):
                ping = await alive.until(lambda got: got.kind == PING and not got.flags & ACK)
                await alive.send(frame(PING, ACK, 0, ping.payload))


async def test_a_peer_that_reads_no_replies_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "_UNSENT_REPLIES", 100)
    connection = http2.Connection({}, native.GrpcStream, set(), http2.OpenStreams(lambda: 0.0))
    written: list[bytes] = []

    class Transport:
        closed = False

        def set_write_buffer_limits(self, high: int) -> None: ...

        def get_extra_info(self, name: str) -> tuple[str, int]:
            return ("10.0.0.9", 1)

        def write(self, data: bytes) -> None:
            written.append(data)

        def close(self) -> None:
            self.closed = True

        abort = close

    transport = Transport()
    connection.connection_made(transport)
    connection.data_received(PREFACE + frame(SETTINGS, 0, 0))
    connection.pause_writing()
    for _ in range(200):
        connection.data_received(PING_FRAME)
    assert transport.closed
    assert len(written) < 110


async def test_header_tables_that_change_are_followed() -> None:
    async with serving() as server, server.peer() as peer:
        paths = ["/test/Echo", "/test/Other"]
        for stream, path in zip(itertools.count(1, 2), paths * 20, strict=False):
            fields = [(name, path if name == ":path" else value) for name, value in FIELDS]
            if stream % 3 == 0:
                peer.encoder.header_table_size = 100 + stream
            await peer.send(
                peer.headers(stream, [*fields, ("x-number", str(stream // 8))]), frame(DATA, 0, stream, ASK)
            )
            answer = await peer.answer(stream)
            assert (ASK in [got.payload for got in answer]) is (path == "/test/Echo")
            if stream >= 75:
                break
