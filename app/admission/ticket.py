"""The ticket: what Envoy carries for a placed request, so that any replica can account for it.

It travels in dynamic metadata and comes back with each access-log entry. Fields joined by tabs, in the
order `lua/renew.lua` reads them; no field can hold a tab, since intake refuses control characters.
"""

from app.request import InferenceRequest

_COST, _MODEL, _ENDPOINT = 3, 6, 7  # which of the fields they are
_FIELDS = 9  # a further one is the request's trace


def write(request: InferenceRequest, endpoint: str, answer_tokens: float = 0) -> str:
    """The ticket of `request` placed on `endpoint` (`ip:port`).

    `answer_tokens` stands for the answer in the cost of a request that lacks it: what flows have learned of
    their answers is lost together with the state that a ticket makes good.
    """
    workload = request.workload
    return "\t".join(
        (
            request.flow,
            str(int(request.band)),
            repr(request.weight),
            repr(request.cost + answer_tokens if request.learn else request.cost),
            workload.id if workload.registered else "",
            str(workload.criticality),
            request.model,
            endpoint,
            str(request.limit),
        )
    )


def endpoint_of(ticket: str) -> str:
    """The endpoint that a ticket was written for; '' if it is none."""
    fields = ticket.split("\t")
    return fields[_ENDPOINT] if len(fields) > _ENDPOINT else ""


def model_of(ticket: str) -> str:
    """The model that a ticket's client asked for; '' if it is none."""
    fields = ticket.split("\t")
    return fields[_MODEL] if len(fields) > _MODEL else ""


def cost_of(ticket: str) -> float:
    """What the request of a ticket takes of the stock, in its unit; 0 if it is no ticket."""
    fields = ticket.split("\t")
    try:
        cost = float(fields[_COST])
    except (IndexError, ValueError):
        return 0.0
    return cost if 0.0 <= cost < float("inf") else 0.0


def with_trace(ticket: str, parent: str) -> str:
    """`ticket` with the traceparent of what comes after the request's decision."""
    return f"{ticket}\t{parent}"


def split_trace(ticket: str) -> tuple[str, str]:
    """A ticket as it was written, and the traceparent it carries; '' if it carries none."""
    if ticket.count("\t") < _FIELDS:
        return ticket, ""
    own, _, parent = ticket.rpartition("\t")
    return own, parent
