"""The fleet ejects a failing server, in each mode, and takes it back when it recovers.

tests/long/outliers.py tests every kind of failure in pools of 2, 4 and 8 servers.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from fleet_load import answered
from model_servers import FAILURES, FailingServers, failing_servers, static

from picker_tools.load.generator import Answer, Request, closed_loop, flow_header, requests_of_flows

MODES: dict[str, tuple[str, ...]] = {
    "lean": ("reset", "error in a stream", "a web page", "404"),
    "http": ("307", "an error as text in 200"),
    "standard": ("503 with a healthy page", "reset after the head", "429", "half an answer", "no content"),
}
CONFIG = {
    "request_queue_controller": {"watermark_per_backend": 4},
    "outlier_detection": {"max_ejection_time": "2s"},
}
SERVICE_S = 0.1  # this load makes 160 requests a second; more would only cost CPU
LOOKED_AT = 100  # the test counts errors in this many requests after a failure


@pytest_asyncio.fixture(params=MODES, loop_scope="function")
async def here(request: pytest.FixtureRequest, fleet: Any) -> AsyncIterator[tuple[str, FailingServers, Any]]:
    async with failing_servers(4, SERVICE_S) as servers:
        started = await asyncio.to_thread(
            fleet, "--endpoints", "0", "--replicas", "2", "--mode", request.param,
            config={"discovery": static(servers.addresses), **CONFIG},
        )  # fmt: skip
        yield request.param, servers, started


async def statuses(fleet: Any) -> dict[str, str]:
    return {each["address"]: each["status"] for each in await fleet.get("endpoints")}


async def test_a_failing_server_is_ejected_until_it_recovers_and_clients_cannot_eject_it(here: Any) -> None:
    mode, servers, fleet = here
    broken = servers.addresses[0]
    for name in MODES[mode]:
        await _it_fails(fleet, servers, broken, name)
    if mode == "lean":
        await _one_flow_makes_engines_fail(fleet, servers)
        await _all_fail(fleet, servers)


async def _it_fails(fleet: Any, servers: FailingServers, broken: str, name: str) -> None:
    failure = FAILURES[name]
    async with closed_loop(fleet.url, clients=20, make_request=requests_of_flows(20)) as load:
        await answered(load, 40)
        servers.failing[broken] = failure
        if name == "429":  # this status says that the server is full, not broken
            await answered(load, LOOKED_AT)
            assert set((await statuses(fleet)).values()) == {"ready"}
        else:
            out = ("ejected",) if failure.health == 200 else ("ejected", "down")  # down: a probe failed first
            found = await fleet.eventually(
                lambda: statuses(fleet), lambda each: each[broken] in out, within_s=10, what=name
            )
            assert list(found.values()).count("ready") == 3, name
        await answered(load, 60)  # requests that were in flight at the ejection have ended
        servers.hits.clear()
        load.history.clear()
        since_s = time.monotonic()  # `hits` counts only requests sent later
        await answered(load, LOOKED_AT)
        assert servers.hits[broken] <= 0.02 * servers.hits.total() + 2, (name, servers.hits)
        if not (failure.cuts and failure.resets):  # Envoy reports a reset answer a second later
            tries = servers.hits[broken] if failure.cuts else 0
            lost = [answer for answer in failed(load.history) if answer.sent_s >= since_s]
            assert len(lost) <= 0.005 * LOOKED_AT + tries, (name, lost)
        # The server recovers and gets requests again.
        del servers.failing[broken]
        servers.hits.clear()
        await fleet.eventually(lambda: servers.hits[broken] > 20, what=f"recovery: {name}")


def failed(history: list[Answer]) -> list[Answer]:
    return [answer for answer in history if not answer.served]


def _poison(_: object, number: int) -> Request:
    return Request("poison", 1, headers=flow_header("attacker"))


async def _one_flow_makes_engines_fail(fleet: Any, servers: FailingServers) -> None:
    for name in ("500", "error in 200"):
        servers.poison = FAILURES[name]
        async with (
            closed_loop(fleet.url, clients=8, make_request=requests_of_flows(8)) as others,
            closed_loop(fleet.url, clients=4, make_request=_poison) as attacker,
        ):
            for _ in range(3):
                await answered(attacker, 10)
                found = await statuses(fleet)
                assert set(found.values()) == {"ready"}, (name, found)
            await answered(others, 20)
            assert failed(others.history) == [], name


async def _all_fail(fleet: Any, servers: FailingServers) -> None:
    servers.failing = dict.fromkeys(servers.addresses, FAILURES["503 with a healthy page"])
    async with closed_loop(fleet.url, clients=4, make_request=requests_of_flows(4)) as load:
        await answered(load, 60)
        servers.failing.clear()
        before = load.served
        await fleet.eventually(lambda: load.served > before + 20, what="answers")
