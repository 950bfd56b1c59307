"""The record of one load run (`RunResult`), and figures that checks, plots and the report compute from it.

`Session.run` returns a `RunResult`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from picker_fleet.admin.models import State
from picker_tools.audit.auditor import Report, audited
from picker_tools.audit.log import Entry, EntryError, LogUnreadable
from picker_tools.load.fleet import Target
from picker_tools.load.generator import Answer
from picker_tools.load.scenarios import Plan, Scenario, Source


def fair(sources: Sequence[Source], demand: Mapping[str, float], served: float) -> dict[str, float]:
    """Each flow's fair share of the service `served` by max-min fairness: higher bands first, equal shares
    within a band, and for no flow more than its `demand`.
    """
    due = dict.fromkeys(demand, 0.0)
    for band in sorted({source.band for source in sources}, key=lambda band: -band.priority):
        flows = sorted({source.flow for source in sources if source.band == band}, key=demand.__getitem__)
        for place, flow in enumerate(flows):
            due[flow] = min(demand[flow], served / (len(flows) - place))
            served -= due[flow]
    return due


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The dispatch of a request as the decision log shows it. Times are in seconds of Redis's clock."""

    at_s: float
    flow: str
    workload: str
    wait_s: float


@dataclass(frozen=True, slots=True)
class LogAudit:
    """The audit of a decision log. `why` is the reason why there is no report; '' if there is a report."""

    report: Report | None
    dispatches: tuple[Dispatch, ...] = ()
    why: str = ""


def read_log(url: str, pool: str = "default") -> LogAudit:
    """Audit the whole decision log in Redis. This function blocks, so call it in a thread."""
    dispatches: list[Dispatch] = []

    def seen(entry: Entry) -> None:
        if entry.event in ("granted", "bypassed"):
            # `arrived` is the time of arrival in µs, or later if an earlier request has the same time.
            wait_s = max(0.0, (entry.time_us - entry.arrived) / 1e6)
            dispatches.append(Dispatch(entry.time_us / 1e6, entry.flow, entry.workload, wait_s))

    try:
        return LogAudit(audited(url, pool, seen), tuple(dispatches))
    except (LogUnreadable, EntryError) as fault:
        return LogAudit(None, why=str(fault))


def violations(log_audits: Sequence[LogAudit], promise: str) -> tuple[int, int, list[str]]:
    """How often `promise` (G1 to G6, log) was checked and broken in `log_audits`, and the first cases."""
    checked = broken = 0
    cases: list[str] = []
    for log_audit in log_audits:
        if log_audit.report is None:
            continue
        finding = log_audit.report.of(promise)
        checked += finding.checked
        broken += finding.broken
        for violation in finding.violations[:3]:
            cases.append("\n    ".join([violation.what, *map(str, violation.evidence)]))
    return checked, broken, cases


@dataclass(frozen=True, slots=True)
class Sample:
    """The shared state as a replica's admin API reports it, `at_s` seconds after the load began."""

    at_s: float
    stock: float
    lower: float
    upper: float
    queued: int
    in_flight: Mapping[str, int]
    leases: int
    replicas: int
    degraded: bool

    @property
    def at_rest(self) -> bool:
        """Whether every count of requests in the shared state is 0."""
        return not any((self.stock, self.queued, self.leases, *self.in_flight.values()))

    @classmethod
    def read(cls, at_s: float, page: bytes) -> "Sample | None":
        """Parse an answer to `GET /api/v1/state`; None if it is malformed."""
        try:
            state = State.model_validate_json(page)
        except ValueError:
            return None
        bounds, counts = state.bounds, (state.queued, state.in_flight, state.leases, len(state.replicas))
        return cls(at_s, state.stock, bounds.lower, bounds.upper, *counts, state.degraded)


@dataclass(frozen=True, slots=True)
class EndpointSample:
    """A sample of the endpoints' metrics pages. `requests` sums the running and waiting requests on the pages
    that were read; `answered` is the number of endpoints whose page was read."""

    at_s: float
    requests: int
    answered: int


@dataclass(slots=True)
class FaultsInjected:
    """The injected faults, with times in seconds of the load. An outage whose end is None is not over."""

    kills: list[tuple[float, str]] = field(default_factory=list)
    outages: list[tuple[float, float | None]] = field(default_factory=list)
    log_audits: list[LogAudit] = field(default_factory=list)  # one audit for each log that an outage deleted


_SETTLING = 0.25  # after this part of the load's duration the queue is steady, and shares are counted
SHARED_AGAIN_S = 5.0  # the fleet shares one queue again within this many seconds after Redis is back (G8)


@dataclass(frozen=True, slots=True)
class RunResult:
    """The record of a run. Times are seconds since the load began, which was at `wall_s` by the wall clock.

    `sent`: number of requests sent. `rest`: the first sample after the last answer in which all counts are 0
    (None: no such sample within `rest_within_s`). `log_audits`: audits of the decision log; several if an
    outage deleted the log, none if this run did not start the fleet.
    """

    plan: Plan
    target: Target
    capacity_per_s: float
    wall_s: float
    sent: int
    answers: tuple[Answer, ...]
    surplus_answers: int = 0
    samples: tuple[Sample, ...] = ()
    endpoint_samples: tuple[EndpointSample, ...] = ()
    rest: Sample | None = None
    rest_within_s: float = 0.0
    faults_injected: FaultsInjected = field(default_factory=FaultsInjected)
    log_audits: tuple[LogAudit, ...] = ()
    interrupted: bool = False
    load_average: float = 0.0

    @property
    def scenario(self) -> Scenario:
        return self.plan.scenario

    @property
    def sources(self) -> tuple[Source, ...]:
        return self.scenario.sources

    def answers_of(self, source: Source) -> list[Answer]:
        return [answer for answer in self.answers if answer.source == source.name]

    @property
    def has_dispatches(self) -> bool:
        """Whether `waits` come from the decision log instead of the clients' measurements."""
        return any(log_audit.dispatches for log_audit in self.log_audits)

    def dispatches_of(self, source: Source) -> list[Dispatch]:
        """The dispatches of requests from `source` that the decision log shows."""
        return [
            dispatch
            for log_audit in self.log_audits
            for dispatch in log_audit.dispatches
            if dispatch.flow == source.flow and source.workload in ("", dispatch.workload)
        ]

    def waits(self, source: Source) -> list[tuple[float, float]]:
        """The (end, length) of each wait of `source`'s requests, from the decision log. Without a log, the
        end and length of each time to the first token."""
        if self.has_dispatches:
            return [(dispatch.at_s - self.wall_s, dispatch.wait_s) for dispatch in self.dispatches_of(source)]
        return [
            (answer.sent_s + answer.first_s, answer.first_s)
            for answer in self.answers_of(source)
            if answer.served and answer.request.streamed and answer.first_s is not None
        ]

    def service(self) -> dict[str, float]:
        """The number of served requests of each flow while the load was steady and the queue shared."""
        served = {source.flow: 0.0 for source in self.sources}
        for source in self.sources:
            if self.has_dispatches:
                moments = [dispatch.at_s - self.wall_s for dispatch in self.dispatches_of(source)]
            else:
                answers = (answer for answer in self.answers_of(source) if answer.served)
                moments = [answer.sent_s + (answer.first_s or 0.0) for answer in answers]
            served[source.flow] += sum(map(self._is_settled, moments))
        return served

    def demand(self) -> dict[str, float]:
        """The number of requests sent by each flow while the load was steady and the queue shared."""
        asked = {source.flow: 0.0 for source in self.sources}
        for source in self.sources:
            asked[source.flow] += sum(self._is_settled(each.sent_s) for each in self.answers_of(source))
        return asked

    @property
    def outage(self) -> tuple[float, float] | None:
        """The start and end of the first outage; its end is the end of the load if Redis did not return."""
        if not self.faults_injected.outages:
            return None
        began_s, ended_s = self.faults_injected.outages[0]
        return began_s, self.plan.duration_s if ended_s is None else ended_s

    def disturbed(self, at_s: float, after_s: float) -> bool:
        """Whether at `at_s` Redis was unavailable, or had been back for less than `after_s` seconds."""
        return any(
            began <= at_s and (ended is None or at_s <= ended + after_s)
            for began, ended in self.faults_injected.outages
        )

    def _is_settled(self, at_s: float) -> bool:
        """Whether at `at_s` the load was steady, and the queue shared (local dispatches are not logged)."""
        is_steady = _SETTLING * self.plan.duration_s <= at_s <= self.plan.duration_s
        return is_steady and not self.disturbed(at_s, SHARED_AGAIN_S)


def latest_before(samples: Sequence[Sample], at_s: float) -> Sample | None:
    """The last of `samples` before `at_s` in which the replica was not degraded."""
    return next((each for each in reversed(samples) if each.at_s < at_s and not each.degraded), None)


def flow_shares(run: RunResult) -> dict[str, dict[str, float]]:
    """Each flow's share of the demand and of the service, and its fair share of the service, while the load
    was steady and the queue shared."""
    service, demand = run.service(), run.demand()
    served, asked = sum(service.values()), sum(demand.values())
    due = fair(run.sources, demand, served)
    if not served or not asked:
        return {}
    return {
        flow: {"asked": demand[flow] / asked, "served": service[flow] / served, "fair": due[flow] / served}
        for flow in service
    }
