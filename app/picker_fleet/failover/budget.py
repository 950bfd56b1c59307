"""A replica's part of the bound while there is no shared state. Pure.

The bound is money: placing a request spends its cost, hearing its end earns it. Whoever hears the end earns,
not whoever placed it, so nothing need be told to anyone: over all replicas (in flight + free) never grows
(docs/without-redis.md has the proof).
"""

import math

_RESIDUE = 1e-9  # of sums of fractions


class Purse:
    """`free` is what may still be spent, in the stock's unit. Below 0 it is a debt: ends pay that first."""

    def __init__(self, free: float) -> None:
        self.free = free

    def spend(self, amount: float) -> bool:
        """Take `amount` if it is there; nothing can be had by a debtor too."""
        if amount > 0 and self.free + _RESIDUE < amount:
            return False
        self.free -= amount
        return True

    def earn(self, amount: float) -> None:
        self.free += amount


def share(free: float, *, live: int, rank: int, whole: bool) -> float:
    """The part of `free` of one of `live` replicas, `rank` of them having lesser ids.

    `whole` (a stock of requests): whole places, of which those left over go to the least ids, one each; else
    an equal part.
    """
    if free <= 0:
        return 0.0
    if not whole:
        return free / max(live, 1)
    each, over = divmod(math.floor(free + _RESIDUE), max(live, 1))
    return float(each + (rank < over))
