"""One connection to Redis that carries everything a replica asks of it, batched.

What arises while a call is on its way goes out together in the next one: a turn of the event loop makes
one message, and load makes batches larger rather than calls more numerous. Within a message scripts keep
a fixed order (`scripts.NAMES`), so that what a replica learned first takes effect first: a lease is
renewed before the same request is settled, an arrival is admitted before it is cancelled.

A message has a deadline. If its connection breaks before, it is sent once more on a new one (scripts are
idempotent by request id). Then its items fail with StateUnavailable, except the ones marked `lasting`,
which stay until Redis has taken them. A call therefore takes at most two deadlines: its own message's, and
that of the one ahead of it.
"""

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import hiredis
from redis import exceptions as redis_errors
from redis.asyncio.connection import Connection, ConnectionPool

from app.errors import StateUnavailable
from app.state import cancelling
from app.state.scripts import NAMES, Script, load

MAX_BATCH = 64  # items a script call: keeps the longest script near a millisecond
MAX_LASTING = 50_000
_RETRY_PAUSE_S = 0.05
_ENDS = ("settle", "cancel")  # scripts that end requests; repeating them changes nothing
_DOWN = (redis_errors.RedisError, OSError, TimeoutError, EOFError)

Reply = Any


class CallMetrics(Protocol):
    """What the link reports of its calls."""

    def redis_call(self, script: str, seconds: float, items: int) -> None: ...

    def redis_error(self, script: str) -> None: ...


@dataclass(slots=True)
class _Item:
    args: tuple[str | int | float, ...]
    answer: asyncio.Future[Reply]
    lasting: bool


@dataclass(slots=True)
class _Call:
    """One EVALSHA (or plain command) on the wire and the items it answers."""

    name: str
    script: Script | None
    command: tuple[Any, ...]
    items: list[_Item]
    batched: bool = False


class Link:
    """A replica's connection to the shared state; see the module. One event loop.

    `on_batch(script, head, replies)` is called with each batched script's reply head (born, news,
    attempts, served) right after its items are answered.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str,
        caller: str,
        call_timeout_s: float,
        connect_timeout_s: float,
        metrics: CallMetrics,
        on_batch: Callable[[Sequence[Any]], None],
    ) -> None:
        self._pool = ConnectionPool.from_url(
            url, socket_connect_timeout=connect_timeout_s, retry=None, decode_responses=True,
            encoding_errors="replace", health_check_interval=0,
        )  # fmt: skip
        self._key = key
        self._caller = caller
        self._call_timeout_s = call_timeout_s
        self._metrics = metrics
        self._on_batch = on_batch
        self._scripts = {name: load(name) for name in NAMES}
        self._batched: dict[str, deque[_Item]] = {name: deque() for name in NAMES}
        self._single: deque[_Call] = deque()
        self._wake = asyncio.Event()
        self._connection: Connection | None = None
        self._fault = "not connected yet"
        self._loop = asyncio.get_running_loop()

    @property
    def fault(self) -> str | None:
        """Why Redis cannot be reached at the moment; None while it answers."""
        return self._fault or None

    def submit(
        self, name: str, args: tuple[str | int | float, ...], *, lasting: bool = False
    ) -> asyncio.Future[Reply]:
        """Add one item to the next batch of script `name`; the future brings its reply.

        Raises (in the future):
            StateUnavailable: no answer in time (see the module); whether it took effect is unknown.
        """
        answer: asyncio.Future[Reply] = self._loop.create_future()
        if lasting and len(self._batched[name]) >= MAX_LASTING:
            answer.set_exception(StateUnavailable("too much waits for the shared state to return"))
            return answer
        self._batched[name].append(_Item(args, answer, lasting))
        self._wake.set()
        return answer

    def call(self, name: str, *args: str | int | float) -> asyncio.Future[Reply]:
        """Run script `name` by itself with the caller's id and `args`; the future brings its whole reply."""
        script = self._scripts[name]
        return self._enqueue(name, script, ("EVALSHA", script.sha, 1, self._key, *args))

    def command(self, *args: str | int | float) -> asyncio.Future[Reply]:
        """Run one plain read command."""
        return self._enqueue(str(args[0]).lower(), None, args)

    def _enqueue(self, name: str, script: Script | None, command: tuple[Any, ...]) -> asyncio.Future[Reply]:
        answer: asyncio.Future[Reply] = self._loop.create_future()
        item = _Item((), answer, False)
        self._single.append(_Call(name, script, command, [item]))
        self._wake.set()
        return answer

    async def run(self) -> None:
        """Carry calls until cancelled; on the way out everything unanswered fails."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while calls := self._take():
                    await self._deliver(calls)
                    cancelling.heed()
        finally:
            for call in self._take():
                self._fail(call, "the replica has stopped")
            await self._disconnect()

    def _take(self) -> list[_Call]:
        """Everything pending, as calls of at most MAX_BATCH items, in the fixed order."""
        calls: list[_Call] = []
        for name, waiting in self._batched.items():
            while waiting:
                items = [waiting.popleft() for _ in range(min(MAX_BATCH, len(waiting)))]
                script = self._scripts[name]
                args = [arg for item in items for arg in item.args]
                command = ("EVALSHA", script.sha, 1, self._key, self._caller, *args)
                calls.append(_Call(name, script, command, items, batched=True))
        calls.extend(self._single)
        self._single.clear()
        return calls

    async def _deliver(self, calls: list[_Call]) -> None:
        """Send `calls` and answer their items; once more if the connection fails under them."""
        until_s = self._loop.time() + self._call_timeout_s
        for attempt in (1, 2):
            try:
                async with asyncio.timeout_at(until_s):
                    seconds = await self._exchange(calls)
            except _DOWN as fault:
                self._fault = str(fault) or "no answer in time"
                for call in calls:
                    self._metrics.redis_error(call.name)
                await self._disconnect()
                calls = [call for call in calls if not all(item.answer.done() for item in call.items)]
                # A connection that broke is worth one more try at once; a server that is silent is not.
                if attempt == 1 and calls and self._loop.time() < until_s:
                    continue
                await self._give_up(calls)
                return
            except asyncio.CancelledError:
                for call in calls:
                    self._fail(call, "the replica has stopped")
                raise
            self._fault = ""
            self._metrics.redis_call(calls[0].name, seconds, sum(len(call.items) for call in calls))
            return

    async def _exchange(self, calls: list[_Call]) -> float:
        """One round trip for all `calls`; returns its seconds."""
        connection = await self._connected()
        started = self._loop.time()
        await connection.send_packed_command(
            b"".join(hiredis.pack_command(call.command) for call in calls), check_health=False
        )
        forgotten: list[_Call] = []
        for call in calls:
            try:
                reply = await connection.read_response(timeout=math.inf)
            except redis_errors.NoScriptError:
                forgotten.append(call)
            except redis_errors.ResponseError as fault:
                self._metrics.redis_error(call.name)
                self._fail(call, f"the shared state refused {call.name}: {fault}")
            else:
                self._answer(call, reply)
        if forgotten:
            # An admission or renewal that runs late must not outlive the end that was sent after it.
            forgotten += [call for call in calls if call.name in _ENDS and call not in forgotten]
        for call in forgotten:
            # EVAL carries the source, so a flushed script cache costs one more trip and no error.
            assert call.script is not None
            command = ("EVAL", call.script.source, *call.command[2:])
            await connection.send_packed_command(hiredis.pack_command(command), check_health=False)
            try:
                self._answer(call, await connection.read_response(timeout=math.inf))
            except redis_errors.ResponseError as fault:
                self._metrics.redis_error(call.name)
                self._fail(call, f"the shared state refused {call.name}: {fault}")
        return self._loop.time() - started

    def _answer(self, call: _Call, reply: Reply) -> None:
        if not call.batched:
            self._resolve(call.items[0], reply)
            return
        for item, answer in zip(call.items, reply[4:], strict=True):
            self._resolve(item, answer)
        self._on_batch(reply[:4])

    @staticmethod
    def _resolve(item: _Item, reply: Reply) -> None:
        if not item.answer.done():
            item.answer.set_result(reply)

    @staticmethod
    def _fail(call: _Call, why: str) -> None:
        for item in call.items:
            if not item.answer.done():
                item.answer.set_exception(StateUnavailable(why, retry_after_s=1))
                item.answer.exception()  # a caller that has gone must not raise a warning

    async def _give_up(self, calls: list[_Call]) -> None:
        for call in reversed(calls):  # so that what is kept stays in order
            kept = [item for item in call.items if item.lasting and not item.answer.done()]
            self._batched[call.name].extendleft(reversed(kept))
            self._fail(
                _Call(call.name, None, (), [item for item in call.items if item not in kept]),
                f"the shared state cannot be reached: {self._fault}",
            )
        await asyncio.sleep(_RETRY_PAUSE_S)
        if any(self._batched.values()):
            self._wake.set()

    async def _connected(self) -> Connection:
        if self._connection is None:
            connection: Connection = self._pool.make_connection()  # type: ignore[no-untyped-call]
            try:
                await connection.connect()  # type: ignore[no-untyped-call]
                cancelling.heed()
            except BaseException:
                await connection.disconnect(nowait=True)
                raise
            self._connection = connection
        return self._connection

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(*_DOWN):
                await connection.disconnect(nowait=True)
