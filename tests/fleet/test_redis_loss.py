"""Redis is lost under load and comes back (G8). The model servers count requests in flight exactly."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import httpx
import pytest
import pytest_asyncio
from admin_calls import ask
from fleet_load import at_rest, metric, one_token
from model_servers import CountingServers, counting_servers, static
from redis_servers import Server, redis_server
from whole_fleet import Fleet, exact_bounds, running

from picker_tools.load.generator import Load, closed_loop

pytestmark = pytest.mark.asyncio(loop_scope="module")
Three = tuple[Fleet, Server, CountingServers]
SERVERS, EACH = 4, 3
BOUND = SERVERS * EACH
CLIENTS = 24
SERVICE_S = 0.4  # number of clients: keeps the pool full even on a busy machine
REFUSED_S = 0.4  # seconds; six clients are refused at any time, and faster retries only cost CPU
LEASE_S = 15.0
PRIORITIES = (7, -3)


def loaded(here: Any, clients: int) -> AbstractAsyncContextManager[Load]:
    """Clients that send the next request after an answer, or REFUSED_S seconds after a refusal."""
    return closed_loop(here.url, clients=clients, make_request=one_token, pause_s=REFUSED_S)


def statuses(load: Load) -> set[int]:
    return {record.status for record in load.history}


async def until_degraded(here: Any, wanted: bool) -> None:
    for replica in range(3):
        await here.until_state(replica=replica, within_s=20, degraded=wanted)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def three(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Three]:
    """Three replicas in one mode, with Redis and model servers. Tests leave the fleet without requests."""
    folder = tmp_path_factory.mktemp("three")
    with redis_server(folder / "valkey") as valkey:
        async with counting_servers(SERVERS, SERVICE_S) as servers:
            options = ("--mode", request.param, "--endpoints", "0", "--redis", valkey.url, "--no-restart")
            config = {
                "discovery": static(servers.addresses),
                # Flow capacity is below the number of clients: some are refused, with and without Redis.
                "fair_request_queue": {"flow_capacity": 6, "guard_share": 0},
                "request_queue_controller": exact_bounds(EACH),
                "objectives": [{"name": f"p{each}", "priority": each} for each in PRIORITIES],
            }
            async with running(folder, *options, config=config) as here:
                await here.until_counted()
                yield here, valkey, servers


async def waiting(here: Any, replica: int) -> list[int]:
    """The number of requests of each of PRIORITIES in a replica's local queue."""
    lengths = (await here.get("state", replica))["local"]["queue_length"]
    return [lengths.get(str(each), 0) for each in PRIORITIES]


def ask_all(tasks: asyncio.TaskGroup, client: httpx.AsyncClient) -> list[asyncio.Task[httpx.Response]]:
    """Send one request of each of PRIORITIES from each of 40 flows."""
    names = [(f"flow-{number}", f"p{each}") for number in range(40) for each in PRIORITIES]
    return [tasks.create_task(ask(client, flow, objective=objective)) for flow, objective in names]


@pytest.mark.parametrize("three", ["lean"], indirect=True)
async def test_without_redis_a_replica_serves_its_local_queue_by_priority(three: Three) -> None:
    here, valkey, servers = three
    valkey.kill()
    await until_degraded(here, True)
    servers.forget_peak()
    async with here.client() as client, asyncio.TaskGroup() as tasks:
        asked = ask_all(tasks, client)

        async def waits() -> list[list[int]]:
            return [await waiting(here, replica) for replica in range(3)]

        await here.eventually(
            waits, lambda found: any(all(counts) for counts in found), what="two priorities in one queue"
        )
        looks = 0
        for replica in range(3):
            before = await waiting(here, replica)
            while min(before) > 0:
                await asyncio.sleep(0.01)  # the admin API allows 200 calls a second
                now = await waiting(here, replica)
                assert now[0] == 0 or now[1] >= before[1], "a low priority is served while a higher waits"
                before, looks = now, looks + 1
        assert looks
    assert {task.result().status_code for task in asked} == {200}
    # Requests that wait when Redis returns are served, too.
    async with here.client() as client, asyncio.TaskGroup() as tasks:
        asked = ask_all(tasks, client)
        await asyncio.to_thread(valkey.revive)
        await until_degraded(here, False)
    assert {task.result().status_code for task in asked} == {200}
    assert servers.peak <= BOUND
    await at_rest(here, within_s=LEASE_S + 5)


@pytest.mark.parametrize(("three", "loss"), [("standard", "killed"), ("http", "silent")], indirect=["three"])
async def test_without_redis_every_replica_admits_within_the_last_bound(three: Three, loss: str) -> None:
    here, valkey, servers = three
    servers.forget_peak()
    async with loaded(here, CLIENTS) as load:
        await servers.until_served(50)
        valkey.kill() if loss == "killed" else valkey.freeze()
        await until_degraded(here, True)
        load.history.clear()

        async def admitted() -> list[int]:
            return [(await here.get("state", replica))["local"]["let_go"] for replica in range(3)]

        before = await admitted()
        await servers.until_served(60)
        await here.eventually(
            admitted,
            lambda now: all(count > then for then, count in zip(before, now, strict=True)),
            within_s=60,
            what="an admission by every replica",
        )
        refused = await here.eventually(lambda: load.unserved, within_s=60, what="a refusal")
        assert {record.status for record in refused} == {503}
        assert all(int(record.retry_after) >= 1 for record in refused)
        for replica in range(3):
            assert (await here.admin("/healthz", replica)).json()["status"] == "degraded"
            assert (await here.admin("/readyz", replica)).status_code == 200
            assert await metric(here, "epp_degraded", replica) == 1
        await asyncio.to_thread(valkey.revive if loss == "killed" else valkey.thaw)
        await until_degraded(here, False)
        load.history.clear()
        await servers.until_served(50)
        assert statuses(load) <= {200, 503}
        degraded = partial(metric, here, "epp_degraded")
        await here.eventually(degraded, lambda count: count == 0, what="epp_degraded 0")
    assert servers.peak <= BOUND
    await at_rest(here, within_s=LEASE_S + 5)
