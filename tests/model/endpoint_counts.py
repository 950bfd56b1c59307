"""The model's counts of requests in flight, by endpoint and by limited flow."""

import math
from collections.abc import Collection, Mapping

from model_state import Request

Burden = tuple[bool, float]  # whether an endpoint is at its limit, and the endpoint's cost

CLOSED = 1e9  # the scripts add this to the count of an endpoint that takes no new requests


class EndpointCounts:
    """The endpoints of a stage (decode or prefill). Draining and removed endpoints take no new requests;
    removed endpoints without requests are forgotten. The stages of a pool share `marks`."""

    def __init__(self, marks: dict[tuple[str, str], int]) -> None:
        self.counts: dict[str, int] = {}
        self.marks = marks  # (drained, down or ejected; endpoint) -> time of the mark, ms
        self.marks_version = 0
        self.published: set[str] = set()  # the published endpoints of all stages
        self._counted: set[str] = set()  # the published endpoints whose requests this stage counts
        self.listed: set[str] = set()
        self._draining: set[str] = set()
        self._of_flow: dict[tuple[str, str], int] = {}  # (flow, endpoint or '' for all) -> requests

    @property
    def open(self) -> set[str]:
        """The endpoints that take new requests."""
        return self.listed - self._draining - {address for _, address in self.marks}

    def mark(self, what: str, on: bool, address: str, now_ms: int) -> bool:
        """Set or remove an endpoint's mark (drained, down, ejected); return False for an unknown endpoint."""
        if address not in self.published:
            return False
        before = set(self.marks)
        if on:
            self.marks[what, address] = now_ms
        else:
            self.marks.pop((what, address), None)
        self.marks_version += before != set(self.marks)
        return True

    @property
    def ejected(self) -> set[str]:
        return {address for what, address in self.marks if what == "ejected"}

    @property
    def only_ejected(self) -> set[str]:
        """The endpoints whose only reason to take no new requests is an ejection."""
        others = {address for what, address in self.marks if what != "ejected"}
        return self.ejected & self.listed - self._draining - others

    @property
    def ready(self) -> int:
        return len(self.open)

    def publish(self, draining: Mapping[str, bool], listed: set[str], counted: set[str]) -> None:
        """Publish all endpoints. The stage may use `listed`, and counts its requests on `counted`."""
        self.listed, self.published, self._counted = listed, set(draining), counted
        self._draining = {address for address, drains in draining.items() if drains}
        for what, address in list(self.marks):
            if address not in draining:
                del self.marks[what, address]
        for address in counted - set(self.counts):
            self.counts[address] = 0
        for address in set(self.counts) - counted:
            self._forget_idle(address)

    def reserve(self, address: str) -> None:
        self.counts[address] = self.counts.get(address, 0) + 1

    def release(self, address: str) -> None:
        if self.counts.get(address, 0) > 0:
            self.counts[address] -= 1
            self._forget_idle(address)

    def _forget_idle(self, address: str) -> None:
        if self.counts[address] == 0 and address not in self._counted:
            del self.counts[address]

    def loads(self) -> dict[str, float]:
        return {a: count + (0 if a in self.open else CLOSED) for a, count in self.counts.items()}

    def options(
        self,
        r: Request,
        named: Collection[str] | None,
        caps: Mapping[str, float],
        last_resort: bool = True,
    ) -> tuple[dict[str, int], bool, list[str]]:
        """Return three values: the endpoints among `named` (None: all) that may take r, with their requests
        in flight; if there are none, whether only limits prevent it; the endpoints at their limit in `caps`.
        As a `last_resort`, r may go to named endpoints that only an ejection keeps from taking requests."""
        if named is None:
            return self._options(r, self.open, caps)
        found = self._options(r, self.open.intersection(named), caps)
        if found[0] or found[1] or not last_resort:
            return found
        return self._options(r, self.only_ejected.intersection(named), caps)

    def _options(
        self, r: Request, among: set[str], caps: Mapping[str, float]
    ) -> tuple[dict[str, int], bool, list[str]]:
        free = {a for a in among if not r.limit or self._of_flow.get((r.flow, a), 0) < r.limit}
        closed = [a for a in free if a in caps and self.counts[a] >= caps[a]]
        return {address: self.counts[address] for address in free.difference(closed)}, bool(among), closed

    def places(self, caps: Mapping[str, float], granted: int) -> float:
        """The number of further grants until each open endpoint is at the limit that `caps` gives."""
        if not self.open <= caps.keys():
            return math.inf
        return sum(max(caps[a] - self.counts[a], 0) for a in self.open) - granted

    def flow_full(self, r: Request) -> bool:
        """Whether request r's flow has reached the flow's limit on all ready endpoints together."""
        return r.limit > 0 and self._of_flow.get((r.flow, ""), 0) >= r.limit * self.ready

    def count_flow(self, r: Request, address: str, change: int) -> None:
        if r.limit:
            count = self._of_flow.pop((r.flow, address), 0) + change
            if count > 0:
                self._of_flow[r.flow, address] = count


def read_candidates(text: str) -> tuple[list[str] | None, dict[str, float]]:
    """Parse text like 'a=0.7,b' into distinct addresses ('*' gives None: all) and their scores."""
    if text == "*":
        return None, {}
    pairs = [part.partition("=") for part in text.split(",") if part]
    scores = {address: float(score) for address, _, score in pairs if score}
    return list(dict.fromkeys(address for address, *_ in pairs)), scores


def burdens(
    counts: Mapping[str, int],
    scores: Mapping[str, float],
    live_weight: float,
    limits: Mapping[str, float],
    shares: Mapping[str, float],
) -> dict[str, Burden]:
    """The burden of each endpoint: a request goes to the least burdened one, or at last to one at its limit.

    With scores the burden is the weighted load minus the score; without scores it is the fraction of the
    endpoint's limit in flight (`shares`), or else the number of requests in flight.
    """
    most = max([1, *counts.values()])
    found = {}
    for address, count in counts.items():
        if scores:
            cost = live_weight * count / most - scores.get(address, 0.0)
        else:
            cost = shares.get(address, float(count))
        found[address] = (count >= limits.get(address, math.inf), round(cost, 9))
    return found
