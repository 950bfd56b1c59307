"""The gate on shared state: one queue and one stock for all replicas.

A request's way through here: `admit` it; if queued, wait for the grant, which comes in the reply of any
call, by wake-up, or with a heartbeat; then `place` it, which may send it back to wait. `attempt` numbers a
stream's try, so that what a dead stream leaves behind never touches the stream that took over its request.
"""

import asyncio
import random
from collections.abc import Callable

from picker_fleet.admission.placed_requests import PlacedRequests, ServiceMeter, ignore_loss
from picker_fleet.admission.waiting import Wait, Waiter, refusal, tell
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.errors import (
    ClientGone,
    ExpiredTtl,
    NoEndpoints,
    RequestError,
    ScriptFailed,
    StateFault,
    StateUnavailable,
    WritesRefused,
)
from picker_fleet.request import InferenceRequest, Placement
from picker_fleet.scheduling.chooser import Choice, EndpointChooser, LeastLoadedChooser
from picker_fleet.signing import Keyring
from picker_fleet.state.failure_detector import PauseDetector
from picker_fleet.state.store import Decision, Store
from picker_fleet.telemetry.metrics import Metrics

# The replica's own timer trails the queue's, which decides; it only answers where no news came.
_EXPIRY_SLACK_S = 0.05
# A request whose time is up is answered within this, whether the shared state answers or not (G5).
_EXPIRY_ANSWER_S = 0.5
# How often an admission is tried again when the shared state has just been lost and is being rebuilt.
_REBUILD_TRIES = 20
_REBUILD_PAUSE_S = 0.1
_NEWS = frozenset(("granted", "expired", "preempted", "evicted"))
_TAKEN_OVER = "taken over by a newer stream"


class SharedGate(PlacedRequests):
    """`admission.gate.Gate` over `Store`. One event loop.

    `answer_tokens` is what an answer costs by default where the stock counts tokens, None where it counts
    requests. `retry_after_s` is what those are told who are turned away after they have waited.
    """

    def __init__(
        self,
        store: Store,
        *,
        metrics: Metrics,
        endpoints: SnapshotCell,
        fallbacks: int,
        on_unknown_pool: Callable[[], None],
        answer_tokens: int | None = None,
        chooser: EndpointChooser | None = None,
        service: ServiceMeter | None = None,
        keys: Keyring | None = None,
        pause_detector: PauseDetector | None = None,
    ) -> None:
        super().__init__(
            store,
            metrics=metrics,
            endpoints=endpoints,
            answer_tokens=answer_tokens,
            chooser=chooser or LeastLoadedChooser(endpoints),
            service=service or ServiceMeter(),
            keys=keys or Keyring(),
            pause_detector=pause_detector or PauseDetector(),
        )
        self._fallbacks = fallbacks
        self._on_unknown_pool = on_unknown_pool
        self.retry_after_s = 1
        self._waiting: dict[str, Waiter] = {}
        self._any_queued = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def waiting(self) -> int:
        """Requests of this replica that wait for their turn."""
        return len(self._waiting)

    async def any_waiting(self) -> None:
        """Wait, without end, until a request of this replica waits for its turn."""
        if not self._waiting:
            self._any_queued.clear()
        await self._any_queued.wait()

    async def admit(
        self, request: InferenceRequest, *, stream_owned: bool, age_s: float = 0.0, wait: Wait | None = None
    ) -> Placement:
        """As `Gate.admit`; `wait` is told that the request is queued."""
        task = asyncio.current_task()
        assert task is not None
        wait = wait or Wait(self._loop.time() - age_s)
        waiter = Waiter(request, next(self._attempts), wait.arrived_s, self._loop.create_future(), task)
        displaced = self._waiting.get(request.id)
        if displaced is not None and not displaced.news.done():
            # Envoy has re-driven the request over a new stream; the old one has no client any more.
            displaced.news.set_exception(ClientGone(_TAKEN_OVER))
            displaced.news.exception()  # it may be past waiting for news; that is no fault of its own
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
        except (asyncio.CancelledError, StateFault) as fault:
            # What the call did, if it arrived, is undone by whoever still owns the attempt. One that found no
            # room did nothing, and there may be too many of those.
            if verdict is not None or not isinstance(fault, WritesRefused):
                self._cancel(request.id, waiter.attempt, "cancelled")
            # Unless others have cancelled it as well: the client went away, or the replica shuts down.
            if waiter.given_up and task.uncancel() == 0 and isinstance(fault, asyncio.CancelledError):
                if waiter.expired:
                    self._accepted(request, Decision("expired", ""))
                raise StateUnavailable("the shared state is away", retry_after_s=1) from None
            raise
        finally:
            if self._waiting.get(request.id) is waiter:
                del self._waiting[request.id]
        return self._placement(request, waiter.attempt, tuple(verdict.detail.split(",")), stream_owned)

    def give_up(self) -> None:
        """End every wait with StateUnavailable; what it had asked for is taken back when it can be."""
        for waiter in self._waiting.values():
            if not waiter.given_up:
                waiter.given_up = True
                waiter.task.cancel()

    def drop_expired(self) -> None:
        """End each wait for an answer of the shared state that outlasts its request's time (G5); who waits
        for its turn has a timer for that."""
        now_s = self._loop.time()
        for waiter in self._waiting.values():
            asking = waiter.asking or waiter.placing
            if asking and now_s > waiter.arrived + waiter.request.ttl_s and not waiter.given_up:
                waiter.given_up = waiter.expired = True
                waiter.task.cancel()

    async def _queue(self, waiter: Waiter, verdict: Decision) -> Decision:
        """`placed`, once the turn of a queued request has come; every refusal is raised."""
        request, waiter.asking = waiter.request, False
        self._metrics.waiting(request.model, request.target_model, 1)
        self._any_queued.set()
        try:
            return await self._wait(waiter, verdict)
        finally:
            self._metrics.waiting(request.model, request.target_model, -1)

    async def _wait(self, waiter: Waiter, verdict: Decision) -> Decision:
        """`placed`, in the end: a queued request may be granted and sent back to wait any number of times."""
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
                # The grant was lost with the shared state, or reaped: ask again, as old as it is.
                waiter.news = self._loop.create_future()
                verdict = await self._admit_known(waiter)
                if verdict.status == "placed":
                    return verdict

    async def _take_up(self, waiter: Waiter) -> Decision:
        """Ask for a granted request's place: `placed`, `queued` or `gone`; every refusal is raised."""
        request = waiter.request
        # Anew before it is asked: one that is sent back may be granted again before its task runs.
        waiter.news, waiter.placing = self._loop.create_future(), True
        try:
            choice = self._chooser.choose(request)
            answer = await self._store.place(request.id, waiter.attempt, choice.candidates)
        finally:
            waiter.placing = False
        return self._chosen(request, choice, answer)

    async def _admit_known(self, waiter: Waiter) -> Decision:
        """`placed` or `queued`; every refusal is raised. Waits out the rebuilding of a lost pool."""
        request = waiter.request
        if self.pause_detector.resumed_recently:
            # Envoy may have given this stream up since, and another replica have its request.
            await self.pause_detector.wait_for_backlog()
        for _ in range(_REBUILD_TRIES):
            age_s = self._loop.time() - waiter.arrived
            choice = self._chooser.choose(request)
            verdict = await self._store.admit(
                request, waiter.attempt, choice.candidates, age_s if age_s > 0.001 else 0.0
            )
            if verdict.status != "unknown-pool":
                return self._chosen(request, choice, verdict)
            self._on_unknown_pool()
            await asyncio.sleep(_REBUILD_PAUSE_S)
        raise StateUnavailable("the shared state is being rebuilt", retry_after_s=1)

    def _chosen(self, request: InferenceRequest, choice: Choice, verdict: Decision) -> Decision:
        """`verdict`, and what came of `choice` is remembered; every refusal is raised."""
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
        """Wait for the grant of a queued request; `granted`, or `placed` if it was placed meanwhile."""
        request = waiter.request
        left_s = int(float(queued.detail)) / 1000 + _EXPIRY_SLACK_S if queued.detail else _EXPIRY_SLACK_S
        timer = self._loop.call_later(left_s, tell, waiter.news, Decision("late", ""))
        try:
            verdict = await waiter.news
        finally:
            timer.cancel()
        if verdict.status == "late":
            verdict = Decision(await self._expire(waiter), "")
        return self._accepted(request, verdict)

    async def _expire(self, waiter: Waiter) -> str:
        """`granted` if the grant came in time after all, else `expired`."""
        try:
            async with asyncio.timeout(_EXPIRY_ANSWER_S):
                # Shielded: the link must still carry it when nobody waits for the answer any more.
                expiry = self._store.cancel(waiter.request.id, waiter.attempt, "expired")
                answer = await asyncio.shield(expiry)
        except TimeoutError:
            return "expired"  # the shared state is away; it learns of the expiry when it returns
        except ScriptFailed:
            return "expired"  # its time is up, whatever is damaged
        return "granted" if answer == "granted" else "expired"

    async def route(self, subset: tuple[str, ...] | None) -> Placement:
        ready = [e.address for e in self._endpoints.current.endpoints if e.ready]
        if subset is not None:
            ready = [address for address in ready if address in subset]
        if not ready:
            raise NoEndpoints("no endpoint is ready that may serve this request", retry_after_s=1)
        return Placement(tuple(random.sample(ready, min(len(ready), 1 + self._fallbacks))), "")

    def on_notification(self, what: str, request_id: str) -> bool:
        """News of a waiting request: granted, expired, preempted, evicted. Repeated or late news, or a word
        of another version, changes nothing.

        True if somebody waited for it who had not been told. A grant of a request that neither waits nor runs
        here was given by a shared state that has lost its end: it is given back.
        """
        waiter = self._waiting.get(request_id)
        if waiter is not None:
            return what in _NEWS and tell(waiter.news, Decision(what, ""))
        if what == "granted" and request_id not in self._owned_streams:
            ignore_loss(self._store.return_grant(request_id))
        return False

    def is_placing(self, request_id: str) -> bool:
        """Whether a waiting request has been granted and its placement is asked for."""
        waiter = self._waiting.get(request_id)
        return waiter is not None and waiter.placing

    async def register_again(self) -> bool:
        """Tell a shared state that has lost us what we hold: streams first, then waiters, oldest first.

        False if it could not be told of all; the call may be repeated.
        """
        if self.pause_detector.resumed_recently:
            await self.pause_detector.wait_for_backlog()  # as in `_admit_known`
        # Answered first: decisions overtake renewals where Redis is slow, and waiters would find it all free.
        renewed = await asyncio.gather(*self.renew_owned_streams(), return_exceptions=True)
        if any(isinstance(answer, StateFault) and not isinstance(answer, ScriptFailed) for answer in renewed):
            return False
        waiters = sorted(self._waiting.values(), key=lambda waiter: waiter.arrived)
        async with asyncio.TaskGroup() as tasks:
            told = [tasks.create_task(self._register_waiter(waiter)) for waiter in waiters]
        return all(task.result() for task in told)

    async def _register_waiter(self, waiter: Waiter) -> bool:
        if waiter.news.done() or waiter.placing:
            return True
        age_s = self._loop.time() - waiter.arrived
        choice = self._chooser.choose(waiter.request)
        try:
            answer = await self._store.admit(waiter.request, waiter.attempt, choice.candidates, age_s)
            verdict = self._chosen(waiter.request, choice, answer)
        except (StateUnavailable, WritesRefused):
            return False
        except RequestError as error:
            if not waiter.news.done():
                waiter.news.set_exception(error)
                waiter.news.exception()  # it may be past waiting for news
            return True
        if verdict.status == "placed":
            tell(waiter.news, verdict)
        return verdict.status != "unknown-pool"
