"""What a verdict of the shared queue means to the client whose request it ends."""

from picker_fleet.errors import (
    DeadlineExceeded,
    Evicted,
    ExpiredTtl,
    InsufficientFlowCapacity,
    NoEndpoints,
    Preempted,
    RequestError,
    Saturated,
    TooManyFlows,
    TotalCapacity,
)
from picker_fleet.request import InferenceRequest
from picker_fleet.state.store import Verdict

_REFUSALS: dict[str, tuple[type[RequestError], str]] = {
    "no-endpoints": (NoEndpoints, "no endpoint is ready that may serve this request"),
    "saturated": (Saturated, "the fleet is saturated, and this request may not wait"),
    "insufficient-flow-capacity": (InsufficientFlowCapacity, "this flow's part of the queue is full"),
    "too-many-flows": (TooManyFlows, "too many other flows wait"),
    "total-capacity": (TotalCapacity, "the queue is full"),
}


def time_up(request: InferenceRequest, retry_after_s: int) -> RequestError:
    """The error of a request that has waited for all of its time: its client's (504) or the queue's (503)."""
    if request.by_client:
        return DeadlineExceeded(f"the client's deadline of {request.ttl_s:g} s passed in the queue")
    return ExpiredTtl(f"waited longer than {request.ttl_s:g} s", retry_after_s=retry_after_s)


def refusal(verdict: Verdict, request: InferenceRequest, retry_after_s: int) -> RequestError | None:
    """The error that `verdict` of `request` amounts to; None if it ends nothing.

    A refusal brings its own Retry-After; `retry_after_s` is for what ends after it has waited.
    """
    if verdict.what == "refused":
        reason, _, seconds = verdict.detail.partition(" ")
        error, message = _REFUSALS[reason]
        return error(message, retry_after_s=int(seconds))
    if verdict.what == "expired":
        return time_up(request, retry_after_s)
    if verdict.what == "preempted":
        return Preempted("taken out of the queue to make room", retry_after_s=retry_after_s)
    if verdict.what == "evicted":
        return Evicted("an operator took it out of the queue", retry_after_s=retry_after_s)
    return None
