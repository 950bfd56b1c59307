"""Where a lane begins that is owed nothing: at v, or a share later when too many have begun there.

Those that begin at v are counted like one flow of weight 1 (docs/fairness.md, "Flows without end").
"""

from picker_tools.audit.lanes import BANDS
from picker_tools.audit.replay import same

_NEWCOMERS = 100  # as in lua/lib/queue.lua


class Newcomers:
    def __init__(self, first: float | None) -> None:
        """`first` is what each band begins with; None: not known, so that either start is right."""
        self._charged: dict[int, float | None] = dict.fromkeys(BANDS, first)

    def rebase(self, band: int, by: float) -> None:
        charged = self._charged[band]
        self._charged[band] = None if charged is None else max(charged - by, 0.0)

    def start(self, band: int, v: float, share: float, shown: float | None) -> float:
        """The start tag of a lane whose next request costs it `share`; `shown` is what the log has."""
        charged = self._charged[band]
        if charged is None:
            return v + share if shown is not None and same(shown, v + share) else v
        ahead = max(charged, v)
        if ahead - v >= _NEWCOMERS * share:
            return v + share
        self._charged[band] = ahead + share
        return v
