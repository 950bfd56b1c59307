"""`python -m bench.fairness.replica`: one replica with its clients, controlled over pipes.

The fairness benchmark starts this process. Each line on stdin is a `Job`: the process joins the job's pool,
prints `ready`, and waits for the line `go`. After `go` the process's clients send requests until the process
reads `stop` and prints `done`. After an error the process prints it and exits; it also exits when stdin ends.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence

import uvloop

from bench.fairness.scenarios import Job, Source
from bench.rig.child import Orders
from picker_fleet.admission.admission import Admission
from picker_fleet.domain.bands import NAMED
from picker_fleet.domain.budgets import BodyBudget
from picker_fleet.domain.config import parse
from picker_fleet.domain.errors import PickerError, RequestError, StateUnavailable
from picker_fleet.domain.request import Completion, Endpoint, InferenceRequest, Outcome, Workload
from picker_fleet.ingress.context import OpenRequests
from picker_fleet.pool import Pool
from picker_fleet.state.subscriptions import listen

_AGAIN_S = 0.02  # seconds that a client pauses after a refusal
_MODEL = "llama"
_PROMPT_TOKENS = 1  # tokens of a prompt; the answer has all other tokens of the request


class Clients:
    """All clients of the load source `source` at this replica. `seed` determines all requests."""

    def __init__(
        self, gate: Admission, source: Source, replica: str, *, service_ms: Sequence[float], seed: str
    ) -> None:
        self._gate = gate
        self._source = source
        self._replica = replica
        self._service_ms = service_ms
        self._random = random.Random(f"{seed}/{source.name}/{replica}")
        self._made = 0

    async def run(self) -> None:
        """Send requests until the task is cancelled. Raises StateUnavailable if Redis is unavailable."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._source.callers):
                tasks.create_task(self._call_forever())
            if self._source.rate_per_s > 0:
                await self._arrive(tasks)

    async def _arrive(self, tasks: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += self._random.expovariate(self._source.rate_per_s)
            await asyncio.sleep(due - loop.time())
            tasks.create_task(self._one())

    async def _call_forever(self) -> None:
        while True:
            if not await self._one():
                await asyncio.sleep(_AGAIN_S)

    async def _one(self) -> bool:
        """Admit, serve and settle one request. Returns False if the request is refused."""
        request = self._next()
        service_s = self._random.uniform(*self._service_ms) / 1000
        try:
            await self._gate.admit(request, stream_owned=False)
        except StateUnavailable:
            raise
        except RequestError:
            return False
        await asyncio.sleep(service_s)
        answer = max(0, self._source.tokens - _PROMPT_TOKENS)
        self._gate.settle(
            Completion(request.id, Outcome.COMPLETED, 200, None, _PROMPT_TOKENS, answer, service_s, service_s)
        )
        return True

    def _next(self) -> InferenceRequest:
        source, number = self._source, self._made
        self._made += 1
        request_id = f"{source.name}.{self._replica}.{number}"
        shared = f"{source.name}-{number % source.workloads}" if source.workloads else ""
        workload = Workload(shared, source.criticality)
        cost = 1.0
        if source.tokens:
            cost = round(source.tokens * source.guess_factor ** self._random.uniform(-1, 1))
        return InferenceRequest(
            request_id, _MODEL, _MODEL, False, source.flow(number), NAMED[source.band], source.weight,
            workload, cost, source.ttl_s, None,
        )  # fmt: skip


_JOINS_S = 30.0


@contextlib.asynccontextmanager
async def joined(job: Job) -> AsyncIterator[Admission]:
    """Run a replica of the job's pool without gRPC and admin servers; yields the replica's `Admission`."""
    settings = parse(job.config)
    pool = Pool(settings, job.replica, bodies=BodyBudget(0), open_requests=OpenRequests())
    store, admission, membership = pool.store, pool.admission, pool.membership
    membership.discovered([Endpoint(each.address) for each in settings.discovery.static or ()])
    async with asyncio.TaskGroup() as tasks:
        works = (
            store.run(),
            listen(settings.redis.url, store.keys.wake(job.replica), admission.failover.on_event),
        )
        # Failover must run: its timer ends requests whose wait for Redis's reply exceeds their TTL (G5).
        running = [tasks.create_task(work) for work in (*works, membership.run(), admission.failover.run())]
        async with asyncio.timeout(_JOINS_S):
            await membership.known()
        yield admission
        for task in running:
            task.cancel()


async def work(job: Job, orders: Orders) -> None:
    async with joined(job) as gate, asyncio.TaskGroup() as tasks:
        print("ready", flush=True)
        if await orders.next() != "go":
            return
        asking = [
            tasks.create_task(
                Clients(gate, source, job.replica, service_ms=job.service_ms, seed=job.seed).run()
            )
            for source in job.sources
        ]
        await orders.next()
        for task in asking:
            task.cancel()


async def main() -> None:
    orders = await Orders.of_stdin()
    fault = ""
    while not fault and (line := await orders.next()):
        try:
            await work(Job.read(line), orders)
        except* (PickerError, OSError) as faults:
            fault = repr(faults.exceptions[0])
        print(f"fault: {fault}" if fault else "done", flush=True)


if __name__ == "__main__":
    uvloop.run(main())
