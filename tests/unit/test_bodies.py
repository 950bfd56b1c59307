"""The byte budget of request bodies: its bound holds, and every exchange gives back what it took."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from extproc_client import (
    Counted,
    ScriptedGate,
    body,
    converse,
    exchange_context,
    headers,
    parts,
    response_body,
    response_headers,
    response_trailers,
    set_headers,
    trailers,
)
from hypothesis import given
from hypothesis import strategies as st

from picker_fleet.config import parse
from picker_fleet.errors import ConfigError, ExpiredTtl, NoEndpoints
from picker_fleet.extproc.context import ExchangeContext
from picker_fleet.extproc.exchange import Exchange

ASK = b'{"model": "m", "prompt": "p"}'
LIMIT = 2048
SMALL = parse({"extproc": {"max_body_bytes": 1024, "max_buffered_bytes": LIMIT}})
RENAMED = parse(
    {
        "extproc": {"max_body_bytes": 1024, "max_buffered_bytes": LIMIT},
        "models": [{"name": "m", "target_models": [{"name": "m-v2"}]}],
    }
)

CHUNKS = st.sampled_from(
    [b"", ASK, ASK[:10], ASK[10:], b"x", b"{", ASK.ljust(600), ASK.ljust(1000), b" " * 1024]
)
MESSAGES = st.one_of(
    st.builds(body, CHUNKS, ended=st.booleans()),
    st.builds(body, CHUNKS, ended=st.just(False)),
    st.builds(trailers),
    st.builds(response_headers, st.just(200), ended=st.booleans()),
    st.builds(response_body, st.just(b"a"), ended=st.booleans()),
    st.builds(response_trailers),
    st.builds(ProcessingRequest),
)
LENGTHS = st.sampled_from([None, len(ASK), 600, 1000, 1024, 99999])


@st.composite
def conversations(draw: st.DrawFn) -> list[ProcessingRequest]:
    """What Envoy might send in one exchange, in a valid or an invalid order."""
    length = draw(LENGTHS)
    first = headers(
        draw(st.sampled_from(["standard", "lean", "headers", None])),
        {} if length is None else {"content-length": str(length)},
        ended=draw(st.integers(0, 9)) == 0,
        metadata=draw(st.sampled_from([{}, {"picker.request": {"model": "m"}}])),
    )
    return [first, *draw(st.lists(MESSAGES, max_size=6))]


async def run(
    exchange: Exchange, talk: Sequence[ProcessingRequest], here: ExchangeContext, leaves: bool
) -> None:
    """Run an exchange as the service does; with `leaves`, its client leaves while it waits."""
    try:
        for message in talk:
            if exchange.done:
                return
            work = asyncio.ensure_future(exchange.receive(message))
            await asyncio.sleep(0)
            if leaves and not work.done():
                work.cancel()
            for _ in await work:
                assert 0 <= here.bodies.held_bytes <= LIMIT
            exchange.before_last_write()
            await asyncio.sleep(0)
        if exchange.uploading and leaves:
            exchange.fail_upload()
            exchange.before_last_write()
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
def test_no_bytes_are_counted_after_all_exchanges_have_ended(
    talks: list[tuple[list[ProcessingRequest], bool]], error: Any, settings: Any, shut: bool
) -> None:
    async def play() -> None:
        gate = ScriptedGate(error)
        here = exchange_context(gate, Counted(), settings)
        if shut:
            gate.open.clear()
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            for talk, leaves in talks:
                tasks.create_task(run(Exchange(here), talk, here, leaves))
            for _ in range(20):
                await asyncio.sleep(0)
            gate.open.set()
        assert here.bodies.held_bytes == 0

    asyncio.run(play())


@pytest.mark.parametrize("mode", ["standard", "lean"])
async def test_a_body_beyond_the_byte_budget_is_refused_until_others_have_gone(mode: str) -> None:
    # Two waiting requests take two thirds of the budget.
    gate, metrics = ScriptedGate(), Counted()
    here = exchange_context(gate, metrics, SMALL)
    gate.open.clear()
    ask = ASK.ljust(700)
    waiting = [asyncio.create_task(converse(Exchange(here), headers(mode), body(ask))) for _ in range(2)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert (len(gate.admitted), here.bodies.held_bytes) == (2, 1400)
    late = Exchange(here)
    assert await converse(late, headers(mode), body(ask[:600], ended=False)) == []
    answers = await converse(late, body(ask[600:]))
    immediate = answers[0].immediate_response
    sent = set_headers(immediate.headers)
    assert immediate.status.code == 503
    assert sent["x-llm-d-request-dropped-reason"] == "rejected-buffer-full"
    assert int(sent["retry-after"]) >= 1
    assert metrics.answers == [(mode, "", "buffer_full")]
    assert here.bodies.held_bytes == 1400
    # A body that fits is accepted meanwhile, and any body once the others have gone.
    gate.open.set()
    assert parts(await converse(Exchange(here), headers(mode), body(ASK)))[0] == "request_headers"
    for task in waiting:
        assert parts(await task)[0] == "request_headers"
    assert parts(await converse(Exchange(here), headers(mode), body(ask)))[0] == "request_headers"
    assert here.bodies.held_bytes == 0


def test_a_budget_below_the_largest_body_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="extproc: max_body_bytes 4096 exceeds max_buffered_bytes 2048"):
        parse({"extproc": {"max_body_bytes": 4096, "max_buffered_bytes": 2048}})
