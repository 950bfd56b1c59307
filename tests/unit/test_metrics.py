"""Metrics: names, capped label values, the page cached for all readers, and the service of each flow."""

import asyncio
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from clocks import Clock
from local_requests import ask
from metrics_page import page_of, samples
from metrics_table import documented, families
from scripted_store import POOL
from tables import cases

from picker_fleet.admin.documents import MAX_METRICS_READS, METRICS_INTERVAL_S, MetricsText
from picker_fleet.admin.protection import Refused
from picker_fleet.admission.ledger import ServiceMeter
from picker_fleet.domain.bands import NAMED, Band, Bands
from picker_fleet.domain.request import Completion, Outcome
from picker_fleet.endpoints.readings import EndpointMetrics
from picker_fleet.telemetry.metrics import OTHER, Metrics

STATE = replace(
    POOL, stock=7, lower=7.2, upper=8.8, ready_backends=4, queue_length={"Critical": 0, "Default": 3},
    active_flows=2, replicas=("a", "b"), in_flight={"10.0.0.1:8000": 2}, paused=True, overdue=1, leases=7,
    dispatched_total=50, guard_dispatches_total=5, ended_total=43,
)  # fmt: skip


ENDED = Completion("r", Outcome.COMPLETED, 200, None, 7, 100, 2.0, 0.2)


def test_a_decision_is_counted_by_code_and_mode_and_its_latency_observed() -> None:
    metrics = Metrics()
    metrics.answered("lean", "llama", "ok", 0.003)
    metrics.answered("lean", "llama", "expired_ttl", 3)
    page = samples(metrics)
    for code in ("ok", "expired_ttl"):
        assert page["epp_requests_total", f"code={code}", "mode=lean", "model=llama"] == 1
    errors = {key[1:]: n for key, n in page.items() if key[0] == "epp_request_errors_total"}
    assert errors == {("code=expired_ttl", "model=llama"): 1}
    for most, count in (("0.0025", 0), ("0.005", 1), ("+Inf", 2)):
        assert page["epp_decision_latency_seconds_bucket", f"le={most}", "mode=lean"] == count
    assert page["epp_decision_latency_seconds_sum", "mode=lean"] == pytest.approx(3.003)


def test_metrics_sum_the_values_of_completions_and_leave_unknown_values_out() -> None:
    metrics = Metrics()
    metrics.completed(ENDED, "llama")
    metrics.completed(Completion("r", Outcome.CLIENT_GONE, 200, None, None, None, None, None), "llama")
    page = samples(metrics)
    counts = {
        ("input_tokens_total", "model=llama"): 7, ("output_tokens_total", "model=llama"): 100,
        ("completions_total", "model=llama", "outcome=client_gone"): 1,
        ("responses_total", "model=llama", "status=200"): 2,
        ("request_duration_seconds_count", "model=llama"): 1,
        ("time_to_first_token_seconds_count", "model=llama"): 1,
    }  # fmt: skip
    assert {key: page["epp_" + key[0], *key[1:]] for key in counts} == counts
    assert not [key for key in page if key[0].startswith("epp_queue_latency")]


@cases("outcome, status, success, shown", {
    "served": (Outcome.COMPLETED, 200, "true", "200"),
    "a failed server": (Outcome.UPSTREAM_FAILED, 503, "false", "503"),
    "a client that left": (Outcome.CLIENT_GONE, 200, "false", "200"),
    "a client that left before its answer": (Outcome.CLIENT_GONE, 0, "false", "499"),
})  # fmt: skip
def test_a_wait_in_the_queue_is_counted_by_the_outcome_of_the_request(
    outcome: Outcome, status: int, success: str, shown: str
) -> None:
    metrics = Metrics()
    metrics.completed(ENDED._replace(outcome=outcome, status=status, waited_s=0.3, target_model="v2"), "m")
    page = samples(metrics)
    counts = {key: n for key, n in page.items() if key[0] == "epp_queue_latency_seconds_count"}
    waits = ("epp_queue_latency_seconds_count", "model=m", f"success={success}", "target_model=v2")
    assert counts == {waits: 1}
    assert page["epp_responses_total", "model=m", f"status={shown}"] == 1


WAITS = ask(model="m", target_model="m-v2")
# Each row has a method of Metrics, the arguments, and samples expected after the calls of all rows.
QUEUE_EVENTS: list[tuple[str, tuple[Any, ...], dict[str, float]]] = [
    ("waited", ("m", 0.3, True), {"queue_latency_seconds_count model=m success=true": 1}),
    ("waited", ("m", 30, False), {"queue_latency_seconds_count model=m success=false": 1}),
    ("bypassed", ("m", "m-v2"), {"bypass_total model=m target_model=m-v2": 1}),
    ("expired", ("m",), {"requests_expired_total model=m": 1}),
    ("client_gone", ("lean", "m", 2.0), {
        "requests_cancelled_total model=m": 1, "responses_total model=m status=499": 1,
        "request_errors_total code=client_gone model=m": 1}),
    ("push_error", ("m", "total_capacity"), {"queue_push_errors_total error_type=total_capacity model=m": 1}),
    *(("waiting", (WAITS, change), {"queue_length model=m target_model=m-v2": 1}) for change in (1, 1, -1)),
    ("preempted", ("Sheddable",), {"preemptions_total band=Sheddable": 1,
                                      "preemptions_total band=Critical": 0}),
    ("evicted", ("Critical",), {"evictions_total band=Critical": 1}),
    ("dequeued", (3, 2), {"popper_dequeue_attempts_total": 3, "popper_dequeue_successes_total": 2}),
    ("adopted", (4,), {"adoptions_total": 4}),
    ("reclaimed", (5,), {"lease_reclaims_total": 5}),
    ("redis_call", ("admit", 0.0004, 8), {"redis_call_seconds_count script=admit": 1,
                                          "redis_call_items_sum script=admit": 8}),
    ("redis_error", ("settle", "item"), {"redis_errors_total kind=item script=settle": 1,
                                         "redis_errors_total kind=full script=settle": 0}),
    *[("access_log", ("ended",), {"access_log_entries_total kind=ended": 6})] * 6,
]  # fmt: skip


def test_metrics_of_queue_events_have_the_specified_names() -> None:
    metrics, expected = Metrics(), {}
    for call, arguments, found in QUEUE_EVENTS:
        getattr(metrics, call)(*arguments)
        expected |= found
    page = samples(metrics)
    assert {name: page[tuple(f"epp_{name}".split())] for name in expected} == expected


def test_the_metrics_of_a_replica_show_degraded_until_its_state_is_shared_again() -> None:
    metrics = Metrics()
    for state, degraded in (("local", 1), ("resyncing", 1), ("shared", 0)):
        metrics.failover(state, "silence")
        metrics.pool(STATE, 8.0, 0.016)
        assert samples(metrics)["epp_degraded",] == degraded, state


def test_gauges_follow_the_pools_state_and_series_of_removed_endpoints_end() -> None:
    metrics = Metrics()
    metrics.pool(STATE, 8.0, 0.016)
    limits = {"10.0.0.2:8000": 32}
    metrics.pool(replace(STATE, in_flight={"10.0.0.2:8000": 1}, limits=limits), 8.0, 0.016)
    metrics.limits_between(1, None)
    page = samples(metrics)
    gauges = {
        "stock_level": 7, "upper_bound": pytest.approx(8.8), "lower_bound": pytest.approx(7.2),
        "watermark": 8, "paused": 1, "live_replicas": 2, "overdue_requests": 1, "leases": 7,
        "dispatches_total": 50, "guard_dispatches_total": 5, "ended_total": 43,
    }  # fmt: skip
    assert {name: page[f"epp_{name}",] for name in gauges} == gauges
    assert page["epp_band_queue_length", "band=Default"] == 3
    in_flight = {key[1]: n for key, n in page.items() if key[0] == "epp_endpoint_in_flight"}
    assert in_flight == {"endpoint=10.0.0.2:8000": 1}
    shown = {key: n for key, n in page.items() if "_limit" in key[0] and "moves" not in key[0]}
    assert shown == {("epp_endpoint_limit", "endpoint=10.0.0.2:8000"): 32, ("epp_limit_min",): 1}


def test_label_pairs_of_model_and_target_model_are_limited_in_number() -> None:
    metrics = Metrics(models=["llama"])
    for number in range(3000):
        metrics.bypassed(f"made-up-{number % 90}", f"variant-{number}")
    metrics.bypassed("llama", "llama")
    page = samples(metrics)
    pairs = {key: value for key, value in page.items() if key[0] == "epp_bypass_total"}
    assert len(pairs) <= 1000 + 90 + 1
    assert sum(pairs.values()) == 3001
    assert page["epp_bypass_total", "model=llama", "target_model=llama"] == 1
    assert any(f"target_model={OTHER}" in key for key in pairs)


def test_each_scorer_of_an_endpoint_has_a_series_and_removed_endpoints_have_none() -> None:
    metrics = Metrics()
    scores = {"10.0.0.1:8000": {"queue-depth": 0.5, "total": 0.7}}
    metrics.follow_scores(lambda: scores)
    assert samples(metrics)["epp_endpoint_score", "endpoint=10.0.0.1:8000", "scorer=total"] == 0.7
    scores = {"10.0.0.2:8000": {"queue-depth": 0.25}}
    page = samples(metrics)
    assert page["epp_endpoint_score", "endpoint=10.0.0.2:8000", "scorer=queue-depth"] == 0.25
    assert not any("endpoint=10.0.0.1:8000" in key for key in page)


def test_gauges_name_new_endpoints_after_series_for_a_thousand_other_endpoints() -> None:
    metrics = Metrics()
    many = {f"10.0.{n // 250}.{n % 250}:8000": 0.1 for n in range(1000)}
    metrics.scrape_ages(1000, lambda: many)
    assert len(samples(metrics)) > 1000
    metrics.scrape_ages(1, lambda: {"10.9.9.9:8000": 0.1})
    metrics.follow_scores(lambda: {"10.9.9.9:8000": {"queue": 0.5}})
    named = [key for key in samples(metrics) if "endpoint=10.9.9.9:8000" in key]
    assert len(named) == 2


@pytest.mark.parametrize("name", ['a"b\n\\', "\ud800", "x" * 100_000, "", "naïve模型", "\x00"])
def test_the_metrics_page_parses_with_a_hostile_model_name(name: str) -> None:
    metrics = Metrics()
    metrics.answered("lean", name, "ok", 0.1)
    assert len(page_of(metrics)) < 50_000
    assert any(key[0] == "epp_requests_total" for key in samples(metrics))


def test_the_documentation_names_the_same_metric_families_as_the_code() -> None:
    found = {name: kind for name, (kind, _) in families(page_of(Metrics()).decode()).items()}
    assert found == {name: row.kind for name, row in documented().items()}


async def test_the_metrics_page_is_rendered_once_a_second_for_all_readers() -> None:
    metrics, clock = Metrics(), Clock()
    pages = MetricsText([metrics], clock)
    first = await asyncio.gather(*(pages.read(f"10.0.0.{n}") for n in range(50)))
    metrics.adopted()
    clock.now_s += METRICS_INTERVAL_S - 0.01
    first.append(await pages.read("10.0.1.1"))
    assert all(page is first[0] for page in first)
    clock.now_s += 0.02
    assert b"epp_adoptions_total 1.0" in await pages.read("10.0.0.1")


async def test_an_address_that_often_reads_the_page_waits_for_the_next_rendering() -> None:
    metrics = Metrics()
    pages = MetricsText([metrics])
    page = await pages.read("a")
    for _ in range(MAX_METRICS_READS - 1):
        assert await pages.read("a") is page
    waiting = [asyncio.create_task(pages.read("a")) for _ in range(MAX_METRICS_READS + 2)]
    assert await pages.read("b") is page
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(each is not page for each in answers)
    assert sum(isinstance(each, bytes) for each in answers) == MAX_METRICS_READS
    assert [each.code for each in answers if isinstance(each, Refused)] == ["too_many_calls"] * 2


async def test_the_metrics_page_is_rendered_in_slices_between_which_the_event_loop_runs() -> None:
    metrics, turns = Metrics(), 0
    for number in range(100):
        metrics.answered("lean", f"model-{number}", "ok", 0.01)
    making = asyncio.create_task(MetricsText([metrics], slice_s=0.0).read("a"))
    while not making.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 100


def filled(models: int, statuses: int = 1) -> Metrics:
    """Metrics after requests for `models` models whose names a client made up."""
    metrics = Metrics()
    for number in range(models):
        name = f"model-{number}"
        for code in ("ok", "queue_ttl", "total_capacity"):
            metrics.answered("lean", name, code, 0.01, f"variant-{number}")
        for success in (True, False):
            metrics.waited(name, 0.1, success, f"variant-{number}")
        for status in range(200, 200 + statuses):
            metrics.completed(ENDED._replace(status=status), name)
        metrics.scraped(f"10.{number >> 8}.{number & 255}.1:80", 0.01, EndpointMetrics(0))
    return metrics


def test_labels_that_clients_choose_cannot_make_the_metrics_page_large() -> None:
    page = page_of(filled(1500, 10)).decode()
    assert len(page) < 12_000_000
    values: dict[str, set[str]] = {}
    for label, value in set(re.findall(r'(\w+)="([^"]*)"', page)):
        values.setdefault(label, set()).add(value)
    for label, seen in values.items():
        assert len(seen) <= 1002, label
    assert OTHER in values["model"]
    assert OTHER in values["endpoint"]
    assert max(Counter(line.split("{")[0] for line in page.splitlines()).values()) <= 2_501 * 16


def test_only_changed_metric_series_are_rendered_again() -> None:
    metrics = filled(100)
    page = MetricsText([metrics])
    pieces = list(page.pieces())
    metrics.answered("lean", "model-7", "ok", 0.01, "variant-7")
    again = list(page.pieces())
    written = [new for old, new in zip(pieces, again, strict=True) if new is not old and old[:1] != b"#"]
    assert len(written) == 2  # a counter and a histogram of the decision


def test_a_band_that_is_not_configured_has_metric_series_while_in_use() -> None:
    bands = Bands([*NAMED, replace(Band.DEFAULT, priority=7, name="seven")])
    metrics = Metrics(bands=bands)
    # Requests of three bands were preempted: band 7 is configured, band 100 is in use, band -3 is neither.
    for priority in (7, 100, -3):
        metrics.preempted(bands.of(priority).name)
    metrics.pool(replace(STATE, queue_length={"100": 2, "Critical": 0, "seven": 0}), 8.0, 0.016)
    page = samples(metrics)

    def names(series: str) -> set[str]:
        return {labels[0].removeprefix("band=") for name, *labels in page if name == series}

    assert names("epp_preemptions_total") == {"Critical", "Default", "Sheddable", "seven", "100"}
    assert names("epp_band_queue_length") == {"100", "Critical", "seven"}
    assert page["epp_preemptions_total", "band=100"] == 1


def test_a_report_of_service_to_flows_covers_the_last_ten_whole_seconds() -> None:
    clock = Clock()
    meter = ServiceMeter(clock)
    for band, flow, cost in ((1, "a", 2.0), (1, "a", 1.0), (1, "b", 1.0), (0, "a", 5.0)):
        meter.record(band, flow, cost)
    # The report does not include the current second.
    assert meter.report() == {"priorities": [], "flows": [], "cut": False}
    flows = [(0, "a", 5.0), (1, "a", 3.0), (1, "b", 1.0)]
    for clock.now_s in (1.5, 10.9):
        assert meter.report() == {"priorities": [(0, 5.0), (1, 4.0)], "flows": flows, "cut": False}
    clock.now_s = 11.0
    assert meter.report() == {"priorities": [], "flows": [], "cut": False}


def test_a_report_of_service_lists_the_busiest_flows_and_sums_bands_over_all_flows() -> None:
    # One meter has more flows than a report lists; the other meter has flows with long names.
    clock = Clock()
    meter, long = ServiceMeter(clock), ServiceMeter(clock)
    for number in range(7000):
        meter.record(2, f"flow-{number}", 1.0)
    for number in range(100):
        long.record(1, f"{number:03d}" * 500, 1.0)
    meter.record(2, "flow-77", 10.0)
    clock.now_s += 1
    report = meter.report()
    # The list of flows is marked as cut; the sum of the band includes all flows.
    assert report["flows"][0] == (2, "flow-77", 11.0)
    assert (len(report["flows"]), report["cut"]) == (200, True)
    assert report["priorities"] == [(2, 7010.0)]
    assert (len(long.report()["flows"]), long.report()["cut"]) == (10, True)
