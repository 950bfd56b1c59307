"""How many unconfigured flows one source may begin."""

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
from extproc_client import (
    Counted,
    ScriptedGate,
    body,
    converse,
    exchange_context,
    headers,
    parts,
    set_headers,
)

from picker_fleet.config import parse
from picker_fleet.errors import TooManyFlows
from picker_fleet.extproc import context
from picker_fleet.extproc.context import NewFlowLimit
from picker_fleet.extproc.exchange import Exchange

HERE = b"10.0.0.1"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def passes(those: NewFlowLimit, flow: str, source: bytes = HERE) -> bool:
    try:
        those.check(flow, source)
    except TooManyFlows:
        return False
    return True


def test_a_source_begins_as_many_flows_as_it_may_and_goes_on_with_them() -> None:
    clock = Clock()
    those = NewFlowLimit(3, ["known"], 0, clock)
    assert [passes(those, f"f{n}") for n in range(5)] == [True] * 3 + [False] * 2
    # What it has begun goes on, and so do configured flows, and other sources
    assert passes(those, "f1")
    assert passes(those, "known")
    assert passes(those, "f3", b"10.0.0.2")
    assert passes(those, "f3")  # which is no new one by then
    # After a minute it may begin more.
    clock.now_s += 20.0
    assert [passes(those, f"later{n}") for n in range(2)] == [True, False]
    with pytest.raises(TooManyFlows, match="more than 3 new flows a minute") as caught:
        those.check("later1", HERE)
    assert caught.value.retry_after_s == 20


@pytest.mark.parametrize(
    ("hops", "one", "other", "same"),
    [
        (0, b"10.0.0.1", b"10.0.0.2", False),
        (0, b"6.6.6.6, 10.0.0.1", b"7.7.7.7,10.0.0.1", True),  # what comes before is the client's own word
        (1, b"6.6.6.6, 10.0.0.1, 10.1.1.1", b"6.6.6.6, 10.0.0.2, 10.1.1.1", False),
        (1, b"6.6.6.6, 10.0.0.1, 10.1.1.1", b"7.7.7.7, 10.0.0.1, 10.1.1.2", True),
        (3, b"10.0.0.1, 10.1.1.1", b"10.0.0.1, 10.1.1.2", True),
        (0, b"2001:db8::1", b"2001:db8::ffff:1", True),  # of one network
        (0, b"2001:db8::1", b"2001:db8:0:1::1", False),
        (0, b"unknown", b"unknown", True),
        (0, b"\xff", b"10.0.0.1", False),
    ],
)
def test_a_source_is_the_last_address_that_a_trusted_proxy_has_told(
    hops: int, one: bytes, other: bytes, same: bool
) -> None:
    those = NewFlowLimit(1, [], hops, Clock())
    assert passes(those, "a", one)
    assert passes(those, "b", other) is not same


def test_without_a_source_nothing_is_limited() -> None:
    those = NewFlowLimit(1, [], 0, Clock())
    assert all(passes(those, f"f{n}", b"") for n in range(10))


def test_names_and_sources_without_end_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_MAX_FLOWS", 100)
    monkeypatch.setattr(context, "_MAX_SOURCES", 100)
    those = NewFlowLimit(1000, ["known"], 0, Clock())
    for n in range(1000):
        assert passes(those, f"f{n}", b"10.0.%d.%d" % divmod(n, 256))
    assert len(those._seen) == 100
    assert len(those._rates._left) == 100


@pytest.mark.parametrize("mode", ["standard", "lean", "headers"])
async def test_a_client_that_invents_flows_is_refused_in_every_mode(mode: str) -> None:
    gate, metrics = ScriptedGate(), Counted()
    settings = parse({"fair_request_queue": {"new_flows_per_minute": 2}, "models": [{"name": "known"}]})
    here = exchange_context(gate, metrics, settings)

    async def ask(model: str, source: str = "10.0.0.1") -> ProcessingResponse:
        metadata = {"picker.request": {"model": model}} if mode == "headers" else {}
        messages = [headers(mode, {"x-forwarded-for": source}, metadata=metadata)]
        if mode != "headers":
            messages.append(body(b'{"model": "%s"}' % model.encode()))
        return (await converse(Exchange(here), *messages))[0]

    # The address is refused, with a Retry-After.
    answers = [await ask(f"invented-{n}") for n in range(3)]
    assert parts(answers) == ["request_headers"] * 2 + ["immediate_response"]
    refused = answers[-1].immediate_response
    assert refused.status.code == 503
    assert set_headers(refused.headers)["retry-after"] == "30"
    assert b'"code":"too_many_flows"' in refused.body
    assert len(gate.admitted) == 2
    others = [await ask("known"), await ask("invented-0"), await ask("invented-3", "10.0.0.2")]
    assert parts(others) == ["request_headers"] * 3
    assert here.bodies.held_bytes == 0
