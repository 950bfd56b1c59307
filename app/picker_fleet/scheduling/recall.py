"""The last choices, by request id: kept as they were made, explained only when somebody asks."""

from collections import OrderedDict
from typing import NamedTuple

from picker_fleet.scheduling.explain import Basis, Explanation, Unscored, explanation

_ADDRESS_BYTES = 24  # of a list of candidates, about


class _Kept(NamedTuple):
    """A tuple, since each request makes one and a frozen dataclass takes three times as long to make."""

    basis: Basis
    chosen: tuple[str, ...]
    live: str
    figures: int


class ExplanationRing:
    """The last picks by request id: at most `most` of them, holding at most `most_figures` scores and reasons
    (about 40 bytes each) in all. Keeping one costs a dictionary entry; `find` does the work."""

    def __init__(self, *, most: int = 1000, most_figures: int = 500_000) -> None:
        self._most = most
        self._most_figures = most_figures
        self._figures = 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, request_id: str, basis: Basis, chosen: tuple[str, ...], live: str = "") -> None:
        """Remember that `request_id` was given `chosen` (best first; none: refused), and the loads that the
        choice was made from (`scheduling.explain`); the last word on an id counts."""
        old = self._kept.pop(request_id, None)
        if old is not None:
            self._figures -= old.figures
        if isinstance(basis, Unscored):
            figures = (
                1 + len(basis.endpoints) + len(basis.in_flight) + len(basis.candidates) // _ADDRESS_BYTES
            )
        else:
            figures = len(basis.kept) * (len(basis.parts) + 2) + 2 * len(basis.excluded) + 1
        self._kept[request_id] = _Kept(basis, chosen, live, figures)
        self._figures += figures
        while len(self._kept) > self._most or (self._figures > self._most_figures and len(self._kept) > 1):
            _, gone = self._kept.popitem(last=False)
            self._figures -= gone.figures

    def find(self, request_id: str) -> Explanation | None:
        """Why `request_id` went where it went; None if that is not known any more."""
        kept = self._kept.get(request_id)
        return explanation(request_id, kept.basis, kept.chosen, kept.live) if kept else None
