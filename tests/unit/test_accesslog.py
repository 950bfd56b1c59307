"""The access log over real gRPC: what each entry tells the gate, in order, whatever comes between."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from metrics_page import page_of

from picker_fleet.admission import accounting_token
from picker_fleet.extproc import accesslog
from picker_fleet.request import Alive, Completion, InferenceRequest, Outcome, Placement
from picker_fleet.signing import Keyring
from picker_fleet.telemetry.metrics import Metrics

Entry = accesslog_pb2.HTTPAccessLogEntry
METHOD = f"/{accesslog.SERVICE}/StreamAccessLogs"
KEYS = Keyring()
NOTE = "flow\t1\t1.0\t1.0\t\t3\tllama\t10.0.0.1:8000\t0"


def signed(request_id: str) -> str:
    """The accounting token of `request_id`."""
    return accounting_token.signed(NOTE, request_id, KEYS)


class Book:
    """A gate that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[Completion | Alive] = []
        self.suspected: list[str] = []

    def settle(self, completion: Completion) -> None:
        self.told.append(completion)

    def renew(self, alive: Alive) -> None:
        self.told.append(alive)

    def suspect(self, request_id: str) -> None:
        self.suspected.append(request_id)

    def withdraw(self, request_id: str) -> None:
        raise AssertionError("the access log withdraws nothing")

    async def admit(self, request: InferenceRequest, *, stream_owned: bool, age_s: float = 0.0) -> Placement:
        raise AssertionError("the access log admits nothing")

    async def confirm(self, request_id: str, placement: Placement, age_s: float) -> bool:
        raise AssertionError("the access log confirms nothing")

    async def route(self, subset: tuple[str, ...] | None) -> Placement:
        raise AssertionError("the access log routes nothing")


def bare(kind: str = "DownstreamEnd", request_id: str = "req-1", status: int = 200) -> Entry:
    """An entry as Envoy sends it of a request that was not placed."""
    message = Entry()
    message.request.request_id = request_id
    message.response.response_code.value = status
    message.common_properties.access_log_type = accesslog_pb2.AccessLogType.Value(kind)
    return message


def entry(kind: str = "DownstreamEnd", request_id: str = "req-1", status: int = 200) -> Entry:
    """The same of one that the picker has placed."""
    message = bare(kind, request_id, status)
    message.common_properties.metadata.filter_metadata["picker"].update({"ticket": signed(request_id)})
    return message


def full() -> Entry:
    message = bare(request_id="from-envoy")
    common = message.common_properties
    common.metadata.filter_metadata["picker"].update({"id": "from-picker", "ticket": signed("from-picker")})
    common.metadata.filter_metadata["picker.usage"].update({"prompt_tokens": 7, "completion_tokens": 100})
    common.metadata.filter_metadata["envoy.lb"].update({accesslog.SERVED_KEY: "10.0.0.1:8000"})
    common.upstream_remote_address.socket_address.address = "10.9.9.9"
    common.upstream_remote_address.socket_address.port_value = 1
    common.time_to_first_downstream_tx_byte.FromMilliseconds(250)
    common.time_to_last_downstream_tx_byte.FromMilliseconds(3500)
    return message


def test_who_served_is_read_from_the_configured_namespace() -> None:
    # Given an entry of an Envoy that keeps it in a namespace of its own
    message = full()
    message.common_properties.metadata.filter_metadata["gateway.lb"].update(
        {accesslog.SERVED_KEY: "10.0.0.3:80"}
    )
    # Then it is read there, and not where it is by default
    assert [accesslog.read(message, *where).served for where in ((), ("gateway.lb",))] == [
        "10.0.0.1:8000",
        "10.0.0.3:80",
    ]


def batch(*entries: Entry) -> als_pb2.StreamAccessLogsMessage:
    message = als_pb2.StreamAccessLogsMessage()
    message.http_logs.log_entry.extend(entries)
    return message


@asynccontextmanager
async def serving(gate: Book, metrics: Metrics) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((accesslog.handler(gate, metrics, KEYS),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def send(channel: grpc.aio.Channel, *messages: bytes) -> als_pb2.StreamAccessLogsResponse:
    call = channel.stream_unary(METHOD, response_deserializer=als_pb2.StreamAccessLogsResponse.FromString)(
        timeout=10
    )
    for message in messages:
        await call.write(message)
    await call.done_writing()
    return await call


async def told(*messages: als_pb2.StreamAccessLogsMessage | bytes) -> list[Completion | Alive]:
    gate = Book()
    async with serving(gate, Metrics()) as channel:
        raw = [message if isinstance(message, bytes) else message.SerializeToString() for message in messages]
        await send(channel, *raw)
    return gate.told


async def test_given_a_final_entry_when_it_comes_then_the_gate_settles_all_that_it_tells() -> None:
    assert await told(batch(full())) == [
        Completion(
            id="from-picker",
            outcome=Outcome.COMPLETED,
            status=200,
            served="10.0.0.1:8000",
            prompt_tokens=7,
            completion_tokens=100,
            duration_s=3.5,
            first_byte_s=0.25,
            accounting_token=signed("from-picker"),
        )
    ]


async def test_given_no_id_of_the_picker_when_an_entry_comes_then_envoys_request_id_is_the_id() -> None:
    assert await told(batch(entry())) == [
        Completion(
            "req-1", Outcome.COMPLETED, 200, None, None, None, None, None, accounting_token=signed("req-1")
        )
    ]


async def test_given_a_periodic_entry_when_it_comes_then_the_lease_is_renewed_with_its_accounting_token() -> (
    None
):
    message = full()
    message.common_properties.access_log_type = accesslog_pb2.DownstreamPeriodic
    assert await told(batch(message)) == [Alive("from-picker", "10.0.0.1:8000", signed("from-picker"))]


async def test_given_an_envoy_without_entry_types_when_it_reports_then_the_intermediate_mark_counts() -> None:
    alive, over = entry("NotSet", "a"), entry("NotSet", "b")
    alive.common_properties.intermediate_log_entry = True
    first, second = await told(batch(alive, over))
    assert first == Alive("a", None, signed("a"))
    assert isinstance(second, Completion)


async def test_given_a_request_that_still_waits_when_it_is_reported_alive_then_nothing_is_renewed() -> None:
    # or each access-log interval would cost Redis as much as there are waiters
    assert await told(batch(bare("DownstreamPeriodic"))) == []


@pytest.mark.parametrize("kind", ["UpstreamEnd", "UpstreamPeriodic", "DownstreamStart", "TcpConnectionEnd"])
async def test_given_another_kind_of_entry_when_it_comes_then_it_is_ignored(kind: str) -> None:
    assert await told(batch(entry(kind))) == []


async def test_given_entries_of_one_request_when_they_come_then_their_order_is_kept() -> None:
    ids = [f"r{number}" for number in range(50)]
    messages = [batch(entry("DownstreamPeriodic", one), entry("DownstreamEnd", one)) for one in ids]
    heard = await told(*messages)
    assert [(type(item), item.id) for item in heard] == [
        (kind, one) for one in ids for kind in (Alive, Completion)
    ]


@pytest.mark.parametrize(
    ("flag", "status", "outcome"),
    [
        ("downstream_connection_termination", 0, Outcome.CLIENT_GONE),
        ("downstream_connection_termination", 200, Outcome.CLIENT_GONE),
        ("downstream_remote_reset", 200, Outcome.CLIENT_GONE),
        ("upstream_connection_failure", 503, Outcome.UPSTREAM_FAILED),
        ("upstream_remote_reset", 200, Outcome.UPSTREAM_FAILED),
        ("delay_injected", 200, Outcome.COMPLETED),
        (None, 500, Outcome.UPSTREAM_FAILED),
        (None, 404, Outcome.COMPLETED),
    ],
)
async def test_given_flags_and_status_when_an_entry_ends_then_the_outcome_follows(
    flag: str | None, status: int, outcome: Outcome
) -> None:
    message = entry(status=status)
    if flag is not None:
        setattr(message.common_properties.response_flags, flag, True)
    (completion,) = await told(batch(message))
    assert isinstance(completion, Completion)
    assert (completion.outcome, completion.status) == (outcome, status)


async def test_given_no_served_key_when_an_entry_ends_then_the_upstream_address_is_used() -> None:
    message = entry()
    socket = message.common_properties.upstream_remote_address.socket_address
    socket.address, socket.port_value = "fd00::1", 8000
    (completion,) = await told(batch(message))
    assert completion.served == "[fd00::1]:8000"


async def test_what_an_endpoint_took_is_told_without_the_wait_before_it() -> None:
    message = full()
    common = message.common_properties
    common.time_to_first_upstream_tx_byte.FromMilliseconds(3000)
    common.time_to_last_upstream_rx_byte.FromMilliseconds(3400)
    (completion, unknown) = await told(batch(message, full()))
    assert isinstance(completion, Completion)
    assert completion.duration_s == 3.5
    assert completion.service_s == pytest.approx(0.4)
    assert isinstance(unknown, Completion)
    assert unknown.service_s is None


@pytest.mark.parametrize(
    ("served", "flag", "attempts", "failed"),
    [
        ("10.0.0.1:8000", False, 1, ""),
        ("10.0.0.2:8000", False, 2, "10.0.0.1:8000"),  # Envoy has gone on to a fallback
        ("10.0.0.2:8000", False, 0, "10.0.0.1:8000"),  # and does not count
        ("10.0.0.2:8000", False, 1, ""),  # Envoy did not know the picked one
        ("10.0.0.1:8000", True, 1, "10.0.0.1:8000"),
        ("", True, 0, "10.0.0.1:8000"),
        ("", False, 0, ""),
    ],
)
async def test_given_a_picked_endpoint_when_it_did_not_serve_then_it_is_told_of_as_failed(
    served: str, flag: bool, attempts: int, failed: str
) -> None:
    message = entry()
    if served:
        message.common_properties.metadata.filter_metadata["envoy.lb"].update({accesslog.SERVED_KEY: served})
    message.common_properties.response_flags.upstream_connection_failure = flag
    message.common_properties.upstream_request_attempt_count = attempts
    (completion,) = await told(batch(message))
    assert isinstance(completion, Completion)
    assert completion.failed == failed


def nan_usage(message: Entry) -> None:
    message.common_properties.metadata.filter_metadata["picker.usage"].update(
        {"prompt_tokens": float("nan"), "completion_tokens": -5}
    )


def text_usage(message: Entry) -> None:
    message.common_properties.metadata.filter_metadata["picker.usage"].update(
        {"prompt_tokens": "many", "completion_tokens": None}
    )


def huge_usage(message: Entry) -> None:
    message.common_properties.metadata.filter_metadata["picker.usage"].update(
        {"prompt_tokens": 1e300, "completion_tokens": float("inf")}
    )


def negative_time(message: Entry) -> None:
    message.common_properties.time_to_last_downstream_tx_byte.seconds = -3


@pytest.mark.parametrize("spoil", [nan_usage, text_usage, huge_usage, negative_time])
async def test_given_senseless_values_when_an_entry_ends_then_they_count_as_unknown(
    spoil: Callable[[Entry], None],
) -> None:
    message = entry()
    spoil(message)
    assert await told(batch(message)) == [
        Completion(
            "req-1", Outcome.COMPLETED, 200, None, None, None, None, None, accounting_token=signed("req-1")
        )
    ]


def stolen(message: Entry) -> None:
    picker(message, {"ticket": signed("another request's")})


def raised(message: Entry) -> None:
    picker(message, {"ticket": signed("req-1").replace("\t1.0\t1.0\t", "\t1.0\t1e12\t")})


def of_a_stranger(message: Entry) -> None:
    picker(message, {"ticket": accounting_token.signed(NOTE, "req-1", Keyring())})


def stripped(message: Entry) -> None:
    picker(message, {"ticket": NOTE})


def odd(message: Entry) -> None:
    picker(message, {"id": 7, "ticket": [1]})


def missing(message: Entry) -> None:
    message.common_properties.metadata.filter_metadata.clear()


def picker(message: Entry, fields: dict[str, object]) -> None:
    message.common_properties.metadata.filter_metadata["picker"].update(fields)


@pytest.mark.parametrize("kind", ["DownstreamEnd", "DownstreamPeriodic"])
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (stolen, "bad-signature"),
        (raised, "bad-signature"),
        (of_a_stranger, "unknown-key"),
        (stripped, "unsigned"),
        (odd, "no-ticket"),
        (missing, "no-ticket"),
    ],
)
def test_an_entry_without_a_accounting_token_of_the_fleet_is_counted_and_changes_nothing(
    spoil: Callable[[Entry], None], reason: str, kind: str
) -> None:
    gate, metrics, message = Book(), Metrics(), entry(kind)
    spoil(message)
    accesslog.take([message, entry(kind, "next")], gate, metrics, KEYS)
    assert [item.id for item in gate.told] == ["next"]
    assert f'epp_access_log_rejected_total{{reason="{reason}"}} 1.0' in page_of(metrics).decode()


def test_a_accounting_token_is_good_over_rotations_and_those_of_an_older_version_while_it_is_about() -> None:
    keys, newcomer = Keyring(), Keyring()
    # Given a fleet whose key is followed by two others, one a day
    keys.take("0a" * 16)
    first = accounting_token.signed(NOTE, "r", keys)
    keys.take(f"{'0b' * 16} {'0a' * 16}")
    announced = accounting_token.signed(NOTE, "r", keys)
    keys.take(f"{'0c' * 16} {'0b' * 16} {'0a' * 16}")
    # Then its accounting tokens are those of the first until the next is known to all, and all stay good
    assert first == announced != accounting_token.signed(NOTE, "r", keys)
    newcomer.take(keys.offer().split(" ", 1)[1])
    for note in (
        first,
        accounting_token.with_trace(first, "00-trace"),
        accounting_token.signed(NOTE, "r", keys),
    ):
        assert accounting_token.checked(note, "r", newcomer) == (note, "")
    # And one without a signature while a version that makes none is about; its trace stays apart
    assert accounting_token.checked(NOTE, "r", newcomer) == (NOTE, "unsigned")
    newcomer.accepts_unsigned = True
    note, fault = accounting_token.checked(f"{NOTE}\t00-trace", "r", newcomer)
    assert (accounting_token.split_trace(note), fault) == ((f"{NOTE}\t", "00-trace"), "")
    assert accounting_token.checked(NOTE, "r", newcomer) == (f"{NOTE}\t", "")


async def test_given_garbage_between_entries_when_it_comes_then_the_others_are_not_lost() -> None:
    tcp = als_pb2.StreamAccessLogsMessage()
    tcp.tcp_logs.log_entry.add().common_properties.upstream_cluster = "pool"
    heard = await told(
        batch(entry(request_id="first")),
        b"\xff\xff not a message",
        als_pb2.StreamAccessLogsMessage(),
        tcp,
        batch(entry(request_id=""), entry(request_id="x" * 5000), entry(request_id="last")),
    )
    assert [item.id for item in heard] == ["first", "last"]


async def test_given_entries_when_taken_then_the_metrics_say_what_they_told() -> None:
    metrics = Metrics()
    entries = [entry(), entry("DownstreamPeriodic"), entry("UpstreamEnd")]
    accesslog.take(entries, Book(), metrics, KEYS)
    page = page_of(metrics).decode()
    for kind in ("ended", "alive", "ignored"):
        assert f'epp_access_log_entries_total{{kind="{kind}"}} 1.0' in page


async def test_given_an_open_stream_when_the_server_stops_then_it_ends() -> None:
    async with serving(Book(), Metrics()) as channel:
        call = channel.stream_unary(METHOD)(timeout=30)
        await call.write(batch(entry()).SerializeToString())
    assert await call.code() is not grpc.StatusCode.OK


def test_a_client_gone_without_a_accounting_token_is_only_suspected() -> None:
    gate, metrics = Book(), Metrics()
    gone, refused = bare(request_id="gone", status=0), bare(request_id="refused", status=503)
    gone.common_properties.response_flags.downstream_connection_termination = True
    accesslog.take([gone, refused], gate, metrics, KEYS)
    assert (gate.told, gate.suspected) == ([], ["gone"])
