"""The fleet ejects a failing server, in each mode, and takes it back when it recovers.

tests/long/outliers.py tests every kind of failure in pools of 2, 4 and 8 servers.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from failing_servers import KINDS, Clients, FailingServers, failing_servers

MODES: dict[str, tuple[str, ...]] = {
    "lean": ("reset", "429", "error in a stream"),
    "http": ("307",),
    "standard": ("503, well by its page", "reset after the head"),
}
CONFIG = {
    "request_queue_controller": {"watermark_per_backend": 4},
    "outlier_detection": {"max_ejection_time": "2s"},
}
SERVICE_S = 0.05
LOOKED_AT = 200  # requests after a failure over which the test counts errors


@pytest_asyncio.fixture(params=MODES, loop_scope="function")
async def here(request: pytest.FixtureRequest, fleet: Any) -> AsyncIterator[tuple[str, FailingServers, Any]]:
    async with failing_servers(4, SERVICE_S) as servers:
        listed = [{"address": address} for address in servers.addresses]
        started = await asyncio.to_thread(
            fleet, "--endpoints", "0", "--replicas", "2", "--mode", request.param,
            config={"discovery": {"static": listed}, **CONFIG},
        )  # fmt: skip
        yield request.param, servers, started


async def statuses(fleet: Any) -> dict[str, str]:
    return {each["address"]: each["status"] for each in await fleet.get("endpoints")}


async def test_a_server_that_fails_is_ejected_and_comes_back_and_no_client_can_eject_one(here: Any) -> None:
    mode, servers, fleet = here
    broken = servers.addresses[0]
    for name in MODES[mode]:
        await _it_fails(fleet, servers, broken, name)
    if mode == "lean":
        await _one_flow_makes_engines_fail(fleet, servers)
        await _all_fail(fleet, servers)


async def _it_fails(fleet: Any, servers: FailingServers, broken: str, name: str) -> None:
    kind = KINDS[name]
    async with Clients(fleet.url, 20) as clients:
        await clients.until_asked(40)
        servers.failing[broken] = kind
        if name == "429":  # the server is full, not broken
            await clients.until_asked(LOOKED_AT)
            assert set((await statuses(fleet)).values()) == {"ready"}
        else:
            out = ("ejected",) if kind.health == 200 else ("ejected", "down")  # a probe may be first
            found = await fleet.eventually(
                lambda: statuses(fleet), lambda each: each[broken] in out, within_s=10, what=name
            )
            assert list(found.values()).count("ready") == 3, name
        await clients.until_asked(60)  # ends the requests in flight
        servers.hits.clear()
        clients.failed.clear()
        await clients.until_asked(LOOKED_AT)
        assert servers.hits[broken] <= 0.02 * servers.hits.total() + 2, (name, servers.hits)
        if not (kind.cuts and kind.resets):  # Envoy reports those a second later
            tries = servers.hits[broken] if kind.cuts else 0
            assert clients.failed.total() <= 0.005 * LOOKED_AT + tries, (name, clients.failed)
        # The server recovers and gets requests again.
        del servers.failing[broken]
        servers.hits.clear()
        await fleet.eventually(
            lambda: asyncio.sleep(0, servers.hits[broken]), lambda n: n > 20, within_s=15, what=name
        )


async def _one_flow_makes_engines_fail(fleet: Any, servers: FailingServers) -> None:
    for name in ("500", "error in 200"):
        servers.poison = KINDS[name]
        async with (
            Clients(fleet.url, 8) as others,
            Clients(fleet.url, 4, prompt="poison", flow="attacker") as attacker,
        ):
            for _ in range(3):
                await attacker.until_asked(10)
                found = await statuses(fleet)
                assert set(found.values()) == {"ready"}, (name, found)
            await others.until_asked(20)
            assert not others.failed, (name, others.failed)


async def _all_fail(fleet: Any, servers: FailingServers) -> None:
    servers.failing = dict.fromkeys(servers.addresses, KINDS["503, well by its page"])
    async with Clients(fleet.url, 4) as clients:
        await clients.until_asked(60)
        servers.failing.clear()
        answered = clients.answered
        await fleet.eventually(
            lambda: asyncio.sleep(0, clients.answered - answered),
            lambda n: n > 20, within_s=15, what="answers",
        )  # fmt: skip
