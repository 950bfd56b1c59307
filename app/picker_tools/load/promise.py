"""A promise of the fleet, judged by a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

KEPT = 5  # cases of one broken promise that are told


class Verdict(StrEnum):
    HELD = "held"
    BROKEN = "broken"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True, slots=True)
class Promise:
    """`says` what is promised, `evidence` what the verdict rests on, `cases` the first that broke it."""

    name: str
    says: str
    verdict: Verdict
    evidence: str
    cases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """What a judge has to say; `load.judges` adds the name and the words of the promise."""

    verdict: Verdict
    evidence: str
    cases: tuple[str, ...] = ()


def unless(cases: Sequence[object], evidence: str) -> Finding:
    """Held where there are no `cases` against it."""
    if not cases:
        return Finding(Verdict.HELD, evidence)
    return Finding(Verdict.BROKEN, f"{evidence}; {len(cases)} against it", tuple(map(str, cases[:KEPT])))


def held_if(kept: bool, evidence: str) -> Finding:
    return Finding(Verdict.HELD if kept else Verdict.BROKEN, evidence)


def not_judged(why: str) -> Finding:
    return Finding(Verdict.NOT_JUDGED, why)
