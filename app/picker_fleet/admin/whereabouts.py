"""Where a request is and why, in one sentence. Pure."""

from collections.abc import Mapping
from typing import Any

from picker_fleet.state.reads import Whereabouts


def why(found: Whereabouts, state: Mapping[str, Any], ahead: int | None, claim_share: float) -> str:
    """`state` is the fleet's (state/store.py); `ahead` how many are foretold to be served before it;
    `claim_share` the part of the bound that one request takes at most."""
    entry = found.entry
    if entry.state == "placed":
        return (
            f"it runs on {entry.endpoints[0]}; its lease ends in {_seconds(found.lease_in_s)} unless renewed"
        )
    if entry.state == "granted":
        return f"its turn has come; replica {entry.owner} is choosing its endpoint"
    if entry.state == "held":
        return f"replica {entry.owner}, which brought it, is silent; it waits to be brought again by another"
    return f"{_before(found, ahead)}; {_obstacle(found, state, claim_share)}"


def _before(found: Whereabouts, ahead: int | None) -> str:
    rank, name = found.rank, found.entry.flow
    if rank is None:
        return "it waits"
    text = f"flow {name} has {_requests(rank)} before it"
    return text if ahead is None or ahead == rank else f"{text}, and {ahead} in all are served sooner"


def _obstacle(found: Whereabouts, state: Mapping[str, Any], claim_share: float) -> str:
    if state["paused"]:
        return "dispatching is paused"
    if not state["ready_backends"]:
        return "no endpoint is ready"
    if found.lane is not None and found.lane.parked:
        at_theirs = "the endpoints its flow's next request may go to are at their limits"
        limit = found.entry.limit
        return (
            f"its flow is at its limit of {limit} in flight on each endpoint, or {at_theirs}"
            if limit
            else at_theirs
        )
    stock, bounds = state["stock"], state["bounds"]
    if stock >= bounds["lower"]:
        return f"the stock ({stock:g}) is at its bounds ({bounds['lower']:g} to {bounds['upper']:g})"
    takes = min(found.entry.cost, claim_share * bounds["upper"])
    if stock + takes > bounds["upper"]:
        return f"its cost ({takes:g}) does not fit above the stock ({stock:g}) yet"
    return "it is served when its turn comes"


def _requests(count: int) -> str:
    return "no request" if not count else "1 request" if count == 1 else f"{count} requests"


def _seconds(value: float | None) -> str:
    return "unknown time" if value is None else f"{value:.1f} s"
