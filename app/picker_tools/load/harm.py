"""What was done to the fleet on purpose."""

from dataclasses import dataclass, field

from picker_tools.load.ledger import Ledger


@dataclass(slots=True)
class Harm:
    """What was done, and when, in seconds since the load began. An outage that has no end goes on."""

    kills: list[tuple[float, str]] = field(default_factory=list)
    outages: list[tuple[float, float | None]] = field(default_factory=list)
    ledgers: list[Ledger] = field(default_factory=list)  # the log as it was before it was lost
