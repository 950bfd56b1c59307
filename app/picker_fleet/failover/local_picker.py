"""The choice of an endpoint where no script can make it: over the last snapshot and this replica's own
count."""

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.errors import NoEndpoints
from picker_fleet.request import InferenceRequest
from picker_fleet.scheduling.chooser import EndpointChooser
from picker_fleet.scheduling.explain import live_load_addresses

_FAILED_S = 10.0  # an endpoint that could not be connected to is left alone for so long


class LocalPicker:
    """Picks, and counts what runs where as far as this replica knows; `begin` before use."""

    def __init__(self, chooser: EndpointChooser, endpoints: SnapshotCell, clock: Callable[[], float]) -> None:
        self._chooser, self._endpoints, self._clock = chooser, endpoints, clock
        self._load: Counter[str] = Counter()
        self._failed: dict[str, float] = {}  # endpoint -> until when it is left alone

    def begin(self, load: Mapping[str, int]) -> None:
        """Count on from the fleet's `load` as it was last known."""
        self._load = Counter(load)

    def pick(self, request: InferenceRequest, *, most: int) -> tuple[str, ...]:
        """Where `request` goes, best first, at most `most`.

        Raises:
            NoEndpoints: none is ready that it may go to.
        """
        now_s = self._clock()
        self._failed = {address: until_s for address, until_s in self._failed.items() if until_s > now_s}
        endpoints = [each for each in self._endpoints.current.endpoints if each.ready]
        ready = {each.address for each in endpoints}
        # As far as this replica knows: what others begin and end meanwhile it does not hear.
        load = self._load
        full = {each.address for each in endpoints if load[each.address] >= (each.max_inflight or math.inf)}
        choice = self._chooser.choose(request)
        picked: tuple[str, ...] = ()
        for able in (ready - self._failed.keys() - full, ready - self._failed.keys(), ready):
            picked = picked or pick(
                choice.candidates,
                able,
                self._load,
                live_weight=self._chooser.live_weight,
                most=most,
                chance=random.random,
            )
        if not picked:
            self._chooser.refused(request, choice)
            raise NoEndpoints("no endpoint is ready that may serve this request", retry_after_s=1)
        live = ",".join(
            str(self._load.get(address, 0)) for address in live_load_addresses(choice.basis, picked)
        )
        self._chooser.placed(request, choice, picked, live)
        return picked

    def began(self, endpoint: str) -> None:
        self._load[endpoint] += 1

    def ended(self, endpoint: str) -> None:
        if self._load[endpoint] > 0:
            self._load[endpoint] -= 1

    def failed(self, endpoint: str) -> None:
        """It could not be connected to."""
        self._failed[endpoint] = self._clock() + _FAILED_S


def pick(
    candidates: str,
    ready: Collection[str],
    load: Mapping[str, int],
    *,
    live_weight: float,
    most: int,
    chance: Callable[[], float],
) -> tuple[str, ...]:
    """Up to `most` of `ready`, best first; equals in random order. Empty if none may be picked. Pure.

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
