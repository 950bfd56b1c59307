"""Runs the simulated engine in real time: requests wait for admission, and tokens arrive at a GPU's pace.

A request's first token comes `ttft_s` seconds after its admission, or sooner if a part of its prompt is
cached; each further token comes `itl_s` seconds later. If both times are 0, no timer is used. Tokens delayed
by a stall of the event loop or by a slow client arrive together afterwards, so that the average pace holds.
"""

import asyncio
from typing import Self

from picker_tools.simulator.engine import Engine, Limits, Phase, Sequence
from picker_tools.simulator.transfer import Pull


class Simulator:
    """Runs one model server's engine in real time, on one event loop."""

    def __init__(self, limits: Limits, *, ttft_s: float, itl_s: float) -> None:
        self.ttft_s = ttft_s
        self.itl_s = itl_s
        self.engine = Engine(limits)
        self._admissions: dict[Sequence, asyncio.Future[None]] = {}

    def begin(self, sequence: Sequence, pull: Pull | None = None) -> "Generation":
        """Queue `sequence`. Leaving the returned context manager ends the request in any state.

        `pull` transfers the prompt's KV cache if `sequence.pulls`.

        Raises:
            ContextTooLong: the request would not fit even if it ran alone.
        """
        self.engine.submit(sequence)
        self.admit()
        return Generation(self, sequence, pull)

    def admit(self) -> None:
        """Admit the requests that fit now, and wake the tasks that wait for these admissions."""
        for sequence in self.engine.schedule():
            admission = self._admissions.get(sequence)
            if admission is not None and not admission.done():
                admission.set_result(None)

    def free(self, sequence: Sequence) -> None:
        """Free the KV blocks that the complete `sequence` keeps."""
        self.engine.free(sequence)
        self.admit()

    async def wait_admitted(self, sequence: Sequence) -> None:
        """Wait until `sequence` runs."""
        while sequence.phase is Phase.WAITING:
            self._admissions[sequence] = asyncio.get_running_loop().create_future()
            try:
                await self._admissions[sequence]
            finally:
                del self._admissions[sequence]


class Generation:
    """The tokens of one request, at a GPU's pace. Leaving the `with` block frees the request's KV blocks."""

    def __init__(self, simulator: Simulator, sequence: Sequence, pull: Pull | None) -> None:
        self._simulator = simulator
        self.sequence = sequence
        self._pull = pull
        self._loop = asyncio.get_running_loop()
        self._due_at_s = self._loop.time() + self._prefill_s  # when the next token is due (loop's clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, fault: object, *_: object) -> None:
        self._release()
        if fault is not None:
            self._simulator.free(self.sequence)  # no answer will name the kept blocks to a decode server

    @property
    def is_over(self) -> bool:
        return not self.sequence.remaining_tokens

    async def next_tokens(self, stride: int) -> int:
        """Wait for the next `stride` tokens, or for fewer tokens if fewer remain or fit into memory.

        Returns the number of tokens: more than `stride` if tokens are overdue, 0 if none remain. The request
        is released before its last tokens are returned, so that the load never counts a request whose client
        has the whole answer.
        """
        itl_s = self._simulator.itl_s
        sequence = self.sequence
        while sequence.remaining_tokens:
            if sequence.phase is Phase.WAITING:
                await self._simulator.wait_admitted(sequence)
                self._due_at_s = self._loop.time() + self._prefill_s
            if sequence.pulls:
                assert self._pull is not None
                arrived = await self._pull.run(sequence.prompt_tokens - sequence.cached_tokens, slowdown=1)
                self._simulator.engine.pulled(sequence, arrived=arrived)
                self._due_at_s = self._loop.time() + self._prefill_s
            tokens = min(stride, sequence.remaining_tokens)
            late_s = await self._until(self._due_at_s + (tokens - 1) * itl_s)
            if sequence.phase is Phase.WAITING:  # the sequence was preempted after its last token
                continue
            if itl_s:
                tokens = min(tokens + int(late_s / itl_s), sequence.remaining_tokens)
            grown = self._simulator.engine.grow(sequence, tokens)
            if grown:
                self._due_at_s += grown * itl_s
                if not sequence.remaining_tokens:
                    self._release()
                return grown
        return 0

    @property
    def _prefill_s(self) -> float:
        sequence = self.sequence
        known_tokens = max(sequence.cached_tokens, sequence.computed_tokens)
        return self._simulator.ttft_s * (1 - known_tokens / max(1, sequence.prompt_tokens))

    async def _until(self, at_s: float) -> float:
        """Sleep until `at_s` by the loop's clock. Returns how many seconds late the sleep ended."""
        wait_s = at_s - self._loop.time()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        return max(0.0, self._loop.time() - at_s)

    def _release(self) -> None:
        if self.sequence.phase is not Phase.ENDED:
            self._simulator.engine.release(self.sequence)
            self._simulator.admit()
