"""gRPC streams of messages on HTTP/2 connections (`http2.py`), and the limits on all connections together.

`native.NativeTransport` makes a `GrpcStream` for each request; the HTTP/2 connection starts the handler.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, Protocol

from picker_fleet.domain.budgets import BodyBudget
from picker_fleet.domain.errors import BufferFull
from picker_fleet.grpc import frames
from picker_fleet.grpc.connections import Connections, Turns
from picker_fleet.grpc.frames import frame, start_of_frame
from picker_fleet.grpc.headers import literal
from picker_fleet.grpc.transport import Handler, Limits, Relay, RpcError, Status

WINDOW_BYTES: Final = 512 * 1024  # bytes of a stream's receive window
FREE_BYTES = 4096  # a stream's first unread bytes are not charged to the budget: about the stream's own size
_MESSAGE_WORK: Final = 2  # units of work (connections.py) for each further message of a frame
_BYTES_A_UNIT: Final = 1024  # a message is a unit of work for this many of its bytes
_READS_A_STEP: Final = 4  # queued messages that a handler reads before other tasks run
MESSAGE_COST = 64  # bytes of overhead that a queued message and its frame take in memory
WRITE_BUFFER: Final = 1024 * 1024  # handlers wait while their connection has more unsent bytes
_CREDIT_BELOW = WINDOW_BYTES // 2  # reopen a stream's window when at most this many bytes are left of it
_WRITE_S = 60.0  # seconds that a write waits for the peer to open its window
_STUCK_S: Final = 30.0  # cut off a peer that reads nothing for this many seconds
_STUCK: Final = 64  # maximum connections whose peers read nothing; each keeps up to `WRITE_BUFFER` unsent

OK_BLOCK = b"\x88" + literal(b"content-type", b"application/grpc")  # 0x88: `:status: 200`
_END_BLOCK = literal(b"grpc-status", b"0")
_OK = start_of_frame(frames.HEADERS, frames.END_HEADERS, len(OK_BLOCK))
_END = start_of_frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, len(_END_BLOCK))
_STOP = start_of_frame(frames.RST_STREAM, 0, 4)
_DATA = bytes((frames.DATA, 0))  # type and flags of a DATA frame, which follow the frame's size
_CREDIT = start_of_frame(frames.WINDOW_UPDATE, 0, 4)

_log = logging.getLogger(__name__)


class Link(Protocol):
    """The interface of a connection for its streams and for `Peers`; `http2.Connection` implements it."""

    peers: "Peers"
    loop: asyncio.AbstractEventLoop
    address: str  # the peer's address, '' if unknown
    silent: int  # number of open streams that have not received a message
    # Streams that have received a message and whose handlers must start, in order of arrival.
    starting: "OrderedDict[int, GrpcStream]"
    last_trusted_s: float  # loop time at which a handler last answered or trusted the peer
    send_window: int
    initial_send_window: int  # the send window of new streams
    paused: bool  # whether the peer has stopped reading
    work_left: int  # units of work left in this connection's turn
    unfinished: "GrpcStream | None"  # the stream to resume in the connection's next turn
    # Streams whose handlers wait for the connection's send window, the longest wait first.
    blocked: "OrderedDict[int, GrpcStream]"

    @property
    def trusted(self) -> bool: ...

    def write(self, data: bytes) -> None: ...

    def wake_next(self) -> None: ...

    def finished(self, stream: "GrpcStream") -> None: ...

    def reset(self, stream_id: int, code: int) -> None: ...

    def abort(self) -> None: ...


def status_block(status: Status, why: str) -> bytes:
    """The header fields of an error status; `why` is percent-encoded except for printable ASCII."""
    message = b"".join(
        bytes((byte,)) if 32 <= byte < 127 and byte != 37 else f"%{byte:02X}".encode()
        for byte in why.encode()[:400]
    )
    return literal(b"grpc-status", str(status).encode()) + literal(b"grpc-message", message)


class GrpcStream:
    """One request's stream: its handler uses the interface `transport.Stream`; its connection calls it, too.

    `content_length` is the length that the client announces, -1 if it announces no length; `message_bytes`
    is the maximum size of a message from the client.
    """

    def __init__(
        self,
        connection: Link,
        stream_id: int,
        handler: Handler,
        budget: BodyBudget,
        content_length: int,
        message_bytes: int,
    ) -> None:
        self.connection = connection
        self.id = stream_id
        self._sid = stream_id.to_bytes(4, "big")
        self._shifted_id = stream_id << 40  # the stream id's part of the 14 bytes that precede a message
        self._handler = handler
        self._budget = budget
        self._content_length = content_length
        self._message_bytes = message_bytes
        self._messages: deque[bytes] = deque()
        self._partial = bytearray()  # the received beginning of a message
        self._wanted_bytes = 0  # the length at which `_partial` is complete or contains its size field
        self._reader: asyncio.Future[bytes | None] | None = None  # gets a message, or None to wake the reader
        self._take: Callable[[bytes], None] | None = None  # if set, called with each message on its arrival
        self._writer: asyncio.Future[None] | None = None
        self._started = False  # whether the response's headers have been sent
        self._fault: Exception | None = None
        self._unread_bytes = 0  # bytes of whole messages that the handler has not read
        self._counted_bytes = 0  # unread bytes charged to the budget
        self._received_bytes = 0
        self.began_s = connection.loop.time()
        self.receive_window = WINDOW_BYTES
        self.send_window = connection.initial_send_window
        self.remote_ended = False
        self.task: asyncio.Task[None] | None = None

    # The handler calls the following methods.

    @property
    def has_message(self) -> bool:
        return bool(self._messages)

    async def read(self) -> bytes | None:
        """The next message; None once the client has ended its side.

        Raises:
            BufferFull: the replica's byte budget is used up, so the stream keeps no more of the request.
            RpcError: the data is not a gRPC message, or the message is too large.
        """
        while not self._messages:
            if self._fault is not None:
                raise self._fault
            if self.remote_ended:
                return None
            self._reader = self.connection.loop.create_future()
            try:
                handed_over = await self._reader
            finally:
                self._reader = None
            if handed_over is not None:
                return handed_over
        message = self._messages.popleft()
        if not self._messages:
            self._unread_bytes = 0
            if self._counted_bytes:
                self._count()
            if self.receive_window <= _CREDIT_BELOW:
                self._give_credit()
        elif len(self._messages) % _READS_A_STEP == 0:
            await asyncio.sleep(0)
        return message

    def interrupt(self, error: Exception) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_exception(error)

    def trust(self) -> None:
        self.connection.last_trusted_s = self.connection.loop.time()

    def charge(self, work: int) -> None:
        self.connection.work_left -= work

    async def relay(self, answer: Relay) -> bytes | None:
        """Works like `Stream.relay`, but wakes no task for each message. Raises the errors of `read`, and
        any error of `answer`."""
        unsent: deque[bytes] = deque()
        is_last = False

        def take(message: bytes) -> None:
            nonlocal is_last
            answers, is_last = answer(message)
            unsent.extend(answers)
            while len(unsent) > is_last and self._write_now(unsent[0]):
                unsent.popleft()
            if unsent or is_last:
                self._take = None  # queue further messages while the task sends the remaining answers
                self._wake_reader(b"")

        while True:
            while self._messages and not (unsent or is_last):
                take(await self.read() or b"")
            while len(unsent) > is_last:
                await self.write(unsent.popleft())
            if is_last:
                return unsent.popleft() if unsent else None
            if not self._messages:
                self._take = take
                try:
                    if await self.read() is None:  # the client ended; else send the remaining answers
                        return None
                finally:
                    self._take = None

    async def write(self, message: bytes) -> None:
        """Send one message; returns once the connection has taken all frames of the message.

        Raises:
            RpcError: the peer's flow-control windows stay closed too long, or the byte budget is used up.
        """
        if not self._write_now(message):
            await self._write_parts(message)

    def _write_now(self, message: bytes) -> bool:
        """Send a message in one frame. Returns False if it is too large, or the windows are too small now."""
        data = self._in_one_frame(message)
        if data:
            self._send(data)
        return bool(data)

    def _send(self, data: bytes) -> None:
        """Send the encoded frames `data`, after the response's headers if those have not been sent."""
        if not self._started:
            self._started = True
            self.trust()
            data = b"".join((_OK, self._sid, OK_BLOCK, data))
        self.connection.write(data)

    async def serve(self) -> None:
        """Run the handler and send the end of the stream."""
        try:
            message = await self._handler(self)
            data = b""
            if message is not None and not (data := self._in_one_frame(message)):
                await self._write_parts(message)
            self._send(b"".join((data, _END, self._sid, _END_BLOCK)))
            self._end()
        except asyncio.CancelledError:
            if self.task is not None:  # the handler has cancelled itself, since the stream is still open
                self.task = None
                self.connection.reset(self.id, frames.CANCEL)
        except RpcError as fault:
            self._fail(fault.status, str(fault))
        except Exception:
            _log.exception("a stream failed")
            self._fail(Status.INTERNAL, "the picker failed on this stream; its log has the reason")

    def _fail(self, status: Status, why: str) -> None:
        """End the stream with an error status."""
        block = (b"" if self._started else OK_BLOCK) + status_block(status, why)
        self.connection.write(frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, self.id, block))
        self._end()

    def _end(self) -> None:
        """Remove the stream from its connection after the end of the response."""
        if not self.remote_ended:
            # RST_STREAM with NO_ERROR asks the client to stop sending, as gRPC's own servers do.
            self.connection.write(b"".join((_STOP, self._sid, frames.NO_ERROR_CODE)))
        self.connection.finished(self)

    def _in_one_frame(self, message: bytes) -> bytes:
        """A message as one frame, charged to the send windows; b'' if a window or a frame is too small."""
        connection = self.connection
        size = len(message) + 5
        window = connection.send_window
        if size > window or size > self.send_window or size > frames.FRAME_BYTES or connection.paused:
            return b""
        connection.send_window = window - size
        self.send_window -= size
        # Before the message come the frame's size, type (0), flags (0) and stream id; then the message's
        # compression flag (0) and size.
        return (size << 88 | self._shifted_id | size - 5).to_bytes(14, "big") + message

    async def _write_parts(self, message: bytes) -> None:
        """Send a message in several frames, as the peer's windows open."""
        connection = self.connection
        rest = memoryview(b"".join((b"\0", len(message).to_bytes(4, "big"), message)))
        while rest:
            room = min(self.send_window, connection.send_window)
            if room <= 0 or connection.paused:
                await self._until_writable(len(rest))
                continue
            # Write several frames at once, but at most 64 KiB: a slow connection's buffer has a limit.
            now, rest = rest[: min(room, 64 * 1024)], rest[min(room, 64 * 1024) :]
            self.send_window -= len(now)
            connection.send_window -= len(now)
            parts: list[bytes | memoryview] = []
            for start in range(0, len(now), frames.FRAME_BYTES):
                part = now[start : start + frames.FRAME_BYTES]
                parts += (len(part).to_bytes(3, "big"), _DATA, self._sid, part)
            self._send(b"".join(parts))
            connection.wake_next()

    async def _until_writable(self, unsent_bytes: int) -> None:
        """Wait until the peer's windows open; meanwhile charge `unsent_bytes` to the byte budget.

        Raises:
            RpcError: the byte budget is used up, or the peer's windows stay closed.
        """
        connection = self.connection
        counted_bytes = max(unsent_bytes - FREE_BYTES, 0)
        try:
            self._budget.take(counted_bytes, unsent_bytes)
        except BufferFull as fault:
            raise RpcError(Status.RESOURCE_EXHAUSTED, str(fault)) from None
        self._writer = connection.loop.create_future()
        if self.send_window > 0:
            connection.blocked[self.id] = self
        try:
            async with asyncio.timeout(_WRITE_S):
                await self._writer
        except BaseException as fault:
            connection.blocked.pop(self.id, None)
            connection.wake_next()  # another stream can now use the connection's window
            if isinstance(fault, TimeoutError):
                raise RpcError(Status.UNAVAILABLE, "the peer does not read the answer") from None
            raise
        finally:
            self._budget.give_back(counted_bytes)
            self._writer = None
        connection.blocked.pop(self.id, None)
        if self.send_window <= 0:
            connection.wake_next()

    def wake_writer(self) -> None:
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    # The connection calls the following methods.

    def receive(self, data: bytes, start: int, end: int, is_last: bool) -> None:
        """Take the payload of a DATA frame, `data[start:end]`; if `is_last`, it ends the client's side."""
        size = end - start
        self._received_bytes += size
        if self._fault is not None:
            return  # do not reopen the window of a stream whose reads fail
        if (
            5 <= size <= self._message_bytes
            and not self._partial
            and data[start : start + 5] == (size - 5).to_bytes(5, "big")
        ):
            self._hand_over(data[start + 5 : end])  # most frames carry one whole message
        else:
            self._take_frame(data, start, end, is_last)
        if self.receive_window <= _CREDIT_BELOW and not self._messages:
            self._give_credit()

    def _take_frame(self, data: bytes, start: int, end: int, is_last: bool) -> None:
        """Take a frame that is not exactly one message: hand over whole messages, and keep other bytes. Once
        the turn's work is used up, keep further messages for the next turn, unless the frame `is_last`."""
        if self._partial:
            self._partial += data[start:end]
            if len(self._partial) < self._wanted_bytes:
                self._count()
                return
            data, self._partial = bytes(self._partial), bytearray()
            start, end = 0, len(data)
        whole_bytes = 5
        while end - start >= 5:
            whole_bytes = 5 + int.from_bytes(data[start + 1 : start + 5], "big")
            if data[start]:
                self._fail_reads(RpcError(Status.UNIMPLEMENTED, "compressed messages are not supported"))
                return
            if whole_bytes > self._message_bytes:
                why = f"a message of {whole_bytes - 5} bytes is too large"
                self._fail_reads(RpcError(Status.RESOURCE_EXHAUSTED, why))
                return
            if start + whole_bytes > end:
                break
            self._hand_over(data[start + 5 : start + whole_bytes])
            if self._fault is not None:
                return
            start += whole_bytes
            whole_bytes = 5
            self.connection.work_left -= _MESSAGE_WORK
            if self.connection.work_left <= 0 and end - start >= 5 and not is_last:
                self.connection.unfinished = self
                break
        self._partial += data[start:end]
        self._wanted_bytes = whole_bytes
        self._count()

    def _hand_over(self, message: bytes) -> None:
        """Give the handler a message, or queue the message until the handler reads it."""
        self.connection.work_left -= len(message) // _BYTES_A_UNIT
        if self._take is not None:
            try:
                self._take(message)
            except Exception as fault:
                self._fail_reads(fault)
            return
        reader = self._reader
        if reader is None or self._messages or reader.done():
            if self.task is None and not self._messages:
                self.connection.peers.heard(self)
            self._messages.append(message)
            self._unread_bytes += len(message) + MESSAGE_COST
            if self._unread_bytes > FREE_BYTES:
                self._count()
        else:
            reader.set_result(message)  # the handler waits for the message: none of its bytes count as unread

    def end_remote(self) -> bool:
        """End the client's side of the stream. Returns False if its bytes differ from the content-length."""
        self.remote_ended = True
        if self._partial:
            self._fail_reads(RpcError(Status.INTERNAL, "the stream ended within a message"))
        self._wake_reader()
        return self._content_length in (-1, self._received_bytes)

    def drop(self) -> None:
        """Free all data of a stream that has ended."""
        self._messages.clear()
        self._partial.clear()
        self._unread_bytes = 0
        if self._counted_bytes:
            self._count()

    def _give_credit(self) -> None:
        """Reopen the stream's receive window, once the handler has read every complete message."""
        if not self.remote_ended and self._fault is None:
            used = WINDOW_BYTES - self.receive_window
            self.connection.write(_CREDIT + self._sid + used.to_bytes(4, "big"))
            self.receive_window = WINDOW_BYTES

    def _count(self) -> None:
        """Charge the stream's unread bytes to the byte budget, except for the first `FREE_BYTES`."""
        unread_bytes = self._unread_bytes + len(self._partial)
        more = max(unread_bytes - FREE_BYTES, 0) - self._counted_bytes
        try:
            if more > 0:
                self._budget.take(more, unread_bytes)
            else:
                self._budget.give_back(-more)
        except BufferFull as fault:
            self._fail_reads(fault)
        else:
            self._counted_bytes += more

    def _fail_reads(self, fault: Exception) -> None:
        if self._fault is None:
            self._fault = fault
            self.drop()
        self._wake_reader()

    def _wake_reader(self, result: bytes | None = None) -> None:
        if self.task is None:
            self.connection.peers.heard(self)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(result)


class Peers:
    """Limits all peers of a transport together: has all `connections`, the `count` of open streams, the
    `cancelled` handlers that have not ended yet, and the `turns` of the connections.

    A handler starts in its connection's turn after its stream's first message has arrived. A request that is
    reset in the same turn costs neither a task nor a Redis call.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.connections: Connections[Link] = Connections("gRPC port", limits.connections)
        self.count = 0
        self.cancelled: set[asyncio.Task[None]] = set()
        self.turns = Turns(limits.step_work, limits.strangers_work)
        self._loop = asyncio.get_running_loop()
        # Streams that have not received a message, the oldest first.
        self._silent: OrderedDict[GrpcStream, None] = OrderedDict()
        self._stuck: OrderedDict[Link, float] = OrderedDict()  # when each peer stopped reading
        self._unread: dict[Link, int] = {}  # how many bytes wait for each connection's turn
        self._unread_bytes = 0  # how many bytes wait for the turns of all connections

    @property
    def full(self) -> str:
        """The reason why new streams are refused; '' while new streams are accepted."""
        if self.count >= self.limits.streams:
            return f"all {self.limits.streams} streams are taken"
        return self.connections.full

    # Count connections.

    def closed(self, connection: Link) -> None:
        """Forget a connection that has ended."""
        self.connections.remove(connection)
        self.unread(connection, 0)
        self._stuck.pop(connection, None)

    def unread(self, connection: Link, size: int) -> None:
        """Record that `size` bytes wait for the connection's turn. If too many bytes of all connections wait,
        cut the connection with the most bytes: an untrusted one if there is any."""
        self._unread_bytes += size - self._unread.pop(connection, 0)
        if size:
            self._unread[connection] = size
        while self._unread_bytes > self.limits.unread_bytes:
            largest = max(self._unread, key=lambda each: (not each.trusted, self._unread[each]))
            self._unread_bytes -= self._unread.pop(largest)
            largest.abort()

    def stuck(self, connection: Link) -> None:
        """Record that a peer reads nothing. If too many peers do so, cut the one that began first."""
        self._stuck[connection] = self._loop.time()
        if len(self._stuck) > _STUCK:
            self._stuck.popitem(last=False)[0].abort()

    def freed(self, connection: Link) -> None:
        """Record that the peer of `connection` reads again."""
        self._stuck.pop(connection, None)

    def end_overdue(self) -> None:
        """Refuse streams whose first message is overdue; cut connections whose peers have stopped reading."""
        now_s = self._loop.time()
        while self._silent and (stream := next(iter(self._silent))).began_s < now_s - self.limits.silent_s:
            stream.connection.reset(stream.id, frames.REFUSED_STREAM)
        while self._stuck and next(iter(self._stuck.values())) < now_s - _STUCK_S:
            self._stuck.popitem(last=False)[0].abort()

    # Count streams.

    def room(self, connection: Link) -> int:
        """How many streams are free for `connection` below the limit for all connections. The last quarter of
        that limit is kept for trusted connections."""
        kept = 0 if connection.trusted else self.limits.streams // 4
        return self.limits.streams - self.count - kept

    def begin(self, stream: GrpcStream) -> None:
        """Count a new stream without a message. If too many streams have no message, refuse the oldest."""
        self.count += 1
        self._silent[stream] = None
        stream.connection.silent += 1
        if len(self._silent) > self.limits.silent:
            oldest = next(iter(self._silent))
            oldest.connection.reset(oldest.id, frames.REFUSED_STREAM)

    def heard(self, stream: GrpcStream) -> None:
        """Let a stream's handler start: the first message or the end of the stream has arrived."""
        if stream in self._silent:
            self._leave_silent(stream)
            stream.connection.starting[stream.id] = stream

    def end(self, stream: GrpcStream, at_once: bool) -> None:
        """Stop counting a stream that has ended. Cancel its handler if the handler still runs: now if
        `at_once`, else when the event loop has time."""
        self.count -= 1
        if stream.task is not None:
            task, stream.task = stream.task, None
            self.cancelled.add(task)
            task.add_done_callback(self.cancelled.discard)
            if at_once:
                task.cancel()
            else:
                self.turns.cancel(task)
        elif stream in self._silent:
            self._leave_silent(stream)
        else:
            stream.connection.starting.pop(stream.id, None)

    def _leave_silent(self, stream: GrpcStream) -> None:
        del self._silent[stream]
        stream.connection.silent -= 1
