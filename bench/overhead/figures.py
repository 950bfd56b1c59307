"""Medians and ratios over the rounds, and the targets. Pure.

A ratio is taken within each round, then its median over the rounds: what else the machine did in a round
affects both sides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from bench.overhead.cases import Case, Setup, Variant
from bench.overhead.measure import Memory, Reading, Readings, SetupResult

BASELINES: tuple[Variant, ...] = ("constant", "terse")


@dataclass(frozen=True, slots=True)
class Spread:
    """A median over the rounds, with the lowest and highest value."""

    median: float
    low: float
    high: float

    @property
    def is_meaningful(self) -> bool:
        """Whether a ratio means anything: not if one side, a difference, is negative."""
        return 0 <= self.median < inf


@dataclass(frozen=True, slots=True)
class Row:
    """One variant in one case.

    Latencies are to the last byte. Added latency is to the answer's headers, less that of `none`: the rest
    passes the picker in `standard` only, and varies more than the picker adds.
    """

    setup: Setup
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
    """The picker by a constant picker in one case."""

    setup: Setup
    case: Case
    baseline: Variant
    cpu: Spread  # the pickers' own processes
    cpu_with_valkey: Spread
    added_p50: Spread
    added_p99: Spread


def spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def rows(result: SetupResult) -> list[Row]:
    """Every variant of every case."""
    return [
        _row(result, case, variant, readings)
        for case, readings in result.cases.items()
        for variant in readings
    ]


def comparisons(result: SetupResult) -> list[Comparison]:
    """Every case by each of its baselines."""
    return [
        Comparison(
            setup=result.setup,
            case=case,
            baseline=baseline,
            cpu=_ratio(readings, baseline, lambda reading: reading.picker_us),
            cpu_with_valkey=_ratio(readings, baseline, lambda reading: reading.picker_us + reading.valkey_us),
            added_p50=_added_ratio(readings, baseline, _first_p50),
            added_p99=_added_ratio(readings, baseline, _first_p99),
        )
        for case, readings in result.cases.items()
        for baseline in BASELINES
        if baseline in readings
    ]


def length_ratio(result: SetupResult, variant: Variant) -> Spread | None:
    """CPU a request of the longest answer by that of the shortest, at one rate; None if not measured.

    Of the pickers only: Envoy's work grows with the answer in any case.
    """
    if variant not in result.paced:
        return None
    short, long = result.paced[variant]
    return spread(_divided(long, short))


def _row(result: SetupResult, case: Case, variant: Variant, readings: Readings) -> Row:
    own = readings[variant]

    def middle(figure: Callable[[Reading], float]) -> float:
        return median(figure(reading) for reading in own)

    compared = variant in (*BASELINES, "picker")
    return Row(
        setup=result.setup,
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


def _added_ratio(readings: Readings, baseline: Variant, figure: Callable[[Reading], float]) -> Spread:
    return spread(_divided(_added(readings, "picker", figure), _added(readings, baseline, figure)))


def _ratio(readings: Readings, baseline: Variant, figure: Callable[[Reading], float]) -> Spread:
    picker, constant = ([figure(each) for each in readings[variant]] for variant in ("picker", baseline))
    return spread(_divided(picker, constant))


def _added(readings: Readings, variant: Variant, figure: Callable[[Reading], float]) -> list[float]:
    pairs = zip(readings[variant], readings["none"], strict=True)
    return [figure(reading) - figure(without) for reading, without in pairs]


def _divided(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Round by round; infinite where `below` is not positive, as differences may be by noise."""
    pairs = zip(above, below, strict=True)
    return [one / other if other > 0 else inf for one, other in pairs]


_CPU = 1.6
_ADDED_P50 = 1.4
_LONG_BY_SHORT = 1.1
_MEMORY = 1.03  # "flat", but for the allocator


@dataclass(frozen=True, slots=True)
class Target:
    """A ratio whose median over the rounds should be at most `limit`. Reported, never asserted."""

    what: str
    limit: float
    measured: Spread

    @property
    def met(self) -> bool:
        return self.measured.median <= self.limit


def targets(results: Sequence[SetupResult], memory: Memory | None) -> list[Target]:
    """The targets of which there is a measurement; all are of `lean`."""
    found: list[Target] = []
    for result in results:
        if result.setup.mode != "lean":
            continue
        for comparison in comparisons(result):
            if comparison.baseline == "constant":
                found += _case_targets(comparison)
        lengths = length_ratio(result, "picker")
        if lengths is not None:
            short, long = (case.tokens for case in result.setup.ends)
            what = f"CPU a request, picker's processes: {result.setup.name}, {long} tokens by {short}"
            found.append(Target(what, _LONG_BY_SHORT, lengths))
    if memory is not None:
        first, last = memory.samples[1], memory.samples[-1]
        grown = last.replica_mib / first.replica_mib
        what = f"memory of a replica after {last.requests} requests by that after {first.requests}"
        found.append(Target(what, _MEMORY, Spread(grown, grown, grown)))
    return found


def _case_targets(comparison: Comparison) -> list[Target]:
    where = f"{comparison.setup.name}, {comparison.case.name}"
    found = [
        Target(f"CPU a request, picker's processes: {where}", _CPU, comparison.cpu),
        Target(f"CPU a request, picker and Valkey: {where}", _CPU, comparison.cpu_with_valkey),
    ]
    if comparison.case.tokens == 1:  # the latency to the headers does not depend on the answer's length
        found.append(Target(f"p50 added latency: {where}", _ADDED_P50, comparison.added_p50))
    return found
