"""A request's wait, in the shared or the local queue, and the errors with which it may end."""

import msgspec

from picker_fleet.domain.errors import (
    BandBytes,
    BandCapacity,
    DeadlineExceeded,
    Evicted,
    ExpiredTtl,
    InsufficientFlowCapacity,
    NoEndpoints,
    Preempted,
    RequestError,
    RequestIdTaken,
    Saturated,
    TooManyFlows,
    TotalCapacity,
)
from picker_fleet.domain.request import InferenceRequest
from picker_fleet.state.schema import Refusal
from picker_fleet.state.store import AnyVerdict, Placed, Queued, Refused, Verdict

# The queue's reason for a refusal -> the error and its message.
REFUSALS: dict[Refusal, tuple[type[RequestError], str]] = {
    Refusal.NO_ENDPOINTS: (NoEndpoints, "no endpoint is ready that may serve this request"),
    Refusal.SATURATED: (Saturated, "the fleet is saturated, and this request may not wait"),
    Refusal.INSUFFICIENT_FLOW_CAPACITY: (
        InsufficientFlowCapacity,
        "this flow has reached its capacity in the queue",
    ),
    Refusal.TOO_MANY_FLOWS: (TooManyFlows, "the queue has reached its maximum number of flows"),
    Refusal.BAND_CAPACITY: (BandCapacity, "the queue of this band is full"),
    Refusal.BAND_BYTES: (BandBytes, "the request bodies queued in this band have reached its byte limit"),
    Refusal.TOTAL_CAPACITY: (TotalCapacity, "the queue is full"),
}


class Wait(msgspec.Struct, eq=False):
    """A request's time in the queue. A request that moves between the shared and the local queue continues
    the same wait.

    The metric `epp_queue_latency_seconds` counts the wait once, when its outcome is known.
    """

    arrived_s: float  # event-loop time
    queued: bool = False


def time_up(request: InferenceRequest, retry_after_s: int) -> RequestError:
    """The error of a request that expired in the queue: 504 for the client's deadline, 503 for the TTL."""
    if request.by_client:
        return DeadlineExceeded(f"the client's deadline of {request.ttl_s:g} s passed in the queue")
    return ExpiredTtl(f"waited longer than {request.ttl_s:g} s", retry_after_s=retry_after_s)


def refusal(verdict: AnyVerdict, request: InferenceRequest, retry_after_s: int) -> RequestError | None:
    """The error with which `verdict` ends `request`; None if the request goes on.

    A refusal has its own Retry-After; `retry_after_s` is the Retry-After of requests that have waited.
    """
    match verdict:
        case Placed() | Queued() | Verdict.GRANTED | Verdict.GONE | Verdict.UNKNOWN_POOL:
            return None
        case Refused(reason, refused_s):
            error, message = REFUSALS[reason]
            return error(message, retry_after_s=refused_s)
        case Verdict.EXPIRED:
            return time_up(request, retry_after_s)
        case Verdict.PREEMPTED:
            return Preempted("preempted by a request of a higher band", retry_after_s=retry_after_s)
        case Verdict.FOREIGN:
            return RequestIdTaken()
        case Verdict.EVICTED:
            return Evicted("an operator took it out of the queue", retry_after_s=retry_after_s)
