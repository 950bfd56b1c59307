"""Shows the balances of tenants' nodes as metrics, while this replica leads, and restores the balances in a
Redis that has lost them. fleet/heartbeat.py calls it.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator

from picker_fleet.domain.tenants import Tree
from picker_fleet.state.reads import CHUNK, TenantRow
from picker_fleet.state.store import Store
from picker_fleet.telemetry.metrics import MOST_TENANTS, Metrics

_ANY = "*"


class TenantMetrics:
    """Reads at each heartbeat the balances of the next nodes, as many as one script call may read. Only nodes
    with settings for their own path have metrics, since clients invent other nodes. `clock` is in seconds."""

    def __init__(self, store: Store, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._store, self._metrics, self._clock = store, metrics, clock
        self._tree: Tree | None = None
        self._paths: list[str] = []
        self._at = 0
        self._epoch = ""  # the epoch of the state with the balances in `_rows`
        self._rows: dict[str, TenantRow] = {}
        self._read_s: dict[str, float] = {}  # path -> when its row was read

    async def look(self, tree: Tree | None, epoch: str) -> None:
        """Read some nodes of `tree` in the state of `epoch`; without `tree`, show no nodes. Charges the nodes
        again if Redis has lost their balances. Raises StateFault if Redis does not answer."""
        if tree is not self._tree:
            named = sorted(path for path in (tree.nodes if tree else ()) if not path.endswith(_ANY))
            self._tree, self._paths, self._at = tree, named[:MOST_TENANTS], 0
            self._rows = {path: self._rows[path] for path in self._paths if path in self._rows}
        is_new, self._epoch = epoch != self._epoch, epoch
        if is_new and self._rows:
            there = await self._store.reads.tenants([*self._rows])
            await asyncio.gather(*(each for row in there for each in self._missing(row)))
        if self._paths:
            some, now_s = self._paths[self._at : self._at + CHUNK], self._clock()
            self._rows |= {row.path: row for row in await self._store.reads.tenants(some)}
            self._read_s |= dict.fromkeys(some, now_s)
            self._at = self._at + CHUNK if self._at + CHUNK < len(self._paths) else 0
        self._metrics.tenants(self._rows)

    def _missing(self, there: TenantRow) -> Iterator[Awaitable[float | None]]:
        """Calls that charge again the units that a node owed, less units leaked since and owed in `there`."""
        age_s = self._clock() - self._read_s[there.path]
        owed = {(each.unit, each.per): each.burst - each.left for each in there.limits}
        for each in self._rows[there.path].limits:
            if each.unit == "parallel" or (each.unit == "budget" and age_s >= each.reset_s):
                continue
            leaked = 0.0 if each.unit == "budget" else each.amount * age_s * 1000 / int(each.per)
            missing = each.burst - each.left - leaked - owed.get((each.unit, each.per), math.inf)
            if missing > 0:
                yield self._store.top_up_tenant(there.path, each.unit, each.per, -missing)
