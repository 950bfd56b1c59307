"""The scenarios of `picker load`, by name. `deploy/locust/locustfile.py` takes the same."""

from collections.abc import Mapping
from typing import Any

from picker_fleet.request import Band
from picker_tools.load.scenario import Fault, Scenario, Source, Talk, Wave

# Three bands by header, for the scenarios that have to do with them.
_OBJECTIVES: list[Mapping[str, Any]] = [
    {"name": "critical", "criticality": "Critical"},
    {"name": "sheddable", "criticality": "Sheddable"},
]
_LOW_TTL_S = 8.0

_ALL = (
    Scenario(
        name="steady",
        summary="Four clients of equal weight ask for 70 % of what the fleet can serve.",
        sources=tuple(Source(f"client-{n}", 0.175, f"client-{n}") for n in range(1, 5)),
        promises=("no-errors", "nothing-expires"),
    ),
    Scenario(
        name="burst",
        summary="Four ask for 40 % of what can be served, and for 1.5 s of every 6 s four times that.",
        sources=tuple(
            Source(f"client-{n}", 0.1, f"client-{n}", wave=Wave(period_s=6, high_s=1.5, factor=4))
            for n in range(1, 5)
        ),
        promises=("no-errors", "nothing-expires", "queue-drains"),
    ),
    Scenario(
        name="noisy-neighbour",
        summary="One client asks for 150 % of what can be served, a quiet one of the same weight for 20 %.",
        sources=(
            Source("noisy", 1.5, "noisy"),
            Source("quiet", 0.2, "quiet"),
        ),
        promises=("overloaded", "quiet-share", "quiet-wait", "quiet-not-refused"),
    ),
    Scenario(
        name="priority-overload",
        summary="Critical 40 %, Default 40 % and Sheddable 100 % of what can be served, in a queue of 60.",
        sources=(
            Source("critical", 0.4, "critical", objective="critical", band=Band.CRITICAL),
            Source("default", 0.4, "default"),
            Source("sheddable-1", 0.5, "sheddable-1", objective="sheddable", band=Band.SHEDDABLE),
            Source("sheddable-2", 0.5, "sheddable-2", objective="sheddable", band=Band.SHEDDABLE),
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
            Source(
                "sheddable",
                0.03,
                "background",
                objective="sheddable",
                band=Band.SHEDDABLE,
                ttl_s=_LOW_TTL_S,
            ),
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
            "scheduling": {
                "scorers": [{"name": "kv-cache", "weight": 1}, {"name": "in-flight", "weight": 2}]
            },
        },
        needs=(("request_queue_controller.unit", "tokens"),),
    ),
    Scenario(
        name="replica-crash",
        summary="Replicas are killed (SIGKILL) at random moments; 80 % of what can be served is asked for.",
        sources=tuple(Source(f"client-{n}", 0.2, f"client-{n}") for n in range(1, 5)),
        promises=("faults-happened", "no-errors", "nothing-expires"),
        fault=Fault.KILL_REPLICAS,
    ),
    Scenario(
        name="redis-outage",
        summary="Redis is gone for a third of the run and comes back empty, while 80 % is asked for.",
        sources=tuple(Source(f"client-{n}", 0.2, f"client-{n}") for n in range(1, 5)),
        promises=("faults-happened", "outage-serves", "outage-bound", "shared-again", "only-overload-errors"),
        duration_s=24.0,
        fault=Fault.STOP_REDIS,
    ),
    Scenario(
        name="multi-turn",
        summary="Conversations of five turns, each with all said before: half of what can be served.",
        sources=(
            Source(
                "talk", 0.5, "talk", prompt_bytes=(800, 1_600), streamed=1.0, talk=Talk(turns=5, think_s=1.0)
            ),
        ),
        promises=("no-errors", "nothing-expires", "turns-stay"),
        config={
            "scheduling": {
                "scorers": [{"name": "prefix-affinity", "weight": 3}, {"name": "in-flight", "weight": 1}]
            }
        },
    ),
)

SCENARIOS: Mapping[str, Scenario] = {scenario.name: scenario for scenario in _ALL}
