"""Sends a scenario's load: each request when it is due, whatever became of those before it."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from picker_tools.load import payload
from picker_tools.load.answer import Answer, Kind
from picker_tools.load.arrivals import Arrival
from picker_tools.load.client import Client, answer_of
from picker_tools.load.payload import Ask
from picker_tools.load.scenario import Source, Talk

_SERVICE_S = 60.0  # an answer that takes longer than its TTL and this is given up


@dataclass(slots=True)
class Counts:
    """How the load stands, to be shown while it runs."""

    sent: int = 0
    open: int = 0
    ended: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    answers: list[Answer] = field(default_factory=list)


class Drive:
    """One load. `began` is the moment, of `perf_counter`, from which its times count."""

    def __init__(
        self,
        client: Client,
        sources: Sequence[Source],
        *,
        model: str,
        seed: int,
        duration_s: float,
        most: int,
    ) -> None:
        self._client = client
        self._sources = sources
        self._model = model
        self._seed = seed
        self._duration_s = duration_s
        self._most = most
        self._stopping = asyncio.Event()
        self.began = time.perf_counter()
        self.counts = Counts()

    @property
    def now_s(self) -> float:
        """Seconds since the load began."""
        return time.perf_counter() - self.began

    @property
    def is_stopped(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """Send nothing more and hang up on what is open; `run` returns soon after."""
        self._stopping.set()
        self._client.hang_up()

    async def run(self, arrivals: Sequence[Arrival]) -> None:
        """Send each of `arrivals` when it is due; returns when the last answer is in."""
        self.began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for arrival in arrivals:
                if await self._stopped_within(arrival.at_s - self.now_s):
                    return
                source = self._sources[arrival.source]
                if source.talk is None:
                    ask = payload.ask(source, self._model, arrival.number, self._seed)
                    tasks.create_task(self._request(source, ask, arrival.number, 0, arrival.at_s))
                else:
                    tasks.create_task(self._talk(source, source.talk, arrival))
            await self._stopped_within(self._duration_s - self.now_s)

    async def _request(self, source: Source, ask: Ask, number: int, turn: int, due_s: float) -> Answer:
        counts = self.counts
        counts.sent += 1
        counts.open += 1
        exchange = await self._client.send(ask, within_s=source.ttl_s + _SERVICE_S)
        answer = answer_of(
            exchange, ask, source=source.name, number=number, turn=turn, due_s=due_s, began=self.began
        )
        counts.open -= 1
        counts.ended[answer.kind] += 1
        counts.answers.append(answer)
        return answer

    async def _talk(self, source: Source, talk: Talk, arrival: Arrival) -> None:
        """A conversation: each turn after the answer to the last and a pause. It ends with the load."""
        chance = Random(f"{self._seed}/{source.name}/talk/{arrival.number}")
        said: list[str] = []
        due_s = arrival.at_s
        for number in range(talk.turns):
            if due_s >= self._duration_s or self.counts.sent >= self._most:
                return
            if await self._stopped_within(due_s - self.now_s):
                return
            ask, words = payload.turn(source, self._model, said, chance)
            answer = await self._request(source, ask, arrival.number, number, due_s)
            if answer.kind is not Kind.SERVED:
                return
            said += [words, f"answer {number} of {answer.tokens} tokens"]
            due_s = self.now_s + chance.expovariate(1 / talk.think_s)

    async def _stopped_within(self, seconds: float) -> bool:
        """Wait `seconds`, or until `stop`; whether it came."""
        if seconds > 0 and not self.is_stopped:
            try:
                async with asyncio.timeout(seconds):
                    await self._stopping.wait()
            except TimeoutError:
                pass
        return self.is_stopped
