"""Publishes and follows the nodes of tenants. fleet/heartbeat.py calls it.

The shared state has two hashes of nodes by path: the configured ones, which the leader publishes, and the
live changes of operators, which win. Each replica follows both.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from picker_fleet.domain.config import Settings, YamlFault, parse, read_yaml
from picker_fleet.domain.errors import ConfigError
from picker_fleet.domain.tenants import Node, Tree
from picker_fleet.endpoints.discovery import FileFault, WatchedFile
from picker_fleet.state.replies import HeartbeatReply
from picker_fleet.state.store import Store

_AT_A_TIME = 500  # nodes that one call changes


class TenantNodes:
    """The nodes of tenants from this replica's configuration, or the file named there, and the nodes in
    force. Without tenants nothing is read or written."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        tenants = settings.tenants
        self._separator = "" if tenants is None else tenants.separator
        self._own: dict[str, str] | None = None  # path -> JSON; None without tenants, until the file is read
        self._published = ""  # the epoch that has these nodes, as far as this leader knows
        self._followed = ("", "")  # epoch and version of the nodes that were read last
        self._changes: Mapping[str, str] = {}  # the live changes
        self._parsed: dict[str, tuple[str, Node]] = {}  # path -> JSON, and the node
        if tenants is not None and tenants.file is None:
            self.found(tenants.nodes)

    def found(self, nodes: Sequence[Node]) -> None:
        """Take the configured nodes."""
        self._own, self._published = {node.path: node.shared() for node in nodes}, ""

    async def publish(self, pulse: HeartbeatReply) -> None:
        """Publish the configured nodes that differ from the published ones, if this replica leads; `pulse` is
        the reply to its last heartbeat."""
        if not pulse.leader:
            self._published = ""  # another leader may publish other nodes
        if self._own is None or not pulse.leader or pulse.epoch == self._published:
            return
        own = self._own
        former = await self._store.nodes_of("tenants")
        changes = {path: text for path, text in own.items() if former.get(path) != text}
        changes |= dict.fromkeys(former.keys() - own.keys(), "")
        paths = sorted(changes)
        for at in range(0, len(paths), _AT_A_TIME):
            some = {path: changes[path] for path in paths[at : at + _AT_A_TIME]}
            await self._store.set_tenants("tenants", some)
        if own is self._own:
            self._published = pulse.epoch

    async def follow(self, epoch: str) -> Tree | None:
        """The nodes in force, if they have changed, else None. Restores live changes that the shared state,
        now of `epoch`, has lost."""
        if not self._separator:
            return None
        version = await self._store.tenants_version()
        if (epoch, version) == self._followed:
            return None
        changes = await self._store.nodes_of("tenant_changes")
        if not changes and self._changes and epoch != self._followed[0]:
            await self._store.set_tenants("tenant_changes", self._changes)
            changes = self._changes
        in_force = {**await self._store.nodes_of("tenants"), **changes}
        self._followed, self._changes = (epoch, version), changes
        former, self._parsed = self._parsed, {}
        for path, text in in_force.items():
            known = former.get(path)
            self._parsed[path] = known if known and known[0] == text else (text, Node.of_shared(path, text))
        return Tree((node for _, node in self._parsed.values()), self._separator)


def nodes_file(settings: Settings) -> WatchedFile[tuple[Node, ...]] | None:
    """The file of nodes that `settings` name; None if they name none."""
    if settings.tenants is None or settings.tenants.file is None:
        return None
    return WatchedFile(settings.tenants.file, partial(nodes_in, settings=settings), "tenants")


def nodes_in(text: str, settings: Settings) -> tuple[Node, ...]:
    """The nodes in the YAML or JSON list `text`, the content of the file that `settings` name.

    Raises:
        FileFault: `text` is no list of nodes, or a node is not valid.
    """
    try:
        nodes = read_yaml(text)
        if nodes is None:
            raise FileFault("is empty; a tree without nodes is written []")
        separator = settings.tenants.separator if settings.tenants is not None else "/"
        tenants = parse({"tenants": {"separator": separator, "nodes": nodes}}).tenants
    except (YamlFault, ConfigError) as fault:
        raise FileFault("; ".join(str(fault).splitlines())) from fault
    return () if tenants is None else tenants.nodes
