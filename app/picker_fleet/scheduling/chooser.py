"""The choice of an endpoint, as far as a replica can make it: candidates for the script, which has the last
word, and what is remembered of each choice."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.request import Completion, InferenceRequest, Outcome
from picker_fleet.scheduling.ask import PickAsk
from picker_fleet.scheduling.explain import ALL, Basis, Explanation, Unscored
from picker_fleet.scheduling.feed import RouteFeed
from picker_fleet.scheduling.latency import SPECIFIED, LatencyBook, LatencyWeights
from picker_fleet.scheduling.prefix import PrefixIndex
from picker_fleet.scheduling.recall import ExplanationRing
from picker_fleet.scheduling.scheduler import Scheduler
from picker_fleet.scheduling.scorers import IN_FLIGHT
from picker_fleet.scheduling.session import SessionTokens
from picker_fleet.scheduling.signals import Signals
from picker_fleet.scraping.board import Reading
from picker_fleet.signing import Keyring

_MOST = 8  # candidates with scores that the script is told; more would cost it more than they gain
_ROUTED = frozenset({"prefix-affinity", "latency"})  # scorers that need what other replicas routed
_LIVE_WEIGHT = 1.0  # of in-flight requests where the configuration names other scorers only
FRESH_S = 0.1  # how old what is known of the endpoints may be: they are scraped as often


class Choice(NamedTuple):
    """What the script is to choose from, as lua/place.lua takes it; and what that came from.

    A tuple, since each request makes one and a frozen dataclass takes three times as long to make.
    """

    candidates: str
    basis: Basis


class LeastLoaded:
    """Leaves the choice to the script: the least loaded of all, or of the subset.

    Labels are not the script's business: where a request asks for some, those of `endpoints` that have them
    are named. `in_flight` gives the fleet's requests by endpoint as last heard of, a mapping that nobody
    changes. `live_weight` is the part of the load in flight beside the scores it gives. One event loop.
    """

    live_weight = 0.0

    def __init__(self, endpoints: SnapshotCell, in_flight: Callable[[], Mapping[str, int]] = dict) -> None:
        self._endpoints = endpoints
        self._in_flight = in_flight
        self._ring = ExplanationRing()

    def choose(self, request: InferenceRequest) -> Choice:
        """The candidates for `request`."""
        known, subset, selector = self._endpoints.current.endpoints, request.subset, request.selector
        if selector:
            wanted = selector.items()
            candidates = ",".join(
                endpoint.address
                for endpoint in known
                if wanted <= endpoint.labels.items() and (subset is None or endpoint.address in subset)
            )
        else:
            candidates = ALL if subset is None else ",".join(subset)
        return Choice(candidates, Unscored(known, self._in_flight(), subset, selector, candidates))

    def placed(
        self, request: InferenceRequest, choice: Choice, endpoints: tuple[str, ...], live: str = ""
    ) -> None:
        """`request` went to the first of `endpoints`; `live` are the loads by which (lua/place.lua)."""
        self._ring.keep(request.id, choice.basis, endpoints, live)

    def refused(self, request: InferenceRequest, choice: Choice) -> None:
        """There was no endpoint for `request`."""
        self._ring.keep(request.id, choice.basis, ())

    def ended(self, completion: Completion) -> None:
        """A request has ended."""

    def session_token(self, endpoint: str) -> str:
        """What the client of a request that `endpoint` serves is to bring back; '' where nobody asks."""
        return ""

    def explain(self, request_id: str) -> Explanation | None:
        """Why a request of late went where it went, or nowhere; None if nothing is known of it."""
        return self._ring.find(request_id)


def weights_of(scorers: Mapping[str, float]) -> dict[str, float]:
    """`scorers` (name -> weight) with the load in flight among them: without it replicas would herd."""
    return {IN_FLIGHT: _LIVE_WEIGHT, **scorers}


class Chooser(LeastLoaded):
    """Ranks by the scorers in force over what this replica knows of all endpoints. One event loop.

    Without a scheduler it leaves the choice to the script, as `LeastLoaded` does. `readings` gives what was
    scraped, `in_flight` the fleet's requests by endpoint as last heard of. `feed` hears what is routed while
    a scorer needs what other replicas routed. `adapters` are LoRA adapters by name, besides those that
    readings tell of. `latency` is what the scorer of that name weighs. `hashes` says whether a scorer asks
    for the hashes of prompts.
    """

    hashes = False

    def __init__(
        self,
        scheduler: Scheduler | None,
        endpoints: SnapshotCell,
        *,
        readings: Callable[[], Mapping[str, Reading]],
        in_flight: Callable[[], Mapping[str, int]],
        index: PrefixIndex,
        latencies: LatencyBook,
        feed: RouteFeed | None,
        clock: Callable[[], float],
        adapters: Collection[str] = (),
        latency: LatencyWeights = SPECIFIED,
        sessions: SessionTokens | None = None,
    ) -> None:
        super().__init__(endpoints, in_flight)
        self._sessions = sessions or SessionTokens(Keyring(), endpoints)
        self._routes_asked = asyncio.Event()
        self.weigh(scheduler)
        self._readings = readings
        self._index = index
        self._latencies = latencies
        self._latency = latency
        self._feed = feed
        self._clock = clock
        self._known: list[Signals] = []
        self._named = frozenset(adapters)
        self._adapters = self._named
        self._version = ""
        self._addresses: frozenset[str] = frozenset()
        self._known_s = -FRESH_S

    def weigh(self, scheduler: Scheduler | None) -> None:
        """Rank by `scheduler` from now on; without one the least loaded is chosen."""
        self._scheduler = scheduler
        weights = scheduler.weights if scheduler is not None else {}
        self._keeps_sessions = "session-affinity" in weights
        self.live_weight = scheduler.live_weight if scheduler is not None else 0.0
        self.hashes = "prefix-affinity" in weights
        self._tells = not _ROUTED.isdisjoint(weights)
        if self._tells:
            self._routes_asked.set()

    async def routes_asked(self) -> None:
        """Wait, without end, until a scorer needs what other replicas routed."""
        await self._routes_asked.wait()

    def choose(self, request: InferenceRequest) -> Choice:
        if self._scheduler is None:
            return super().choose(request)
        self._look()
        ask = PickAsk(
            subset=None if request.subset is None else frozenset(request.subset),
            adapter=request.target_model if request.target_model in self._adapters else "",
            selector=request.selector,
            session_endpoint=self._sessions.endpoint_of(request.session) if request.session else "",
            blocks=len(request.prefix),
            matches=self._index.match(request.prefix),
            latency=self._latency,
        )
        # A limit may leave only those that are far down.
        most = len(self._known) if request.limit else _MOST
        ranking = self._scheduler.rank(ask, self._known, most=most)
        return Choice(",".join(f"{best.address}={best.base:.4f}" for best in ranking.best), ranking)

    def placed(
        self, request: InferenceRequest, choice: Choice, endpoints: tuple[str, ...], live: str = ""
    ) -> None:
        super().placed(request, choice, endpoints, live)
        if self._feed is not None and self._tells and request.prefix:
            self._feed.routed(endpoints[0], request.prefix)

    def ended(self, completion: Completion) -> None:
        if self._feed is None or not self._tells or completion.outcome is not Outcome.COMPLETED:
            return
        if not 200 <= completion.status < 300:
            return  # a refusal is quick, and says nothing of how long answers take
        # Without the wait in our own queue, which says nothing of the endpoint.
        seconds = completion.duration_s if completion.service_s is None else completion.service_s
        if completion.served and seconds is not None:
            self._feed.completed(completion.served, seconds)

    def session_token(self, endpoint: str) -> str:
        return self._sessions.token_of(endpoint) if self._keeps_sessions else ""

    def scores(self) -> Mapping[str, Mapping[str, float]]:
        """What each scorer gives each endpoint that may be picked (`ip:port` -> scorer -> 0 to 1), for
        a request that asks for nothing in particular; `total` is the weighted whole."""
        if self._scheduler is None:
            return {}
        self._look()
        ranking = self._scheduler.rank(PickAsk(latency=self._latency), self._known, most=0)
        columns = {**ranking.parts, "total": ranking.totals}
        return {
            signals.address: {name: scores[at] for name, scores in columns.items()}
            for at, signals in enumerate(ranking.kept)
        }

    def _look(self) -> None:
        """Take up what is known of the endpoints, unless that was a moment ago."""
        snapshot, now_s = self._endpoints.current, self._clock()
        if snapshot.version == self._version and now_s - self._known_s < FRESH_S:
            return
        if snapshot.version != self._version:
            self._addresses = frozenset(endpoint.address for endpoint in snapshot.endpoints)
            self._latencies.keep(self._addresses)
        self._index.keep(self._addresses)  # routes to endpoints that have left come late, and from the past
        self._version, self._known_s = snapshot.version, now_s
        readings, in_flight = self._readings(), self._in_flight()
        self._known = []
        adapters = set(self._named)
        pages = {name: reading.metrics for name, reading in readings.items() if reading.known}
        open_to_new = [endpoint.address for endpoint in snapshot.endpoints if endpoint.ready]
        # Where most are stale it is the scraping that is late. The few that were read just now would get all
        # requests, so their loads are not compared with nothing: what is in flight decides.
        compared = 2 * sum(address in pages for address in open_to_new) >= len(open_to_new)
        for endpoint in snapshot.endpoints:
            known = pages.get(endpoint.address)
            loads = known if compared else None
            if known is not None:
                adapters |= known.active_adapters | known.waiting_adapters
            self._known.append(
                Signals(
                    endpoint.address,
                    labels=endpoint.labels,
                    draining=endpoint.draining or endpoint.drained,
                    healthy=not endpoint.down,
                    waiting=loads.waiting if loads else None,
                    running=loads.running if loads else None,
                    kv_utilisation=loads.kv_utilisation if loads else None,
                    max_adapters=known.max_adapters if known else None,
                    active_adapters=known.active_adapters if known else frozenset(),
                    waiting_adapters=known.waiting_adapters if known else frozenset(),
                    stale=known is None,
                    in_flight=float(in_flight.get(endpoint.address, 0)),
                    latency=self._latencies.stats(endpoint.address),
                )
            )
        self._adapters = frozenset(adapters)
