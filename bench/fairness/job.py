"""What a replica is told to do, as it passes over a pipe: who asks, how much, and of which pool."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Source:
    """Clients of one kind. They are either `callers`, each with one request at a time, or arrive at random
    at `rate_per_s` and wait for nobody.

    Its fairness id is its name unless `fairness_id` says otherwise; `ids` of them are used in turn, and so
    are `workloads` workload ids (0: each request is its own). `tokens` is what a request really takes (0:
    requests are counted, not tokens); it is announced as that times a random factor between
    1/`guess_factor` and `guess_factor`.
    """

    name: str
    band: int = 1
    weight: float = 1.0
    callers: int = 0
    rate_per_s: float = 0.0
    fairness_id: str = ""
    ids: int = 1
    workloads: int = 0
    criticality: int = 3
    ttl_s: float = 60.0
    tokens: int = 0
    guess_factor: float = 1.0

    def flow(self, number: int) -> str:
        """The fairness id of the source's n-th request."""
        own = self.fairness_id or self.name
        return own if self.ids == 1 else f"{own}-{number % self.ids}"

    def part(self, which: int, of: int) -> "Source":
        """What the `which`-th of `of` replicas sees of it."""
        callers = self.callers // of + (which < self.callers % of)
        return replace(self, callers=callers, rate_per_s=self.rate_per_s / of)


@dataclass(frozen=True, slots=True)
class Job:
    """One replica's part in one run. `service_ms` is between what and what an answer takes, evenly."""

    replica: str
    config: Mapping[str, Any]
    sources: tuple[Source, ...]
    service_ms: tuple[float, float]
    seed: str

    def written(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, line: str | bytes) -> "Job":
        tree = json.loads(line)
        sources = tuple(Source(**each) for each in tree.pop("sources"))
        return cls(**{**tree, "sources": sources, "service_ms": tuple(tree["service_ms"])})


def source_of(request_id: str) -> str:
    """The source that made a request; `drive` names them so."""
    return request_id.partition(".")[0]


def pinned(sources: int, replicas: int) -> list[list[int]]:
    """By source, the replicas it comes through: with enough of them, no two sources share one."""
    doors: list[list[int]] = [[] for _ in range(sources)]
    for slot in range(max(sources, replicas)):
        doors[slot % sources].append(slot % replicas)
    return doors
