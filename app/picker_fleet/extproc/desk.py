"""What all exchanges of a replica share."""

from collections.abc import Callable
from dataclasses import dataclass

from picker_fleet.admission.gate import Gate
from picker_fleet.config import Settings
from picker_fleet.extproc.bodies import Bodies
from picker_fleet.extproc.door import Door
from picker_fleet.extproc.newcomers import Newcomers
from picker_fleet.intake import Intake
from picker_fleet.paths import AllowedPaths
from picker_fleet.rates import Rates
from picker_fleet.sections import ExtProc
from picker_fleet.telemetry.decisions import DecisionLines
from picker_fleet.telemetry.metrics import Metrics

_READS_S = 2.0  # reads that nobody has asked for in this time are lost


@dataclass(frozen=True, slots=True)
class Desk:
    """Its parts, made once. `reads` bounds what goes through without admission, `fill` is the part of the
    queue that is taken, 0 to 1. `clock` is in seconds and only its differences count."""

    settings: Settings
    paths: AllowedPaths
    reads: Rates
    bodies: Bodies
    newcomers: Newcomers
    intake: Intake
    gate: Gate
    door: Door
    metrics: Metrics
    lines: DecisionLines
    clock: Callable[[], float]
    fill: Callable[[], float]


def reads(settings: ExtProc, clock: Callable[[], float]) -> Rates:
    """The bound of what goes through without admission: one for all clients of the replica."""
    return Rates(settings.read_rate, max(settings.read_rate * _READS_S, 1.0), 1, clock)


def newcomers(settings: Settings, clock: Callable[[], float]) -> Newcomers:
    """The bound of flows that clients name."""
    names = {model.name for model in settings.models}
    queue = settings.fair_request_queue
    return Newcomers(queue.new_flows_per_minute, names, settings.extproc.trusted_hops, clock)
