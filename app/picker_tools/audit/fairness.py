"""The check of G2: each turn goes to the least start tag, each dispatch advances its flow's tag by its share,
and the service gap between two flows is bounded.

The check recomputes the start tags by the rules of docs/fairness.md and compares the results with the logged
tags. The class `Services` checks the bound on the dispatched service, and the class `TreeFairness` all levels
of a tree of tenants. The check is independent on purpose: it shares no code with the queue under check.
"""

import heapq
from collections import defaultdict

from picker_tools.audit.checks import Check, Finding
from picker_tools.audit.log import GUARD, Entry
from picker_tools.audit.replay import (
    RUNNING,
    FlowQueue,
    FlowQueues,
    OpenRequest,
    Replay,
    RequestState,
    Rules,
    Step,
    same,
)
from picker_tools.audit.service import FREE_STARTS, Services
from picker_tools.audit.tree_fairness import TreeFairness


class Bands:
    """The virtual time of each band, the order of its flow queues, and the charge of its new flows.

    A dispatch moves a band's virtual time up to the served start tag. While a band is idle, its virtual time
    may move to the highest finish tag. A rebase lowers virtual time and tags alike. Nothing else moves the
    virtual time.

    Flows that become backlogged and owe nothing for earlier service start at the virtual time v. Each band
    charges such flows together like one flow of weight 1. When too many have started, further flows start one
    share later (docs/fairness.md, "Flows").
    """

    def __init__(self, finding: Finding, flow_queues: FlowQueues, first: float | None) -> None:
        """`first` is the initial virtual time and charge of each band. If `first` is None, the check takes
        the first logged virtual time, and accepts either start tag of a new flow."""
        self._finding = finding
        self._flow_queues = flow_queues
        self._first_v = self._first_charge = first
        self._knows_all = first is not None  # whether the log has shown every flow queue
        self._v: dict[int, float | None] = {}
        self._charged: dict[int, float | None] = {}
        self._idle: dict[int, bool] = {}  # whether nothing has waited or run since the band's last entry
        # Flow queues by start tag: heaps that drop outdated items when they reach the top.
        self._heaps: defaultdict[int, list[tuple[float, str]]] = defaultdict(list)

    def v(self, band: int) -> float | None:
        return self._v.get(band, self._first_v)

    def forget_flow_queues(self) -> None:
        """Treat charges as unknown: flow queues and bands may have tags and charges that no entry showed."""
        self._knows_all = False
        self._first_charge = None
        self._charged.clear()

    def collect(self, band: int) -> None:
        """Forget band number `band`, which is unused: the next band with it starts at virtual time 0."""
        self._v[band], self._charged[band], self._idle[band] = 0.0, 0.0, False
        for queue in self._flow_queues.of(band):
            queue.tag = 0.0
        self._reorder(band)

    def rebase(self, band: int, by: float) -> None:
        """Lower all tags of `band` by `by`; the differences of tags stay the same."""
        v, charged = self.v(band), self._charged.get(band, self._first_charge)
        self._v[band] = None if v is None else v - by
        self._charged[band] = None if charged is None else max(charged - by, 0.0)
        for queue in self._flow_queues.of(band):
            if queue.tag is not None:
                queue.tag -= by
        self._reorder(band)

    def accept(self, entry: Entry) -> None:
        """Take the virtual time of `entry` without checking it."""
        self._v[entry.band] = entry.v
        idle = entry.stock == 0 and entry.queued == 0
        for band in {*self._v, entry.band}:
            self._idle[band] = idle or (self._idle.get(band, False) and band != entry.band)

    def check(self, entry: Entry) -> float:
        """Check the virtual time of `entry`. Returns the virtual time before the decision of `entry`."""
        before = self.v(entry.band)
        idle = self._idle.get(entry.band, False)
        self.accept(entry)
        if before is None:
            return entry.v
        after = before
        if entry.event == "granted" and entry.by != GUARD and entry.tag is not None:
            after = max(before, entry.tag)
        if same(after, entry.v):
            return before
        if not (idle and entry.v > before and self._is_highest(entry)):
            self._finding.add(f"virtual time of band {entry.band} is {entry.v:g}, expected {after:g}", entry)
        return entry.v

    def start(self, band: int, v: float, share: float, shown: float | None) -> float:
        """The start tag of a new flow whose next request costs `share`; `shown` is the logged start tag."""
        charged = self._charged.get(band, self._first_charge)
        if charged is None:
            return v + share if shown is not None and same(shown, v + share) else v
        charged_to = max(charged, v)
        if charged_to - v >= FREE_STARTS * share:
            return v + share
        self._charged[band] = charged_to + share
        return v

    def push(self, queue: FlowQueue) -> None:
        """Record that `queue` has a new tag, or has become servable again."""
        if queue.tag is None:
            return
        heap = self._heaps[queue.band]
        heapq.heappush(heap, (queue.tag, queue.name))
        if len(heap) > 4 * len(self._flow_queues) + 64:
            self._reorder(queue.band)

    def earlier_than(self, queue: FlowQueue, tag: float) -> FlowQueue | None:
        """The servable flow queue that precedes `queue` with start tag `tag`; None if there is none."""
        heap = self._heaps[queue.band]
        while heap:
            least, name = heap[0]
            first = self._flow_queues.find((queue.band, name))
            if first is None or not first.is_servable or first.tag != least:
                heapq.heappop(heap)
                continue
            if first is queue or (least, name) >= (tag, queue.name) or (least != tag and same(least, tag)):
                return None
            return first
        return None

    def _is_highest(self, entry: Entry) -> bool:
        """Whether the virtual time of `entry` is the band's highest tag; True if not all tags are known."""
        tags = [queue.tag for queue in self._flow_queues.of(entry.band) if queue.tag is not None]
        return not self._knows_all or same(max(tags, default=0.0), entry.v)

    def _reorder(self, band: int) -> None:
        """Order all flow queues of `band` by the queues' present tags."""
        heap = self._heaps[band]
        heap[:] = [(each.tag, each.name) for each in self._flow_queues.of(band) if each.tag is not None]
        heapq.heapify(heap)


class Fairness(Check):
    """Checks G2. If a tag is unknown (the log begins midway, or the order changed), the check takes the tag
    from the next entry that shows it. A change of settings begins a new interval for every flow.
    """

    PROMISE = "G2"
    TITLE = "the least start tag is next; service is within the bound of fair queueing"

    def __init__(self, finding: Finding, replay: Replay) -> None:
        super().__init__(finding, replay)
        self._rules: Rules | None = None
        self._tree = TreeFairness(finding, replay)
        self._had_gap = False  # whether entries were left unchecked
        # The start tag of a flow queue not seen before; None: unknown.
        self._new_tag = 0.0 if replay.complete else None
        self._collected: set[int] = set()  # bands of which every flow queue is known, since all began anew
        self._bands = Bands(finding, replay.flow_queues, self._new_tag)
        self._services = Services(finding, replay)
        self._tag_entries: dict[tuple[int, str], Entry] = {}  # flow queue -> the last entry with its tag

    def check(self, step: Step) -> None:
        entry, replay = step.entry, self._replay
        if entry.event == "tuned":
            return
        if replay.settled and replay.rules is not None and replay.rules.separator:
            self._had_gap = True
            self._services.clear()
            self._tree.check(step, replay.rules)
            return
        self._tree.forget()
        if entry.event == "rebased" and entry.tag is not None:
            self._rebase(entry.band, entry.tag)
        if entry.event == "collected":
            self._collect(entry.band)
            return
        if not replay.settled or replay.rules is None:
            self._had_gap = True
            self._services.clear()
            self._bands.accept(entry)
            return
        if self._had_gap:
            self._had_gap = False
            self._forget_tags()
        if replay.rules != self._rules:
            self._rules = replay.rules
            self._restart(entry, replay.rules)
        self._check(step, self._bands.check(entry), replay.rules)

    def close(self) -> None:
        """Check the service of every flow that is still backlogged."""
        self._tree.close()
        if self._replay.last is None:
            return
        for queue in self._services.open():
            self._services.check(queue, self._replay.last, self._bands.v(queue.band))

    def _check(self, step: Step, v: float, rules: Rules) -> None:
        entry, request = step.entry, step.request
        if entry.event == "throttled":
            queue = self._flow_queue(entry.band, entry.flow)
            self._services.check(queue, entry, self._bands.v(queue.band))
            self._expect(queue, queue.tag, entry)
            self._end_service(queue)
        elif entry.event == "unthrottled":
            queue = self._flow_queue(entry.band, entry.flow)
            self._expect(queue, None if queue.tag is None else max(v, queue.tag), entry)
            self._services.begin(queue, entry, v)
        elif entry.event == "corrected":
            self._correct(entry, request, v, rules)
        elif request is None:
            return
        elif step.enters_queue:
            self._enter(entry, v, rules)
        elif step.leaves_queue:
            queue = self._flow_queue(entry.band, request.flow_key)
            if step.after is RequestState.GRANTED:
                self._serve(queue, entry, v, rules)
            else:
                self._services.check(queue, entry, self._bands.v(queue.band))
            if queue.waiting == 1:
                self._end_service(queue)

    def _serve(self, queue: FlowQueue, entry: Entry, v: float, rules: Rules) -> None:
        share = rules.share(entry)
        queue.largest = max(queue.largest, share)
        if entry.note and not same(entry.number, share):
            self._finding.add(f"flow {queue.name!r} charged {entry.note}, but its share is {share:g}", entry)
        if queue.throttled:
            self._finding.add(f"throttled flow {queue.name!r} served", *self._evidence(queue, entry))
        if entry.tag is None:
            self._finding.add("the grant shows no tag", entry)
            return
        self._services.check(queue, entry, v)
        self._expect(queue, queue.tag, entry)
        first = None if entry.by == GUARD else self._bands.earlier_than(queue, entry.tag)
        if first is not None:
            what = (
                f"flow {queue.name!r} served at tag {entry.tag:g} while {first.name!r} waits at {first.tag:g}"
            )
            self._finding.add(what, *self._evidence(first, entry))
        self._set_tag(queue, entry.tag + share, entry)
        self._services.serve(queue, share, entry, entry.v)

    def _enter(self, entry: Entry, v: float, rules: Rules) -> None:
        queue, share = self._flow_queue(entry.band, rules.flow_key(entry.flow)), rules.share(entry)
        queue.largest = max(queue.largest, share)
        start = queue.tag
        if not queue.waiting and queue.tag is not None and queue.tag <= v:
            uncharged = share if entry.event == "requeued" else 0.0
            shown = None if entry.tag is None else entry.tag + uncharged
            start = self._bands.start(queue.band, v, share, shown)
        if entry.event == "requeued":  # the request returns to its position and its charge is refunded
            self._adjust(queue, None if start is None else start - share, -share, entry, v)
            if not queue.waiting:
                self._services.begin(queue, entry, v)
        elif not queue.waiting:
            if entry.tag is None:
                self._finding.add(f"flow {queue.name!r} becomes backlogged and shows no tag", entry)
            self._expect(queue, start, entry)
            self._services.begin(queue, entry, v)
        elif entry.tag is not None:
            what = f"flow {queue.name!r} gets a new start tag while {queue.waiting} requests wait"
            self._finding.add(what, *self._evidence(queue, entry))

    def _correct(self, entry: Entry, request: OpenRequest | None, v: float, rules: Rules) -> None:
        queue, change = self._flow_queue(entry.band, rules.flow_key(entry.flow)), entry.number
        after = None if queue.tag is None else queue.tag + change
        if not queue.waiting and queue.tag is not None and queue.tag <= v:
            # If the queue forgot the flow's finish tag, the correction applies to the request's own charge.
            charged = request.grant_entry.tag if request and request.grant_entry else None
            own = None if charged is None else min(charged + rules.share(entry), v) + change
            if entry.tag is not None and (own is None or same(entry.tag, own)):
                after = own
        self._adjust(queue, after, change, entry, v)

    def _adjust(self, queue: FlowQueue, after: float | None, change: float, entry: Entry, v: float) -> None:
        """Change the flow's charge by `change` and expect the tag `after` (None: unknown)."""
        self._services.check(queue, entry, v)
        self._expect(queue, after, entry)
        self._services.check(queue, entry, v, share=change, is_correction=True)

    def _expect(self, queue: FlowQueue, tag: float | None, entry: Entry) -> None:
        """Check that `entry` shows `tag` (None: unknown), then continue with the logged tag."""
        self._finding.checked += 1
        if entry.tag is None:
            return
        if tag is not None and not same(tag, entry.tag):
            what = f"tag of flow {queue.name!r} is {entry.tag:.12g}, expected {tag:.12g}"
            self._finding.add(what, *self._evidence(queue, entry))
            self._services.end(queue)
        self._set_tag(queue, entry.tag, entry)

    def _set_tag(self, queue: FlowQueue, tag: float, entry: Entry) -> None:
        queue.tag = tag
        self._tag_entries[queue.key] = entry
        self._bands.push(queue)

    def _end_service(self, queue: FlowQueue) -> None:
        """End the interval of a flow no longer backlogged. Drop flow queues with outdated tags."""
        self._services.end(queue)
        requests, flow_queues = self._replay.requests, self._replay.flow_queues
        if len(flow_queues) <= 2 * len(requests) + 1000:
            return
        charged = {request.queue_key for request in requests.values() if request.state in RUNNING}
        for each in flow_queues.all():
            v = self._bands.v(each.band)
            # The scripts also drop finish tags that the virtual time has passed.
            known = each.tag is not None and v is not None and each.tag <= v
            if each is not queue and not each.waiting and known and each.key not in charged:
                flow_queues.drop(each)
                self._tag_entries.pop(each.key, None)

    def _evidence(self, queue: FlowQueue, entry: Entry) -> list[Entry]:
        last = self._tag_entries.get(queue.key)
        return [last, entry] if last else [entry]

    def _flow_queue(self, band: int, name: str) -> FlowQueue:
        queue = self._replay.flow_queues.find((band, name))
        if queue is None:
            queue = self._replay.flow_queues.at((band, name))
            queue.tag = 0.0 if band in self._collected else self._new_tag
        return queue

    def _restart(self, entry: Entry, rules: Rules) -> None:
        """Begin new backlogged intervals under new settings: earlier service used other shares."""
        self._services.restart(lambda _, first_entry: rules.share(first_entry))
        for queue in self._replay.flow_queues.all():
            if queue.is_servable:
                self._services.begin(queue, entry, self._bands.v(queue.band))

    def _collect(self, band: int) -> None:
        self._bands.collect(band)
        self._collected.add(band)
        for queue in self._replay.flow_queues.of(band):
            self._services.end(queue)
            self._tag_entries.pop(queue.key, None)

    def _rebase(self, band: int, by: float) -> None:
        self._bands.rebase(band, by)
        for queue in self._replay.flow_queues.of(band):
            self._services.rebase(queue, by)

    def _forget_tags(self) -> None:
        self._new_tag = None
        self._collected.clear()
        self._bands.forget_flow_queues()
        for queue in self._replay.flow_queues.all():
            queue.tag = None
