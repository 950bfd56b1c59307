"""Envoy's access log over real gRPC: each log entry is reported to the gate, in order."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from background import until
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from extproc_client import KnownOrigins, ScriptedGate, serving_on
from metrics_page import page_of
from tables import cases

from picker_fleet.domain.allowlist import SERVED as SERVED_KEY
from picker_fleet.domain.request import Alive, Completion, Fault, Outcome
from picker_fleet.grpc.native import NativeTransport
from picker_fleet.ingress.ext_proc import accesslog
from picker_fleet.ingress.ext_proc.accesslog import Account
from picker_fleet.state import accounting_token
from picker_fleet.state.accounting_token import Keyring
from picker_fleet.telemetry.metrics import Metrics

on_both_transports = pytest.mark.usefixtures("transport")

Entry = accesslog_pb2.HTTPAccessLogEntry
METHOD = f"/{accesslog.SERVICE}/StreamAccessLogs"
KEYS = Keyring()
FIELDS = "flow\t1\t1.0\t1.0\t\t3\tllama\t10.0.0.1:8000\t0"


def signed(request_id: str) -> str:
    """The accounting token of `request_id`."""
    return accounting_token.signed(FIELDS, request_id, KEYS)


def bare(kind: str = "DownstreamEnd", request_id: str = "req-1", status: int = 200, flag: str = "") -> Entry:
    """Envoy's access-log entry for a request that was not placed; `flag` is an Envoy response flag."""
    common = {"access_log_type": kind, "response_flags": {flag: True} if flag else None}
    response = {"response_code": {"value": status}}
    return Entry(request={"request_id": request_id}, response=response, common_properties=common)


def entry(*details: Any, **more: Any) -> Entry:
    """Envoy's access-log entry for a placed request: an entry made by `bare`, with an accounting token."""
    message = bare(*details, **more)
    describe(message, {"picker": {"token": signed(message.request.request_id)}})
    return message


def describe(message: Entry, metadata: Mapping[str, Mapping[str, Any]]) -> None:
    """Put filter metadata into `message`."""
    for namespace, fields in metadata.items():
        message.common_properties.metadata.filter_metadata[namespace].update(dict(fields))


def full() -> Entry:
    message = bare(request_id="from-envoy")
    describe(message, {"picker": {"id": "from-picker", "token": signed("from-picker")}})
    describe(message, {"picker.usage": {"prompt_tokens": 7, "completion_tokens": 100}})
    describe(message, {"envoy.lb": {SERVED_KEY: "10.0.0.1:8000"}})
    common = message.common_properties
    common.upstream_remote_address.socket_address.address = "10.9.9.9"
    common.upstream_remote_address.socket_address.port_value = 1
    common.time_to_first_downstream_tx_byte.FromMilliseconds(250)
    common.time_to_last_downstream_tx_byte.FromMilliseconds(3500)
    return message


async def test_an_access_log_peer_is_trusted_once_an_entry_has_a_token_that_the_fleet_signed() -> None:
    metrics = Metrics()
    handlers = accesslog.handlers([Account(ScriptedGate(), metrics, KEYS, KnownOrigins())])
    transport = NativeTransport(handlers, {}, 2**20)
    address = f"127.0.0.1:{await transport.start('127.0.0.1:0')}"
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_unary(METHOD)(timeout=10)
        forged = bare()
        describe(forged, {"picker": {"token": accounting_token.signed(FIELDS, "req-1", Keyring())}})
        await call.write(batch(forged).SerializeToString())
        await until(lambda: b'{kind="ignored"} 1.0' in page_of(metrics))
        (connection,) = transport.peers.connections.all
        assert not connection.trusted
        await call.write(batch(entry()).SerializeToString())
        await until(lambda: connection.trusted)
        call.cancel()
    await transport.stop(None)


def test_the_serving_endpoint_is_read_from_the_configured_metadata_namespace() -> None:
    message = full()
    describe(message, {"gateway.lb": {SERVED_KEY: "10.0.0.3:80"}})
    assert accesslog.read(message).served == "10.0.0.1:8000"
    assert accesslog.read(message, "gateway.lb").served == "10.0.0.3:80"


def batch(*entries: Entry) -> als_pb2.StreamAccessLogsMessage:
    return als_pb2.StreamAccessLogsMessage(http_logs={"log_entry": entries})


@asynccontextmanager
async def serving(gate: ScriptedGate) -> AsyncIterator[grpc.aio.Channel]:
    async with (
        serving_on(accesslog.handlers([Account(gate, Metrics(), KEYS, KnownOrigins())])) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield channel


async def reported(*messages: als_pb2.StreamAccessLogsMessage | bytes) -> list[Completion | Alive]:
    gate = ScriptedGate()
    async with serving(gate) as channel:
        call = channel.stream_unary(METHOD)(timeout=10)
        for message in messages:
            await call.write(message if isinstance(message, bytes) else message.SerializeToString())
        await call.done_writing()
        assert await call == b""
    return gate.reported


def ended(message: Entry) -> Completion:
    """The only completion that `message` reports."""
    (completion,) = taken(message)[0].reported
    assert isinstance(completion, Completion)
    return completion


def taken(*entries: Entry) -> tuple[ScriptedGate, str]:
    """Account for `entries`; return the gate, which records calls, and the text of the metrics page."""
    gate, metrics = ScriptedGate(), Metrics()
    accesslog.Collector([Account(gate, metrics, KEYS, KnownOrigins())]).take(entries)
    return gate, page_of(metrics).decode()


BARE_END = Completion("req-1", Outcome.COMPLETED, 200, *[None] * 5, accounting_token=signed("req-1"))


@on_both_transports
async def test_a_final_access_log_entry_settles_its_request_with_all_the_entrys_fields() -> None:
    end = Completion("from-picker", Outcome.COMPLETED, 200, "10.0.0.1:8000", 7, 100, 3.5, 0.25)
    assert await reported(batch(full())) == [end._replace(accounting_token=signed("from-picker"))]
    # Without an id from the picker, Envoy's request id identifies the request.
    assert await reported(batch(entry())) == [BARE_END]


@on_both_transports
async def test_a_periodic_log_entry_with_an_accounting_token_renews_the_lease() -> None:
    message = full()
    message.common_properties.access_log_type = accesslog_pb2.DownstreamPeriodic
    message.response.response_body_bytes = 5
    alive = Alive("from-picker", "10.0.0.1:8000", signed("from-picker"), answer_bytes=5)
    assert await reported(batch(message)) == [alive]
    message.response.response_code.value = 101  # a WebSocket session may be idle for long
    assert await reported(batch(message)) == [alive._replace(answer_bytes=0)]


@pytest.mark.parametrize(("sent_kib", "renewed"), [(65, 0), (1024, 1)])
def test_an_answer_that_its_client_does_not_read_renews_no_lease(sent_kib: int, renewed: int) -> None:
    message = entry("DownstreamPeriodic")
    message.response.response_body_bytes = 1024 * 1024
    message.common_properties.downstream_wire_bytes_sent = sent_kib * 1024
    assert len(taken(message)[0].renewed) == renewed


def test_a_periodic_log_entry_ends_the_prefill_of_a_split_request_whose_answer_has_begun() -> None:
    split = accounting_token.signed(f"{FIELDS}\tprefill=10.0.0.7:8000,1,2,3,4", "req-1", KEYS)
    for token, ttft, ended in ((split, "1500", ["req-1"]), (split, "-", []), (signed("req-1"), "1500", [])):
        message = bare("DownstreamPeriodic")
        describe(message, {"picker": {"token": token}})
        message.common_properties.custom_tags[accesslog.TTFT_TAG] = ttft
        gate, _ = taken(message)
        assert [alive.id for alive in gate.renewed] == ["req-1"]
        assert gate.prefilled_ids == ended
    unsigned = bare("DownstreamPeriodic")
    describe(unsigned, {"picker": {"token": split[:-1]}})
    unsigned.common_properties.custom_tags[accesslog.TTFT_TAG] = "1500"
    assert taken(unsigned)[0].prefilled_ids == []


@pytest.mark.parametrize("kind", ["UpstreamEnd", "UpstreamPeriodic", "DownstreamStart", "TcpConnectionEnd"])
@on_both_transports
async def test_entries_of_other_types_and_periodic_entries_of_queued_requests_are_ignored(kind: str) -> None:
    # If such entries counted, a queued request would cost Redis a call in each access-log interval.
    assert await reported(batch(entry(kind), bare("DownstreamPeriodic"))) == []


OUTCOMES = [
    ("downstream_connection_termination", 0, Outcome.CLIENT_GONE),
    ("downstream_connection_termination", 200, Outcome.CLIENT_GONE),
    ("downstream_remote_reset", 200, Outcome.CLIENT_GONE),
    ("downstream_protocol_error", 200, Outcome.CLIENT_GONE),
    ("upstream_connection_failure", 503, Outcome.UPSTREAM_FAILED),
    ("upstream_remote_reset", 200, Outcome.UPSTREAM_FAILED),
    ("delay_injected", 200, Outcome.COMPLETED),
    *(("", status, Outcome.UPSTREAM_FAILED) for status in (302, 429, 500)),
    ("", 404, Outcome.COMPLETED),
]


@pytest.mark.parametrize(("flag", "status", "outcome"), OUTCOMES)
def test_envoys_response_flag_and_status_decide_the_outcome(flag: str, status: int, outcome: Outcome) -> None:
    completion = ended(entry(status=status, flag=flag))
    assert (completion.outcome, completion.status) == (outcome, status)


def test_without_metadata_about_the_server_the_upstream_address_names_the_serving_endpoint() -> None:
    message = entry()
    socket = message.common_properties.upstream_remote_address.socket_address
    socket.address, socket.port_value = "fd00::1", 8000
    assert ended(message).served == "[fd00::1]:8000"


def test_service_time_excludes_the_wait_in_the_queue() -> None:
    message = full()
    common = message.common_properties
    common.time_to_first_upstream_tx_byte.FromMilliseconds(3000)
    common.time_to_last_upstream_rx_byte.FromMilliseconds(3400)
    completion = ended(message)
    assert completion.duration_s == 3.5
    assert completion.service_s == pytest.approx(0.4)
    assert ended(full()).service_s is None


PICKED, UNCONNECTED = "10.0.0.1:8000", "upstream_connection_failure"
SERVED = {
    "the picked endpoint served": (PICKED, "", 1, "", ""),
    "a fallback served": ("10.0.0.2:8000", "", 2, "", PICKED),
    "a fallback served, without a count of attempts": ("10.0.0.2:8000", "", 0, "", PICKED),
    "Envoy did not know the picked endpoint": ("10.0.0.2:8000", "", 1, "", ""),
    "the picked endpoint accepted no connection": (PICKED, UNCONNECTED, 1, PICKED, ""),
    "no endpoint accepted a connection": ("", UNCONNECTED, 0, PICKED, ""),
    "no endpoint served": ("", "", 0, "", ""),
}


@cases("served, flag, attempts, failed, passed_over", SERVED)
def test_a_picked_endpoint_that_did_not_serve_is_reported(
    served: str, flag: str, attempts: int, failed: str, passed_over: str
) -> None:
    message = entry(flag=flag)
    if served:
        describe(message, {"envoy.lb": {SERVED_KEY: served}})
    message.common_properties.upstream_request_attempt_count = attempts
    completion = ended(message)
    assert (completion.failed, completion.passed_over) == (failed, passed_over)


def with_error(error_code: float | None = None) -> Callable[[Any], None]:
    """Let the usage metadata report an error in the answer's body."""
    fields = {"error": True} if error_code is None else {"error": True, "error_code": error_code}
    return lambda message: describe(message, {"picker.usage": fields})


def is_stream(message: Any) -> None:
    message.response.response_headers["content-type"] = "text/event-stream; charset=utf-8"


def is_overdue(message: Any) -> None:
    """Let the entry report that Envoy ended the request at its longest duration."""
    message.response.response_code_details = "max_duration_timeout"


WHOLE = 300  # bytes
FAULTS: dict[str, tuple[int, int, str, Callable[[Any], None] | None, str]] = {
    "a good answer": (200, WHOLE, "", None, ""),
    "an error of the server": (500, WHOLE, "", None, "500"),
    "a redirect": (307, 0, "", None, "307"),
    "a full endpoint": (429, WHOLE, "", None, "full"),
    "a client's fault": (422, WHOLE, "", None, ""),
    "an answer without content": (204, 0, "", None, ""),
    "a short answer": (200, 14, "", None, ""),
    "an empty answer": (200, 0, "", None, "empty"),
    "an empty stream": (200, 14, "", is_stream, "empty"),
    "a reset": (200, WHOLE, "upstream_remote_reset", None, "reset"),
    "a client that left": (200, WHOLE, "downstream_connection_termination", None, ""),
    "an answer that Envoy cut off": (200, 0, "", is_overdue, ""),
    "no answer in the time that Envoy allows": (504, 0, "", is_overdue, "504"),
    "an error in the answer": (200, WHOLE, "", with_error(), "error in 200"),
    "an error of the client in the answer": (200, WHOLE, "", with_error(400), ""),
    "a client's fault, explained without a code": (400, WHOLE, "", with_error(), ""),
    "an error of the server in the answer": (200, WHOLE, "", with_error(503), "error in 200"),
}


@cases("status, size, flag, tells, fault", FAULTS)
def test_the_end_of_a_request_shows_whether_its_endpoint_failed(
    status: int, size: int, flag: str, tells: Callable[[Any], None] | None, fault: str
) -> None:
    message = entry(flag=flag)
    describe(message, {"envoy.lb": {SERVED_KEY: PICKED}})
    message.response.response_code.value = status
    message.response.response_body_bytes = size
    if tells is not None:
        tells(message)
    completion = ended(message)
    assert completion.fault == fault
    assert completion.answered == (
        not fault and status in (200, 204) and not flag and tells is not is_overdue
    )


ATTEMPTS = {
    "a status": (503, "", "503", 0.0),
    "a full endpoint with retry-after": (429, "7", "full", 7.0),
    "a full endpoint with an absurd retry-after": (429, "99999999", "full", 60.0),
    "no connection": (0, "upstream_connection_failure", "connect", 0.0),
    "a cut connection": (0, "upstream_connection_termination", "reset", 0.0),
}


@cases("status, more, why, hold_s", ATTEMPTS)
def test_a_failed_attempt_is_reported_as_a_fault_of_its_endpoint(
    status: int, more: str, why: str, hold_s: float
) -> None:
    message = entry(flag="" if more.isdigit() else more)
    common = message.common_properties
    common.access_log_type = accesslog_pb2.UpstreamEnd
    common.metadata.filter_metadata.clear()  # Envoy sends no metadata with entries of type UpstreamEnd
    common.upstream_remote_address.socket_address.address = "10.0.0.1"
    common.upstream_remote_address.socket_address.port_value = 8000
    message.request.request_id = "from-envoy"
    message.response.response_code.value = status
    if more.isdigit():
        message.response.response_headers["retry-after"] = more
    assert accesslog.read(message) == Fault("from-envoy", PICKED, why, "", hold_s)


@pytest.mark.parametrize(
    ("prompt", "completion"), [(float("nan"), -5), ("many", None), (1e300, float("inf"))]
)
@on_both_transports
async def test_invalid_values_in_an_envoy_log_entry_are_unknown(prompt: object, completion: object) -> None:
    message = entry()
    describe(message, {"picker.usage": {"prompt_tokens": prompt, "completion_tokens": completion}})
    message.common_properties.time_to_last_downstream_tx_byte.seconds = -3
    assert await reported(batch(message)) == [BARE_END]


ANTHROPICS = {"prompt_tokens": 150, "cache_read_tokens": 700, "cache_creation_tokens": 50}
USAGES: dict[str, tuple[dict[str, float], tuple[int | None, int | None]]] = {
    "OpenAI's usage": ({"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 16}, (7, 9)),
    "OpenAI's with cached tokens": (
        {"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 16, "cached_tokens": 5}, (7, 9)),
    "usage of embeddings": ({"prompt_tokens": 7, "total_tokens": 7}, (7, 0)),
    "a total alone": ({"total_tokens": 7}, (7, 0)),
    "Anthropic's": ({**ANTHROPICS, "completion_tokens": 9}, (900, 9)),
    "Anthropic's stream": (
        {f"first_{name}": count for name, count in ANTHROPICS.items()} | {"completion_tokens": 9}, (900, 9)),
    "Anthropic's stream with 0 at its end": (
        {"first_prompt_tokens": 900, "prompt_tokens": 0, "completion_tokens": 9}, (900, 9)),
    "answer tokens alone": ({"completion_tokens": 9}, (None, 9)),
}  # fmt: skip


@cases("usage, expected", USAGES)
def test_token_counts_that_envoy_reports_are_added_up(
    usage: dict[str, float], expected: tuple[int | None, int | None]
) -> None:
    message = entry()
    describe(message, {"picker.usage": usage})
    read = accesslog.read(message)
    assert isinstance(read, Completion)
    assert (read.prompt_tokens, read.completion_tokens) == expected
    cached = [usage[key] for key in accesslog._CACHED if key in usage]
    assert read.cached_tokens == (cached[0] if cached else None)


INVALID: dict[str, tuple[dict[str, object], str]] = {
    "another request's token": ({"token": signed("another request's")}, "bad-signature"),
    "a changed token": ({"token": signed("req-1").replace("1.0\t1.0", "1.0\t1e12")}, "bad-signature"),
    "another fleet's token": ({"token": accounting_token.signed(FIELDS, "req-1", Keyring())}, "unknown-key"),
    "an unsigned token": ({"token": FIELDS}, "unsigned"),
    "a token that is no text": ({"id": 7, "token": [1]}, "no-token"),
    "no token": ({}, "no-token"),
}


@pytest.mark.parametrize("kind", ["DownstreamEnd", "DownstreamPeriodic"])
@cases("picker, reason", INVALID)
def test_an_entry_without_a_valid_accounting_token_is_counted_and_changes_nothing(
    picker: Mapping[str, object], reason: str, kind: str
) -> None:
    message = bare(kind)
    describe(message, {"picker": picker} if picker else {})
    gate, page = taken(message, entry(kind, "next"))
    assert [item.id for item in gate.reported] == ["next"]
    assert f'epp_access_log_rejected_total{{reason="{reason}"}} 1.0' in page


def test_accounting_tokens_stay_valid_over_key_rotations() -> None:
    keys, newcomer = Keyring(), Keyring()
    keys.take("0a" * 16)
    first = accounting_token.signed(FIELDS, "r", keys)
    keys.take(f"{'0b' * 16} {'0a' * 16}")
    announced = accounting_token.signed(FIELDS, "r", keys)
    keys.take(f"{'0c' * 16} {'0b' * 16} {'0a' * 16}")
    # A new key signs only after a whole key period, in which every replica learned the new key.
    assert announced == first
    assert accounting_token.signed(FIELDS, "r", keys) != first
    newcomer.take(keys.offer().split(" ", 1)[1])
    traced = accounting_token.with_trace(first, "00-trace")
    for token in (first, traced, accounting_token.signed(FIELDS, "r", keys)):
        assert accounting_token.fault_of(token, "r", newcomer) == ""
    for token in (FIELDS, f"{FIELDS}\t00-trace"):
        assert accounting_token.fault_of(token, "r", newcomer) == "unsigned"


@on_both_transports
async def test_malformed_messages_in_the_access_log_stream_lose_no_valid_entry() -> None:
    tcp = als_pb2.StreamAccessLogsMessage()
    tcp.tcp_logs.log_entry.add().common_properties.upstream_cluster = "pool"
    first, empty = batch(entry(request_id="first")), als_pb2.StreamAccessLogsMessage()
    last = batch(entry(request_id=""), entry(request_id="x" * 5000), entry(request_id="last"))
    items = await reported(first, b"\xff\xff not a message", empty, tcp, last)
    assert [item.id for item in items] == ["first", "last"]


@on_both_transports
async def test_an_access_log_message_with_too_many_entries_is_dropped() -> None:
    flood = batch(*(entry(request_id="many") for _ in range(2049)))
    items = await reported(batch(entry(request_id="first")), flood, batch(entry(request_id="last")))
    assert [item.id for item in items] == ["first", "last"]


async def test_entries_of_the_access_log_are_charged_to_their_peer_as_work() -> None:
    charged: list[int] = []
    data = batch(entry(), entry()).SerializeToString()
    account = Account(ScriptedGate(), Metrics(), KEYS, KnownOrigins())
    accesslog.Collector([account]).on_message(data, charge=charged.append)
    assert charged == [4]


@on_both_transports
async def test_a_replica_that_is_cut_off_ends_the_access_log_stream_after_the_next_message() -> None:
    gate = ScriptedGate()
    async with serving(gate) as channel:
        call = channel.stream_unary(METHOD)(timeout=10)
        gate.is_cut_off = True
        await call.write(batch(entry()).SerializeToString())
        assert await call == b""
    assert gate.reported == [BARE_END]


def test_access_log_entries_are_counted_by_kind() -> None:
    _, page = taken(entry(), entry("DownstreamPeriodic"), entry("UpstreamEnd"))
    for kind in ("ended", "alive", "ignored"):
        assert f'epp_access_log_entries_total{{kind="{kind}"}} 1.0' in page


def answered(status: int = 200, placed: str | None = None, ttft: str = "1500", ended_ms: int = 2) -> Entry:
    """Envoy's entry for an attempt on behalf of a client of HTTP/2."""
    message = bare("UpstreamEnd", "from-envoy", status)
    placed = f"req-1 ={signed('req-1')}" if placed is None else placed
    message.response.response_headers[accesslog.PLACED_HEADER] = placed
    message.common_properties.time_to_last_upstream_rx_byte.FromMilliseconds(ended_ms)
    if ttft:
        message.common_properties.custom_tags[accesslog.TTFT_TAG] = ttft
    return message


@pytest.mark.parametrize("status", [200, 400, 429, 500])
def test_an_answer_that_an_endpoint_has_sent_ends_its_request_before_the_client_has_read_it(
    status: int,
) -> None:
    outcome = Outcome.UPSTREAM_FAILED if status in (429, 500) else Outcome.COMPLETED
    expected = BARE_END._replace(status=status, outcome=outcome, is_read=False)
    gate, page = taken(answered(status))
    assert (gate.reported, gate.settled) == ([expected], [])
    assert 'epp_access_log_entries_total{kind="answered"} 1.0' in page


@pytest.mark.parametrize(("protocol", "ended_ms"), [("HTTP2", 1200), ("HTTP2", 1001), ("HTTP11", 1200)])
def test_the_end_of_a_request_says_whether_an_http2_client_read_the_answer_late(
    protocol: str, ended_ms: int
) -> None:
    message = entry()
    message.protocol_version = protocol
    message.common_properties.time_to_last_upstream_rx_byte.FromMilliseconds(1000)
    message.common_properties.duration.FromMilliseconds(ended_ms)
    gate, _ = taken(message)
    assert gate.settled[0].is_late is (protocol == "HTTP2" and ended_ms == 1200)


ANSWERS_THAT_END_NOTHING: dict[str, tuple[Entry]] = {
    "Envoy may try another endpoint": (answered(503, ttft=""),),
    "the answer is cut off": (answered(ended_ms=0),),
    "the request was not placed, mode lean": (answered(placed=" ="),),
    "the request was not placed, mode http": (answered(placed=" "),),
    "the id is another's": (answered(placed=f"req-2 ={signed('req-1')}"),),
    "the id is too long": (answered(placed=f"{'x' * 513} =token"),),
}


@cases("message", ANSWERS_THAT_END_NOTHING)
def test_an_entry_that_does_not_prove_a_complete_final_answer_ends_no_request(message: Entry) -> None:
    assert taken(message)[0].reported == []


def test_a_request_whose_client_left_without_an_accounting_token_only_becomes_a_suspect() -> None:
    gone = bare(request_id="gone", status=0, flag="downstream_connection_termination")
    gate, _ = taken(gone, bare(request_id="refused", status=503))
    assert (gate.reported, gate.suspected) == ([], ["gone"])


def test_ids_of_stored_state_are_noted_with_their_endpoint_if_the_fleet_signed_the_token() -> None:
    told = {"response_id": "resp_1", "conversation_id": "conv_1"}
    read_token = accounting_token.of_read("read", KEYS)
    entries = []
    for name, token, path, kind in (
        ("r-1", signed("r-1"), "/v1/responses", "DownstreamEnd"),
        ("r-2", signed("r-2"), "/v1/responses?x=1", "DownstreamPeriodic"),
        ("r-3", signed("r-3"), "/v1/chat/completions", "DownstreamEnd"),
        ("r-4", signed("r-1"), "/v1/responses", "DownstreamEnd"),
        ("read", read_token, "/team/v1/conversations", "DownstreamEnd"),
        ("r-5", read_token, "/v1/conversations", "DownstreamEnd"),
    ):
        message = bare(kind, name)
        message.request.path = path
        describe(
            message,
            {
                "picker": {"id": name, "token": token},
                "picker.usage": told,
                accesslog.NAMESPACE: {SERVED_KEY: "10.0.0.1:8000"},
            },
        )
        entries.append(message)
    gate, origins = ScriptedGate(), KnownOrigins()
    accesslog.Collector([Account(gate, Metrics(), KEYS, origins)]).take(entries)  # type: ignore[arg-type]
    assert origins.noted == [(("resp_1", "conv_1"), "10.0.0.1:8000")] * 3
    # A 404 means that the server lacks the state, so no id is noted.
    entries[0].response.response_code.value = 404
    accesslog.Collector([Account(ScriptedGate(), Metrics(), KEYS, origins)]).take(entries[:1])  # type: ignore[arg-type]
    assert origins.noted[3:] == [((), "10.0.0.1:8000")]
    # A read of stored state is not admitted, so the gate gets no report of the end of the read.
    assert [each.id for each in gate.reported] == ["r-1", "r-2", "r-3"]
