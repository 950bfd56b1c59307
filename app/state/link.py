"""One connection to Redis that carries everything a replica asks of it, batched.

What arises while a message is on its way goes out together in the next one: alone, a call leaves at once,
and load makes batches larger rather than messages more numerous. What nobody waits for
(completions, renewals) gives the others a moment to join it. Within a message scripts keep a fixed order
(`scripts.NAMES`), so that what a replica learned first takes effect first: a lease is renewed before the
same request is settled, an arrival is admitted before it is cancelled.

A message has a deadline. If its connection breaks before, or the server is not the primary any more, it is
sent once more on a new one (scripts are idempotent by request id). Then its items fail with
StateUnavailable, except the ones marked `lasting`, which stay until Redis has taken them. A call therefore
takes at most two deadlines: its own message's, and that of the one ahead of it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import hiredis

from app.errors import StateUnavailable
from app.state import cancelling
from app.state.calls import Call, Item, Reply
from app.state.primary import NOT_PRIMARY, connections
from app.state.scripts import NAMES, load_library
from app.state.wire import DOWN, Wire

MAX_BATCH = 64  # items a script call: keeps the longest script near a millisecond
MAX_LASTING = 50_000
_RETRY_PAUSE_S = 0.05
_PATIENCE_S = 0.002  # how long what nobody waits for waits for company
_PATIENT = ("settle", "renew")
_ENDS = ("settle", "cancel")  # scripts that end requests; repeating them changes nothing
_NOT_LOADED = "ERR Function not found"
# A reply read so long past its deadline finds a process that slept (SIGSTOP, a frozen machine). Its lease may
# have run out, and what it grants be another's by now. Shorter than the shortest lease, 2 s.
_SLEPT_S = 1.0
_LOADS = 5  # of the library, for one message: more means that somebody flushes it on purpose


class CallMetrics(Protocol):
    """What the link reports of its calls."""

    def redis_call(self, script: str, seconds: float, items: int) -> None: ...

    def redis_error(self, script: str) -> None: ...


class Link:
    """A replica's connection to the shared state; see the module. One event loop.

    `on_batch(head)` is called with each batched script's reply head (born, news, attempts, served) right
    after its items are answered.
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
        self._pool = connections(url, key, socket_connect_timeout=connect_timeout_s)
        self._key = key
        self._caller = caller
        self._call_timeout_s = call_timeout_s
        self._metrics = metrics
        self._on_batch = on_batch
        self._library = load_library()
        self._functions = {name: self._library.function(name) for name in NAMES}
        self._batched: dict[str, deque[Item]] = {name: deque() for name in NAMES}
        self._single: deque[Call] = deque()
        self._loop = asyncio.get_running_loop()
        self._wire: Wire | None = None
        self._open = False  # the wire may be written to
        self._fault = "not connected yet"
        self._lost = asyncio.Event()
        self._lost.set()
        self._due: asyncio.TimerHandle | None = None
        self._message: list[Call] = []  # on its way, whole
        self._flying: deque[Call] = deque()  # what of it is not answered yet, in order
        self._forgotten: list[Call] = []  # what of it met a Redis that lacks the library
        self._astray = ""  # what a server said to it that is not the primary
        self.lives = 0  # connections made so far
        self._loads = 0
        self._sent_s = 0.0
        self._resent = False
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def fault(self) -> str | None:
        """Why Redis cannot be reached at the moment; None while it answers."""
        return self._fault or None

    def unsent(self, name: str) -> list[tuple[str | int | float, ...]]:
        """The arguments of the items of script `name` that Redis cannot have seen yet."""
        return [item.args for item in self._batched[name] if not item.tried]

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
        self._batched[name].append(Item(args, answer, lasting))
        self._schedule(now=name not in _PATIENT)
        return answer

    def call(self, name: str, *args: str | int | float) -> asyncio.Future[Reply]:
        """Run script `name` by itself with `args`; the future brings its whole reply."""
        return self._enqueue(name, ("FCALL", self._functions[name], 1, self._key, *args))

    def command(self, *args: str | int | float) -> asyncio.Future[Reply]:
        """Run one plain command."""
        return self._enqueue(str(args[0]).lower(), args)

    def _enqueue(self, name: str, command: tuple[Any, ...]) -> asyncio.Future[Reply]:
        answer: asyncio.Future[Reply] = self._loop.create_future()
        self._single.append(Call(name, command, [Item((), answer, False)]))
        self._schedule(now=True)
        return answer

    async def run(self) -> None:
        """Keep the connection until cancelled; on the way out everything unanswered fails."""
        try:
            while True:
                await self._lost.wait()
                self._lost.clear()
                await self._reconnect()
        finally:
            self._drop_message("the replica has stopped", keep=False)
            for call in self._take():
                call.fail("the replica has stopped")
            await self._disconnect()

    async def _reconnect(self) -> None:
        """A new connection, however long it takes; what can't wait that long fails meanwhile."""
        await self._disconnect()
        if self._astray:
            # Those who know the primary may still name the one that just said it is not.
            self._astray = ""
            await asyncio.sleep(_RETRY_PAUSE_S)
        while True:
            try:
                async with asyncio.timeout(self._call_timeout_s):
                    self._wire = await Wire.connect(self._pool, self._land, self._note_lost)
            except DOWN as fault:
                cancelling.heed()
                self._fault = str(fault) or "no answer in time"
                self._give_up()
                await asyncio.sleep(_RETRY_PAUSE_S)
            else:
                break
        self.lives += 1
        self._open = True
        rest = [call for call in self._message if not call.answered]
        if rest and not self._resent:
            self._send(rest, again=True)
        else:
            self._drop_message(self._fault, keep=True)
            self._schedule(now=True)

    async def _disconnect(self) -> None:
        self._open = False
        wire, self._wire = self._wire, None
        if wire is not None:
            await wire.close()

    def _schedule(self, *, now: bool) -> None:
        """See that what is pending goes out: at once, or when it has had its wait for company."""
        if not self._open or self._message:
            return  # it goes with the next message
        if now:
            self._send_pending()
        elif self._due is None:
            self._due = self._loop.call_later(_PATIENCE_S, self._send_pending)

    def _send_pending(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._open and not self._message and (calls := self._take()):
            self._send(calls, again=False)

    def _take(self) -> list[Call]:
        """Everything pending, as calls of at most MAX_BATCH items, in the fixed order."""
        calls: list[Call] = []
        for name, waiting in self._batched.items():
            while waiting:
                items = [waiting.popleft() for _ in range(min(MAX_BATCH, len(waiting)))]
                args = [arg for item in items for arg in item.args]
                command = ("FCALL", self._functions[name], 1, self._key, self._caller, *args)
                calls.append(Call(name, command, items, batched=True))
        calls.extend(self._single)
        self._single.clear()
        return calls

    def _send(self, calls: list[Call], *, again: bool) -> None:
        self._message, self._flying, self._forgotten = calls, deque(calls), []
        self._resent, self._loads = again, 0
        self._sent_s = self._loop.time()
        self._deadline = self._loop.call_later(self._call_timeout_s, self._note_overdue)
        self._write(calls)

    def _write(self, calls: Sequence[Call]) -> None:
        assert self._wire is not None
        self._wire.write(b"".join([hiredis.pack_command(call.command) for call in calls]))

    def _land(self, reply: Reply) -> None:
        """Take the next reply of the message on its way."""
        if not self._flying:
            return  # its message was given up
        if self._loop.time() - self._sent_s > self._call_timeout_s + _SLEPT_S:
            if self._deadline is not None:
                self._deadline.cancel()
            self._note_overdue()
            return
        call = self._flying.popleft()
        if not isinstance(reply, hiredis.ReplyError):
            call.answer(reply, self._on_batch)
        elif str(reply).startswith(_NOT_LOADED) and self._loads < _LOADS:
            self._forgotten.append(call)
        elif str(reply).startswith(NOT_PRIMARY):
            self._astray = str(reply)
        else:
            self._metrics.redis_error(call.name)
            call.fail(f"the shared state refused {call.name}: {reply}")
        if not self._flying:
            self._finish_message()

    def _finish_message(self) -> None:
        if self._astray:
            self._note_lost(self._astray)
            return
        if self._forgotten:
            self._load_library()
            return
        items = sum(len(call.items) for call in self._message)
        self._metrics.redis_call(self._message[0].name, self._loop.time() - self._sent_s, items)
        self._fault = ""
        self._close_message()
        if self._single or any(self._batched.values()):
            # Not before those who wait for these replies have had their turn to ask for more.
            self._loop.call_soon(self._send_pending)

    def _load_library(self) -> None:
        """Give Redis the library and ask again: a flushed one costs one more trip and no error."""
        self._loads += 1
        # An admission or renewal that runs late must not outlive the end that was sent after it.
        late = [call for call in self._message if call.name in _ENDS and call not in self._forgotten]
        load = Call("load", ("FUNCTION", "LOAD", "REPLACE", self._library.source), [])
        self._flying = deque([load, *self._forgotten, *late])
        self._forgotten = []
        self._write(self._flying)

    def _close_message(self) -> None:
        self._message, self._flying = [], deque()
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _note_lost(self, why: str) -> None:
        """The connection broke: its message is worth one more try on a new one."""
        self._fault = why
        for call in self._message:
            self._metrics.redis_error(call.name)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._open = False
        self._lost.set()

    def _note_overdue(self) -> None:
        """No answer in time: a server that is silent gets no second try of the same message."""
        self._deadline = None
        self._fault = "no answer in time"
        for call in self._message:
            self._metrics.redis_error(call.name)
        self._drop_message(self._fault, keep=True)
        self._open = False
        self._lost.set()

    def _give_up(self) -> None:
        """Fail what is pending, and what was on its way, but for what lasts."""
        self._drop_message(self._fault, keep=True)
        calls = self._take()
        for call in calls:
            self._metrics.redis_error(call.name)
        self._set_aside(calls, self._fault, keep=True)

    def _drop_message(self, why: str, *, keep: bool) -> None:
        calls = [call for call in self._message if not call.answered]
        for item in (item for call in calls for item in call.items):
            item.tried = True
        self._close_message()
        self._set_aside(calls, why, keep=keep)

    def _set_aside(self, calls: list[Call], why: str, *, keep: bool) -> None:
        """Fail the items of `calls`; with `keep` the lasting ones go back to where they came from."""
        for call in reversed(calls):  # so that what is kept stays in order
            kept = [item for item in call.items if keep and item.lasting and not item.answer.done()]
            if kept:
                self._batched[call.name].extendleft(reversed(kept))
            call.items = [item for item in call.items if item not in kept]
            call.fail(f"the shared state cannot be reached: {why}")
