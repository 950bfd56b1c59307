"""The flow queues that the audit rebuilds, with their order and service in start-time fair queueing.

The replay (replay.py) counts the waiting requests; the check of G2 (fairness.py) keeps tags, orders, service.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from picker_fleet.domain.bands import NAMED
from picker_tools.audit.log import Entry
from picker_tools.audit.nodes import INNER, ROOT, ancestry

ROUNDING = 1e-9  # relative tolerance for rounding errors in sums


@dataclass(slots=True)
class Level:
    """The order of one node's children: their virtual time, the charge of newcomers (None: unknown), and when
    either of them last changed.

    Children that become backlogged and owe nothing for earlier service (newcomers) start at the virtual time
    v. At each node all newcomers together are charged like one child of weight 1. When too many have started,
    further children start one share later (docs/fairness.md, "New flows").

    The log does not show whether the scripts have forgotten the tag of an idle inner node. The check assumes
    the lesser of the two possible tags; `slack` is the largest such difference among backlogged children.
    """

    v: float | None
    charged: float | None
    new_tag: float | None  # the tag of a child that was not seen before; None if unknown
    changed_us: int = 0
    slack: float = 0.0
    # The children by start tag, as a heap, which drops outdated items when they reach its top.
    heap: list[tuple[float, str]] = field(default_factory=list)


@dataclass(slots=True)
class Service:
    """The service of one flow since it became backlogged at `since`, measured against the virtual time of its
    order.

    For two flows f and g of an order and every interval [s, e] in which both are backlogged, the bound is:

        W_f − W_g <= c_f + c_g + debt_f(e) + debt_g(s) + claim_f(s) + claim_g(e)

    W is dispatched service by weight (the sum of shares), corrections included; c is the flow's largest
    share. With v the virtual time and S a flow's start tag, debt = max(0, S − v − c) is service that
    the flow received out of turn (by the guard, or estimated too low) and has not yet worked off;
    claim = max(0, v − S) is service owed to the flow since a charge was corrected downwards. Without guard
    and corrections debt and claim are 0, which leaves the bound of start-time fair queueing.

    To check all pairs, the check compares each flow with v. With a = W − debt − v and b = W + claim − v the
    left side less debts and claims is [a_f(e) − b_f(s)] + [a_g(s) − b_g(e)]. So two inequalities suffice for
    each flow: for all s <= e of one backlogged interval, a(e) − b(s) <= c (never far ahead) and a(s) − b(e)
    <= c (never far behind). These inequalities take a few operations per dispatch, whatever the number of
    flows. Between a flow's own events its a and b only fall, so the check runs just before and just after
    each event. The field `served` is the service W since `since`.
    """

    since: Entry
    served: float
    claim: float
    low: float  # the least b = W + claim − v since the flow became backlogged
    high: float  # the greatest a = W − debt − v since the flow became backlogged

    @classmethod
    def begin(cls, since: Entry, tag: float, v: float, largest: float) -> "Service":
        claim = max(0.0, v - tag)
        debt = max(0.0, tag - v - largest)
        return cls(since, 0.0, claim, claim - v, -debt - v)

    def add(self, share: float, tag: float, v: float, largest: float, *, is_correction: bool) -> str:
        """Record that a dispatch, or a correction, charged `share` and set the tag to `tag`. Returns the
        violation, or ''."""
        self.served += share
        claim = max(0.0, v - tag)
        # If the virtual time v passes the flow's tag, the flow has missed its turn. A missed turn adds no
        # claim, so the bound is broken and reported.
        self.claim = claim if is_correction else min(self.claim, claim)
        return self._check_service(tag, v, largest)

    def rebase(self, by: float) -> None:
        """Record that a rebase lowered v and all tags of the order by `by`."""
        self.low += by
        self.high += by

    def _check_service(self, tag: float, v: float, largest: float) -> str:
        debt = max(0.0, tag - v - largest)
        a, b = self.served - debt - v, self.served + self.claim - v
        slack = largest + ROUNDING * max(1.0, abs(v), abs(self.served))
        if a - self.low > slack:
            return f"{a - self.low:g} ahead of the virtual time; {largest:g} is the bound"
        if self.high - b > slack:
            return f"{self.high - b:g} behind the virtual time; {largest:g} is the bound"
        self.low, self.high = min(self.low, b), max(self.high, a)
        return ""


@dataclass(slots=True, eq=False)
class FlowQueue:
    """The requests of one flow that wait in one band. `tag` is the flow's start tag while the flow is
    backlogged, else its finish tag; None if unknown.

    `largest` is the share of the flow's largest request, waiting or served. The log entry `tag_entry`
    last set the tag, which may be higher by `slack`. `service` is None unless the flow is backlogged. `level`
    is the order of an inner node's children. The check of G2 sets the fields from `tag` to `level`.

    The flow queues of a band are the leaves of a tree. Each inner node has a FlowQueue, too: its `waiting`
    counts the requests of all flows below, its `ordered` the children that take turns. `parent` is None for
    the root. Inner nodes are tenants; without tenants, the root is the parent of all flow queues.
    """

    band: int
    name: str
    parent: "FlowQueue | None" = None
    children: int = 0
    ordered: int = 0
    waiting: int = 0
    throttled: bool = False
    tag: float | None = None
    tag_entry: Entry | None = None
    slack: float = 0.0
    largest: float = 0.0
    service: Service | None = None
    level: Level | None = None

    @property
    def key(self) -> tuple[int, str]:
        return self.band, self.name

    @property
    def is_inner(self) -> bool:
        return self.name.endswith(INNER)

    @property
    def is_servable(self) -> bool:
        """Whether the flow queue takes turns among the children of its parent."""
        return not self.throttled and (self.ordered > 0 if self.is_inner else self.waiting > 0)

    @property
    def chain(self) -> Iterator["FlowQueue"]:
        """The flow queue and its ancestors below the root, which all take turns among their siblings."""
        each = self
        while each.parent is not None:
            yield each
            each = each.parent

    @property
    def throttled_by(self) -> "FlowQueue | None":
        """The member that is throttled, this flow queue or an ancestor; None without such a member."""
        return next((each for each in self.chain if each.throttled), None)


class FlowQueues:
    """All flow queues that have waiting requests or a tag that is still needed.

    `separator` divides a flow's name into the names on its path in the tree of tenants; '' without tenants.
    """

    def __init__(self, separator: str = "") -> None:
        self.separator = separator
        self._flow_queues: dict[tuple[int, str], FlowQueue] = {}
        self._servable: Counter[int] = Counter()
        # The priority of each band as last logged, by the band's number.
        self.priorities = {number: band.priority for number, band in enumerate(NAMED)}

    def find(self, key: tuple[int, str]) -> FlowQueue | None:
        return self._flow_queues.get(key)

    def at(self, key: tuple[int, str]) -> FlowQueue:
        """The flow queue with the key `key`; if it is missing, a new one with an unknown tag."""
        queue = self._flow_queues.get(key)
        if queue is None:
            parent = self._parent(key)
            queue = self._flow_queues[key] = FlowQueue(*key, parent)
            if parent is not None:
                parent.children += 1
        return queue

    def _parent(self, key: tuple[int, str]) -> FlowQueue | None:
        band, name = key
        if name == ROOT:
            return None
        paths = ancestry(name.removesuffix(INNER), self.separator)
        return self.at((band, paths[-2] + INNER if len(paths) > 1 else ROOT))

    def of(self, band: int) -> list[FlowQueue]:
        return [queue for queue in self._flow_queues.values() if queue.band == band]

    def all(self) -> list[FlowQueue]:
        return list(self._flow_queues.values())

    def above(self, priority: int) -> list[int]:
        """The bands with a priority above `priority` that have a flow queue that takes turns."""
        return [band for band, of in self.priorities.items() if of > priority and self._servable[band] > 0]

    @property
    def have_turns(self) -> bool:
        """Whether any band has a flow queue that takes turns."""
        return any(self._servable.values())

    def collect(self, band: int) -> None:
        """Forget a band that has become empty."""
        for queue in reversed(self.of(band)):  # drop children before their parents
            if not (queue.waiting or queue.children):
                self.drop(queue)
        self.priorities.pop(band, None)

    def wait(self, queue: FlowQueue, change: int) -> None:
        """Add `change` to the number of requests waiting in `queue`."""
        was_servable = queue.is_servable
        for each in queue.chain:
            each.waiting += change
        self._take_turns(queue, was_servable)

    def set_throttled(self, queue: FlowQueue, throttled: bool) -> None:
        was_servable = queue.is_servable
        queue.throttled = throttled
        self._take_turns(queue, was_servable)

    def unthrottle_empty(self) -> None:
        for queue in self._flow_queues.values():
            if not queue.waiting:
                queue.throttled = False

    def clear(self) -> None:
        self._flow_queues.clear()
        self._servable.clear()

    def drop(self, queue: FlowQueue) -> None:
        """Forget a flow queue that is empty and has no children."""
        del self._flow_queues[queue.key]
        if queue.parent is not None:
            queue.parent.children -= 1

    def __len__(self) -> int:
        return len(self._flow_queues)

    def _take_turns(self, queue: FlowQueue, was_servable: bool) -> None:
        """Record that a flow queue, and with it maybe its ancestors, begins or ceases to take turns."""
        while (change := queue.is_servable - was_servable) and queue.parent is not None:
            was_servable = queue.parent.is_servable
            queue = queue.parent
            queue.ordered += change
            if not queue.ordered:
                queue.throttled = False  # a node without children that take turns is not throttled
        if queue.parent is None:
            self._servable[queue.band] += change
