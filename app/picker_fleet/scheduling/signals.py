"""What is known of one endpoint when it is looked at as a candidate."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from picker_fleet.scheduling.latency import LatencyStats


@dataclass(frozen=True, slots=True)
class Signals:
    """One endpoint (`address`: `ip:port`) with what was scraped from it and what the fleet knows of it.

    Scraped, and None while unknown: `waiting` and `running` requests, `kv_utilisation` (0 to 1),
    `max_adapters` (LoRA adapters that fit at once, running and waiting ones together). A stale endpoint's
    scraped figures are dropped here, so that they are unknown to everything that reads them; so is a figure
    that is no finite number.
    Known to the fleet: `in_flight` requests as last read (the script that reserves has the live figure), and
    `latency` of its last completions, None without any. `has_adapter_slot` follows from the others: another
    adapter fits beside the running and the waiting ones; False while unknown.
    """

    address: str
    labels: Mapping[str, str] = field(default_factory=dict)
    draining: bool = False
    healthy: bool = True
    waiting: float | None = None
    running: float | None = None
    kv_utilisation: float | None = None
    max_adapters: int | None = None
    active_adapters: frozenset[str] = frozenset()
    waiting_adapters: frozenset[str] = frozenset()
    stale: bool = False
    in_flight: float = 0.0
    latency: LatencyStats | None = None
    has_adapter_slot: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if self.stale:
            for name in ("waiting", "running", "kv_utilisation", "max_adapters"):
                object.__setattr__(self, name, None)
            for name in ("active_adapters", "waiting_adapters"):
                object.__setattr__(self, name, frozenset())
        for name in ("waiting", "running", "kv_utilisation"):
            figure = getattr(self, name)
            if figure is not None and not math.isfinite(figure):
                object.__setattr__(self, name, None)
        if self.max_adapters is not None:
            adapters = len(self.active_adapters) + len(self.waiting_adapters)
            object.__setattr__(self, "has_adapter_slot", adapters < self.max_adapters)
