"""The engine in real time: turns are waited for, and tokens come when a GPU would have made them.

A request's first token comes `ttft_s` after it was admitted, sooner by the part of its prompt that the prefix
cache has; each further one `itl_s` later. Both may be
0: then no timer is used at all. What a stall of the event loop or a slow client delayed comes at once
when it is over, so that the pace is kept on average.
"""

import asyncio
from types import TracebackType
from typing import Self

from picker_tools.simulator.engine import Engine, Limits, Load, Phase, Sequence


class Simulator:
    """One model server's GPU. One event loop."""

    def __init__(self, limits: Limits, *, ttft_s: float, itl_s: float) -> None:
        self.ttft_s = ttft_s
        self.itl_s = itl_s
        self.engine = Engine(limits)
        self._turns: dict[Sequence, asyncio.Future[None]] = {}

    @property
    def load(self) -> Load:
        return self.engine.load()

    def begin(
        self,
        *,
        prompt_tokens: int,
        max_tokens: int,
        adapter: str | None,
        prompt_blocks: tuple[bytes, ...] = (),
    ) -> "Generation":
        """Queue a request; leaving the returned context removes it, whatever its state.

        Raises:
            NeverFits: it could not run even alone.
        """
        sequence = Sequence(prompt_tokens, max_tokens, adapter, prompt_blocks)
        self.engine.submit(sequence)
        self.wake_admitted()
        return Generation(self, sequence)

    def wake_admitted(self) -> None:
        """Give their turn to the requests that fit now."""
        for sequence in self.engine.schedule():
            turn = self._turns.get(sequence)
            if turn is not None and not turn.done():
                turn.set_result(None)

    async def turn(self, sequence: Sequence) -> None:
        """Wait until `sequence` runs."""
        while sequence.phase is Phase.WAITING:
            self._turns[sequence] = asyncio.get_running_loop().create_future()
            try:
                await self._turns[sequence]
            finally:
                del self._turns[sequence]


class Generation:
    """The tokens of one request, as they come. Use it as a context, which frees what it holds."""

    def __init__(self, simulator: Simulator, sequence: Sequence) -> None:
        self._simulator = simulator
        self._sequence = sequence
        self._loop = asyncio.get_running_loop()
        self._due_at_s = self._loop.time() + self._prefill_s  # the next token, on the loop's clock

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    @property
    def is_over(self) -> bool:
        return not self._sequence.left_tokens

    async def next_tokens(self, stride_tokens: int) -> int:
        """Wait for the next `stride_tokens` tokens, or as many as are left or fit in memory.

        Returns how many came, more if they are overdue, or 0 once all have come. The last ones free the
        request's place before they are returned, so a client with its whole answer is not counted.
        """
        itl_s = self._simulator.itl_s
        sequence = self._sequence
        while sequence.left_tokens:
            if sequence.phase is Phase.WAITING:
                await self._simulator.turn(sequence)
                self._due_at_s = self._loop.time() + self._prefill_s
            tokens = min(stride_tokens, sequence.left_tokens)
            late_s = await self._until(self._due_at_s + (tokens - 1) * itl_s)
            if sequence.phase is Phase.WAITING:  # preempted meanwhile
                continue
            if itl_s:
                tokens = min(tokens + int(late_s / itl_s), sequence.left_tokens)
            came = self._simulator.engine.grow(sequence, tokens)
            if came:
                self._due_at_s += came * itl_s
                if not sequence.left_tokens:
                    self._release()
                return came
        return 0

    @property
    def _prefill_s(self) -> float:
        sequence = self._sequence
        return self._simulator.ttft_s * (1 - sequence.cached_tokens / max(1, sequence.prompt_tokens))

    async def _until(self, at_s: float) -> float:
        """Sleep until `at_s` of the loop's clock; returns by how many seconds it has passed."""
        wait_s = at_s - self._loop.time()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        return max(0.0, self._loop.time() - at_s)

    def _release(self) -> None:
        if self._sequence.phase is not Phase.ENDED:
            self._simulator.engine.release(self._sequence)
            self._simulator.wake_admitted()
