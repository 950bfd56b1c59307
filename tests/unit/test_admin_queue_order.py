"""The predicted dispatch order, the cursors of its pages, and the OpenAPI document."""

import base64
import functools
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from admin_client import View, api, asking
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from scripted_store import ScriptedStore

from picker_fleet.admin import views
from picker_fleet.admin.fleet_state import FleetState
from picker_fleet.admin.queue_order import Position, PredictedRequest, count_before, predicted_order
from picker_fleet.admin.views import BadCursor, FleetView, decode_cursor, encode_cursor
from picker_fleet.domain.config import Settings, parse
from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.state.reads import FlowQueueRow

SHARES = st.sampled_from([0.1, 1 / 3, 0.5, 1.0, 2.0, 7.0])
FLOWS = ("", "a", "b", "c", "d")


def flow_queue(flow: str, group: int = 1, tag: float = 0, queued: int = 3, share: float = 1) -> FlowQueueRow:
    return FlowQueueRow(group, flow, tag, queued, 1.0, 1.0, share, None)


@st.composite
def queues(draw: st.DrawFn) -> list[FlowQueueRow]:
    keys = [(group, flow) for group in range(6) for flow in FLOWS]
    chosen = draw(st.lists(st.sampled_from(keys), unique=True, max_size=8))
    tags = st.sampled_from([0.0, 0.1, 1.0, 1e6])
    return [
        flow_queue(flow, group, draw(tags), draw(st.integers(1, 6)), draw(SHARES)) for group, flow in chosen
    ]


def keys_of(requests: list[PredictedRequest]) -> list[tuple[int, str, int]]:
    return [(each.queue.group, each.queue.name, each.rank) for each in requests]


@given(queues())
def test_the_predicted_order_has_each_request_once_by_group_and_tag(found: list[FlowQueueRow]) -> None:
    requests = predicted_order(found, None, 10_000)
    queued = [(each.group, each.name, rank) for each in found for rank in range(each.queued)]
    assert sorted(keys_of(requests)) == sorted(queued)
    order = [(each.queue.group, each.tag) for each in requests]
    assert order == sorted(order)


def test_the_predicted_order_of_flows_follows_their_weights() -> None:
    # The flows have the weights 3 and 1.
    gold, iron = flow_queue("gold", share=1 / 3, queued=6), flow_queue("iron", queued=2)
    found = predicted_order([gold, iron, flow_queue("low", group=2, queued=1)], None, 99)
    flows = ["gold", "iron", "gold", "gold", "gold", "iron", "gold", "gold", "low"]
    assert [each.queue.name for each in found] == flows


@given(queues(), st.integers(1, 5))
def test_each_page_of_the_queue_continues_where_the_last_ended(found: list[FlowQueueRow], size: int) -> None:
    whole = keys_of(predicted_order(found, None, 10_000))
    read: list[tuple[int, str, int]] = []
    after: Position | None = None
    while page := predicted_order(found, after, size):
        assert count_before(found, page[0].position) == len(read)
        assert [each.number for each in page] == list(range(len(read) + 1, len(read) + len(page) + 1))
        read += keys_of(page)
        after = page[-1].position
        assert len(read) <= len(whole)
    assert read == whole


def test_the_next_page_begins_at_the_same_request_though_the_queue_was_served_meanwhile() -> None:
    found = [flow_queue("a", queued=50, share=0.1), flow_queue("b", queued=50, share=0.1)]
    first = predicted_order(found, None, 20)
    # Ten requests of each flow are served, so the remaining requests have lower ranks.
    served = [each._replace(start=each.start + 10 * each.share, queued=40) for each in found]
    rest, before = (predicted_order(each, first[-1].position, 99) for each in (served, found))
    ranks = [(each.queue.name, each.rank) for each in before]
    assert [(each.queue.name, each.rank + 10) for each in rest] == ranks


@pytest.mark.parametrize("tag", [1e308, -1e308])
def test_a_cursor_with_an_extreme_tag_is_before_or_after_all_requests_of_its_group(tag: float) -> None:
    found = [flow_queue("a", share=1e-9), flow_queue("b", group=4)]
    count = count_before(found, Position(1, tag, "a"))
    assert count == (3 if tag > 0 else 0)
    assert len(predicted_order(found, Position(1, tag, "a"), 99)) == 6 - count


@given(
    st.integers(0, 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)
def test_a_decoded_page_cursor_has_the_parts_that_were_encoded(number: int, tag: float, text: str) -> None:
    cursor = encode_cursor("flows", number, repr(tag), text)
    assert decode_cursor(cursor, views.OF_FLOWS) == ("flows", number, repr(tag), text)
    assert cursor.replace("-", "").replace("_", "").isalnum()


@given(st.text(max_size=60))
def test_arbitrary_text_is_refused_as_a_page_cursor(text: str) -> None:
    with pytest.raises(BadCursor, match="leave it out"):
        decode_cursor(text, views.OF_FLOWS)


BAD_CURSORS = [
    '["queue",1,"1","a"]',  # another list
    *(f'["flows",{rest}]' for rest in ('1,"1"', '1,"1","a",2', f'1,"1","{"a" * 5000}"')),  # length
    *(f'["flows",{number},"1","a"]' for number in ("-1", "9223372036854775808", "true", "1.0")),
    *(f'["flows",1,"{score}","a"]' for score in ("nan", "inf", "-inf", "(1", "1_000", "٣", "", "x")),
    *('["flows",1,1.5,"a"]', '["flows",1,null,"a"]', '{"flows":1}', "[" * 500, "1e999", "\udcff"),
]


@pytest.mark.parametrize("packed", BAD_CURSORS)
def test_a_cursor_of_another_list_or_of_a_wrong_type_or_length_is_refused(packed: str) -> None:
    cursor = base64.urlsafe_b64encode(packed.encode(errors="surrogateescape")).decode().rstrip("=")
    with pytest.raises(BadCursor):
        decode_cursor(cursor, views.OF_FLOWS)


PATH_EXAMPLES = {
    "flow": "gold", "workload_id": "chat", "request_id": "4f1d-9c", "address": "10.0.0.1:8000",
    "tenant": "acme/search",
}  # fmt: skip


class NoRows(View, FleetView):
    """A replica of a pool without flows, workloads and requests."""

    def __init__(self) -> None:
        super().__init__()
        empty = {"flow_queue.return_value": [], "workload.return_value": None, "request.return_value": None}
        self._store, self._chooser = Mock(reads=AsyncMock(**empty)), Mock(**{"explain.return_value": None})
        self._cache = AsyncMock(**{"get.return_value": FleetState()})
        self._membership = Mock(effective=KnownFleet(Settings()).config)


@functools.cache
def described() -> dict[str, Any]:
    return api().openapi()


def validate(page: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    """Assert that `value` is valid under `schema`, which may refer to components of `page`."""
    Draft202012Validator({**schema, "components": page["components"]}).validate(value)


def example(page: dict[str, Any], content: dict[str, Any]) -> Any:
    """The example of a media type, or else the example of the media type's schema."""
    if "example" in content:
        return content["example"]
    schema = content["schema"]
    if schema.get("type") == "array":
        return [example(page, {"schema": schema["items"]})]
    return page["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["example"]


def test_every_answer_and_parameter_of_a_call_has_an_example_of_its_schema() -> None:
    page = described()
    for call in (call for calls in page["paths"].values() for call in calls.values()):
        name = call["summary"]
        assert name
        assert call["description"] not in ("", name), name
        assert {"200", "default"} <= call["responses"].keys(), name
        for status, response in call["responses"].items():
            assert response["description"], (name, status)
            assert response["content"], (name, status)
            for content in response["content"].values():
                validate(page, content["schema"], example(page, content))
        for parameter in call.get("parameters", ()):
            assert parameter["description"], (name, parameter["name"])
            validate(page, parameter["schema"], parameter["schema"]["examples"][0])
        for content in call.get("requestBody", {"content": {}})["content"].values():
            validate(page, content["schema"], content["example"])


def test_every_field_of_a_schema_is_described_and_in_its_example() -> None:
    page = described()
    for name, schema in page["components"]["schemas"].items():
        assert schema["description"], name
        validate(page, {"$ref": f"#/components/schemas/{name}"}, schema["example"])
        for field, about in schema["properties"].items():
            assert about.get("description"), f"{name}.{field} has no description"
            assert field in schema["example"], f"{name}.{field} is not in the example"


# For each fault: call, status, code, query, and arguments of the HTTP request; an eviction also says where
# the request is.
PROVOKED: list[tuple[str, str, int, str, str, dict[str, Any]]] = [
    ("get", "/api/v1/flows", 400, "bad_cursor", "?cursor=nonsense", {}),
    ("get", "/api/v1/flows", 422, "bad_limit", "?limit=0", {}),
    ("get", "/api/v1/flows/{flow}", 404, "unknown_flow", "", {}),
    ("get", "/api/v1/workloads/{workload_id}", 404, "unknown_workload", "", {}),
    ("get", "/api/v1/requests/{request_id}", 404, "unknown_request", "", {}),
    ("get", "/api/v1/tenants", 404, "no_tenants", "", {}),
    ("get", "/api/v1/tenants/{tenant}", 404, "no_tenants", "", {}),
    ("patch", "/api/v1/config", 400, "bad_request", "", {"content": b"[]"}),
    ("patch", "/api/v1/config", 413, "body_too_large", "", {"content": b" " * 70_000}),
    ("patch", "/api/v1/config", 422, "bad_config", "", {"json": {"fair_request_queue": {"queue_ttl": 0}}}),
    ("patch", "/api/v1/config", 403, "not_local", "", {"headers": {"x-real-ip": "203.0.113.1"}}),
    ("post", "/api/v1/requests/{request_id}/evict", 404, "unknown_request", "", {"where": "unknown"}),
    ("post", "/api/v1/requests/{request_id}/evict", 409, "request_running", "", {"where": "running"}),
]  # fmt: skip


async def test_a_fault_is_answered_with_a_problem_document_that_has_its_code() -> None:
    store = ScriptedStore()
    app = api(NoRows(), store, parse({"admin": {"rate": 1e6}}))
    async with asking(app) as http:
        for method, path, status, code, asked, more in PROVOKED:
            store.evicting = more.get("where", "evicted")
            arguments = {name: value for name, value in more.items() if name != "where"}
            (kind,) = described()["paths"][path][method]["responses"][str(status)]["content"]
            instance = path.format(**PATH_EXAMPLES)
            answer = await http.request(method.upper(), instance + asked, **arguments)
            assert (answer.status_code, answer.headers["content-type"]) == (status, kind), (path, code)
            problem = answer.json()
            assert (problem["status"], problem["code"], problem["instance"]) == (status, code, instance)
