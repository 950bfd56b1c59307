"""The order of a node's children by start-time fair queueing, in a band and in its tree of tenants. Pure.

A band is the root of its tree. Without tenants the children of the root are the flow queues. With tenants a
flow is a path: acme/search/key-17 is a leaf below the inner nodes acme and acme/search.

Why flows get their shares (G2; Goyal, Vin, Cheng 1996; on several servers: Jin, Chase, Kaur, SFQ(D), 2004).
A flow queue that becomes backlogged starts at S = max(v, F): v is the band's virtual time, F is the flow
queue's tag when its last request left. A turn serves the flow queue with the least S, sets v = S, and adds
the share c/w (cost over weight) to that queue's S. While f is backlogged, v <= S_f <= v + s_f, s_f being its
largest share: no tag is below v, because turns take the least tag and newcomers start at v or above; and S_f
was at most v when f was last served or started, and v never falls. The service of flow queue f in an interval
is the growth of its tag S_f, which differs from the growth of v by at most f's largest share s_f. So the
services of flow queues f and g, each divided by its weight, differ by at most s_f + s_g, the sum of their
largest shares.
The tag belongs to the flow queue, not to a request, so a request that leaves early leaves no gap.

Why tenants get their shares at each level (H-SFQ; Goyal, Guo, Vin, "A Hierarchical CPU Scheduler for
Multimedia Operating Systems", OSDI 1996). Each inner node has its own virtual time and tags for its children.
Serving a request adds its cost over the child's weight to the tag of one child at each level of its path. An
inner node is backlogged while one of its children takes turns. The proof above needs only that each turn of a
node serves the child with the least tag; how often the node itself gets a turn does not matter. So the proof
holds for the children of any node: the services of two siblings that are both backlogged, each divided by its
weight, differ by at most the sum of their largest shares. The bound does not depend on the number of flows
below a child, so a tenant gains nothing from more flows.

A client that uses a new flow for each request could keep the virtual time v from growing. So all flow queues
that start with F <= v together count like one flow of weight 1: once these newcomers are NEWCOMERS shares
ahead of v, the next newcomer starts a share later.
"""

import heapq
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

NEWCOMERS = 100
INNER = "\x1e"  # ends the name of an inner node among its siblings; no flow contains this character

M = TypeVar("M")


class ScoredSet(Generic[M]):
    """A set of members in order of score, ties by name, like a sorted set of Redis.

    The method `first` takes O(log n) amortised: entries of removed or moved members stay in the heap until
    they reach the top of the heap.
    """

    def __init__(self) -> None:
        self._entries: dict[M, tuple[float, str, int, M]] = {}
        self._heap: list[tuple[float, str, int, M]] = []
        self._puts = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[M]:
        return iter(self._entries)

    def __contains__(self, member: object) -> bool:
        return member in self._entries

    def put(self, member: M, score: float, name: str) -> None:
        self._puts += 1
        entry = self._entries[member] = (score, name, self._puts, member)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, entry)

    def remove(self, member: M) -> bool:
        """Remove `member`. Returns False if the member was not in the set."""
        return self._entries.pop(member, None) is not None

    def score(self, member: M) -> float:
        return self._entries[member][0]

    def scores(self) -> dict[str, float]:
        return {name: score for score, name, _, _ in self._entries.values()}

    def first(self) -> M | None:
        while self._heap:
            member = self._heap[0][3]
            if self._entries.get(member) is self._heap[0]:
                return member
            heapq.heappop(self._heap)
        return None

    def lowest(self, count: int) -> list[M]:
        """The `count` members with the lowest scores, in order; takes O(n)."""
        return [entry[3] for entry in heapq.nsmallest(count, self._entries.values())]

    def last(self) -> M:
        """The member with the highest score; takes O(n)."""
        return max(self._entries.values())[3]


class Order:
    """The backlogged children of one node in a band's tree, in the order of start-time fair queueing.

    A child is a flow queue, by its name, or an inner node, by its path and INNER. `turns` has the children
    that take turns; `throttled` has the start tags of children that take none; `finish` has the tags that
    children had when they were last backlogged. `v` is the virtual time: the greatest start tag served, not
    counting service by the starvation guard. `newcomers` is the common tag of all children that started at v.
    """

    def __init__(self) -> None:
        self.v = self.newcomers = 0.0
        self.turns: ScoredSet[str] = ScoredSet()
        self.throttled: dict[str, float] = {}
        self.finish: dict[str, float] = {}

    def tag_of(self, child: str) -> float:
        """The start tag of a backlogged child."""
        return self.turns.score(child) if child in self.turns else self.throttled[child]

    def start_tag(self, child: str, share: float) -> float:
        """The start tag of a child that becomes backlogged with a request of share `share`."""
        finish = self.finish.get(child, 0.0)
        if finish > self.v:
            return finish
        reached = max(self.newcomers, self.v)
        if reached - self.v >= NEWCOMERS * share:
            return self.v + share
        self.newcomers = reached + share
        return self.v

    def set_tag(self, child: str, tag: float) -> None:
        """Move a backlogged child to the start tag `tag`."""
        if child in self.turns:
            self.turns.put(child, tag, child)
        else:
            self.throttled[child] = tag

    def leave(self, child: str) -> None:
        """Remove a child that is no longer backlogged, and keep its tag."""
        if child in self.turns:
            self.finish[child] = self.turns.score(child)
            self.turns.remove(child)
        elif child in self.throttled:
            self.finish[child] = self.throttled.pop(child)

    def forget_finish_tags(self, at_rest: bool) -> None:
        if at_rest:
            self.v = max([self.v, *self.finish.values()])
        self.finish = {child: tag for child, tag in self.finish.items() if tag > self.v}


class Level(NamedTuple):
    """One step of a path through a band's tree: a node's `order`, and the name `child` of its child on the
    path. `path` is the child's path in the tree."""

    order: Order
    child: str
    path: str
