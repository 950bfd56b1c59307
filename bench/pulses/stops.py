"""Processes that are stopped and continued at random, as on a host whose cores are busy."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Mapping

import psutil

PAUSE_S = (0.1, 1.5)  # since the last stop ended
STOP_S = (0.05, 0.6)


@contextlib.asynccontextmanager
async def pulses(seed: int, victims: Mapping[str, psutil.Process]) -> AsyncIterator[dict[str, float]]:
    """Until the block ends; all run then. For how many seconds each was stopped, in all, so far.

    `victims` are children of this process or of theirs. Each has its own sequence of pauses and stops, which
    `seed` and its name decide.
    """
    stopped_s = dict.fromkeys(victims, 0.0)

    async def pulse(name: str, victim: psutil.Process) -> None:
        dice = random.Random(f"{seed} {name}")
        try:
            while True:
                await asyncio.sleep(dice.uniform(*PAUSE_S))
                lasts_s = dice.uniform(*STOP_S)
                victim.suspend()
                await asyncio.sleep(lasts_s)
                victim.resume()
                stopped_s[name] += lasts_s
        finally:
            victim.resume()

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(pulse(*each)) for each in victims.items()]
        try:
            yield stopped_s
        finally:
            for task in running:
                task.cancel()
