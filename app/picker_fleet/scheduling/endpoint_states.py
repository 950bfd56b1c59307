"""Keeps the endpoint states that picks read, and selects the endpoints that a pick looks at.

In a pool of at most `ALL_LOOKED_AT` endpoints a pick looks at all endpoints. In a larger pool a pick looks at
`SAMPLED` endpoints that take requests (the power of d choices, Mitzenmacher 1996), and at a few endpoints
with affinity to the request: endpoints that have served the longest prefixes of its prompt, have its session,
or run its adapter. The sample is drawn at random ten times a second, and again after `_PICKS_OF_A_SAMPLE`
picks. So the cost of a pick is independent of the size of the pool (docs/decisions.md, 25).
"""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.domain.request import Endpoint, InferenceRequest
from picker_fleet.endpoints.readings import EndpointMetrics, MetricsCache
from picker_fleet.endpoints.snapshot import Snapshot, SnapshotCell
from picker_fleet.scheduling.route_stream import RouteStream
from picker_fleet.scheduling.scorers import EndpointState

REFRESH_S = 0.1  # greatest age of a state, in seconds; endpoints are scraped at this interval
ALL_LOOKED_AT = 64
SAMPLED = 16
_PICKS_OF_A_SAMPLE = 64  # more picks would crowd the sample's endpoints while other endpoints are idle
_NAMED = 8  # maximum endpoints added to a pick for its prompt, and as many for its adapter
_MOST_SELECTORS = 64  # maximum label selectors whose endpoints are cached

_UNKNOWN = EndpointMetrics(0)  # used as the metrics of an endpoint without a fresh reading

Selector = frozenset[tuple[str, str]]
StageName = Literal["decode", "prefill", "encode"]


class EndpointStates:
    """The states of all endpoints, at most `REFRESH_S` old after a call of `refresh`. One event loop.

    The argument `adapters` has names of LoRA adapters that the readings may lack. The endpoints serve the
    stage `stage`. The method `refresh` removes endpoints that have left the pool from the index of `routes`.
    """

    def __init__(
        self,
        endpoints: SnapshotCell,
        fleet: KnownFleet,
        *,
        readings: MetricsCache,
        routes: RouteStream,
        clock: Callable[[], float],
        adapters: Collection[str],
        stage: StageName = "decode",
    ) -> None:
        self._endpoints, self._fleet, self._clock, self._stage = endpoints, fleet, clock, stage
        self._cache = readings
        self._index = routes.index
        self._latencies, self._model, self._backlogs = routes.latencies, routes.model, routes.backlogs
        self._configured_adapters = frozenset(adapters)
        self.adapters = self._configured_adapters
        # The following derive from the endpoint snapshot with version `_version`.
        self._version = ""
        self._by_address: dict[str, Endpoint] = {}
        self._all_addresses: frozenset[str] = frozenset()  # addresses of the endpoints of all stages
        self._open: list[str] = []  # addresses of endpoints that take requests
        self._is_open: frozenset[str] = frozenset()
        self._selected: dict[Selector, list[str]] = {}  # selector -> addresses in `_open` with these labels
        self.samples = False  # whether picks look at a sample only
        # The following were read at the time `_refreshed_s`.
        self._refreshed_s = -REFRESH_S
        self._readings = readings.snapshot()
        self._in_flight: Mapping[str, int] = {}
        self._running_adapters: dict[str, list[str]] = {}  # adapter -> addresses
        self._compare_loads = True
        self._states: dict[str, EndpointState] = {}
        # The states for picks without preferences; the list object stays the same until the next draw.
        self.common: list[EndpointState] = []
        self._common_addresses: frozenset[str] = frozenset()
        self._picks = 0  # number of picks that have looked at the current sample

    def refresh(self) -> None:
        """Read endpoints, metrics and loads again, unless the endpoints are unchanged and the last refresh is
        less than `REFRESH_S` old."""
        snapshot, now_s = self._endpoints.current, self._clock()
        if snapshot.version == self._version and now_s - self._refreshed_s < REFRESH_S:
            if self.samples and self._picks >= _PICKS_OF_A_SAMPLE:
                self._use(self._draw())
            return
        if snapshot.version != self._version:
            self._take(snapshot)
        self._index.retain(self._all_addresses)  # a late route may name a removed endpoint
        self._refreshed_s = now_s
        self._readings = self._cache.snapshot()
        self._in_flight = self._fleet.prefills if self._stage == "prefill" else self._fleet.in_flight
        self._states = {}
        self._note_adapters()
        drawn = self._draw()
        ready = [address for address in drawn if self._by_address[address].ready]
        # If most readings are stale, scraping is late, and the few endpoints with fresh readings would get
        # all requests. So compare only requests in flight, not scraped loads.
        fresh = sum(self._is_fresh(address) for address in ready)
        self._compare_loads = 2 * fresh >= len(ready)
        self._use(drawn)

    def _draw(self) -> Sequence[str]:
        """The endpoints for picks without preferences: all, or in a large pool a random sample."""
        if not self.samples:
            return list(self._by_address)
        # If no endpoint takes requests, sample all endpoints, so that an explanation can give reasons.
        return _sample(self._open or list(self._by_address), SAMPLED)

    def _use(self, drawn: Sequence[str]) -> None:
        self.common = [self._state(address) for address in drawn]
        self._common_addresses, self._picks = frozenset(drawn), 0

    def everything(self) -> Sequence[EndpointState]:
        """The states of all endpoints; without sampling, the list stays the same until the next refresh."""
        if self.samples:
            return [self._state(address) for address in self._by_address]
        return self.common

    def state(self, address: str) -> EndpointState | None:
        """The state of the endpoint `address`; None if it has left the pool."""
        return self._state(address) if address in self._by_address else None

    def looked_at(self, request: InferenceRequest, session_endpoint: str) -> Sequence[EndpointState]:
        """The states that a pick for `request` looks at, including the state of `session_endpoint`."""
        if not self.samples or request.limit:
            return self.everything()  # the flow may be below its limit only on endpoints outside a sample
        self._picks += 1
        named = self._named(request, session_endpoint)
        if request.subset is None and not request.selector:
            further = [address for address in named if address not in self._common_addresses]
            return [*self.common, *map(self._state, further)] if further else self.common
        eligible: Sequence[str] = self._open
        allowed = self._is_open
        if request.selector:
            eligible = self._with_labels(frozenset(request.selector.items()))
            allowed = frozenset(eligible)
        if request.subset is not None:
            eligible = [address for address in request.subset if address in allowed]
        wanted = frozenset(eligible) if named else frozenset()
        looked_at = dict.fromkeys(address for address in named if address in wanted)
        looked_at.update(dict.fromkeys(_sample(eligible, SAMPLED)))
        return [self._state(address) for address in looked_at]

    def _take(self, snapshot: Snapshot) -> None:
        self._version = snapshot.version
        listed = snapshot.decoders if self._stage == "decode" else snapshot.prefillers
        if self._stage == "encode":
            listed = snapshot.encoders
        self._all_addresses = frozenset(endpoint.address for endpoint in snapshot.endpoints)
        self._by_address = {endpoint.address: endpoint for endpoint in listed}
        # If endpoints have limits, look at all endpoints: a whole sample may be full.
        limits = any(endpoint.max_inflight is not None for endpoint in listed)
        self.samples = len(listed) > ALL_LOOKED_AT and not limits
        if self.samples:
            self._index.name_holders()
        self._open = [endpoint.address for endpoint in listed if endpoint.ready]
        self._is_open = frozenset(self._open)
        self._selected = {}
        for statistics in (self._latencies, self._model, self._backlogs):
            statistics.retain(self._all_addresses)

    def _note_adapters(self) -> None:
        self._running_adapters = {}
        for address in self._readings.with_adapters():
            reading = self._readings[address]
            if reading.known and address in self._by_address:
                metrics = reading.metrics
                for adapter in metrics.active_adapters | metrics.waiting_adapters | metrics.idle_adapters:
                    self._running_adapters.setdefault(adapter, []).append(address)
        self.adapters = self._configured_adapters | self._running_adapters.keys()

    def _named(self, request: InferenceRequest, session_endpoint: str) -> list[str]:
        """The endpoints of this pool with affinity to `request`: by its prompt, session or adapter."""
        known = self._by_address
        found = self._index.holders(request.prefix, _NAMED) if request.prefix else []
        if session_endpoint:
            found.append(session_endpoint)
        if request.target_model in self._running_adapters:
            found += _sample(self._running_adapters[request.target_model], _NAMED)
        return list(dict.fromkeys(address for address in found if address in known))

    def _with_labels(self, selector: Selector) -> list[str]:
        found = self._selected.get(selector)
        if found is None:
            if len(self._selected) >= _MOST_SELECTORS:
                self._selected = {}
            labels_of = self._by_address
            found = [address for address in self._open if selector <= labels_of[address].labels.items()]
            self._selected[selector] = found
        return found

    def _is_fresh(self, address: str) -> bool:
        reading = self._readings.get(address)
        return reading is not None and reading.known

    def _state(self, address: str) -> EndpointState:
        state = self._states.get(address)
        if state is not None:
            return state
        endpoint, reading = self._by_address[address], self._readings.get(address)
        metrics = reading.metrics if reading is not None and reading.known else _UNKNOWN
        if metrics.kv_tokens is not None:
            self._index.report_size(address, metrics.kv_tokens)
        loads = metrics if self._compare_loads else _UNKNOWN
        state = self._states[address] = EndpointState(
            address,
            labels=endpoint.labels,
            draining=endpoint.draining or endpoint.drained,
            healthy=not (endpoint.down or endpoint.ejected),
            waiting=loads.waiting,
            running=loads.running,
            kv_utilisation=loads.kv_utilisation,
            max_adapters=metrics.max_adapters,
            active_adapters=metrics.active_adapters,
            waiting_adapters=metrics.waiting_adapters,
            idle_adapters=metrics.idle_adapters,
            stale=metrics is _UNKNOWN,
            in_flight=float(self._in_flight.get(address, 0)),
            latency=self._latencies.stats(address),
        )
        return state


def _sample(among: Sequence[str], most: int) -> Sequence[str]:
    return among if len(among) <= most else random.sample(among, most)
