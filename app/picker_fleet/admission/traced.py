"""Wrappers of the gate and of the store that trace requests. A replica uses them only if tracing is
configured, so that tracing costs nothing otherwise.

The accounting token carries the traceparent, after the fields that `lua/renew.lua` reads. So any replica that
receives a request's end adds the end's span to the same trace.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from picker_fleet.admission.gate import Gate
from picker_fleet.domain.errors import RequestError
from picker_fleet.domain.request import Alive, Completion, Fault, InferenceRequest, Outcome, Placement
from picker_fleet.state import accounting_token
from picker_fleet.state.store import AnyVerdict, SettleReply, Store
from picker_fleet.telemetry.tracing import Traces


class TracedGate:
    """Wraps an `admission.gate.Gate`: traces each request from arrival to decision, and adds a span for its
    end. Uses one event loop."""

    def __init__(self, gate: Gate, traces: Traces) -> None:
        self._gate = gate
        self._traces = traces
        self._traceparents: dict[str, str] = {}  # id of a request whose stream is owned -> traceparent

    async def admit(self, request: InferenceRequest, *, stream_owned: bool, age_s: float = 0.0) -> Placement:
        spans = self._traces.begin(request)
        if spans is None:
            return await self._gate.admit(request, stream_owned=stream_owned, age_s=age_s)
        try:
            placement = await self._gate.admit(request, stream_owned=stream_owned, age_s=age_s)
        except RequestError as error:
            spans.end(None, error.code)
            raise
        except BaseException:  # cancelled: the client has gone, or the replica shuts down
            spans.end(None, "cancelled")
            raise
        finally:
            self._traces.decided(request.id, spans)
        spans.end(placement)
        parent = spans.parent
        if stream_owned:
            self._traceparents[request.id] = parent
        return placement._replace(
            accounting_token=accounting_token.with_trace(placement.accounting_token, parent)
        )

    async def route(
        self, subset: tuple[str, ...] | None, *, origin: str = "", session: str = ""
    ) -> Placement:
        return await self._gate.route(subset, origin=origin, session=session)

    async def confirm(self, request_id: str, placement: Placement, age_s: float) -> bool:
        own, _ = accounting_token.split_trace(placement.accounting_token)
        return await self._gate.confirm(request_id, placement._replace(accounting_token=own), age_s)

    def withdraw(self, request_id: str, placement: Placement) -> None:
        self._traceparents.pop(request_id, None)
        self._gate.withdraw(request_id, placement)

    def settle(self, completion: Completion) -> None:
        own, parent = accounting_token.split_trace(completion.accounting_token)
        parent = parent or self._traceparents.pop(completion.id, "")
        if parent:
            self._traces.settling(parent, completion)
            completion = completion._replace(accounting_token=own)
        self._gate.settle(completion)

    def shut_down(self) -> None:
        self._gate.shut_down()

    def suspect(self, request_id: str) -> None:
        self._gate.suspect(request_id)

    def fault(self, fault: Fault) -> None:
        own, _ = accounting_token.split_trace(fault.accounting_token)
        self._gate.fault(fault._replace(accounting_token=own))

    def renew(self, alive: Alive) -> None:
        own, parent = accounting_token.split_trace(alive.accounting_token)
        self._gate.renew(alive._replace(accounting_token=own) if parent else alive)


class TracedStore(Store):
    """A `Store` that records a span for each step of a traced request."""

    def __init__(self, url: str, *, traces: Traces, **parts: Any) -> None:
        super().__init__(url, **parts)
        self._traces = traces

    def admit(
        self, request: InferenceRequest, attempt: str, candidates: str, age_s: float = 0.0
    ) -> asyncio.Future[AnyVerdict]:
        call = partial(super().admit, request, attempt, candidates, age_s)
        return self._traced(request.id, "admit", call)

    def place(self, request_id: str, attempt: str, candidates: str) -> asyncio.Future[AnyVerdict]:
        return self._traced(request_id, "place", partial(super().place, request_id, attempt, candidates))

    def _traced(
        self, request_id: str, stage: str, call: Callable[[], asyncio.Future[AnyVerdict]]
    ) -> asyncio.Future[AnyVerdict]:
        spans = self._traces.undecided(request_id)
        if spans is None:
            return call()
        span = spans.begin_stage(stage)
        answer = call()
        answer.add_done_callback(partial(spans.end_stage, span))
        return answer

    def acknowledge(self, request_id: str, attempt: str) -> asyncio.Future[str]:
        spans = self._traces.undecided(request_id)
        if spans is not None:  # the script granted and placed the request in one step
            span = spans.begin_stage("place")
            span.set_attribute("picker.verdict", "placed")
            span.end()
        return super().acknowledge(request_id, attempt)

    def settle(
        self,
        request_id: str,
        outcome: Outcome,
        actual: float | None = None,
        answer_tokens: int | None = None,
        *,
        answered: bool = False,
        urgent: bool = False,
    ) -> asyncio.Future[SettleReply]:
        answer = super().settle(request_id, outcome, actual, answer_tokens, answered=answered, urgent=urgent)
        self._traces.settled(request_id, answer)
        return answer
