"""Keeps the endpoints' limits: the leader feeds the controller and stores its decisions for the scripts.

fleet/heartbeat.py calls `look` after each read of the shared state. Each stage has a controller. The
controllers' state is in Redis: a new leader continues from this state, as does a leader that another replica
may have replaced for a while.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial

from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.domain.sections import MOST_LIMIT
from picker_fleet.endpoints.readings import MetricsCache, Reading
from picker_fleet.endpoints.snapshot import Snapshot
from picker_fleet.fleet.limit_controller import EndpointLimit, LimitController, Misses, Observation, Page
from picker_fleet.scheduling.forecasts import broken_promise
from picker_fleet.scheduling.latency_model import LatencyModel
from picker_fleet.state.pool_state import PREFILL, FoundLimit, PoolState
from picker_fleet.state.store import Store
from picker_fleet.telemetry.metrics import Metrics

# The stages, by the prefix of an endpoint's address in the name of its limit.
_DECODE = ""
_STAGES = (_DECODE, PREFILL)

_log = logging.getLogger(__name__)


class LimitKeeper:
    """Finds the limits of a pool's endpoints while this replica is the leader and the mode is `adaptive`.

    `readings` has the endpoints' metrics pages, timed by `clock` (seconds); `latencies` predicts latencies.
    """

    def __init__(
        self,
        store: Store,
        fleet: KnownFleet,
        readings: MetricsCache,
        latencies: LatencyModel,
        clock: Callable[[], float],
        metrics: Metrics,
    ) -> None:
        self._store, self._fleet, self._clock, self._metrics = store, fleet, clock, metrics
        self._readings, self._latencies = readings, latencies
        # The controller of each stage; empty if the limits are unknown or another replica leads.
        self._controllers: dict[str, LimitController] = {}
        self._stored: Mapping[str, FoundLimit] = {}  # the limits in Redis, as far as this replica knows
        self._followed: Mapping[str, FoundLimit] = {}  # the limits in force when another replica last led
        self._epoch_us = 0  # the pool's epoch in which `_stored` was stored
        self._connection, self._looked_s = 0, 0.0  # the connection to Redis and the time of the last look
        self._settled_s = 0.0  # after this time no other replica takes itself for the leader
        self._dispatched = 0  # the number of grants at the last look

    async def look(self, pool: PoolState, snapshot: Snapshot, *, leads: bool) -> None:
        """Take the state `pool` and the newest pages into account. `snapshot` has the published endpoints.

        Raises:
            StateFault: the limits cannot be read or stored.
        """
        settings = self._fleet.config.settings
        bounds = settings.request_queue_controller
        if not (leads and bounds.is_adaptive):
            self._controllers = {}
            if bounds.is_adaptive:
                reason, changed_ms = "as before the leader changed", pool.now_us // 1000
                known = {
                    name: FoundLimit(limit, reason, changed_ms, unit=bounds.unit)
                    for name, limit in pool.limits_by_name.items()
                }
                # A pinned limit hides the found limit: keep the limit that was found before the pin.
                for name in [each for each in known if each.removeprefix(PREFILL) in bounds.pinned]:
                    del known[name]
                    if name in self._followed:
                        known[name] = self._followed[name]
                self._followed = known
            return
        in_tokens = bounds.unit == "tokens"
        if pool.paused or not snapshot.endpoints or (in_tokens and not bounds.enabled):
            return  # without a queue the scripts count no tokens in flight
        configured = {
            "least": bounds.min_per_backend,
            "most": bounds.max_per_backend or MOST_LIMIT,
            "initial": bounds.initial_limit,
        }
        now_s = self._clock()
        if not self._knows_the_limits(pool, now_s):
            found = await self._store.found_limits()
            if not self._controllers or (found and found != self._stored):
                # A rolling restart may have changed the unit: ignore limits in another unit.
                usable = {name: each for name, each in found.items() if each.unit == bounds.unit}
                self._controllers = {stage: LimitController(**configured) for stage in _STAGES}
                for stage, controller in self._controllers.items():
                    self._resume(controller, _of_stage(stage, usable or self._followed), pool.now_us, now_s)
                self._dispatched = pool.dispatched_total
            self._stored = found
        self._connection, self._looked_s = self._store.connection_epoch, now_s
        # If no request may wait, a limit that is reached is the only sign of a demand for more.
        never_wait = not bounds.enabled or settings.fair_request_queue.overload == "reject-noncritical"
        waiting = never_wait or pool.queued > 0 or pool.dispatched_total > self._dispatched
        self._dispatched = pool.dispatched_total
        readings = self._readings.snapshot()
        observed = {
            _DECODE: {
                address: Observation(
                    pool.in_flight.get(address, 0),
                    _page(readings.get(address)),
                    pool.endpoint_refusals.get(address, 0),
                    round(pool.amounts.get(address, 0.0)) if in_tokens else None,
                )
                for address in (each.address for each in snapshot.decoders)
            },
            # If limits are in tokens, the stage prefill has none (lua/lib/settings.lua).
            PREFILL: {
                address: Observation(pool.prefill_in_flight.get(address, 0), _page(readings.get(address)))
                for address in (each.address for each in snapshot.prefillers if not in_tokens)
            },
        }
        found = {}
        for stage, controller in self._controllers.items():
            controller.configure(**configured)
            before = controller.limits()
            controller.look(
                now_s,
                observed[stage],
                waiting=waiting,
                completed=pool.ended_total,
                misses=self._misses(stage, observed[stage], now_s),
            )
            for address, each in controller.endpoints.items():
                if (former := before.get(address)) is not None and former != each.limit:
                    self._metrics.limit_moved(each.limit - former)
                    whose = f"{'prefills on ' if stage else ''}{address}"
                    _log.info("limit of %s: %d, was %d: %s", whose, each.limit, former, each.reason)
                found[stage + address] = self._found(stage + address, each, pool.now_us, now_s)
        if found != self._stored or pool.born_us != self._epoch_us:
            await self._store.set_limits(found)
            self._stored, self._epoch_us = found, pool.born_us

    def _misses(self, stage: str, observed: Mapping[str, Observation], now_s: float) -> Misses | None:
        """Which limits of a stage would break a configured latency objective; None without objectives."""
        settings = self._fleet.config.settings
        if not settings.promises_latencies:
            return None
        promise = partial(
            broken_promise, self._latencies, settings.promised_latency, now_s, prefill=stage == PREFILL
        )
        return lambda address, limit: promise(address, limit / observed[address].mean_request)

    def _knows_the_limits(self, pool: PoolState, now_s: float) -> bool:
        """Whether Redis still has the limits that this replica stored last. After a while another replica may
        have led, and after a reconnection the server may be another primary, which lacks the last writes. A
        Redis that lost its state takes each replica for the leader until the others have reported."""
        silence_s = self._fleet.config.settings.leases.replica_silence
        if self._connection != self._store.connection_epoch or pool.born_us != self._epoch_us:
            self._settled_s = now_s + silence_s
        return bool(self._controllers) and now_s - self._looked_s < silence_s and now_s >= self._settled_s

    def _found(self, name: str, each: EndpointLimit, now_us: int, now_s: float) -> FoundLimit:
        """The state of the limit `name`, which the next leader continues."""
        changed_ms = int(now_us / 1000 - (now_s - each.changed_s) * 1000)
        former = self._stored.get(name)
        if former is not None and (former.limit, former.reason) == (each.limit, each.reason):
            changed_ms = former.changed_ms  # the limit has not moved, though the two clocks may differ by now
        return FoundLimit(
            each.limit,
            each.reason,
            changed_ms,
            each.grows_fast,
            each.full_at,
            each.pause_s,
            self._fleet.config.settings.request_queue_controller.unit,
        )

    @staticmethod
    def _resume(
        controller: LimitController, found: Mapping[str, FoundLimit], now_us: int, now_s: float
    ) -> None:
        """Continue from the limits `found` that an earlier leader stored."""
        for address, each in found.items():
            age_s = max(0.0, (now_us / 1000 - each.changed_ms) / 1000)
            controller.endpoints[address] = EndpointLimit(
                each.limit,
                each.reason,
                now_s - age_s,
                grows_fast=each.grows_fast,
                full_at=each.full_at,
                pause_s=each.pause_s,
                resumes_s=now_s if each.grows_fast else now_s + each.pause_s,
            )


def _of_stage(stage: str, found: Mapping[str, FoundLimit]) -> dict[str, FoundLimit]:
    """The limits of one stage by address, out of `found`, the limits of both stages."""
    return {
        name.removeprefix(stage): each
        for name, each in found.items()
        if name.startswith(PREFILL) is (stage == PREFILL)
    }


def _page(reading: Reading | None) -> Page | None:
    """The page in `reading`, if the controller can use it."""
    if reading is None or not reading.known:
        return None
    metrics = reading.metrics
    if metrics.waiting is None or metrics.running is None:
        return None
    return Page(
        metrics.scraped_ms / 1000,
        metrics.waiting,
        metrics.running,
        metrics.kv_utilisation,
        metrics.preemptions,
        metrics.started_s or 0.0,
    )
