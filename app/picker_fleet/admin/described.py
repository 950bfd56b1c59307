"""What the OpenAPI page says besides the routes themselves: each fault as it really comes, with an example.

Examples are data for the page alone; that they are as the API answers is held by tests/unit/test_openapi.py.
"""

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI

from picker_fleet.admin.cursor import BadCursor
from picker_fleet.admin.listed import CURSORS
from picker_fleet.live_config import LIVE

_JSON, _PROBLEM = "application/json", "application/problem+json"
_PLACES = {"flow": "gold", "workload_id": "chat", "request_id": "4f1d-9c", "address": "10.0.0.1:8000"}
_LATE = ("state_unavailable", "the shared state did not answer within 2 s")
# By status; or by status and path, where one fault of this status is likelier than the others.
_FAULTS: dict[tuple[str, str], tuple[str, str]] = {
    ("400", ""): ("bad_cursor", str(BadCursor())),
    ("400", "/api/v1/config"): ("bad_request", "the body must be a JSON object of sections"),
    ("401", ""): ("token_needed", "the bearer token of this fleet is needed"),
    ("403", ""): (
        "not_local",
        "without an admin.token in the configuration only this machine may make changes",
    ),
    ("404", "/api/v1/flows/{flow}"): (
        "unknown_flow",
        "no request of this flow waits, and none was served of late",
    ),
    ("404", "/api/v1/workloads/{workload_id}"): ("unknown_workload", "no such workload has asked of late"),
    ("404", "/api/v1/requests/{request_id}"): (
        "unknown_request",
        "neither the pool nor this replica knows of the request",
    ),
    ("404", "/api/v1/requests/{request_id}/evict"): ("unknown_request", "no such request waits"),
    ("404", ""): ("unknown_endpoint", "no endpoint 10.0.0.1:8000"),
    ("408", ""): ("body_too_slow", "the body did not come within 5 s"),
    ("409", ""): ("request_running", "the request has left the queue already"),
    ("413", ""): ("body_too_large", "the body is larger than 65536 bytes"),
    ("422", ""): ("bad_limit", "query.limit: Input should be greater than or equal to 1"),
    ("422", "/api/v1/config"): (
        "bad_config",
        "fair_request_queue.total_capacity: Input should be greater than or equal to 1 (got '0')",
    ),
    ("429", ""): (
        "too_many_calls",
        "more than 200 calls a second from one client (a change counts as 10)",
    ),
    ("500", ""): ("internal_error", "the replica failed to answer: KeyError"),
    ("503", ""): _LATE,
    ("503", "/api/v1/events"): (
        "too_many_listeners",
        "no more can listen to this replica; ask another",
    ),
}
_ELSEWHERE = "default"  # any other fault; 500 stands for them
# The details of these do not begin with the call.
_BARE = ("bad_cursor", "bad_limit", "bad_config", "internal_error", "state_unavailable")


def add(app: FastAPI) -> None:
    """Let the OpenAPI page of `app` say that problem documents are such and not plain JSON, with examples."""
    plain = app.openapi

    def page() -> dict[str, Any]:
        if app.openapi_schema is None:
            for path, methods in plain()["paths"].items():
                for method, call in methods.items():
                    _parameters(call.get("parameters", ()), path)
                    for status, response in call["responses"].items():
                        _as_problem(response.get("content", {}), status, method.upper(), path)
        return plain()

    app.openapi = page  # type: ignore[method-assign]


def _parameters(parameters: Any, path: str) -> None:
    """Tools look for a parameter's example beside its schema, and some only there."""
    for parameter in parameters:
        if parameter["name"] == "cursor":  # each list knows its own only
            parameter["example"] = CURSORS[path.rpartition("/")[2]]
        else:
            parameter["example"] = parameter["schema"]["examples"][0]


def _as_problem(content: dict[str, Any], status: str, method: str, path: str) -> None:
    described = content.get(_JSON, {})
    if described.get("schema", {}).get("$ref", "").endswith("/Problem"):
        content[_PROBLEM] = {**content.pop(_JSON), "example": problem(status, method, path)}


def problem(status: str, method: str, path: str) -> dict[str, Any]:
    """The problem document of a fault of this status (`default`: 500) on a route's path."""
    status = "500" if status == _ELSEWHERE else status
    code, text = _FAULTS.get((status, path)) or _FAULTS[status, ""]
    instance = path.format(**_PLACES)
    document: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(int(status)).phrase,
        "status": int(status),
        "code": code,
        "detail": text if code in _BARE else f"{method} {instance}: {text}",
        "instance": instance,
    }
    if status == "422":
        document["faults"] = [text]
    if code == "bad_config":
        document["live"] = list(LIVE)
    return document
