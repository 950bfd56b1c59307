"""Simulates one policy in front of four model servers, and computes the run's figures."""

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.benefit.policies import RELEASE_S, Direct, Job, Policy, Pool, Queued
from bench.fairness.measures import jain
from bench.rig.simulated import Server, Timeline
from picker_tools.simulator.engine import Limits
from picker_tools.simulator.engine import Sequence as Generation

SERVERS = 4
# Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023,
# table 1: an A100-40GB has 15 700 KV slots beside OPT-13B's weights.
KV_SLOTS = 15_700
_LIMITS = Limits(max_num_seqs=256, kv_blocks=KV_SLOTS // 16)
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
    """Figures of a simulated run after warm-up. `recomputed`, `too_late`: shares of all computed tokens."""

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
                sum(
                    job.tokens.max_tokens
                    for job in self.jobs
                    if job.tenant == tenant and (job.ended_s or everything)
                )
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


def _generation(draw: random.Random) -> Generation:
    """A request with random lengths of prompt and answer."""

    def one(mean: float) -> int:
        return min(max(round(draw.lognormvariate(math.log(mean) - _SIGMA**2 / 2, _SIGMA)), 1), _LONGEST)

    return Generation(one(_PROMPT), one(_ANSWER))


def _recomputed(servers: Sequence[Server]) -> float:
    """The share of all computed tokens that were computed again after a preemption."""
    spent = sum(server.computed.total() for server in servers)
    kept = sum(each.computed_tokens for server in servers for each in server.computed)
    return 1 - kept / spent


def saturated(in_flight: int, seed: int) -> tuple[float, float, float]:
    """Simulate servers that always have `in_flight` requests each. Returns answers/s of all servers, the
    share of tokens that were recomputed, and the mean time from placement to the first token."""
    time, draw = Timeline(), random.Random(seed)
    servers = [Server(time, _LIMITS) for _ in range(SERVERS)]
    firsts: list[float] = []  # times to first token of answers after the warm-up

    def put(server: Server) -> None:
        placed_s, first_s = time.now_s, 0.0

        def grown(each: Generation) -> None:
            nonlocal first_s
            first_s = first_s or time.now_s
            if not each.remaining_tokens:
                if time.now_s > _WARM_S:
                    firsts.append(first_s - placed_s)
                put(server)

        server.submit(_generation(draw), grown)

    for server in servers:
        for _ in range(in_flight):
            put(server)
    time.run(_END_S)
    return len(firsts) / (_END_S - _WARM_S), _recomputed(servers), sum(firsts) / len(firsts)


def run(policy: str, load: float, capacity: float, bound: float, seed: int) -> Figures:
    """Simulate `policy` at a load of `load` × `capacity` requests/s, with at most `bound` requests at each
    server. With the same seed and load, all policies get the same requests."""
    time, draw = Timeline(), random.Random(f"{seed}/{load}")
    servers = [Server(time, _LIMITS) for _ in range(SERVERS)]

    def grown(job: Job) -> None:
        job.first_s = job.first_s or time.now_s
        if not job.tokens.remaining_tokens:
            job.ended_s = time.now_s
            release(job)

    gate = POLICIES[policy](Pool(servers, random.Random(seed).random, grown), bound)

    def release(job: Job) -> None:
        time.at(time.now_s + RELEASE_S, lambda: gate.release(job, time.now_s))

    def leave(job: Job) -> None:
        if not (job.ended_s or job.refused):
            job.left = True
            servers[job.server].abandon(job.tokens)
            release(job)

    def arrive(job: Job) -> None:
        gate.arrive(job, time.now_s)
        # The event of expiry has no effect unless the request still waits in the queue.
        time.at(job.arrived_s + _QUEUE_TTL_S, lambda: gate.leave(job))
        time.at(job.arrived_s + DEADLINE_S, lambda: leave(job))

    jobs: list[Job] = []
    at_s = 0.0
    while (at_s := at_s + draw.expovariate(load * capacity)) < _END_S:
        tenant = kind = "chat"
        if draw.random() >= CHAT_LOAD / load:
            tenant, kind = "bulk", "urgent" if draw.random() < _URGENT else "nightly"
        job = Job(len(jobs), tenant, kind, _generation(draw), at_s)
        jobs.append(job)
        time.at(at_s, functools.partial(arrive, job))
    time.run(_END_S + DEADLINE_S)
    spent = sum(server.computed.total() for server in servers)
    too_late = sum(servers[job.server].computed[job.tokens] for job in jobs if job.left)
    answered = [job for job in jobs if _WARM_S < job.ended_s <= _END_S]
    return Figures(
        [job for job in jobs if job.arrived_s > _WARM_S],
        len(answered) / (_END_S - _WARM_S),
        sum(job.tokens.max_tokens for job in answered) / (_END_S - _WARM_S),
        _recomputed(servers),
        too_late / spent,
    )
