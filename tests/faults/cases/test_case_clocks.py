"""Wrong wall clocks on replicas change no decision: the scripts use only Redis's clock.

libfaketime shifts the wall clock of each replica process, but not the process's monotonic clock.
"""

import asyncio
import email.utils
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from case_fleet import config, log_of, rests, sent
from fault_case import Case

from picker_tools.load.generator import Answer

_LIBRARIES = ("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1",
              "/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1")  # fmt: skip
OFFSETS_S = (300, -300, 0)
# Each Python process runs this at its start: a replica executes itself again with its own clock offset.
SITE = f"""
import os, sys
line = sys.orig_argv
offsets = {OFFSETS_S!r}
if "serve" in line and "LD_PRELOAD" not in os.environ:
    number = int(line[-1].rsplit("-", 1)[1].removesuffix(".yaml"))
    os.environ.update(LD_PRELOAD="@", FAKETIME=f"{{offsets[number - 1]:+d}}", DONT_FAKE_MONOTONIC="1",
                      FAKETIME_DONT_FAKE_MONOTONIC="1")
    os.execv(sys.executable, line)
"""


@pytest.fixture
def wrong_clocks(tmp_path: Path) -> dict[str, str]:
    """Environment variables that shift the replicas' wall clocks by OFFSETS_S."""
    found = [library for library in _LIBRARIES if Path(library).exists()]
    assert found, "libfaketime is missing: install Debian's libfaketime"
    (tmp_path / "sitecustomize.py").write_text(SITE.replace("@", found[0]), encoding="utf-8")
    project = str(Path(__file__).parents[3] / "app")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), project])}


async def test_wrong_clocks_of_replicas_change_no_grant(
    faulty: Callable[..., Any], case: Case, wrong_clocks: dict[str, str]
) -> None:
    count = case.size(16, 60)
    case.describe("replica clocks 5 min fast, 5 min slow and right")
    # The replicas of one fleet have right clocks, the replicas of the other have wrong clocks.
    options = ("--endpoints", "1", "--sim-ttft", "5", "--sim-itl", "10")
    right = faulty(*options, config=config(lease_s=15, per_endpoint=1))
    wrong = faulty(
        *options, config=config(lease_s=15, per_endpoint=1), environment=wrong_clocks, spawned=True
    )
    off_s = [await _offset_s(wrong, replica) for replica in range(3)]
    assert [round(seconds / 60) for seconds in off_s] == [5, -5, 0]
    # Each fleet gets the same requests in the same order; the requests wait behind one long answer.
    both = await asyncio.gather(_decisions(right, count), _decisions(wrong, count))
    # Both fleets grant requests in the same order, and the same requests expire.
    assert both[0] == both[1]
    served = [what for what, _ in both[0]].count("granted")
    expired = [what for what, _ in both[0]].count("expired")
    case.report(f"{served} grants in the same order, {expired} expiries the same; clocks off by {off_s} s")
    assert (served, expired) == (count - count // 4, count // 4)


async def _decisions(fleet: Any, count: int) -> list[tuple[str, int]]:
    """Pairs of event and request number: all grants in order, then all expiries in order."""
    blocking = sent(fleet, "blocking", 100_000, streamed=True, leaves_s=60.0)
    await fleet.until_state(stock=1, queued=0)
    waiting: list[asyncio.Task[Answer]] = []
    for number in range(count):
        # Three flows of different cost; every fourth request expires in the queue.
        headers = [("x-gateway-inference-fairness-id", f"flow-{number % 3}")]
        if number % 4 == 3:
            headers.append(("x-llm-d-inference-ttl", "3s"))
        waiting.append(sent(fleet, f"number {number}", 1, headers=tuple(headers)))
        await _until_logged(fleet, "queued", number + 1)
    await _until_logged(fleet, "expired", count // 4)
    blocking.cancel()
    await asyncio.gather(*waiting)
    await asyncio.gather(blocking, return_exceptions=True)
    await rests(fleet)
    log = await log_of(fleet)
    numbers = [entry["request"] for entry in log if entry["event"] == "queued"]
    decided = [(entry["event"], entry["request"]) for entry in log]
    ordered = [each for event in ("granted", "expired") for each in decided if each[0] == event]
    return [(event, numbers.index(request)) for event, request in ordered]


async def _until_logged(fleet: Any, event: str, count: int) -> None:
    """Wait until the decision log has `count` entries of `event`."""

    async def logged() -> int:
        return [entry["event"] for entry in await log_of(fleet)].count(event)

    await fleet.eventually(logged, lambda found: found == count, what=f"{count} x {event}")


async def _offset_s(fleet: Any, replica: int) -> int:
    """Seconds by which a replica's wall clock is ahead of the test's, from the date header of an answer."""
    date = (await fleet.admin("/healthz", replica)).headers["date"]
    return round(email.utils.parsedate_to_datetime(date).timestamp() - time.time())
