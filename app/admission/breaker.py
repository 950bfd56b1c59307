"""Whether decisions are asked of the shared state, or taken without it. Pure; the clock comes in.

    CLOSED ──(silence, loss or a failed decision)──> OPEN ──(a quick probe)──> HALF_OPEN
       ^                                              ^                            │
       └────────(enough quick probes in a row)────────┼────────────────────────────┤
                                                      └──(a slow or failed probe)──┘

*Silence* is time in which a decision waits and nothing at all comes from Redis; any reply ends it. So a Redis
that is slow, but answers, is waited for: what counts is not how long an answer took but whether anything
comes. `MISSES` budgets of silence open the breaker, and so does a connection that stays lost for one budget:
with a look each half budget while one waits, no decision waits for more than two.

To close it, probes must come back within `QUICK` budgets, less than what opens it: a Redis just too slow
stays out rather than going to and fro. How many in a row starts at two and doubles, to sixteen, each time the
breaker opens again within `CALM_S` of having closed.
"""

import enum
import math

MISSES = 1.5  # budgets of silence that open it
QUICK = 1.2  # budgets a probe may take that helps to close it
CALM_S = 30.0
_FEWEST, _MOST = 2, 16  # probes in a row
_ROUNDING_S = 1e-9  # of sums of half budgets


class State(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """`look` regularly, at least twice a budget while a decision waits. Times in seconds of one monotonic
    clock."""

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s
        self._state = State.CLOSED
        self._looked_s = math.inf
        self._heard_s = -1.0
        self._silent_s = 0.0
        self._down_s = 0.0
        self._streak = 0
        self._wanted = _FEWEST
        self._closed_s: float | None = None  # when it last closed, after having been open

    @property
    def state(self) -> State:
        return self._state

    @property
    def closed(self) -> bool:
        return self._state is State.CLOSED

    @property
    def wanted(self) -> int:
        """Quick probes in a row that close it."""
        return self._wanted

    def look(self, now_s: float, *, asked_s: float | None, heard_s: float, down: bool) -> None:
        """Note how things stand: the oldest decision that waits was asked for at `asked_s` (None if none
        waits), the last reply came at `heard_s`, there is no connection.
        """
        looked_s, self._looked_s = self._looked_s, now_s
        if not self.closed:
            return
        if asked_s is None or heard_s > self._heard_s:
            self._silent_s = 0.0
        self._heard_s = max(self._heard_s, heard_s)
        if asked_s is not None:
            self._silent_s += self._since(max(looked_s, asked_s, heard_s), now_s)
        self._down_s = self._down_s + self._since(looked_s, now_s) if down else 0.0
        silent_s, down_s = self._silent_s + _ROUNDING_S, self._down_s + _ROUNDING_S
        if silent_s >= MISSES * self._budget_s or down_s >= self._budget_s:
            self.fail(now_s)

    def _since(self, start_s: float, now_s: float) -> float:
        # A process that stood still itself must not blame Redis: a look stands for half a budget at most.
        return max(0.0, min(now_s - start_s, self._budget_s / 2))

    def fail(self, now_s: float) -> None:
        """A decision could not be had, whatever the reason."""
        if self.closed:
            soon = self._closed_s is not None and now_s - self._closed_s < CALM_S
            self._wanted = min(2 * self._wanted, _MOST) if soon else _FEWEST
        self._state = State.OPEN
        self._streak = 0

    def probed(self, now_s: float, took_s: float | None) -> None:
        """A probe came back after `took_s`; None if it did not."""
        if self.closed:
            return
        if took_s is None or took_s > QUICK * self._budget_s:
            self._state, self._streak = State.OPEN, 0
            return
        self._state, self._streak = State.HALF_OPEN, self._streak + 1
        if self._streak >= self._wanted:
            self._state, self._closed_s = State.CLOSED, now_s
            self._silent_s = self._down_s = 0.0
