"""Sends every script call of a replica over one Redis connection, in batches; state/store.py calls it.

Calls submitted while a message is in flight go out together in the next message; with no message in flight, a
call goes out at the end of the event loop's turn. So under load batches grow, not the number of messages.
While ends come at intervals shorter than `_BATCH_DELAY_S` on average, an end that is not urgent waits up to
`_BATCH_DELAY_S` to share a message with an admission.

Order, guaranteed:
- Within a message, scripts run in the order of `scripts.NAMES`: a lease is renewed before the same request is
  settled, an end frees capacity before the next request is admitted, and a request is admitted before it is
  cancelled.
- Redis runs messages in the order in which they were written, and items of one script in the order in which
  they were submitted, except items that Redis denied or refused, which are retried later.
- Decisions (admit, place) wait at most `_BATCH_DELAY_S` for replies to earlier messages; then the decisions
  go out in a message of their own. All other calls wait until no exclusive message (`Message`) is in flight.
- When a call is retried behind later messages, the ends (settle, cancel) in those messages are sent again
after it, so that a late admission never outlives its request. Ends are idempotent.
- A renewal is not sent again once the end of its request was sent: it would restore the ended request.

Failure: a message waits while Redis is slow. If a message's connection breaks, is stuck, or leads to a server
that is not the primary, the message's unanswered calls are sent once more on a new connection (scripts are
idempotent by request id). Redis is unavailable when its silence is proven (state/connection.py), when a new
connection is refused, or when a connection is lost before any reply. While Redis is unavailable, items fail
with StateUnavailable, except durable items, which stay pending until Redis has accepted them.

Items, calls (state/connection.py) and messages are msgspec structs, which are faster to construct than
dataclasses.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import hiredis
import msgspec

from picker_fleet.background import keep
from picker_fleet.domain.errors import OtherFormat, ScriptFailed, StateUnavailable, WritesRefused
from picker_fleet.state.connection import (
    DOWN,
    LONG_PAUSE_S,
    Argument,
    Call,
    ConnectionMonitor,
    DelayedCalls,
    FailureDetector,
    Item,
    PauseDetector,
    RedisConnection,
    Reply,
)
from picker_fleet.state.error_replies import (
    NO_ANSWER,
    Meaning,
    explained,
    log_error,
    meaning_of,
    other_format,
)
from picker_fleet.state.primary import TIMEOUTS, connections, named_primary, raise_if_cancelled
from picker_fleet.state.scripts import ENDS, NAMES, load_library

MAX_BATCH = 16  # maximum items per script call: sixteen preemptions take well below 5 ms
MAX_DURABLE = 50_000
_MAX_IN_FLIGHT = 64
_BATCH_DELAY_S = 0.002  # longest wait of decisions for earlier replies, and of ends for decisions
_LONGEST_INTERVALS = 10  # cap of an interval between requests' ends before averaging, in batch delays
_END_ALPHA = 0.1
_RANK = {name: rank for rank, name in enumerate(NAMES)}
_DELAYED = ("renew", "acknowledge", "prefilled")  # scripts for whose replies no caller waits
_DECISIONS = ("admit", "place")
_RECONNECT_PAUSE_S = 0.05
_UNREACHABLE = "Redis cannot be reached: {}"
_LIBRARY_MISSING = "ERR Function not found"
_MAX_LOADS = 5  # maximum library loads per message, in case a client keeps flushing the library
_FOLLOW_S = 2.0  # seconds between two lookups of the primary at Sentinels or Cluster
_LOAD_AGAIN_S = 1.0  # pause before loading a refused library again
_DENIED_RETRY_S = 0.05
_DURABLE_RETRY_S = 0.5


class CallMetrics(Protocol):
    def redis_call(self, script: str, seconds: float, items: int) -> None: ...

    def redis_error(self, script: str, kind: str) -> None: ...

    def redis_silence(self, seconds: float, paused_s: float) -> None: ...

    def strays(self, n: int) -> None: ...

    def adopted(self) -> None: ...


class Pending:
    """Items and calls that wait to be sent: items grouped by script, and single calls.

    `functions` maps script names to function names for FCALL; `key` is the key of the pool, `caller` the
    replica's id.
    """

    def __init__(self, functions: Mapping[str, str], key: str, caller: str) -> None:
        self._heads = {name: ("FCALL", functions[name], 1, key, caller) for name in NAMES}
        self._batched: dict[str, deque[Item]] = {}
        self._single: deque[Call] = deque()

    def __bool__(self) -> bool:
        return bool(self._batched or self._single)

    def add(self, name: str, item: Item) -> None:
        self._batched.setdefault(name, deque()).append(item)

    def add_call(self, call: Call) -> None:
        self._single.append(call)

    def count(self, name: str) -> int:
        return len(self._batched.get(name, ()))

    def unsent(self, name: str) -> list[tuple[Argument, ...]]:
        """The arguments of the items of script `name` that Redis cannot have received."""
        return [item.args for item in self._batched.get(name, ()) if not item.tried]

    def take(self, names: Collection[str] = NAMES, *, single: bool = True) -> list[Call]:
        """Remove and return the items of the scripts `names`, as calls of at most MAX_BATCH items, in the
        order of NAMES; with `single` also the single calls, last."""
        calls: list[Call] = []
        for name in sorted(self._batched, key=_RANK.__getitem__):
            if name not in names:
                continue
            items, head = self._batched.pop(name), self._heads[name]
            while items:
                batch = [items.popleft() for _ in range(min(MAX_BATCH, len(items)))]
                args = [arg for item in batch for arg in item.args]
                calls.append(Call(name, (*head, *args), batch, batched=True, head=len(head)))
        if single:
            calls += self._single
            self._single.clear()
        return calls

    def put_back(self, calls: list[Call], why: str, *, views: bool = False) -> None:
        """Queue the durable items of `calls` again, and if `views` also the repeatable calls. Fail all other
        items with StateUnavailable."""
        for call in reversed(calls):  # reversed, since appendleft and extendleft then restore the order
            if views and call.repeatable and not call.answered:
                self._single.appendleft(call)
                continue
            kept = [item for item in call.items if item.durable and not item.answer.done()]
            if kept:
                self._batched.setdefault(call.name, deque()).extendleft(reversed(kept))
            call.items = [item for item in call.items if item not in kept]
            call.fail(StateUnavailable, _UNREACHABLE.format(why))


class Message(msgspec.Struct, eq=False):
    """Calls that are written together and answered in order, until each call is answered or the message is
    dropped.

    `sent_s` is event-loop time; `paused_s` is the pause detector's total at `sent_s`. `exclusive`: while the
    message is in flight, only messages of decisions (admit, place) may be sent. `resent`: the message carries
    the unanswered calls of a lost connection; the message is dropped if the new connection is lost, too.

    All messages are dropped when Redis is unavailable, or when this replica was paused for long. After a
    drop, durable items are pending again, and so are reads (views) unless Redis is unavailable; all other
    items fail with StateUnavailable."""

    calls: list[Call]
    sent_s: float
    paused_s: float
    exclusive: bool
    resent: bool = False
    awaiting: deque[Call] = msgspec.field(default_factory=deque)  # calls without a reply yet, in order
    retry: list[Call] = msgspec.field(default_factory=list)  # calls to send again, in order
    library_missing: bool = False
    loads: int = 0  # number of library loads for this message
    load_error: str = ""

    def __post_init__(self) -> None:
        self.awaiting = deque(self.calls)

    @property
    def unanswered(self) -> list[Call]:
        return [call for call in self.calls if not call.answered]

    def retry_apart(self, call: Call) -> None:
        """Retry each item of `call` in a call of its own, if `call` is among `calls`."""
        if call in self.calls:
            at = self.calls.index(call)
            self.calls[at : at + 1] = single = call.split()
            self.retry += single

    def begin_retry(self, load: Call | None, others: Iterable["Message"]) -> None:
        """Next await replies to `load`, then to the calls in `retry`, then once more to every end of a
        request in this message and in `others`, the messages in flight."""
        sent = (call for message in (self, *others) for call in message.calls)
        ends = [call for call in sent if call.name in ENDS]
        self.awaiting = deque(_without_ended(self.retry, ends))
        if load is not None:
            self.loads += 1
            self.awaiting.appendleft(load)
        self.awaiting.extend(call for call in ends if call not in self.retry)
        self.retry, self.library_missing = [], False


def _without_ended(calls: list[Call], ends: Iterable[Call]) -> list[Call]:
    """Remove the renewals of requests that `ends` end from `calls`; return the calls to send again."""
    ended = {item.args[0] for call in ends for item in call.items}
    kept: list[Call] = []
    for call in calls:
        call.drop_renewals(ended)
        is_cut = call.name in ("renew", "admit") and any(item.answer.done() for item in call.items)
        kept += call.split() if is_cut else [call]
    return kept


class BatchingClient:
    """A replica's connection to Redis; the module's docstring lists the guarantees. One event loop.

    The callback `on_batch(head)` gets the head of each batched reply right after the reply's items are
    answered. The callback `on_unavailable(cause, why)` is called before items fail because Redis is
    unavailable, and again at each further sign while the outage lasts; `cause` is 'refused' or 'silence'.
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
        on_unavailable: Callable[[str, str], object],
    ) -> None:
        self._url, self._pool = url, connections(url, key, socket_connect_timeout=connect_timeout_s)
        self._connect = partial(RedisConnection.connect, self._pool)
        self._key = key
        self._connect_timeout_s = connect_timeout_s
        self._failure_detector, self._pause_detector = failure_detector, pause_detector
        self._metrics = metrics
        self._on_batch, self._on_unavailable = on_batch, on_unavailable
        self.library = load_library()
        self._functions = {name: self.library.function(name) for name in NAMES}
        self._pending = Pending(self._functions, key, caller)
        self._in_flight: deque[Message] = deque()  # messages in flight, in the order of their replies
        self._denied = DelayedCalls(_DENIED_RETRY_S, self._resend_denied)
        self._refused = DelayedCalls(_DURABLE_RETRY_S, self._requeue_refused)
        self._loop = asyncio.get_running_loop()
        self._connection: RedisConnection | None = None
        self._open = False  # whether the connection may be written to
        self._lost = asyncio.Event()
        self._lost.set()
        self._fault = "not connected yet"
        self._load_error, self._load_denied_s = "", -_LOAD_AGAIN_S  # (last failed library load, its time)
        self._not_primary = ""  # why the server is not usable as the primary; '' if it is
        self._timer: asyncio.TimerHandle | None = None  # timer that sends the next batch
        self._soon = False  # the next batch is sent in this turn of the event loop
        self._ended_s = float("-inf")  # when a request's end was last submitted
        self._end_interval_s = _LONGEST_INTERVALS * _BATCH_DELAY_S  # smoothed interval between requests' ends
        self.connection_epoch = 0  # number of connections made so far
        self._is_mute = False  # whether the last connection has brought no reply yet
        self.last_reply_s = self._loop.time()
        self._monitor = ConnectionMonitor(
            self, failure_detector, pause_detector, self._connect, self._report_silence
        )

    @property
    def fault(self) -> str | None:
        """The reason why Redis cannot be reached now; None while it answers."""
        return self._fault or None

    @property
    def waiting(self) -> bool:
        """Whether a message waits for its reply, or the client for a connection."""
        return bool(self._in_flight) or not self._open

    def unsent(self, name: str) -> list[tuple[Argument, ...]]:
        return self._pending.unsent(name)

    def submit(
        self,
        name: str,
        args: tuple[Argument, ...],
        parse: Callable[[Any], Any] | None = None,
        *,
        durable: bool = False,
        urgent: bool = False,
    ) -> asyncio.Future[Any]:
        """Add one item to the next batch of script `name`; the returned future gets the item's reply,
        converted by `parse`. An `urgent` end is not delayed to share a message with an admission.

        Raises (in the future):
            StateUnavailable: Redis is unavailable; whether the item took effect is unknown.
            WritesRefused: Redis accepts no writes for now.
            OtherFormat: the pool has another format.
            ScriptFailed: Redis answered this item with an error.
        """
        answer: asyncio.Future[Any] = self._loop.create_future()
        if durable and self._pending.count(name) >= MAX_DURABLE:
            answer.set_exception(StateUnavailable("too many reports wait for Redis to answer again"))
            return answer
        if name in ENDS:
            self._denied.drop_renewals(args[:1])
        self._pending.add(name, Item(args, answer, durable, parse))
        may_wait = name in _DELAYED or (name == "settle" and self._note_end() and not urgent)
        self._schedule(now=not may_wait)
        return answer

    def _note_end(self) -> bool:
        """Record a submitted end of a request. Returns whether ends come faster than `_BATCH_DELAY_S`."""
        now_s = self._loop.time()
        interval_s = min(now_s - self._ended_s, _LONGEST_INTERVALS * _BATCH_DELAY_S)
        self._ended_s = now_s
        self._end_interval_s += _END_ALPHA * (interval_s - self._end_interval_s)
        return self._end_interval_s < _BATCH_DELAY_S

    def call(self, name: str, *args: str | int | float) -> asyncio.Future[Reply]:
        """Run script `name` unbatched with `args`; the future gets the whole reply."""
        return self._submit_call(name, ("FCALL", self._functions[name], 1, self._key, *args))

    def command(self, *args: Argument) -> asyncio.Future[Reply]:
        return self._submit_call(str(args[0]).lower(), args)

    def _submit_call(self, name: str, command: tuple[Any, ...]) -> asyncio.Future[Reply]:
        answer: asyncio.Future[Reply] = self._loop.create_future()
        self._pending.add_call(Call(name, command, [Item((), answer, False)]))
        self._schedule(now=True)
        return answer

    async def run(self) -> None:
        """Keep a connection to Redis open until cancelled; then fail every unanswered item."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(keep("redis-monitor", self._monitor.run), name="redis-monitor")
                tasks.create_task(keep("redis-primary", self._follow_primary), name="redis-primary")
                await keep("redis-connection", self._stay_connected)
        finally:
            calls = (*self._drop(), *self._pending.take(), *self._refused.take(), *self._denied.take())
            for call in calls:
                call.fail(StateUnavailable, _UNREACHABLE.format("the replica has stopped"))
            await self._disconnect()

    async def _follow_primary(self) -> None:
        """Disconnect from a server when Sentinels or the Cluster name another primary."""
        while True:
            await asyncio.sleep(_FOLLOW_S)
            connection = self._connection
            named = await named_primary(self._url, self._pool)
            if named is None or connection is None or connection is not self._connection or not self._open:
                continue
            if connection.server != named:
                self._not_primary = f"another primary is named now: {named[0]}:{named[1]}"
                self._on_lost(self._not_primary)

    async def _stay_connected(self) -> None:
        while True:
            await self._lost.wait()
            try:
                self._lost.clear()
                await self._reconnect()
            except BaseException:
                self._lost.set()  # the next turn of the loop connects again
                raise

    async def _reconnect(self) -> None:
        """Reconnect, without a time limit, and resend the unanswered calls. While Redis
        refuses or is silent, items that are not durable fail."""
        await self._disconnect()
        if self._not_primary:
            # Sentinels or the Cluster may still name the server that has just proved not to be the primary.
            self._not_primary = ""
            await asyncio.sleep(_RECONNECT_PAUSE_S)
        elif self._is_mute:
            # The last connection brought no reply: a proxy may have accepted it for a dead server.
            self._declare_unavailable("refused")
            await asyncio.sleep(_RECONNECT_PAUSE_S)
        while True:
            try:
                async with asyncio.timeout(self._connect_timeout_s):
                    self._connection = await self._connect(self._on_reply, self._on_lost)
                break
            except DOWN as fault:
                raise_if_cancelled()
                self._fault = str(fault) or "no answer in time"
                if not isinstance(fault, TIMEOUTS):
                    self._declare_unavailable("refused")
                await asyncio.sleep(_RECONNECT_PAUSE_S)
        self.connection_epoch += 1
        self._open = self._is_mute = True
        unanswered = [call for message in self._in_flight for call in message.unanswered]
        if unanswered and not any(message.resent for message in self._in_flight):
            self._in_flight.clear()
            ends = [call for call in unanswered if call.name in ENDS]
            self._send(_without_ended(unanswered, ends), resent=True)
        else:
            self._pending.put_back(self._drop(), self._fault, views=True)
            # Send the ends of requests only after the new server's first reply: if it stayed silent, it would
            # be unknown whether it has received them. Send all other calls at once.
            others = [name for name in NAMES if name not in ENDS]
            self._send(self._pending.take(others) or [Call("ping", ("PING",), [])])
            self._schedule(now=False)

    async def _disconnect(self) -> None:
        self._open = False
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    def _schedule(self, *, now: bool) -> None:
        """Send pending calls: at once if `now` and no message is in flight, else after the batch delay."""
        if not self._open:
            return
        if now and not self._in_flight:
            # Send decisions at the end of the event loop's present turn, so that all decisions of the turn
            # share a message.
            if not self._soon:
                self._soon = True
                self._loop.call_soon(self._send_soon)
        elif self._timer is None:
            self._timer = self._loop.call_later(_BATCH_DELAY_S, self._send_pending)

    def _send_soon(self) -> None:
        self._soon = False
        self._send_pending()

    def _send_pending(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._open or len(self._in_flight) >= _MAX_IN_FLIGHT:
            return
        # At most one message in flight carries ends of requests, so that `unsent` knows which ends Redis
        # cannot have.
        exclusive = not any(message.exclusive for message in self._in_flight)
        calls = self._pending.take() if exclusive else self._pending.take(_DECISIONS, single=False)
        if calls:
            self._send(calls, exclusive=exclusive)

    def _send(self, calls: list[Call], *, exclusive: bool = True, resent: bool = False) -> None:
        now_s = self._loop.time()
        paused_s = self._pause_detector.paused_until(now_s)
        self._in_flight.append(Message(calls, now_s, paused_s, exclusive, resent))
        self._write(calls)

    def _write(self, calls: Iterable[Call]) -> None:
        assert self._connection is not None
        self._connection.write(b"".join([hiredis.pack_command(call.command) for call in calls]))

    def _on_reply(self, reply: Reply) -> None:
        """Handle a reply from Redis, which belongs to the first message in flight."""
        if not self._open or not self._in_flight:
            return  # a reply to a dropped message
        message, now_s = self._in_flight[0], self._loop.time()
        self.last_reply_s, self._is_mute = now_s, False
        if now_s - message.sent_s > LONG_PAUSE_S and self._paused_s(message, now_s) > LONG_PAUSE_S:
            # During the pause leases may have ended, so another replica may own requests granted here.
            self._pause_detector.mark_resumed()
            why = "this replica was paused"
            self._count_errors()
            self._pending.put_back(self._drop(), why, views=True)
            self._lose(why)
            return
        call = message.awaiting.popleft()
        if not isinstance(reply, hiredis.ReplyError):
            call.answer(reply, self._on_batch)
        else:
            self._on_error(message, call, str(reply))
        if not message.awaiting:
            self._finish(message, now_s - message.sent_s - self._paused_s(message, now_s))

    def _paused_s(self, message: Message, now_s: float) -> float:
        """Seconds for which this replica has been paused since `message` was sent."""
        return self._pause_detector.paused_until(now_s) - message.paused_s

    def _on_error(self, message: Message, call: Call, error: str) -> None:
        """Redis answered `call` with `error`: retry it, keep it, or fail it (docs/errors.md)."""
        if call.name == "load":
            message.load_error = error
            if meaning_of(error) is not Meaning.ELSEWHERE:
                self._load_error, self._load_denied_s = error, self._loop.time()
        meaning = meaning_of(error)
        if error.startswith(_LIBRARY_MISSING):
            denied_lately = self._loop.time() - self._load_denied_s < _LOAD_AGAIN_S
            if message.loads < _MAX_LOADS and not message.load_error and not denied_lately:
                message.retry.append(call)
                message.library_missing = True
                return
            if cause := message.load_error or (self._load_error if denied_lately else ""):
                error = f"{error}, and loading the library fails: {explained(cause)}"
                meaning = meaning_of(cause)
                if meaning is Meaning.ITEM:
                    meaning = Meaning.DENIED  # without the library no call can succeed
        self._metrics.redis_error(call.name, meaning.value)
        if meaning is Meaning.ELSEWHERE:
            self._not_primary = error
        elif call.answered:
            pass  # an end that was sent again, or a call whose caller has gone
        elif meaning is Meaning.ITEM:
            # Retry each item of a failed call in a call of its own, so that only the faulty item fails. A
            # failed script has changed nothing, so no item takes effect twice.
            if len(call.items) > 1:
                message.retry_apart(call)
            else:
                log_error(call.name, (item.args for item in call.items), error)
                call.fail(ScriptFailed, f"the shared state refused {call.name}: {error}")
        elif meaning is Meaning.FORMAT:
            call.fail(OtherFormat, other_format(error))
        elif any(item.durable for item in call.items):
            call.mark_tried()
            self._refused.add(call)
        elif meaning is Meaning.FULL:
            call.fail(WritesRefused, f"the shared state takes no writes for now: {explained(error)}")
        elif call.denied:
            call.fail(StateUnavailable, f"the shared state denies {call.name}: {explained(error)}")
        else:
            call.denied = True
            # Make one call per item, because some items may be answered by the time of the retry.
            self._denied.add(*(call.split() if call.batched else [call]))

    def _requeue_refused(self, calls: list[Call]) -> None:
        self._pending.put_back(calls, "the shared state refuses for now")
        self._schedule(now=False)

    def _resend_denied(self, calls: list[Call]) -> None:
        if self._open:
            self._send(calls, exclusive=False)
        else:
            self._pending.put_back(calls, self._fault)

    def _finish(self, message: Message, took_s: float) -> None:
        if self._not_primary:
            self._lose(self._not_primary)
            return
        self._in_flight.popleft()
        if message.retry:
            # Redis answers the retried calls after all messages in flight, so this message goes to the end.
            load = None
            if message.library_missing:
                load = Call("load", ("FUNCTION", "LOAD", "REPLACE", self.library.source), [])
            message.begin_retry(load, self._in_flight)
            self._in_flight.append(message)
            self._write(message.awaiting)
            return
        items = sum(len(call.items) for call in message.calls)
        self._metrics.redis_call(message.calls[0].name, took_s, items)
        self._failure_detector.record_reply_time(took_s)
        self._fault = ""
        if self._pending and (message.exclusive or self._timer is None or not self._in_flight):
            # First let callers that waited for these replies submit their next calls.
            self._loop.call_soon(self._send_pending)

    def _on_lost(self, why: str) -> None:
        """The connection broke: count the calls of all messages in flight as errors, and reconnect."""
        self._count_errors()
        self._lose(why)

    def _lose(self, why: str) -> None:
        self._fault = why
        self._open = False
        self._lost.set()

    def on_stuck(self) -> None:
        if self._open:
            self._on_lost("this connection is silent; Redis answers on new connections")

    def on_silent(self) -> None:
        self._fault = "no answer in time"
        self._declare_unavailable("silence")
        if self._open:
            self._lose(self._fault)

    def _drop(self) -> list[Call]:
        """Drop every message in flight. Returns the unanswered calls, which Redis may have run."""
        calls = [call for message in self._in_flight for call in message.unanswered]
        for call in calls:
            call.mark_tried()
        self._in_flight.clear()
        return calls

    def _count_errors(self, calls: Iterable[Call] | None = None) -> None:
        """Count `calls` in the metrics as unanswered; None: the calls of all messages in flight."""
        in_flight = (call for message in self._in_flight for call in message.calls)
        for call in in_flight if calls is None else calls:
            self._metrics.redis_error(call.name, NO_ANSWER)

    def _declare_unavailable(self, cause: str) -> None:
        """Fail all items, pending and in flight, except durable items."""
        self._on_unavailable(cause, self._fault)
        self._count_errors()
        self._pending.put_back(self._drop(), self._fault)
        pending = self._pending.take()
        self._count_errors(pending)
        self._pending.put_back(pending, self._fault)

    def _report_silence(self) -> None:
        last_s = max(self.last_reply_s, self._monitor.answered_s)
        self._metrics.redis_silence(self._loop.time() - last_s, self._pause_detector.paused_s)
