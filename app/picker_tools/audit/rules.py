"""The settings in force, as a `tuned` entry notes them, and what they make of a request."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from picker_tools.audit.entry import Entry, EntryError


@dataclass(frozen=True, slots=True)
class Rules:
    """The part of the settings that decides order and room (docs/redis-schema.md, `base`)."""

    fairness: str = "weighted-fair"
    ordering: str = "fcfs"
    band_policy: str = "strict"
    guard_share: float = 0.0
    starvation_ms: int = 0  # 0: half the time a request has
    upper_per: float = 0.0
    weights: Mapping[str, float] = field(default_factory=dict)
    caps: Mapping[str, int] = field(default_factory=dict)  # of endpoints that have a limit
    paused: bool = False
    claim_share: float = 1.0  # of the bound, that one request takes at most
    queues: bool = True  # False: the queue is switched off, and nothing takes of the stock
    logged: bool = True  # False: what follows this entry was not written

    @classmethod
    def parse(cls, note: str) -> "Rules":
        """The settings of `note`, JSON; what it does not name is as the scripts take it.

        Raises:
            EntryError: it is no JSON object, or a value has the wrong type.
        """
        try:
            settings: dict[str, Any] = json.loads(note)
            return cls(
                fairness=str(settings.get("fairness", "weighted-fair")),
                ordering=str(settings.get("ordering", "fcfs")),
                band_policy=str(settings.get("band_policy", "strict")),
                guard_share=float(settings.get("guard_share", 0)),
                starvation_ms=int(settings.get("starvation_ms", 0)),
                upper_per=float(settings.get("upper_per", 0)),
                # Lua's empty table may come as an empty list.
                weights={flow: float(weight) for flow, weight in dict(settings.get("weights") or {}).items()},
                caps={address: int(most) for address, most in dict(settings.get("caps") or {}).items()},
                paused=settings.get("paused") == 1,
                claim_share=float(settings.get("claim_share", 1)),
                queues=settings.get("queue_enabled", 1) != 0,
                logged=settings.get("log_max", 1) != 0,
            )
        except (AttributeError, TypeError, ValueError) as fault:
            raise EntryError(f"settings cannot be read: {fault}") from None

    def lane(self, flow: str) -> str:
        """What a band orders: the flow, or '' for all of it."""
        return "" if self.fairness == "none" else flow

    def share(self, entry: Entry) -> float:
        """What serving the request of `entry` costs its lane."""
        if self.fairness == "round-robin":
            return 1.0
        if self.fairness == "none":
            return entry.cost
        return entry.cost / (self.weights.get(entry.flow) or entry.weight)

    def due_ms(self, entry: Entry) -> int:
        """When the request of `entry` becomes overdue."""
        arrived_ms = entry.arrived // 1000
        patience_ms = self.starvation_ms or (entry.deadline_ms - arrived_ms) // 2
        return min(arrived_ms + patience_ms, entry.deadline_ms)

    def ready(self, upper: float) -> int:
        """How many endpoints the bound `upper` was made of."""
        return round(upper / self.upper_per) if self.upper_per > 0 else 0

    def orders_like(self, other: "Rules | None") -> bool:
        """Whether what waits stands in the same lanes and order under both."""
        return other is not None and (self.fairness, self.ordering) == (other.fairness, other.ordering)
