"""Requests that have been placed through the shared state: their leases, and their ends."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from picker_fleet.admission import ticket
from picker_fleet.admission.service import ServiceMeter
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.request import Alive, Completion, InferenceRequest, Placement
from picker_fleet.scheduling.chooser import EndpointChooser
from picker_fleet.signing import Keyring
from picker_fleet.state.awake import AwakeClock
from picker_fleet.state.store import Store
from picker_fleet.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Held:
    """A placed request whose stream this replica holds; the only one who can renew its lease."""

    attempt: int
    ticket: str
    served: str


class RunningRequests:
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
        awake: AwakeClock,
    ) -> None:
        self._store = store
        self._keys = keys
        self._metrics = metrics
        self._endpoints = endpoints
        self._answer_tokens = answer_tokens
        self.answer_tokens = answer_tokens or 0
        self._service = service
        self._chooser = chooser
        self.awake = awake
        self._attempts = itertools.count(1)
        self._held: dict[str, _Held] = {}

    def placed_elsewhere(
        self, request: InferenceRequest, endpoints: tuple[str, ...], *, held: bool
    ) -> Placement:
        """The placement of a request that was admitted without the shared state."""
        return self._placement(request, next(self._attempts), endpoints, held, self._store.now_ms())

    def _placement(
        self,
        request: InferenceRequest,
        attempt: int,
        endpoints: tuple[str, ...],
        held: bool,
        alone_ms: int | None = None,
    ) -> Placement:
        self._service.note(request.band, request.flow, request.cost)
        written = ticket.write(request, endpoints[0], self.answer_tokens, alone_ms)
        note = ticket.signed(written, request.id, self._keys)
        if held:
            self._held[request.id] = _Held(attempt, note, endpoints[0])
        return Placement(endpoints, note, attempt, self._chooser.session_token(endpoints[0]))

    async def confirm(self, request_id: str, placement: Placement, age_s: float) -> bool:
        # Without its ticket: a place that is lost may be another's, and restored would be one too many (G1).
        return await self._store.renew(request_id, placement.attempt, "", "") == "renewed"

    def withdraw(self, request_id: str, placement: Placement) -> None:
        self._held.pop(request_id, None)
        self._cancel(request_id, placement.attempt, "withdrawn")

    def settle(self, completion: Completion, then: Callable[[], object] = lambda: None) -> None:
        """As `Gate.settle`; `then` is called when the shared state has taken it, or never will."""

        def settled(answer: asyncio.Future[str]) -> None:
            then()
            if not answer.cancelled() and answer.exception() is None:
                self._settled(completion, note, answer.result())

        note = completion.ticket or self.held_ticket(completion.id)
        self.ended(completion)
        self._tell_end(completion).add_done_callback(settled)

    def held_ticket(self, request_id: str) -> str:
        """The ticket of a request whose stream this replica holds; '' if it holds none."""
        held = self._held.get(request_id)
        return held.ticket if held is not None else ""

    def ended(self, completion: Completion) -> None:
        """Account for an end as far as this replica is concerned."""
        held = self._held.pop(completion.id, None)
        if held is not None or completion.ticket:  # else it was never placed
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
            ignore_loss(self._store.mark(address, "down", True))

    def _settled(self, completion: Completion, note: str, reply: str) -> None:
        what, _, model = reply.partition(" ")
        if what == "settled":
            self._metrics.completed(completion, model)
            if ticket.is_alone(note):  # who has seen it is not to bring it back
                self._bury(completion)
        elif what == "unknown" and note:
            # Placed without the shared state, or lost with it, or its lease had ended. It is told of once.
            self._metrics.completed(completion, ticket.model_of(note))
            if completion.ticket:  # who placed it may not hear that it is over
                self._bury(completion)

    def suspect(self, request_id: str) -> None:
        ignore_loss(self._store.suspect(request_id))

    def _bury(self, completion: Completion) -> None:
        def buried(answer: asyncio.Future[str]) -> None:
            if not answer.cancelled() and answer.exception() is None and answer.result() == "back":
                self.tell_end(completion)  # brought back meanwhile

        self._store.bury(completion.id).add_done_callback(buried)

    def renew(self, alive: Alive) -> None:
        # What was written while this process slept may be long over, and its end lost: that restores nothing.
        note = "" if self.awake.just_woke else alive.ticket
        ignore_loss(self._store.renew(alive.id, None, alive.served or "", note))

    def renew_held(self) -> list[asyncio.Future[str]]:
        """Renew every lease that this replica's own streams keep; the answers, which nobody has to await."""
        answers = [
            self._store.renew(request_id, held.attempt, held.served, held.ticket)
            for request_id, held in self._held.items()
        ]
        for answer in answers:
            ignore_loss(answer)
        return answers

    def _cancel(self, request_id: str, attempt: int, why: str) -> None:
        ignore_loss(self._store.cancel(request_id, attempt, why))


def ignore_loss(answer: asyncio.Future[str]) -> None:
    """A call whose failure its lease or its repetition makes good; its exception is looked at and left."""
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())
