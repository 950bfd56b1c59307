"""What a verdict of the shared queue means to the client whose request it ends."""

from app.errors import (
    Evicted,
    ExpiredTtl,
    InsufficientFlowCapacity,
    NoEndpoints,
    Preempted,
    RequestError,
    Saturated,
    TotalCapacity,
)
from app.state.store import Verdict

_REFUSALS: dict[str, tuple[type[RequestError], str]] = {
    "no-endpoints": (NoEndpoints, "no endpoint is ready that may serve this request"),
    "saturated": (Saturated, "the fleet is saturated, and only critical requests may wait"),
    "insufficient-flow-capacity": (InsufficientFlowCapacity, "this flow's part of the queue is full"),
    "total-capacity": (TotalCapacity, "the queue is full"),
}


def refusal(verdict: Verdict, *, ttl_s: float, retry_after_s: int) -> RequestError | None:
    """The error that `verdict` amounts to; None if it ends nothing.

    A refusal brings its own Retry-After; `retry_after_s` is for what ends after it has waited.
    """
    if verdict.what == "refused":
        reason, _, seconds = verdict.detail.partition(" ")
        error, message = _REFUSALS[reason]
        return error(message, retry_after_s=int(seconds))
    if verdict.what == "expired":
        return ExpiredTtl(f"waited longer than {ttl_s:g} s", retry_after_s=retry_after_s)
    if verdict.what == "preempted":
        return Preempted("taken out of the queue to make room", retry_after_s=retry_after_s)
    if verdict.what == "evicted":
        return Evicted("an operator took it out of the queue", retry_after_s=retry_after_s)
    return None
