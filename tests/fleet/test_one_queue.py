"""Three replicas, each a real process, share one bound and one queue."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from decision_ledger import Ledger
from fleet_load import at_rest, complete, completed, decisions, served_by

CONFIG = {
    "fair_request_queue": {"flow_capacity": 1000},
    "request_queue_controller": {"watermark_per_backend": 2},
}


@pytest.fixture(params=["lean", "standard", "http"], scope="module")
def here(request: pytest.FixtureRequest, shared_fleet: Any) -> Any:
    """A fleet in each mode; the mode's last test kills an endpoint."""
    quick = ("--sim-ttft", "10", "--sim-itl", "1")
    return shared_fleet("--no-restart", "--mode", request.param, *quick, config=CONFIG)


async def test_300_parallel_requests_never_exceed_the_bound(here: Any) -> None:
    answers = await completed(here.url, 300, tokens=5)
    await at_rest(here)
    log = await decisions(here)
    assert max(entry.stock for entry in log) == 8  # four endpoints at a watermark of 2 requests
    assert Ledger.replay(log).ends == Counter({"completed": 300})
    served = Counter(answer.endpoint for answer in answers)
    assert len(served) == 4
    assert min(served.values()) >= 2  # an endpoint that stalls may get only two requests
    # Before the first request ends, each placement goes to an endpoint with the fewest requests in flight.
    events = [entry.event for entry in log]
    first = Counter(entry.endpoint for entry in log[: events.index("completed")] if entry.endpoint)
    assert max(first.values()) - min(first[endpoint] for endpoint in served) <= 1


async def test_a_dead_endpoint_fails_no_request_and_is_down_for_every_replica(here: Any) -> None:
    assert (await complete(here.url, "before", 2)).served
    dead = here.state["endpoints"][0]["address"]
    here.endpoint(0).kill()
    here.wait_line("DOWN  endpoint-1   was killed by SIGKILL and is not started again")
    served = await served_by(here.url, 40)
    assert dead not in served
    assert len(served) == 3
    await at_rest(here)

    async def status() -> str:
        assert (await complete(here.url, "tries the dead endpoint", 2)).served
        return str(await here.endpoint_status(dead, 1))

    await here.eventually(status, lambda found: found == "down", what="status down at another replica")
    assert (await here.get("state", 2))["ready_backends"] == 3
    assert dead not in await served_by(here.url, 12)
    await at_rest(here)


async def test_without_a_queue_requests_beyond_the_bound_run_at_once(fleet: Any) -> None:
    config = {"request_queue_controller": {"enabled": False, "watermark_per_backend": 1}}
    here = fleet("--replicas", "2", "--endpoints", "2", "--sim-ttft", "500", "--sim-itl", "1", config=config)
    async with asyncio.TaskGroup() as clients:
        tasks = [clients.create_task(complete(here.url, f"prompt {i}", 100)) for i in range(20)]

        def half_on_each(state: dict[str, Any]) -> bool:
            assert (state["queue_enabled"], state["queued"], state["stock"]) == (False, 0, 0)
            return state["leases"] == 20 and sorted(state["in_flight"].values()) == [10, 10]

        await here.until("state", half_on_each, what="twenty in flight, half on each endpoint")
    assert all(task.result().served for task in tasks)
    await at_rest(here)
