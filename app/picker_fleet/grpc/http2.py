"""The part of HTTP/2 (RFC 9113) that a gRPC server needs: one peer's connection as an asyncio protocol.

`native.NativeTransport` makes a `Connection` for each peer. The connection runs the handler of each request
in a task of its own and gives it a `Stream`. Frames are parsed and written in the event loop's thread, so
a reset cancels its handler in the same step and no message is copied between threads.

Input is untrusted. Malformed input ends its stream with a reset, or the connection with a GOAWAY. Memory is
bounded: a connection keeps one frame and 32 KiB of headers, `Limits` bounds all connections together, and
the replica's byte budget bounds the data that no handler has read yet. A stream's window reopens only after
its handler has read every complete message.

A gateway's connection carries many clients, so nothing that one client can cause ends the connection:
resets, many streams, half-sent requests. `Load` bounds their work instead. Only the peer itself sends frames
that carry nothing; a peer that sends too many loses its connection (docs/security.md, "Rapid resets").
"""

import asyncio
import logging
import re
import struct
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import hpack

from picker_fleet.domain.budgets import POOL_HEADER, BodyBudget
from picker_fleet.grpc.transport import Handler

WINDOW_BYTES: Final = 512 * 1024  # receive window of a stream
_DEFAULT_WINDOW: Final = 65_535  # RFC 9113, 6.9.2
_CONNECTION_WINDOW: Final = 16 * 1024 * 1024  # reopens as data arrives: stream windows are the limit
FRAME_BYTES: Final = 16_384  # largest frame that RFC 9113 lets either side send without a setting
_BLOCK_BYTES: Final = 32 * 1024  # limit of one request's headers, encoded
_LIST_BYTES: Final = 64 * 1024  # limit of one request's headers, decoded
_CACHED_BLOCKS: Final = 256  # decoded header blocks in the cache; an Envoy sends few kinds
_CACHED_BYTES: Final = 1024  # largest block in the cache
_ENDED_IDS: Final = 4096  # ids to remember of streams that this side ended first
_FLUSH_BYTES: Final = 64 * 1024
_WRITE_BUFFER: Final = 1024 * 1024  # unsent bytes above which handlers wait
_END_S: Final = 5.0  # for a closing connection's handlers and last bytes
_STUCK_S: Final = 30.0  # until a peer that reads nothing is cut off
_STUCK: Final = 64  # connections whose peers read nothing; each holds up to `_WRITE_BUFFER`
_WARNING_S: Final = 1.0  # minimum time between two warnings

# What frames cost, charged to `Limits.idle_frames`, and what raises a connection's allowance.
_SETTINGS_COST: Final = 20  # a SETTINGS frame may update every stream
_RESIZE_COST: Final = 20  # a resize of the HPACK table
_PER_STREAM: Final = 4  # frames allowed for each stream opened
_BYTES_SENT: Final = 1024  # bytes sent that allow one more frame
_PER_S: Final = 50  # frames allowed for each second of age
_DECODE_COST: Final = 32  # decoding uncached headers costs so many of `Limits.step_frames`
_DECODE_BYTES: Final = 16  # encoded header bytes that cost one frame more

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADER = struct.Struct(">BHBBL")  # length in two parts, type, flags, stream id
_PAIR = struct.Struct(">HL")
_HEADER_BYTES = 9
_MAX_WINDOW = 2**31 - 1
_ANY_STREAM = 2**31 - 1

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITISED = 0x1, 0x1, 0x4, 0x8, 0x20
NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = 0x0, 0x1, 0x2, 0x3
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL = 0x5, 0x6, 0x7, 0x8
COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 0x9, 0xB
_TABLE_SIZE, _ENABLE_PUSH, _MAX_STREAMS, _INITIAL_WINDOW, _MAX_FRAME, _MAX_LIST = range(1, 7)

_log = logging.getLogger(__name__)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Encode one frame."""
    size = len(payload)
    return _HEADER.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id) + payload


def start_of_frame(kind: int, flags: int, size: int) -> bytes:
    """Encode a frame's first five bytes, which precede its stream id."""
    return _HEADER.pack(size >> 16, size & 0xFFFF, kind, flags, 0)[:5]


def literal(name: bytes, value: bytes) -> bytes:
    """Encode a header field as an HPACK literal without indexing; lengths up to 126 take one byte."""
    return b"\0" + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    size = len(text)
    if size < 127:
        return bytes((size,)) + text
    size -= 127
    length = bytearray((127,))
    while size >= 128:
        length.append(size % 128 + 128)
        size //= 128
    length.append(size)
    return bytes(length) + text


OK_BLOCK = b"\x88" + literal(b"content-type", b"application/grpc")  # 0x88: `:status: 200`
_BAD_TYPE_BLOCK = b"\x08\x03415"  # `:status: 415`, a literal: an HTTP error for a peer without gRPC
NO_ERROR_CODE = b"\0\0\0\0"

_HOP_HEADERS = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
_POOL = POOL_HEADER.encode()
# Three HPACK table resizes at the start of a block; RFC 7541, 4.2 allows two.
_RESIZES = re.compile(rb"(?:[\x20-\x3e]|\x3f[\x80-\xff]*[\x00-\x7f]){3}")
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))


class ConnectionFault(Exception):
    """The peer broke the protocol: the connection ends with a GOAWAY of `code`."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class _Request(NamedTuple):
    """A request's decoded headers: the handler to run, or the header block `refusal` to answer with.

    `reset` is the error code that ends a malformed request's stream, None if the request is well-formed.
    """

    handler: Handler | None
    budget: BodyBudget | None
    refusal: bytes
    reset: int | None
    content_length: int


class Stream(Protocol):
    """The interface of streams to their connection; `native.GrpcStream` implements it."""

    began_s: float
    handler: Handler
    receive_window: int
    send_window: int
    task: asyncio.Task[None] | None

    @property
    def connection(self) -> "Connection": ...

    @property
    def id(self) -> int: ...

    @property
    def remote_ended(self) -> bool:
        """Whether the client's side has ended."""
        ...

    async def serve(self, handler: Handler) -> None:
        """Run the handler and send the end of the stream."""
        ...

    def receive(self, data: bytes, start: int, end: int) -> None:
        """Take the payload of a DATA frame, `data[start:end]`."""
        ...

    def end_remote(self) -> bool:
        """End the client's side. Returns whether the bytes received match the content-length, if any."""
        ...

    def wake_writer(self) -> None:
        """Resume a handler that waits to write: a window has grown."""
        ...

    def drop(self) -> None:
        """Free everything that the ended stream holds."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the peers of one transport.

    All `connections` together may have `streams` open streams. At most `silent` of these may lack a first
    message, `silent_here` on one connection, each for `silent_s`; other streams are refused. Up to
    `unsent_replies` replies wait for a peer that does not read. A connection may send `idle_frames` frames
    that carry nothing, and more as it ages, opens streams and is sent data.

    One step of the event loop reads `step_frames` frames and starts `step_starts` handlers at most.
    """

    streams: int = 20_000
    connections: int = 4096
    silent: int = 4096
    silent_here: int = 1024
    silent_s: float = 10.0
    unsent_replies: int = 10_000
    idle_frames: int = 2000
    step_frames: int = 512
    step_starts: int = 32


class NewStream(Protocol):
    """Makes the stream of a request."""

    def __call__(
        self,
        connection: "Connection",
        stream_id: int,
        send_window: int,
        content_length: int,
        budget: BodyBudget,
        handler: Handler,
    ) -> Stream: ...


class Load:
    """State that a transport's connections share: `limits`, the `count` of open streams, the `refused`
    handlers, and the work budget of one event-loop step.

    A handler starts once its stream's first message has arrived and all data read with that message has been
    parsed, if the step's budget allows. A request reset before that costs neither a task nor a Redis call.
    Frames beyond the budget wait until the other connections' frames have been read.

    At the limit, a new connection replaces one without an open stream: first the oldest that never had a
    stream, then the one idle for longest.
    """

    __slots__ = (
        "_idle",
        "_left_out",
        "_loop",
        "_refilling",
        "_starting",
        "_starts_left",
        "_stuck",
        "_unread",
        "_unused",
        "_warned_s",
        "connections",
        "count",
        "frames_left",
        "limits",
        "refused",
        "silent",
    )

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.connections: set[Connection] = set()
        self.count = 0
        self.refused: set[Handler] = set()
        self.silent: OrderedDict[Stream, None] = OrderedDict()  # without a first message yet, oldest first
        self.frames_left, self._starts_left = limits.step_frames, limits.step_starts
        self._loop = asyncio.get_running_loop()
        self._starting: OrderedDict[Stream, None] = OrderedDict()
        self._unread: deque[Connection] = deque()  # connections with frames for a later step
        self._refilling = False
        self._unused: OrderedDict[Connection, None] = OrderedDict()
        self._idle: OrderedDict[Connection, None] = OrderedDict()
        self._stuck: OrderedDict[Connection, float] = OrderedDict()  # since when the peer reads nothing
        self._warned_s, self._left_out = -_WARNING_S, 0

    @property
    def full(self) -> str:
        """Why new streams are refused; empty while they are taken."""
        if self.count >= self.limits.streams:
            return f"all {self.limits.streams} streams are taken"
        if len(self.connections) >= self.limits.connections and not (self._unused or self._idle):
            return f"all {self.limits.connections} connections are taken"
        return ""

    # Connections.

    def opened(self, connection: "Connection") -> bool:
        """Add a new connection. Returns False if there is no room for it."""
        if len(self.connections) >= self.limits.connections:
            self._warn_of_full()
            spare = self._unused or self._idle
            if not spare:
                return False
            spare.popitem(last=False)[0].abort()
        self.connections.add(connection)
        self._unused[connection] = None
        return True

    def closed(self, connection: "Connection") -> None:
        self.connections.discard(connection)
        self._unused.pop(connection, None)
        self._idle.pop(connection, None)
        self._stuck.pop(connection, None)

    def busy(self, connection: "Connection") -> None:
        """Mark `connection` as in use, since it has an open stream."""
        if self._idle.pop(connection, self) is self:
            self._unused.pop(connection, None)

    def idle(self, connection: "Connection") -> None:
        """Mark `connection` as idle, since its last stream has ended."""
        if connection in self.connections:
            self._idle[connection] = None

    def stuck(self, connection: "Connection") -> None:
        """Note that the peer does not read; if too many do not, cut the connection stuck for longest."""
        self._stuck[connection] = self._loop.time()
        if len(self._stuck) > _STUCK:
            self._stuck.popitem(last=False)[0].abort()

    def freed(self, connection: "Connection") -> None:
        """Note that the peer reads again."""
        self._stuck.pop(connection, None)

    def _warn_of_full(self) -> None:
        now_s = self._loop.time()
        if now_s - self._warned_s < _WARNING_S:
            self._left_out += 1
            return
        _log.warning(
            "all %d connections are taken: idle ones are closed",
            self.limits.connections,
            extra={"left_out": self._left_out},
        )
        self._warned_s, self._left_out = now_s, 0

    def end_overdue(self) -> None:
        """Refuse streams whose first message is overdue; cut connections whose peers have stopped reading."""
        before_s = self._loop.time() - self.limits.silent_s
        while self.silent and (stream := next(iter(self.silent))).began_s < before_s:
            stream.connection.refuse(stream.id)
        before_s = self._loop.time() - _STUCK_S
        while self._stuck and next(iter(self._stuck.values())) < before_s:
            self._stuck.popitem(last=False)[0].abort()

    # Work.

    def begin(self, stream: Stream) -> None:
        """Count a new stream without a first message; if too many such streams wait, refuse the oldest."""
        self.count += 1
        self.silent[stream] = None
        stream.connection.silent += 1
        if len(self.silent) > self.limits.silent:
            oldest = next(iter(self.silent))
            oldest.connection.refuse(oldest.id)

    def heard(self, stream: Stream) -> None:
        """Queue a stream's handler to start: the first message or the end of the stream has arrived."""
        if self.silent.pop(stream, self) is None:
            stream.connection.silent -= 1
            self._starting[stream] = None

    def end(self, stream: Stream) -> None:
        """Stop counting a stream that has ended."""
        self.count -= 1
        if stream.task is not None:
            return
        if self.silent.pop(stream, self) is None:
            stream.connection.silent -= 1
        else:
            self._starting.pop(stream, None)

    def start(self) -> None:
        """Start queued handlers, as many as the step's budget allows."""
        starting = self._starting
        while starting and self._starts_left > 0:
            stream, _ = starting.popitem(last=False)
            self._starts_left -= 1
            stream.task = self._loop.create_task(stream.serve(stream.handler))
        limits = self.limits
        if not self._refilling and (
            2 * self.frames_left < limits.step_frames or 2 * self._starts_left < limits.step_starts
        ):
            self._refilling = True
            self._loop.call_soon(self._refill)

    def wait(self, connection: "Connection") -> None:
        """Queue `connection`, whose frames a later step is to read."""
        self._unread.append(connection)

    def _refill(self) -> None:
        """Renew the budget for a new event-loop step, and go on with queued frames and handlers."""
        self._refilling = False
        self.frames_left, self._starts_left = self.limits.step_frames, self.limits.step_starts
        self.start()
        for _ in range(len(self._unread)):
            if self.frames_left <= 0:
                break
            self._unread.popleft().read_on()
        self.start()


class Connection(asyncio.Protocol):
    """One peer's connection. All connections of a transport share `load`.

    `find` returns the handler of a path and a pool, and the byte budget for data that it has not read yet.
    """

    def __init__(
        self,
        find: Callable[[bytes, bytes], tuple[Handler, BodyBudget] | None],
        new_stream: NewStream,
        load: Load,
    ) -> None:
        self.load, self._limits = load, load.limits
        self._new_stream = new_stream
        self.silent = 0  # streams without a first message
        self.send_window = _DEFAULT_WINDOW
        self.paused = False
        # Streams whose handlers wait for the connection's window, in order of waiting.
        self.blocked: OrderedDict[int, Stream] = OrderedDict()
        self.received = False  # whether data has arrived since the transport last cleared this
        self.settled = False  # whether the peer's preface and settings have arrived
        self._find = find
        self.loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._closed = False
        self._waiting = False  # whether a later step is to read the frames in `_tail`
        self._tail = b""
        self._streams: dict[int, Stream] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._last_id = 0
        self._refuse_after = _ANY_STREAM
        self._initial_send_window = _DEFAULT_WINDOW
        self._arrived_bytes = 0  # DATA bytes since the connection's window was last opened
        self._decoder = hpack.Decoder(max_header_list_size=_LIST_BYTES)
        self._blocks: dict[bytes, _Request] = {}
        self._block: bytearray | None = None  # headers that CONTINUATION frames have yet to complete
        self._block_of = (0, 0)  # stream id and flags of `_block`
        self._unsent_replies = 0
        self._idle_frames = 0  # the cost of frames that carried nothing
        self._idle_allowed = self._limits.idle_frames
        self._begun = 0  # streams opened so far
        self._began_s = self.loop.time()
        self._sent_bytes = 0
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._draining = False
        self._cancelled: set[asyncio.Task[None]] = set()  # handlers that have not ended yet
        self._cut: asyncio.TimerHandle | None = None

    @property
    def peer(self) -> tuple[str, int]:
        """The peer's address ('' if unknown) and its number of open streams."""
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        return str(peer[0]) if isinstance(peer, tuple) else "", len(self._streams)

    # Called by asyncio.

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if not self.load.opened(self):
            self._closed = True
            transport.abort()
            return
        transport.set_write_buffer_limits(high=_WRITE_BUFFER)
        settings = (
            (_MAX_STREAMS, self._limits.streams), (_INITIAL_WINDOW, WINDOW_BYTES), (_MAX_LIST, _LIST_BYTES)
        )  # fmt: skip
        payload = b"".join(_PAIR.pack(*pair) for pair in settings)
        more = _CONNECTION_WINDOW - _DEFAULT_WINDOW
        self.write(frame(SETTINGS, 0, 0, payload) + frame(WINDOW_UPDATE, 0, 0, more.to_bytes(4, "big")))

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        if self._cut is not None:
            self._cut.cancel()  # the timer would keep the transport alive
        self._unsent = []
        self._tail = b""
        for stream_id in list(self._streams):
            self._cancel(stream_id)
        self.load.closed(self)

    def pause_writing(self) -> None:
        self.paused = True
        self.load.stuck(self)

    def resume_writing(self) -> None:
        self.paused = False
        self.load.freed(self)
        self._unsent_replies = 0
        self.wake_next()

    def data_received(self, data: bytes) -> None:
        self.received = True
        if self._closed:
            return
        if self._tail:
            data = self._tail + data
            self._tail = b""
        if self._waiting:  # data that was in transit when reading was paused
            self._tail = data
            return
        self._read(data)
        self.load.start()

    def read_on(self) -> None:
        """Read the frames that an earlier step left unread."""
        self._waiting = False
        if self._closed:
            return
        data, self._tail = self._tail, b""
        self._read(data)
        if not (self._waiting or self._closed):
            self._transport.resume_reading()

    def _read(self, data: bytes) -> None:
        """Read the frames of `data`, as many as the step's budget allows."""
        load = self.load
        try:
            at = 0
            if not self.settled:
                if data[: len(PREFACE)] != PREFACE[: len(data)]:
                    raise ConnectionFault(PROTOCOL_ERROR, "this is not HTTP/2")
                if len(data) < len(PREFACE) + _HEADER_BYTES:
                    self._tail = data
                    return
                at = len(PREFACE)
                if data[at + 3] != SETTINGS or data[at + 4] & ACK:
                    raise ConnectionFault(PROTOCOL_ERROR, "settings come first")
                self.settled = True
            end = len(data)
            arrived = 0
            while end - at >= _HEADER_BYTES:
                if load.frames_left <= 0:
                    self._waiting = True
                    self._transport.pause_reading()
                    load.wait(self)
                    break
                load.frames_left -= 1
                high, low, kind, flags, stream_id = _HEADER.unpack_from(data, at)
                size = high << 16 | low
                if size > FRAME_BYTES:
                    raise ConnectionFault(FRAME_SIZE_ERROR, "a frame is too large")
                start = at + _HEADER_BYTES
                if start + size > end:
                    break
                at = start + size
                if kind == DATA and self._block is None:
                    arrived += size
                    self._on_data(flags, stream_id & _ANY_STREAM, data, start, at)
                else:
                    self._on_frame(kind, flags, stream_id & _ANY_STREAM, data, start, at)
            self._arrived_bytes += arrived
            if self._arrived_bytes >= _CONNECTION_WINDOW // 2:
                self._open_window()
            if at < end:
                self._tail = data[at:]
        except ConnectionFault as fault:
            self.close(fault.code, str(fault))
        except Exception:
            _log.exception("a connection failed")
            self.close(INTERNAL_ERROR, "the picker failed on this connection; its log says why")

    # Called by handlers and the transport.

    @property
    def drained(self) -> bool:
        """After `drain`: whether the peer has read the GOAWAY and no stream is open."""
        return self._closed or (self._refuse_after != _ANY_STREAM and not self._streams)

    async def ended(self) -> None:
        """Wait until the cancelled handlers have ended."""
        if self._cancelled:
            await asyncio.wait(self._cancelled, timeout=_END_S)

    def write(self, data: bytes) -> None:
        """Send `data` with all other data of this event-loop step, since system calls cost most."""
        if self._closed:
            return
        if not self._unsent:
            self.loop.call_soon(self._flush)
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        if self._unsent_bytes > _FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._unsent:
            data, self._unsent, self._unsent_bytes = b"".join(self._unsent), [], 0
            self._sent_bytes += len(data)
            self._transport.write(data)

    def ping(self) -> None:
        self.write(frame(PING, 0, 0, b"picker\0\0"))

    def drain(self) -> None:
        """Announce by GOAWAY that new streams will soon be refused; open streams are still served.

        The peer's answer to the ping shows that it has read the GOAWAY. Streams opened after that are
        refused, so that the peer sends them elsewhere.
        """
        self._draining = True
        self.write(frame(GOAWAY, 0, 0, _ANY_STREAM.to_bytes(4, "big") + NO_ERROR.to_bytes(4, "big")))
        self.ping()

    def close(self, code: int = NO_ERROR, why: str = "") -> None:
        """End the connection and everything on it."""
        if self._closed:
            return
        payload = self._last_id.to_bytes(4, "big") + code.to_bytes(4, "big") + why.encode()
        self.write(frame(GOAWAY, 0, 0, payload))
        self._flush()
        self._closed = True
        for stream_id in list(self._streams):
            self._cancel(stream_id)
        self._transport.close()
        self._cut = self.loop.call_later(_END_S, self._transport.abort)  # the peer may not read

    def abort(self) -> None:
        """Cut the connection without a GOAWAY."""
        self._closed = True
        self._transport.abort()

    def forget(self, stream_id: int, remote_ended: bool) -> None:
        """Remove a stream that this side has ended."""
        stream = self._streams.pop(stream_id, None)
        if stream is None:
            return
        self._left(stream)
        if not remote_ended:
            self._remember(stream_id)

    def refuse(self, stream_id: int) -> None:
        """Reset an unprocessed stream with REFUSED_STREAM: the peer may send the request elsewhere."""
        self.write(frame(RST_STREAM, 0, stream_id, REFUSED_STREAM.to_bytes(4, "big")))
        self._remember(stream_id)
        self._cancel(stream_id)

    def _remember(self, stream_id: int) -> None:
        """Remember a stream that this side has ended: later frames of the client on it are no error."""
        self._ended[stream_id] = None
        if len(self._ended) > _ENDED_IDS:
            self._ended.popitem(last=False)

    # Frames.

    def _on_frame(self, kind: int, flags: int, stream_id: int, data: bytes, start: int, end: int) -> None:
        if self._block is not None and (kind != CONTINUATION or stream_id != self._block_of[0]):
            raise ConnectionFault(PROTOCOL_ERROR, "headers are not complete")
        if kind == HEADERS:
            self._on_headers(flags, stream_id, data, start, end)
        elif kind == WINDOW_UPDATE:
            self._on_window_update(stream_id, data[start:end])
        elif kind == RST_STREAM:
            self._on_reset(stream_id, end - start)
        elif kind == PING:
            self._on_ping(flags, stream_id, data[start:end])
        elif kind == SETTINGS:
            self._on_settings(flags, stream_id, data[start:end])
        elif kind == CONTINUATION:
            self._on_continuation(flags, data[start:end])
        elif kind == PRIORITY:
            self._on_priority(stream_id, data[start:end])
        elif kind == PUSH_PROMISE:
            raise ConnectionFault(PROTOCOL_ERROR, "a client pushes nothing")
        elif kind == GOAWAY and (stream_id or end - start < 8):
            raise ConnectionFault(PROTOCOL_ERROR if stream_id else FRAME_SIZE_ERROR, "a malformed GOAWAY")
        else:
            self._count_idle(1)

    def _count_idle(self, cost: int) -> None:
        """Count a frame that carries nothing; a gateway sends few of these, whatever its clients do."""
        self._idle_frames += cost
        if self._idle_frames <= self._idle_allowed:
            return
        age_s = int(self.loop.time() - self._began_s)
        more = _PER_STREAM * self._begun + self._sent_bytes // _BYTES_SENT + _PER_S * age_s
        self._idle_allowed = self._limits.idle_frames + more
        if self._idle_frames > self._idle_allowed:
            raise ConnectionFault(ENHANCE_YOUR_CALM, "too many frames carry nothing")

    def _on_data(self, flags: int, stream_id: int, data: bytes, start: int, end: int) -> None:
        stream = self._streams.get(stream_id)
        if stream is None or stream.remote_ended:
            self._on_late_data(stream_id)
            return
        stream.receive_window -= end - start
        if stream.receive_window < 0:
            self.reset(stream_id, FLOW_CONTROL_ERROR)
            return
        if not flags:
            if start < end:
                stream.receive(data, start, end)
            else:
                self._count_idle(1)
            return
        if flags & PADDED:
            padding = data[start] + 1 if start < end else 1
            if padding > end - start:
                raise ConnectionFault(PROTOCOL_ERROR, "more padding than data")
            start += 1
            end -= padding - 1
        if start < end:
            stream.receive(data, start, end)
        elif not flags & END_STREAM:
            self._count_idle(1)
        if flags & END_STREAM:
            self._end_remote(stream_id, stream)

    def _on_late_data(self, stream_id: int) -> None:
        """Handle data for a stream that is not open, or that its client had already ended."""
        if stream_id == 0 or stream_id > self._last_id:
            raise ConnectionFault(PROTOCOL_ERROR, "data of a stream that is not open")
        if stream_id not in self._ended:
            self._count_idle(1)
            self.reset(stream_id, STREAM_CLOSED)

    def _open_window(self) -> None:
        """Reopen the connection's window by the bytes received since it was last opened."""
        self.write(frame(WINDOW_UPDATE, 0, 0, self._arrived_bytes.to_bytes(4, "big")))
        self._arrived_bytes = 0

    def _end_remote(self, stream_id: int, stream: Stream) -> None:
        if not stream.end_remote():
            self.reset(stream_id, PROTOCOL_ERROR)

    def _on_headers(self, flags: int, stream_id: int, data: bytes, start: int, end: int) -> None:
        if not stream_id & 1:
            raise ConnectionFault(PROTOCOL_ERROR, "a client's streams have odd ids")
        if flags & PADDED:
            padding = data[start] if start < end else 0
            start += 1
            end -= padding
        if flags & PRIORITISED:
            if end - start >= 5 and int.from_bytes(data[start : start + 4], "big") & _ANY_STREAM == stream_id:
                raise ConnectionFault(PROTOCOL_ERROR, "a stream depends on itself")
            start += 5
        if start > end:
            raise ConnectionFault(PROTOCOL_ERROR, "more padding than headers")
        if flags & END_HEADERS:
            self._on_block(flags, stream_id, data[start:end])
        else:
            self._block, self._block_of = bytearray(data[start:end]), (stream_id, flags)

    def _on_continuation(self, flags: int, payload: bytes) -> None:
        if self._block is None:
            raise ConnectionFault(PROTOCOL_ERROR, "nothing to continue")
        self._count_idle(1)
        self._block += payload
        if len(self._block) > _BLOCK_BYTES:
            raise ConnectionFault(ENHANCE_YOUR_CALM, "headers are too large")
        if flags & END_HEADERS:
            block, self._block = bytes(self._block), None
            stream_id, first_flags = self._block_of
            self._on_block(first_flags, stream_id, block)

    def _on_block(self, flags: int, stream_id: int, block: bytes) -> None:
        request = self._blocks.get(block)
        if request is None:
            request = self._read_block(block)
        if stream_id <= self._last_id:
            self._on_trailers(flags, stream_id)
            return
        self._last_id = stream_id
        self._begun += 1
        load = self.load
        if request.reset is not None:
            self.reset(stream_id, request.reset)
        elif (
            stream_id > self._refuse_after
            # One connection may take at most two thirds of all streams.
            or len(self._streams) >= 2 * (self._limits.streams - load.count)
            or self.silent >= self._limits.silent_here
            or request.handler in load.refused
        ):
            self.reset(stream_id, REFUSED_STREAM)
        elif request.handler is None or request.budget is None:
            remote_ended = bool(flags & END_STREAM)
            stop = b"" if remote_ended else frame(RST_STREAM, 0, stream_id, NO_ERROR_CODE)
            self.write(frame(HEADERS, END_HEADERS | END_STREAM, stream_id, request.refusal) + stop)
            if not remote_ended:
                self._remember(stream_id)
        else:
            window, length = self._initial_send_window, request.content_length
            stream = self._new_stream(self, stream_id, window, length, request.budget, request.handler)
            if not self._streams:
                load.busy(self)
            self._streams[stream_id] = stream
            load.begin(stream)
            if flags & END_STREAM:
                self._end_remote(stream_id, stream)

    def _on_trailers(self, flags: int, stream_id: int) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:
            if stream_id not in self._ended:
                raise ConnectionFault(STREAM_CLOSED, "headers of a closed stream")
        elif stream.remote_ended:
            self.reset(stream_id, STREAM_CLOSED)
        elif not flags & END_STREAM:
            self.reset(stream_id, PROTOCOL_ERROR)
        else:
            self._end_remote(stream_id, stream)

    def _on_reset(self, stream_id: int, size: int) -> None:
        if size != 4:
            raise ConnectionFault(FRAME_SIZE_ERROR, "a malformed reset")
        if stream_id == 0 or stream_id > self._last_id:
            raise ConnectionFault(PROTOCOL_ERROR, "a reset of a stream that is not open")
        if stream_id in self._streams:
            self._cancel(stream_id)
        else:
            self._count_idle(1)

    def _on_window_update(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(FRAME_SIZE_ERROR, "a malformed window update")
        self._count_idle(1)
        more = int.from_bytes(payload, "big") & _MAX_WINDOW
        if stream_id == 0:
            self.send_window += more
            if more == 0 or self.send_window > _MAX_WINDOW:
                raise ConnectionFault(FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR, "a wrong window update")
            self.wake_next()
            return
        stream = self._streams.get(stream_id)
        if stream is None:
            if stream_id > self._last_id:
                raise ConnectionFault(PROTOCOL_ERROR, "a window of a stream that is not open")
            return
        stream.send_window += more
        if more == 0 or stream.send_window > _MAX_WINDOW:
            self.reset(stream_id, FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR)
            return
        stream.wake_writer()

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id or len(payload) != 8:
            raise ConnectionFault(PROTOCOL_ERROR if stream_id else FRAME_SIZE_ERROR, "a malformed ping")
        self._count_idle(1)
        if not flags & ACK:
            self._reply(frame(PING, ACK, 0, payload))
        elif self._draining and self._refuse_after == _ANY_STREAM:
            self._refuse_after = self._last_id
            self.write(frame(GOAWAY, 0, 0, self._last_id.to_bytes(4, "big") + NO_ERROR.to_bytes(4, "big")))

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id or len(payload) % 6 or (flags & ACK and payload):
            raise ConnectionFault(PROTOCOL_ERROR if stream_id else FRAME_SIZE_ERROR, "malformed settings")
        self._count_idle(_SETTINGS_COST)
        if flags & ACK:
            return
        window = self._initial_send_window
        for name, value in _PAIR.iter_unpack(payload):
            if name == _INITIAL_WINDOW:
                if value > _MAX_WINDOW:
                    raise ConnectionFault(FLOW_CONTROL_ERROR, "a window is too large")
                window = value
            elif (name == _ENABLE_PUSH and value > 1) or (name == _MAX_FRAME and not 16_384 <= value < 2**24):
                raise ConnectionFault(PROTOCOL_ERROR, "a setting is out of range")
        if window != self._initial_send_window:
            more, self._initial_send_window = window - self._initial_send_window, window
            for stream in self._streams.values():
                stream.send_window += more
                if stream.send_window > _MAX_WINDOW:
                    raise ConnectionFault(FLOW_CONTROL_ERROR, "a window is too large")
                stream.wake_writer()
        self._reply(frame(SETTINGS, ACK, 0))

    def _on_priority(self, stream_id: int, payload: bytes) -> None:
        if stream_id == 0:
            raise ConnectionFault(PROTOCOL_ERROR, "a priority of no stream")
        self._count_idle(1)
        if len(payload) != 5:
            self.reset(stream_id, FRAME_SIZE_ERROR)
        elif int.from_bytes(payload[:4], "big") & _ANY_STREAM == stream_id:
            self.reset(stream_id, PROTOCOL_ERROR)

    def _reply(self, data: bytes) -> None:
        """Reply to a peer's frame. A peer that does not read may have only `unsent_replies` waiting."""
        if self.paused:
            self._unsent_replies += 1
            if self._unsent_replies > self._limits.unsent_replies:
                raise ConnectionFault(ENHANCE_YOUR_CALM, "the peer does not read")
        self.write(data)

    def reset(self, stream_id: int, code: int) -> None:
        """End a stream with an error code; CANCEL is sent only for a stream that is still open."""
        if code != CANCEL or stream_id in self._streams:
            self._reply(frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big")))
        self._cancel(stream_id)

    def _cancel(self, stream_id: int) -> None:
        """Remove a stream that ended before its handler did, and cancel the handler."""
        stream = self._streams.pop(stream_id, None)
        if stream is None:
            return
        self._left(stream)
        if stream.task is not None:
            stream.task.cancel()
            self._cancelled.add(stream.task)
            stream.task.add_done_callback(self._cancelled.discard)

    def _left(self, stream: Stream) -> None:
        """Release a stream that is no longer open."""
        self.load.end(stream)
        stream.drop()
        if not (self._streams or self._closed):
            self.load.idle(self)

    def wake_next(self) -> None:
        """Wake the first writer that waits for the connection's window, if the window is open. Each writer
        wakes the next one after writing, so a window update wakes no more writers than it serves."""
        if self.blocked and self.send_window > 0 and not self.paused:
            next(iter(self.blocked.values())).wake_writer()

    # Headers.

    def _read_block(self, block: bytes) -> _Request:
        """Decode a request's headers, and cache the result by the encoded block.

        An Envoy's requests differ only in their stream id, so their blocks are identical once the headers are
        in the HPACK table. A block keeps its meaning for as long as the table does not change.
        """
        self.load.frames_left -= _DECODE_COST + len(block) // _DECODE_BYTES
        if block[:1] and 0x20 <= block[0] < 0x40:
            self._count_idle(_RESIZE_COST)
            if _RESIZES.match(block):
                raise ConnectionFault(COMPRESSION_ERROR, "a block resizes the header table too often")
        table = self._decoder.header_table
        before = (table.maxsize, len(table.dynamic_entries), *list(table.dynamic_entries)[:1])
        try:
            headers = self._decoder.decode(block, raw=True)
        except Exception as fault:  # a damaged block may raise anything in the decoder
            raise ConnectionFault(COMPRESSION_ERROR, "headers cannot be decoded") from fault
        after = (table.maxsize, len(table.dynamic_entries), *list(table.dynamic_entries)[:1])
        request = self._request(headers)
        if before[:2] != after[:2] or (before[2:] and before[2] is not after[2]):
            self._blocks.clear()
        elif len(self._blocks) < _CACHED_BLOCKS and len(block) <= _CACHED_BYTES:
            self._blocks[block] = request
        return request

    def _request(self, headers: Any) -> _Request:
        found: dict[bytes, bytes] = {}
        malformed = False
        regular = False
        for name, value in headers:
            name, value = bytes(name), bytes(value)
            pseudo = name[:1] == b":"
            malformed |= not name or name != name.lower() or name in _HOP_HEADERS
            malformed |= pseudo and (regular or name not in _PSEUDO or name in found)
            malformed |= name == b"te" and value != b"trailers"
            regular |= not pseudo
            found[name] = value
        path, length = found.get(b":path", b""), found.get(b"content-length", b"")
        malformed |= not path or not found.get(b":method") or not found.get(b":scheme")
        malformed |= bool(length) and not length.isdigit()
        if malformed:
            return _Request(None, None, b"", PROTOCOL_ERROR, -1)
        if found[b":method"] != b"POST" or not found.get(b"content-type", b"").startswith(
            b"application/grpc"
        ):
            return _Request(None, None, _BAD_TYPE_BLOCK, None, -1)
        handler = self._find(path, found.get(_POOL, b""))
        if handler is None:
            block = literal(b"grpc-status", b"12") + literal(b"grpc-message", b"unknown method")
            return _Request(None, None, OK_BLOCK + block, None, -1)
        return _Request(*handler, b"", None, int(length[:20]) if length else -1)
