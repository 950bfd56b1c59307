"""Reads and builds the ext_proc messages (docs/specification.md, 002). Called by an exchange.

Constant answers are built once and shared: a transport serialises a message when it is written.

The first message's `protocol_config` says how much of a request and its answer Envoy sends:

request body           response body          mode
FULL_DUPLEX_STREAMED   FULL_DUPLEX_STREAMED   standard (also if Envoy says nothing)
FULL_DUPLEX_STREAMED   NONE                   lean
NONE                   NONE                   headers
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import orjson
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from picker_fleet.errors import Dropped, RequestError, ShuttingDown, TooManyFlows, Unsupported
from picker_fleet.request import Placement

DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
DROPPED_REASON = "x-llm-d-request-dropped-reason"
PRESSURE: Final = "x-queue-pressure"  # docs/fairness.md, "Backpressure"

SUBSET_HINT = "envoy.lb.subset_hint"  # metadata namespaces
# {id, token}, and {waited, target} of a queued request, come back in the access log; {session, pressure} go
# to the client
PICKER = "picker"
REQUEST = "picker.request"  # what Envoy read from the body (`headers` mode)

CHUNK_BYTES = 62_000  # Envoy's limit for one body chunk of an answer
WHOLE_BYTES = 512 * 1024  # of a body that goes back in one piece: half of what an Envoy buffers by default
_RETRY_AFTER_S = 1
_CONTINUE_AND_REPLACE = 1  # CommonResponse.ResponseStatus
_OVERWRITE = 2  # HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD

_NONE = ProcessingMode.NONE
_DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
_MODES = {(_DUPLEX, _DUPLEX): "standard", (_DUPLEX, _NONE): "lean", (_NONE, _NONE): "headers"}

_PRESSURE_STEPS = 100
_PRESSURES = tuple(f"{step / _PRESSURE_STEPS:.2f}" for step in range(_PRESSURE_STEPS + 1))
FULL: Final = _PRESSURES[-1]


def _constant(part: str) -> ProcessingResponse:
    answer = ProcessingResponse()
    getattr(answer, part).SetInParent()
    return answer


RESPONSE_HEADERS = _constant("response_headers")
RESPONSE_TRAILERS = _constant("response_trailers")
RESPONSE_HEADERS_UNSIZED = _constant("response_headers")  # for a body whose length will change
RESPONSE_HEADERS_UNSIZED.response_headers.response.header_mutation.remove_headers.append("content-length")


def mode_of(message: ProcessingRequest) -> str:
    """The mode that Envoy speaks.

    Raises:
        Unsupported: it would send bodies in a way that is none of the three modes.
    """
    if not message.HasField("protocol_config"):
        return "standard"
    config = message.protocol_config
    request, response = config.request_body_mode, config.response_body_mode
    mode = _MODES.get((request, response))
    if mode is None:
        names = {number: name for name, number in ProcessingMode.BodySendMode.items()}
        asked, answered = names.get(request, request), names.get(response, response)
        raise Unsupported(
            f"request_body_mode {asked} with response_body_mode {answered} is not supported; "
            "FULL_DUPLEX_STREAMED or NONE is, for both or with NONE for the response"
        )
    return mode


def pressure(fill: float, waited_s: float, ttl_s: float) -> str:
    """The value of `x-queue-pressure`, `0.00` to `1.00`: how near requests are to a refusal.

    The greater of `fill`, the part of the queue that is taken, and the part of its time to live that the
    request has waited. Both are known locally, so it costs no call to Redis.
    """
    waited = waited_s / ttl_s
    greater = fill if fill > waited else waited
    return _PRESSURES[round(greater * _PRESSURE_STEPS)] if greater < 1 else FULL


def read_headers(message: Any, wanted: Collection[str]) -> dict[str, bytes]:
    """Raw values of the headers in `wanted` (lower case) of an HttpHeaders; the first of each name."""
    found: dict[str, bytes] = {}
    for field in message.headers.headers:
        name = field.key
        if name not in wanted:
            name = name.lower()  # Envoy itself sends lower case
        if name in wanted and name not in found:
            found[name] = field.raw_value or field.value.encode()
    return found


def read_metadata(message: Any, namespace: str) -> dict[str, Any] | None:
    """The fields of one namespace of a ProcessingRequest's filter metadata; None if it is not there.

    Numbers are floats, lists are lists; nested structures are left out.
    """
    if not message.HasField("metadata_context"):
        return None
    spaces = message.metadata_context.filter_metadata
    if namespace not in spaces:
        return None
    return {key: _plain(value) for key, value in spaces[namespace].fields.items()}


def placed(
    placement: Placement,
    request_id: str,
    content_length: int | None,
    tries: int = 0,
    target_model: str = "",
    *,
    namespace: str,
    pressure: str,
) -> ProcessingResponse:
    """The request-headers answer that sends a request to its endpoints, which metadata names in `namespace`.

    `request_id` is '' for a request without admission; `content_length` None for an unchanged body. `tries`
    is how many endpoints to name at least, where the request may go to no other; `target_model` is what
    it is sent as; `pressure` is the client's.
    """
    answer = ProcessingResponse()
    answer.CopyFrom(_towards(placement.header(tries), namespace))
    if content_length is not None:
        _overwrite(answer.request_headers.response.header_mutation, "content-length", str(content_length))
    account = answer.dynamic_metadata.fields[PICKER].struct_value.fields
    account["pressure"].string_value = pressure
    if request_id:
        account["id"].string_value = request_id
        account["ticket"].string_value = placement.accounting_token
        if placement.session:
            account["session"].string_value = placement.session
        if placement.waited_s is not None:
            account["waited"].number_value = placement.waited_s
            account["target"].string_value = target_model
    return answer


@lru_cache(maxsize=1024)
def _towards(destination: str, namespace: str) -> ProcessingResponse:
    """What all answers with one list of endpoints share; to be copied, never changed."""
    answer = ProcessingResponse()
    common = answer.request_headers.response
    common.clear_route_cache = True
    _overwrite(common.header_mutation, DESTINATION, destination)
    answer.dynamic_metadata.fields[namespace].struct_value.fields[DESTINATION].string_value = destination
    return answer


def _overwrite(mutation: Any, key: str, value: str) -> None:
    """Add to a HeaderMutation: the header `key` becomes `value`, whatever it was."""
    option = mutation.set_headers.add(append_action=_OVERWRITE)
    option.header.key = key
    option.header.raw_value = value.encode()


def with_body(answer: ProcessingResponse, body: bytes) -> ProcessingResponse:
    """`answer`, which `placed` has made, with the request's whole body: Envoy needs nothing else.

    Envoy buffers it whole (`WHOLE_BYTES`), and sends it on without a content-length.
    """
    common = answer.request_headers.response
    common.status = _CONTINUE_AND_REPLACE
    common.body_mutation.body = body
    return answer


def request_body(body: bytes) -> Iterator[ProcessingResponse]:
    """`body` in chunks, each made when it is asked for; the last one ends the request."""
    last = max(len(body) - 1, 0) // CHUNK_BYTES * CHUNK_BYTES
    for start in range(0, last + 1, CHUNK_BYTES):
        answer = ProcessingResponse()
        echo = answer.request_body.response.body_mutation.streamed_response
        echo.body = body[start : start + CHUNK_BYTES] if last else body
        echo.end_of_stream = start == last
        yield answer


def response_headers(added: Mapping[str, str], *, sized: bool) -> ProcessingResponse:
    """A model server's headers, passed on with those `added` for the client; an empty one is left out."""
    answer = ProcessingResponse()
    answer.CopyFrom(RESPONSE_HEADERS if sized else RESPONSE_HEADERS_UNSIZED)
    for name, value in added.items():
        if value:
            _overwrite(answer.response_headers.response.header_mutation, name, value)
    return answer


def response_body(body: bytes, *, ended: bool) -> ProcessingResponse:
    """One chunk of the model server's answer, passed on."""
    answer = ProcessingResponse()
    echo = answer.response_body.response.body_mutation.streamed_response
    echo.body = body
    echo.end_of_stream = ended
    return answer


class Refusal(NamedTuple):
    """The picker's own answer to a client, whatever transport carries it."""

    status: int
    headers: dict[str, str]
    body: bytes


def refusal(error: RequestError, overload_status: int, fill: Callable[[], float]) -> Refusal:
    """The status, headers and OpenAI-style body that say why a request is refused.

    `overload_status` is that of requests dropped for overload; `fill` the part of the queue that is taken.
    """
    dropped = isinstance(error, Dropped)
    status = overload_status if dropped else error.status
    by_queue = dropped and not isinstance(error, ShuttingDown | TooManyFlows)
    headers = {
        "content-type": "application/json",
        PRESSURE: FULL if by_queue else pressure(fill(), 0.0, 1.0),
    }
    if error.retry_after_s is not None or status in (429, 503):
        headers["retry-after"] = str(_RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s)
    if error.reason is not None:
        headers[DROPPED_REASON] = error.reason
    text = {"error": {"message": str(error), "type": error.kind, "code": error.code}}
    return Refusal(status, headers, orjson.dumps(text, option=orjson.OPT_APPEND_NEWLINE))


def refused(refusal: Refusal, code: str) -> ProcessingResponse:
    """The ext_proc message that carries `refusal`; `code` is its error's."""
    answer = ProcessingResponse()
    immediate = answer.immediate_response
    immediate.status.code = refusal.status
    immediate.details = f"picker_{code}"
    immediate.body = refusal.body
    for key, value in refusal.headers.items():
        _overwrite(immediate.headers, key, value)
    return answer


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "list_value":
        return [_plain(entry) for entry in value.list_value.values]
    if kind in ("string_value", "number_value", "bool_value"):
        return getattr(value, kind)
    return None
