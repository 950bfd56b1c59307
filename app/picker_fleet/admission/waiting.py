"""What a verdict of the shared queue means to the client whose request it ends."""

import asyncio
from dataclasses import dataclass

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
from picker_fleet.state.store import Decision

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


def refusal(verdict: Decision, request: InferenceRequest, retry_after_s: int) -> RequestError | None:
    """The error that `verdict` of `request` amounts to; None if it ends nothing.

    A refusal brings its own Retry-After; `retry_after_s` is for what ends after it has waited.
    """
    if verdict.status == "refused":
        reason, _, seconds = verdict.detail.partition(" ")
        error, message = _REFUSALS[reason]
        return error(message, retry_after_s=int(seconds))
    if verdict.status == "expired":
        return time_up(request, retry_after_s)
    if verdict.status == "preempted":
        return Preempted("taken out of the queue to make room", retry_after_s=retry_after_s)
    if verdict.status == "evicted":
        return Evicted("an operator took it out of the queue", retry_after_s=retry_after_s)
    return None


@dataclass(slots=True)
class Wait:
    """A request's time in the queue: one wait, however often it crosses between the shared and the local one.

    It is counted once, when the outcome of its request is known (`epp_queue_latency_seconds`).
    """

    arrived_s: float  # event-loop time
    queued: bool = False


@dataclass(slots=True)
class Waiter:
    """A request between its admission and its placement. `news` brings what happens to it meanwhile.

    `asking` says that its admission is asked for; `placing` that its placement is: it has been granted, and
    need not be told of again. `given_up` says that its task was cancelled because the shared state is away,
    or, where it is also `expired`, has not answered in its time.
    """

    request: InferenceRequest
    attempt: int
    arrived: float  # event-loop time
    news: asyncio.Future[Decision]
    task: asyncio.Task[object]
    asking: bool = True
    placing: bool = False
    given_up: bool = False
    expired: bool = False


def tell(news: asyncio.Future[Decision], verdict: Decision) -> bool:
    """Bring news, unless some has come already: False then."""
    if news.done():
        return False
    news.set_result(verdict)
    return True
