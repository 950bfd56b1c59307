"""The gate that admits through Redis: all replicas share one queue and one stock.

`admit` places a request or queues it. A queued request waits for its grant, which arrives in the reply to any
call, by a wake-up, or with a heartbeat. If any endpoint will do, the granting script also places the request,
and the replica acknowledges the placement. Otherwise the replica then asks for a placement, and the script
may queue the request again. A replica that owns a stream renews its request's lease until the request ends.
`attempt` numbers the streams of a request, so that a late call of a dead stream never affects the stream that
took the request over. Only a stream with the same flow, model and body digest may; `attempt` has the digest.
"""

import asyncio
import itertools
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypedDict

import msgspec

from picker_fleet.admission.gate import Wait, refusal
from picker_fleet.admission.ledger import Entry, Ledger
from picker_fleet.domain.errors import (
    ClientGone,
    ExpiredTtl,
    NoEndpoints,
    RequestError,
    RequestIdTaken,
    ScriptFailed,
    ShuttingDown,
    StateFault,
    StateUnavailable,
    WritesRefused,
)
from picker_fleet.domain.request import Alive, Completion, Fault, InferenceRequest, Placement
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.scheduling.chooser import Choice, EndpointChooser
from picker_fleet.state import accounting_token
from picker_fleet.state.accounting_token import Keyring
from picker_fleet.state.connection import PauseDetector
from picker_fleet.state.schema import Refusal
from picker_fleet.state.store import (
    AnyVerdict,
    FaultReply,
    Notification,
    Placed,
    Queued,
    Refused,
    Renewal,
    SettleReply,
    Store,
    SuspicionReply,
    TombstoneReply,
    Verdict,
)
from picker_fleet.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)
# Redis decides when a queued request expires; this replica's own timer fires later, if no notification came.
_EXPIRY_SLACK_S = 0.05
# Answer an expired request within this time, even if Redis does not answer (G5).
_EXPIRY_ANSWER_S = 0.5
# Repeat an admission this many times while the replicas rebuild a lost shared state.
_REBUILD_TRIES = 20
_REBUILD_PAUSE_S = 0.1
_ID_CHECK_S = 0.005  # between two checks whether another request with the same id is admitted
_TAKEN_OVER = "taken over by a newer stream"
_SUSPECT_TRIES = 4
_SUSPECT_PAUSE_S = 1.0
METER_WINDOW_S = 10  # whole seconds before the current one
_MAX_UNACKNOWLEDGED = 10_000  # beyond, the replica asks for each placement, which needs no acknowledgement
_MAX_METERED_FLOWS = 5000  # in each second
_MAX_LISTED = 200  # flows in a report
_MAX_LISTED_BYTES = 16_000  # of the flow names in a report, approximately


class Waiter(msgspec.Struct, eq=False):
    """A request between its admission and its placement. `notification` resolves to the queue's verdict.

    `asking`: Redis has not answered the admission yet. `placing`: the request is granted, and Redis has not
    answered the placement yet. `error`: why the wait ends without a verdict.
    """

    request: InferenceRequest
    attempt: str
    arrived_s: float  # event-loop time
    notification: asyncio.Future[AnyVerdict]
    asking: bool = True
    placing: bool = False
    awaited: asyncio.Future[AnyVerdict] | None = None
    error: RequestError | None = None

    async def until(self, answer: asyncio.Future[AnyVerdict]) -> AnyVerdict:
        """Wait for `answer`. Raises `error` if the wait is ended, even if `answer` has just come."""
        if self.error is None:
            self.awaited = answer
            verdict = await answer
            self.awaited = None
            if self.error is None:
                return verdict
        raise self.error

    def end(self, error: RequestError) -> None:
        """End the wait with `error`, whatever it waits for."""
        self.error = error
        if self.awaited is not None and not self.awaited.done():
            self.awaited.set_exception(error)


class SharedGate:
    """Implements `admission.gate.Gate` by `Store`. Uses one event loop.

    `answer_tokens` is the default cost of an answer if the stock counts tokens, None if it counts requests.
    `retry_after_s` is the Retry-After of requests refused after a wait. The gate calls `on_unknown_pool` when
    the shared state has lost the pool, and `record_cost(priority, flow, cost)` for each placement. Each
    admission, and each placement without Redis, takes the next number of `attempts`, by default 1, 2, …
    """

    def __init__(
        self,
        store: Store,
        *,
        metrics: Metrics,
        endpoints: SnapshotCell,
        fallbacks: int,
        on_unknown_pool: Callable[[], object],
        chooser: EndpointChooser,
        answer_tokens: int | None = None,
        record_cost: Callable[[int, str, float], object] = lambda priority, flow, cost: None,
        keys: Keyring | None = None,
        pause_detector: PauseDetector | None = None,
        attempts: Iterator[int] | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self._store, self._metrics, self._endpoints = store, metrics, endpoints
        self._fallbacks, self._on_unknown_pool = fallbacks, on_unknown_pool
        self._counts_tokens, self.answer_tokens = answer_tokens is not None, answer_tokens or 0
        self._chooser = chooser
        self._record_cost = record_cost
        self._keys = keys or Keyring()
        self.pause_detector = pause_detector or PauseDetector()
        self.retry_after_s = 1
        self.fleet_queued = 0  # the fleet's queued requests, as of the last heartbeat or dispatch
        self._queued = 0  # this replica's queued requests, a subset of `_waiting`
        self._attempts = attempts or itertools.count(1)
        self._waiting: dict[str, Waiter] = {}
        self._any_waiting = asyncio.Event()
        # Request id -> attempt of a request that its grant placed, until Redis has the acknowledgement.
        self._unacknowledged: dict[str, str] = {}
        self._loop = asyncio.get_running_loop()
        self.ledger = Ledger(self._loop.time) if ledger is None else ledger

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def places_are_awaited(self) -> bool:
        """Whether any request of the fleet is queued, so that Redis must hear of each end soon. Other
        replicas' requests count as of the last heartbeat or dispatch."""
        return self._queued > 0 or self.fleet_queued > 0

    def running_by_model(self) -> Counter[str]:
        """The number of placed requests whose streams this replica owns, by the model in the request."""
        return Counter(accounting_token.model_of(entry.token) for entry in self.ledger.owned())

    async def any_waiting(self) -> None:
        if not self._waiting:
            self._any_waiting.clear()
        await self._any_waiting.wait()

    async def admit(
        self, request: InferenceRequest, *, stream_owned: bool, age_s: float = 0.0, wait: Wait | None = None
    ) -> Placement:
        """Implement `Gate.admit`; set `wait.queued` if Redis queues the request."""
        wait = wait or Wait(self._loop.time() - age_s)
        attempt, notification = self._next_attempt(request), self._loop.create_future()
        waiter = Waiter(request, attempt, wait.arrived_s, notification)
        while (displaced := self._waiting.get(request.id)) is not None and not request.repeats(
            displaced.request
        ):
            if not displaced.asking:
                raise RequestIdTaken()
            await asyncio.sleep(_ID_CHECK_S)  # Redis has yet to decide whether the other request owns the id
        if displaced is not None:
            # Envoy sent the request again over a new stream; the old stream has lost its client.
            _fail(displaced.notification, ClientGone(_TAKEN_OVER))
            displaced.notification.exception()  # mark as retrieved: the displaced task may have ended
        self._waiting[request.id] = waiter
        verdict: AnyVerdict | None = None
        try:
            verdict = await self._admit_known(waiter)
            if isinstance(verdict, Queued):
                wait.queued = True
                placed = await self._queue(waiter, verdict)
            else:
                placed = verdict
                if not wait.queued:
                    self._metrics.bypassed(request.model, request.target_model)
        except (asyncio.CancelledError, RequestError) as fault:
            # Undo the admission in case it reached Redis. If Redis refused the request, or the call for lack
            # of memory, it changed nothing.
            may_count = waiter.error is not None or isinstance(
                fault, asyncio.CancelledError | StateFault | RequestIdTaken
            )
            if may_count and (verdict is not None or not isinstance(fault, WritesRefused)):
                self._cancel(request.id, waiter.attempt, "cancelled")
            raise
        finally:
            if self._waiting.get(request.id) is waiter:
                del self._waiting[request.id]
        return self._placement(request, waiter.attempt, placed.endpoints, stream_owned)

    def _next_attempt(self, request: InferenceRequest) -> str:
        return f"{next(self._attempts)}.{request.digest}"

    def give_up(self) -> None:
        """End every wait with StateUnavailable; Redis receives the cancels when it answers again."""
        for waiter in self._waiting.values():
            if waiter.error is None:
                waiter.end(StateUnavailable("Redis is unavailable", retry_after_s=1))

    def shut_down(self) -> None:
        for waiter in self._waiting.values():
            waiter.end(ShuttingDown())

    def drop_expired(self) -> None:
        """End each wait for an answer of Redis that exceeds the request's TTL (G5). Waits in the queue have
        their own timer."""
        now_s = self._loop.time()
        for waiter in self._waiting.values():
            asking = waiter.asking or waiter.placing
            if asking and now_s > waiter.arrived_s + waiter.request.ttl_s and waiter.error is None:
                error = self._refusal(waiter.request, Verdict.EXPIRED)
                assert error is not None
                waiter.end(error)

    async def _queue(self, waiter: Waiter, verdict: Queued) -> Placed:
        """Count the request as queued until it is placed; raise every refusal."""
        request, waiter.asking = waiter.request, False
        self._metrics.waiting(request, 1)
        self._any_waiting.set()
        self._queued += 1
        try:
            return await self._wait(waiter, verdict)
        finally:
            self._queued -= 1
            self._metrics.waiting(request, -1)

    async def _wait(self, waiter: Waiter, verdict: Queued) -> Placed:
        """Wait until the request is placed; Redis may grant and queue it again any number of times."""
        while True:
            turn = await self._turn(waiter, verdict)
            if isinstance(turn, Placed):
                return turn
            answer = await self._take_up(waiter)
            if answer is None:
                if self._waiting.get(waiter.request.id) is not waiter:
                    raise ClientGone(_TAKEN_OVER)
                # The grant was lost with the shared state, or expired: admit the request again with its age.
                waiter.notification = self._loop.create_future()
                answer = await self._admit_known(waiter)
            if isinstance(answer, Placed):
                return answer
            verdict = answer

    async def _take_up(self, waiter: Waiter) -> Placed | Queued | None:
        """Place a granted request. Returns None if it has to be admitted again; raises every refusal."""
        request = waiter.request
        # Make the new future before the call: Redis may queue the request again and grant it before its task
        # runs.
        waiter.notification, waiter.placing = self._loop.create_future(), True
        try:
            choice = self._chooser.choose(request)
            answer = await waiter.until(self._store.place(request.id, waiter.attempt, choice.candidates))
        finally:
            waiter.placing = False
        if self._is_worth_another(request, choice, answer):
            return None
        return self._chosen(request, choice, answer)

    def _is_worth_another(self, request: InferenceRequest, choice: Choice, verdict: AnyVerdict) -> bool:
        """Whether Redis refused `request` for lack of an endpoint, and the script's own choice may find one:
        endpoints may have been replaced since this replica read them."""
        none_found = isinstance(verdict, Refused) and verdict.reason is Refusal.NO_ENDPOINTS
        return none_found and self._chooser.unscored(request).candidates != choice.candidates

    async def _admit_known(self, waiter: Waiter) -> Placed | Queued:
        """Admit a request; retry while the pool is lost. Raises refusals."""
        request = waiter.request
        # During a pause Envoy may have closed this stream and sent its request to another replica.
        await self.pause_detector.wait_for_backlog()
        for _ in range(_REBUILD_TRIES):
            age_s = self._loop.time() - waiter.arrived_s
            choice = self._chooser.choose(request)
            verdict = await waiter.until(
                self._store.admit(request, waiter.attempt, choice.candidates, age_s if age_s > 0.001 else 0.0)
            )
            if self._is_worth_another(request, choice, verdict):
                choice = self._chooser.unscored(request)
                age_s = self._loop.time() - waiter.arrived_s
                verdict = await waiter.until(
                    self._store.admit(request, waiter.attempt, choice.candidates, age_s)
                )
            if (answer := self._chosen(request, choice, verdict)) is not None:
                return answer
            self._on_unknown_pool()
            await asyncio.sleep(_REBUILD_PAUSE_S)
        raise StateUnavailable("the pool's state in Redis is being rebuilt", retry_after_s=1)

    def _chosen(
        self, request: InferenceRequest, choice: Choice, verdict: AnyVerdict
    ) -> Placed | Queued | None:
        """Report the outcome of `choice` to the chooser. Returns None if Redis does not know the pool or the
        request; raises every refusal."""
        if isinstance(verdict, Placed):
            self._chooser.placed(request, choice, verdict.endpoints, verdict.loads)
            return verdict
        if isinstance(verdict, Queued):
            return verdict
        error = self._refusal(request, verdict)
        if isinstance(error, NoEndpoints):
            self._chooser.refused(request, choice)
        if error is not None:
            raise error
        return None

    def _refusal(self, request: InferenceRequest, verdict: AnyVerdict) -> RequestError | None:
        """The error with which `verdict` ends `request`, counted; None if the request goes on."""
        error = refusal(verdict, request, self.retry_after_s)
        if error is None:
            return None
        if isinstance(verdict, Refused):
            self._metrics.push_error(request.model, error.code, request.target_model)
        elif isinstance(error, ExpiredTtl):
            self._metrics.expired(request.model, request.target_model)
        elif verdict is Verdict.PREEMPTED:
            self._metrics.preempted(request.band)
        elif verdict is Verdict.EVICTED:
            self._metrics.evicted(request.band)
        return error

    async def _turn(self, waiter: Waiter, queued: Queued) -> Placed | None:
        """Wait for the grant of a queued request. Returns Placed if the grant placed it; raises refusals."""
        late = TimeoutError()
        timer = self._loop.call_later(queued.left_s + _EXPIRY_SLACK_S, _fail, waiter.notification, late)
        verdict: AnyVerdict
        try:
            verdict = await waiter.until(waiter.notification)
        except TimeoutError as fault:
            if fault is not late:
                raise
            verdict = await self._expire(waiter)
        finally:
            timer.cancel()
        if (error := self._refusal(waiter.request, verdict)) is not None:
            raise error
        return verdict if isinstance(verdict, Placed) else None

    async def _expire(self, waiter: Waiter) -> Verdict:
        """Report an expiry to Redis. Returns GRANTED if Redis granted the request first, else EXPIRED."""
        # The store sends the expiry to Redis even if the answer is late.
        expiry = self._store.cancel(waiter.request.id, waiter.attempt, "expired")
        await asyncio.wait((expiry,), timeout=_EXPIRY_ANSWER_S)
        is_granted = expiry.done() and expiry.exception() is None and expiry.result() == "granted"
        return Verdict.GRANTED if is_granted else Verdict.EXPIRED

    async def route(
        self, subset: tuple[str, ...] | None, *, origin: str = "", session: str = ""
    ) -> Placement:
        allowed = [e for e in self._endpoints.current.endpoints if subset is None or e.address in subset]
        ready = [e.address for e in allowed if e.ready]
        first = [e.address for e in allowed if e.address == origin and not e.down]
        if session and not first:
            preferred = self._chooser.session_endpoint(session, subset)
            first = [address for address in ready if address == preferred]
        if not ready and not first:
            raise NoEndpoints("no endpoint is ready that may serve this request", retry_after_s=1)
        others = random.sample(ready, min(len(ready), 1 + self._fallbacks))
        return Placement(tuple(dict.fromkeys((*first, *others)))[: 1 + self._fallbacks], "")

    def dequeued(self, attempts: int, successes: int) -> None:
        """A call of this replica tried to dispatch queued requests of any replica."""
        self._metrics.dequeued(attempts, successes)
        if successes and not self.fleet_queued:
            self.fleet_queued = 1  # a lower bound; the next heartbeat brings the count

    def notified(self, notification: Notification) -> bool:
        """Redis granted, placed, expired, preempted or evicted a request. A repeated, late or unknown
        notification changes nothing.

        Returns True if the notification is the first for a waiting request. A grant for a request that
        neither waits nor runs here means that Redis lost the request's end: give the grant back.
        """
        request_id, verdict = notification.request_id, notification.verdict
        waiter = self._waiting.get(request_id)
        if isinstance(verdict, Placed):
            if (
                waiter is not None
                and waiter.attempt == notification.attempt
                and not self.pause_detector.resumed_recently  # else another replica may have the request
                and len(self._unacknowledged) < _MAX_UNACKNOWLEDGED
            ):
                return self._on_placed(waiter, verdict)
            verdict = Verdict.GRANTED  # ask `place.lua`, as for any grant
        if waiter is not None:
            return _notify(waiter.notification, verdict)
        entry = self.ledger.get(request_id)
        owned = entry is not None and entry.owned
        if verdict is Verdict.GRANTED and not owned and request_id not in self._unacknowledged:
            _ignore_loss(self._store.return_grant(request_id))
        return False

    def _on_placed(self, waiter: Waiter, verdict: Placed) -> bool:
        """Redis granted and placed a request in one call. Returns as `notified`."""
        if not _notify(waiter.notification, verdict):
            return False
        self._acknowledge(waiter.request.id, waiter.attempt)
        self._chosen(waiter.request, self._chooser.unscored(waiter.request), verdict)
        return True

    def _acknowledge(self, request_id: str, attempt: str) -> None:
        """Acknowledge a placement; until Redis has this call, it may repeat the notification."""

        def taken(answer: asyncio.Future[str]) -> None:
            if self._unacknowledged.get(request_id) == attempt:
                del self._unacknowledged[request_id]

        self._unacknowledged[request_id] = attempt
        answer = self._store.acknowledge(request_id, attempt)
        _ignore_loss(answer)
        answer.add_done_callback(taken)

    def is_placing(self, request_id: str) -> bool:
        """Whether Redis has yet to answer the placement of a granted request."""
        waiter = self._waiting.get(request_id)
        return waiter is not None and waiter.placing

    async def register_again(self) -> bool:
        """Register owned streams, then waiting requests, oldest first, with a shared state that lost them.

        Returns False if Redis did not take some of them; the caller may repeat the call.
        """
        await self.pause_detector.wait_for_backlog()  # as in `_admit_known`
        # Wait for the renewals: if Redis is slow, admissions sent with them would overtake them and find the
        # whole stock free.
        renewed = await asyncio.gather(*self.renew_owned_streams(), return_exceptions=True)
        if any(isinstance(answer, StateFault) and not isinstance(answer, ScriptFailed) for answer in renewed):
            return False
        waiters = sorted(self._waiting.values(), key=lambda waiter: waiter.arrived_s)
        # Read the clock once: a pause of the process between two readings would reverse the requests' order.
        now_s = self._loop.time()
        async with asyncio.TaskGroup() as tasks:
            registered = [tasks.create_task(self._register_waiter(waiter, now_s)) for waiter in waiters]
        return all(task.result() for task in registered)

    async def _register_waiter(self, waiter: Waiter, now_s: float) -> bool:
        if waiter.notification.done() or waiter.placing:
            return True
        age_s = now_s - waiter.arrived_s
        choice = self._chooser.choose(waiter.request)
        try:
            answer = await self._store.admit(waiter.request, waiter.attempt, choice.candidates, age_s)
            verdict = self._chosen(waiter.request, choice, answer)
        except (StateUnavailable, WritesRefused):
            return False
        except RequestError as error:
            if not waiter.notification.done():
                waiter.notification.set_exception(error)
                waiter.notification.exception()  # mark as retrieved: the waiting task may have ended
            return True
        if isinstance(verdict, Placed):
            _notify(waiter.notification, verdict)
        return verdict is not None

    # Placed requests

    def placed_elsewhere(
        self, request: InferenceRequest, endpoints: tuple[str, ...], *, stream_owned: bool
    ) -> Placement:
        """Make the placement of a request that this replica admitted without Redis."""
        attempt = self._next_attempt(request)
        return self._placement(request, attempt, endpoints, stream_owned, self._store.now_ms())

    def _placement(
        self,
        request: InferenceRequest,
        attempt: str,
        endpoints: tuple[str, ...],
        stream_owned: bool,
        alone_ms: int | None = None,
    ) -> Placement:
        self._record_cost(request.band.priority, request.flow, request.cost)
        written = accounting_token.write(request, endpoints[0], self.answer_tokens, alone_ms)
        token = accounting_token.signed(written, request.id, self._keys)
        self.ledger.place(request.id, attempt, token, endpoints[0], owned=stream_owned)
        return Placement(endpoints, token, attempt, self._chooser.session_token(endpoints[0]))

    async def confirm(self, request_id: str, placement: Placement, age_s: float) -> bool:
        # Send no accounting token: another request may have the stock of this one, so never restore it (G1).
        return await self._store.renew(request_id, placement.attempt, "", "") == "renewed"

    def withdraw(self, request_id: str, placement: Placement) -> None:
        self.ledger.withdraw(request_id)
        self._cancel(request_id, placement.attempt, "withdrawn")

    def settle(self, completion: Completion) -> Entry | None:
        """Implement `Gate.settle`. Returns the request's entry; None if the request was never placed."""
        token = self.token_of(completion)
        entry = self.ledger.finish(completion, token) if token else None
        self.note_end(completion, token)
        answered = partial(self._on_answered_end, completion, token, entry)
        self._tell_end(completion).add_done_callback(answered)
        return entry

    def token_of(self, completion: Completion) -> str:
        """The accounting token that came with an end; else of the stream, if it is owned; else ''."""
        entry = self.ledger.get(completion.id)
        return completion.accounting_token or (entry.token if entry is not None and entry.owned else "")

    def note_end(self, completion: Completion, token: str) -> None:
        """Learn from an end: times and failures of endpoints."""
        if token:  # otherwise the request was never placed
            self._chooser.ended(completion)
        if completion.failed:
            self._note_failed(completion.failed)
        if not (completion.fault or completion.passed_over):
            return
        if token and completion.fault:
            endpoint = completion.served or accounting_token.endpoint_of(token)
            self.fault(Fault(completion.id, endpoint, completion.fault, token, completion.hold_s))
        if token and completion.passed_over:
            self.fault(Fault(completion.id, completion.passed_over, "retried", token))

    def fault(self, fault: Fault) -> None:
        flow = accounting_token.flow_of(fault.accounting_token)
        self._store.report_fault(fault, flow).add_done_callback(partial(self._on_fault, fault))

    def _on_fault(self, fault: Fault, answer: asyncio.Future[FaultReply]) -> None:
        if answer.cancelled() or answer.exception() is not None:
            return
        reply = answer.result()
        if reply == "unknown":
            return
        self._metrics.endpoint_fault(fault.endpoint, fault.why)
        if reply == "ejected":
            _log.warning("endpoint %s is ejected: %s", fault.endpoint, fault.why)
            self._metrics.endpoint_ejected(fault.endpoint, fault.why)
        elif reply == "down":
            _log.warning("cannot connect to endpoint %s", fault.endpoint)

    def tell_end(self, completion: Completion) -> None:
        """Report an end to Redis; the store keeps the call until Redis takes it."""
        _ignore_loss(self._tell_end(completion))

    def _tell_end(self, completion: Completion) -> asyncio.Future[SettleReply]:
        actual = answer_tokens = None
        if self._counts_tokens:
            answer_tokens = completion.completion_tokens
            if answer_tokens is not None and completion.prompt_tokens is not None:
                actual = float(completion.prompt_tokens + answer_tokens)
        if actual is None and 400 <= completion.status < 500:
            actual = 1.0  # the engine refused the request, so it used none of the tokens it was charged
        return self._store.settle(
            completion.id,
            completion.outcome,
            actual,
            answer_tokens,
            answered=completion.answered,
            urgent=self.places_are_awaited,
        )

    def _note_failed(self, address: str) -> None:
        """Mark an endpoint as down: it gets no request until probes succeed."""
        known = next((e for e in self._endpoints.current.endpoints if e.address == address), None)
        if known is not None and not known.down:
            _log.warning("cannot connect to endpoint %s", address)
            _ignore_loss(self._store.mark_endpoint(address, "down", True))

    def _on_answered_end(
        self, completion: Completion, token: str, entry: Entry | None, answer: asyncio.Future[SettleReply]
    ) -> None:
        """Redis has answered the report of an end, or never will. Of two reports the first answer counts."""
        if entry is not None and not self.ledger.confirm(entry):
            return
        if answer.cancelled() or answer.exception() is not None:
            return
        reply = answer.result()
        if reply.kind == "settled":
            self._metrics.completed(completion, reply.model)
            if accounting_token.is_alone(token):  # a replica that saw the request alive must not restore it
                self._tombstone(completion)
        elif reply.kind == "unknown" and token:
            # The request was placed without Redis, or Redis lost its record, or its lease has expired.
            self._metrics.completed(completion, accounting_token.model_of(token))
            if completion.accounting_token:  # the replica that placed the request may not learn of the end
                self._tombstone(completion)

    def suspect(self, request_id: str, tries: int = _SUSPECT_TRIES) -> None:
        """Implement `Gate.suspect`. Report a waiting request again later: its owner may still place it before
        learning that the client has gone."""

        def told(answer: asyncio.Future[SuspicionReply]) -> None:
            lost = answer.cancelled() or answer.exception() is not None
            if not lost and answer.result() == "waiting" and tries > 1:
                self._loop.call_later(_SUSPECT_PAUSE_S, self.suspect, request_id, tries - 1)

        self._store.report_client_gone(request_id).add_done_callback(told)

    def _tombstone(self, completion: Completion) -> None:
        def written(answer: asyncio.Future[TombstoneReply]) -> None:
            lost = answer.cancelled() or answer.exception() is not None
            if not lost and answer.result() == "back":
                self.tell_end(completion)  # another replica restored the request: settle it

        self._store.tombstone(completion.id).add_done_callback(written)

    def renew(self, alive: Alive) -> None:
        # An entry that this process read late does not show that the request still runs.
        if not self.pause_detector.resumed_recently:
            _ignore_loss(self._store.renew(alive.id, None, alive.served or "", alive.accounting_token))

    def renew_owned_streams(self) -> list[asyncio.Future[Renewal]]:
        """Renew the lease of every owned stream. The caller need not await the answers."""
        answers = [
            self._store.renew(entry.id, entry.attempt, entry.endpoint, entry.token)
            for entry in self.ledger.owned()
        ]
        for answer in answers:
            _ignore_loss(answer)
        return answers

    def _cancel(self, request_id: str, attempt: str, why: str) -> None:
        _ignore_loss(self._store.cancel(request_id, attempt, why))


class ServiceReport(TypedDict):
    """Costs placed in the last ten whole seconds, as the replica info carries them (docs/redis-schema.md)."""

    priorities: list[tuple[int, float]]  # priority and cost of each band
    flows: list[tuple[int, str, float]]  # priority, name and cost of the busiest flows
    cut: bool  # whether `flows` omits some flows


class ServiceMeter:
    """Sums the costs of placed requests by band and flow, in bounded memory.

    After 5000 flows in one second, a further flow counts for its band only.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._seconds: deque[tuple[int, dict[tuple[int, str], float], dict[int, float]]] = deque()
        self._reported: tuple[int, ServiceReport] | None = None  # the last report's second, and the report

    def record(self, priority: int, flow: str, cost: float) -> None:
        second = int(self._clock_s())
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, {}, {}))
            self._forget(second)
        _, flows, bands = self._seconds[-1]
        bands[priority] = bands.get(priority, 0.0) + cost
        key = priority, flow
        if key in flows or len(flows) < _MAX_METERED_FLOWS:
            flows[key] = flows.get(key, 0.0) + cost

    def report(self) -> ServiceReport:
        """The report, computed at most once a second. Callers must not change it."""
        second = int(self._clock_s())
        if self._reported is None or self._reported[0] != second:
            self._reported = second, self._add_up(second)
        return self._reported[1]

    def _add_up(self, second: int) -> ServiceReport:
        self._forget(second)
        bands: Counter[int] = Counter()
        flows: Counter[tuple[int, str]] = Counter()
        for begun, costs, totals in self._seconds:
            if begun != second:
                flows.update(costs)
                bands.update(totals)
        listed: list[tuple[int, str, float]] = []
        room = _MAX_LISTED_BYTES
        for (priority, flow), cost in flows.most_common(_MAX_LISTED):
            room -= len(flow) + 16
            if room < 0:
                break
            listed.append((priority, flow, round(cost, 3)))
        of_bands: list[tuple[int, float]] = [
            (priority, round(cost, 3)) for priority, cost in sorted(bands.items())
        ]
        return {"priorities": of_bands, "flows": listed, "cut": len(listed) < len(flows)}

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] < second - METER_WINDOW_S:
            self._seconds.popleft()


def _notify(notification: asyncio.Future[AnyVerdict], verdict: AnyVerdict) -> bool:
    """Resolve `notification` to `verdict`. Returns False if it was resolved before."""
    if notification.done():
        return False
    notification.set_result(verdict)
    return True


def _fail(notification: asyncio.Future[AnyVerdict], error: Exception) -> None:
    if not notification.done():
        notification.set_exception(error)


def _ignore_loss(answer: asyncio.Future[Any]) -> None:
    """Ignore the failure of a call that a lease or a repetition makes up for."""
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())
