"""The bound of start-time fair queueing on the service of one member of an order (docs/fairness.md, G2)."""

from collections.abc import Callable
from dataclasses import dataclass

from picker_tools.audit.checks import Finding
from picker_tools.audit.log import Entry
from picker_tools.audit.nodes import INNER
from picker_tools.audit.replay import FlowQueue, Replay, RequestState

ROUNDING = 1e-9  # tolerance for rounding errors of sums, relative to the sums


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
    flows. a and b only fall between the flow's own events, so the check runs just before and just after each
    event. The field `served` is the service W since `since`.
    """

    since: Entry
    served: float
    claim: float
    low: float  # the least b
    high: float  # the greatest a

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
        # If the virtual time v passes the flow's tag, the flow missed its turn. A missed turn adds no claim,
        # so the bound is broken and reported.
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


class Services:
    """The service of each backlogged member of an order; reports every service beyond its bound.

    `order` gives the virtual time of a member's order (None: unknown, so nothing is checked), and by how much
    the log leaves the member's tag open.
    """

    def __init__(
        self, finding: Finding, replay: Replay, order: Callable[[FlowQueue], tuple[float | None, float]]
    ) -> None:
        self._finding = finding
        self._replay = replay
        self._order = order
        self._services: dict[tuple[int, str], Service] = {}

    def restart(self, share: Callable[[FlowQueue, Entry], float]) -> None:
        """End all intervals, because new settings change the shares; `share` gives a member's new share."""
        self.clear()
        for member in self._replay.flow_queues.all():
            member.largest = 0.0
        for request in self._replay.requests.values():
            if request.state is RequestState.QUEUED:
                for member in self._replay.flow_queues.at(request.queue_key).chain:
                    member.largest = max(member.largest, share(member, request.first_entry))

    def clear(self) -> None:
        self._services.clear()

    def begin(self, member: FlowQueue, since: Entry) -> None:
        """Record that `member` became backlogged at `since`."""
        v, slack = self._order(member)
        if v is not None and member.tag is not None:
            self._services[member.key] = Service.begin(since, member.tag, v, member.largest + slack)

    def end(self, member: FlowQueue) -> None:
        self._services.pop(member.key, None)

    def open(self) -> list[FlowQueue]:
        """The members whose service is recorded."""
        return [self._replay.flow_queues.at(key) for key in self._services]

    def check(
        self, member: FlowQueue, entry: Entry, *, share: float = 0.0, is_correction: bool = False
    ) -> None:
        """Check the service of `member` just before `entry`, or after `entry` dispatched its `share`, or
        corrected its charge by `share`."""
        service = self._services.get(member.key)
        v, slack = self._order(member)
        if service is None or v is None or member.tag is None:
            return
        self._finding.checked += 1
        wrong = service.add(share, member.tag, v, member.largest + slack, is_correction=is_correction)
        if wrong:
            what = f"service of {member.name.removesuffix(INNER)!r}, backlogged throughout, is {wrong}"
            self._finding.add(what, service.since, entry)
            self.end(member)

    def serve(self, member: FlowQueue, share: float, entry: Entry) -> None:
        """Record that `entry` dispatched `share` of `member`, whose interval may begin here."""
        if member.key in self._services:
            self.check(member, entry, share=share)
        else:
            self.begin(member, entry)

    def rebase(self, member: FlowQueue, by: float) -> None:
        if member.key in self._services:
            self._services[member.key].rebase(by)
