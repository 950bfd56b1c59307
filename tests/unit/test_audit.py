"""The auditor of decision logs: parsing, correct logs, each broken rule, and measures of fairness."""

import functools
import itertools
import pickle
import random
from collections.abc import Callable, Iterable

import faulty_queues as faulty
import pytest
from queue_simulator import QueueSimulator, Request
from tables import cases

from bench.fairness import measures
from picker_fleet.cli import main
from picker_fleet.domain.bands import NAMED
from picker_tools.audit.auditor import Auditor, Report, audit
from picker_tools.audit.log import Entry, EntryError
from picker_tools.audit.replay import Rules
from picker_tools.local_fleet.network import LOOPBACK, free_port


def raw(**changes: str) -> dict[str, str]:
    queue = QueueSimulator()
    queue.admit("r1", "flow", cost=2.5)
    return {**queue.log[-1], **changes}


def test_fields_of_a_log_entry_are_parsed_to_their_types() -> None:
    entry = Entry.parse(raw(tag="1.5", due_ms="7"))
    found = (entry.event, entry.request, entry.cost, entry.tag, entry.due_ms)
    assert found == ("bypassed", "r1", 2.5, 1.5, 7)
    assert Entry.parse(raw(tag="", due_ms="")).tag is None
    assert str(entry).startswith("#2 1700000000.000000 bypassed r1 flow='flow' priority=0 cost=2.5")


UNREADABLE: list[tuple[str, str | None, str]] = [
    ("stock", "much", "entry 2: stock is 'much'"),
    ("band", "", "entry 2: band is ''"),
    ("event", "dreamt", "entry 2: event is 'dreamt'"),
    ("seq", "x" * 1000, f"entry {'x' * 20}: seq is {'x' * 80!r}"),
    *((field, None, f"entry 2: {field} is missing") for field in ("flow", "tag", "bytes")),
]


@pytest.mark.parametrize(("name", "value", "says"), UNREADABLE)
def test_the_error_names_a_bad_or_missing_field_of_an_entry(name: str, value: str | None, says: str) -> None:
    entry = raw() | {name: value}
    if value is None:
        del entry[name]
    with pytest.raises(EntryError) as fault:
        audit([entry])
    assert str(fault.value) == says


@pytest.mark.parametrize("note", ["", "[]", '{"guard_share": "x"}', '{"weights": {"a": null}}'])
def test_unreadable_settings_in_a_log_entry_raise_an_entry_error(note: str) -> None:
    with pytest.raises(EntryError, match="settings cannot be read"):
        Rules.parse(note)
    # Lua writes an empty table as a list.
    assert Rules.parse('{"weights": []}').weights == {}


def test_an_empty_decision_log_has_no_violation_and_no_remark() -> None:
    report = audit([])
    assert (report.entries, report.first_seq, report.violations, report.remarks) == (0, None, 0, ())


@pytest.mark.parametrize("url", ["redis://{host}:{port}/0", "http://{host}"])
def test_auditing_an_unreachable_redis_ends_with_exit_code_2(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", "--redis", url.format(host=LOOPBACK, port=free_port())]) == 2
    shown = capsys.readouterr()
    assert (shown.out, len(shown.err.splitlines())) == ("", 1)


def violations_of(report: Report) -> list[str]:
    return [violation.what for finding in report.findings for violation in finding.violations]


def audited(log: list[dict[str, str]], settings: str | None = None) -> Report:
    """Audit a decision log that must have no violation; return the audit's report."""
    report = audit(log, settings)
    assert (violations_of(report), report.violations) == ([], 0)
    return report


def ids(queue: QueueSimulator, state: str) -> list[str]:
    """The requests in `state`, oldest first."""
    return [r.id for r in queue.requests.values() if r.state == state]


@functools.cache
def busy_queue(seed: int, steps: int = 300) -> QueueSimulator:
    """A queue with bands, weights, limits, deadlines, corrections, cancels, adoptions and live changes.

    Several tests share the queue, so they must not change it or its log.
    """
    chance, names = random.Random(seed), itertools.count()
    queue = QueueSimulator(total_capacity=40, starvation_ms=200)
    weights = {"one": 1.0, "two": 2.0, "four": 4.0, "tight": 1.0}
    for step in range(steps):
        queue.advance_ms(chance.choice([0, 1, 20]))
        for _ in range(chance.randrange(6)):
            flow = chance.choice(list(weights))
            ttl_ms = chance.choice([300, 60_000])
            fields = {"band": chance.choice([0, 1, 1, 2]), "cost": chance.choice([0.25, 1, 2.75])}
            fields |= {"weight": weights[flow], "limit": int(flow == "tight")}
            queue.admit(f"r{next(names)}", flow, ttl_ms=ttl_ms, **fields)
        queue.place_granted()
        queue.sweep()
        for name in ids(queue, "placed")[:2]:
            queue.settle(name, chance.choice([None, 0.1, 1.0, 4.0]))
        waiting = ids(queue, "queued")
        if waiting and step % 5 == 0:
            name = chance.choice(waiting)
            chance.choice([queue.cancel, queue.orphan, queue.admit])(name)
            if chance.random() < 0.5 and name in queue.requests:
                queue.admit(name, owner="b")
        if step % 60 == 59:
            queue.change_settings(upper_per=chance.choice([2, 3]), weights={"one": chance.choice([1, 3])})
    return queue


@pytest.mark.parametrize("seed", range(5))
def test_a_correct_log_shows_no_violation_and_every_promise_is_checked(seed: int) -> None:
    queue = busy_queue(seed)
    events = (
        "tuned bypassed queued granted placed completed cancelled expired preempted refused orphaned adopted"
    )
    assert {entry["event"] for entry in queue.log} >= {
        *events.split(),
        "corrected",
        "throttled",
        "unthrottled",
    }
    assert any(entry["by"] == "guard" for entry in queue.log)
    report = audited(queue.log)
    assert all(finding.checked > 100 for finding in report.findings)
    assert report.open_at_end == len(queue.requests)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kept", [0.9, 0.5, 0.1])
def test_a_log_without_its_beginning_is_checked_as_far_as_possible(seed: int, kept: float) -> None:
    log = busy_queue(seed).log
    start = int(len(log) * (1 - kept))
    settings = [entry["note"] for entry in log[:start] if entry["event"] == "tuned"][-1]
    audited(log[start:])
    assert audited(log[start:], settings).remarks[0].startswith(f"begins at entry {start + 1}")


def test_dispatch_order_is_checked_once_requests_from_before_the_log_have_left() -> None:
    queue = QueueSimulator()
    queue.admit_many("old", 10)
    start = len(queue.log)
    queue.run_dry()
    queue.admit_many("new", 20, flows=2)
    queue.run_dry()
    report = audited(queue.log[start:], queue.log[0]["note"])
    assert report.of("G4").checked > 15
    assert report.of("G2").checked > 15


def test_after_a_band_was_collected_all_its_flows_are_charged_even_if_the_log_begins_late() -> None:
    queue = QueueSimulator(total_capacity=200)
    queue.admit("first")
    queue.run_dry()
    queue.write("collected", Request("", "", band=1))
    flood(queue)
    queue.admit_many("busy", 4)
    for i in range(6):
        queue.admit(f"again{i}", f"flow{i}")
    audited(queue.log[1:], queue.log[0]["note"])


def test_requests_from_before_the_log_was_switched_on_are_ignored() -> None:
    queue = QueueSimulator()
    queue.admit_many("old", 10)
    start = len(queue.log)
    queue.change_settings(log_max=500)
    queue.run_dry()
    assert audited(numbered(queue.log[start:])).remarks[0].startswith("begins at entry 1")


def numbered(entries: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{**entry, "seq": str(i)} for i, entry in enumerate(entries, start=1)]


def test_decisions_made_while_the_log_was_off_are_no_violation() -> None:
    queue = QueueSimulator()
    queue.admit("before")
    queue.change_settings(log_max=0)
    off = len(queue.log)
    queue.admit_many("meanwhile", 10)
    on = len(queue.log)
    queue.change_settings(log_max=100)
    queue.run_dry()
    report = audited(numbered(queue.log[:off] + queue.log[on:]))
    assert report.remarks == (f"the log was off after entry {off}",)


def test_the_audits_memory_grows_with_open_requests_and_not_with_the_log() -> None:
    # The queue stays short; each request has a new flow.
    queue = QueueSimulator(endpoints=1)
    for i in range(3_000):
        queue.admit(f"r{i}", f"flow{i}", band=i % 3)
        if len(queue.requests) > 6:
            queue.place_granted()
            queue.settle(ids(queue, "placed")[0])
        if i % 100 == 0:
            queue.run_dry()
            queue.sweep()
    auditor = Auditor()
    sizes = []
    for i, raw in enumerate(queue.log):
        auditor.take(raw)
        if i % (len(queue.log) // 8) == 0:
            sizes.append(len(pickle.dumps(auditor)))
    assert max(sizes[4:]) < 1.3 * max(sizes[:4])
    assert violations_of(auditor.report()) == []


def test_after_a_change_of_ordering_order_is_checked_once_older_requests_have_left() -> None:
    queue = QueueSimulator()
    for i in range(8):
        queue.admit(f"old{i}", ttl_ms=60_000 - i)
    queue.change_settings(ordering="edf")
    queue.admit_many("new", 8)
    # No sweep has reordered the old requests yet, so they are still served by arrival.
    queue.run_dry()
    queue.sweep()
    queue.admit("afterwards")
    audited(queue.log)


def test_a_reused_request_id_is_checked_at_its_new_position() -> None:
    queue = QueueSimulator(endpoints=1)
    queue.admit_many("runs", 3)
    for name in ("again", "first", "second"):
        queue.admit(name, "a")
    queue.cancel("again")
    queue.admit("again", "b")
    queue.run_dry()
    audited(queue.log)


@pytest.mark.parametrize("seed", range(20))
def test_changing_the_starvation_guards_share_breaks_no_bound(seed: int) -> None:
    queue, dice = QueueSimulator(endpoints=1), random.Random(seed)
    for i in range(120):
        if i < 60:
            queue.admit(f"r{i}", f"flow{i % 3}", band=i % 3)
        queue.advance_ms(dice.choice((0, 0, 40) if i < 60 else (0, 20, 200)))
        if dice.random() < 0.3:
            queue.change_settings(guard_share=dice.choice((0.05, 0.1, 0.5)))
        if i >= 60:
            queue.place_granted()
            queue.settle(ids(queue, "placed")[0])
    audited(queue.log)


def test_a_dispatch_counts_with_the_guards_share_before_it_even_if_the_order_was_unknown_then() -> None:
    queue = QueueSimulator(endpoints=1, guard_share=0.5)
    for name in ("runs", "runs too", "unseen"):
        queue.admit(name, "a")
    seen = len(queue.log)
    queue.change_settings(guard_share=0.5)
    queue.admit("overdue for longest", "a")
    queue.advance_ms(1)
    queue.admit("next by turn", "b")
    queue.advance_ms(10_000)
    queue.settle("runs")
    assert ids(queue, "granted") == ["unseen"]
    queue.change_settings(guard_share=1)
    queue.settle("runs too")
    assert ids(queue, "granted") == ["unseen", "next by turn"]
    audited(queue.log[seen:])


def mixed_load(queue: QueueSimulator) -> None:
    """Load the queue with all bands, two weights, a limited flow and overdue requests, until all requests
    end."""
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
    """Admit more requests of a flow than the flow's limit allows in flight."""
    for i in range(5):
        queue.admit(f"tight{i}", "tight", limit=1)
    queue.run_dry()


def ignored_endpoint_limit(queue: QueueSimulator) -> None:
    """Give an endpoint a limit. The simulated queue exceeds the limit, which the audit must report."""
    queue.change_settings(caps={queue.endpoints[0]: 1})
    queue.admit_many("r", 4)
    queue.run_dry()


def ignored_found_limits(queue: QueueSimulator) -> None:
    """Let the fleet find limits, and lower the first endpoint's limit while requests run there. The simulated
    queue exceeds the limits, and the audit must say so."""
    first = queue.endpoints[0]
    queue.change_settings(adaptive=1, upper_per=3, default_cap=2, caps={first: 3})
    queue.admit_many("r", 6)
    queue.change_settings(caps={first: 2})
    queue.settle("r0")
    limited(queue)


def ignored_limits_in_tokens(queue: QueueSimulator) -> None:
    """Let the fleet find limits in tokens. The simulated queue exceeds the limits, and the audit must say
    so."""
    found = {"default_token_cap": 9, "token_caps": {queue.endpoints[0]: 3}}
    queue.change_settings(adaptive=1, upper_per=6, lower_per=6, **found)
    queue.admit_many("r", 4, cost=3)
    queue.run_dry()


def ignored_band_limits(queue: QueueSimulator) -> None:
    """Give each band limits. The simulated queue exceeds the limits, which the audit must report."""
    bands = [{"priority": band.priority, "capacity": 3, "bytes": 1000} for band in NAMED]
    queue.change_settings(bands=bands, paused=1)
    for i in range(8):
        queue.admit(f"r{i}", body_bytes=600)
    queue.change_settings(paused=0)
    queue.run_dry()


def blocked_head(queue: QueueSimulator) -> None:
    """The first request in the queue does not fit, but a later request would."""
    for name, cost in (("runs", 3), ("large", 2), ("small", 1)):
        queue.admit(name, cost=cost)
    queue.run_dry()


def flood(queue: QueueSimulator) -> None:
    """Start more new flows at once than may start without a charge."""
    queue.change_settings(total_capacity=200)
    queue.admit_many("r", 110, flows=110)
    queue.run_dry()


def paused(queue: QueueSimulator) -> None:
    queue.admit_many("r", 8)
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
    (faulty.OverAdmits, mixed_load, "G1", "over-admission"),
    (faulty.FillsPastTheLowerBound, mixed_load, "G1", "not below the lower bound"),
    (faulty.TakesWhilePaused, paused, "G1", "while the pool is paused"),
    (faulty.ForgetsFlowLimits, limited, "G1", "flow limit passed"),
    (faulty.ForgetsEndpointLimits, limited, "G1", "endpoint limit passed"),
    (QueueSimulator, ignored_endpoint_limit, "G1", "2 requests on 10.0.0.1:8000, 1 allowed"),
    (QueueSimulator, ignored_found_limits, "G1", "3 requests on 10.0.0.1:8000, 2 allowed"),
    (QueueSimulator, ignored_found_limits, "G1", "3 requests on 10.0.0.2:8000, 2 allowed"),
    (QueueSimulator, ignored_limits_in_tokens, "G1", "beside 3 tokens on 10.0.0.1:8000, 3 allowed"),
    (faulty.ForgetsFlowLimits, ignored_found_limits, "G1", "in flight, 1 on each of 3 endpoints"),
    (QueueSimulator, ignored_band_limits, "G1", "4 requests wait in priority 0, 3 allowed"),
    (QueueSimulator, ignored_band_limits, "G1", "1200 bytes wait in priority 0, 1000 allowed"),
    (faulty.ServesTheGreatestTag, mixed_load, "G2", "waits at"),
    (faulty.NeverServesFlowB, mixed_load, "G2", "behind the virtual time"),
    (faulty.AdvancesTagsByHalf, mixed_load, "G2", "tag of flow"),
    (faulty.IgnoresWeights, mixed_load, "G2", "but its share is"),
    (faulty.LetsNewFlowsGoFirst, flood, "G2", "tag of flow"),
    (faulty.LeavesVirtualTimeBehind, mixed_load, "G2", "virtual time of band"),
    (faulty.GuardsWithoutCredit, mixed_load, "G3", "more than its share"),
    (faulty.NeverGuards, mixed_load, "G3", "less than its share"),
    (faulty.NeverGuards, mixed_load, "G3", "not served within the promised number of dispatches"),
    (faulty.LosesGuardCredit, mixed_load, "G3", "less than its share"),
    (faulty.GuardsTheShortestOverdue, mixed_load, "G3", "was overdue for longer"),
    (faulty.GuardsTheNewest, mixed_load, "G3", "which is not overdue"),
    (faulty.ServesTheNewest, mixed_load, "G4", "which comes first in its flow"),
    (faulty.ServesLowBandsFirst, mixed_load, "G4", "served while priority"),
    (faulty.BypassesTheQueue, blocked_head, "G4", "bypassed a queue"),
    (faulty.DispatchesPastTheDeadline, mixed_load, "G5", "past its deadline"),
    (QueueSimulator, late_answer, "G5", "is still queued"),
    (faulty.EndsTwice, mixed_load, "G6", "ends without having begun, or twice"),
    (faulty.LosesARunningRequest, mixed_load, "G6", "request r1 was placed and is lost"),
    (faulty.ReturnsTooMuch, mixed_load, "G6", "stock is"),
    (faulty.KeepsRoundingError, mixed_load, "G6", "no request runs, but the stock is"),
    (faulty.ReturnsToAnotherEndpoint, mixed_load, "G6", "is returned to"),
]


@cases("queue, load, promise, words", {f"{row[0].__name__}: {row[-1]}": row for row in FAULTS})
def test_the_audit_finds_and_names_a_broken_rule_with_evidence(
    queue: type[QueueSimulator], load: Callable[[QueueSimulator], None], promise: str, words: str
) -> None:
    broken = queue()
    load(broken)
    report = audit(broken.log)
    found = [violation for violation in report.of(promise).violations if words in violation.what]
    assert found, report.findings
    assert all(violation.evidence for violation in found)


@pytest.mark.parametrize("share", [0.1, 0.4])
@pytest.mark.parametrize("load", [mixed_load, limited, blocked_head, flood])
def test_a_correct_queue_shows_no_violation_under_the_same_loads(
    load: Callable[[QueueSimulator], None], share: float
) -> None:
    queue = QueueSimulator(guard_share=share)
    load(queue)
    report = audited(queue.log)
    assert (report.first_seq, report.last_seq, report.remarks) == (1, len(queue.log), ())
    assert (report.open_at_end, len(queue.requests)) == (0, 0)
    assert all(finding.checked for finding in report.findings if load is mixed_load)


RESTORED: dict[str, tuple[str, str, float, list[str]]] = {
    "its share": ("4", "4", 2.0, []),
    "its share where one of three endpoints is not ready": ("4", "6", 3.0, []),
    "its share of the sum of limits that the fleet has found": ("7", "7", 3.5, []),
    "more than its share": ("4", "4", 9.0, ["stock is 9, expected 2"]),
    "its share of a low bound": ("4", "2", 1.0, ["request r is restored under a bound of 2"]),
    "its share of a high bound": ("4", "7", 3.5, ["request r is restored under a bound of 7"]),
}


@cases("upper, note, taken, says", RESTORED)
def test_a_restored_request_takes_at_most_its_share_of_the_bound(
    upper: str, note: str, taken: float, says: list[str]
) -> None:
    queue = QueueSimulator(largest_claim=0.5)
    queue.stock = taken
    request = Request("r", "flow", cost=9.0, endpoint=queue.endpoints[0])
    queue.write("restored", request, note=note)
    queue.log[-1]["upper"] = upper
    queue.stock = 0.0
    queue.write("completed", request)
    assert violations_of(audit(queue.log)) == says


@pytest.mark.parametrize("note", ["many", "inf", "nan", ""])
def test_a_restored_request_without_a_bound_is_an_entry_error(note: str) -> None:
    queue = QueueSimulator()
    queue.write("restored", Request("r", "flow"), note=note)
    with pytest.raises(EntryError, match="note is"):
        audit(queue.log)


def test_a_missing_log_entry_is_the_only_violation_and_later_entries_are_checked() -> None:
    queue = QueueSimulator()
    mixed_load(queue)
    del queue.log[20]
    report = audit(queue.log)
    assert [violation.what for violation in report.of("log").violations] == violations_of(report)
    assert violations_of(report) == ["entry 22 follows 20"]
    assert report.remarks[0] == "entries between 20 and 22 are missing"


def test_a_wrong_count_of_requests_in_flight_is_reported_only_at_two_successive_log_entries() -> None:
    queue = QueueSimulator()
    mixed_load(queue)
    at = next(i for i, entry in enumerate(queue.log) if entry["event"] == "placed")
    queue.log[at]["stock"] = str(float(queue.log[at]["stock"]) - 0.125)
    report = audit(queue.log)
    seqs = [violation.evidence[-1].seq for violation in report.of("G6").violations]
    assert seqs == [at + 1, at + 2]
    assert report.violations == 2


class Log:
    """A decision log with one entry per millisecond. Request ids have the form SOURCE.NUMBER."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._arrived: dict[str, int] = {}

    def write(self, event: str, *requests: str, band: int = 1, weight: float = 1, by: str = "") -> "Log":
        for request in requests:
            now_us = 1000 * (len(self.entries) + 1)
            arrived = self._arrived.setdefault(request, now_us)
            self.entries.append(
                Entry(
                    seq=len(self.entries) + 1, time_us=now_us, event=event, request=request,
                    flow=source_of(request), band=band, priority=NAMED[band].priority, workload="", cost=1,
                    weight=weight, arrived=arrived, deadline_ms=0, due_ms=None, limit=0, tag=None, v=0, by=by,
                    owner="", endpoint="", stock=0, queued=0, upper=100, lower=100, note="", body_bytes=0,
                )
            )  # fmt: skip
        return self


def source_of(request: str) -> str:
    return request.partition(".")[0]


def names(source: str, numbers: Iterable[int]) -> list[str]:
    return [f"{source}.{number}" for number in numbers]


def test_the_gap_in_service_is_the_widest_of_any_interval_in_which_both_flows_wait() -> None:
    # The widest interval has the three dispatches of flow `a`; the bound is the sum 1/1 + 1/1 of cost /
    # weight.
    log = Log().write("queued", *names("a", range(9)), *names("b", range(9)))
    log.write("granted", "b.0", "a.0", "a.1", "a.2", "b.1")
    (gap,) = measures.gaps(log.entries)
    assert (set(gap.flows), gap.widest, gap.bound) == ({"a", "b"}, 3, 2)
    assert gap.violated


def test_the_gap_between_flows_counts_service_divided_by_weight() -> None:
    log = Log().write("queued", *names("a", range(3)), *names("b", range(9)))
    for turn in range(2):
        log.write("granted", f"a.{turn}", weight=1)
        log.write("granted", *names("b", range(4 * turn, 4 * turn + 4)), weight=4)
    (gap,) = measures.gaps(log.entries)
    # The bound is the sum 1/1 + 1/4 of cost / weight of both flows.
    assert (gap.widest, gap.bound) == (1, 1.25)
    assert not gap.violated


def test_service_of_one_flow_while_the_other_is_idle_makes_no_gap() -> None:
    log = Log().write("queued", *names("a", range(9))).write("granted", *names("a", range(3)))
    log.write("queued", "b.0").write("granted", "b.0").write("granted", *names("a", range(3, 8)))
    (gap,) = measures.gaps(log.entries)
    # Only one dispatch happens while both flows wait.
    assert gap.widest == 1


def test_flows_of_different_bands_are_not_compared() -> None:
    log = Log().write("queued", *names("a", range(9)), band=0).write("queued", *names("b", range(9)))
    log.write("granted", *names("a", range(5)), band=0)
    assert measures.gaps(log.entries) == []


def test_the_measured_window_is_the_longest_time_in_which_all_flows_wait() -> None:
    # Both flows wait during one dispatch, and later during three.
    log = Log().write("queued", "a.0", *names("b", range(9))).write("granted", "a.0")
    log.write("granted", *names("b", range(4))).write("queued", *names("a", range(1, 9)))
    log.write("granted", "a.1", "b.4", "a.2").write("cancelled", *names("b", range(5, 9)))
    log.write("granted", *names("a", range(3, 9)))
    window = measures.window(log.entries, {"a", "b"}, source_of)
    assert (window.grants, dict(window.served)) == (3, {"a": 2, "b": 1})


@cases("served, shares, jain, min_by_max", {
    "service follows weights": ({"a": 100, "b": 200}, {"a": 1, "b": 1}, 1, 1),
    "one flow has all service": ({"a": 100}, {"a": 2, "b": 0}, 0.5, 0),
})  # fmt: skip
def test_shares_of_flows_follow_from_service_and_weights(
    served: dict[str, float], shares: dict[str, float], jain: float, min_by_max: float
) -> None:
    assert measures.normalised(served, {"a": 1, "b": 2}) == shares
    assert (measures.jain(shares.values()), measures.min_by_max(shares.values())) == (jain, min_by_max)


# Request `a` waits in a higher band than request `b`.
INVERSIONS = {
    "a turn past a higher band": ("granted b.0, granted a.0, granted b.1", 1),
    "no inversion by the guard": ("guard b.0, granted a.0, granted b.1", 0),
    "no inversion past an orphaned request until it is adopted": (
        "orphaned a.0, granted b.0, adopted a.0, granted b.1", 1
    ),
    "no inversion past a running request that is adopted": ("granted a.0, adopted a.0, granted b.0", 0),
}  # fmt: skip


@cases("events, inverted", INVERSIONS)
def test_an_inversion_is_a_dispatch_while_a_higher_band_waits(events: str, inverted: int) -> None:
    log = Log().write("queued", "a.0", band=0).write("queued", "b.0", "b.1", band=2)
    for event in events.split(", "):
        what, request = event.split()
        by = {"granted": "turn", "guard": "guard"}.get(what, "")
        log.write("granted" if by else what, request, band="a b".index(request[0]), by=by)
    assert measures.order(log.entries).inverted_turns == inverted


def test_the_longest_wait_includes_requests_that_expired_or_still_wait() -> None:
    # One request is served after 2 ms, another expires after 3 ms, a third still waits after 4 ms.
    log = Log().write("queued", "a.0", "a.1").write("granted", "a.0").write("queued", "a.2")
    log.write("expired", "a.1").write("queued", *names("b", range(3)))
    assert measures.highest_wait_ms(log.entries[:5], "a", source_of) == 3
    assert measures.highest_wait_ms(log.entries, "a", source_of) == 4
    assert measures.waits_ms(log.entries, "a", source_of) == [2]
