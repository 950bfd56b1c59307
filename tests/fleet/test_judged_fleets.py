"""Every fleet of these tests is judged by its decision log when it ends. That this can fail is shown here."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from fleet_load import at_rest, complete, decisions

LOG = "epp:{default}:log"


async def test_a_fleet_whose_log_breaks_a_promise_does_not_end_well(fleet: Any) -> None:
    # Given a fleet that says nothing of a decision log, and has served
    here = fleet("--replicas", "1", "--endpoints", "1", "--sim-ttft", "1", "--sim-itl", "1")
    async with here.client() as client:
        answers = await asyncio.gather(*(complete(client, f"prompt {i}", 2) for i in range(10)))
    assert [answer for answer in answers if not answer.whole] == []
    await at_rest(here)
    # Then its log has all of that, and nothing against it
    assert len([entry for entry in await decisions(here) if entry.event == "completed"]) == 10
    here.audit()
    # But when the log says that a request ended twice, that is told with what shows it
    async with here.redis() as redis:
        entries = await redis.xrange(LOG)
        last, completed = entries[-1][1], next(e for _, e in reversed(entries) if e["event"] == "completed")
        twice: Mapping[str, str] = {**completed, "seq": str(int(last["seq"]) + 1)}
        await redis.xadd(LOG, dict(twice))
    with pytest.raises(AssertionError, match=rf"G6: request {completed['request']} ends .* or twice"):
        here.stop()
    # And the fleet has ended all the same
    assert here.process.poll() == 0


async def test_a_log_that_lost_its_beginning_is_no_evidence(fleet: Any) -> None:
    # Given a fleet whose log has been cut
    here = fleet("--replicas", "1", "--endpoints", "1", unaudited="its log is cut")
    async with here.client() as client:
        assert (await complete(client, "prompt", 2)).whole
    await at_rest(here)
    async with here.redis() as redis:
        (first, _), *_ = await redis.xrange(LOG, count=1)
        await redis.xdel(LOG, first)
    # When it is judged, then that is held against it
    with pytest.raises(AssertionError, match="log: it begins at entry 2"):
        here.audit()
