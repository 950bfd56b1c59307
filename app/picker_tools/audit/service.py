"""G2 for one lane: the service it has had beside the virtual time of its band.

The bound is that of two flows f and g of a band, over every interval [s, e] in which both are backlogged:

    W_f − W_g <= c_f + c_g + debt_f(e) + debt_g(s) + claim_f(s) + claim_g(e)

W is dispatched service by weight (the sum of shares), corrections included; c the lane's largest share. With
v the band's virtual time and S a lane's start tag, debt = max(0, S − v − c) is service had out of turn (by
the guard, or estimated too low) and not yet worked off, claim = max(0, v − S) service still owed since a
charge was corrected downwards. Without guard and corrections both are 0: the bound of start-time fair
queueing.

To check it for all pairs, each lane is measured against v. With a = W − debt − v and b = W + claim − v the
left side less debts and claims is [a_f(e) − b_f(s)] + [a_g(s) − b_g(e)]. So it is enough that each lane has,
for all s <= e of a time it was backlogged, a(e) − b(s) <= c (never far ahead) and a(s) − b(e) <= c (never far
behind): a few operations a dispatch, whatever the number of lanes. a and b only fall between the lane's own
events, so just before and just after each of these is when to look.
"""

from dataclasses import dataclass

from picker_tools.audit.entry import Entry

ROUNDING = 1e-9  # of the sums, relative to their size


@dataclass(slots=True)
class Service:
    """A lane since it became backlogged at `since`. `had` is W since then."""

    since: Entry
    had: float
    claim: float
    low: float  # the least b
    high: float  # the greatest a

    @classmethod
    def begin(cls, since: Entry, tag: float, v: float, largest: float) -> "Service":
        claim = max(0.0, v - tag)
        debt = max(0.0, tag - v - largest)
        return cls(since, 0.0, claim, claim - v, -debt - v)

    def before(self, tag: float, v: float, largest: float) -> str:
        """Look just before an event of the lane. What is wrong, '' if nothing is."""
        # v moving on past a tag takes the turn from a lane; that makes no new claim, so it shows.
        self.claim = min(self.claim, max(0.0, v - tag))
        return self._look(tag, v, largest)

    def serve(self, share: float, tag: float, v: float, largest: float) -> str:
        """`share` was dispatched, and the tag is now `tag`. What is wrong, '' if nothing is."""
        self.had += share
        self.claim = min(self.claim, max(0.0, v - tag))
        return self._look(tag, v, largest)

    def correct(self, change: float, tag: float, v: float, largest: float) -> str:
        """The charge was changed after the fact. What is wrong, '' if nothing is."""
        self.had += change
        self.claim = max(0.0, v - tag)
        return self._look(tag, v, largest)

    def rebase(self, by: float) -> None:
        """All tags of the band, and v, are less by `by`."""
        self.low += by
        self.high += by

    def _look(self, tag: float, v: float, largest: float) -> str:
        debt = max(0.0, tag - v - largest)
        a, b = self.had - debt - v, self.had + self.claim - v
        slack = largest + ROUNDING * max(1.0, abs(v), abs(self.had))
        if a - self.low > slack:
            return f"{a - self.low:g} ahead of its band's virtual time; {largest:g} is the bound"
        if self.high - b > slack:
            return f"{self.high - b:g} behind its band's virtual time; {largest:g} is the bound"
        self.low, self.high = min(self.low, b), max(self.high, a)
        return ""
