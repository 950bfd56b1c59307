"""`extproc.transport: native`: gRPC on this package's HTTP/2 layer (`http2.py`), without other threads.

`server.Server` makes the transport; each connection makes a `GrpcStream` for each request.
"""

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from picker_fleet.background import keep
from picker_fleet.domain.budgets import BodyBudget, ByPool
from picker_fleet.domain.errors import BufferFull, StartupError
from picker_fleet.grpc.certificates import MAX_TLS_CONNECTIONS, Certificates, serve
from picker_fleet.grpc.http2 import (
    CANCEL,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES,
    HEADERS,
    NO_ERROR_CODE,
    OK_BLOCK,
    RST_STREAM,
    WINDOW_BYTES,
    WINDOW_UPDATE,
    Connection,
    Limits,
    Load,
    frame,
    literal,
    start_of_frame,
)
from picker_fleet.grpc.transport import Handler, Relay, RpcError, Status

FREE_BYTES = 4096  # unread bytes per stream not charged to the budget: about the stream's own size
MESSAGE_COST = 64  # bytes of overhead that a queued message and its frame take in memory
_CREDIT_BELOW = WINDOW_BYTES // 2  # a stream's window is reopened at or below this size
_OTHERS_BYTES = 64 * 1024 * 1024  # limit of unread bytes of all streams without a budget of their own
_STEP_S = 0.01
_CLOSE_S = 0.25
_WRITE_S = 60.0  # time limit for a peer to open its window
_OVERDUE_S = 1.0  # between two checks for overdue streams

_END_BLOCK = literal(b"grpc-status", b"0")
_OK = start_of_frame(HEADERS, END_HEADERS, len(OK_BLOCK))
_END = start_of_frame(HEADERS, END_HEADERS | END_STREAM, len(_END_BLOCK))
_STOP = start_of_frame(RST_STREAM, 0, 4)
_DATA = bytes((DATA, 0))  # type and flags of a DATA frame, which follow its size
_CREDIT = start_of_frame(WINDOW_UPDATE, 0, 4)

_log = logging.getLogger(__name__)


class GrpcStream:
    """One request's stream, for its handler (`transport.Stream`) and its connection; does the gRPC framing.

    `message_bytes` is the largest message that a client may send.
    """

    __slots__ = (
        "_budget",
        "_content_length",
        "_counted_bytes",
        "_fault",
        "_message_bytes",
        "_messages",
        "_partial",
        "_reader",
        "_received_bytes",
        "_shifted_id",
        "_started",
        "_take",
        "_unread_bytes",
        "_writer",
        "began_s",
        "connection",
        "handler",
        "id",
        "receive_window",
        "remote_ended",
        "send_window",
        "sid",
        "task",
    )

    def __init__(
        self,
        connection: "Connection",
        stream_id: int,
        send_window: int,
        content_length: int,
        budget: BodyBudget,
        handler: Handler,
        *,
        message_bytes: int,
    ) -> None:
        self.connection = connection
        self.id = stream_id
        self.handler = handler
        self.sid = stream_id.to_bytes(4, "big")
        self._shifted_id = stream_id << 40  # the id at its place in the 14 bytes before a message
        self._budget = budget
        self._message_bytes = message_bytes
        self._content_length = content_length
        self._messages: deque[bytes] = deque()
        self._partial = bytearray()
        self._reader: asyncio.Future[bytes | None] | None = None  # gets a message, or None: look again
        self._take: Callable[[bytes], None] | None = None  # called with each message on arrival
        self._writer: asyncio.Future[None] | None = None
        self.remote_ended = False
        self._started = False  # the response's headers have been sent
        self._fault: Exception | None = None
        self._unread_bytes = 0
        self._counted_bytes = 0  # unread bytes charged to the budget
        self._received_bytes = 0
        self.began_s = connection.loop.time()
        self.receive_window = WINDOW_BYTES
        self.send_window = send_window
        self.task: asyncio.Task[None] | None = None

    # Called by the handler.

    @property
    def has_message(self) -> bool:
        return bool(self._messages)

    async def read(self) -> bytes | None:
        """The next message; None once the client has ended its side.

        Raises:
            BufferFull: the replica's byte budget is used up; no more of the request is kept.
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
            self._unread_bytes = len(self._partial)
            if self._counted_bytes:
                self._count()
            if self.receive_window <= _CREDIT_BELOW:
                self._give_credit()
        return message

    def interrupt(self, error: Exception) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_exception(error)

    async def read_all(self, take: Callable[[bytes], None]) -> None:
        """As `Stream.read_all`, without waking a task for each message. Raises as `read`, and any error of
        `take`."""
        self._take = take
        try:
            while (message := await self.read()) is not None:
                take(message)
        finally:
            self._take = None

    async def write(self, message: bytes) -> None:
        """Send one message; returns when the connection has all of its frames."""
        if not self._write_now(message):
            await self._write_parts(message)

    def _write_now(self, message: bytes) -> bool:
        """Send a message as one frame. Returns False if the message is too large or cannot be sent now."""
        frames = self._in_one_frame(message)
        if not frames:
            return False
        if self._started:
            self.connection.write(frames)
        else:
            self._started = True
            self.connection.write(b"".join((_OK, self.sid, OK_BLOCK, frames)))
        return True

    async def relay(self, answer: Relay) -> bytes | None:
        """As `Stream.relay`, without waking a task for each message. Raises as `read`, and any error of
        `answer`."""
        unsent: deque[bytes] = deque()
        is_last = False

        def take(message: bytes) -> None:
            nonlocal is_last
            answers, is_last = answer(message)
            now = answers[:-1] if is_last else answers
            for at, each in enumerate(now):
                if not self._write_now(each):
                    unsent.extend(now[at:])
                    break
            if is_last:
                unsent.extend(answers[-1:])
            if unsent or is_last:
                self._take = None  # queue further messages until the task has sent the rest
                self._wake_reader()

        while True:
            while self._messages and not (unsent or is_last):
                take(await self.read() or b"")
            while len(unsent) > (1 if is_last else 0):
                await self.write(unsent.popleft())
            if is_last:
                return unsent.popleft() if unsent else None
            if not self._messages:
                if self._fault is not None:
                    raise self._fault
                if self.remote_ended:
                    return None
                self._take, self._reader = take, self.connection.loop.create_future()
                try:
                    await self._reader
                finally:
                    self._take = self._reader = None

    async def serve(self, handler: Handler) -> None:
        """Run the handler and send the end of the stream."""
        try:
            await self._finish(await handler(self))
        except asyncio.CancelledError:
            self.connection.reset(self.id, CANCEL)
        except RpcError as fault:
            self._fail(fault.status, str(fault))
        except Exception:
            _log.exception("a stream failed")
            self._fail(Status.INTERNAL, "the picker failed on this stream; its log says why")

    async def _finish(self, message: bytes | None) -> None:
        """Send the last message, if there is one, and the end of the stream."""
        connection, sid = self.connection, self.sid
        frames = b""
        if message is not None:
            frames = self._in_one_frame(message)
            if not frames:
                await self._write_parts(message)
        if not self._started:
            frames = b"".join((_OK, sid, OK_BLOCK, frames))
        if self.remote_ended:
            connection.write(b"".join((frames, _END, sid, _END_BLOCK)))
        else:
            # As gRPC's own servers do: RST_STREAM with NO_ERROR tells the client to stop sending.
            connection.write(b"".join((frames, _END, sid, _END_BLOCK, _STOP, sid, NO_ERROR_CODE)))
        connection.forget(self.id, self.remote_ended)

    def _fail(self, status: Status, why: str) -> None:
        """End the stream with an error status."""
        block = literal(b"grpc-status", str(status).encode()) + literal(b"grpc-message", _escaped(why))
        block = block if self._started else OK_BLOCK + block
        end = frame(HEADERS, END_HEADERS | END_STREAM, self.id, block)
        stop = b"" if self.remote_ended else _STOP + self.sid + NO_ERROR_CODE
        self.connection.write(end + stop)
        self.connection.forget(self.id, self.remote_ended)

    def _in_one_frame(self, message: bytes) -> bytes:
        """A message as one frame, deducted from the windows; empty if too large or not to be sent now."""
        connection = self.connection
        size = len(message) + 5
        window = connection.send_window
        if size > window or size > self.send_window or size > FRAME_BYTES or connection.paused:
            return b""
        connection.send_window = window - size
        self.send_window -= size
        # Frame size, DATA (0), flags (0) and stream id, then the message's compression flag (0) and size.
        return (size << 88 | self._shifted_id | size - 5).to_bytes(14, "big") + message

    async def _write_parts(self, message: bytes) -> None:
        """Send a message in several frames, as the peer's windows allow."""
        connection = self.connection
        rest = memoryview(b"".join((b"\0", len(message).to_bytes(4, "big"), message)))
        if not self._started:
            connection.write(_OK + self.sid + OK_BLOCK)
            self._started = True
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
            for start in range(0, len(now), FRAME_BYTES):
                part = now[start : start + FRAME_BYTES]
                parts += (len(part).to_bytes(3, "big"), _DATA, self.sid, part)
            connection.write(b"".join(parts))
            connection.wake_next()

    async def _until_writable(self, unsent_bytes: int) -> None:
        """Wait until the peer's windows open; `unsent_bytes` are charged to the budget meanwhile.

        Raises:
            RpcError: the budget is used up, or the windows stay closed.
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
            connection.wake_next()  # another stream may use the window
            if isinstance(fault, TimeoutError):
                raise RpcError(Status.UNAVAILABLE, "the answer is not read") from None
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

    # Called by the connection.

    def receive(self, data: bytes, start: int, end: int) -> None:
        """Take the payload of a DATA frame, `data[start:end]`."""
        size = end - start
        self._received_bytes += size
        if self._fault is not None:
            return  # without reopening the window
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
        """Take a frame that is not exactly one message."""
        if self._partial:
            self._keep_part(data[start:end])
            if not self._is_decided():
                return
            data, self._partial = bytes(self._partial), bytearray()
            self._unread_bytes -= len(data)
            if self._counted_bytes:
                self._count()
            start, end = 0, len(data)
        start = self._take_messages(data, start, end)
        if start < end and self._fault is None:
            self._keep_part(data[start:end])

    def _keep_part(self, part: bytes) -> None:
        """Keep part of a message until the rest arrives."""
        self._partial += part
        self._unread_bytes += len(part)
        if self._unread_bytes > FREE_BYTES:
            self._count()

    def _is_decided(self) -> bool:
        """Whether the partial message is complete, or known to be invalid."""
        if len(self._partial) < 5:
            return False
        whole = 5 + int.from_bytes(self._partial[1:5], "big")
        return len(self._partial) >= whole or bool(self._partial[0]) or whole > self._message_bytes

    def _take_messages(self, data: bytes, start: int, end: int) -> int:
        """Deliver or queue the complete messages of `data[start:end]`. Returns where the rest begins."""
        while end - start >= 5:
            length = int.from_bytes(data[start + 1 : start + 5], "big")
            if data[start]:
                self._fail_reads(RpcError(Status.UNIMPLEMENTED, "compressed messages are not supported"))
                return end
            if length + 5 > self._message_bytes:
                self._fail_reads(
                    RpcError(Status.RESOURCE_EXHAUSTED, f"a message of {length} bytes is too large")
                )
                return end
            stop = start + 5 + length
            if stop > end:
                break
            self._hand_over(data[start + 5 : stop])
            start = stop
            if self._fault is not None:
                return end
        return start

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
                self.connection.load.heard(self)
            self._messages.append(message)
            self._unread_bytes += len(message) + MESSAGE_COST
            if self._unread_bytes > FREE_BYTES:
                self._count()
        else:
            reader.set_result(message)  # the handler waits for the message: none of it counts as unread

    def end_remote(self) -> bool:
        """End the client's side. Returns whether the bytes received match the content-length, if any."""
        self.remote_ended = True
        if self._partial:
            self._fail_reads(RpcError(Status.INTERNAL, "the stream ended within a message"))
        self._wake_reader()
        return self._content_length in (-1, self._received_bytes)

    def drop(self) -> None:
        """Free everything that the ended stream holds."""
        if self._unread_bytes:
            self._messages.clear()
            self._partial = bytearray()
            self._unread_bytes = 0
            self._count()

    def _give_credit(self) -> None:
        """Reopen the window: the handler has read every complete message, so more data may come."""
        if not self.remote_ended and self._fault is None:
            used = WINDOW_BYTES - self.receive_window
            self.connection.write(_CREDIT + self.sid + used.to_bytes(4, "big"))
            self.receive_window = WINDOW_BYTES

    def _count(self) -> None:
        """Charge the unread bytes to the budget, except for `FREE_BYTES` per stream."""
        more = max(self._unread_bytes - FREE_BYTES, 0) - self._counted_bytes
        try:
            if more > 0:
                self._budget.take(more, self._unread_bytes)
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

    def _wake_reader(self) -> None:
        if self.task is None:
            self.connection.load.heard(self)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Keepalive(NamedTuple):
    """A peer that sent nothing for `silence_s` is pinged and has `answer_s` to answer. If the wait takes
    `pause_s` longer than that, this process was paused, and the peer is not cut off."""

    silence_s: float = 20.0
    answer_s: float = 10.0
    pause_s: float = 1.0


class NativeTransport:
    """Serves gRPC. `handlers` are by path; `budgets`, by handler, limit the data not read yet.

    Handlers without a budget share a separate one, so that large bodies delay no access log. `message_bytes`
    is the largest message that a client may send.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler | ByPool[Handler]],
        budgets: Mapping[Handler, BodyBudget],
        message_bytes: int,
        certificates: Certificates | None = None,
        limits: Limits = Limits(),  # noqa: B008 - it is frozen
        keepalive: Keepalive = Keepalive(),  # noqa: B008
    ) -> None:
        self._certificates, self._keepalive = certificates, keepalive
        self._handlers = {path.encode(): handler for path, handler in handlers.items()}
        self._budgets, self._others = budgets, BodyBudget(_OTHERS_BYTES)
        self._new_stream = partial(GrpcStream, message_bytes=message_bytes)
        if certificates is not None:
            limits = replace(limits, connections=min(limits.connections, MAX_TLS_CONNECTIONS))
        self.load = Load(limits)
        self._connections = self.load.connections
        self._server: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def full(self) -> str:
        return self.load.full

    async def start(self, listen: str) -> int:
        try:
            self._server = await serve(self._connection, listen, self._certificates)
        except OSError as fault:
            raise StartupError(f"extproc.listen {listen}: cannot be bound; is the port in use?") from fault
        for name, work in (("keepalive", self._ping_silent_peers), ("overdue", self._end_overdue)):
            self._tasks.append(asyncio.create_task(keep(name, work), name=name))
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def streams_by_peer(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for connection in self.load.connections:
            address, count = connection.peer
            found[address] += count
        return found

    def refuse(self, path: str, wanted: bool = True) -> None:
        """As `Transport.refuse`, with REFUSED_STREAM: the peer learns that nothing was processed."""
        handler, refused = self._handlers[path.encode()], self.load.refused
        handlers = handler.all if isinstance(handler, ByPool) else (handler,)
        (refused.update if wanted else refused.difference_update)(handlers)

    async def stop(self, grace_s: float | None) -> None:
        """As `Transport.stop`. A GOAWAY sends the peers' next streams elsewhere."""
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
        for connection in list(self._connections):
            await connection.ended()
        with contextlib.suppress(TimeoutError):  # send the last bytes and close TLS
            async with asyncio.timeout(_CLOSE_S):
                while self._connections:  # noqa: ASYNC110
                    await asyncio.sleep(_STEP_S)
        for connection in list(self._connections):
            connection.abort()
        for task in self._tasks:
            task.cancel()

    def _connection(self) -> Connection:
        return Connection(self._find, self._new_stream, self.load)

    async def _end_overdue(self) -> None:
        while True:
            await asyncio.sleep(_OVERDUE_S)
            self.load.end_overdue()

    def _find(self, path: bytes, pool: bytes) -> tuple[Handler, BodyBudget] | None:
        """The handler of `path` in `pool`, and its byte budget; None for an unknown path."""
        found = self._handlers.get(path)
        if found is None:
            return None
        handler = found.of(pool) if isinstance(found, ByPool) else found
        return handler, self._budgets.get(handler, self._others)

    async def _ping_silent_peers(self) -> None:
        """Cut off peers that answer no ping: streams of a vanished peer would stay open for ever."""
        silence_s, answer_s, pause_s = self._keepalive
        while True:
            for connection in self._connections:
                connection.received = False
            await asyncio.sleep(silence_s)
            silent = [connection for connection in self._connections if not connection.received]
            for connection in silent:
                connection.ping()
            if not silent:
                continue
            clock = asyncio.get_running_loop().time
            pinged_s = clock()
            await asyncio.sleep(answer_s)
            if clock() - pinged_s > answer_s + pause_s:
                continue  # answers may have arrived during the pause, unread
            for connection in silent:
                if not connection.received:
                    connection.abort()


def _escaped(text: str) -> bytes:
    """A status message for the grpc-message header: printable ASCII, all else percent-encoded."""
    return b"".join(
        bytes((byte,)) if 32 <= byte < 127 and byte != 37 else f"%{byte:02X}".encode()
        for byte in text.encode()[:400]
    )
