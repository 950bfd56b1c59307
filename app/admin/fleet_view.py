"""The admin API's view of a running replica."""

from typing import Any

from app.admission.membership import Membership
from app.endpoints.snapshot import Endpoint
from app.scheduling.chooser import LeastLoaded
from app.scraping.board import MetricsBoard, Reading
from app.state.store import Store


class FleetView:
    """`app.admin.view.StateView` over a replica's own parts.

    A replica is ready from its first contact with a pool that may admit, and stays so: one that loses
    Redis still answers, and must be seen to.
    """

    def __init__(
        self,
        store: Store,
        membership: Membership,
        board: MetricsBoard,
        chooser: LeastLoaded,
        *,
        replica: str,
        pool: str,
    ) -> None:
        self._store = store
        self._membership = membership
        self._board = board
        self._chooser = chooser
        self._identity = {"replica": replica, "pool": pool}

    async def state(self) -> dict[str, Any]:
        return {**self._identity, **await self._membership.state()}

    async def endpoints(self) -> list[dict[str, Any]]:
        in_flight = (await self._membership.state())["in_flight"]
        readings = self._board.snapshot()
        return [
            {
                "address": endpoint.address,
                "labels": endpoint.labels,
                "status": _status(endpoint),
                "in_flight": in_flight.get(endpoint.address, 0),
                **_scraped(readings.get(endpoint.address)),
            }
            for endpoint in await self._membership.endpoints()
        ]

    def explain(self, request_id: str) -> dict[str, Any] | None:
        found = self._chooser.explain(request_id)
        return None if found is None else found.to_dict()

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
        "scraped_s_ago": round(reading.age_s, 3),
        "scrape_fault": metrics.fault,
    }
