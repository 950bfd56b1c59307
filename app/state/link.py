"""One connection to Redis that carries everything a replica asks of it, batched.

What arises while a message is on its way goes out together in the next one: alone, a call leaves at once,
and load makes batches larger rather than messages more numerous. What nobody waits for
(completions, renewals) gives the others a moment to join it. A decision waits no longer than that moment for
the message ahead: where Redis is far away or slow, several are under way, of which one carries what is no
decision. Within a message scripts keep a fixed order (`scripts.NAMES`), so that what a replica learned first
takes effect first: a lease is renewed before the same request is settled, an arrival is admitted before it is
cancelled.

A message has a deadline. If its connection breaks before, or the server is not the primary any more, it is
sent once more on a new one (scripts are idempotent by request id). Then its items fail with
StateUnavailable, except the ones marked `lasting`, which stay until Redis has taken them; also where it
answers that it takes no writes for now. A call therefore takes at most two deadlines, one for each time it is
sent. Errors that Redis answers: app/state/error_replies.py, app/state/refusals.py.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import hiredis

from app.errors import StateUnavailable
from app.state import cancelling
from app.state.calls import Argument, Call, CallMetrics, Item, Reply
from app.state.error_replies import NO_ANSWER, Meaning, meaning_of
from app.state.message import Message
from app.state.pending import Pending
from app.state.primary import connections
from app.state.refusals import Refusals
from app.state.scripts import NAMES, load_library
from app.state.underway import UnderWay
from app.state.wire import DOWN, Wire

MAX_LASTING = 50_000
_RETRY_PAUSE_S = 0.05
_PATIENCE_S = 0.002  # how long a decision waits for the message ahead, or anything for company
_MOST_UNDER_WAY = 64
_PATIENT = ("settle", "renew")
_DECISIONS = ("admit", "place")
_NOT_LOADED = "ERR Function not found"
# A reply read so long past its deadline finds a process that slept (SIGSTOP, a frozen machine). Its lease may
# have run out, and what it grants be another's by now. Shorter than the shortest lease, 2 s.
_SLEPT_S = 1.0
_LOADS = 5  # of the library, for one message: more means that somebody flushes it on purpose


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
        self._call_timeout_s = call_timeout_s
        self._metrics = metrics
        self._on_batch = on_batch
        self._library = load_library()
        self._functions = {name: self._library.function(name) for name in NAMES}
        self._pending = Pending(self._functions, key, caller)
        self._refusals = Refusals(self._ask_again, self._ask_once_more)
        self._loop = asyncio.get_running_loop()
        self._wire: Wire | None = None
        self._open = False  # the wire may be written to
        self._fault = "not connected yet"
        self._lost = asyncio.Event()
        self._lost.set()
        self._due: asyncio.TimerHandle | None = None
        self._under_way = UnderWay(call_timeout_s, self._note_overdue)
        self._astray = ""  # what a server said that is not, or not now, the one to ask
        self.lives = 0  # connections made so far

    @property
    def fault(self) -> str | None:
        """Why Redis cannot be reached at the moment; None while it answers."""
        return self._fault or None

    def unsent(self, name: str) -> list[tuple[Argument, ...]]:
        """The arguments of the items of script `name` that Redis cannot have seen yet."""
        return self._pending.unsent(name)

    def submit(
        self, name: str, args: tuple[Argument, ...], *, lasting: bool = False
    ) -> asyncio.Future[Reply]:
        """Add one item to the next batch of script `name`; the future brings its reply.

        Raises (in the future):
            StateUnavailable: no answer in time (see the module); whether it took effect is unknown.
            WritesRefused: Redis takes no writes for now.
            ScriptFailed: Redis answered this item with an error.
        """
        answer: asyncio.Future[Reply] = self._loop.create_future()
        if lasting and self._pending.waiting(name) >= MAX_LASTING:
            answer.set_exception(StateUnavailable("too much waits for the shared state to return"))
            return answer
        self._pending.add(name, Item(args, answer, lasting))
        self._schedule(now=name not in _PATIENT)
        return answer

    def call(self, name: str, *args: str | int | float) -> asyncio.Future[Reply]:
        """Run script `name` by itself with `args`; the future brings its whole reply."""
        return self._enqueue(name, ("FCALL", self._functions[name], 1, self._key, *args))

    def command(self, *args: Argument) -> asyncio.Future[Reply]:
        """Run one plain command."""
        return self._enqueue(str(args[0]).lower(), args)

    def _enqueue(self, name: str, command: tuple[Any, ...]) -> asyncio.Future[Reply]:
        answer: asyncio.Future[Reply] = self._loop.create_future()
        self._pending.single.append(Call(name, command, [Item((), answer, False)]))
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
            self._pending.set_aside(self._under_way.drop(), "the replica has stopped", keep=False)
            for call in (*self._pending.take(), *self._refusals.take()):
                call.fail(StateUnavailable, "the replica has stopped")
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
        rest = self._under_way.unanswered
        if rest and not self._under_way.once_more:
            self._under_way.forget()
            self._send(rest, again=True)
        else:
            self._pending.set_aside(self._under_way.drop(), self._fault, keep=True)
            # Who takes connections may be as silent as before, and of ends that it was sent nobody would know
            # whether it has them: they wait for its first answer. All else goes out, and has its deadline.
            self._send(self._pending.take(ends=False) or [Call("ping", ("PING",), [])])
            self._schedule(now=False)

    async def _disconnect(self) -> None:
        self._open = False
        wire, self._wire = self._wire, None
        if wire is not None:
            await wire.close()

    def _schedule(self, *, now: bool) -> None:
        """See that what is pending goes out: at once, or when it has had its wait."""
        if not self._open:
            return
        if now and not self._under_way:
            self._send_pending()
        elif self._due is None:
            self._due = self._loop.call_later(_PATIENCE_S, self._send_pending)

    def _send_pending(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if not self._open or len(self._under_way) >= _MOST_UNDER_WAY:
            return
        # Only of ends in one message is it unknown at any time whether Redis has seen them (`unsent`).
        whole = not any(message.whole for message in self._under_way)
        if calls := self._pending.take() if whole else self._pending.take_of(_DECISIONS):
            self._send(calls, whole=whole)

    def _send(self, calls: list[Call], *, whole: bool = True, again: bool = False) -> None:
        self._under_way.begin(Message(calls, self._loop.time(), whole, again))
        self._write(calls)

    def _write(self, calls: Iterable[Call]) -> None:
        assert self._wire is not None
        self._wire.write(b"".join([hiredis.pack_command(call.command) for call in calls]))

    def _land(self, reply: Reply) -> None:
        """Take the next reply to the first message under way."""
        if not self._open or not self._under_way:
            return  # its message was given up
        message = self._under_way[0]
        if self._loop.time() - message.sent_s > self._call_timeout_s + _SLEPT_S:
            self._note_overdue()
            return
        call = message.flying.popleft()
        if not isinstance(reply, hiredis.ReplyError):
            call.answer(reply, self._on_batch)
        else:
            self._take_error(message, call, str(reply))
        if not message.flying:
            self._finish(message)

    def _take_error(self, message: Message, call: Call, error: str) -> None:
        if call.name == "load":
            message.load_fault = error
        if error.startswith(_NOT_LOADED):
            if message.loads < _LOADS and not message.load_fault:
                message.anew.append(call)
                message.forgotten = True
                return
            error = message.load_fault or error
        meaning = meaning_of(error)
        self._metrics.redis_error(call.name, meaning.value)
        if meaning is Meaning.ELSEWHERE:
            self._astray = error
        else:
            self._refusals.met(message, call, error, meaning)

    def _ask_again(self, calls: list[Call]) -> None:
        self._pending.set_aside(calls, "the shared state refuses for now", keep=True)
        self._schedule(now=False)

    def _ask_once_more(self, calls: list[Call]) -> None:
        if self._open:
            self._send(calls, whole=False)
        else:
            self._pending.set_aside(calls, self._fault, keep=True)

    def _finish(self, message: Message) -> None:
        if self._astray:
            self._lose(self._astray)
            return
        self._under_way.popleft()
        if message.anew:
            self._ask_anew(message)
            return
        self._metrics.redis_call(message.calls[0].name, self._loop.time() - message.sent_s, message.items)
        self._fault = ""
        if self._pending and (message.whole or self._due is None or not self._under_way):
            # Not before those who wait for these replies have had their turn to ask for more.
            self._loop.call_soon(self._send_pending)

    def _ask_anew(self, message: Message) -> None:
        """Ask once more for what of `message` a Redis without the library did not know, having given it the
        library, and for what it refused in company: one more trip.

        What is written now is answered after all that is under way.
        """
        load = None
        if message.forgotten:
            load = Call("load", ("FUNCTION", "LOAD", "REPLACE", self._library.source), [])
        message.repeat(load, self._under_way)
        self._under_way.append(message)
        self._write(message.flying)

    def _note_lost(self, why: str) -> None:
        """The connection broke: what was under way is worth one more try on a new one."""
        self._count_errors()
        self._lose(why)

    def _lose(self, why: str) -> None:
        self._fault = why
        self._under_way.rest()
        self._open = False
        self._lost.set()

    def _note_overdue(self) -> None:
        """No answer in time: a server that is silent gets no second try of the same messages."""
        self._fault = "no answer in time"
        self._count_errors()
        self._pending.set_aside(self._under_way.drop(), self._fault, keep=True)
        self._open = False
        self._lost.set()

    def _count_errors(self) -> None:
        for message in self._under_way:
            for call in message.calls:
                self._metrics.redis_error(call.name, NO_ANSWER)

    def _give_up(self) -> None:
        """Fail what is pending, and what was on its way, but for what lasts."""
        self._pending.set_aside(self._under_way.drop(), self._fault, keep=True)
        calls = self._pending.take()
        for call in calls:
            self._metrics.redis_error(call.name, NO_ANSWER)
        self._pending.set_aside(calls, self._fault, keep=True)
