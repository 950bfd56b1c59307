"""The list of endpoints changes while requests wait and run: replicas pick only endpoints that Envoy has."""

import asyncio
import itertools
import json
from pathlib import Path

import pytest
from fleet_load import at_rest
from model_servers import counting_servers
from whole_fleet import Fleet, running

from picker_tools.load.generator import Answer, Request, send_request

CLIENTS = 60
CONFIG = {
    "fair_request_queue": {"queue_without_endpoints": True, "queue_ttl": "60s"},
    "request_queue_controller": {"watermark_per_backend": 100},
    "scheduling": {"scorers": {"queue-depth": 1}},
}


async def ask(here: Fleet, number: int) -> Answer:
    return await send_request(here.url, Request(f"prompt {number}", 1))


@pytest.mark.parametrize("mode", ["lean", "standard", "http"])
async def test_requests_queued_without_endpoints_are_served_once_envoy_knows_a_new_endpoint(
    tmp_path: Path, mode: str
) -> None:
    async with counting_servers(3, 0.05) as servers:
        file = tmp_path / "endpoints.json"

        def write(*addresses: str) -> None:
            draft = file.with_suffix(".new")
            draft.write_text(json.dumps([{"address": each} for each in addresses]))
            draft.replace(file)

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
