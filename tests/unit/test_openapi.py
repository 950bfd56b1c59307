"""The OpenAPI document of the admin API is complete, and its examples are what the API answers."""

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
PATH_EXAMPLES = {"flow": "gold", "workload_id": "chat", "request_id": "4f1d-9c", "address": "10.0.0.1:8000"}
UNAVAILABLE = StateUnavailable("the shared state did not answer within 2 s")


class NoRows:
    """Lists that are empty, and check cursors as the real ones do."""

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


def validate(page: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    """The value is valid under the schema, which may refer to the page."""
    Draft202012Validator({**schema, "components": page["components"]}).validate(value)


def example(page: dict[str, Any], content: dict[str, Any]) -> Any:
    """The example of a media type: its own, or else its schema's."""
    if "example" in content:
        return content["example"]
    schema = content["schema"]
    if schema.get("type") == "array":
        return [example(page, {"schema": schema["items"]})]
    return page["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["example"]


@pytest.mark.parametrize(("method", "path"), operations())
def test_every_answer_and_parameter_of_a_call_has_an_example_of_its_schema(method: str, path: str) -> None:
    page = described()
    call = page["paths"][path][method]
    assert call["summary"]
    assert call["description"]
    assert call["summary"] != call["description"]
    assert {"200", "default"} <= call["responses"].keys()
    for status, response in call["responses"].items():
        assert response["description"], status
        assert response["content"], status
        for kind, content in response["content"].items():
            shown = example(page, content)
            validate(page, content["schema"], shown)
            if kind == "application/problem+json":
                assert shown["status"] == (500 if status == "default" else int(status))
                assert shown["instance"] == path.format(**PATH_EXAMPLES)
    for parameter in call.get("parameters", ()):
        assert parameter["description"], parameter["name"]
        validate(page, parameter["schema"], parameter["example"])
    if "requestBody" in call:
        for content in call["requestBody"]["content"].values():
            validate(page, content["schema"], content["example"])


@pytest.mark.parametrize("name", sorted(described()["components"]["schemas"]))
def test_every_field_of_a_schema_is_described_and_in_its_example(name: str) -> None:
    page = described()
    schema = page["components"]["schemas"][name]
    assert schema["description"]
    validate(page, {"$ref": f"#/components/schemas/{name}"}, schema["example"])
    for field, about in schema["properties"].items():
        assert about.get("description"), f"{name}.{field} has no description"
        assert field in schema["example"], f"{name}.{field} is not in the example"


@pytest.mark.parametrize("path", ["flows", "queue", "inflight", "workloads"])
def test_the_example_of_a_cursor_is_a_cursor_of_its_list(path: str) -> None:
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
        ("get", "/api/v1/state", 503, "", {"view": UNAVAILABLE}),
    ],
)  # fmt: skip
async def test_a_provoked_fault_is_answered_as_in_its_example(
    method: str, path: str, status: int, asked: str, more: dict[str, Any]
) -> None:
    store, view = ScriptedStore(), View()
    store.evicting = more.pop("store", "evicted")
    view.answer = more.pop("view", view.answer)
    admin = {"token": more.pop("token", None)}
    app = api(view, store, parse({"admin": admin}), lists=cast(FleetLists, NoRows()))
    responses = app.openapi()["paths"][path][method]["responses"]
    (content,) = responses["default" if status == 500 else str(status)]["content"].values()
    async with asking(app) as http:
        answer = await http.request(method.upper(), path.format(**PATH_EXAMPLES) + asked, **more)
    assert answer.status_code == status
    assert answer.json() == content["example"]
