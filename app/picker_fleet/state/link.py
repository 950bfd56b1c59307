"""One connection to Redis that carries everything a replica asks of it, batched.

What arises while a message is on its way goes out together in the next one: alone, a call leaves at once,
and load makes batches larger rather than messages more numerous. What nobody waits for
(completions, renewals) gives the others a moment to join it. A decision waits no longer than that moment for
the message ahead: where Redis is far away or slow, several are under way, of which one carries what is no
decision. Within a message scripts keep a fixed order (`scripts.NAMES`), so that what a replica learned first
takes effect first: a lease is renewed before the same request is settled, an arrival is admitted before it is
cancelled.

A message waits while Redis is slow, until its silence is proven (state/silence.py). If its connection
breaks before, is stuck, or leads to a server that is not the primary any more, it is sent once more on a new
one (scripts are idempotent by request id). Redis is away when it is silent, or when a new connection is
refused, or lost before anything came by it. Then items fail with StateUnavailable, except the ones marked
`lasting`, which stay until Redis has taken them; also where it answers that it takes no writes for now.
Errors that Redis answers: state/error_replies.py, state/refusals.py.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import hiredis
from redis import exceptions as redis_errors

from picker_fleet.errors import StateUnavailable
from picker_fleet.state import cancelling
from picker_fleet.state.awake import LONG_S, AwakeClock
from picker_fleet.state.calls import Argument, Call, CallMetrics, Item, Reply
from picker_fleet.state.detector import Detector
from picker_fleet.state.error_replies import NO_ANSWER, Meaning, meaning_of
from picker_fleet.state.message import Message
from picker_fleet.state.pending import Pending
from picker_fleet.state.primary import connections
from picker_fleet.state.refusals import Refusals
from picker_fleet.state.scripts import NAMES, load_library
from picker_fleet.state.silence import Silence
from picker_fleet.state.underway import UnderWay
from picker_fleet.state.wire import DOWN, Wire

MAX_LASTING = 50_000
_RETRY_PAUSE_S = 0.05
_PATIENCE_S = 0.002  # how long a decision waits for the message ahead, or anything for company
_MOST_UNDER_WAY = 64
_PATIENT = ("settle", "renew")
_DECISIONS = ("admit", "place")
_NOT_LOADED = "ERR Function not found"
_SILENT = (TimeoutError, redis_errors.TimeoutError)  # of a connection that is not made: nobody refused it
_LOADS = 5  # of the library, for one message: more means that somebody flushes it on purpose


class Link:
    """A replica's connection to the shared state; see the module. One event loop.

    `on_batch(head)` is called with each batched script's reply head (born, news, attempts, served) right
    after its items are answered, `on_away(cause, why)` when Redis is given up, for as long as it is, and
    before anything fails; `cause` is `refused` or `silence`.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str,
        caller: str,
        silence: Silence,
        awake: AwakeClock,
        connect_timeout_s: float,
        metrics: CallMetrics,
        on_batch: Callable[[Sequence[Any]], None],
        on_away: Callable[[str, str], object],
    ) -> None:
        self._pool = connections(url, key, socket_connect_timeout=connect_timeout_s)
        self._key = key
        self._connect_timeout_s = connect_timeout_s
        self._silence, self._awake = silence, awake
        self._metrics = metrics
        self._on_batch, self._on_away = on_batch, on_away
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
        self._under_way = UnderWay()
        self._astray = ""  # what a server said that is not, or not now, the one to ask
        self.lives = 0  # connections made so far
        self._connected_s = 0.0  # when the last of them was
        self.heard_s = self._loop.time()  # when the last reply came, or this began
        self._detector = Detector(self, silence, awake, self._connect, self._tell_time)

    @property
    def fault(self) -> str | None:
        """Why Redis cannot be reached at the moment; None while it answers."""
        return self._fault or None

    @property
    def waits(self) -> bool:
        """Whether anything waits for Redis: an answer, or a connection."""
        return bool(self._under_way) or not self._open

    def unsent(self, name: str) -> list[tuple[Argument, ...]]:
        """The arguments of the items of script `name` that Redis cannot have seen yet."""
        return self._pending.unsent(name)

    def submit(
        self, name: str, args: tuple[Argument, ...], *, lasting: bool = False
    ) -> asyncio.Future[Reply]:
        """Add one item to the next batch of script `name`; the future brings its reply.

        Raises (in the future):
            StateUnavailable: Redis is away (see the module); whether it took effect is unknown.
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
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._detector.run(), name="redis-detector")
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
        elif self.lives and self.heard_s < self._connected_s:
            # Whoever took the last connection, a proxy before a dead server perhaps, said nothing on it.
            self._give_up("refused")
            await asyncio.sleep(_RETRY_PAUSE_S)
        while True:
            try:
                async with asyncio.timeout(self._connect_timeout_s):
                    self._wire = await Wire.connect(self._pool, self._land, self._note_lost)
            except DOWN as fault:
                cancelling.heed()
                self._fault = str(fault) or "no answer in time"
                if not isinstance(fault, _SILENT):
                    self._give_up("refused")
                await asyncio.sleep(_RETRY_PAUSE_S)
            else:
                break
        self.lives += 1
        self._open, self._connected_s = True, self._loop.time()
        rest = self._under_way.unanswered
        if rest and not self._under_way.once_more:
            self._under_way.clear()
            self._send(rest, again=True)
        else:
            self._pending.set_aside(self._under_way.drop(), self._fault, keep=True)
            # Who takes connections may be as silent as before, and of ends that it was sent nobody would know
            # whether it has them: they wait for its first answer. All else goes out.
            self._send(self._pending.take(ends=False) or [Call("ping", ("PING",), [])])
            self._schedule(now=False)

    async def _connect(self, on_reply: Callable[[Any], None], on_lost: Callable[[str], None]) -> Wire:
        """Another connection, for a probe."""
        return await Wire.connect(self._pool, on_reply, on_lost)

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
        now_s = self._loop.time()
        self._under_way.append(Message(calls, now_s, self._awake.stood_until(now_s), whole, again))
        self._write(calls)

    def _write(self, calls: Iterable[Call]) -> None:
        assert self._wire is not None
        self._wire.write(b"".join([hiredis.pack_command(call.command) for call in calls]))

    def _land(self, reply: Reply) -> None:
        """Take the next reply to the first message under way."""
        if not self._open or not self._under_way:
            return  # its message was given up
        message, now_s = self._under_way[0], self._loop.time()
        self.heard_s = now_s
        if now_s - message.sent_s > LONG_S and self._stood_s(message, now_s) > LONG_S:
            # The leases of what it grants may have run out, and it be another's by now.
            self._awake.woke()
            self._abandon("this replica stood still")
            return
        call = message.flying.popleft()
        if not isinstance(reply, hiredis.ReplyError):
            call.answer(reply, self._on_batch)
        else:
            self._take_error(message, call, str(reply))
        if not message.flying:
            self._finish(message, now_s - message.sent_s - self._stood_s(message, now_s))

    def _stood_s(self, message: Message, now_s: float) -> float:
        """For how long this replica stood still since `message` was sent."""
        return self._awake.stood_until(now_s) - message.stood_s

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

    def _finish(self, message: Message, took_s: float) -> None:
        if self._astray:
            self._lose(self._astray)
            return
        self._under_way.popleft()
        if message.anew:
            self._ask_anew(message)
            return
        self._metrics.redis_call(message.calls[0].name, took_s, message.items)
        self._silence.took(took_s)
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
        self._open = False
        self._lost.set()

    def stuck(self) -> None:
        """The connection is silent, and others are not: what is under way is sent once more on a new one."""
        if self._open:
            self._note_lost("this connection is silent, and others are not")

    def away(self) -> None:
        """Redis is silent."""
        self._fault = "no answer in time"
        self._give_up("silence")
        if self._open:
            self._lose(self._fault)

    def _abandon(self, why: str) -> None:
        """What is under way fails, and the connection is made anew."""
        self._count_errors()
        self._pending.set_aside(self._under_way.drop(), why, keep=True)
        self._lose(why)

    def _count_errors(self) -> None:
        for message in self._under_way:
            for call in message.calls:
                self._metrics.redis_error(call.name, NO_ANSWER)

    def _give_up(self, cause: str) -> None:
        """Redis is away: what is pending fails, and what was on its way, but for what lasts."""
        self._on_away(cause, self._fault)
        self._count_errors()
        self._pending.set_aside(self._under_way.drop(), self._fault, keep=True)
        calls = self._pending.take()
        for call in calls:
            self._metrics.redis_error(call.name, NO_ANSWER)
        self._pending.set_aside(calls, self._fault, keep=True)

    def _tell_time(self) -> None:
        last_s = max(self.heard_s, self._detector.answered_s)
        self._metrics.redis_silence(self._loop.time() - last_s, self._awake.stood_s)
