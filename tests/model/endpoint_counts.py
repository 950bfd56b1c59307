"""Requests in flight on each endpoint, and of each limited flow."""

from collections.abc import Mapping

from lane_order import Request

CLOSED = 1e9  # what the scripts add to the count of an endpoint that takes nothing new


class EndpointCounts:
    """What drains or has left takes nothing new; what has left is forgotten when it is idle."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._listed: set[str] = set()
        self._open: set[str] = set()
        self._of_flow: dict[tuple[str, str], int] = {}  # flow and endpoint; endpoint '' for all

    @property
    def ready(self) -> int:
        return len(self._open)

    def publish(self, draining: Mapping[str, bool]) -> None:
        self._listed = set(draining)
        self._open = {address for address, drains in draining.items() if not drains}
        for address in self._listed - set(self.counts):
            self.counts[address] = 0
        for address in set(self.counts) - self._listed:
            self._forget_idle(address)

    def reserve(self, address: str) -> None:
        self.counts[address] = self.counts.get(address, 0) + 1

    def release(self, address: str) -> None:
        if self.counts.get(address, 0) > 0:
            self.counts[address] -= 1
            self._forget_idle(address)

    def _forget_idle(self, address: str) -> None:
        if self.counts[address] == 0 and address not in self._listed:
            del self.counts[address]

    def loads(self) -> dict[str, float]:
        return {a: count + (0 if a in self._open else CLOSED) for a, count in self.counts.items()}

    def options(self, r: Request, candidates: str) -> tuple[dict[str, int], bool]:
        """Where r may go, with its counts there; and, if nowhere, whether only its flow's limit is why."""
        among = self._open if candidates == "*" else self._open & set(candidates.split(","))
        free = {a for a in among if not r.limit or self._of_flow.get((r.flow, a), 0) < r.limit}
        return {address: self.counts[address] for address in free}, bool(among)

    def flow_full(self, r: Request) -> bool:
        """Whether as many of r's flow are granted or placed as its limit allows on all ready endpoints."""
        return r.limit > 0 and self._of_flow.get((r.flow, ""), 0) >= r.limit * self.ready

    def count_flow(self, r: Request, address: str, change: int) -> None:
        if r.limit:
            count = self._of_flow.pop((r.flow, address), 0) + change
            if count > 0:
                self._of_flow[r.flow, address] = count
