"""More trials of live changes: bounds apart, band weights, the weights and caps of the score."""

from collections.abc import Mapping
from typing import Any

from bench.tuning.fleet import Group
from bench.tuning.knobs import BURST, Trial, bounds, places, queue, shares, stock


def _aware(**keys: object) -> Mapping[str, Any]:
    return {**queue(ordering="workload-aware"), "workloads": keys}


LIVE = (
    Trial(
        "lower_bound_per_backend, upper_bound_per_backend",
        "24 requests arrive at once at a watermark of 2, two endpoints",
        {
            f"{lower}, {upper}": bounds(lower_bound_per_backend=lower, upper_bound_per_backend=upper)
            for lower, upper in ((2, 2), (1, 4))
        },
        (Group("client", 24),),
        stock,
        paused=False,
        fleets=dict.fromkeys(("2, 2", "1, 4"), BURST),
    ),
    Trial(
        "band_weights",
        "24 requests of each band wait, the lowest came first, `band_policy: weighted`; the first 20 served",
        {
            ", ".join(str(weight) for weight in weights): queue(
                band_policy="weighted",
                band_weights=dict(zip(("Critical", "Default", "Sheddable"), weights, strict=True)),
            )
            for weights in ((70, 20, 10), (50, 30, 20))
        },
        (Group("low", 24, "sheddable"), Group("middle", 24), Group("high", 24, "critical")),
        shares(20),
    ),
    Trial(
        "workloads.criticality_weight",
        "`workload-aware`: 4 requests of `plain` (criticality 3), then 4 of `grave` (criticality 5)",
        {f"{weight:g}": _aware(criticality_weight=weight) for weight in (0.4, 0)},
        (Group("one", 4, workload="plain", criticality=3), Group("one", 4, workload="grave", criticality=5)),
        places,
    ),
    Trial(
        "workloads.rate_cap",
        "`workload-aware`: 20 requests of `busy`, then 2 of `rare`",
        {"100": _aware(rate_cap=100), "1": _aware(rate_cap=1)},
        (Group("one", 20, workload="busy"), Group("one", 2, workload="rare")),
        places,
    ),
    Trial(
        "workloads.rate_weight, rate_cap 1",
        "the same",
        {"0.2": _aware(rate_cap=1, rate_weight=0.2), "0": _aware(rate_cap=1, rate_weight=0)},
        (Group("one", 20, workload="busy"), Group("one", 2, workload="rare")),
        places,
    ),
)
