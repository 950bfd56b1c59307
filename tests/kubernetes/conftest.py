"""Fixtures: one real API server for all tests; pickers, a gateway and model servers for each test."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from api_server import NAMESPACE, PODS, POOLS, ApiServer, started
from echo_server import EchoServers
from seat import APP, Seat, opened


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One API server for all tests; a test that kills the server must restart it."""
    with started(tmp_path_factory.mktemp("cluster")) as server:
        yield server


@pytest.fixture
def empty(cluster: ApiServer) -> ApiServer:
    """The API server after all pods, pools, objectives and model rewrites have been deleted."""
    for kind in ("inferenceobjectives", "inferencemodelrewrites"):
        path = f"/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{NAMESPACE}/{kind}"
        for each in cluster.call("GET", path)["items"]:
            cluster.call("DELETE", f"{path}/{each['metadata']['name']}")
    for pod in cluster.call("GET", PODS)["items"]:
        cluster.delete_pod(pod["metadata"]["name"], grace_s=0)
    for pool in cluster.call("GET", POOLS)["items"]:
        cluster.call("DELETE", f"{POOLS}/{pool['metadata']['name']}")
    return cluster


@pytest.fixture
async def bare(empty: ApiServer, tmp_path: Path) -> AsyncIterator[Seat]:
    """A `Seat` without pickers and gateway, on an API server without pools."""
    async with opened(tmp_path) as here:
        yield here


@pytest.fixture
async def servers() -> AsyncIterator[EchoServers]:
    async with contextlib.AsyncExitStack() as stack:
        yield EchoServers(stack)


@pytest.fixture
async def seat(empty: ApiServer, tmp_path: Path) -> AsyncIterator[Seat]:
    """A `Seat` with two pickers for the pool `llm`, which has no pods yet, and a gateway."""
    async with opened(tmp_path) as here:
        empty.put_pool("llm", [here.port], APP)
        for _ in range(2):
            await here.start_picker(empty.kubeconfig("admin"), "llm", NAMESPACE)
        for picker in here.pickers:
            await here.ready(picker)
        await here.start_gateway()
        yield here
