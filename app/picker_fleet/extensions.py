"""The interface for your own scorers, filters, orderings and cost estimators, version 1.

An extension is a distribution with an entry point that names an `Extension`:

    [project.entry-points."picker_fleet.scorers"]
    my-scorer = "my_package:EXTENSION"

    class Parameters(BaseModel, extra="forbid"):
        label: str

    def make(parameters: Parameters) -> Scorer:
        def score(pick: PickRequest, candidates: Sequence[EndpointState]) -> list[float]: ...
        return score

    EXTENSION = Extension(version=1, make=make, parameters=Parameters)

`version` is the number of the interface for which you wrote the extension; never pass `VERSION` there. The
folder `examples/extension` is a complete distribution. The configuration names extensions; a stage's scorers
take their parameters from `scheduling.scorer_parameters`:

| group | protocol | key |
|---|---|---|
| `picker_fleet.scorers` | `Scorer` | `scheduling.scorers: [{name, weight, parameters}]` |
| `picker_fleet.filters` | `Filter` | `scheduling.filters: [{name, parameters}]` |
| `picker_fleet.orderings` | `Ordering` | `fair_request_queue: {ordering: edf, due: {name, parameters}}` |
| `picker_fleet.cost_estimators` | `CostEstimator` | `fair_request_queue.cost: {name, parameters}` |

An extension gets one call at a time, in a thread of its own, and must not change its arguments. The picker
ignores a call that raises, or takes longer than `scheduling.extension_budget`: so a filter is no access
control. Do slow work in `make`, or in a thread that `make` starts. Prefix matches, the session's endpoint,
latencies and forecasts are known only while a built-in scorer that needs them is configured.

A version of the interface gains fields but loses none. `GET /api/v1/config` shows the parameters: let a
parameter name the file of a secret instead of the secret.
"""

from picker_fleet.domain.extensions import VERSION, Extension, NoParameters
from picker_fleet.domain.request import InferenceRequest
from picker_fleet.scheduling.extension_calls import CostEstimator, CostFacts, Ordering
from picker_fleet.scheduling.scheduler import Filter
from picker_fleet.scheduling.scorers import EndpointState, PickRequest, Scorer

__all__ = [
    "VERSION",
    "CostEstimator",
    "CostFacts",
    "EndpointState",
    "Extension",
    "Filter",
    "InferenceRequest",
    "NoParameters",
    "Ordering",
    "PickRequest",
    "Scorer",
]
