"""Admission and endpoint choice by one replica alone, while Redis is unavailable (G8). All calls come from
one event loop.

An `Outage` owns one `LocalGate` and one `LocalPicker`. The gate admits requests within this replica's budget,
which is its share of the bound: starting a request acquires its cost from the budget, and the replica that
receives the request's end adds the cost to its own budget. So, over all replicas, the sum of free budgets and
costs in flight never grows (docs/redis.md).
"""

import asyncio
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from picker_fleet.admission.local_queue import LocalQueue, Rules, Waiting
from picker_fleet.admission.quotas import Granted, Lack, Quotas, Usage
from picker_fleet.admission.waits import Wait, refusal, time_up
from picker_fleet.domain.errors import (
    ClientGone,
    NoEndpoints,
    Preempted,
    RequestError,
    RequestIdTaken,
)
from picker_fleet.domain.request import InferenceRequest, largest_claim
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.scheduling.chooser import EndpointChooser
from picker_fleet.scheduling.explain import live_load_addresses
from picker_fleet.state.replies import Refused
from picker_fleet.state.schema import Refusal
from picker_fleet.telemetry.metrics import Metrics

RESIDUE = 1e-9  # tolerance for rounding errors in sums of fractions
_FAILED_S = 10.0  # an endpoint that refused a connection gets no requests for this many seconds


def part_of(free: float, *, live: int, rank: int, counts_requests: bool) -> float:
    """This replica's share of the free budget `free`, divided among `live` replicas, `rank` of which have
    lesser ids.

    If budget counts requests (`counts_requests`), shares are whole numbers, and the replicas with the least
    ids get one request more until the remainder is used up. If budget counts tokens, all shares are equal.
    """
    if free <= 0:
        return 0.0
    if not counts_requests:
        return free / max(live, 1)
    each, remainder = divmod(math.floor(free + RESIDUE), max(live, 1))
    return float(each + (rank < remainder))


@dataclass(slots=True)
class _TransferRequest:
    """A peer's request, still unanswered, for at least `minimum` of this replica's budget."""

    minimum: float
    granted: asyncio.Future[float]


class LocalGate:
    """One replica's budget and local queue. The event `has_waiting` is set while requests wait.

    The attribute `free` is the remaining budget, in the stock's unit. Neither `free` nor the cost of a
    request exceeds `bound`. A negative `free` is a debt, which released budget pays off first. If `paused`,
    the gate admits no request; while `is_in_doubt()` returns True, it uses no budget. Released budget goes in
    turn to the local queue and to each peer that waits for a budget transfer. `quotas` has this replica's
    share of tenants' limits; None without tenants.
    """

    def __init__(
        self,
        metrics: Metrics,
        free: float,
        bound: float,
        rules: Rules,
        *,
        paused: bool = False,
        quotas: Quotas | None = None,
        is_in_doubt: Callable[[], bool] = lambda: False,
    ) -> None:
        self._metrics, self._is_in_doubt = metrics, is_in_doubt
        self._loop = asyncio.get_running_loop()
        self.has_waiting = asyncio.Event()
        self.free = min(free, bound)
        self._bound, self._largest_claim = bound, largest_claim(rules.claim_share, bound)
        self._paused = paused
        self._quotas = quotas
        self._queue = LocalQueue(rules)
        self._waiting: dict[str, Waiting] = {}  # waiting requests by id
        self._waits: dict[str, float] = {}  # throttled node -> the loop's time when its balance suffices
        self._turns: deque[_TransferRequest | None] = deque([None])  # None stands for the local queue's turn

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def fill(self) -> float:
        """The occupied part of the local queue, 0 to 1."""
        return min(len(self._queue) / self._queue.capacity, 1.0)

    def lengths(self) -> dict[str, int]:
        return self._queue.lengths()

    def limit_budget(self, maximum: float) -> None:
        """Reduce the free budget to at most `maximum` (may be negative), since peers may own the rest."""
        self.free = min(self.free, maximum)

    def charge(self, cost: float) -> float:
        """The budget that a request of `cost` acquires: at most the largest claim, as in Lua scripts."""
        return min(cost, self._largest_claim)

    async def admit(self, request: InferenceRequest, cost: float, wait: Wait, *, alone: bool = True) -> bool:
        """Acquire `cost` of the budget, if necessary after a wait. Returns False if the shared queue must
        admit the request instead.

        If `alone` is False, the caller next asks the shared queue, which then counts a request that does not
        wait. Sets `wait.queued` if the request is queued.

        Raises:
            Dropped: the request was refused, was preempted or expired.
            DeadlineExceeded: the client's own deadline passed.
            ClientGone: a newer stream has taken the request over.
            RequestIdTaken: another waiting request has the same id.
            OverLimit: a tenant's limit refuses the request.
        """
        if self._quotas is None or not alone:  # unless `alone`, the shared queue charges the tenants' limits
            return await self._admit(request, cost, wait, alone=alone)
        request, keeps_charge = self._arrive(self._quotas, request), False
        try:
            keeps_charge = await self._admit(request, cost, wait, alone=alone)
            return keeps_charge
        except ClientGone:
            keeps_charge = True  # the newer stream takes over the charge of its tenants' limits
            raise
        finally:
            if not keeps_charge:
                self.end_charge(request.id, unserved=True)
                self._dispatch()

    async def _admit(self, request: InferenceRequest, cost: float, wait: Wait, *, alone: bool) -> bool:
        former = self._waiting.get(request.id)
        if former is not None and not request.repeats(former.request):
            raise RequestIdTaken()
        if former is not None and not former.turn.done():
            former.turn.set_exception(ClientGone("taken over by a newer stream"))
        has_turn = not self._paused and not len(self._queue) and not self._lacking(request.id)
        if has_turn and self.acquire(cost):
            self._start(request.id)
            if alone and not wait.queued:
                self._metrics.bypassed(request.model, request.target_model)
            return True
        if wait.arrived_s + request.ttl_s <= self._loop.time():
            raise self._time_up(request)
        waiting = self._enter(request, cost, wait.arrived_s)
        wait.queued = True
        return await self._wait(waiting)

    def _enter(self, request: InferenceRequest, cost: float, arrived_s: float) -> Waiting:
        try:
            waiting, preempted = self._queue.offer(request, cost, arrived_s)
        except RequestError as error:
            self._metrics.push_error(request.model, error.code, request.target_model)
            raise
        if preempted is not None:
            why = Preempted("preempted by a request of a higher band", retry_after_s=1)
            self._end_wait(preempted, why)
            self._metrics.preempted(preempted.request.band.name)
        waiting.turn = self._loop.create_future()
        self._waiting[request.id] = waiting
        self.has_waiting.set()
        self._dispatch()
        return waiting

    async def _wait(self, waiting: Waiting) -> bool:
        self._metrics.waiting(waiting.request, 1)
        timer = self._loop.call_at(waiting.deadline_s, self._end_wait, waiting, None)
        try:
            return await waiting.turn
        except asyncio.CancelledError:
            if _acquired(waiting.turn):
                self.release(waiting.cost)
            raise
        finally:
            timer.cancel()
            self._metrics.waiting(waiting.request, -1)
            self._leave(waiting)

    def _arrive(self, quotas: Quotas, request: InferenceRequest) -> InferenceRequest:
        """Charge an arriving request to its tenants' limits, unless an earlier stream has done so. Returns
        the request, in the lowest band if a tenant's limit demotes it."""
        is_new = request.id not in quotas.charges
        lack = quotas.arrive(request) if is_new else None
        if lack is not None:
            raise self._beyond(lack, quotas, request)
        if is_new and quotas.is_demoted(request.id):
            self._metrics.demoted(request.flow, quotas.tree)
        lowest = self._queue.lowest_band
        is_lower = quotas.is_demoted(request.id) and lowest.priority < request.band.priority
        return request._replace(band=lowest) if is_lower else request

    def _beyond(self, lack: Lack, quotas: Quotas, request: InferenceRequest) -> RequestError:
        """Count and return the error of a request that a tenant's limit refuses."""
        reason = Refusal.OVER_BURST if lack.over_burst else Refusal.OVER_LIMIT
        refused = Refused(reason, lack.retry_s, str(lack), quotas.shown(request.flow))
        error = refusal(refused, request, lack.retry_s, quotas.tree)
        assert error is not None
        self._metrics.push_error(request.model, error.code, request.target_model)
        self._metrics.over_limit(refused.limit, quotas.tree)
        return error

    def _lacking(self, request_id: str) -> tuple[str, float] | None:
        return self._quotas.lacking(request_id) if self._quotas is not None else None

    def _start(self, request_id: str) -> None:
        if self._quotas is not None:
            self._quotas.start(request_id)

    def quota(self, request_id: str) -> str:
        """The tenants' balances that the answer to a placed request shows (`Placement.quota`)."""
        return self._quotas.quota(request_id) if self._quotas is not None else ""

    def granted(self) -> list[Granted]:
        """The amounts of tenants' limits that this replica has granted without Redis."""
        return list(self._quotas.granted()) if self._quotas is not None else []

    def charged(self) -> list[str]:
        """The running requests that this replica has charged to tenants' limits. Another replica may have
        received the end of such a request."""
        charges = self._quotas.charges if self._quotas is not None else {}
        return [request_id for request_id, charge in charges.items() if charge.started]

    def end_charge(self, request_id: str, *, unserved: bool, usage: Usage | None = None) -> None:
        """End the charges of a request's tenants: correct them by its `usage` (prompt, cached and answer
        tokens), or refund them if the request is `unserved`."""
        quotas = self._quotas
        if quotas is None:
            return
        if usage is not None:
            quotas.use(request_id, usage)
        quotas.end(request_id, unserved=unserved)
        for child in quotas.eased():
            self._waits.pop(child, None)
            self._queue.unthrottle(child)

    def acquire(self, amount: float) -> bool:
        """Take `amount` of the budget if it is free, else return False. 0 is granted even in debt."""
        if amount > 0 and (self.free + RESIDUE < amount or self._is_in_doubt()):
            return False
        self.free -= amount
        return True

    def release(self, amount: float) -> None:
        """Add `amount` to the budget, up to the bound, and dispatch requests."""
        self.free += min(amount, max(self._bound - self.free, 0.0))
        self._dispatch()

    def shortage(self) -> tuple[float, float]:
        """The budget that the next waiting request lacks, and the cost of all waiting requests; 0, 0 if no
        request can be served."""
        turn = self._queue.turn(self._loop.time())
        if turn is None:
            return 0.0, 0.0
        total = sum(waiting.cost for waiting in self._waiting.values())
        return max(turn[0].cost - max(self.free, 0.0), 0.0), total

    async def transfer_budget(self, minimum: float, maximum: float, wait_s: float) -> float:
        """Give budget to a peer. If neither a request nor another peer waits here, give at once at most
        `maximum`; otherwise give `minimum` at the peer's turn. Returns the amount given; 0 if the peer's turn
        does not come within `wait_s` seconds."""
        self._turns = deque(each for each in self._turns if each is None or not each.granted.done())
        if not self._waiting and len(self._turns) == 1 and self.free >= minimum:
            granted = min(maximum, self.free)
            self.acquire(granted)
            return granted
        transfer = _TransferRequest(minimum, self._loop.create_future())
        self._turns.append(transfer)
        try:
            await asyncio.wait((transfer.granted,), timeout=wait_s)
        except asyncio.CancelledError:
            if transfer.granted.done():
                self.release(transfer.minimum)
            raise
        finally:
            transfer.granted.cancel()  # unless the transfer is granted, `_dispatch` will skip it
            self._dispatch()
        return transfer.granted.result() if not transfer.granted.cancelled() else 0.0

    def hand_over_waiting(self) -> None:
        """Send every waiting request to the shared queue, the oldest first."""
        for waiting in self._queue.all():
            if not waiting.turn.done():
                waiting.turn.set_result(False)

    def end_waits(self, error: Callable[[], RequestError]) -> None:
        """Refuse every waiting request with the error that `error` makes."""
        for waiting in self._queue.all():
            self._end_wait(waiting, error())

    def _dispatch(self) -> None:
        """Give the free budget to the local queue and to waiting peers, in turn."""
        if self._paused:
            return
        unused = 0  # number of successive turns that used no budget
        while unused < len(self._turns):
            transfer = self._turns[0]
            if transfer is None:
                served = self._serve_one()
                if served is None:
                    return  # the next request of the local queue costs more than the free budget
                self._turns.rotate(-1)
                unused = 0 if served else unused + 1
            elif transfer.granted.done():
                self._turns.popleft()
            elif not self.acquire(transfer.minimum):
                return
            else:
                self._turns.popleft()
                transfer.granted.set_result(transfer.minimum)
                unused = 0

    def _serve_one(self) -> bool | None:
        """Place one queued request locally. Returns False if no request can be served, None if the next one
        costs more than the free budget."""
        queue, now_s = self._queue, self._loop.time()
        while (turn := queue.turn(now_s)) is not None:
            waiting, by_guard = turn
            if waiting.turn.done():
                queue.remove(waiting)
            elif waiting.deadline_s <= now_s:
                self._end_wait(waiting, None)
            elif (lacking := self._lacking(waiting.id)) is not None:
                self._throttle(waiting, *lacking)
            elif self.acquire(waiting.cost):
                queue.serve(waiting, by_guard)
                self._start(waiting.id)
                waiting.turn.set_result(True)
                self._metrics.dequeued(1, 1)
                return True
            else:
                return None
        return False

    def _throttle(self, waiting: Waiting, child: str, wait_ms: float) -> None:
        """Let requests below the tenant node `child` wait until the node's balance suffices."""
        self._queue.throttle(waiting, child)
        if wait_ms < math.inf:
            self._waits[child] = self._loop.time() + max(wait_ms, 1.0) / 1000
            self._loop.call_at(self._waits[child], self._unthrottle, child)

    def _unthrottle(self, child: str) -> None:
        self._waits.pop(child, None)
        self._queue.unthrottle(child)
        self._dispatch()

    def _end_wait(self, waiting: Waiting, error: RequestError | None) -> None:
        """End a request's wait with `error`, or, if that is None, with the error of an expired request."""
        self._queue.remove(waiting)
        if not waiting.turn.done():
            waiting.turn.set_exception(error or self._time_up(waiting.request))

    def _time_up(self, request: InferenceRequest) -> RequestError:
        if not request.by_client:
            self._metrics.expired(request.model, request.target_model)
            if (quotas := self._quotas) is not None and request.id in quotas.charges:
                now_s = self._loop.time()
                waits = {child: (end_s - now_s) * 1000 for child, end_s in self._waits.items()}
                lack = quotas.longest_lack(request.id) or quotas.holding_up(request.id, waits)
                if lack is not None:
                    return self._beyond(lack, quotas, request)
        return time_up(request, retry_after_s=1)

    def _leave(self, waiting: Waiting) -> None:
        self._queue.remove(waiting)
        if self._waiting.get(waiting.id) is waiting:
            del self._waiting[waiting.id]
        if not self._waiting:
            self.has_waiting.clear()


def _acquired(turn: asyncio.Future[bool]) -> bool:
    return turn.done() and not turn.cancelled() and turn.exception() is None and turn.result()


class LocalPicker:
    """Picks endpoints by the last snapshot and this replica's own counts, without the Lua scripts.

    The argument `load` has the fleet's requests in flight by endpoint, as last read from Redis; the picker
    adds only changes by this replica.
    """

    def __init__(
        self,
        chooser: EndpointChooser,
        endpoints: SnapshotCell,
        load: Mapping[str, int],
        clock: Callable[[], float],
    ) -> None:
        self._chooser, self._endpoints, self._clock = chooser, endpoints, clock
        self._load = Counter(load)
        self._failed: dict[str, float] = {}  # failed endpoint -> the time until which it gets no request

    def pick(self, request: InferenceRequest, *, most: int) -> tuple[str, ...]:
        """At most `most` endpoints for `request`, the best first.

        Raises:
            NoEndpoints: neither a ready nor an ejected endpoint may serve the request.
        """
        now_s = self._clock()
        self._failed = {address: until_s for address, until_s in self._failed.items() if until_s > now_s}
        known = self._endpoints.current.decoders
        endpoints = [each for each in known if each.ready]
        ready = {each.address for each in endpoints}
        load = self._load
        full = {each.address for each in endpoints if load[each.address] >= (each.max_inflight or math.inf)}
        choice = self._chooser.choose(request)
        picked: tuple[str, ...] = ()
        ejected = {each.address for each in known if each.ejected and not (each.draining or each.drained)}
        for able in (ready - self._failed.keys() - full, ready - self._failed.keys(), ready, ejected):
            picked = picked or pick(
                choice.candidates,
                able,
                load,
                live_weight=self._chooser.live_weight,
                most=most,
                chance=random.random,
            )
        if not picked:
            self._chooser.refused(request, choice)
            raise NoEndpoints("no endpoint is ready that may serve this request", retry_after_s=1)
        live = ",".join(
            str(self._load.get(address, 0)) for address in live_load_addresses(choice.basis, picked)
        )
        self._chooser.placed(request, choice, picked, live)
        return picked

    def began(self, endpoint: str) -> None:
        self._load[endpoint] += 1

    def ended(self, endpoint: str) -> None:
        if self._load[endpoint] > 0:
            self._load[endpoint] -= 1

    def failed(self, endpoint: str) -> None:
        self._failed[endpoint] = self._clock() + _FAILED_S


def pick(
    candidates: str,
    ready: Collection[str],
    load: Mapping[str, int],
    *,
    live_weight: float,
    most: int,
    chance: Callable[[], float],
) -> tuple[str, ...]:
    """Pick up to `most` endpoints of `ready`, the best first, ties in random order; () if no candidate is
    ready. Pure.

    `candidates` has the format of `lua/lib/endpoints.lua`: '*' (any endpoint), 'a,b' (the least loaded is
    best), or 'a=0.7,b=0.5' (scores, from which `live_weight` times the endpoint's load over the largest load
    is subtracted). `load` has the requests in flight by endpoint.
    """
    scores: dict[str, float | None]
    if candidates == "*":
        scores = dict.fromkeys(ready)
    else:
        listed = (entry.partition("=") for entry in candidates.split(",") if entry)
        scores = {
            address: float(score) if score else None for address, _, score in listed if address in ready
        }
    top = max((load.get(address, 0) for address in scores), default=0) or 1

    def penalty(address: str) -> float:
        score, count = scores[address], load.get(address, 0)
        return float(count) if score is None else live_weight * count / top - score

    return tuple(sorted(scores, key=lambda address: (penalty(address), chance()))[:most])
