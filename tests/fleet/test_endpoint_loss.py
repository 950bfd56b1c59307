"""A model server dies: its clients are served by the next best (G9)."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from fleet_load import PATIENT, at_rest, complete


@pytest.mark.parametrize("mode", ["lean", "standard", "headers"])
async def test_a_dead_endpoint_costs_no_client_an_error(fleet: Any, mode: str) -> None:
    # Given a fleet that serves, and one of its four endpoints killed
    here = fleet("--mode", mode, "--sim-ttft", "5", "--sim-itl", "1")
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
