"""A body that ends with trailers reaches its model server complete and once."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from counting_servers import CountingServers, counting_servers
from fleet_load import at_rest
from http2_client import upload
from whole_fleet import running

SMALL = json.dumps({"model": "llama", "prompt": "x"}).encode()
LARGE = json.dumps({"model": "llama", "prompt": "x" * 3_000_000}).encode()


@pytest_asyncio.fixture(params=["lean", "standard"], scope="module", loop_scope="module")
async def behind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Any, CountingServers]]:
    async with counting_servers(1, 0.0) as servers:
        config = {"discovery": {"static": [{"address": each} for each in servers.addresses]}}
        options = ("--mode", request.param, "--endpoints", "0", "--replicas", "1")
        async with running(tmp_path_factory.mktemp("trailers"), *options, config=config) as here:
            yield here, servers


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("sized", [False, True], ids=["unsized", "sized"])
@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["small", "large"])
async def test_a_body_with_trailers_reaches_its_model_server_once(
    behind: tuple[Any, CountingServers], body: bytes, sized: bool
) -> None:
    here, servers = behind
    before = servers.served
    async with upload(here.url) as client:
        length = [("content-length", str(len(body)))] if sized else []
        await client.send(body, length, trailers=[("x-checksum", "7")])
        assert await client.answered() == "200"
    assert servers.last_body == body
    assert servers.served == before + 1
    await at_rest(here)
