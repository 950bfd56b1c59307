"""Every fault the fleet names, each with its HTTP status, metric label and dropped-reason.

    PickerError
    ├── ConfigError              a configuration that cannot be used
    ├── StartupError             a part that would not start
    ├── MissingExtra             a command needs an optional package that is not installed
    └── RequestError             a request that gets an answer from the picker itself
        ├── BadRequest           400: malformed body or headers
        ├── UnknownPath          404: no path of a model server
        ├── TooManyReads         429: too many lists of models requested
        ├── PayloadTooLarge      413
        ├── Unsupported          500: Envoy is configured in a way the picker cannot serve
        ├── BufferFull           503: the replica holds as many bytes of bodies as it may
        ├── NoEndpoints          503: nothing to pick from
        ├── ClientGone           499: the client has left
        ├── DeadlineExceeded     504: the client's own deadline passed
        ├── StateFault           the shared state did not do what it was asked
        │   ├── StateUnavailable 503: it cannot be reached
        │   ├── WritesRefused    503: it answers, and takes no writes for now
        │   └── ScriptFailed     500: it answered this one request with an error
        └── Dropped              503, or 429 by configuration: overload
            ├── Saturated
            ├── TotalCapacity
            ├── TooManyFlows
            ├── InsufficientFlowCapacity
            ├── ExpiredTtl
            ├── Preempted
            ├── Evicted
            └── ShuttingDown

Statuses and reasons are those of docs/errors.md; the queue's errors are those of spec 003.
"""

from typing import ClassVar


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

    def __init__(self, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BadRequest(RequestError):
    status = 400
    code = "bad_request"
    kind = "invalid_request_error"


class BodyStalled(RequestError):
    status = 408
    code = "body_stalled"
    kind = "invalid_request_error"


class UnknownPath(RequestError):
    status = 404
    code = "unknown_path"
    kind = "invalid_request_error"


class TooManyReads(RequestError):
    """What needs no admission has a bound of its own (`extproc.read_rate`)."""

    status = 429
    code = "too_many_reads"
    kind = "rate_limit_error"


class PayloadTooLarge(RequestError):
    status = 413
    code = "payload_too_large"
    kind = "invalid_request_error"


class Unsupported(RequestError):
    status = 500
    code = "unsupported_processing_mode"


class BufferFull(RequestError):
    status = 503
    code = "buffer_full"
    kind = "overloaded_error"
    reason = "rejected-buffer-full"


class NoEndpoints(RequestError):
    status = 503
    code = "no_endpoints"
    kind = "overloaded_error"
    reason = "rejected-no-endpoints"


class ClientGone(RequestError):
    status = 499
    code = "client_gone"
    reason = "rejected-context-cancelled"


class DeadlineExceeded(RequestError):
    """Waited past the client's own deadline (intake.py has the headers)."""

    status = 504
    code = "deadline_exceeded"
    reason = "rejected-context-cancelled"


class StateFault(RequestError):
    """The shared state did not do what it was asked. Errors of Redis: state/error_replies.py."""


class StateUnavailable(StateFault):
    """No answer in time, or one that everyone gets: the replica goes on without it (G8)."""

    status = 503
    code = "state_unavailable"
    kind = "overloaded_error"


class WritesRefused(StateFault):
    """Redis is out of memory, or cannot write its file. Ends of requests are still taken."""

    status = 503
    code = "writes_refused"
    kind = "overloaded_error"


class ScriptFailed(StateFault):
    """Redis answered what this one request asked with an error; no other request is affected."""

    status = 500
    code = "script_failed"


class Dropped(RequestError):
    """Refused for overload: `overload_status` of the configuration replaces 503."""

    status = 503
    kind = "overloaded_error"
    reason = "rejected-saturated"


class Saturated(Dropped):
    """No room below the bounds, and this band may not wait (overload policy reject-noncritical)."""

    code = "saturated"


class TotalCapacity(Dropped):
    """The queue's total capacity is in use (docs/fairness.md, "Capacity and preemption")."""

    code = "total_capacity"


class TooManyFlows(Dropped):
    """Its flow is new, and its source has begun as many as it may, or as many wait as may in all."""

    code = "too_many_flows"


class InsufficientFlowCapacity(Dropped):
    """ErrInsufficientFlowCapacity: this flow's part of the queue is in use."""

    code = "insufficient_flow_capacity"


class ExpiredTtl(Dropped):
    """ErrExpiredTTL: waited past its time to live."""

    code = "expired_ttl"
    reason = "rejected-ttl-expired"


class Preempted(Dropped):
    """Waited, and had to make room for a higher band."""

    code = "preempted"
    reason = "evicted-queue-pressure"


class Evicted(Dropped):
    """Waited, and an operator took it out of the queue."""

    code = "evicted"
    reason = "evicted-queue-pressure"


class ShuttingDown(Dropped):
    code = "shutting_down"
    reason = "rejected-shutting-down"
