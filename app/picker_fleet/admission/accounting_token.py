"""The accounting token: what Envoy carries for a placed request, so that any replica can account for it.

It travels in dynamic metadata and returns with each access-log entry. Its fields are joined by tabs, in the
order of state/schema.py; no field can have a tab, since intake refuses control characters. A request that was
placed without Redis has one more field, the time. The last field is the fleet's signature over the request's
id and all fields before it; a trace may follow.
"""

from picker_fleet.request import InferenceRequest
from picker_fleet.signing import Keyring
from picker_fleet.state.schema import ACCOUNTING_TOKEN, ADMITTED_ALONE

_PURPOSE = "ticket"
_TRACEPARENT = "00-"

_COST, _MODEL, _ENDPOINT = map(ACCOUNTING_TOKEN.index, ("cost", "model", "endpoint"))
_FIELDS = len(ACCOUNTING_TOKEN)  # without the time of a placement without Redis, the signature and the trace


def write(
    request: InferenceRequest, endpoint: str, answer_tokens: float = 0, alone_ms: int | None = None
) -> str:
    """The accounting token of `request` placed on `endpoint` (`ip:port`).

    `alone_ms` is the time by the clock of the shared state, if the request was placed without Redis.
    `answer_tokens` completes a cost that lacks the answer's part: the mean of the flow is lost together with
    the state that the token restores.
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


def signed(token_fields: str, request_id: str, keys: Keyring) -> str:
    """The fields of `write`, with the signature that makes them the token of request `request_id`."""
    signature = keys.sign(_PURPOSE, f"{request_id}\t{token_fields}")
    return f"{token_fields}\t{signature}"


def checked(token: str, request_id: str, keys: Keyring) -> tuple[str, str]:
    """The token, and what is wrong with it: '' if it is the fleet's own for `request_id`.

    A token of a version without signatures gets an empty one, where those are accepted.
    """
    own, parent = split_trace(token)
    token_fields, _, signature = own.rpartition("\t")
    if own.count("\t") < _FIELDS:
        signature = ""
    fault = keys.fault(_PURPOSE, f"{request_id}\t{token_fields}", signature)
    if fault and keys.accepts_unsigned and own.count("\t") == _FIELDS - 1:
        unsigned = f"{own}\t"
        return (with_trace(unsigned, parent) if parent else unsigned), ""
    return token, fault


def is_alone(token: str) -> bool:
    """Whether its request was placed without Redis."""
    if ADMITTED_ALONE not in token:  # nearly always
        return False
    fields = token.split("\t")
    return len(fields) > _FIELDS and fields[_FIELDS].startswith(ADMITTED_ALONE)


def endpoint_of(token: str) -> str:
    """The endpoint that an accounting token was written for; '' if it is none."""
    fields = token.split("\t")
    return fields[_ENDPOINT] if len(fields) > _ENDPOINT else ""


def model_of(token: str) -> str:
    """The model that an accounting token's client asked for; '' if it is none."""
    fields = token.split("\t")
    return fields[_MODEL] if len(fields) > _MODEL else ""


def cost_of(token: str) -> float:
    """What the request of a token takes of the stock, in its unit; 0 if it is no token."""
    fields = token.split("\t")
    try:
        cost = float(fields[_COST])
    except (IndexError, ValueError):
        return 0.0
    return cost if 0.0 <= cost < float("inf") else 0.0


def with_trace(token: str, parent: str) -> str:
    """`token` with the traceparent of what comes after the request's decision."""
    return f"{token}\t{parent}"


def split_trace(token: str) -> tuple[str, str]:
    """An accounting token as it was written, and the traceparent it carries; '' if it carries none."""
    own, _, parent = token.rpartition("\t")
    if parent.startswith(_TRACEPARENT) and token.count("\t") >= _FIELDS:
        return own, parent
    return token, ""
