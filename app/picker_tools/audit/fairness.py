"""The check of G2 (fairness): each turn goes to the least start tag, each dispatch advances the tags of its
flow and of the flow's ancestors by its share, and siblings' services differ by a bounded amount.

Each band is a tree whose leaves are flows. With tenants its inner nodes are tenants; without tenants, flows
are the children of the root. The scripts use hierarchical start-time fair queueing (Goyal, Guo, Vin, OSDI
1996). While two siblings are both backlogged and not throttled, the bound for them is the same as for two
flows of a band (docs/fairness.md, G2).

The log shows the virtual time of each band and the start tags of leaves. The check computes the tags of inner
nodes from the dispatched service, and recomputes start tags by the rules of docs/fairness.md. The check is
independent on purpose: it shares no code with the queue that it checks.
"""

import heapq

from picker_tools.audit.checks import Check, Finding
from picker_tools.audit.flow_queues import FlowQueue, Level, Service
from picker_tools.audit.log import GUARD, Entry
from picker_tools.audit.nodes import INNER, ROOT
from picker_tools.audit.replay import (
    RUNNING,
    OpenRequest,
    Replay,
    RequestState,
    Rules,
    Step,
    same,
)

_FRESH = float("-inf")  # the tag of a member that owes nothing for earlier service
_FREE_STARTS = 100  # the same number as NEWCOMERS in lua/lib/flows.lua
_LEAST_WEIGHT, _MOST_WEIGHT = 0.001, 1e6
_KEPT_US = 10_000_000  # the scripts keep the tags of an idle node's children for at least this long
_NO_TURNS = frozenset({"tuned", "tenant", "topped_up", "charged", "refunded", "used"})


class Fairness(Check):
    """Checks G2. If a tag is unknown (the log begins midway, or the order changed), the check takes it from
    the next entry that shows it. A change of settings begins a new interval for every member (flow, tenant).
    """

    PROMISE = "G2"
    TITLE = "the least start tag is next; service is within the bound of fair queueing"

    def __init__(self, finding: Finding, replay: Replay) -> None:
        super().__init__(finding, replay)
        self._complete = replay.complete  # whether the log has shown all service so far
        self._collected: set[int] = set()  # bands that have begun anew since all tags were unknown
        self._is_forgotten = False
        self._has_dropped = False
        self._idle: dict[int, bool] = {}  # band -> whether nothing has waited or run since its last entry
        self._settings: tuple[Rules | None, int] = (None, 0)

    def check(self, step: Step) -> None:
        entry, replay = step.entry, self._replay
        if entry.event in _NO_TURNS:
            return
        if not replay.settled or replay.rules is None:
            self._forget()
            return
        self._is_forgotten = False
        if entry.event == "rebased" and entry.tag is not None:
            self._rebase(entry.band, entry.tag)
        if entry.event == "collected":
            self._collect(entry.band)
            return
        if (replay.rules, replay.nodes.version) != self._settings:
            self._restart(entry, replay.rules)
        self._follow_band(entry)
        self._follow_member(step, replay.rules)
        self._show_band(entry)

    def close(self) -> None:
        """Check the service of every member that is still backlogged."""
        if self._replay.last is not None:
            for member in self._replay.flow_queues.all():
                self._check_service(member, self._replay.last)

    def _follow_member(self, step: Step, rules: Rules) -> None:
        entry, request, flow_queues = step.entry, step.request, self._replay.flow_queues
        key = entry.band, rules.flow_key(entry.flow)
        if entry.event == "throttled":
            self._throttle(flow_queues.at(key), entry)
        elif entry.event == "unthrottled":
            self._unthrottle(flow_queues.at(key), entry)
        elif entry.event == "corrected":
            self._correct(flow_queues.at(key), request, entry)
        elif request is None:
            return
        elif step.enters_queue:
            self._enter(flow_queues.at(key), entry)
        elif step.leaves_queue:
            queue = flow_queues.at(request.queue_key)
            if step.after is RequestState.GRANTED:
                self._serve(queue, entry)
            if queue.waiting == 1:
                self._leave(queue, entry)

    # Check the virtual time of a band, which each entry of the band shows.

    def _follow_band(self, entry: Entry) -> None:
        """Follow the sweep of an idle pool, which sets the band's virtual time to the highest tag, so that
        all members of the band start equal."""
        root = self._level(self._root(entry.band))
        was_idle = self._idle.get(entry.band, False)
        idle = entry.stock == 0 and entry.queued == 0
        for band in {*self._idle, entry.band}:
            self._idle[band] = idle or (self._idle.get(band, False) and band != entry.band)
        if root.v is None or not was_idle or entry.v <= root.v:
            return
        members = self._children(self._root(entry.band))
        is_known = self._complete and not any(each.slack for each in members)
        highest = max((each.tag for each in members if each.tag is not None), default=0.0)
        if is_known and not same(highest, entry.v):
            return  # `_show_band` reports the virtual time
        root.v = entry.v
        for each in members:
            each.slack = 0.0

    def _show_band(self, entry: Entry) -> None:
        """Check the band's virtual time after the decision that `entry` reports."""
        root = self._level(self._root(entry.band))
        expected, root.v = root.v, entry.v
        if expected is not None and not same(expected, entry.v) and not root.slack:
            what = f"virtual time of band {entry.band} is {entry.v:g}, expected {expected:g}"
            self._finding.add(what, entry)

    # Follow events of members (flows and tenants).

    def _enter(self, leaf: FlowQueue, entry: Entry) -> None:
        for each in leaf.chain:
            each.largest = max(each.largest, self._share(each, entry))
        is_requeued = entry.event == "requeued"
        if not leaf.waiting:
            shown = entry.tag
            if shown is None:
                self._finding.add(f"flow {leaf.name!r} becomes backlogged and shows no tag", entry)
            elif is_requeued:
                shown += self._share(leaf, entry)
            self._start(leaf, entry, shown)
        elif entry.tag is not None and not is_requeued:
            what = f"flow {leaf.name!r} gets a new start tag while {leaf.waiting} requests wait"
            self._finding.add(what, *self._evidence(leaf, entry))
        if is_requeued:  # the request returns to its position in the queue, and its charge is refunded
            for each in leaf.chain:
                self._adjust(each, -self._share(each, entry), entry)
            self._expect(leaf, entry)

    def _start(self, member: FlowQueue, entry: Entry, shown: float | None) -> None:
        """Record that a request makes `member`, and perhaps its ancestors, backlogged."""
        while member.parent is not None:
            parent = member.parent
            level, share = self._level(parent), self._share(member, entry)
            self._expire(parent, level, entry)
            if level.v is None and level.new_tag == _FRESH:
                level.v = level.charged = shown or 0.0
            if shown == 0 and level.v and not parent.ordered and parent.parent is not None:
                # The scripts have forgotten the idle node, and so the tags of its children.
                level.v, level.charged, level.new_tag = 0.0, 0.0, _FRESH
                for each in self._children(parent):
                    each.tag = each.tag if each.throttled else _FRESH
            tag = self._tag(member, level)
            if level.v is None or tag is None:
                start = shown
            elif tag > level.v:
                start = tag
            elif level.charged is None:
                start = shown
                if parent.parent is None and shown is not None and not same(shown, level.v + share):
                    start = level.v
            else:
                reached = max(level.charged, level.v)
                start = level.v
                if reached - level.v >= _FREE_STARTS * share:
                    start = level.v + share
                else:
                    level.charged, level.changed_us = reached + share, entry.time_us
            self._set_start(member, level, start, shown, entry)
            shown = None
            if parent.ordered or parent.throttled:
                return
            member = parent

    def _set_start(
        self, member: FlowQueue, level: Level, start: float | None, shown: float | None, entry: Entry
    ) -> None:
        assert member.parent is not None
        if member.tag is None or start is None:
            member.slack = 0.0
        else:
            member.slack = max(0.0, member.tag + member.slack - start)
        level.slack = max(level.slack if member.parent.ordered else 0.0, member.slack)
        self._set_tag(member, start)
        if shown is not None:
            self._expect(member, entry, shown)
        self._begin(member, entry)

    def _serve(self, leaf: FlowQueue, entry: Entry) -> None:
        blocked, is_turn = leaf.throttled_by, entry.by != GUARD
        if blocked is not None:
            what = f"flow {leaf.name!r} served while {blocked.name.removesuffix(INNER)!r} is throttled"
            self._finding.add(what, *self._evidence(blocked, entry))
        share = self._share(leaf, entry)
        if entry.note and not same(entry.number, share):
            self._finding.add(f"flow {leaf.name!r} charged {entry.note}, but its share is {share:g}", entry)
        self._expect(leaf, entry)
        for member in leaf.chain:
            assert member.parent is not None
            level, share = self._level(member.parent), self._share(member, entry)
            member.largest = max(member.largest, share)
            is_unsure = member.tag is None or level.slack > 0
            if is_unsure and member.parent.parent is None and is_turn and entry.v > (level.v or 0.0):
                member.tag = entry.v  # the band's virtual time shows the tag
            self._check_service(member, entry)
            if member.tag is None:
                continue
            if is_turn:
                self._check_turn(member, member.tag, level, entry)
            if is_turn and (level.v is None or member.tag > level.v):
                level.v, level.changed_us = member.tag, entry.time_us
            self._set_tag(member, member.tag + share, entry)
            if member.service is None:
                self._begin(member, entry)
            else:
                self._check_service(member, entry, share=share)

    def _check_turn(self, member: FlowQueue, tag: float, level: Level, entry: Entry) -> None:
        """Check that no sibling that takes turns precedes `member`, which `entry` serves at `tag`."""
        heap = level.heap
        while heap and not level.slack:
            least, name = heap[0]
            first = self._replay.flow_queues.find((member.band, name))
            if first is None or not first.is_servable or first.tag != least:
                heapq.heappop(heap)
                continue
            is_tie = least != tag and same(least, tag)
            if first is not member and (least, name) < (tag, member.name) and not is_tie:
                what = f"{_named(member)} served at tag {tag:g} while {_named(first)} waits at {least:g}"
                self._finding.add(what, *self._evidence(first, entry))
            return

    def _leave(self, member: FlowQueue, entry: Entry) -> None:
        """Remove `member` from its parent's order, and each ancestor that has no other child in order."""
        while member.parent is not None and member.is_servable:
            self._check_service(member, entry)
            member.service = None
            if member.parent.ordered > 1:
                break
            member = member.parent
        self._drop_idle()

    def _throttle(self, member: FlowQueue, entry: Entry) -> None:
        self._check_service(member, entry)
        self._expect(member, entry)
        self._leave(member, entry)

    def _unthrottle(self, throttled: FlowQueue, entry: Entry) -> None:
        """Let `throttled`, and each ancestor without another child in order, take turns again, without the
        missed turns."""
        for member in throttled.chain:
            assert member.parent is not None
            level = self._level(member.parent)
            tag = self._tag(member, level)
            self._set_tag(member, None if tag is None or level.v is None else max(level.v, tag))
            if member is throttled:
                self._expect(member, entry)
            self._begin(member, entry)
            if member.parent.ordered or member.parent.throttled:
                return

    def _correct(self, leaf: FlowQueue, request: OpenRequest | None, entry: Entry) -> None:
        for member in leaf.chain:
            assert member.parent is not None
            level, change = self._level(member.parent), entry.number
            if member is not leaf:
                change *= self._share(member, entry) / self._share(leaf, entry)
            self._set_tag(member, self._tag(member, level))
            is_idle = not (member.is_servable or member.throttled)
            if is_idle and member.tag is not None and level.v is not None and member.tag <= level.v:
                # If the scripts have forgotten the tag, they correct the virtual time, or a lesser tag that
                # the request's own charge has left.
                if member is leaf and member.parent.parent is None:
                    charged = request.grant_entry.tag if request and request.grant_entry else None
                    own = None if charged is None else min(charged + self._share(leaf, entry), level.v)
                    if own is None or (entry.tag is not None and same(entry.tag, own + change)):
                        member.tag = own
                else:
                    member.slack = max(member.slack, level.v - max(member.tag, 0.0))
                if member.tag == _FRESH:
                    member.tag = level.v
            self._adjust(member, change, entry)
        self._expect(leaf, entry)

    def _adjust(self, member: FlowQueue, change: float, entry: Entry) -> None:
        """Change the tag of `member` by `change`, since its charge has changed."""
        if member.tag is None:
            return
        self._check_service(member, entry)
        self._set_tag(member, member.tag + change)
        self._check_service(member, entry, share=change, is_correction=True)

    def _expect(self, member: FlowQueue, entry: Entry, shown: float | None = None) -> None:
        """Check that `entry` (or `shown`) has the tag of `member`, then continue with the logged tag."""
        self._finding.checked += 1
        shown = entry.tag if shown is None else shown
        if shown is None:
            self._finding.add(f"the entry {entry.event} of {_named(member)} shows no tag", entry)
            return
        slack, member.slack = member.slack, 0.0
        if member.parent is not None:
            slack = max(slack, self._level(member.parent).slack)
        if member.tag is not None and not slack and not same(member.tag, shown):
            what = f"tag of {_named(member)} is {shown:.12g}, expected {member.tag:.12g}"
            self._finding.add(what, *self._evidence(member, entry))
            member.service = None
        self._set_tag(member, shown, entry)

    @staticmethod
    def _evidence(member: FlowQueue, entry: Entry) -> list[Entry]:
        return [member.tag_entry, entry] if member.tag_entry else [entry]

    # Check the service of members.

    def _begin(self, member: FlowQueue, since: Entry) -> None:
        """Record that `member` became backlogged at `since`."""
        v, slack = self._order(member)
        if v is not None and member.tag is not None:
            member.service = Service.begin(since, member.tag, v, member.largest + slack)

    def _check_service(
        self, member: FlowQueue, entry: Entry, *, share: float = 0.0, is_correction: bool = False
    ) -> None:
        """Check the service of `member` just before `entry`, or, with a `share`, after `entry` dispatched
        that share or corrected the member's charge by it."""
        service = member.service
        v, slack = self._order(member)
        if service is None or v is None or member.tag is None:
            return
        self._finding.checked += 1
        wrong = service.add(share, member.tag, v, member.largest + slack, is_correction=is_correction)
        if wrong:
            what = f"service of {member.name.removesuffix(INNER)!r}, backlogged throughout, is {wrong}"
            self._finding.add(what, service.since, entry)
            member.service = None

    # Follow tags.

    def _order(self, member: FlowQueue) -> tuple[float | None, float]:
        """The virtual time and the slack of the order to which `member` belongs."""
        if member.parent is None:
            return None, 0.0
        level = self._level(member.parent)
        return level.v, level.slack

    def _root(self, band: int) -> FlowQueue:
        return self._replay.flow_queues.at((band, ROOT))

    def _level(self, parent: FlowQueue) -> Level:
        if parent.level is None:
            all_known = self._complete or parent.band in self._collected
            known = 0.0 if all_known and (parent.name == ROOT or not self._has_dropped) else None
            parent.level = Level(known, known, _FRESH if all_known else None)
        return parent.level

    def _tag(self, member: FlowQueue, level: Level) -> float | None:
        return level.new_tag if member.tag is None else member.tag

    def _set_tag(self, member: FlowQueue, tag: float | None, entry: Entry | None = None) -> None:
        """Set the tag of `member` in its parent's order; `entry`: the log entry that shows or explains it."""
        member.tag = tag
        if entry is not None:
            member.tag_entry = entry
        if tag is None or member.parent is None:
            return
        heap = self._level(member.parent).heap
        heapq.heappush(heap, (tag, member.name))
        if len(heap) > 4 * len(self._replay.flow_queues) + 64:
            children = self._children(member.parent)
            heap[:] = [(each.tag, each.name) for each in children if each.tag is not None]
            heapq.heapify(heap)

    def _children(self, parent: FlowQueue) -> list[FlowQueue]:
        return [each for each in self._replay.flow_queues.of(parent.band) if each.parent is parent]

    def _expire(self, parent: FlowQueue, level: Level, entry: Entry) -> None:
        """Allow for tags that the scripts may have forgotten, since a node's children were idle for long."""
        if parent.ordered or parent.parent is None or level.v is None:
            return
        if entry.time_us - level.changed_us <= _KEPT_US:
            return
        for each in self._children(parent):
            if each.tag is not None and each.tag > level.v and not each.throttled:
                each.slack += each.tag - level.v
                each.tag = level.v

    def _share(self, member: FlowQueue, entry: Entry) -> float:
        """The share that the request in `entry` charges to `member`."""
        rules = self._replay.rules
        assert rules is not None
        if not rules.separator or rules.fairness == "round-robin":
            return rules.share(entry)
        weight = self._replay.nodes.find(member.name.removesuffix(INNER), rules.separator).weight
        if weight is None:
            return entry.cost if member.is_inner else rules.share(entry)
        return entry.cost / min(max(weight, _LEAST_WEIGHT), _MOST_WEIGHT)

    def _forget(self) -> None:
        """Treat all tags as unknown from here on: entries were not checked, or flow queues changed places."""
        if self._is_forgotten:
            return
        self._is_forgotten, self._complete = True, False
        self._collected.clear()
        for queue in self._replay.flow_queues.all():
            queue.tag, queue.slack, queue.service, queue.level = None, 0.0, None, None

    def _restart(self, entry: Entry, rules: Rules) -> None:
        """Begin new backlogged intervals under new settings, since earlier service used other shares."""
        before, _ = self._settings
        self._settings = rules, self._replay.nodes.version
        if before is not None and before.separator != rules.separator:
            self._forget()
        flow_queues = self._replay.flow_queues
        for queue in flow_queues.all():
            queue.service, queue.largest = None, 0.0
        for request in self._replay.requests.values():
            if request.state is RequestState.QUEUED:
                for member in flow_queues.at(request.queue_key).chain:
                    member.largest = max(member.largest, self._share(member, request.first_entry))
        for queue in flow_queues.all():
            if queue.is_servable:
                self._begin(queue, entry)

    def _collect(self, band: int) -> None:
        """Forget band number `band`, which is unused; the next band with this number starts at time 0."""
        self._collected.add(band)
        for queue in self._replay.flow_queues.of(band):
            queue.tag, queue.tag_entry, queue.slack = _FRESH, None, 0.0
            queue.service = queue.level = None
        self._idle.pop(band, None)

    def _rebase(self, band: int, by: float) -> None:
        """Lower the tags of the band's children by `by`; the differences of tags stay the same."""
        root = self._level(self._root(band))
        root.v = None if root.v is None else root.v - by
        root.charged = None if root.charged is None else max(root.charged - by, 0.0)
        root.heap.clear()
        for queue in self._children(self._root(band)):
            if queue.tag is not None:
                self._set_tag(queue, queue.tag - by)
                if queue.service is not None:
                    queue.service.rebase(by)

    def _drop_idle(self) -> None:
        """If there are many flows and tenants, drop members whose tags have no effect, as the scripts do."""
        requests, flow_queues = self._replay.requests, self._replay.flow_queues
        if len(flow_queues) <= 8 * len(requests) + 1000:
            return
        charged = {
            each.key
            for request in requests.values()
            if request.state in RUNNING
            for each in flow_queues.at(request.queue_key).chain
        }
        for each in reversed(flow_queues.all()):
            if each.parent is None or each.waiting or each.children or each.key in charged:
                continue
            level = self._level(each.parent)
            if level.v is not None and each.tag is not None and each.tag <= level.v:
                flow_queues.drop(each)
                self._has_dropped = True


def _named(member: FlowQueue) -> str:
    return f"{'tenant' if member.is_inner else 'flow'} {member.name.removesuffix(INNER)!r}"
