"""The runs: what is sent, how the queue is configured, and each replica's part as a `Job`.

The control is what N independent pickers do: each replica has a pool and a queue of its own and its part of
the bounds, so that all together let through as much as the fleet does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class Source:
    """Clients of one kind. Either `callers`, each with one request at a time, or random arrivals at
    `rate_per_s`.

    The fairness id is `fairness_id` or the name; `ids` of them are used in turn, and so are `workloads`
    workload ids (0: one a request). `tokens` is what a request really takes (0: requests are counted); its
    estimate is that times a random factor between 1/`guess_factor` and `guess_factor`.
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
        """The part of the source at the `which`-th of `of` replicas."""
        callers = self.callers // of + (which < self.callers % of)
        return replace(self, callers=callers, rate_per_s=self.rate_per_s / of)


@dataclass(frozen=True, slots=True)
class Job:
    """One replica's part in one run. An answer takes a random time within `service_ms`."""

    replica: str
    config: Mapping[str, Any]
    sources: tuple[Source, ...]
    service_ms: tuple[float, float]
    seed: str

    def written(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def read(cls, line: str) -> "Job":
        return msgspec.json.decode(line, type=cls)


def source_of(request_id: str) -> str:
    """The source of a request, by its id (`Clients` makes them)."""
    return request_id.partition(".")[0]


def assign_replicas(sources: int, replicas: int) -> list[list[int]]:
    """The replicas of each source: with enough of them, no two sources share one."""
    assigned: list[list[int]] = [[] for _ in range(sources)]
    for slot in range(max(sources, replicas)):
        assigned[slot % sources].append(slot % replicas)
    return assigned


_ENDPOINTS = 4
_LOG = 1_000_000
_ROOM = 4000  # capacity of the queue where capacity is not measured


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run: it lasts until `grants` requests have been dispatched from the queue."""

    name: str
    sources: tuple[Source, ...]
    config: Mapping[str, Any]
    service_ms: tuple[float, float]
    grants: int


def _config(in_flight: float, *, unit: str = "requests", **queue: Any) -> dict[str, Any]:
    """Up to `in_flight` at once, the queue as `queue` says; the decision log is on."""
    each = in_flight / _ENDPOINTS
    wait_cap = queue.pop("wait_cap_s", 60.0)
    return {
        "discovery": {"static": [{"address": f"10.0.0.{number + 1}:8000"} for number in range(_ENDPOINTS)]},
        "request_queue_controller": {
            "watermark_per_backend": each,
            "lower_bound_per_backend": each,
            "upper_bound_per_backend": each,
            "unit": unit,
        },
        "fair_request_queue": {"total_capacity": _ROOM, "flow_capacity": _ROOM, **queue},
        "workloads": {"wait_cap": wait_cap},
        # A slow machine is not a dead replica.
        "leases": {"replica_silence": 30.0, "inflight": 60.0},
        "decision_log": {"enabled": True, "max_entries": _LOG},
    }


WEIGHTS: Mapping[str, float] = {"one": 1.0, "two": 2.0, "four": 4.0, "split": 1.0}
SPLIT_IDS = 50


def weights(grants: int) -> Scenario:
    """Weights 1:2:4, and a fourth flow of weight 1 that spreads its requests over 50 workload ids."""
    sources = tuple(
        Source(name, weight=weight, callers=64, workloads=SPLIT_IDS if name == "split" else 1)
        for name, weight in WEIGHTS.items()
    )
    return Scenario("weights", sources, _config(16, ordering="workload-aware"), (4, 20), grants)


def split_flows(grants: int) -> Scenario:
    """The same, but the fourth may choose its fairness id: 50 flows of weight 1."""
    same = weights(grants)
    *others, split = (replace(source, workloads=0) for source in same.sources)
    return replace(same, name="split", sources=(*others, replace(split, callers=200, ids=SPLIT_IDS)))


def trickle(grants: int) -> Scenario:
    """Twice what 8 in flight at 20 ms each can serve, nearly all of it from one flow."""
    sources = (Source("trickle", rate_per_s=20), Source("bulk", rate_per_s=780))
    return Scenario("trickle", sources, _config(8, flow_capacity=200), (10, 30), grants)


def starvation(grants: int, ttl_s: float, guard_share: float) -> Scenario:
    """One flow; its criticality-5 requests alone keep all endpoints busy, few are of criticality 1.

    The TTL is 30 s and the cap of waits 60 s, both scaled by the same factor. Criticality 5 comes from 40
    workloads: a single one would soon be so busy that its rate outweighs the rest of its score.
    """
    sources = (
        Source("low", rate_per_s=16, workloads=1, criticality=1, ttl_s=ttl_s, fairness_id="both"),
        Source("high", callers=100, workloads=40, criticality=5, ttl_s=ttl_s, fairness_id="both"),
    )
    config = _config(8, ordering="workload-aware", guard_share=guard_share, wait_cap_s=2 * ttl_s)
    return Scenario("starvation", sources, config, (10, 30), grants)


def bands(grants: int, ttl_s: float) -> Scenario:
    """Critical at 0.3 and Default at 0.6 of what can be served, in bursts; Sheddable always waits."""
    sources = (
        Source("critical", band=0, rate_per_s=120),
        Source("default", band=1, rate_per_s=220),
        Source("sheddable", band=2, callers=150, ttl_s=ttl_s),
    )
    return Scenario("bands", sources, _config(8), (10, 30), grants)


TOKENS: Mapping[str, int] = {"small": 100, "large": 10_000}


def tokens(grants: int) -> Scenario:
    """Two flows of equal weight whose requests are a hundred times apart, and badly estimated."""
    sources = tuple(
        Source(name, callers=300 if name == "small" else 16, tokens=size, guess_factor=4.0)
        for name, size in TOKENS.items()
    )
    return Scenario("tokens", sources, _config(20_000, unit="tokens"), (4, 12), grants)


def configured(tree: Mapping[str, Any], url: str, pool: str, pools: int) -> dict[str, Any]:
    """The configuration of a replica of `pool`, one of `pools` that share the bounds of `tree`."""
    controller = dict(tree["request_queue_controller"])
    for bound in ("watermark_per_backend", "lower_bound_per_backend", "upper_bound_per_backend"):
        controller[bound] /= pools
    queue = dict(tree["fair_request_queue"])
    queue["total_capacity"] //= pools
    queue["flow_capacity"] //= pools
    return {
        **tree,
        "pool": pool,
        "redis": {"url": url, "silence": 5.0, "connect_timeout": 5.0},
        "request_queue_controller": controller,
        "fair_request_queue": queue,
    }
