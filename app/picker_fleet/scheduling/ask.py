"""What a request asks of the choice of its endpoint."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from picker_fleet.scheduling.latency import SPECIFIED, LatencyWeights


@dataclass(frozen=True, slots=True)
class PickAsk:
    """One request as filters and scorers see it.

    `subset` holds the only addresses that may be picked (None: any). `adapter` is the target model if it is
    a LoRA adapter, '' for a base model. `selector` gives labels an endpoint must have. `session_endpoint`
    is the address that served the request's session before, '' for none.
    `blocks` is how many prefix blocks the prompt has, `matches` how many of them, from the first on, each
    address has served. `chance` gives numbers in [0, 1): ties, and the scorer `random`.
    """

    subset: frozenset[str] | None = None
    adapter: str = ""
    selector: Mapping[str, str] = field(default_factory=dict)
    session_endpoint: str = ""
    blocks: int = 0
    matches: Mapping[str, int] = field(default_factory=dict)
    latency: LatencyWeights = SPECIFIED
    chance: Callable[[], float] = random.random
