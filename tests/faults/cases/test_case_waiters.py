"""The cost of a wake-up for Redis does not depend on the number of waiting requests."""

import asyncio
import resource
from collections.abc import Callable
from typing import Any

from case_fleet import config, rests, sent
from fault_case import Case

from picker_tools.load.generator import Answer, flow_header

DISPATCHES = 60
MOST_RATIO = 1.25
PATIENCE_S = 900.0
ARRIVING = 200  # maximum number of requests that are sent but not yet queued
FEW_WORKERS_FILES = 15_000
SPARE_FILES = 1000


async def test_a_wake_up_costs_redis_the_same_if_many_wait(faulty: Callable[..., Any], case: Case) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # In mode `http` each waiting request takes two connections of Envoy.
    most = (hard - SPARE_FILES) // 2 if case.mode == "http" else 9_900  # Envoy accepts 10 000 connections
    few, many = case.size(50, 1000), min(case.size(300, 10_000), most)
    case.describe(f"{many} requests wait, one slot is freed at a time")
    files = hard if case.mode == "http" else min(hard, FEW_WORKERS_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, files), hard))
    # The pool runs one request at a time. Sweeps end requests whose end was lost; they are rare here, because
    # a sweep scans all waiting requests.
    slow = config(per_endpoint=1)
    slow["fair_request_queue"]["queue_ttl"] = "10m"
    slow["request_queue_controller"]["expiry_cleanup_interval"] = f"{case.size(10, 60)}s"
    here = faulty("--endpoints", "1", "--sim-ttft", "50", "--sim-itl", "5", config=slow)
    costs = [await _calls_a_wakeup(here, few), await _calls_a_wakeup(here, many)]
    # A wake-up costs Redis about as many calls with many waiting requests as with few.
    costs_text = " and ".join(f"{calls:.1f} calls, {commands:.1f} commands" for calls, commands in costs)
    ratio = costs[1][0] / costs[0][0]
    case.report(f"a wake-up costs {costs_text} while {few} and {many} requests wait: ratio {ratio:.2f}")
    assert ratio <= MOST_RATIO
    assert costs[1][1] / costs[0][1] <= MOST_RATIO
    await case.check(here)


async def _calls_a_wakeup(here: Any, waiters: int) -> tuple[float, float]:
    """Numbers of script calls and Redis commands per dispatched request, while `waiters` requests wait."""
    tasks: list[asyncio.Task[Answer]] = []

    blocking = sent(here, "hold", 100_000, streamed=True, leaves_s=PATIENCE_S)
    await here.until_state(stock=1)
    for number in range(waiters):
        flow = flow_header(f"flow-{number % 10}")
        tasks.append(sent(here, "w", 1, leaves_s=PATIENCE_S, headers=flow))
        if number % ARRIVING == ARRIVING - 1:
            least = number - ARRIVING
            await here.until(
                "state", lambda state, least=least: state["queued"] > least, within_s=60, what="arrivals"
            )
    await here.until_state(queued=waiters, within_s=60)
    blocking.cancel()
    before = await _spent(here)
    most = min(DISPATCHES, waiters - 5)
    await here.eventually(
        lambda: sum(task.done() for task in tasks), lambda done: done >= most, within_s=60, what="dispatches"
    )
    after = await _spent(here)
    # Let requests in flight end before the clients leave.
    await here.post("pause")
    await here.until_state(stock=0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(blocking, *tasks, return_exceptions=True)
    await rests(here, within_s=60)
    await here.post("resume")
    return (after[0] - before[0]) / (after[2] - before[2]), (after[1] - before[1]) / (after[2] - before[2])


async def _spent(here: Any) -> tuple[int, int, int]:
    """Numbers of script calls, Redis commands and dispatches so far, except by periodic background tasks."""
    async with here.redis() as client:
        stats = await client.info("commandstats")
        dispatched = (await here.get("state"))["dispatched_total"]
    by_clock = ("cmdstat_publish", "cmdstat_hset", "cmdstat_info", "cmdstat_ping", "cmdstat_xread")
    calls = {name: int(stat["calls"]) for name, stat in stats.items() if name not in by_clock}
    return calls["cmdstat_fcall"], sum(calls.values()), dispatched
