"""A fleet's closing audit fails when its log shows a violation or lacks its beginning."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from fleet_load import at_rest, complete, decisions

LOG = "epp:{default}:log"


async def test_a_log_with_a_violation_fails_the_test_when_its_fleet_stops(fleet: Any) -> None:
    here = fleet("--replicas", "1", "--endpoints", "1", "--sim-ttft", "1", "--sim-itl", "1")
    async with here.client() as client:
        answers = await asyncio.gather(*(complete(client, f"prompt {i}", 2) for i in range(10)))
    assert [answer for answer in answers if not answer.whole] == []
    await at_rest(here)
    assert len([entry for entry in await decisions(here) if entry.event == "completed"]) == 10
    here.audit()
    # The log now says that a request ended twice.
    async with here.redis() as redis:
        entries = await redis.xrange(LOG)
        last, completed = entries[-1][1], next(e for _, e in reversed(entries) if e["event"] == "completed")
        twice: Mapping[str, str] = {**completed, "seq": str(int(last["seq"]) + 1)}
        await redis.xadd(LOG, dict(twice))
    with pytest.raises(AssertionError, match=rf"G6: request {completed['request']} ends .* or twice"):
        here.stop()
    assert here.process.poll() == 0


async def test_a_log_without_its_beginning_fails_the_audit(fleet: Any) -> None:
    here = fleet("--replicas", "1", "--endpoints", "1", unaudited="its log is trimmed")
    async with here.client() as client:
        assert (await complete(client, "prompt", 2)).whole
    await at_rest(here)
    async with here.redis() as redis:
        (first, _), *_ = await redis.xrange(LOG, count=1)
        await redis.xdel(LOG, first)
    with pytest.raises(AssertionError, match="log: it begins at entry 2"):
        here.audit()
