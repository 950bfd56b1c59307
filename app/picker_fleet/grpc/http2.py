"""The part of HTTP/2 (RFC 9113) that a gRPC server needs: frames, flow control, and limits on each peer.

`native.NativeTransport` makes a `Connection` for each peer. Each request's `GrpcStream` (`streams.py`) runs
in a task of its own. The event loop's thread parses and writes frames, so a reset cancels the stream's
handler in the same step of the event loop, and no message is copied between threads.

Input is untrusted. Malformed input ends its stream by a reset, or its connection by a GOAWAY frame. Memory is
bounded: a connection keeps one frame and 16 KiB of headers; `Limits` bounds the number of connections and the
data that waits for their turns; and each stream charges data that its handler has not read to a byte budget.
A stream's window reopens only after its handler has read every complete message.

A gateway's connection carries many clients. So one client's resets, streams or half-sent requests, however
many, do not end the connection; `Peers` bounds the work of all connections instead. Frames without effect,
however, come from the peer itself: too many end its connection (docs/security.md, "Rapid resets").
"""

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

from picker_fleet.grpc import frames
from picker_fleet.grpc.certificates import address_of
from picker_fleet.grpc.connections import Line
from picker_fleet.grpc.frames import ConnectionFault, frame
from picker_fleet.grpc.headers import LIST_BYTES, HeaderReader, resizes_table
from picker_fleet.grpc.streams import WINDOW_BYTES, WRITE_BUFFER, GrpcStream, Link, Peers

_CONNECTION_WINDOW: Final = 16 * 1024 * 1024  # reopened on arrival: the streams' windows limit the data
_BLOCK_BYTES: Final = 16 * 1024  # maximum bytes of one request's encoded headers
_ENDED_IDS: Final = 4096  # how many ids of streams that this side ended first are remembered
_FLUSH_BYTES: Final = 64 * 1024
_CLOSE_S: Final = 5.0  # seconds for sending the last bytes of a connection that closes

# `Limits.idle_frames` bounds the frames without effect; these constants give their costs and raise the bound.
_RESIZE_COST: Final = 20  # a resize of the HPACK table counts as this many frames without effect
_PER_STREAM: Final = 4  # each stream that a peer opens allows the peer this many frames without effect
_BYTES_SENT: Final = 1024  # sending the peer this many bytes allows the peer one more frame without effect
_PER_S: Final = 50  # each second of a connection's age allows this many frames without effect
# The following constants are units of work (connections.py); reading a frame takes one unit.
_STREAM_WORK: Final = 3  # units of work for starting a stream
_START_WORK: Final = 16  # units for starting a handler and for the handler's own work
_RESET_WORK: Final = 10  # units of work for cancelling a handler
_DECODE_WORK: Final = 32  # units for decoding uncached headers; one more for each `_DECODE_BYTES` and field
_DECODE_BYTES: Final = 16
# Payload bytes of the frame types that have only one size.
_SIZES: Final = {frames.PRIORITY: 5, frames.RST_STREAM: 4, frames.PING: 8, frames.WINDOW_UPDATE: 4}
_OF_CONNECTION: Final = (frames.SETTINGS, frames.PING, frames.GOAWAY)

_log = logging.getLogger(__name__)


# Opens the stream for a stream id; returns None to refuse it, so that the peer sends the request elsewhere.
Open = Callable[["Connection", int], GrpcStream | None]


class Connection(asyncio.Protocol):
    """One peer's connection. All connections of a transport share `peers`.

    The function `find` takes the well-formed header fields of a request. `find` returns a function that opens
    the request's stream, or the header block of an immediate answer.
    """

    def __init__(self, find: Callable[[Mapping[bytes, bytes]], Open | bytes], peers: Peers) -> None:
        self.peers, self._limits = peers, peers.limits
        self.loop = asyncio.get_running_loop()
        self.silent = 0  # number of open streams that have not received a message
        self.send_window = frames.DEFAULT_WINDOW
        self.initial_send_window = frames.DEFAULT_WINDOW  # the send window of new streams
        self.paused = False  # whether the peer has stopped reading
        # Streams whose handlers wait for the connection's send window, the longest wait first.
        self.blocked: OrderedDict[int, GrpcStream] = OrderedDict()
        self.received = False  # whether data has arrived since the transport last cleared this flag
        self.starting: OrderedDict[int, GrpcStream] = OrderedDict()
        self.last_trusted_s = -math.inf
        self.line: Line | None = None
        self.tag, self.queued = 0.0, False
        self._transport: Any = None
        self.address = ""
        self._closed = False
        self._settled = False  # whether the peer's preface and settings have arrived
        self.work_left = 0  # units of work left in this connection's turn; between turns at most 0
        self.unfinished: GrpcStream | None = None  # the stream with further messages of the last frame
        self._paused_reading = False
        self._tail = b""  # data that has arrived but was not parsed yet
        self._streams: dict[int, GrpcStream] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._last_id = 0
        self._refuse_after = frames.LAST_STREAM
        self._arrived_bytes = 0  # bytes of DATA frames since the connection's window was last opened
        self._headers: HeaderReader[Open | bytes] = HeaderReader(find, malformed=b"")
        self._block: bytearray | None = None  # an incomplete header block, before its CONTINUATION frames
        self._block_of = (0, 0)  # the flags and stream id of the header block `_block`
        self._unsent_replies = 0
        self._idle_frames = 0  # the total cost of frames without effect so far
        self._idle_allowed = self._limits.idle_frames
        self._begun = 0  # number of streams opened so far
        self._began_s = self.loop.time()
        self._sent_bytes = 0
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._draining = False
        self._cut: asyncio.TimerHandle | None = None

    @property
    def peer(self) -> tuple[str, int]:
        """The peer's address ('' if unknown) and its number of open streams."""
        return self.address, len(self._streams)

    @property
    def trusted(self) -> bool:
        """Whether a handler has answered the peer, or called `trust`, within `Limits.trusted_s` seconds."""
        return self.loop.time() - self.last_trusted_s < self._limits.trusted_s

    # asyncio calls the following methods.

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.address = address_of(transport)
        if not self.peers.connections.add(self):
            self.abort()
            return
        transport.set_write_buffer_limits(high=WRITE_BUFFER)
        settings = {
            frames.MAX_STREAMS: self._limits.streams,
            frames.INITIAL_WINDOW: WINDOW_BYTES,
            frames.MAX_LIST: LIST_BYTES,
        }
        payload = b"".join(frames.SETTING.pack(*setting) for setting in settings.items())
        self.write(frame(frames.SETTINGS, 0, 0, payload))
        self._open_window(_CONNECTION_WINDOW - frames.DEFAULT_WINDOW)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        if self._cut is not None:
            self._cut.cancel()  # a running timer would keep the transport alive
        self._unsent = []
        self._tail = b""
        self._cancel_all()
        self.peers.closed(self)

    def pause_writing(self) -> None:
        self.paused = True
        self.peers.stuck(self)

    def resume_writing(self) -> None:
        self.paused = False
        self.peers.freed(self)
        self._unsent_replies = 0
        self.wake_next()

    def data_received(self, data: bytes) -> None:
        self.received = True
        if self._closed:
            return
        self._tail += data
        self.peers.turns.ask(self)
        if self.queued and not (self._paused_reading or self._closed):
            self._paused_reading = True
            self._transport.pause_reading()
            self.peers.unread(self, len(self._tail))

    def work(self, most: int) -> tuple[int, bool]:
        """Read frames that have arrived and start handlers, within `most` units of work (`turns.Worker`) less
        those that handlers have charged since the last turn."""
        self.work_left += most
        self._start_handlers(most // 2)  # first, since a flood of frames must not delay handlers
        stream, self.unfinished = self.unfinished, None
        if stream is not None and stream.id in self._streams:
            stream.receive(b"", 0, 0, False)
        is_unread = not self._closed and (self.unfinished is not None or self._read())
        if not is_unread:
            self._start_handlers(0)
        has_more = is_unread or bool(self.starting)
        if self._paused_reading and not (has_more or self._closed):
            self._paused_reading = False
            self._transport.resume_reading()
            self.peers.unread(self, 0)
        done, self.work_left = most - self.work_left, 0
        return done, has_more

    def _start_handlers(self, kept: int) -> None:
        """Start waiting handlers while the turn has more than `kept` units of work left."""
        while self.starting and self.work_left > kept:
            self.work_left -= _START_WORK
            _, stream = self.starting.popitem(last=False)
            stream.task = self.loop.create_task(stream.serve())

    def _read(self) -> bool:
        """Read frames of `_tail` within the turn's limit of work; return whether unread frames may remain."""
        data, at, is_unread = self._tail, 0, False
        try:
            if not self._settled:
                if data[: len(frames.PREFACE)] != frames.PREFACE[: len(data)]:
                    raise ConnectionFault(frames.PROTOCOL_ERROR, "the connection does not begin with HTTP/2")
                if len(data) < len(frames.PREFACE) + frames.HEADER_BYTES:
                    return False
                at = len(frames.PREFACE)
                if data[at + 3] != frames.SETTINGS or data[at + 4] & frames.ACK:
                    raise ConnectionFault(frames.PROTOCOL_ERROR, "the first frame must be SETTINGS")
                self._settled = True
            at, is_unread = self._read_frames(data, at)
            self._tail = data[at:]
        except ConnectionFault as fault:
            self.close(fault.code, str(fault))
        except Exception:
            _log.exception("a connection failed")
            self.close(frames.INTERNAL_ERROR, "the server failed on this connection; its log has the reason")
        return is_unread

    def _read_frames(self, data: bytes, at: int) -> tuple[int, bool]:
        """Read the frames of `data` from `at` on. Returns where the unread rest of `data` begins, and whether
        the turn's work ended before that rest was read."""
        end, arrived, is_unread = len(data), 0, False
        while end - at >= frames.HEADER_BYTES:
            if self.work_left <= 0:
                is_unread = True
                break
            self.work_left -= 1
            high, low, kind, flags, stream_id = frames.HEADER.unpack_from(data, at)
            size = high << 16 | low
            if size > frames.FRAME_BYTES:
                raise ConnectionFault(frames.FRAME_SIZE_ERROR, "a frame is too large")
            start = at + frames.HEADER_BYTES
            if start + size > end:
                break
            at = start + size
            if kind == frames.DATA and self._block is None:
                arrived += size
                self._on_data(flags, stream_id & frames.LAST_STREAM, data, start, at)
            else:
                self._on_frame(kind, flags, stream_id & frames.LAST_STREAM, data, start, at)
        self._arrived_bytes += arrived
        if self._arrived_bytes >= _CONNECTION_WINDOW // 2:
            self._open_window(self._arrived_bytes)
            self._arrived_bytes = 0
        return at, is_unread or self.unfinished is not None

    def _open_window(self, more: int) -> None:
        """Open the connection's receive window by `more` further bytes."""
        self.write(frame(frames.WINDOW_UPDATE, 0, 0, more.to_bytes(4, "big")))

    # Handlers, the transport and `peers` call the following methods.

    @property
    def drained(self) -> bool:
        """After a call of `drain`: whether the peer has read the GOAWAY frame, and no stream is open."""
        return self._closed or (self._refuse_after != frames.LAST_STREAM and not self._streams)

    def write(self, data: bytes) -> None:
        """Send `data` in one system call with all other data that this step of the event loop writes."""
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
        self.write(frame(frames.PING, 0, 0, b"picker\0\0"))

    def drain(self) -> None:
        """Announce by a GOAWAY frame that new streams will soon be refused; open streams are still served.

        The peer's answer to the ping shows that the peer has read the GOAWAY frame. Streams that open after
        this answer are refused, so that the peer sends their requests elsewhere.
        """
        self._draining = True
        self._go_away(frames.LAST_STREAM, frames.NO_ERROR)
        self.ping()

    def close(self, code: int = frames.NO_ERROR, why: str = "") -> None:
        """End the connection and all of its streams."""
        if self._closed:
            return
        self._go_away(self._last_id, code, why)
        self._flush()
        self._closed = True
        self._cancel_all()
        self._transport.close()
        self._cut = self.loop.call_later(_CLOSE_S, self._transport.abort)  # the peer may never read the rest

    def _go_away(self, last_id: int, code: int, why: str = "") -> None:
        self.write(
            frame(frames.GOAWAY, 0, 0, last_id.to_bytes(4, "big") + code.to_bytes(4, "big") + why.encode())
        )

    def abort(self) -> None:
        """Cut the connection without sending a GOAWAY frame."""
        self._closed = True
        self._transport.abort()

    def finished(self, stream: GrpcStream) -> None:
        """Remove a stream that its handler has ended."""
        stream.task = None
        if not stream.remote_ended and stream.id in self._streams:
            self._ignore(stream.id)
        self._cancel(stream.id)

    def reset(self, stream_id: int, code: int) -> None:
        """End a stream with error `code`. REFUSED_STREAM lets the peer send the request to another server."""
        self.write(frame(frames.RST_STREAM, 0, stream_id, code.to_bytes(4, "big")))
        self._ignore(stream_id)
        self._cancel(stream_id)

    def wake_next(self) -> None:
        """If the connection's send window is open, wake the first writer that waits for it. After its write,
        each writer wakes the next one, so a window update wakes no more writers than it serves."""
        if self.blocked and self.send_window > 0 and not self.paused:
            next(iter(self.blocked.values())).wake_writer()

    # End streams.

    def _ignore(self, stream_id: int) -> None:
        """Ignore later frames on a stream that this side has ended: the client may not yet know the end."""
        self._ended[stream_id] = None
        if len(self._ended) > _ENDED_IDS:
            self._ended.popitem(last=False)

    def _cancel(self, stream_id: int) -> None:
        """Release a stream if it is open, and cancel its handler if the handler runs."""
        stream = self._streams.pop(stream_id, None)
        if stream is None:
            return
        self.peers.end(stream, at_once=not self._closed)
        stream.drop()
        if not (self._streams or self._closed):
            self.peers.connections.idle(self)

    def _cancel_all(self) -> None:
        for stream_id in list(self._streams):
            self._cancel(stream_id)

    def _fault(self, stream_id: int, code: int) -> None:
        """End a stream on which the peer broke the protocol."""
        self._reply(frame(frames.RST_STREAM, 0, stream_id, code.to_bytes(4, "big")))
        self._cancel(stream_id)

    def _reply(self, data: bytes) -> None:
        """Reply to a frame. At most `unsent_replies` replies wait for a peer that does not read."""
        if self.paused:
            self._unsent_replies += 1
            if self._unsent_replies > self._limits.unsent_replies:
                raise ConnectionFault(frames.ENHANCE_YOUR_CALM, "the peer does not read replies")
        self.write(data)

    # Handle frames.

    def _on_frame(self, kind: int, flags: int, stream_id: int, data: bytes, start: int, end: int) -> None:
        if self._block is not None and (kind != frames.CONTINUATION or stream_id != self._block_of[1]):
            raise ConnectionFault(frames.PROTOCOL_ERROR, "a frame interrupts a header block")
        if kind == frames.HEADERS:
            self._on_headers(flags, stream_id, data, start, end)
            return
        size = end - start
        if size != _SIZES.get(kind, size) or (kind == frames.GOAWAY and size < 8):
            raise ConnectionFault(frames.FRAME_SIZE_ERROR, "a frame has a wrong size")
        if stream_id and kind in _OF_CONNECTION:
            raise ConnectionFault(frames.PROTOCOL_ERROR, "a frame about the connection names a stream")
        if kind == frames.WINDOW_UPDATE:
            self._on_window_update(stream_id, data[start:end])
        elif kind == frames.RST_STREAM:
            self._on_reset(stream_id)
        elif kind == frames.PING:
            self._on_ping(flags, data[start:end])
        elif kind == frames.SETTINGS:
            self._on_settings(flags, data[start:end])
        elif kind == frames.CONTINUATION:
            self._on_continuation(flags, data[start:end])
        elif kind == frames.PUSH_PROMISE or (kind == frames.PRIORITY and not stream_id):
            raise ConnectionFault(frames.PROTOCOL_ERROR, "a client must not send this frame")
        else:
            self._count_idle(1)  # PRIORITY, GOAWAY and frame types of extensions have no effect

    def _count_idle(self, cost: int) -> None:
        """Count a frame without effect, of which gateways send few even for hostile clients."""
        self._idle_frames += cost
        if self._idle_frames <= self._idle_allowed:
            return
        age_s = int(self.loop.time() - self._began_s)
        more = _PER_STREAM * self._begun + self._sent_bytes // _BYTES_SENT + _PER_S * age_s
        self._idle_allowed = self._limits.idle_frames + more
        if self._idle_frames > self._idle_allowed:
            raise ConnectionFault(frames.ENHANCE_YOUR_CALM, "too many frames without effect")

    def _on_data(self, flags: int, stream_id: int, data: bytes, start: int, end: int) -> None:
        stream = self._streams.get(stream_id)
        if stream is None or stream.remote_ended:
            if stream_id == 0 or stream_id > self._last_id:
                raise ConnectionFault(frames.PROTOCOL_ERROR, "DATA on a stream that is not open")
            if stream_id not in self._ended:
                self._count_idle(1)
                self._fault(stream_id, frames.STREAM_CLOSED)
            return
        stream.receive_window -= end - start
        if stream.receive_window < 0:
            self._fault(stream_id, frames.FLOW_CONTROL_ERROR)
            return
        if flags & frames.PADDED:
            start, end = self._without_padding(data, start, end)
        if start < end:
            stream.receive(data, start, end, bool(flags & frames.END_STREAM))
        elif not flags & frames.END_STREAM:
            self._count_idle(1)
        if flags & frames.END_STREAM and not stream.end_remote():
            self._fault(stream_id, frames.PROTOCOL_ERROR)

    def _without_padding(self, data: bytes, start: int, end: int) -> tuple[int, int]:
        """The positions where the content of the padded payload `data[start:end]` begins and ends."""
        padding = data[start] if start < end else 0
        if start + 1 + padding > end:
            raise ConnectionFault(frames.PROTOCOL_ERROR, "a frame's padding is longer than its payload")
        return start + 1, end - padding

    def _on_headers(self, flags: int, stream_id: int, data: bytes, start: int, end: int) -> None:
        if not stream_id & 1:
            raise ConnectionFault(frames.PROTOCOL_ERROR, "a client's streams have odd ids")
        if flags & frames.PADDED:
            start, end = self._without_padding(data, start, end)
        if flags & frames.PRIORITISED:
            start += 5  # skip the priority, which has no effect since RFC 9113
            if start > end:
                raise ConnectionFault(frames.PROTOCOL_ERROR, "the priority in a HEADERS frame is cut off")
        if flags & frames.END_HEADERS:
            self._on_block(flags, stream_id, data[start:end])
        else:
            self._block, self._block_of = bytearray(data[start:end]), (flags, stream_id)

    def _on_continuation(self, flags: int, payload: bytes) -> None:
        if self._block is None:
            raise ConnectionFault(frames.PROTOCOL_ERROR, "a CONTINUATION frame without headers before it")
        self._count_idle(1)
        self._block += payload
        if len(self._block) > _BLOCK_BYTES:
            raise ConnectionFault(frames.ENHANCE_YOUR_CALM, "headers are too large")
        if flags & frames.END_HEADERS:
            block, self._block = bytes(self._block), None
            self._on_block(*self._block_of, block)

    def _on_block(self, flags: int, stream_id: int, block: bytes) -> None:
        found = self._headers.known.get(block)
        if found is None:
            found = self._read_block(block)
        if stream_id <= self._last_id:
            self._on_trailers(flags, stream_id)
            return
        self._last_id = stream_id
        self._begun += 1
        if isinstance(found, bytes):
            self._answer(flags, stream_id, found)
            return
        peers = self.peers
        stream = None
        if (
            stream_id <= self._refuse_after
            # One connection may take at most two thirds of all streams.
            and len(self._streams) < 2 * peers.room(self)
            and self.silent < self._limits.silent_here
        ):
            stream = found(self, stream_id)
        if stream is None:
            self.reset(stream_id, frames.REFUSED_STREAM)
            return
        if not self._streams:
            peers.connections.busy(self)
        self._streams[stream_id] = stream
        self.work_left -= _STREAM_WORK
        peers.begin(stream)
        if flags & frames.END_STREAM and not stream.end_remote():
            self._fault(stream_id, frames.PROTOCOL_ERROR)

    def _read_block(self, block: bytes) -> Open | bytes:
        self.work_left -= _DECODE_WORK + len(block) // _DECODE_BYTES
        if resizes_table(block):
            self._count_idle(_RESIZE_COST)
        try:
            found = self._headers.read(block)
        except ValueError as fault:
            raise ConnectionFault(frames.COMPRESSION_ERROR, str(fault)) from fault
        self.work_left -= self._headers.decoded  # one byte of a block may encode a whole field
        return found

    def _answer(self, flags: int, stream_id: int, block: bytes) -> None:
        """Answer a request by the header block `block`, or by a reset if `block` is empty; open no stream."""
        if not block:
            self._fault(stream_id, frames.PROTOCOL_ERROR)
            return
        self.write(frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream_id, block))
        if not flags & frames.END_STREAM:
            self.reset(stream_id, frames.NO_ERROR)

    def _on_trailers(self, flags: int, stream_id: int) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:
            if stream_id not in self._ended:
                raise ConnectionFault(frames.STREAM_CLOSED, "HEADERS on a closed stream")
        elif stream.remote_ended:
            self._fault(stream_id, frames.STREAM_CLOSED)
        elif not flags & frames.END_STREAM or not stream.end_remote():
            self._fault(stream_id, frames.PROTOCOL_ERROR)

    def _on_reset(self, stream_id: int) -> None:
        if stream_id == 0 or stream_id > self._last_id:
            raise ConnectionFault(frames.PROTOCOL_ERROR, "RST_STREAM on a stream that is not open")
        if stream_id in self._streams:
            self.work_left -= _RESET_WORK
            self._cancel(stream_id)
        else:
            self._count_idle(1)

    def _on_window_update(self, stream_id: int, payload: bytes) -> None:
        self._count_idle(1)
        more = int.from_bytes(payload, "big") & frames.MAX_WINDOW
        code = frames.FLOW_CONTROL_ERROR if more else frames.PROTOCOL_ERROR
        if stream_id == 0:
            self.send_window += more
            if more == 0 or self.send_window > frames.MAX_WINDOW:
                raise ConnectionFault(code, "a WINDOW_UPDATE has an invalid increment")
            self.wake_next()
            return
        stream = self._streams.get(stream_id)
        if stream is None:
            if stream_id > self._last_id:
                raise ConnectionFault(frames.PROTOCOL_ERROR, "WINDOW_UPDATE on a stream that is not open")
            return
        stream.send_window += more
        if more == 0 or stream.send_window > frames.MAX_WINDOW:
            self._fault(stream_id, code)
        else:
            stream.wake_writer()

    def _on_ping(self, flags: int, payload: bytes) -> None:
        self._count_idle(1)
        if not flags & frames.ACK:
            self._reply(frame(frames.PING, frames.ACK, 0, payload))
        elif self._draining and self._refuse_after == frames.LAST_STREAM:
            self._refuse_after = self._last_id
            self._go_away(self._last_id, frames.NO_ERROR)

    def _on_settings(self, flags: int, payload: bytes) -> None:
        if len(payload) % 6 or (flags & frames.ACK and payload):
            raise ConnectionFault(frames.FRAME_SIZE_ERROR, "a SETTINGS frame has a wrong size")
        self._count_idle(1 + len(payload) // 6)
        if flags & frames.ACK:
            return
        window = self.initial_send_window
        for name, value in frames.SETTING.iter_unpack(payload):
            if name == frames.INITIAL_WINDOW:
                window = value
            elif (name == frames.ENABLE_PUSH and value > 1) or (
                name == frames.MAX_FRAME and not frames.FRAME_BYTES <= value < 2**24
            ):
                raise ConnectionFault(frames.PROTOCOL_ERROR, "a setting is out of range")
        if window > frames.MAX_WINDOW:
            raise ConnectionFault(frames.FLOW_CONTROL_ERROR, "the initial window is too large")
        if window != self.initial_send_window:
            self._count_idle(len(self._streams))
            self.work_left -= len(self._streams)
            more, self.initial_send_window = window - self.initial_send_window, window
            for stream in self._streams.values():
                stream.send_window += more
                if stream.send_window > frames.MAX_WINDOW:
                    raise ConnectionFault(frames.FLOW_CONTROL_ERROR, "a stream's window is too large")
                stream.wake_writer()
        self._reply(frame(frames.SETTINGS, frames.ACK, 0))


def open_stream(
    path: bytes,
    refused: set[bytes],
    make: Callable[[Link, int], GrpcStream],
    connection: Link,
    stream_id: int,
) -> GrpcStream | None:
    """A stream for a request of `path`; None if new streams of `path` are refused."""
    return None if path in refused else make(connection, stream_id)
