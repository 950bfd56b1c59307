"""Other proxies before the pickers (`examples/`): placement, refusals, ends of all kinds, hostile clients."""

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from crowd import http_client
from fleet_load import Caller, at_rest, decisions, exchange, fresh, total
from own_proxy import haproxy, nginx

CONFIG = {
    "extproc": {"trusted_headers": ["x-gateway-inference-fairness-id"]},
    "request_queue_controller": {"watermark_per_backend": 1},
    "fair_request_queue": {"queue_ttl": "5s", "total_capacity": 20, "flow_capacity": 20},
    "leases": {"inflight": "8s", "access_log_interval": "4s"},
}
RED, BLUE = ("authorization", "Bearer key-of-red"), ("authorization", "Bearer key-of-blue")
MODEL = ("x-model", "llama")


@pytest.fixture(scope="module")
def here(shared_fleet: Any) -> Any:
    options = ("--mode", "http", "--replicas", "2", "--endpoints", "2", "--sim-ttft", "20", "--sim-itl", "20")
    return shared_fleet(*options, config=CONFIG)


@pytest.fixture(scope="module")
def urls(here: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The URL of each proxy."""
    folder = tmp_path_factory.mktemp("proxies")
    with nginx(here, folder / "nginx") as one, haproxy(here, folder / "haproxy") as other:
        yield {"nginx": one, "haproxy": other}


@pytest.fixture(params=["nginx", "haproxy"])
def url(urls: dict[str, str], request: pytest.FixtureRequest) -> str:
    return urls[request.param]


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(url) as opened:
        yield opened


def ask(tokens: int = 1, **fields: Any) -> dict[str, Any]:
    return {"model": "llama", "prompt": "hi", "max_tokens": tokens, **fields}


async def streaming(url: str) -> Caller:
    """A client whose answer streams for 10 s."""
    return await Caller.ask(url, 500, header="x-model: llama")


@asynccontextmanager
async def full(*urls: str) -> AsyncIterator[list[Caller]]:
    """Clients whose answers stream take a place by each URL, and leave at the end."""
    callers = [await streaming(url) for url in urls]
    for caller in callers:
        assert b"200 OK" in await caller.first_bytes()
    yield callers
    for caller in callers:
        await caller.leave()


async def ends(fleet: Any) -> list[tuple[str, str]]:
    """Flow and event of each request's end."""
    kinds = ("completed", "cancelled", "client_gone", "upstream_failed", "expired", "reclaimed")
    return [(entry.flow, entry.event) for entry in await decisions(fleet) if entry.event in kinds]


async def settled(fleet: Any) -> None:
    """Wait until every request has ended, and none because its lease ran out."""
    await at_rest(fleet)
    assert "reclaimed" not in [event for _, event in await ends(fleet)]


async def test_a_request_goes_where_the_picker_says_and_its_end_frees_its_place(
    here: Any, client: httpx.AsyncClient
) -> None:
    before = len(await ends(here))
    for headers in ([RED, MODEL], [BLUE, MODEL]):
        answer = await client.post("/v1/completions", json=ask(), headers=headers)
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 1)
    await settled(here)
    assert (await ends(here))[before:] == [("red", "completed"), ("blue", "completed")]


async def test_requests_wait_for_a_place_and_all_are_served(here: Any, client: httpx.AsyncClient) -> None:
    asks = [client.post("/v1/completions", json=ask(5), headers=[RED, MODEL]) for _ in range(12)]
    assert [answer.status_code for answer in await asyncio.gather(*asks)] == [200] * 12
    await settled(here)


async def test_a_list_of_models_needs_no_place(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/models")
    assert (answer.status_code, answer.json()["data"][0]["id"]) == (200, "llama")


async def test_a_client_that_leaves_its_answer_frees_its_place(here: Any, url: str) -> None:
    before = len(await ends(here))
    async with full(url):
        pass
    await settled(here)
    assert [event for _, event in (await ends(here))[before:]] == ["client_gone"]


async def leaving_the_queue(fleet: Any, url: str, within_s: float) -> None:
    """Two clients have the places, three leave the queue, which is then empty; the two leave, too."""
    async with full(url, url):
        waiting = [await streaming(url) for _ in range(3)]
        await fleet.until_state(queued=3)
        for caller in waiting:
            await caller.leave()
        await fleet.until_state(queued=0, within_s=within_s)


async def test_a_client_that_leaves_the_queue_is_forgotten(here: Any, url: str) -> None:
    await leaving_the_queue(here, url, within_s=4.0)  # before their time is up
    await settled(here)


async def refusals(client: httpx.AsyncClient, url: str) -> None:
    """Each refusal has its status and its body: an unknown model, an unknown path, a TTL that has passed."""
    unnamed = await client.post("/v1/completions", json=ask(model="unknown"), headers=[RED])
    assert (unnamed.status_code, unnamed.json()["error"]["code"]) == (400, "bad_request")
    elsewhere = await client.post("/v1/load_lora_adapter", json=ask(), headers=[RED, MODEL])
    assert (elsewhere.status_code, elsewhere.json()["error"]["code"]) == (404, "unknown_path")
    async with full(url, url):
        brief = ("x-llm-d-inference-ttl", "100ms")
        late = await client.post("/v1/completions", json=ask(), headers=[RED, MODEL, brief])
    assert (late.status_code, late.json()["error"]["code"]) == (503, "expired_ttl")
    assert int(late.headers["retry-after"]) >= 1


async def test_a_refusal_has_its_status_and_its_body(client: httpx.AsyncClient, url: str, here: Any) -> None:
    await refusals(client, url)
    await settled(here)


# Headers by which a client could claim another flow, skip its admission, or choose its endpoint.
SPOOFED = [
    ("x-gateway-inference-fairness-id", "blue"),
    ("x-llm-d-inference-fairness-id", "blue"),
    ("x-gateway-inference-objective", "gold"),
    ("x-gateway-model-name-rewrite", "other"),
    ("x-picker-model", "other"),
    ("x-picker-body-bytes", "1"),
    ("x-picker-refuse-as", "401"),
    ("x-picker-settle-token", "spoofed"),
    ("x-forwarded-method", "GET"),
    ("x-forwarded-uri", "/v1/models"),
    ("x-gateway-destination-endpoint", "127.0.0.1:1"),
    ("x-gateway-destination-endpoint-subset", "127.0.0.1:1"),
]


async def test_no_header_of_a_client_reaches_the_check(here: Any, url: str) -> None:
    assert await ends_of(here, url, [RED, MODEL, *SPOOFED]) == [("red", "completed")]


async def test_no_header_of_a_client_of_envoy_reaches_the_check(here: Any) -> None:
    # The Envoy of `picker up` trusts its user with the flow and the objective.
    spoofed = [pair for pair in SPOOFED if "-inference-" not in pair[0]]
    assert await ends_of(here, here.url, [RED, MODEL, *spoofed]) == [("llama", "completed")]


async def ends_of(here: Any, url: str, headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """How a request with these headers ends; its client sees nothing of the picker's."""
    before = len(await ends(here))
    await assert_served(url, headers)
    await settled(here)
    return (await ends(here))[before:]


async def assert_served(url: str, headers: list[tuple[str, str]]) -> None:
    """A request with these headers is served, and its client sees nothing of the picker's."""
    async with http_client(url) as client:
        answer = await client.post("/v1/completions", json=ask(), headers=headers)
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith(("x-picker", "x-gateway"))]


async def test_no_model_that_a_body_names_becomes_another_header(
    here: Any, client: httpx.AsyncClient
) -> None:
    before = len(await ends(here))
    for name in ("llama\r\nx-gateway-inference-fairness-id: blue", "llama\n", "llama\x00", ["llama"]):
        answer = await client.post("/v1/completions", json=ask(model=name), headers=[RED])
        assert answer.status_code in (400, 404)  # by the picker or by the model server
    await settled(here)
    assert {flow for flow, _ in (await ends(here))[before:]} <= {"red"}


PATHS = [
    "/settle",
    "/check",
    "/check/v1/completions",
    "/picker-settle",
    "/picker-check",
    "/v1/../settle",
    "/v1/../picker-settle",
    "/v1/%2e%2e/settle",
    "/v1//../../settle",
    "/v1/..%2fsettle",
    "/v1/completions/../../../settle",
    "//settle",
    "/picker-settle/",
    "/v1/picker-settle",
    "http://pickers/settle",
]


async def test_no_path_of_a_client_reaches_the_settle_address(here: Any, urls: dict[str, str]) -> None:
    token = base64.urlsafe_b64encode(b"a\nb\n\n").decode()  # counted as refused where it arrives
    before = await settlements(here)
    assert await posted(f"http://{here.state['replicas'][0]['http']}", "/settle", token) == b"403"
    asked = [(proxy, path) for proxy in (*urls.values(), here.url) for path in PATHS]
    statuses = await asyncio.gather(*(posted(proxy, path, token) for proxy, path in asked))
    assert [each for each in zip(asked, statuses, strict=True) if each[1] not in (b"400", b"404")] == []
    assert await settlements(here) == before + 1


async def posted(url: str, path: str, token: str) -> bytes:
    """The status of a bodyless POST to `path`, sent as it is written."""
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\nx-picker-settle-token: {token}\r\nx-model: llama\r\n"
    answer = await exchange(url, f"{head}connection: close\r\ncontent-length: 0\r\n\r\n".encode())
    return answer.split()[1]


async def page_of(fleet: Any, replica: int) -> str:
    text: str = (await fleet.admin("/metrics", replica)).text
    return text


async def settlements(fleet: Any) -> float:
    """Reports that replicas refused for their token: what reached a settle address."""
    pages = await asyncio.gather(*(fresh(partial(page_of, fleet, replica)) for replica in range(2)))
    name = "epp_access_log_rejected_total"
    # Envoy logs refused requests without a token.
    return sum(total(page, name) - total(page, name, reason="no-token") for page in pages)


async def test_a_long_answer_keeps_its_place_longer_than_a_lease(here: Any, urls: dict[str, str]) -> None:
    async with full(*urls.values()) as callers:  # for 10 s, and a lease lasts 8 s
        for caller in callers:
            await caller.read_to_end()
    await settled(here)


async def test_a_dead_endpoint_is_passed_over(fleet: Any, tmp_path: Path) -> None:
    own = fleet("--mode", "http", "--replicas", "1", "--endpoints", "2", config=CONFIG, unaudited="a kill")
    with nginx(own, tmp_path / "nginx") as url:
        async with http_client(url) as client:
            own.endpoint(0).kill()
            asks = [client.post("/v1/completions", json=ask(), headers=[RED, MODEL]) for _ in range(6)]
            assert [answer.status_code for answer in await asyncio.gather(*asks)] == [200] * 6
        await settled(own)


async def test_a_request_that_waits_on_a_replica_that_dies_is_served_by_another(
    fleet: Any, tmp_path: Path
) -> None:
    own = fleet("--mode", "http", "--replicas", "2", "--endpoints", "1", config=CONFIG, unaudited="a kill")
    with nginx(own, tmp_path / "nginx") as one, haproxy(own, tmp_path / "haproxy") as other:
        async with http_client() as client, asyncio.TaskGroup() as tasks, full(one):
            asks = [
                tasks.create_task(client.post(f"{url}/v1/completions", json=ask(), headers=[RED, MODEL]))
                for url in (one, other) * 4
            ]
            await own.until_state(queued=8)
            own.replica(1).kill()
        assert [each.result().status_code for each in asks] == [200] * 8
