"""What a load scenario is: who asks, how often, for what, and what it is to show. Pure data."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from picker_fleet.request import Band

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
class Talk:
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
    talk: Talk | None = None

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


@dataclass(frozen=True, slots=True)
class Scenario:
    """`config` is laid over the defaults for a fleet of its own; `promises` name judges of `load.judges`.

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
