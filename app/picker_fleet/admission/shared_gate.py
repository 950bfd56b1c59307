"""The gate on shared state: one queue and one stock for all replicas.

A request is admitted by `admit`. If it is queued, it waits for its grant, which comes in the reply of any
call, by a wake-up, or with a heartbeat. If any endpoint will do, the script that grants it places it, too,
and the replica acknowledges that. Else it is placed then, which may queue it again. Until its end this
replica renews its lease if it owns the stream. `attempt` numbers the streams of a request, so that a late
call of a dead stream never affects the stream that has taken the request over. Only a stream that brings the
same flow, model and body may do that; the digest of the body stands behind the number.
"""

import asyncio
import itertools
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypedDict, TypeVar

import msgspec

from picker_fleet.admission.gate import Wait, refusal
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.errors import (
    ClientGone,
    ExpiredTtl,
    NoEndpoints,
    RequestError,
    RequestIdTaken,
    ScriptFailed,
    StateFault,
    StateUnavailable,
    WritesRefused,
)
from picker_fleet.request import Alive, Completion, Fault, InferenceRequest, Placement
from picker_fleet.scheduling.chooser import Choice, EndpointChooser, LeastLoadedChooser
from picker_fleet.state import accounting_token
from picker_fleet.state.accounting_token import Keyring
from picker_fleet.state.connection import PauseDetector
from picker_fleet.state.schema import NOTIFICATIONS
from picker_fleet.state.store import Decision, Store
from picker_fleet.telemetry.metrics import Metrics

_About = TypeVar("_About")

_log = logging.getLogger(__name__)
# This replica's timer fires after the queue's, which decides; it matters only where no notification came.
_EXPIRY_SLACK_S = 0.05
# A request whose time is up is answered within this, whether Redis answers or not (G5).
_EXPIRY_ANSWER_S = 0.5
# How often an admission is repeated while a lost shared state is rebuilt.
_REBUILD_TRIES = 20
_REBUILD_PAUSE_S = 0.1
_NO_ENDPOINTS = "no-endpoints"  # why the script refused
_TAKEN_OVER = "taken over by a newer stream"
_SUSPECT_TRIES = 4
_SUSPECT_PAUSE_S = 1.0
_MAX_RECENT = 50_000  # the oldest are dropped
_SPARE = 5_000  # that may be remembered beyond, so that the oldest are looked for seldom
_FORGET_S = 1.0  # between two searches for what is old
METER_WINDOW_S = 10  # whole seconds, without the present one
_MAX_UNACKNOWLEDGED = 10_000  # a grant beyond asks for its place, which needs no acknowledgement
_MAX_METERED_FLOWS = 5000  # a second
_MAX_LISTED = 200
_MAX_LISTED_BYTES = 16_000  # of names, about


class Waiter(msgspec.Struct, eq=False):
    """A request between its admission and its placement. `notification` is what happens to it in the queue.

    `asking`: its admission is not answered yet. `placing`: it is granted, and its placement is not answered
    yet. `given_up`: its task was cancelled because Redis is lost or, where it is also `expired`, has not
    answered in the request's time.
    """

    request: InferenceRequest
    attempt: str
    arrived_s: float  # event-loop time
    notification: asyncio.Future[Decision]
    task: asyncio.Task[object]
    asking: bool = True
    placing: bool = False
    given_up: bool = False
    expired: bool = False


class _OwnedStream(NamedTuple):
    """A placed request whose stream this replica owns; no other can renew its lease."""

    attempt: str
    accounting_token: str
    served: str


class SharedGate:
    """`admission.gate.Gate` over `Store`. One event loop.

    `answer_tokens` is the default cost of an answer where the stock counts tokens, None where it counts
    requests. `retry_after_s` goes to clients that are refused after they have waited. `on_unknown_pool` is
    called when the shared state has lost the pool; `record_cost(priority, flow, cost)` for each placement.
    Each request and each placement takes one of `attempts`, by default 1, 2, …
    """

    def __init__(
        self,
        store: Store,
        *,
        metrics: Metrics,
        endpoints: SnapshotCell,
        fallbacks: int,
        on_unknown_pool: Callable[[], object],
        answer_tokens: int | None = None,
        chooser: EndpointChooser | None = None,
        record_cost: Callable[[int, str, float], object] = lambda priority, flow, cost: None,
        keys: Keyring | None = None,
        pause_detector: PauseDetector | None = None,
        attempts: Iterator[int] | None = None,
    ) -> None:
        self._store, self._metrics, self._endpoints = store, metrics, endpoints
        self._fallbacks, self._on_unknown_pool = fallbacks, on_unknown_pool
        self._counts_tokens, self.answer_tokens = answer_tokens is not None, answer_tokens or 0
        self._chooser = chooser or LeastLoadedChooser(endpoints)
        self._record_cost = record_cost
        self._keys = keys or Keyring()
        self.pause_detector = pause_detector or PauseDetector()
        self.retry_after_s = 1
        self.fleet_queued = 0  # requests that wait in the fleet, as of the last heartbeat or dispatch
        self._queued = 0  # those of this replica: a part of `_waiting`
        self._attempts = attempts or itertools.count(1)
        self._waiting: dict[str, Waiter] = {}
        self._any_waiting = asyncio.Event()
        self._owned_streams: dict[str, _OwnedStream] = {}
        # By id, with accounting tokens: ends that Redis has not answered.
        self.unconfirmed_ends: dict[str, tuple[Completion, str]] = {}
        # Attempts of requests that were placed when they were granted, until Redis has the acknowledgement.
        self._unacknowledged: dict[str, str] = {}
        self._loop = asyncio.get_running_loop()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def places_are_awaited(self) -> bool:
        """Whether requests wait, so that an end is urgent; of other replicas as of the last heartbeat or
        dispatch."""
        return self._queued > 0 or self.fleet_queued > 0

    def running_by_model(self) -> Counter[str]:
        """The placed requests whose streams this replica owns, by the model that was asked for."""
        return Counter(
            accounting_token.model_of(each.accounting_token) for each in self._owned_streams.values()
        )

    async def any_waiting(self) -> None:
        if not self._waiting:
            self._any_waiting.clear()
        await self._any_waiting.wait()

    async def admit(
        self, request: InferenceRequest, *, stream_owned: bool, age_s: float = 0.0, wait: Wait | None = None
    ) -> Placement:
        """As `Gate.admit`; `wait.queued` is set if the request is queued."""
        task = asyncio.current_task(self._loop)
        assert task is not None
        wait = wait or Wait(self._loop.time() - age_s)
        attempt, notification = self._next_attempt(request), self._loop.create_future()
        waiter = Waiter(request, attempt, wait.arrived_s, notification, task)
        displaced = self._waiting.get(request.id)
        if displaced is not None:
            # Envoy has sent the request again over a new stream; the old one has no client any more.
            why: RequestError = ClientGone(_TAKEN_OVER)
            if not request.repeats(displaced.request):
                why = RequestIdTaken()
                if not displaced.asking:
                    raise why  # else Redis says whose id it is
            if not displaced.notification.done():
                displaced.notification.set_exception(why)
                displaced.notification.exception()  # its task may not wait for it any more
        self._waiting[request.id] = waiter
        verdict: Decision | None = None
        try:
            verdict = await self._admit_known(waiter)
            if verdict.status == "placed":
                if not wait.queued:
                    self._metrics.bypassed(request.model, request.target_model)
            else:
                wait.queued = True
                verdict = await self._queue(waiter, verdict)
        except (asyncio.CancelledError, StateFault, RequestIdTaken) as fault:
            # Undo the admission in case it reached Redis. One that Redis refused for lack of memory has done
            # nothing.
            if verdict is not None or not isinstance(fault, WritesRefused):
                self._cancel(request.id, waiter.attempt, "cancelled")
            # Only if nothing else has cancelled the task as well: the client left, or the replica shuts down.
            if waiter.given_up and task.uncancel() == 0 and isinstance(fault, asyncio.CancelledError):
                if waiter.expired:
                    self._accepted(request, Decision("expired", ""))
                raise StateUnavailable("the shared state is away", retry_after_s=1) from None
            raise
        finally:
            if self._waiting.get(request.id) is waiter:
                del self._waiting[request.id]
        return self._placement(request, waiter.attempt, tuple(verdict.detail.split(",")), stream_owned)

    def _next_attempt(self, request: InferenceRequest) -> str:
        return f"{next(self._attempts)}.{request.digest}"

    def give_up(self) -> None:
        """End every wait with StateUnavailable; admissions are cancelled once Redis answers."""
        for waiter in self._waiting.values():
            if not waiter.given_up:
                waiter.given_up = True
                waiter.task.cancel()

    def drop_expired(self) -> None:
        """End each wait for an answer of Redis that outlasts its request's time (G5); a queued request has a
        timer."""
        now_s = self._loop.time()
        for waiter in self._waiting.values():
            asking = waiter.asking or waiter.placing
            if asking and now_s > waiter.arrived_s + waiter.request.ttl_s and not waiter.given_up:
                waiter.given_up = waiter.expired = True
                waiter.task.cancel()

    async def _queue(self, waiter: Waiter, verdict: Decision) -> Decision:
        """`placed`, in the end; every refusal is raised."""
        request, waiter.asking = waiter.request, False
        self._metrics.waiting(request, 1)
        self._any_waiting.set()
        self._queued += 1
        try:
            return await self._wait(waiter, verdict)
        finally:
            self._queued -= 1
            self._metrics.waiting(request, -1)

    async def _wait(self, waiter: Waiter, verdict: Decision) -> Decision:
        """`placed`, in the end: a queued request may be granted and queued again any number of times."""
        request = waiter.request
        while True:
            verdict = await self._turn(waiter, verdict)
            if verdict.status == "granted":
                verdict = await self._take_up(waiter)
            if verdict.status == "placed":
                return verdict
            if verdict.status == "gone":
                if self._waiting.get(request.id) is not waiter:
                    raise ClientGone(_TAKEN_OVER)
                # The grant was lost with the shared state, or expired: admit it again with its age.
                waiter.notification = self._loop.create_future()
                verdict = await self._admit_known(waiter)
                if verdict.status == "placed":
                    return verdict

    async def _take_up(self, waiter: Waiter) -> Decision:
        """Place a granted request: `placed`, `queued` or `gone`; every refusal is raised."""
        request = waiter.request
        # Renewed before the call: a request that is queued again may be granted before its task runs.
        waiter.notification, waiter.placing = self._loop.create_future(), True
        try:
            choice = self._chooser.choose(request)
            answer = await self._store.place(request.id, waiter.attempt, choice.candidates)
        finally:
            waiter.placing = False
        if self._is_worth_another(request, choice, answer):
            return Decision("gone", "")
        return self._chosen(request, choice, answer)

    def _is_worth_another(self, request: InferenceRequest, choice: Choice, verdict: Decision) -> bool:
        """Whether `request` was refused for want of an endpoint, and the script's own choice may find one:
        endpoints may have been replaced since this replica read them."""
        none_found = verdict.status == "refused" and verdict.detail.startswith(_NO_ENDPOINTS)
        return none_found and self._chooser.unscored(request).candidates != choice.candidates

    async def _admit_known(self, waiter: Waiter) -> Decision:
        """`placed` or `queued`; every refusal is raised. Waits until a lost pool is rebuilt."""
        request = waiter.request
        if self.pause_detector.resumed_recently:
            # Envoy may have given this stream up during the pause, and another replica may have its request.
            await self.pause_detector.wait_for_backlog()
        for _ in range(_REBUILD_TRIES):
            age_s = self._loop.time() - waiter.arrived_s
            choice = self._chooser.choose(request)
            verdict = await self._store.admit(
                request, waiter.attempt, choice.candidates, age_s if age_s > 0.001 else 0.0
            )
            if self._is_worth_another(request, choice, verdict):
                choice = self._chooser.unscored(request)
                verdict = await self._store.admit(
                    request, waiter.attempt, choice.candidates, self._loop.time() - waiter.arrived_s
                )
            if verdict.status != "unknown-pool":
                return self._chosen(request, choice, verdict)
            self._on_unknown_pool()
            await asyncio.sleep(_REBUILD_PAUSE_S)
        raise StateUnavailable("the shared state is being rebuilt", retry_after_s=1)

    def _chosen(self, request: InferenceRequest, choice: Choice, verdict: Decision) -> Decision:
        """Report to the chooser what became of `choice`. Returns `verdict`; every refusal is raised."""
        if verdict.status == "placed":
            self._chooser.placed(request, choice, tuple(verdict.detail.split(",")), verdict.loads)
            return verdict
        try:
            return self._accepted(request, verdict)
        except NoEndpoints:
            self._chooser.refused(request, choice)
            raise

    def _accepted(self, request: InferenceRequest, verdict: Decision) -> Decision:
        error = refusal(verdict, request, self.retry_after_s)
        if error is None:
            return verdict
        if verdict.status == "refused":
            self._metrics.push_error(request.model, error.code, request.target_model)
        elif isinstance(error, ExpiredTtl):
            self._metrics.expired(request.model, request.target_model)
        elif verdict.status == "preempted":
            self._metrics.preempted(request.band)
        elif verdict.status == "evicted":
            self._metrics.evicted(request.band)
        raise error

    async def _turn(self, waiter: Waiter, queued: Decision) -> Decision:
        """Wait for the grant of a queued request: `granted`, or `placed` if it was placed meanwhile."""
        request = waiter.request
        left_s = int(float(queued.detail)) / 1000 + _EXPIRY_SLACK_S if queued.detail else _EXPIRY_SLACK_S
        timer = self._loop.call_later(left_s, _notify, waiter.notification, Decision("late", ""))
        try:
            verdict = await waiter.notification
        finally:
            timer.cancel()
        if verdict.status == "late":
            verdict = Decision(await self._expire(waiter), "")
        return self._accepted(request, verdict)

    async def _expire(self, waiter: Waiter) -> str:
        """`granted` if the grant came in time after all, else `expired`."""
        try:
            async with asyncio.timeout(_EXPIRY_ANSWER_S):
                # Shielded: the call must be sent even if nobody waits for its answer any more.
                expiry = self._store.cancel(waiter.request.id, waiter.attempt, "expired")
                answer = await asyncio.shield(expiry)
        except TimeoutError:
            return "expired"  # Redis is told of the expiry when it answers again
        except ScriptFailed:
            return "expired"  # its time is up all the same
        return "granted" if answer == "granted" else "expired"

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

    def on_dequeued(self, attempts: int, successes: int) -> None:
        """A call of this replica has tried to dispatch requests that wait, of any replica."""
        self._metrics.dequeued(attempts, successes)
        if successes and not self.fleet_queued:
            self.fleet_queued = 1  # at least; the next heartbeat counts them

    def on_notification(self, what: str, about: str) -> bool:
        """A request was granted, placed, expired, preempted or evicted; `about` is its id or, if it was
        placed, `ATTEMPT ENDPOINTS LOADS ID`. A repeated, late or unknown notification changes nothing.

        True if a request waits that was not notified before. A grant of a request that neither waits nor runs
        here comes from a shared state that has lost its end, and is returned.
        """
        if what == "placed":
            parts = about.split(" ", 3)
            return len(parts) == 4 and self._on_placed(*parts)
        waiter = self._waiting.get(about)
        if waiter is not None:
            return what in NOTIFICATIONS and _notify(waiter.notification, Decision(what, ""))
        if what == "granted" and about not in self._owned_streams and about not in self._unacknowledged:
            _ignore_loss(self._store.return_grant(about))
        return False

    def _on_placed(self, attempt: str, endpoints: str, loads: str, request_id: str) -> bool:
        """A request was granted and placed at once. As `on_notification`."""
        waiter = self._waiting.get(request_id)
        if (
            waiter is None
            or waiter.attempt != attempt
            or self.pause_detector.resumed_recently  # another replica may have it by now
            or len(self._unacknowledged) >= _MAX_UNACKNOWLEDGED
        ):
            return self.on_notification("granted", request_id)  # the script decides, as about any grant
        verdict = Decision("placed", endpoints, loads)
        if not _notify(waiter.notification, verdict):
            return False
        self._acknowledge(request_id, waiter.attempt)
        self._chosen(waiter.request, self._chooser.unscored(waiter.request), verdict)
        return True

    def _acknowledge(self, request_id: str, attempt: str) -> None:
        """Tell Redis that this replica knows where a request is. Until then it may be notified again."""

        def taken(answer: asyncio.Future[str]) -> None:
            if self._unacknowledged.get(request_id) == attempt:
                del self._unacknowledged[request_id]

        self._unacknowledged[request_id] = attempt
        answer = self._store.acknowledge(request_id, attempt)
        _ignore_loss(answer)
        answer.add_done_callback(taken)

    def is_placing(self, request_id: str) -> bool:
        """Whether the placement of a granted request is not answered yet."""
        waiter = self._waiting.get(request_id)
        return waiter is not None and waiter.placing

    async def register_again(self) -> bool:
        """Register owned streams and then waiting requests, oldest first, with a shared state that has lost
        them.

        False if some could not be registered; the call may be repeated.
        """
        if self.pause_detector.resumed_recently:
            await self.pause_detector.wait_for_backlog()  # as in `_admit_known`
        # Wait for the answers: admissions overtake renewals where Redis is slow, and would find everything
        # free.
        renewed = await asyncio.gather(*self.renew_owned_streams(), return_exceptions=True)
        if any(isinstance(answer, StateFault) and not isinstance(answer, ScriptFailed) for answer in renewed):
            return False
        waiters = sorted(self._waiting.values(), key=lambda waiter: waiter.arrived_s)
        # One reading of the clock: a pause of the process between two of them would reverse their order.
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
                waiter.notification.exception()  # its task may not wait for it any more
            return True
        if verdict.status == "placed":
            _notify(waiter.notification, verdict)
        return verdict.status != "unknown-pool"

    # Placed requests

    def placed_elsewhere(
        self, request: InferenceRequest, endpoints: tuple[str, ...], *, stream_owned: bool
    ) -> Placement:
        """The placement of a request that was admitted without Redis."""
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
        if stream_owned:
            self._owned_streams[request.id] = _OwnedStream(attempt, token, endpoints[0])
        return Placement(endpoints, token, attempt, self._chooser.session_token(endpoints[0]))

    async def confirm(self, request_id: str, placement: Placement, age_s: float) -> bool:
        # Without its token, so that nothing is restored: another request may have got a lost place (G1).
        return await self._store.renew(request_id, placement.attempt, "", "") == "renewed"

    def withdraw(self, request_id: str, placement: Placement) -> None:
        self._owned_streams.pop(request_id, None)
        self._cancel(request_id, placement.attempt, "withdrawn")

    def settle(self, completion: Completion) -> str:
        """As `Gate.settle`. Returns the request's accounting token; '' if none is known."""
        token = completion.accounting_token or self.accounting_token_of(completion.id)
        self.ended(completion)
        self.unconfirmed_ends[completion.id] = completion, token
        self._tell_end(completion).add_done_callback(partial(self._on_answered_end, completion.id))
        return token

    def accounting_token_of(self, request_id: str) -> str:
        """The accounting token of a request whose stream this replica owns; '' if it owns none."""
        owned = self._owned_streams.get(request_id)
        return owned.accounting_token if owned is not None else ""

    def ended(self, completion: Completion) -> None:
        owned = self._owned_streams.pop(completion.id, None)
        if owned is not None or completion.accounting_token:  # else it was never placed
            self._chooser.ended(completion)
        if completion.failed:
            self._note_failed(completion.failed)
        if not (completion.fault or completion.passed_over):
            return
        token = completion.accounting_token or (owned.accounting_token if owned is not None else "")
        if token and completion.fault:
            endpoint = completion.served or accounting_token.endpoint_of(token)
            self.fault(Fault(completion.id, endpoint, completion.fault, token, completion.hold_s))
        if token and completion.passed_over:
            self.fault(Fault(completion.id, completion.passed_over, "retried", token))

    def fault(self, fault: Fault) -> None:
        flow = accounting_token.flow_of(fault.accounting_token)
        self._store.report_fault(fault, flow).add_done_callback(partial(self._on_fault, fault))

    def _on_fault(self, fault: Fault, answer: asyncio.Future[str]) -> None:
        if answer.cancelled() or answer.exception() is not None or (what := answer.result()) == "unknown":
            return
        self._metrics.endpoint_fault(fault.endpoint, fault.why)
        if what == "ejected":
            _log.warning("endpoint %s is ejected: %s", fault.endpoint, fault.why)
            self._metrics.endpoint_ejected(fault.endpoint, fault.why)
        elif what == "down":
            _log.warning("endpoint %s cannot be connected to", fault.endpoint)

    def tell_end(self, completion: Completion) -> None:
        """Tell Redis of an end; the call is kept until Redis takes it."""
        _ignore_loss(self._tell_end(completion))

    def _tell_end(self, completion: Completion) -> asyncio.Future[str]:
        actual = answer_tokens = None
        if self._counts_tokens:
            answer_tokens = completion.completion_tokens
            if answer_tokens is not None and completion.prompt_tokens is not None:
                actual = float(completion.prompt_tokens + answer_tokens)
        if actual is None and 400 <= completion.status < 500:
            actual = 1.0  # refused by its engine, which ran nothing of what it claimed
        return self._store.settle(
            completion.id,
            completion.outcome,
            actual,
            answer_tokens,
            answered=completion.answered,
            urgent=self.places_are_awaited,
        )

    def _note_failed(self, address: str) -> None:
        """No request goes to the endpoint until a probe succeeds."""
        known = next((e for e in self._endpoints.current.endpoints if e.address == address), None)
        if known is not None and not known.down:
            _log.warning("endpoint %s cannot be connected to", address)
            _ignore_loss(self._store.mark_endpoint(address, "down", True))

    def _on_answered_end(self, request_id: str, answer: asyncio.Future[str]) -> None:
        """Redis has answered an end, or never will. If it was reported twice, the first answer counts."""
        end = self.unconfirmed_ends.pop(request_id, None)
        if end is None or answer.cancelled() or answer.exception() is not None:
            return
        completion, token = end
        what, _, model = answer.result().partition(" ")
        if what == "settled":
            self._metrics.completed(completion, model)
            if accounting_token.is_alone(token):  # a replica that saw it alive must not restore it
                self._tombstone(completion)
        elif what == "unknown" and token:
            # Placed without Redis, or lost with it, or its lease has expired.
            self._metrics.completed(completion, accounting_token.model_of(token))
            if completion.accounting_token:  # the replica that placed it may not learn of the end
                self._tombstone(completion)

    def suspect(self, request_id: str, tries: int = _SUSPECT_TRIES) -> None:
        """As `Gate.suspect`. While the request waits, its owner may place it before it learns that its client
        has gone: then its answer reaches nobody."""

        def told(answer: asyncio.Future[str]) -> None:
            lost = answer.cancelled() or answer.exception() is not None
            if not lost and answer.result() == "waiting" and tries > 1:
                self._loop.call_later(_SUSPECT_PAUSE_S, self.suspect, request_id, tries - 1)

        self._store.report_client_gone(request_id).add_done_callback(told)

    def _tombstone(self, completion: Completion) -> None:
        def written(answer: asyncio.Future[str]) -> None:
            if not answer.cancelled() and answer.exception() is None and answer.result() == "back":
                self.tell_end(completion)  # restored meanwhile

        self._store.tombstone(completion.id).add_done_callback(written)

    def renew(self, alive: Alive) -> None:
        # An entry written while this process was paused must not restore a request whose end is lost.
        token = "" if self.pause_detector.resumed_recently else alive.accounting_token
        _ignore_loss(self._store.renew(alive.id, None, alive.served or "", token))

    def owned_costs(self) -> dict[str, float]:
        """What each request takes of the stock whose stream this replica owns, by id."""
        return {
            name: accounting_token.cost_of(owned.accounting_token)
            for name, owned in self._owned_streams.items()
        }

    def renew_owned_streams(self) -> list[asyncio.Future[str]]:
        """Renew the lease of every owned stream. The answers need not be awaited."""
        answers = [
            self._store.renew(request_id, owned.attempt, owned.served, owned.accounting_token)
            for request_id, owned in self._owned_streams.items()
        ]
        for answer in answers:
            _ignore_loss(answer)
        return answers

    def _cancel(self, request_id: str, attempt: str, why: str) -> None:
        _ignore_loss(self._store.cancel(request_id, attempt, why))


class Recent(dict[str, tuple[float, _About]]):
    """What is known of requests for `keep_s` seconds, by id, with the time when it was noted, oldest first.
    Of more than 50 000 the oldest may be dropped sooner."""

    def __init__(self, keep_s: float, clock: Callable[[], float]) -> None:
        super().__init__()
        self._keep_s, self._clock = keep_s, clock
        self._forget_s = 0.0  # when old ones are dropped next

    def note(self, request_id: str, about: _About) -> float:
        """Returns the time, in seconds of the clock."""
        now_s = self._clock()
        self.pop(request_id, None)  # the newest comes last
        self[request_id] = now_s, about
        if now_s >= self._forget_s or len(self) > _MAX_RECENT + _SPARE:
            self._forget(now_s)
        return now_s

    def of_late(self) -> Iterator[tuple[str, _About]]:
        """What was noted within `keep_s`, by id."""
        since_s = self._clock() - self._keep_s
        return ((name, about) for name, (noted_s, about) in self.items() if noted_s >= since_s)

    def _forget(self, now_s: float) -> None:
        beyond, since_s = len(self) - _MAX_RECENT, now_s - self._keep_s
        old: list[str] = []
        for request_id, (noted_s, _) in self.items():
            if noted_s >= since_s and len(old) >= beyond:
                break
            old.append(request_id)
        for request_id in old:
            del self[request_id]
        self._forget_s = now_s + _FORGET_S


class ServiceReport(TypedDict):
    """The service of the last ten whole seconds, as the replica info carries it (docs/redis-schema.md)."""

    priorities: list[tuple[int, float]]  # priority and cost of each band
    flows: list[tuple[int, str, float]]  # priority, name and cost of the busiest flows
    cut: bool  # there are more flows


class ServiceMeter:
    """Costs of placed requests by band and flow. Recording one is a dictionary entry; memory is bounded.

    A flow beyond 5000 in one second counts for its band only.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._seconds: deque[tuple[int, dict[tuple[int, str], float], dict[int, float]]] = deque()
        self._reported: tuple[int, ServiceReport] | None = None  # in which second, and what

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
        """Added up once a second, however often it is asked for. Not to be changed."""
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


def _notify(notification: asyncio.Future[Decision], verdict: Decision) -> bool:
    """Deliver a notification; False if one was delivered before."""
    if notification.done():
        return False
    notification.set_result(verdict)
    return True


def _ignore_loss(answer: asyncio.Future[str]) -> None:
    """Ignore a failed call that a lease or a repetition makes good."""
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())
