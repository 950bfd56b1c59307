"""The admin API on its real server: health, metrics, state, and problem documents for every fault."""

import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from admin_client import STATE, View, api, asking, problem

from picker_fleet.admin.protection import Deadlines
from picker_fleet.admin.server import serving
from picker_fleet.errors import StartupError, StateUnavailable
from picker_fleet.telemetry.metrics import Metrics


@pytest.fixture
def view() -> View:
    return View()


@pytest.fixture
async def http(view: View) -> AsyncIterator[httpx.AsyncClient]:
    metrics = Metrics()
    metrics.answered("lean", "llama", "ok", 0.01)
    async with asking(api(view, metrics=metrics)) as client:
        yield client


async def test_given_a_well_replica_when_asked_then_both_health_pages_are_200(
    http: httpx.AsyncClient,
) -> None:
    for path in ("/healthz", "/readyz"):
        response = await http.get(path)
        assert response.status_code == 200
        assert response.json() == {
            "status": "ok",
            "replica": "r-1",
            "pool": "default",
            "components": {"redis": "ok", "grpc": "ok"},
        }


async def test_given_an_unready_replica_when_asked_then_only_readiness_fails_and_names_the_component(
    http: httpx.AsyncClient, view: View
) -> None:
    view.is_ready = False
    view.components = {"redis": "no answer within 50 ms", "grpc": "ok"}
    health, ready = await http.get("/healthz"), await http.get("/readyz")
    assert (health.status_code, health.json()["status"]) == (200, "degraded")
    assert (ready.status_code, ready.json()["status"]) == (503, "unready")
    assert ready.json()["components"]["redis"] == "no answer within 50 ms"


async def test_given_counts_when_the_metrics_page_is_read_then_they_are_on_it(
    http: httpx.AsyncClient,
) -> None:
    response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert 'epp_requests_total{code="ok",mode="lean",model="llama"' in response.text


async def test_given_a_state_when_read_then_it_comes_whole(http: httpx.AsyncClient, view: View) -> None:
    view.answer = {**STATE, "added": 1}
    response = await http.get("/api/v1/state")
    assert response.status_code == 200
    assert response.json() == {**STATE, "added": 1}


async def test_given_an_unreachable_state_when_read_then_the_problem_is_a_503(
    http: httpx.AsyncClient, view: View
) -> None:
    view.answer = StateUnavailable("redis://127.0.0.1:1 refused the connection")
    document = problem(await http.get("/api/v1/state"), 503)
    assert document["code"] == "state_unavailable"
    assert "refused the connection" in document["detail"]


async def test_given_a_state_that_never_comes_when_read_then_the_problem_is_a_503(
    view: View,
) -> None:
    view.answer = None
    async with asking(api(view, deadlines=Deadlines(read_s=0.05))) as http:
        assert "did not answer" in problem(await http.get("/api/v1/state"), 503)["detail"]


@pytest.mark.parametrize("answer", [{"stock": 1}, RuntimeError("secret of the inside")])
async def test_given_a_fault_of_our_own_when_asked_then_the_problem_is_a_500_without_its_insides(
    http: httpx.AsyncClient, view: View, answer: dict[str, Any] | Exception
) -> None:
    view.answer = answer
    assert "secret" not in problem(await http.get("/api/v1/state"), 500)["detail"]


async def test_given_wrong_paths_and_methods_when_asked_then_each_is_a_problem(
    http: httpx.AsyncClient,
) -> None:
    assert problem(await http.get("/api/v1/nonsense"), 404)["instance"] == "/api/v1/nonsense"
    response = await http.post("/api/v1/state")
    problem(response, 405)
    assert response.headers["allow"] == "GET"


async def test_given_the_openapi_page_when_read_then_the_state_is_described_with_an_example(
    http: httpx.AsyncClient,
) -> None:
    schema = (await http.get("/openapi.json")).json()
    assert schema["components"]["schemas"]["State"]["example"] == STATE
    assert {"/healthz", "/readyz", "/metrics", "/api/v1/state"} <= set(schema["paths"])


async def test_given_a_taken_port_when_served_then_the_fault_names_the_address(view: View) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartupError, match=f"cannot listen on {listen}"):
            async with serving(api(view), listen):
                pass


async def test_given_an_unknown_host_when_served_then_the_fault_names_the_address(view: View) -> None:
    with pytest.raises(StartupError, match=r"cannot listen on 203\.0\.113\.1:0"):
        async with serving(api(view), "203.0.113.1:0"):
            pass


async def test_given_a_served_api_when_left_then_its_port_is_free_and_the_bodys_error_is_kept(
    view: View,
) -> None:
    address = ""
    with pytest.raises(KeyError, match="mine"):
        async with serving(api(view), "127.0.0.1:0") as address:
            raise KeyError("mine")
    async with serving(api(view), address) as again:
        assert again == address
