"""The admin API on its real server: health, metrics, state, the dashboard's files, and problem documents."""

import base64
import csv
import hashlib
import re
import socket
from collections.abc import AsyncIterator
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import orjson
import pytest
from admin_client import STATE, View, api, asking, problem
from tables import cases

from picker_fleet.admin.documents import FOLDER, content_security_policy
from picker_fleet.admin.protection import Deadlines
from picker_fleet.admin.server import serving
from picker_fleet.admin.usage import Row, UsageExport
from picker_fleet.domain.errors import StartupError, StateUnavailable
from picker_fleet.state.reads import Usage
from picker_fleet.telemetry.metrics import Metrics

HEALTH = {
    "ready": (True, "ok", "", (200, "ok"), (200, "ok")),
    "not ready": (False, "no answer within 50 ms", "", (200, "degraded"), (503, "unready")),
    "full": (True, "ok", "all 20000 streams are taken", (200, "degraded"), (503, "unready")),
}


@cases("ready, redis, full, health, readiness", HEALTH)
async def test_health_and_readiness_answers_name_the_components_of_a_replica(
    ready: bool, redis: str, full: str, health: tuple[int, str], readiness: tuple[int, str]
) -> None:
    view = View()
    view.is_ready, view.components = ready, {"redis": redis}
    async with asking(api(view, full=full)) as http:
        for path, (code, status) in (("/healthz", health), ("/readyz", readiness)):
            answer = await http.get(path)
            components = {"redis": redis, "grpc": full or "ok"}
            shown = {"status": status, "replica": "r-1", "pool": "default", "components": components}
            assert (answer.status_code, answer.json()) == (code, shown)


async def test_metrics_are_served_as_prometheus_text() -> None:
    metrics = Metrics()
    metrics.answered("lean", "llama", "ok", 0.01)
    async with asking(api(metrics=metrics)) as http:
        response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert 'epp_requests_total{code="ok",mode="lean",model="llama"' in response.text


async def test_the_admin_api_serves_all_fields_of_the_state_even_undocumented_fields() -> None:
    state = {**STATE, "paused": True, "added": 1}
    async with asking(api(View(state))) as http:
        response = await http.get("/api/v1/state")
    assert response.status_code == 200
    assert response.json() == state


UNTOLD: list[tuple[dict[str, Any] | Exception | None, int, str, str]] = [
    (StateUnavailable("nobody answers"), 503, "state_unavailable", "nobody answers"),
    (None, 503, "state_unavailable", "did not answer"),  # no answer
    ({"stock": 1}, 500, "internal_error", ""),
    (RuntimeError("secret of the inside"), 500, "internal_error", ""),
]


async def test_an_unreadable_state_is_answered_by_a_problem_document_without_secrets() -> None:
    view = View()
    async with asking(api(view, deadlines=Deadlines(read_s=0.05))) as http:
        for view.answer, status, code, says in UNTOLD:
            document = problem(await http.get("/api/v1/state"), status)
            assert (document["code"], document["instance"]) == (code, "/api/v1/state")
            assert says in document["detail"]
            assert "secret" not in document["detail"]


async def test_unknown_paths_and_methods_are_answered_by_problem_documents() -> None:
    async with asking(api()) as http:
        assert problem(await http.get("/api/v1/nonsense"), 404)["instance"] == "/api/v1/nonsense"
        response = await http.post("/api/v1/state")
    problem(response, 405)
    assert response.headers["allow"] == "GET"


async def test_the_startup_error_of_the_admin_server_names_an_address_that_cannot_be_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for listen in (f"127.0.0.1:{taken.getsockname()[1]}", "203.0.113.1:0"):
            with pytest.raises(StartupError, match=f"cannot listen on {re.escape(listen)}"):
                async with serving(api(), listen):
                    pass


async def test_a_stopped_admin_server_frees_its_port_and_raises_the_error_that_stopped_it() -> None:
    address = ""
    with pytest.raises(KeyError, match="mine"):
        async with serving(api(), "127.0.0.1:0") as address:
            raise KeyError("mine")
    async with serving(api(), address) as again:
        assert again == address


async def test_the_dashboard_is_served_with_a_policy_that_allows_its_own_files_only() -> None:
    assert (FOLDER / "index.html").is_file()
    async with asking(api()) as http:
        page = await http.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.headers["x-content-type-options"] == "nosniff"
        policy = page.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        for name in re.findall(r'(?:src|href)="/?static/([^"]+)"', page.text):
            assert (await http.get(f"/static/{name}")).status_code == 200
        for name in ("none.js", "..%2Fapi.py", "%2e%2e/api.py", "api.py", "__init__.py"):
            problem(await http.get(f"/static/{name}"), 404)


def test_the_content_security_policy_allows_inline_scripts_and_styles_by_hash() -> None:
    page = b"<style>p{}</style><script type='module'>go()</script><script src='/static/a.js'></script>"
    policy = content_security_policy(page)
    script, style = (base64.b64encode(hashlib.sha256(text).digest()).decode() for text in (b"go()", b"p{}"))
    assert f"script-src 'self' 'sha256-{script}';" in policy
    assert f"style-src 'self' 'sha256-{style}';" in policy
    assert policy.count("sha256") == 2


async def test_the_dashboard_and_the_api_page_load_nothing_from_elsewhere() -> None:
    async with asking(api()) as client:
        for path in ("/", "/docs"):
            page = await client.get(path)
            assert page.status_code == 200
            assert not re.search(r"(?:src|href|url\()\W*(?:https?:)?//", page.text)
            assert "default-src 'none'" in page.headers["content-security-policy"]
        assert (await client.get("/redoc")).status_code == 404
        described = (await client.get("/openapi.json")).json()
    for route, calls in described["paths"].items():
        for method in calls:
            assert f"<code>{method.upper()} {route}</code>" in page.text


class OneHour:
    """In place of UsageExport: a row and a note at 2026-01-01T00:00:00Z, and an hour without rows."""

    def now_hour(self) -> int:
        return 490_900

    async def hours(self) -> list[int]:
        return [490_896, 490_897]

    async def rows(self, hour: int, *, is_followed: bool) -> AsyncIterator[list[Row]]:
        used = Row(hour, "=acme/a,b", "'llama", Usage(2, 0, 5, 1, 7, 12.5), "")
        yield [used, Row(hour, "", "", Usage(0, 0, 0, 0, 0, 0.0), "lost")] if is_followed else []


async def test_usage_of_the_requested_hours_is_exported_as_json_lines_or_csv() -> None:
    async with asking(api(usage=cast(UsageExport, OneHour()))) as client:
        lines = (await client.get("/api/v1/usage")).text.splitlines()
        note, first, second = map(orjson.loads, lines)
        assert note["note"] == "no usage is kept of hours before 2026-01-01T00:00:00Z"
        assert (first["hour"], first["tenant"], first["cost"]) == ("2026-01-01T00:00:00Z", "=acme/a,b", 12.5)
        assert (second["tenant"], second["note"]) == ("", "lost")
        since = "/api/v1/usage?from=2026-01-01T00:59:59Z"
        asked = await client.get(since, headers={"accept": "text/csv"})
        assert asked.headers["content-type"].startswith("text/csv")
        header, row, _ = asked.text.splitlines()
        named = dict(zip(header.split(","), next(csv.reader([row])), strict=True))
        names = {"tenant": "'=acme/a,b", "model": "''llama"}  # escaped so that no cell is a formula
        assert named == {name: str(value) for name, value in first.items()} | names
        for time in ("to=0001-01-01T00:00:00Z", "from=0001-01-01T00:00:00%2B14:00"):
            assert note["note"] in (await client.get(f"/api/v1/usage?{time}")).text
        early = await client.get("/api/v1/usage?format=csv&from=2025-12-31T23:00:00&to=2026-01-01T00:00:00Z")
        assert early.text.splitlines()[1:] == [f"2025-12-31T23:00:00Z,,,0,0,0,0,0,0.0,{note['note']}"]
        rest = await client.get("/api/v1/usage?from=2026-01-01T01:59:59")
        assert rest.text == ""
        for times in ("from=noon", "from=2026-01-02T00:00:00Z&to=2026-01-01T00:00:00Z"):
            assert (await client.get(f"/api/v1/usage?{times}")).json()["code"] == "bad_from"
    nothing = Mock(hours=AsyncMock(return_value=[]))
    async with asking(api(usage=nothing)) as client:
        assert (await client.get("/api/v1/usage")).json()["code"] == "no_tenants"
