"""Simulates a model server whose speed depends on its load. The caller passes the simulated time.

The server batches like vLLM V1: each step computes one token for every running request and, within the token
budget, the prompts of new requests. When the KV cache is full, the server preempts the newest request,
discards its KV cache and computes the request again later. A roofline model gives a step's time: reading the
weights and the KV cache, or computing the tokens, whichever takes longer.
"""

from collections import deque
from dataclasses import dataclass, field

# Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023,
# table 1 and section 3: OPT-13B on one A100-40GB has 26 GB of weights and 15 700 KV slots of 800 KB.
KV_SLOTS = 15_700
_WEIGHT_BYTES = 26e9
_KV_BYTES = 800e3
_FLOP_PER_TOKEN = 2 * 13e9
# NVIDIA A100 40GB data sheet: 1555 GB/s and 312 TFLOP/s (BF16). Assumed: `_REACHED` of these rates is
# attained.
_REACHED = 0.6
_BYTES_PER_S = 1555e9 * _REACHED
_FLOP_PER_S = 312e12 * _REACHED
# vLLM's defaults for online serving (`max_num_seqs`, `max_num_batched_tokens`).
MAX_RUNNING = 256
_TOKEN_BUDGET = 2048


@dataclass(slots=True, eq=False)
class Job:
    """One request. `computed`: tokens now in the KV cache. `spent`: all tokens computed for the request."""

    number: int
    tenant: str
    kind: str
    prompt: int
    answer: int
    arrived_s: float
    generated: int = 0
    computed: int = 0
    spent: int = 0
    server: int = -1
    first_s: float = 0.0
    ended_s: float = 0.0
    refused: bool = False
    left: bool = False  # the client has left


@dataclass(slots=True)
class Engine:
    """A model server. `running` and `waiting` are in order of arrival; preempted requests wait first."""

    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    used: int = 0
    recomputed: int = 0
    busy: bool = False
    _scheduled: list[tuple[Job, int]] = field(default_factory=list)
    _abandoned: bool = False

    def begin_step(self) -> float:
        """Schedule the server's next step. Returns the step's duration in seconds; 0 without a request."""
        if self._abandoned:
            self._drop_abandoned()
        scheduled: list[tuple[Job, int]] = []
        self._scheduled = scheduled
        budget, preempted = _TOKEN_BUDGET, False
        running = self.running
        at = 0
        while at < len(running) and budget > 0:
            job = running[at]
            tokens = min(job.prompt + job.generated - job.computed, budget)
            while self.used + tokens > KV_SLOTS and len(running) > at:
                self._preempt()
                preempted = True
            if len(running) <= at:
                break
            scheduled.append((job, tokens))
            self.used += tokens
            budget -= tokens
            at += 1
        while self.waiting and not preempted and len(running) < MAX_RUNNING and budget > 0:
            job = self.waiting[0]
            tokens = min(job.prompt + job.generated, budget)
            if self.used + tokens > KV_SLOTS:
                break
            running.append(self.waiting.popleft())
            scheduled.append((job, tokens))
            self.used += tokens
            budget -= tokens
        if not scheduled:
            return 0.0
        memory_s = (_WEIGHT_BYTES + self.used * _KV_BYTES) / _BYTES_PER_S
        return max(memory_s, (_TOKEN_BUDGET - budget) * _FLOP_PER_TOKEN / _FLOP_PER_S)

    def abandon(self, job: Job) -> None:
        """Mark the request of a client that left; like vLLM, the server drops it before the next step."""
        job.left = self._abandoned = True

    def end_step(self, now_s: float) -> list[Job]:
        """Count the tokens that the step has computed. Returns the requests that the step has ended."""
        ended = []
        for job, tokens in self._scheduled:
            job.computed += tokens
            job.spent += tokens
            if job.computed < job.prompt + job.generated:
                continue
            job.generated += 1
            job.first_s = job.first_s or now_s
            if job.generated == job.answer and not job.left:
                job.ended_s = now_s
                self.used -= job.computed
                ended.append(job)
        if ended:
            self.running = [job for job in self.running if not job.ended_s]
        return ended

    def _preempt(self) -> None:
        last = self.running.pop()
        self.used -= last.computed
        self.recomputed += last.computed
        last.computed = 0
        self.waiting.appendleft(last)

    def _drop_abandoned(self) -> None:
        self._abandoned = False
        self.used -= sum(job.computed for job in self.running if job.left)
        self.running = [job for job in self.running if not job.left]
        self.waiting = deque(job for job in self.waiting if not job.left)
