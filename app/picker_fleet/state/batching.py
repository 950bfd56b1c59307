"""One connection to Redis that carries everything a replica asks of it, batched.

What arises while a message is on its way goes out together in the next one: alone, a call leaves at once,
and load makes batches larger rather than messages more numerous. What nobody waits for
(completions, renewals) gives the others a moment to join it. A decision waits no longer than that moment for
the message ahead: where Redis is far away or slow, several are under way, of which one carries what is no
decision. Within a message scripts keep a fixed order (`scripts.NAMES`), so that what a replica learned first
takes effect first: a lease is renewed before the same request is settled, an arrival is admitted before it is
cancelled.

A message waits while Redis is slow, until its silence is proven (state/failure_detector.py). If its
connection breaks before, is stuck, or leads to a server that is not the primary, it is sent once more on a
new one (scripts are idempotent by request id). Redis is away when it is silent, or when a new connection is
refused, or lost before anything came by it. Then items fail with StateUnavailable, except those marked
`durable`, which stay until Redis has taken them; also where it answers that it takes no writes for now.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import hiredis
from redis import exceptions as redis_errors

from picker_fleet.errors import ScriptFailed, StateFault, StateUnavailable, WritesRefused
from picker_fleet.state.connection import (
    DOWN,
    NO_ANSWER,
    Meaning,
    RedisConnection,
    connections,
    meaning_of,
    raise_if_cancelled,
)
from picker_fleet.state.failure_detector import (
    LONG_PAUSE_S,
    ConnectionMonitor,
    FailureDetector,
    PauseDetector,
)
from picker_fleet.state.scripts import ENDS, NAMES, load_library

Reply = Any
Argument = str | int | float | bytes
HEAD = 4  # born, news, attempts, served: what every batched script's reply begins with


class CallMetrics(Protocol):
    """What is reported of calls."""

    def redis_call(self, script: str, seconds: float, items: int) -> None: ...

    def redis_error(self, script: str, kind: str) -> None: ...

    def redis_silence(self, seconds: float, paused_s: float) -> None:
        """Nothing has come for `seconds`; this replica has stood still for `paused_s` in all."""

    def strays(self, n: int) -> None: ...


@dataclass(slots=True)
class Item:
    """One thing asked, and the future that brings its answer. A `durable` one outlives a lost connection;
    `tried` says that it was on its way when one broke."""

    args: tuple[Argument, ...]
    answer: asyncio.Future[Reply]
    durable: bool
    tried: bool = False


@dataclass(slots=True)
class Call:
    """One function call (or plain command) and the items it answers: none, one, or a whole batch."""

    name: str
    command: tuple[Any, ...]
    items: list[Item]
    batched: bool = False
    head: int = 0  # how many words of `command` come before the items' own
    denied: bool = False  # once before: state/connection.py

    @property
    def answered(self) -> bool:
        return all(item.answer.done() for item in self.items)

    def answer(self, reply: Reply, on_batch: Callable[[Sequence[Any]], None]) -> None:
        """Give each item its part of `reply`; `on_batch` gets a batch's head after that."""
        if not self.batched:
            for item in self.items:
                _resolve(item, reply)
            return
        for item, part in zip(self.items, reply[HEAD:], strict=True):
            _resolve(item, part)
        on_batch(reply[:HEAD])

    def apart(self) -> list["Call"]:
        """A call for each item that has no answer yet."""
        head = self.command[: self.head]
        return [
            Call(self.name, (*head, *item.args), [item], self.batched, self.head, self.denied)
            for item in self.items
            if not item.answer.done()
        ]

    def fail(self, fault: type[StateFault], why: str) -> None:
        """`fault` to every item that has no answer yet."""
        for item in self.items:
            if not item.answer.done():
                item.answer.set_exception(fault(why, retry_after_s=1))
                item.answer.exception()  # a caller that has gone must not raise a warning


def _resolve(item: Item, reply: Reply) -> None:
    if not item.answer.done():
        item.answer.set_result(reply)


@dataclass(slots=True)
class Message:
    """`sent_s` in event-loop time, when this replica had stood still for `paused_s` in all. `whole`: until it
    is answered, nothing but decisions goes out beside it. `again`: it was lost with a connection before;
    there is no third try.
    """

    calls: list[Call]
    sent_s: float
    paused_s: float
    whole: bool
    again: bool
    flying: deque[Call] = field(init=False)  # what is not answered yet, in order
    retry: list[Call] = field(default_factory=list)  # what of it is to be asked once more, in order
    forgotten: bool = False  # some of it met a Redis that lacks the library
    loads: int = 0  # of the library, on its behalf
    load_fault: str = ""  # why it could not be loaded

    def __post_init__(self) -> None:
        self.flying = deque(self.calls)

    def repeat(self, load: Call | None, others: Iterable["Message"]) -> None:
        """What is in `anew` flies once more, behind `load`; `others` are under way."""
        self.flying = deque(self.retry)
        if load is not None:
            self.loads += 1
            self.flying.appendleft(load)
        # An admission or renewal that runs late must not outlive the end that was sent after it.
        asked = {id(call) for call in self.retry}
        self.flying.extend(
            call
            for each in (self, *others)
            for call in each.calls
            if call.name in ENDS and id(call) not in asked
        )
        self.retry, self.forgotten = [], False

    @property
    def items(self) -> int:
        return sum(len(call.items) for call in self.calls)

    def part(self, call: Call) -> None:
        """Ask for each item of `call` by itself once more, if it is one of this message's own."""
        for at, each in enumerate(self.calls):
            if each is call:
                self.calls[at : at + 1] = alone = call.apart()
                self.retry += alone
                return

    @property
    def unanswered(self) -> list[Call]:
        return [call for call in self.calls if not call.answered]


class InFlight(deque[Message]):
    """In the order in which they are answered."""

    def drop(self) -> list[Call]:
        """None is under way any more; their unanswered calls, whose items Redis may have seen."""
        calls = self.unanswered
        for call in calls:
            for item in call.items:
                item.tried = True
        self.clear()
        return calls

    @property
    def unanswered(self) -> list[Call]:
        return [call for message in self for call in message.unanswered]

    @property
    def once_more(self) -> bool:
        """Whether one of them was lost with a connection before."""
        return any(message.again for message in self)


MAX_BATCH = 16  # items a script call: one that preempts sixteen times stays well below 5 ms
_RANK = {name: rank for rank, name in enumerate(NAMES)}
_NO_ENDS = tuple(name for name in NAMES if name not in ENDS)


class Pending:
    """`batched` has the items of each script that has any; `single` is filled by who asks.

    `functions` are the scripts' names as FCALL knows them, `key` is the pool's, `caller` the replica.
    """

    def __init__(self, functions: Mapping[str, str], key: str, caller: str) -> None:
        self._heads = {name: ("FCALL", functions[name], 1, key, caller) for name in NAMES}
        self.batched: dict[str, deque[Item]] = {}
        self.single: deque[Call] = deque()

    def __bool__(self) -> bool:
        return bool(self.batched or self.single)

    def add(self, name: str, item: Item) -> None:
        """One more item for script `name`."""
        self.batched.setdefault(name, deque()).append(item)

    def waiting(self, name: str) -> int:
        """How many items wait for script `name`."""
        return len(self.batched.get(name, ()))

    def unsent(self, name: str) -> list[tuple[Argument, ...]]:
        """The arguments of the items of script `name` that Redis cannot have seen yet."""
        return [item.args for item in self.batched.get(name, ()) if not item.tried]

    def take(self, *, ends: bool = True) -> list[Call]:
        """Everything, with the ends or without, as calls of at most MAX_BATCH items, in the fixed order."""
        calls = self.take_of(NAMES if ends else _NO_ENDS)
        if self.single:
            calls.extend(self.single)
            self.single.clear()
        return calls

    def take_of(self, names: Container[str]) -> list[Call]:
        """The items of some scripts, likewise."""
        calls: list[Call] = []
        for name in sorted(self.batched, key=_RANK.__getitem__):
            if name not in names:
                continue
            waiting, head = self.batched.pop(name), self._heads[name]
            while waiting:
                items = [waiting.popleft() for _ in range(min(MAX_BATCH, len(waiting)))]
                args = [arg for item in items for arg in item.args]
                calls.append(Call(name, (*head, *args), items, batched=True, head=len(head)))
        return calls

    def set_aside(self, calls: list[Call], why: str, *, keep: bool) -> None:
        """Fail the items of `calls`; with `keep` the durable ones go back to where they came from."""
        for call in reversed(calls):  # so that what is kept stays in order
            kept = [item for item in call.items if keep and item.durable and not item.answer.done()]
            if kept:
                self.batched.setdefault(call.name, deque()).extendleft(reversed(kept))
            call.items = [item for item in call.items if item not in kept]
            call.fail(StateUnavailable, f"the shared state cannot be reached: {why}")


_log = logging.getLogger(__name__)
_MOMENT_S = 0.05
_PAUSE_S = 0.5
_LINES_A_SECOND = 10  # of the log: whoever sends a bad request may send many
_MOST_LOGGED = 200  # characters of a name, or of an error

Ask = Callable[[list[Call]], None]


class Refusals:
    """`ask_again` is given what lasts, when it is time, `ask_once_more` what was denied for the first time.
    One event loop."""

    def __init__(self, ask_again: Ask, ask_once_more: Ask) -> None:
        self._kept, self._denied = _Kept(_PAUSE_S, ask_again), _Kept(_MOMENT_S, ask_once_more)
        self._logged_s, self._lines = 0, 0

    def met(self, message: Message, call: Call, why: str, meaning: Meaning) -> None:
        """`call` of `message` was answered with the error `why`, which is not ELSEWHERE."""
        if call.answered:
            return  # an end that was asked for again, or one that nobody waits for
        if meaning is Meaning.ITEM:
            if len(call.items) > 1:
                message.part(call)
            else:
                self._tell(call, why)
                call.fail(ScriptFailed, f"the shared state refused {call.name}: {why}")
        elif any(item.durable for item in call.items):
            for item in call.items:
                item.tried = True
            self._kept.add(call)
        elif meaning is Meaning.FULL:
            call.fail(WritesRefused, f"the shared state takes no writes for now: {why}")
        elif call.denied:
            call.fail(StateUnavailable, f"the shared state denies {call.name}: {why}")
        else:
            call.denied = True
            for each in call.apart() if call.batched else [call]:  # some may have no use for it by then
                self._denied.add(each)

    def take(self) -> list[Call]:
        """What is kept; it is kept no longer."""
        return self._kept.take() + self._denied.take()

    def _tell(self, call: Call, why: str) -> None:
        second = int(asyncio.get_running_loop().time())
        if second != self._logged_s:
            self._logged_s, self._lines = second, 0
        self._lines += 1
        if self._lines <= _LINES_A_SECOND:
            whose = ", ".join(_named(item) for item in call.items)
            _log.error("Redis answered %s of %s with an error: %s", call.name, whose, _shown(why))


def _named(item: Item) -> str:
    """Which request it is about; of an arrival (state/schema.py) also what its keys are made of."""
    first = item.args[0] if item.args else ""
    if not isinstance(first, bytes):
        return _shown(str(first))
    request_id, _, flow, workload, *_ = [*first.decode(errors="replace").split("\0", 4), "", "", "", ""]
    return f"{_shown(request_id)} (flow {_shown(flow)}, workload {_shown(workload)})"


def _shown(text: str) -> str:
    shown = ascii(text[:_MOST_LOGGED])
    return shown if len(shown) <= _MOST_LOGGED else shown[: _MOST_LOGGED - 1] + "…"


class _Kept:
    """Calls, of which those without an answer are handed over `pause_s` after the first was added."""

    def __init__(self, pause_s: float, ask: Ask) -> None:
        self._pause_s = pause_s
        self._ask = ask
        self._calls: list[Call] = []
        self._pause: asyncio.TimerHandle | None = None

    def add(self, call: Call) -> None:
        self._calls.append(call)
        if self._pause is None:
            self._pause = asyncio.get_running_loop().call_later(self._pause_s, self._over)

    def take(self) -> list[Call]:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        calls, self._calls = self._calls, []
        return calls

    def _over(self) -> None:
        if calls := [call for call in self.take() if not call.answered]:
            self._ask(calls)


MAX_DURABLE = 50_000
_RETRY_PAUSE_S = 0.05
_PATIENCE_S = 0.002  # how long a decision waits for the message ahead, or anything for company
_MOST_IN_FLIGHT = 64
_PATIENT = ("settle", "renew")
_DECISIONS = ("admit", "place")
_NOT_LOADED = "ERR Function not found"
_SILENT = (TimeoutError, redis_errors.TimeoutError)  # of a connection that is not made: nobody refused it
_LOADS = 5  # of the library, for one message: more means that somebody flushes it on purpose


class BatchingClient:
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
        failure_detector: FailureDetector,
        pause_detector: PauseDetector,
        connect_timeout_s: float,
        metrics: CallMetrics,
        on_batch: Callable[[Sequence[Any]], None],
        on_away: Callable[[str, str], object],
    ) -> None:
        self._pool = connections(url, key, socket_connect_timeout=connect_timeout_s)
        self._key = key
        self._connect_timeout_s = connect_timeout_s
        self._failure_detector, self._pause_detector = failure_detector, pause_detector
        self._metrics = metrics
        self._on_batch, self._on_away = on_batch, on_away
        self._library = load_library()
        self._functions = {name: self._library.function(name) for name in NAMES}
        self._pending = Pending(self._functions, key, caller)
        self._refusals = Refusals(self._ask_again, self._ask_once_more)
        self._loop = asyncio.get_running_loop()
        self._wire: RedisConnection | None = None
        self._open = False  # the wire may be written to
        self._fault = "not connected yet"
        self._lost = asyncio.Event()
        self._lost.set()
        self._due: asyncio.TimerHandle | None = None
        self._in_flight = InFlight()
        self._not_primary = ""  # what a server said that is not, or not now, the one to ask
        self.connection_epoch = 0  # connections made so far
        self._connected_s = 0.0  # when the last of them was
        self.heard_s = self._loop.time()  # when the last reply came, or this began
        self._monitor = ConnectionMonitor(
            self, failure_detector, pause_detector, self._connect, self._tell_time
        )

    @property
    def fault(self) -> str | None:
        """Why Redis cannot be reached at the moment; None while it answers."""
        return self._fault or None

    @property
    def waits(self) -> bool:
        """Whether anything waits for Redis: an answer, or a connection."""
        return bool(self._in_flight) or not self._open

    def unsent(self, name: str) -> list[tuple[Argument, ...]]:
        """The arguments of the items of script `name` that Redis cannot have seen yet."""
        return self._pending.unsent(name)

    def submit(
        self, name: str, args: tuple[Argument, ...], *, durable: bool = False
    ) -> asyncio.Future[Reply]:
        """Add one item to the next batch of script `name`; the future brings its reply.

        Raises (in the future):
            StateUnavailable: Redis is away (see the module); whether it took effect is unknown.
            WritesRefused: Redis takes no writes for now.
            ScriptFailed: Redis answered this item with an error.
        """
        answer: asyncio.Future[Reply] = self._loop.create_future()
        if durable and self._pending.waiting(name) >= MAX_DURABLE:
            answer.set_exception(StateUnavailable("too much waits for the shared state to return"))
            return answer
        self._pending.add(name, Item(args, answer, durable))
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
                tasks.create_task(self._monitor.run(), name="redis-detector")
                while True:
                    await self._lost.wait()
                    self._lost.clear()
                    await self._reconnect()
        finally:
            self._pending.set_aside(self._in_flight.drop(), "the replica has stopped", keep=False)
            for call in (*self._pending.take(), *self._refusals.take()):
                call.fail(StateUnavailable, "the replica has stopped")
            await self._disconnect()

    async def _reconnect(self) -> None:
        """A new connection, however long it takes; what can't wait that long fails meanwhile."""
        await self._disconnect()
        if self._not_primary:
            # Those who know the primary may still name the one that just said it is not.
            self._not_primary = ""
            await asyncio.sleep(_RETRY_PAUSE_S)
        elif self.connection_epoch and self.heard_s < self._connected_s:
            # Whoever took the last connection, a proxy before a dead server perhaps, said nothing on it.
            self._give_up("refused")
            await asyncio.sleep(_RETRY_PAUSE_S)
        while True:
            try:
                async with asyncio.timeout(self._connect_timeout_s):
                    self._wire = await RedisConnection.connect(self._pool, self._land, self._note_lost)
            except DOWN as fault:
                raise_if_cancelled()
                self._fault = str(fault) or "no answer in time"
                if not isinstance(fault, _SILENT):
                    self._give_up("refused")
                await asyncio.sleep(_RETRY_PAUSE_S)
            else:
                break
        self.connection_epoch += 1
        self._open, self._connected_s = True, self._loop.time()
        rest = self._in_flight.unanswered
        if rest and not self._in_flight.once_more:
            self._in_flight.clear()
            self._send(rest, again=True)
        else:
            self._pending.set_aside(self._in_flight.drop(), self._fault, keep=True)
            # Who takes connections may be as silent as before, and of ends that it was sent nobody would know
            # whether it has them: they wait for its first answer. All else goes out.
            self._send(self._pending.take(ends=False) or [Call("ping", ("PING",), [])])
            self._schedule(now=False)

    async def _connect(
        self, on_reply: Callable[[Any], None], on_lost: Callable[[str], None]
    ) -> RedisConnection:
        """Another connection, for a probe."""
        return await RedisConnection.connect(self._pool, on_reply, on_lost)

    async def _disconnect(self) -> None:
        self._open = False
        wire, self._wire = self._wire, None
        if wire is not None:
            await wire.close()

    def _schedule(self, *, now: bool) -> None:
        """See that what is pending goes out: at once, or when it has had its wait."""
        if not self._open:
            return
        if now and not self._in_flight:
            self._send_pending()
        elif self._due is None:
            self._due = self._loop.call_later(_PATIENCE_S, self._send_pending)

    def _send_pending(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if not self._open or len(self._in_flight) >= _MOST_IN_FLIGHT:
            return
        # Only of ends in one message is it unknown at any time whether Redis has seen them (`unsent`).
        whole = not any(message.whole for message in self._in_flight)
        if calls := self._pending.take() if whole else self._pending.take_of(_DECISIONS):
            self._send(calls, whole=whole)

    def _send(self, calls: list[Call], *, whole: bool = True, again: bool = False) -> None:
        now_s = self._loop.time()
        self._in_flight.append(Message(calls, now_s, self._pause_detector.paused_until(now_s), whole, again))
        self._write(calls)

    def _write(self, calls: Iterable[Call]) -> None:
        assert self._wire is not None
        self._wire.write(b"".join([hiredis.pack_command(call.command) for call in calls]))

    def _land(self, reply: Reply) -> None:
        """Take the next reply to the first message under way."""
        if not self._open or not self._in_flight:
            return  # its message was given up
        message, now_s = self._in_flight[0], self._loop.time()
        self.heard_s = now_s
        if now_s - message.sent_s > LONG_PAUSE_S and self._stood_s(message, now_s) > LONG_PAUSE_S:
            # The leases of what it grants may have run out, and it be another's by now.
            self._pause_detector.mark_resumed()
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
        return self._pause_detector.paused_until(now_s) - message.paused_s

    def _take_error(self, message: Message, call: Call, error: str) -> None:
        if call.name == "load":
            message.load_fault = error
        if error.startswith(_NOT_LOADED):
            if message.loads < _LOADS and not message.load_fault:
                message.retry.append(call)
                message.forgotten = True
                return
            error = message.load_fault or error
        meaning = meaning_of(error)
        self._metrics.redis_error(call.name, meaning.value)
        if meaning is Meaning.ELSEWHERE:
            self._not_primary = error
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
        if self._not_primary:
            self._lose(self._not_primary)
            return
        self._in_flight.popleft()
        if message.retry:
            self._send_retry(message)
            return
        self._metrics.redis_call(message.calls[0].name, took_s, message.items)
        self._failure_detector.record_reply_time(took_s)
        self._fault = ""
        if self._pending and (message.whole or self._due is None or not self._in_flight):
            # Not before those who wait for these replies have had their turn to ask for more.
            self._loop.call_soon(self._send_pending)

    def _send_retry(self, message: Message) -> None:
        """Ask once more for what of `message` a Redis without the library did not know, having given it the
        library, and for what it refused in company: one more trip.

        What is written now is answered after all that is under way.
        """
        load = None
        if message.forgotten:
            load = Call("load", ("FUNCTION", "LOAD", "REPLACE", self._library.source), [])
        message.repeat(load, self._in_flight)
        self._in_flight.append(message)
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
        """What is under way fails, and the connection is made retry."""
        self._count_errors()
        self._pending.set_aside(self._in_flight.drop(), why, keep=True)
        self._lose(why)

    def _count_errors(self) -> None:
        for message in self._in_flight:
            for call in message.calls:
                self._metrics.redis_error(call.name, NO_ANSWER)

    def _give_up(self, cause: str) -> None:
        """Redis is away: what is pending fails, and what was on its way, but for what lasts."""
        self._on_away(cause, self._fault)
        self._count_errors()
        self._pending.set_aside(self._in_flight.drop(), self._fault, keep=True)
        calls = self._pending.take()
        for call in calls:
            self._metrics.redis_error(call.name, NO_ANSWER)
        self._pending.set_aside(calls, self._fault, keep=True)

    def _tell_time(self) -> None:
        last_s = max(self.heard_s, self._monitor.answered_s)
        self._metrics.redis_silence(self._loop.time() - last_s, self._pause_detector.paused_s)
