"""What picks know of the endpoints, and which of them a pick looks at.

In a pool of at most `ALL_LOOKED_AT` endpoints a pick looks at all. In a larger one it looks at `SAMPLED` of
those that take requests (the power of d choices, Mitzenmacher 1996), and at a few that the request itself
names: where the longest parts of its prompt were served, where its session is, where its adapter runs. The
sample is drawn at random ten times a second, and after `_PICKS_OF_A_SAMPLE` picks. So a pick costs the same
in a pool of any size (docs/decisions.md, 25).
"""

import random
from collections.abc import Callable, Collection, Mapping, Sequence

from picker_fleet.endpoints.readings import Readings
from picker_fleet.endpoints.snapshot import Snapshot, SnapshotCell
from picker_fleet.request import Endpoint, InferenceRequest
from picker_fleet.scheduling.endpoint_history import LatencyTracker, PrefixIndex
from picker_fleet.scheduling.scorers import EndpointState

REFRESH_S = 0.1  # states are at most this old: endpoints are scraped as often
ALL_LOOKED_AT = 64
SAMPLED = 16
_PICKS_OF_A_SAMPLE = 64  # more would crowd its endpoints while others are idle
_NAMED = 8  # by the prompt, and as many by the adapter
_MOST_SELECTORS = 64  # label selectors whose endpoints are kept

Selector = frozenset[tuple[str, str]]


class EndpointStates:
    """The endpoints' states, at most `REFRESH_S` old once `refresh` was called. One event loop.

    `readings`, `in_flight` and `latencies` are what is known of endpoints by address; `adapters` are names of
    LoRA adapters besides those in the readings. `index` forgets endpoints that have left.
    """

    def __init__(
        self,
        endpoints: SnapshotCell,
        *,
        readings: Callable[[], Readings],
        in_flight: Callable[[], Mapping[str, int]],
        latencies: LatencyTracker,
        index: PrefixIndex,
        clock: Callable[[], float],
        adapters: Collection[str] = (),
    ) -> None:
        self._endpoints, self._clock = endpoints, clock
        self._read_readings, self._read_in_flight = readings, in_flight
        self._latencies, self._index = latencies, index
        self._configured_adapters = frozenset(adapters)
        self.adapters = self._configured_adapters
        # Of the snapshot `_version`.
        self._version = ""
        self._by_address: dict[str, Endpoint] = {}
        self._open: list[str] = []  # addresses that take requests
        self._is_open: frozenset[str] = frozenset()
        self._selected: dict[Selector, list[str]] = {}  # those of `_open` that have the labels
        self.samples = False  # picks look at a part
        # As of `_refreshed_s`.
        self._refreshed_s = -REFRESH_S
        self._readings = readings()
        self._in_flight: Mapping[str, int] = {}
        self._running_adapters: dict[str, list[str]] = {}  # adapter -> addresses
        self._compare_loads = True
        self._states: dict[str, EndpointState] = {}
        # What a pick without wishes looks at; the same list until it is drawn anew.
        self.common: list[EndpointState] = []
        self._common_addresses: frozenset[str] = frozenset()
        self._picks = 0  # that have looked at it

    def refresh(self) -> None:
        """Take what is known now, unless that was done less than `REFRESH_S` ago and the endpoints are the
        same."""
        snapshot, now_s = self._endpoints.current, self._clock()
        if snapshot.version == self._version and now_s - self._refreshed_s < REFRESH_S:
            if self.samples and self._picks >= _PICKS_OF_A_SAMPLE:
                self._use(self._draw())
            return
        if snapshot.version != self._version:
            self._take(snapshot)
        self._index.retain(self._by_address.keys())  # routes to endpoints that have left may arrive late
        self._refreshed_s = now_s
        self._readings, self._in_flight = self._read_readings(), self._read_in_flight()
        self._states = {}
        self._note_adapters()
        drawn = self._draw()
        ready = [address for address in drawn if self._by_address[address].ready]
        # If most are stale, scraping is late. The few with fresh figures would get all requests, so loads are
        # not compared: the requests in flight decide.
        fresh = sum(self._is_fresh(address) for address in ready)
        self._compare_loads = 2 * fresh >= len(ready)
        self._use(drawn)

    def _draw(self) -> Sequence[str]:
        """The addresses that picks without wishes look at."""
        if not self.samples:
            return list(self._by_address)
        # If none takes requests, an explanation still says why of some.
        return _sample(self._open or list(self._by_address), SAMPLED)

    def _use(self, drawn: Sequence[str]) -> None:
        self.common = [self._state(address) for address in drawn]
        self._common_addresses, self._picks = frozenset(drawn), 0

    def everything(self) -> Sequence[EndpointState]:
        """All endpoints; the same list until the next refresh of a pool that is not sampled."""
        if self.samples:
            return [self._state(address) for address in self._by_address]
        return self.common

    def looked_at(self, request: InferenceRequest, session_endpoint: str) -> Sequence[EndpointState]:
        """Those that a pick for `request` looks at, `session_endpoint` ('': none) among them."""
        if not self.samples or request.limit:
            return self.everything()  # a limit on each endpoint may leave any of them only
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
        self._by_address = {endpoint.address: endpoint for endpoint in snapshot.endpoints}
        # With limits of endpoints the best of a few may all be full.
        limits = any(endpoint.max_inflight is not None for endpoint in snapshot.endpoints)
        self.samples = len(snapshot.endpoints) > ALL_LOOKED_AT and not limits
        if self.samples:
            self._index.name_holders()
        self._open = [endpoint.address for endpoint in snapshot.endpoints if endpoint.ready]
        self._is_open = frozenset(self._open)
        self._selected = {}
        self._latencies.retain(self._by_address.keys())

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
        """The endpoints of this pool that `request` has a reason to go to."""
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
        metrics = reading.metrics if reading is not None and reading.known else None
        loads = metrics if self._compare_loads else None
        state = self._states[address] = EndpointState(
            address,
            labels=endpoint.labels,
            draining=endpoint.draining or endpoint.drained,
            healthy=not (endpoint.down or endpoint.ejected),
            waiting=loads.waiting if loads else None,
            running=loads.running if loads else None,
            kv_utilisation=loads.kv_utilisation if loads else None,
            max_adapters=metrics.max_adapters if metrics else None,
            active_adapters=metrics.active_adapters if metrics else frozenset(),
            waiting_adapters=metrics.waiting_adapters if metrics else frozenset(),
            idle_adapters=metrics.idle_adapters if metrics else frozenset(),
            stale=metrics is None,
            in_flight=float(self._in_flight.get(address, 0)),
            latency=self._latencies.stats(address),
        )
        return state


def _sample(among: Sequence[str], most: int) -> Sequence[str]:
    return among if len(among) <= most else random.sample(among, most)
