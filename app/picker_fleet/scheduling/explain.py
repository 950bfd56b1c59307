"""Explains why a request was placed on its endpoint, or refused: candidates, scores, loads and reasons.

The chooser keeps choices as it made them; an explanation is computed only on request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Final, NamedTuple

from picker_fleet.domain.request import Endpoint
from picker_fleet.scheduling.scheduler import Ranking, apply_filters
from picker_fleet.scheduling.scorers import EndpointState, PickRequest

ANY_ENDPOINT: Final = "*"
_BY_SCORE = "highest `final`: the score with the live load in place of the load as last read; ties in turn"
_REFUSED = "no endpoint could take the request"
_BY_STATE = "the request names an id whose state this endpoint has"
_BY_LOAD = (
    "no scorers: the fewest in flight (`live`), relative to the limits that the fleet finds, ties in turn; "
    "endpoints whose `live` is null have no fewer, or were not compared"
)


class LeastLoadedPick(NamedTuple):
    """The basis of a choice that the script made alone: the pool's `endpoints`, and the requests in flight at
    each endpoint."""

    endpoints: tuple[Endpoint, ...]
    in_flight: Mapping[str, int]
    subset: tuple[str, ...] | None
    selector: Mapping[str, str]
    candidates: str
    has_state: bool = False  # the request names an id, and the only candidate has its state
    excluded: Mapping[str, str] = MappingProxyType({})  # address -> reason of an installed filter


PickBasis = Ranking | LeastLoadedPick


@dataclass(frozen=True, slots=True)
class ScoredCandidate:
    """One candidate of an explained pick.

    The field `score` is the total in [0, 1], and `parts` has each scorer's unweighted score (None and empty
    without scorers). The field `in_flight` is the load that the replica last read, `live` the load that the
    script compared, and `final` the total with `live` in place of `in_flight`. The fields `live` and `final`
    are None if the script did not report the load, or could not take the candidate (the flow is at its limit
    on this endpoint, or the endpoint has left).
    """

    address: str
    score: float | None
    parts: Mapping[str, float]
    in_flight: float
    live: float | None
    final: float | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """One pick: the `chosen` endpoints in the order of the answer (empty: the request was refused),
    `candidates` best first, the `excluded` endpoints with reasons, the soft filters that were `waived`, the
    scorers' normalised `weights`, and the `rule` that decided among the candidates. `stages` says why the
    request was split or not, '' if that was not asked; `prefillers` are the prefill endpoints, best first.
    `encoders` encode the request's media."""

    request_id: str
    chosen: tuple[str, ...]
    candidates: tuple[ScoredCandidate, ...]
    excluded: Mapping[str, str]
    waived: tuple[str, ...]
    weights: Mapping[str, float]
    rule: str
    stages: str = ""
    prefillers: tuple[str, ...] = ()
    encoders: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """The explanation as JSON-compatible values; numbers are rounded to four digits."""
        return {name: _rounded(value) for name, value in asdict(self).items()}

    def summary(self) -> dict[str, str]:
        """Fields of a log line: candidates as `address score/live`, and excluded endpoints with reasons."""
        stages = {"stages": self.stages, "prefillers": ", ".join(self.prefillers)}
        return {
            "candidates": ", ".join(
                f"{one.address} {_figure(one.score if one.final is None else one.final)}/{_figure(one.live)}"
                for one in self.candidates
            ),
            "excluded": ", ".join(f"{address} {why}" for address, why in self.excluded.items()),
            **(stages if self.stages else {}),
        }


def explain(request_id: str, basis: PickBasis, chosen: tuple[str, ...], live: str) -> Explanation:
    """Explain the choice of `chosen` on `basis`. `live`: the loads that the script compared, as
    `lua/place.lua` returns loads ('' for none)."""
    if isinstance(basis, LeastLoadedPick):
        explained = _explain_by_load(request_id, basis, chosen, live)
    else:
        explained = _explain_by_score(request_id, basis, chosen, live)
    return explained if chosen else replace(explained, rule=_REFUSED)


def live_load_addresses(basis: PickBasis, chosen: Sequence[str]) -> list[str]:
    """The endpoints whose loads the script returns, in the order of the script's reply."""
    if not isinstance(basis, LeastLoadedPick):
        return [candidate.address for candidate in basis.best]
    if basis.candidates == ANY_ENDPOINT:
        return list(chosen)
    return list(dict.fromkeys(basis.candidates.split(",")))


def live_loads(basis: PickBasis, chosen: Sequence[str], live: str) -> dict[str, float]:
    """The loads that the script compared, by address; `live` is the script's reply ('' for none)."""
    values = live.split(",") if live else []
    addresses = live_load_addresses(basis, chosen)
    return {address: float(load) for address, load in zip(addresses, values, strict=False) if load}


def _explain_by_score(request_id: str, ranking: Ranking, chosen: tuple[str, ...], live: str) -> Explanation:
    loads = live_loads(ranking, chosen, live)
    greatest = max([1.0, *loads.values()])
    bases = {candidate.address: candidate.base for candidate in ranking.best}
    rows = []
    for at, (endpoint, total) in enumerate(zip(ranking.eligible, ranking.totals, strict=True)):
        address, load = endpoint.address, loads.get(endpoint.address)
        # The final score is `live_weight` minus the cost in lua/lib/endpoints.lua, so that it compares with
        # the other scores.
        final = None if load is None else bases[address] + ranking.live_weight * (1 - load / greatest)
        parts = {name: scores[at] for name, scores in ranking.parts.items()}
        rows.append(ScoredCandidate(address, min(1.0, total), parts, endpoint.in_flight, load, final))
    # Keep the order of `best`, where ties are in random order; then append all other endpoints by score.
    position = {candidate.address: at for at, candidate in enumerate(ranking.best)}
    rows.sort(key=lambda row: (position.get(row.address, len(position)), -(row.score or 0.0)))
    return Explanation(
        request_id, chosen, tuple(rows), ranking.excluded, ranking.waived, ranking.weights, _BY_SCORE
    )


def _explain_by_load(
    request_id: str, basis: LeastLoadedPick, chosen: tuple[str, ...], live: str
) -> Explanation:
    loads = live_loads(basis, chosen, live)
    pick = PickRequest(None if basis.subset is None else frozenset(basis.subset), selector=basis.selector)
    filtered = apply_filters(
        pick,
        [
            EndpointState(
                endpoint.address,
                labels=endpoint.labels,
                draining=endpoint.draining or endpoint.drained,
                healthy=not (endpoint.down or endpoint.ejected),
                in_flight=float(basis.in_flight.get(endpoint.address, 0)),
            )
            for endpoint in basis.endpoints
        ],
    )
    rows = [
        ScoredCandidate(one.address, None, {}, one.in_flight, loads.get(one.address))
        for one in filtered.eligible
    ]
    position = {address: at for at, address in enumerate(chosen)}
    rows.sort(
        key=lambda row: (
            position.get(row.address, len(position)),
            row.live is None,
            row.in_flight if row.live is None else row.live,
        )
    )
    rule, excluded = _BY_LOAD, {**filtered.excluded, **basis.excluded}
    if basis.has_state:
        rule, excluded = _BY_STATE, dict.fromkeys(excluded, "lacks the state that the request names")
    return Explanation(request_id, chosen, tuple(rows), excluded, filtered.waived, {}, rule)


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def _figure(value: float | None) -> str:
    return "?" if value is None else f"{round(value, 4):g}"
