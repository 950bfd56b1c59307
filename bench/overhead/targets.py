"""What the picker may cost, and whether it kept to it. Stated, never asserted: machines differ."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.overhead.figures import Comparison, Spread, comparisons, length_ratio
from bench.overhead.measure import RigResult
from bench.overhead.memory import Memory

_CPU = 1.6
_ADDED_P50 = 1.4
_LONG_BY_SHORT = 1.1
_MEMORY = 1.03  # "flat": what an allocator's luck may add


@dataclass(frozen=True, slots=True)
class Target:
    """A ratio that should not pass `limit`; judged by its median over the rounds."""

    what: str
    limit: float
    measured: Spread

    @property
    def met(self) -> bool:
        return self.measured.median <= self.limit


def judged(results: Sequence[RigResult], memory: Memory | None) -> list[Target]:
    """The targets of which there is a measurement; all are of `lean`."""
    targets: list[Target] = []
    for result in results:
        if result.rig.mode != "lean":
            continue
        for comparison in comparisons(result):
            if comparison.floor == "constant":
                targets += _of_case(comparison)
        lengths = length_ratio(result, "picker")
        if lengths is not None:
            short, long = (case.tokens for case in result.rig.ends)
            what = f"CPU a request, picker's processes: {result.rig.name}, {long} tokens by {short}"
            targets.append(Target(what, _LONG_BY_SHORT, lengths))
    if memory is not None:
        first, last = memory.marks[1], memory.marks[-1]
        grown = last.replica_mib / first.replica_mib
        what = f"memory of a replica after {last.requests} requests by that after {first.requests}"
        targets.append(Target(what, _MEMORY, Spread(grown, grown, grown)))
    return targets


def _of_case(comparison: Comparison) -> list[Target]:
    where = f"{comparison.rig.name}, {comparison.case.name}"
    targets = [
        Target(f"CPU a request, picker's processes: {where}", _CPU, comparison.cpu),
        Target(f"CPU a request, picker and Valkey: {where}", _CPU, comparison.cpu_with_valkey),
    ]
    if comparison.case.tokens == 1:  # up to the headers, an answer's length changes nothing but the noise
        targets.append(Target(f"p50 added latency: {where}", _ADDED_P50, comparison.added_p50))
    return targets
