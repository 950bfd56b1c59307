"""The admin API's own description: complete, with examples that are what the API really answers."""

import functools
from typing import Any, cast

import pytest
from admin_client import View, api, asking
from jsonschema import Draft202012Validator
from scripted_store import ScriptedStore

from picker_fleet.admin.models import Flows
from picker_fleet.admin.views import FleetLists, decode_cursor
from picker_fleet.config import parse
from picker_fleet.errors import StateUnavailable

METHODS = ("get", "post", "patch")
PLACES = {"flow": "gold", "workload_id": "chat", "request_id": "4f1d-9c", "address": "10.0.0.1:8000"}
LATE = StateUnavailable("the shared state did not answer within 2 s")


class Nobody:
    """Lists that know of nothing, and read cursors as the real ones do."""

    async def flows(self, limit: int, cursor: str | None, band: Any) -> Flows:
        decode_cursor(str(cursor), "flows", int, str, str)
        return Flows(flows=[], total=0, cursor=None)

    async def flow(self, name: str) -> None: ...

    async def workload(self, name: str) -> None: ...

    async def request(self, request_id: str) -> None: ...


@functools.cache
def described() -> dict[str, Any]:
    return api().openapi()


def operations() -> list[tuple[str, str]]:
    return [(method, path) for path, calls in described()["paths"].items() for method in calls]


def fits(page: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    """The value is of the schema, which may point into the page."""
    Draft202012Validator({**schema, "components": page["components"]}).validate(value)


def example(page: dict[str, Any], content: dict[str, Any]) -> Any:
    """Of a media type: its own, else its schema's, as OpenAPI has it."""
    if "example" in content:
        return content["example"]
    schema = content["schema"]
    if schema.get("type") == "array":
        return [example(page, {"schema": schema["items"]})]
    return page["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["example"]


@pytest.mark.parametrize(("method", "path"), operations())
def test_given_a_call_when_its_description_is_read_then_every_answer_has_an_example_that_fits(
    method: str, path: str
) -> None:
    page = described()
    call = page["paths"][path][method]
    # Given the call's words
    assert call["summary"]
    assert call["description"]
    assert call["summary"] != call["description"]
    # Then each answer, good or bad, has an example of its own schema
    assert {"200", "default"} <= call["responses"].keys()
    for status, response in call["responses"].items():
        assert response["description"], status
        assert response["content"], status
        for kind, content in response["content"].items():
            shown = example(page, content)
            fits(page, content["schema"], shown)
            if kind == "application/problem+json":
                assert shown["status"] == (500 if status == "default" else int(status))
                assert shown["instance"] == path.format(**PLACES)
    # And so does each parameter, and the body
    for parameter in call.get("parameters", ()):
        assert parameter["description"], parameter["name"]
        fits(page, parameter["schema"], parameter["example"])
    if "requestBody" in call:
        for content in call["requestBody"]["content"].values():
            fits(page, content["schema"], content["example"])


@pytest.mark.parametrize("name", sorted(described()["components"]["schemas"]))
def test_given_a_schema_when_read_then_each_field_is_described_and_in_the_example(name: str) -> None:
    page = described()
    schema = page["components"]["schemas"][name]
    assert schema["description"]
    fits(page, {"$ref": f"#/components/schemas/{name}"}, schema["example"])
    for field, about in schema["properties"].items():
        assert about.get("description"), f"{name}.{field} has no description"
        assert field in schema["example"], f"{name}.{field} is not in the example"


@pytest.mark.parametrize("path", ["flows", "queue", "inflight", "workloads"])
def test_given_a_list_when_its_cursors_example_is_read_then_it_is_a_cursor_of_this_list(path: str) -> None:
    kinds = {"inflight": (str, str), "workloads": (str, int)}.get(path, (int, str, str))
    (parameter,) = [
        each for each in described()["paths"][f"/api/v1/{path}"]["get"]["parameters"]
        if each["name"] == "cursor"
    ]  # fmt: skip
    assert decode_cursor(parameter["example"], path, *kinds)


@pytest.mark.parametrize(
    ("method", "path", "status", "asked", "more"),
    [
        ("get", "/api/v1/flows", 400, "?cursor=nonsense", {}),
        ("get", "/api/v1/flows", 422, "?limit=0", {}),
        ("get", "/api/v1/flows/{flow}", 404, "", {}),
        ("get", "/api/v1/workloads/{workload_id}", 404, "", {}),
        ("get", "/api/v1/requests/{request_id}", 404, "", {}),
        ("patch", "/api/v1/config", 400, "", {"content": b"[]"}),
        ("patch", "/api/v1/config", 413, "", {"content": b" " * 70_000}),
        ("patch", "/api/v1/config", 422, "", {"json": {"fair_request_queue": {"total_capacity": 0}}}),
        ("patch", "/api/v1/config", 403, "", {"headers": {"x-real-ip": "203.0.113.1"}}),
        ("post", "/api/v1/requests/{request_id}/evict", 404, "", {"store": "unknown"}),
        ("post", "/api/v1/requests/{request_id}/evict", 409, "", {"store": "running"}),
        ("post", "/api/v1/pause", 401, "", {"token": "s3cret"}),
        ("get", "/api/v1/state", 500, "", {"view": KeyError("inside")}),
        ("get", "/api/v1/state", 503, "", {"view": LATE}),
    ],
)  # fmt: skip
async def test_given_a_fault_when_it_is_provoked_then_the_answer_is_its_example(
    method: str, path: str, status: int, asked: str, more: dict[str, Any]
) -> None:
    # Given a replica that has this fault, and what its page says of it
    store, view = ScriptedStore(), View()
    store.evicting = more.pop("store", "evicted")
    view.answer = more.pop("view", view.answer)
    admin = {"token": more.pop("token", None)}
    app = api(view, store, parse({"admin": admin}), lists=cast(FleetLists, Nobody()))
    responses = app.openapi()["paths"][path][method]["responses"]
    (content,) = responses["default" if status == 500 else str(status)]["content"].values()
    # When it is provoked
    async with asking(app) as http:
        answer = await http.request(method.upper(), path.format(**PLACES) + asked, **more)
    # Then the answer is the example, to the letter
    assert answer.status_code == status
    assert answer.json() == content["example"]
