"""Admission through Redis: all replicas share one queue and one stock.

While Redis is in use, admission.py calls `admit`, which places or queues a request. A queued request waits
for its grant, which arrives in the reply to any call, by a wake-up, or with a heartbeat. If any endpoint will
do, the granting script also places the request, and the replica acknowledges the placement. For other
requests the replica asks for a placement after the grant, and the script may queue the request again. A
replica that owns a stream renews its request's lease until the request ends. The field `attempt` numbers the
streams of a request, so that a late call of a dead stream never affects the stream that took the request
over. Only a stream with the same flow, model and body digest (in `attempt`) may take a request over.
"""

import asyncio
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from picker_fleet.admission.ledger import Ledger
from picker_fleet.admission.reports import ignore_loss
from picker_fleet.admission.waits import Wait, refusal
from picker_fleet.domain.bands import Criticality
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
    TooSlow,
    WritesRefused,
)
from picker_fleet.domain.request import InferenceRequest
from picker_fleet.domain.tenants import Tree
from picker_fleet.scheduling.chooser import Choice, EndpointChooser
from picker_fleet.scheduling.forecasts import MetLoads
from picker_fleet.state.connection import PauseDetector
from picker_fleet.state.replies import AnyVerdict, Notification, Placed, Queued, Refused, Renewal, Verdict
from picker_fleet.state.schema import Refusal
from picker_fleet.state.store import Store
from picker_fleet.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from picker_fleet.telemetry.tracing import Traces

_DEMOTED = "demoted=1"  # the quota text of a demoted request ends with this (lua/lib/quotas.lua)
# Redis expires queued requests. If its notification does not arrive, this replica's own timer fires this many
# seconds after the expiry.
_EXPIRY_SLACK_S = 0.05
# Answer an expired request within this many seconds, even if Redis does not answer (G5).
_EXPIRY_ANSWER_S = 0.5
# Try an admission this many times while the replicas rebuild a lost shared state.
_REBUILD_TRIES = 20
_REBUILD_PAUSE_S = 0.1
_ID_CHECK_S = 0.005  # seconds between checks whether another request with the same id is admitted
_TAKEN_OVER = "taken over by a newer stream"
_LONGEST_RETRY_S = 60
_CHUNK = 512  # maximum registrations in flight at a time; the store sends 16 registrations in a call
# Send an age of fewer seconds as 0. Ages are whole ms, and another process may have had the CPU core since
# the request arrived, so a tiny age could let the request overtake earlier requests in its message.
_YOUNG_S = 0.01


class Waiter(msgspec.Struct, eq=False):
    """A request between its admission and its placement. The future `notification` resolves to the queue's
    verdict.

    `asking`: Redis has not answered the admission yet. `placing`: the request is granted, and Redis has not
    answered the placement yet. `unacknowledged`: the grant placed the request, and Redis may lack the
    acknowledgement. `error`: the error that ended the wait instead of a verdict. `placed`: the placement,
    without endpoints until it is made. `loads`: the endpoints' loads when the placement was made.
    """

    request: InferenceRequest
    attempt: str
    arrived_s: float
    notification: asyncio.Future[AnyVerdict]
    asking: bool = True
    placing: bool = False
    unacknowledged: bool = False
    placed: Placed = Placed(())
    loads: MetLoads = MetLoads()
    awaited: asyncio.Future[AnyVerdict] | None = None
    error: RequestError | None = None

    async def until(self, answer: asyncio.Future[AnyVerdict]) -> AnyVerdict:
        """Wait for `answer`. Raises `error` if the wait is ended, even if `answer` has just arrived."""
        if self.error is None:
            self.awaited = answer
            verdict = await answer
            self.awaited = None
            if self.error is None:
                return verdict
        raise self.error

    def end(self, error: RequestError) -> None:
        """End the request's wait with `error`, in any state of the wait."""
        self.error = error
        if self.awaited is not None and not self.awaited.done():
            self.awaited.set_exception(error)


class SharedQueue:
    """This replica's requests in the shared queue. All calls come from one event loop.

    `Membership` sets the attributes `retry_after_s`, the Retry-After of requests refused after a wait, and
    `expected_wait_s`, the time to dispatch all waiting requests. The queue calls `on_unknown_pool` when the
    shared state has lost the pool. `tenants` returns the limits that refusals name.
    """

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        *,
        metrics: Metrics,
        chooser: EndpointChooser,
        pause_detector: PauseDetector,
        on_unknown_pool: Callable[[], object],
        clock: Callable[[], float],
        attempts: Iterator[int],
        traces: "Traces | None" = None,
        tenants: Callable[[], Tree | None] = lambda: None,
    ) -> None:
        self._store, self._ledger, self._metrics, self._chooser = store, ledger, metrics, chooser
        self.pause_detector, self._on_unknown_pool, self._clock = pause_detector, on_unknown_pool, clock
        self._attempts, self._traces, self._tenants = attempts, traces, tenants
        self.retry_after_s = 1
        self.expected_wait_s = 0.0
        self.fleet_queued = 0  # number of the fleet's queued requests as of the last heartbeat or dispatch
        self._queued = 0  # number of requests in `_waiting` that Redis has queued
        self._waiting: dict[str, Waiter] = {}
        self._any_waiting = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def places_are_awaited(self) -> bool:
        """Whether any request of the fleet is queued, so that Redis must learn of each request's end soon.
        Other replicas' queued requests are as counted at the last heartbeat or dispatch."""
        return self._queued > 0 or self.fleet_queued > 0

    async def any_waiting(self) -> None:
        if not self._waiting:
            self._any_waiting.clear()
        await self._any_waiting.wait()

    def new_waiter(self, request: InferenceRequest, wait: Wait) -> Waiter:
        # `pool.early_ms` in lua/lib/pool.lua reads the part of the attempt after the hyphen.
        early = f"-{request.early_ms}" if request.early_ms else ""
        attempt = f"{next(self._attempts)}{early}.{request.digest}"
        return Waiter(request, attempt, wait.arrived_s, self._loop.create_future())

    def check_latency(self, request: InferenceRequest) -> None:
        """Refuse a sheddable request whose latency objective every endpoint is predicted to miss.

        Raises:
            TooSlow: the request is refused; its Retry-After is how late the fastest endpoint would be.
        """
        if request.band.criticality is not Criticality.SHEDDABLE:
            return
        shortfall_s = self._chooser.shortfall_s(request, self.expected_wait_s)
        if shortfall_s is not None:
            self._metrics.push_error(request.model, TooSlow.code, request.target_model)
            retry_after_s = min(max(math.ceil(shortfall_s), 1), _LONGEST_RETRY_S)
            message = (
                f"every endpoint is predicted to miss the request's latency objective ({request.latency}) "
                f"by {shortfall_s * 1000:.0f} ms or more"
            )
            raise TooSlow(message, retry_after_s=retry_after_s)

    async def admit(self, request: InferenceRequest, wait: Wait) -> Waiter:
        """Wait until Redis has placed the request; set `wait.queued` if Redis queues it. Cancelling the call
        withdraws the request.

        Raises:
            RequestError: the request is refused, expires, is preempted or is evicted, or Redis is
            unreachable.
        """
        waiter = self.new_waiter(request, wait)
        while (displaced := self._waiting.get(request.id)) is not None and not request.repeats(
            displaced.request
        ):
            if not displaced.asking:
                raise RequestIdTaken()
            await asyncio.sleep(_ID_CHECK_S)  # Redis has not yet decided on the other request with this id
        if displaced is not None:
            # Envoy has sent the request again over a new stream, so the old stream has lost its client.
            _fail(displaced.notification, ClientGone(_TAKEN_OVER))
            displaced.notification.exception()  # keeps asyncio from logging an unread error
        self._waiting[request.id] = waiter
        verdict: AnyVerdict | None = None
        try:
            verdict = await self._admit_known(waiter)
            if isinstance(verdict, Queued):
                wait.queued = True
                waiter.placed = await self._queue(waiter, verdict)
            else:
                waiter.placed = verdict
                if not wait.queued:
                    self._metrics.bypassed(request.model, request.target_model)
            if waiter.placed.quota.endswith(_DEMOTED):
                self._metrics.demoted(request.flow, self._tenants())
        except (asyncio.CancelledError, RequestError) as fault:
            # Undo the admission in case Redis received it. If Redis refused the request, or refused the call
            # for lack of memory, it changed nothing.
            may_count = waiter.error is not None or isinstance(
                fault, asyncio.CancelledError | StateFault | RequestIdTaken
            )
            if may_count and (verdict is not None or not isinstance(fault, WritesRefused)):
                self.cancel(request.id, waiter.attempt, "cancelled")
            raise
        finally:
            if self._waiting.get(request.id) is waiter:
                del self._waiting[request.id]
        return waiter

    def cancel(self, request_id: str, attempt: str, why: str) -> None:
        ignore_loss(self._store.cancel(request_id, attempt, why))

    def give_up(self) -> None:
        """End every wait with StateUnavailable; Redis gets the cancellations when it answers again."""
        for waiter in self._waiting.values():
            if waiter.error is None:
                waiter.end(StateUnavailable("Redis is unavailable", retry_after_s=1))

    def shut_down(self) -> None:
        for waiter in self._waiting.values():
            waiter.end(ShuttingDown())

    def drop_expired(self) -> None:
        """End each wait for an answer of Redis that exceeds the request's TTL (G5). A wait in the queue has a
        timer of its own."""
        now_s = self._clock()
        for waiter in self._waiting.values():
            asking = waiter.asking or waiter.placing
            if asking and now_s > waiter.arrived_s + waiter.request.ttl_s and waiter.error is None:
                error = self._refusal(waiter.request, Verdict.EXPIRED)
                assert error is not None
                waiter.end(error)

    async def _queue(self, waiter: Waiter, verdict: Queued) -> Placed:
        """Count the request as queued until it is placed. Raises every refusal."""
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
        """Wait until the request is placed. Redis may grant and requeue the request any number of times."""
        while True:
            turn = await self._turn(waiter, verdict)
            if isinstance(turn, Placed):
                return turn
            answer = await self._take_up(waiter)
            if answer is None:
                if self._waiting.get(waiter.request.id) is not waiter:
                    raise ClientGone(_TAKEN_OVER)
                # The grant expired, or was lost with the shared state: admit the request again, with its age.
                waiter.notification = self._loop.create_future()
                answer = await self._admit_known(waiter)
            if isinstance(answer, Placed):
                return answer
            verdict = answer

    async def _take_up(self, waiter: Waiter) -> Placed | Queued | None:
        """Place a granted request. Returns None if it must be admitted again. Raises every refusal."""
        request = waiter.request
        # Before the call, make the new future: a grant may come before the task of the request runs.
        waiter.notification, waiter.placing = self._loop.create_future(), True
        try:
            choice = self._chooser.choose(request)
            placement = self._store.place(request.id, waiter.attempt, choice.candidates, choice.prefill)
            if self._traces is not None:
                self._traces.stage(request.id, "place", placement)
            answer = await waiter.until(placement)
        finally:
            waiter.placing = False
        if self._is_worth_another(request, choice, answer):
            return None
        return self._chosen(waiter, choice, answer)

    def _is_worth_another(self, request: InferenceRequest, choice: Choice, verdict: AnyVerdict) -> bool:
        """Whether Redis found no endpoint for `request` but may find one among all endpoints, since endpoints
        may have been replaced after this replica read their list."""
        none_found = isinstance(verdict, Refused) and verdict.reason is Refusal.NO_ENDPOINTS
        return none_found and self._chooser.unscored(request).candidates != choice.candidates

    async def _admit_known(self, waiter: Waiter) -> Placed | Queued:
        """Admit a request; retry while Redis lacks the pool's state. Raises every refusal."""
        request = waiter.request
        # During a pause Envoy may have closed this stream and sent its request to another replica.
        await self.pause_detector.wait_for_backlog()
        for _ in range(_REBUILD_TRIES):
            choice = self._chooser.choose(request)
            verdict = await waiter.until(self._ask(waiter, choice, self._clock()))
            if self._is_worth_another(request, choice, verdict):
                choice = self._chooser.unscored(request)._replace(prefill=choice.prefill, split=choice.split)
                verdict = await waiter.until(self._ask(waiter, choice, self._clock()))
            if (answer := self._chosen(waiter, choice, verdict)) is not None:
                return answer
            self._on_unknown_pool()
            await asyncio.sleep(_REBUILD_PAUSE_S)
        raise StateUnavailable("the pool's state in Redis is being rebuilt", retry_after_s=1)

    def _ask(self, waiter: Waiter, choice: Choice, now_s: float) -> asyncio.Future[AnyVerdict]:
        """Ask Redis to admit a request, with its age at `now_s`."""
        age_s = now_s - waiter.arrived_s
        age_s = age_s if age_s > _YOUNG_S else 0.0
        answer = self._store.admit(waiter.request, waiter.attempt, choice.candidates, age_s, choice.prefill)
        if self._traces is not None:
            self._traces.stage(waiter.request.id, "admit", answer)
        return answer

    def _chosen(self, waiter: Waiter, choice: Choice, verdict: AnyVerdict) -> Placed | Queued | None:
        """Report the outcome of `choice` to the chooser. Returns None if Redis does not know the pool or the
        request. Raises every refusal."""
        request = waiter.request
        if isinstance(verdict, Placed):
            waiter.loads = self._chooser.placed(
                request, choice, verdict.endpoints, verdict.loads, verdict.prefillers
            )
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
        """Count and return the error with which `verdict` ends `request`; None if the request continues."""
        error = refusal(verdict, request, self.retry_after_s, self._tenants())
        if error is None:
            return None
        if isinstance(verdict, Refused) and verdict.limit:
            self._metrics.over_limit(verdict.limit, self._tenants())
        if isinstance(verdict, Refused):
            self._metrics.push_error(request.model, error.code, request.target_model)
        elif isinstance(error, ExpiredTtl):
            self._metrics.expired(request.model, request.target_model)
        elif verdict is Verdict.PREEMPTED:
            self._metrics.preempted(request.band.name)
        elif verdict is Verdict.EVICTED:
            self._metrics.evicted(request.band.name)
        return error

    async def _turn(self, waiter: Waiter, queued: Queued) -> Placed | None:
        """Wait for the grant of a queued request. Returns Placed if the grant placed the request, else None.
        Raises every refusal."""
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
        if isinstance(verdict, Refused):  # the request expired while it waited for a tenant's limit
            if waiter.request.by_client:
                verdict = Verdict.EXPIRED
            else:
                self._metrics.expired(waiter.request.model, waiter.request.target_model)
        if (error := self._refusal(waiter.request, verdict)) is not None:
            raise error
        return verdict if isinstance(verdict, Placed) else None

    async def _expire(self, waiter: Waiter) -> AnyVerdict:
        """Report an expired request to Redis. Returns GRANTED if Redis granted it first, else EXPIRED, or the
        refusal of the tenant's limit for which the request waited."""
        # The store sends the expiry to Redis even if this method no longer waits for the answer.
        expiry = self._store.expire(waiter.request.id, waiter.attempt)
        await asyncio.wait((expiry,), timeout=_EXPIRY_ANSWER_S)
        return expiry.result() if expiry.done() and expiry.exception() is None else Verdict.EXPIRED

    def dequeued(self, attempts: int, successes: int) -> None:
        """Record that Redis, in a call of this replica, tried to dispatch queued requests of any replica."""
        self._metrics.dequeued(attempts, successes)
        if successes and not self.fleet_queued:
            self.fleet_queued = 1  # at least one request is queued; the next heartbeat has the number

    def notified(self, notification: Notification) -> bool:
        """Handle a notification that Redis granted, placed, expired, preempted or evicted a request. A
        repeated, late or unknown notification changes nothing.

        Returns True if the notification is the first for a waiting request. A grant for a request that
        neither waits nor runs here shows that Redis lost the request's end: return the grant to Redis.
        """
        request_id, verdict = notification.request_id, notification.verdict
        waiter = self._waiting.get(request_id)
        if isinstance(verdict, Placed):
            if (
                waiter is not None
                and waiter.attempt == notification.attempt
                and not self.pause_detector.resumed_recently  # a pause makes another replica the owner
            ):
                return self._on_placed(waiter, verdict)
            verdict = Verdict.GRANTED  # ask Redis for a placement, as after a grant without placement
        if waiter is not None:
            return _notify(waiter.notification, verdict)
        entry = self._ledger.get(request_id)
        runs = entry is not None and (entry.owned or bool(entry.unacknowledged))
        if verdict is Verdict.GRANTED and not runs:
            ignore_loss(self._store.return_grant(request_id))
        return False

    def _on_placed(self, waiter: Waiter, verdict: Placed) -> bool:
        """Acknowledge that Redis granted and placed a request in one call. Redis may repeat the notification
        until it has the acknowledgement. Returns as `notified`."""
        if not _notify(waiter.notification, verdict):
            return False
        request, attempt, waiter.unacknowledged = waiter.request, waiter.attempt, True

        def taken(answer: asyncio.Future[str]) -> None:
            waiter.unacknowledged = False
            entry = self._ledger.get(request.id)
            if entry is not None and entry.unacknowledged == attempt:
                entry.unacknowledged = ""

        if self._traces is not None:
            self._traces.placed_by_grant(request.id)
        answer = self._store.acknowledge(request.id, attempt)
        ignore_loss(answer)
        answer.add_done_callback(taken)
        self._chosen(waiter, self._chooser.unscored(request), verdict)
        return True

    def is_placing(self, request_id: str) -> bool:
        """Whether Redis has not yet answered the call that places a granted request."""
        waiter = self._waiting.get(request_id)
        return waiter is not None and waiter.placing

    async def register_again(self) -> bool:
        """Register requests that the shared state lost: owned streams, then waiting requests, oldest first.

        Returns False if Redis did not accept some requests; the caller may repeat the call.
        """
        await self.pause_detector.wait_for_backlog()  # streams may have closed during a pause
        # Wait for the renewals: if Redis is slow, admissions sent together with them would overtake them and
        # find the whole stock free.
        renewed = await asyncio.gather(*self.renew_owned_streams(), return_exceptions=True)
        if any(isinstance(answer, StateFault) and not isinstance(answer, ScriptFailed) for answer in renewed):
            return False
        waiters = sorted(self._waiting.values(), key=lambda waiter: waiter.arrived_s)
        # Read the clock once: a pause of this process between two readings would reverse the requests' order.
        now_s = self._clock()
        for at in range(0, len(waiters), _CHUNK):
            async with asyncio.TaskGroup() as tasks:
                chunk = waiters[at : at + _CHUNK]
                registered = [tasks.create_task(self._register_waiter(waiter, now_s)) for waiter in chunk]
            if not all(task.result() for task in registered):
                return False
        return True

    async def _register_waiter(self, waiter: Waiter, now_s: float) -> bool:
        has_left = self._waiting.get(waiter.request.id) is not waiter
        if has_left or waiter.notification.done() or waiter.placing:
            return True
        choice = self._chooser.choose(waiter.request)
        asking = self._ask(waiter, choice, now_s)
        await asyncio.wait((asking, waiter.notification), return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            asking.cancel()  # sent again later, the call would admit a request that has ended
            return True
        try:
            verdict = self._chosen(waiter, choice, asking.result())
        except (StateUnavailable, WritesRefused):
            return False
        except RequestError as error:
            if not waiter.notification.done():
                waiter.notification.set_exception(error)
                waiter.notification.exception()  # keeps asyncio from logging an unread error
            return True
        if isinstance(verdict, Placed):
            _notify(waiter.notification, verdict)
        return verdict is not None

    def renew_owned_streams(self, *, is_due: bool = False) -> list[asyncio.Future[Renewal]]:
        """Renew the lease of every request whose stream this replica owns; if `is_due`, only the leases that
        `Entry.renewal` selects. The caller need not await the answers."""
        answers = [
            self._store.renew(entry.id, entry.attempt, entry.endpoint, token)
            for entry in self._ledger.owned()
            if (token := entry.renewal(entry.token, self._store.epoch) if is_due else entry.token) is not None
        ]
        for answer in answers:
            ignore_loss(answer)
        return answers


def _notify(notification: asyncio.Future[AnyVerdict], verdict: AnyVerdict) -> bool:
    """Resolve the future `notification` to `verdict`. Returns False if the future was resolved before."""
    if notification.done():
        return False
    notification.set_result(verdict)
    return True


def _fail(notification: asyncio.Future[AnyVerdict], error: Exception) -> None:
    if not notification.done():
        notification.set_exception(error)
