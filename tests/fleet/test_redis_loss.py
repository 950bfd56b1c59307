"""Redis goes away under load and comes back (G8). Model servers count what is in flight, exactly."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from counting_servers import CountingServers, counting_servers
from fleet_load import PATIENT, at_rest, metric, shared
from own_valkey import OwnValkey, own_valkey
from whole_fleet import Fleet, started

pytestmark = pytest.mark.asyncio(loop_scope="module")
Three = tuple[Fleet, OwnValkey, CountingServers]
SERVERS, EACH = 4, 3
BOUND = SERVERS * EACH
CLIENTS = 24
SERVICE_S = 0.4  # long enough that places are what is short, also on a busy machine
REFUSED_S = 0.4  # six of the clients are, at any time: more often they would only cost
LEASE_S = 15.0
OF_AGE_S = 6.0  # three seconds since it joined, which it did in the first three


def config(servers: CountingServers) -> dict[str, Any]:
    return {
        "discovery": {"static": [{"address": address} for address in servers.addresses]},
        # less room than clients, so that some are refused, in common and by each alone
        "fair_request_queue": {"total_capacity": 6, "flow_capacity": 6},
        "request_queue_controller": {
            "watermark_per_backend": EACH,
            "upper_bound_per_backend": EACH,
            "lower_bound_per_backend": EACH,
        },
    }


class Load:
    """Clients that ask again as soon as they are answered, or soon after they were refused: those who were
    served fill the room to wait again by themselves.
    """

    def __init__(self) -> None:
        self.answers: list[httpx.Response] = []
        self.stop = asyncio.Event()

    async def ask(self, client: httpx.AsyncClient) -> None:
        while not self.stop.is_set():
            body = {"model": "llama", "prompt": "hi", "max_tokens": 1}
            answer = await client.post("/v1/completions", json=body)
            self.answers.append(answer)
            if answer.status_code != 200:
                await asyncio.sleep(REFUSED_S)


@asynccontextmanager
async def loaded(here: Any, clients: int) -> AsyncIterator[Load]:
    load = Load()
    async with here.client(**PATIENT) as client, asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(load.ask(client))
        try:
            yield load
        finally:
            load.stop.set()


async def states(here: Any) -> list[dict[str, Any]]:
    return [await shared(here, replica) for replica in range(3)]


async def until_grown_up(here: Any) -> None:
    """Wait until each replica has been there long enough for the others to count on it: a younger one that
    loses Redis has no part of the bound."""

    async def look() -> bool:
        replicas = (await here.admin("/api/v1/replicas")).json()["replicas"]
        return len(replicas) == 3 and all(each["started_s_ago"] > OF_AGE_S for each in replicas)

    await here.eventually(look, within_s=60, what="replicas that are of age")


async def until_degraded(here: Any, wanted: bool) -> None:
    async def look() -> bool:
        return all(state.get("degraded") is wanted for state in await states(here))

    await here.eventually(look, within_s=20, what=f"degraded {wanted}")


async def until_served(here: Any, servers: CountingServers, more: int) -> None:
    goal = servers.served + more

    async def look() -> bool:
        return servers.served >= goal

    await here.eventually(look, within_s=60, what=f"{more} more answers")


@asynccontextmanager
async def fleet_of_three(folder: Path, mode: str) -> AsyncIterator[Three]:
    async with own_valkey(folder) as valkey, counting_servers(SERVERS, SERVICE_S) as servers:
        options = ("--mode", mode, "--endpoints", "0", "--redis", valkey.url, "--no-restart")
        here = await asyncio.to_thread(lambda: started(folder, options, config(servers)))
        try:
            await until_grown_up(here)
            yield here, valkey, servers
        finally:
            await asyncio.to_thread(here.stop)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def three(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Callable[[str], Awaitable[Three]]]:
    """`three(mode)`: a fleet of three replicas, its Redis and its model servers; those of the test before if
    they were of the same mode. Tests leave them at rest."""
    async with AsyncExitStack() as running:
        found: dict[str, Three] = {}

        async def of(mode: str) -> Three:
            if mode not in found:
                await running.aclose()
                found.clear()
                folder = tmp_path_factory.mktemp("three")
                found[mode] = await running.enter_async_context(fleet_of_three(folder, mode))
            return found[mode]

        yield of


LOSSES: dict[str, tuple[Callable[[OwnValkey], None], Callable[[OwnValkey], Any]]] = {
    "killed": (OwnValkey.kill, OwnValkey.start),
    "silent": (OwnValkey.freeze, OwnValkey.thaw),
}


async def test_an_idle_fleet_admits_at_most_its_bound_when_a_burst_comes_without_redis(three: Any) -> None:
    here, valkey, servers = await three("lean")
    # Given a fleet that has served and is at rest
    async with loaded(here, 3) as load:
        await until_served(here, servers, 10)
    await at_rest(here)

    # When Redis dies, and then a burst comes
    valkey.kill()
    await until_degraded(here, True)
    servers.forget_peak()
    async with loaded(here, CLIENTS) as load:
        await until_served(here, servers, 100)

    # Then the replicas' shares make up the bound, and not one more
    assert servers.peak <= BOUND
    assert {answer.status_code for answer in load.answers} <= {200, 503}

    # And requests that wait when Redis comes back are served from the common queue
    async with loaded(here, CLIENTS):
        await valkey.start()
        await until_degraded(here, False)
        await until_served(here, servers, 50)
    assert servers.peak <= BOUND
    await at_rest(here, within_s=LEASE_S + 5)


@pytest.mark.parametrize(
    ("mode", "loss"),
    [("lean", "killed"), ("lean", "silent"), ("standard", "killed"), ("headers", "silent")],
)
async def test_without_redis_the_fleet_goes_on_within_its_last_bound(
    three: Any, mode: str, loss: str
) -> None:
    here, valkey, servers = await three(mode)
    lose, bring_back = LOSSES[loss]
    servers.forget_peak()
    # Given more clients than the fleet has room for
    async with loaded(here, CLIENTS) as load:
        await until_served(here, servers, 50)

        # When Redis is away
        lose(valkey)
        await until_degraded(here, True)
        load.answers.clear()

        # Then requests are still answered, through every replica
        before = [state["local"]["let_go"] for state in await states(here)]
        await until_served(here, servers, 60)

        async def all_let_go() -> bool:
            after = [state["local"]["let_go"] for state in await states(here)]
            return all(now > then for then, now in zip(before, after, strict=True))

        await here.eventually(all_let_go, within_s=60, what="a request let go by every replica")

        # And what is past the room to wait is told when to come again
        async def some_refused() -> list[httpx.Response]:
            return [answer for answer in load.answers if answer.status_code != 200]

        refused = await here.eventually(some_refused, within_s=60, what="a refusal")
        assert {answer.status_code for answer in refused} == {503}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)

        # And it shows, without taking the replica out of service
        for replica in range(3):
            assert (await here.admin("/healthz", replica)).json()["status"] == "degraded"
            assert (await here.admin("/readyz", replica)).status_code == 200
            assert await metric(here, "epp_degraded", replica) == 1

        # When it is back, empty or as it was, then operation is shared again by itself
        back = bring_back(valkey)
        if back is not None:
            await back
        await until_degraded(here, False)
        load.answers.clear()
        await until_served(here, servers, 50)
        assert {answer.status_code for answer in load.answers} <= {200, 503}

        async def shows_no_loss() -> bool:
            return await metric(here, "epp_degraded", 0) == 0

        await here.eventually(shows_no_loss, what="epp_degraded 0")
    # And at no time was more in flight than the bound, and at rest nothing is
    assert servers.peak <= BOUND
    await at_rest(here, within_s=LEASE_S + 5)
