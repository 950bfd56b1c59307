"""Fails over to local admission when Redis becomes unavailable, and later back to Redis (G8; docs/redis.md).

admission.py asks for each request whether Redis or this replica decides; the store reports events of Redis.
"""

import asyncio
import enum
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from picker_fleet.admission.ledger import Ledger, Phase
from picker_fleet.admission.local_gate import RESIDUE, LocalGate, LocalPicker
from picker_fleet.admission.local_queue import rules_of
from picker_fleet.admission.outage import Outage, OutageStatus, Resync, unseen_s
from picker_fleet.admission.peers import (
    TRANSFER_WAIT_S,
    BudgetTransfer,
    EndedCharge,
    OutageCount,
    PeerClient,
    Peers,
    PeerState,
    RedisUse,
    lost_budget,
)
from picker_fleet.admission.quotas import Granted, Quotas, ToldQuotas, Usage
from picker_fleet.admission.reports import Reports
from picker_fleet.admission.shared_queue import SharedQueue
from picker_fleet.admission.tombstones import Tombstones
from picker_fleet.background import Work, keep
from picker_fleet.domain.errors import ScriptFailed, StateFault, StateUnavailable, WritesRefused
from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.scheduling.chooser import EndpointChooser
from picker_fleet.state import accounting_token
from picker_fleet.state.connection import FailureDetector
from picker_fleet.state.replies import Dispatched, Event, HeartbeatReply, Notification
from picker_fleet.state.store import Store
from picker_fleet.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)
_JITTER_S = 0.1  # longest random delay of a resync, so that replicas do not all resync at the same moment
_TICK_S = 0.2
_FETCH_S = 0.2  # pause, in seconds, before other replicas are asked for the ends of requests
_RECOVER_S = 1.0  # pause, in seconds, before each attempt to recover lost budget
_LATELY_S = 3.0  # a replica uses Redis if Redis has answered a heartbeat within this many seconds
_CUT_OFF = 0.2  # a replica without Redis for more than this fraction of `leases.inflight` may be cut off
_PAUSED_S = 2.0  # if this replica pauses, its peers need longer than this to return to Redis without it


@dataclass(frozen=True, slots=True)
class FailoverTimes:
    """Time limits in seconds. `newcomer_s`: a replica that joined fewer seconds ago starts an outage without
    budget, because its peers may not know it. `peers_wait_s`: a resync waits this long for peers to publish
    the completions that they received. A replica in the state RESYNCING waits `max_resync_s` for all peers to
    resync, and `straggler_s` for a late peer that is still live. `report_s` is the interval between two
    access-log entries of a running request.
    """

    report_s: float
    newcomer_s: float = 3.0
    peers_wait_s: float = 2.0
    max_resync_s: float = 3.5
    straggler_s: float = 15.0


class FailoverState(enum.Enum):
    """Whether Redis or this replica decides about admissions. The API and the metrics use the same values.

    | state     | event         | next      | action                                                         |
    |-----------|---------------|-----------|----------------------------------------------------------------|
    | SHARED    | REDIS_LOST    | LOCAL     | an `Outage` begins; waiting requests move to its queue         |
    | LOCAL     | REDIS_ANSWERS | RESYNCING | this replica, then its peers, report ends to Redis; afterwards |
    |           |               |           | this replica reports its running requests                      |
    | RESYNCING | REDIS_LOST    | LOCAL     | the budget is limited to this replica's share                  |
    | RESYNCING | ALL_RESYNCED  | SHARED    | waiting requests join the shared queue; the `Outage` ends      |

    In LOCAL, a request is admitted if the budget covers its cost. In RESYNCING, an admission needs both the
    budget and Redis. The replica reports the ends of requests to Redis in RESYNCING and again on the way to
    SHARED, because another replica may have restored a request whose end it had not received. An event that
    the table does not list changes nothing.
    """

    SHARED = "shared"
    LOCAL = "local"
    RESYNCING = "resyncing"


class FailoverEvent(enum.Enum):
    """REDIS_LOST: Redis refuses connections, probes prove its silence (state/connection.py), or a decision
    failed. REDIS_ANSWERS: Redis has answered enough heartbeats in a row. ALL_RESYNCED: every replica that was
    live has resynced, or a limit of `FailoverTimes` has ended the wait.
    """

    REDIS_LOST = enum.auto()
    REDIS_ANSWERS = enum.auto()
    ALL_RESYNCED = enum.auto()


_SHARED, _LOCAL, _RESYNCING = FailoverState.SHARED, FailoverState.LOCAL, FailoverState.RESYNCING
_TRANSITIONS: Mapping[tuple[FailoverState, FailoverEvent], FailoverState] = {
    (_SHARED, FailoverEvent.REDIS_LOST): _LOCAL,
    (_LOCAL, FailoverEvent.REDIS_ANSWERS): _RESYNCING,
    (_RESYNCING, FailoverEvent.REDIS_LOST): _LOCAL,
    (_RESYNCING, FailoverEvent.ALL_RESYNCED): _SHARED,
}


@dataclass(slots=True)
class Stock:
    """The figures in the reply to the last heartbeat, as of when Redis was in use."""

    pulse: HeartbeatReply
    seen_s: float


class _Moment(NamedTuple):
    """A time, by which this process has been paused for `paused_s` seconds in all."""

    at_s: float
    paused_s: float


class Failover:
    """Decides whether requests are admitted through Redis or in an `Outage`. All calls come from one event
    loop.

    The callback `heartbeat_now` sends a heartbeat, which also probes Redis; with `full=False` the replica
    need not read the whole shared state. The attribute `outage` is None while Redis decides.
    """

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        queue: SharedQueue,
        reports: Reports,
        *,
        replica: str,
        metrics: Metrics,
        endpoints: SnapshotCell,
        chooser: EndpointChooser,
        failure_detector: FailureDetector,
        fleet: KnownFleet,
        heartbeat_now: Callable[..., None],
        peer_client: PeerClient,
        times: FailoverTimes,
        clock: Callable[[], float],
    ) -> None:
        self._store, self.ledger, self._queue, self._reports = store, ledger, queue, reports
        self._metrics, self._endpoints, self._chooser = metrics, endpoints, chooser
        self._failure_detector, self._fleet = failure_detector, fleet
        store.on_event = self.on_event
        self._heartbeat_now, self._peer_client = heartbeat_now, peer_client
        self._times, self._clock = times, clock
        self._peers = Peers(replica)
        self.told = ToldQuotas()  # tenants' balances in Redis's last replies
        self.tombstones = Tombstones(
            store,
            replica,
            ledger,
            may_publish=lambda: self.state is not _LOCAL,
            may_settle=lambda: not self.degraded,
            heartbeat_now=heartbeat_now,
            peers_wait_s=times.peers_wait_s,
            clock=clock,
        )
        self.state = _SHARED
        self.outage: Outage | None = None  # the current outage; None in the state SHARED
        self.is_cut_off = False  # whether other replicas use Redis and this replica cannot
        self.placed = 0.0  # cost of the requests placed through Redis since the last heartbeat
        self.prepaid = 0.0  # budget held by requests that entered the shared queue while RESYNCING
        self.is_busy = False  # whether this replica has placed or ended requests since the last tick
        self.ignored_s = -math.inf  # when this replica last ignored a report that a request runs
        # The latest moment until which no other replica can have used this replica's part of the bound.
        self._sound = self._moment()
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio tasks of the current outage
        self.stock: Stock | None = None  # None until this replica has joined the pool
        self._joined_s = 0.0
        # The numbers of successive heartbeats that Redis has answered, and that have failed.
        self._answered_heartbeats = self._failed_heartbeats = 0
        metrics.failover(self.state.value)

    @property
    def degraded(self) -> bool:
        """Whether this replica has state that Redis lacks."""
        return self.outage is not None and not self.outage.resynced

    @property
    def is_in_doubt(self) -> bool:
        """Whether this process was paused for so long that other replicas may have used this replica's part
        of the bound: before Redis was lost, or because they returned to Redis without this replica."""
        return self._moment().paused_s - self._sound.paused_s > _PAUSED_S

    def _moment(self) -> _Moment:
        return _Moment(self._clock(), self._queue.pause_detector.paused_s)

    def status(self) -> OutageStatus | None:
        """The current outage as the admin API shows it; None while Redis decides."""
        return self.outage.status(self.state.value, self._times.report_s) if self.outage is not None else None

    # Peers call the following methods.

    async def transfer_budget(self, minimum: float, maximum: float) -> float:
        """Give a peer between `minimum` and `maximum` of this replica's budget; 0 if less is available."""
        if self.outage is None:
            return 0.0
        return await self.outage.gate.transfer_budget(minimum, maximum, TRANSFER_WAIT_S)

    def outage_count(self) -> OutageCount | None:
        """This replica's figures for `peers.lost_budget`; None if it does not know which requests ran when
        the outage began."""
        outage = self.outage
        if outage is None or outage.resync_attempted or self.state is not _LOCAL or self.is_in_doubt:
            return None
        # Wait until each running request has a new access-log entry: its last entry may have gone to a
        # replica that has left, or this replica may have ignored that entry.
        since_s = max(self._peers.left_s, self._joined_s, self.ignored_s)
        if self._clock() - since_s < unseen_s(self._times.report_s):
            return None
        running = {name: outage.gate.charge(cost) for name, cost in outage.before.items()}
        return OutageCount(len(self._peers.live), outage.bound, outage.initial_free, running)

    def redis_use(self) -> RedisUse:
        now_s, stock, outage = self._clock(), self.stock, self.outage
        uses = outage is None and stock is not None and now_s - stock.seen_s < _LATELY_S
        return RedisUse(uses, now_s - outage.began_s if outage and self.state is _LOCAL else 0.0)

    def ended_before(self, ids: Collection[str]) -> list[str] | None:
        """The subset of `ids` whose ends this replica received before the outage; None without an outage."""
        if self.outage is None:
            return None
        return [request_id for request_id in ids if request_id in self.outage.ended_before]

    def ended(self, ids: Collection[str]) -> Mapping[str, EndedCharge] | None:
        """How the requests `ids` ended whose ends this replica received in the outage; None without one."""
        return self.outage.ended(ids) if self.outage is not None else None

    # The store and the heartbeat call the following methods.

    def on_event(self, event: Event) -> None:
        if isinstance(event, Notification):
            self._queue.notified(event)
        elif isinstance(event, Dispatched):
            self._queue.dequeued(event.attempts, event.successes)
        else:
            self.redis_lost(event.cause, event.reason)

    def heartbeat_fields(self) -> dict[str, object]:
        return {"degraded": self.degraded, **self.tombstones.heartbeat_fields()}

    def heartbeat_answered(self, pulse: HeartbeatReply) -> None:
        if self.state is not _LOCAL and pulse.epoch != "0":
            now_s = self._clock()
            self._joined_s = self._joined_s or now_s
            self.stock, self.placed = Stock(pulse, now_s), 0.0
            if self.outage is None:
                self._sound = self._moment()
        self._failed_heartbeats = 0
        self._answered_heartbeats += 1
        if self.state is _LOCAL and self._answered_heartbeats >= self._failure_detector.heartbeats_to_recover:
            self._transition(FailoverEvent.REDIS_ANSWERS, "answers")

    def heartbeat_missed(self, fault: StateFault) -> None:
        """Handle a failed heartbeat: after two error replies of Redis in a row, start an outage."""
        self._answered_heartbeats = 0
        self._failed_heartbeats += 1
        is_answered = isinstance(fault, ScriptFailed | StateUnavailable)
        if is_answered and self._failed_heartbeats >= 2 and not self._queue.pause_detector.resumed_recently:
            self.redis_lost("failed", str(fault))

    def redis_lost(self, cause: str, reason: str) -> bool:
        """Start an outage. Returns False if this replica has not joined the pool, and so has no budget.
        The arguments `cause` and `reason` are the fields of `RedisLost`."""
        self._answered_heartbeats = 0
        if self.stock is None:
            return False
        if self.state is not _LOCAL:
            _log.warning("Redis unavailable (%s); admitting locally within this replica's share", reason)
        self._transition(FailoverEvent.REDIS_LOST, cause)
        return True

    def update_peers(self, about: Mapping[str, Mapping[str, object]]) -> None:
        """Store the info of live replicas: replica id -> the JSON object that its heartbeat published."""
        replicas = {name: PeerState.read(said) for name, said in about.items()}
        self._peers.update(replicas, shared=self.outage is None, now_s=self._clock())
        self.tombstones.update_peers(replicas)

    # Fail over and back. The method `run` calls the public steps below; tests/model/returns.py calls the same
    # steps in any order and restores saved states.

    def save(self) -> tuple[Any, ...]:
        """A copy of the state on which the next transitions depend, without budget and queue."""
        return (
            self.state,
            self.outage is not None and self.outage.resynced,
            self.ledger.save(),
            self.tombstones.save(),
        )

    def restore(self, saved: tuple[Any, ...]) -> None:
        state, resynced, ledger, tombstones = saved
        if state is _SHARED:
            self.outage = None
        else:
            outage = self.outage or self.begin_outage()
            outage.resync = Resync(self._clock(), done=resynced) if state is _RESYNCING else None
        self.state = state
        self.ledger.restore(ledger)
        self.tombstones.restore(tombstones)

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(keep("failover-watch", self._watch), name="failover-watch")
                tasks.create_task(keep("tombstones", self.tombstones.run), name="tombstones")
        finally:
            self._cancel_tasks()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._tick()

    def _tick(self) -> None:
        if not self.is_in_doubt:
            self._sound = self._moment()
        self._queue.drop_expired()
        if self.outage is not None:
            self._heartbeat_now()
            if self.state is _RESYNCING and self._all_resynced(self.outage):
                self._transition(FailoverEvent.ALL_RESYNCED, "all-told")
        elif self.is_busy:
            # Read the stock from Redis again, since this replica has changed it.
            self.is_busy = False
            self._heartbeat_now(full=False)

    def _transition(self, event: FailoverEvent, cause: str) -> None:
        before, after = self.state, _TRANSITIONS.get((self.state, event))
        if after is None:
            return
        self.is_cut_off = False
        if before is _SHARED:
            outage = self.begin_outage()
            transfer = BudgetTransfer(outage.gate, self._peer_client, self._peers.addresses)
            self._start(transfer.run, "budget-transfer")
            self._start(partial(self._recover_budget, outage), "budget-recovery")
            self._start(partial(self._ask_peers, outage), "cut-off")
            self._start(partial(self._fetch_ends, outage), "ends")
        elif after is _LOCAL:
            self.abort_resync()
        elif after is _RESYNCING:
            self._start(partial(self._resync, *self.begin_resync()), "resync")
        else:
            self.end_outage()
        self._metrics.failover(after.value, cause)

    def begin_outage(self) -> Outage:
        now_s, stock = self._clock(), self.stock
        assert stock is not None
        pulse, config = stock.pulse, self._fleet.config
        live = self._peers.count(pulse)
        newcomer = now_s - self._joined_s < self._times.newcomer_s
        # Requests in the shared queue may hold local budget of an earlier outage (`prepaid`); they release it
        # when they return to the local queue.
        free = (0.0 if newcomer else self._own_part(stock)) - self.prepaid
        rules = rules_of(config, live, self._fleet.tenants)
        quotas = self._quotas_of_share(live)
        gate = LocalGate(
            self._metrics,
            free,
            pulse.upper,
            rules,
            paused=pulse.paused,
            quotas=quotas,
            is_in_doubt=lambda: self.is_in_doubt,
        )
        picker = LocalPicker(self._chooser, self._endpoints, self._fleet.in_flight, self._clock)
        outage = Outage(
            gate,
            picker,
            self.ledger,
            pulse.upper,
            pulse.upper / live,
            self._clock,
            before=self.ledger.costs(now_s - unseen_s(self._times.report_s)),
            ended_before=frozenset(entry.id for entry in self.tombstones.ends()),
            began_ms=self._store.now_ms(),
        )
        for request_id, reports in Counter(self._store.unsent_ends()).items():
            entry = self.ledger.get(request_id)
            if entry is None or entry.end is None or entry.confirmed:
                continue
            if not entry.end.is_late or reports > 1:  # a late end may repeat an end that released the cost
                gate.release(gate.charge(accounting_token.cost_of(entry.token)))
            self.ledger.finish(entry.end, entry.token)
        outage.initial_free = gate.free + self.prepaid
        self.outage = outage
        self._go_local()
        return outage

    def _quotas_of_share(self, live: int) -> Quotas | None:
        """This replica's share of the tenants' limits, with the balances that Redis reported last."""
        tree, settings = self._fleet.tenants, self._fleet.config.settings
        if tree is None or settings.tenants is None or settings.fair_request_queue.fairness == "none":
            return None
        quotas = Quotas(tree, settings.tenants.prices, self._store.now_ms, live=live)
        for flow, quota, at_ms in self.told.oldest_first():
            quotas.take_over(flow, quota, at_ms)
        return quotas

    def _own_part(self, stock: Stock) -> float:
        counts_requests = self._fleet.config.settings.request_queue_controller.unit == "requests"
        part = self._peers.own_part(stock.pulse, counts_requests=counts_requests)
        return max(part - self.placed, 0.0)

    def abort_resync(self) -> None:
        """End a resync because Redis is lost again: give up budget that other replicas may have got."""
        outage, stock = self.outage, self.stock
        assert outage is not None
        assert outage.resync is not None
        assert stock is not None
        resync, outage.resync = outage.resync, None
        if stock.seen_s > resync.began_s:
            # Other replicas may already be in the state SHARED. The stock in Redis no longer includes the
            # requests whose ends this replica reported in the resync.
            outage.gate.limit_budget(self._own_part(stock) - self.prepaid)
        else:
            outage.gate.limit_budget(outage.gate.free - resync.released)
        self._go_local()

    async def _recover_budget(self, outage: Outage) -> None:
        """Recover budget that belonged to calls in transit when Redis was lost. Only the replica with the
        least id recovers budget, once in an outage."""
        while (others := self._peers.others()) is not None and not outage.resync_attempted:
            await asyncio.sleep(_RECOVER_S)
            own = self.outage_count()
            if own is None:
                continue
            lost = await lost_budget(own, outage.ended_before, self._peer_client, others)
            if lost is None or self.outage_count() is None:
                continue
            if self._fleet.config.settings.request_queue_controller.unit == "requests":
                lost = float(math.floor(lost + RESIDUE))  # a fraction cannot start a request
            if lost > 0:
                _log.info(
                    "recovered %.3g of the bound from calls that were in transit when Redis was lost", lost
                )
                outage.gate.release(lost)
            return

    async def _fetch_ends(self, outage: Outage) -> None:
        """End the charges of requests whose ends other replicas received: Envoy sends its access log to one
        replica, but a request counts as in flight at the replica that placed it."""
        while True:
            await asyncio.sleep(_FETCH_S)
            ids = outage.gate.charged()
            peers = self._peers.addresses() if ids else []
            for ended in await asyncio.gather(*(self._peer_client.ended(peer, ids) for peer in peers)):
                for request_id, how in (ended or {}).items():
                    usage = Usage(*how.usage) if how.usage else None
                    outage.gate.end_charge(request_id, unserved=how.unserved, usage=usage)
            outage.gate.release(0.0)  # dispatches requests that waited for the charges to end

    async def _ask_peers(self, outage: Outage) -> None:
        """Find out whether other replicas use Redis, or used it while this replica was paused. If they do,
        Envoy must send requests and access-log entries to them: otherwise Redis would end the lease of each
        running request whose entries come to this replica, and admit another request (G1)."""
        patience_s = _CUT_OFF * self._fleet.config.settings.leases.inflight
        while True:
            now, is_in_doubt, said = self._moment(), self.is_in_doubt, list[RedisUse]()
            may_be_cut_off = now.at_s - outage.began_s >= patience_s
            if may_be_cut_off or is_in_doubt:
                asked = await asyncio.gather(*map(self._peer_client.redis_use, self._peers.addresses()))
                said = [each for each in asked if each is not None]
            unknown_s = now.at_s - self._sound.at_s - _PAUSED_S  # peers may have used Redis meanwhile
            if is_in_doubt and all(each.local_s >= unknown_s for each in said):
                self._sound, is_in_doubt = now, False
                outage.gate.release(0.0)
            is_alone = is_in_doubt or any(each.uses for each in said)
            was_cut_off = self.is_cut_off
            self.is_cut_off = may_be_cut_off and is_alone and self.state is _LOCAL
            if self.is_cut_off and not was_cut_off:
                _log.warning("other replicas use Redis, and this one cannot: it takes no requests")
            if self.is_cut_off:
                outage.gate.end_waits(
                    partial(StateUnavailable, "this replica has lost Redis", retry_after_s=1)
                )
            await asyncio.sleep(_RECOVER_S)

    def _go_local(self) -> None:
        self.state = _LOCAL
        self._failure_detector.record_failover(self._clock())
        self._queue.give_up()

    def begin_resync(self) -> tuple[Outage, Resync]:
        outage = self.outage
        assert outage is not None
        self.state, outage.resync = _RESYNCING, Resync(self._clock())
        outage.resync_attempted = True
        self.tombstones.begin_resync()
        return outage, outage.resync

    async def _resync(self, outage: Outage, resync: Resync) -> None:
        """Report requests in flight to Redis, which answers again; `finish_resync` reports ended requests."""
        if outage.resync is not resync:
            return  # this task was restarted after a failure, and Redis has been lost since then
        try:
            await asyncio.sleep(random.random() * _JITTER_S)
            await self.tombstones.publish()
            self._heartbeat_now()  # asks the other replicas to publish the ends that they received
            await self.tombstones.wait_for_peers(self._peers.live)
            running = await outage.restore_running(self._store, self._times.report_s)
        except (StateUnavailable, WritesRefused) as fault:
            if outage.resync is resync:
                self.redis_lost("failed", f"lost again during the resync: {fault}")
            return
        if outage.resync is resync:  # otherwise Redis was lost again, which has ended this resync
            self.finish_resync(resync)
            _log.info("Redis answers again; reported %d requests in flight to it", running)

    def finish_resync(self, resync: Resync) -> None:
        """Settle ended requests, once Redis has every request that this replica saw in flight."""
        self._queue.renew_owned_streams()
        self._tell_ends()
        resync.done = True
        self.tombstones.settle_restored()
        self._heartbeat_now()

    def _tell_ends(self) -> None:
        """Report to Redis each end of a request that this replica received in the outage."""
        for entry in self.ledger.journal():
            if entry.phase is Phase.ENDED and entry.end is not None:
                self._reports.tell_end(entry.end)

    def _all_resynced(self, outage: Outage) -> bool:
        """Whether all replicas have reported their requests in flight to Redis, or the wait has timed out."""
        now_s, resync = self._clock(), outage.resync
        if resync is None or not resync.done:
            return False
        waited_s, straggles = now_s - resync.began_s, self._peers.live_ones(self._straggles)
        if waited_s >= self._times.max_resync_s:
            # Wait longer for a live but late replica, which may still be using its share of the bound.
            return not straggles or waited_s >= self._times.straggler_s
        if now_s - outage.began_s < self._times.report_s:
            return False  # the access log may not yet have reported a request placed before the outage
        return not straggles and self._peers.all_resynced()

    def _straggles(self, replica: str, said: PeerState) -> bool:
        """Whether a replica has state that Redis lacks, or has not yet answered this replica's resync: its
        stored info may date from before the outage."""
        return said.degraded or not self.tombstones.peers_answered((replica,))

    def end_outage(self) -> None:
        outage, self.outage = self.outage, None
        assert outage is not None
        self.state = _SHARED
        self._failure_detector.record_recovery(self._clock())
        self._tell_ends()
        self.ledger.end_outage()
        outage.gate.hand_over_waiting()
        self._cancel_tasks()
        if granted := outage.gate.granted():
            self._start(partial(self._charge_granted, granted), "tenants")
        _log.info("resynced with Redis after %.1f s", self._clock() - outage.began_s)
        self._heartbeat_now()

    async def _charge_granted(self, granted: Iterable[Granted]) -> None:
        """Charge the tenants' limits in Redis for the requests that this replica granted without Redis."""
        for path, unit, per, amount in granted:
            try:
                await self._store.top_up_tenant(path, unit, per, -amount)
            except (ScriptFailed, StateUnavailable, WritesRefused) as fault:
                _log.warning("not all tenants' requests of the outage are charged: %s", fault)
                return

    def _start(self, work: Work, name: str) -> None:
        task = asyncio.create_task(keep(name, work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
