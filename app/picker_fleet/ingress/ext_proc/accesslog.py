"""Envoy's gRPC access log reports which requests run or have ended, their usage, and which endpoint served.

In the modes `lean` and `http` the picker sees nothing of a request after the decision; access-log entries
release the request's stock (G6) and renew its lease. Each Envoy worker sends batches on one long stream to
one replica, which handles a stream's entries in order. A malformed entry is counted and dropped; the rest
of its batch is handled (G10). Anyone may reach this port: an entry can end, renew or restore a
request only if the fleet has signed its token for that request. A stream carries entries of all pools; each
pool signs with its own keys, so the signature identifies the pool. The replica's gRPC server runs this
service.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]

from picker_fleet.admission.admission import Admission
from picker_fleet.admission.origins import Origins
from picker_fleet.domain.allowlist import SERVED, has_state
from picker_fleet.domain.request import CONNECT, FULL, Alive, Completion, Fault, Outcome, fault_of, hold_of
from picker_fleet.grpc.transport import Handler, Stream
from picker_fleet.state import accounting_token
from picker_fleet.state.accounting_token import NO_TOKEN, UNKNOWN_KEY, Keyring
from picker_fleet.telemetry.metrics import Metrics

SERVICE: Final = "envoy.service.accesslog.v3.AccessLogService"
NAMESPACE: Final = "envoy.lb"  # the default metadata namespace in which Envoy names the endpoint that served

_MOST_ENTRIES = 2048  # maximum entries of a message; Envoy's messages of 16 KiB have at most about 100
_ENTRY_WORK = 2  # units of work (grpc/connections.py) of an entry

_log = logging.getLogger(__name__)

_PERIODIC = accesslog_pb2.DownstreamPeriodic
_END = accesslog_pb2.DownstreamEnd
_ATTEMPT_END = accesslog_pb2.UpstreamEnd  # the entry reports a failed attempt, or has PLACED_HEADER
FAULT_TAG: Final = "picker.fault"  # marks a failed attempt of a request that its ext_proc stream settles

# This tag has the time, in µs, from the first byte sent to the endpoint until the first byte of the answer's
# body. Other fields of an entry have the time of the headers, which servers send before the first token.
TTFT_TAG: Final = "picker.ttft"
TTFT_FORMAT: Final = "%COMMON_DURATION(US_TX_BEG:US_RX_BODY_BEG:us)%"
_MOST_DIGITS = 12

_CLIENT_FLAGS = frozenset(
    {"downstream_connection_termination", "downstream_remote_reset", "downstream_protocol_error"}
)
# Envoy's response code details of an answer cut off at its `max_stream_duration`; no flag shows it.
_CUT_OFF = "max_duration_timeout"
_UPSTREAM_FLAGS = frozenset(
    {
        "failed_local_healthcheck",
        "no_healthy_upstream",
        "upstream_request_timeout",
        "local_reset",
        "upstream_remote_reset",
        "upstream_connection_failure",
        "upstream_connection_termination",
        "upstream_overflow",
        "upstream_retry_limit_exceeded",
        "upstream_max_stream_duration_reached",
        "upstream_protocol_error",
    }
)
# The response flags that Envoy sets if a request has reached an endpoint and the endpoint then failed.
_FAULT_FLAGS = ("upstream_remote_reset", "upstream_connection_termination", "upstream_protocol_error")
_RESET = "reset"  # the fault of an endpoint that cut an answer off
RETRY_AFTER: Final = "retry-after"
CONTENT_TYPE: Final = "content-type"
_NOTHING: Mapping[str, Any] = {}

# In mode `http` Envoy keeps these headers of the picker's answer as metadata of the ext_authz filter.
EXT_AUTHZ: Final = "envoy.filters.http.ext_authz"
ID_HEADER: Final = "x-picker-request-id"
TOKEN_HEADER: Final = "x-picker-accounting-token"
WAITED_HEADER: Final = "x-picker-waited"
TARGET_HEADER: Final = "x-picker-target-model"
METADATA_HEADERS: Final = (ID_HEADER, TOKEN_HEADER, WAITED_HEADER, TARGET_HEADER)
TOKEN_MARK: Final = "="  # starts each name and token, so that a header value does not lose leading blanks
# Envoy adds this header (`ID =TOKEN`) to an endpoint's answer; the log of attempts then has the header.
PLACED_HEADER: Final = "x-picker-placed"
_LONGEST_ID = 512
_HTTP2 = accesslog_pb2.HTTPAccessLogEntry.HTTP2
# A client that still reads after so many seconds is slow; `Admission.answered` waits longer for the end.
_LATE_S = 0.1
# If a client does not read, Envoy stops reading the endpoint's answer once about 1 MiB of it is unsent.
_UNSENT_BYTES = 768 * 1024
# Metadata keys of prompt tokens in Anthropic's API: of an answer's usage, or of a stream's first event.
PROMPT_SOURCES: Final = tuple(
    tuple(f"{when}{what}" for what in ("prompt_tokens", "cache_read_tokens", "cache_creation_tokens"))
    for when in ("", "first_")
)
_CACHED = ("cached_tokens", "cache_read_tokens", "first_cache_read_tokens")
STATE_IDS: Final = ("response_id", "conversation_id")  # metadata keys of ids in the Responses API
_MOST_TOKENS = 1e9


class Account(NamedTuple):
    """The parts of one pool to which access-log entries are reported."""

    gate: Admission
    metrics: Metrics
    keys: Keyring
    origins: Origins


def handlers(accounts: Sequence[Account], namespace: str = NAMESPACE) -> Mapping[str, Handler]:
    """The access log's gRPC handler, by path. The metadata `namespace` names the endpoint that served."""
    return {f"/{SERVICE}/StreamAccessLogs": Collector(accounts, namespace).collect}


class Collector:
    """Reports the entries of Envoy's access-log streams, in order. All methods run in one event loop."""

    def __init__(self, accounts: Sequence[Account], namespace: str = NAMESPACE) -> None:
        self._accounts, self._namespace = accounts, namespace

    async def collect(self, stream: Stream) -> bytes:
        """Handle the messages of one stream until the stream ends."""
        await stream.relay(partial(self.on_message, trust=stream.trust, charge=stream.charge))
        return b""  # StreamAccessLogsResponse has no fields

    def on_message(
        self,
        data: bytes,
        trust: Callable[[], object] = lambda: None,
        charge: Callable[[int], object] = lambda work: None,
    ) -> tuple[Sequence[bytes], bool]:
        """Handle one StreamAccessLogsMessage; no answer is sent. A malformed message, or one with too many
        entries, is dropped, and the stream continues. If this replica is cut off from Redis, the stream ends:
        Envoy then opens a stream to another replica. Calls `trust` if an entry has a token that the fleet
        signed: only gateways do. Calls `charge` with the message's units of work."""
        try:
            message = als_pb2.StreamAccessLogsMessage.FromString(data)
        except DecodeError:
            _log.warning("an access-log message could not be decoded", extra={"size_bytes": len(data)})
        else:
            entries = message.http_logs.log_entry
            charge(_ENTRY_WORK * len(entries))
            if len(entries) > _MOST_ENTRIES:
                _log.warning("an access-log message has more than %d entries", _MOST_ENTRIES)
            elif self.take(entries):
                trust()
        return (), all(account.gate.is_cut_off for account in self._accounts)

    def take(self, entries: Iterable[Any]) -> bool:
        """Report the HTTPAccessLogEntry messages `entries`, in order, each to its request's pool. Returns
        whether an entry had a token that the fleet signed."""
        accounts, is_signed = self._accounts, False
        for entry in entries:
            try:
                item = read(entry, self._namespace)
            except (ValueError, TypeError, OverflowError):
                _log.warning("an access-log entry could not be read", exc_info=True)
                item = None
            if item is None:
                accounts[0].metrics.access_log("ignored")
                continue
            if isinstance(item, Fault) and not item.accounting_token:
                for each in accounts:  # without a token, any pool may have the request
                    each.gate.fault(item)
                accounts[0].metrics.access_log("failed")
                continue
            account, fault = accounts[0], NO_TOKEN
            if item.accounting_token:  # without a token, the request waits or was refused
                account, fault = self._owner(item.accounting_token, item.id)
            if fault:
                account.metrics.access_log_rejected(fault)
                if fault is NO_TOKEN and isinstance(item, Completion) and item.outcome is Outcome.CLIENT_GONE:
                    # Either the client left before Envoy had the token, or the entry is forged.
                    for each in accounts:
                        each.gate.suspect(item.id)
                account.metrics.access_log("ignored")
                continue
            is_signed = True
            if has_state(entry.request.path) and not isinstance(item, Fault):
                account.origins.note(_ids(entry), item.served)
            if accounting_token.is_read(item.accounting_token):
                account.metrics.access_log("ignored")
            elif isinstance(item, Completion):
                account.gate.settle(item) if item.is_read else account.gate.answered(item)
                account.metrics.access_log("ended" if item.is_read else "answered")
            elif isinstance(item, Fault):
                account.gate.fault(item)
                account.metrics.access_log("failed")
            else:
                account.gate.renew(item)
                if item.is_prefilled:
                    account.gate.prefilled(item.id)
                account.metrics.access_log("alive")
        return is_signed

    def _owner(self, token: str, request_id: str) -> tuple[Account, str]:
        """The account of the pool that signed the accounting token, and the reason why the token is invalid
        ('' if it is valid). If no pool has signed the token, the first account is returned."""
        fault = UNKNOWN_KEY
        for account in self._accounts:
            its_fault = accounting_token.fault_of(token, request_id, account.keys)
            if not its_fault:
                return account, ""
            fault = its_fault if fault is UNKNOWN_KEY else fault
        return self._accounts[0], fault


def read(entry: Any, namespace: str = NAMESPACE) -> Completion | Alive | Fault | None:
    """The renewal, completion or failed attempt that one HTTPAccessLogEntry reports; None if the entry
    reports something else or names no request.

    The id and the accounting token come unchecked from the dynamic metadata that the picker wrote. An entry
    from before the decision has no such metadata: the request's id is then Envoy's `x-request-id`.
    """
    common = entry.common_properties
    kind = common.access_log_type
    if kind not in (_END, _PERIODIC, _ATTEMPT_END):
        return None
    if kind == _ATTEMPT_END and PLACED_HEADER in entry.response.response_headers:
        return _answered(entry)
    metadata = common.metadata.filter_metadata  # an entry about one attempt has no metadata
    check = metadata.get(EXT_AUTHZ)
    if check is not None:
        fields = check.fields
        request_id, token = _text(fields, ID_HEADER), _text(fields, TOKEN_HEADER).removeprefix(TOKEN_MARK)
        waited_s, target_model = _wait_of_check(fields)
    else:
        picker = _fields(metadata, "picker")
        request_id, token, waited_s = _text(picker, "id"), _text(picker, "token"), _waited_s(picker)
        target_model = "" if waited_s is None else _text(picker, "target")
    request_id = request_id or entry.request.request_id
    if not request_id or len(request_id) > _LONGEST_ID:
        return None
    flags = common.response_flags if common.HasField("response_flags") else None
    status = entry.response.response_code.value
    if kind == _ATTEMPT_END or FAULT_TAG in common.custom_tags:
        return _failed_attempt(entry, flags, status, request_id, token)
    served = _text(_fields(metadata, namespace), SERVED) or _address(common)
    if kind == _PERIODIC:
        if entry.response.response_body_bytes - common.downstream_wire_bytes_sent > _UNSENT_BYTES:
            return None  # the endpoint may have finished long ago: do not renew the lease
        is_prefilled = (
            accounting_token.prefill_of(token)[0] != ""
            and _ttft_s(common.custom_tags.get(TTFT_TAG, "")) is not None
        )
        sent_bytes = entry.response.response_body_bytes if status == 200 else 0  # a WebSocket (101) counts 0
        return Alive(request_id, served, token, is_prefilled, sent_bytes)
    usage = _fields(metadata, "picker.usage")
    prompt_tokens, completion_tokens = _counts(usage) if usage else (None, None)
    cached_tokens = None
    if usage and len(usage) > 2:  # most answers report only the tokens of prompt and completion
        cached = (_tokens(usage, key) for key in _CACHED)
        cached_tokens = next((count for count in cached if count is not None), None)
    duration_s = _seconds(common.time_to_last_downstream_tx_byte)
    first_byte_s = _seconds(common.time_to_first_downstream_tx_byte)
    service_s = _between(common.time_to_first_upstream_tx_byte, common.time_to_last_upstream_rx_byte)
    picked = accounting_token.endpoint_of(token)
    failed = _failed(flags, served, picked)
    # If the only attempt went to another endpoint, Envoy did not know the picked endpoint yet.
    passed_over = (
        picked if served not in (None, picked) and common.upstream_request_attempt_count != 1 else ""
    )
    outcome, fault = _outcome(flags, status), ""
    has_usage = prompt_tokens is not None or completion_tokens is not None
    is_well = has_usage and status == 200 and outcome is Outcome.COMPLETED
    if not is_well and outcome is Outcome.COMPLETED and entry.response.response_code_details == _CUT_OFF:
        outcome = Outcome.CLIENT_GONE
    body_bytes, content_type = entry.response.response_body_bytes, ""
    if not (is_well and completion_tokens):  # skips the comparison of content types for most answers
        content_type = entry.response.response_headers.get(CONTENT_TYPE, "")
    if served and not is_well and outcome is not Outcome.CLIENT_GONE and not failed:
        size = None if has_usage else body_bytes
        fault = _fault(flags, status, size, _tells_error(usage), content_type)
    # Pass positional arguments: keyword arguments would take three times as long.
    return Completion(
        request_id, outcome, status, served, prompt_tokens, completion_tokens, duration_s,
        first_byte_s, failed, token, service_s, waited_s, target_model, fault, 0.0, passed_over,
        _ttft_s(common.custom_tags.get(TTFT_TAG, "")), cached_tokens,
        entry.request.path, content_type, body_bytes, True, _is_late(entry),
    )  # fmt: skip


def _is_late(entry: Any) -> bool:
    """Whether an HTTP/2 or HTTP/3 client read its answer so slowly that an earlier entry reported its end."""
    common = entry.common_properties
    if entry.protocol_version < _HTTP2 or _seconds(common.time_to_last_upstream_rx_byte) is None:
        return False
    return (_between(common.time_to_last_upstream_rx_byte, common.duration) or 0.0) > _LATE_S


def _answered(entry: Any) -> Completion | None:
    """The request whose whole answer the endpoint has sent, whether or not the client has read the answer.
    None if the request was not placed, or if Envoy may retry, since the answer was cut off or has no body.
    """
    common, status = entry.common_properties, entry.response.response_code.value
    request_id, _, token = entry.response.response_headers[PLACED_HEADER].partition(f" {TOKEN_MARK}")
    has_body = _ttft_s(common.custom_tags.get(TTFT_TAG, "")) is not None
    is_whole = _seconds(common.time_to_last_upstream_rx_byte) is not None
    if not (token and has_body and is_whole) or len(request_id) > _LONGEST_ID:
        return None
    return Completion(
        request_id, _outcome(None, status), status, _address(common), None, None, None, None,
        accounting_token=token, is_read=False,
    )  # fmt: skip


def _failed_attempt(entry: Any, flags: Any, status: int, request_id: str, token: str) -> Fault | None:
    """The fault that an endpoint showed in one attempt; None without a fault."""
    endpoint = _address(entry.common_properties)
    if endpoint is None:
        return None
    if flags is not None and flags.upstream_connection_failure:
        return Fault(request_id, endpoint, CONNECT, token)
    why = _fault(flags, status)
    if not why:
        return None
    return Fault(
        request_id, endpoint, why, token, hold_of(entry.response.response_headers.get(RETRY_AFTER, ""))
    )


def _fault(flags: Any, status: int, *about: Any) -> str:
    """The result of `fault_of`, or 'reset' if Envoy's flags show that the endpoint cut the answer off."""
    why = fault_of(status, *about)
    if flags is not None and why != FULL and any(getattr(flags, name) for name in _FAULT_FLAGS):
        return _RESET
    return why


def _tells_error(usage: Any) -> bool:
    """Whether the answer's body reports an error other than a client error (4xx)."""
    if not usage or "error" not in usage:
        return False
    return not 400 <= usage["error_code"].number_value < 500 if "error_code" in usage else True


def _ids(entry: Any) -> tuple[str, ...]:
    """The ids of stored state (Responses API) that Envoy has found in a successful response."""
    if not 200 <= entry.response.response_code.value < 300:
        return ()
    usage = _fields(entry.common_properties.metadata.filter_metadata, "picker.usage")
    return tuple(filter(None, (_text(usage, key) for key in STATE_IDS)))


def _outcome(flags: Any, status: int) -> Outcome:
    if flags is not None:
        names = {field.name for field, _ in flags.ListFields()}
        if names & _CLIENT_FLAGS:
            return Outcome.CLIENT_GONE
        if names & _UPSTREAM_FLAGS:
            return Outcome.UPSTREAM_FAILED
    return Outcome.UPSTREAM_FAILED if fault_of(status) else Outcome.COMPLETED


def _failed(flags: Any, served: str | None, picked: str) -> str:
    """The picked endpoint if Envoy could not connect to it and used no other endpoint; else ''."""
    is_last = served is None or served == picked
    return picked if is_last and flags is not None and flags.upstream_connection_failure else ""


def _fields(metadata: Any, name: str) -> Any:
    """The fields of the protobuf Struct `name`; empty if there is no such Struct."""
    struct = metadata.get(name)
    return _NOTHING if struct is None else struct.fields


def _text(fields: Any, key: str) -> str:
    """The string at `key` of a Struct's fields; '' if `key` is missing or no string."""
    value = fields.get(key)
    return "" if value is None else value.string_value


def _wait_of_check(fields: Any) -> tuple[float | None, str]:
    """A request's seconds in the queue and its target model, from the check's answer; (None, '') if the
    request was not queued."""
    if WAITED_HEADER not in fields:
        return None, ""
    waited_s = None
    with contextlib.suppress(ValueError):
        seconds = float(_text(fields, WAITED_HEADER))
        waited_s = seconds if 0 <= seconds < math.inf else None
    return waited_s, _text(fields, TARGET_HEADER).removeprefix(TOKEN_MARK)


def _waited_s(fields: Any) -> float | None:
    """The time in the queue that the picker recorded; None if the request was not queued."""
    value = fields.get("waited")
    if value is None or value.WhichOneof("kind") != "number_value":
        return None
    seconds = value.number_value
    return seconds if 0 <= seconds < math.inf else None


def _counts(usage: Any) -> tuple[int | None, int | None]:
    """The tokens of prompt and answer in `usage`. Usage without a total may be of Anthropic's API, which
    reports a stream's prompt tokens in the first event, and cached tokens separately."""
    prompt, answer = _tokens(usage, "prompt_tokens"), _tokens(usage, "completion_tokens")
    total = _tokens(usage, "total_tokens")
    if total is not None:
        if prompt is None:
            prompt = max(total - (answer or 0), 0)
        return prompt, max(total - prompt, 0) if answer is None else answer
    # Skip the search if the entry has only the token counts of prompt and answer, as in OpenAI's API.
    for source in () if prompt is not None and len(usage) == 2 else PROMPT_SOURCES:
        told = [count for key in source if (count := _tokens(usage, key)) is not None]
        if told:
            prompt = max(prompt or 0, sum(told))
    return prompt, answer


def _tokens(fields: Any, key: str) -> int | None:
    value = fields.get(key)
    if value is None:
        return None
    number = value.number_value  # protobuf returns 0 if the value is no number
    if 0 < number <= _MOST_TOKENS:
        return int(number)
    return 0 if number == 0 and value.WhichOneof("kind") == "number_value" else None


def _seconds(duration: Any) -> float | None:
    """A protobuf Duration in seconds; None for 0 s, which means that the field is unset."""
    seconds = duration.seconds + duration.nanos / 1e9
    return seconds if seconds > 0 else None


def _ttft_s(digits: str) -> float | None:
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS
    return int(digits) / 1e6 if is_number else None


def _between(first: Any, last: Any) -> float | None:
    began_s, ended_s = _seconds(first), _seconds(last)
    return None if began_s is None or ended_s is None else max(ended_s - began_s, 0.0)


def _address(common: Any) -> str | None:
    """The `ip:port` of the upstream connection; None if there was no connection."""
    socket = common.upstream_remote_address.socket_address
    if not socket.address or not socket.port_value:
        return None
    host = f"[{socket.address}]" if ":" in socket.address else socket.address
    return f"{host}:{socket.port_value}"
