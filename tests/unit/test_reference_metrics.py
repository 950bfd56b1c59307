"""Metrics under the llm-d reference picker's names, with equal values and present from the first scrape."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from local_requests import ask
from metrics_page import samples
from scripted_store import POOL

from picker_fleet.domain.request import Band, Completion, Outcome
from picker_fleet.endpoints.readings import EndpointMetrics, Reading
from picker_fleet.telemetry.metrics import Metrics
from picker_fleet.telemetry.reference_metrics import ReferenceMetrics

QUEUE = ("llm_d_epp_flow_control_queue_size", "inference_extension_flow_control_queue_size")
SATURATION = ("llm_d_epp_flow_control_pool_saturation", "inference_extension_flow_control_pool_saturation")
RUNNING = ("llm_d_epp_request_running", "inference_objective_running_requests")
READY = ("llm_d_epp_ready_endpoints", "inference_pool_ready_pods")


FLOW_CONTROL = ("llm_d_epp_flow_control", "inference_extension_flow_control")
COMPLETED = Completion(
    "r", Outcome.COMPLETED, 200, "10.0.0.1:80", 9, 9, 3.0, 1.5, waited_s=0.5, target_model="llama-7b"
)


def reading(waiting: float, running: float, kv: float, *, known: bool = True) -> Reading:
    return Reading(EndpointMetrics(0, waiting, running, kv), 0.0, known)


class Page:
    """The metrics page of a replica of the pool `llm`."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.readings: dict[str, Reading] = {}
        self.running: Counter[str] = Counter()
        live: Any = {"readings": lambda: self.readings, "running": lambda: self.running}
        ReferenceMetrics("llm", self.metrics, **live)

    def series(self, name: str) -> dict[tuple[str, ...], float]:
        return {key: value for key, value in samples(self.metrics).items() if key[0] == name}

    def values(self, names: tuple[str, ...], *labels: str) -> list[float | None]:
        found = samples(self.metrics)
        return [found.get((name, *labels)) for name in names]


@pytest.fixture
def page() -> Page:
    return Page()


def test_requests_are_counted_by_flow_and_priority_and_model_and_fall_to_0(page: Page) -> None:
    assert page.values(QUEUE, "inference_pool=llm") == [0, 0]
    assert page.values(RUNNING) == [0, 0]
    urgent = ask(flow="tenant", band=Band.CRITICAL, model="llama", target_model="llama-7b")
    page.metrics.waiting(urgent, 3)
    page.metrics.waiting(urgent._replace(band=Band.SHEDDABLE), 1)
    page.running.update({"llama": 5, "": 1})
    models = ("inference_pool=llm", "model_name=llama", "priority=10", "target_model_name=llama-7b")
    labels = ("fairness_id=tenant", *models)
    assert page.values(QUEUE, *labels) == [3, 3]
    assert page.values(QUEUE, *(label.replace("=10", "=-10") for label in labels)) == [1, 1]
    assert page.values(RUNNING, "model_name=llama") == [5, 5]
    page.metrics.waiting(urgent, -3)
    page.running.clear()
    assert page.values(QUEUE, *labels) == [0, 0]
    assert page.values(RUNNING, "model_name=llama") == [0, 0]


def test_metrics_of_saturation_and_ready_endpoints_follow_the_pool(page: Page) -> None:
    page.metrics.pool(replace(POOL, stock=3.0, upper=12.0, ready_backends=2), 10.0, 0.0)
    assert page.values(SATURATION, "inference_pool=llm") == [0.25, 0.25]
    assert page.values(READY, "name=llm") == [2, 2]
    page.metrics.pool(replace(POOL, stock=0.0, upper=0.0, ready_backends=0), 0.0, 0.0)
    assert page.values(SATURATION, "inference_pool=llm") == [1, 1], "no endpoint: nothing fits"
    assert page.values(READY, "name=llm") == [0, 0]


def test_average_metrics_leave_out_endpoints_with_unknown_readings(page: Page) -> None:
    names = tuple(f"{prefix}_average_queue_size" for prefix in ("llm_d_epp", "inference_pool"))
    assert page.values(names, "name=llm") == [None, None]
    page.readings = {"a": reading(2, 4, 0.5), "b": reading(4, 8, 0.7), "c": reading(90, 90, 0.9, known=False)}
    assert page.values(names, "name=llm") == [3, 3]
    assert page.values(("inference_pool_average_running_requests",), "name=llm") == [6]
    assert page.values(("llm_d_epp_average_kv_cache_utilization",), "name=llm") == [0.6]


def test_the_number_of_metric_series_per_flow_is_limited(page: Page) -> None:
    names = ["\ud800", "x" * 100_000, *(f"flow-{number}" for number in range(3000))]
    for name in names:
        page.metrics.waiting(ask(flow=name), 1)
    lengths = page.series(QUEUE[0]).values()
    assert (len(lengths), sum(lengths)) == (1001, len(names))
    for name in names:
        page.metrics.waiting(ask(flow=name), -1)
    page.metrics.waiting(ask(flow="new"), 1)
    lengths = page.series(QUEUE[0]).values()
    assert len(lengths) <= 1001
    assert sum(lengths) == 1
    assert not page.metrics.waiting_requests.keys() - {("new", Band.DEFAULT, "m", "m")}


def test_the_number_of_metric_series_per_model_is_limited(page: Page) -> None:
    page.running.update({f"model-{number}": 1 for number in range(3000)})
    series = page.series(RUNNING[0])
    assert (len(series), series[RUNNING[0], "model_name=other"]) == (1002, 2000)


def test_decisions_and_answers_and_waits_have_metrics_under_the_references_names(page: Page) -> None:
    models = ("model_name=llama", "target_model_name=llama-7b")
    for mode, code in (("lean", "ok"), ("http", "ok"), ("http", "total_capacity")):
        page.metrics.answered(mode, "llama", code, 0.1, "llama-7b")
    page.metrics.completed(COMPLETED, "llama")
    requests = ("llm_d_epp_request_total", "inference_objective_request_total")
    assert page.values(requests, *models) == [3, 3]
    errors = ("inference_objective_request_error_total",)
    assert page.values(errors, "error_code=total_capacity", *models) == [1]
    for prefix in ("llm_d_epp_request", "inference_objective_request"):
        for name, seconds in (("duration_seconds", 3.0), ("ttft_seconds", 1.5)):
            names = tuple(f"{prefix}_{name}_{part}" for part in ("count", "sum"))
            assert page.values(names, "model_name=llama") == [1, seconds]
    waited = tuple(f"{prefix}_request_queue_duration_seconds_sum" for prefix in FLOW_CONTROL)
    assert page.values(waited, *models[:1], "success=true", *models[1:]) == [0.5, 0.5]
    own = ("model=llama", "success=true", "target_model=llama-7b")
    assert page.values(("epp_queue_latency_seconds_sum",), *own) == [0.5]
