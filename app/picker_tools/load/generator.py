"""The open-loop load generator: each source's rate, its Poisson arrivals, its requests, and their sending.

Arrivals depend on the seed alone, never on the fleet's answers: a slow fleet does not reduce the load.
A `Session` runs one `LoadGenerator`.
"""

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice
from random import Random
from typing import Any

import orjson

from picker_tools.load.client import Answer, Client, HttpRequest, Kind, answer_of
from picker_tools.load.scenarios import Conversation, Plan, Scenario, Source, Wave

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_WORDS = ("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliett")


def completion_request(source: Source, model: str, number: int, seed: int) -> HttpRequest:
    """Request `number` of `source`. Each prompt is unique."""
    chance = Random(f"{seed}/{source.name}/{number}")
    streamed = chance.random() < source.streamed
    prompt = f"{source.name} {number} {_text(source, chance)}"
    return _request(COMPLETIONS, source, model, streamed, prompt=prompt)


def conversation_turn(
    source: Source, model: str, history: Sequence[str], chance: Random
) -> tuple[HttpRequest, str]:
    """The next request of a conversation after the messages of `history`, and the user's new message."""
    streamed = chance.random() < source.streamed
    message = _text(source, chance)
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate((*history, message))]
    return _request(CHAT, source, model, streamed, messages=messages), message


def _request(path: str, source: Source, model: str, streamed: bool, **prompt: Any) -> HttpRequest:
    tree = {"model": model, **prompt, "max_tokens": source.answer_tokens, "stream": streamed}
    return HttpRequest(path, request_headers(source), orjson.dumps(tree), streamed, source.answer_tokens)


def request_headers(source: Source) -> tuple[tuple[str, str], ...]:
    """The headers of docs/protocol.md for `source`."""
    sent = [
        ("x-gateway-inference-fairness-id", source.flow),
        ("x-llm-d-inference-ttl", f"{source.ttl_s:g}s"),
    ]
    if source.objective:
        sent.append(("x-gateway-inference-objective", source.objective))
    if source.workload:
        context = {"workload_id": source.workload, "criticality": source.criticality}
        sent.append(("x-workload-context", orjson.dumps(context).decode()))
    return tuple(sent)


def _text(source: Source, chance: Random) -> str:
    low, high = source.prompt_bytes
    size = round(math.exp(chance.uniform(math.log(low), math.log(high))))
    # A short random text, repeated: all random would cost more CPU than sending.
    run = " ".join(chance.choices(_WORDS, k=64))
    return (f"{run} " * (size // len(run) + 1))[:size]


@dataclass(frozen=True, slots=True)
class LoadRates:
    """`rates_per_s`: each source's arrivals outside its wave. `capacity_per_s`: the rate of load 1."""

    rates_per_s: tuple[float, ...]
    capacity_per_s: float


def rates_by_capacity(scenario: Scenario, lower: float, answers_s: Sequence[float]) -> LoadRates:
    """For a fleet that dispatches while its stock is below `lower`, where an answer takes each source
    `answers_s` seconds. Dispatch stops with the request that reaches the bound.
    """
    return _load_rates(scenario, _alone_per_s(scenario, lower, answers_s))


def rates_by_total(scenario: Scenario, rate_per_s: float, answers_s: Sequence[float]) -> LoadRates:
    """`rate_per_s` requests in all, mixed by the sources' loads."""
    each = _alone_per_s(scenario, 1e6, answers_s)
    total = sum(source.load * rate for source, rate in zip(scenario.sources, each, strict=True))
    return _load_rates(scenario, [rate * rate_per_s / total for rate in each])


def _load_rates(scenario: Scenario, alone_per_s: Sequence[float]) -> LoadRates:
    rates = [source.load * rate for source, rate in zip(scenario.sources, alone_per_s, strict=True)]
    capacity = sum(rates) / sum(source.load for source in scenario.sources)
    arrivals = [
        rate / (source.conversation.turns if source.conversation else 1)
        for source, rate in zip(scenario.sources, rates, strict=True)
    ]
    return LoadRates(tuple(arrivals), capacity)


def _alone_per_s(scenario: Scenario, lower: float, answers_s: Sequence[float]) -> list[float]:
    """The rate of each source if it were alone."""
    return [
        (lower / source.cost_tokens if scenario.in_tokens else math.ceil(lower)) / answer_s
        for source, answer_s in zip(scenario.sources, answers_s, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Arrival:
    """Request (or conversation) `number` of the source with index `source`; `at_s` since the load began."""

    at_s: float
    source: int
    number: int


def arrivals(
    sources: Sequence[Source],
    rates_per_s: Sequence[float],
    *,
    duration_s: float,
    max_requests: int,
    seed: int,
) -> list[Arrival]:
    """All arrivals before `duration_s` in order, at most `max_requests`. `rates_per_s` are those
    outside a wave."""
    each = [
        _arrivals_of(place, source, rate, duration_s, Random(f"{seed}/{source.name}"))
        for place, (source, rate) in enumerate(zip(sources, rates_per_s, strict=True))
    ]
    return list(islice(merge(*each, key=lambda arrival: arrival.at_s), max_requests))


def _arrivals_of(
    place: int, source: Source, rate_per_s: float, duration_s: float, chance: Random
) -> Iterator[Arrival]:
    at_s, number = 0.0, 0
    while rate_per_s > 0:
        at_s = _next(at_s, rate_per_s, source.wave, chance.expovariate(1.0))
        if at_s >= duration_s:
            return
        yield Arrival(at_s, place, number)
        number += 1


def _next(at_s: float, rate_per_s: float, wave: Wave | None, need: float) -> float:
    """The moment by which `need` more arrivals are expected after `at_s`.

    With `need` exponential of mean 1 these moments are a Poisson process, whatever the rate does between.
    """
    if wave is None:
        return at_s + need / rate_per_s
    # Counted in half periods, so that a moment rounded to before an edge is not in the earlier half.
    period, into_s = divmod(at_s, wave.period_s)
    high = into_s < wave.high_s
    while True:
        rate = rate_per_s * (wave.factor if high else 1.0)
        edge_s = period * wave.period_s + (wave.high_s if high else wave.period_s)
        room = rate * (edge_s - at_s)
        if need <= room:
            return at_s + need / rate
        need -= room
        at_s = edge_s
        period, high = (period, False) if high else (period + 1, True)


_SERVICE_S = 60.0  # the client gives up after its TTL and this


@dataclass(slots=True)
class Counts:
    """The state of the load, shown while it runs."""

    sent: int = 0
    open: int = 0
    ended: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    answers: list[Answer] = field(default_factory=list)


class LoadGenerator:
    """One load. Its times count from `began`, by `perf_counter`."""

    def __init__(self, client: Client, plan: Plan, model: str) -> None:
        self._client, self._plan, self._model = client, plan, model
        self._stopping = asyncio.Event()
        self.began = time.perf_counter()
        self.counts = Counts()

    @property
    def now_s(self) -> float:
        """Seconds since the load began."""
        return time.perf_counter() - self.began

    async def sleep_until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self.now_s))

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
                source = self._plan.scenario.sources[arrival.source]
                if source.conversation is None:
                    ask = completion_request(source, self._model, arrival.number, self._plan.seed)
                    tasks.create_task(self._request(source, ask, arrival.number, 0, arrival.at_s))
                else:
                    tasks.create_task(self._converse(source, source.conversation, arrival))
            await self._stopped_within(self._plan.duration_s - self.now_s)

    async def _request(
        self, source: Source, ask: HttpRequest, number: int, turn: int, due_s: float
    ) -> Answer:
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

    async def _converse(self, source: Source, conversation: Conversation, arrival: Arrival) -> None:
        """Send each turn after the answer to the last and a pause, until the load ends."""
        chance = Random(f"{self._plan.seed}/{source.name}/talk/{arrival.number}")
        history: list[str] = []
        due_s = arrival.at_s
        for number in range(conversation.turns):
            if due_s >= self._plan.duration_s or self.counts.sent >= self._plan.max_requests:
                return
            if await self._stopped_within(due_s - self.now_s):
                return
            ask, message = conversation_turn(source, self._model, history, chance)
            answer = await self._request(source, ask, arrival.number, number, due_s)
            if answer.kind is not Kind.SERVED:
                return
            history += [message, f"answer {number} of {answer.tokens} tokens"]
            due_s = self.now_s + chance.expovariate(1 / conversation.think_s)

    async def _stopped_within(self, seconds: float) -> bool:
        """Wait `seconds`, or until `stop`; whether it was called."""
        if seconds > 0 and not self.is_stopped:
            try:
                async with asyncio.timeout(seconds):
                    await self._stopping.wait()
            except TimeoutError:
                pass
        return self.is_stopped
