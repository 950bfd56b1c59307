"""What the admin API shows and does, as the running replica offers it."""

from collections.abc import Mapping
from typing import Any, Protocol

from picker_fleet.request import Band


class StateView(Protocol):
    """A replica's insight into the fleet, its parts and itself."""

    async def state(self) -> dict[str, Any]:
        """The fleet's shared state at one moment, of the shape of `admin.models.State`.

        Raises:
            StateUnavailable: it cannot be read now.
        """
        ...

    async def endpoints(self) -> list[dict[str, Any]]:
        """Every endpoint, of the shape of `admin.models.Endpoint`. Raises as `state` does."""
        ...

    def ready(self) -> tuple[bool, dict[str, str]]:
        """Whether this replica should get traffic, and each component's `ok` or what is wrong with it."""
        ...

    def identity(self) -> dict[str, str]:
        """Who this replica is: at least `replica` (its id) and `pool`."""
        ...


class Lists(Protocol):
    """What waits, runs and asks, page by page; of the shapes of `admin.listed`. Each method raises
    StateUnavailable as `state` does, and BadCursor (admin/cursor.py) for a cursor that is not its own.
    None: nobody knows of it.
    """

    async def flows(self, limit: int, cursor: str | None, band: Band | None) -> dict[str, Any]: ...

    async def flow(self, name: str) -> dict[str, Any] | None: ...

    async def queue(
        self, limit: int, cursor: str | None, band: Band | None, flow: str | None
    ) -> dict[str, Any]: ...

    async def in_flight(self, limit: int, cursor: str | None) -> dict[str, Any]: ...

    async def request(self, request_id: str) -> dict[str, Any] | None: ...

    async def workloads(self, limit: int, cursor: str | None) -> dict[str, Any]: ...

    async def busiest(self, limit: int) -> dict[str, Any]:
        """Workloads with the most requests that have not ended, of some hundred; like `workloads`."""
        ...

    async def workload(self, workload_id: str) -> dict[str, Any] | None: ...

    async def replicas(self) -> list[dict[str, Any]]: ...


class Controls(Protocol):
    """What an operator can change in the whole fleet. Each method raises StateUnavailable as `state` does."""

    async def config(self) -> dict[str, Any]:
        """The configuration in force, of the shape of `admin.models.Config`."""
        ...

    async def change(self, patch: Mapping[str, Any]) -> dict[str, Any]:
        """Make the changes of a partial settings tree, and return `config`; null takes a change back.

        Raises:
            ConfigError: a key may not change live, or what results is not valid. Nothing has changed then.
        """
        ...

    async def pause(self, paused: bool) -> dict[str, Any]:
        """Stop or go on dispatching; of the shape of `admin.models.Dispatch`."""
        ...

    async def drain(self, address: str, on: bool) -> bool:
        """Keep new requests from an endpoint, or let them come again; False if there is no such endpoint."""
        ...

    async def evict(self, request_id: str) -> str:
        """Take a request out of the queue: `evicted`, `running` (too late) or `unknown`."""
        ...
