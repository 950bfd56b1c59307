"""What every gate shares: the interface that Envoy's side uses, a request's wait, the errors that end it."""

from dataclasses import dataclass
from typing import Protocol

import msgspec

from picker_fleet.errors import (
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
from picker_fleet.request import Alive, Completion, Fault, InferenceRequest, Placement
from picker_fleet.state.store import Decision

# By the reason that the queue gives: the error, and its message.
REFUSALS: dict[str, tuple[type[RequestError], str]] = {
    "no-endpoints": (NoEndpoints, "no endpoint is ready that may serve this request"),
    "saturated": (Saturated, "the fleet is saturated, and this request may not wait"),
    "insufficient-flow-capacity": (InsufficientFlowCapacity, "this flow's part of the queue is full"),
    "too-many-flows": (TooManyFlows, "too many other flows wait"),
    "band-capacity": (BandCapacity, "the queue of this band is full"),
    "band-bytes": (BandBytes, "the bodies that wait in this band have as many bytes as they may"),
    "total-capacity": (TotalCapacity, "the queue is full"),
}


class Gate(Protocol):
    """Admission and placement of requests, from one event loop."""

    async def admit(self, request: InferenceRequest, *, stream_owned: bool, age_s: float = 0.0) -> Placement:
        """Wait for the request's turn and its endpoints. Its place in the queue is that of one that arrived
        `age_s` ago.

        `stream_owned`: this replica has the request's stream until it ends (`standard`), so the gate renews
        its lease until `settle` or `withdraw`; otherwise access-log entries do. Cancelling the call withdraws
        the request.

        Raises:
            RequestError: it is refused, expired, preempted or evicted, or the shared state cannot be reached.
        """
        ...

    async def route(
        self, subset: tuple[str, ...] | None, *, origin: str = "", session: str = ""
    ) -> Placement:
        """Endpoints without admission, for a request that ends with its headers (GET). First comes `origin`,
        though it takes nothing new, or the endpoint of the `session`.

        Raises:
            NoEndpoints: none is ready, or none of the subset.
        """
        ...

    async def confirm(self, request_id: str, placement: Placement, age_s: float) -> bool:
        """Whether the request still has its placement, made `age_s` ago; then its lease starts again.

        For a request without an owned stream of which Envoy does not know yet, so that nobody renews its
        lease.

        Raises:
            StateUnavailable: it cannot be known.
        """
        ...

    def withdraw(self, request_id: str, placement: Placement) -> None:
        """Take back a placement that never reached Envoy. Returns at once."""
        ...

    def settle(self, completion: Completion) -> object:
        """Account for a request's end. Returns at once; the next batch carries it, ahead of what is admitted
        after it. Idempotent."""
        ...

    def suspect(self, request_id: str) -> None:
        """The request may have ended: an entry without an accounting token says so. Its endpoint's next
        metrics pages decide. Returns at once."""
        ...

    def fault(self, fault: Fault) -> None:
        """An attempt of a request has failed on an endpoint, or that is full. Returns at once; idempotent."""
        ...

    def renew(self, alive: Alive) -> None:
        """Renew a request's lease. Returns at once; the next batch carries it."""
        ...


class Wait(msgspec.Struct, eq=False):
    """A request's time in the queue: one wait, however often it moves between the shared and the local queue.

    It is counted once, when the outcome of its request is known (`epp_queue_latency_seconds`).
    """

    arrived_s: float  # event-loop time
    queued: bool = False


def time_up(request: InferenceRequest, retry_after_s: int) -> RequestError:
    """The error of a request whose time in the queue is up: the client's (504) or the queue's own (503)."""
    if request.by_client:
        return DeadlineExceeded(f"the client's deadline of {request.ttl_s:g} s passed in the queue")
    return ExpiredTtl(f"waited longer than {request.ttl_s:g} s", retry_after_s=retry_after_s)


def refusal(verdict: Decision, request: InferenceRequest, retry_after_s: int) -> RequestError | None:
    """The error with which `verdict` ends `request`; None if it does not.

    A refusal has its own Retry-After; `retry_after_s` is for requests that have waited.
    """
    if verdict.status == "refused":
        reason, _, seconds = verdict.detail.partition(" ")
        error, message = REFUSALS[reason]
        return error(message, retry_after_s=int(seconds))
    if verdict.status == "expired":
        return time_up(request, retry_after_s)
    if verdict.status == "preempted":
        return Preempted("taken out of the queue to make room", retry_after_s=retry_after_s)
    if verdict.status == "foreign":
        return RequestIdTaken()
    if verdict.status == "evicted":
        return Evicted("an operator took it out of the queue", retry_after_s=retry_after_s)
    return None


@dataclass(frozen=True, slots=True)
class OutageStatus:
    """An outage as the admin API shows it. Amounts are in the stock's unit.

    `mode` is the FailoverState; `bound` the fleet's, of which `share` is this replica's part. `in_flight`
    counts the requests placed here that were placed or seen alive within an access-log interval and a second,
    and whose end was not received here: another replica may have received it.
    """

    mode: str
    since_s: float
    bound: float
    share: float
    free: float
    let_go: int  # requests placed here
    in_flight: int
    queued: int
    queue_length: dict[str, int]  # by the name of the band
