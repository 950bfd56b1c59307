"""The choice of an endpoint where no script can make it: over the last snapshot and this replica's own
count. Pure."""

from collections.abc import Callable, Collection, Mapping


def pick(
    candidates: str,
    ready: Collection[str],
    load: Mapping[str, int],
    *,
    live_weight: float,
    most: int,
    chance: Callable[[], float],
) -> tuple[str, ...]:
    """Up to `most` of `ready`, best first; equals in random order. Empty if none may be picked.

    `candidates` are as `lua/lib/endpoints.lua` takes them: '*', 'a,b' (the least loaded) or 'a=0.7,b=0.5'
    (scores, to which the load's part of `live_weight` is added). `load`: requests in flight, as far as known.
    """
    scores: dict[str, float | None]
    if candidates == "*":
        scores = dict.fromkeys(ready)
    else:
        listed = (entry.partition("=") for entry in candidates.split(",") if entry)
        scores = {
            address: float(score) if score else None for address, _, score in listed if address in ready
        }
    top = max((load.get(address, 0) for address in scores), default=0) or 1

    def burden(address: str) -> float:
        score, count = scores[address], load.get(address, 0)
        return float(count) if score is None else live_weight * count / top - score

    return tuple(sorted(scores, key=lambda address: (burden(address), chance()))[:most])
