"""Reports to Redis which placed requests run or have ended, and which endpoints have failed.

No call waits for Redis. The store repeats the report of an end until Redis accepts it; any other report may
be lost, since a lease or a later report makes up for it.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from picker_fleet.admission.connection_check import ConnectionCheck
from picker_fleet.admission.ledger import Entry, Ledger
from picker_fleet.domain.request import Alive, Completion, Fault, Outcome
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.scheduling.answer_comparison import AnswerComparison
from picker_fleet.scheduling.chooser import EndpointChooser
from picker_fleet.state import accounting_token
from picker_fleet.state.replies import FaultReply, SettleReply, SuspicionReply, TombstoneReply
from picker_fleet.state.store import Store
from picker_fleet.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from picker_fleet.telemetry.tracing import Traces

_log = logging.getLogger(__name__)
_SUSPECT_TRIES = 4
_SUSPECT_PAUSE_S = 1.0
_EVENT_BYTES = 256  # size of an event with one token in a stream of chat completions by vLLM


def ignore_loss(answer: asyncio.Future[Any]) -> None:
    """Ignore the failure of a call, since a lease or a later call makes up for it."""
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())


def _least_answer(completion: Completion) -> int:
    """The minimum number of tokens in a streamed answer, by its size. Without this minimum a client could
    exceed its share and limits by not asking for usage, or by leaving before the last event."""
    is_stream = completion.content_type.startswith("text/event-stream")
    return completion.body_bytes // _EVENT_BYTES if is_stream else 0


def _is_cut(completion: Completion) -> bool:
    """Whether only an answer's first event arrived, in which Anthropic's API reports 0 or 1 answer tokens."""
    return completion.completion_tokens in (0, 1) and completion.outcome is not Outcome.COMPLETED


def _tokens(completion: Completion) -> tuple[int | None, int | None]:
    """The numbers of tokens in prompt and answer; None if unknown."""
    answer = completion.completion_tokens
    if answer is not None and _is_cut(completion):
        answer = max(answer, _least_answer(completion))
    return completion.prompt_tokens, answer


def usage_of(completion: Completion) -> tuple[int, int, int] | None:
    """The numbers of tokens in prompt, cached prompt, and answer, for `Store.settle`; None if unknown."""
    prompt, answer = _tokens(completion)
    if prompt is not None and answer is not None:
        return prompt, min(completion.cached_tokens or 0, prompt), answer
    if 400 <= completion.status < 500 and completion.outcome is not Outcome.UPSTREAM_FAILED:
        return 0, 0, 0  # the engine refused the request, and so used no tokens
    least = max(answer or 0, _least_answer(completion))
    return (-1, -1, least) if least else None


class Reports:
    """Sends the reports of one replica. The function `are_places_awaited` returns whether requests wait, so
    that Redis must learn of each end soon. If the stock counts tokens (`counts_tokens`), the report of an end
    has the tokens used; with tenants (`has_tenants`), it has the usage that corrects their charges."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        *,
        metrics: Metrics,
        endpoints: SnapshotCell,
        chooser: EndpointChooser,
        counts_tokens: bool,
        has_tenants: bool,
        are_places_awaited: Callable[[], bool],
        record_usage: Callable[[Completion, str, str], object] | None = None,
        traces: "Traces | None" = None,
    ) -> None:
        self._store, self._ledger, self._metrics = store, ledger, metrics
        self.connection_check = ConnectionCheck(endpoints)
        self._endpoints, self._chooser = endpoints, chooser
        self._counts_tokens, self._are_places_awaited = counts_tokens, are_places_awaited
        self._has_tenants, self._record_usage, self._traces = has_tenants, record_usage, traces
        self._answers = AnswerComparison()

    def settle(self, completion: Completion, token: str, entry: Entry | None) -> None:
        """Report that a request has ended; `token` is its accounting token, '' if unknown; `entry` is its
        entry in the ledger, None if it was never placed."""
        compared = self._answers.compare(completion, token)
        self.note_end(compared, token)
        answered = partial(self._on_answered_end, completion, token, entry)
        self._tell_end(compared, token).add_done_callback(answered)

    def note_end(self, completion: Completion, token: str) -> None:
        """Record the latency and the faults of endpoints that a request's end shows."""
        if not completion.is_read:
            return
        if token:  # without a token, the request may never have been placed
            self._chooser.ended(completion, token)
        if completion.failed:
            self.connection_check.report(completion.failed, partial(self._note_failed, completion.failed))
        if not (completion.fault or completion.passed_over):
            return
        if token and completion.fault:
            endpoint = completion.served or accounting_token.endpoint_of(token)
            self.fault(Fault(completion.id, endpoint, completion.fault, token, completion.hold_s))
        if token and completion.passed_over:
            self.fault(Fault(completion.id, completion.passed_over, "retried", token))

    def fault(self, fault: Fault) -> None:
        flow = accounting_token.flow_of(fault.accounting_token)
        self._store.report_fault(fault, flow).add_done_callback(partial(self._on_fault, fault))

    def _on_fault(self, fault: Fault, answer: asyncio.Future[FaultReply]) -> None:
        if answer.cancelled() or answer.exception() is not None:
            return
        reply = answer.result()
        if reply == "unknown":
            return
        self._metrics.endpoint_fault(fault.endpoint, fault.why)
        if reply == "ejected":
            _log.warning("endpoint %s is ejected: %s", fault.endpoint, fault.why)
            self._metrics.endpoint_ejected(fault.endpoint, fault.why)
        elif reply == "down":
            _log.warning("cannot connect to endpoint %s", fault.endpoint)

    def tell_end(self, completion: Completion) -> None:
        """Report a request's end to Redis; the store repeats the call until Redis accepts it."""
        ignore_loss(self._tell_end(completion, completion.accounting_token))

    def _tell_end(self, completion: Completion, token: str) -> asyncio.Future[SettleReply]:
        actual = answer_tokens = prompt_size = None
        if self._counts_tokens:
            prompt, answer_tokens = _tokens(completion)
            if answer_tokens is not None and prompt is not None:
                actual = float(prompt + answer_tokens)
                prompt_size = accounting_token.prompt_size_of(token)
                if _is_cut(completion):
                    answer_tokens = prompt_size = None  # do not let Redis learn from an incomplete answer
            elif least := _least_answer(completion):
                actual = -float(least)
        if actual is None and 400 <= completion.status < 500:
            actual = 1.0  # the engine refused the request, and so used none of the tokens charged for it
        answer = self._store.settle(
            completion.id,
            completion.outcome,
            actual,
            answer_tokens,
            prompt_size,
            usage=usage_of(completion) if self._has_tenants else None,
            answered=completion.answered,
            urgent=self._are_places_awaited(),
        )
        if self._traces is not None:
            self._traces.settled(completion.id, answer)
        return answer

    def _note_failed(self, address: str) -> None:
        """Mark an endpoint as down, so that it gets no request until probes succeed."""
        known = next((e for e in self._endpoints.current.endpoints if e.address == address), None)
        if known is not None and not known.down:
            _log.warning("cannot connect to endpoint %s", address)
            ignore_loss(self._store.mark_endpoint(address, "down", True))

    def _on_answered_end(
        self, completion: Completion, token: str, entry: Entry | None, answer: asyncio.Future[SettleReply]
    ) -> None:
        """Record that Redis has confirmed a request's end, or never will. Ignores a second answer, and an
        answer to an earlier end of the request."""
        if entry is not None and not (entry.end is completion and self._ledger.confirm(entry)):
            return
        if answer.cancelled() or answer.exception() is not None:
            return
        reply = answer.result()
        if reply.kind == "settled":
            self.count(completion, token, reply.model)
            if accounting_token.is_alone(token):  # keep replicas that saw the request run from restoring it
                self._tombstone(completion)
        elif reply.kind == "unknown" and token:
            # The request was placed without Redis, or Redis lost its record, or its lease has expired.
            self.count(completion, token, accounting_token.model_of(token))
            if completion.accounting_token:  # the replica that placed the request may not learn of its end
                self._tombstone(completion)

    def count(self, completion: Completion, token: str, model: str) -> None:
        """Count a request's end in metrics and usage; `token` is its accounting token, '' if unknown."""
        if not completion.is_read:
            return
        self._metrics.completed(completion, model)
        if self._record_usage is not None:
            self._record_usage(completion, accounting_token.flow_of(token), model)

    def suspect(self, request_id: str, tries: int = _SUSPECT_TRIES) -> None:
        """Report that a request may have ended, since its client has gone. If the request waits, report this
        again later: its owner may place it before it learns that the client has gone."""

        def told(answer: asyncio.Future[SuspicionReply]) -> None:
            lost = answer.cancelled() or answer.exception() is not None
            if not lost and answer.result() == "waiting" and tries > 1:
                asyncio.get_running_loop().call_later(_SUSPECT_PAUSE_S, self.suspect, request_id, tries - 1)

        self._store.report_client_gone(request_id).add_done_callback(told)

    def _tombstone(self, completion: Completion) -> None:
        def written(answer: asyncio.Future[TombstoneReply]) -> None:
            lost = answer.cancelled() or answer.exception() is not None
            if not lost and answer.result() == "back":
                self.tell_end(completion)  # settle the request, which another replica has restored

        self._store.tombstone(completion.id).add_done_callback(written)

    def renew(self, alive: Alive) -> None:
        ignore_loss(self._store.renew(alive.id, None, alive.served or "", alive.accounting_token))
