"""Live changes by the admin API: valid changes, permissions, and a problem document for each fault."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from admin_client import CountingMembership, NoEvents, api, asking, problem
from background import running
from clocks import Clock
from fastapi import FastAPI
from scripted_store import ScriptedStore
from tables import cases

from picker_fleet.admin import protection
from picker_fleet.admin.changes import FleetControls
from picker_fleet.admin.events import Events
from picker_fleet.admin.models import Dispatch
from picker_fleet.admin.protection import Deadlines, Tokens
from picker_fleet.admin.server import serving
from picker_fleet.domain.config import Settings, parse
from picker_fleet.domain.errors import ConfigError, StartupError, StateUnavailable
from picker_fleet.fleet.heartbeat import Membership
from picker_fleet.fleet.live_config import LIVE
from picker_fleet.state.store import Store
from picker_fleet.telemetry.logs import OneASecond

SECRETIVE = parse(
    {
        "tracing": {"endpoint": "http://user:hunter2@otel.example:4317/v1?key=hunter2"},
        "redis": {"url": "rediss://user:hunter2@redis.example:6380/3?password=hunter2"},
        "admin": {"token": "hunter2"},
        "discovery": {"file": "endpoints.yaml"},
        "models": [{"name": "llama", "criticality": "Critical"}],
    }
)
FREE = parse({"admin": {"rate": 1e6}})
WITH_TOKEN = parse({"admin": {"token": "s3cret-!", "rate": 1e6}})
ENDPOINT = "endpoints/10.0.0.1:8000"
POSTS = ("pause", "resume", "requests/r/evict", f"{ENDPOINT}/drain", f"{ENDPOINT}/undrain")
CHANGES = [*(("POST", f"/api/v1/{path}") for path in POSTS), ("PATCH", "/api/v1/config")]


@pytest.fixture
def store() -> ScriptedStore:
    store = ScriptedStore()
    store.epoch = "life"
    return store


@dataclass
class Fleet:
    """A shared state, the controls that change the state, and a client of the admin API."""

    store: ScriptedStore
    membership: CountingMembership
    controls: FleetControls
    http: httpx.AsyncClient


@pytest.fixture
async def fleet(store: ScriptedStore) -> AsyncIterator[Fleet]:
    membership = CountingMembership()
    controls = FleetControls(cast(Store, store), cast(Membership, membership), SECRETIVE)
    async with asking(api(store=store)) as http:
        yield Fleet(store, membership, controls, http)


def client_at(app: FastAPI, host: str, url: str = "http://picker.example") -> httpx.AsyncClient:
    """A client that the server sees connect from address `host`."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, client=(host, 4711)), base_url=url)


async def test_a_config_patch_is_in_force_at_once_and_null_reverts_a_change(fleet: Fleet) -> None:
    watermark = {"request_queue_controller": {"watermark_per_backend": 10}}
    patch = {"fair_request_queue": {"ordering": "edf"}, "weights": {"gold": 3}, **watermark}
    response = await fleet.http.patch("/api/v1/config", json=patch)
    assert response.status_code == 200
    config = response.json()
    assert config["config"]["fair_request_queue"]["ordering"] == "edf"
    assert config["config"]["fair_request_queue"]["flow_capacity"] == 100
    assert (config["changes"], config["weights"]) == (patch, {"gold": 3})
    assert (config["tuned_version"], config["paused"]) == ("1", False)
    assert (await fleet.http.get("/api/v1/config")).json() == config
    bounds = {
        "adaptive": 0,
        "largest_claim": 0.25,
        "lower_per": 9,
        "upper_per": 11,
        "default_prefill_cap": 10,
    }
    assert fleet.store.overrides == {"ordering": "edf", "weights": {"gold": 3}, **bounds}

    revert = {"fair_request_queue": {"ordering": None}, "weights": {"gold": None}}
    response = await fleet.http.patch("/api/v1/config", json=revert)
    assert response.json()["changes"] == watermark
    assert response.json()["config"]["fair_request_queue"]["ordering"] == "fcfs"
    assert fleet.store.overrides == bounds


async def test_an_invalid_patch_changes_nothing_and_the_problem_names_the_live_keys(fleet: Fleet) -> None:
    # test_live_changes.py covers all faults of a patch.
    patch = {"pool": "other", "fair_request_queue": {"queue_ttl": "1s"}}
    document = problem(await fleet.http.patch("/api/v1/config", json=patch), 422)
    said = [fault.partition("; valid: ")[0] for fault in document["faults"]]
    assert said == [f"{key}: cannot change live" for key in ("pool", "fair_request_queue.queue_ttl")]
    assert document["faults"] == document["detail"].splitlines()
    assert document["live"] == list(LIVE)
    assert (fleet.store.overrides, fleet.store.tunings) == ({}, 0)


BAD_BODIES = {
    "empty": (b"", 400, "not JSON"),
    "broken": (b"{", 400, "not JSON"),
    "not-a-number": (b'{"weights": {"a": NaN}}', 400, "not JSON"),
    "nested": (b"[" * 10_000, 400, "not JSON"),
    "nested objects": (b'{"a":' * 900 + b"1" + b"}" * 900, 400, "not JSON"),
    "a key twice": (b'{"weights": {"a": 1}, "weights": {}}', 400, "a key is given twice"),
    "list": (b"[]", 400, "must be a JSON object"),
    "large": (b'{"pool": "%b"}' % (b"x" * 70_000), 413, "larger than 65536 bytes"),
}


async def test_a_change_with_a_bad_body_is_answered_by_a_problem_document(store: ScriptedStore) -> None:
    async with asking(api(store=store, settings=FREE)) as http:
        for name, (body, status, detail) in BAD_BODIES.items():
            document = problem(await http.patch("/api/v1/config", content=body), status)
            assert detail in document["detail"], name


async def test_a_request_whose_body_never_ends_is_answered_408(store: ScriptedStore) -> None:
    app = api(store=store, deadlines=Deadlines(body_s=0.05))

    async with serving(app, "127.0.0.1:0") as address, asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(*address.split(":"))
        head = f"PATCH /api/v1/config HTTP/1.1\r\nhost: {address}\r\ncontent-length: 9\r\n\r\n"
        writer.write(f"{head}{{".encode())
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"application/problem+json" in answer


async def test_a_pause_of_the_queue_stays_in_force_through_other_changes_until_resume(fleet: Fleet) -> None:
    assert (await fleet.http.post("/api/v1/pause")).json() == {"paused": True, "tuned_version": "1"}
    for cap in (5, None):
        response = await fleet.http.patch("/api/v1/config", json={"workloads": {"rate_cap": cap}})
        assert response.json()["paused"] is True
    assert fleet.store.overrides == {"paused": 1}
    assert (await fleet.http.post("/api/v1/resume")).json() == {"paused": False, "tuned_version": "4"}
    assert fleet.store.overrides == {}


async def test_a_change_to_an_unpublished_pool_is_answered_503(fleet: Fleet) -> None:
    fleet.store.epoch = "0"
    for method, path in (("POST", "/api/v1/pause"), ("PATCH", "/api/v1/config")):
        response = await fleet.http.request(method, path, json={"workloads": {"rate_cap": 5}})
        document = problem(response, 503)
        assert document["code"] == "state_unavailable"
        assert "not known yet" in document["detail"]


@pytest.mark.parametrize("answers", [True, False])
async def test_every_change_is_answered_503_if_the_shared_state_fails_or_never_answers(
    store: ScriptedStore, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    async def unavailable(*_: object) -> Any:
        if not answers:
            await asyncio.Event().wait()
        raise StateUnavailable("nobody answers")

    for name in ("set_live_config", "live_config", "evict", "mark_endpoint"):
        monkeypatch.setattr(store, name, unavailable)
    async with asking(api(store=store, deadlines=Deadlines(change_s=0.02))) as http:
        for method, path in [*CHANGES, ("GET", "/api/v1/config")]:
            detail = problem(await http.request(method, path, json={}), 503)["detail"]
            assert ("nobody" if answers else "within 0.02 s") in detail


NO_TOKEN = [None, "", "Bearer", "Bearer wrong", "Bearer ü", "Basic s3cret-!", "s3cret-!", "Bearer s3cret-!2"]


async def test_a_change_without_a_token_is_answered_401(store: ScriptedStore) -> None:
    async with asking(api(store=store, settings=WITH_TOKEN)) as http:
        for header in NO_TOKEN:
            headers = {} if header is None else {"authorization": header.encode()}
            for method, path in CHANGES:
                response = await http.request(method, path, json={"nonsense": 1}, headers=headers)
                assert problem(response, 401)["code"] == "token_needed", (header, path)
                assert response.headers["www-authenticate"].startswith("Bearer")
    assert store.tunings == 0


@pytest.fixture
def with_roles(tmp_path: Path) -> Settings:
    for name in ("alice", "bob"):
        (tmp_path / name).write_text(f"{name}-s3cret\n")
    tokens = [{"file": str(tmp_path / "alice"), "role": "viewer"}]
    tokens += [{"file": str(tmp_path / "bob"), "role": "operator"}]
    return parse({"admin": {"token": "s3cret-!", "tokens": tokens, "hosts": ["picker.example"]}})


OPEN = ["/healthz", "/readyz", "/metrics", "/", "/static/api.js", "/openapi.json"]
ROLES = {
    "no token": ("", 401, 401),
    "a wrong token": ("alice-s3cre", 401, 401),
    "a viewer's token": ("alice-s3cret", 200, 403),
    "an operator's token": ("bob-s3cret", 200, 200),
    "the token of admin.token": ("s3cret-!", 200, 200),
}


@cases("token, read, changed", ROLES)
async def test_reads_need_a_viewers_token_and_changes_an_operators_token(
    store: ScriptedStore, with_roles: Settings, token: str, read: int, changed: int
) -> None:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with client_at(api(store=store, settings=with_roles), "203.0.113.9") as http:
        reads = [
            await http.get(f"/api/v1/{path}", headers=headers) for path in ("state", "config", "changes")
        ]
        assert [answer.status_code for answer in reads] == [read] * 3
        answer = await http.post("/api/v1/pause", headers=headers)
        assert answer.status_code == changed
        if changed == 403:
            assert problem(answer, 403)["code"] == "operator_needed"
        assert [(await http.get(path)).status_code for path in OPEN] == [200] * len(OPEN)
    assert store.overrides == ({"paused": 1} if changed == 200 else {})


async def test_refused_calls_of_the_admin_api_are_logged(
    store: ScriptedStore, with_roles: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    async with client_at(api(store=store, settings=with_roles), "203.0.113.9") as http:
        for _ in range(20):
            await http.get("/api/v1/requests/%E2%80%AE", headers={"authorization": "Bearer s3cre"})
    lines = [record.getMessage() for record in caplog.records if "an admin API call" in record.message]
    assert 1 <= len(lines) < 20
    assert "203.0.113.9" in lines[0]
    assert "401" in lines[0]
    assert "s3cre" not in lines[0]


async def test_a_token_file_is_read_again_after_a_change(with_roles: Settings, tmp_path: Path) -> None:
    clock = Clock()
    tokens = Tokens(with_roles.admin, clock)

    def known(*names: str) -> list[bool]:
        clock.now_s += 10
        return [tokens.find(name.encode()) is not None for name in names]

    assert known("alice-s3cret", "alice-new") == [True, False]
    (tmp_path / "alice").write_text("alice-new")
    assert known("alice-s3cret", "alice-new") == [False, True]
    # Deleting a token file gives no caller a right.
    for name in ("alice", "bob"):
        (tmp_path / name).unlink()
    assert known("alice-new", "bob-s3cret", "", "s3cret-!") == [False, False, False, True]
    assert tokens.needed


async def test_an_event_stream_ends_when_its_token_is_removed(
    store: ScriptedStore, with_roles: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protection, "_RELOAD_S", 0.0)
    events = Events(NoEvents(), interval_s=0.01)
    headers = {"authorization": "Bearer alice-s3cret"}
    async with (
        asking(api(store=store, settings=with_roles, events=events)) as http,
        http.stream("GET", "/api/v1/events", headers=headers) as response,
        running(events.run()),
    ):
        assert response.status_code == 200
        (tmp_path / "alice").unlink()
        async with asyncio.timeout(30):
            async for _ in response.aiter_lines():
                pass


async def test_an_empty_token_file_counts_as_no_token_until_a_token_is_written(tmp_path: Path) -> None:
    file, clock = tmp_path / "token", Clock()
    file.write_text("\n")
    tokens = Tokens(parse({"admin": {"token_file": str(file)}}).admin, clock)
    assert not tokens.needed
    for text, found in (("s3cret-!", True), ("", False)):
        file.write_text(text)
        clock.now_s += 10
        assert (tokens.find(b"s3cret-!") is not None, tokens.needed) == (found, True)


def test_a_missing_token_file_prevents_the_start_of_a_replica(tmp_path: Path) -> None:
    settings = parse({"admin": {"tokens": [{"file": str(tmp_path / "missing"), "role": "viewer"}]}})
    with pytest.raises(StartupError, match="missing"):
        Tokens(settings.admin)


async def test_each_change_is_logged_and_listed_with_its_operator(
    store: ScriptedStore, with_roles: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    headers, weights = {"authorization": "Bearer bob-s3cret"}, {"weights": {"gold": 3}}
    async with client_at(api(store=store, settings=with_roles), "203.0.113.9") as http:
        await http.patch("/api/v1/config", json=weights, headers=headers)
        await http.post("/api/v1/requests/r%E2%80%AE1/evict", headers=headers)
        store.evicting = "unknown"
        await http.post("/api/v1/requests/r2/evict", headers=headers)  # changes nothing
        await http.patch("/api/v1/config", json={"nonsense": 1}, headers=headers)
        listed = (await http.get("/api/v1/changes", headers=headers)).json()["changes"]
    assert [(each["by"], each["address"], each["outcome"]) for each in listed] == [
        ("bob", "203.0.113.9", "made")
    ] * 2
    assert [each["change"] for each in listed] == [
        "POST /api/v1/requests/r\u202e1/evict",
        "PATCH /api/v1/config",
    ]
    assert json.loads(listed[1]["detail"]) == weights
    lines = [record.getMessage() for record in caplog.records if "change by" in record.message]
    assert len(lines) == 2
    assert all("bob" in line and "\u202e" not in line for line in lines)


async def test_each_of_several_changes_within_a_second_has_a_log_line(
    store: ScriptedStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with client_at(api(store=store), LOCAL, "http://127.0.0.1:8081") as http:
        with caplog.filtering(OneASecond()):
            for call in ("pause", "resume", "pause"):
                await http.post(f"/api/v1/{call}")
    assert [line.message.split("'")[1][-6:] for line in caplog.records] == ["/pause", "resume", "/pause"]


async def test_a_change_that_redis_does_not_confirm_is_listed_as_unknown(
    store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unavailable(*_: object) -> Any:
        raise StateUnavailable("nobody answers")

    monkeypatch.setattr(store, "set_live_config", unavailable)
    async with client_at(api(store=store), LOCAL, "http://127.0.0.1:8081") as http:
        assert (await http.post("/api/v1/pause")).status_code == 503
        (change,) = (await http.get("/api/v1/changes")).json()["changes"]
    assert (change["by"], change["outcome"]) == (LOCAL, "unknown")


async def test_a_malformed_host_header_is_answered_400(store: ScriptedStore) -> None:
    async with asking(api(store=store, settings=FREE)) as http:
        for host in ("[", "[::1", "a]b"):
            for method, path in [*CHANGES, ("GET", "/api/v1/state"), ("POST", "/nonsense")]:
                answer = await http.request(method, path, headers={"host": host})
                assert problem(answer, 400)["code"] == "bad_host", (host, method, path)


LOCAL = "127.0.0.1"
ELSEWHERE: dict[str, tuple[str, dict[str, str]]] = {
    **{address: (address, {}) for address in ("203.0.113.9", "::ffff:203.0.113.9", "not-an-address")},
    "through a proxy": (LOCAL, {"x-forwarded-for": "127.0.0.1"}),
    "through a proxy that sends Forwarded": (LOCAL, {"forwarded": "for=203.0.113.9"}),
    "under another name": (LOCAL, {"host": "rebound.example"}),
    "from a page of another host": (LOCAL, {"origin": "http://evil.example"}),
    "from a page without a host": (LOCAL, {"origin": "null"}),
    "from a page of a malformed host": (LOCAL, {"origin": "http://["}),
}


async def test_with_no_token_configured_a_change_from_another_machine_is_answered_403(
    store: ScriptedStore,
) -> None:
    app = api(store=store, settings=FREE)
    for name, (client, headers) in ELSEWHERE.items():
        async with client_at(app, client, "http://127.0.0.1:8081") as http:
            for method, path in CHANGES:
                response = await http.request(method, path, json={}, headers=headers)
                assert "admin.token" in problem(response, 403)["detail"], (name, path)
            reads = 421 if "host" in headers else 200
            assert (await http.get("/api/v1/config", headers=headers)).status_code == reads, name
    assert store.tunings == 0


HERE = [(LOCAL, LOCAL), (LOCAL, "localhost"), ("::1", "[::1]"), ("::ffff:127.0.0.1", LOCAL)]


async def test_with_no_token_configured_this_machine_and_its_dashboard_may_make_changes(
    store: ScriptedStore,
) -> None:
    app = api(store=store, settings=FREE)
    for client, host in HERE:
        url = f"http://{host}:8081"
        async with client_at(app, client, url) as http:
            assert (await http.post("/api/v1/pause")).status_code == 200, (client, host)
            assert (await http.post("/api/v1/resume", headers={"origin": url})).status_code == 200


async def test_the_configuration_is_shown_without_its_secrets(fleet: Fleet) -> None:
    shown = await fleet.controls.config()
    assert "hunter2" not in str(shown)
    assert shown.config["redis"]["url"] == "rediss://redis.example:6380/3"
    assert shown.config["tracing"]["endpoint"] == "http://otel.example:4317/v1"
    assert shown.config["admin"]["token"] == "(set)"
    assert shown.config["discovery"]["file"] == "endpoints.yaml"
    assert shown.config["models"][0]["criticality"] == "Critical"
    assert "fair_request_queue.ordering" in shown.live


async def test_a_live_change_that_contradicts_an_earlier_live_change_is_refused(fleet: Fleet) -> None:
    await fleet.controls.change({"fair_request_queue": {"total_capacity": 200}})
    with pytest.raises(ConfigError, match="flow_capacity 300 exceeds total_capacity 200"):
        await fleet.controls.change({"fair_request_queue": {"flow_capacity": 300}})
    assert fleet.store.changes == {"fair_request_queue.total_capacity": 200}
    assert fleet.store.tunings == 1


async def test_changes_that_two_replicas_make_at_the_same_time_are_both_in_force(fleet: Fleet) -> None:
    deviation = "request_queue_controller.percentage_deviation_for_bounds"
    bounds = {"adaptive": 0, "largest_claim": 0.25}
    overrides = {"weights": {"b": 2}, "lower_per": 1.0, "upper_per": 3.0, **bounds}
    fleet.store.meanwhile = (overrides, {"weights.b": 2, deviation: 0.5})
    watermark = {"watermark_per_backend": 10}
    shown = await fleet.controls.change({"weights": {"a": 1}, "request_queue_controller": watermark})
    assert shown.weights == {"a": 1, "b": 2}
    bounds |= {"lower_per": 5.0, "upper_per": 15.0, "default_prefill_cap": 10}
    assert fleet.store.overrides == {"weights": {"a": 1, "b": 2}, **bounds}
    assert fleet.store.changes[deviation] == 0.5


async def test_each_live_change_makes_the_replica_send_a_heartbeat_at_once(fleet: Fleet) -> None:
    await fleet.controls.change({"workloads": {"rate_cap": 5}})
    assert await fleet.controls.pause(True) == Dispatch(paused=True, tuned_version="2")
    await fleet.controls.drain("10.0.0.1:8000", True)
    assert fleet.membership.heartbeats == 3


async def test_live_changes_that_contradict_this_configuration_are_shown_and_can_be_reverted(
    fleet: Fleet,
) -> None:
    fleet.store.version, fleet.store.changes = "3", {"fair_request_queue.total_capacity": 10}
    shown = await fleet.controls.config()
    assert shown.config["fair_request_queue"]["total_capacity"] == 1000
    assert shown.changes == {"fair_request_queue": {"total_capacity": 10}}
    await fleet.controls.change({"fair_request_queue": {"total_capacity": None}})
    assert fleet.store.changes == {}
