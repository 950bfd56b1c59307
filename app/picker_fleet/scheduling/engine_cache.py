"""Models the prefix cache of one endpoint's engine: the blocks of prompts in the order of eviction, and how
many of them the engine keeps. Pure; the class `PrefixIndex` (endpoint_history.py) has one model an endpoint.

Engines evict the least recently used blocks first, and of one prompt the last blocks first (vLLM,
docs/design/prefix_caching.md; SGLang's radix tree evicts leaves first). So a block is cached while fewer than
`capacity` other blocks have been used since: its LRU stack distance (Mattson, Gecsei, Slutz and Traiger,
"Evaluation techniques for storage hierarchies", 1970), here its *rank*. The model also keeps blocks beyond
the capacity, as ARC keeps ghosts (Megiddo and Modha, FAST 2003): a hit on one of them shows that the capacity
is larger.

The capacity is estimated from answers that report their cached tokens. The ranks of the prompt's blocks when
it was placed, and the number of blocks that were cached, give the highest rank that was kept and the lowest
rank that was evicted (`Evidence`). If the estimate contradicts one of these ranks, the estimate moves by a
part of the distance on a logarithmic scale, at most `_MOST_STEP` (stochastic approximation, Robbins and Monro
1951). Answers and running requests take blocks that no prompt shows, so the estimate settles below the
configured capacity.

While a replica reads the engine's KV events, these say which blocks are evicted; the capacity is then only a
bound, not below the capacity that the engine's page reports.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, NamedTuple

_GAIN = 0.2
_LEAST_STEP, _MOST_STEP = 0.01, 0.15  # step of the capacity's logarithm for one piece of evidence
_MOST_FACTOR: Final = math.log(64.0)  # the estimate stays within 1/64 to 64 times the reported capacity
_SLACK_BLOCKS, _SLACK = 2, 0.1  # error of converting cached tokens to blocks: blocks, fraction
_SETTLED_S = 2.0  # an engine may still compute blocks that were sent a shorter time ago
_MOST_STEPS = 8
_STRIKES = 3  # contradicting answers in a row that show that the engine cleared its cache


class Step(NamedTuple):
    """The prompt's first `blocks` blocks have ranks of at most `rank`; the newest was used `age_s` ago."""

    blocks: int
    rank: int
    age_s: float


class Expectation(NamedTuple):
    """The ranks of a prompt's blocks when the prompt was placed; `life` says how often the cache had been
    cleared by then."""

    life: int
    steps: tuple[Step, ...]


class Evidence(NamedTuple):
    """`kept` is the highest rank that an answer has shown to be cached, 0 if none; `evicted` is the lowest
    rank that the answer has shown to be evicted, 0 if none."""

    kept: float
    evicted: float


def evidence_of(expected: Expectation, cached_blocks: float) -> Evidence:
    """The evidence of an answer for whose prompt the engine had `cached_blocks` blocks in its cache."""
    slack = _SLACK_BLOCKS + _SLACK * cached_blocks
    kept = evicted = before = 0.0
    for blocks, rank, age_s in expected.steps:  # a step's last blocks have the highest ranks
        if before < cached_blocks - slack:
            kept = rank - max(blocks - (cached_blocks - slack), 0.0)
        if blocks > cached_blocks + slack:
            if age_s >= _SETTLED_S:
                evicted = rank - (blocks - max(cached_blocks + slack, before)) + 1
            break
        before = blocks
    return Evidence(kept, evicted)


class EngineCache:
    """The blocks that one endpoint was sent, in the order of their last use. `cached` has the blocks
    predicted to be cached, `evicted` older blocks, each with its last request's number."""

    __slots__ = (
        "_has_holes", "_left", "_log_factor", "_number", "_since_s", "_strikes", "_told",
        "asked", "cached", "evicted", "follows", "hits", "life", "tells",
    )  # fmt: skip

    def __init__(self, told: float) -> None:
        self._told = told
        self._log_factor = 0.0  # logarithm of the ratio of the estimate to `_told`
        self.tells = False  # whether answers of the endpoint report their cached tokens
        self.follows = False  # whether the engine's KV events are read
        self.life = 0  # how often the cache was cleared
        self.asked = self.hits = 0  # number of blocks in all prompts; number predicted to be cached
        self.clear()

    def __len__(self) -> int:
        return len(self.cached) + len(self.evicted)

    def clear(self) -> list[bytes]:
        """Forget all blocks, and return them: the engine has restarted or cleared its cache."""
        gone = [*self.cached, *self.evicted] if self.life else []
        self.life += 1
        self.cached: OrderedDict[bytes, int] = OrderedDict()
        self.evicted: OrderedDict[bytes, int] = OrderedDict()
        self._left: dict[int, int] = {}  # request -> blocks that no later request has used; oldest first
        self._since_s: dict[int, float] = {}
        self._number = self._strikes = 0
        self._has_holes = False  # whether a block may be missing before others of its prompt
        self.tells = False
        return gone

    @property
    def capacity(self) -> float:
        """The estimated capacity, in blocks."""
        return self._told * math.exp(max(self._log_factor, 0.0) if self.follows else self._log_factor)

    def report_size(self, capacity: float) -> None:
        """Use the `capacity` in blocks that the engine's page reports; corrections from answers stay."""
        self._told = capacity

    def add(self, links: Sequence[bytes], most: int, now_s: float) -> list[bytes]:
        """Record that the endpoint was sent a prompt with the blocks `links`. Keeps at most `most` blocks;
        returns the blocks that were dropped."""
        self._number = number = self._number + 1
        self._left[number], self._since_s[number] = len(links), now_s
        cached, evicted = self.cached, self.evicted
        had = _count(links, lambda link: cached.get(link, 0), 0)
        if self._has_holes:
            had = next((at for at, link in enumerate(links) if link not in cached), len(links))
            self.remove(links[had:])
        known = had + (_count(links[had:], lambda link: evicted.get(link, 0), 0) if evicted else 0)
        used_before = Counter(map(cached.__getitem__, links[:had]))
        used_before.update(map(evicted.pop, links[had:known]))
        for last, count in used_before.items():
            self._less(last, count)
        cached.update(dict.fromkeys(reversed(links), number))
        for link in reversed(links[:had]):
            cached.move_to_end(link)
        self.asked += len(links)
        self.hits += had
        return self.fit(most, len(links))

    def fit(self, most: int, least: int = 0) -> list[bytes]:
        """Predict that the last `capacity` blocks are cached, but at least `least`, and drop all blocks
        beyond `most`. Returns the dropped blocks."""
        cached, evicted = self.cached, self.evicted
        capacity = min(max(round(self.capacity), least), most)
        oldest = cached.popitem
        for _ in range(len(cached) - capacity):
            link, number = oldest(last=False)
            evicted[link] = number
        while evicted and len(cached) < capacity:
            link, number = evicted.popitem()
            cached[link] = number
            cached.move_to_end(link, last=False)
        surplus = len(cached) + len(evicted) - most
        if surplus <= 0:
            return []
        gone = list(islice(evicted, surplus))
        for number, count in Counter(map(evicted.pop, gone)).items():
            self._less(number, count)
        return gone

    def remove(self, links: Sequence[bytes]) -> list[bytes]:
        """Forget the blocks `links`, and return those that were known: the engine has removed them."""
        self._has_holes = True
        gone = []
        for link in links:
            number = self.cached.pop(link, 0) or self.evicted.pop(link, 0)
            if number:
                self._less(number, 1)
                gone.append(link)
        return gone

    def restore(self, links: Sequence[bytes], most: int, now_s: float) -> list[bytes]:
        """Record that the engine has stored the blocks `links`. Returns the blocks that were dropped."""
        new = [link for link in dict.fromkeys(links) if link not in self.cached]
        self.remove(new)
        asked, hits = self.asked, self.hits
        gone = self.add(new, most, now_s) if new else []
        self.asked, self.hits = asked, hits
        return gone

    def _less(self, number: int, count: int) -> None:
        """Record that `count` blocks last used by request `number` were used again or dropped."""
        self._left[number] -= count
        if not self._left[number]:
            del self._left[number], self._since_s[number]

    def _last(self, link: bytes) -> int:
        """The last request that used `link`; 0 if none is known."""
        return self.cached.get(link) or self.evicted.get(link, 0)

    def expect(self, links: Sequence[bytes], now_s: float) -> Expectation:
        """The ranks that the blocks `links` of a prompt have now."""
        ends: list[tuple[int, int]] = []  # number of blocks, last request that used these; fewest blocks last
        end = _count(links, self._last, 0)
        while end and len(ends) < _MOST_STEPS:
            ends.append((end, number := self._last(links[end - 1])))
            end = _count(links[:end], self._last, number)
        steps, rank, counts = [], 0, reversed(self._left.items())
        for end, number in reversed(ends):
            for request, count in counts:
                rank += count
                if request == number:
                    break
            steps.append(Step(end, rank, now_s - self._since_s[number]))
        return Expectation(self.life, tuple(steps))

    def teaches(self, evidence: Evidence) -> bool:
        """Whether `learn(evidence)` would change the estimate of the cache's capacity."""
        kept, evicted = evidence
        return not self.tells or self._strikes > 0 or kept > self.capacity or 0 < evicted <= self.capacity

    def learn(self, evidence: Evidence, most: int, *, of_answer: bool) -> list[bytes]:
        """Move the estimate of the cache's capacity, to at most `most` blocks. Clears the cache if several
        answers in a row had nothing cached of blocks used lately. Returns the blocks that were dropped.
        `of_answer`: the evidence comes from an answer's cached tokens."""
        self.tells = self.tells or of_answer
        kept, evicted = evidence
        capacity = self.capacity
        step = 0.0
        if kept > capacity:
            step = max(_GAIN * math.log(kept / capacity), _LEAST_STEP)
        elif 0 < evicted <= capacity:
            step = min(_GAIN * math.log(evicted / capacity), -_LEAST_STEP)
        log_factor = self._log_factor + min(max(step, -_MOST_STEP), _MOST_STEP)
        highest = min(max(math.log(most / self._told), 0.0), _MOST_FACTOR)
        self._log_factor = min(max(log_factor, -_MOST_FACTOR), highest)
        if kept or not evicted:
            self._strikes = 0
        elif evicted <= capacity / 2:
            self._strikes += 1
        return self.clear() if self._strikes >= _STRIKES else self.fit(most)


def _count(links: Sequence[bytes], last: Callable[[bytes], int], after: int) -> int:
    """The number of leading `links` whose last request (by `last`) has a higher number than `after`."""
    low, high = 0, len(links)
    while low < high:
        middle = (low + high) // 2
        if last(links[middle]) > after:
            low = middle + 1
        else:
            high = middle
    return low
