"""Compares the prefix index with the caches that engines report, and shares the corrections.

Answers are the best source: the placing replica keeps the ranks of a prompt's blocks until the request ends,
and compares the answer's cached tokens (`PrefixFeedback`). In some modes the end of a request may reach
another replica; such a request teaches nothing. So a fleet learns from a part of its requests, which is
enough. Where answers do not report cached tokens, the counters on the engine's page show cached tokens, less
precisely (`CacheWatch`). The watch also notices that an engine has restarted. Both classes share their
corrections through the stream of routes, so that all replicas correct their indexes alike.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from picker_fleet.domain.rates import Rates
from picker_fleet.domain.request import Completion, InferenceRequest
from picker_fleet.endpoints.readings import ASLEEP, EndpointMetrics, MetricsCache
from picker_fleet.scheduling.endpoint_history import BLOCK_BYTES, MAX_PROMPT_BYTES, Predicted
from picker_fleet.scheduling.engine_cache import Expectation, evidence_of
from picker_fleet.scheduling.route_stream import EvidenceRecord, LossRecord, RouteStream

# Most requests a second whose answers one replica compares, at a cost of about 50 µs each.
_ANSWERS_A_SECOND: Final = 50.0
_MOST_PENDING = 4096  # maximum requests whose answers are awaited; beyond, the oldest are dropped
_BYTES_PER_TOKEN = (1.0, 16.0)  # outside this range a prompt has images or token ids: ignore its tokens
_LEAST_QUERIES = 50_000.0  # tokens looked up between two comparisons of an engine's counters
_UNEQUAL = 0.1  # measured and predicted shares of hits agree if they differ by a smaller fraction
_LEAST_RATIO = 0.6  # a page lowers a capacity at most to this fraction: less would look like a cleared cache
_SAME_START_S = 1.0


class _Pending(NamedTuple):
    address: str
    expected: Expectation
    prompt_bytes: int


class PrefixFeedback:
    """Compares the cached tokens of answers with the index of `routes`. One event loop; `clock` is in
    seconds."""

    def __init__(self, routes: RouteStream, clock: Callable[[], float]) -> None:
        self._routes = routes
        self._rates = Rates(_ANSWERS_A_SECOND, 2 * _ANSWERS_A_SECOND, 1, clock)
        self._pending: dict[str, _Pending] = {}  # request id -> its placement; oldest first

    def placed(self, request: InferenceRequest, address: str) -> None:
        """A request is placed on `address`: remember the index's prediction for its prompt, before the index
        records the placement."""
        if self._rates.take():
            return
        expected = self._routes.index.expect(address, request.prefix)
        if expected is None:
            return
        prompt_bytes = len(request.prefix) * BLOCK_BYTES + BLOCK_BYTES // 2
        if prompt_bytes >= MAX_PROMPT_BYTES:
            prompt_bytes = max(request.body_bytes, prompt_bytes)
        self._pending[request.id] = _Pending(address, expected, prompt_bytes)
        if len(self._pending) > _MOST_PENDING:
            del self._pending[next(iter(self._pending))]

    def ended(self, completion: Completion) -> None:
        """Publish evidence about the engine's cache if the request's answer contradicts the index."""
        pending = self._pending.pop(completion.id, None)
        if pending is None or not completion.answered or not completion.prompt_tokens:
            return
        address, expected, prompt_bytes = pending
        if completion.served not in (None, address):
            return
        cached = completion.cached_tokens
        if cached is None:  # vLLM leaves the number out if it is 0
            if not self._routes.index.predicted(address).tells:
                return
            cached = 0
        bytes_per_token = prompt_bytes / completion.prompt_tokens
        if not _BYTES_PER_TOKEN[0] <= bytes_per_token <= _BYTES_PER_TOKEN[1]:
            return
        evidence = evidence_of(expected, cached * bytes_per_token / BLOCK_BYTES)
        if self._routes.index.teaches(address, evidence, expected.life):
            self._routes.add(EvidenceRecord(address, *evidence, bytes_per_token))


class _Counted(NamedTuple):
    queries: float
    hits: float
    predicted: Predicted


class CacheWatch:
    """Reads the pages that this replica scrapes: notices restarts, and compares the counters of prefix hits
    with the predictions. `readings` has the last readings of other replicas."""

    def __init__(self, routes: RouteStream, readings: MetricsCache) -> None:
        self._routes, self._readings = routes, readings
        self._last: dict[str, EndpointMetrics] = {}
        self._counted: dict[str, _Counted] = {}  # the counters at the last comparison
        self._refused: set[str] = set()  # endpoints that refused a connection since their last page

    def refused(self, address: str) -> None:
        """Record that the endpoint refused a connection: the engine may have ended."""
        self._refused.add(address)

    def read(self, address: str, page: EndpointMetrics) -> None:
        """Compare a new page of the endpoint with its last page."""
        last, others = self._last.get(address), self._readings.last_read(address)
        if last is None or (others is not None and others.scraped_ms > last.scraped_ms):
            last = others
        self._last[address] = page
        refused = address in self._refused
        self._refused.discard(address)
        if last is not None and _has_lost_cache(last, page, refused):
            self._counted.pop(address, None)
            if address in self._routes.index.addresses:
                self._routes.add(LossRecord(address))
        elif page.prefix_queries is not None and page.prefix_hits is not None:
            self._compare(address, page.prefix_queries, page.prefix_hits)
        if len(self._last) > 2 * len(self._readings.addresses) + 1:
            self._last = {each: kept for each, kept in self._last.items() if each in self._readings.addresses}
            self._counted = {each: kept for each, kept in self._counted.items() if each in self._last}

    def _compare(self, address: str, queries: float, hits: float) -> None:
        now = self._routes.index.predicted(address)
        before = self._counted.get(address)
        if before is None:
            self._counted[address] = _Counted(queries, hits, now)
            return
        looked_up, asked = queries - before.queries, now.asked - before.predicted.asked
        if looked_up < _LEAST_QUERIES or asked <= 0:
            return
        self._counted[address] = _Counted(queries, hits, now)
        share, predicted = (hits - before.hits) / looked_up, (now.hits - before.predicted.hits) / asked
        if now.tells or not predicted:
            return
        ratio = max(share / predicted, _LEAST_RATIO)
        if ratio < 1 - _UNEQUAL:
            self._routes.add(EvidenceRecord(address, 0, now.capacity * ratio))
        elif ratio > 1 + _UNEQUAL:
            self._routes.add(EvidenceRecord(address, now.capacity * ratio, 0))


def _has_lost_cache(last: EndpointMetrics, page: EndpointMetrics, refused: bool) -> bool:
    """Whether the engine has restarted between two of its pages, or slept, which frees its KV cache."""
    if last.unready == ASLEEP != page.unready:
        return True
    if last.started_s is not None and page.started_s is not None:
        return abs(page.started_s - last.started_s) > _SAME_START_S
    counters = [(last.prefix_queries, page.prefix_queries), (last.preemptions, page.preemptions)]
    known = [(before, now) for before, now in counters if before is not None and now is not None]
    return any(now < before for before, now in known) or (refused and not any(now for _, now in known))
