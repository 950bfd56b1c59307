"""The metrics of a pool in one replica; admin/documents.py shows them as Prometheus text.

Metric names follow spec 003, with the prefix `epp_`; further metrics have names that operators expect.
Counters, histograms and `epp_queue_length` concern this replica only: sum them over the fleet. Gauges of the
shared state (bounds, stock, queue by band) are equal on all replicas: query such gauges with `max`. A label
has at most 1000 values; further values become `other`. Times are in seconds. The label `target_model` is
empty if the model variant is unknown.

The instruments of prometheus-client take a lock for each update and visit every bucket: 1 µs a count, up to 3
µs an observation. Rendering a thousand models takes more than half a second. The families here belong to one
event loop, find the bucket by bisection, and keep the text of each series until its value changes.
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from prometheus_client.utils import floatToGoString

from picker_fleet.domain.bands import NAMED, Band
from picker_fleet.domain.budgets import BodyBudget
from picker_fleet.domain.errors import ClientGone
from picker_fleet.domain.request import Completion, InferenceRequest, Outcome
from picker_fleet.domain.tenants import Tree
from picker_fleet.endpoints.readings import EndpointMetrics
from picker_fleet.state.error_replies import NO_ANSWER, Meaning
from picker_fleet.state.pool_state import PoolState
from picker_fleet.state.reads import TenantRow

OTHER = "other"
MOST_TENANTS = 1000  # most nodes of tenants with metrics
_PERS = {"1000": "1s", "60000": "1m", "3600000": "1h", "86400000": "1d", "0": ""}  # periods of limits
_MAX_VALUES = 1000  # most distinct values of a label, and most distinct pairs of two labels' values
_MAX_VALUE_CHARS = 128
# The most series of a family: even with capped labels, the number of combinations can be large.
_MAX_SERIES = 10_000
_MAX_HISTOGRAMS = 2_500

Labels = tuple[str, ...]

_DECISION = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_QUEUE = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0)
_DURATION = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_FIRST_BYTE = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_REDIS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5)
_ITEMS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)

_MODEL = ("model", "target_model")
_SCRIPTS = (
    "tombstone", "renew", "report_client_gone", "settle", "admit", "place", "acknowledge", "cancel",
    "heartbeat", "sweep",
)  # fmt: skip
_ERROR_KINDS = (NO_ANSWER, *(meaning.value for meaning in Meaning))
_CLIENT_GONE = str(ClientGone.status)
_FAILOVER_STATES = ("shared", "local", "resyncing")
_TRANSITIONS = (
    ("local", "refused"),
    ("local", "silence"),
    ("local", "failed"),
    ("resyncing", "answers"),
    ("shared", "all-told"),
)
# Field of the shared state -> the name of its metric, and the help text.
_POOL_GAUGES = {
    "stock": ("stock_level", "Requests or tokens in flight, fleet-wide."),
    "lower": ("lower_bound", "While the stock is below this bound, requests are dispatched."),
    "watermark": ("watermark", "The target of the stock."),
    "upper": ("upper_bound", "The stock never exceeds this bound."),
    "queue_fill": ("queue_fill", "The part of the queue's total capacity in use."),
    "active_flows": ("active_flows", "Flows with a queued request."),
    "overdue": ("overdue_requests", "Queued requests past their starvation threshold."),
    "leases": ("leases", "Requests in flight that have a lease."),
    "ready_backends": ("ready_backends", "Endpoints that take new requests."),
    "replicas": ("live_replicas", "Replicas that send heartbeats."),
    "paused": ("paused", "1 while dispatch is paused, fleet-wide."),
}
_POOL_TOTALS = {
    "dispatched_total": ("dispatches", "Requests dispatched from the queue, fleet-wide."),
    "guard_dispatches_total": ("guard_dispatches", "Requests dispatched by the starvation guard."),
    "ended_total": ("ended", "Requests in flight that ended, fleet-wide."),
}


class Waiting(NamedTuple):
    """The key of `request` under which this replica counts waiting requests."""

    flow: str
    band: Band
    model: str
    target_model: str


class Metrics:
    """The metrics of one pool in a replica.

    The models `models` keep their label values whatever names clients send; `labels` are added to each
    series. The configured bands `bands` always have series, any other band only while in use."""

    def __init__(
        self,
        models: Iterable[str] = (),
        labels: Mapping[str, str] = MappingProxyType({}),
        bands: Iterable[Band] = NAMED,
    ) -> None:
        self.page = page = Page(labels)
        known = tuple(models)
        self._model = LabelCap(known)
        self._variant = PairCap((model, target) for model in known for target in ("", model))
        self._endpoint = LabelCap()

        counters, gauges = partial(Counters, page), partial(Gauges, page)
        histograms = partial(Histograms, page)

        self.requests = counters(
            "epp_requests", "Decisions sent to Envoy, by code.", (*_MODEL, "code", "mode")
        )
        self.refusals = counters("epp_request_errors", "Decisions that were refusals.", (*_MODEL, "code"))
        self._decision = histograms(
            "epp_decision_latency_seconds",
            "Time from a request's first message to its decision.",
            _DECISION,
            ("mode",),
        )
        self.waits = histograms(
            "epp_queue_latency_seconds", "Time in the queue.", _QUEUE, (*_MODEL, "success")
        )
        self._bypasses = counters("epp_bypass", "Requests that bypassed the queue.", _MODEL)
        self._expired = counters("epp_requests_expired", "Requests dropped past their TTL.", _MODEL)
        self._cancelled = counters(
            "epp_requests_cancelled", "Requests whose client disconnected before the decision.", _MODEL
        )
        self._waiting = gauges("epp_queue_length", "Requests of this replica that wait in the queue.", _MODEL)
        self._bodies = gauges("epp_buffered_bytes", "Bytes of bodies that this replica holds.")
        self._preemptions = counters("epp_preemptions", "Requests preempted for a higher band.", ("band",))
        self._evictions = counters("epp_evictions", "Requests an operator took out of the queue.", ("band",))
        self._push_errors = counters(
            "epp_queue_push_errors", "Requests the queue refused.", (*_MODEL, "error_type")
        )
        self._attempts = counters("epp_popper_dequeue_attempts", "Dispatch attempts.")
        self._successes = counters("epp_popper_dequeue_successes", "Dispatch attempts that served a request.")
        self.adopted = counters("epp_adoptions", "Requests adopted from another replica.").count
        self.reclaimed = counters("epp_lease_reclaims", "Requests released because their lease ended.").count

        self._completions = counters(
            "epp_completions", "Requests that ended, by outcome.", ("model", "outcome")
        )
        self._statuses = counters("epp_responses", "Answers by HTTP status, or 0.", ("model", "status"))
        self._tokens_in = counters(
            "epp_input_tokens", "Prompt tokens, as model servers count them.", ("model",)
        )
        self._tokens_out = counters(
            "epp_output_tokens", "Completion tokens, as model servers count them.", ("model",)
        )
        self.durations = histograms(
            "epp_request_duration_seconds", "Time until the last byte of the answer.", _DURATION, ("model",)
        )
        self.first_bytes = histograms(
            "epp_time_to_first_token_seconds", "Time until the answer's first byte.", _FIRST_BYTE, ("model",)
        )

        self.access_log = counters(
            "epp_access_log_entries", "Access-log entries, by what they report.", ("kind",)
        ).count_one
        self.access_log_rejected = counters(
            "epp_access_log_rejected",
            "Access-log entries without a valid accounting token, by fault.",
            ("reason",),
        ).count_one
        self._calls = histograms("epp_redis_call_seconds", "Time of one script call.", _REDIS, ("script",))
        self._items = histograms("epp_redis_call_items", "Items in one script call.", _ITEMS, ("script",))
        self._errors = counters(
            "epp_redis_errors", "Failed script calls, by kind of failure.", ("script", "kind")
        )

        self._degraded = gauges("epp_degraded", "1 while this replica works without the shared state.")
        self._failover_state = gauges("epp_failover_state", "1 for this replica's current state.", ("state",))
        self._transitions = counters(
            "epp_failover_transitions", "Changes of the failover state, by cause.", ("to", "cause")
        )
        self._paused_s = counters("epp_stood_still_seconds", "Seconds in which this replica did not run.")
        self._redis_answer_age = gauges("epp_redis_answer_age_seconds", "Time since Redis last answered.")
        self.background_failure = counters(
            "epp_background_failures",
            "Failures of background tasks, each followed by a new attempt.",
            ("task",),
        ).count_one
        self.strays = counters("epp_strays", "Dropped entries of requests without a record.").count
        self.keys_lost = counters("epp_redis_keys_lost", "How often Redis had lost keys of the pool.").count
        self._unfit = gauges(
            "epp_redis_unfit", "1 for each fault that makes the Redis server unfit.", ("fault",)
        )
        self.ghosts = counters(
            "epp_ghosts", "Requests released early: their endpoint no longer had them."
        ).count
        self._scrapes = counters(
            "epp_scrapes", "Metrics pages of model servers read, by result.", ("endpoint", "result")
        )
        self._probes = counters(
            "epp_probes", "Probes that model servers answered, between two scrapes.", ("endpoint",)
        )
        self._faults = counters(
            "epp_endpoint_faults",
            "Attempts that failed on an endpoint, or found it full.",
            ("endpoint", "reason"),
        )
        self._extension_faults = counters(
            "epp_extension_faults",
            "Calls of extensions without a result, or left out.",
            ("extension", "reason"),
        )
        self._ejections = counters(
            "epp_endpoint_ejections", "Ejections of an endpoint that failed.", ("endpoint", "reason")
        )
        self._scrape_s = histograms("epp_scrape_seconds", "Duration of a scrape.", _REDIS, ("result",))
        self._readings = counters(
            "epp_scrape_readings", "Readings published to the fleet, or lost.", ("result",)
        )
        self._owned = gauges("epp_scrape_endpoints", "Endpoints that this replica scrapes.")
        self._ages = gauges("epp_scrape_age_seconds", "Age of an endpoint's last reading.", ("endpoint",))
        self._scores = gauges("epp_endpoint_score", "Score of an endpoint by scorer.", ("endpoint", "scorer"))

        self._pool_gauges = {key: gauges(f"epp_{name}", text) for key, (name, text) in _POOL_GAUGES.items()}
        self._pool_totals = {key: counters(f"epp_{name}", text) for key, (name, text) in _POOL_TOTALS.items()}
        self._band_queues = gauges("epp_band_queue_length", "Queued requests, fleet-wide.", ("band",))
        self._band_bytes = gauges(
            "epp_band_queue_bytes", "Bytes of the bodies of queued requests, fleet-wide.", ("band",)
        )
        self._in_flight = gauges(
            "epp_endpoint_in_flight", "Requests in flight on an endpoint.", ("endpoint",)
        )
        self._limits = gauges("epp_endpoint_limit", "Limit of requests (or tokens) in flight.", ("endpoint",))
        self._prefills = gauges(
            "epp_endpoint_prefills", "Prompts that an endpoint prefills for others.", ("endpoint",)
        )
        self._prefill_limits = gauges(
            "epp_endpoint_prefill_limit", "Limit of such prompts of an endpoint.", ("endpoint",)
        )
        self._splits = counters(
            "epp_split_requests", "Requests whose prompt another endpoint prefills.", (*_MODEL, "mode")
        )
        self._least_limit = gauges("epp_limit_min", "The least limit that the fleet may find.")
        self._most_limit = gauges("epp_limit_max", "The highest limit that the fleet may find.")
        self._limit_moves = counters(
            "epp_endpoint_limit_moves", "Limits that this replica moved, as the leader.", ("direction",)
        )
        self._tenants: Mapping[str, TenantRow] = {}
        self._remaining = gauges(
            "epp_tenant_remaining", "Units left of a tenant's limit.", ("tenant", "unit", "per")
        )
        self._remaining.follow_all(self._remaining_by_limit)
        self._served_cost = counters("epp_tenant_served_cost", "Cost served for a tenant.", ("tenant",))
        self._served_cost.follow_all(self._served_by_tenant)
        self._over_limit = counters(
            "epp_tenant_over_limit",
            "Requests that a tenant's limit refused or demoted.",
            ("tenant", "unit", "action"),
        )
        self._ended_labels: dict[tuple[str, Outcome, int], tuple[Labels, Labels, Labels]] = {}
        self.pool_state: PoolState | None = None  # the shared state last shown
        self.waiting_requests: dict[Waiting, int] = {}  # of this replica
        # Start the series at 0, so that a query finds a rate of 0 and not a missing series.
        self._bands = frozenset(band.name for band in bands)
        for name in sorted(self._bands):
            self._preemptions.add((name,), 0)
            self._evictions.add((name,), 0)
        for script, kind in itertools.product(_SCRIPTS, _ERROR_KINDS):
            self._errors.add((script, kind), 0)
        for direction in ("up", "down"):
            self._limit_moves.add((direction,), 0)
        for transition in _TRANSITIONS:
            self._transitions.add(transition, 0)

    def answered(self, mode: str, model: str, code: str, seconds: float, target_model: str = "") -> None:
        """Count a decision sent to Envoy; `code` is `ok` or the RequestError's code."""
        labels = self._variant(model, target_model)
        self.requests.add((*labels, code, mode))
        if code != "ok":
            self.refusals.add((*labels, code))
        self._decision.observe(seconds, (mode,))

    def split(self, mode: str, model: str, target_model: str) -> None:
        """Count a request that was sent to Envoy with a prefill endpoint."""
        self._splits.add((*self._variant(model, target_model), mode))

    def completed(self, completion: Completion, model: str) -> None:
        """Count a request that has ended. Fields of `completion` that are None are not counted."""
        ended = model, completion.outcome, completion.status
        labels = self._ended_labels.get(ended) or self._labels_of_end(*ended)
        label, of_outcome, of_status = labels
        self._completions.add(of_outcome)
        self._statuses.add(of_status)
        if completion.prompt_tokens:
            self._tokens_in.add(label, completion.prompt_tokens)
        if completion.completion_tokens:
            self._tokens_out.add(label, completion.completion_tokens)
        if completion.duration_s is not None:
            self.durations.observe(completion.duration_s, label)
        if completion.first_byte_s is not None:
            self.first_bytes.observe(completion.first_byte_s, label)
        if completion.waited_s is not None:
            success = completion.outcome is Outcome.COMPLETED
            self.waited(model, completion.waited_s, success, completion.target_model)

    def _labels_of_end(self, model: str, outcome: Outcome, status: int) -> tuple[Labels, Labels, Labels]:
        """The labels of a series by model, outcome and status; cached, since they have few combinations."""
        name = self._model(model)
        text = str(status) if status == 0 or 100 <= status < 600 else OTHER
        if status == 0 and outcome is Outcome.CLIENT_GONE:
            text = _CLIENT_GONE
        if len(self._ended_labels) >= _MAX_SERIES:
            self._ended_labels.clear()
        labels = (name,), (name, outcome.value), (name, text)
        self._ended_labels[model, outcome, status] = labels
        return labels

    def waited(self, model: str, seconds: float, success: bool, target_model: str = "") -> None:
        """Record the queue time of a request that has ended, in `success` or not (answered in full)."""
        labels = (*self._variant(model, target_model), "true" if success else "false")
        self.waits.observe(seconds, labels)

    def bypassed(self, model: str, target_model: str = "") -> None:
        self._bypasses.add(self._variant(model, target_model))

    def expired(self, model: str, target_model: str = "") -> None:
        self._expired.add(self._variant(model, target_model))

    def client_gone(self, mode: str, model: str, seconds: float, target_model: str = "") -> None:
        """Count a request whose client disconnected before the decision, as status 499."""
        self.answered(mode, model, ClientGone.code, seconds, target_model)
        self._cancelled.add(self._variant(model, target_model))
        self._statuses.add((self._model(model), _CLIENT_GONE))

    def waiting(self, request: InferenceRequest, change: int) -> None:
        """Add `change` to the number of this replica's waiting requests with the labels of `request`."""
        self._waiting.add(self._variant(request.model, request.target_model), change)
        alike = Waiting(request.flow, request.band, request.model, request.target_model)
        count = self.waiting_requests.pop(alike, 0) + change
        if count:
            self.waiting_requests[alike] = count

    def follow_bodies(self, bodies: BodyBudget) -> None:
        """Show the body bytes that this replica holds, read whenever the page is rendered."""
        self._bodies.follow_all(lambda: {(): float(bodies.held_bytes)})

    def preempted(self, band: Band) -> None:
        self._preemptions.add((band.name,))

    def evicted(self, band: Band) -> None:
        self._evictions.add((band.name,))

    def push_error(self, model: str, error_type: str, target_model: str = "") -> None:
        """Count a request that the queue refused; `error_type` is the Dropped error's code."""
        self._push_errors.add((*self._variant(model, target_model), error_type))

    def dequeued(self, attempts: int, successes: int) -> None:
        self._attempts.add(amount=attempts)
        self._successes.add(amount=successes)

    def redis_unfit(self, faults: Mapping[str, bool]) -> None:
        """Show for each fault that state/server_check.py looks for whether the Redis server has it."""
        self._unfit.replace({(fault,): float(has_it) for fault, has_it in faults.items()})

    def redis_call(self, script: str, seconds: float, items: int) -> None:
        """Record an answered call of the script `script` for `items` items."""
        label = (script,)
        self._calls.observe(seconds, label)
        self._items.observe(items, label)

    def redis_error(self, script: str, kind: str) -> None:
        """Count a failed call to Redis; `kind` is `no-answer` or a meaning of state/error_replies.py."""
        self._errors.add((script, kind))

    def scraped(self, address: str, seconds: float, reading: EndpointMetrics) -> None:
        self._scrapes.add((self._endpoint(address), "partial" if reading.remark else "ok"))
        self._scrape_s.observe(seconds, ("ok",))

    def endpoint_fault(self, address: str, why: str) -> None:
        self._faults.add((self._endpoint(address), _class_of(why)))

    def extension_fault(self, extension: str, reason: str) -> None:
        self._extension_faults.add((extension, reason))

    def endpoint_ejected(self, address: str, why: str) -> None:
        self._ejections.add((self._endpoint(address), _class_of(why)))

    def probed(self, address: str, status: int, ready: bool) -> None:
        self._probes.add((self._endpoint(address),))

    def scrape_failed(self, address: str, kind: str, seconds: float) -> None:
        """Count a failed scrape; `kind` is timeout, silent, connection, status or page."""
        self._scrapes.add((self._endpoint(address), kind))
        self._scrape_s.observe(seconds, ("failed",))

    def scrape_published(self, readings: int, seconds: float) -> None:
        self._readings.add(("published",), readings)
        self._calls.observe(seconds, ("scrape",))

    def scrape_unpublished(self, readings: int) -> None:
        self._readings.add(("lost",), readings)

    def scrape_ages(self, owned: int, ages_s: Callable[[], Mapping[str, float]]) -> None:
        self._owned.set(owned)
        self._ages.follow_all(lambda: _by_endpoint(ages_s()))

    def pool(self, state: PoolState, watermark: float, queue_fill: float) -> None:
        """Show the shared state; `queue_fill` is the occupied part (0 to 1) of the queue."""
        self.pool_state = state
        others = {
            "watermark": watermark,
            "queue_fill": queue_fill,
            "replicas": len(state.replicas),
        }
        for key, gauge in self._pool_gauges.items():
            gauge.set(float(others[key] if key in others else getattr(state, key)))
        for key, counter in self._pool_totals.items():
            counter.follow(float(getattr(state, key)))
        self._band_queues.replace({(band,): float(n) for band, n in state.queue_length.items()})
        self._band_bytes.replace({(band,): float(n) for band, n in state.queue_bytes.items()})
        in_use = self._bands.union(state.queue_length)
        for by_band in (self._preemptions, self._evictions):
            by_band.keep(lambda labels: labels[0] in in_use)
        self._in_flight.follow_all(lambda: _by_endpoint(state.in_flight))
        self._limits.follow_all(lambda: _by_endpoint(state.limits))
        self._prefills.follow_all(lambda: _by_endpoint(state.prefill_in_flight))
        self._prefill_limits.follow_all(lambda: _by_endpoint(state.prefill_limits))

    def limits_between(self, least: int | None, most: int | None) -> None:
        """Show the limits' bounds. A bound that is None has no series."""
        for gauge, bound in ((self._least_limit, least), (self._most_limit, most)):
            gauge.replace({} if bound is None else {(): float(bound)})

    def limit_moved(self, by: int) -> None:
        """Count a limit that this replica, the leader, has moved by `by` requests or tokens."""
        self._limit_moves.add(("up" if by > 0 else "down",))

    def tenants(self, rows: Mapping[str, TenantRow]) -> None:
        """Show the balances of tenants' nodes by path."""
        self._tenants = rows

    def _remaining_by_limit(self) -> dict[Labels, float]:
        left = (
            ((label_value(path), limit.unit, _PERS.get(limit.per, limit.per)), limit.left)
            for path, row in self._tenants.items()
            for limit in row.limits
        )
        return dict(itertools.islice(left, _MAX_SERIES))

    def _served_by_tenant(self) -> dict[Labels, float]:
        return {(label_value(path),): row.served or 0.0 for path, row in self._tenants.items()}

    def over_limit(self, limit: str, tenants: Tree | None) -> None:
        """Count a request that a limit refused; `limit` as in state/store.py. Only nodes of `tenants` with
        settings for their own path are named."""
        unit, _, path = limit.split(" ", 2)
        node = None if tenants is None else tenants.node(path)
        named = label_value(path) if node is not None and node.path == path else OTHER
        self._over_limit.add((named, unit, "reject"))

    def demoted(self, flow: str, tenants: Tree | None) -> None:
        """Count a demoted request, for the first node of its path that demotes."""
        nodes = [] if tenants is None else [(path, tenants.node(path)) for path in tenants.paths(flow)]
        path, node = next(
            ((path, node) for path, node in nodes if node is not None and node.over_limit == "demote"),
            ("", None),
        )
        named = label_value(path) if node is not None and node.path == path else OTHER
        self._over_limit.add((named, "", "demote"))

    def redis_silence(self, seconds: float, paused_s: float) -> None:
        """Show the `seconds` since Redis last answered, and the total time that this replica was paused."""
        self._redis_answer_age.set(seconds)
        self._paused_s.follow(paused_s)

    def failover(self, state: str, cause: str = "") -> None:
        """Show the failover state (admission/failover.py); if there is a `cause`, count a transition."""
        self._failover_state.replace({(side,): float(side == state) for side in _FAILOVER_STATES})
        self._degraded.set(float(state != "shared"))
        if cause:
            self._transitions.add((state, cause))

    def follow_scores(self, scores: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        """Call `scores`, whenever the page is rendered, for `ip:port` -> scorer -> score in [0, 1]."""

        def by_endpoint_and_scorer() -> dict[Labels, float]:
            name = LabelCap()
            return {
                (name(address), scorer): score
                for address, parts in scores().items()
                for scorer, score in parts.items()
            }

        self._scores.follow_all(by_endpoint_and_scorer)


def _class_of(why: str) -> str:
    """The fault's reason as a label with few values: an HTTP status becomes a class, such as `5xx`."""
    return f"{why[0]}xx" if why.isdecimal() else why


def _by_endpoint(values: Mapping[str, float]) -> dict[Labels, float]:
    """Sum `values` by endpoint label. A new LabelCap each time counts only the endpoints of now."""
    name = LabelCap()
    found: dict[Labels, float] = {}
    for address, value in values.items():
        labels = (name(address),)
        found[labels] = found.get(labels, 0.0) + value
    return found


def label_value(text: str) -> str:
    """The string `text` as a label value: cut to 128 characters, those that UTF-8 cannot encode replaced. One
    bad name must not make the whole metrics page fail."""
    return text[:_MAX_VALUE_CHARS].encode("utf-8", "replace").decode("utf-8")


class LabelCap:
    """Keeps the first 1000 values of a label; any further value becomes `other`.

    Clients choose some labels (model names): without a cap they could make the process's memory and metrics
    page arbitrarily large. `known` values keep their names whatever clients send first.
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._names: dict[str, str] = {}
        for value in known:
            self(value)

    def __call__(self, value: str) -> str:
        if len(value) > _MAX_VALUE_CHARS:
            value = value[:_MAX_VALUE_CHARS]
        name = self._names.get(value)
        if name is not None:
            return name
        if len(self._names) >= _MAX_VALUES:
            return OTHER
        name = self._names[value] = label_value(value)
        return name


class PairCap:
    """Caps the values of model and variant, and the pairs of both.

    With separate caps only, a client that chooses model and variant could make a million pairs. After 1000
    pairs, new variants of a model become `other`.
    """

    def __init__(self, known: Iterable[tuple[str, str]] = ()) -> None:
        known = tuple(known)
        self._first = LabelCap(first for first, _ in known)
        self._second = LabelCap(("", *(second for _, second in known)))
        self._pairs: dict[tuple[str, str], tuple[str, str]] = {}
        for first, second in known:
            self._pairs[first, second] = self._first(first), self._second(second)

    def __call__(self, first: str, second: str) -> tuple[str, str]:
        pair = self._pairs.get((first, second))
        if pair is not None:
            return pair
        name = self._first(first)
        if name == OTHER:
            return OTHER, ""
        if len(self._pairs) >= _MAX_VALUES:
            return name, OTHER if second else ""
        pair = self._pairs[first, second] = name, self._second(second)
        return pair


class Page:
    """The metric families of one pool in exposition order; each series has `labels`."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.labels = labels
        self.families: list[Family] = []


class Family:
    """A metric family, which `page` shows after the families made earlier.

    Callers pass label values in the order of `labels`; the page's text has the labels sorted by name. Each
    class has `series`, which yields the text in pieces that take microseconds each to render.
    """

    def __init__(self, page: Page, name: str, kind: str, help_text: str, labels: Labels) -> None:
        self._page, self._name, self._help, self._labels = page, name, help_text, labels
        self.head = f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n".encode()
        page.families.append(self)

    def series(self) -> Iterator[bytes]:
        raise NotImplementedError

    def _line(self, name: str, values: Labels, value: float) -> str:
        pairs = ",".join(pair for _, pair in self._pairs(values))
        return f"{name}{{{pairs}}} {_number(value)}\n" if pairs else f"{name} {_number(value)}\n"

    def _pairs(self, values: Labels) -> list[tuple[str, str]]:
        """The name of each label, and the label's text `name="value"`."""
        named = sorted((*zip(self._labels, values, strict=True), *self._page.labels.items()))
        return [(label, f'{label}="{_escaped(text)}"') for label, text in named]


def _number(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class _Values(Family):
    """A family whose series have one number each. Keeps a series' text until its value changes."""

    _read: Callable[[], dict[Labels, float]] | None = None

    def __init__(self, page: Page, name: str, kind: str, help_text: str, labels: Labels) -> None:
        super().__init__(page, name, kind, help_text, labels)
        self._values: dict[Labels, float] = {} if labels else {(): 0.0}
        self._texts: dict[Labels, tuple[float, bytes]] = {}

    def add(self, labels: Labels = (), amount: float = 1) -> None:
        try:
            self._values[labels] += amount
        except KeyError:
            if len(self._values) >= _MAX_SERIES:
                labels = (OTHER,) * len(labels)
            self._values[labels] = self._values.get(labels, 0.0) + amount

    def follow_all(self, read: Callable[[], dict[Labels, float]]) -> None:
        """Read all series from `read` whenever the page is rendered; no other update is needed."""
        self._read = read

    @property
    def values(self) -> Mapping[Labels, float]:
        return self._values

    def series(self) -> Iterator[bytes]:
        if self._read is not None:
            self._values = self._read()
        kept = self._texts
        self._texts = texts = {}
        for labels, value in list(self._values.items()):
            text = kept.get(labels)
            if text is None or text[0] != value:
                text = value, self._line(self._name, labels, value).encode()
            texts[labels] = text
            yield text[1]


class Counters(_Values):
    """A counter family. The name `name` lacks the suffix `_total`; label values are ordered as `labels`."""

    def __init__(self, page: Page, name: str, help_text: str, labels: Labels = ()) -> None:
        super().__init__(page, f"{name}_total", "counter", help_text, labels)

    def count(self, n: int = 1) -> None:
        """Add `n` to the only series of a family without labels."""
        self.add(amount=n)

    def count_one(self, value: str) -> None:
        """Add 1 to the series with `value` of a family with one label."""
        self.add((value,))

    def follow(self, total: float) -> None:
        """Show a total that another module counts; the total may restart at 0."""
        self._values = {(): total}

    def keep(self, wanted: Callable[[Labels], bool]) -> None:
        """Remove the series for whose labels `wanted` is false."""
        self._values = {labels: value for labels, value in self._values.items() if wanted(labels)}


class Gauges(_Values):
    """A gauge family; `replace` sets all series at once, so that no series of a removed object remains."""

    def __init__(self, page: Page, name: str, help_text: str, labels: Labels = ()) -> None:
        super().__init__(page, name, "gauge", help_text, labels)

    def set(self, value: float) -> None:
        self._values = {(): value}

    def replace(self, values: dict[Labels, float]) -> None:
        self._values = values


class _Cell:
    __slots__ = ("counts", "text", "total")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.total = 0.0
        self.text: bytes | None = None  # text of the series; dropped at the next observation


class Histograms(Family):
    """A histogram family with the ascending upper bounds `bounds`, and the bucket `+Inf`."""

    def __init__(
        self, page: Page, name: str, help_text: str, bounds: tuple[float, ...], labels: Labels = ()
    ) -> None:
        super().__init__(page, name, "histogram", help_text, labels)
        self._bounds = bounds
        self._size = len(bounds) + 1
        self._edges = (*map(_number, bounds), "+Inf")
        self._cells: dict[Labels, _Cell] = {}
        self._keeps_texts = True

    def observe(self, value: float, labels: Labels = ()) -> None:
        cell = self._cells.get(labels)
        if cell is None:
            if len(self._cells) >= _MAX_HISTOGRAMS:
                labels = (OTHER,) * len(labels)
            cell = self._cells.setdefault(labels, _Cell(self._size))
        cell.counts[bisect_left(self._bounds, value)] += 1
        cell.total += value
        cell.text = None

    def also(self, name: str, labels: Labels) -> None:
        """Show this histogram a second time, under another name and with other label names."""
        copy = Histograms(self._page, name, self._help, self._bounds, labels)
        copy._cells = self._cells
        copy._keeps_texts = False

    def series(self) -> Iterator[bytes]:
        for labels, cell in list(self._cells.items()):
            if not self._keeps_texts:
                yield self._text(labels, cell)
                continue
            if cell.text is None:
                cell.text = self._text(labels, cell)
            yield cell.text

    def _text(self, labels: Labels, cell: _Cell) -> bytes:
        counts = list(itertools.accumulate(cell.counts))
        pairs = self._pairs(labels)
        before = "".join(f"{pair}," for label, pair in pairs if label < "le")
        after = "".join(f",{pair}" for label, pair in pairs if label > "le")
        lines = [
            f'{self._name}_bucket{{{before}le="{edge}"{after}}} {count}.0\n'
            for edge, count in zip(self._edges, counts, strict=True)
        ]
        lines.append(self._line(f"{self._name}_count", labels, counts[-1]))
        lines.append(self._line(f"{self._name}_sum", labels, cell.total))
        return "".join(lines).encode()
