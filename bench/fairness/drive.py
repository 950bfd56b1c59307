"""The clients of one replica, and the model servers behind it: a request that is placed is held for a
while, then settled."""

import asyncio
import random
from collections.abc import Sequence

from bench.fairness.job import Source
from picker_fleet.admission.shared_gate import SharedGate
from picker_fleet.errors import RequestError, StateUnavailable
from picker_fleet.request import Band, Completion, InferenceRequest, Outcome, Workload

_AGAIN_S = 0.02  # a caller that was refused pauses, as a client would
_MODEL = "llama"
_PROMPT_TOKENS = 1  # the rest of a request's tokens is its answer


class Clients:
    """All clients of `source` at this replica. The same seed gives the same requests in the same order."""

    def __init__(
        self, gate: SharedGate, source: Source, replica: str, *, service_ms: Sequence[float], seed: str
    ) -> None:
        self._gate = gate
        self._source = source
        self._replica = replica
        self._service_ms = service_ms
        self._random = random.Random(f"{seed}/{source.name}/{replica}")
        self._made = 0

    async def run(self) -> None:
        """Ask until cancelled. Raises StateUnavailable if the shared state does not answer."""
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
        """Whether the request was served."""
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
        workload = Workload(shared or f"auto-{request_id}", source.criticality, registered=bool(shared))
        cost = 1.0
        if source.tokens:
            cost = round(source.tokens * source.guess_factor ** self._random.uniform(-1, 1))
        return InferenceRequest(
            request_id, _MODEL, _MODEL, False, source.flow(number), Band(source.band), source.weight,
            workload, cost, source.ttl_s, None,
        )  # fmt: skip
