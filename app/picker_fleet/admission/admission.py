"""Admits, places and accounts for requests; the servers of ext_proc and of mode `http` call it.

While Redis answers, a request waits in the shared queue. During an outage, a request waits in this replica's
local queue and is placed within this replica's share of the bound (G8; docs/redis.md).
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from picker_fleet.admission.failover import Failover, FailoverState, FailoverTimes
from picker_fleet.admission.ledger import Entry, Ledger, Phase
from picker_fleet.admission.outage import Outage, unseen_s
from picker_fleet.admission.peers import PeerClient
from picker_fleet.admission.reports import Reports, ignore_loss
from picker_fleet.admission.shared_queue import SharedQueue, Waiter
from picker_fleet.admission.waits import Wait
from picker_fleet.domain.errors import (
    ClientGone,
    RequestError,
    RequestIdTaken,
    ShuttingDown,
    StateUnavailable,
)
from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.domain.request import CONNECT, Alive, Completion, Fault, InferenceRequest, Placement
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.scheduling.chooser import EndpointChooser
from picker_fleet.state import accounting_token
from picker_fleet.state.accounting_token import Keyring
from picker_fleet.state.connection import FailureDetector, PauseDetector
from picker_fleet.state.replies import Placed
from picker_fleet.state.store import Store
from picker_fleet.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from picker_fleet.telemetry.tracing import Traces

_UNREAD_S = 0.5  # after a whole answer, wait this long for the report of the end, then release the resources


class Admission:
    """Admits, places and accounts for requests. All calls come from one event loop.

    `Membership` (fleet/) uses the attributes `queue` (the requests that wait in Redis) and `failover`. Each
    placement calls `record_cost` with priority, flow and cost; each end of a request calls `record_usage`
    with the completion, flow ('' if unknown) and model. The iterator `attempts` numbers the streams of
    requests, by default 1, 2, …
    """

    def __init__(
        self,
        store: Store,
        *,
        replica: str,
        fleet: KnownFleet,
        metrics: Metrics,
        endpoints: SnapshotCell,
        chooser: EndpointChooser,
        keys: Keyring,
        failure_detector: FailureDetector,
        pause_detector: PauseDetector,
        heartbeat_now: Callable[..., None],
        peer_client: PeerClient,
        times: FailoverTimes,
        record_cost: Callable[[int, str, float], object] = lambda priority, flow, cost: None,
        record_usage: Callable[[Completion, str, str], object] | None = None,
        traces: "Traces | None" = None,
        clock: Callable[[], float] | None = None,
        attempts: Iterator[int] | None = None,
    ) -> None:
        self._store, self._fleet, self._metrics, self._chooser = store, fleet, metrics, chooser
        self._keys, self._record_cost, self._traces = keys, record_cost, traces
        self._pause_detector = pause_detector
        self._clock = clock or asyncio.get_running_loop().time
        self._is_shut_down = False
        settings = fleet.config.settings
        in_tokens = settings.request_queue_controller.unit == "tokens"
        self._answer_tokens = settings.fair_request_queue.default_answer_tokens if in_tokens else 0
        self.ledger = Ledger(self._clock, 2 * unseen_s(times.report_s))
        self.queue = SharedQueue(
            store,
            self.ledger,
            metrics=metrics,
            chooser=chooser,
            pause_detector=pause_detector,
            on_unknown_pool=heartbeat_now,
            clock=self._clock,
            attempts=attempts or itertools.count(1),
            traces=traces,
            tenants=lambda: fleet.tenants,
        )
        self._reports = Reports(
            store,
            self.ledger,
            metrics=metrics,
            endpoints=endpoints,
            chooser=chooser,
            counts_tokens=in_tokens,
            has_tenants=settings.tenants is not None,
            are_places_awaited=lambda: self.queue.places_are_awaited,
            record_usage=record_usage,
            traces=traces,
        )
        self.failover = Failover(
            store,
            self.ledger,
            self.queue,
            self._reports,
            replica=replica,
            metrics=metrics,
            endpoints=endpoints,
            chooser=chooser,
            failure_detector=failure_detector,
            fleet=fleet,
            heartbeat_now=heartbeat_now,
            peer_client=peer_client,
            times=times,
            clock=self._clock,
        )

    @property
    def is_cut_off(self) -> bool:
        """Whether other replicas use Redis and this replica cannot, so that Envoy should use the others."""
        return self.failover.is_cut_off

    async def admit(self, request: InferenceRequest, *, stream_owned: bool, age_s: float = 0.0) -> Placement:
        """Wait until the request has its turn and is placed on endpoints. The request is queued as if it had
        arrived `age_s` seconds ago.

        `stream_owned`: this replica has the request's stream until the request ends (mode `standard`), and so
        renews its lease until `settle` or `withdraw` is called. In other modes access-log entries renew the
        lease. Cancelling the call withdraws the request.

        Raises:
            RequestError: the request is refused, expires, is preempted or is evicted, or Redis is
            unreachable.
        """
        if not age_s and self.failover.outage is None:
            self.queue.check_latency(request)
        if early_ms := self._chooser.early_ms(request):
            request = request._replace(early_ms=early_ms)
        spans = self._traces.begin(request) if self._traces is not None else None
        # A request with an age has lost an earlier placement, so count its wait from its arrival.
        wait = Wait(self._clock() - age_s, queued=age_s > 0)
        try:
            placement = await self._place(request, wait, stream_owned)
        except BaseException as error:
            # After ClientGone a newer stream continues the wait; after RequestIdTaken the request waits on
            # under a new id.
            if wait.queued and not isinstance(error, ClientGone | RequestIdTaken):
                waited_s = self._clock() - wait.arrived_s
                self._metrics.waited(request.model, waited_s, False, request.target_model)
            if spans is not None:
                spans.end(None, error.code if isinstance(error, RequestError) else "cancelled")
            raise
        if wait.queued:
            placement = placement._replace(waited_s=self._clock() - wait.arrived_s)
        if spans is None:
            return placement
        spans.end(placement)
        entry = self.ledger.get(request.id)
        if stream_owned and entry is not None:
            entry.traceparent = spans.parent
        token = accounting_token.with_trace(placement.accounting_token, spans.parent)
        return placement._replace(accounting_token=token)

    async def confirm(self, request_id: str, placement: Placement, age_s: float) -> bool:
        """Return whether a request still has a placement made `age_s` seconds ago; if so, restart its lease.

        An earlier placement is confirmed before Envoy gets the placement again: if no stream of this replica
        owns the request, nothing has renewed the request's lease yet.

        Raises:
            StateUnavailable: there is no answer from Redis.
        """
        # No other replica can own the request before the request's lease expires, or while this replica's own
        # budget covers its cost.
        outage, entry = self.failover.outage, self.ledger.get(request_id)
        is_local = outage is not None and entry is not None and entry.is_local
        own = age_s < self._fleet.config.settings.leases.inflight or is_local
        if self.failover.state is FailoverState.LOCAL:
            return own
        try:
            if outage is None or not own:
                # Send no accounting token, so that Redis cannot restore this request: another request may
                # have got its stock (G1).
                answer = await self._store.renew(request_id, placement.attempt, "", "")
                return answer == "renewed"
            token = self._own_token(placement.accounting_token)
            await self._store.renew(request_id, placement.attempt, "", token)
        except StateUnavailable as fault:
            if not self.failover.redis_lost("failed", str(fault)):
                raise
        return own

    def withdraw(self, request_id: str, placement: Placement) -> None:
        """Undo a placement that never reached Envoy. The call does not wait for Redis."""
        entry, outage = self.ledger.get(request_id), self.failover.outage
        if entry is not None:
            if outage is not None and entry.is_local:
                outage.withdraw(entry)
            self.ledger.withdraw(entry)
        self.queue.cancel(request_id, placement.attempt, "withdrawn")

    def settle(self, completion: Completion) -> None:
        """Account for a request's end. Returns at once: the next message to Redis carries the end, ahead of
        later admissions. Idempotent."""
        entry, outage = self.ledger.get(completion.id), self.failover.outage
        if self._traces is not None:
            completion = self._trace_end(self._traces, completion, entry)
        # Use the accounting token that came with the end, or else the ledger's token of an owned stream.
        token = completion.accounting_token or (entry.token if entry is not None and entry.owned else "")
        is_local = self.failover.state is FailoverState.LOCAL
        ran, is_new = bool(token), True
        was_unread = False
        if entry is not None and entry.phase is Phase.ENDED:
            was_unread = entry.unread
            if outage is None and entry.confirmed and not was_unread:  # an end counts only once
                self._reports.tell_end(completion)  # Redis may have restored the request since its end
                return
        if outage is None:
            self.failover.is_busy = True
        elif ran or (entry is not None and entry.running and entry.journaled):
            ran, is_new = True, outage.end(entry, completion, token)
        elif is_local:
            return  # the request never ran, but Envoy also logs refused requests
        is_known = is_local or (was_unread and entry is not None and entry.confirmed)
        entry = self.ledger.finish(completion, token, is_reported=not is_known) if ran else None
        if is_known:
            self._reports.note_end(completion, token)
            if is_new or was_unread:
                self._reports.count(completion, token, accounting_token.model_of(token))
        else:
            self._reports.settle(completion, token, entry)
        if entry is not None:
            self.failover.tombstones.add(entry)

    def answered(self, completion: Completion) -> None:
        """Record that the endpoint has sent its whole answer. Envoy reports the request's end only once the
        client has read the answer; if the client is slow, release the request's resources. Idempotent."""
        self.ledger.answer(completion)
        asyncio.get_running_loop().call_later(_UNREAD_S, self._end_unread, completion)

    def _end_unread(self, completion: Completion) -> None:
        entry = self.ledger.get(completion.id)
        if entry is None or entry.phase is Phase.ENDED:
            return
        # In an outage, a request that Redis has placed is released by the replica that gets its end.
        if self.failover.outage is None or entry.is_local:
            token = self._own_token(completion.accounting_token)  # Envoy's later report makes the trace span
            self.settle(completion._replace(accounting_token=token))

    def suspect(self, request_id: str) -> None:
        """Record that an access-log entry without an accounting token says that a request has ended. The next
        metrics pages of the request's endpoint decide whether that is true. Returns at once."""
        if self.failover.state is not FailoverState.LOCAL:
            self._reports.suspect(request_id)

    def fault(self, fault: Fault) -> None:
        """Record that a request failed on an endpoint, or that the endpoint is full. Idempotent. A report
        that the endpoint accepts no connection is checked first."""
        if fault.why == CONNECT:
            self._reports.connection_check.report(fault.endpoint, partial(self._note_fault, fault))
        else:
            self._note_fault(fault)

    def _note_fault(self, fault: Fault) -> None:
        outage = self.failover.outage
        if self.failover.state is not FailoverState.LOCAL:
            self._reports.fault(fault._replace(accounting_token=self._own_token(fault.accounting_token)))
        elif outage is not None and fault.why == CONNECT:
            outage.picker.failed(fault.endpoint)

    def renew(self, alive: Alive) -> None:
        """Renew a request's lease. Returns at once; the next message to Redis carries the renewal."""
        if self._traces is not None:
            alive = alive._replace(accounting_token=self._own_token(alive.accounting_token))
        entry = self.ledger.get(alive.id)
        if entry is not None and entry.phase is Phase.ENDED:
            alive = alive._replace(accounting_token="")  # a late or repeated entry must not restore a request
        # An access-log entry that arrived during a pause of this process is old: its request may have ended.
        if self._pause_detector.resumed_recently:
            self.failover.ignored_s = self._clock()
            return
        self.ledger.see(alive)
        if self.failover.outage is not None:
            self.failover.outage.see(alive)
        entry, leases = self.ledger.get(alive.id), self._fleet.config.settings.leases
        token: str | None = alive.accounting_token
        if entry is not None and leases.inflight >= 3 * leases.access_log_interval:
            token = entry.renewal(alive.accounting_token, self._store.epoch)
        if token is not None and self.failover.state is not FailoverState.LOCAL:
            self._reports.renew(alive._replace(accounting_token=token))

    def prefilled(self, request_id: str) -> None:
        """Record that the answer of a split request has begun, so that its prefill endpoint is free again.
        Idempotent; does not wait for Redis. Without Redis, the endpoint's reservation ends with its lease."""
        if self.failover.state is not FailoverState.LOCAL:
            ignore_loss(self._store.prefilled(request_id))

    def fill(self) -> float:
        """The occupied part, 0 to 1, of the fleet's queue as of the last heartbeat, or, during an outage, of
        this replica's local queue."""
        if self.failover.outage is not None:
            return self.failover.outage.gate.fill
        if self.failover.stock is None or not self.failover.stock.pulse.queued:
            return 0.0
        capacity = self._fleet.config.settings.fair_request_queue.total_capacity
        return min(self.failover.stock.pulse.queued / capacity, 1.0)

    def shut_down(self) -> None:
        """Refuse every waiting request and every later request with ShuttingDown."""
        self._is_shut_down = True
        self.queue.shut_down()
        if self.failover.outage is not None:
            self.failover.outage.gate.end_waits(ShuttingDown)

    async def _place(self, request: InferenceRequest, wait: Wait, stream_owned: bool) -> Placement:
        """Admit a request by Redis or by the local budget; retry if Redis is lost or returns meanwhile."""
        failover = self.failover
        while not self._is_shut_down:
            if failover.outage is not None:
                placement = await self._place_in_outage(failover.outage, request, wait, stream_owned)
                if placement is not None:
                    return placement
                continue
            try:
                waiter = await self.queue.admit(request, wait)
            except StateUnavailable as fault:
                # After a pause of this process the store drops its pending calls: admit again.
                if not self._pause_detector.resumed_recently and not failover.redis_lost(
                    "failed", str(fault)
                ):
                    raise
            else:
                failover.is_busy, failover.placed = True, failover.placed + self._cost(request)
                if waiter.placed.quota:
                    failover.told.note(request.flow, waiter.placed.quota, self._store.now_ms())
                return self._placement(request, waiter, stream_owned)
        raise ShuttingDown()

    async def _place_in_outage(
        self, outage: Outage, request: InferenceRequest, wait: Wait, stream_owned: bool
    ) -> Placement | None:
        """Admit a request locally. Returns None if the failover state changed, so that the caller retries."""
        failover = self.failover
        if outage.has_another(request):
            raise RequestIdTaken()
        cost = outage.gate.charge(self._cost(request))
        is_local = failover.state is FailoverState.LOCAL
        asking = request
        if request.learn:
            answer = self._fleet.config.settings.fair_request_queue.default_answer_tokens
            asking = request._replace(answer_tokens=request.answer_tokens + answer)
        if not await outage.gate.admit(asking, cost, wait, alone=is_local):
            return None
        try:
            if failover.state is FailoverState.LOCAL:
                most = 1 + self._fleet.config.settings.scheduling.fallbacks
                waiter = self.queue.new_waiter(request, wait)
                endpoints = outage.picker.pick(request, most=most)
                waiter.placed = Placed(endpoints, quota=outage.gate.quota(request.id))
                placement = self._placement(request, waiter, stream_owned, self._store.now_ms())
            else:
                waiter = await self._wait_prepaid(request, cost, wait)
                outage.gate.end_charge(request.id, unserved=True)  # Redis has charged the request
                placement = self._placement(request, waiter, stream_owned)
        except BaseException as error:
            if failover.outage is not None:  # release the budget even if a later outage has begun
                failover.outage.gate.end_charge(request.id, unserved=True)
                failover.outage.gate.release(cost)
            if not isinstance(error, StateUnavailable):
                raise
            failover.redis_lost("failed", str(error))
            return None
        if failover.outage is not None:  # it is None if the outage ended during the admission
            failover.outage.record_placement(request.id, placement, cost)
        return placement

    async def _wait_prepaid(self, request: InferenceRequest, cost: float, wait: Wait) -> Waiter:
        """Admit through Redis a request that already holds `cost` of the local budget."""
        self.failover.prepaid += cost
        try:
            waiter = await self.queue.admit(request, wait)
        finally:
            self.failover.prepaid -= cost
        self.failover.placed += cost
        return waiter

    def _cost(self, request: InferenceRequest) -> float:
        if not self._fleet.config.settings.request_queue_controller.enabled:
            return 0.0  # without flow control, requests take no stock
        return request.cost + self._answer_tokens if request.learn else request.cost

    def _placement(
        self, request: InferenceRequest, waiter: Waiter, stream_owned: bool, alone_ms: int | None = None
    ) -> Placement:
        """Record a placement. Without Redis, `alone_ms` is the placement's time by Redis's clock."""
        self._record_cost(request.band.priority, request.flow, request.cost)
        placed, loads = waiter.placed, waiter.loads
        endpoint, prefiller = placed.endpoints[0], placed.prefillers[0] if placed.prefillers else ""
        written = accounting_token.write(
            request,
            endpoint,
            self._answer_tokens,
            alone_ms,
            loads.decode or (),
            prefiller=prefiller,
            prefill_load=loads.prefill or (),
        )
        token = accounting_token.signed(written, request.id, self._keys)
        entry = self.ledger.place(request.id, waiter.attempt, token, endpoint, owned=stream_owned)
        entry.unacknowledged = waiter.attempt if waiter.unacknowledged else ""
        session = self._chooser.session_token(endpoint)
        return Placement(
            placed.endpoints,
            token,
            waiter.attempt,
            session,
            quota=placed.quota,
            prefillers=placed.prefillers,
            prefill_s=loads.prefill_s,
        )

    def _own_token(self, token: str) -> str:
        """The accounting token `token` as the fleet signed it, without a traceparent."""
        return accounting_token.split_trace(token)[0] if self._traces is not None else token

    def _trace_end(self, traces: "Traces", completion: Completion, entry: Entry | None) -> Completion:
        """Begin the span of a request's end. Returns the completion with its token as the fleet signed it."""
        own, parent = accounting_token.split_trace(completion.accounting_token)
        if not parent and entry is not None and entry.owned:
            parent = entry.traceparent
        if parent:
            traces.settling(parent, completion)
        return completion._replace(accounting_token=own)
