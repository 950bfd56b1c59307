"""A model server hangs or is drained: the next best endpoints serve its clients (G9).

test_one_queue.py tests a server that dies.
"""

import asyncio
from typing import Any

import pytest
from fleet_load import at_rest, complete, served_by
from whole_fleet import suspended


@pytest.fixture(scope="module")
def here(shared_fleet: Any) -> Any:
    """A fleet of four endpoints; every test leaves the fleet unchanged."""
    return shared_fleet("--sim-ttft", "5", "--sim-itl", "5")


async def test_an_endpoint_that_hangs_is_down_until_it_answers_again(here: Any) -> None:
    stopped = here.state["endpoints"][0]["address"]

    async def seen() -> set[str]:
        return {await here.endpoint_status(stopped, replica) for replica in range(3)}

    with suspended(here.endpoint(0)):
        # No request is sent: scraping alone marks the endpoint as down, for every replica.
        await here.eventually(seen, lambda each: each == {"down"}, within_s=60, what="status down")
        assert stopped not in await served_by(here.url, 12)
    await here.eventually(seen, lambda each: each == {"ready"}, within_s=60, what="status ready")
    await here.eventually(
        lambda: served_by(here.url, 8),
        lambda by: stopped in by,
        within_s=60,
        what="a request served by the resumed endpoint",
    )
    await at_rest(here)


async def test_a_drained_endpoint_finishes_its_requests_and_gets_no_new_ones(here: Any) -> None:
    drained, *others = (each["address"] for each in here.state["endpoints"])

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(complete(here.url, f"runs {i}", 1000, streamed=True)) for i in range(4)]
        await here.until_state(stock=4)
        assert (await here.post(f"endpoints/{drained}/drain"))["drained"] is True
        assert await here.endpoint_status(drained, 1) == "drained"
        assert await served_by(here.url, 12) == set(others)
    assert [task.result() for task in running if not task.result().served] == []
    await here.post(f"endpoints/{drained}/undrain", 2)
    assert await here.endpoint_status(drained) == "ready"
    unknown = await here.admin("/api/v1/endpoints/10.9.9.9:1/drain", method="POST")
    detail = "POST /api/v1/endpoints/10.9.9.9:1/drain: no endpoint 10.9.9.9:1"
    assert (unknown.status_code, unknown.json()["detail"]) == (404, detail)
    await at_rest(here)
