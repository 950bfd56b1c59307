"""Medians and ratios over the rounds. Pure.

A ratio is taken within each round, between neighbours in time, and then its median over the rounds: what
else the machine did in a round touches both sides of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from bench.overhead.cases import Case, Rig, Variant
from bench.overhead.measure import Reading, Readings, RigResult

FLOORS: tuple[Variant, ...] = ("constant", "terse")


@dataclass(frozen=True, slots=True)
class Spread:
    """A median over the rounds, and between what it is one."""

    median: float
    low: float
    high: float

    @property
    def told_from_noise(self) -> bool:
        """Whether a ratio means anything: not if one side, a difference, came out below nothing."""
        return 0 <= self.median < inf


@dataclass(frozen=True, slots=True)
class Row:
    """One variant in one case.

    Latencies are up to the last byte. Added latency is up to the answer's headers, less that of `none`:
    what comes after them passes the picker in `standard` only, and varies more than the picker adds.
    """

    rig: Rig
    case: Case
    variant: Variant
    requests_per_s: float
    picker_us: float
    valkey_us: float
    envoy_us: float
    p50_ms: float
    p99_ms: float
    added_p50_ms: float | None
    added_p99_ms: float | None
    bypassed: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The picker by a constant one in one case; 1 would be a picker that costs nothing of its own."""

    rig: Rig
    case: Case
    floor: Variant
    cpu: Spread  # the pickers' own processes
    cpu_with_valkey: Spread
    added_p50: Spread
    added_p99: Spread


def spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def rows(result: RigResult) -> list[Row]:
    """Every variant of every case."""
    return [
        _row(result, case, variant, readings)
        for case, readings in result.cases.items()
        for variant in readings
    ]


def comparisons(result: RigResult) -> list[Comparison]:
    """Every case by each floor that it has."""
    return [
        Comparison(
            rig=result.rig,
            case=case,
            floor=floor,
            cpu=_ratio(readings, floor, lambda reading: reading.picker_us),
            cpu_with_valkey=_ratio(readings, floor, lambda reading: reading.picker_us + reading.valkey_us),
            added_p50=_added_ratio(readings, floor, _first_p50),
            added_p99=_added_ratio(readings, floor, _first_p99),
        )
        for case, readings in result.cases.items()
        for floor in FLOORS
        if floor in readings
    ]


def length_ratio(result: RigResult, variant: Variant) -> Spread | None:
    """CPU a request of the longest answer by that of the shortest, at one pace; None if not measured.

    Of the pickers' processes only: Envoy's work grows with the answer whoever picks.
    """
    if variant not in result.paced:
        return None
    short, long = result.paced[variant]
    return spread(_divided(long, short))


def _row(result: RigResult, case: Case, variant: Variant, readings: Readings) -> Row:
    own = readings[variant]

    def middle(figure: Callable[[Reading], float]) -> float:
        return median(figure(reading) for reading in own)

    compared = variant in (*FLOORS, "picker")
    return Row(
        rig=result.rig,
        case=case,
        variant=variant,
        requests_per_s=middle(lambda reading: reading.requests_per_s),
        picker_us=middle(lambda reading: reading.picker_us),
        valkey_us=middle(lambda reading: reading.valkey_us),
        envoy_us=middle(lambda reading: reading.envoy_us),
        p50_ms=middle(lambda reading: (reading.calm or reading.busy).last_p50_ms),
        p99_ms=middle(lambda reading: (reading.calm or reading.busy).last_p99_ms),
        added_p50_ms=median(_added(readings, variant, _first_p50)) if compared else None,
        added_p99_ms=median(_added(readings, variant, _first_p99)) if compared else None,
        bypassed=result.bypassed.get(variant),
    )


def _first_p50(reading: Reading) -> float:
    return (reading.calm or reading.busy).first_p50_ms


def _first_p99(reading: Reading) -> float:
    return (reading.calm or reading.busy).first_p99_ms


def _added_ratio(readings: Readings, floor: Variant, figure: Callable[[Reading], float]) -> Spread:
    return spread(_divided(_added(readings, "picker", figure), _added(readings, floor, figure)))


def _ratio(readings: Readings, floor: Variant, figure: Callable[[Reading], float]) -> Spread:
    picker, constant = ([figure(each) for each in readings[variant]] for variant in ("picker", floor))
    return spread(_divided(picker, constant))


def _added(readings: Readings, variant: Variant, figure: Callable[[Reading], float]) -> list[float]:
    pairs = zip(readings[variant], readings["none"], strict=True)
    return [figure(reading) - figure(without) for reading, without in pairs]


def _divided(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Round by round; infinite where `below` is nothing or less, which differences may be by noise."""
    pairs = zip(above, below, strict=True)
    return [one / other if other > 0 else inf for one, other in pairs]
