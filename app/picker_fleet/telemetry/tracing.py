"""OpenTelemetry traces of requests, sent over OTLP to a collector. The package `admission` uses this module,
which is imported only if tracing is configured.

    decide ─┬─ admit      the admit script
            ├─ wait       the wait in the queue; one more span if the request is requeued
            ├─ place      the choice of an endpoint after the grant; zero length if the grant placed it
            └─ settle     the request's end, from the replica that receives it

If the request has a W3C `traceparent`, the span `decide` is a child of the client's span, and the client's
sampling flag applies. Other requests are sampled with the configured probability.
"""

import asyncio
import contextlib
import threading
from collections import OrderedDict
from functools import partial

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from picker_fleet.domain.request import Completion, InferenceRequest, Placement
from picker_fleet.domain.sections import Tracing
from picker_fleet.state.replies import AnyVerdict, Queued, SettleReply, name_of

_HEADER = "traceparent"
_EXPORT_S = 2  # timeout of an export in the background; a failed export loses its spans
_MAX_SETTLING = 10_000
_W3C = TraceContextTextMapPropagator()


class DecisionSpans:
    """The spans of a request from arrival to decision; until the decision `undecided` maps its id to them."""

    def __init__(
        self, tracer: trace.Tracer, root: Span, undecided: "dict[str, DecisionSpans]", request_id: str
    ) -> None:
        self._tracer = tracer
        self._root = root
        self._undecided, self._request_id = undecided, request_id
        undecided[request_id] = self
        self._context = trace.set_span_in_context(root, Context())
        self._wait: Span | None = None

    @property
    def parent(self) -> str:
        """The `traceparent` that spans after the decision have as parent."""
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, self._context)
        return carrier.get(_HEADER, "")

    def begin_stage(self, name: str) -> Span:
        """Start a child span of the decision; end the wait span first, if there is one."""
        self._end_wait()
        return self._tracer.start_span(name, self._context)

    def end_stage(self, span: Span, answer: "asyncio.Future[AnyVerdict]") -> None:
        """End a stage with the script's verdict; Queued starts a wait span."""
        if not answer.cancelled() and answer.exception() is None:
            verdict = answer.result()
            span.set_attribute("picker.verdict", name_of(verdict))
            if isinstance(verdict, Queued):
                self._wait = self._tracer.start_span("wait", self._context)
        span.end()

    def end(self, placement: Placement | None, fault: str = "") -> None:
        """End the decision's span with the endpoint of `placement`, or with the error `fault`. If a newer
        stream has the same request id, the newer stream's spans stay."""
        if self._undecided.get(self._request_id) is self:
            del self._undecided[self._request_id]
        self._end_wait()
        if placement is not None:
            self._root.set_attribute("picker.endpoint", placement.endpoints[0])
        else:
            self._root.set_status(Status(StatusCode.ERROR, fault))
        self._root.end()

    def _end_wait(self) -> None:
        if self._wait is not None:
            self._wait.end()
            self._wait = None


class Traces:
    """A replica's traces. Serves one event loop; a background thread exports the spans."""

    def __init__(self, processor: SpanProcessor, *, sample: float, replica: str, pool: str) -> None:
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample)),
            resource=Resource.create(
                {"service.name": "picker", "service.instance.id": replica, "picker.pool": pool}
            ),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("picker-fleet")
        self._undecided: dict[str, DecisionSpans] = {}
        self._settling: OrderedDict[str, Span] = OrderedDict()

    @classmethod
    def to_collector(cls, tracing: Tracing, *, replica: str, pool: str) -> "Traces":
        """Traces that are exported to the configured collector."""
        exporter = OTLPSpanExporter(
            endpoint=tracing.endpoint, insecure=tracing.endpoint.startswith("http://"), timeout=_EXPORT_S
        )
        processor = BatchSpanProcessor(exporter, schedule_delay_millis=1000)
        return cls(processor, sample=tracing.sample, replica=replica, pool=pool)

    def begin(self, request: InferenceRequest) -> DecisionSpans | None:
        """Start the trace of a request; None if the request is not sampled."""
        root = self._tracer.start_span(
            "decide",
            _context_of(request.trace),
            SpanKind.SERVER,
            {
                "picker.request_id": request.id,
                "picker.flow": request.flow,
                "picker.band": request.band.name,
                "picker.cost": request.cost,
                "gen_ai.request.model": request.model,
                "picker.target_model": request.target_model,
            },
        )
        if not root.is_recording():
            return None
        return DecisionSpans(self._tracer, root, self._undecided, request.id)

    def stage(self, request_id: str, name: str, answer: "asyncio.Future[AnyVerdict]") -> None:
        """Trace a stage, `admit` or `place`, from the call to Redis until its `answer`."""
        if (spans := self._undecided.get(request_id)) is not None:
            answer.add_done_callback(partial(spans.end_stage, spans.begin_stage(name)))

    def placed_by_grant(self, request_id: str) -> None:
        """Add a `place` span without length: a script granted and placed the request in one step."""
        if (spans := self._undecided.get(request_id)) is not None:
            span = spans.begin_stage("place")
            span.set_attribute("picker.verdict", "placed")
            span.end()

    def settling(self, parent: str, completion: Completion) -> None:
        """Start the span of a request's end, as a child of the decision's traceparent `parent`."""
        tokens = {
            "gen_ai.usage.input_tokens": completion.prompt_tokens,
            "gen_ai.usage.output_tokens": completion.completion_tokens,
        }
        self._settling[completion.id] = self._tracer.start_span(
            "settle",
            _context_of(parent),
            attributes={
                "picker.request_id": completion.id,
                "picker.outcome": completion.outcome.value,
                "http.response.status_code": completion.status,
                **{name: count for name, count in tokens.items() if count is not None},
            },
        )
        if len(self._settling) > _MAX_SETTLING:
            self._settling.popitem(last=False)[1].end()

    def settled(self, request_id: str, answer: "asyncio.Future[SettleReply]") -> None:
        """End the settle span when `answer`, the reply of the settle script, arrives."""
        span = self._settling.pop(request_id, None)
        if span is not None:
            answer.add_done_callback(lambda done: _end_settle(span, done))

    async def stop(self, deadline_s: float) -> None:
        """Export the remaining spans; wait at most `deadline_s`."""
        done, loop = asyncio.Event(), asyncio.get_running_loop()

        def flush() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the event loop may be closed already
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=flush, name="traces", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await done.wait()


def _context_of(parent: str) -> Context:
    return _W3C.extract({_HEADER: parent}, Context()) if parent else Context()


def _end_settle(span: Span, answer: "asyncio.Future[SettleReply]") -> None:
    if answer.cancelled() or answer.exception() is not None:
        span.set_status(Status(StatusCode.ERROR, "the call to settle the request failed"))
    else:
        span.set_attribute("picker.verdict", answer.result().kind)
    span.end()
