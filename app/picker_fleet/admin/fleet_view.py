"""The admin API's view of a running replica."""

from typing import Any

from picker_fleet.admin import shown
from picker_fleet.admin.standing import Lookout
from picker_fleet.endpoints.readings import MetricsCache, Reading
from picker_fleet.endpoints.snapshot import Endpoint
from picker_fleet.replica.heartbeat import Membership
from picker_fleet.scheduling.endpoint_history import LatencyTracker
from picker_fleet.scheduling.scorers import LatencyStats
from picker_fleet.state.store import Store


class FleetView:
    """`admin.view.StateView` over a replica's own parts.

    A replica is ready from its first contact with a pool that may admit, and stays so: one that loses
    Redis still answers, and must be seen to.
    """

    def __init__(
        self,
        store: Store,
        membership: Membership,
        board: MetricsCache,
        latencies: LatencyTracker,
        lookout: Lookout,
        *,
        replica: str,
        pool: str,
    ) -> None:
        self._store = store
        self._membership = membership
        self._board = board
        self._latencies = latencies
        self._lookout = lookout
        self._identity = {"replica": replica, "pool": pool}

    async def state(self) -> dict[str, Any]:
        state = await self._membership.state()
        # Without the shared state the lanes are told as they were last seen.
        standing = self._lookout.last if state["degraded"] else await self._lookout.standing()
        settings = self._membership.effective.settings
        queue = settings.fair_request_queue
        weights = queue.band_weights if queue.band_policy == "weighted" else None
        return {
            **self._identity,
            **state,
            "unit": settings.request_queue_controller.unit,
            "queue_enabled": settings.request_queue_controller.enabled,
            "bands": shown.bands(state, standing, weights),
            "pool_age_s": max(0.0, (state["now_us"] - state["born_us"]) / 1e6) if state["born_us"] else 0.0,
        }

    async def endpoints(self) -> list[dict[str, Any]]:
        in_flight = (await self._membership.state())["in_flight"]
        readings = self._board.snapshot()
        return [
            {
                "address": endpoint.address,
                "labels": endpoint.labels,
                "status": _status(endpoint),
                "in_flight": in_flight.get(endpoint.address, 0),
                "max_inflight": endpoint.max_inflight,
                **_scraped(readings.get(endpoint.address)),
                **_latency(self._latencies.stats(endpoint.address)),
            }
            for endpoint in await self._membership.endpoints()
        ]

    def ready(self) -> tuple[bool, dict[str, str]]:
        pulse = self._membership.pulse
        joined = pulse is not None and pulse.born != "0"
        endpoints = pulse.ready if pulse is not None else 0
        return joined, {
            "redis": self._store.fault or "ok",
            "pool": self._membership.standing if joined else "not joined yet",
            "endpoints": "ok" if endpoints else "none is ready",
        }

    def identity(self) -> dict[str, str]:
        return dict(self._identity)


def _status(endpoint: Endpoint) -> str:
    if endpoint.down:
        return "down"
    if endpoint.drained:
        return "drained"
    return "draining" if endpoint.draining else "ready"


def _latency(stats: LatencyStats | None) -> dict[str, float]:
    if stats is None:
        return {}
    return {"latency_mean_s": shown.rounded(stats.mean_s), "latency_std_s": shown.rounded(stats.std_s)}


def _scraped(reading: Reading | None) -> dict[str, Any]:
    """What the endpoint's own metrics page said last."""
    if reading is None:
        return {}
    metrics = reading.metrics
    return {
        "waiting": metrics.waiting,
        "running": metrics.running,
        "kv_utilisation": metrics.kv_utilisation,
        "adapters": sorted(metrics.active_adapters),
        "waiting_adapters": sorted(metrics.waiting_adapters),
        "max_adapters": metrics.max_adapters,
        "scraped_s_ago": round(reading.age_s, 3),
        "scrape_fault": metrics.fault,
    }
