"""A model server dies: its clients are served by the next best (G9)."""

import asyncio
from collections import Counter
from typing import Any

import httpx
import pytest
from fleet_load import PATIENT, at_rest, complete, shared, stream


@pytest.mark.parametrize("mode", ["lean", "standard", "headers"])
async def test_a_dead_endpoint_costs_no_client_an_error(fleet: Any, mode: str) -> None:
    # Given a fleet that serves, and one of its four endpoints killed
    here = fleet("--no-restart", "--mode", mode, "--sim-ttft", "5", "--sim-itl", "1")
    async with here.client(**PATIENT) as client:
        assert (await complete(client, "before", 2)).whole
        dead = here.kill_endpoint(0)
        # When more clients ask than are placed elsewhere
        answers = await asyncio.gather(*(complete(client, f"after {i}", 2) for i in range(40)))
    # Then each is served, by one of the living
    assert [answer for answer in answers if not answer.whole] == []
    served = Counter(answer.endpoint for answer in answers)
    assert dead not in served
    assert len(served) == 3
    # And nothing stays taken
    await at_rest(here)


async def test_an_endpoint_that_cannot_be_connected_to_is_taken_out_for_all(fleet: Any) -> None:
    # Given a fleet that serves, and one of its four endpoints killed
    here = fleet("--no-restart", "--sim-ttft", "5", "--sim-itl", "1")
    dead = here.kill_endpoint(0)
    async with here.client(**PATIENT) as client:
        # When a request has met it
        async def is_down() -> bool:
            assert (await complete(client, "meets it", 2)).whole
            return await status(here, dead, replica=1) == "down"

        await here.eventually(is_down, what="the mark")
        # Then the bounds are those of the other three, and no replica sends anything there
        assert (await here.admin("/api/v1/state", 2)).json()["ready_backends"] == 3
        answers = await asyncio.gather(*(complete(client, f"after {i}", 2) for i in range(12)))
    assert [answer for answer in answers if not answer.whole] == []


async def test_an_endpoint_that_stands_still_is_taken_out_until_it_answers_again(fleet: Any) -> None:
    # Given a fleet that serves, and one of its four endpoints that takes connections and does nothing
    here = fleet("--no-restart", "--sim-ttft", "5", "--sim-itl", "1")
    still = here.stop_endpoint(0)
    try:
        # When nobody has asked for anything, then scraping alone takes it out, for every replica
        async def is_down() -> bool:
            return [await status(here, still, replica) for replica in range(3)] == ["down"] * 3

        await here.eventually(is_down, within_s=60, what="the mark")
        # And clients are served by the others
        async with here.client(**PATIENT) as client:
            answers = await asyncio.gather(*(complete(client, f"meanwhile {i}", 2) for i in range(12)))
        assert [answer for answer in answers if not answer.whole] == []
        assert still not in {answer.endpoint for answer in answers}
    finally:
        here.continue_endpoint(0)

    # When it goes on, then it is back, and serves
    async def is_back() -> bool:
        return [await status(here, still, replica) for replica in range(3)] == ["ready"] * 3

    await here.eventually(is_back, within_s=60, what="its return")
    async with here.client(**PATIENT) as client:

        async def serves() -> bool:
            answers = await asyncio.gather(*(complete(client, f"after {i}", 2) for i in range(8)))
            return still in {answer.endpoint for answer in answers}

        await here.eventually(serves, within_s=60, what="an answer of its own")
    await at_rest(here)


async def test_a_drained_endpoint_finishes_what_it_has_and_gets_nothing_new(fleet: Any) -> None:
    # Given answers being streamed by each of two endpoints
    here = fleet("--endpoints", "2", "--sim-ttft", "5", "--sim-itl", "5")
    async with here.client(**PATIENT) as client, asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(stream(client, f"runs {i}", 1000)) for i in range(4)]

        async def streaming() -> bool:
            return bool((await shared(here))["stock"] == 4)

        await here.eventually(streaming, what="4 streams")
        # When an operator drains one through one replica, then another tells of it, and new ones go elsewhere
        drained = here.state["endpoints"][0]["address"]
        assert (await change(here, f"{drained}/drain", replica=0)).json()["drained"] is True
        assert await status(here, drained, replica=1) == "drained"
        answers = [tasks.create_task(complete(client, f"new {i}", 2)) for i in range(6)]
    assert {task.result().endpoint for task in answers if task.result().whole} == {
        here.state["endpoints"][1]["address"]
    }
    # And what ran there ended whole
    assert [task.result() for task in running if not task.result().whole] == []
    # When it is let in again, then it is as before; and an endpoint nobody knows is named
    await change(here, f"{drained}/undrain", replica=2)
    assert await status(here, drained, replica=0) == "ready"
    unknown = await change(here, "10.9.9.9:1/drain", replica=0)
    detail = "POST /api/v1/endpoints/10.9.9.9:1/drain: no endpoint 10.9.9.9:1"
    assert (unknown.status_code, unknown.json()["detail"]) == (404, detail)
    await at_rest(here)


async def status(fleet: Any, address: str, replica: int) -> str:
    """What a replica says of an endpoint."""
    told = (await fleet.admin("/api/v1/endpoints", replica)).json()
    return str(next(each["status"] for each in told if each["address"] == address))


async def change(fleet: Any, path: str, replica: int) -> httpx.Response:
    answer: httpx.Response = await fleet.admin(f"/api/v1/endpoints/{path}", replica, method="POST")
    return answer
