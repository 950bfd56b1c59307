"""The fairness scenarios: load, queue configuration, and each replica's share of the load as a `Job`.

The control models N independent pickers: each replica has its own pool and queue with its share of the
bounds, so that all replicas together admit as much as the fleet.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class Source:
    """Clients of one kind, `callers` with one request at a time each or random arrivals at `rate_per_s`.

    The fairness id is `fairness_id`, or else `name`. The clients' requests use `ids` fairness ids and
    `workloads` workload ids (0: none) in turn. `tokens`: a request's actual number of tokens (0: requests are
    counted); its estimated cost is `tokens` times a random factor from 1/`guess_factor` to `guess_factor`.
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
        """The fairness id of the n-th request of this source."""
        own = self.fairness_id or self.name
        return own if self.ids == 1 else f"{own}-{number % self.ids}"

    def part(self, which: int, of: int) -> "Source":
        """The share of this source's load that replica number `which` (from 0) of `of` replicas gets."""
        callers = self.callers // of + (which < self.callers % of)
        return replace(self, callers=callers, rate_per_s=self.rate_per_s / of)


@dataclass(frozen=True, slots=True)
class Job:
    """One replica's share of a scenario's run. Each answer takes a random time in the range `service_ms`."""

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
    """The name of the source whose `Clients` made `request_id`."""
    return request_id.partition(".")[0]


def assign_replicas(sources: int, replicas: int) -> list[list[int]]:
    """The replica numbers of each load source. With enough replicas no two load sources share a replica."""
    assigned: list[list[int]] = [[] for _ in range(sources)]
    for slot in range(max(sources, replicas)):
        assigned[slot % sources].append(slot % replicas)
    return assigned


_ENDPOINTS = 4
_LOG = 1_000_000
_ROOM = 4000  # capacity of the queue in scenarios that do not measure refusals


@dataclass(frozen=True, slots=True)
class Scenario:
    """Load and configuration of a run, which ends after `grants` requests were dispatched from the queue."""

    name: str
    sources: tuple[Source, ...]
    config: Mapping[str, Any]
    service_ms: tuple[float, float]
    grants: int


def _config(in_flight: float, *, unit: str = "requests", **queue: Any) -> dict[str, Any]:
    """A configuration with a bound of `in_flight` requests, queue settings `queue`, and the decision log."""
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
        # Long timeouts, so that no replica on a slow machine counts as silent.
        "leases": {"replica_silence": 30.0, "inflight": 60.0},
        "decision_log": {"enabled": True, "max_entries": _LOG},
    }


WEIGHTS: Mapping[str, float] = {"one": 1.0, "two": 2.0, "four": 4.0, "split": 1.0}
SPLIT_IDS = 50


def weights(grants: int) -> Scenario:
    """Flows of weights 1, 2 and 4, and a fourth flow of weight 1 with 50 workload ids."""
    sources = tuple(
        Source(name, weight=weight, callers=64, workloads=SPLIT_IDS if name == "split" else 1)
        for name, weight in WEIGHTS.items()
    )
    return Scenario("weights", sources, _config(16, ordering="workload-aware"), (4, 20), grants)


def split_flows(grants: int) -> Scenario:
    """Like `weights`, but the fourth client uses 50 fairness ids, which are 50 flows of weight 1."""
    same = weights(grants)
    *others, split = (replace(source, workloads=0) for source in same.sources)
    return replace(same, name="split", sources=(*others, replace(split, callers=200, ids=SPLIT_IDS)))


def trickle(grants: int) -> Scenario:
    """Twice the load that 8 requests in flight of 20 ms each can serve, nearly all from one flow."""
    sources = (Source("trickle", rate_per_s=20), Source("bulk", rate_per_s=780))
    return Scenario("trickle", sources, _config(8, flow_capacity=200), (10, 30), grants)


def starvation(grants: int, ttl_s: float, guard_share: float) -> Scenario:
    """One flow with enough criticality-5 requests to keep all endpoints busy, and few criticality-1 requests.

    The TTL and the wait cap are the defaults, 30 s and 60 s, scaled by one factor. The criticality-5 requests
    come from 40 workloads, because a single busy workload's request rate would dominate its score.
    """
    sources = (
        Source("low", rate_per_s=16, workloads=1, criticality=1, ttl_s=ttl_s, fairness_id="both"),
        Source("high", callers=100, workloads=40, criticality=5, ttl_s=ttl_s, fairness_id="both"),
    )
    config = _config(8, ordering="workload-aware", guard_share=guard_share, wait_cap_s=2 * ttl_s)
    return Scenario("starvation", sources, config, (10, 30), grants)


def bands(grants: int, ttl_s: float) -> Scenario:
    """Critical requests arrive at 0.3 of the capacity, Default at 0.55; Sheddable requests always wait."""
    sources = (
        Source("critical", band=0, rate_per_s=120),
        Source("default", band=1, rate_per_s=220),
        Source("sheddable", band=2, callers=150, ttl_s=ttl_s),
    )
    return Scenario("bands", sources, _config(8), (10, 30), grants)


TOKENS: Mapping[str, int] = {"small": 100, "large": 10_000}


def tokens(grants: int) -> Scenario:
    """Two flows of equal weight whose requests' sizes differ by a factor of 100, with bad cost estimates."""
    sources = tuple(
        Source(name, callers=300 if name == "small" else 16, tokens=size, guess_factor=4.0)
        for name, size in TOKENS.items()
    )
    return Scenario("tokens", sources, _config(20_000, unit="tokens"), (4, 12), grants)


def configured(tree: Mapping[str, Any], url: str, pool: str, pools: int) -> dict[str, Any]:
    """The configuration of a replica of `pool`, one of `pools` pools that share the bounds in `tree`."""
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
