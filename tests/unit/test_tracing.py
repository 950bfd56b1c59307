"""Traces of requests: spans, parents and attributes; tracing is imported only if it is enabled."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from admission_bench import admission_over
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from scripted_store import ScriptedStore, answered

from picker_fleet.domain.bands import Band
from picker_fleet.domain.config import parse
from picker_fleet.domain.errors import TotalCapacity
from picker_fleet.domain.request import Alive, Completion, InferenceRequest, Outcome, Placement, Workload
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.ingress.headers import HEADERS
from picker_fleet.ingress.intake import Intake, read_body
from picker_fleet.state import accounting_token
from picker_fleet.state.accounting_token import Keyring
from picker_fleet.state.replies import Placed, Queued
from picker_fleet.state.store import Store, parse_verdict
from picker_fleet.telemetry.metrics import Metrics
from picker_fleet.telemetry.tracing import Traces
from picker_tools.local_fleet.bootstrap import build_bootstrap, to_yaml

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
NOT_SAMPLED = PARENT[:-2] + "00"
REQUEST = InferenceRequest(
    "r-1", "llama", "llama", False, "f", Band.DEFAULT, 1.0, Workload("w", 3), 1.0, 30.0, None
)
E1 = "10.0.0.1:8000"


class Tracing:
    """A replica's admission over a scripted store, with spans exported to memory."""

    def __init__(self, sample: float) -> None:
        self.memory = InMemorySpanExporter()
        self.traces = Traces(SimpleSpanProcessor(self.memory), sample=sample, replica="r", pool="p")
        self.store = ScriptedStore()
        self.store.admitting = [Placed((E1,))]
        self.gate = admission_over(cast(Store, self.store), Metrics(), SnapshotCell(), traces=self.traces)

    def spans(self) -> dict[str, Any]:
        return {span.name: span for span in self.memory.get_finished_spans()}

    def named(self, name: str) -> list[Any]:
        return [span for span in self.memory.get_finished_spans() if span.name == name]


Make = Callable[..., Tracing]


@pytest.fixture
def tracing() -> Iterator[Make]:
    made: list[Tracing] = []

    def make(sample: float = 1.0) -> Tracing:
        made.append(Tracing(sample))
        return made[-1]

    yield make
    for each in made:
        each.traces._provider.shutdown()


def ended(**changes: Any) -> Completion:
    completion = Completion("r-1", Outcome.COMPLETED, 200, None, 3, 8, 0.1, 0.05)
    return completion._replace(**changes)


async def test_a_request_with_a_traceparent_continues_that_trace(tracing: Make) -> None:
    traced = tracing(sample=0.0)
    for request in (REQUEST._replace(trace=PARENT), REQUEST._replace(trace=NOT_SAMPLED), REQUEST):
        await traced.gate.admit(request, stream_owned=False)
    (span,) = traced.named("decide")
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert span.attributes["picker.endpoint"] == "10.0.0.1:8000"
    assert span.attributes["picker.flow"] == "f"


@pytest.mark.parametrize("parent", ["", "garbage", "00-zz-00f067aa0ba902b7-01", "\x00", "00-" + "0" * 32])
async def test_a_malformed_traceparent_is_ignored(tracing: Make, parent: str) -> None:
    traced = tracing()
    await traced.gate.admit(REQUEST._replace(trace=parent), stream_owned=False)
    (span,) = traced.named("decide")
    assert span.parent is None


async def test_the_accounting_token_carries_the_trace_to_the_settling_replica(tracing: Make) -> None:
    placing, settling = tracing(), tracing(sample=0.0)
    placement = await placing.gate.admit(REQUEST, stream_owned=False)
    decide = placing.spans()["decide"]
    settling.gate.renew(Alive("r-1", None, placement.accounting_token))
    settling.gate.settle(ended(accounting_token=placement.accounting_token))
    await asyncio.sleep(0)  # callbacks of the reply run in the next iteration of the event loop
    own, _ = accounting_token.split_trace(placement.accounting_token)
    assert settling.store.alive == [("r-1", own)]
    assert [entry.token for entry in settling.gate.ledger] == [own]
    span = settling.spans()["settle"]
    assert span.context.trace_id == decide.context.trace_id
    assert span.parent.span_id == decide.context.span_id
    assert span.attributes["gen_ai.usage.output_tokens"] == 8
    assert span.attributes["picker.verdict"] == "settled"


async def test_the_trace_of_an_owned_stream_needs_no_accounting_token(tracing: Make) -> None:
    traced = tracing()
    await traced.gate.admit(REQUEST, stream_owned=True)
    traced.gate.settle(ended())
    await asyncio.sleep(0)  # callbacks of the reply run in the next iteration of the event loop
    spans = traced.spans()
    assert spans["settle"].parent.span_id == spans["decide"].context.span_id
    assert [entry.traceparent for entry in traced.gate.ledger] == [""]
    assert not traced.traces._settling


async def test_a_refusal_of_a_request_ends_the_trace_with_the_refusals_code(tracing: Make) -> None:
    traced = tracing()
    traced.store.admitting = [parse_verdict("refused total-capacity 60")]
    with pytest.raises(TotalCapacity):
        await traced.gate.admit(REQUEST, stream_owned=False)
    span = traced.spans()["decide"]
    assert span.status.description == "total_capacity"
    assert not traced.traces._undecided


async def test_the_stages_of_a_queued_request_are_child_spans_of_its_trace(tracing: Make) -> None:
    traced = tracing()
    live = traced.traces.begin(REQUEST)
    assert live is not None
    placed = Placed(("10.0.0.1:8000",))
    for name, verdict in (("admit", Queued(30.0)), ("place", Queued(30.0)), ("place", placed)):
        live.end_stage(live.begin_stage(name), answered(verdict))
    live.end(Placement(("10.0.0.1:8000",), ""))
    spans = traced.memory.get_finished_spans()
    assert [span.name for span in spans] == ["admit", "wait", "place", "wait", "place", "decide"]
    assert {span.parent.span_id for span in spans[:-1]} == {spans[-1].context.span_id}


def test_the_traceparent_is_read_only_if_tracing_is_enabled() -> None:
    by_setting = (parse({"tracing": {"enabled": on}}) for on in (False, True))
    off, on = (Intake(each, new_id=lambda: "id", keys=Keyring()) for each in by_setting)
    assert (off.headers, on.headers) == (HEADERS, HEADERS | {"traceparent"})
    ask = read_body(b'{"model": "llama"}')
    assert on.request(ask, {"traceparent": PARENT.encode()}, subset=None, trusted=False).trace == PARENT


def test_envoy_passes_the_traceparent_on_only_if_tracing_is_enabled() -> None:
    local = ("127.0.0.1", 0)
    for on in (False, True):
        settings = parse({"tracing": {"enabled": on}})
        bootstrap = build_bootstrap(settings, mode="lean", listen=local, admin=local, pickers=[local])
        assert ("exact: traceparent" in to_yaml(bootstrap)) is on
