"""Model servers in simulated time: the simulator's engine (app/picker_tools/simulator/engine.py), whose steps
take the times that were measured for vLLM with OPT-13B (batch.py)."""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable

from picker_tools.simulator.batch import BUDGET_TOKENS, step_s
from picker_tools.simulator.engine import Engine, Limits, Sequence, Step
from picker_tools.simulator.transfer import KV_BANDWIDTH_GB_S, KV_BYTES_PER_TOKEN

_TRANSFER_TOKEN_S = KV_BYTES_PER_TOKEN / (KV_BANDWIDTH_GB_S * 1e9)


class Timeline:
    """Actions in order of their times; `now_s` is the time of the last one."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def clock(self) -> float:
        return self.now_s

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time_s, next(self._numbers), act))

    def next(self) -> Callable[[], None]:
        """The next action; moves the time to it."""
        self.now_s, _, act = heapq.heappop(self._due)
        return act

    def run(self, until_s: float) -> None:
        while self._due and self._due[0][0] <= until_s:
            self.next()()


class Server:
    """One model server. `computed`: number of tokens computed by sequence, including recomputed tokens."""

    def __init__(self, timeline: Timeline, limits: Limits) -> None:
        self._timeline = timeline
        self.engine = Engine(limits)
        self.computed = Counter[Sequence]()
        self._grown: dict[Sequence, Callable[[Sequence], None]] = {}
        self._arrived: dict[Sequence, Callable[[], None]] = {}
        self._link_free_s = 0.0
        self._is_idle = True

    def submit(
        self,
        sequence: Sequence,
        grown: Callable[[Sequence], None],
        arrived: Callable[[], None] = lambda: None,
    ) -> None:
        """Queue `sequence`. `grown` is called with each token, `arrived` when its KV cache has come."""
        self.engine.submit(sequence)
        self._grown[sequence], self._arrived[sequence] = grown, arrived
        self._begin_if_idle()

    def free(self, sequence: Sequence) -> None:
        """Free the blocks that the complete `sequence` keeps."""
        self.engine.free(sequence)
        self._begin_if_idle()

    def abandon(self, sequence: Sequence) -> None:
        """Drop `sequence`, whose client has left."""
        self.engine.release(sequence)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        del self._grown[sequence], self._arrived[sequence]

    def _begin_if_idle(self) -> None:
        if self._is_idle:
            self._begin_step()

    def _begin_step(self) -> None:
        step = self.engine.begin_step(BUDGET_TOKENS)
        for sequence in step.pulling:
            begin_s = max(self._link_free_s, self._timeline.now_s)
            self._link_free_s = begin_s + sequence.prompt_tokens * _TRANSFER_TOKEN_S
            self._timeline.at(self._link_free_s, lambda each=sequence: self._pulled(each))  # type: ignore[misc]
        self._is_idle = not step.tokens
        if step.tokens:
            self._timeline.at(self._timeline.now_s + step_s(step), lambda: self._end_step(step))

    def _pulled(self, sequence: Sequence) -> None:
        self._arrived[sequence]()
        self.engine.pulled(sequence, arrived=True)
        self._begin_if_idle()

    def _end_step(self, step: Step) -> None:
        self.computed.update(step.tokens)
        for sequence in self.engine.end_step(step):
            grown = self._grown[sequence]
            if not sequence.remaining_tokens:
                self._forget(sequence)
            grown(sequence)
        self._begin_step()
