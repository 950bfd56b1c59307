"""The auditor finds each rule that a queue breaks, and names it."""

from collections.abc import Callable

import pytest
from faulty_queues import (
    AdvancesTagsByHalf,
    BypassesTheQueue,
    DispatchesPastTheDeadline,
    EndsTwice,
    FillsPastTheLowerBound,
    ForgetsEndpointLimits,
    ForgetsFlowLimits,
    GuardsTheNewest,
    GuardsTheShortestOverdue,
    GuardsWithoutCredit,
    IgnoresWeights,
    KeepsRoundingError,
    LeavesVirtualTimeBehind,
    LetsNewFlowsGoFirst,
    LosesARunningRequest,
    LosesGuardCredit,
    NeverGuards,
    NeverServesFlowB,
    OverAdmits,
    ReturnsToAnotherEndpoint,
    ReturnsTooMuch,
    ServesLowBandsFirst,
    ServesTheGreatestTag,
    ServesTheNewest,
    TakesWhilePaused,
)
from queue_simulator import QueueSimulator

from picker_tools.audit.auditor import audit
from picker_tools.audit.report import Report


def mixed_load(queue: QueueSimulator) -> None:
    """All bands, two weights, one limited flow, overdue requests, one past its deadline; all are served."""
    for i in range(8):
        queue.admit(f"r{i}", "ab"[i % 2], weight=1 + i % 2, cost=0.25 if i % 3 else 1)
    for i in range(6):
        queue.admit(f"tight{i}", "tight", limit=1)
    queue.place_granted()
    queue.settle("r0")
    queue.admit("brief", "a", ttl_ms=50, band=0)
    for i in range(6):
        queue.admit(f"shed{i}", "c", band=2)
        queue.advance_ms(1)
    queue.advance_ms(1500)
    for i in range(40):
        queue.admit(f"s{i}", "ab"[i % 2], weight=1 + i % 2, cost=0.25 if i % 3 else 1, band=i % 2)
    queue.cancel("s37")
    queue.change_settings(paused=0)
    queue.run_dry()


def limited(queue: QueueSimulator) -> None:
    """More requests of a flow than its endpoints may have at once."""
    for i in range(5):
        queue.admit(f"tight{i}", "tight", limit=1)
    queue.run_dry()


def ignored_endpoint_limit(queue: QueueSimulator) -> None:
    """An endpoint has a limit that this queue ignores."""
    queue.change_settings(caps={queue.endpoints[0]: 1})
    for i in range(4):
        queue.admit(f"r{i}")
    queue.run_dry()


def blocked_head(queue: QueueSimulator) -> None:
    """The first request in the queue does not fit; a later one would."""
    for name, cost in (("runs", 3), ("large", 2), ("small", 1)):
        queue.admit(name, cost=cost)
    queue.run_dry()


def flood(queue: QueueSimulator) -> None:
    """More new flows at once than may start without a charge."""
    queue.change_settings(total_capacity=200)
    for i in range(110):
        queue.admit(f"r{i}", f"flow{i}")
    queue.run_dry()


def paused(queue: QueueSimulator) -> None:
    for i in range(8):
        queue.admit(f"r{i}")
    queue.change_settings(paused=1)
    queue.place_granted()
    queue.settle("r0")


def late_answer(queue: QueueSimulator) -> None:
    """No sweep runs while a request waits past its deadline."""
    for i in range(5):
        queue.admit(f"r{i}", ttl_ms=100 if i == 4 else 60_000)
    queue.advance_ms(1200)
    queue.admit("other")


FAULTS: list[tuple[type[QueueSimulator], Callable[[QueueSimulator], None], str, str]] = [
    (OverAdmits, mixed_load, "G1", "over-admission"),
    (FillsPastTheLowerBound, mixed_load, "G1", "not below the lower bound"),
    (TakesWhilePaused, paused, "G1", "while the pool is paused"),
    (ForgetsFlowLimits, limited, "G1", "flow limit passed"),
    (ForgetsEndpointLimits, limited, "G1", "endpoint limit passed"),
    (QueueSimulator, ignored_endpoint_limit, "G1", "2 requests on 10.0.0.1:8000, 1 allowed"),
    (ServesTheGreatestTag, mixed_load, "G2", "waits at"),
    (NeverServesFlowB, mixed_load, "G2", "behind its band's virtual time"),
    (AdvancesTagsByHalf, mixed_load, "G2", "tag of flow"),
    (IgnoresWeights, mixed_load, "G2", "where its share is"),
    (LetsNewFlowsGoFirst, flood, "G2", "tag of flow"),
    (LeavesVirtualTimeBehind, mixed_load, "G2", "virtual time of band"),
    (GuardsWithoutCredit, mixed_load, "G3", "more than its share"),
    (NeverGuards, mixed_load, "G3", "less than its share"),
    (NeverGuards, mixed_load, "G3", "not served within the dispatches it takes"),
    (LosesGuardCredit, mixed_load, "G3", "less than its share"),
    (GuardsTheShortestOverdue, mixed_load, "G3", "was overdue for longer"),
    (GuardsTheNewest, mixed_load, "G3", "which is not overdue"),
    (ServesTheNewest, mixed_load, "G4", "which comes first in its flow"),
    (ServesLowBandsFirst, mixed_load, "G4", "served while band"),
    (BypassesTheQueue, blocked_head, "G4", "bypassed a queue"),
    (DispatchesPastTheDeadline, mixed_load, "G5", "past its deadline"),
    (QueueSimulator, late_answer, "G5", "is still queued"),
    (EndsTwice, mixed_load, "G6", "ends without having begun, or twice"),
    (LosesARunningRequest, mixed_load, "G6", "request r1 was placed and is lost"),
    (ReturnsTooMuch, mixed_load, "G6", "stock is"),
    (KeepsRoundingError, mixed_load, "G6", "nothing runs, and the stock is"),
    (ReturnsToAnotherEndpoint, mixed_load, "G6", "is returned to"),
]


def violations_of(report: Report, promise: str) -> list[str]:
    return [violation.what for violation in report.of(promise).violations]


@pytest.mark.parametrize(
    ("queue", "load", "promise", "words"),
    FAULTS,
    ids=[f"{queue.__name__}: {words}" for queue, _, _, words in FAULTS],
)
def test_a_broken_rule_is_found_and_named_with_evidence(
    queue: type[QueueSimulator], load: Callable[[QueueSimulator], None], promise: str, words: str
) -> None:
    faulty = queue()
    load(faulty)
    report = audit(faulty.log)
    found = [violation for violation in report.of(promise).violations if words in violation.what]
    assert found, report.as_json()["promises"]
    assert all(violation.evidence for violation in found)


@pytest.mark.parametrize("share", [0.1, 0.4])
@pytest.mark.parametrize("load", [mixed_load, limited, blocked_head, flood])
def test_the_same_loads_on_a_correct_queue_show_no_violation(
    load: Callable[[QueueSimulator], None], share: float
) -> None:
    queue = QueueSimulator(guard_share=share)
    load(queue)
    report = audit(queue.log)
    assert report.violations == 0, report.as_json()["promises"]
    assert all(finding.checked for finding in report.findings if load is mixed_load)


def test_a_missing_entry_is_the_only_violation_and_the_rest_is_checked() -> None:
    queue = QueueSimulator()
    mixed_load(queue)
    del queue.log[20]
    report = audit(queue.log)
    assert violations_of(report, "log") == ["entry 22 follows 20"]
    assert report.violations == 1
    assert report.remarks[0] == "entries between 20 and 22 are missing"


def test_one_wrong_stock_is_reported_at_its_own_entry_and_the_next_only() -> None:
    queue = QueueSimulator()
    mixed_load(queue)
    at = next(i for i, entry in enumerate(queue.log) if entry["event"] == "placed")
    queue.log[at]["stock"] = str(float(queue.log[at]["stock"]) - 0.125)
    report = audit(queue.log)
    seqs = [violation.evidence[-1].seq for violation in report.of("G6").violations]
    assert seqs == [at + 1, at + 2]
    assert report.violations == 2
