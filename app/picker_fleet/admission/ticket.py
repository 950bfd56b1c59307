"""The ticket: what Envoy carries for a placed request, so that any replica can account for it.

It travels in dynamic metadata and comes back with each access-log entry. Fields joined by tabs, in the
order of state/schema.py; no field can hold a tab, since intake refuses control characters. One of a
request that was let go without the shared state has a field more, which says when. The last is the fleet's
signature, over the request's id and all fields before it.
"""

from picker_fleet.request import InferenceRequest
from picker_fleet.signing import Keyring
from picker_fleet.state.schema import ACCOUNTING_TOKEN, ADMITTED_ALONE

_PURPOSE = "ticket"
_TRACEPARENT = "00-"

_COST, _MODEL, _ENDPOINT = map(ACCOUNTING_TOKEN.index, ("cost", "model", "endpoint"))
_FIELDS = len(
    ACCOUNTING_TOKEN
)  # then, it may be, when it was let go alone; then the signature; a further one is its trace


def write(
    request: InferenceRequest, endpoint: str, answer_tokens: float = 0, alone_ms: int | None = None
) -> str:
    """The ticket of `request` placed on `endpoint` (`ip:port`).

    `alone_ms` is when that was, by the clock of the shared state, if it was without that.

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
            *(() if alone_ms is None else (f"{ADMITTED_ALONE}{alone_ms}",)),
        )
    )


def signed(note: str, request_id: str, keys: Keyring) -> str:
    """What `write` gives, with the signature that makes it the ticket of request `request_id`."""
    signature = keys.sign(_PURPOSE, f"{request_id}\t{note}")
    return f"{note}\t{signature}"


def checked(ticket: str, request_id: str, keys: Keyring) -> tuple[str, str]:
    """A ticket that came back, and what is wrong with it: '' if it is the fleet's own for `request_id`.

    One that a version without signatures has made gets an empty one, where those are accepted.
    """
    own, parent = split_trace(ticket)
    note, _, signature = own.rpartition("\t")
    if own.count("\t") < _FIELDS:
        signature = ""
    fault = keys.fault(_PURPOSE, f"{request_id}\t{note}", signature)
    if fault and keys.accepts_unsigned and own.count("\t") == _FIELDS - 1:
        unsigned = f"{own}\t"
        return (with_trace(unsigned, parent) if parent else unsigned), ""
    return ticket, fault


def is_alone(ticket: str) -> bool:
    """Whether its request was let go without the shared state."""
    if ADMITTED_ALONE not in ticket:  # as with nearly every one
        return False
    fields = ticket.split("\t")
    return len(fields) > _FIELDS and fields[_FIELDS].startswith(ADMITTED_ALONE)


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
    own, _, parent = ticket.rpartition("\t")
    if parent.startswith(_TRACEPARENT) and ticket.count("\t") >= _FIELDS:
        return own, parent
    return ticket, ""
