"""Parses the request headers that the picker reads (docs/protocol.md). intake.py calls this module.

If a request has a header in both spellings, `x-gateway-…` and `x-llm-d-…`, the first spelling counts. A
malformed header raises a `BadRequest` that names the header (G10). Only a malformed workload context raises
nothing: it makes an anonymous workload of criticality 3 (docs/specification.md).
"""

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache

import orjson

from picker_fleet.domain import allowlist
from picker_fleet.domain.config import Settings
from picker_fleet.domain.errors import BadRequest
from picker_fleet.domain.request import LatencyObjective, Workload, finite_number
from picker_fleet.domain.units import duration_s, endpoint_address, has_control
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.scheduling.sessions import SESSION_HEADER

METHOD, PATH = ":method", ":path"
REQUEST_ID = "x-request-id"
CONTENT_LENGTH = "content-length"
CONTENT_TYPE, CONTENT_ENCODING = "content-type", "content-encoding"
OF_BODY = (CONTENT_LENGTH, CONTENT_TYPE, CONTENT_ENCODING)
FORWARDED_FOR = "x-forwarded-for"
TTL = "x-llm-d-inference-ttl"
# Headers that give a client's own deadline. Another Envoy in front of the picker's Envoy sets ROUTE_TIMEOUT;
# Envoy accepts ROUTE_TIMEOUT only from internal peers.
REQUEST_TIMEOUT = "x-request-timeout"
GRPC_TIMEOUT = "grpc-timeout"
ROUTE_TIMEOUT = "x-envoy-expected-rq-timeout-ms"
DEADLINES = (REQUEST_TIMEOUT, GRPC_TIMEOUT, ROUTE_TIMEOUT)
SLO_TTFT, SLO_TPOT = SLO = ("x-slo-ttft-ms", "x-slo-tpot-ms")
WORKLOAD = "x-workload-context"
SESSION_HEADERS = frozenset(("session-id", "x-session-affinity"))
TRACE = "traceparent"
TEST_SELECTION = "test-epp-endpoint-selection"  # the conformance suite chooses endpoints by this header
HEADERS = frozenset(
    (METHOD, PATH, FORWARDED_FOR, REQUEST_ID, WORKLOAD, TTL, *DEADLINES, *SLO, SESSION_HEADER, *OF_BODY)
)
TIMES = frozenset((TTL, *DEADLINES))

MAX_WORKLOAD_ID_BYTES = 128
_SHORT_CONTEXT = 512  # maximum characters of a workload context that is cached
DEFAULT_CRITICALITY = 3
ANONYMOUS = Workload("", DEFAULT_CRITICALITY)
_MIN_TTL_S = 0.001
_MOST_HINTED = 4096  # maximum entries of a subset hint that are read, at about 2 µs each

_GRPC_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")  # TimeoutValue and TimeoutUnit of the gRPC protocol
_GRPC_UNIT_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_WHOLE_MS = re.compile(r"[0-9]{1,15}")
_MS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")


def read_subset(hint: object) -> tuple[str, ...]:
    """The endpoints (`ip:port`, canonical) of a subset hint. `hint` is a list or a comma-separated string.

    Entries that are not addresses, or beyond the first `_MOST_HINTED`, are ignored; a hint of any other type
    gives no endpoints.
    """
    if isinstance(hint, str):
        hint = hint.split(",", _MOST_HINTED)
    entries = hint[:_MOST_HINTED] if isinstance(hint, list | tuple) else ()
    found: list[str] = []
    for entry in entries:
        with suppress(ValueError):
            found.append(_canonical(str(entry).strip()))
    return tuple(found)


# Cached, since each request's subset hint repeats the same endpoints, possibly hundreds.
_canonical = lru_cache(maxsize=10_000)(endpoint_address)


def selected_endpoints(endpoints: SnapshotCell, choice: bytes) -> tuple[str, ...]:
    """The endpoints that the conformance suite's header `choice` names, each as `ip:port` or as an `ip`."""
    parts = [part.strip() for part in choice.decode(errors="replace").split(",")]
    by_host: dict[str, list[str]] = {}
    for address in (each.address for each in endpoints.current.decoders):
        by_host.setdefault(address.rpartition(":")[0].strip("[]"), []).append(address)
    found = [address for part in parts for address in by_host.get(part.strip("[]"), ())]
    return tuple(dict.fromkeys((*found, *read_subset(parts))))


def wanted_headers(settings: Settings) -> frozenset[str]:
    """The lower-case names of the headers that the picker reads under `settings`."""
    traces = {TRACE} if settings.tracing.enabled else frozenset()
    tests = {TEST_SELECTION} if settings.extproc.conformance else frozenset()
    keys = {key for key in settings.scheduling.session_keys if key in SESSION_HEADERS}
    tenants = frozenset() if settings.tenants is None else frozenset(settings.tenants.headers or ())
    return HEADERS | allowlist.trusted(settings.extproc.trusted_headers) | keys | tenants | traces | tests


def ttl_of(headers: Mapping[str, bytes], most_s: float) -> tuple[float, bool]:
    """How many seconds a request may wait, at most `most_s`, and whether a deadline of the client sets that.

    Raises:
        BadRequest: a header is malformed; the message names it.
    """
    text = text_of(headers, TTL)
    ttl_s = min(max(_duration_s(TTL, text), _MIN_TTL_S), most_s) if text else most_s
    deadline_s = _deadline_s(headers)
    return (deadline_s, True) if deadline_s <= ttl_s else (ttl_s, False)


def _deadline_s(headers: Mapping[str, bytes]) -> float:
    """The seconds until the client's earliest deadline; infinite if the client sets no deadline.

    `x-request-timeout` is in seconds or a duration such as `500ms`; `grpc-timeout` has gRPC's format; the
    route timeout is in milliseconds, and 0 means no timeout.
    """
    deadline_s = math.inf
    if text := text_of(headers, REQUEST_TIMEOUT):
        deadline_s = _duration_s(REQUEST_TIMEOUT, text)
    if text := text_of(headers, GRPC_TIMEOUT):
        match = _GRPC_TIMEOUT.fullmatch(text)
        if match is None:
            raise BadRequest(
                f"header {GRPC_TIMEOUT}: {text[:40]!r} is no gRPC timeout: write 500m, 30S or 5M"
            )
        deadline_s = min(deadline_s, int(match[1]) * _GRPC_UNIT_S[match[2]])
    if text := text_of(headers, ROUTE_TIMEOUT):
        if not _WHOLE_MS.fullmatch(text):
            raise BadRequest(f"header {ROUTE_TIMEOUT}: {text[:40]!r} is no number of milliseconds")
        deadline_s = min(deadline_s, int(text) / 1000 or math.inf)
    return max(deadline_s, _MIN_TTL_S)


def latency_of(headers: Mapping[str, bytes], configured: LatencyObjective) -> LatencyObjective:
    """The request's latency objective: each time comes from its header, or else from `configured`.

    Raises:
        BadRequest: a header is malformed; the message names it.
    """
    times = [_ms(headers, name) or time_s for name, time_s in zip(SLO, configured, strict=True)]
    return LatencyObjective(*times)


def _ms(headers: Mapping[str, bytes], name: str) -> float:
    """The milliseconds in the header `name` as seconds; 0 without the header."""
    text = text_of(headers, name)
    if not text:
        return 0.0
    if not _MS.fullmatch(text) or not float(text):
        wanted = "number of milliseconds above 0 and below 10^9: write 12.5"
        raise BadRequest(f"header {name}: {text[:40]!r} is no {wanted}")
    return float(text) / 1000


def _duration_s(name: str, text: str) -> float:
    try:
        seconds = duration_s(text)
    except ValueError as fault:
        raise BadRequest(f"header {name}: {fault}") from None
    if seconds <= 0:
        raise BadRequest(f"header {name}: the duration must be above zero")
    return seconds


def workload_of(headers: Mapping[str, bytes]) -> Workload:
    """The workload that the headers name; an anonymous workload without the workload-context header.

    Raises:
        BadRequest: the workload context is not valid UTF-8.
    """
    context = text_of(headers, WORKLOAD)
    if not context:
        return ANONYMOUS
    return _short_context(context) if len(context) <= _SHORT_CONTEXT else _workload(context)


def _workload(text: str) -> Workload:
    """The workload in the header value `text`; an anonymous workload if `text` is malformed."""
    try:
        context = orjson.loads(text)
    except orjson.JSONDecodeError:
        return ANONYMOUS
    if not isinstance(context, dict):
        return ANONYMOUS
    number = finite_number(context.get("criticality"))
    criticality = DEFAULT_CRITICALITY if number is None else int(min(max(number, 1), 5))
    name = context.get("workload_id")
    stripped = name.strip() if isinstance(name, str) else ""
    if not stripped or len(stripped.encode()) > MAX_WORKLOAD_ID_BYTES or has_control(stripped):
        return Workload("", criticality)
    return Workload(stripped, criticality)


_short_context = lru_cache(maxsize=4096)(_workload)  # requests of one workload send the same context


def text_of(headers: Mapping[str, bytes], *names: str) -> str:
    """The value of the first non-empty header among `names`; '' if all these headers are empty."""
    for name in names:
        raw = headers.get(name)
        if raw:
            try:
                return raw.decode()
            except UnicodeDecodeError:
                raise BadRequest(f"header {name} is not valid UTF-8") from None
    return ""
