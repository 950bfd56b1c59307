"""Chooses candidate endpoints for a request from the data of one replica.

Admission calls the chooser before each request is placed. The chooser reserves nothing: the script
(`lua/place.lua`) makes the final choice among the candidates, by the live load.
"""

import logging
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple, get_args

import msgspec

from picker_fleet.domain.config import EffectiveConfig
from picker_fleet.domain.errors import NoEndpoints
from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.domain.request import (
    ANY_LATENCY,
    KEY_MARK,
    Completion,
    InferenceRequest,
    Placement,
)
from picker_fleet.domain.scheduling import SLO_HEADROOM
from picker_fleet.endpoints.readings import MetricsCache
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.scheduling.cache_feedback import PrefixFeedback
from picker_fleet.scheduling.endpoint_history import BLOCK_BYTES
from picker_fleet.scheduling.endpoint_states import EndpointStates, StageName
from picker_fleet.scheduling.explain import (
    ANY_ENDPOINT,
    Explanation,
    LeastLoadedPick,
    PickBasis,
    explain,
    live_loads,
)
from picker_fleet.scheduling.extension_calls import Extensions
from picker_fleet.scheduling.forecasts import Forecasts, MetLoads, shortfall_s
from picker_fleet.scheduling.route_stream import CompletionRecord, RouteStream
from picker_fleet.scheduling.scheduler import FILTERS, Scheduler, apply_filters, with_in_flight
from picker_fleet.scheduling.scorers import EndpointState, PickRequest
from picker_fleet.scheduling.sessions import SessionKeys, SessionTokens
from picker_fleet.scheduling.splitting import SplitDecision, StageTimes, decide
from picker_fleet.state.accounting_token import Keyring

_log = logging.getLogger(__name__)

# The most candidates that the script gets: further ones cost the script more than they improve the choice. If
# picks look at samples, candidates differ between picks, and so cost the script more: pass fewer.
_MAX_SCORED, _MAX_OF_A_SAMPLE = 8, 5
_TRIED = 1 / 8  # fraction of streams that are admitted although predicted to be late, by a factor below two
_DRAWS = 32  # choices kept for similar requests to share; each breaks ties differently
_ROUTE_SCORERS = frozenset({"prefix-affinity", "latency"})  # scorers that need the routes of all replicas
_ADDRESS_BYTES = 24  # approximate length of one address in a list of candidates
_in_flight = attrgetter("in_flight")
_MOST_ENCODERS = 8


class Choice(NamedTuple):
    """The candidates in the form that the script `lua/place.lua` takes, and the basis of the choice.
    `prefill`: the candidates of the stage prefill, also in the script's form; '': do not split. `split` is
    the reason for splitting the request or not; None if no endpoint may prefill for others."""

    candidates: str
    basis: PickBasis
    prefill: str = ""
    split: SplitDecision | None = None


class ExplanationCache:
    """Keeps the last choices for explanations: at most `max_choices`, with at most `max_values` scores and
    reasons (about 40 bytes each) in all. The method `add` is cheap; `get` computes the explanation."""

    def __init__(self, *, max_choices: int = 1000, max_values: int = 500_000) -> None:
        self._max_choices = max_choices
        self._max_values = max_values
        self._values = 0
        self._encoders: deque[tuple[str, tuple[str, ...]]] = deque(maxlen=max_choices)
        # Kept choices, oldest first; the last element of each is the number of its scores and reasons.
        self._choices: deque[
            tuple[str, PickBasis, tuple[str, ...], str, SplitDecision | None, tuple[str, ...], int]
        ] = deque()

    def __len__(self) -> int:
        return len(self._choices)

    def add(
        self,
        request_id: str,
        basis: PickBasis,
        chosen: tuple[str, ...],
        live: str = "",
        split: SplitDecision | None = None,
        prefillers: tuple[str, ...] = (),
    ) -> None:
        """Keep the choice for `request_id`: the `chosen` endpoints and `prefillers` (best first; empty: the
        request was refused), the `live` loads that the script compared, and why it was `split` or not."""
        choices = self._choices
        if isinstance(basis, LeastLoadedPick):
            values = 1 + len(basis.endpoints) + len(basis.in_flight) + len(basis.candidates) // _ADDRESS_BYTES
        else:
            values = basis.values
        choices.append((request_id, basis, chosen, live, split, prefillers, values))
        self._values += values
        while len(choices) > self._max_choices or (self._values > self._max_values and len(choices) > 1):
            self._values -= choices.popleft()[-1]

    def add_encoders(self, request_id: str, encoders: tuple[str, ...]) -> None:
        self._encoders.append((request_id, encoders))

    def get(self, request_id: str) -> Explanation | None:
        """Explain the last choice for `request_id`; None if the choice is no longer kept."""
        found = next((each for each in reversed(self._choices) if each[0] == request_id), None)
        if found is None:
            return None
        _, basis, chosen, live, split, prefillers, _ = found
        explained = explain(request_id, basis, chosen, live)
        stages = "" if split is None else str(split)
        if split is not None and split.is_split and chosen and not prefillers:
            stages = f"whole, since no prefill endpoint could be reserved; {stages}"
        encoders = next((found for each, found in reversed(self._encoders) if each == request_id), ())
        return replace(explained, stages=stages, prefillers=prefillers, encoders=encoders)


class EndpointChooser:
    """Lists the candidates of a request: the best by the configured scorers or, without scorers, all, so that
    the script chooses by load. One event loop.

    Scorers read this replica's data: the attribute `fleet` has the requests in flight as last read from
    Redis, `readings` has the scraped metrics, `routes` has the prompt prefixes and latencies of endpoints,
    and gets those that this replica observes. `live_weight` is the weight with which the script adds the live
    load to the candidates' scores. `extensions` are the pool's extensions; by default they are made here.
    """

    def __init__(
        self,
        fleet: KnownFleet,
        endpoints: SnapshotCell,
        *,
        readings: MetricsCache,
        routes: RouteStream,
        keys: Keyring,
        clock: Callable[[], float],
        extensions: Extensions | None = None,
    ) -> None:
        configured = fleet.config.settings.scheduling
        self._fallbacks, self._latency_weights = configured.fallbacks, configured.latency
        self._extensions = extensions or Extensions(fleet.config.settings)
        self._filters = {**FILTERS, **self._extensions.filters}
        self._prefer, self._preferred = configured.prefer, fleet.config.settings.preferred_labels
        for name in configured.prefer.keys() - self._preferred.keys():
            _log.warning(
                "scheduling.prefer: `labels` has no %s of this replica: it counts only for prefills", name
            )
        self._fleet, self._endpoints, self._routes = fleet, endpoints, routes
        self._sessions, self._session_keys = SessionTokens(keys, endpoints), SessionKeys(endpoints)
        self._explanations = ExplanationCache()
        self._forecasts, self._feedback = Forecasts(routes, clock), PrefixFeedback(routes, clock)
        self._states, self._prefill_states, self._encode_states = (
            EndpointStates(
                endpoints,
                fleet,
                readings=readings,
                routes=routes,
                clock=clock,
                adapters=configured.adapters,
                stage=stage,
            )
            for stage in get_args(StageName)
        )
        self._encode_scheduler = Scheduler({"queue-depth": 1.0, "running-requests": 1.0})
        # The states for requests that any endpoint may serve; valid until endpoints or loads are read again.
        self._any = LeastLoadedPick((), {}, None, {}, ANY_ENDPOINT)
        # Choices drawn from the states `_drawn_from` and cached, at most `_DRAWS` for each kind of request.
        self._drawn: dict[tuple[object, ...], list[Choice]] = {}
        self._drawn_from: Sequence[EndpointState] = ()
        self.follow(fleet.config)

    def follow(self, config: EffectiveConfig) -> None:
        """From now on, choose by the scorers of `config`."""
        weights = config.settings.scheduling.weights
        prefill_weights = config.settings.scheduling.prefill_weights
        outside = self._extensions
        self._scheduler, self._prefill_scheduler = (
            Scheduler(with_in_flight(each), outside.scorers, outside.filters) if each else None
            for each in (weights, prefill_weights)
        )
        self._threshold = config.settings.scheduling.stages.threshold
        self._drawn_from = ()
        self.live_weight = self._scheduler.live_weight if self._scheduler is not None else 0.0
        self._decodes_by_prefix = "prefix-affinity" in weights
        self._scores_prefixes = self._decodes_by_prefix or "prefix-affinity" in prefill_weights
        self._scores_forecasts = SLO_HEADROOM in weights
        self._orders_by_deadline = config.settings.fair_request_queue.ordering == "edf"
        self._gives_tokens = "session-affinity" in weights
        self._shares_routes = not _ROUTE_SCORERS.isdisjoint((*weights, *prefill_weights))
        self._shares_completions = "latency" in weights
        if self._shares_routes:
            self._routes.share()
        if self._scores_forecasts or config.settings.promises_latencies:
            self._forecasts.use()

    @property
    def needs_prefix_hashes(self) -> bool:
        """Whether a scorer, or a forecast, reads the hashes of prompts."""
        return self._scores_prefixes or self._forecasts.used

    @property
    def predicts(self) -> bool:
        """Whether the latencies of requests are predicted."""
        return self._forecasts.used

    @property
    def has_encoders(self) -> bool:
        """Whether an endpoint encodes images, audio and video for others."""
        return bool(self._endpoints.current.encoders)

    def encoders(self, request: InferenceRequest, placement: Placement) -> tuple[str, ...]:
        """The endpoints that encode the media of `request`, at most one for each item; none if the request's
        endpoint or prefill endpoint encodes, too.

        Redis does not count an encoder's requests, since no report says when an encoder ends. Draw twice
        as many endpoints at random, and take the less loaded half: all replicas would crowd the least loaded
        endpoints while scraped loads are out of date ("How Useful Is Old Information?", Mitzenmacher 2000).
        """
        states = self._encode_states
        states.refresh()
        pick = self._pick(request)
        able = apply_filters(pick, self._looked_at(states, request, pick), self._filters).eligible
        addresses = {each.address for each in able}
        if not addresses.isdisjoint((placement.endpoints[0], *placement.prefillers[:1])):
            return ()
        count = min(request.media, _MOST_ENCODERS)
        drawn = random.sample(able, min(2 * count, len(able)))
        best = self._encode_scheduler.rank(pick, drawn, limit=count).best
        named = tuple(each.address for each in best)
        self._explanations.add_encoders(request.id, named)
        return named

    def choose(self, request: InferenceRequest) -> Choice:
        """The candidate endpoints for `request`, and, if it is to be split, for its prefill."""
        if not self._endpoints.current.prefillers or not request.can_split or request.origin:
            return self._choose(request)
        matches = self._routes.index.match(request.prefix)
        return self._with_prefill(request, self._choose(request, matches), matches)

    def _choose(self, request: InferenceRequest, matches: Mapping[str, int] | None = None) -> Choice:
        if request.origin and self._is_able(request, request.origin):
            known = LeastLoadedPick(
                self._endpoints.current.decoders,
                self._fleet.in_flight,
                (request.origin,),
                request.selector,
                request.origin,
                has_state=True,
            )
            return Choice(request.origin, known)
        if self._scheduler is None:
            return self.unscored(request)
        states = self._states
        states.refresh()
        session_endpoint = ""
        if request.session:
            session_endpoint = self.session_endpoint(request.session, request.subset, request.selector)
        looked_at = states.looked_at(request, session_endpoint)
        if matches is None:
            among = [state.address for state in looked_at] if states.samples else None
            matches = self._routes.index.match(request.prefix, among)
        pick = self._pick(request)._replace(
            session_endpoint=session_endpoint,
            prefix_blocks=len(request.prefix),
            prefix_matches=matches,
            latency_weights=self._latency_weights,
        )
        if self._scores_forecasts and request.latency != ANY_LATENCY:
            forecasts = self._forecasts.of(request, looked_at, pick.prefix_matches)
            pick = pick._replace(objective=request.latency, forecasts=forecasts)
        drawn: list[Choice] = []
        if looked_at is states.common and self._scheduler.can_share(pick) and not request.limit:
            drawn = self._drawn_for(pick, looked_at)
            if len(drawn) == _DRAWS:
                return drawn[int(random.random() * _DRAWS)]
        if request.limit:
            limit = len(looked_at)  # every endpoint with a high score may be at the flow's limit
        else:
            limit = max(_MAX_OF_A_SAMPLE if states.samples else _MAX_SCORED, 1 + self._fallbacks)
        ranking = self._scheduler.rank(pick, looked_at, limit=limit)
        if not ranking.best and states.samples and self._extensions.filters:
            ranking = self._scheduler.rank(pick, states.everything(), limit=limit)
        choice = Choice(",".join(f"{best.address}={best.base:.4f}" for best in ranking.best), ranking)
        drawn.append(choice)
        return choice

    def _with_prefill(self, request: InferenceRequest, choice: Choice, matches: Mapping[str, int]) -> Choice:
        """Decide whether to split `request`, whose decode endpoint will be one of `choice`; if so, add the
        candidates for its prefill. While no decode endpoint is known, a request may wait for one: its
        predicted times are unknown."""
        self._forecasts.use()  # forecasts also say when a prefill ends
        states, scheduler = self._prefill_states, self._prefill_scheduler
        self._states.refresh()
        states.refresh()
        pick = self._pick(request)._replace(prefix_blocks=len(request.prefix), prefix_matches=matches)
        decoder = self._likely_decoder(pick, choice)
        looked_at = self._looked_at(states, request, pick)
        prefill = ANY_ENDPOINT
        if scheduler is not None:
            prefill, best = self._ranked_prefill(scheduler, pick, looked_at, choice, decoder)
        else:
            able = apply_filters(pick, looked_at, self._filters).eligible
            best = [min(able, key=_in_flight).address] if able else []
            if request.subset is not None or request.selector or self._extensions.filters:
                prefill = ",".join(each.address for each in able)
        prefiller = states.state(best[0]) if best else None
        if prefiller is None:
            return choice
        cached = 0
        if self._decodes_by_prefix:  # else requests do not go where their prompts are cached
            on_decoders = (n for address, n in matches.items() if self._states.state(address) is not None)
            cached = max(on_decoders, default=0)
        times = StageTimes()
        if self._threshold is None and decoder is not None:
            times = self._forecasts.stage_times(
                request, decoder, prefiller, self._states.state(prefiller.address), matches
            )
        draw = random.random if request.stream else None  # only streams show the time to the first token
        split = decide(self._uncached_tokens(request, cached), self._threshold, times, draw)
        return choice._replace(prefill=prefill if split.is_split else "", split=split)

    def _ranked_prefill(
        self,
        scheduler: Scheduler,
        pick: PickRequest,
        looked_at: Sequence[EndpointState],
        choice: Choice,
        decoder: EndpointState | None,
    ) -> tuple[str, Sequence[str]]:
        """The candidates for a prefill in the form that the script takes, and their addresses, best first, if
        `decoder` (None: unknown) decodes. If labels are preferred, each decode endpoint prefers prefill
        endpoints with its own labels, since the KV cache goes from one to the other."""
        decoders = [] if decoder is None else [decoder]
        if self._prefer and not isinstance(choice.basis, LeastLoadedPick):
            known = (self._states.state(each.address) for each in choice.basis.best)
            decoders = [each for each in known if each is not None]
        alike: dict[tuple[tuple[str, str], ...], list[str]] = {}  # preferred labels -> decode endpoints
        for each in decoders:
            own = tuple((name, each.labels[name]) for name in self._prefer if name in each.labels)
            alike.setdefault(own, []).append(each.address)
        # The script gives the load in flight the same weight in both stages: scale the other scores.
        scale = (self.live_weight or 1.0) / scheduler.live_weight
        best, parts = list[str](), list[str]()
        for own, addresses in (alike or {(): []}).items():
            ranked = scheduler.rank(pick._replace(preferred=dict(own)), looked_at, limit=_MAX_SCORED).best
            best = best or [each.address for each in ranked]
            candidates = ",".join(f"{each.address}={each.base * scale:.4f}" for each in ranked)
            parts.append(f"{','.join(addresses)}>{candidates}" if len(alike) > 1 else candidates)
        return ";".join(parts), best

    def _looked_at(
        self, states: EndpointStates, request: InferenceRequest, pick: PickRequest
    ) -> Sequence[EndpointState]:
        """The endpoints of the stage prefill or encode that a pick looks at: all if installed filters exclude
        a whole sample."""
        found = states.looked_at(request, "")
        if not states.samples or not self._extensions.filters:
            return found
        return found if apply_filters(pick, found, self._filters).eligible else states.everything()

    def _likely_decoder(self, pick: PickRequest, choice: Choice) -> EndpointState | None:
        """The endpoint that will probably serve the request of `choice`; None if no endpoint is ready."""
        if isinstance(choice.basis, LeastLoadedPick):
            able = apply_filters(pick, self._states.everything(), self._filters).eligible
            return min(able, key=_in_flight, default=None)
        return self._states.state(choice.basis.best[0].address) if choice.basis.best else None

    def _uncached_tokens(self, request: InferenceRequest, cached_blocks: int) -> float:
        """The estimated tokens of the prompt beyond its first `cached_blocks` blocks."""
        line = self._fleet.prompt_line(request.model)
        tokens = request.prompt_tokens or line.tokens(
            request.prompt_size or request.prompt_bytes or request.body_bytes
        )
        cached = cached_blocks * BLOCK_BYTES / max(request.body_bytes, 1)
        return tokens * max(1.0 - cached, 0.0)

    def _pick(self, request: InferenceRequest) -> PickRequest:
        """The fields of `request` that the filters read."""
        return PickRequest(
            subset=None if request.subset is None else frozenset(request.subset),
            adapter=request.target_model if request.target_model in self._states.adapters else "",
            selector=request.selector,
            preferred=self._preferred,
            request=request,
        )

    def shortfall_s(self, request: InferenceRequest, wait_s: float = 0.0) -> float | None:
        """Seconds by which even the fastest endpoint is predicted to miss the latency objective of `request`,
        after `wait_s` in the queue; None without one, or if some endpoint may meet it or is unknown."""
        if request.latency == ANY_LATENCY:
            return None
        self._forecasts.use()
        if not self._forecasts.are_current(request.model):
            return None  # if all requests were refused, predictions would never change
        self._states.refresh()
        able = apply_filters(self._pick(request), self._states.everything()).eligible
        matches = self._routes.index.match(request.prefix)
        left = request.latency._replace(ttft_s=request.latency.ttft_s - wait_s)
        forecasts = [*self._forecasts.of(request, able, matches).values()]
        if self._endpoints.current.prefillers and request.can_split:
            self._prefill_states.refresh()
            prefillers = apply_filters(self._pick(request), self._prefill_states.everything()).eligible
            forecasts += self._forecasts.of_split(request, able, prefillers, matches)
        late_s = shortfall_s(left, forecasts)
        if late_s is not None and request.stream and random.random() < _TRIED:
            # A refused request teaches nothing: admit some requests whose predicted delay may be wrong.
            late_s = shortfall_s(left._replace(ttft_s=2 * left.ttft_s, tpot_s=2 * left.tpot_s), forecasts)
        return late_s

    def early_ms(self, request: InferenceRequest) -> int:
        """Under the ordering `edf`, how many milliseconds before the end of its TTL `request` must start in
        order to meet its TTL and its latency objective on the fastest endpoint, by prediction; else 0."""
        if not self._orders_by_deadline:
            return 0
        if self._extensions.due is not None:
            due_s = self._extensions.due(request)
            if due_s is not None:
                return round((request.ttl_s - min(due_s, request.ttl_s)) * 1000)
        predicted_s = 0.0
        if request.latency != ANY_LATENCY:
            self._forecasts.use()
        if self._forecasts.used:
            self._states.refresh()
            forecasts = self._forecasts.of(request, self._states.common, {}).values()
            predicted_s = min(
                (each.ttft.median_s for each in forecasts if each.ttft is not None), default=0.0
            )
        start_s = min(request.ttl_s, request.latency.ttft_s) - predicted_s
        return round((request.ttl_s - max(start_s, 0.0)) * 1000)

    def _is_able(self, request: InferenceRequest, address: str) -> bool:
        """Whether the endpoint takes requests, and `request` may be placed on it."""
        if request.subset is not None and address not in request.subset:
            return False
        known, wanted = self._endpoints.current.decoders, request.selector.items()
        return any(e.address == address and e.ready and wanted <= e.labels.items() for e in known)

    def session_endpoint(
        self, session: str, subset: tuple[str, ...] | None, selector: Mapping[str, str] | None = None
    ) -> str:
        """The endpoint of a session token or of a session key, if within `subset`; '' if there is none."""
        if not self._gives_tokens:
            return ""
        if session[0] == KEY_MARK:
            return self._session_keys.endpoint_of(session, subset, selector)
        return self._sessions.endpoint_of(session)

    def _drawn_for(self, pick: PickRequest, looked_at: Sequence[EndpointState]) -> list[Choice]:
        """The choices made so far from the states `looked_at` for requests with the same scores as `pick`."""
        if looked_at is not self._drawn_from:
            self._drawn, self._drawn_from = {}, looked_at
        matches = pick.prefix_matches
        likeness = pick.adapter, pick.session_endpoint, pick.prefix_blocks if matches else 0, *matches.items()
        return self._drawn.setdefault(likeness, [])

    def unscored(self, request: InferenceRequest) -> Choice:
        """Candidates without scores, among which the script chooses by load: this replica's readings may be
        out of date. The script does not know labels: if a request selects by labels, list the endpoints with
        these labels."""
        known, in_flight = self._endpoints.current.decoders, self._fleet.in_flight
        subset, selector = request.subset, request.selector
        excluded: Mapping[str, str] = {}
        if self._extensions.filters:
            self._states.refresh()
            kept = apply_filters(self._pick(request), self._states.everything(), self._extensions.filters)
            subset = tuple(each.address for each in kept.eligible if subset is None or each.address in subset)
            excluded = kept.excluded
        if subset is None and not selector:
            if known is not self._any.endpoints or in_flight is not self._any.in_flight:
                self._any = LeastLoadedPick(known, in_flight, None, {}, ANY_ENDPOINT)
            return Choice(ANY_ENDPOINT, self._any)
        if selector:
            wanted = selector.items()
            candidates = ",".join(
                endpoint.address
                for endpoint in known
                if wanted <= endpoint.labels.items() and (subset is None or endpoint.address in subset)
            )
        else:
            candidates = ",".join(subset or ())
        pick = LeastLoadedPick(known, in_flight, subset, selector, candidates, excluded=excluded)
        return Choice(candidates, pick)

    def placed(
        self,
        request: InferenceRequest,
        choice: Choice,
        endpoints: tuple[str, ...],
        live: str = "",
        prefillers: tuple[str, ...] = (),
    ) -> MetLoads:
        """Record that `request` was placed on the first of `endpoints`, and its prefill, if the request is
        split, on the first of `prefillers`; `live` are the loads that the script compared (lua/place.lua).
        Returns the endpoints' loads when it was placed."""
        self._explanations.add(request.id, choice.basis, endpoints, live, choice.split, prefillers)
        loads = MetLoads()
        placed_on = (endpoints[0], *prefillers[:1])
        if self._forecasts.used:
            seen = live_loads(choice.basis, endpoints, live)
            loads = self._forecast_placed(request, placed_on, seen)
        if request.prefix and (self._shares_routes or self._forecasts.used):
            if not prefillers:  # a split request's cached tokens are on the prefill endpoint
                self._feedback.placed(request, endpoints[0])
            for address in placed_on:
                self._routes.add_route(address, request.prefix)
        return loads

    def _forecast_placed(
        self, request: InferenceRequest, placed_on: tuple[str, ...], loads: Mapping[str, float]
    ) -> MetLoads:
        address, *prefillers = placed_on
        self._states.refresh()
        state = self._states.state(address)
        if state is None:
            return MetLoads()
        if address in loads:
            state = msgspec.structs.replace(state, in_flight=loads[address])
        matches = self._routes.index.match(request.prefix, placed_on)
        if not prefillers:
            return self._forecasts.placed(request, state, matches)
        self._prefill_states.refresh()
        prefiller = self._prefill_states.state(prefillers[0])
        if prefiller is None:
            return MetLoads()
        return self._forecasts.placed_split(request, state, prefiller, matches)

    def refused(self, request: InferenceRequest, choice: Choice) -> None:
        """Record that no endpoint could take `request`."""
        self._explanations.add(request.id, choice.basis, (), split=choice.split)

    def ended(self, completion: Completion, token: str) -> None:
        """Learn the endpoint's latency from the end of a request; `token` is its accounting token."""
        self._forecasts.learn(completion, token)
        self._feedback.ended(completion)
        if not self._shares_completions or not completion.answered:
            return  # an error response is quick: its time would distort the endpoint's latency
        # The duration without the wait in the queue, if known, else the whole duration.
        seconds = completion.duration_s if completion.service_s is None else completion.service_s
        if completion.served and seconds is not None:
            self._routes.add(CompletionRecord(completion.served, seconds))

    def session_token(self, endpoint: str) -> str:
        """The token for the client of a request that `endpoint` serves; '' if no scorer uses sessions."""
        return self._sessions.token_of(endpoint) if self._gives_tokens else ""

    def explain(self, request_id: str) -> Explanation | None:
        """The reasons why a recent request was placed on its endpoint, or refused; None if unknown."""
        return self._explanations.get(request_id)

    def route(self, subset: tuple[str, ...] | None, *, origin: str = "", session: str = "") -> Placement:
        """Choose random ready endpoints for a request that needs no admission. The first is the endpoint
        `origin`, even if it takes no new requests; without `origin`, the endpoint of the `session`.

        Raises:
            NoEndpoints: no endpoint, or no endpoint of the subset, is ready.
        """
        allowed = [e for e in self._endpoints.current.decoders if subset is None or e.address in subset]
        ready = [e.address for e in allowed if e.ready]
        first = [e.address for e in allowed if e.address == origin and not e.down]
        if session and not first:
            preferred = self.session_endpoint(session, subset)
            first = [address for address in ready if address == preferred]
        if not ready and not first:
            raise NoEndpoints("no endpoint is ready that may serve this request", retry_after_s=1)
        others = random.sample(ready, min(len(ready), 1 + self._fallbacks))
        return Placement(tuple(dict.fromkeys((*first, *others)))[: 1 + self._fallbacks], "")

    def scores(self) -> Mapping[str, Mapping[str, float]]:
        """The scores of each eligible endpoint (`ip:port` -> scorer -> 0 to 1) for a request without
        preferences; `total` is their weighted sum."""
        if self._scheduler is None:
            return {}
        self._states.refresh()
        pick = PickRequest(latency_weights=self._latency_weights, preferred=self._preferred)
        ranking = self._scheduler.rank(pick, self._states.everything(), limit=0)
        columns = {**ranking.parts, "total": ranking.totals}
        return {
            endpoint.address: {name: scores[at] for name, scores in columns.items()}
            for at, endpoint in enumerate(ranking.eligible)
        }
