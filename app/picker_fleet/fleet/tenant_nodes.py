"""Publishes and follows the nodes of tenants. fleet/heartbeat.py calls it.

The shared state has two hashes of nodes by path: the configured ones, which the leader publishes, and the
live changes of operators, which win. Each replica follows the nodes in both hashes.
"""

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial

from picker_fleet.domain.config import Settings, YamlFault, parse, read_yaml
from picker_fleet.domain.errors import ConfigError
from picker_fleet.domain.tenants import Node, Tree
from picker_fleet.endpoints.discovery import FileFault, WatchedFile
from picker_fleet.state.replies import HeartbeatReply, is_older
from picker_fleet.state.store import Store
from picker_fleet.telemetry.logs import AUDIT

_LOGGED_AT_ONCE = 20  # nodes logged between two pauses
_MOST_DETAIL = 4000  # characters of a change's entry in the list of changes
_log = logging.getLogger(AUDIT)


class TenantNodes:
    """The nodes of tenants from this replica's configuration, or the file named there, and the nodes in
    force. If no tenants are configured, no nodes are read or written."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        tenants = settings.tenants
        self._separator = "" if tenants is None else tenants.separator
        self._source = "tenants.file" if tenants and tenants.file else "configuration"
        self._own: dict[str, str] | None = None  # path -> JSON; None without tenants, until the file is read
        # The epoch in which this leader published nodes last, and these nodes.
        self._published: tuple[str, dict[str, str] | None] = "", None
        self._followed = ("", "")  # epoch and version of the nodes that were read last
        self._changes: Mapping[str, str] = {}  # the live changes
        self._parsed: dict[str, tuple[str, Node]] = {}  # path -> (the node's JSON, the parsed node)
        if tenants is not None and tenants.file is None:
            self.found(tenants.nodes)

    def found(self, nodes: Sequence[Node]) -> None:
        """Take over the tenants' nodes of the configuration or of its file."""
        self._own = {node.path: node.shared() for node in nodes}

    async def publish(self, pulse: HeartbeatReply) -> None:
        """Publish the configured nodes that differ from the published ones, if this replica leads; `pulse` is
        the reply to its last heartbeat."""
        if not pulse.leader:
            self._published = "", None  # another leader may publish other nodes
        own = self._own
        if own is None or not pulse.leader or (pulse.epoch, own) == self._published:
            return
        former = await self._store.nodes_of("tenants")
        changes = dict(sorted((dict.fromkeys(former, "") | own).items() - former.items()))
        await self._store.set_tenants("tenants", changes)
        is_first, self._published = self._published[0] != pulse.epoch, (pulse.epoch, own)
        if changes and (former or not is_first):
            await self._record(former, changes)

    async def _record(self, former: Mapping[str, str], changes: Mapping[str, str]) -> None:
        """Record changed nodes, as the admin API records operators' changes: the log gets each node, the list
        of changes, which keeps 200 entries, one entry that names the first nodes."""
        texts = []
        for at, (path, text) in enumerate(changes.items()):
            if at % _LOGGED_AT_ONCE == 0:
                await asyncio.sleep(0)  # requests must not wait while 10 000 nodes are logged
            texts.append(f"{json.dumps(path)}: {json.dumps({'old': former.get(path, ''), 'new': text})}")
            _log.warning("change by %s: tenant %s", self._source, texts[-1])
        change = {"at": time.time(), "by": self._source, "address": "", "outcome": "made"}
        change["change"] = f"{len(changes)} nodes of tenants"
        change["detail"] = f"{{{', '.join(texts)}}}"[:_MOST_DETAIL]
        await self._store.note_change(json.dumps(change))

    async def follow(self, epoch: str) -> Tree | None:
        """The nodes in force, if they have changed, else None. Restores live changes that the shared state,
        now of `epoch`, has lost; its version is lower after a restart from an old dump, or a failover."""
        if not self._separator:
            return None
        version = await self._store.tenants_version()
        former_epoch, former_version = self._followed
        if (epoch, version) == self._followed:
            return None
        has_lost = epoch == former_epoch and is_older(version, former_version)
        if has_lost and not version:
            return None  # Redis has lost the nodes: the next epoch restores the live changes
        changes = await self._store.nodes_of("tenant_changes")
        if has_lost or (not changes and self._changes and epoch != former_epoch):
            self._published = "", None  # Redis may have lost the configured nodes, too
            lost = (dict.fromkeys(changes, "") | dict(self._changes)).items() - changes.items()
            if lost:
                await self._store.set_tenants("tenant_changes", dict(sorted(lost)))
            changes = self._changes
        in_force = {**await self._store.nodes_of("tenants"), **changes}
        parsed = {}
        for path, text in in_force.items():
            known = self._parsed.get(path)
            if known is None or known[0] != text:
                await asyncio.sleep(0)  # requests must not wait while 10 000 nodes are parsed
                known = text, Node.of_shared(path, text)
            parsed[path] = known
        self._followed, self._changes, self._parsed = (epoch, version), changes, parsed
        return Tree((node for _, node in parsed.values()), self._separator)


def nodes_file(settings: Settings) -> WatchedFile[tuple[Node, ...]] | None:
    """The file of nodes that `settings` name; None if they name none."""
    if settings.tenants is None or settings.tenants.file is None:
        return None
    return WatchedFile(settings.tenants.file, partial(nodes_in, settings=settings), "tenants")


def nodes_in(text: str, settings: Settings) -> tuple[Node, ...]:
    """The nodes in the YAML or JSON list `text`, the content of the file that `settings` name.

    Raises:
        FileFault: the file's `text` is no list of nodes, or a node is not valid.
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
