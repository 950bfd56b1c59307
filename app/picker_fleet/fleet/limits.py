"""Keeps the endpoints' limits: the leader feeds the controller and stores its decisions for the scripts.

fleet/heartbeat.py calls `look` after each read of the shared state. The controller's state is in Redis:
a new leader goes on from it, and so does a leader that another replica may have replaced for a while.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial

from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.domain.sections import MOST_LIMIT
from picker_fleet.endpoints.readings import MetricsCache, Reading
from picker_fleet.fleet.limit_controller import EndpointLimit, LimitController, Misses, Observation, Page
from picker_fleet.scheduling.forecasts import broken_promise
from picker_fleet.scheduling.latency_model import LatencyModel
from picker_fleet.state.pool_state import FoundLimit, PoolState
from picker_fleet.state.store import Store
from picker_fleet.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)


class LimitKeeper:
    """Finds the limits of a pool's endpoints while this replica is the leader and the mode is `adaptive`.

    `readings` has the endpoints' metrics pages, `latencies` predicts latencies; `clock` is in seconds.
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
        self._controller: LimitController | None = None  # None: unknown, or not this replica's task
        self._stored: Mapping[str, FoundLimit] = {}  # what Redis has, as far as this replica knows
        self._epoch_us = 0  # the epoch of the pool that has these limits
        self._connection, self._looked_s = 0, 0.0  # the connection to Redis and the time of the last look
        self._dispatched = 0  # grants so far, as of the last look

    async def look(self, pool: PoolState, addresses: set[str], *, leads: bool) -> None:
        """Take the state `pool` and the newest pages into account. `addresses` are the published endpoints.

        Raises:
            StateFault: the limits cannot be read or stored.
        """
        bounds = self._fleet.config.settings.request_queue_controller
        if not (leads and bounds.is_adaptive):
            self._controller = None
            return
        if pool.paused or not addresses:
            return
        configured = {
            "least": bounds.min_per_backend,
            "most": bounds.max_per_backend or MOST_LIMIT,
            "initial": bounds.initial_limit,
        }
        now_s = self._clock()
        if not self._knows_the_limits(now_s):
            found = await self._store.found_limits()
            if self._controller is None or (found and found != self._stored):
                self._controller = LimitController(**configured)
                # A rolling restart may have changed the unit.
                usable = {address: each for address, each in found.items() if each.unit == bounds.unit}
                self._resume(self._controller, usable, pool.now_us, now_s)
                self._dispatched = pool.dispatched_total
            self._stored = found
        self._connection, self._looked_s = self._store.connection_epoch, now_s
        controller = self._controller
        assert controller is not None
        controller.configure(**configured)
        readings = self._readings.snapshot()
        observed = {
            address: Observation(
                pool.in_flight.get(address, 0),
                _page(readings.get(address)),
                pool.endpoint_refusals.get(address, 0),
                round(pool.amounts.get(address, 0.0)) if bounds.unit == "tokens" else None,
            )
            for address in addresses
        }
        waiting = pool.queued > 0 or pool.dispatched_total > self._dispatched
        self._dispatched = pool.dispatched_total
        before = controller.limits()
        settings = self._fleet.config.settings
        misses: Misses | None = None
        if settings.promises_latencies:
            promise = partial(broken_promise, self._latencies, settings.promised_latency)

            def misses(address: str, limit: int) -> str:
                return promise(address, limit / observed[address].mean_request)

        controller.look(now_s, observed, waiting=waiting, completed=pool.ended_total, misses=misses)
        for address, each in controller.endpoints.items():
            if (former := before.get(address)) is not None and former != each.limit:
                self._metrics.limit_moved(each.limit - former)
                _log.info("limit of %s: %d, was %d: %s", address, each.limit, former, each.reason)
        found = {
            address: self._found(address, each, pool.now_us, now_s)
            for address, each in controller.endpoints.items()
        }
        if found != self._stored or pool.born_us != self._epoch_us:
            await self._store.set_limits(found)
            self._stored, self._epoch_us = found, pool.born_us

    def _knows_the_limits(self, now_s: float) -> bool:
        """Whether Redis still has what this replica stored. After a while another replica may have led, and
        after a reconnection the server may be another primary, which lacks the last writes."""
        silence_s = self._fleet.config.settings.leases.replica_silence
        is_recent = now_s - self._looked_s < silence_s
        return self._controller is not None and is_recent and self._connection == self._store.connection_epoch

    def _found(self, address: str, each: EndpointLimit, now_us: int, now_s: float) -> FoundLimit:
        """What a new leader has to know of an endpoint's limit."""
        changed_ms = int(now_us / 1000 - (now_s - each.changed_s) * 1000)
        former = self._stored.get(address)
        if former is not None and (former.limit, former.reason) == (each.limit, each.reason):
            changed_ms = former.changed_ms  # the limit has not moved; the two clocks may have
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
        """Go on from the limits `found` that an earlier leader stored."""
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


def _page(reading: Reading | None) -> Page | None:
    """The page in `reading`, if the controller can use it."""
    if reading is None or not reading.known:
        return None
    metrics = reading.metrics
    if metrics.waiting is None or metrics.running is None:
        return None
    return Page(reading.age_s, metrics.waiting, metrics.running, metrics.kv_utilisation, metrics.preemptions)
