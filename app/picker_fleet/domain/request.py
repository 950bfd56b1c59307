"""The domain types of the picker: requests, endpoints, outcomes. Uses no I/O, clock or randomness.

Types that each request instantiates are tuples: creating a frozen dataclass takes three times as long.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple

from picker_fleet.domain.bands import Band

KEY_MARK: Final = "="  # prefix of a client's own session key; session tokens never contain it
_NO_LABELS: Mapping[str, str] = MappingProxyType({})


class Workload(NamedTuple):
    """A request's client workload (spec 001). The `id` '' marks an anonymous workload: one request."""

    id: str
    criticality: int  # criticality from 1 (lowest) to 5 (highest)


class LatencyObjective(NamedTuple):
    """The longest time to the first token and time per output token of a request; inf: no objective."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf

    def __str__(self) -> str:
        times = zip(("TTFT", "TPOT"), self, strict=True)
        return ", ".join(f"{name} {time_s * 1000:g} ms" for name, time_s in times if time_s < math.inf)


ANY_LATENCY: Final = LatencyObjective()


class PromptLine(NamedTuple):
    """A prompt of a size (ingress/cost.py) has about `base` + `slope` · size tokens."""

    base: float
    slope: float

    def tokens(self, size: float) -> float:
        """The estimated tokens of a prompt of `size`: at least a third of `slope` · size."""
        text_tokens = self.slope * size
        tokens, least = self.base + text_tokens, text_tokens / 3
        return tokens if tokens > least else least


UNLEARNED: Final = PromptLine(0.0, 0.25)  # for a model without reported usage: a token for four letters


class InferenceRequest(NamedTuple):
    """One request, as admission and scheduling see it, in any mode.

    `id` is unique in the pool and safe in a Redis member; `cost` is in the stock's unit (unit `requests`: 1).
    `subset` lists the endpoints (`ip:port`) that may be picked, None for all endpoints of the pool.
    `selector` has the labels that an endpoint needs to be picked. `session` is the client's session token,
    unchecked, or KEY_MARK and a session key, '' for none. `prefix` has the hashes of the prompt's blocks,
    empty if no scorer reads them. `limit` bounds the flow's requests in flight on one endpoint (0: no bound).
    `learn` says that `cost` lacks the answer's tokens, so that the mean of the flow's answers is added.
    `prompt_size` is the size of the prompt's text (ingress/cost.py), 0 if the engine's usage counts more than
    this text. `trace` is the request's W3C traceparent, '' without one or without tracing. `by_client` says
    that `ttl_s` is the client's own deadline. `body_bytes` is the body's length, 0 if unknown. `digest`
    identifies the body; never show the digest: whoever knows it could pass for the request. `refers` are the
    ids of the response and conversation that the request continues, and `origin` is the endpoint that stores
    them, '' if unknown. `latency` is the objective of the client's header or of the configuration. Under the
    ordering `edf` the request is served as if its TTL ended `early_ms` sooner. `prompt_tokens` and
    `answer_tokens` are estimates for the quotas of tenants, 0 without tenants; with `learn`, `answer_tokens`
    is 0 and the answer's mean length is added, too. `can_split`: other endpoints may prefill the prompt and
    encode its media (images …). `media` is the most endpoints that may encode, 0 for none. `prompt_bytes` is
    `body_bytes` with media counted by their tokens; 0 if the media are few or unknown.
    """

    id: str
    model: str
    target_model: str
    stream: bool
    flow: str
    band: Band
    weight: float
    workload: Workload
    cost: float
    ttl_s: float
    subset: tuple[str, ...] | None
    limit: int = 0
    learn: bool = False
    session: str = ""
    prefix: tuple[bytes, ...] = ()
    selector: Mapping[str, str] = _NO_LABELS
    trace: str = ""
    by_client: bool = False
    body_bytes: int = 0
    digest: str = ""
    refers: tuple[str, ...] = ()
    prompt_size: int = 0
    origin: str = ""
    latency: LatencyObjective = ANY_LATENCY
    early_ms: int = 0
    prompt_tokens: float = 0.0
    answer_tokens: float = 0.0
    can_split: bool = False
    media: int = 0
    prompt_bytes: int = 0

    def repeats(self, other: "InferenceRequest") -> bool:
        """Whether this request is a retry of `other`, which has the same id."""
        return (self.flow, self.model, self.digest) == (other.flow, other.model, other.digest)


class Placement(NamedTuple):
    """The decision for a request: its `endpoints` (`ip:port`, best first), and its accounting token.
    `prefillers` are the endpoints that compute the prompt of a split request, best first; empty if it is
    whole. `prefill_s` is the predicted time (s) until that prompt is computed, None if unknown.

    Envoy returns the opaque `accounting_token` in the access log; this token suffices to account for the
    request after a loss of the shared state. `attempt` names the stream that may withdraw the placement, and
    has the body's digest. `session` is the token that the client is to send with its next request, '' for
    none. `waited_s` is the time in the queue, None if the request bypassed the queue. `quota` has the
    tenants' limits of which the least is left (ingress/quota_headers.py), '' without tenants.
    """

    endpoints: tuple[str, ...]
    accounting_token: str
    attempt: str = ""
    session: str = ""
    waited_s: float | None = None
    quota: str = ""
    prefillers: tuple[str, ...] = ()
    prefill_s: float | None = None


class Outcome(enum.StrEnum):
    """How a request ended; each value is also the value of a metric label."""

    COMPLETED = "completed"
    CLIENT_GONE = "client_gone"
    UPSTREAM_FAILED = "upstream_failed"


class Completion(NamedTuple):
    """The end of one request, from the end of its stream or from its final access-log entry.

    `duration_s` is the client's whole wait, time in the queue included; `service_s` is the endpoint's part of
    `duration_s`, None if unknown. `failed` is an endpoint to which Envoy's connection failed, '' if none is
    known. `accounting_token` is the token of the placement, '' if Envoy did not return the token. `waited_s`
    is the time in the queue, None if the request bypassed the queue; `target_model` is the model's variant,
    set if the request waited. `fault` and `hold_s` describe a bad answer of the serving endpoint, as in
    `Fault`. `passed_over` is an endpoint that failed an earlier attempt, '' if none is known. `ttft_s` is the
    time from the beginning of `service_s` to the first byte of the answer's body, None if unknown.
    `cached_tokens` are the prompt's tokens that the endpoint had in a cache. `path` is the request's path;
    `content_type` and `body_bytes` describe the answer's body. If not `is_read`, the endpoint has sent its
    answer, and another end follows when the client has read it: only that end is counted. `is_late`: the
    client read so slowly that an end with `is_read` False came before, maybe to another replica. `is_odd`:
    other endpoints give no answers like this one (`scheduling/answer_comparison.py`).
    """

    id: str
    outcome: Outcome
    status: int  # HTTP status; 0: the client got none
    served: str | None  # ip:port
    prompt_tokens: int | None
    completion_tokens: int | None
    duration_s: float | None
    first_byte_s: float | None
    failed: str = ""
    accounting_token: str = ""
    service_s: float | None = None
    waited_s: float | None = None
    target_model: str = ""
    fault: str = ""
    hold_s: float = 0.0
    passed_over: str = ""
    ttft_s: float | None = None
    cached_tokens: int | None = None
    path: str = ""
    content_type: str = ""
    body_bytes: int = 0
    is_read: bool = True
    is_late: bool = False
    is_odd: bool = False

    @property
    def answered(self) -> bool:
        """Whether the endpoint answered with success. An answer to a client's error is no success."""
        is_success = self.outcome is Outcome.COMPLETED and 200 <= self.status < 300
        return is_success and not self.fault and not self.is_odd


# Values of `Fault.why`; the function `fault_of` returns further values.
FULL: Final = "full"  # the endpoint takes no more requests for now
CONNECT: Final = "connect"  # the endpoint accepts no connection


class Fault(NamedTuple):
    """A failed attempt of a request on an endpoint. A `FULL` endpoint is full for `hold_s` (0: no time
    known). Without an accounting token the fault counts only while the request runs on that endpoint."""

    id: str
    endpoint: str
    why: str
    accounting_token: str
    hold_s: float = 0.0


class Alive(NamedTuple):
    """A lease renewal of a request in flight. `accounting_token`, '' if unknown, can restore a lost
    record. `is_prefilled`: the request is split, and its answer has begun. `answer_bytes`: bytes of the
    answer so far."""

    id: str
    served: str | None
    accounting_token: str
    is_prefilled: bool = False
    answer_bytes: int = 0


def largest_claim(share: float, bound: float) -> float:
    """The most stock that one request takes under `bound`: the part `share` of the bound, but at least 1
    unit,or the whole bound if the bound is below 1 unit. The Lua scripts compute the same amount."""
    return max(share * bound, min(1.0, bound))


_STREAM = "text/event-stream"
_REDIRECTS = range(300, 400)  # HTTP statuses that no working model server sends
_EMPTY_STREAM_BYTES = 16  # longest stream without an answer, for example only `data: [DONE]`
_LONGEST_HOLD_S = 60.0
ERROR_IN_200: Final = "error in 200"


def fault_of(status: int, body_bytes: int | None = None, error: bool = False, content_type: str = "") -> str:
    """Classify an endpoint's answer as a value of `Fault.why`; '' for success or a client's error.

    `error` says that the body reports an error other than a client error. `body_bytes` is the body's length,
    None if the body is known to contain an answer.
    """
    if status == 429:
        return FULL
    if status >= 500 or status in _REDIRECTS:
        return str(status)
    if error and status < 300:
        return ERROR_IN_200
    least = _EMPTY_STREAM_BYTES if content_type.startswith(_STREAM) else 0
    return "empty" if status == 200 and body_bytes is not None and body_bytes <= least else ""


def hold_of(retry_after: str) -> float:
    """Seconds of a `retry-after` header, at most a minute; 0 if it is empty or a date."""
    text = retry_after.strip()
    return min(float(text), _LONGEST_HOLD_S) if text.isascii() and text.isdecimal() else 0.0


def finite_number(value: object) -> float | None:
    """`value` as a finite float if `value` is a JSON number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


# Endpoint labels that override the configured location of the metrics page.
METRICS_PORT = "picker-fleet/metrics-port"
METRICS_PATH = "picker-fleet/metrics-path"
METRICS_SCHEME = "picker-fleet/metrics-scheme"
KV_EVENTS_PORT = "picker-fleet/kv-events-port"  # overrides `scheduling.kv_events_port`


class Ejection(NamedTuple):
    """Why an endpoint is ejected. After `until_ms` (Redis's clock) a probe decides whether it returns."""

    reason: str
    until_ms: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One model server. `address` is `ip:port`, IPv6 in brackets.

    `max_inflight` bounds the endpoint's requests in flight from the whole fleet; None: no bound. The endpoint
    gets no new requests while it is `draining` (by discovery), `drained` (by an operator), `down`
    (connections fail) or `ejected` (its answers fail). An endpoint that `decodes` generates answers; one that
    `prefills` computes prompts for other endpoints, and one that `encodes` encodes media for other endpoints.
    """

    address: str
    labels: dict[str, str] = field(default_factory=dict)
    draining: bool = False
    drained: bool = False
    down: bool = False
    max_inflight: int | None = None
    ejected: Ejection | None = None
    prefills: bool = False
    decodes: bool = True
    encodes: bool = False

    @property
    def ready(self) -> bool:
        return not (self.draining or self.drained or self.down or self.ejected)
