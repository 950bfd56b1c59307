"""Metrics under the reference picker's names, which existing dashboards and autoscalers query.

`llm_d_epp_…` are the names of llm-d, `inference_…` the older names of the Gateway API inference extension.
Values are computed when the page is rendered. Queue sizes and running requests are counts of this replica:
sum them over the fleet. Metrics of the pool are the same on every replica.
"""

from collections.abc import Callable, Mapping
from functools import partial
from statistics import fmean
from typing import Final

from picker_fleet.endpoints.readings import EndpointMetrics, Reading
from picker_fleet.telemetry.catalogue import Labels
from picker_fleet.telemetry.metrics import OTHER, Counters, Gauges, LabelCap, Metrics, label_value

_FLOW_CONTROL: Final = ("llm_d_epp_flow_control", "inference_extension_flow_control")
_POOL: Final = ("llm_d_epp", "inference_pool")
_REQUEST: Final = ("llm_d_epp_request", "inference_objective_request")
_MODEL: Final = ("model_name", "target_model_name")
_QUEUED: Final = ("fairness_id", "priority", "inference_pool", *_MODEL)
_MOST_QUEUE_SERIES = 1000
_AVERAGES: Final[Mapping[str, Callable[[EndpointMetrics], float | None]]] = {
    "average_queue_size": lambda reading: reading.waiting,
    "average_running_requests": lambda reading: reading.running,
    "average_kv_cache_utilization": lambda reading: reading.kv_utilisation,
}


class ReferenceMetrics:
    """Adds families of the pool `pool` to the page of `metrics`.

    `readings` returns each endpoint's newest reading; `running` returns how many answers in flight pass
    through this replica, by model."""

    def __init__(
        self,
        pool: str,
        metrics: Metrics,
        *,
        readings: Callable[[], Mapping[str, Reading]],
        running: Callable[[], Mapping[str, int]],
    ) -> None:
        self._pool, self._metrics = (pool,), metrics
        self._readings, self._running = readings, running
        self._model = LabelCap()
        self._queue_seen: dict[Labels, float] = {}
        self._running_seen: dict[Labels, float] = {("",): 0.0}
        page = metrics.page

        def gauges(
            names: tuple[str, ...], help_text: str, labels: Labels, read: Callable[[], dict[Labels, float]]
        ) -> None:
            for name in names:
                Gauges(page, name, help_text, labels).follow_all(read)

        gauges(
            tuple(f"{prefix}_queue_size" for prefix in _FLOW_CONTROL),
            "Requests of this replica that wait in the queue.",
            _QUEUED,
            self._waiting,
        )
        gauges(
            tuple(f"{prefix}_pool_saturation" for prefix in _FLOW_CONTROL),
            "The stock as a fraction of its upper bound.",
            ("inference_pool",),
            self._saturation,
        )
        gauges(
            ("llm_d_epp_request_running", "inference_objective_running_requests"),
            "Requests in flight whose answers pass through this replica.",
            ("model_name",),
            self._running_by_model,
        )
        gauges(
            ("llm_d_epp_ready_endpoints", "inference_pool_ready_pods"),
            "Endpoints that take new requests.",
            ("name",),
            self._ready,
        )
        for what, amount_of in _AVERAGES.items():
            names = tuple(f"{prefix}_{what}" for prefix in _POOL)
            gauges(names, "Mean over the endpoints.", ("name",), partial(self._average, amount_of))
        for prefix in _REQUEST:
            requests = Counters(page, prefix, "Decisions sent to Envoy.", _MODEL)
            requests.follow_all(self._requests_by_model)
            metrics.histograms["epp_request_duration_seconds"].also(f"{prefix}_duration_seconds", _MODEL[:1])
            metrics.histograms["epp_time_to_first_token_seconds"].also(f"{prefix}_ttft_seconds", _MODEL[:1])
        errors = Counters(
            page, f"{_REQUEST[1]}_error", "Decisions that were refusals.", (*_MODEL, "error_code")
        )
        errors.follow_all(lambda: dict(metrics.counters["epp_request_errors"].values))
        for prefix in _FLOW_CONTROL:
            metrics.histograms["epp_queue_latency_seconds"].also(
                f"{prefix}_request_queue_duration_seconds", (*_MODEL, "success")
            )

    def _requests_by_model(self) -> dict[Labels, float]:
        found: dict[Labels, float] = {}
        for (model, target, *_), count in self._metrics.counters["epp_requests"].values.items():
            found[model, target] = found.get((model, target), 0.0) + count
        return found

    def _running_by_model(self) -> dict[Labels, float]:
        """The number of requests in flight of each model, and 0 for models that had requests before."""
        found = dict.fromkeys(self._running_seen, 0.0)
        for model, count in self._running().items():
            labels = (self._model(model),)
            found[labels] = found.get(labels, 0.0) + count
        self._running_seen = found
        return found

    def _saturation(self) -> dict[Labels, float]:
        state = self._metrics.pool_state
        if state is None:
            return {}
        return {self._pool: state.stock / state.upper if state.upper > 0 else 1.0}

    def _ready(self) -> dict[Labels, float]:
        state = self._metrics.pool_state
        return {} if state is None else {self._pool: float(state.ready_backends)}

    def _average(self, amount_of: Callable[[EndpointMetrics], float | None]) -> dict[Labels, float]:
        known = [reading.metrics for reading in self._readings().values() if reading.known]
        amounts = [amount for each in known if (amount := amount_of(each)) is not None]
        return {self._pool: fmean(amounts)} if amounts else {}

    def _waiting(self) -> dict[Labels, float]:
        """The queue length of each series, and 0 for series that had requests before. Clients name flows and
        models: beyond `_MOST_QUEUE_SERIES` series, drop series at 0, and count the rest as `other`."""
        found: dict[Labels, float] = {}
        for each, count in self._metrics.waiting_requests.items():
            priority = str(each.band.priority)
            labels: Labels = (each.flow, priority, *self._pool, each.model, each.target_model)
            if len(found) >= _MOST_QUEUE_SERIES:
                labels = (OTHER, priority, *self._pool, OTHER, OTHER)
            labels = tuple(map(label_value, labels))
            found[labels] = found.get(labels, 0.0) + count
        for labels in self._queue_seen:
            if len(found) >= _MOST_QUEUE_SERIES:
                break
            found.setdefault(labels, 0.0)
        self._queue_seen = found
        return found or {("", "", *self._pool, "", ""): 0.0}  # show a series at 0 rather than none
