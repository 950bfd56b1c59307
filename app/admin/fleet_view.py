"""The admin API's view of a running replica."""

from typing import Any

from app.admission.membership import Membership
from app.endpoints.snapshot import Endpoint
from app.state.store import Store


class FleetView:
    """`app.admin.view.StateView` over a replica's own parts.

    A replica is ready from its first contact with a pool that may admit, and stays so: one that loses
    Redis still answers, and must be seen to.
    """

    def __init__(self, store: Store, membership: Membership, *, replica: str, pool: str) -> None:
        self._store = store
        self._membership = membership
        self._identity = {"replica": replica, "pool": pool}

    async def state(self) -> dict[str, Any]:
        return {**self._identity, **await self._membership.state()}

    async def endpoints(self) -> list[dict[str, Any]]:
        in_flight = (await self._membership.state())["in_flight"]
        return [
            {
                "address": endpoint.address,
                "labels": endpoint.labels,
                "status": _status(endpoint),
                "in_flight": in_flight.get(endpoint.address, 0),
            }
            for endpoint in await self._store.endpoints()
        ]

    def ready(self) -> tuple[bool, dict[str, str]]:
        pulse = self._membership.pulse
        joined = pulse is not None and pulse.born != "0"
        endpoints = pulse.ready if pulse is not None else 0
        return joined, {
            "redis": self._store.fault or "ok",
            "pool": "ok" if joined else "not joined yet",
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
