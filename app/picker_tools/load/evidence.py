"""All that a run has brought to light, and the readings that promises and plots take from it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from picker_tools.load.answer import Answer, Kind
from picker_tools.load.harm import Harm
from picker_tools.load.ledger import Ledger, Turn
from picker_tools.load.sample import OnEndpoints, Sample
from picker_tools.load.scenario import BYTES_PER_TOKEN, Scenario, Source

_SETTLING = 0.25  # of the duration: shares are counted after it, when the queue is as it stays


@dataclass(frozen=True, slots=True)
class Parameters:
    """What was asked for. `capacity_per_s` is what `load` 1 stands for (requests, mixed as the sources are),
    `rates_per_s` each source's arrivals. `mode`, `replicas` and `endpoints` are '' and 0 where they are not
    known. The objectives are None where none was given.
    """

    seed: int
    duration_s: float
    capacity_per_s: float
    rates_per_s: tuple[float, ...]
    own: bool
    mode: str
    replicas: int
    endpoints: int
    slo_ttft_p95_s: float | None = None
    slo_latency_p95_s: float | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """Times in seconds since the load began. `wall_s` is that moment by the clock of the machine.

    `sent` requests went out. `rest` is the first look at the fleet, after the last answer, at which all its
    counts were 0 (None: there was none in `rest_within_s`). `ledgers` are stretches of the decision log,
    empty for a fleet that was found.
    """

    scenario: Scenario
    parameters: Parameters
    wall_s: float
    sent: int
    answers: tuple[Answer, ...]
    surplus_answers: int = 0
    samples: tuple[Sample, ...] = ()
    on_endpoints: tuple[OnEndpoints, ...] = ()
    rest: Sample | None = None
    rest_within_s: float = 0.0
    harm: Harm = field(default_factory=Harm)
    ledgers: tuple[Ledger, ...] = ()
    interrupted: bool = False
    load_average: float = 0.0

    @property
    def sources(self) -> tuple[Source, ...]:
        return self.scenario.sources

    def answers_of(self, source: Source) -> list[Answer]:
        return [answer for answer in self.answers if answer.source == source.name]

    @property
    def has_turns(self) -> bool:
        """Whether waits are the queue's own record, and not what clients saw."""
        return any(ledger.turns for ledger in self.ledgers)

    def turns_of(self, source: Source) -> list[Turn]:
        """Dispatches of requests that `source` sent, by the decision log."""
        return [
            turn
            for ledger in self.ledgers
            for turn in ledger.turns
            if turn.flow == source.flow and source.workload in ("", turn.workload)
        ]

    def waits(self, source: Source) -> list[tuple[float, float]]:
        """Moment and length of each wait, by the decision log, or else the time to first token."""
        if self.has_turns:
            return [(turn.at_s - self.wall_s, turn.wait_s) for turn in self.turns_of(source)]
        return [
            (answer.sent_s + answer.first_s, answer.first_s)
            for answer in self.answers_of(source)
            if answer.kind is Kind.SERVED and answer.streamed and answer.first_s is not None
        ]

    def service(self) -> dict[str, float]:
        """What each flow was served while the load was settled, in requests or tokens as the fleet counts."""
        served = {source.flow: 0.0 for source in self.sources}
        for source in self.sources:
            if self.has_turns:
                moments = [(turn.at_s - self.wall_s, turn.cost) for turn in self.turns_of(source)]
            else:
                moments = [
                    (answer.sent_s + (answer.first_s or 0.0), self.cost(answer))
                    for answer in self.answers_of(source)
                    if answer.kind is Kind.SERVED
                ]
            served[source.flow] += sum(cost for at_s, cost in moments if self._is_settled(at_s))
        return served

    def demand(self) -> dict[str, float]:
        """What each flow asked for in the same time, refused or not."""
        asked = {source.flow: 0.0 for source in self.sources}
        for source in self.sources:
            answers = self.answers_of(source)
            asked[source.flow] += sum(self.cost(each) for each in answers if self._is_settled(each.sent_s))
        return asked

    def cost(self, answer: Answer) -> float:
        """What the fleet charges for the request: 1, or its estimated tokens."""
        if not self.scenario.in_tokens:
            return 1.0
        return answer.prompt_bytes / BYTES_PER_TOKEN + answer.asked_tokens

    def disturbed(self, at_s: float, after_s: float) -> bool:
        """Whether Redis was away at `at_s`, or not yet back for `after_s`."""
        return any(
            began <= at_s and (ended is None or at_s <= ended + after_s) for began, ended in self.harm.outages
        )

    def _is_settled(self, at_s: float) -> bool:
        return _SETTLING * self.parameters.duration_s <= at_s <= self.parameters.duration_s


def latest_before(samples: Sequence[Sample], at_s: float) -> Sample | None:
    """The last of `samples` before `at_s`, of a fleet that was not degraded."""
    return next((each for each in reversed(samples) if each.at_s < at_s and not each.degraded), None)
