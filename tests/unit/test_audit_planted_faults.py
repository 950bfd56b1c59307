"""Rules broken on purpose, one at a time: the audit finds each and names it."""

from collections.abc import Callable

import pytest
from faulty_queues import (
    AdvancesTagsByHalf,
    BypassesTheQueue,
    CutsTheCredit,
    DispatchesTheLate,
    EndsTwice,
    FillsPastTheLowerBound,
    ForgetsEndpointLimits,
    ForgetsFlowLimits,
    GuardsTheNewest,
    GuardsTheWrongOne,
    GuardsWithoutCredit,
    IgnoresWeights,
    KeepsALittle,
    LeavesVirtualTimeBehind,
    LetsNewFlowsGoFirst,
    LosesARunningRequest,
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
    """All bands, two weights, one limited flow, some overdue, one past its deadline; served to the end."""
    for i in range(8):
        queue.admit(f"r{i}", "ab"[i % 2], weight=1 + i % 2, cost=0.25 if i % 3 else 1)
    for i in range(6):
        queue.admit(f"tight{i}", "tight", limit=1)
    queue.place_granted()
    queue.settle("r0")
    queue.admit("brief", "a", ttl_ms=50, band=0)
    for i in range(6):
        queue.admit(f"shed{i}", "c", band=2)
        queue.wait_ms(1)
    queue.wait_ms(1500)
    for i in range(40):
        queue.admit(f"s{i}", "ab"[i % 2], weight=1 + i % 2, cost=0.25 if i % 3 else 1, band=i % 2)
    queue.cancel("s37")
    queue.tune(paused=0)
    queue.run_dry()


def limited(queue: QueueSimulator) -> None:
    """More of a flow than its endpoints may have at once."""
    for i in range(5):
        queue.admit(f"tight{i}", "tight", limit=1)
    queue.run_dry()


def heedless(queue: QueueSimulator) -> None:
    """An endpoint has a limit, which this queue knows nothing of."""
    queue.tune(caps={queue.endpoints[0]: 1})
    for i in range(4):
        queue.admit(f"r{i}")
    queue.run_dry()


def blocked_head(queue: QueueSimulator) -> None:
    """Who comes first in the queue does not fit, and who comes after would."""
    for name, cost in (("runs", 3), ("large", 2), ("small", 1)):
        queue.admit(name, cost=cost)
    queue.run_dry()


def flood(queue: QueueSimulator) -> None:
    """More new flows at once than may start ahead of the others."""
    queue.tune(total_capacity=200)
    for i in range(110):
        queue.admit(f"r{i}", f"flow{i}")
    queue.run_dry()


def paused(queue: QueueSimulator) -> None:
    for i in range(8):
        queue.admit(f"r{i}")
    queue.tune(paused=1)
    queue.place_granted()
    queue.settle("r0")


def late_answer(queue: QueueSimulator) -> None:
    """Nobody sweeps while a request waits far past its time."""
    for i in range(5):
        queue.admit(f"r{i}", ttl_ms=100 if i == 4 else 60_000)
    queue.wait_ms(1200)
    queue.admit("other")


FAULTS: list[tuple[type[QueueSimulator], Callable[[QueueSimulator], None], str, str]] = [
    (OverAdmits, mixed_load, "G1", "over-admission"),
    (FillsPastTheLowerBound, mixed_load, "G1", "not below the lower bound"),
    (TakesWhilePaused, paused, "G1", "while the pool is paused"),
    (ForgetsFlowLimits, limited, "G1", "flow limit passed"),
    (ForgetsEndpointLimits, limited, "G1", "endpoint limit passed"),
    (QueueSimulator, heedless, "G1", "2 requests on 10.0.0.1:8000, 1 allowed"),
    (ServesTheGreatestTag, mixed_load, "G2", "waits at"),
    (NeverServesFlowB, mixed_load, "G2", "behind its band's virtual time"),
    (AdvancesTagsByHalf, mixed_load, "G2", "tag of lane"),
    (IgnoresWeights, mixed_load, "G2", "where its share is"),
    (LetsNewFlowsGoFirst, flood, "G2", "tag of lane"),
    (LeavesVirtualTimeBehind, mixed_load, "G2", "virtual time of band"),
    (GuardsWithoutCredit, mixed_load, "G3", "more than its share"),
    (NeverGuards, mixed_load, "G3", "less than its share"),
    (NeverGuards, mixed_load, "G3", "not served within the dispatches it takes"),
    (CutsTheCredit, mixed_load, "G3", "less than its share"),
    (GuardsTheWrongOne, mixed_load, "G3", "was overdue for longer"),
    (GuardsTheNewest, mixed_load, "G3", "which is not overdue"),
    (ServesTheNewest, mixed_load, "G4", "which comes first in its lane"),
    (ServesLowBandsFirst, mixed_load, "G4", "served while band"),
    (BypassesTheQueue, blocked_head, "G4", "bypassed a queue"),
    (DispatchesTheLate, mixed_load, "G5", "past its deadline"),
    (QueueSimulator, late_answer, "G5", "is still queued"),
    (EndsTwice, mixed_load, "G6", "ends without having begun, or twice"),
    (LosesARunningRequest, mixed_load, "G6", "request r1 was placed and is lost"),
    (ReturnsTooMuch, mixed_load, "G6", "stock is"),
    (KeepsALittle, mixed_load, "G6", "nothing runs, and the stock is"),
    (ReturnsToAnotherEndpoint, mixed_load, "G6", "is given back to"),
]


def told(report: Report, promise: str) -> list[str]:
    return [violation.what for violation in report.of(promise).violations]


@pytest.mark.parametrize(
    ("queue", "load", "promise", "words"),
    FAULTS,
    ids=[f"{queue.__name__}: {words}" for queue, _, _, words in FAULTS],
)
def test_a_planted_fault_is_found_and_named(
    queue: type[QueueSimulator], load: Callable[[QueueSimulator], None], promise: str, words: str
) -> None:
    # Given a queue that breaks one rule
    faulty = queue()
    load(faulty)
    # When its log is audited
    report = audit(faulty.log)
    # Then that promise is found broken, in these words, with the entries that show it
    found = [violation for violation in report.of(promise).violations if words in violation.what]
    assert found, report.as_json()["promises"]
    assert all(violation.evidence for violation in found)


@pytest.mark.parametrize("share", [0.1, 0.4])
@pytest.mark.parametrize("load", [mixed_load, limited, blocked_head, flood])
def test_without_a_fault_the_same_loads_break_nothing(
    load: Callable[[QueueSimulator], None], share: float
) -> None:
    queue = QueueSimulator(guard_share=share)
    load(queue)
    report = audit(queue.log)
    assert report.violations == 0, report.as_json()["promises"]
    assert all(finding.checked for finding in report.findings if load is mixed_load)


def test_a_missing_entry_is_told_and_what_follows_is_joined() -> None:
    # Given a log without one of its entries
    queue = QueueSimulator()
    mixed_load(queue)
    del queue.log[20]
    # When it is audited, then that is the one violation
    report = audit(queue.log)
    assert told(report, "log") == ["entry 22 follows 20"]
    assert report.violations == 1
    assert report.remarks[0] == "entries between 20 and 22 are missing"


def test_a_fault_is_told_once_where_it_happened() -> None:
    # Given one entry whose stock is too high by one, and right ones around it
    queue = QueueSimulator()
    mixed_load(queue)
    at = next(i for i, entry in enumerate(queue.log) if entry["event"] == "placed")
    queue.log[at]["stock"] = str(float(queue.log[at]["stock"]) - 0.125)
    # When it is audited, then only the step to it and the step from it are told
    report = audit(queue.log)
    seqs = [violation.evidence[-1].seq for violation in report.of("G6").violations]
    assert seqs == [at + 1, at + 2]
    assert report.violations == 2
