"""Every fault the fleet names, each with its HTTP status, metric label and dropped-reason.

    PickerError
    ├── ConfigError              a configuration that cannot be used
    ├── StartupError             a part that would not start
    ├── MissingExtra             a command needs an optional package that is not installed
    └── RequestError             a request that gets an answer from the picker itself
        ├── BadRequest           400: malformed body or headers
        ├── UnknownPath          404: no path of a model server
        ├── UnknownPool          404: the proxy names a pool that is not served here
        ├── TooManyReads         429: too many lists of models requested
        ├── PayloadTooLarge      413
        ├── UnsupportedEncoding  415: a body in an encoding that cannot be read
        ├── Unsupported          500: Envoy is configured in a way the picker cannot serve
        ├── BufferFull           503: the replica holds as many bytes of bodies as it may
        ├── NoEndpoints          503: nothing to pick from
        ├── ClientGone           499: the client has left
        ├── RequestIdTaken       409: another request has its id; it is given a new one
        ├── DeadlineExceeded     504: the client's own deadline passed
        ├── ShuttingDown         503: the replica drains
        ├── StateFault           the shared state did not do what it was asked
        │   ├── StateUnavailable 503: it cannot be reached
        │   ├── WritesRefused    503: it answers, and takes no writes for now
        │   ├── OtherFormat      503: a version that shares no state with this one has written it
        │   └── ScriptFailed     500: it answered this one request with an error
        └── Dropped              503, or 429 by configuration: overload
            ├── Saturated
            ├── TotalCapacity
            ├── TooManyFlows
            ├── InsufficientFlowCapacity
            ├── ExpiredTtl
            ├── Preempted
            └── Evicted

Statuses and reasons are those of docs/errors.md; the queue's errors are those of spec 003.
"""

from typing import ClassVar

_INVALID, _OVERLOADED = "invalid_request_error", "overloaded_error"  # kinds


class PickerError(Exception):
    """Base of everything raised on purpose."""


class ConfigError(PickerError):
    """A configuration that cannot be used; the message has one line a fault."""


class StartupError(PickerError):
    """A part that did not start; the message says which and why."""


class MissingExtra(PickerError):
    """A command needs a package that only an extra installs; the message names both."""


class RequestError(PickerError):
    """Ends one request with an answer from the picker.

    `code` is the OpenAI-style error code and the metric label; `reason` the value of
    `x-llm-d-request-dropped-reason`, or None where the protocol has none.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    kind: ClassVar[str] = "api_error"
    reason: ClassVar[str | None] = None

    def __init_subclass__(cls, **attributes: int | str) -> None:
        """`attributes` are any of the four above, stated in the head of a class."""
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
    """The proxy's configuration, not the client, names it."""


class TooManyReads(RequestError, status=429, code="too_many_reads", kind="rate_limit_error"):
    """What needs no admission has a bound of its own (`extproc.read_rate`)."""


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
    """Another request has this id, which opens nothing of that one."""

    def __init__(self, message: str = "another request has this id") -> None:
        super().__init__(message)


class DeadlineExceeded(
    RequestError, status=504, code="deadline_exceeded", reason="rejected-context-cancelled"
):
    """Waited past the client's own deadline (intake.py has the headers)."""


class StateFault(RequestError):
    """The shared state did not do what it was asked. Errors of Redis: state/error_replies.py."""


class StateUnavailable(StateFault, status=503, code="state_unavailable", kind=_OVERLOADED):
    """No answer in time, or one that everyone gets: the replica goes on without it (G8)."""


class WritesRefused(StateFault, status=503, code="writes_refused", kind=_OVERLOADED):
    """Redis is out of memory, or cannot write its file. Ends of requests are still taken."""


class OtherFormat(StateFault, status=503, code="other_format", kind=_OVERLOADED):
    """The pool in Redis has another format, or none. Nothing in it is read or changed."""


class ScriptFailed(StateFault, status=500, code="script_failed"):
    """Redis answered what this one request asked with an error; no other request is affected."""


class ShuttingDown(
    RequestError, status=503, kind=_OVERLOADED, code="shutting_down", reason="rejected-shutting-down"
):
    """The replica drains, or has stopped before the request's turn came; another replica takes a retry."""


class Dropped(RequestError, status=503, kind=_OVERLOADED, reason="rejected-saturated"):
    """Refused for overload: `overload_status` of the configuration replaces 503."""


class Saturated(Dropped, code="saturated"):
    """No room below the bounds, and this band may not wait (overload policy reject-noncritical)."""


class TotalCapacity(Dropped, code="total_capacity"):
    """The queue's total capacity is in use (docs/fairness.md, "Capacity and preemption")."""


class BandCapacity(Dropped, code="band_capacity"):
    """As many requests wait in its band as its capacity allows."""


class BandBytes(Dropped, code="band_bytes"):
    """With its body more bytes would wait in its band than may."""


class TooManyFlows(Dropped, code="too_many_flows"):
    """Its flow is new, and its address has begun too many flows, or too many flows wait in all."""


class InsufficientFlowCapacity(Dropped, code="insufficient_flow_capacity"):
    """ErrInsufficientFlowCapacity: this flow's capacity in the queue is in use."""


class ExpiredTtl(Dropped, code="expired_ttl", reason="rejected-ttl-expired"):
    """ErrExpiredTTL: waited past its time to live."""


class Preempted(Dropped, code="preempted", reason="evicted-queue-pressure"):
    """Waited, and had to make room for a higher band."""


class Evicted(Dropped, code="evicted", reason="evicted-queue-pressure"):
    """Waited, and an operator took it out of the queue."""
