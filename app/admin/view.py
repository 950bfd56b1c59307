"""What the admin API shows, as the running replica offers it."""

from typing import Any, Protocol


class StateView(Protocol):
    """A replica's insight into the fleet, its parts and itself."""

    async def state(self) -> dict[str, Any]:
        """The fleet's shared state at one moment, of the shape of `app.admin.models.State`.

        Raises:
            StateUnavailable: it cannot be read now.
        """
        ...

    def ready(self) -> tuple[bool, dict[str, str]]:
        """Whether this replica should get traffic, and each component's `ok` or what is wrong with it."""
        ...

    def identity(self) -> dict[str, str]:
        """Who this replica is: at least `replica` (its id) and `pool`."""
        ...
