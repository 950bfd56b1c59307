"""Redis forgets: its scripts, all its data."""

import asyncio
import contextlib
from typing import Any

from fleet_load import PATIENT, at_rest, complete, shared

LEASE_S = 15.0
CONFIG = {"fair_request_queue": {"flow_capacity": 1000}}


async def test_flushed_scripts_cost_no_client_an_error(fleet: Any) -> None:
    # Given a fleet under load
    here = fleet("--sim-ttft", "5", "--sim-itl", "1", config=CONFIG)
    done = asyncio.Event()
    flushes = 0

    async def flush() -> None:
        nonlocal flushes
        async with here.redis() as redis:
            while not done.is_set():
                await redis.script_flush()
                await redis.function_flush()
                flushes += 1
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.1):
                        await done.wait()

    # When the library is flushed every 100 ms
    async with here.client(**PATIENT) as client, asyncio.TaskGroup() as tasks:
        tasks.create_task(flush())
        answers = []
        for wave in range(8):
            asks = (complete(client, f"prompt {wave} {i}", 5) for i in range(50))
            answers += await asyncio.gather(*asks)
        done.set()
    # Then every client has its answer, but for one whose call met only flushes while the machine stood still:
    # it is told when to come again (docs/guarantees.md, Faults)
    assert flushes > 5
    lost = [answer for answer in answers if not answer.whole]
    assert len(lost) <= 1, lost
    assert all(answer.status == 503 and int(answer.retry_after or 0) >= 1 for answer in lost), lost
    await at_rest(here)


async def test_all_data_lost_is_rebuilt(fleet: Any) -> None:
    # Given requests that run for half a minute, and others queued behind them. That is several reports of the
    # access log (one each 5 s): however late the machine lets Redis forget, some are still to come
    config = {**CONFIG, "request_queue_controller": {"watermark_per_backend": 1}}
    here = fleet("--mode", "lean", "--sim-ttft", "10", "--sim-itl", "20", config=config)
    async with here.client(**PATIENT) as client, asyncio.TaskGroup() as tasks:
        long = [tasks.create_task(complete(client, f"long {i}", 1500)) for i in range(4)]

        async def running(count: int) -> bool:
            return bool((await shared(here))["stock"] == count)

        await here.eventually(lambda: running(4), what="4 running")
        short = [tasks.create_task(complete(client, f"short {i}", 2)) for i in range(20)]

        async def queued() -> bool:
            return bool((await shared(here))["queued"] == 20)

        await here.eventually(queued, what="20 queued")
        # When everything in Redis is deleted
        async with here.redis() as redis:
            await redis.flushall()
        # Then the queued ones are registered again and all are served
        answers = await asyncio.gather(*short)
        assert [answer for answer in answers if not answer.whole] == []
        # And the running ones, which nobody but Envoy knows, are counted again: by their access log
        await here.eventually(lambda: running(4), within_s=LEASE_S + 10, what="4 counted again")
    assert [task.result() for task in long if not task.result().whole] == []
    # And in the end the counts are exactly 0
    await at_rest(here, within_s=LEASE_S + 5)
