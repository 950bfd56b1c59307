"""A replica's membership in the fleet: heartbeats, publishing, sweeping, polling, renewal of leases.

pool.py runs the class `Membership`, which sends the heartbeats, renews leases, and runs a `Publisher`
(publisher.py), a `Sweeper` and a `NotificationPoller`. None of them admits or places a request.
"""

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from picker_fleet.admission.failover import Failover
from picker_fleet.admission.outage import OutageStatus
from picker_fleet.admission.shared_queue import SharedQueue
from picker_fleet.background import keep
from picker_fleet.domain.config import EffectiveConfig, Settings
from picker_fleet.domain.errors import ConfigError, OtherFormat, StateFault, StateUnavailable, WritesRefused
from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.domain.request import Endpoint
from picker_fleet.domain.sections import Leases
from picker_fleet.domain.tenants import Node
from picker_fleet.endpoints.snapshot import Snapshot, SnapshotCell, unmarked
from picker_fleet.fleet import live_config
from picker_fleet.fleet.info import EnvoyLimits
from picker_fleet.fleet.limits import LimitKeeper
from picker_fleet.fleet.publisher import UNKNOWN, Publisher, acknowledged
from picker_fleet.fleet.tenant_metrics import TenantMetrics
from picker_fleet.fleet.tenant_nodes import TenantNodes
from picker_fleet.fleet.usage import UsageMeter
from picker_fleet.state.pool_state import PoolState, marked
from picker_fleet.state.replies import HeartbeatReply, LiveConfig, SweepReply, is_older
from picker_fleet.state.server_check import ServerCheck
from picker_fleet.state.store import Store
from picker_fleet.telemetry.metrics import Metrics

T = TypeVar("T")
_log = logging.getLogger(__name__)
_RENEWALS = 3  # number of renewals of a lease within its duration
_OTHERS_PUBLISH_S = 0.2  # longest time that another replica should need to publish a change
_LOOKS = 5  # maximum extra heartbeats that look for a change published by another replica
_ACKNOWLEDGED_LOOK_S = 0.1  # interval of checks whether Envoys have acknowledged new endpoints

# A poll for notifications is one cheap command. If wake-ups arrive, polls find nothing. If no wake-up
# arrives, a poll finds a grant within `_MIN_POLL_S` seconds while grants are frequent, and always within
# `_MAX_POLL_S`. The pause between polls grows slowly, so that it stays short at a few grants a second.
_MIN_POLL_S = 0.01
_MAX_POLL_S = 0.1
_POLL_GROWTH = 1.1
_NO_LIST = "no_list"  # field of the replica info while discovery has reported no endpoint list
_SUSPECTS_S = 0.05  # interval of sweeps while requests may have ended without a report
_SWEEPS_OF_RATE = 3  # the rate of dispatches is mostly of so many sweeps


class HeartbeatTrigger:
    """Called to ask for a heartbeat before the interval ends. With `full=False` the replica then reads the
    whole shared state only if its last read is an interval old."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._brief = False

    def __call__(self, *, full: bool = True) -> None:
        self._brief = self._brief or not full
        self._asked.set()

    def take(self) -> bool:
        """Clear the request for a heartbeat. Returns whether a read of the shared state must follow."""
        brief, self._brief = self._brief, False
        self._asked.clear()
        return not brief

    async def wait(self) -> None:
        await self._asked.wait()


@dataclass(frozen=True, slots=True)
class SharedState:
    """The pool's state, and values that depend on this replica's configuration. `queue_fill` is the occupied
    part (0 to 1) of the queue. If `outage` is set, the state was read before that outage."""

    pool: PoolState
    watermark: float
    queue_fill: float
    outage: OutageStatus | None = None


class Sweeper:
    """Reclaims requests of dead replicas, and requests that stay silent. Calls `on_suspects` with the
    endpoints of requests that may have ended without a report."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        metrics: Metrics,
        on_suspects: Callable[[Sequence[str]], object],
    ) -> None:
        self._store, self._settings, self._metrics = store, settings, metrics
        self._on_suspects = on_suspects

    async def run(self) -> None:
        interval_s = self._settings.request_queue_controller.expiry_cleanup_interval
        while True:
            with contextlib.suppress(StateFault):
                swept = await self._sweep(interval_s)
                while swept.more or swept.suspects:
                    if swept.suspects and not swept.more:
                        await asyncio.sleep(min(_SUSPECTS_S, interval_s))
                    swept = await self._sweep(interval_s)
            await asyncio.sleep(interval_s)

    async def _sweep(self, interval_s: float) -> SweepReply:
        swept = await self._store.sweep(
            interval_s=interval_s,
            grace_s=self._settings.leases.adoption_grace,
            idle_s=self._settings.workloads.idle_after,
            unseen_s=_unseen_s(self._settings.leases),
        )
        self._metrics.reclaimed(swept.reclaimed)
        if swept.given_up:
            self._metrics.ghosts(swept.given_up)
            _log.warning("reclaimed %d requests that their endpoints do not run", swept.given_up)
        if swept.suspects:
            self._on_suspects(swept.suspects)
        return swept


class NotificationPoller:
    """Polls this replica's notifications while requests of `queue` wait, in case a wake-up is lost. A poll
    leaves the notifications in Redis; the heartbeat removes them."""

    def __init__(self, store: Store, queue: SharedQueue) -> None:
        self._store = store
        self._queue = queue

    async def run(self) -> None:
        pause_s = _MAX_POLL_S
        while True:
            await self._queue.any_waiting()
            await asyncio.sleep(pause_s)
            found = await self._poll()
            pause_s = _MIN_POLL_S if found else min(_POLL_GROWTH * pause_s, _MAX_POLL_S)

    async def _poll(self) -> int:
        """Read this replica's notifications from Redis and deliver them; return how many were new."""
        found = 0
        with contextlib.suppress(StateFault):
            for notification in await self._store.notifications():
                # Skip a grant whose placement Redis has yet to answer: the grant stays listed until then.
                if not self._queue.is_placing(notification.request_id):
                    found += self._queue.notified(notification)
        return found


class Membership:
    """Sends this replica's heartbeats, and acts on each reply: publishes, registers requests again, follows
    live changes, reads the shared state. One event loop.

    Each heartbeat publishes `replica_info()` as JSON; `heartbeat_now` asks for a heartbeat at once. Each live
    change calls `on_config` with the configuration and its live changes; `on_suspects` is for `Sweeper`. Each
    heartbeat also sends the counts of `usage`, which only fleets with tenants have.
    """

    def __init__(
        self,
        store: Store,
        queue: SharedQueue,
        settings: Settings,
        *,
        endpoints: SnapshotCell,
        metrics: Metrics,
        replica_info: Callable[[], Mapping[str, object]],
        fleet: KnownFleet,
        failover: Failover,
        heartbeat_now: HeartbeatTrigger,
        limits: LimitKeeper,
        on_config: Callable[[EffectiveConfig], object],
        on_suspects: Callable[[Sequence[str]], object],
        usage: UsageMeter | None = None,
    ) -> None:
        self._store, self._queue, self._settings, self._leases = store, queue, settings, settings.leases
        self._endpoints, self._metrics, self._replica_info = endpoints, metrics, replica_info
        self._published = endpoints.current  # the endpoints that Redis had last
        self._fleet, self.heartbeat_now, self._failover = fleet, heartbeat_now, failover
        self._limits, self._on_config, self._usage = limits, on_config, usage
        self._clock = asyncio.get_running_loop().time
        self._tenant_metrics = TenantMetrics(store, metrics, self._clock)
        self._unqueued_s = self._clock()  # when no request of the fleet waited, as far as known
        self._publisher = Publisher(store, settings)
        self._tenants = TenantNodes(store, settings)
        self._sweeper = Sweeper(store, settings, metrics, on_suspects)
        self._server_check = ServerCheck(store, lambda: self.trouble, metrics.redis_unfit)
        self._envoy_limits = EnvoyLimits(self._clock)
        # The last heartbeat's reply; None before the first reply, and while the pool has another format.
        self.pulse: HeartbeatReply | None = None
        self.refusal = ""  # why this replica may not join the pool, and the remedy; '' if it may
        self.live_config = LiveConfig()  # the configuration's live changes, as of the last heartbeat
        self._followed = ("", "")  # (epoch of the shared state, version) of the live changes last applied
        self._joined = asyncio.Event()  # set once this replica has joined a known pool
        self._fault = ""  # why the last heartbeat failed; '' if it succeeded
        self._answered_s = -math.inf
        self._left = False
        self._epoch = ""
        self._connection_epoch = 0
        self._stored_info = ""  # the replica info that the shared state has; '': unknown
        self._lost = False  # whether the shared state may lack this replica's requests
        self._state: SharedState | None = None  # the shared state read last
        self._followed_s = -math.inf  # when all parts of the replica last got the shared state
        self._follow_up: asyncio.TimerHandle | None = None

    def leads(self) -> bool:
        """Whether this replica is the leader, which writes for the whole fleet."""
        return self.pulse is not None and self.pulse.leader

    @property
    def trouble(self) -> str:
        """Why the last heartbeat failed although Redis can be reached; '' if it succeeded."""
        return "" if self._store.fault else self._fault

    @property
    def unfit(self) -> str:
        """Why the configuration of Redis is unfit for the shared state; '' if the configuration is fit."""
        return self.trouble or "; ".join(self._server_check.faults.values())

    @property
    def has_list(self) -> bool:
        """Whether this replica's own discovery has reported endpoints, even an empty list."""
        return self._publisher.has_list

    @property
    def effective(self) -> EffectiveConfig:
        """The configuration with the live changes applied, as of the last heartbeat."""
        return self._fleet.config

    @property
    def status(self) -> str:
        """`ok`, or the failover state while this replica works without the shared state."""
        outage = self._failover.status()
        return "ok" if outage is None else f"{outage.mode}: without the shared state"

    async def endpoints(self) -> tuple[Endpoint, ...]:
        """Read the pool's endpoints; during an outage return the last known. Raises StateUnavailable."""
        if self._failover.status() is not None:
            return self._endpoints.current.endpoints
        return await self._store.endpoints()

    async def state(self) -> SharedState:
        """Read the shared state; in an outage return the state read last. Raises StateUnavailable."""
        if (outage := self._failover.status()) is None:
            try:
                return await self._read()
            except StateUnavailable:
                if (outage := self._failover.status()) is None:  # unless an outage began during the read
                    raise
        if self._state is None:
            raise StateUnavailable("the shared state has not been read yet", retry_after_s=1)
        return replace(self._state, outage=outage)

    async def known(self) -> None:
        """Wait until this replica has joined a pool that a replica has published."""
        await self._joined.wait()

    def discovered(self, endpoints: Sequence[Endpoint]) -> None:
        """Use the endpoints that discovery reports. The leader publishes reported endpoints at once. Any
        other replica reads the published endpoints when the leader should have published the same change."""
        self._publisher.discovered(endpoints)
        self._follow_discovery()
        if self.pulse is None or self.pulse.leader:
            self.heartbeat_now(full=self.pulse is None)
        if self._follow_up is not None:
            self._follow_up.cancel()
        self._look_later(_LOOKS)

    def tenants_found(self, nodes: Sequence[Node]) -> None:
        """Use the nodes of tenants from the watched file. The leader publishes these nodes at once."""
        self._tenants.found(nodes)
        self.heartbeat_now(full=False)

    def _follow_discovery(self) -> None:
        """In an outage, use the endpoints that this replica discovers itself."""
        if self._failover.status() is not None:
            # Without a stream from Envoy, this replica cannot know whether another replica has one.
            self._publisher.acknowledged(self._endpoints.current, [self._endpoints.acknowledged or ""])
            self._endpoints.publish(self._publisher.in_outage(self._published))

    def _look_later(self, looks: int) -> None:
        after_s = _ACKNOWLEDGED_LOOK_S if self._publisher.awaits_envoys else _OTHERS_PUBLISH_S
        self._follow_up = asyncio.get_running_loop().call_later(after_s, self._look, looks)

    def _look(self, looks: int) -> None:
        """Ask for a heartbeat unless the discovered endpoints are published; check again later in case the
        leader or Envoys are late."""
        self._follow_up = None
        awaits_envoys = self._publisher.awaits_envoys
        if awaits_envoys or not self._publisher.discovered_last(self._endpoints.current.version):
            self.heartbeat_now(full=False)
            if looks > 1 or awaits_envoys:
                self._look_later(looks if awaits_envoys else looks - 1)

    async def run(self) -> None:
        """Run all tasks of the membership until cancelled. Faults of Redis are retried, never raised."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(keep("heartbeat", self._beat_forever))
            tasks.create_task(keep("sweep", self._sweeper.run))
            tasks.create_task(keep("server-check", self._server_check.run))
            tasks.create_task(keep("renewal", self._renew_leases))
            tasks.create_task(keep("notifications", NotificationPoller(self._store, self._queue).run))

    async def leave(self, deadline_s: float) -> None:
        """Leave the pool, so that other replicas need not wait `leases.replica_silence` first."""
        self._left = True
        with contextlib.suppress(StateFault, TimeoutError):
            async with asyncio.timeout(deadline_s):
                if self._usage is not None:
                    await self._usage.flush(leaves=True)
                await self._store.leave()

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(self._leases.inflight / _RENEWALS)
            await self._queue.pause_detector.wait_for_backlog()
            self._queue.renew_owned_streams(is_due=True)

    # Heartbeats

    async def _beat_forever(self) -> None:
        interval_s = self._leases.heartbeat
        while True:
            began_s = self._clock()
            full = self.heartbeat_now.take()
            if self._left:
                return
            try:
                await self._beat(full)
            except StateFault as fault:
                if isinstance(fault, OtherFormat):
                    self._stay_out(fault)
                elif str(fault) != self._fault and self._failover.status() is None:
                    _log.warning("a heartbeat failed: %s", fault)
                self._fault = str(fault)
                self._failover.heartbeat_missed(fault)
                self._follow_discovery()
            with contextlib.suppress(TimeoutError):
                # Measure the interval from the last start: it bounds the delay of a grant without a wake-up.
                rest_s = interval_s - (self._clock() - began_s)
                async with asyncio.timeout(max(rest_s, interval_s / 2)):
                    await self.heartbeat_now.wait()

    def _stay_out(self, fault: OtherFormat) -> None:
        """Forget the pool: another software version has written the pool in another format."""
        refusal = (
            f"{fault}: stop the replicas that use it and delete the keys epp:{{{self._settings.pool}}}:*, "
            "or set another pool (docs/upgrading.md)"
        )
        if refusal != self.refusal:
            _log.error("not joining: %s", refusal)
        self.refusal, self.pulse = refusal, None
        self._published = Snapshot("", ())
        self._endpoints.publish(self._published)  # no endpoints: scrape none, route to none

    async def _beat(self, full: bool) -> None:
        pulse = await self._send()
        self.refusal = self._fault = ""
        publishes = await self._publishes(pulse)
        if self._publisher.awaits_envoys and (publishes or pulse.epoch == UNKNOWN):
            versions = acknowledged((await self._read()).pool)
            self._publisher.acknowledged(self._endpoints.current, versions)
        if self._publisher.is_due(pulse, publishes=publishes):
            with contextlib.suppress(WritesRefused):  # the last publication stays valid; heartbeats go on
                rebuilt = await self._publisher.publish(pulse)
                if rebuilt is not None and self._epoch:
                    _log.error(
                        "Redis lost the key %s; rebuilt the pool from %d request records",
                        rebuilt.lost or "pool",
                        rebuilt.records,
                    )
            pulse = await self._send()
            if pulse.epoch == UNKNOWN:
                # The script `publish` has not rebuilt the pool completely: publish again.
                self.heartbeat_now(full=False)
        self.pulse = pulse
        self._queue.fleet_queued = pulse.queued
        if self._lost:
            await self._drain_again(pulse)
        if pulse.endpoints_version != self._endpoints.current.version:
            self._published = Snapshot(pulse.endpoints_version, await self._endpoints_of(pulse))
            self._endpoints.publish(self._published)
            self._publisher.in_force(self._published)
        if pulse.epoch == UNKNOWN:
            return
        if self._lost:
            _log.warning("Redis may have lost the requests of this replica; registering them again")
            await self._register_again(pulse.epoch)
        self._epoch = pulse.epoch
        with contextlib.suppress(WritesRefused):  # the nodes in force stay valid; heartbeats go on
            await self._beating(self._tenants.publish(pulse))
        self._joined.set()
        await self._follow_changes(pulse)
        if full or self._clock() - self._followed_s >= self._leases.heartbeat:
            await self._follow_state()
            if self._usage is not None:
                await self._tenant_metrics.look(self._fleet.tenants if self.leads() else None, self._epoch)
                with contextlib.suppress(WritesRefused):  # unsent usage stays here; heartbeats go on
                    await self._usage.flush()

    async def _publishes(self, pulse: HeartbeatReply) -> bool:
        """Whether this replica publishes endpoints for the fleet (publisher.py)."""
        about = self._state.pool.about if self._state is not None else {}
        if about and _NO_LIST in about[min(about)]:
            about = (await self._read()).pool.about  # the leader's discovery may have a list by now
        if not about or _NO_LIST not in about[min(about)]:
            return pulse.leader
        listing = [replica for replica, info in about.items() if _NO_LIST not in info]
        return min(listing, default="") == self._store.replica

    async def _register_again(self, epoch: str) -> None:
        """Register this replica's requests with the shared state."""
        self._epoch, self._lost, registered = epoch, False, False
        try:
            registered = await self._beating(self._queue.register_again())
        finally:
            self._lost = self._lost or not registered

    async def _beating(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` while heartbeats go on: otherwise, if the work takes long, other replicas would take
        this one for dead and orphan its requests, and each heartbeat would begin the work anew."""
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait((task,), timeout=self._leases.heartbeat))[0]:
                with contextlib.suppress(StateFault):  # if Redis fails, `work` raises the fault
                    await self._call("")
            return task.result()
        finally:
            task.cancel()

    async def _endpoints_of(self, pulse: HeartbeatReply) -> tuple[Endpoint, ...]:
        """The published endpoints; of a list that this replica discovered itself, only the marks are read."""
        listed = self._publisher.endpoints_of(pulse.endpoints_version)
        if listed is None:
            return await self._store.endpoints()
        if pulse.endpoints_version == unmarked(pulse.endpoints_version):
            return listed
        return marked(listed, await self._store.marks(), await self._store.ejections())

    async def _send(self) -> HeartbeatReply:
        """Send a heartbeat. A heartbeat carries the replica info only if the info has changed or may be lost,
        which saves a tenth of its time in Redis."""
        info = self._info()
        if info == self._stored_info:
            pulse = await self._call("")
            if pulse.was_known and not self._lost:
                return pulse
        self._stored_info = ""  # if no reply arrives, the stored info is unknown
        pulse = await self._call(info)
        self._stored_info = info
        return pulse

    async def _call(self, info: str) -> HeartbeatReply:
        pulse = await self._store.heartbeat(info, self._leases.replica_silence)
        self._lost = self._lost or self._may_be_lost(pulse)
        self._failover.heartbeat_answered(pulse)
        return pulse

    def _info(self) -> str:
        about = dict(self._replica_info())
        served = about.pop("served", None)
        about |= self._failover.heartbeat_fields()
        if (version := self._endpoints.acknowledged) is not None:
            about["eds"] = version
        if not self.has_list:
            about[_NO_LIST] = True
        parts = [about] if served is None else [about, {"served": served}]
        return "\n".join(json.dumps(part, separators=(",", ":")) for part in parts)

    def _may_be_lost(self, pulse: HeartbeatReply) -> bool:
        """Whether the shared state may lack this replica's requests."""
        # A new connection may lead to a server that lacks the last writes of the former server (failover).
        reconnected = self._connection_epoch != self._store.connection_epoch
        self._connection_epoch = self._store.connection_epoch
        before_s, self._answered_s = self._answered_s, self._clock()
        if not self._epoch:
            return False
        was_silent = self._answered_s - before_s > self._leases.replica_silence
        is_gone = pulse.epoch != self._epoch or (not pulse.was_known and not was_silent)
        if is_gone and not reconnected and not self._lost:
            self._metrics.keys_lost()
        return reconnected or not pulse.was_known or pulse.epoch != self._epoch

    async def _drain_again(self, pulse: HeartbeatReply) -> None:
        """Restore the operator's drain marks in a shared state that has lost them, or lost their last changes
        (a restart from an old dump, a failover)."""
        wrong = [each for each in self._endpoints.current.endpoints if each.drained]
        if pulse.epoch == self._epoch:
            if not is_older(_marks_of(pulse.endpoints_version), _marks_of(self._published.version)):
                return
            drained = {address for mark, address in await self._store.marks() if mark == "drained"}
            known = self._endpoints.current.endpoints
            wrong = [each for each in known if each.drained != (each.address in drained)]
        for endpoint in wrong:
            await self._store.mark_endpoint(endpoint.address, "drained", endpoint.drained)

    async def _follow_changes(self, pulse: HeartbeatReply) -> None:
        """Apply new live changes; restore live changes in Redis if the shared state has lost them, or has
        lost the last ones (a restart from an old dump, a failover)."""
        if (pulse.epoch, pulse.tuned_version) == self._followed:
            return
        known, found = self.live_config, await self._store.live_config()
        has_lost = pulse.epoch == self._followed[0] and is_older(found.version, known.version)
        if has_lost or (not found.version and known.overrides):
            overrides, changes = (
                dict.fromkeys(old.keys() - new.keys()) | dict(new)
                for old, new in ((found.overrides, known.overrides), (found.changes, known.changes))
            )
            await self._store.set_live_config(overrides, changes)
            found = await self._store.live_config()
        self.live_config, self._followed = found, (pulse.epoch, found.version)
        try:
            self._fleet.config = live_config.applied(self._settings, self.live_config.changes)
        except ConfigError as fault:
            _log.warning("live changes do not fit this replica's configuration: %s", fault)
            self._fleet.config = EffectiveConfig(self._settings, {})
        why = self._fleet.config.settings.request_queue_controller.why_static
        if why and self._settings.request_queue_controller.is_adaptive:
            _log.warning("a live change made the limits %s", why)
        self._on_config(self._fleet.config)

    async def follow_tenants(self) -> None:
        """Read the nodes of tenants if they have changed."""
        if (tenants := await self._tenants.follow(self._epoch)) is not None:
            self._fleet.tenants = tenants

    async def _follow_state(self) -> None:
        """Read the whole shared state, and pass the state to the parts of the replica that use it."""
        state = await self._read()
        self._followed_s = self._clock()
        pool = state.pool
        self._fleet.live, self._fleet.in_flight = pool.replicas, pool.in_flight
        self._fleet.prefills = pool.prefill_in_flight
        self._fleet.busy = any(pool.in_flight.values())
        self._fleet.prompt_lines = pool.prompt_lines
        await self._beating(self.follow_tenants())
        self._metrics.pool(pool, state.watermark, state.queue_fill)
        bounds = self._fleet.config.settings.request_queue_controller
        least_most = (bounds.min_per_backend, bounds.max_per_backend) if bounds.is_adaptive else (None, None)
        self._metrics.limits_between(*least_most)
        if self.leads():
            self._envoy_limits.look(pool.about.values())
        with contextlib.suppress(WritesRefused):  # the limits in force stay valid; heartbeats go on
            await self._limits.look(pool, self._endpoints.current, leads=self.leads())
        self._queue.retry_after_s = pool.retry_after_s
        if not pool.queued:
            self._unqueued_s = self._clock()
        # Sooner the rate includes a time without a queue, and with as few dispatches as there were arrivals.
        is_known = self._clock() - self._unqueued_s >= _SWEEPS_OF_RATE * bounds.expiry_cleanup_interval
        self._queue.expected_wait_s = pool.queued / pool.drain_rate if is_known and pool.drain_rate else 0.0

    async def _read(self) -> SharedState:
        pool = await self._store.state(self._leases.replica_silence)
        if others := {each.address for each in self._endpoints.current.endpoints if not each.decodes}:
            limits = {address: limit for address, limit in pool.limits.items() if address not in others}
            pool = replace(pool, limits=limits)  # the default limit is only for requests that are decoded
        settings = self._fleet.config.settings
        bounds = settings.request_queue_controller
        self._state = SharedState(
            pool,
            watermark=pool.upper
            if bounds.is_adaptive
            else bounds.watermark_per_backend * pool.ready_backends,
            queue_fill=min(pool.queued / settings.fair_request_queue.total_capacity, 1.0),
        )
        self._failover.update_peers(pool.about)
        return self._state


def _marks_of(endpoints_version: str) -> str:
    """The number of changes of marks in a published version of the endpoints; '' before the first."""
    return endpoints_version.partition("+")[2]


def _unseen_s(leases: Leases) -> float:
    """The silence, in seconds, after which a request in flight is suspect: the longest interval between two
    signs of life, and a margin for a busy machine."""
    interval_s = max(leases.access_log_interval, leases.inflight / _RENEWALS)
    return interval_s + max(1.0, interval_s / 4)
