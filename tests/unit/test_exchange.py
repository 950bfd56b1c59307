"""One ext_proc exchange with Envoy in each mode, valid or invalid: messages in, answers out."""

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from typing import Any

import extproc_client as envoy
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from extproc_client import PLACEMENT, ScriptedGate, Talk, body, given_back, headers, parts, set_headers
from tables import cases

from picker_fleet.domain import errors
from picker_fleet.domain.allowlist import ENCODERS, OF_SIDECAR, PREFILLER
from picker_fleet.domain.errors import ExpiredTtl, RequestError, StateUnavailable
from picker_fleet.domain.request import Outcome
from picker_fleet.ingress.ext_proc.codec import WHOLE_BYTES
from picker_fleet.state import accounting_token

ASK = b'{"model": "m", "prompt": "p"}'
BIG = json.dumps({"model": "m", "prompt": "x" * 600_000}).encode()
LONG = json.dumps({"model": "m", "prompt": "x" * WHOLE_BYTES}).encode()  # longer than an ext_proc message
DESTINATION = {"x-gateway-destination-endpoint": ",".join(PLACEMENT.endpoints)}
SPLIT = {"models": [{"name": "m", "target_models": [{"name": "m-v2"}]}]}
FAIRNESS = "x-gateway-inference-fairness-id"

every_mode = pytest.mark.parametrize("mode", ["standard", "lean"])


def asks(mode: str, fields: dict[str, str | bytes] | None = None) -> list[ProcessingRequest]:
    """The messages of a small request in the mode `mode`."""
    return [headers(mode, fields or {}), body(ASK)]


def unended(mode: str, ask: bytes) -> list[ProcessingRequest]:
    """A request whose body has the full content-length, but is not yet marked as ended."""
    return [headers(mode, {"content-length": str(len(ask))}), body(ask, ended=False)]


def chunks(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def ended_with(came: list[bytes], *, trailing: bool = False) -> list[ProcessingRequest]:
    """Messages of a response body with the chunks `came`; if `trailing`, trailers follow the last chunk."""
    body = [envoy.response_body(chunk) for chunk in came]
    body[-1].response_body.end_of_stream = not trailing
    return [*body, envoy.response_trailers()] if trailing else body


@every_mode
async def test_a_request_is_placed_in_every_mode(mode: str) -> None:
    talk = Talk()
    answers = await talk.say(*asks(mode, {"x-request-id": "envoys-id"}))

    assert set_headers(answers[0].request_headers.response.header_mutation) == DESTINATION
    assert parts(answers) == ["request_headers"] + ["request_body"] * (mode == "standard")
    assert given_back(answers) == [(ASK, True)]
    # In the mode `lean` only Envoy can set the request id. In the mode `standard` the stream owns the
    # request, and a client may set the id.
    request, stream_owned = talk.gate.admitted[0]
    assert request.id == ("made-1" if mode == "standard" else "envoys-id")
    told = {"id": request.id, "token": "ticket-1", "pressure": "0.25"}
    assert dict(answers[0].dynamic_metadata["picker"]) == told
    assert (stream_owned, talk.exchange.done) == ((True, False) if mode == "standard" else (False, True))
    assert talk.metrics.answers == [(mode, "m", "ok")]
    talk.close()
    assert talk.gate.withdrawn == []


@every_mode
async def test_nothing_is_sent_to_envoy_before_the_whole_body_has_arrived(mode: str) -> None:
    talk = Talk()
    # Until the picker answers, Envoy may still retry at another replica (G7).
    sent = [body(chunk, ended=False) for chunk in chunks(BIG, 16_384)]
    assert await talk.say(headers(mode), *sent) == []
    assert talk.gate.admitted == []

    answers = await talk.say(body())
    assert envoy.whole(answers) == BIG
    assert all(len(chunk) <= 62_000 for chunk, _ in given_back(answers))


async def test_in_lean_a_body_with_its_full_content_length_is_answered_at_once_in_one_message() -> None:
    talk = Talk()
    answers = await talk.say(*unended("lean", ASK))
    assert parts(answers) == ["request_headers"]
    assert given_back(answers) == [(ASK, True)]
    assert set_headers(answers[0].request_headers.response.header_mutation) == DESTINATION
    assert talk.exchange.done
    talk.close()
    assert (len(talk.gate.admitted), talk.gate.withdrawn) == (1, [])


@pytest.mark.parametrize(("spare", "chunks"), [(0, 0), (1, 9)])
async def test_mode_lean_sends_a_body_above_512_kib_in_several_messages(spare: int, chunks: int) -> None:
    ask = ASK.ljust(WHOLE_BYTES + spare)
    answers = await Talk().say(headers("lean"), body(ask))
    assert parts(answers) == ["request_headers"] + ["request_body"] * chunks
    assert envoy.whole(answers) == ask


@pytest.mark.parametrize(("mode", "ask", "count"), [("standard", ASK, 1), ("lean", LONG, 9)], ids=["s", "l"])
@pytest.mark.parametrize("end", ["an empty chunk", "trailers"])
async def test_a_request_is_placed_once_its_body_has_the_full_content_length(
    mode: str, ask: bytes, count: int, end: str
) -> None:
    talk = Talk()
    # An empty chunk without the end flag does not end the body.
    assert await talk.say(*unended(mode, ask), body(b"", ended=False)) == []
    # The request is placed once, and Envoy has no answer yet.
    assert len(talk.gate.admitted) == 1
    answers = await talk.say(body() if end == "an empty chunk" else envoy.trailers())
    assert parts(answers) == ["request_headers"] + ["request_body"] * count * (end == "an empty chunk")
    assert envoy.whole(answers) == ask
    talk.close()
    assert (len(talk.gate.admitted), talk.gate.withdrawn) == (1, [])


@pytest.mark.parametrize("keeping", [True, False])
async def test_a_lease_is_confirmed_if_the_end_of_the_request_body_arrives_late(keeping: bool) -> None:
    talk = Talk()
    await talk.say(*unended("lean", LONG))
    # The end of the body arrives so late that the lease may have expired; nothing has renewed the lease.
    talk.wait_s(3)
    talk.gate.keeping = keeping
    answers = await talk.say(body())
    # If the lease is lost, the request queues again with its age, and the first placement is withdrawn.
    assert talk.gate.confirmed == [("made-1", 4.0)]
    assert [request.id for request, _ in talk.gate.admitted] == ["made-1"] * (1 if keeping else 2)
    assert talk.gate.ages_s == ([0.0] if keeping else [0.0, 6.0])
    assert talk.gate.withdrawn == ([] if keeping else ["made-1"])
    assert envoy.whole(answers) == LONG
    talk.close()
    assert talk.gate.withdrawn == ([] if keeping else ["made-1"])


def endless(begun: asyncio.Event) -> Callable[..., Awaitable[Any]]:
    """A function that sets the event `begun` and never returns."""

    async def call(*_: object) -> None:
        begun.set()
        await asyncio.Future()

    return call


async def test_a_client_that_leaves_during_the_confirmation_has_its_lease_withdrawn() -> None:
    talk, begun = Talk(), asyncio.Event()
    await talk.say(*unended("lean", LONG))
    talk.gate.confirm = endless(begun)  # type: ignore[method-assign]
    talk.wait_s(3)
    await talk.leave(body(), once=begun)
    assert talk.gate.withdrawn == ["made-1"]


@pytest.mark.parametrize("why", ["no confirmation", "a longer body", "the stream ends", "in standard"])
async def test_a_lease_whose_request_is_not_answered_is_withdrawn(why: str) -> None:
    talk = Talk()
    await talk.say(*(unended("standard", ASK) if why == "in standard" else unended("lean", LONG)))
    if why == "no confirmation":
        talk.wait_s(3)
        talk.gate.error = StateUnavailable("away")
        assert (await talk.refused(body())).status == 503
    elif why == "a longer body":
        refused = await talk.refused(body(b"more"))
        assert refused.status == 400
        assert "after its JSON object" in refused.error["message"]
    talk.close()
    assert talk.gate.withdrawn == ["made-1"]


@every_mode
@pytest.mark.parametrize("ask", [ASK, LONG], ids=["small", "long"])
async def test_a_body_that_trailers_end_is_sent_back_once_with_the_headers(mode: str, ask: bytes) -> None:
    # If the body came in separate chunks, Envoy's router would also send its own copy with the trailers.
    talk = Talk()
    answers = await talk.say(headers(mode), body(ask, ended=False), envoy.trailers())
    assert parts(answers) == ["request_headers"]
    assert given_back(answers) == [(ask, True)]
    # In the mode `standard`, Envoy still sends the response to the picker.
    assert talk.exchange.done == (mode == "lean")
    if mode == "standard":
        await talk.say(envoy.response_headers(200, ended=True))
        assert talk.exchange.done


SEVERAL = {"models": [{"name": "m"}, {"name": "n"}]}


@every_mode
@pytest.mark.parametrize("model", ["m", "renamed"])
async def test_a_compressed_body_is_forwarded_as_received_or_decoded_to_rename_its_model(
    mode: str, model: str
) -> None:
    settings = {"models": [{"name": "m", "target_models": [{"name": model}]}]}
    talk = Talk(settings=settings)
    packed = gzip.compress(ASK)
    fields = {
        "content-encoding": "gzip",
        "content-length": str(len(packed)),
        "content-type": "application/json",
    }
    answers = await talk.say(headers(mode, fields), body(packed))
    mutation = answers[0].request_headers.response.header_mutation
    if model == "m":
        assert envoy.whole(answers) == packed
        assert list(mutation.remove_headers) == [PREFILLER, ENCODERS, *OF_SIDECAR]
    else:
        renamed = ASK.replace(b'"m"', b'"renamed"')
        assert envoy.whole(answers) == renamed
        assert "content-encoding" in mutation.remove_headers
        assert set_headers(mutation)["content-length"] == str(len(renamed))
    assert talk.gate.admitted[0][0].model == "m"
    assert talk.here.bodies.held_bytes == 0
    refused = await talk.another().refused(headers(mode, {"content-encoding": "lzma"}), body(packed))
    assert (refused.status, refused.code) == (415, "unsupported_encoding")
    assert "lzma" in refused.error["message"]
    assert talk.here.bodies.held_bytes == 0


@every_mode
@pytest.mark.parametrize("change", [-1, 12])
async def test_a_request_is_placed_by_its_bodys_length_and_not_its_content_length_header(
    mode: str, change: int
) -> None:
    # An earlier Envoy filter has changed the length of the body, but not the content-length header.
    talk = Talk()
    first, rest = ASK[: len(ASK) - 12], ASK[len(ASK) - 12 :]
    length = len(first) if change > 0 else len(ASK) + 100
    assert await talk.say(headers(mode, {"content-length": str(length)}), body(first, ended=False)) == []
    answers = await talk.say(body(rest, ended=False), body())
    assert envoy.whole(answers) == ASK
    assert set_headers(answers[0].request_headers.response.header_mutation)["content-length"] == str(len(ASK))


@every_mode
async def test_a_request_that_needs_no_admission_keeps_its_body(mode: str) -> None:
    talk = Talk()
    answers = await talk.say(headers(mode, ask=("POST", "/v1/responses/r/cancel")), body(b"{}"))
    assert envoy.whole(answers) == b"{}"
    assert (talk.gate.admitted, talk.gate.routed) == ([], [None])


@every_mode
async def test_a_websocket_session_is_admitted_by_the_model_in_its_query_string(mode: str) -> None:
    talk = Talk(settings=SEVERAL)
    asked = headers(
        mode if mode == "standard" else (0, 0), {"upgrade": "websocket"}, ask=("GET", "/v1/realtime?model=n")
    )
    answers = await talk.say(asked)
    assert parts(answers) == ["request_headers"]
    assert [request.model for request, _ in talk.gate.admitted] == ["n"]
    if mode == "standard":
        said = await talk.say(
            envoy.response_headers(101), body(b"ping", ended=False), envoy.response_body(b"pong"), body(b"")
        )
        assert [(each.body, each.end_of_stream) for each in envoy.echoed(said)] == [
            (b"ping", False),
            (b"", True),
        ]
        await talk.say(envoy.response_body(b"", ended=True))
    assert talk.exchange.done


@every_mode
async def test_an_unknown_path_is_admitted_without_a_model_if_unknown_paths_pass(mode: str) -> None:
    talk = Talk(settings={**SEVERAL, "extproc": {"unknown_paths": "pass"}})
    ask = ("POST", "/no/such/path")
    await talk.another().say(headers(mode, ask=ask), body(b"\xff"))
    await talk.another().say(headers(mode, ended=True, ask=("GET", "/no/such/path")))
    assert [request.model for request, _ in talk.gate.admitted] == ["unnamed", "unnamed"]
    refused = await talk.another().refused(headers(mode, ask=("POST", "/no/such/sleep")))
    assert (refused.status, refused.code) == (404, "unknown_path")


@every_mode
async def test_a_request_without_body_is_routed_without_admission(mode: str) -> None:
    talk = Talk()
    hint = {"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": ["10.0.0.1:8000"]}}
    answers = await talk.say(headers(mode, ended=True, metadata=hint))

    assert parts(answers) == ["request_headers"]
    # The list names an endpoint for each of Envoy's tries, so that no endpoint outside the subset serves.
    assert set_headers(answers[0].request_headers.response.header_mutation) == {
        "x-gateway-destination-endpoint": "10.0.0.1:8000,[fd00::2]:8000,10.0.0.1:8000"
    }
    assert dict(answers[0].dynamic_metadata["picker"]) == {"pressure": "0.25"}
    assert talk.gate.routed == [("10.0.0.1:8000",)]
    assert talk.metrics.answers == [(mode, "", "ok")]
    if mode == "standard":
        await talk.say(envoy.response_headers(200, ended=True))
    assert talk.exchange.done
    assert (talk.gate.admitted, talk.gate.settled, talk.gate.withdrawn) == ([], [], [])


# test_allowlist.py has all spellings, test_intake.py all faults of bodies and headers.
NOT_SERVED: list[tuple[str, str | bytes]] = [
    ("POST", "/flush_cache"), ("GET", "/v1/completions"), ("GET", b"/v1/models/\xff"), ("CONNECT", ""),
]  # fmt: skip
UNSUPPORTED = [
    ((2, 0), "BUFFERED"), ((99, 4), "99"), ((1, 0), "STREAMED"), ((3, 4), "BUFFERED_PARTIAL"),
    ((4, 2), "BUFFERED"), ((0, 4), "FULL_DUPLEX_STREAMED"), ((0, 0), "NONE"), ((5, 5), "GRPC"),
]  # fmt: skip
REFUSED = [
    *(
        ([headers(mode, ended=ended, ask=ask)], status, code, says)
        for mode in ("standard", "lean")
        for ask, ended, status, code, says in (
            *((ask, ended, 404, "unknown_path", "") for ended in (True, False) for ask in NOT_SERVED),
            (("POST", "/v1/chat/completions?x=/v1/models"), True, 400, "bad_request", "has no body"),
        )
    ),
    *(
        ([headers(mode), body(bad)], 400, "bad_request", says)
        for mode in ("standard", "lean")
        for bad, says in ((b"", "empty"), (b'{"model": 7}', "must be a string"))
    ),
    *(
        ([headers(mode), *[body(b" " * 3_000_000, ended=False)] * 3], 413, "payload_too_large", "8388608")
        for mode in ("standard", "lean")
    ),
    *(
        (messages, 500, "unsupported_processing_mode", says)
        for messages, says in (
            *(([headers(mode)], names) for mode, names in UNSUPPORTED),
            ([body(ASK)], "received request body instead"),
            ([ProcessingRequest()], "received an empty message instead"),
            ([headers("lean"), headers("lean")], "received request headers instead"),
            ([headers("lean"), envoy.response_headers()], "received response headers instead"),
            ([headers("standard"), envoy.response_body(b"x")], "received response body instead"),
            ([headers("standard"), ProcessingRequest()], "received an empty message instead"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "status", "code", "says"), REFUSED)
async def test_an_invalid_request_is_refused_with_its_fault(
    messages: list[ProcessingRequest], status: int, code: str, says: str
) -> None:
    talk = Talk()
    refused = await talk.refused(*messages)
    assert (refused.status, refused.code) == (status, code)
    assert says in refused.error["message"]
    assert refused.error["type"] == ("invalid_request_error" if status < 500 else "api_error")
    talk.close()
    assert (talk.gate.admitted, talk.gate.routed) == ([], [])
    assert talk.metrics.answers == [(envoy.mode_of(messages[0]), "", code)]


@every_mode
async def test_the_rate_of_requests_that_need_no_admission_is_limited_over_all_exchanges(mode: str) -> None:
    # The limit is one read a second, with a burst of two; reads of configured paths count, too.
    talk = Talk(settings={"extproc": {"read_rate": 1, "paths": ["GET /v1/adapters/{id}"]}})
    for ask in (("GET", "/v1/models"), ("GET", "/v1/adapters/a")):
        assert parts(await talk.another().say(headers(mode, ended=True, ask=ask))) == ["request_headers"]
    refused = await talk.another().refused(headers(mode, ended=True))
    assert (refused.status, refused.code, refused.headers["retry-after"]) == (429, "too_many_reads", "1")
    assert len(talk.gate.routed) == 2
    await talk.another().say(*asks(mode))
    assert talk.metrics.answers[-1] == (mode, "m", "ok")


@every_mode
async def test_a_connect_request_which_has_no_path_is_refused_like_an_unknown_path(mode: str) -> None:
    message = headers(mode, ended=True, ask=("CONNECT", "/"))
    fields = message.request_headers.headers.headers
    fields.remove(next(field for field in fields if field.key == ":path"))
    refused = await Talk().refused(message)
    assert (refused.status, refused.code) == (404, "unknown_path")


@pytest.mark.parametrize("missing", [":method", ":path"])
async def test_an_envoy_that_forwards_no_path_is_refused_with_the_setting_to_change(missing: str) -> None:
    message = headers("lean")
    fields = message.request_headers.headers.headers
    fields.remove(next(field for field in fields if field.key == missing))
    refused = await Talk().refused(message)
    assert (refused.status, refused.code) == (500, "unsupported_processing_mode")
    assert "forward_rules" in refused.error["message"]


@every_mode
async def test_a_malformed_header_is_refused_by_name_if_it_is_trusted(mode: str) -> None:
    bad = asks(mode, {FAIRNESS: b"caf\xe9", "cookie": b"\xff\xfe"})
    talk = Talk()
    await talk.say(*bad)
    assert talk.gate.admitted[0][0].flow == "m"
    talk = Talk(settings={"extproc": {"trusted_headers": [FAIRNESS]}})
    refused = await talk.refused(*bad)
    assert refused.status == 400
    assert FAIRNESS in refused.error["message"]
    assert talk.gate.admitted == []


class Teapot(RequestError):
    """An exception for which the picker has no rule."""

    status, code = 418, "teapot"


REFUSALS = {
    "the queue is full": (errors.TotalCapacity("full"), 503, 429, "1.00"),
    "the TTL has expired": (ExpiredTtl("late"), 503, 429, "1.00"),
    "the queue is not the cause": (errors.NoEndpoints("none"), 503, 503, "0.25"),
    "the replica stops": (errors.ShuttingDown(), 503, 503, "0.25"),
    "an unknown error": (Teapot("tea"), 418, 418, "0.25"),
}


@every_mode
@cases("error, status, configured, pressure", REFUSALS)
async def test_a_refusal_by_the_gate_reports_the_queue_pressure_and_may_be_429(
    error: RequestError, status: int, configured: int, pressure: str, mode: str
) -> None:
    refused = await Talk(ScriptedGate(error)).refused(*asks(mode))
    assert (refused.status, refused.headers["x-queue-pressure"]) == (status, pressure)
    # test_codec.py checks all fields of a refusal.
    assert (refused.code, refused.error["message"]) == (error.code, str(error))
    talk = Talk(ScriptedGate(error), {"fair_request_queue": {"overload_status": 429}})
    assert (await talk.refused(*asks(mode))).status == configured
    talk.close()
    assert (await talk.another().refused(headers(mode, ended=True))).status == configured
    assert talk.metrics.answers == [(mode, "m", error.code), (mode, "", error.code)]
    assert (talk.gate.withdrawn, talk.gate.settled) == ([], [])


async def test_an_unexpected_error_is_logged_and_answered_with_500(caplog: pytest.LogCaptureFixture) -> None:
    refused = await Talk(ScriptedGate(ValueError("a bug"))).refused(*asks("lean"))
    assert (refused.status, refused.code) == (500, "internal_error")
    assert "a bug" not in refused.error["message"]
    assert "a bug" in caplog.text


@pytest.mark.parametrize(("mode", "count"), [("standard", 2), ("lean", 1)])
async def test_a_placement_is_withdrawn_unless_envoy_gets_the_whole_answer(mode: str, count: int) -> None:
    for given_out in range(count + 1):
        talk = Talk()
        talk.gate.placement = PLACEMENT._replace(waited_s=2.5)
        for message in asks(mode, {"x-request-id": "made-1"}):
            answers = iter(await talk.exchange.receive(message))
        for _ in range(given_out):
            next(answers)
        # Envoy may receive an answer and end the stream before the picker's write returns.
        talk.close()
        if given_out == count:
            assert (talk.gate.withdrawn, talk.metrics.waits) == ([], [])
            assert talk.metrics.answers == [(mode, "m", "ok")]
        else:
            assert talk.gate.withdrawn == ["made-1"]
            assert talk.metrics.answers == [(mode, "m", "client_gone")]
            assert talk.metrics.waits == [("m", 2.5, False, "m")]
            assert talk.gate.settled == []


USAGE = {"prompt_tokens": 7, "completion_tokens": 100, "prompt_tokens_details": {"cached_tokens": 1}}
ANSWERS = {
    "json": json.dumps(
        {"choices": [{"text": 'a "usage": {"prompt_tokens": 99} b'}], "usage": USAGE}
    ).encode(),
    "sse": (
        b'data: {"choices":[{"text":"a"}],"usage":null}\n\n' * 3
        + b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":100}}\n\ndata: [DONE]\n\n'
    ),
    "responses": (
        b'event: response.completed\ndata: {"type":"response.completed","response":{"output":["%b"],'
        b'"usage":{"input_tokens":7,"output_tokens":100},"metadata":{}}}\n\n' % (b"x" * 50_000)
    ),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("size", [7, 1_000_000])
async def test_standard_mode_passes_an_answer_on_and_accounts_for_its_tokens(
    answer: bytes, size: int
) -> None:
    talk, came = Talk(), chunks(answer, size)
    await talk.say(*asks("standard"))
    said = await talk.say(envoy.response_headers(200, served="10.0.0.2:8000"), *ended_with(came))
    assert parts(said) == ["response_headers"] + ["response_body"] * len(came)
    passed = [(chunk.body, chunk.end_of_stream) for chunk in envoy.echoed(said, "response_body")]
    assert passed == [*((chunk, False) for chunk in came[:-1]), (came[-1], True)]
    assert talk.exchange.done
    talk.close()
    [completion] = talk.gate.settled
    assert (completion.id, completion.outcome, completion.status) == ("made-1", Outcome.COMPLETED, 200)
    assert completion.served == "10.0.0.2:8000"
    assert (completion.prompt_tokens, completion.completion_tokens) == (7, 100)
    assert 0 < (completion.first_byte_s or 0) < (completion.duration_s or 0)


ERROR = b'{"error": {"message": "dead", "type": "InternalServerError", "code": 500}}'
SAID = {
    "an answer": (200, b'{"choices": [], "usage": {"prompt_tokens": 1}}', "", ""),
    "an answer whose text is an error": (200, b'{"choices": [{"text": "{\\"error\\": {}}"}]}', "", ""),
    "an error in a 200": (200, ERROR, "", "error in 200"),
    "a client error in a 200": (200, ERROR.replace(b"500", b"400"), "", ""),
    "a client's fault": (422, b'{"error": "too long", "error_type": "validation"}', "", ""),
    "an empty answer": (200, b"", "", "empty"),
    "an error status": (503, ERROR, "", "503"),
    "a full endpoint": (429, ERROR, "", "full"),
    "an answer of a fallback": (200, b'{"choices": [], "usage": {"prompt_tokens": 1}}', "10.0.0.9:8000", ""),
}


@cases("status, answer, served, fault", SAID)
async def test_standard_mode_reads_from_an_answer_whether_the_endpoint_has_failed(
    status: int, answer: bytes, served: str, fault: str
) -> None:
    talk = Talk()
    await talk.say(*asks("standard"))
    picked = talk.gate.placement.endpoints[0]
    await talk.say(
        envoy.response_headers(status, served=served or picked), envoy.response_body(answer, ended=True)
    )
    talk.close()
    [completion] = talk.gate.settled
    assert (completion.fault, completion.passed_over) == (fault, picked if served else "")


async def test_a_request_whose_response_exceeds_the_byte_budget_is_settled_and_not_withdrawn() -> None:
    talk = Talk()
    await talk.say(*asks("standard"))
    talk.exchange.refuse(errors.BufferFull("full"))
    talk.close()
    assert [completion.outcome for completion in talk.gate.settled] == [Outcome.CLIENT_GONE]
    assert talk.gate.withdrawn == []


BEGUN = [envoy.response_headers(200), envoy.response_body(b"a")]
ENDS = {
    "without a body": ([envoy.response_headers(204, ended=True)], Outcome.COMPLETED, 204),
    "as a failure": ([envoy.response_headers(503, ended=True)], Outcome.UPSTREAM_FAILED, 503),
    "with trailers": ([*BEGUN, envoy.response_trailers()], Outcome.COMPLETED, 200),
    "before it begins": ([], Outcome.CLIENT_GONE, 0),
    "after a part": (BEGUN, Outcome.CLIENT_GONE, 200),
    "as a failure in its body": ([envoy.response_headers(502)], Outcome.UPSTREAM_FAILED, 502),
}


@cases("messages, outcome, status", ENDS)
async def test_standard_mode_settles_a_request_once_however_the_answer_ends(
    messages: list[ProcessingRequest], outcome: Outcome, status: int
) -> None:
    talk = Talk()
    await talk.say(*asks("standard"))
    assert parts(await talk.say(*messages)) == [message.WhichOneof("request") for message in messages]
    talk.close()
    [completion] = talk.gate.settled
    assert (completion.outcome, completion.status) == (outcome, status)
    assert (completion.prompt_tokens, completion.completion_tokens) == (None, None)
    assert talk.gate.withdrawn == []


WITH_PREFILL = PLACEMENT._replace(prefillers=("10.0.0.7:8000", "10.0.0.8:8000"), prefill_s=0.0)


@every_mode
async def test_the_header_of_the_prefill_endpoint_is_set_for_a_split_request_and_else_removed(
    mode: str,
) -> None:
    settings = {"scheduling": {"stages": {"header": "X-Own-Prefiller"}}}
    for placement, value in ((WITH_PREFILL, "10.0.0.7:8000"), (PLACEMENT, None)):
        for header, own in ((PREFILLER, {}), ("x-own-prefiller", settings)):
            talk = Talk(settings=own)
            talk.gate.placement = placement
            answers = await talk.say(*asks(mode))
            mutation = answers[0].request_headers.response.header_mutation
            assert set_headers(mutation).get(header) == value
            removed = [ENCODERS] if value else [header, ENCODERS]
            assert list(mutation.remove_headers) == [*removed, *OF_SIDECAR]


async def test_standard_mode_reports_a_prefill_as_done_once_the_answer_has_its_first_bytes() -> None:
    talk = Talk()
    talk.gate.placement = WITH_PREFILL
    await talk.say(*asks("standard"), envoy.response_headers(200), envoy.response_body(b""))
    assert talk.gate.prefilled_ids == [], "some sidecars send the headers before the prefill ends"
    await talk.say(envoy.response_body(b"a"), envoy.response_body(b"b"), envoy.response_body(b"", ended=True))
    assert talk.gate.prefilled_ids == [talk.gate.settled[0].id]
    talk.close()
    whole = Talk()
    await whole.say(*asks("standard"), *BEGUN)
    assert whole.gate.prefilled_ids == []
    whole.close()


async def test_lean_mode_reports_a_prefill_as_done_after_its_predicted_time() -> None:
    for prefill_s, is_told in ((0.0, True), (None, False)):
        talk = Talk()
        talk.gate.placement = WITH_PREFILL._replace(prefill_s=prefill_s)
        await talk.say(*asks("lean"))
        await asyncio.sleep(0.01)
        assert talk.gate.prefilled_ids == ([talk.gate.admitted[0][0].id] if is_told else [])


@pytest.mark.parametrize("begun", [[], [headers("standard"), body(b"{", ended=False)]])
async def test_standard_mode_passes_on_an_answer_that_envoy_makes(begun: list[ProcessingRequest]) -> None:
    talk = Talk()
    end = envoy.response_body(b"timeout", ended=True)
    said = await talk.say(*begun, envoy.response_headers(408), body(b"x"), end)
    assert parts(said) == ["response_headers", "response_body"]
    talk.close()
    assert (talk.gate.admitted, talk.gate.settled) == ([], [])


async def test_the_attribute_request_id_says_in_standard_mode_that_envoy_sets_the_id() -> None:
    talk = Talk()
    first = headers("standard", {"x-request-id": "envoys-id"})
    first.attributes["envoy.filters.http.ext_proc"].fields["request.id"].string_value = "envoys-id"
    await talk.say(first, body(ASK))
    assert talk.gate.admitted[0][0].id == "envoys-id"


@every_mode
async def test_a_body_with_a_rewritten_model_is_sent_with_its_new_length(mode: str) -> None:
    talk = Talk(settings=SPLIT)
    answers = await talk.say(*asks(mode))
    sent = envoy.whole(answers)
    assert json.loads(sent) == {"model": "m-v2", "prompt": "p"}
    sent_headers = set_headers(answers[0].request_headers.response.header_mutation)
    names = ["content-length"] + ["x-picker-content-length"] * (mode == "lean")
    assert sent_headers == {**DESTINATION, **dict.fromkeys(names, str(len(sent)))}
    assert (talk.gate.admitted[0][0].model, talk.gate.admitted[0][0].target_model) == ("m", "m-v2")


GZIP = {"content-encoding": "gzip"}


async def renamed(
    came: list[bytes], fields: dict[str, str] | None = None, *, trailing: bool = False
) -> list[bytes]:
    """The chunks that a client gets if model m-v2 answers a request for model m with the chunks `came`."""
    talk = Talk(settings=SPLIT)
    said = (await talk.say(*asks("standard"), envoy.response_headers(200, fields)))[2:]
    removed = list(said[0].response_headers.response.header_mutation.remove_headers)
    assert removed == ([] if fields == GZIP else ["content-length"])
    said += await talk.say(*ended_with(came, trailing=trailing))
    assert (parts(said)[-1] == "response_trailers") == trailing
    assert talk.exchange.done
    return [chunk.body for chunk in envoy.echoed(said, "response_body")]


async def test_the_model_in_an_answer_is_renamed_without_delay_unless_compressed() -> None:
    event = b'data: {"model":"m-v2"}\n\n'
    assert (await renamed([event, b"end"]))[0] == b'data: {"model":"m"}\n\n'
    # A model name cut off by the end of the answer is passed on unchanged.
    assert b"".join(await renamed([b'{"model":"m-', b""], trailing=True)) == b'{"model":"m-'
    assert await renamed([event], GZIP) == [event]
    for uncompressed in ("identity", ""):
        assert await renamed([event], {"content-encoding": uncompressed}) == [b'data: {"model":"m"}\n\n']


@every_mode
async def test_a_client_receives_its_session_token_in_every_mode(mode: str) -> None:
    talk = Talk()
    talk.gate.placement = PLACEMENT._replace(session="a-token")
    answers = await talk.say(*asks(mode))
    # In the mode `lean`, Envoy copies the session token to the answer; in `standard` the picker does so.
    assert answers[0].dynamic_metadata["picker"]["session"] == "a-token"
    if mode == "standard":
        (answer,) = await talk.say(envoy.response_headers(200))
        told = {"x-session-token": "a-token", "x-queue-pressure": "0.25"}
        assert set_headers(answer.response_headers.response.header_mutation) == told


async def test_the_pressure_is_the_larger_of_queue_fill_and_waited_share_of_the_ttl() -> None:
    # The request has waited 1 s of a TTL of 2 s; the queue is a quarter full.
    answers = await Talk().say(*asks("lean", {"x-llm-d-inference-ttl": "2"}))
    assert answers[0].dynamic_metadata["picker"]["pressure"] == "0.50"


async def test_a_configured_metadata_namespace_has_the_destination_and_the_serving_endpoint() -> None:
    talk = Talk(settings={"extproc": {"metadata_namespace": "gateway.lb"}})
    answers = await talk.say(*asks("standard"))
    assert sorted(answers[0].dynamic_metadata) == ["gateway.lb", "picker"]
    answer = envoy.response_headers(200, ended=True)
    envoy.describe(answer, {"gateway.lb": {"x-gateway-destination-endpoint-served": "10.0.0.9:8000"}})
    await talk.say(answer)
    assert [each.served for each in talk.gate.settled] == ["10.0.0.9:8000"]


@every_mode
async def test_a_request_that_names_stored_state_goes_to_the_endpoint_that_has_the_state(mode: str) -> None:
    origins = envoy.KnownOrigins()
    origins.known = {"resp_1": "10.0.0.2:8000", "conv_1": "10.0.0.3:8000"}
    talk = Talk(origins=origins)
    ask = b'{"model": "m", "previous_response_id": "resp_0", "conversation": {"id": "conv_1"}}'
    await talk.say(headers(mode, ask=("POST", "/v1/responses")), body(ask))
    assert talk.gate.admitted[0][0].origin == "10.0.0.3:8000"
    talk = Talk(origins=origins)
    token = "s" * 28
    await talk.say(headers(mode, {"x-session-token": token}, ended=True, ask=("GET", "/v1/responses/resp_1")))
    await Talk(gate=talk.gate).say(headers(mode, {"x-session-token": token}, ended=True))
    assert talk.gate.wanted == [("10.0.0.2:8000", token), ("", token)]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/conversations", "/v1/chat/completions"])
async def test_ids_in_an_answer_are_noted_in_standard_and_signed_for_the_access_log_in_lean(
    path: str,
) -> None:
    origins = envoy.KnownOrigins()
    talk = Talk(origins=origins)
    await talk.say(headers("standard", ask=("POST", path)), body(ASK))
    served = envoy.response_headers(200)
    envoy.describe(served, {"envoy.lb": {"x-gateway-destination-endpoint-served": "10.0.0.9:8000"}})
    await talk.say(served, envoy.response_body(b'{"id": "made_1"}', ended=True))
    assert origins.noted == ([] if "chat" in path else [(("made_1",), "10.0.0.9:8000")])
    answers = await Talk().say(headers("lean", {"x-request-id": "r-1"}, ask=("POST", path)), body(ASK))
    told = answers[0].dynamic_metadata["picker"]
    assert told["id"] == "r-1"
    assert accounting_token.is_read(told["token"]) == (path == "/v1/conversations")
