"""What a replica counts and measures, and the Prometheus text that shows it.

Names are those of spec 003 with the prefix `epp_`, and those that operators of such systems expect besides.
Counters, histograms and `epp_queue_length` are this replica's own and add up over the fleet; gauges of the
shared state (bounds, stock, queue by band) are the same on every replica and are read with `max`. A label has
at most 1000 values, then `other`. Times are seconds. `target_model` is empty if the variant is not known.

Every method returns at once. One event loop.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest

from picker_fleet.errors import ClientGone
from picker_fleet.request import Band, Completion, Outcome
from picker_fleet.state.error_replies import NO_ANSWER, Meaning
from picker_fleet.telemetry.series import OTHER, Counters, Gauges, Histograms, LabelCap, Page, PairCap

PAGE_TYPE = CONTENT_TYPE_LATEST  # Content-Type of the text

_DECISION = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_QUEUE = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0)
_DURATION = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_FIRST_BYTE = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_REDIS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5)
_ITEMS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)

_MODEL = ("model", "target_model")
_SCRIPTS = (
    "tombstone", "renew", "report_client_gone", "settle", "admit", "place", "cancel", "heartbeat", "sweep",
)  # fmt: skip
_ERROR_KINDS = (NO_ANSWER, *(meaning.value for meaning in Meaning))
_CLIENT_GONE = str(ClientGone.status)
_FAILOVER_STATES = ("shared", "local", "returning")
_TRANSITIONS = (
    ("local", "refused"),
    ("local", "silence"),
    ("local", "failed"),
    ("returning", "answers"),
    ("shared", "all-told"),
)
# Of the shared state, by key: the name of the metric and its help.
_POOL_GAUGES = {
    "stock": ("stock_level", "What is in flight, fleet-wide, in the stock's unit."),
    "lower": ("lower_bound", "The stock below which requests are dispatched."),
    "watermark": ("watermark", "The target of the stock."),
    "upper": ("upper_bound", "The stock is never above it."),
    "queue_fill": ("queue_fill", "The part of the queue's total capacity in use."),
    "active_flows": ("active_flows", "Flows with a queued request."),
    "overdue": ("overdue_requests", "Queued requests past their starvation threshold."),
    "leases": ("leases", "Requests in flight that have a lease."),
    "ready_backends": ("ready_backends", "Endpoints that take new requests."),
    "replicas": ("live_replicas", "Replicas that send heartbeats."),
    "paused": ("paused", "1 while dispatch is paused, fleet-wide."),
    "degraded": ("degraded", "1 while this replica works without the shared state."),
}
_POOL_TOTALS = {
    "dispatched_total": ("dispatches", "Requests dispatched from the queue, fleet-wide."),
    "guard_dispatches_total": ("guard_dispatches", "Requests dispatched by the starvation guard."),
    "ended_total": ("ended", "Requests in flight that ended, fleet-wide."),
}
_STATUS_TEXTS = {0: "0", **{status: str(status) for status in range(100, 600)}}


class Metrics:
    """A replica's metrics. `models` keep their label value whatever names clients send."""

    def __init__(self, models: Iterable[str] = ()) -> None:
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self._page = page = Page()
        known = tuple(models)
        self._model = LabelCap(known=known)
        self._variant = PairCap(known=((model, target) for model in known for target in ("", model)))
        self._endpoint = LabelCap()

        def counters(name: str, help_text: str, labels: tuple[str, ...] = ()) -> Counters:
            return Counters(page, f"epp_{name}", help_text, labels)

        def gauges(name: str, help_text: str, labels: tuple[str, ...] = ()) -> Gauges:
            return Gauges(page, f"epp_{name}", help_text, labels)

        def histograms(
            name: str, help_text: str, bounds: tuple[float, ...], labels: tuple[str, ...]
        ) -> Histograms:
            return Histograms(page, f"epp_{name}", help_text, bounds, labels)

        self._requests = counters("requests", "Decisions sent to Envoy, by code.", (*_MODEL, "code", "mode"))
        self._refused = counters("request_errors", "Decisions that were refusals.", (*_MODEL, "code"))
        self._decision = histograms(
            "decision_latency_seconds",
            "From a request's first message to its decision.",
            _DECISION,
            ("mode",),
        )
        self._waits = histograms("queue_latency_seconds", "Time in the queue.", _QUEUE, (*_MODEL, "success"))
        self._bypasses = counters("bypass", "Requests that bypassed the queue.", _MODEL)
        self._expired = counters("requests_expired", "Requests dropped past their TTL.", _MODEL)
        self._cancelled = counters(
            "requests_cancelled", "Requests whose client disconnected before the decision.", _MODEL
        )
        self._waiting = gauges("queue_length", "Requests of this replica that wait in the queue.", _MODEL)
        self._bodies = gauges("buffered_bytes", "Bytes of bodies that this replica holds.")
        self._preemptions = counters("preemptions", "Requests preempted for a higher band.", ("band",))
        self._evictions = counters("evictions", "Requests an operator took out of the queue.", ("band",))
        self._push_errors = counters(
            "queue_push_errors", "Requests the queue refused.", (*_MODEL, "error_type")
        )
        self._attempts = counters("popper_dequeue_attempts", "Dispatch attempts.")
        self._successes = counters("popper_dequeue_successes", "Dispatch attempts that served a request.")
        self._adopted = counters("adoptions", "Requests adopted from another replica.")
        self._reclaimed = counters("lease_reclaims", "Requests released because their lease ended.")

        self._completions = counters("completions", "Requests that ended, by outcome.", ("model", "outcome"))
        self._statuses = counters("responses", "Answers by HTTP status, 0 for none.", ("model", "status"))
        self._tokens_in = counters("input_tokens", "Prompt tokens, as model servers count them.", ("model",))
        self._tokens_out = counters(
            "output_tokens", "Completion tokens, as model servers count them.", ("model",)
        )
        self._duration = histograms("request_duration_seconds", "Until the last byte.", _DURATION, ("model",))
        self._first_byte = histograms(
            "time_to_first_token_seconds", "Until the answer's first byte.", _FIRST_BYTE, ("model",)
        )

        self._entries = counters("access_log_entries", "Access-log entries, by what they report.", ("kind",))
        self._rejected = counters(
            "access_log_rejected",
            "Entries without a valid accounting token, by what is wrong.",
            ("reason",),
        )
        self._calls = histograms("redis_call_seconds", "One batched script call.", _REDIS, ("script",))
        self._items = histograms("redis_call_items", "Items in one script call.", _ITEMS, ("script",))
        self._errors = counters(
            "redis_errors", "Failed script calls, by what Redis answered.", ("script", "kind")
        )

        self._failover_state = gauges("failover_state", "1 for the state this replica is in.", ("state",))
        self._transitions = counters(
            "failover_transitions", "Changes of the failover state, by cause.", ("to", "cause")
        )
        self._paused_s = counters("stood_still_seconds", "Seconds in which this replica did not run.")
        self._redis_answer_age = gauges("redis_answer_age_seconds", "Time since any answer of Redis.")
        self._strays = counters("strays", "Entries of the shared state without a record, dropped.")
        self._ghosts = counters("ghosts", "Requests released early: their endpoint no longer had them.")
        self._scrapes = counters(
            "scrapes", "Metrics pages of model servers read, by result.", ("endpoint", "result")
        )
        self._probes = counters(
            "probes", "Probes that model servers answered, between two scrapes.", ("endpoint",)
        )
        self._scrape_s = histograms("scrape_seconds", "Duration of a scrape.", _REDIS, ("result",))
        self._readings = counters("scrape_readings", "Readings published to the fleet, or lost.", ("result",))
        self._owned = gauges("scrape_endpoints", "Endpoints that this replica scrapes.")
        self._ages = gauges("scrape_age_seconds", "Age of an endpoint's last reading.", ("endpoint",))
        self._scores = gauges("endpoint_score", "Score of an endpoint by scorer.", ("endpoint", "scorer"))

        self._pool_gauges = {key: gauges(name, text) for key, (name, text) in _POOL_GAUGES.items()}
        self._pool_totals = {key: counters(name, text) for key, (name, text) in _POOL_TOTALS.items()}
        self._band_queues = gauges("band_queue_length", "Queued requests, fleet-wide.", ("band",))
        self._in_flight = gauges("endpoint_in_flight", "Requests in flight on an endpoint.", ("endpoint",))
        # A rate of 0 instead of a missing series.
        for band in Band:
            self._preemptions.add((band.label,), 0)
            self._evictions.add((band.label,), 0)
        for script, kind in itertools.product(_SCRIPTS, _ERROR_KINDS):
            self._errors.add((script, kind), 0)
        for transition in _TRANSITIONS:
            self._transitions.add(transition, 0)

    def answered(self, mode: str, model: str, code: str, seconds: float, target_model: str = "") -> None:
        """A decision was sent: `code` is `ok` or the RequestError's code."""
        labels = self._variant(model, target_model)
        self._requests.add((*labels, code, mode))
        if code != "ok":
            self._refused.add((*labels, code))
        self._decision.observe(seconds, (mode,))

    def completed(self, completion: Completion, model: str) -> None:
        """A request ended. Fields of `completion` that are None are not counted."""
        name = self._model(model)
        self._completions.add((name, completion.outcome.value))
        if completion.status == 0 and completion.outcome is Outcome.CLIENT_GONE:
            self._statuses.add((name, _CLIENT_GONE))
        else:
            self._statuses.add((name, _STATUS_TEXTS.get(completion.status, OTHER)))
        label = (name,)
        if completion.prompt_tokens:
            self._tokens_in.add(label, completion.prompt_tokens)
        if completion.completion_tokens:
            self._tokens_out.add(label, completion.completion_tokens)
        if completion.duration_s is not None:
            self._duration.observe(completion.duration_s, label)
        if completion.first_byte_s is not None:
            self._first_byte.observe(completion.first_byte_s, label)
        if completion.waited_s is not None:
            success = completion.outcome is Outcome.COMPLETED
            self.waited(model, completion.waited_s, success, completion.target_model)

    def access_log(self, kind: str, n: int) -> None:
        """`n` access-log entries arrived: `kind` is `ended`, `alive` or `ignored`."""
        self._entries.add((kind,), n)

    def access_log_rejected(self, reason: str) -> None:
        """An entry was ignored for its accounting token; `reason` is a code of state/accounting_token.py."""
        self._rejected.add((reason,))

    def waited(self, model: str, seconds: float, success: bool, target_model: str = "") -> None:
        """A request waited `seconds` in the queue, and its outcome is known; `success`: answered in full."""
        labels = (*self._variant(model, target_model), "true" if success else "false")
        self._waits.observe(seconds, labels)

    def bypassed(self, model: str, target_model: str = "") -> None:
        self._bypasses.add(self._variant(model, target_model))

    def expired(self, model: str, target_model: str = "") -> None:
        self._expired.add(self._variant(model, target_model))

    def client_gone(self, mode: str, model: str, seconds: float, target_model: str = "") -> None:
        """The client of a request disconnected before the decision: status 499."""
        self.answered(mode, model, ClientGone.code, seconds, target_model)
        self._cancelled.add(self._variant(model, target_model))
        self._statuses.add((self._model(model), _CLIENT_GONE))

    def waiting(self, model: str, target_model: str, change: int) -> None:
        """`change` more (or fewer) requests of this replica wait in the queue."""
        self._waiting.add(self._variant(model, target_model), change)

    def follow_bodies(self, held_bytes: Callable[[], float]) -> None:
        """Read the bytes of bodies that this replica holds from `held_bytes`."""
        self._bodies.follow(held_bytes)

    def preempted(self, band: Band) -> None:
        """A queued request of this replica was preempted for a higher band."""
        self._preemptions.add((band.label,))

    def evicted(self, band: Band) -> None:
        """An operator took a queued request of this replica out."""
        self._evictions.add((band.label,))

    def push_error(self, model: str, error_type: str, target_model: str = "") -> None:
        """The queue refused a request; `error_type` is the Dropped error's code."""
        self._push_errors.add((*self._variant(model, target_model), error_type))

    def dequeued(self, attempts: int, successes: int) -> None:
        self._attempts.add(amount=attempts)
        self._successes.add(amount=successes)

    def adopted(self, n: int = 1) -> None:
        self._adopted.add(amount=n)

    def reclaimed(self, n: int = 1) -> None:
        self._reclaimed.add(amount=n)

    def ghosts(self, n: int) -> None:
        self._ghosts.add(amount=n)

    def strays(self, n: int) -> None:
        self._strays.add(amount=n)

    def redis_call(self, script: str, seconds: float, items: int) -> None:
        """One answered call of `script` that carried `items` items."""
        label = (script,)
        self._calls.observe(seconds, label)
        self._items.observe(items, label)

    def redis_error(self, script: str, kind: str) -> None:
        """`kind`: no-answer, or the meaning of the error reply (state/error_replies.py)."""
        self._errors.add((script, kind))

    def scraped(self, address: str, seconds: float) -> None:
        self._scrapes.add((self._endpoint(address), "ok"))
        self._scrape_s.observe(seconds, ("ok",))

    def probed(self, address: str) -> None:
        self._probes.add((self._endpoint(address),))

    def scrape_failed(self, address: str, kind: str, seconds: float) -> None:
        """`kind`: timeout, silent, connection, status or page."""
        self._scrapes.add((self._endpoint(address), kind))
        self._scrape_s.observe(seconds, ("failed",))

    def scrape_published(self, readings: int, seconds: float) -> None:
        self._readings.add(("published",), readings)
        self._calls.observe(seconds, ("scrape",))

    def scrape_unpublished(self, readings: int) -> None:
        self._readings.add(("lost",), readings)

    def scrape_ages(self, owned: int, ages_s: Mapping[str, float]) -> None:
        self._owned.set(owned)
        name = LabelCap()  # a new cap: only the present endpoints count, not all that there ever were
        self._ages.replace({(name(address),): age_s for address, age_s in ages_s.items()})

    def pool(self, state: Mapping[str, Any]) -> None:
        """Show the shared state, as `Membership.state` returns it; a missing key leaves its series as it
        was."""
        values = {**state, **state.get("bounds", {})}
        if "replicas" in state:
            values["replicas"] = len(state["replicas"])
        for key, gauge in self._pool_gauges.items():
            if (value := values.get(key)) is not None:
                gauge.set(float(value))
        for key, counter in self._pool_totals.items():
            if key in state:
                counter.follow(float(state[key]))
        if "queue_length" in state:
            self._band_queues.replace({(str(band),): float(n) for band, n in state["queue_length"].items()})
        if "in_flight" in state:
            loads: dict[tuple[str, ...], float] = {}
            for address, count in state["in_flight"].items():
                label = (self._endpoint(address),)
                loads[label] = loads.get(label, 0.0) + count
            self._in_flight.replace(loads)

    def redis_silence(self, seconds: float, paused_s: float) -> None:
        """Redis last answered `seconds` ago; this replica itself was paused for `paused_s` in all."""
        self._redis_answer_age.set(seconds)
        self._paused_s.follow(paused_s)

    def failover(self, state: str, cause: str = "") -> None:
        """The failover state of this replica (failover/gate.py), and the cause of the change to it."""
        self._failover_state.replace({(side,): float(side == state) for side in _FAILOVER_STATES})
        if cause:
            self._transitions.add((state, cause))

    def degraded(self, on: bool) -> None:
        """Whether this replica works without the shared state."""
        self._pool_gauges["degraded"].set(float(on))

    def scores(self, scores: Mapping[str, Mapping[str, float]]) -> None:
        """The scores of each endpoint: `ip:port` -> scorer -> score in [0, 1]."""
        name = LabelCap()
        self._scores.replace(
            {
                (name(address), scorer): score
                for address, parts in scores.items()
                for scorer, score in parts.items()
            }
        )

    def pieces(self) -> Iterator[bytes]:
        """The Prometheus text, of type `PAGE_TYPE`, in pieces that take microseconds each."""
        yield generate_latest(self._process)
        yield from self._page.pieces()
