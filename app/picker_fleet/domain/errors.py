"""All errors that this project defines, with HTTP status, metric label and dropped reason.

    PickerError
    ├── ConfigError              an unusable configuration
    ├── StartupError             a part that cannot start
    ├── MissingExtra             a command needs an optional package that is not installed
    └── RequestError             a request that the picker answers itself
        ├── BadRequest           400: malformed body or headers
        ├── BodyStalled          408: the body did not arrive in time
        ├── UnknownPath          404: the path is not allowed
        ├── UnknownPool          404: the proxy names a pool that is not served here
        ├── TooManyReads         429: too many requests that need no admission
        ├── TooSlow              429: no endpoint can keep the request's latency objective
        ├── OverLimit            429: a tenant of the request is over its limit
        │   └── OverBurst        429: the request needs more at once than a tenant's limit ever allows
        ├── PayloadTooLarge      413
        ├── UnsupportedEncoding  415: the body cannot be decoded
        ├── Unsupported          500: Envoy is configured in a way the picker cannot serve
        ├── BufferFull           503: the replica's memory for bodies is used up
        ├── NoEndpoints          503: no endpoint can take the request
        ├── ClientGone           499: the client has left
        ├── RequestIdTaken       409: another request has this id; the picker assigns a new one
        ├── DeadlineExceeded     504: the client's own deadline passed
        ├── ShuttingDown         503: the replica drains
        ├── StateFault           a call to the shared state failed
        │   ├── StateUnavailable 503: Redis cannot be reached
        │   ├── WritesRefused    503: Redis answers, but refuses writes for now
        │   ├── OtherFormat      503: an incompatible version has written the state
        │   └── ScriptFailed     500: the script failed for this request only
        └── Dropped              503, or 429 by configuration: refused for overload
            ├── Saturated
            ├── TotalCapacity, BandCapacity, BandBytes
            ├── TooManyFlows
            ├── InsufficientFlowCapacity
            ├── ExpiredTtl
            ├── Preempted
            └── Evicted

docs/errors.md lists statuses and reasons; spec 003 defines the queue's errors.
"""

from typing import ClassVar, Final

import msgspec

_INVALID, _OVERLOADED = "invalid_request_error", "overloaded_error"  # kinds

MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # msgspec's errors for bad JSON


class PickerError(Exception):
    """Base of all errors that this project defines."""


class ConfigError(PickerError):
    """An unusable configuration; the message has one line for each fault."""


class StartupError(PickerError):
    """A part that did not start; the message names the part and the reason."""


class MissingExtra(PickerError):
    """A command needs a package that an extra installs; the message names package and extra."""


class RequestError(PickerError):
    """Ends one request with an answer from the picker.

    `code` is the OpenAI-style error code and the metric label; `reason` is the value of
    `x-llm-d-request-dropped-reason`, None without one. `is_overload`: the setting `overload_status` replaces
    the status; `by_queue`: the client gets `x-queue-pressure` 1.00.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    kind: ClassVar[str] = "api_error"
    reason: ClassVar[str | None] = None
    is_overload: ClassVar[bool] = False
    by_queue: ClassVar[bool] = False

    def __init_subclass__(cls, **attributes: int | str) -> None:
        """Set the attributes `code`, `reason` and so on from the keywords of the class statement."""
        for name, value in attributes.items():
            setattr(cls, name, value)

    def __init__(self, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BadRequest(RequestError, status=400, code="bad_request", kind=_INVALID):
    pass


class BodyStalled(RequestError, status=408, code="body_stalled", kind=_INVALID):
    pass


class UnknownPath(RequestError, status=404, code="unknown_path", kind=_INVALID):
    pass


class UnknownPool(RequestError, status=404, code="unknown_pool", kind=_INVALID):
    """The proxy names a pool that is not served: the proxy's configuration is wrong, not the request."""


class TooManyReads(RequestError, status=429, code="too_many_reads", kind="rate_limit_error"):
    """Too many reads, which need no admission, but whose rate is limited (`extproc.read_rate`)."""


class TooSlow(
    RequestError, status=429, code="too_slow", kind=_OVERLOADED, reason="rejected-latency-objective"
):
    """A sheddable request whose latency objective every endpoint is predicted to miss."""


class OverLimit(RequestError, status=429, code="over_limit", kind="rate_limit_error", reason="over-limit"):
    """A limit or budget of a tenant on the request's path is used up, and the request may not wait, or has
    waited for its TTL. `quota`: the balances that the answer shows, as in `Placement`."""

    def __init__(self, message: str, *, retry_after_s: int | None = None, quota: str = "") -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.quota = quota


class OverBurst(OverLimit, code="over_burst", reason="over-burst"):
    """The request's estimate is above the burst of a tenant's limit, so no retry can succeed."""


class PayloadTooLarge(RequestError, status=413, code="payload_too_large", kind=_INVALID):
    pass


class UnsupportedEncoding(RequestError, status=415, code="unsupported_encoding", kind=_INVALID):
    pass


class Unsupported(RequestError, status=500, code="unsupported_processing_mode"):
    pass


class BufferFull(
    RequestError, status=503, code="buffer_full", kind=_OVERLOADED, reason="rejected-buffer-full"
):
    pass


class NoEndpoints(
    RequestError, status=503, code="no_endpoints", kind=_OVERLOADED, reason="rejected-no-endpoints"
):
    pass


class ClientGone(RequestError, status=499, code="client_gone", reason="rejected-context-cancelled"):
    pass


class RequestIdTaken(RequestError, status=409, code="request_id_taken", kind=_INVALID):
    """Another request has this id. The refused client gets no access to that request."""

    def __init__(self, message: str = "another request has this id") -> None:
        super().__init__(message)


class DeadlineExceeded(
    RequestError, status=504, code="deadline_exceeded", reason="rejected-context-cancelled"
):
    """The request waited past the client's own deadline (its headers: ingress/headers.py)."""


class StateFault(RequestError):
    """A call to the shared state failed. state/error_replies.py classifies Redis's error replies."""


class StateUnavailable(StateFault, status=503, code="state_unavailable", kind=_OVERLOADED):
    """Redis did not answer in time, or fails every call: the replica continues without Redis (G8)."""


class WritesRefused(StateFault, status=503, code="writes_refused", kind=_OVERLOADED):
    """Redis is out of memory, or cannot write to disk. The ends of requests are still recorded in Redis."""


class OtherFormat(StateFault, status=503, code="other_format", kind=_OVERLOADED):
    """The pool in Redis has a wrong format, or none: replicas neither read nor change the pool."""


class ScriptFailed(StateFault, status=500, code="script_failed"):
    """Redis answered this request's script call with an error; no other request is affected."""


class ShuttingDown(
    RequestError, status=503, kind=_OVERLOADED, code="shutting_down", reason="rejected-shutting-down"
):
    """The replica drains, or stopped before it granted the request; another replica accepts a retry."""

    def __init__(self, message: str = "this replica is shutting down; try again") -> None:
        super().__init__(message)


class Dropped(
    RequestError, status=503, kind=_OVERLOADED, reason="rejected-saturated", is_overload=True, by_queue=True
):
    """The request was refused because of overload."""


class Saturated(Dropped, code="saturated"):
    """Requests in flight are at their bound, and this band may not wait (overload: reject-noncritical)."""


class TotalCapacity(Dropped, code="total_capacity"):
    """The queue's total capacity is used up (docs/fairness.md, "Capacity and preemption")."""


class BandCapacity(Dropped, code="band_capacity"):
    """The band's capacity in waiting requests is used up."""


class BandBytes(Dropped, code="band_bytes"):
    """With this request's body, the band would exceed its limit on the bytes of waiting bodies."""


class TooManyFlows(Dropped, code="too_many_flows", by_queue=False):
    """The flow is new, and its client address has started too many flows, or too many flows wait in total."""


class InsufficientFlowCapacity(Dropped, code="insufficient_flow_capacity"):
    """ErrInsufficientFlowCapacity: this flow's capacity in the queue is used up."""


class ExpiredTtl(Dropped, code="expired_ttl", reason="rejected-ttl-expired"):
    """ErrExpiredTTL: the request waited past its TTL."""


class Preempted(Dropped, code="preempted", reason="evicted-queue-pressure"):
    """The request waited, and was removed to make room for a request of a higher band."""


class Evicted(Dropped, code="evicted", reason="evicted-queue-pressure"):
    """The request waited, and an operator removed it from the queue."""
