"""The list of endpoints changes while requests wait and run: replicas pick only endpoints that Envoy has."""

import asyncio
import itertools
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
from fleet_load import at_rest
from model_servers import counting_servers
from redis_servers import redis_server
from whole_fleet import Fleet, running

from picker_tools.load.generator import Answer, Request, send_request

CLIENTS = 60
CONFIG = {
    "fair_request_queue": {"queue_without_endpoints": True, "queue_ttl": "60s"},
    "request_queue_controller": {"watermark_per_backend": 100},
    "scheduling": {"scorers": {"queue-depth": 1}},
}


def write_endpoints(file: Path, addresses: Iterable[str]) -> None:
    draft = file.with_suffix(".new")
    draft.write_text(json.dumps([{"address": each} for each in addresses]))
    draft.replace(file)


async def ask(here: Fleet, number: int) -> Answer:
    return await send_request(here.url, Request(f"prompt {number}", 1))


@pytest.mark.parametrize("mode", ["lean", "standard", "http"])
async def test_requests_queued_without_endpoints_are_served_once_envoy_knows_a_new_endpoint(
    tmp_path: Path, mode: str
) -> None:
    async with counting_servers(3, 0.05) as servers:
        file = tmp_path / "endpoints.json"

        def write(*addresses: str) -> None:
            write_endpoints(file, addresses)

        write(servers.addresses[0])
        config = {"discovery": {"file": str(file)}, **CONFIG}
        async with running(tmp_path, "--mode", mode, "--endpoints", "0", config=config) as here:
            write()
            await here.until_state(ready_backends=0)
            waiting = [asyncio.create_task(ask(here, number)) for number in range(CLIENTS)]
            await here.until_state(queued=CLIENTS)
            write(servers.addresses[1])
            answers = await asyncio.gather(*waiting)
            assert {answer.status for answer in answers} == {200}

            # Under load, the endpoint list is emptied and refilled three times, each time with a new server.
            stop, numbers = asyncio.Event(), itertools.count(CLIENTS)

            async def client() -> list[int]:
                statuses = []
                while not stop.is_set():
                    statuses.append((await ask(here, next(numbers))).status)
                return statuses

            clients = [asyncio.create_task(client()) for _ in range(16)]
            for address in (servers.addresses[2], *servers.addresses[:2]):
                await servers.until_served(30)
                write()
                await here.until_state(ready_backends=0)
                write(address)
            await servers.until_served(30)
            stop.set()
            statuses = list(itertools.chain(*await asyncio.gather(*clients)))
            assert set(statuses) == {200}
            await at_rest(here)


@pytest.mark.parametrize("mode", ["lean", "standard", "http"])
async def test_in_an_outage_of_redis_replicas_follow_their_own_lists_of_endpoints(
    tmp_path: Path, mode: str
) -> None:
    async with counting_servers(1, 0.05) as former, counting_servers(1, 0.05) as latter:
        file = tmp_path / "endpoints.json"
        write_endpoints(file, former.addresses)
        with redis_server(tmp_path / "valkey") as valkey:
            options = ("--mode", mode, "--endpoints", "0", "--redis", valkey.url, "--no-restart")
            config = {"discovery": {"file": str(file)}, **CONFIG}
            async with running(tmp_path, *options, config=config) as here:

                async def served() -> list[bool]:
                    """Whether each of the two servers serves some of ten requests."""
                    before = [each.served for each in (former, latter)]
                    answers = [await ask(here, number) for number in range(10)]
                    assert {answer.status for answer in answers} == {200}
                    now = [each.served for each in (former, latter)]
                    return [count > then for count, then in zip(now, before, strict=True)]

                assert await served() == [True, False]
                await here.until_counted()
                valkey.kill()
                for replica in range(len(here.state["replicas"])):
                    await here.until_state(replica=replica, within_s=20, degraded=True)
                write_endpoints(file, former.addresses + latter.addresses)
                for replica in range(len(here.state["replicas"])):
                    await here.eventually(
                        partial(here.get, "endpoints", replica),
                        lambda found: [each["status"] for each in found] == ["ready", "ready"],
                        within_s=20,
                        what="both endpoints ready",
                    )
                await here.eventually(served, lambda found: found == [True, True], what="both servers")
                write_endpoints(file, latter.addresses)
                await here.eventually(served, lambda found: found == [False, True], what="the new server")
                await asyncio.to_thread(valkey.revive)
                await here.until_state(within_s=20, degraded=False)
                assert await served() == [False, True]
                await at_rest(here)
