"""The bound of start-time fair queueing on the service of one member of an order (docs/fairness.md, G2)."""

from dataclasses import dataclass

from picker_tools.audit.log import Entry

FREE_STARTS = 100  # NEWCOMERS in lua/lib/flows.lua
ROUNDING = 1e-9  # tolerance for rounding errors of sums, relative to the sums


@dataclass(slots=True)
class Service:
    """The service of one flow since it became backlogged at `since`, measured against the virtual time of its
    order: of its band, or in a tree of the node above.

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
    event. The field `served` is W since `since`.
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

    def before(self, tag: float, v: float, largest: float) -> str:
        """Check just before an event of the flow. Returns a description of the violation, or ''."""
        # If the virtual time v passes the flow's tag, the flow missed its turn. A missed turn adds no claim,
        # so the check reports it.
        self.claim = min(self.claim, max(0.0, v - tag))
        return self._check_service(tag, v, largest)

    def serve(self, share: float, tag: float, v: float, largest: float) -> str:
        """Record a dispatch of `share` that moved the tag to `tag`. Returns the violation, or ''."""
        self.served += share
        self.claim = min(self.claim, max(0.0, v - tag))
        return self._check_service(tag, v, largest)

    def correct(self, change: float, tag: float, v: float, largest: float) -> str:
        """Record a correction of the flow's charge by `change`. Returns the violation, or ''."""
        self.served += change
        self.claim = max(0.0, v - tag)
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
