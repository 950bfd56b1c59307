"""Changing the fleet over HTTP: who may, what may change, and a problem document for every fault."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from admin_client import STATE, View, api, asking, problem
from scripted_store import ScriptedStore

from picker_fleet.admin.protection import Deadlines
from picker_fleet.admin.server import serving
from picker_fleet.config import parse
from picker_fleet.errors import StateUnavailable
from picker_fleet.live_config import LIVE

TOKEN = parse({"admin": {"token": "s3cret-!", "hosts": ["picker.example"]}})
CHANGES = [
    ("POST", "/api/v1/pause"),
    ("POST", "/api/v1/resume"),
    ("POST", "/api/v1/requests/r/evict"),
    ("POST", "/api/v1/endpoints/10.0.0.1:8000/drain"),
    ("POST", "/api/v1/endpoints/10.0.0.1:8000/undrain"),
    ("PATCH", "/api/v1/config"),
]


@pytest.fixture
def store() -> ScriptedStore:
    store = ScriptedStore()
    store.epoch = "life"
    return store


@pytest.fixture
async def http(store: ScriptedStore) -> AsyncIterator[httpx.AsyncClient]:
    async with asking(api(store=store)) as client:
        yield client


async def test_given_a_partial_tree_when_patched_then_it_is_in_force_and_shown(
    http: httpx.AsyncClient, store: ScriptedStore
) -> None:
    # When bounds and an ordering change
    response = await http.patch(
        "/api/v1/config",
        json={
            "fair_request_queue": {"ordering": "edf"},
            "request_queue_controller": {"watermark_per_backend": 10},
        },
    )

    # Then the answer is the configuration in force, which GET shows too
    assert response.status_code == 200
    shown = response.json()
    assert shown["config"]["fair_request_queue"]["ordering"] == "edf"
    assert shown["tuned_version"] == "1"
    assert (await http.get("/api/v1/config")).json() == shown
    assert store.overrides == {"ordering": "edf", "lower_per": 9, "upper_per": 11}

    # When null takes one back, then the other stays
    response = await http.patch("/api/v1/config", json={"fair_request_queue": {"ordering": None}})
    assert response.json()["changes"] == {"request_queue_controller": {"watermark_per_backend": 10}}
    assert response.json()["config"]["fair_request_queue"]["ordering"] == "fcfs"


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        ({"pool": "other"}, "pool: cannot change live"),
        ({"fair_request_queue": {"queue_ttl": "1s"}}, "fair_request_queue.queue_ttl: cannot change live"),
        ({"fair_request_queue": {"flow_capacity": 5000}}, "flow_capacity 5000 exceeds total_capacity 1000"),
        ({"weights": {"go\x1fld": 2}}, "is no flow's key"),
        ({"weights": {"gold": -1}}, "weights.gold: must be a number from 0.001"),
    ],
)
async def test_given_a_patch_that_cannot_be_when_sent_then_the_problem_names_it_and_lists_the_live_keys(
    http: httpx.AsyncClient, store: ScriptedStore, patch: dict[str, Any], says: str
) -> None:
    document = problem(await http.patch("/api/v1/config", json=patch), 422)
    assert says in document["detail"]
    assert document["faults"] == document["detail"].splitlines()
    assert document["live"] == list(LIVE)
    assert (store.overrides, store.tunings) == ({}, 0)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b'{"weights": {"a": NaN}}', 400, "not JSON"),
        (b"[" * 10_000, 400, "not JSON"),
        (b"[]", 400, "must be a JSON object"),
        (b'{"pool": "' + b"x" * 70_000 + b'"}', 413, "larger than 65536 bytes"),
    ],
    ids=["empty", "broken", "not-a-number", "nested", "list", "large"],
)
async def test_given_a_bad_body_when_patched_then_the_problem_says_why(
    http: httpx.AsyncClient, body: bytes, status: int, says: str
) -> None:
    assert says in problem(await http.patch("/api/v1/config", content=body), status)["detail"]


async def test_given_a_body_that_never_ends_when_patched_then_the_problem_is_a_408(
    store: ScriptedStore,
) -> None:
    # Given a client that announces more than it sends
    app = api(store=store, deadlines=Deadlines(body_s=0.05))
    async with serving(app, "127.0.0.1:0") as address, asyncio.timeout(10):
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            f"PATCH /api/v1/config HTTP/1.1\r\nhost: {address}\r\ncontent-length: 9\r\n\r\n{{".encode()
        )

        # Then it is answered all the same
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"application/problem+json" in head
        writer.close()
        await writer.wait_closed()


async def test_given_a_fleet_when_paused_and_resumed_then_the_shared_state_has_it(
    http: httpx.AsyncClient, store: ScriptedStore
) -> None:
    assert (await http.post("/api/v1/pause")).json() == {"paused": True, "tuned_version": "1"}
    assert store.overrides == {"paused": 1}
    assert (await http.get("/api/v1/config")).json()["paused"] is True
    assert (await http.post("/api/v1/resume")).json() == {"paused": False, "tuned_version": "2"}
    assert store.overrides == {}


async def test_given_a_paused_fleet_when_its_state_is_read_then_it_says_so() -> None:
    view = View()
    view.answer = {**STATE, "paused": True, "tuned_version": "7"}
    async with asking(api(view)) as http:
        state = (await http.get("/api/v1/state")).json()
    assert (state["paused"], state["tuned_version"]) == (True, "7")


async def test_given_a_request_when_evicted_then_it_is_gone_or_the_problem_says_where_it_is(
    http: httpx.AsyncClient, store: ScriptedStore
) -> None:
    assert (await http.post("/api/v1/requests/r-1/evict")).json() == {"id": "r-1", "result": "evicted"}
    store.evicting = "running"
    assert "left the queue" in problem(await http.post("/api/v1/requests/r-1/evict"), 409)["detail"]
    store.evicting = "unknown"
    assert "no such request" in problem(await http.post("/api/v1/requests/r-1/evict"), 404)["detail"]


async def test_given_an_endpoint_when_drained_and_let_in_again_then_the_shared_state_is_told(
    http: httpx.AsyncClient, store: ScriptedStore
) -> None:
    address = (await http.get("/api/v1/endpoints")).json()[0]["address"]
    drained = await http.post(f"/api/v1/endpoints/{address}/drain")
    assert drained.json() == {"address": address, "drained": True}
    undrained = await http.post(f"/api/v1/endpoints/{address}/undrain")
    assert undrained.json() == {"address": address, "drained": False}
    assert store.marks == [(address, "drained", True), (address, "drained", False)]
    assert "10.9.9.9:1" in problem(await http.post("/api/v1/endpoints/10.9.9.9:1/drain"), 404)["detail"]


async def test_given_an_unknown_pool_when_changed_then_the_problem_is_a_503(
    http: httpx.AsyncClient, store: ScriptedStore
) -> None:
    store.epoch = "0"
    assert problem(await http.post("/api/v1/pause"), 503)["code"] == "state_unavailable"


async def test_given_an_unreachable_state_when_asked_then_every_route_is_a_503(
    store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(*_: object) -> Any:
        raise StateUnavailable("nobody answers")

    for name in ("set_live_config", "live_config", "evict", "mark_endpoint"):
        monkeypatch.setattr(store, name, gone)
    async with asking(api(store=store)) as http:
        for method, path in [*CHANGES, ("GET", "/api/v1/config")]:
            document = problem(await http.request(method, path, json={}), 503)
            assert document["detail"] == "nobody answers"


async def test_given_a_state_that_never_answers_when_asked_then_every_route_is_a_503(
    store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(*_: object) -> Any:
        await asyncio.Event().wait()

    for name in ("set_live_config", "live_config", "evict", "mark_endpoint"):
        monkeypatch.setattr(store, name, silent)
    async with asking(api(store=store, deadlines=Deadlines(change_s=0.02))) as http:
        for method, path in [*CHANGES, ("GET", "/api/v1/config")]:
            assert "did not answer" in problem(await http.request(method, path, json={}), 503)["detail"]


@pytest.mark.parametrize(("method", "path"), CHANGES)
@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer wrong", "Bearer ü", "Basic s3cret-!", "s3cret-!", "Bearer s3cret-!2"],
)
async def test_given_a_token_when_changed_without_it_then_the_problem_is_a_401(
    store: ScriptedStore, method: str, path: str, header: str | None
) -> None:
    async with asking(api(store=store, settings=TOKEN)) as http:
        headers = {} if header is None else {"authorization": header.encode()}
        response = await http.request(method, path, json={"nonsense": 1}, headers=headers)
    assert "bearer token" in problem(response, 401)["detail"]
    assert response.headers["www-authenticate"].startswith("Bearer")
    assert store.tunings == 0


async def test_given_a_token_when_changed_with_it_then_anyone_may_and_reading_needs_none(
    store: ScriptedStore,
) -> None:
    app = api(store=store, settings=TOKEN)
    transport = httpx.ASGITransport(app, client=("203.0.113.9", 4711))
    bearer = {"authorization": b"bearer s3cret-!"}
    async with httpx.AsyncClient(transport=transport, base_url="http://picker.example") as http:
        assert (await http.post("/api/v1/pause", headers=bearer)).status_code == 200
        assert (await http.get("/api/v1/config")).status_code == 200
        assert (await http.get("/api/v1/state")).status_code == 200
    assert store.overrides == {"paused": 1}


LOCAL = ("127.0.0.1", 4711)


@pytest.mark.parametrize(
    ("client", "headers"),
    [
        (("203.0.113.9", 4711), {}),
        (("::ffff:203.0.113.9", 4711), {}),
        (("not-an-address", 4711), {}),
        (LOCAL, {"x-forwarded-for": "127.0.0.1"}),
        (LOCAL, {"forwarded": "for=203.0.113.9"}),
        (LOCAL, {"host": "rebound.example"}),
        (LOCAL, {"origin": "http://evil.example"}),
        (LOCAL, {"origin": "null"}),
    ],
)
async def test_given_no_token_when_changed_from_elsewhere_then_the_problem_is_a_403(
    store: ScriptedStore, client: tuple[str, int], headers: dict[str, str]
) -> None:
    transport = httpx.ASGITransport(api(store=store), client=client)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8081") as http:
        for method, path in CHANGES:
            response = await http.request(method, path, json={}, headers=headers)
            assert "admin.token" in problem(response, 403)["detail"]
        reads = 421 if "host" in headers else 200
        assert (await http.get("/api/v1/config", headers=headers)).status_code == reads
    assert store.tunings == 0


@pytest.mark.parametrize(
    ("client", "base"),
    [
        (LOCAL, "http://127.0.0.1:8081"),
        (LOCAL, "http://localhost:8081"),
        (("::1", 4711), "http://[::1]:8081"),
        (("::ffff:127.0.0.1", 4711), "http://127.0.0.1:8081"),
    ],
)
async def test_given_no_token_when_changed_from_this_machine_or_its_own_page_then_it_is_done(
    store: ScriptedStore, client: tuple[str, int], base: str
) -> None:
    transport = httpx.ASGITransport(api(store=store), client=client)
    async with httpx.AsyncClient(transport=transport, base_url=base) as http:
        assert (await http.post("/api/v1/pause")).status_code == 200
        assert (await http.post("/api/v1/resume", headers={"origin": base})).status_code == 200


async def test_given_the_openapi_page_when_read_then_changes_are_described(http: httpx.AsyncClient) -> None:
    paths = (await http.get("/openapi.json")).json()["paths"]
    assert {"get", "patch"} <= set(paths["/api/v1/config"])
    body = paths["/api/v1/config"]["patch"]["requestBody"]["content"]["application/json"]
    assert "weights" in body["example"]
    assert paths["/api/v1/pause"]["post"]["security"]
    assert {"404", "409"} <= set(paths["/api/v1/requests/{request_id}/evict"]["post"]["responses"])
