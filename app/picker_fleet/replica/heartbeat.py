"""A replica's part in the fleet: its heartbeat, the sweep, the leases it keeps, what it publishes, and the
changes made live that it follows."""

import asyncio
import contextlib
import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from picker_fleet import live_config
from picker_fleet.admission.shared_gate import NotificationPoller, SharedGate
from picker_fleet.config import Settings
from picker_fleet.endpoints.snapshot import Endpoint, Snapshot, SnapshotCell
from picker_fleet.errors import ConfigError, StateFault, StateUnavailable, WritesRefused
from picker_fleet.failover.outage import OutageStatus
from picker_fleet.live_config import EffectiveConfig, LiveConfig, shared_settings
from picker_fleet.sections import Leases
from picker_fleet.state.store import Pulse, Store
from picker_fleet.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)
_LONGEST_RETRY_S = 60
_RENEWALS = 3  # of a lease, by who holds the request's stream


class Failover(Protocol):
    """What follows the heartbeat: the gate that can do without Redis (failover/gate.py)."""

    def heartbeat_fields(self) -> Mapping[str, object]:
        """What the heartbeat tells the other replicas: `degraded`, and what goes with it."""
        ...

    def heartbeat_answered(self, pulse: Pulse) -> None: ...

    def heartbeat_missed(self) -> None: ...

    def update_peers(self, about: Mapping[str, Mapping[str, Any]]) -> None: ...

    def status(self) -> OutageStatus | None: ...


class KnownFleet:
    """What this replica knows of the fleet, as of the last heartbeat; before the first, its configuration
    only."""

    def __init__(self, settings: Settings) -> None:
        self.config = EffectiveConfig(settings, {})  # with the live changes
        self.live: Sequence[str] = ()  # ids of the live replicas
        self.in_flight: Mapping[str, int] = {}  # requests by endpoint


class Membership:
    """Keeps this replica known and the pool's shared facts in step; see `run`. One event loop.

    `replica_info` is what it tells of itself with each heartbeat, JSON to be; a function is asked each time.
    `on_effective` hears the configuration with the live changes in it, whenever those are another.

    `on_suspects` is called with endpoints where requests in flight may have ended unheard.

    The replica with the least id publishes; any does while the pool is unknown (start, FLUSHALL).
    """

    def __init__(
        self,
        store: Store,
        gate: SharedGate,
        settings: Settings,
        *,
        endpoints: SnapshotCell,
        metrics: Metrics,
        replica_info: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        fleet: KnownFleet | None = None,
        failover: Failover | None = None,
        on_effective: Callable[[EffectiveConfig], object] = lambda _: None,
        on_suspects: Callable[[Sequence[str]], None] = lambda addresses: None,
    ) -> None:
        self._store = store
        self._gate = gate
        self._settings = settings
        self._cell = endpoints
        self._metrics = metrics
        self._replica_info = replica_info if callable(replica_info) else lambda: replica_info
        self._failover = failover
        self._fleet = fleet or KnownFleet(settings)
        self._on_effective = on_effective
        self._on_suspects = on_suspects
        self._state: dict[str, Any] = {}
        self._brief = False
        self._loop = asyncio.get_running_loop()
        self._read_s = -math.inf  # when the whole state was last read
        self._shared = shared_settings(settings, {})
        self._config_version = _version(self._shared)
        self._discovered: tuple[Endpoint, ...] | None = None
        self._discovered_version = ""
        self._born = ""
        self._lives = 0  # of the connection to the shared state, as of the last heartbeat
        self._forgotten = False  # the shared state has yet to be told again what this replica holds
        self._now = asyncio.Event()
        self._pulse: Pulse | None = None
        self._known = asyncio.Event()
        self._left = False
        self._live_config = LiveConfig()
        self._followed = ("", "")  # the life of the shared state and the version of changes in `_tuned`

    @property
    def pulse(self) -> Pulse | None:
        """What the last heartbeat learned; None before the first."""
        return self._pulse

    @property
    def live(self) -> Sequence[str]:
        """Ids of the live replicas, as of the last heartbeat; empty before it."""
        return self._fleet.live

    @property
    def in_flight(self) -> Mapping[str, int]:
        """The fleet's requests by endpoint, as of the last heartbeat."""
        return self._fleet.in_flight

    @property
    def live_config(self) -> LiveConfig:
        """The live changes, as of the last heartbeat."""
        return self._live_config

    @property
    def effective(self) -> EffectiveConfig:
        """The configuration with the live changes in it, as of the last heartbeat."""
        return self._fleet.config

    @property
    def standing(self) -> str:
        """`ok`, or that this replica works without the shared state."""
        alone = self._alone()
        return "ok" if alone is None else f"{alone.mode}: without the shared state"

    async def endpoints(self) -> tuple[Endpoint, ...]:
        """The pool's endpoints; without the shared state as last known. Raises StateUnavailable."""
        if self.standing != "ok":
            return self._cell.current.endpoints
        return await self._store.endpoints()

    async def known(self) -> None:
        """Wait until this replica has joined a pool that may admit."""
        await self._known.wait()

    async def state(self) -> dict[str, Any]:
        """The shared state now, with what this replica knows of its meaning. Raises StateUnavailable.

        While this replica works without it: as it was last known, and under `local` what it does by itself.
        """
        if (alone := self._alone()) is None:
            try:
                return await self._read()
            except StateUnavailable:
                if (alone := self._alone()) is None:  # it has not turned out to be away meanwhile
                    raise
        return {**self._state, "degraded": True, "local": asdict(alone)}

    def _alone(self) -> OutageStatus | None:
        return self._failover.status() if self._failover is not None else None

    async def _read(self) -> dict[str, Any]:
        state = await self._store.state(self._settings.leases.replica_silence)
        settings = self._fleet.config.settings
        watermark = settings.request_queue_controller.watermark_per_backend
        state["bounds"]["watermark"] = watermark * state["ready_backends"]
        state["queue_fill"] = min(state["queued"] / settings.fair_request_queue.total_capacity, 1.0)
        state["degraded"] = False
        about = state.pop("about", {})
        if self._failover is not None:
            self._failover.update_peers(about)
        self._state, self._read_s = state, self._loop.time()
        return state

    def discovered(self, endpoints: Sequence[Endpoint]) -> None:
        """Take the endpoints that discovery reports; published at once if this replica publishes."""
        self._discovered = tuple(sorted(endpoints, key=lambda endpoint: endpoint.address))
        facts = [[e.address, e.labels, e.draining, e.max_inflight] for e in self._discovered]
        self._discovered_version = _version(facts)
        self._now.set()

    def heartbeat_now(self, *, full: bool = True) -> None:
        """Send a heartbeat now rather than at the next interval; unless `full`, read only its own reply."""
        self._brief = self._brief or not full
        self._now.set()

    async def run(self) -> None:
        """Beat, sweep and renew until cancelled. Faults of Redis are waited out, never raised."""
        leases = self._settings.leases
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat_forever(leases.heartbeat))
            tasks.create_task(self._sweep_forever())
            tasks.create_task(self._renew_forever(leases.inflight / _RENEWALS))
            tasks.create_task(NotificationPoller(self._store, self._gate).run())

    async def leave(self, deadline_s: float) -> None:
        """Say goodbye, so that nobody waits out this replica's silence."""
        self._left = True
        with contextlib.suppress(StateFault, TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._store.leave()

    async def _beat_forever(self, interval_s: float) -> None:
        while True:
            began_s = self._loop.time()
            self._now.clear()
            if self._left:
                return
            try:
                await self._beat()
            except StateFault as fault:
                if not isinstance(fault, StateUnavailable):
                    _log.warning("a heartbeat failed: %s", fault)
                if self._failover is not None:
                    self._failover.heartbeat_missed()
            with contextlib.suppress(TimeoutError):
                # From beat to beat: a grant whose wake-up was lost waits no longer than one interval.
                rest_s = interval_s - (self._loop.time() - began_s)
                async with asyncio.timeout(max(rest_s, interval_s / 2)):
                    await self._now.wait()

    async def _beat(self) -> None:
        silence_s = self._settings.leases.replica_silence
        brief, self._brief = self._brief, False
        pulse = await self._heartbeat(silence_s)
        unknown = pulse.born == "0"
        # A new connection may lead to a server that lacks the last of what the former one took.
        anew, self._lives = self._lives != self._store.lives, self._store.lives
        if self._born and (unknown or anew or not pulse.was_known or pulse.born != self._born):
            self._forgotten = True
        if self._discovered is not None and (unknown or (pulse.leader and self._differs(pulse))):
            with contextlib.suppress(
                WritesRefused
            ):  # what is published already goes on, and so do heartbeats
                await self._publish()
            pulse = await self._heartbeat(silence_s)
        self._pulse = pulse
        if self._forgotten and pulse.born != self._born:
            await self._drain_again()
        if pulse.endpoints_version != self._cell.current.version:
            self._cell.publish(Snapshot(pulse.endpoints_version, await self._store.endpoints()))
        if pulse.born == "0":
            return
        if self._forgotten:
            _log.warning("the shared state may have lost this replica; registering what it holds")
            self._forgotten = not await self._gate.register_again()
        self._born = pulse.born
        self._known.set()
        await self._follow(pulse)
        if brief and self._loop.time() - self._read_s < self._settings.leases.heartbeat:
            return
        state = await self._read()
        self._fleet.live, self._fleet.in_flight = state["replicas"], state["in_flight"]
        self._metrics.pool(state)
        self._gate.retry_after_s = _retry_after_s(state["queued"], state["drain_rate"])

    async def _heartbeat(self, silence_s: float) -> Pulse:
        about = dict(self._replica_info())
        served = about.pop("served", None)
        about |= self._failover.heartbeat_fields() if self._failover is not None else {"degraded": False}
        parts = [about] if served is None else [about, {"served": served}]
        text = "\n".join(json.dumps(part, separators=(",", ":")) for part in parts)
        pulse = await self._store.heartbeat(text, silence_s)
        if self._failover is not None:
            self._failover.heartbeat_answered(pulse)
        return pulse

    async def _drain_again(self) -> None:
        """What an operator drained was lost with the shared state; whoever comes first brings it back."""
        for endpoint in self._cell.current.endpoints:
            if endpoint.drained:
                await self._store.mark(endpoint.address, "drained", True)

    async def _follow(self, pulse: Pulse) -> None:
        """Take over live changes; bring them back if they were lost with the shared state."""
        if (pulse.born, pulse.tuned_version) == self._followed:
            return
        if not pulse.tuned_version and self._live_config.overrides:
            await self._store.tune(self._live_config.overrides, self._live_config.changes)
        self._take(pulse.born, LiveConfig(*await self._store.tuned()))

    def _take(self, born: str, tuned: LiveConfig) -> None:
        self._live_config, self._followed = tuned, (born, tuned.version)
        try:
            self._fleet.config = live_config.applied(self._settings, tuned.changes)
        except ConfigError as fault:
            _log.warning("live changes do not fit this replica's configuration: %s", fault)
            self._fleet.config = EffectiveConfig(self._settings, {})
        self._on_effective(self._fleet.config)

    def _differs(self, pulse: Pulse) -> bool:
        endpoints_version = pulse.endpoints_version.partition("+")[0]  # less what has been marked since
        return (pulse.config_version, endpoints_version) != (self._config_version, self._discovered_version)

    async def _publish(self) -> None:
        assert self._discovered is not None
        await self._store.publish(
            self._shared,
            self._discovered,
            config_version=self._config_version,
            endpoints_version=self._discovered_version,
        )
        # What was changed live may mean other numbers under this configuration than under the last one.
        tuned = LiveConfig(*await self._store.tuned())
        with contextlib.suppress(ConfigError):
            wanted = live_config.overrides(self._settings, tuned.changes)
            if tuned.changes and wanted != {name: tuned.overrides.get(name) for name in wanted}:
                await self._store.tune(live_config.replacing(tuned.overrides, wanted), {})

    async def _sweep_forever(self) -> None:
        settings = self._settings
        interval_s = settings.request_queue_controller.expiry_cleanup_interval
        while True:
            with contextlib.suppress(StateFault):
                more = True
                while more:
                    swept = await self._store.sweep(
                        interval_s=interval_s,
                        grace_s=settings.leases.adoption_grace,
                        idle_s=settings.workloads.idle_after,
                        unseen_s=_unseen_s(settings.leases),
                    )
                    more = swept.more
                    self._metrics.reclaimed(swept.reclaimed)
                    if swept.ghosts:
                        self._metrics.ghosts(swept.ghosts)
                        _log.warning("gave up %d requests that their endpoints do not have", swept.ghosts)
                    if swept.suspects:
                        self._on_suspects(swept.suspects)
            await asyncio.sleep(interval_s)

    async def _renew_forever(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            self._gate.renew_owned_streams()


def _unseen_s(leases: Leases) -> float:
    """Without a sign of life for so long, a request in flight is suspect: the longest interval between two
    signs of life, and a margin for a busy machine."""
    interval_s = max(leases.access_log_interval, leases.inflight / _RENEWALS)
    return interval_s + max(1.0, interval_s / 4)


def _retry_after_s(queued: int, drain_rate: float) -> int:
    """How long the queue takes to drain, whole seconds; as the scripts tell it to whom they refuse."""
    if drain_rate <= 0:
        return 1
    return max(1, min(_LONGEST_RETRY_S, math.ceil((queued + 1) / drain_rate)))


def _version(facts: object) -> str:
    return hashlib.sha1(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
