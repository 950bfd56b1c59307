"""Shows the balances of tenants' nodes as metrics, while this replica leads. fleet/heartbeat.py calls it."""

from picker_fleet.domain.tenants import Tree
from picker_fleet.state.reads import CHUNK, TenantRow
from picker_fleet.state.store import Store
from picker_fleet.telemetry.metrics import MOST_TENANTS, Metrics

_ANY = "*"


class TenantMetrics:
    """Reads at each heartbeat the balances of the next nodes, as many as one script call may read. Only nodes
    with settings for their own path have metrics, since clients invent other nodes."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store, self._metrics = store, metrics
        self._tree: Tree | None = None
        self._paths: list[str] = []
        self._at = 0
        self._rows: dict[str, TenantRow] = {}

    async def look(self, tree: Tree | None) -> None:
        """Read some nodes of `tree`; None: show none. Raises StateFault if Redis does not answer."""
        if tree is not self._tree:
            named = sorted(path for path in (tree.nodes if tree else ()) if not path.endswith(_ANY))
            self._tree, self._paths, self._at = tree, named[:MOST_TENANTS], 0
            self._rows = {path: self._rows[path] for path in self._paths if path in self._rows}
        if self._paths:
            some = self._paths[self._at : self._at + CHUNK]
            self._rows |= {row.path: row for row in await self._store.reads.tenants(some)}
            self._at = self._at + CHUNK if self._at + CHUNK < len(self._paths) else 0
        self._metrics.tenants(self._rows)
