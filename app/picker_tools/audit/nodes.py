"""Tenants as the decision log shows them: the paths of flows, and the settings of the tree's nodes.

The entries `tenant` show each change of nodes (docs/redis-schema.md). The audit has its own code for paths
and nodes, since it checks the scripts' code.
"""

from collections.abc import Iterator

import msgspec

from picker_tools.audit.log import Entry, EntryError

LEVELS = 8  # maximum levels of the tree; a node on the last level has the rest of its flow's name
INNER = "\x1e"  # ends the name of an inner node; a leaf has the name of its flow
ROOT = 2 * INNER  # the root's name; INNER alone is the name of the inner node with the path ''
BETWEEN = "\x1f"
_KINDS = ("tenant_changes", "tenants")  # operators' changes take precedence over configured nodes
_MOST_CACHED = 10_000

QUEUE, DEMOTE = "queue", "demote"


class Limit(msgspec.Struct, frozen=True):
    """`amount` of `unit` in each `per_ms`, at most `burst` at once (None: the amount)."""

    unit: str
    amount: float
    per_ms: float
    burst: float | None = None

    @property
    def most(self) -> float:
        return self.amount if self.burst is None else self.burst


class Budget(msgspec.Struct, frozen=True):
    """`units` of cost in each calendar `period`: day, week or month."""

    units: float
    period: str


class Node(msgspec.Struct, frozen=True):
    """A node's settings. `weight` None stands for 1 at an inner node, and for the flow's weight at a leaf."""

    weight: float | None = None
    over_limit: str = QUEUE
    max_parallel: int | None = None
    limits: tuple[Limit, ...] = ()
    budget: Budget | None = None

    @property
    def has_quota(self) -> bool:
        return bool(self.limits or self.budget) or self.max_parallel is not None


def ancestry(flow: str, separator: str) -> list[str]:
    """The paths of the nodes above and at `flow`, from the top: a, a/b and a/b/c for the flow a/b/c. Without
    a separator, the flow is the only path."""
    names = flow.split(separator, LEVELS - 1) if separator else [flow]
    return [separator.join(names[:depth]) for depth in range(1, len(names) + 1)]


class Nodes:
    """The nodes in force by path. In a node's path `*` stands for any name, as in PARENT/* or */*."""

    def __init__(self) -> None:
        self._nodes: dict[str, dict[str, Node]] = {kind: {} for kind in _KINDS}
        self._found: dict[str, Node] = {}
        self.version = 0  # number of changes so far

    def change(self, entry: Entry) -> None:
        """Apply an entry `tenant`, whose note is PATH<31>KIND<31>JSON; without JSON the node is removed.

        Raises:
            EntryError: the note cannot be read.
        """
        path, _, rest = entry.note.partition(BETWEEN)
        kind, _, text = rest.partition(BETWEEN)
        if kind not in _KINDS:
            raise EntryError(f"entry {entry.seq}: note is {entry.note[:80]!r}")
        self._nodes[kind].pop(path, None)
        try:
            if text:
                # Lua may encode an empty list as an empty table.
                given = msgspec.json.decode(text, type=dict[str, object])
                known = {name: value for name, value in given.items() if value not in ({}, None)}
                self._nodes[kind][path] = msgspec.convert(known, Node, strict=False)
        except msgspec.MsgspecError as fault:
            raise EntryError(f"entry {entry.seq}: node {path!r} cannot be read: {fault}") from None
        self._found.clear()
        self.version += 1

    def find(self, path: str, separator: str) -> Node:
        """The settings of `path`: the node's own, else its parent's for all children, else its level's."""
        found = self._found.get(path)
        if found is None:
            if len(self._found) >= _MOST_CACHED:
                self._found.clear()
            found = self._found[path] = next(self._candidates(path.split(separator, LEVELS - 1), separator))
        return found

    def _candidates(self, names: list[str], separator: str) -> Iterator[Node]:
        for pattern in (names, [*names[:-1], "*"], ["*"] * len(names)):
            for kind in _KINDS:
                node = self._nodes[kind].get(separator.join(pattern))
                if node is not None:
                    yield node
        yield Node()
