"""The model's queue: the product's local FairQueue, extended by the rules that only the shared queue has."""

import math
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import Any

from model_state import Moment, Request, Workloads

from picker_fleet.admission.fair_queue import BandQueue, Context, FairQueue, FlowQueue, Policy
from picker_fleet.admission.tenant_tree import INNER, Level, Order
from picker_fleet.domain.bands import NAMED, Band, Bands, Criticality

REBASED_AT, REBASED_TO = 2.0**26, 2.0**20
_NAMES = [each.name for each in fields(Policy)]
_DEFAULTS = {"max_flows": math.inf}


def policy_of(moment: Moment) -> Policy:
    """The settings in force that determine the order of the queue."""
    settings = _DEFAULTS | moment.settings | {"tree": moment.tree if moment.settings.get("tenants") else None}
    return Policy(**{name: settings.get(name) for name in _NAMES} | {"bands": bands_of(settings)})


def bands_of(settings: Mapping[str, Any]) -> Bands:
    """The configured bands: first the three named bands, then other bands."""
    bands = settings.get("bands") or named_bands()
    names = [Criticality(band.name) for band in NAMED]
    found = []
    for at, (each, weight) in enumerate(zip_longest(bands, settings.get("band_weights", ())[: len(bands)])):
        criticality = names[at] if at < len(names) else Criticality.DEFAULT
        name = str(criticality) if at < len(names) else f"other {at}"
        attributes = bool(each.get("preemptible")), bool(each.get("guaranteed"))
        limits = each.get("capacity"), each.get("bytes")
        found.append(Band(each["priority"], name, weight or 1.0, *attributes, criticality, *limits))
    return Bands(found)


def named_bands() -> list[dict[str, Any]]:
    """The three named bands in the form of the settings."""
    shared = ("priority", "preemptible", "guaranteed")
    return [{name: getattr(band, name) for name in shared} for band in NAMED]


def throttled_of(band: BandQueue[Request]) -> dict[str, float]:
    """The throttled flow queues and inner nodes of a band, with their tags."""
    return {child: tag for order in band.orders() for child, tag in order.throttled.items()}


class SharedQueue(FairQueue[Request]):
    """A FairQueue that also corrects charges, rebases tags, and is reordered by the sweep. The queue calls
    `log(event, child)` when a flow queue or an inner node is throttled or unthrottled."""

    def __init__(
        self,
        moment: Moment,
        workloads: Workloads,
        next_arrival: Callable[[], int],
        log: Callable[[str, str], None],
    ) -> None:
        self._rules = Context(policy_of(moment), lambda: moment.now_us, workloads)
        super().__init__(self._rules, next_arrival)
        self._make_named()
        self._log = log
        self.credit = 0.0  # the starvation guard's credit; the first publication sets it to 1
        # (priority, flow queue) -> its blockers, endpoints that were full -> its tag when its wait began, or
        # when one of its requests was last served
        self._blocked: dict[tuple[int, str], dict[str, float]] = {}
        self._probes: set[tuple[int, str]] = set()  # flow queues that may be granted a request without room
        self.waits: dict[tuple[int, str], int] = {}  # (priority, throttled child) -> end of its wait, ms

    def put_settings(self, moment: Moment) -> None:
        self._rules.policy = policy_of(moment)
        self._make_named()

    def collect(self, in_use: Container[int], at_rest: bool) -> None:
        """Forget unnamed bands without requests, unless a band's tag exceeds the bands' virtual time `bv`."""
        named = {band.priority for band in self.policy.bands if band.is_named}
        for priority, band in list(self.bands.items()):
            owes = band.tag > self.bv and not at_rest
            if priority not in named and priority not in in_use and not owes:
                del self.bands[priority]
                self._log("collected", "")

    def _make_named(self) -> None:
        for band in self.policy.bands:
            if band.is_named:
                self.band(band.priority)

    def insert(self, r: Request) -> None:
        super().insert(r)
        r.state, r.timer_ms = "queued", r.due_ms

    def remove(self, r: Request) -> None:
        super().remove(r)
        if r.flow_queue not in self.bands[r.priority].queues:
            self.forget_blockers(r.priority, r.flow_queue)

    def correct(self, r: Request, by: float, floor: float) -> None:
        """Add r's share times `by` to the tag at each level of the tree. A missing tag starts from the
        level's virtual time v, or for a flow queue from `floor`, if this is lower."""
        levels = self._levels_of(r)
        for (order, child, _), share in zip(levels, self.shares(r, levels), strict=True):
            if child in order.turns or child in order.throttled:
                self.charge(order, child, by * share)
            else:
                least = order.v if child.endswith(INNER) else min(floor, order.v)
                order.finish[child] = order.finish.get(child, least) + by * share

    def _levels_of(self, r: Request) -> list[Level]:
        return self.bands[r.priority].levels(self.name_of(r), self.policy.tree)

    def is_throttled(self, r: Request) -> bool:
        """Whether r's flow queue, or a node above it, is throttled and therefore takes no turns."""
        return bool(self.throttled(r))

    def throttled(self, r: Request) -> list[str]:
        """All throttled nodes among r's flow queue and its ancestors."""
        return [child for order, child, _ in self._levels_of(r) if child in order.throttled]

    def is_in_order(self, r: Request) -> bool:
        """Whether r's flow queue takes turns among the children of its parent, which may be throttled."""
        return r.flow_queue in self._levels_of(r)[-1].order.turns

    def throttle(self, r: Request, child: str) -> None:
        super().throttle(r, child)
        self.waits.pop((r.priority, child), None)  # an earlier throttling may have left an entry
        self._log("throttled", child)

    def wait_for_endpoints(self, r: Request, closed: Collection[str]) -> None:
        """Let request r's throttled flow queue wait for room on one of the endpoints in `closed`. If r is the
        queue's next request, forget other blockers."""
        at, queue = (r.priority, r.flow_queue), self.bands[r.priority].queues[r.flow_queue]
        former = self._blocked.pop(at, {})
        self._probes.discard(at)
        if queue.head() is r:
            former = {each: tag for each, tag in former.items() if each in closed}
        tag = queue.levels[-1].order.tag_of(r.flow_queue)
        if blockers := dict.fromkeys(closed, tag) | former:
            self._blocked[at] = blockers

    def served(self, r: Request, places: Container[str]) -> bool:
        """Let r's flow queue wait by its present tag. Return whether a blocker is in `places`."""
        blockers = self._blocked.get((r.priority, self.name_of(r)), {})
        for each in blockers:
            blockers[each] = self._levels_of(r)[-1].order.tag_of(self.name_of(r))
        return any(each in places for each in blockers)

    def blockers(self, r: Request) -> Collection[str]:
        return self._blocked.get((r.priority, self.name_of(r)), {}).keys()

    def forget_blockers(self, priority: int, name: str) -> None:
        self._blocked.pop((priority, name), None)
        self._probes.discard((priority, name))

    def takes_probe(self, r: Request) -> bool:
        """Whether r's flow queue has permission for a grant without room; using the permission ends it."""
        may = (r.priority, r.flow_queue) in self._probes
        self._probes.discard((r.priority, r.flow_queue))
        return may

    def blocked(self, priority: int, address: str) -> dict[str, float]:
        """The flow queues of a band that wait for room on an endpoint, with the queues' tags."""
        found = self._blocked.items()
        return {name: tags[address] for (band, name), tags in found if band == priority and address in tags}

    def use_room(self, address: str) -> None:
        """Unthrottle the first throttled flow queue that waits for the endpoint."""
        for band in self.bands_in_order():
            priority = next(each for each, other in self.bands.items() if other is band)
            waiting = self.blocked(priority, address)
            for name in sorted(waiting, key=lambda name: (waiting[name], name)):
                if self.unthrottle(priority, name):
                    return

    def unthrottle(self, priority: int, child: str) -> bool:
        found = super().unthrottle(priority, child)
        if found:
            self._log("unthrottled", child)
        return found

    def unthrottle_all(self) -> None:
        for priority, band in self.bands.items():
            for child in sorted(throttled := throttled_of(band), key=lambda child: (throttled[child], child)):
                self.probe(priority, child)

    def probe(self, priority: int, child: str) -> None:
        """Unthrottle a child; a flow queue with blockers may be granted a request without room."""
        if (priority, child) in self._blocked:
            self._probes.add((priority, child))
        self.unthrottle(priority, child)

    def reorder(self, policy_changed: bool, scan_order: Sequence[str]) -> None:
        """The sweep's scan: move each request to its position under the present policy and arrival rates.

        The first request that enters a flow queue determines the queue's start tag, so `scan_order` must have
        the ids of all requests in the order of the scan.
        """
        if policy_changed:
            found = {id: at for at, id in enumerate(scan_order)}
            for r in sorted(self.requests(), key=lambda r: found[r.id]):
                if r.flow_queue != self.name_of(r):
                    self.remove(r)
                    self.insert(r)
        for band in self.bands.values():
            for name, queue in band.queues.items():
                if not policy_changed:
                    queue.refresh()
                    continue
                band.queues[name] = sorted_again = FlowQueue[Request](self._rules, queue.levels)
                for r in queue.requests:
                    sorted_again.insert(r)

    def rebase(self) -> None:
        """Lower virtual time and all tags by the same amount when virtual time exceeds REBASED_AT."""
        for priority, band in self.bands.items():
            if band.v >= REBASED_AT:
                self._rebase(priority, band)
        if self.bv >= REBASED_AT:
            by = self.bv - REBASED_TO
            self.bv -= by
            for band in self.bands.values():
                band.tag -= by

    def _rebase(self, priority: int, order: Order) -> None:
        by = order.v - REBASED_TO
        order.v, order.newcomers = order.v - by, max(order.newcomers - by, 0.0)
        order.finish = {child: tag - by for child, tag in order.finish.items()}
        children = [*order.turns, *order.throttled]
        for child in children:
            self.charge(order, child, -by)
        for (other, name), tags in self._blocked.items():
            if other == priority and name in children:
                tags.update({address: tag - by for address, tag in tags.items()})
        self._log("rebased", "")
