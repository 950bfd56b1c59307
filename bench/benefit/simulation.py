"""Simulates one policy in front of four model servers, and computes the run's figures."""

import functools
import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.benefit.engine import Engine, Job
from bench.benefit.policies import RELEASE_S, Direct, Policy, Pool, Queued
from picker_tools.audit.measures import jain

SERVERS = 4
DEADLINE_S = 60.0  # a client leaves if its answer is not complete after this time
_QUEUE_TTL_S = 30.0  # seconds: the default of fair_request_queue.queue_ttl
_WARM_S, _END_S = 60.0, 300.0
CHAT_LOAD = 0.3  # load of tenant `chat` as a share of the capacity; tenant `bulk` sends the rest
_URGENT = 0.1  # share of the requests of `bulk` that are urgent
# Mean lengths of ShareGPT's prompts and answers in the paper's figure 11; the log-normal shape is assumed.
_PROMPT, _ANSWER, _SIGMA, _LONGEST = 161, 338, 1.0, 1000
KINDS = ("chat", "urgent", "nightly")

POLICIES: dict[str, Callable[[Pool, float], Policy]] = {
    "no queue (least request)": lambda pool, bound: Direct(pool, scored=False),
    "pick only": lambda pool, bound: Direct(pool, scored=True),
    "fcfs": lambda pool, bound: Queued(pool, bound, fairness="none"),
    "weighted-fair": Queued,
    "workload-aware": lambda pool, bound: Queued(pool, bound, ordering="workload-aware"),
    "one queue a replica": lambda pool, bound: Queued(pool, bound, queues=4),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a run after the warm-up. `recomputed`, `too_late`: shares of all computed tokens."""

    jobs: Sequence[Job]
    per_s: float
    tokens_per_s: float
    recomputed: float
    too_late: float

    def of(self, kind: str) -> list[Job]:
        return [job for job in self.jobs if job.kind == kind]

    def in_time(self, kind: str) -> float:
        """The share of the requests of `kind` that were answered before the client's deadline."""
        found = self.of(kind)
        return sum(job.ended_s > 0 for job in found) / len(found)

    def waits_s(self, kind: str) -> list[float]:
        """Sorted times to first token of the answered requests of `kind`."""
        return sorted(job.first_s - job.arrived_s for job in self.of(kind) if job.ended_s)

    def durations_s(self, kind: str) -> list[float]:
        return sorted(job.ended_s - job.arrived_s for job in self.of(kind) if job.ended_s)

    def shares(self) -> tuple[float, float]:
        """Tokens served to chat and to bulk, each divided by the tenant's max-min fair share of the total."""
        asked, served = (
            [
                sum(job.answer for job in self.jobs if job.tenant == tenant and (job.ended_s or everything))
                for tenant in ("chat", "bulk")
            ]
            for everything in (True, False)
        )
        half = sum(served) / 2
        chat = min(asked[0], max(half, sum(served) - asked[1]))
        return served[0] / chat, served[1] / (sum(served) - chat)

    @property
    def jain(self) -> float:
        return jain(self.shares())


def lengths(draw: random.Random) -> tuple[int, int]:
    """Random lengths of a request's prompt and answer, in tokens."""

    def one(mean: float) -> int:
        return min(max(round(draw.lognormvariate(math.log(mean) - _SIGMA**2 / 2, _SIGMA)), 1), _LONGEST)

    return one(_PROMPT), one(_ANSWER)


class _Events:
    """The simulation's event queue: runs the servers' steps and other actions in order of time."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.now_s = 0.0
        self._engines = engines
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.ended: Callable[[Job], None] = lambda job: None

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time_s, next(self._numbers), action))

    def start(self, server: int) -> None:
        """Let an idle server begin a step."""
        if not self._engines[server].busy:
            self._engines[server].busy = True
            self.at(self.now_s, lambda: self._begin(server))

    def _begin(self, server: int) -> None:
        engine = self._engines[server]
        took_s = engine.begin_step()
        engine.busy = took_s > 0
        if engine.busy:
            self.at(self.now_s + took_s, lambda: self._end(server))

    def _end(self, server: int) -> None:
        for job in self._engines[server].end_step(self.now_s):
            self.ended(job)
        self._begin(server)

    def run(self, until_s: float) -> None:
        while self._due and self._due[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._due)
            action()


def saturated(in_flight: int, seed: int) -> tuple[float, float, float]:
    """Simulate servers that each always have `in_flight` requests. Returns answers/s of all servers, the
    share of tokens that were recomputed, and the mean time from placement to the first token."""
    engines = [Engine() for _ in range(SERVERS)]
    events, draw = _Events(engines), random.Random(seed)
    ended: list[Job] = []
    numbers = itertools.count()
    jobs: list[Job] = []

    def put(server: int) -> None:
        jobs.append(Job(next(numbers), "", "", *lengths(draw), events.now_s, server=server))
        engines[server].waiting.append(jobs[-1])
        events.start(server)

    def again(job: Job) -> None:
        ended.append(job)
        put(job.server)

    events.ended = again
    for server in range(SERVERS):
        for _ in range(in_flight):
            put(server)
    events.run(_END_S)
    late = [job for job in ended if job.ended_s > _WARM_S]
    firsts = [job.first_s - job.arrived_s for job in late]
    spent = sum(job.spent for job in jobs)
    return (
        len(late) / (_END_S - _WARM_S),
        sum(engine.recomputed for engine in engines) / spent,
        sum(firsts) / len(firsts),
    )


def run(policy: str, load: float, capacity: float, bound: float, seed: int) -> Figures:
    """Simulate `policy` at a load of `load` × `capacity` requests/s, with at most `bound` requests at each
    server. With the same seed and load, all policies get the same requests."""
    engines = [Engine() for _ in range(SERVERS)]
    events, draw = _Events(engines), random.Random(f"{seed}/{load}")
    gate = POLICIES[policy](Pool(engines, random.Random(seed).random, events.start), bound)

    def release(job: Job) -> None:
        events.at(events.now_s + RELEASE_S, lambda: gate.release(job, events.now_s))

    def leave(job: Job) -> None:
        if not (job.ended_s or job.refused):
            engines[job.server].abandon(job)
            release(job)

    def arrive(job: Job) -> None:
        gate.arrive(job, events.now_s)
        # Expiry has no effect unless the request still waits in the queue.
        events.at(job.arrived_s + _QUEUE_TTL_S, lambda: gate.leave(job))
        events.at(job.arrived_s + DEADLINE_S, lambda: leave(job))

    events.ended = release
    jobs: list[Job] = []
    time_s = 0.0
    while (time_s := time_s + draw.expovariate(load * capacity)) < _END_S:
        tenant = kind = "chat"
        if draw.random() >= CHAT_LOAD / load:
            tenant, kind = "bulk", "urgent" if draw.random() < _URGENT else "nightly"
        job = Job(len(jobs), tenant, kind, *lengths(draw), time_s)
        jobs.append(job)
        events.at(time_s, functools.partial(arrive, job))
    events.run(_END_S + DEADLINE_S)
    spent = sum(job.spent for job in jobs)
    answered = [job for job in jobs if _WARM_S < job.ended_s <= _END_S]
    return Figures(
        [job for job in jobs if job.arrived_s > _WARM_S],
        len(answered) / (_END_S - _WARM_S),
        sum(job.answer for job in answered) / (_END_S - _WARM_S),
        sum(engine.recomputed for engine in engines) / spent,
        sum(job.spent for job in jobs if job.left) / spent,
    )
