"""OpenTelemetry traces of requests, sent over OTLP to a collector. Nothing here is imported unless they are
configured.

    decide ─┬─ admit      the script's first word
            ├─ wait       in the queue; again if the request is sent back to it
            ├─ place      the choice of an endpoint after the grant
            └─ settle     everything given back; by whichever replica hears of the end

`decide` is a child of the client's span if the request brought a W3C `traceparent`, whose word on sampling
counts; other requests are sampled by the configured share.
"""

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from picker_fleet.request import Completion, InferenceRequest, Placement
from picker_fleet.sections import Tracing

_HEADER = "traceparent"
_EXPORT_S = 2  # what a collector may take; nobody waits for it, and what it does not take is lost
_MOST_SETTLING = 10_000
_W3C = TraceContextTextMapPropagator()


class Live:
    """The spans of one request between its arrival and its decision."""

    def __init__(self, tracer: trace.Tracer, root: Span) -> None:
        self._tracer = tracer
        self._root = root
        self._context = trace.set_span_in_context(root, Context())
        self._wait: Span | None = None

    @property
    def parent(self) -> str:
        """The traceparent of what comes after the decision."""
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, self._context)
        return carrier.get(_HEADER, "")

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Span]:
        """A child span around the block; what waited waits no longer."""
        self._end_wait()
        with self._tracer.start_as_current_span(name, self._context, record_exception=False) as span:
            yield span

    def told(self, verdict: str) -> None:
        """What the shared state said at a stage; `queued` begins a wait."""
        if verdict == "queued":
            self._wait = self._tracer.start_span("wait", self._context)

    def end(self, placement: Placement | None, fault: str = "") -> None:
        """The decision is made: a placement, or `fault`."""
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
    """A replica's traces. One event loop; sending is a thread's work."""

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
        self._live: dict[str, Live] = {}
        self._settling: OrderedDict[str, Span] = OrderedDict()

    @classmethod
    def to_collector(cls, tracing: Tracing, *, replica: str, pool: str) -> "Traces":
        """Traces that are sent to the collector of the configuration."""
        exporter = OTLPSpanExporter(
            endpoint=tracing.endpoint, insecure=tracing.endpoint.startswith("http://"), timeout=_EXPORT_S
        )
        processor = BatchSpanProcessor(exporter, schedule_delay_millis=1000)
        return cls(processor, sample=tracing.sample, replica=replica, pool=pool)

    def begin(self, request: InferenceRequest) -> Live | None:
        """A request has come; None if it is not sampled."""
        root = self._tracer.start_span(
            "decide",
            _context_of(request.trace),
            SpanKind.SERVER,
            {
                "picker.request_id": request.id,
                "picker.flow": request.flow,
                "picker.band": request.band.label,
                "picker.cost": request.cost,
                "gen_ai.request.model": request.model,
                "picker.target_model": request.target_model,
            },
        )
        if not root.is_recording():
            return None
        live = self._live[request.id] = Live(self._tracer, root)
        return live

    def live(self, request_id: str) -> Live | None:
        """The request's spans, while it is being decided upon."""
        return self._live.get(request_id)

    def decided(self, request_id: str, live: Live) -> None:
        """It has been decided upon; a newer stream of the same request keeps its own spans."""
        if self._live.get(request_id) is live:
            del self._live[request_id]

    def settling(self, parent: str, completion: Completion) -> None:
        """The end of a request was heard of, whose decision has the traceparent `parent`."""
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
        if len(self._settling) > _MOST_SETTLING:
            self._settling.popitem(last=False)[1].end()

    def settled(self, request_id: str, answer: "asyncio.Future[str]") -> None:
        """The shared state was told of an end; `answer` brings what it says."""
        span = self._settling.pop(request_id, None)
        if span is not None:
            answer.add_done_callback(lambda done: _end_settle(span, done))

    async def stop(self, deadline_s: float) -> None:
        """Send what is left, as far as that can be done within the deadline."""
        done, loop = asyncio.Event(), asyncio.get_running_loop()

        def flush() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop may have ended first
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=flush, name="traces", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await done.wait()


def _context_of(parent: str) -> Context:
    return _W3C.extract({_HEADER: parent}, Context()) if parent else Context()


def _end_settle(span: Span, answer: "asyncio.Future[str]") -> None:
    if answer.cancelled() or answer.exception() is not None:
        span.set_status(Status(StatusCode.ERROR, "the shared state was not told"))
    else:
        span.set_attribute("picker.verdict", answer.result().partition(" ")[0])
    span.end()
