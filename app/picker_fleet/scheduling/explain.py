"""Why a request went where it went, or nowhere: what a choice was made from, put into words and numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from picker_fleet.endpoints.snapshot import Endpoint
from picker_fleet.scheduling.ask import PickAsk
from picker_fleet.scheduling.filters import sift
from picker_fleet.scheduling.scheduler import Ranking
from picker_fleet.scheduling.signals import Signals

ALL = "*"
_BY_SCORE = "highest `final`: the score with the live load in place of the load as last known; equals in turn"
_BY_LOAD = (
    "no scorers: the fewest in flight (`live`), equals in turn; who has null had no fewer, or was not asked"
)


class Unscored(NamedTuple):
    """What was known where the script alone chose: `endpoints` of the pool and what each had in flight."""

    endpoints: tuple[Endpoint, ...]
    in_flight: Mapping[str, int]
    subset: tuple[str, ...] | None
    selector: Mapping[str, str]
    candidates: str


Basis = Ranking | Unscored


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate with its total in [0, 1] and each scorer's unweighted part (None and empty without
    scorers), its load when it was looked at (requests in flight, as the replica last knew it), and the load
    that the choice was made from. `final` is the total with that load in it. None: not told, or the script
    could not take it (its flow is at its limit there, or it has just been taken out)."""

    address: str
    score: float | None
    parts: Mapping[str, float]
    in_flight: float
    live: float | None
    final: float | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """One pick: `chosen` endpoints in the order of the answer (none: it was refused), `candidates` best
    first, who was out and why, the soft filters that were waived, the weights (normalised) of the scorers,
    and the `rule` that decided among the candidates."""

    request_id: str
    chosen: tuple[str, ...]
    candidates: tuple[Scored, ...]
    excluded: Mapping[str, str]
    waived: tuple[str, ...]
    weights: Mapping[str, float]
    rule: str

    def to_dict(self) -> dict[str, object]:
        """Fit for JSON, scores rounded to four digits."""
        return {
            "request_id": self.request_id,
            "chosen": list(self.chosen),
            "candidates": [
                {
                    "address": one.address,
                    "score": _rounded(one.score),
                    "parts": {name: round(part, 4) for name, part in one.parts.items()},
                    "in_flight": one.in_flight,
                    "live": one.live,
                    "final": _rounded(one.final),
                }
                for one in self.candidates
            ],
            "excluded": dict(self.excluded),
            "waived": list(self.waived),
            "weights": {name: round(weight, 4) for name, weight in self.weights.items()},
            "rule": self.rule,
        }

    def summary(self) -> dict[str, str]:
        """As fields of a log line: the candidates, each as `address score/live`, and who was out and why."""
        return {
            "candidates": ", ".join(
                f"{one.address} {_word(one.score if one.final is None else one.final)}/{_word(one.live)}"
                for one in self.candidates
            ),
            "excluded": ", ".join(f"{address} {why}" for address, why in self.excluded.items()),
        }


def explanation(request_id: str, basis: Basis, chosen: tuple[str, ...], live: str) -> Explanation:
    """What `basis` says of a request that was given `chosen`; `live` are the loads that the choice was made
    from, as `lua/place.lua` gives them ('' for none)."""
    if isinstance(basis, Unscored):
        return _by_load(request_id, basis, chosen, live)
    return _by_score(request_id, basis, chosen, live)


def named(basis: Basis, chosen: Sequence[str]) -> list[str]:
    """The endpoints that loads are given of, in that order."""
    if not isinstance(basis, Unscored):
        return [candidate.address for candidate in basis.best]
    return list(chosen) if basis.candidates == ALL else list(dict.fromkeys(basis.candidates.split(",")))


def _by_score(request_id: str, ranking: Ranking, chosen: tuple[str, ...], live: str) -> Explanation:
    loads = _loads(named(ranking, chosen), live)
    most = max([1.0, *loads.values()])
    bases = {candidate.address: candidate.base for candidate in ranking.best}
    rows = []
    for at, (endpoint, total) in enumerate(zip(ranking.kept, ranking.totals, strict=True)):
        address, load = endpoint.address, loads.get(endpoint.address)
        # As the script reckons it (lua/lib/endpoints.lua), put so that it is a score like the others.
        final = None if load is None else bases[address] + ranking.live_weight * (1 - load / most)
        parts = {name: scores[at] for name, scores in ranking.parts.items()}
        rows.append(Scored(address, min(1.0, total), parts, endpoint.in_flight, load, final))
    # The ranking drew lots among equals: its order first, then the ones it left out.
    place = {candidate.address: at for at, candidate in enumerate(ranking.best)}
    rows.sort(key=lambda row: (place.get(row.address, len(place)), -(row.score or 0.0)))
    return Explanation(
        request_id, chosen, tuple(rows), ranking.excluded, ranking.waived, ranking.weights, _BY_SCORE
    )


def _by_load(request_id: str, seen: Unscored, chosen: tuple[str, ...], live: str) -> Explanation:
    loads = _loads(named(seen, chosen), live)
    ask = PickAsk(None if seen.subset is None else frozenset(seen.subset), selector=seen.selector)
    sifted = sift(
        ask,
        [
            Signals(
                endpoint.address,
                labels=endpoint.labels,
                draining=endpoint.draining or endpoint.drained,
                healthy=not endpoint.down,
                in_flight=float(seen.in_flight.get(endpoint.address, 0)),
            )
            for endpoint in seen.endpoints
        ],
    )
    rows = [Scored(one.address, None, {}, one.in_flight, loads.get(one.address)) for one in sifted.kept]
    rank = {address: at for at, address in enumerate(chosen)}
    rows.sort(
        key=lambda row: (
            rank.get(row.address, len(rank)),
            row.live is None,
            row.in_flight if row.live is None else row.live,
        )
    )
    return Explanation(request_id, chosen, tuple(rows), sifted.excluded, sifted.waived, {}, _BY_LOAD)


def _loads(addresses: Sequence[str], live: str) -> dict[str, float]:
    told = live.split(",") if live else []
    return {address: float(load) for address, load in zip(addresses, told, strict=False) if load}


def _rounded(score: float | None) -> float | None:
    return None if score is None else round(score, 4)


def _word(figure: float | None) -> str:
    return "?" if figure is None else f"{round(figure, 4):g}"
