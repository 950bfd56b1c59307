"""The interface of a gate, as the ext_proc and HTTP servers use it, and shared parts: waits, refusals."""

from dataclasses import dataclass
from typing import Protocol

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
from picker_fleet.domain.request import Alive, Completion, Fault, InferenceRequest, Placement
from picker_fleet.state.schema import Refusal
from picker_fleet.state.store import AnyVerdict, Placed, Queued, Refused, Verdict

# The queue's reason for a refusal -> the error and its message.
REFUSALS: dict[Refusal, tuple[type[RequestError], str]] = {
    Refusal.NO_ENDPOINTS: (NoEndpoints, "no endpoint is ready that may serve this request"),
    Refusal.SATURATED: (Saturated, "the fleet is saturated, and this request may not wait"),
    Refusal.INSUFFICIENT_FLOW_CAPACITY: (
        InsufficientFlowCapacity,
        "this flow's part of the queue is full",
    ),
    Refusal.TOO_MANY_FLOWS: (TooManyFlows, "too many other flows wait"),
    Refusal.BAND_CAPACITY: (BandCapacity, "the queue of this band is full"),
    Refusal.BAND_BYTES: (BandBytes, "the bodies that wait in this band have as many bytes as they may"),
    Refusal.TOTAL_CAPACITY: (TotalCapacity, "the queue is full"),
}


class Gate(Protocol):
    """Admits and places requests. Uses one event loop."""

    async def admit(self, request: InferenceRequest, *, stream_owned: bool, age_s: float = 0.0) -> Placement:
        """Wait for the request's turn and its endpoints. The request is queued as if it had arrived `age_s`
        ago.

        `stream_owned`: this replica has the request's stream until the request ends (`standard`), so the gate
        renews the lease until `settle` or `withdraw`; otherwise access-log entries renew it. Cancelling the
        call withdraws the request.

        Raises:
            RequestError: the request is refused, expired, preempted or evicted, or Redis is unreachable.
        """
        ...

    async def route(
        self, subset: tuple[str, ...] | None, *, origin: str = "", session: str = ""
    ) -> Placement:
        """Choose endpoints without admission, for a request that ends with its headers (GET). The first is
        `origin`, even if it takes no new requests, or else the endpoint of the `session`.

        Raises:
            NoEndpoints: no endpoint is ready, or none of the subset.
        """
        ...

    async def confirm(self, request_id: str, placement: Placement, age_s: float) -> bool:
        """Whether the request still has its placement, made `age_s` ago; if so, restart its lease.

        For a request without an owned stream whose placement Envoy does not have yet: no access-log entry
        renews its lease.

        Raises:
            StateUnavailable: Redis does not answer.
        """
        ...

    def withdraw(self, request_id: str, placement: Placement) -> None:
        """Undo a placement that never reached Envoy. Returns at once."""
        ...

    def settle(self, completion: Completion) -> object:
        """Account for a request's end. Returns at once; the next batch carries the end, ahead of later
        admissions. Idempotent."""
        ...

    def suspect(self, request_id: str) -> None:
        """An access-log entry without an accounting token says that the request has ended. The next metrics
        pages of its endpoint decide. Returns at once."""
        ...

    def fault(self, fault: Fault) -> None:
        """An attempt of a request failed, or its endpoint is full. Returns at once; idempotent."""
        ...

    def renew(self, alive: Alive) -> None:
        """Renew a request's lease. Returns at once; the next batch carries the renewal."""
        ...

    def shut_down(self) -> None:
        """Refuse every waiting request and every later one with ShuttingDown."""
        ...


class Wait(msgspec.Struct, eq=False):
    """A request's time in the queue. Moving between the shared and the local queue continues the same wait.

    `epp_queue_latency_seconds` counts the wait once, when its outcome is known.
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

    A refusal brings its own Retry-After; `retry_after_s` is for requests that have waited.
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
            return Preempted("taken out of the queue to make room", retry_after_s=retry_after_s)
        case Verdict.FOREIGN:
            return RequestIdTaken()
        case Verdict.EVICTED:
            return Evicted("an operator took it out of the queue", retry_after_s=retry_after_s)


@dataclass(frozen=True, slots=True)
class OutageStatus:
    """An outage as the admin API shows it. Amounts are in the stock's unit.

    `mode` is the FailoverState; `bound` is the fleet's bound, and `share` this replica's share of it.
    `in_flight` counts the requests placed here that were placed or seen alive within an access-log interval
    and a second, and whose end this replica has not received. Another replica may have received the end.
    """

    mode: str
    since_s: float
    bound: float
    share: float
    free: float
    let_go: int  # requests placed here
    in_flight: int
    queued: int
    queue_length: dict[str, int]  # band name -> queued requests
