"""One exchange with Envoy in every mode, whole and broken: messages in, answers out."""

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from extproc_client import (
    PLACEMENT,
    Counted,
    Fault,
    ScriptedGate,
    body,
    converse,
    describe,
    echoed,
    exchange_context,
    given_back,
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
from picker_fleet.errors import (
    ExpiredTtl,
    NoEndpoints,
    RequestError,
    ShuttingDown,
    StateUnavailable,
    TotalCapacity,
)
from picker_fleet.extproc import codec
from picker_fleet.extproc.codec import WHOLE_BYTES
from picker_fleet.extproc.exchange import Exchange
from picker_fleet.request import Outcome, Placement

ASK = b'{"model": "m", "prompt": "p"}'
BIG = json.dumps({"model": "m", "prompt": "x" * 600_000}).encode()
DESTINATION = {"x-gateway-destination-endpoint": codec.destinations(PLACEMENT)}
SPLIT = parse({"models": [{"name": "m", "target_models": [{"name": "m-v2"}]}]})


def asks(mode: str, fields: dict[str, str | bytes] | None = None) -> list[ProcessingRequest]:
    """A small request in `mode`."""
    if mode == "headers":
        return [headers(mode, fields or {}, metadata={"picker.request": {"model": "m", "stream": True}})]
    return [headers(mode, fields or {}), body(ASK)]


def chunked(data: bytes, size: int) -> list[ProcessingRequest]:
    """`data` as Envoy streams it, ended by an empty chunk."""
    return [*(body(data[at : at + size], ended=False) for at in range(0, len(data), size)), body()]


def refusal(answers: Sequence[ProcessingResponse]) -> tuple[int, dict[str, Any]]:
    """Status and error of the one answer, an immediate one."""
    assert parts(answers) == ["immediate_response"]
    immediate = answers[0].immediate_response
    return immediate.status.code, json.loads(immediate.body)["error"]


@pytest.mark.parametrize("mode", ["standard", "lean", "headers"])
async def test_a_request_is_placed_in_every_mode(mode: str) -> None:
    gate, metrics = ScriptedGate(), Counted()
    exchange = Exchange(exchange_context(gate, metrics))
    answers = await converse(exchange, *asks(mode, {"x-request-id": "envoys-id"}))

    assert set_headers(answers[0].request_headers.response.header_mutation) == DESTINATION
    assert parts(answers) == ["request_headers"] + ["request_body"] * (mode == "standard")
    assert given_back(answers) == [(ASK, True)] * (mode != "headers")
    # The id is Envoy's where only Envoy can set it. In standard the stream owns the request.
    request, stream_owned = gate.admitted[0]
    assert request.id == ("made-1" if mode == "standard" else "envoys-id")
    assert dict(answers[0].dynamic_metadata["picker"]) == {
        "id": request.id,
        "ticket": "ticket-1",
        "pressure": "0.25",
    }
    assert stream_owned == (mode == "standard")
    assert exchange.done == (mode != "standard")
    assert metrics.answers == [(mode, "m", "ok")]
    exchange.close()
    assert gate.withdrawn == []


@pytest.mark.parametrize(
    ("mode", "cost"), [("standard", len(ASK) / 4), ("lean", len(ASK) / 4), ("headers", 100.0)]
)
async def test_a_request_is_costed_in_tokens_in_every_mode(mode: str, cost: float) -> None:
    tokens = {"unit": "tokens", "watermark_per_backend": 8000}
    gate = ScriptedGate()
    exchange = Exchange(exchange_context(gate, settings=parse({"request_queue_controller": tokens})))
    await converse(exchange, *asks(mode, {"content-length": "400"} if mode == "headers" else {}))
    exchange.close()

    # The cost is the prompt's; the answer's part comes from the flow's mean.
    request, _ = gate.admitted[0]
    assert (request.cost, request.learn) == (cost, True)


@pytest.mark.parametrize("mode", ["standard", "lean"])
async def test_nothing_is_sent_before_the_whole_body_has_come(mode: str) -> None:
    gate = ScriptedGate()
    exchange = Exchange(exchange_context(gate))
    *first, last = [headers(mode), *chunked(BIG, 16_384)]

    # Envoy may still retry elsewhere (G7).
    assert await converse(exchange, *first) == []
    assert gate.admitted == []

    answers = await converse(exchange, last)
    chunks = echoed(answers)
    assert b"".join(chunk.body for chunk in chunks) == BIG
    assert all(len(chunk.body) <= 62_000 for chunk in chunks)
    assert [chunk.end_of_stream for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


class Unconfirming(ScriptedGate):
    """Never says whether a place is still its request's own."""

    def __init__(self) -> None:
        super().__init__()
        self.asking = asyncio.Event()

    async def confirm(self, request_id: str, placement: Placement, age_s: float) -> bool:
        self.asking.set()
        await asyncio.Event().wait()
        raise AssertionError("nothing ends the wait")


SIZED = {"content-length": str(len(ASK))}
LONG = json.dumps({"model": "m", "prompt": "x" * WHOLE_BYTES}).encode()  # more than one message gives back
UNENDED = [headers("lean", {"content-length": str(len(LONG))}), body(LONG, ended=False)]


async def test_in_lean_a_body_complete_by_its_length_is_answered_in_one_message_at_once() -> None:
    # All bytes have arrived, but not the end of the stream.
    gate = ScriptedGate()
    exchange = Exchange(exchange_context(gate))
    answers = await converse(exchange, headers("lean", SIZED), body(ASK, ended=False))
    assert parts(answers) == ["request_headers"]
    assert given_back(answers) == [(ASK, True)]
    assert set_headers(answers[0].request_headers.response.header_mutation) == DESTINATION
    assert exchange.done
    exchange.close()
    assert len(gate.admitted) == 1
    assert gate.withdrawn == []


@pytest.mark.parametrize(
    ("spare", "messages"),
    [(0, ["request_headers"]), (1, ["request_headers"] + ["request_body"] * 9)],
)
async def test_one_message_carries_at_most_what_every_envoy_buffers(spare: int, messages: list[str]) -> None:
    ask = ASK.ljust(WHOLE_BYTES + spare)
    answers = await converse(Exchange(exchange_context(ScriptedGate())), headers("lean"), body(ask))
    assert parts(answers) == messages
    assert b"".join(chunk for chunk, _ in given_back(answers)) == ask
    assert [ended for _, ended in given_back(answers)][-1]


@pytest.mark.parametrize(
    ("mode", "ask"), [pytest.param("standard", ASK, id="standard"), pytest.param("lean", LONG, id="lean")]
)
@pytest.mark.parametrize("end", ["an empty chunk", "trailers"])
async def test_a_body_complete_by_its_length_is_placed_before_its_end_arrives(
    mode: str, ask: bytes, end: str
) -> None:
    # All bytes have arrived, but not the end of the stream.
    gate = ScriptedGate()
    exchange = Exchange(exchange_context(gate))
    sized: dict[str, str | bytes] = {"content-length": str(len(ask))}
    assert await converse(exchange, headers(mode, sized), body(ask, ended=False)) == []
    # It is placed once, and Envoy has no answer yet.
    assert len(gate.admitted) == 1
    answers = await converse(exchange, body() if end == "an empty chunk" else trailers())
    chunks = (1 if mode == "standard" else 9) if end == "an empty chunk" else 0
    assert parts(answers) == ["request_headers"] + ["request_body"] * chunks
    assert b"".join(chunk for chunk, _ in given_back(answers)) == ask
    assert [ended for _, ended in given_back(answers)][-1]
    exchange.close()
    assert len(gate.admitted) == 1
    assert gate.withdrawn == []


async def test_an_empty_chunk_after_a_whole_body_changes_nothing() -> None:
    gate = ScriptedGate()
    exchange = Exchange(exchange_context(gate))
    messages = [headers("standard", SIZED), body(ASK, ended=False), body(b"", ended=False)]
    assert await converse(exchange, *messages) == []
    answers = await converse(exchange, body())
    assert given_back(answers) == [(ASK, True)]
    assert len(gate.admitted) == 1


@pytest.mark.parametrize("keeping", [True, False])
async def test_a_lease_is_confirmed_if_the_end_of_its_body_arrives_late(keeping: bool) -> None:
    gate = ScriptedGate()
    here = exchange_context(gate)
    exchange = Exchange(here)
    await converse(exchange, *UNENDED)
    # The end arrives so late that the lease may have expired; nothing renews it before the answer.
    for _ in range(3):
        here.clock()
    gate.keeping = keeping
    answers = await converse(exchange, body())
    # A lost lease: it queues again with its age, and the first placement is withdrawn.
    assert gate.confirmed == [("made-1", 4.0)]
    assert [request.id for request, _ in gate.admitted] == ["made-1"] * (1 if keeping else 2)
    assert gate.ages_s == ([0.0] if keeping else [0.0, 6.0])
    assert gate.withdrawn == ([] if keeping else ["made-1"])
    assert b"".join(chunk for chunk, _ in given_back(answers)) == LONG
    exchange.close()
    assert gate.withdrawn == ([] if keeping else ["made-1"])


async def test_a_lease_that_cannot_be_confirmed_is_withdrawn() -> None:
    gate = ScriptedGate()
    here = exchange_context(gate)
    exchange = Exchange(here)
    await converse(exchange, *UNENDED)
    for _ in range(3):
        here.clock()
    gate.error = StateUnavailable("away")
    code, _ = refusal(await converse(exchange, body()))
    assert code == 503
    exchange.close()
    assert gate.withdrawn == ["made-1"]


async def test_a_client_that_leaves_during_the_confirmation_has_its_lease_withdrawn() -> None:
    gate = Unconfirming()
    here = exchange_context(gate)
    exchange = Exchange(here)
    await converse(exchange, *UNENDED)
    for _ in range(3):
        here.clock()
    task = asyncio.create_task(converse(exchange, body()))
    await gate.asking.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    exchange.close()
    assert gate.withdrawn == ["made-1"]


@pytest.mark.parametrize(
    "unended", [[headers("standard", SIZED), body(ASK, ended=False)], UNENDED], ids=["standard", "lean"]
)
async def test_a_stream_that_ends_before_the_end_of_its_body_has_its_lease_withdrawn(
    unended: list[ProcessingRequest],
) -> None:
    gate = ScriptedGate()
    exchange = Exchange(exchange_context(gate))
    await converse(exchange, *unended)
    exchange.close()
    assert len(gate.withdrawn) == 1


async def test_a_body_longer_than_its_content_length_is_refused_and_its_lease_withdrawn() -> None:
    gate = ScriptedGate()
    exchange = Exchange(exchange_context(gate))
    await converse(exchange, *UNENDED)
    code, error = refusal(await converse(exchange, body(b"more")))
    assert code == 400
    assert "content-length" in error["message"]
    exchange.close()
    assert len(gate.withdrawn) == 1


@pytest.mark.parametrize("mode", ["standard", "lean"])
@pytest.mark.parametrize("ask", [ASK, LONG], ids=["small", "long"])
async def test_a_body_that_trailers_end_goes_back_once_with_the_headers(mode: str, ask: bytes) -> None:
    # (in chunks of its own, Envoy's router would send its copy of it besides, as the trailers pass)
    exchange = Exchange(exchange_context(ScriptedGate()))
    answers = await converse(exchange, headers(mode), body(ask, ended=False), trailers())
    assert parts(answers) == ["request_headers"]
    assert given_back(answers) == [(ask, True)]
    # In standard the response phases follow.
    assert exchange.done == (mode == "lean")
    if mode == "standard":
        await converse(exchange, response_headers(200, ended=True))
        assert exchange.done


async def test_without_a_protocol_config_the_mode_is_standard() -> None:
    gate = ScriptedGate()
    exchange = Exchange(exchange_context(gate))
    await converse(exchange, headers(None), body(ASK))
    assert gate.admitted[0][1]
    assert not exchange.done


@pytest.mark.parametrize("mode", ["standard", "lean", "headers"])
async def test_a_request_without_body_is_routed_without_admission(mode: str) -> None:
    gate, metrics = ScriptedGate(), Counted()
    exchange = Exchange(exchange_context(gate, metrics))
    hint = {"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": ["10.0.0.1:8000"]}}
    answers = await converse(exchange, headers(mode, ended=True, metadata=hint))

    assert parts(answers) == ["request_headers"]
    # (named as often as Envoy tries: what is not listed may serve no request that is bound to a subset)
    assert set_headers(answers[0].request_headers.response.header_mutation) == {
        "x-gateway-destination-endpoint": codec.destinations(PLACEMENT, 3)
    }
    assert codec.destinations(PLACEMENT, 3) == "10.0.0.1:8000,[fd00::2]:8000,10.0.0.1:8000"
    assert dict(answers[0].dynamic_metadata["picker"]) == {"pressure": "0.25"}
    assert gate.routed == [("10.0.0.1:8000",)]
    assert metrics.answers == [(mode, "", "ok")]
    if mode == "standard":
        await converse(exchange, response_headers(200, ended=True))
    assert exchange.done
    assert (gate.admitted, gate.settled, gate.withdrawn) == ([], [], [])


# test_allowlist.py has all spellings.
NOT_SERVED = [
    ("POST", "/flush_cache"),
    ("GET", "/v1/completions"),
    ("GET", b"/v1/models/\xff"),
    ("CONNECT", ""),
]


@pytest.mark.parametrize("mode", ["standard", "lean", "headers"])
@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("ask", NOT_SERVED)
async def test_paths_outside_the_allowlist_are_refused_in_every_mode(
    mode: str, ended: bool, ask: tuple[str, str | bytes]
) -> None:
    gate, metrics = ScriptedGate(), Counted()
    exchange = Exchange(exchange_context(gate, metrics))
    metadata = {"picker.request": {"model": "m"}}
    answers = await converse(exchange, headers(mode, ended=ended, metadata=metadata, ask=ask))
    status, error = refusal(answers)
    assert (status, error["code"]) == (404, "unknown_path")
    assert exchange.done
    exchange.close()
    assert (gate.admitted, gate.routed) == ([], [])
    assert metrics.answers == [(mode, "", "unknown_path")]


@pytest.mark.parametrize("mode", ["standard", "lean", "headers"])
@pytest.mark.parametrize(
    ("ask", "ended", "says"),
    [
        (("POST", "/v1/chat/completions?x=/v1/models"), True, "has no body"),
        (("GET", "/v1/models?x=1"), False, "with a body"),
    ],
)
async def test_inference_needs_a_body_and_a_read_has_none(
    mode: str, ask: tuple[str, str], ended: bool, says: str
) -> None:
    gate = ScriptedGate()
    metadata = {"picker.request": {"model": "m"}}
    exchange = Exchange(exchange_context(gate))
    status, error = refusal(await converse(exchange, headers(mode, ended=ended, metadata=metadata, ask=ask)))
    assert (status, error["code"]) == (400, "bad_request")
    assert says in error["message"]
    assert (gate.admitted, gate.routed) == ([], [])


@pytest.mark.parametrize("mode", ["standard", "lean", "headers"])
async def test_reads_are_bounded_in_rate_over_all_exchanges(mode: str) -> None:
    # One read a second, a burst of two; one has a configured path.
    gate, metrics = ScriptedGate(), Counted()
    settings = parse({"extproc": {"read_rate": 1, "paths": ["GET /v1/adapters/{id}"]}})
    here = exchange_context(gate, metrics, settings)
    reads = [headers(mode, ended=True), headers(mode, ended=True, ask=("GET", "/v1/adapters/a"))]
    for message in reads:
        assert parts(await converse(Exchange(here), message)) == ["request_headers"]
    answers = await converse(Exchange(here), headers(mode, ended=True))
    status, error = refusal(answers)
    assert (status, error["code"]) == (429, "too_many_reads")
    assert set_headers(answers[0].immediate_response.headers)["retry-after"] == "1"
    assert len(gate.routed) == 2
    await converse(Exchange(here), *asks(mode))
    assert metrics.answers[-1] == (mode, "m", "ok")


@pytest.mark.parametrize("missing", [":method", ":path"])
async def test_an_envoy_that_forwards_no_path_is_refused_with_the_setting_to_change(missing: str) -> None:
    message = headers("lean")
    fields = message.request_headers.headers.headers
    kept = [field for field in fields if field.key != missing]
    del fields[:]
    fields.extend(kept)
    status, error = refusal(await converse(Exchange(exchange_context(ScriptedGate())), message))
    assert (status, error["code"]) == (500, "unsupported_processing_mode")
    assert "forward_rules" in error["message"]


@pytest.mark.parametrize(
    ("hint", "subset"),
    [
        (None, None),
        ([], ()),
        (["10.0.0.1:8000", "nonsense"], ("10.0.0.1:8000",)),
        ("10.0.0.1:80", ("10.0.0.1:80",)),
    ],
)
async def test_a_subset_hint_reaches_the_gate(hint: object, subset: tuple[str, ...] | None) -> None:
    gate = ScriptedGate()
    key = "x-gateway-destination-endpoint-subset"
    metadata = {"envoy.lb.subset_hint": {key: hint}} if hint is not None else {}
    await converse(Exchange(exchange_context(gate)), headers("lean", metadata=metadata), body(ASK))
    assert gate.admitted[0][0].subset == subset


@pytest.mark.parametrize("mode", ["standard", "lean"])
@pytest.mark.parametrize(("bad", "says"), [(b"", "empty"), (b'{"model": 7}', "must be a string")])
async def test_a_bad_body_is_refused_by_name(mode: str, bad: bytes, says: str) -> None:
    gate, metrics = ScriptedGate(), Counted()
    exchange = Exchange(exchange_context(gate, metrics))
    status, error = refusal(await converse(exchange, headers(mode), body(bad)))
    assert (status, error["code"], error["type"]) == (400, "bad_request", "invalid_request_error")
    assert says in error["message"]
    assert exchange.done
    assert gate.admitted == []
    assert metrics.answers == [(mode, "", "bad_request")]


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        (None, "content-type"),
        ({"error": "invalid-json"}, "not valid JSON"),
        ({"model": ""}, "no model"),
        ({"model": 7}, "must be a string"),
    ],
)
async def test_a_body_that_envoy_could_not_read_is_refused(metadata: Any, says: str) -> None:
    first = headers("headers", metadata={"picker.request": metadata} if metadata is not None else {})
    status, error = refusal(await converse(Exchange(exchange_context(ScriptedGate())), first))
    assert status == 400
    assert says in error["message"]


@pytest.mark.parametrize("mode", ["standard", "lean", "headers"])
async def test_a_bad_header_is_refused_by_name_where_it_counts(mode: str) -> None:
    name = "x-gateway-inference-fairness-id"
    gate = ScriptedGate()
    await converse(Exchange(exchange_context(gate)), *asks(mode, {name: b"caf\xe9"}))
    assert gate.admitted[0][0].flow == "m"
    gate = ScriptedGate()
    counting = exchange_context(gate, settings=parse({"extproc": {"trusted_headers": [name]}}))
    status, error = refusal(await converse(Exchange(counting), *asks(mode, {name: b"caf\xe9"})))
    assert status == 400
    assert name in error["message"]
    assert gate.admitted == []


async def test_other_headers_may_hold_any_bytes() -> None:
    answers = await converse(
        Exchange(exchange_context(ScriptedGate())), *asks("lean", {"cookie": b"\xff\xfe"})
    )
    assert parts(answers)[0] == "request_headers"


@pytest.mark.parametrize("mode", ["standard", "lean", "headers"])
async def test_a_body_announced_too_large_is_refused_at_once(mode: str) -> None:
    first = asks(mode, {"content-length": "20971520"})[0]
    status, error = refusal(await converse(Exchange(exchange_context(ScriptedGate())), first))
    assert (status, error["code"]) == (413, "payload_too_large")
    assert "8388608 bytes" in error["message"]


@pytest.mark.parametrize("mode", ["standard", "lean"])
async def test_a_body_that_grows_too_large_is_refused_at_once(mode: str) -> None:
    settings = parse({"extproc": {"max_body_bytes": 2048}})
    exchange = Exchange(exchange_context(ScriptedGate(), settings=settings))
    answers = await converse(exchange, headers(mode), body(b"x" * 2048, ended=False), body(b"x", ended=False))
    assert refusal(answers)[0] == 413
    assert exchange.done


@pytest.mark.parametrize(
    ("modes", "names"),
    [
        ((2, 0), "BUFFERED"),
        ((99, 4), "99"),
        ((1, 0), "STREAMED"),
        ((3, 4), "BUFFERED_PARTIAL"),
        ((4, 2), "BUFFERED"),
        ((0, 4), "FULL_DUPLEX_STREAMED"),
        ((5, 5), "GRPC"),
    ],
)
async def test_other_body_modes_are_refused_by_name(modes: tuple[int, int], names: str) -> None:
    status, error = refusal(await converse(Exchange(exchange_context(ScriptedGate())), headers(modes)))
    assert (status, error["code"]) == (500, "unsupported_processing_mode")
    assert names in error["message"]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([body(ASK)], "request body came"),
        ([ProcessingRequest()], "an empty message came"),
        ([headers("lean"), headers("lean")], "request headers came"),
        ([headers("lean"), response_headers()], "response headers came"),
        ([headers("standard"), response_body(b"x")], "response body came"),
        ([headers("standard"), ProcessingRequest()], "an empty message came"),
    ],
)
async def test_messages_out_of_order_are_refused(messages: list[ProcessingRequest], says: str) -> None:
    exchange = Exchange(exchange_context(ScriptedGate()))
    status, error = refusal(await converse(exchange, *messages))
    assert status == 500
    assert says in error["message"]
    assert exchange.done


@pytest.mark.parametrize("mode", ["standard", "lean", "headers"])
async def test_a_refusal_of_the_gate_is_the_answer(mode: str) -> None:
    gate, metrics = ScriptedGate(ExpiredTtl("waited 30 s", retry_after_s=2)), Counted()
    exchange = Exchange(exchange_context(gate, metrics))
    answers = await converse(exchange, *asks(mode))
    assert refusal(answers) == (
        503,
        {"message": "waited 30 s", "type": "overloaded_error", "code": "expired_ttl"},
    )
    sent = set_headers(answers[0].immediate_response.headers)
    assert sent["retry-after"] == "2"
    assert sent["x-llm-d-request-dropped-reason"] == "rejected-ttl-expired"
    assert metrics.answers == [(mode, "m", "expired_ttl")]
    exchange.close()
    assert (gate.withdrawn, gate.settled) == ([], [])


async def test_overload_may_be_429_by_configuration_and_other_faults_not() -> None:
    settings = parse({"fair_request_queue": {"overload_status": 429}})
    for error, status in ((ExpiredTtl("late"), 429), (NoEndpoints("none"), 503), (Fault("tea"), 418)):
        exchange = Exchange(exchange_context(ScriptedGate(error), settings=settings))
        assert refusal(await converse(exchange, *asks("lean")))[0] == status


async def test_no_endpoint_for_a_get_is_the_answer() -> None:
    exchange = Exchange(exchange_context(ScriptedGate(NoEndpoints("none is ready"))))
    assert refusal(await converse(exchange, headers("lean", ended=True)))[0] == 503


async def test_an_unexpected_exception_is_logged_and_answered_with_500(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exchange = Exchange(exchange_context(ScriptedGate(ValueError("a bug"))))
    status, error = refusal(await converse(exchange, *asks("lean")))
    assert (status, error["code"]) == (500, "internal_error")
    assert "a bug" not in error["message"]
    assert "a bug" in caplog.text


@pytest.mark.parametrize("mode", ["standard", "lean"])
async def test_an_incomplete_body_is_not_admitted(mode: str) -> None:
    gate = ScriptedGate()
    exchange = Exchange(exchange_context(gate))
    await converse(exchange, headers(mode), body(b'{"model"', ended=False))
    exchange.close()

    assert (gate.admitted, gate.withdrawn, gate.settled) == ([], [], [])


@pytest.mark.parametrize("mode", ["standard", "lean", "headers"])
async def test_a_client_that_leaves_while_waiting_cancels_the_wait(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    gate, metrics = ScriptedGate(), Counted()
    gate.open.clear()
    exchange = Exchange(exchange_context(gate, metrics))
    task = asyncio.create_task(converse(exchange, *asks(mode, {"x-request-id": "made-1"})))
    await gate.asked.wait()

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    caplog.set_level(logging.INFO)
    exchange.close()
    exchange.close()

    assert gate.cancelled == ["made-1"]
    assert (gate.withdrawn, gate.settled) == ([], [])
    # Metrics and log have 499, a client that left.
    assert metrics.answers == [(mode, "m", "client_gone")]
    [line] = [record for record in caplog.records if record.getMessage() == "refused"]
    assert (vars(line)["decision"], vars(line)["status"]) == ("client_gone", 499)


@pytest.mark.parametrize("mode", ["standard", "lean", "headers"])
async def test_a_placement_whose_answer_was_not_sent_is_withdrawn(mode: str) -> None:
    # The stream ends before the answer was written.
    gate, metrics = ScriptedGate(), Counted()
    gate.waited_s = 2.5
    exchange = Exchange(exchange_context(gate, metrics))
    for message in asks(mode, {"x-request-id": "made-1"}):
        await exchange.receive(message)
    exchange.close()
    exchange.close()

    assert gate.withdrawn == ["made-1"]
    assert metrics.answers == [(mode, "m", "client_gone")]
    assert metrics.waits == [("m", 2.5, False, "m")]
    assert gate.settled == []


JSON_ANSWER = json.dumps(
    {
        "model": "m",
        "choices": [{"text": 'a "usage": {"prompt_tokens": 99} b'}],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 100,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }
).encode()
SSE_ANSWER = (
    b'data: {"choices":[{"text":"a"}],"usage":null}\n\n' * 3
    + b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":100}}\n\ndata: [DONE]\n\n'
)
RESPONSES_ANSWER = (
    b'event: response.completed\ndata: {"type":"response.completed","response":{"output":["'
    + b"x" * 50_000
    + b'"],"usage":{"input_tokens":7,"output_tokens":100},"metadata":{}}}\n\n'
)


@pytest.mark.parametrize(
    "answer", [JSON_ANSWER, SSE_ANSWER, RESPONSES_ANSWER], ids=["json", "sse", "responses"]
)
@pytest.mark.parametrize("size", [1, 7, 1000, 1_000_000])
async def test_standard_passes_the_answer_on_and_accounts_for_it(answer: bytes, size: int) -> None:
    gate = ScriptedGate()
    exchange = Exchange(exchange_context(gate))
    await converse(exchange, *asks("standard"))
    came = [answer[at : at + size] for at in range(0, len(answer), size)]
    messages = [response_body(chunk, ended=index == len(came) - 1) for index, chunk in enumerate(came)]
    said = await converse(exchange, response_headers(200, served="10.0.0.2:8000"), *messages)

    assert parts(said) == ["response_headers"] + ["response_body"] * len(came)
    chunks = echoed(said, "response_body")
    assert [chunk.body for chunk in chunks] == came
    assert [chunk.end_of_stream for chunk in chunks] == [False] * (len(came) - 1) + [True]
    assert exchange.done
    exchange.close()
    [completion] = gate.settled
    assert (completion.id, completion.outcome, completion.status) == ("made-1", Outcome.COMPLETED, 200)
    assert completion.served == "10.0.0.2:8000"
    assert (completion.prompt_tokens, completion.completion_tokens) == (7, 100)
    assert completion.first_byte_s is not None
    assert completion.duration_s is not None
    assert 0 < completion.first_byte_s < completion.duration_s


@pytest.mark.parametrize(
    ("messages", "answered", "outcome", "status"),
    [
        ([response_headers(204, ended=True)], ["response_headers"], Outcome.COMPLETED, 204),
        ([response_headers(503, ended=True)], ["response_headers"], Outcome.UPSTREAM_FAILED, 503),
        (
            [response_headers(200), response_body(b"a"), response_trailers()],
            ["response_headers", "response_body", "response_trailers"],
            Outcome.COMPLETED,
            200,
        ),
        ([], [], Outcome.CLIENT_GONE, 0),
        (
            [response_headers(200), response_body(b"a")],
            ["response_headers", "response_body"],
            Outcome.CLIENT_GONE,
            200,
        ),
        ([response_headers(502)], ["response_headers"], Outcome.UPSTREAM_FAILED, 502),
    ],
)
async def test_standard_settles_once_however_the_answer_ends(
    messages: list[ProcessingRequest], answered: list[str], outcome: Outcome, status: int
) -> None:
    gate = ScriptedGate()
    exchange = Exchange(exchange_context(gate))
    await converse(exchange, *asks("standard"))
    assert parts(await converse(exchange, *messages)) == answered
    exchange.close()
    exchange.close()
    [completion] = gate.settled
    assert (completion.outcome, completion.status) == (outcome, status)
    assert (completion.prompt_tokens, completion.completion_tokens) == (None, None)
    assert gate.withdrawn == []


@pytest.mark.parametrize("begun", [[], [headers("standard"), body(b"{", ended=False)]])
async def test_standard_passes_on_an_answer_that_envoy_makes_itself(begun: list[ProcessingRequest]) -> None:
    gate = ScriptedGate()
    exchange = Exchange(exchange_context(gate))
    messages = [*begun, response_headers(408), body(b"x")]
    said = await converse(exchange, *messages, response_body(b"timeout", ended=True))

    assert parts(said) == ["response_headers", "response_body"]
    exchange.close()
    assert (gate.admitted, gate.settled) == ([], [])


@pytest.mark.parametrize("mode", ["standard", "lean"])
async def test_a_rewritten_model_goes_out_with_the_right_length(mode: str) -> None:
    gate = ScriptedGate()
    answers = await converse(Exchange(exchange_context(gate, settings=SPLIT)), *asks(mode))

    sent = b"".join(chunk for chunk, _ in given_back(answers))
    assert json.loads(sent) == {"model": "m-v2", "prompt": "p"}
    sent_headers = set_headers(answers[0].request_headers.response.header_mutation)
    assert sent_headers == {**DESTINATION, "content-length": str(len(sent))}
    assert (gate.admitted[0][0].model, gate.admitted[0][0].target_model) == ("m", "m-v2")


async def test_headers_mode_refuses_what_it_cannot_rewrite() -> None:
    gate = ScriptedGate()
    status, error = refusal(
        await converse(Exchange(exchange_context(gate, settings=SPLIT)), *asks("headers"))
    )
    assert status == 500
    assert "m-v2" in error["message"]
    assert gate.admitted == []


async def renamed(
    chunks: list[bytes], fields: dict[str, str] | None = None, *, trailing: bool = False
) -> bytes:
    """What a client gets of `chunks`, the answer of model m-v2 to a request for m."""
    exchange = Exchange(exchange_context(ScriptedGate(), settings=SPLIT))
    await converse(exchange, *asks("standard"))
    said = await converse(exchange, response_headers(200, fields))
    removed = list(said[0].response_headers.response.header_mutation.remove_headers)
    assert removed == ([] if fields else ["content-length"])
    for index, chunk in enumerate(chunks):
        ended = not trailing and index == len(chunks) - 1
        said += await converse(exchange, response_body(chunk, ended=ended))
    if trailing:
        said += await converse(exchange, response_trailers())
        assert parts(said)[-1] == "response_trailers"
    assert exchange.done
    return b"".join(chunk.body for chunk in echoed(said, "response_body"))


NAMED = (
    b'data: {"model":"m-v2","text":"\\"model\\":\\"m-v2\\""}\n\ndata: {"model": "m-v2"}\n\n{"model":"m-v22"}'
)


@given(st.integers(min_value=1, max_value=len(NAMED)), st.booleans())
async def test_the_client_reads_the_name_it_asked_for(size: int, trailing: bool) -> None:
    chunks = [NAMED[at : at + size] for at in range(0, len(NAMED), size)]

    expected = (
        b'data: {"model":"m","text":"\\"model\\":\\"m-v2\\""}\n\ndata: {"model":"m"}\n\n{"model":"m-v22"}'
    )
    assert await renamed(chunks, trailing=trailing) == expected


async def test_an_event_is_not_delayed_by_the_renaming() -> None:
    exchange = Exchange(exchange_context(ScriptedGate(), settings=SPLIT))
    await converse(exchange, *asks("standard"), response_headers(200))
    said = await converse(exchange, response_body(b'data: {"model":"m-v2"}\n\n'))
    assert [chunk.body for chunk in echoed(said, "response_body")] == [b'data: {"model":"m"}\n\n']


async def test_a_name_cut_off_at_the_end_is_not_kept() -> None:
    assert await renamed([b'{"model":"m-', b""], trailing=True) == b'{"model":"m-'


async def test_a_compressed_answer_is_not_touched() -> None:
    assert await renamed([b'"model":"m-v2"'], {"content-encoding": "gzip"}) == b'"model":"m-v2"'


@given(st.binary(max_size=64), st.binary(max_size=64))
async def test_no_header_and_no_body_breaks_an_exchange(header: bytes, ask: bytes) -> None:
    gate = ScriptedGate()
    names = ("x-workload-context", "x-llm-d-inference-fairness-id", "x-llm-d-inference-ttl", "content-length")
    trusting = parse({"extproc": {"trusted_headers": ["x-llm-d-inference-fairness-id"]}})
    exchange = Exchange(exchange_context(gate, settings=trusting))
    answers = await converse(exchange, headers("lean", dict.fromkeys(names, header)))
    if not exchange.done:
        answers = await converse(exchange, body(ask))

    assert exchange.done
    if parts(answers) == ["immediate_response"]:
        assert refusal(answers)[0] in (400, 413)
    else:
        assert len(gate.admitted) == 1


async def test_a_client_receives_its_session_token_in_every_mode() -> None:
    for mode in ("standard", "lean", "headers"):
        gate = ScriptedGate()
        gate.session = "a-token"
        exchange = Exchange(exchange_context(gate))
        answers = await converse(exchange, *asks(mode, {}))
        # Envoy has it from the metadata, and tells it; in `standard` it may be anyone's Envoy
        assert answers[0].dynamic_metadata["picker"]["session"] == "a-token"
        if mode == "standard":
            (answer,) = await converse(exchange, response_headers(200))
            assert set_headers(answer.response_headers.response.header_mutation) == {
                "x-session-token": "a-token",
                "x-queue-pressure": "0.25",
            }
        exchange.close()


@pytest.mark.parametrize(
    ("error", "pressure"),
    [
        (TotalCapacity("full"), "1.00"),  # no room for it
        (ExpiredTtl("late"), "1.00"),
        (NoEndpoints("none"), "0.25"),  # the queue has nothing to do with it
        (ShuttingDown("bye"), "0.25"),
    ],
)
async def test_a_refusal_carries_the_queue_pressure(error: RequestError, pressure: str) -> None:
    gate = ScriptedGate()
    gate.error = error
    (answer,) = await converse(Exchange(exchange_context(gate)), *asks("lean"))
    assert set_headers(answer.immediate_response.headers)["x-queue-pressure"] == pressure


async def test_the_pressure_is_the_part_of_its_time_that_a_request_has_waited_where_that_is_more() -> None:
    # A TTL of 2 s, a wait of 1 s, a queue a quarter full.
    gate = ScriptedGate()
    answers = await converse(Exchange(exchange_context(gate)), *asks("lean", {"x-llm-d-inference-ttl": "2"}))
    assert answers[0].dynamic_metadata["picker"]["pressure"] == "0.50"


async def test_a_gateway_s_own_namespace_has_the_destination_and_names_who_served() -> None:
    gate = ScriptedGate()
    settings = parse({"extproc": {"metadata_namespace": "gateway.lb"}})
    exchange = Exchange(exchange_context(gate, settings=settings))
    answers = await converse(exchange, *asks("standard"))
    assert sorted(answers[0].dynamic_metadata) == ["gateway.lb", "picker"]
    answer = response_headers(200, ended=True)
    describe(answer, {"gateway.lb": {"x-gateway-destination-endpoint-served": "10.0.0.9:8000"}})
    await converse(exchange, answer)
    assert [each.served for each in gate.settled] == ["10.0.0.9:8000"]
