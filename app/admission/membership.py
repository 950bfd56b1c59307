"""A replica's part in the fleet: its heartbeat, the sweep, the leases it keeps, what it publishes."""

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Any

from app.admission.shared import SharedGate
from app.config import Settings
from app.endpoints.snapshot import Endpoint, Snapshot, SnapshotCell
from app.errors import StateUnavailable
from app.state.store import Pulse, Store
from app.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)


class Membership:
    """Keeps this replica known and the pool's shared facts in step; see `run`. One event loop.

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
        about: dict[str, str],
    ) -> None:
        self._store = store
        self._gate = gate
        self._settings = settings
        self._cell = endpoints
        self._metrics = metrics
        self._about = json.dumps(about, separators=(",", ":"))
        self._shared = _shared_settings(settings)
        self._config_version = _version(self._shared)
        self._discovered: tuple[Endpoint, ...] | None = None
        self._discovered_version = ""
        self._born = ""
        self._forgotten = False  # the shared state has yet to be told again what this replica holds
        self._poke = asyncio.Event()
        self._pulse: Pulse | None = None
        self._known = asyncio.Event()
        self._left = False

    @property
    def pulse(self) -> Pulse | None:
        """What the last heartbeat learned; None before the first."""
        return self._pulse

    async def known(self) -> None:
        """Wait until this replica has joined a pool that may admit."""
        await self._known.wait()

    async def state(self) -> dict[str, Any]:
        """The shared state now, with what this replica knows of its meaning. Raises StateUnavailable."""
        state = await self._store.state(self._settings.leases.replica_silence)
        watermark = self._settings.request_queue_controller.watermark_per_backend
        state["bounds"]["watermark"] = watermark * state["ready_backends"]
        state["degraded"] = False
        return state

    def discovered(self, endpoints: Sequence[Endpoint]) -> None:
        """Take the endpoints that discovery reports; published at once if this replica publishes."""
        self._discovered = tuple(sorted(endpoints, key=lambda endpoint: endpoint.address))
        facts = [[e.address, e.labels, e.draining] for e in self._discovered]
        self._discovered_version = _version(facts)
        self._poke.set()

    def poke(self) -> None:
        """Beat now rather than at the next interval."""
        self._poke.set()

    async def run(self) -> None:
        """Beat, sweep and renew until cancelled. Faults of Redis are waited out, never raised."""
        leases = self._settings.leases
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat_forever(leases.heartbeat))
            tasks.create_task(self._sweep_forever())
            tasks.create_task(self._renew_forever(leases.inflight / 3))

    async def leave(self, deadline_s: float) -> None:
        """Say goodbye, so that nobody waits out this replica's silence."""
        self._left = True
        with contextlib.suppress(StateUnavailable, TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._store.leave()

    async def _beat_forever(self, interval_s: float) -> None:
        while True:
            self._poke.clear()
            if self._left:
                return
            with contextlib.suppress(StateUnavailable):
                await self._beat()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._poke.wait()

    async def _beat(self) -> None:
        silence_s = self._settings.leases.replica_silence
        pulse = await self._store.heartbeat(self._about, silence_s)
        unknown = pulse.born == "0"
        if self._born and (unknown or not pulse.was_known or pulse.born != self._born):
            self._forgotten = True
        if self._discovered is not None and (unknown or (pulse.leader and self._differs(pulse))):
            await self._publish()
            pulse = await self._store.heartbeat(self._about, silence_s)
        self._pulse = pulse
        if pulse.endpoints_version != self._cell.current.version:
            self._cell.publish(Snapshot(pulse.endpoints_version, await self._store.endpoints()))
        if pulse.born == "0":
            return
        if self._forgotten:
            _log.warning("the shared state had lost this replica; registering what it holds")
            self._forgotten = not await self._gate.register_again()
        self._born = pulse.born
        self._known.set()
        self._metrics.pool(await self.state())

    def _differs(self, pulse: Pulse) -> bool:
        return (pulse.config_version, pulse.endpoints_version) != (
            self._config_version,
            self._discovered_version,
        )

    async def _publish(self) -> None:
        assert self._discovered is not None
        await self._store.publish(
            self._shared,
            self._discovered,
            config_version=self._config_version,
            endpoints_version=self._discovered_version,
        )

    async def _sweep_forever(self) -> None:
        settings = self._settings
        interval_s = settings.request_queue_controller.expiry_cleanup_interval
        while True:
            with contextlib.suppress(StateUnavailable):
                more = True
                while more:
                    swept = await self._store.sweep(
                        interval_s=interval_s,
                        grace_s=settings.leases.adoption_grace,
                        idle_s=settings.workloads.idle_after,
                    )
                    more = swept.more
                    self._metrics.reclaimed(swept.reclaimed)
            await asyncio.sleep(interval_s)

    async def _renew_forever(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            self._gate.renew_held()


def _shared_settings(settings: Settings) -> dict[str, float]:
    """The numbers every replica must agree on, under the names `lua/lib/pool.lua` reads."""
    queue, controller, leases = (
        settings.fair_request_queue,
        settings.request_queue_controller,
        settings.leases,
    )
    log = settings.decision_log
    return {
        "upper_per": controller.upper_per_backend,
        "lower_per": controller.lower_per_backend,
        "total_capacity": queue.total_capacity,
        "flow_capacity": queue.flow_capacity,
        "lease_ms": leases.inflight * 1000,
        # A replica that does not place a grant within this is as silent as one that does not beat.
        "grant_lease_ms": leases.replica_silence * 1000,
        "silence_ms": leases.replica_silence * 1000,
        "fallbacks": settings.scheduling.fallbacks,
        "log_max": log.max_entries if log.enabled else 0,
        "window_ms": settings.workloads.rate_window * 1000,
        "ema_alpha": settings.workloads.ema_alpha,
    }


def _version(facts: object) -> str:
    return hashlib.sha1(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
