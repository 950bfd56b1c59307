"""The metrics of shared state: the same on every replica, to be read with `max`."""

from collections.abc import Callable, Mapping
from typing import Any

from picker_fleet.telemetry.series import Counters, Gauges, Page

_SCALARS = {
    "stock_level": "What is in flight, fleet-wide, in the stock's unit.",
    "lower_bound": "Dispatch runs below it.",
    "watermark": "The stock that is aimed at.",
    "upper_bound": "The stock is never above it.",
    "queue_fill": "The part of the queue's total capacity that is taken.",
    "active_flows": "Flows with a queued request.",
    "overdue_requests": "Queued requests that the starvation guard looks after.",
    "leases": "Requests in flight whose lease somebody keeps.",
    "ready_backends": "Endpoints that take new requests.",
    "live_replicas": "Replicas that report.",
    "paused": "1 while dispatch is paused, fleet-wide.",
    "degraded": "1 while this replica works without the shared state.",
}
_TOTALS = {
    "dispatches": ("dispatched_total", "Requests let out of the queue, fleet-wide."),
    "guard_dispatches": ("guard_dispatches_total", "Those of them by the starvation guard."),
    "ended": ("ended_total", "Requests in flight that ended, fleet-wide."),
}


class PoolMetrics:
    """Gauges and counters of shared state on `page`; `endpoint` caps the values of that label."""

    def __init__(self, page: Page, endpoint: Callable[[str], str]) -> None:
        self._endpoint = endpoint
        self._scalars = {name: Gauges(page, f"epp_{name}", about) for name, about in _SCALARS.items()}
        self._totals = {key: Counters(page, f"epp_{name}", about) for name, (key, about) in _TOTALS.items()}
        self._queued = Gauges(page, "epp_band_queue_length", "Queued requests, fleet-wide.", ("band",))
        self._in_flight = Gauges(
            page, "epp_endpoint_in_flight", "Requests in flight on an endpoint.", ("endpoint",)
        )

    def degraded(self, on: bool) -> None:
        """This replica works without the shared state, or with it again."""
        self._scalars["degraded"].set(float(on))

    def show(self, state: Mapping[str, Any]) -> None:
        """Set everything from a state as `Membership.state` returns it.

        Read are `stock`, `bounds` {lower, watermark, upper}, `queue_length` {band: requests}, `queue_fill`,
        `active_flows`, `overdue`, `leases`, `ready_backends`, `replicas` (a list), `paused`, `degraded`,
        `in_flight` {ip:port: requests} and the totals. A key that is absent leaves its series as it was.
        """
        bounds = state.get("bounds", {})
        replicas = state.get("replicas")
        for name, value in (
            ("stock_level", state.get("stock")),
            ("lower_bound", bounds.get("lower")),
            ("watermark", bounds.get("watermark")),
            ("upper_bound", bounds.get("upper")),
            ("queue_fill", state.get("queue_fill")),
            ("active_flows", state.get("active_flows")),
            ("overdue_requests", state.get("overdue")),
            ("leases", state.get("leases")),
            ("ready_backends", state.get("ready_backends")),
            ("live_replicas", None if replicas is None else len(replicas)),
            ("paused", state.get("paused")),
            ("degraded", state.get("degraded")),
        ):
            if value is not None:
                self._scalars[name].set(float(value))
        for key, counter in self._totals.items():
            if key in state:
                counter.follow(float(state[key]))
        if "queue_length" in state:
            self._queued.replace({(str(k),): float(n) for k, n in state["queue_length"].items()})
        if "in_flight" in state:
            loads: dict[tuple[str, ...], float] = {}
            for address, count in state["in_flight"].items():
                label = (self._endpoint(address),)
                loads[label] = loads.get(label, 0.0) + count
            self._in_flight.replace(loads)
