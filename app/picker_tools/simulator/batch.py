"""Runs the simulated engine step by step in real time: a step takes longer the more it computes.

As in vLLM V1, a step of continuous batching computes one token for each running sequence, and chunks of
prompts within a budget of tokens. One timer ends each step; an idle server has no timer. If a stall of the
event loop delays a step, the next steps end earlier, so that the average pace holds.
"""

import asyncio
from typing import Self

from picker_tools.simulator.engine import Engine, Limits, Sequence, Step
from picker_tools.simulator.transfer import Pull

# A step's time in seconds: vLLM with OPT-13B on one A100-80GB, as fitted by Zhong et al., "DistServe:
# Disaggregating Prefill and Decoding for Goodput-optimized Large Language Model Serving", OSDI 2024. Source:
# github.com/LLMServe/DistServe, simdistserve/estimators/profile_data/profiler-a100-80g.vllm.json, keys
# `decoding_smallbs` and `prefill`. This model omits the second base time of a step that also computes
# prompts, and the square of a prompt's length (6 % of a prompt of 1000 tokens).
BASE_S = 19.56e-3
SEQUENCE_S = 50.6e-6  # a step takes so much longer for each sequence that decodes
KV_TOKEN_S = 0.494e-6  # a step takes so much longer for each token in the contexts of decoding sequences
PREFILL_TOKEN_S = 150.5e-6
BUDGET_TOKENS = 2048  # vLLM's default of --max-num-batched-tokens for online serving


def step_s(step: Step) -> float:
    """How many seconds `step` takes."""
    decode_s = step.decoding * SEQUENCE_S + step.kv_tokens * KV_TOKEN_S
    return BASE_S + decode_s + step.prefill_tokens * PREFILL_TOKEN_S


class BatchSimulator:
    """Runs one model server's engine in steps, each `slowdown` times as long as `step_s`, on one event loop.

    A new value of `slowdown` applies from the next step on.
    """

    def __init__(self, limits: Limits, *, slowdown: float) -> None:
        self.slowdown = slowdown
        self.engine = Engine(limits)
        self._generations: dict[Sequence, BatchGeneration] = {}
        self._is_idle = True

    def begin(self, sequence: Sequence, pull: Pull | None = None) -> "BatchGeneration":
        """Queue `sequence`. Leaving the returned context manager ends the request in any state.

        `pull` transfers the prompt's KV cache if `sequence.pulls`.

        Raises:
            ContextTooLong: the request would not fit even if it ran alone.
        """
        self.engine.submit(sequence)
        self._generations[sequence] = generation = BatchGeneration(self, sequence, pull)
        self._begin_if_idle()
        return generation

    def end(self, sequence: Sequence) -> None:
        """Release `sequence`, which is finished or abandoned."""
        del self._generations[sequence]
        self.engine.release(sequence)

    def free(self, sequence: Sequence) -> None:
        """Free the KV blocks that the complete `sequence` keeps."""
        self.engine.free(sequence)
        self._begin_if_idle()

    async def pull(self, sequence: Sequence, pull: Pull) -> None:
        """Transfer the KV cache of the admitted `sequence`."""
        arrived = await pull.run(sequence.prompt_tokens - sequence.cached_tokens, self.slowdown)
        self.engine.pulled(sequence, arrived=arrived)
        self._begin_if_idle()

    def _begin_if_idle(self) -> None:
        if self._is_idle:
            self._begin_step(asyncio.get_running_loop().time())

    def _begin_step(self, at_s: float) -> None:
        step = self.engine.begin_step(BUDGET_TOKENS)
        for sequence in step.pulling:
            self._generations[sequence].start_pull()
        self._is_idle = not step.tokens
        if step.tokens:
            ends_s = at_s + step_s(step) * self.slowdown
            asyncio.get_running_loop().call_at(ends_s, self._end_step, step, ends_s)

    def _end_step(self, step: Step, at_s: float) -> None:
        for sequence in self.engine.end_step(step):
            self._generations[sequence].grown()
        self._begin_step(at_s)


class BatchGeneration:
    """The tokens of one request, step by step. Leaving the `with` block frees the request's KV blocks."""

    def __init__(self, simulator: BatchSimulator, sequence: Sequence, pull: Pull | None) -> None:
        self._simulator = simulator
        self.sequence = sequence
        self._pull = pull
        self._pulling: asyncio.Task[None] | None = None
        self._returned = 0  # number of tokens that `next_tokens` has returned
        self._wanted = 0
        self._wake = asyncio.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, fault: object, *_: object) -> None:
        if self._pulling is not None:
            self._pulling.cancel()
        self._simulator.end(self.sequence)
        if fault is not None:
            self._simulator.free(self.sequence)  # no answer will name the kept blocks to a decode server

    @property
    def is_over(self) -> bool:
        return self._returned == self.sequence.max_tokens

    def start_pull(self) -> None:
        """Begin to transfer the prompt's KV cache from another server, once the sequence is admitted."""
        assert self._pull is not None
        self._pulling = asyncio.create_task(self._simulator.pull(self.sequence, self._pull))

    def grown(self) -> None:
        """Note that a step has generated a token."""
        if self.sequence.generated_tokens >= self._wanted:
            self._wake.set()

    async def next_tokens(self, stride: int) -> int:
        """Wait for the next `stride` tokens, or for fewer tokens if fewer remain.

        Returns the number of tokens: more than `stride` if tokens are overdue, 0 if none remain.
        """
        self._wanted = min(self._returned + stride, self.sequence.max_tokens)
        while self.sequence.generated_tokens < self._wanted:
            self._wake.clear()
            await self._wake.wait()
        count = self.sequence.generated_tokens - self._returned
        self._returned += count
        return count
