"""A model server dies, hangs or is drained: its clients are served by the next best (G9)."""

import asyncio
from typing import Any

import httpx
import pytest
from fleet_load import PATIENT, at_rest, complete, stream


async def served_by(client: httpx.AsyncClient, count: int) -> set[str | None]:
    """The endpoints that serve `count` parallel requests, none of which fails."""
    answers = await asyncio.gather(*(complete(client, f"prompt {i}", 2) for i in range(count)))
    assert [answer for answer in answers if not answer.whole] == []
    return {answer.endpoint for answer in answers}


async def statuses(fleet: Any, address: str) -> list[str]:
    """What each replica says of an endpoint."""
    return [await status(fleet, address, replica) for replica in range(len(fleet.state["replicas"]))]


async def status(fleet: Any, address: str, replica: int) -> str:
    rows = (await fleet.admin("/api/v1/endpoints", replica)).json()
    return str(next(each["status"] for each in rows if each["address"] == address))


@pytest.mark.parametrize("mode", ["lean", "standard", "headers", "http"])
async def test_a_dead_endpoint_fails_no_request_and_is_down_for_every_replica(fleet: Any, mode: str) -> None:
    here = fleet("--no-restart", "--mode", mode, "--sim-ttft", "5", "--sim-itl", "1")
    async with here.client(**PATIENT) as client:
        assert (await complete(client, "before", 2)).whole
        dead = here.kill_endpoint(0)
        here.wait_line("DOWN  endpoint-1   was killed by SIGKILL and is not started again")
        served = await served_by(client, 40)
        assert dead not in served
        assert len(served) == 3
        await at_rest(here)

        async def is_down() -> bool:
            assert (await complete(client, "meets it", 2)).whole
            return await status(here, dead, replica=1) == "down"

        await here.eventually(is_down, what="the mark")
        assert (await here.admin("/api/v1/state", 2)).json()["ready_backends"] == 3
        assert dead not in await served_by(client, 12)
    await at_rest(here)


async def test_an_endpoint_that_hangs_is_down_until_it_answers_again(fleet: Any) -> None:
    here = fleet("--no-restart", "--sim-ttft", "5", "--sim-itl", "1")
    stopped = here.stop_endpoint(0)

    async def all_say(wanted: str) -> bool:
        return await statuses(here, stopped) == [wanted] * 3

    async with here.client(**PATIENT) as client:
        try:
            # No request is sent: scraping alone takes it out, for every replica.
            await here.eventually(lambda: all_say("down"), within_s=60, what="the mark")
            assert stopped not in await served_by(client, 12)
        finally:
            here.continue_endpoint(0)
        await here.eventually(lambda: all_say("ready"), within_s=60, what="its return")

        async def serves() -> bool:
            return stopped in await served_by(client, 8)

        await here.eventually(serves, within_s=60, what="a request that it serves")
    await at_rest(here)


async def test_a_drained_endpoint_finishes_its_requests_and_gets_no_new_ones(fleet: Any) -> None:
    here = fleet("--endpoints", "2", "--sim-ttft", "5", "--sim-itl", "5")
    drained, other = (each["address"] for each in here.state["endpoints"])

    async def change(path: str, replica: int) -> httpx.Response:
        answer: httpx.Response = await here.admin(f"/api/v1/endpoints/{path}", replica, method="POST")
        return answer

    async with here.client(**PATIENT) as client, asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(stream(client, f"runs {i}", 1000)) for i in range(4)]
        await here.until_state(stock=4)
        assert (await change(f"{drained}/drain", replica=0)).json()["drained"] is True
        assert await status(here, drained, replica=1) == "drained"
        assert await served_by(client, 6) == {other}
    assert [task.result() for task in running if not task.result().whole] == []
    await change(f"{drained}/undrain", replica=2)
    assert await status(here, drained, replica=0) == "ready"
    unknown = await change("10.9.9.9:1/drain", replica=0)
    detail = "POST /api/v1/endpoints/10.9.9.9:1/drain: no endpoint 10.9.9.9:1"
    assert (unknown.status_code, unknown.json()["detail"]) == (404, detail)
    await at_rest(here)
