"""Counts the usage of requests whose ends this replica receives, for the export of usage (admin/usage.py).

Each heartbeat adds the counts to the shared state, by hour, leaf (flow) and model (lua/count_usage.lua). A
batch is sent until Redis has answered, and Redis counts a repeated batch once. So a replica that dies loses
the counts that it has not sent, and Redis may lose counts; the export says where. Only fleets with tenants
count usage.
"""

import asyncio
from collections.abc import Mapping
from itertools import islice
from operator import add
from typing import NamedTuple

from picker_fleet.domain.request import Completion, Outcome
from picker_fleet.domain.tenants import Price
from picker_fleet.state.reads import Usage
from picker_fleet.state.store import Store

HOUR_MS = 3_600_000
MOST_ROWS = 50_000  # maximum rows kept while Redis is unavailable; one more row sums all other usage
_BATCH_ROWS = 200  # rows in one script call, which then takes less than a millisecond

_OTHERS = "", ""


class Batch(NamedTuple):
    number: int
    hour: int
    former: int  # hour of the batch before; 0 for the first batch
    rows: dict[tuple[str, str], Usage]


class UsageMeter:
    """Counts ends, and sends the counts to `store`. The field `prices` of the configuration's `tenants` maps
    models to prices. One event loop."""

    def __init__(self, store: Store, prices: Mapping[str, Price]) -> None:
        self._store = store
        # Model -> price of a token of the prompt, of its cached part, and of the answer.
        self._prices = {model: tuple(price.shared().values()) for model, price in prices.items()}
        self._others = self._prices.get("*") or tuple(Price().shared().values())
        # Hour -> (leaf, model) -> usage. The hour is 0 before the first heartbeat; no hour is empty.
        self._hours: dict[int, dict[tuple[str, str], list[float]]] = {}
        self._rows = 0
        self._batch: Batch | None = None  # the batch sent last, until Redis has answered
        self._last = Batch(0, 0, 0, {})  # the newest batch, which gives the next batch its number
        self._sending = asyncio.Lock()

    def count(self, completion: Completion, leaf: str, model: str) -> None:
        """Count an ended request, unless no model server has answered it, so that it used nothing."""
        prompt, answer = completion.prompt_tokens, completion.completion_tokens
        unreported, cached, cost = 0, 0, 0.0
        if prompt is None or answer is None:
            if completion.outcome is Outcome.UPSTREAM_FAILED or completion.status >= 400:
                return
            unreported, prompt, answer = 1, 0, 0
        else:
            of_prompt, of_cached, of_answer = self._prices.get(model, self._others)
            cached = min(completion.cached_tokens or 0, prompt)
            cost = (prompt - cached) * of_prompt + cached * of_cached + answer * of_answer
        counts = self._hours.setdefault(self._store.now_ms() // HOUR_MS, {})
        row = counts.get((leaf, model))
        if row is None:
            names = (leaf, model) if self._rows < MOST_ROWS else _OTHERS
            self._rows += names not in counts
            row = counts.setdefault(names, [0, 0, 0, 0, 0, 0.0])
        row[:] = map(add, row, (1, unreported, prompt, cached, answer, cost))

    async def flush(self, *, leaves: bool = False) -> None:
        """Send all counts, or else a mark that this replica has none. `leaves`: the replica shuts down.

        Raises:
            StateFault: Redis has not taken all counts; the next call sends the remaining counts.
        """
        async with self._sending:
            while True:
                batch = self._batch = self._batch or self._next_batch()
                is_last = leaves and not self._hours
                await self._store.count_usage(*batch, leaves=is_last)
                self._batch = None
                if not self._hours:
                    return

    def _next_batch(self) -> Batch:
        hour = next(iter(self._hours), 0)
        counts = self._hours.get(hour, {})
        rows = {names: Usage._make(counts.pop(names)) for names in list(islice(counts, _BATCH_ROWS))}
        self._rows -= len(rows)
        if not counts:
            self._hours.pop(hour, None)
        hour = hour or self._store.now_ms() // HOUR_MS
        self._last = Batch(self._last.number + 1, hour, self._last.hour, rows)
        return self._last
