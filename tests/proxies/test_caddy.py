"""Caddy before the pickers (`examples/caddy`), which reports no ends of requests."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from crowd import http_client
from fleet_load import at_rest, decisions
from own_proxy import caddy
from test_proxies import CONFIG as WITH_REPORTS
from test_proxies import (
    MODEL,
    PATHS,
    RED,
    SPOOFED,
    ask,
    assert_served,
    leaving_the_queue,
    posted,
    refusals,
    streaming,
)
from whole_fleet import started

_ENDS_WITHIN_S = 30.0
# As docs/proxies.md says for a proxy that reports no ends.
CONFIG = {
    **WITH_REPORTS,
    "fair_request_queue": {"queue_ttl": "20s", "total_capacity": 20, "flow_capacity": 20},
    "http": {"longest_request": "1s"},
    "leases": {"inflight": "10m", "access_log_interval": "1s"},
}
OPTIONS = ("--mode", "http", "--replicas", "2", "--endpoints", "2", "--sim-ttft", "20", "--sim-itl", "20")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    fleet = started(tmp_path_factory.mktemp("fleet"), OPTIONS, CONFIG, unaudited="a kill")
    yield fleet
    fleet.stop()


@pytest.fixture(scope="module")
def url(here: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with caddy(here, tmp_path_factory.mktemp("caddy"), os.environ["PROXY_TEST_CADDY"]) as running:
        yield running


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(url) as opened:
        yield opened


async def flows(fleet: Any) -> list[str]:
    """The flows of all requests that were admitted."""
    return [entry.flow for entry in await decisions(fleet) if entry.event in ("bypassed", "queued")]


async def test_a_request_goes_where_the_picker_says_and_its_place_is_free_after_its_end(
    here: Any, client: httpx.AsyncClient
) -> None:
    before = len(await flows(here))
    answer = await client.post("/v1/completions", json=ask(), headers=[RED, MODEL])
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 1)
    assert (await client.get("/v1/models", headers=[RED, MODEL])).status_code == 200
    await at_rest(here, within_s=_ENDS_WITHIN_S)  # long before its lease ends
    assert (await flows(here))[before:] == ["red"]


async def test_a_long_answer_keeps_its_place(here: Any, url: str) -> None:
    caller = await streaming(url)  # for 10 s
    async with asyncio.timeout(60):
        while b"[DONE]" not in (part := await caller.reader.read(65536)):
            assert part
            assert (await here.get("state"))["stock"] == 1
    await caller.leave()
    await at_rest(here, within_s=_ENDS_WITHIN_S)


async def test_a_client_that_leaves_the_queue_is_forgotten(here: Any, url: str) -> None:
    await leaving_the_queue(here, url, within_s=15.0)  # before their time is up
    await at_rest(here, within_s=_ENDS_WITHIN_S)


async def test_a_refusal_has_its_status_and_its_body(here: Any, client: httpx.AsyncClient, url: str) -> None:
    await refusals(client, url)
    await at_rest(here, within_s=_ENDS_WITHIN_S)


async def test_no_header_of_a_client_reaches_the_check(here: Any, url: str) -> None:
    before = len(await flows(here))
    await assert_served(url, [RED, MODEL, *SPOOFED])
    await at_rest(here, within_s=_ENDS_WITHIN_S)
    assert (await flows(here))[before:] == ["red"]


async def test_no_path_of_a_client_reaches_the_settle_address(here: Any, url: str) -> None:
    statuses = await asyncio.gather(*(posted(url, path, "") for path in PATHS))
    assert set(statuses) <= {b"400", b"404"}


async def test_a_dead_endpoint_is_passed_over(here: Any, client: httpx.AsyncClient) -> None:
    here.endpoint(0).kill()
    asks = [client.post("/v1/completions", json=ask(), headers=[RED, MODEL]) for _ in range(4)]
    assert [answer.status_code for answer in await asyncio.gather(*asks)] == [200] * 4
    await at_rest(here, within_s=_ENDS_WITHIN_S)


async def test_a_request_that_waits_on_a_replica_that_dies_is_asked_again_at_another(
    here: Any, client: httpx.AsyncClient
) -> None:
    # Places stay with the fleet, so both are taken by an operator's pause.
    await here.post("pause")
    asks = [
        asyncio.create_task(client.post("/v1/completions", json=ask(), headers=[RED, MODEL]))
        for _ in range(4)
    ]
    await here.until_state(queued=4)
    here.replica(1).kill()
    await here.post("resume")
    assert [answer.status_code for answer in await asyncio.gather(*asks)] == [200] * 4
