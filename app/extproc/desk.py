"""What all exchanges of a replica share."""

from collections.abc import Callable
from dataclasses import dataclass

from app.admission.gate import Gate
from app.config import Settings
from app.extproc.door import Door
from app.intake import Intake
from app.telemetry.decisions import DecisionLines
from app.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Desk:
    """Its parts, made once. `clock` is in seconds and only its differences count. `fill` is the part of
    the queue that is taken, 0 to 1."""

    settings: Settings
    intake: Intake
    gate: Gate
    door: Door
    metrics: Metrics
    lines: DecisionLines
    clock: Callable[[], float]
    fill: Callable[[], float]
