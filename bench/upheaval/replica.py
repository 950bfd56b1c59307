"""One replica with its clients: `python -m bench.upheaval.replica`, led over stdin.

The first line is a `bench.fairness.job.Job`; after it `adopt ID ID…` brings requests of a replica that has
died, `end` lets what is under way finish and makes no more. Prints `ready`, and `done` when all have ended.
"""

import asyncio
import itertools
import sys

import uvloop

from bench.fairness.job import Job
from bench.fairness.replica import Led, joined
from bench.upheaval.asking import ask_of
from picker_fleet.admission.shared_gate import SharedGate
from picker_fleet.errors import RequestError
from picker_fleet.request import Completion, Outcome

_CALLERS = 60
_AGAIN_S = 0.1  # a caller that was refused pauses, as a client would
_PROMPT_TOKENS = 1


class Clients:
    """What asks through one replica, until `end`."""

    def __init__(self, gate: SharedGate, name: str, tasks: asyncio.TaskGroup) -> None:
        self._gate = gate
        self._ids = (f"{name}.{number}" for number in itertools.count())
        self._tasks = tasks
        self._ending = False

    def start(self) -> None:
        for _ in range(_CALLERS):
            self._tasks.create_task(self._call())

    def adopt(self, request_id: str) -> None:
        self._tasks.create_task(self._one(request_id))

    def end(self) -> None:
        self._ending = True

    async def _call(self) -> None:
        while not self._ending:
            if not await self._one(next(self._ids)):
                await asyncio.sleep(_AGAIN_S)

    async def _one(self, request_id: str) -> bool:
        """Whether it was served."""
        ask = ask_of(request_id)
        try:
            async with asyncio.timeout(ask.leaves_s):
                await self._gate.admit(ask.request, stream_owned=ask.held)
        except (RequestError, TimeoutError):
            return False
        await asyncio.sleep(ask.service_s)
        spent = (_PROMPT_TOKENS, ask.tokens - _PROMPT_TOKENS)
        seconds = (ask.service_s, ask.service_s)
        self._gate.settle(Completion(request_id, Outcome.COMPLETED, 200, None, *spent, *seconds))
        return True


async def work(job: Job, led: Led) -> None:
    async with joined(job) as gate:
        led.say("ready")
        async with asyncio.TaskGroup() as tasks:
            clients = Clients(gate, job.replica, tasks)
            clients.start()
            while (order := await led.hear()) and order != "end":
                for request_id in order.split()[1:]:
                    clients.adopt(request_id)
            clients.end()
        led.say("done")
        await led.hear()  # its heartbeats go on until everybody has ended


async def main() -> None:
    orders = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    led = Led(orders)
    await work(Job.read(await led.hear()), led)


if __name__ == "__main__":
    uvloop.run(main())
