"""A request's wait in the shared or local queue, and the errors with which a wait may end."""

import math

import msgspec

from picker_fleet.domain.errors import (
    BandBytes,
    BandCapacity,
    DeadlineExceeded,
    Evicted,
    ExpiredTtl,
    InsufficientFlowCapacity,
    NoEndpoints,
    OverBurst,
    OverLimit,
    Preempted,
    RequestError,
    RequestIdTaken,
    Saturated,
    TooManyFlows,
    TotalCapacity,
)
from picker_fleet.domain.request import InferenceRequest
from picker_fleet.domain.tenants import Tree
from picker_fleet.state.replies import AnyVerdict, Placed, Queued, Refused, Verdict
from picker_fleet.state.schema import Refusal

# The error and message for each reason for which the queue refuses a request, except for tenants' limits.
REFUSALS: dict[Refusal, tuple[type[RequestError], str]] = {
    Refusal.NO_ENDPOINTS: (NoEndpoints, "no endpoint is ready that may serve this request"),
    Refusal.SATURATED: (Saturated, "the fleet is saturated, and requests of this band may not wait"),
    Refusal.INSUFFICIENT_FLOW_CAPACITY: (
        InsufficientFlowCapacity,
        "this request's flow has reached its capacity in the queue",
    ),
    Refusal.TOO_MANY_FLOWS: (TooManyFlows, "the queue has reached its maximum number of flows"),
    Refusal.BAND_CAPACITY: (BandCapacity, "the queue of this request's band is full"),
    Refusal.BAND_BYTES: (BandBytes, "the bodies queued in this request's band have reached its byte limit"),
    Refusal.TOTAL_CAPACITY: (TotalCapacity, "the queue is full"),
}


class Wait(msgspec.Struct, eq=False):
    """A request's time in the queue. A request that moves between the shared and the local queue continues
    its wait.

    The metric `epp_queue_latency_seconds` counts each wait once, when the wait's outcome is known.
    """

    arrived_s: float  # event-loop time
    queued: bool = False


def time_up(request: InferenceRequest, retry_after_s: int, tenants: Tree | None = None) -> RequestError:
    """The error of a request that expired in the queue: 504 if the client's deadline passed, 503 after the
    TTL. The message names the nodes of `tenants` for whose limits the request may have waited."""
    if request.by_client:
        return DeadlineExceeded(f"the client's deadline of {request.ttl_s:g} s passed in the queue")
    nodes = {path: tenants.node(path) for path in tenants.paths(request.flow)} if tenants else {}
    limited = [path for path, node in nodes.items() if node and node.over_limit == "queue" and node.amounts()]
    told = f", for its turn or for a limit of {' or '.join(limited)}" if limited else ""
    return ExpiredTtl(f"waited longer than {request.ttl_s:g} s{told}", retry_after_s=retry_after_s)


def refusal(
    verdict: AnyVerdict, request: InferenceRequest, retry_after_s: int, tenants: Tree | None = None
) -> RequestError | None:
    """The error with which the queue's `verdict` ends `request`; None if the request continues.

    A refusal has its own Retry-After; `retry_after_s` is the Retry-After of requests that have waited.
    `tenants` has the limits that the messages of refusals name.
    """
    match verdict:
        case Placed() | Queued() | Verdict.GRANTED | Verdict.GONE | Verdict.UNKNOWN_POOL:
            return None
        case Refused(Refusal.OVER_LIMIT, refused_s, limit, quota):
            refused_s = max(refused_s, 1)
            return OverLimit(_over_limit(limit, refused_s, tenants), retry_after_s=refused_s, quota=quota)
        case Refused(Refusal.OVER_BURST, _, limit, quota):
            return OverBurst(_over_burst(limit, request, tenants), quota=quota)
        case Refused(reason, refused_s):
            error, message = REFUSALS[reason]
            return error(message, retry_after_s=refused_s)
        case Verdict.EXPIRED:
            return time_up(request, retry_after_s, tenants)
        case Verdict.PREEMPTED:
            return Preempted("preempted by a request of a higher band", retry_after_s=retry_after_s)
        case Verdict.FOREIGN:
            return RequestIdTaken()
        case Verdict.EVICTED:
            return Evicted("evicted by an operator", retry_after_s=retry_after_s)


def _over_limit(limit: str, wait_s: int, tenants: Tree | None) -> str:
    """The message for a request beyond `limit`, a text `UNIT PER_MS PATH` (state/store.py)."""
    unit, path, told, _ = _parsed(limit, tenants)
    return f"{path}: {told or f'its limit of {_words(unit)} is used up'}; retry in {wait_s} s"


def _over_burst(limit: str, request: InferenceRequest, tenants: Tree | None) -> str:
    """The message for a request that is larger than `limit` allows at any time."""
    unit, path, _, most = _parsed(limit, tenants)
    prompt, answer = request.prompt_tokens, request.answer_tokens
    needs = {"requests": 1.0, "prompt_tokens": prompt, "answer_tokens": answer, "tokens": prompt + answer}
    allows = "has a lower limit" if most is None else f"allows {most:.15g} at once"
    if unit not in needs or (request.learn and unit != "prompt_tokens"):
        return f"the request needs more than the {_words(unit)} of {path}, which {allows}"
    return f"the request needs about {math.ceil(needs[unit])} {_words(unit)}; {path} {allows}"


def _parsed(limit: str, tenants: Tree | None) -> tuple[str, str, str, float | None]:
    """The unit and path in a text `UNIT PER_MS PATH`, the limit in words, and the most it allows at once."""
    unit, _, rest = limit.partition(" ")
    per, _, path = rest.partition(" ")
    node = None if tenants is None else tenants.node(path)
    if node is not None and unit == "parallel" and node.max_parallel_requests is not None:
        return unit, path, f"{node.max_parallel_requests} requests at once", None
    if node is not None and unit == "budget" and node.budget is not None:
        return unit, path, f"{node.budget.units:g} units a {node.budget.period}", node.budget.units
    if node is not None and per.isdecimal() and (found := node.limit(unit, int(per))) is not None:
        return unit, path, f"{found.amount} {_words(unit)} per {found.per}", found.most_at_once
    return unit, path, "", None


def _words(unit: str) -> str:
    return {"parallel": "requests at once"}.get(unit, unit.replace("_", " "))
