"""One fleet with two pools (docs/protocol.md): only Envoy chooses the pool, and pools share no state."""

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import pytest_asyncio
from crowd import http_client
from edge_envoy import Edge, bootstrap, started
from fleet_load import metric
from redis_servers import Server, redis_server
from test_top import screen
from whole_fleet import Fleet, exact_bounds, running

from picker_tools.local_fleet.bootstrap import to_yaml
from picker_tools.local_fleet.network import LOOPBACK, free_port
from picker_tools.local_fleet.parts import Mode
from picker_tools.top.command import url_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
POOLS = ("default", "batch")
PARTS = ("redis", "pool", "endpoints")  # readiness components of a pool
PLACES = 4  # capacity of the default pool's queue
CONFIG: dict[str, Any] = {
    "pools": {
        "default": {"fair_request_queue": {"total_capacity": PLACES, "flow_capacity": PLACES}},
        "batch": {"models": [{"name": "llama", "weight": 2}]},
    },
    "request_queue_controller": exact_bounds(4),
    "http": {"listen": f"{LOOPBACK}:0"},
}
Two = tuple[Fleet, Server]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Two]:
    """Two replicas that serve both pools, an endpoint for each pool, and Redis; tests leave no request."""
    folder = tmp_path_factory.mktemp("two")
    with redis_server(folder / "valkey") as valkey:
        sims = ("--endpoints", "1", "--sim-ttft", "5", "--sim-itl", "1")
        options = ("--replicas", "2", *sims, "--redis", valkey.url)
        async with running(folder, *options, config=CONFIG) as here:
            yield here, valkey


def endpoint_of(here: Fleet, pool: str) -> str:
    return next(str(each["address"]) for each in here.state["endpoints"] if each["pool"] == pool)


async def at_rest(here: Fleet) -> None:
    for pool in POOLS:
        await here.until_state(pool=pool, within_s=30, stock=0, queued=0)


class Answer(NamedTuple):
    status: int
    endpoint: str | None
    text: str


async def ask(client: httpx.AsyncClient, pool: str = "", **headers: str) -> Answer:
    """The answer to a small request; its host header makes the local fleet's Envoy select `pool`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await client.post(
        "/v1/completions",
        json={"model": "llama", "prompt": "hi", "max_tokens": 2},
        headers={**({"host": pool} if pool else {}), **named},
    )
    return Answer(answer.status_code, answer.headers.get("x-served-by"), answer.text)


@contextmanager
def envoy(here: Fleet, folder: Path, mode: Mode) -> Iterator[tuple[Edge, dict[str, str]]]:
    """Run a second Envoy, whose first listener selects the pool by host. Yields the Envoy, and the URLs of a
    listener for pool `batch` and of a listener for pool `nobody`, which does not exist."""
    listens = {"batch": (LOOPBACK, free_port()), "nobody": (LOOPBACK, free_port())}
    tree = bootstrap(here, mode, CONFIG, pool_listens={"batch": listens["batch"]})
    of_batch = tree["staticResources"]["listeners"][1]
    foreign = json.loads(json.dumps(copy.deepcopy(of_batch)).replace('"value": "batch"', '"value": "nobody"'))
    assert foreign != of_batch
    foreign["name"] = "nobody"
    foreign["address"]["socketAddress"]["portValue"] = listens["nobody"][1]
    tree["staticResources"]["listeners"].append(foreign)
    with started(to_yaml(tree), folder) as running_envoy:
        yield running_envoy, {name: f"http://{host}:{port}" for name, (host, port) in listens.items()}


@pytest.mark.parametrize("mode", ["lean", "http"])
async def test_envoys_route_or_listener_chooses_the_pool_and_no_client_does(
    two: Two, tmp_path: Path, mode: Mode
) -> None:
    here, _ = two
    default, batch = (endpoint_of(here, pool) for pool in POOLS)
    with envoy(here, tmp_path / "edge", mode) as (edge, listeners):
        async with http_client(edge.url) as client:
            for endpoint, name, headers in (
                (default, "", {}),
                (default, "default", {}),
                (batch, "batch", {}),
                (batch, "batch:8080", {}),
                (batch, "batch.example.org", {}),
                (default, "", {"x_picker_pool": "batch"}),  # a client's header is ignored
                (batch, "batch", {"x_picker_pool": "default"}),  # the route overrides the client's header
            ):
                assert (await ask(client, name, **headers)).endpoint == endpoint, (name, headers)
        async with http_client(listeners["batch"]) as client:
            hosts = [(await ask(client, host)).endpoint for host in ("", "default")]
            hosts.append((await ask(client, x_picker_pool="default")).endpoint)
        assert hosts == [batch] * 3
        async with http_client(listeners["nobody"]) as client:
            refused = [await ask(client), await ask(client, x_picker_pool="batch")]
        assert [(each.status, each.endpoint) for each in refused] == [(404, None)] * 2
        assert json.loads(refused[0].text)["error"]["code"] == "unknown_pool"
    # Envoy's access log settles each request in its own pool.
    await at_rest(here)
    labels = {"code": "unknown_pool", "mode": mode, "model": "", "pool": "default"}

    refusals = partial(metric, here, "epp_requests_total", **labels)
    await here.eventually(refusals, what="the refusals of the unknown pool")


async def test_a_full_queue_refuses_only_requests_of_its_own_pool(two: Two) -> None:
    here, _ = two
    before = await here.get("state", pool="batch")
    await here.post("pause")  # this call pauses the default pool
    async with here.client() as client, asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(ask(client)) for _ in range(PLACES)]
        await here.until_state(queued=PLACES, paused=True)
        refused = await ask(client)
        assert refused.status == 503
        assert json.loads(refused.text)["error"]["code"] in ("insufficient_flow_capacity", "total_capacity")
        # Pool `batch` keeps its bounds and its empty queue, and serves requests.
        answers = await asyncio.gather(*(ask(client, "batch") for _ in range(2 * PLACES)))
        assert {(each.status, each.endpoint) for each in answers} == {(200, endpoint_of(here, "batch"))}
        now = await here.get("state", pool="batch")
        assert (now["queued"], now["paused"], now["bounds"]) == (0, False, before["bounds"])
        flows = (await here.get("queue", pool="default"))["requests"]
        assert [each["flow"] for each in flows] == ["llama"] * PLACES
        assert (await here.get("queue", pool="batch"))["requests"] == []
        await here.post("resume")
    assert {task.result().status for task in waiting} == {200}
    await at_rest(here)
    # Each pool has its own keys in Redis.
    async with here.redis() as client:
        assert {key.split(":")[1] for key in await client.keys("epp:*")} == {"{default}", "{batch}"}


async def test_operators_see_and_change_one_pool_at_a_time(two: Two) -> None:
    here, _ = two
    listed = (await here.get("pools"))["pools"]
    assert [(each["name"], each["default"], each["ready"], each["path"]) for each in listed] == [
        ("default", True, True, "/pools/default/"),
        ("batch", False, True, "/pools/batch/"),
    ]
    assert (await here.get("pools", pool="batch"))["pools"] == listed
    unknown = await here.admin("/pools/nobody/api/v1/state")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "unknown_pool")
    for pool in POOLS:
        assert (await here.get("state", pool=pool))["pool"] == pool
        assert "Picker Fleet" in (await here.admin(f"/pools/{pool}/")).text
    components = (await here.admin("/readyz")).json()["components"]
    assert components.keys() == {"grpc", *(f"{pool}.{part}" for pool in POOLS for part in PARTS)}

    # A live change reaches every replica of its pool and leaves the other pool unchanged.
    change = {"fair_request_queue": {"total_capacity": 770}, "weights": {"gold": 3}}
    await here.patch(change, pool="batch")
    for replica in range(2):
        changed, same = [await here.get("config", replica, pool=pool) for pool in ("batch", "default")]
        assert changed["config"]["fair_request_queue"]["total_capacity"] == 770
        assert (same["config"]["fair_request_queue"]["total_capacity"], same["changes"]) == (PLACES, {})
    drained = endpoint_of(here, "batch")
    await here.post(f"endpoints/{drained}/drain", pool="batch")
    assert (await here.admin(f"/api/v1/endpoints/{drained}/drain", method="POST")).status_code == 404
    await here.until_state(pool="batch", within_s=30, ready_backends=0)
    assert (await here.get("state", pool="default"))["ready_backends"] == 1
    await here.post(f"endpoints/{drained}/undrain", pool="batch")
    await here.until_state(pool="batch", within_s=30, ready_backends=1)


async def test_the_dashboard_and_top_show_the_chosen_pool(two: Two, dashboard: Any) -> None:
    here, _ = two
    endpoints = {pool: endpoint_of(here, pool) for pool in POOLS}
    async with dashboard(here) as shown:
        for number, pool in enumerate(("default", "batch", "default")):
            if number:
                await shown.page.locator("#pools").select_option(pool)
                await shown.page.wait_for_url(f"**/pools/{pool}/")
            await shown.says("#rows-endpoints", endpoints[pool])
            assert await shown.page.locator("#pools").input_value() == pool
            assert await shown.page.locator("#rows-endpoints tr").count() == 1
    for pool in POOLS:
        async with screen(url_of(here.admin_url(), pool)) as top:
            await top.press("3")
            await top.shows(endpoints[pool])


async def test_both_pools_are_served_during_a_redis_outage_and_return_to_redis(two: Two) -> None:
    here, valkey = two
    await here.until_counted()
    valkey.freeze()
    try:
        async with here.client() as client, asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(ask(client, pool)) for pool in POOLS for _ in range(2)]
            for pool in POOLS:
                await here.until_state(pool=pool, within_s=30, degraded=True)
        assert {task.result().status for task in asked} == {200}
        async with here.client() as client:
            for pool in POOLS:
                answer = await ask(client, pool)
                assert (answer.status, answer.endpoint) == (200, endpoint_of(here, pool))
    finally:
        valkey.thaw()
    for pool, replica in product(POOLS, (0, 1)):
        await here.until_state(pool=pool, replica=replica, within_s=30, degraded=False)
    await at_rest(here)
