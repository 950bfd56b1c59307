"""The domain: what a request and an endpoint are to the picker. Pure: no I/O, no clock, no randomness.

What each request makes, here and elsewhere, is a tuple: a frozen dataclass takes three times as long to make.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple

from picker_fleet.bands import Band

KEY_MARK: Final = "="  # begins a session that is a key of the client's own; no token has it
_NO_LABELS: Mapping[str, str] = MappingProxyType({})


class Workload(NamedTuple):
    """Who asks (spec 001). The `id` of an anonymous one is '': it stands for one request."""

    id: str
    criticality: int  # 1 (lowest) to 5


class InferenceRequest(NamedTuple):
    """One request as the gate sees it, whatever mode it came by.

    `id` is unique in the pool and safe in a Redis member; `cost` is in the stock's unit (requests: 1).
    `subset` is None for the whole pool, else the endpoints (`ip:port`) that may be picked.
    `selector` holds labels that an endpoint must have to be picked.
    `session` is the token of the client's last answer, unchecked, or KEY_MARK and a key, '' for none;
    `prefix` the hashes of the prompt's blocks, empty where nobody asks for them. `limit` is how many requests
    of the flow may be in flight on one endpoint (0: any number). `learn` says that `cost` lacks the answer's
    part, for which the flow's mean stands in. `trace` is the W3C traceparent that it came with, '' for none
    or where nobody asks for it. `by_client` says that `ttl_s` is a deadline of the client's own. `body_bytes`
    is the length of its body, 0 if unknown, and `digest` tells its body from others. It is never shown: who
    knows it could pass for the request. `refers` are ids of state that it goes on with (a response, a
    conversation), and `origin` is the endpoint that has the state, '' if that is not known.
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
    origin: str = ""

    def repeats(self, other: "InferenceRequest") -> bool:
        """Whether this is `other`, whose id it has, sent again."""
        return (self.flow, self.model, self.digest) == (other.flow, other.model, other.digest)


class Placement(NamedTuple):
    """Where a request goes: `endpoints`, best first (`ip:port`), and what the access log must return.

    `accounting_token` is opaque to Envoy; it has what is needed to account for the request after the shared
    state was lost. `attempt` says which stream may withdraw the placement, and has the body's digest.
    `session` goes to the client, who sends it back with its next request; '' for none. `waited_s` is the time
    in the queue, None if it bypassed it.
    """

    endpoints: tuple[str, ...]
    accounting_token: str
    attempt: str = ""
    session: str = ""
    waited_s: float | None = None


class Outcome(enum.StrEnum):
    """How a request ended; the metric label."""

    COMPLETED = "completed"
    CLIENT_GONE = "client_gone"
    UPSTREAM_FAILED = "upstream_failed"


class Completion(NamedTuple):
    """The end of one request, from the end of its stream or from its final access-log entry.

    `duration_s` is what the client waited, in the queue too; `service_s` the endpoint's part of it, None if
    unknown. `failed` is an endpoint that could not be connected to, '' if none is known. `accounting_token`
    is the placement's, '' if Envoy did not return it. `waited_s` is the time in the queue, None if the
    request bypassed it; `target_model` is the model it was sent as, set where it waited. `fault` says what
    is wrong with the answer of the endpoint that served, as in `Fault`; `hold_s` is as there. `passed_over`
    is an endpoint that failed an attempt before, '' if none is known.
    """

    id: str
    outcome: Outcome
    status: int  # 0: none was sent
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

    @property
    def answered(self) -> bool:
        """Whether the endpoint has answered well. A client's own fault says nothing of it."""
        return self.outcome is Outcome.COMPLETED and 200 <= self.status < 300 and not self.fault


# Why there is a fault, besides what describes a failed answer.
FULL: Final = "full"  # the endpoint takes no more requests for now
CONNECT: Final = "connect"  # it cannot be connected to


class Fault(NamedTuple):
    """An attempt of a request has failed on an endpoint; one that is `FULL` is so for `hold_s` (0: it did
    not say). Without an accounting token it counts only while the request runs there."""

    id: str
    endpoint: str
    why: str
    accounting_token: str
    hold_s: float = 0.0


class Alive(NamedTuple):
    """A sign of life of a request in flight. `accounting_token` rebuilds a lost record; '' if unknown."""

    id: str
    served: str | None
    accounting_token: str


def largest_claim(share: float, bound: float) -> float:
    """What one request takes of the stock at most under `bound`, as in the scripts: its `share`, but a whole
    request where the bound has room for one."""
    return max(share * bound, min(1.0, bound))


_STREAM = "text/event-stream"
_REDIRECTS = range(300, 400)  # no model server answers a request with one
_EMPTY_STREAM_BYTES = 16  # of a stream that has no answer: nothing, or `data: [DONE]` alone
_LONGEST_HOLD_S = 3600.0
ERROR_IN_200: Final = "error in 200"


def fault_of(status: int, body_bytes: int | None = None, error: bool = False, content_type: str = "") -> str:
    """What is wrong with an endpoint that answered so, as in `Fault`; '' if nothing is, or the client is.

    `error` says that the body tells of an error, and not of one of the client's. `body_bytes`: None if it is
    known to have an answer.
    """
    if status == 429:
        return FULL
    if status >= 500 or status in _REDIRECTS:
        return str(status)
    if error:
        return ERROR_IN_200
    least = _EMPTY_STREAM_BYTES if content_type.startswith(_STREAM) else 0
    return "empty" if status == 200 and body_bytes is not None and body_bytes <= least else ""


def hold_of(retry_after: str) -> float:
    """Seconds of a `retry-after` header; 0 if it has none (a date counts as none)."""
    text = retry_after.strip()
    return min(float(text), _LONGEST_HOLD_S) if text.isascii() and text.isdecimal() else 0.0


def finite_number(value: object) -> float | None:
    """`value` as a finite float if it is a JSON number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


# Labels of an endpoint that say where its metrics page is, if elsewhere than the configuration says.
METRICS_PORT = "picker-fleet/metrics-port"
METRICS_PATH = "picker-fleet/metrics-path"
METRICS_SCHEME = "picker-fleet/metrics-scheme"


class Ejection(NamedTuple):
    """Why an endpoint is ejected, and until when (Redis's clock); then a probe decides."""

    reason: str
    until_ms: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One model server. `address` is `ip:port`, IPv6 in brackets.

    `max_inflight` is how many requests of the whole fleet it may have at once, None for any number. It takes
    nothing new while it is `draining` (so discovery says), `drained` (by an operator), `down` (connections
    fail) or `ejected` (its answers fail).
    """

    address: str
    labels: dict[str, str] = field(default_factory=dict)
    draining: bool = False
    drained: bool = False
    down: bool = False
    max_inflight: int | None = None
    ejected: Ejection | None = None

    @property
    def ready(self) -> bool:
        return not (self.draining or self.drained or self.down or self.ejected)
