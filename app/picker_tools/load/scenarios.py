"""The scenarios of `picker load`: their sources, faults, and the promises a run must show. Pure data.

`deploy/locust/locustfile.py` uses the same scenarios.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from picker_fleet.bands import Band

BYTES_PER_TOKEN = 4  # as the fleet estimates a prompt


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast one of the scenario's own simulators is: what `picker sim` takes."""

    ttft_ms: float = 60.0
    itl_ms: float = 12.0

    def answer_s(self, tokens: int) -> float:
        """Seconds that an answer of `tokens` takes where nothing is in its way."""
        return (self.ttft_ms + self.itl_ms * max(0, tokens - 1)) / 1000


@dataclass(frozen=True, slots=True)
class Wave:
    """The rate is multiplied by `factor` for the first `high_s` of every `period_s`."""

    period_s: float
    high_s: float
    factor: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """A source whose arrivals are conversations: so many turns, a pause of `think_s` (mean) between them."""

    turns: int
    think_s: float


@dataclass(frozen=True, slots=True)
class Source:
    """One client population. `load` is its demand outside its wave, as a part of what the fleet can serve
    (1: all of it).

    `objective` '' sends none. `prompt_bytes` is a range; sizes are spread evenly over its logarithm.
    `streamed` is the part of requests that ask for a stream.
    """

    name: str
    load: float
    flow: str
    objective: str = ""
    band: Band = Band.DEFAULT
    weight: float = 1.0
    workload: str = ""
    criticality: int = 3
    prompt_bytes: tuple[int, int] = (200, 400)
    answer_tokens: int = 16
    streamed: float = 0.8
    ttl_s: float = 30.0
    wave: Wave | None = None
    conversation: Conversation | None = None

    @property
    def cost_tokens(self) -> float:
        """About what a request of it is charged under `unit: tokens`, on average."""
        low, high = self.prompt_bytes
        mean_bytes = (high - low) / math.log(high / low) if high > low else low
        return mean_bytes / BYTES_PER_TOKEN + self.answer_tokens


class Fault(StrEnum):
    """What the scenario does to its own fleet."""

    NONE = "none"
    KILL_REPLICAS = "kill replicas"
    STOP_REDIS = "stop Redis"
    KILL_AND_STOP = "kill a replica, then stop Redis"

    @property
    def stops_redis(self) -> bool:
        return self in (Fault.STOP_REDIS, Fault.KILL_AND_STOP)

    @property
    def kills_replicas(self) -> bool:
        return self in (Fault.KILL_REPLICAS, Fault.KILL_AND_STOP)


@dataclass(frozen=True, slots=True)
class Scenario:
    """`config` is laid over the defaults for a fleet of its own; `promises` name entries of
    `SCENARIO_CHECKS`.

    `needs` are settings (dotted key, value) without which a given fleet cannot show what it is about.
    """

    name: str
    summary: str
    sources: tuple[Source, ...]
    promises: tuple[str, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[tuple[str, str], ...] = ()
    duration_s: float = 20.0
    fault: Fault = Fault.NONE
    speed: Speed = Speed()

    @property
    def own_fleet_only(self) -> bool:
        return self.fault is not Fault.NONE

    @property
    def in_tokens(self) -> bool:
        controller: Mapping[str, Any] = self.config.get("request_queue_controller", {})
        return controller.get("unit") == "tokens"

    @property
    def objectives(self) -> frozenset[str]:
        """Those that a fleet must know."""
        return frozenset(source.objective for source in self.sources if source.objective)


@dataclass(frozen=True, slots=True)
class Plan:
    """A run of `scenario` with at most `max_requests`. `rate_per_s` None: by what the fleet can serve."""

    scenario: Scenario
    duration_s: float
    seed: int
    max_requests: int
    rate_per_s: float | None = None
    slo_ttft_p95_s: float | None = None
    slo_latency_p95_s: float | None = None


# Three bands by header, for the scenarios that have to do with them.
_OBJECTIVES: list[Mapping[str, Any]] = [
    {"name": "critical", "criticality": "Critical"},
    {"name": "sheddable", "criticality": "Sheddable"},
]
_LOW_TTL_S = 8.0
_SHEDDABLE = Source("sheddable-1", 0.5, "sheddable-1", objective="sheddable", band=Band.SHEDDABLE)
_NOISY_AND_QUIET = (Source("noisy", 1.5, "noisy"), Source("quiet", 0.2, "quiet"))


_OUTAGE_PROMISES = (
    "faults-happened", "outage-serves", "outage-bound", "shared-again", "only-overload-errors",
)  # fmt: skip


def _alike(load: float, wave: Wave | None = None) -> tuple[Source, ...]:
    """Four clients of equal weight and `load`."""
    return tuple(Source(f"client-{n}", load, f"client-{n}", wave=wave) for n in range(1, 5))


def _scorers(weights: Mapping[str, float]) -> Mapping[str, Any]:
    return {"scorers": [{"name": name, "weight": weight} for name, weight in weights.items()]}


_ALL = (
    Scenario(
        name="steady",
        summary="Four clients of equal weight ask for 70 % of what the fleet can serve.",
        sources=_alike(0.175),
        promises=("no-errors", "nothing-expires"),
    ),
    Scenario(
        name="burst",
        summary="Four ask for 40 % of what can be served, and for 1.5 s of every 6 s four times that.",
        sources=_alike(0.1, Wave(period_s=6, high_s=1.5, factor=4)),
        promises=("no-errors", "nothing-expires", "queue-drains"),
    ),
    Scenario(
        name="noisy-neighbour",
        summary="One client asks for 150 % of what can be served, a quiet one of the same weight for 20 %.",
        sources=_NOISY_AND_QUIET,
        promises=("overloaded", "quiet-share", "quiet-wait", "quiet-not-refused"),
    ),
    Scenario(
        name="priority-overload",
        summary="Critical 40 %, Default 40 % and Sheddable 100 % of what can be served, in a queue of 60.",
        sources=(
            Source("critical", 0.4, "critical", objective="critical", band=Band.CRITICAL),
            Source("default", 0.4, "default"),
            _SHEDDABLE,
            replace(_SHEDDABLE, name="sheddable-2", flow="sheddable-2"),
        ),
        promises=("overloaded", "critical-not-refused", "waits-by-band"),
        config={
            "objectives": _OBJECTIVES,
            "fair_request_queue": {"total_capacity": 60, "flow_capacity": 40},
        },
    ),
    Scenario(
        name="starvation",
        summary=(
            "Criticality-5 workloads fill one flow; a criticality-1 workload shares it, and a Sheddable one "
            "waits below them. Together these are within the guard's tenth of the service."
        ),
        sources=(
            Source("urgent-1", 0.7, "shared", workload="urgent-1", criticality=5),
            Source("urgent-2", 0.7, "shared", workload="urgent-2", criticality=5),
            Source("low", 0.04, "shared", workload="low", criticality=1, ttl_s=_LOW_TTL_S),
            replace(_SHEDDABLE, name="sheddable", load=0.03, flow="background", ttl_s=_LOW_TTL_S),
        ),
        promises=("overloaded", "low-not-starved"),
        config={
            "objectives": _OBJECTIVES,
            "fair_request_queue": {"ordering": "workload-aware", "flow_capacity": 100},
        },
        needs=(("fair_request_queue.ordering", "workload-aware"),),
    ),
    Scenario(
        name="workload-aware",
        summary=(
            "Four workloads of one flow ask for 130 % of what can be served: two busy ones of criticality 3, "
            "one of criticality 5, and one of 3 that asks seldom. Only the workload score tells them apart."
        ),
        sources=(
            Source("urgent", 0.3, "shared", workload="urgent", criticality=5),
            Source("quiet", 0.1, "shared", workload="quiet", criticality=3),
            Source("busy-1", 0.45, "shared", workload="busy-1", criticality=3),
            Source("busy-2", 0.45, "shared", workload="busy-2", criticality=3),
        ),
        promises=("overloaded", "urgent-first", "seldom-first"),
        config={
            "fair_request_queue": {"ordering": "workload-aware", "flow_capacity": 400},
            # A run is short, and small: what a workload asks for counts sooner, and for more.
            "workloads": {"rate_window": "10s", "rate_cap": 20},
        },
        needs=(("fair_request_queue.ordering", "workload-aware"),),
    ),
    Scenario(
        name="long-prompts",
        summary="Prompts of 8 to 160 KB beside short ones, charged in tokens: 124 % of what can be served.",
        sources=(
            Source("long", 1.2, "long", prompt_bytes=(8_000, 160_000), answer_tokens=24),
            Source("short", 0.04, "short", prompt_bytes=(200, 2_000)),
        ),
        promises=("overloaded", "no-errors-but-overload", "short-share", "short-wait"),
        config={
            "request_queue_controller": {"unit": "tokens", "watermark_per_backend": 16_000},
            "scheduling": _scorers({"kv-cache": 1, "in-flight": 2}),
        },
        needs=(("request_queue_controller.unit", "tokens"),),
    ),
    Scenario(
        name="replica-crash",
        summary="Replicas are killed (SIGKILL) at random moments; 80 % of what can be served is asked for.",
        sources=_alike(0.2),
        promises=("faults-happened", "no-errors", "nothing-expires"),
        fault=Fault.KILL_REPLICAS,
    ),
    Scenario(
        name="redis-outage",
        summary="Redis is gone for a third of the run and comes back empty, while 80 % is asked for.",
        sources=_alike(0.2),
        promises=_OUTAGE_PROMISES,
        duration_s=24.0,
        fault=Fault.STOP_REDIS,
    ),
    Scenario(
        name="demo",
        summary=(
            "One client asks for 150 % of what can be served, a quiet one of the same weight for 20 %; a "
            "replica is killed, and later Redis."
        ),
        sources=_NOISY_AND_QUIET,
        promises=("overloaded", "quiet-wait", "quiet-not-refused", *_OUTAGE_PROMISES),
        duration_s=60.0,
        fault=Fault.KILL_AND_STOP,
    ),
    Scenario(
        name="multi-turn",
        summary="Conversations of five turns, each with all said before: half of what can be served.",
        sources=(
            Source(
                "talk",
                0.5,
                "talk",
                prompt_bytes=(800, 1_600),
                streamed=1.0,
                conversation=Conversation(5, 1.0),
            ),
        ),
        promises=("no-errors", "nothing-expires", "turns-stay"),
        config={
            "scheduling": _scorers({"prefix-affinity": 3, "in-flight": 1}),
        },
    ),
)

SCENARIOS: Mapping[str, Scenario] = {scenario.name: scenario for scenario in _ALL}
