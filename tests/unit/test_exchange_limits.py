"""Limits over all exchanges of a replica: a byte budget for bodies, and new flows per client source."""

import asyncio
from collections.abc import Sequence
from typing import Any

import extproc_client as envoy
import pytest
from background import until
from clocks import Clock
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from extproc_client import ScriptedGate, Talk, body, headers, parts
from hypothesis import given
from hypothesis import strategies as st

from picker_fleet.domain.budgets import BodyBudget, BodyBuffer
from picker_fleet.domain.errors import BodyStalled, BufferFull, ExpiredTtl, NoEndpoints, TooManyFlows
from picker_fleet.ingress.context import NewFlowLimit

ASK = b'{"model": "m", "prompt": "p"}'
LIMIT = 2048
SMALL: dict[str, Any] = {"extproc": {"max_body_bytes": 1024, "max_buffered_bytes": LIMIT}}
RENAMED = {**SMALL, "models": [{"name": "m", "target_models": [{"name": "m-v2"}]}]}

CHUNKS = st.sampled_from(
    [b"", ASK, ASK[:10], ASK[10:], b"x", b"{", ASK.ljust(600), ASK.ljust(1000), b" " * 1024]
)
MESSAGES = st.one_of(
    st.builds(body, CHUNKS, ended=st.booleans()),
    st.builds(body, CHUNKS, ended=st.just(False)),
    st.builds(envoy.trailers),
    st.builds(envoy.response_headers, st.just(200), ended=st.booleans()),
    st.builds(envoy.response_body, st.just(b"a"), ended=st.booleans()),
    st.builds(envoy.response_trailers),
    st.builds(ProcessingRequest),
)
LENGTHS = st.sampled_from([None, len(ASK), 600, 1000, 1024, 99999])


@st.composite
def conversations(draw: st.DrawFn) -> list[ProcessingRequest]:
    """Messages of one exchange, in a valid or an invalid order."""
    length = draw(LENGTHS)
    first = headers(
        draw(st.sampled_from(["standard", "lean", None])),
        {} if length is None else {"content-length": str(length)},
        ended=draw(st.integers(0, 9)) == 0,
    )
    return [first, *draw(st.lists(MESSAGES, max_size=6))]


async def run(talk: Talk, messages: Sequence[ProcessingRequest], leaves: bool) -> None:
    """Run an exchange as the service does; with `leaves`, the client leaves while the request waits."""
    exchange = talk.exchange
    try:
        for message in messages:
            if exchange.done:
                return
            work = asyncio.ensure_future(exchange.receive(message))
            await asyncio.sleep(0)
            if leaves and not work.done():
                work.cancel()
            for _ in await work:
                assert 0 <= talk.here.bodies.held_bytes <= LIMIT
            await asyncio.sleep(0)
        if exchange.uploading and leaves:
            exchange.refuse(BodyStalled("late"))
    except asyncio.CancelledError:
        pass
    finally:
        exchange.close()


@given(
    st.lists(st.tuples(conversations(), st.booleans()), min_size=1, max_size=5),
    st.sampled_from([None, ExpiredTtl("late"), NoEndpoints("none"), ValueError("a fault")]),
    st.sampled_from([SMALL, RENAMED]),
    st.booleans(),
)
async def test_the_byte_budget_is_empty_after_all_exchanges_have_ended(
    talks: list[tuple[list[ProcessingRequest], bool]], error: Any, settings: Any, shut: bool
) -> None:
    talk = Talk(ScriptedGate(error), settings)
    if shut:
        talk.gate.open.clear()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        for messages, leaves in talks:
            tasks.create_task(run(talk.another(), messages, leaves))
        for _ in range(20):
            await asyncio.sleep(0)
        talk.gate.open.set()
    assert talk.here.bodies.held_bytes == 0


@pytest.mark.parametrize("mode", ["standard", "lean"])
async def test_a_body_beyond_the_byte_budget_is_refused_until_other_bodies_are_released(mode: str) -> None:
    # Two waiting requests take two thirds of the budget.
    talk, ask = Talk(settings=SMALL), ASK.ljust(700)
    talk.gate.open.clear()
    waiting = [asyncio.create_task(talk.another().say(headers(mode), body(ask))) for _ in range(2)]
    await until(lambda: len(talk.gate.admitted) == 2)
    assert talk.here.bodies.held_bytes == 1400
    late = talk.another()
    assert await late.say(headers(mode), body(ask[:600], ended=False)) == []
    refused = await late.refused(body(ask[600:]))
    assert refused.status == 503
    assert refused.headers["x-llm-d-request-dropped-reason"] == "rejected-buffer-full"
    assert int(refused.headers["retry-after"]) >= 1
    assert talk.metrics.answers == [(mode, "", "buffer_full")]
    assert talk.here.bodies.held_bytes == 1400
    # A body that fits is accepted at once; larger bodies are accepted once the waiting requests have gone.
    talk.gate.open.set()
    answers = [await talk.another().say(headers(mode), body(ASK)), *await asyncio.gather(*waiting)]
    answers.append(await talk.another().say(headers(mode), body(ask)))
    assert [parts(each)[0] for each in answers] == ["request_headers"] * 4
    assert talk.here.bodies.held_bytes == 0


def test_a_body_that_finds_no_room_displaces_the_slowest_unfinished_body() -> None:
    clock, mib = Clock(), 1024 * 1024
    budget = BodyBudget(32 * mib, clock)
    silent, slower, slow, fast, whole = (BodyBuffer(budget, 16 * mib) for _ in range(5))
    for each, size in ((silent, 8), (slower, 4), (slow, 4), (fast, 4), (whole, 4)):
        each.add(b"x" * size * mib)
    whole.join()
    late = BodyBuffer(budget, 16 * mib)
    for _ in range(50):  # 5 s
        clock.now_s += 0.1
        fast.add(b"x" * (mib // 20))  # twice the least allowed rate, up to 6.5 MiB
        slow.add(b"x" * (mib // 50))
        slower.add(b"x" * 1000)
    late.add(b"x" * 8 * mib)
    with pytest.raises(BufferFull, match="too slowly"):
        silent.add(b"x")
    BodyBuffer(budget, 16 * mib).add(b"x" * 4 * mib)
    with pytest.raises(BufferFull, match="too slowly"):
        slower.join()
    slow.join()  # its bytes stay
    with pytest.raises(BufferFull, match="used up"):
        BodyBuffer(budget, 16 * mib).add(b"x" * 8 * mib)
    assert len(fast.join()) == 4 * mib + 50 * (mib // 20)


HERE = b"10.0.0.1"


def passes(limit: NewFlowLimit, flow: str, source: bytes = HERE) -> bool:
    try:
        limit.check(flow, source)
    except TooManyFlows:
        return False
    return True


def test_a_client_source_may_begin_flows_up_to_its_limit_and_continue_begun_flows() -> None:
    clock = Clock()
    limit = NewFlowLimit(3, ["known"], 0, clock)
    assert [passes(limit, f"f{n}") for n in range(5)] == [True] * 3 + [False] * 2
    # Flows that the source has begun still pass, and so do configured flows and other sources.
    assert passes(limit, "f1")
    assert passes(limit, "known")
    assert passes(limit, "f3", b"10.0.0.2")
    assert passes(limit, "f3")  # another source has begun flow f3 before
    # After reaching the limit, a source may begin another flow every 20 s.
    clock.now_s += 20.0
    assert [passes(limit, f"later{n}") for n in range(2)] == [True, False]
    with pytest.raises(TooManyFlows, match="more than 3 new flows a minute") as caught:
        limit.check("later1", HERE)
    assert caught.value.retry_after_s == 20
    # A request without a source has no limit of flows.
    assert all(passes(limit, f"more{n}", b"") for n in range(10))


SOURCES = [
    (0, b"10.0.0.1", b"10.0.0.2", False),
    (0, b"6.6.6.6, 10.0.0.1", b"7.7.7.7,10.0.0.1", True),  # a client can forge earlier addresses of the list
    (1, b"6.6.6.6, 10.0.0.1, 10.1.1.1", b"6.6.6.6, 10.0.0.2, 10.1.1.1", False),
    (1, b"6.6.6.6, 10.0.0.1, 10.1.1.1", b"7.7.7.7, 10.0.0.1, 10.1.1.2", True),
    (3, b"10.0.0.1, 10.1.1.1", b"10.0.0.1, 10.1.1.2", True),
    (0, b"2001:db8::1", b"2001:db8::ffff:1", True),  # one /64 network
    (0, b"2001:db8::1", b"2001:db8:0:1::1", False),
    (0, b"10.0.0.1:5000", b"10.0.0.1:5001", True),  # with the client's port, as from Azure's gateway
    (0, b"10.0.0.1:5000", b"10.0.0.2:5000", False),
    (0, b"[2001:db8::1]:5000", b"2001:db8::2", True),
    (0, b"::ffff:10.0.0.1", b"10.0.0.1", True),
    (0, b"::ffff:10.0.0.1", b"::ffff:10.0.0.2", False),
    (0, b"unknown", b"unknown", True),
    (0, b"\xff", b"10.0.0.1", False),
]


@pytest.mark.parametrize(("hops", "one", "other", "same"), SOURCES)
def test_the_source_of_a_request_is_the_last_address_that_a_trusted_proxy_reports(
    hops: int, one: bytes, other: bytes, same: bool
) -> None:
    limit = NewFlowLimit(1, [], hops, Clock())
    assert passes(limit, "a", one)
    assert passes(limit, "b", other) is not same


def test_above_the_limits_the_oldest_flows_and_client_sources_are_forgotten() -> None:
    limit = NewFlowLimit(1000, ["known"], 0, Clock(), max_flows=100, max_sources=100)
    for n in range(1000):
        assert passes(limit, f"f{n}", b"10.0.%d.%d" % divmod(n, 256))
    assert len(limit._seen) == 100
    assert len(limit._rates._left) == 100


@pytest.mark.parametrize("mode", ["standard", "lean"])
async def test_a_client_that_invents_flows_is_refused_in_every_mode(mode: str) -> None:
    talk = Talk(settings={"fair_request_queue": {"new_flows_per_minute": 2}, "models": [{"name": "known"}]})

    def ask(model: str, source: str = "10.0.0.1") -> list[ProcessingRequest]:
        return [headers(mode, {"x-forwarded-for": source}), body(b'{"model": "%s"}' % model.encode())]

    for n in range(2):
        await talk.another().say(*ask(f"invented-{n}"))
    refused = await talk.another().refused(*ask("invented-2"))
    assert (refused.status, refused.code, refused.headers["retry-after"]) == (503, "too_many_flows", "30")
    assert len(talk.gate.admitted) == 2
    others = [ask("known"), ask("invented-0"), ask("invented-3", "10.0.0.2")]
    assert [parts(await talk.another().say(*each))[0] for each in others] == ["request_headers"] * 3
    assert talk.here.bodies.held_bytes == 0
