"""What all exchanges of a replica share, and the gate that refuses requests once the replica drains."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from picker_fleet.admission.gate import Gate
from picker_fleet.allowlist import AllowedPaths
from picker_fleet.config import Settings
from picker_fleet.errors import ShuttingDown
from picker_fleet.extproc.limits import BodyBudget, NewFlowLimit
from picker_fleet.intake import Intake
from picker_fleet.rates import Rates
from picker_fleet.request import InferenceRequest, Placement
from picker_fleet.telemetry.logs import DecisionLines
from picker_fleet.telemetry.metrics import Metrics

_REFUSAL = "this replica is shutting down; try again"


class DrainGate:
    """Stands before the admission gate. `close` refuses new requests, `cancel_waiters` those that wait."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._closed = False
        self._waiting: set[asyncio.Task[object]] = set()
        self._cancelled: set[asyncio.Task[object]] = set()

    @property
    def waiting(self) -> int:
        """Requests that wait for admission."""
        return len(self._waiting)

    def close(self) -> None:
        """Refuse every request that is not waiting yet."""
        self._closed = True

    def cancel_waiters(self) -> None:
        """Refuse all requests, those that wait included."""
        self._closed = True
        for task in self._waiting - self._cancelled:
            self._cancelled.add(task)
            task.cancel()

    async def admit(self, request: InferenceRequest, *, stream_owned: bool, age_s: float = 0.0) -> Placement:
        """As `Gate.admit`; at most one at a time in a task.

        Raises:
            ShuttingDown: the gate is closed, or the replica stopped while the request waited.
        """
        if self._closed:
            raise ShuttingDown(_REFUSAL)
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("admission needs a task")
        self._waiting.add(task)
        try:
            return await self._gate.admit(request, stream_owned=stream_owned, age_s=age_s)
        except asyncio.CancelledError:
            if task not in self._cancelled:
                raise
            if task.uncancel() > 0:  # the client left as well
                raise
            raise ShuttingDown(_REFUSAL) from None
        finally:
            self._waiting.discard(task)
            self._cancelled.discard(task)


class OpenRequests:
    """Counts requests that are being handled, in any mode, so that a drain can wait for them."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def began(self) -> None:
        self._count += 1
        self._idle.clear()

    def ended(self) -> None:
        self._count -= 1
        if not self._count:
            self._idle.set()

    @property
    def count(self) -> int:
        return self._count

    async def none(self) -> None:
        """Wait until no request is being handled."""
        await self._idle.wait()


@dataclass(frozen=True, slots=True)
class ExchangeContext:
    """Made once. `reads` limits requests that go through without admission, `fill` is the part of the queue
    that is taken, 0 to 1. `clock` is in seconds; only its differences count."""

    settings: Settings
    paths: AllowedPaths
    reads: Rates
    bodies: BodyBudget
    new_flows: NewFlowLimit
    intake: Intake
    gate: Gate
    drain_gate: DrainGate
    open_requests: OpenRequests
    metrics: Metrics
    lines: DecisionLines
    clock: Callable[[], float]
    fill: Callable[[], float]
