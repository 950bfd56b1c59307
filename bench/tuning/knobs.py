"""The changes that are tried, the requests that meet them, and what is read off the log."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.tuning.fleet import Group, Seen

Change = Mapping[str, Any]
BURST = "burst"  # the fleet for requests that are to arrive all at once
_ONE_FLOW = (Group("client", 24),)


@dataclass(frozen=True, slots=True)
class Trial:
    """One knob: the values to try, each as a change of the configuration, and what to tell of each run.

    `fleets` names, by value, the fleet that a run needs, if not the one of all live changes. `hold_s` is how
    long dispatch stays paused once all are in.
    """

    knob: str
    asked: str
    values: Mapping[str, Change]
    groups: Sequence[Group]
    told: Callable[[Seen], str]
    paused: bool = True
    fleets: Mapping[str, str] = field(default_factory=dict)
    hold_s: float = 0.0


def queue(**keys: object) -> Change:
    return {"fair_request_queue": keys}


def bounds(**keys: object) -> Change:
    return {"request_queue_controller": keys}


def stock(seen: Seen) -> str:
    """What was in flight at most, and while somebody waited."""
    waiting = max((entry.stock for entry in seen.served()), default=0.0)
    bypassed = sum(entry.event == "bypassed" for entry in seen.entries)
    return f"in flight at most {seen.highest_stock:g}; {bypassed} past the empty queue; then {waiting:g}"


def shares(first: int) -> Callable[[Seen], str]:
    def told(seen: Seen) -> str:
        flows = Counter(entry.flow for entry in seen.served()[:first])
        return ", ".join(f"{flow} {count}" for flow, count in sorted(flows.items()))

    return told


def places(seen: Seen) -> str:
    """The places of each workload in the order of service."""
    places: dict[str, list[int]] = {}
    for place, entry in enumerate(seen.served(), 1):
        places.setdefault(entry.workload, []).append(place)
    return "; ".join(f"{name} {_short(at)}" for name, at in sorted(places.items()))


def _sheddable(seen: Seen) -> str:
    """Where the Sheddable requests come in the order of service."""
    at = [place for place, entry in enumerate(seen.served(), 1) if entry.band == 2]
    return "Sheddable served " + _short(at)


def _short(places: Sequence[int]) -> str:
    if len(places) > 1 and places[-1] - places[0] == len(places) - 1:
        return f"{places[0]}–{places[-1]}"
    return ", ".join(str(place) for place in places)


def answers(seen: Seen) -> str:
    codes = sorted(seen.codes().items())
    return "; ".join(f"{flow}: {count} {code}" for (flow, code), count in codes)


_SHARED = (Group("bulk", 24), Group("gold", 24))
_BANDS = (Group("low", 24, "sheddable"), Group("middle", 24), Group("high", 24, "critical"))
_WORKLOADS = (
    Group("shared", 4, workload="early", criticality=3),
    Group("shared", 4, workload="important", criticality=5),
    Group("shared", 4, workload="urgent", criticality=3, ttl="300s"),
)
_OVERDUE = (Group("low", 4, "sheddable"), Group("high", 36, "critical"))
_FULL = (Group("low", 20, "sheddable"), Group("high", 8, "critical"))
_NOISY = (Group("noisy", 30), Group("quiet", 5))

TRIALS = (
    Trial(
        "watermark_per_backend",
        "24 requests wait, two endpoints",
        {text: bounds(watermark_per_backend=value) for text, value in (("1", 1), ("2", 2), ("4", 4))},
        _ONE_FLOW,
        stock,
    ),
    Trial(
        "percentage_deviation_for_bounds",
        "24 requests arrive at once at a watermark of 4, two endpoints",
        {
            f"{value:g}": bounds(watermark_per_backend=4, percentage_deviation_for_bounds=value)
            for value in (0.1, 0.25, 0.5)
        },
        _ONE_FLOW,
        stock,
        paused=False,
        fleets=dict.fromkeys(("0.1", "0.25", "0.5"), BURST),
    ),
    Trial(
        "fairness",
        "24 requests of `bulk` wait, then 24 of `gold` (weight 3); the first 16 served",
        {
            name: {"fair_request_queue": {"fairness": name}, "weights": {"gold": 3}}
            for name in ("weighted-fair", "round-robin", "none")
        },
        _SHARED,
        shares(16),
    ),
    Trial(
        "band_policy",
        "24 requests of each band wait, the lowest came first; the first 20 served",
        {name: queue(band_policy=name) for name in ("strict", "weighted")},
        _BANDS,
        shares(20),
    ),
    Trial(
        "ordering",
        "one flow, four requests each of three workloads: `early` (first, criticality 3), `important` "
        "(criticality 5), `urgent` (last, TTL 300 s instead of 600)",
        {name: queue(ordering=name) for name in ("fcfs", "edf", "workload-aware")},
        _WORKLOADS,
        places,
    ),
    Trial(
        "guard_share",
        "4 Sheddable requests wait, then 36 Critical; all overdue (`starvation_after: 100ms`)",
        {f"{value:g}": queue(guard_share=value, starvation_after="100ms") for value in (0, 0.1, 0.5)},
        _OVERDUE,
        _sheddable,
    ),
    Trial(
        "starvation_after",
        "the same at `guard_share: 0.5`",
        {text: queue(guard_share=0.5, starvation_after=text) for text in ("100ms", "250s")},
        _OVERDUE,
        _sheddable,
    ),
    Trial(
        "overload",
        "a queue of 20: 20 Sheddable requests arrive, then 8 Critical",
        {
            name: queue(overload=name, total_capacity=20, flow_capacity=20)
            for name in ("preempt", "reject-noncritical")
        },
        _FULL,
        answers,
    ),
    Trial(
        "flow_capacity",
        "a queue of 20: a flow sends 30 requests, then another 5",
        {str(value): queue(total_capacity=20, flow_capacity=value) for value in (20, 10)},
        _NOISY,
        answers,
    ),
    Trial(
        "total_capacity",
        "the same at `flow_capacity: 20`",
        {str(value): queue(total_capacity=value, flow_capacity=20) for value in (20, 40)},
        _NOISY,
        answers,
    ),
)
