"""The gate that goes on without the shared state (G8; docs/without-redis.md).

Which side it is on, and when it changes, is decided in `failover.outage`.
"""

from typing import Any

from picker_fleet.admission import accounting_token
from picker_fleet.admission.waiting import Wait
from picker_fleet.errors import ClientGone, StateUnavailable
from picker_fleet.failover.journal import Placed
from picker_fleet.failover.outage import Crossing, Mode
from picker_fleet.request import Alive, Completion, InferenceRequest, Placement


class FailoverGate(Crossing):
    """`admission.gate.Gate`: the shared one while it can be had, else this replica's own. One event loop.

    `effective` gives the configuration in force, `load` the fleet's requests by endpoint as last heard of,
    `heartbeat_now` sends a heartbeat, which is the probe of Redis; with `full=False` only its reply is read.
    """

    def status(self) -> dict[str, Any] | None:
        """What it is like without the shared state; None while there is one.

        `in_flight` counts requests let go here whose end was not heard here; others may have heard it.
        """
        if self._mode is Mode.SHARED:
            return None
        return {
            "mode": self._mode.value,
            "since_s": round(self._loop.time() - self._left_s, 3),
            "bound": self._bound,
            "share": self._share,
            "free": self._local.free,
            "let_go": self._let_go,
            "in_flight": len(self._outbox),
            "queued": self._local.waiting,
            "queue_length": self._local.lengths(),
        }

    def fill(self) -> float:
        """The queue's part that is taken, 0 to 1: the fleet's as of the last heartbeat, or this replica's own
        without the shared state."""
        if self._mode is not Mode.SHARED:
            return self._local.fill
        if self._pulse is None or not self._pulse.queued:
            return 0.0
        return min(self._pulse.queued / self._effective().settings.fair_request_queue.total_capacity, 1.0)

    async def admit(self, request: InferenceRequest, *, stream_owned: bool, age_s: float = 0.0) -> Placement:
        # One that came before has had a place that was lost: since then it waits.
        wait = Wait(self._loop.time() - age_s, queued=age_s > 0)
        try:
            placement = await self._admit(request, wait, stream_owned)
        except ClientGone:
            raise  # a newer stream of the request goes on with its wait
        except BaseException:
            if wait.queued:
                self._metrics.waited(request.model, self._waited_s(wait), False, request.target_model)
            raise
        return placement._replace(waited_s=self._waited_s(wait)) if wait.queued else placement

    def _waited_s(self, wait: Wait) -> float:
        return self._loop.time() - wait.arrived_s

    async def _admit(self, request: InferenceRequest, wait: Wait, stream_owned: bool) -> Placement:
        while True:
            if self._mode is Mode.SHARED:
                try:
                    age_s = self._waited_s(wait)
                    placement = await self._shared.admit(
                        request, stream_owned=stream_owned, age_s=age_s, wait=wait
                    )
                except StateUnavailable:
                    if self._shared.awake.just_woke:
                        continue  # what was asked before was given up; the next one pauses first
                    self.away("failed", "a decision could not be had")
                    if self._mode is Mode.SHARED:
                        raise  # nothing is known that could be gone by
                    continue
                self._gained += self._cost(request)
                self._busy = True
                self._tombstones.anew(request.id)
                return placement
            placed = await self._admit_alone(request, wait, stream_owned)
            if placed is not None:
                return placed

    async def _admit_alone(
        self, request: InferenceRequest, wait: Wait, stream_owned: bool
    ) -> Placement | None:
        cost = self._local.cost_of(self._cost(request))
        if not await self._local.admit(request, cost, wait, alone=self._mode is Mode.LOCAL):
            return None
        try:
            if self._mode is not Mode.LOCAL:
                self._prepaid += cost
                try:
                    age_s = self._waited_s(wait)
                    placement = await self._shared.admit(
                        request, stream_owned=stream_owned, age_s=age_s, wait=wait
                    )
                finally:
                    self._prepaid -= cost
                self._gained += cost
            else:
                fallbacks = self._effective().settings.scheduling.fallbacks
                picked = self._picker.pick(request, most=1 + fallbacks)
                placement = self._shared.placed_elsewhere(request, picked, stream_owned=stream_owned)
        except StateUnavailable:
            self._local.earn(cost)
            self.away("failed", "a decision could not be had")
            return None
        except BaseException:
            self._local.earn(cost)
            raise
        self._tombstones.anew(request.id)
        if self._mode is not Mode.SHARED:  # it may have come back just now
            endpoint = placement.endpoints[0]
            now_s = self._loop.time()
            self._outbox.placed(
                request.id, Placed(placement.attempt, placement.accounting_token, endpoint, cost, now_s)
            )
            self._picker.began(endpoint)
            self._let_go += 1
        return placement

    async def route(self, subset: tuple[str, ...] | None) -> Placement:
        return await self._shared.route(subset)

    async def confirm(self, request_id: str, placement: Placement, age_s: float) -> bool:
        mode, lease_s = self._mode, self._effective().settings.leases.inflight
        # Without the shared state: nobody else has it while its lease cannot have run out, nor where this
        # replica's own purse has paid for it.
        own = age_s < lease_s or bool(self._outbox.endpoint_of(request_id))
        if mode is Mode.LOCAL:
            return own
        try:
            if mode is Mode.SHARED or not own:
                return await self._shared.confirm(request_id, placement, age_s)
            await self._store.renew(request_id, placement.attempt, "", placement.accounting_token)
        except StateUnavailable:
            self.away("failed", "a place could not be confirmed")
            if self._mode is Mode.SHARED:
                raise
        return own

    def withdraw(self, request_id: str, placement: Placement) -> None:
        if self._mode is not Mode.SHARED:
            self._picker.ended(self._outbox.endpoint_of(request_id))
            self._local.earn(self._outbox.withdrawn(request_id))
        self._shared.withdraw(request_id, placement)

    def settle(self, completion: Completion) -> None:
        note = completion.accounting_token or self._shared.accounting_token_of(completion.id)
        if note or self._outbox.knows(completion.id):
            self._tombstones.heard(completion.id)
        if self._mode is Mode.SHARED:
            self._busy = True
            self._unanswered[completion.id] = completion, note
            self._shared.settle(completion, lambda: self._unanswered.pop(completion.id, None))
            return
        if self._mode is Mode.RETURNING:
            self._shared.settle(completion)
        if not (note or self._outbox.knows(completion.id)):
            return  # the end of one that was never placed: Envoy tells of refused ones, too
        self._picker.ended(self._outbox.endpoint_of(completion.id) or accounting_token.endpoint_of(note))
        if completion.failed:
            self._picker.failed(completion.failed)
        freed = self._outbox.ended(completion, note)
        if self._mode is Mode.LOCAL:
            self._shared.ended(completion)
            if freed is not None:
                self._metrics.completed(completion, accounting_token.model_of(note))
        if freed is not None:
            freed = self._local.cost_of(freed)
            self._regained += freed
            self._local.earn(freed)

    def suspect(self, request_id: str) -> None:
        if self._mode is not Mode.LOCAL:
            self._shared.suspect(request_id)

    def renew(self, alive: Alive) -> None:
        if self._tombstones.knows(alive.id):
            alive = alive._replace(accounting_token="")  # late, or told again: it brings nothing back
        # What was written while this process slept may be long over.
        if self._mode is not Mode.SHARED and not self._shared.awake.just_woke:
            self._outbox.alive(alive)
        if self._mode is not Mode.LOCAL:
            self._shared.renew(alive)

    def _cost(self, request: InferenceRequest) -> float:
        if not self._effective().settings.request_queue_controller.enabled:
            return 0.0  # nothing takes of the stock
        return request.cost + self._shared.answer_tokens if request.learn else request.cost
