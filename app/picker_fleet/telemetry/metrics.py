"""The metrics of a pool in one replica; admin/documents.py shows them as Prometheus text.

catalogue.py lists them. Names follow spec 003, with the prefix `epp_`; further metrics have names that
operators expect. Counters, histograms and `epp_queue_length` concern this replica only: sum them over the
fleet. Gauges of the shared state (bounds, stock, queue by band) are equal on all replicas: query such gauges
with `max`. A label has at most 1000 values; further values become `other`. Times are in seconds. The label
`target_model` is empty if the model variant is unknown.

The instruments of prometheus-client take a lock for each update and visit every bucket: 1 µs a count, up to 3
µs an observation. Rendering a thousand models takes more than half a second. The families here belong to one
event loop, find the bucket by bisection, and keep the text of each series until its value changes.
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from prometheus_client.utils import floatToGoString

from picker_fleet.domain.bands import NAMED, Band
from picker_fleet.domain.budgets import BodyBudget
from picker_fleet.domain.errors import ClientGone
from picker_fleet.domain.request import Completion, InferenceRequest, Outcome
from picker_fleet.domain.tenants import PERIODS, Tree
from picker_fleet.endpoints.readings import EndpointMetrics
from picker_fleet.state.error_replies import NO_ANSWER, Meaning
from picker_fleet.state.pool_state import PoolState
from picker_fleet.state.reads import TenantRow
from picker_fleet.telemetry.catalogue import COUNTERS, GAUGES, HISTOGRAMS, POOL_GAUGES, POOL_TOTALS, Labels

OTHER = "other"
MOST_TENANTS = 1000  # maximum nodes of tenants with metrics
_MAX_VALUES = 1000  # maximum distinct values of a label; maximum distinct pairs of two labels' values
_MAX_VALUE_CHARS = 128
# The most series of a family: even with capped labels, the number of combinations can be large.
_MAX_SERIES = 10_000
_MAX_HISTOGRAMS = 2_500

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

        self.counters = {name: Counters(page, name, *about) for name, about in COUNTERS.items()}
        self.gauges = {name: Gauges(page, name, *about) for name, about in GAUGES.items()}
        self.histograms = {name: Histograms(page, name, *about) for name, about in HISTOGRAMS.items()}
        self.adopted = self.counters["epp_adoptions"].count
        self.reclaimed = self.counters["epp_lease_reclaims"].count
        self.preempted = self.counters["epp_preemptions"].count_one
        self.evicted = self.counters["epp_evictions"].count_one
        self.extension_fault = self.counters["epp_extension_faults"].count_one
        self.redis_error = self.counters["epp_redis_errors"].count_one
        self.access_log = self.counters["epp_access_log_entries"].count_one
        self.access_log_rejected = self.counters["epp_access_log_rejected"].count_one
        self.background_failure = self.counters["epp_background_failures"].count_one
        self.strays = self.counters["epp_strays"].count
        self.keys_lost = self.counters["epp_redis_keys_lost"].count
        self.ghosts = self.counters["epp_ghosts"].count
        self._tenants: Mapping[str, TenantRow] = {}
        self.gauges["epp_tenant_remaining"].follow_all(self._remaining_by_limit)
        self.counters["epp_tenant_served_cost"].follow_all(self._served_by_tenant)
        self._ended_labels: dict[tuple[str, Outcome, int], tuple[Labels, Labels, Labels]] = {}
        self.pool_state: PoolState | None = None  # the shared state last shown
        self.waiting_requests: dict[Waiting, int] = {}  # of this replica
        # Start the series at 0, so that a query finds a rate of 0 and not a missing series.
        self._bands = frozenset(band.name for band in bands)
        for name in sorted(self._bands):
            self.counters["epp_preemptions"].add((name,), 0)
            self.counters["epp_evictions"].add((name,), 0)
        for script, kind in itertools.product(_SCRIPTS, _ERROR_KINDS):
            self.counters["epp_redis_errors"].add((script, kind), 0)
        for direction in ("up", "down"):
            self.counters["epp_endpoint_limit_moves"].add((direction,), 0)
        for transition in _TRANSITIONS:
            self.counters["epp_failover_transitions"].add(transition, 0)

    def answered(self, mode: str, model: str, code: str, seconds: float, target_model: str = "") -> None:
        """Count a decision sent to Envoy; `code` is `ok` or the RequestError's code."""
        labels = self._variant(model, target_model)
        self.counters["epp_requests"].add((*labels, code, mode))
        if code != "ok":
            self.counters["epp_request_errors"].add((*labels, code))
        self.histograms["epp_decision_latency_seconds"].observe(seconds, (mode,))

    def split(self, mode: str, model: str, target_model: str) -> None:
        """Count a request that was sent to Envoy with a prefill endpoint."""
        self.counters["epp_split_requests"].add((*self._variant(model, target_model), mode))

    def completed(self, completion: Completion, model: str) -> None:
        """Count a request that has ended. Fields of `completion` that are None are not counted."""
        ended = model, completion.outcome, completion.status
        labels = self._ended_labels.get(ended) or self._labels_of_end(*ended)
        label, of_outcome, of_status = labels
        self.counters["epp_completions"].add(of_outcome)
        self.counters["epp_responses"].add(of_status)
        if completion.prompt_tokens:
            self.counters["epp_input_tokens"].add(label, completion.prompt_tokens)
        if completion.completion_tokens:
            self.counters["epp_output_tokens"].add(label, completion.completion_tokens)
        if completion.duration_s is not None:
            self.histograms["epp_request_duration_seconds"].observe(completion.duration_s, label)
        if completion.first_byte_s is not None:
            self.histograms["epp_time_to_first_token_seconds"].observe(completion.first_byte_s, label)
        if completion.waited_s is not None:
            success = completion.outcome is Outcome.COMPLETED
            self.waited(model, completion.waited_s, success, completion.target_model)

    def _labels_of_end(self, model: str, outcome: Outcome, status: int) -> tuple[Labels, Labels, Labels]:
        """The labels of a series by model, outcome and status: few combinations, and so cached."""
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
        """Record the queue time of an ended request; `success`: it was answered in full."""
        labels = (*self._variant(model, target_model), "true" if success else "false")
        self.histograms["epp_queue_latency_seconds"].observe(seconds, labels)

    def bypassed(self, model: str, target_model: str = "") -> None:
        self.counters["epp_bypass"].add(self._variant(model, target_model))

    def expired(self, model: str, target_model: str = "") -> None:
        self.counters["epp_requests_expired"].add(self._variant(model, target_model))

    def client_gone(self, mode: str, model: str, seconds: float, target_model: str = "") -> None:
        """Count a request whose client disconnected before the decision, as status 499."""
        self.answered(mode, model, ClientGone.code, seconds, target_model)
        self.counters["epp_requests_cancelled"].add(self._variant(model, target_model))
        self.counters["epp_responses"].add((self._model(model), _CLIENT_GONE))

    def waiting(self, request: InferenceRequest, change: int) -> None:
        """Add `change` to the number of this replica's waiting requests with the labels of `request`."""
        self.gauges["epp_queue_length"].add(self._variant(request.model, request.target_model), change)
        alike = Waiting(request.flow, request.band, request.model, request.target_model)
        count = self.waiting_requests.pop(alike, 0) + change
        if count:
            self.waiting_requests[alike] = count

    def follow_bodies(self, bodies: BodyBudget) -> None:
        """Show the body bytes that this replica holds, read whenever the page is rendered."""
        self.gauges["epp_buffered_bytes"].follow_all(lambda: {(): float(bodies.held_bytes)})

    def push_error(self, model: str, error_type: str, target_model: str = "") -> None:
        """Count a request that the queue refused; `error_type` is the Dropped error's code."""
        self.counters["epp_queue_push_errors"].add((*self._variant(model, target_model), error_type))

    def dequeued(self, attempts: int, successes: int) -> None:
        self.counters["epp_popper_dequeue_attempts"].add(amount=attempts)
        self.counters["epp_popper_dequeue_successes"].add(amount=successes)

    def redis_unfit(self, faults: Mapping[str, bool]) -> None:
        """Show for each fault that state/server_check.py looks for whether the Redis server has it."""
        self.gauges["epp_redis_unfit"].replace({(fault,): float(has_it) for fault, has_it in faults.items()})

    def redis_call(self, script: str, seconds: float, items: int) -> None:
        """Record an answered call of the script `script` for `items` items."""
        label = (script,)
        self.histograms["epp_redis_call_seconds"].observe(seconds, label)
        self.histograms["epp_redis_call_items"].observe(items, label)

    def scraped(self, address: str, seconds: float, reading: EndpointMetrics) -> None:
        self.counters["epp_scrapes"].add((self._endpoint(address), "partial" if reading.remark else "ok"))
        self.histograms["epp_scrape_seconds"].observe(seconds, ("ok",))

    def endpoint_fault(self, address: str, why: str) -> None:
        self.counters["epp_endpoint_faults"].add((self._endpoint(address), _class_of(why)))

    def endpoint_ejected(self, address: str, why: str) -> None:
        self.counters["epp_endpoint_ejections"].add((self._endpoint(address), _class_of(why)))

    def probed(self, address: str, status: int, ready: bool) -> None:
        self.counters["epp_probes"].add((self._endpoint(address),))

    def scrape_failed(self, address: str, kind: str, seconds: float) -> None:
        """Count a failed scrape; `kind` is timeout, silent, connection, status or page."""
        self.counters["epp_scrapes"].add((self._endpoint(address), kind))
        self.histograms["epp_scrape_seconds"].observe(seconds, ("failed",))

    def scrape_published(self, readings: int, seconds: float) -> None:
        self.counters["epp_scrape_readings"].add(("published",), readings)
        self.histograms["epp_redis_call_seconds"].observe(seconds, ("scrape",))

    def scrape_unpublished(self, readings: int) -> None:
        self.counters["epp_scrape_readings"].add(("lost",), readings)

    def scrape_ages(self, owned: int, ages_s: Callable[[], Mapping[str, float]]) -> None:
        self.gauges["epp_scrape_endpoints"].set(owned)
        self.gauges["epp_scrape_age_seconds"].follow_all(lambda: _by_endpoint(ages_s()))

    def pool(self, state: PoolState, watermark: float, queue_fill: float) -> None:
        """Show the shared state; `queue_fill` is the occupied part (0 to 1) of the queue."""
        self.pool_state = state
        others = {
            "watermark": watermark,
            "queue_fill": queue_fill,
            "replicas": len(state.replicas),
        }
        for key, name in POOL_GAUGES.items():
            self.gauges[name].set(float(others[key] if key in others else getattr(state, key)))
        for key, name in POOL_TOTALS.items():
            self.counters[name].follow(float(getattr(state, key)))
        self.gauges["epp_band_queue_length"].replace(
            {(band,): float(n) for band, n in state.queue_length.items()}
        )
        self.gauges["epp_band_queue_bytes"].replace(
            {(band,): float(n) for band, n in state.queue_bytes.items()}
        )
        in_use = self._bands.union(state.queue_length)
        for by_band in (self.counters["epp_preemptions"], self.counters["epp_evictions"]):
            by_band.keep(lambda labels: labels[0] in in_use)
        self.gauges["epp_endpoint_in_flight"].follow_all(lambda: _by_endpoint(state.in_flight))
        self.gauges["epp_endpoint_limit"].follow_all(lambda: _by_endpoint(state.limits))
        self.gauges["epp_endpoint_prefills"].follow_all(lambda: _by_endpoint(state.prefill_in_flight))
        self.gauges["epp_endpoint_prefill_limit"].follow_all(lambda: _by_endpoint(state.prefill_limits))

    def limits_between(self, least: int | None, most: int | None) -> None:
        """Show the least and highest limit that the fleet may find. A bound that is None has no series."""
        for gauge, bound in ((self.gauges["epp_limit_min"], least), (self.gauges["epp_limit_max"], most)):
            gauge.replace({} if bound is None else {(): float(bound)})

    def limit_moved(self, by: int) -> None:
        """Count a limit that this replica, the leader, has moved by `by` requests or tokens."""
        self.counters["epp_endpoint_limit_moves"].add(("up" if by > 0 else "down",))

    def tenants(self, rows: Mapping[str, TenantRow]) -> None:
        """Show the balances of tenants' nodes by path."""
        self._tenants = rows

    def _remaining_by_limit(self) -> dict[Labels, float]:
        left = (
            ((label_value(path), limit.unit, PERIODS.get(limit.per, limit.per)), limit.left)
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
        self.counters["epp_tenant_over_limit"].add((named, unit, "reject"))

    def demoted(self, flow: str, tenants: Tree | None) -> None:
        """Count a demoted request, for the first node of its path that demotes."""
        nodes = [] if tenants is None else [(path, tenants.node(path)) for path in tenants.paths(flow)]
        path, node = next(
            ((path, node) for path, node in nodes if node is not None and node.over_limit == "demote"),
            ("", None),
        )
        named = label_value(path) if node is not None and node.path == path else OTHER
        self.counters["epp_tenant_over_limit"].add((named, "", "demote"))

    def redis_silence(self, seconds: float, paused_s: float) -> None:
        """Show the `seconds` since Redis last answered, and the total time that this replica was paused."""
        self.gauges["epp_redis_answer_age_seconds"].set(seconds)
        self.counters["epp_stood_still_seconds"].follow(paused_s)

    def failover(self, state: str, cause: str = "") -> None:
        """Show the failover state (admission/failover.py); if there is a `cause`, count a transition."""
        self.gauges["epp_failover_state"].replace(
            {(side,): float(side == state) for side in _FAILOVER_STATES}
        )
        self.gauges["epp_degraded"].set(float(state != "shared"))
        if cause:
            self.counters["epp_failover_transitions"].add((state, cause))

    def follow_scores(self, scores: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        """Call `scores`, whenever the page is rendered, for `ip:port` -> scorer -> score in [0, 1]."""

        def by_endpoint_and_scorer() -> dict[Labels, float]:
            name = LabelCap()
            return {
                (name(address), scorer): score
                for address, parts in scores().items()
                for scorer, score in parts.items()
            }

        self.gauges["epp_endpoint_score"].follow_all(by_endpoint_and_scorer)


def _class_of(why: str) -> str:
    """The fault's reason as a label with few values, in which HTTP statuses become classes such as `5xx`."""
    return f"{why[0]}xx" if why.isdecimal() else why


def _by_endpoint(values: Mapping[str, float]) -> dict[Labels, float]:
    """Sum `values` by endpoint label. A new LabelCap each time counts only the present endpoints."""
    name = LabelCap()
    found: dict[Labels, float] = {}
    for address, value in values.items():
        labels = (name(address),)
        found[labels] = found.get(labels, 0.0) + value
    return found


def label_value(text: str) -> str:
    """The string `text` as a label value: cut to 128 characters that UTF-8 can encode. One bad name must not
    make the whole metrics page fail."""
    return text[:_MAX_VALUE_CHARS].encode("utf-8", "replace").decode("utf-8")


class LabelCap:
    """Keeps the first 1000 values of a label; any further value becomes `other`.

    Clients choose some labels (model names): without a cap they could make the process's memory and metrics
    page arbitrarily large. `known` values always keep their names.
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

    def count_one(self, *labels: str) -> None:
        """Add 1 to the series with `labels`."""
        self.add(labels)

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
        self.text: bytes | None = None  # cached text of the series, until the next observation


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
