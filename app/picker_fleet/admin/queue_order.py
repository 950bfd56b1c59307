"""Predicts the order in which waiting requests are served, and explains why a request waits. The functions
are pure; the views (views.py) call them.

Start-time fair queueing serves the flow with the smallest start tag; serving a request raises the flow's tag
by cost / weight, the flow's share. If all requests of a flow have the oldest one's cost, request n is served
at the tag start + n * share. A request's tag stays the same while the queue is served. So a page can continue
at any depth, and a position is a count over flow queues. The order changes with arrivals, dispatches of the
starvation guard, unequal costs in a flow, and, under `band_policy: weighted`, the turns between bands.
"""

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from picker_fleet.domain.request import largest_claim
from picker_fleet.state.pool_state import PoolState
from picker_fleet.state.reads import FlowQueueRow, RequestStatus

_SLACK = 1e-6  # tolerance for rounding errors of tags, as a fraction of a flow's share
_MIN_SHARE = 1e-12


class Position(NamedTuple):
    """A request's place in the order: its flow queue's group, its predicted start tag, and its flow."""

    group: int
    tag: float
    flow: str


class PredictedRequest(NamedTuple):
    """Request number `rank` of a flow queue (from 0), with its predicted start tag `tag` and its predicted
    place `number` (from 1) among all requests."""

    queue: FlowQueueRow
    rank: int
    tag: float
    number: int

    @property
    def position(self) -> Position:
        return Position(self.queue.group, self.tag, self.queue.name)


def predicted_tag(queue: FlowQueueRow, rank: int) -> float:
    """The start tag at which request number `rank` of the flow queue will be served."""
    return queue.start + rank * max(queue.share, _MIN_SHARE)


def predicted_order(
    queues: Sequence[FlowQueueRow], after: Position | None, limit: int
) -> list[PredictedRequest]:
    """The next `limit` requests after the position `after`, in O(queues + limit * log queues)."""
    skipped = 0
    heads = []
    for queue in queues:
        rank = 0 if after is None else _served_before(queue, after, inclusive=True)
        skipped += rank
        if rank < queue.queued:
            heads.append((queue.group, predicted_tag(queue, rank), queue.name, rank, queue))
    heapq.heapify(heads)
    found: list[PredictedRequest] = []
    while heads and len(found) < limit:
        group, tag, name, rank, queue = heads[0]
        found.append(PredictedRequest(queue, rank, tag, skipped + len(found) + 1))
        if rank + 1 < queue.queued:
            heapq.heapreplace(heads, (group, predicted_tag(queue, rank + 1), name, rank + 1, queue))
        else:
            heapq.heappop(heads)
    return found


def count_before(queues: Sequence[FlowQueueRow], position: Position) -> int:
    """How many requests are predicted to be served before the request at `position`."""
    return sum(_served_before(queue, position, inclusive=False) for queue in queues)


def _served_before(queue: FlowQueueRow, position: Position, *, inclusive: bool) -> int:
    """How many requests of `queue` are served before `position` (`inclusive`: before or at `position`)."""
    if queue.group != position.group:
        return queue.queued if queue.group < position.group else 0
    ranks = (position.tag - queue.start) / max(queue.share, _MIN_SHARE)
    if not math.isfinite(ranks):
        return queue.queued if ranks > 0 else 0
    ties_first = queue.name < position.flow or (inclusive and queue.name == position.flow)
    count = math.floor(ranks + _SLACK) + 1 if ties_first else math.ceil(ranks - _SLACK)
    return min(max(count, 0), queue.queued)


def request_status(
    found: RequestStatus, state: PoolState, before: int | None, claim_share: float, short: str
) -> str:
    """One sentence that says where a request is and why.

    Args:
        state: the pool's state, read at about the same time as `found`.
        before: how many requests are predicted to be served before this request; None if unknown.
        claim_share: the largest share of the stock's upper bound that one request may take.
        short: which tenant's limit the request waits for; '' if none.
    """
    entry = found.entry
    if entry.state == "placed":
        lease = "unknown time" if found.lease_in_s is None else f"{found.lease_in_s:.1f} s"
        return f"it runs on {entry.endpoints[0]}; its lease ends in {lease} unless renewed"
    if entry.state == "granted":
        return f"its turn has come; replica {entry.owner} is choosing its endpoint"
    if entry.state == "orphaned":
        return f"its replica {entry.owner} is silent; it waits until another replica adopts it"
    return f"{_queue_position(found, before)}; {_obstacle(found, state, claim_share, short)}"


def _queue_position(found: RequestStatus, before: int | None) -> str:
    rank = found.rank
    if rank is None:
        return "it waits"
    count = "no request" if not rank else "1 request" if rank == 1 else f"{rank} requests"
    text = f"flow {found.entry.flow} has {count} before it"
    return text if before is None or before == rank else f"{text}, and {before} in all are served sooner"


def _obstacle(found: RequestStatus, state: PoolState, claim_share: float, short: str) -> str:
    entry, queue = found.entry, found.queue
    if state.paused:
        return "dispatching is paused"
    if not state.ready_backends:
        return "no endpoint is ready"
    if short:
        return short
    if queue is not None and queue.throttled:
        text = "the endpoints its flow's next request may go to are at their limits"
        if entry.limit:
            text = f"its flow is at its limit of {entry.limit} in flight on each endpoint, or {text}"
        return text
    stock, upper = state.stock, state.upper
    if stock >= state.lower:
        return f"the stock ({stock:g}) is at its bounds ({state.lower:g} to {upper:g})"
    takes = min(entry.cost, largest_claim(claim_share, upper))
    if stock + takes > upper:
        return f"its cost ({takes:g}) does not fit above the stock ({stock:g}) yet"
    return "it is served when its turn comes"
