"""The ext_proc messages, parsed as Envoy does (docs/specification.md, 002)."""

import json

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from extproc_client import PLACEMENT, headers, set_headers

from picker_fleet.domain import errors
from picker_fleet.domain.allowlist import DESTINATION
from picker_fleet.domain.errors import ExpiredTtl, RequestError
from picker_fleet.ingress.context import DROPPED_REASON, refusal
from picker_fleet.ingress.ext_proc import codec

message = ProcessingResponse.FromString
HEADER = "10.0.0.1:8000,[fd00::2]:8000"


def test_a_placement_names_the_same_endpoints_in_header_and_metadata() -> None:
    answer = message(
        codec.placed(PLACEMENT, HEADER, "id-1", 1234, namespace="envoy.lb", pressure="0.25").message()
    )

    common = answer.request_headers.response
    # A changed body is sent with its new length.
    assert set_headers(common.header_mutation) == {DESTINATION: HEADER, "content-length": "1234"}
    assert common.clear_route_cache
    metadata = answer.dynamic_metadata
    assert dict(metadata["envoy.lb"]) == {DESTINATION: HEADER}
    assert dict(metadata["picker"]) == {"id": "id-1", "token": "ticket-1", "pressure": "0.25"}


def test_a_second_answer_with_the_same_endpoints_takes_no_other_field_from_the_first() -> None:
    codec.placed(PLACEMENT, HEADER, "id-1", 1234, namespace="envoy.lb", pressure="0.25")
    answer = message(
        codec.placed(PLACEMENT, HEADER, "", None, namespace="gateway.lb", pressure="0.50").message()
    )

    assert set_headers(answer.request_headers.response.header_mutation) == {DESTINATION: HEADER}
    assert sorted(answer.dynamic_metadata) == ["gateway.lb", "picker"]
    assert dict(answer.dynamic_metadata["picker"]) == {"pressure": "0.50"}


REFUSALS = [
    (errors.BadRequest("no model"), 503, 400, "0.50", ()),
    (errors.PayloadTooLarge("big"), 429, 413, "0.50", ()),
    (errors.NoEndpoints("none"), 429, 503, "0.50", ("1", "rejected-no-endpoints")),
    (ExpiredTtl("late", retry_after_s=7), 429, 429, "1.00", ("7", "rejected-ttl-expired")),
    (errors.ShuttingDown(), 429, 503, "0.50", ("1", "rejected-shutting-down")),
]


@pytest.mark.parametrize(("error", "overload_status", "status", "pressure", "extra"), REFUSALS)
def test_a_refusal_has_the_status_headers_and_body_of_its_error(
    error: RequestError, overload_status: int, status: int, pressure: str, extra: tuple[str, ...]
) -> None:
    refused = refusal(error, overload_status, 0.5)
    immediate = message(codec.refused(refused, error.code)).immediate_response
    assert immediate.status.code == status
    assert set_headers(immediate.headers) == {
        "content-type": "application/json",
        "x-queue-pressure": pressure,
        **dict(zip(("retry-after", DROPPED_REASON), extra, strict=False)),
    }
    kind = "invalid_request_error" if status < 429 else "overloaded_error"
    shown = {"message": str(error), "type": kind, "code": error.code}
    assert json.loads(immediate.body) == {"error": shown}
    assert immediate.details == f"picker_{error.code}"


@pytest.mark.parametrize(
    ("path", "is_anthropics"),
    [
        *(
            (path, True)
            for path in (b"/v1/messages", b"/a/v1/messages?beta=true", b"/v1/messages/count_tokens")
        ),
        *((path, False) for path in (b"", b"/v1/messages2", b"/v1/chat/completions?x=/v1/messages")),
    ],
)
def test_a_refusal_has_the_error_format_of_the_api_that_was_called(path: bytes, is_anthropics: bool) -> None:
    for error, kind in (
        (errors.BadRequest("no model"), "invalid_request_error"),
        (errors.PayloadTooLarge("big"), "request_too_large"),
        (ExpiredTtl("late"), "overloaded_error"),
    ):
        said = json.loads(refusal(error, 503, 0.5, path).body)
        shape = {"type": "error", "error": {"type": kind, "message": str(error)}}
        assert (said == shape) is is_anthropics
        assert said["error"]["message"] == str(error)


def test_only_wanted_headers_are_read_whatever_their_case() -> None:
    message = headers("lean", [("X-Request-ID", "first"), ("x-request-id", "second"), ("cookie", b"\xff")])
    message.request_headers.headers.headers.add(key="x-llm-d-inference-ttl", value="5s")

    read = {"x-request-id": b"first", "x-llm-d-inference-ttl": b"5s"}
    assert codec.read_headers(message.request_headers, {*read, "x-absent"}) == read


def test_envoys_metadata_is_read_as_plain_values() -> None:
    fields = {"text": "a", "number": 2, "yes": True, "list": ["a", 1], "nothing": None, "deep": {"a": 1}}
    more = {"lists": [[1], "a"], "long": [1] * 10_000}
    message = headers("lean", metadata={"some": fields | more})
    read = {key: codec.read_metadata(message, "some", key) for key in fields | more}
    assert read == {**fields, "nothing": "", "deep": "", "lists": ["", "a"], "long": [1] * 4096}
    assert codec.read_metadata(message, "some", "other") is None
    assert codec.read_metadata(message, "other", "text") is None
    assert codec.read_metadata(ProcessingRequest(), "some", "text") is None
