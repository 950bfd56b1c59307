"""Requests that have been placed through the shared state: their leases, and their ends."""

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from picker_fleet.admission import accounting_token
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.request import Alive, Completion, InferenceRequest, Placement
from picker_fleet.scheduling.chooser import EndpointChooser
from picker_fleet.signing import Keyring
from picker_fleet.state.failure_detector import PauseDetector
from picker_fleet.state.store import Store
from picker_fleet.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)
WINDOW_S = 10  # whole seconds, without the one that has begun
_MOST_FLOWS = 5000  # a second
_MOST_TOLD = 200
_MOST_TOLD_BYTES = 16_000  # of names, about


@dataclass(frozen=True, slots=True)
class _OwnedStream:
    """A placed request whose stream this replica holds; the only one who can renew its lease."""

    attempt: int
    accounting_token: str
    served: str


class ServiceMeter:
    """Costs of placed requests by band and flow. Noting one is a dictionary entry; memory is bounded.

    A flow beyond 5000 in one second counts for its band only.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._seconds: deque[tuple[int, dict[tuple[int, str], float], list[float]]] = deque()
        self._reported: tuple[int, dict[str, Any]] = (-1, {})  # in which second, and what

    def note(self, band: int, flow: str, cost: float) -> None:
        """A request of `flow` has been placed."""
        second = int(self._clock_s())
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, {}, [0.0, 0.0, 0.0]))
            self._forget(second)
        _, flows, bands = self._seconds[-1]
        bands[band] += cost
        lane = (band, flow)
        if lane in flows or len(flows) < _MOST_FLOWS:
            flows[lane] = flows.get(lane, 0.0) + cost

    def report(self) -> dict[str, Any]:
        """`bands`: cost by band; `flows`: [band, flow, cost] of the busiest; `cut`: there are more.

        Added up once a second, however often it is asked for. Not to be changed.
        """
        second = int(self._clock_s())
        if self._reported[0] != second:
            self._reported = second, self._add_up(second)
        return self._reported[1]

    def _add_up(self, second: int) -> dict[str, Any]:
        self._forget(second)
        bands = [0.0, 0.0, 0.0]
        flows: Counter[tuple[int, str]] = Counter()
        for begun, costs, totals in self._seconds:
            if begun != second:
                flows.update(costs)
                bands = [a + b for a, b in zip(bands, totals, strict=True)]
        told: list[list[object]] = []
        room = _MOST_TOLD_BYTES
        for (band, flow), cost in flows.most_common(_MOST_TOLD):
            room -= len(flow) + 16
            if room < 0:
                break
            told.append([band, flow, round(cost, 3)])
        return {"bands": [round(cost, 3) for cost in bands], "flows": told, "cut": len(told) < len(flows)}

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] < second - WINDOW_S:
            self._seconds.popleft()


class PlacedRequests:
    """What `SharedGate` knows of them; its parts are described there. One event loop."""

    def __init__(
        self,
        store: Store,
        *,
        metrics: Metrics,
        endpoints: SnapshotCell,
        answer_tokens: int | None,
        chooser: EndpointChooser,
        service: ServiceMeter,
        keys: Keyring,
        pause_detector: PauseDetector,
    ) -> None:
        self._store = store
        self._keys = keys
        self._metrics = metrics
        self._endpoints = endpoints
        self._answer_tokens = answer_tokens
        self.answer_tokens = answer_tokens or 0
        self._service = service
        self._chooser = chooser
        self.pause_detector = pause_detector
        self._attempts = itertools.count(1)
        self._owned_streams: dict[str, _OwnedStream] = {}

    def placed_elsewhere(
        self, request: InferenceRequest, endpoints: tuple[str, ...], *, stream_owned: bool
    ) -> Placement:
        """The placement of a request that was admitted without the shared state."""
        return self._placement(request, next(self._attempts), endpoints, stream_owned, self._store.now_ms())

    def _placement(
        self,
        request: InferenceRequest,
        attempt: int,
        endpoints: tuple[str, ...],
        stream_owned: bool,
        alone_ms: int | None = None,
    ) -> Placement:
        self._service.note(request.band, request.flow, request.cost)
        written = accounting_token.write(request, endpoints[0], self.answer_tokens, alone_ms)
        note = accounting_token.signed(written, request.id, self._keys)
        if stream_owned:
            self._owned_streams[request.id] = _OwnedStream(attempt, note, endpoints[0])
        return Placement(endpoints, note, attempt, self._chooser.session_token(endpoints[0]))

    async def confirm(self, request_id: str, placement: Placement, age_s: float) -> bool:
        # Without its token: a place that is lost may be another's, and restored would be one too many (G1).
        return await self._store.renew(request_id, placement.attempt, "", "") == "renewed"

    def withdraw(self, request_id: str, placement: Placement) -> None:
        self._owned_streams.pop(request_id, None)
        self._cancel(request_id, placement.attempt, "withdrawn")

    def settle(self, completion: Completion, then: Callable[[], object] = lambda: None) -> None:
        """As `Gate.settle`; `then` is called when the shared state has taken it, or never will."""

        def settled(answer: asyncio.Future[str]) -> None:
            then()
            if not answer.cancelled() and answer.exception() is None:
                self._settled(completion, note, answer.result())

        note = completion.accounting_token or self.accounting_token_of(completion.id)
        self.ended(completion)
        self._tell_end(completion).add_done_callback(settled)

    def accounting_token_of(self, request_id: str) -> str:
        """The accounting token of a request whose stream this replica holds; '' if it holds none."""
        owned = self._owned_streams.get(request_id)
        return owned.accounting_token if owned is not None else ""

    def ended(self, completion: Completion) -> None:
        """Account for an end as far as this replica is concerned."""
        owned = self._owned_streams.pop(completion.id, None)
        if owned is not None or completion.accounting_token:  # else it was never placed
            self._chooser.ended(completion)
        if completion.failed:
            self._note_failed(completion.failed)

    def tell_end(self, completion: Completion) -> None:
        """Tell the shared state of an end; kept until it has taken it."""
        ignore_loss(self._tell_end(completion))

    def _tell_end(self, completion: Completion) -> asyncio.Future[str]:
        actual = answer_tokens = None
        if self._answer_tokens is not None:
            answer_tokens = completion.completion_tokens
            if answer_tokens is not None and completion.prompt_tokens is not None:
                actual = float(completion.prompt_tokens + answer_tokens)
        return self._store.settle(completion.id, completion.outcome, actual, answer_tokens)

    def _note_failed(self, address: str) -> None:
        """Nobody is to pick it any more, until a probe finds it well again."""
        known = next((e for e in self._endpoints.current.endpoints if e.address == address), None)
        if known is not None and not known.down:
            _log.warning("endpoint %s cannot be connected to", address)
            ignore_loss(self._store.mark_endpoint(address, "down", True))

    def _settled(self, completion: Completion, note: str, reply: str) -> None:
        what, _, model = reply.partition(" ")
        if what == "settled":
            self._metrics.completed(completion, model)
            if accounting_token.is_alone(note):  # who has seen it is not to bring it back
                self._bury(completion)
        elif what == "unknown" and note:
            # Placed without the shared state, or lost with it, or its lease had ended. It is told of once.
            self._metrics.completed(completion, accounting_token.model_of(note))
            if completion.accounting_token:  # who placed it may not hear that it is over
                self._bury(completion)

    def suspect(self, request_id: str) -> None:
        ignore_loss(self._store.report_client_gone(request_id))

    def _bury(self, completion: Completion) -> None:
        def buried(answer: asyncio.Future[str]) -> None:
            if not answer.cancelled() and answer.exception() is None and answer.result() == "back":
                self.tell_end(completion)  # brought back meanwhile

        self._store.tombstone(completion.id).add_done_callback(buried)

    def renew(self, alive: Alive) -> None:
        # What was written while this process slept may be long over, and its end lost: that restores nothing.
        note = "" if self.pause_detector.resumed_recently else alive.accounting_token
        ignore_loss(self._store.renew(alive.id, None, alive.served or "", note))

    def renew_owned_streams(self) -> list[asyncio.Future[str]]:
        """Renew every lease that this replica's own streams keep; the answers, which nobody has to await."""
        answers = [
            self._store.renew(request_id, owned.attempt, owned.served, owned.accounting_token)
            for request_id, owned in self._owned_streams.items()
        ]
        for answer in answers:
            ignore_loss(answer)
        return answers

    def _cancel(self, request_id: str, attempt: int, why: str) -> None:
        ignore_loss(self._store.cancel(request_id, attempt, why))


def ignore_loss(answer: asyncio.Future[str]) -> None:
    """A call whose failure its lease or its repetition makes good; its exception is looked at and left."""
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())
