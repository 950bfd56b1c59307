"""When a fleet ends, the audit fails if the decision log violates a guarantee or lacks its first entry."""

from typing import Any

import pytest
from fleet_load import at_rest, completed, decisions

LOG = "epp:{default}:log"


async def test_the_audit_fails_on_a_log_with_a_violation_or_without_its_first_entry(fleet: Any) -> None:
    here = fleet("--replicas", "1", "--endpoints", "1", "--sim-ttft", "1", "--sim-itl", "1")
    await completed(here.url, 10)
    await at_rest(here)
    assert len([entry for entry in await decisions(here) if entry.event == "completed"]) == 10
    here.audit()
    async with here.redis() as redis:
        # Append a second end of one request to the log.
        entries = await redis.xrange(LOG)
        last, ended = entries[-1][1], next(e for _, e in reversed(entries) if e["event"] == "completed")
        added = await redis.xadd(LOG, {**ended, "seq": str(int(last["seq"]) + 1)})
        with pytest.raises(AssertionError, match=rf"G6: request {ended['request']} ends .* or twice"):
            here.audit()
        # Remove the appended entry and the first entry.
        await redis.xdel(LOG, added, entries[0][0])
    with pytest.raises(AssertionError, match="log: it begins at entry 2"):
        here.stop()
    assert here.process.poll() == 0
