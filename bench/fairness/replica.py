"""One replica with its clients: `python -m bench.fairness.replica`, led over pipes.

Each line on stdin is a `Job`. It joins the job's pool, prints `ready`, waits for `go`, lets its clients ask
until it reads `stop`, prints `done`. Or it prints what went wrong, and ends. Ends with stdin too.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

import uvloop

from bench.fairness.drive import Clients
from bench.fairness.job import Job
from picker_fleet.admission.shared_gate import SharedGate
from picker_fleet.config import parse
from picker_fleet.endpoints.snapshot import Endpoint
from picker_fleet.errors import PickerError
from picker_fleet.serve import assemble
from picker_fleet.state.subscriptions import listen

_JOINS_S = 30.0
_ORDERS_S = 600.0  # nobody leads a replica that hears nothing for so long


class Led:
    """Orders on stdin, answers on stdout."""

    def __init__(self, orders: asyncio.StreamReader) -> None:
        self._orders = orders

    async def hear(self) -> str:
        """The next order; '' when there will be none."""
        async with asyncio.timeout(_ORDERS_S):
            return (await self._orders.readline()).decode().strip()

    def say(self, line: str) -> None:
        print(line, flush=True)


@contextlib.asynccontextmanager
async def joined(job: Job) -> AsyncIterator[SharedGate]:
    """The shared gate of a replica that is part of the job's pool; what would stand before it is left out."""
    settings = parse(job.config)
    parts = assemble(settings, job.replica)
    store, shared, membership = parts.store, parts.shared, parts.membership
    membership.discovered([Endpoint(each.address) for each in settings.discovery.static or ()])
    async with asyncio.TaskGroup() as tasks:
        works = (
            store.run(),
            listen(settings.redis.url, store.keys.wake(job.replica), shared.on_notification),
        )
        # The watch of Redis notes that the loop runs, too: else the gate believes that its process has slept.
        running = [tasks.create_task(work) for work in (*works, membership.run(), parts.failover.run())]
        async with asyncio.timeout(_JOINS_S):
            await membership.known()
        yield shared
        for task in running:
            task.cancel()


async def work(job: Job, led: Led) -> None:
    async with joined(job) as gate, asyncio.TaskGroup() as tasks:
        led.say("ready")
        if await led.hear() != "go":
            return
        asking = [
            tasks.create_task(
                Clients(gate, source, job.replica, service_ms=job.service_ms, seed=job.seed).run()
            )
            for source in job.sources
        ]
        await led.hear()
        for task in asking:
            task.cancel()


async def main() -> None:
    orders = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    led = Led(orders)
    fault = ""
    while not fault and (line := await led.hear()):
        try:
            await work(Job.read(line), led)
        except* (PickerError, OSError) as faults:
            fault = repr(faults.exceptions[0])
        led.say(f"fault: {fault}" if fault else "done")


if __name__ == "__main__":
    uvloop.run(main())
