"""gRPC over HTTP/2 (`http2.py`) in the event loop's thread: streams of messages, and their transport.

`server.Server` makes the transport (`extproc.transport: native`). That makes a `GrpcStream` for each request.
"""

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from picker_fleet.background import keep
from picker_fleet.domain.budgets import BodyBudget
from picker_fleet.domain.errors import BufferFull, StartupError
from picker_fleet.grpc import frames
from picker_fleet.grpc.certificates import MAX_TLS_CONNECTIONS, Certificates, serve
from picker_fleet.grpc.frames import frame, start_of_frame
from picker_fleet.grpc.headers import literal
from picker_fleet.grpc.http2 import WINDOW_BYTES, Connection, Limits, Open, Peers
from picker_fleet.grpc.transport import ByMetadata, Handler, Relay, RpcError, Status

FREE_BYTES = 4096  # unread bytes per stream that are not charged to the budget: about the stream's own size
MESSAGE_COST = 64  # bytes of overhead that a queued message and its frame take in memory
_CREDIT_BELOW = WINDOW_BYTES // 2  # a stream's window is reopened when at most this many bytes are left
_OTHERS_BYTES = 64 * 1024 * 1024  # most unread bytes of all streams without a budget of their own
_STEP_S = 0.01
_CLOSE_S = 0.25
_CANCEL_S = 5.0  # seconds for cancelled handlers to end
_WRITE_S = 60.0  # most seconds for a peer to open its window
_OVERDUE_S = 1.0  # seconds between checks for overdue streams

_OK_BLOCK = b"\x88" + literal(b"content-type", b"application/grpc")  # 0x88: `:status: 200`
_END_BLOCK = literal(b"grpc-status", b"0")
_BAD_TYPE_BLOCK = b"\x08\x03415"  # the literal `:status: 415`: an HTTP error for a peer without gRPC
_OK = start_of_frame(frames.HEADERS, frames.END_HEADERS, len(_OK_BLOCK))
_END = start_of_frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, len(_END_BLOCK))
_STOP = start_of_frame(frames.RST_STREAM, 0, 4)
_DATA = bytes((frames.DATA, 0))  # type and flags of a DATA frame, which follow the frame's size
_CREDIT = start_of_frame(frames.WINDOW_UPDATE, 0, 4)

_log = logging.getLogger(__name__)


def _status_block(status: Status, why: str) -> bytes:
    """The header fields of an error status; printable ASCII of `why` is kept, all else percent-encoded."""
    message = b"".join(
        bytes((byte,)) if 32 <= byte < 127 and byte != 37 else f"%{byte:02X}".encode()
        for byte in why.encode()[:400]
    )
    return literal(b"grpc-status", str(status).encode()) + literal(b"grpc-message", message)


class GrpcStream:
    """One request's stream, for its handler (`transport.Stream`) and its connection (`http2.Stream`).

    `content_length` is the length that the client announces, -1 if it announces none; `message_bytes` is the
    largest message that a client may send.
    """

    def __init__(
        self,
        connection: Connection,
        stream_id: int,
        handler: Handler,
        budget: BodyBudget,
        content_length: int,
        message_bytes: int,
    ) -> None:
        self.connection = connection
        self.id = stream_id
        self._sid = stream_id.to_bytes(4, "big")
        self._shifted_id = stream_id << 40  # the stream id at its place in the 14 bytes before a message
        self._handler = handler
        self._budget = budget
        self._content_length = content_length
        self._message_bytes = message_bytes
        self._messages: deque[bytes] = deque()
        self._partial = bytearray()  # the received beginning of a message
        self._wanted_bytes = 0  # length at which `_partial` is complete or contains its size field
        self._reader: asyncio.Future[bytes | None] | None = None  # yields a message, or None: check again
        self._take: Callable[[bytes], None] | None = None  # called with each message on arrival
        self._writer: asyncio.Future[None] | None = None
        self._started = False  # whether the response's headers have been sent
        self._fault: Exception | None = None
        self._unread_bytes = 0  # bytes of whole messages not read yet
        self._counted_bytes = 0  # unread bytes charged to the budget
        self._received_bytes = 0
        self.began_s = connection.loop.time()
        self.receive_window = WINDOW_BYTES
        self.send_window = connection.initial_send_window
        self.remote_ended = False
        self.task: asyncio.Task[None] | None = None

    # Methods that the handler calls.

    @property
    def has_message(self) -> bool:
        return bool(self._messages)

    async def read(self) -> bytes | None:
        """The next message; None once the client has ended its side.

        Raises:
            BufferFull: the replica's byte budget is used up; no further bytes of the request are kept.
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
        return message

    def interrupt(self, error: Exception) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_exception(error)

    async def relay(self, answer: Relay) -> bytes | None:
        """Does what `Stream.relay` does, without waking a task for each message. Raises the errors of `read`,
        and any error of `answer`."""
        unsent: deque[bytes] = deque()
        is_last = False

        def take(message: bytes) -> None:
            nonlocal is_last
            answers, is_last = answer(message)
            unsent.extend(answers)
            while len(unsent) > is_last and self._write_now(unsent[0]):
                unsent.popleft()
            if unsent or is_last:
                self._take = None  # queue further messages until the task has sent the remaining answers
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
                    if await self.read() is None:  # else `take` has stopped: send the remaining answers
                        return None
                finally:
                    self._take = None

    async def write(self, message: bytes) -> None:
        """Send one message; returns when the connection has all frames of the message.

        Raises:
            RpcError: the peer's flow-control windows stay closed too long, or the byte budget is used up.
        """
        if not self._write_now(message):
            await self._write_parts(message)

    def _write_now(self, message: bytes) -> bool:
        """Send a message as one frame. Returns False if the message cannot be sent this way now."""
        data = self._in_one_frame(message)
        if data:
            self._send(data)
        return bool(data)

    def _send(self, data: bytes) -> None:
        """Send the frames `data`, preceded by the response's headers if these have not been sent."""
        if not self._started:
            self._started = True
            data = b"".join((_OK, self._sid, _OK_BLOCK, data))
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
            if self.task is not None:  # the stream is still open: its handler has cancelled itself
                self.task = None
                self.connection.reset(self.id, frames.CANCEL)
        except RpcError as fault:
            self._fail(fault.status, str(fault))
        except Exception:
            _log.exception("a stream failed")
            self._fail(Status.INTERNAL, "the picker failed on this stream; its log says why")

    def _fail(self, status: Status, why: str) -> None:
        """End the stream with an error status."""
        block = (b"" if self._started else _OK_BLOCK) + _status_block(status, why)
        self.connection.write(frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, self.id, block))
        self._end()

    def _end(self) -> None:
        """Remove the stream from its connection, after the end of the response."""
        if not self.remote_ended:
            # RST_STREAM with NO_ERROR tells the client to stop sending, as gRPC's own servers do.
            self.connection.write(b"".join((_STOP, self._sid, frames.NO_ERROR_CODE)))
        self.connection.finished(self)

    def _in_one_frame(self, message: bytes) -> bytes:
        """A message as one frame, charged to the windows; empty if too large or not to be sent now."""
        connection = self.connection
        size = len(message) + 5
        window = connection.send_window
        if size > window or size > self.send_window or size > frames.FRAME_BYTES or connection.paused:
            return b""
        connection.send_window = window - size
        self.send_window -= size
        # The frame's size, DATA (0), flags (0) and stream id; the message's compression flag (0) and size.
        return (size << 88 | self._shifted_id | size - 5).to_bytes(14, "big") + message

    async def _write_parts(self, message: bytes) -> None:
        """Send a message in several frames, as far as the peer's windows allow at a time."""
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
        """Wait until the peer's windows open; `unsent_bytes` are charged to the byte budget meanwhile.

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
            connection.wake_next()  # another stream may use the connection's window
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

    # Methods that the connection calls.

    def receive(self, data: bytes, start: int, end: int) -> None:
        """Take the payload of a DATA frame, `data[start:end]`."""
        size = end - start
        self._received_bytes += size
        if self._fault is not None:
            return  # do not reopen the stream's window
        if (
            5 <= size <= self._message_bytes
            and not self._partial
            and data[start : start + 5] == (size - 5).to_bytes(5, "big")
        ):
            self._hand_over(data[start + 5 : end])  # most frames are one whole message
        else:
            self._take_frame(data, start, end)
        if self.receive_window <= _CREDIT_BELOW and not self._messages:
            self._give_credit()

    def _take_frame(self, data: bytes, start: int, end: int) -> None:
        """Take a frame that is not exactly one message: hand over whole messages, keep the other bytes."""
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
        self._partial += data[start:end]
        self._wanted_bytes = whole_bytes
        self._count()

    def _hand_over(self, message: bytes) -> None:
        """Give the handler a message, or queue the message until the handler reads."""
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
        """End the client's side. Returns whether its bytes match the content-length, if there is one."""
        self.remote_ended = True
        if self._partial:
            self._fail_reads(RpcError(Status.INTERNAL, "the stream ended within a message"))
        self._wake_reader()
        return self._content_length in (-1, self._received_bytes)

    def drop(self) -> None:
        """Free everything that the ended stream holds."""
        self._messages.clear()
        self._partial.clear()
        self._unread_bytes = 0
        if self._counted_bytes:
            self._count()

    def _give_credit(self) -> None:
        """Reopen the stream's window: the handler has read every complete message, so more data may come."""
        if not self.remote_ended and self._fault is None:
            used = WINDOW_BYTES - self.receive_window
            self.connection.write(_CREDIT + self._sid + used.to_bytes(4, "big"))
            self.receive_window = WINDOW_BYTES

    def _count(self) -> None:
        """Charge the stream's unread bytes to the budget, except for the first `FREE_BYTES`."""
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


class NativeTransport:
    """Serves gRPC. `handlers` maps paths to handlers; `budgets` limit each handler's unread data.

    Handlers without a budget share a separate one, so that large bodies delay no access log. `message_bytes`
    is the largest message that a client may send.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler | ByMetadata],
        budgets: Mapping[Handler, BodyBudget],
        message_bytes: int,
        certificates: Certificates | None = None,
        limits: Limits = Limits(),  # noqa: B008 - it is frozen
    ) -> None:
        self._certificates = certificates
        self._handlers = {path.encode(): handler for path, handler in handlers.items()}
        self._budgets, self._others = budgets, BodyBudget(_OTHERS_BYTES)
        self._message_bytes = message_bytes
        self._refused: set[bytes] = set()  # paths
        if certificates is not None:
            limits = replace(limits, connections=min(limits.connections, MAX_TLS_CONNECTIONS))
        self.peers = Peers(limits)
        self._connections = self.peers.connections
        self._server: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def full(self) -> str:
        """The reason why new streams are refused; empty while new streams are accepted."""
        return self.peers.full

    async def start(self, listen: str) -> int:
        """Bind the address `listen` and serve. Returns the bound port.

        Raises:
            StartupError: the address cannot be bound.
        """
        try:
            self._server = await serve(
                partial(Connection, self._find, self.peers), listen, self._certificates
            )
        except OSError as fault:
            raise StartupError(f"extproc.listen {listen}: cannot be bound; is the port in use?") from fault
        for name, work in (("keepalive", self._ping_silent_peers), ("overdue", self._end_overdue)):
            self._tasks.append(asyncio.create_task(keep(name, work), name=name))
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def streams_by_peer(self) -> Counter[str]:
        """The number of open streams by peer address."""
        found: Counter[str] = Counter()
        for connection in self._connections:
            address, count = connection.peer
            found[address] += count
        return found

    def refuse(self, path: str, wanted: bool = True) -> None:
        """Refuse new streams of `path` with REFUSED_STREAM, so that the peer sends the requests elsewhere;
        with `wanted` False, accept such streams again."""
        (self._refused.add if wanted else self._refused.discard)(path.encode())

    async def stop(self, grace_s: float | None) -> None:
        """Accept no new streams, wait at most `grace_s` seconds for open streams to end, and cut the others.
        A GOAWAY makes the peers open their next streams elsewhere."""
        if self._server is None:
            return
        self._server.close()
        if grace_s is not None:
            for connection in self._connections:
                connection.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    while not all(connection.drained for connection in self._connections):  # noqa: ASYNC110
                        await asyncio.sleep(_STEP_S)
        for connection in list(self._connections):
            connection.close()
        if self.peers.cancelled:
            await asyncio.wait(self.peers.cancelled, timeout=_CANCEL_S)
        with contextlib.suppress(TimeoutError):  # let connections send their last bytes and close TLS
            async with asyncio.timeout(_CLOSE_S):
                while self._connections:  # noqa: ASYNC110
                    await asyncio.sleep(_STEP_S)
        for connection in list(self._connections):
            connection.abort()
        for task in self._tasks:
            task.cancel()

    async def _end_overdue(self) -> None:
        while True:
            await asyncio.sleep(_OVERDUE_S)
            self.peers.end_overdue()

    def _find(self, fields: Mapping[bytes, bytes]) -> Open | bytes:
        """A function that opens streams for requests with `fields`, or an immediate answer's header block."""
        if fields[b":method"] != b"POST" or not fields.get(b"content-type", b"").startswith(
            b"application/grpc"
        ):
            return _BAD_TYPE_BLOCK
        path = fields[b":path"]
        handler = self._handlers.get(path)
        if handler is None:
            return _OK_BLOCK + _status_block(Status.UNIMPLEMENTED, "unknown method")
        if isinstance(handler, ByMetadata):
            handler = handler.choose(fields)
        budget = self._budgets.get(handler, self._others)
        length = int(fields.get(b"content-length", b"")[:20] or -1)

        def opened(connection: Connection, stream_id: int) -> GrpcStream | None:
            if path in self._refused:
                return None
            return GrpcStream(connection, stream_id, handler, budget, length, self._message_bytes)

        return opened

    async def _ping_silent_peers(self) -> None:
        """Cut off peers that answer no ping: streams of a vanished peer would stay open for ever."""
        limits = self.peers.limits
        while True:
            for connection in self._connections:
                connection.received = False
            await asyncio.sleep(limits.silence_s)
            silent = [connection for connection in self._connections if not connection.received]
            for connection in silent:
                connection.ping()
            if not silent:
                continue
            clock = asyncio.get_running_loop().time
            pinged_s = clock()
            await asyncio.sleep(limits.answer_s)
            if clock() - pinged_s > limits.answer_s + limits.pause_s:
                continue  # answers to pings may have arrived during the pause, unread
            for connection in silent:
                if not connection.received:
                    connection.abort()
