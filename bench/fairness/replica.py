"""One replica with its clients: `python -m bench.fairness.replica`, led over pipes.

Each line on stdin is a `Job`. It joins the job's pool, prints `ready`, waits for `go`, lets its clients ask
until it reads `stop`, prints `done`. Or it prints what went wrong, and ends. Ends with stdin too.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

import uvloop

from app.admission.membership import Membership
from app.admission.shared import SharedGate
from app.config import parse
from app.endpoints.snapshot import Endpoint, SnapshotCell
from app.errors import PickerError
from app.state.store import Store
from app.state.wakeups import listen
from app.telemetry.metrics import Metrics
from bench.fairness.drive import Clients
from bench.fairness.job import Job

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
    """The gate of a replica that is part of the job's pool, as `app.assembly` puts it together."""
    settings = parse(job.config)
    metrics, cell = Metrics(), SnapshotCell()
    store = Store(
        settings.redis.url,
        pool=settings.pool,
        replica=job.replica,
        call_timeout_s=settings.redis.call_timeout,
        connect_timeout_s=settings.redis.connect_timeout,
        metrics=metrics,
        on_news=lambda what, request_id: gate.hear(what, request_id),
        on_dequeued=metrics.dequeued,
        on_adopted=metrics.adopted,
    )
    in_tokens = settings.request_queue_controller.unit == "tokens"
    gate = SharedGate(
        store,
        metrics=metrics,
        endpoints=cell,
        fallbacks=settings.scheduling.fallbacks,
        on_unknown_pool=lambda: membership.poke(),
        answer_tokens=settings.fair_request_queue.default_answer_tokens if in_tokens else None,
    )
    membership = Membership(store, gate, settings, endpoints=cell, metrics=metrics, about={"host": "bench"})
    membership.discovered([Endpoint(each.address) for each in settings.discovery.static or ()])
    async with asyncio.TaskGroup() as tasks:
        parts = (store.run(), listen(settings.redis.url, store.keys.wake(job.replica), gate.hear))
        running = [tasks.create_task(part) for part in (*parts, membership.run())]
        async with asyncio.timeout(_JOINS_S):
            await membership.known()
        yield gate
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
