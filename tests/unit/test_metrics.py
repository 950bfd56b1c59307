"""Metrics: the names on the page, capped labels, and JSON log lines."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
from metrics_page import page_of, samples
from metrics_table import documented, families

from picker_fleet.request import Band, Completion, Outcome
from picker_fleet.telemetry import logs
from picker_fleet.telemetry.logs import DecisionLines
from picker_fleet.telemetry.metrics import Metrics
from picker_fleet.telemetry.series import OTHER, LabelCap

STATE = {
    "stock": 7,
    "bounds": {"lower": 7.2, "watermark": 8.0, "upper": 8.8},
    "ready_backends": 4,
    "queue_length": {"Critical": 0, "Default": 3},
    "active_flows": 2,
    "replicas": ["a", "b"],
    "in_flight": {"10.0.0.1:8000": 2},
    "degraded": True,
    "paused": True,
    "overdue": 1,
    "leases": 7,
    "dispatched_total": 50,
    "guard_dispatches_total": 5,
    "ended_total": 43,
}


def ended(**changes: object) -> Completion:
    fields: dict[str, object] = {
        "id": "r",
        "outcome": Outcome.COMPLETED,
        "status": 200,
        "served": None,
        "prompt_tokens": 7,
        "completion_tokens": 100,
        "duration_s": 2.0,
        "first_byte_s": 0.2,
    }
    return Completion(**{**fields, **changes})  # type: ignore[arg-type]


def test_given_a_decision_when_counted_then_code_mode_and_latency_are_on_the_page() -> None:
    metrics = Metrics()
    metrics.answered("lean", "llama", "ok", 0.003)
    metrics.answered("lean", "llama", "expired_ttl", 3)
    page = samples(metrics)
    assert page["epp_requests_total", "code=ok", "mode=lean", "model=llama"] == 1
    assert page["epp_requests_total", "code=expired_ttl", "mode=lean", "model=llama"] == 1
    assert page["epp_request_errors_total", "code=expired_ttl", "model=llama"] == 1
    assert ("epp_request_errors_total", "code=ok", "model=llama") not in page
    assert page["epp_decision_latency_seconds_bucket", "le=0.0025", "mode=lean"] == 0
    assert page["epp_decision_latency_seconds_bucket", "le=0.005", "mode=lean"] == 1
    assert page["epp_decision_latency_seconds_bucket", "le=+Inf", "mode=lean"] == 2
    assert page["epp_decision_latency_seconds_sum", "mode=lean"] == pytest.approx(3.003)


def test_given_completions_when_counted_then_tokens_and_durations_add_up_and_unknowns_are_left_out() -> None:
    metrics = Metrics()
    metrics.completed(ended(), "llama")
    metrics.completed(
        ended(
            outcome=Outcome.CLIENT_GONE,
            prompt_tokens=None,
            completion_tokens=None,
            duration_s=None,
            first_byte_s=None,
        ),
        "llama",
    )
    page = samples(metrics)
    assert page["epp_input_tokens_total", "model=llama"] == 7
    assert page["epp_output_tokens_total", "model=llama"] == 100
    assert page["epp_completions_total", "model=llama", "outcome=client_gone"] == 1
    assert page["epp_responses_total", "model=llama", "status=200"] == 2
    assert page["epp_request_duration_seconds_count", "model=llama"] == 1
    assert page["epp_time_to_first_token_seconds_count", "model=llama"] == 1
    assert not [key for key in page if key[0].startswith("epp_queue_latency")]


@pytest.mark.parametrize(
    ("outcome", "status", "success", "shown"),
    [
        (Outcome.COMPLETED, 200, "true", "200"),
        (Outcome.UPSTREAM_FAILED, 503, "false", "503"),
        (Outcome.CLIENT_GONE, 200, "false", "200"),
        (Outcome.CLIENT_GONE, 0, "false", "499"),
    ],
)
def test_given_a_wait_when_its_request_has_ended_then_it_counts_by_the_outcome(
    outcome: Outcome, status: int, success: str, shown: str
) -> None:
    metrics = Metrics()
    metrics.completed(ended(outcome=outcome, status=status, waited_s=0.3, target_model="v2"), "m")
    page = samples(metrics)
    counts = {key: n for key, n in page.items() if key[0] == "epp_queue_latency_seconds_count"}
    waits = ("epp_queue_latency_seconds_count", "model=m", f"success={success}", "target_model=v2")
    assert counts == {waits: 1}
    assert page["epp_responses_total", "model=m", f"status={shown}"] == 1


def test_given_queue_events_when_counted_then_they_have_the_specified_names() -> None:
    metrics = Metrics()
    metrics.waited("m", 0.3, True)
    metrics.waited("m", 30, False)
    metrics.bypassed("m", "m-v2")
    metrics.expired("m")
    metrics.client_gone("lean", "m", 2.0)
    metrics.push_error("m", "total_capacity")
    metrics.waiting("m", "m-v2", 1)
    metrics.waiting("m", "m-v2", 1)
    metrics.waiting("m", "m-v2", -1)
    metrics.preempted(Band.SHEDDABLE)
    metrics.evicted(Band.CRITICAL)
    metrics.dequeued(3, 2)
    metrics.adopted(4)
    metrics.reclaimed(5)
    metrics.redis_call("admit", 0.0004, 8)
    metrics.redis_error("settle", "item")
    metrics.access_log("ended", 6)
    page = samples(metrics)
    assert page["epp_queue_latency_seconds_count", "model=m", "success=true"] == 1
    assert page["epp_queue_latency_seconds_count", "model=m", "success=false"] == 1
    assert page["epp_bypass_total", "model=m", "target_model=m-v2"] == 1
    assert page["epp_requests_expired_total", "model=m"] == 1
    assert page["epp_requests_cancelled_total", "model=m"] == 1
    assert page["epp_queue_push_errors_total", "error_type=total_capacity", "model=m"] == 1
    assert page["epp_queue_length", "model=m", "target_model=m-v2"] == 1
    assert page["epp_responses_total", "model=m", "status=499"] == 1
    assert page["epp_request_errors_total", "code=client_gone", "model=m"] == 1
    assert page["epp_preemptions_total", "band=Sheddable"] == 1
    assert page["epp_preemptions_total", "band=Critical"] == 0
    assert page["epp_evictions_total", "band=Critical"] == 1
    assert page["epp_popper_dequeue_attempts_total",] == 3
    assert page["epp_popper_dequeue_successes_total",] == 2
    assert page["epp_adoptions_total",] == 4
    assert page["epp_lease_reclaims_total",] == 5
    assert page["epp_redis_call_seconds_count", "script=admit"] == 1
    assert page["epp_redis_call_items_sum", "script=admit"] == 8
    assert page["epp_redis_errors_total", "kind=item", "script=settle"] == 1
    assert page["epp_redis_errors_total", "kind=full", "script=settle"] == 0
    assert page["epp_access_log_entries_total", "kind=ended"] == 6


def test_given_a_state_when_shown_then_gauges_follow_and_series_of_gone_endpoints_end() -> None:
    metrics = Metrics()
    metrics.pool(STATE)
    metrics.pool({"in_flight": {"10.0.0.2:8000": 1}})
    page = samples(metrics)
    assert page["epp_stock_level",] == 7
    assert page["epp_upper_bound",] == pytest.approx(8.8)
    assert page["epp_lower_bound",] == pytest.approx(7.2)
    assert page["epp_watermark",] == 8
    assert page["epp_band_queue_length", "band=Default"] == 3
    assert page["epp_paused",] == 1
    assert page["epp_live_replicas",] == 2
    assert page["epp_degraded",] == 1
    assert page["epp_overdue_requests",] == 1
    assert page["epp_leases",] == 7
    assert page["epp_dispatches_total",] == 50
    assert page["epp_guard_dispatches_total",] == 5
    assert page["epp_ended_total",] == 43
    assert page["epp_endpoint_in_flight", "endpoint=10.0.0.2:8000"] == 1
    assert ("epp_endpoint_in_flight", "endpoint=10.0.0.1:8000") not in page


def test_given_more_names_than_the_cap_when_counted_then_the_rest_is_other_and_known_models_stay() -> None:
    metrics = Metrics(models=["llama"])
    for number in range(1500):
        metrics.bypassed(f"made-up-{number}")
    metrics.bypassed("llama")
    page = samples(metrics)
    models = [key for key in page if key[0] == "epp_bypass_total"]
    assert len(models) == 1001
    assert page["epp_bypass_total", f"model={OTHER}"] == 501
    assert page["epp_bypass_total", "model=llama"] == 1


def test_given_a_client_that_makes_up_both_names_when_counted_then_the_pairs_are_capped_too() -> None:
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


def test_given_a_replica_without_the_shared_state_when_told_then_the_gauge_follows() -> None:
    metrics = Metrics()
    metrics.degraded(True)
    assert samples(metrics)["epp_degraded",] == 1
    metrics.degraded(False)
    assert samples(metrics)["epp_degraded",] == 0


def test_given_scores_when_shown_then_each_scorer_has_its_series_and_gone_endpoints_have_none() -> None:
    metrics = Metrics()
    metrics.scores({"10.0.0.1:8000": {"queue-depth": 0.5, "total": 0.7}})
    metrics.scores({"10.0.0.2:8000": {"queue-depth": 0.25}})
    page = samples(metrics)
    assert page["epp_endpoint_score", "endpoint=10.0.0.2:8000", "scorer=queue-depth"] == 0.25
    assert not any("endpoint=10.0.0.1:8000" in key for key in page)


def test_given_a_thousand_endpoints_gone_when_new_ones_come_then_gauges_name_them() -> None:
    metrics = Metrics()
    metrics.scrape_ages(1000, {f"10.0.{n // 250}.{n % 250}:8000": 0.1 for n in range(1000)})
    metrics.scrape_ages(1, {"10.9.9.9:8000": 0.1})
    metrics.scores({"10.9.9.9:8000": {"queue": 0.5}})
    named = [key for key in samples(metrics) if "endpoint=10.9.9.9:8000" in key]
    assert len(named) == 2


@pytest.mark.parametrize("name", ['a"b\n\\', "\ud800", "x" * 100_000, "", "naïve模型", "\x00"])
def test_given_a_hostile_model_name_when_counted_then_the_page_still_parses(name: str) -> None:
    metrics = Metrics()
    metrics.answered("lean", name, "ok", 0.1)
    assert len(page_of(metrics)) < 50_000
    assert any(key[0] == "epp_requests_total" for key in samples(metrics))


def test_given_a_cap_when_a_known_value_comes_again_then_it_keeps_its_name() -> None:
    cap = LabelCap(limit=1)
    assert [cap("a"), cap("b"), cap("a")] == ["a", OTHER, "a"]


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    logs.setup("INFO", stream, replica="r-1")
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def test_given_a_log_line_when_written_then_it_is_one_json_object_with_its_fields(lines: io.StringIO) -> None:
    logging.getLogger("picker_fleet.x").warning(
        "took %d", 3, extra={"request_id": "id-1", "flow": "flow-1", "decision": "expired"}
    )
    line = json.loads(lines.getvalue())
    assert lines.getvalue().count("\n") == 1
    assert line["message"] == "took 3"
    assert line["level"] == "warning"
    assert (line["request_id"], line["flow"], line["decision"]) == ("id-1", "flow-1", "expired")
    assert line["replica"] == "r-1"


def test_given_values_json_does_not_know_when_logged_then_the_line_is_written_all_the_same(
    lines: io.StringIO,
) -> None:
    # Alone: what half a character does to other handlers is not the matter here.
    root = logging.getLogger()
    root.handlers[:] = [each for each in root.handlers if getattr(each, "stream", None) is lines]
    try:
        raise ValueError("bad \ud800 text\nsecond line")
    except ValueError:
        logging.getLogger("picker_fleet.x").exception("failed \ud800", extra={"what": {1, 2}, "size": 2**70})
    line = json.loads(lines.getvalue())
    assert "ValueError" in line["exception"]
    assert lines.getvalue().count("\n") == 1


def test_given_the_page_when_compared_with_its_documentation_then_both_name_the_same_families() -> None:
    found = families(page_of(Metrics()).decode())
    assert {name: kind for name, (kind, _) in found.items()} == {
        name: row.kind for name, row in documented().items()
    }


def test_given_text_when_a_line_is_written_then_it_stays_one_line_and_its_fields_can_be_told_apart() -> None:
    formatter = logs.TextFormatter()
    record = logging.makeLogRecord(
        {
            "name": "picker_fleet.x",
            "levelname": "INFO",
            "msg": "a\nb",
            "flow": "x y=\n",
            "request_id": "r-1",
            "none": "",
        }
    )
    line = formatter.format(record)
    assert "\n" not in line
    assert line.endswith('INFO    picker_fleet.x a\\nb flow="x y=\\n" request_id=r-1 none=""')


def test_given_a_flood_of_refusals_when_logged_then_a_few_a_second_are_written_and_the_rest_counted(
    lines: io.StringIO,
) -> None:
    now_s = 0.0
    written = DecisionLines(lambda: now_s)
    for _ in range(100):
        written.refused(None, "total_capacity", 503, "lean", 0.1)
    written.refused(None, "bad_request", 400, "lean", 0.1)
    now_s = 1.0
    written.refused(None, "total_capacity", 503, "lean", 0.1)
    told = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [line["decision"] for line in told] == ["total_capacity"] * 5 + ["bad_request", "total_capacity"]
    assert told[-1]["left_out"] == 95
    assert not written.debug
