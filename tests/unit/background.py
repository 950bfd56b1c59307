"""Background tasks of tests, and waiting for a condition."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def running(*works: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Run the coroutines `works` as tasks until the block ends; AssertionError if a task ended earlier."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=10)
        assert all(task.cancelled() for task in tasks), tasks


async def until(condition: Callable[[], object]) -> None:
    """Let other tasks, threads and connections run until `condition` holds; TimeoutError after 30 s."""
    async with asyncio.timeout(30):
        for turn in itertools.count():
            if condition():
                return
            await asyncio.sleep(0 if turn < 1000 else 0.001)
