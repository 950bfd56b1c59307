"""Who waits at the gate, and who may still go to it while the replica shuts down."""

import asyncio

from picker_fleet.admission.gate import Gate
from picker_fleet.errors import ShuttingDown
from picker_fleet.request import InferenceRequest, Placement

_REFUSAL = "this replica is shutting down; try again"


class Door:
    """Stands before the gate. Closing it refuses newcomers; `show_out` refuses those who still wait."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._closed = False
        self._waiting: set[asyncio.Task[object]] = set()
        self._shown_out: set[asyncio.Task[object]] = set()

    @property
    def waiting(self) -> int:
        """Requests at the gate."""
        return len(self._waiting)

    def close(self) -> None:
        """From now on, who is not waiting yet is refused."""
        self._closed = True

    def show_out(self) -> None:
        """Refuse all who still wait."""
        self._closed = True
        for task in self._waiting - self._shown_out:
            self._shown_out.add(task)
            task.cancel()

    async def admit(self, request: InferenceRequest, *, held: bool, age_s: float = 0.0) -> Placement:
        """As `Gate.admit`; at most one at a time in a task.

        Raises:
            ShuttingDown: the door is closed, or closed for good while the request waited.
        """
        if self._closed:
            raise ShuttingDown(_REFUSAL)
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("admission needs a task")
        self._waiting.add(task)
        try:
            return await self._gate.admit(request, held=held, age_s=age_s)
        except asyncio.CancelledError:
            if task not in self._shown_out:
                raise
            if task.uncancel() > 0:  # the client went away as well
                raise
            raise ShuttingDown(_REFUSAL) from None
        finally:
            self._waiting.discard(task)
            self._shown_out.discard(task)
