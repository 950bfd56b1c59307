"""What each request asks for. Everything follows from its id, so that any replica can bring it again."""

import random
from dataclasses import dataclass

from picker_fleet.request import Band, InferenceRequest, Workload

FLOWS = tuple(f"flow-{number}" for number in range(12))
_LIMITED, _LIMIT = 3, 2  # so many flows may have so many in flight on each endpoint
_WORKLOADS = 30
_MODEL = "llama"


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, what its client will do, and what its answer will take.

    `leaves_s`: the client hangs up after so long without an answer; None if it is patient. `tokens`: the
    request's real cost.
    """

    request: InferenceRequest
    leaves_s: float | None
    service_s: float
    held: bool
    tokens: int


def ask_of(request_id: str) -> Ask:
    """The same for the same id, in every process."""
    dice = random.Random(request_id)
    number = dice.randrange(len(FLOWS))
    shared = dice.random() < 0.5
    name = f"workload-{dice.randrange(_WORKLOADS)}" if shared else f"auto-{request_id}"
    tokens = dice.randint(1, 20)
    long = dice.random() < 0.002
    request = InferenceRequest(
        request_id,
        model=_MODEL,
        target_model=_MODEL,
        stream=False,
        flow=FLOWS[number],
        band=Band(dice.choice((0, 1, 1, 2, 2))),
        weight=1.0 + number % 4,
        workload=Workload(name, dice.randint(1, 5), registered=shared),
        cost=float(max(1, round(tokens * dice.uniform(0.25, 4)))),
        ttl_s=dice.choice((0.3, 1.0, 5.0, 30.0)),
        subset=None,
        limit=_LIMIT if number < _LIMITED else 0,
    )
    return Ask(
        request,
        leaves_s=dice.uniform(0, 0.3) if dice.random() < 0.1 else None,
        service_s=4.0 if long else dice.uniform(0.002, 0.02),
        held=long,
        tokens=tokens,
    )
