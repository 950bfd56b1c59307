"""The scenarios of `picker load`: sources, faults, promises to check, and the plan of all requests.

`deploy/locust/locustfile.py` sends requests of the same sources.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import merge
from itertools import islice
from random import Random
from typing import Any

import orjson

from picker_fleet.domain.bands import Band
from picker_tools.load.generator import Planned, Request

_PROMPT_BYTES = (200, 400)
_STREAMED = 0.8  # this part of the requests asks for a streamed answer
_WORDS = ("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliett")

TTFT_MS, ITL_MS = 60.0, 12.0  # the simulators' times to first and next token in a fleet that a run starts
ANSWER_TOKENS = 16
ANSWER_S = (TTFT_MS + ITL_MS * (ANSWER_TOKENS - 1)) / 1000  # seconds for an answer on an idle simulator


@dataclass(frozen=True, slots=True)
class Source:
    """A population of clients. `load` is the clients' demand as a fraction of the fleet's capacity.

    If `objective` is '', the source's requests name no objective.
    """

    name: str
    load: float
    flow: str
    objective: str = ""
    band: Band = Band.DEFAULT
    workload: str = ""
    criticality: int = 3
    ttl_s: float = 30.0


class Fault(StrEnum):
    """The faults that a scenario may inject into a fleet that the run starts."""

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
    """A named load. `config` overrides the default settings of a fleet that the run starts; `promises` are
    names of entries in `SCENARIO_CHECKS`.

    `needs` has settings (dotted key, value) that a fleet that already runs must have for this scenario.
    """

    name: str
    summary: str
    sources: tuple[Source, ...]
    promises: tuple[str, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[tuple[str, str], ...] = ()
    duration_s: float = 20.0
    fault: Fault = Fault.NONE

    @property
    def own_fleet_only(self) -> bool:
        return self.fault is not Fault.NONE

    @property
    def objectives(self) -> frozenset[str]:
        """The names of the objectives that the fleet must have."""
        return frozenset(source.objective for source in self.sources if source.objective)


@dataclass(frozen=True, slots=True)
class Plan:
    """A run of `scenario` with at most `max_requests` requests; `rate_per_s` None: the fleet's capacity."""

    scenario: Scenario
    duration_s: float
    seed: int
    max_requests: int
    rate_per_s: float | None = None


_LOW_TTL_S = 8.0
_NOISY_AND_QUIET = (Source("noisy", 1.5, "noisy"), Source("quiet", 0.2, "quiet"))
_OUTAGE_PROMISES = (
    "faults-happened", "outage-serves", "outage-bound", "shared-again", "only-overload-errors",
)  # fmt: skip
_BY_WORKLOAD = (("fair_request_queue.ordering", "workload-aware"),)


def _alike(load: float) -> tuple[Source, ...]:
    """Four sources of equal weight and equal demand `load`."""
    return tuple(Source(f"client-{n}", load, f"client-{n}") for n in range(1, 5))


def _in_shared_flow(name: str, load: float, criticality: int, ttl_s: float = 30.0) -> Source:
    """A source of requests that is one workload of the flow `shared`."""
    return Source(name, load, "shared", workload=name, criticality=criticality, ttl_s=ttl_s)


_ALL = (
    Scenario(
        name="steady",
        summary="Four clients of equal weight ask for 70 % of the fleet's capacity.",
        sources=_alike(0.175),
        promises=("no-errors", "nothing-expires"),
    ),
    Scenario(
        name="noisy-neighbour",
        summary="A noisy client asks for 150 % of the capacity, a quiet one of equal weight for 20 %.",
        sources=_NOISY_AND_QUIET,
        promises=("overloaded", "quiet-share", "quiet-wait", "quiet-not-refused"),
    ),
    Scenario(
        name="starvation",
        summary=(
            "Criticality-5 workloads overload one flow, which a criticality-1 workload shares; a Sheddable "
            "flow waits in a lower band. The guard's tenth of the service covers the two low demands."
        ),
        sources=(
            _in_shared_flow("urgent-1", 0.7, 5),
            _in_shared_flow("urgent-2", 0.7, 5),
            _in_shared_flow("low", 0.04, 1, _LOW_TTL_S),
            Source("sheddable", 0.03, "background", "sheddable", Band.SHEDDABLE, ttl_s=_LOW_TTL_S),
        ),
        promises=("overloaded", "low-not-starved"),
        config={
            "objectives": [{"name": "sheddable", "criticality": "Sheddable"}],
            "fair_request_queue": {"ordering": "workload-aware", "flow_capacity": 100},
        },
        needs=_BY_WORKLOAD,
    ),
    Scenario(
        name="workload-aware",
        summary=(
            "Four workloads of one flow ask for 130 % of the capacity: two busy ones of criticality 3, one "
            "of criticality 5, and a quiet one of criticality 3. Only the workload score ranks them."
        ),
        sources=(
            _in_shared_flow("urgent", 0.3, 5),
            _in_shared_flow("quiet", 0.1, 3),
            _in_shared_flow("busy-1", 0.45, 3),
            _in_shared_flow("busy-2", 0.45, 3),
        ),
        promises=("overloaded", "urgent-first", "seldom-first"),
        config={
            "fair_request_queue": {"ordering": "workload-aware", "flow_capacity": 400},
            # With a short rate window and a low cap, rates affect the scores even in a short, small run.
            "workloads": {"rate_window": "10s", "rate_cap": 20},
        },
        needs=_BY_WORKLOAD,
    ),
    Scenario(
        name="replica-crash",
        summary="Replicas die (SIGKILL) at random moments, while clients ask for 80 % of the capacity.",
        sources=_alike(0.2),
        promises=("faults-happened", "no-errors", "nothing-expires"),
        fault=Fault.KILL_REPLICAS,
    ),
    Scenario(
        name="redis-outage",
        summary="Redis is down for a third of the run and restarts empty, at a load of 80 % of the capacity.",
        sources=_alike(0.2),
        promises=_OUTAGE_PROMISES,
        duration_s=24.0,
        fault=Fault.STOP_REDIS,
    ),
    Scenario(
        name="demo",
        summary=(
            "A noisy client asks for 150 % of the capacity, a quiet one of equal weight for 20 %; a "
            "replica is killed, and later Redis."
        ),
        sources=_NOISY_AND_QUIET,
        promises=("overloaded", "quiet-wait", "quiet-not-refused", *_OUTAGE_PROMISES),
        duration_s=60.0,
        fault=Fault.KILL_AND_STOP,
    ),
)

SCENARIOS: Mapping[str, Scenario] = {scenario.name: scenario for scenario in _ALL}


def source_request(source: Source, model: str, number: int, seed: int) -> Request:
    """Make request number `number` of `source`. The prompt of each request is unique."""
    chance = Random(f"{seed}/{source.name}/{number}")
    text = " ".join(chance.choices(_WORDS, k=80))[: chance.randint(*_PROMPT_BYTES)]
    headers = [
        ("x-gateway-inference-fairness-id", source.flow),
        ("x-llm-d-inference-ttl", f"{source.ttl_s:g}s"),
    ]
    if source.objective:
        headers.append(("x-gateway-inference-objective", source.objective))
    if source.workload:
        context = {"workload_id": source.workload, "criticality": source.criticality}
        headers.append(("x-workload-context", orjson.dumps(context).decode()))
    return Request(
        f"{source.name} {number} {text}",
        ANSWER_TOKENS,
        streamed=chance.random() < _STREAMED,
        headers=tuple(headers),
        model=model,
    )


def planned(plan: Plan, capacity_per_s: float, model: str) -> Iterator[Planned]:
    """All requests of a run, in order of time. Each source's arrivals are a Poisson process; the seed, the
    scenario and the capacity determine all times.
    """
    sources = plan.scenario.sources
    arrivals = merge(*(_arrivals(place, plan, capacity_per_s) for place in range(len(sources))))
    for at_s, place, number in islice(arrivals, plan.max_requests):
        source = sources[place]
        yield Planned(at_s, source_request(source, model, number, plan.seed), source.name, number)


def _arrivals(place: int, plan: Plan, capacity_per_s: float) -> Iterator[tuple[float, int, int]]:
    source = plan.scenario.sources[place]
    chance, at_s, number = Random(f"{plan.seed}/{source.name}"), 0.0, 0
    while (at_s := at_s + chance.expovariate(source.load * capacity_per_s)) < plan.duration_s:
        yield at_s, place, number
        number += 1
