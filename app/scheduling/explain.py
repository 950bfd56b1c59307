"""Why a request went where it went: kept for the last requests, worked out only when somebody asks."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from app.scheduling.scheduler import Ranking


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate with its total in [0, 1] and each scorer's unweighted part, its load when it was looked at
    (requests in flight, as the replica last knew it), and the load the script found (None: not told)."""

    address: str
    score: float
    parts: Mapping[str, float]
    in_flight: float
    live: float | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """One pick: `chosen` endpoints in the order of the answer, `candidates` best first, who was out and why,
    the soft filters that were waived, and the weights (normalised) of the scorers."""

    request_id: str
    chosen: tuple[str, ...]
    candidates: tuple[Scored, ...]
    excluded: Mapping[str, str]
    waived: tuple[str, ...]
    weights: Mapping[str, float]

    def to_dict(self) -> dict[str, object]:
        """Fit for JSON, scores rounded to four digits."""
        return {
            "request_id": self.request_id,
            "chosen": list(self.chosen),
            "candidates": [
                {
                    "address": one.address,
                    "score": round(one.score, 4),
                    "parts": {name: round(part, 4) for name, part in one.parts.items()},
                    "in_flight": one.in_flight,
                    "live": one.live,
                }
                for one in self.candidates
            ],
            "excluded": dict(self.excluded),
            "waived": list(self.waived),
            "weights": {name: round(weight, 4) for name, weight in self.weights.items()},
        }


@dataclass(frozen=True, slots=True)
class _Kept:
    ranking: Ranking
    chosen: tuple[str, ...]
    live: Mapping[str, float]
    figures: int


def explanation(
    request_id: str, ranking: Ranking, chosen: tuple[str, ...], live: Mapping[str, float]
) -> Explanation:
    """What `ranking` says of a request that was given `chosen`; `live` is the load the script found."""
    rows = [
        Scored(
            endpoint.address,
            min(1.0, total),
            {name: scores[at] for name, scores in ranking.parts.items()},
            endpoint.in_flight,
            live.get(endpoint.address),
        )
        for at, (endpoint, total) in enumerate(zip(ranking.kept, ranking.totals, strict=True))
    ]
    # The ranking drew lots among equals: its order first, then the ones it left out.
    place = {candidate.address: at for at, candidate in enumerate(ranking.best)}
    rows.sort(key=lambda row: (place.get(row.address, len(place)), -row.score))
    return Explanation(request_id, chosen, tuple(rows), ranking.excluded, ranking.waived, ranking.weights)


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

    def keep(
        self,
        request_id: str,
        ranking: Ranking,
        chosen: tuple[str, ...],
        live: Mapping[str, float] | None = None,
    ) -> None:
        """Remember that `request_id` was given `chosen` (best first); the last word on an id counts."""
        old = self._kept.pop(request_id, None)
        if old is not None:
            self._figures -= old.figures
        figures = len(ranking.kept) * (len(ranking.parts) + 2) + 2 * len(ranking.excluded) + 1
        self._kept[request_id] = _Kept(ranking, chosen, live or {}, figures)
        self._figures += figures
        while len(self._kept) > self._most or (self._figures > self._most_figures and len(self._kept) > 1):
            _, gone = self._kept.popitem(last=False)
            self._figures -= gone.figures

    def find(self, request_id: str) -> Explanation | None:
        """Why `request_id` went where it went; None if that is not known any more."""
        kept = self._kept.get(request_id)
        return explanation(request_id, kept.ranking, kept.chosen, kept.live) if kept else None
