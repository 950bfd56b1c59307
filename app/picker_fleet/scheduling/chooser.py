"""The choice of an endpoint, as far as one replica can make it.

A chooser gives the script the candidates; the script (`lua/place.lua`) has the last word. It also remembers
each choice for explanations, and gives clients the session tokens that the scorer `session-affinity` goes by.
"""

import asyncio
import random
from bisect import bisect
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from xxhash import xxh3_64_intdigest

from picker_fleet.endpoints.readings import Readings
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.request import KEY_MARK, Completion, InferenceRequest, Outcome
from picker_fleet.scheduling.endpoint_history import LatencyTracker, PrefixIndex
from picker_fleet.scheduling.endpoint_states import EndpointStates
from picker_fleet.scheduling.explain import (
    ANY_ENDPOINT,
    Explanation,
    LeastLoadedPick,
    PickBasis,
    explain,
)
from picker_fleet.scheduling.scheduler import Scheduler
from picker_fleet.scheduling.scorers import (
    DEFAULT_LATENCY_WEIGHTS,
    IN_FLIGHT,
    EndpointState,
    LatencyWeights,
    PickRequest,
)
from picker_fleet.state.accounting_token import LENGTH, Keyring

if TYPE_CHECKING:
    from picker_fleet.scheduling.route_stream import RouteStream  # it brings Redis's client

SESSION_HEADER: Final = "x-session-token"  # of a request, and of an answer

# Candidates with scores for the script: more would cost it more than they gain. In a sample fewer, since
# picks then differ in their candidates, and each costs the script more.
_MAX_SCORED, _MAX_OF_A_SAMPLE = 8, 5
_DRAWS = 32  # choices that similar requests share; each has its ties in another order
_ROUTE_SCORERS = frozenset({"prefix-affinity", "latency"})  # need what other replicas routed
_IN_FLIGHT_WEIGHT = 1.0  # where the configuration names other scorers only
_SESSION_PURPOSE = "session"
_MAX_TOKENS = 10_000
_ADDRESS_BYTES = 24  # of one address in a list of candidates, about


class Choice(NamedTuple):
    """The candidates for the script, in the form `lua/place.lua` takes, and what they were chosen from."""

    candidates: str
    basis: PickBasis


class EndpointChooser(Protocol):
    """What admission needs of a chooser. `live_weight` is the weight of the live load, which the script adds
    to the candidates' scores."""

    live_weight: float

    def choose(self, request: InferenceRequest) -> Choice:
        """The candidates for `request`."""
        ...

    def unscored(self, request: InferenceRequest) -> Choice:
        """The script's own choice for `request`: what this replica knows of the endpoints may be out of
        date."""
        ...

    def placed(
        self, request: InferenceRequest, choice: Choice, endpoints: tuple[str, ...], live: str = ""
    ) -> None:
        """`request` went to the first of `endpoints`; `live` are the loads it was chosen by
        (lua/place.lua)."""

    def refused(self, request: InferenceRequest, choice: Choice) -> None:
        """There was no endpoint for `request`."""

    def ended(self, completion: Completion) -> None:
        """A request has ended."""

    def session_token(self, endpoint: str) -> str:
        """The token for the client of a request that `endpoint` serves; '' if no scorer uses sessions."""
        ...

    def session_endpoint(self, session: str, subset: tuple[str, ...] | None) -> str:
        """The endpoint of `subset` that a session asks for; '' if none, or no scorer uses sessions."""
        ...

    def explain(self, request_id: str) -> Explanation | None:
        """Why a recent request went to its endpoint, or nowhere; None if it is not known."""
        ...


class ExplanationCache:
    """The last choices: at most `max_choices`, with at most `max_values` scores and reasons (about 40 bytes
    each) together. Adding one costs little; `get` does the work."""

    def __init__(self, *, max_choices: int = 1000, max_values: int = 500_000) -> None:
        self._max_choices = max_choices
        self._max_values = max_values
        self._values = 0
        # The oldest first; each with the number of its values.
        self._choices: deque[tuple[str, PickBasis, tuple[str, ...], str, int]] = deque()

    def __len__(self) -> int:
        return len(self._choices)

    def add(self, request_id: str, basis: PickBasis, chosen: tuple[str, ...], live: str = "") -> None:
        """Remember that `request_id` was given `chosen` (best first; none: refused), and the `live` loads
        that the choice was made from (see `explain`)."""
        choices = self._choices
        if isinstance(basis, LeastLoadedPick):
            values = 1 + len(basis.endpoints) + len(basis.in_flight) + len(basis.candidates) // _ADDRESS_BYTES
        else:
            values = basis.values
        choices.append((request_id, basis, chosen, live, values))
        self._values += values
        while len(choices) > self._max_choices or (self._values > self._max_values and len(choices) > 1):
            self._values -= choices.popleft()[-1]

    def get(self, request_id: str) -> Explanation | None:
        """Why `request_id` went to its endpoint, by its last choice; None if that is no longer known."""
        found = next((each for each in reversed(self._choices) if each[0] == request_id), None)
        return None if found is None else explain(*found[:-1])


class LeastLoadedChooser:
    """Leaves the choice to the script, which takes the least loaded endpoint of all, or of the subset.

    The script does not know labels: if a request selects by labels, the candidates are the endpoints that
    have them. `in_flight` gives the fleet's requests by endpoint as last read, a mapping that nobody changes.
    One event loop.
    """

    live_weight = 0.0

    def __init__(
        self,
        endpoints: SnapshotCell,
        in_flight: Callable[[], Mapping[str, int]] = dict,
        explanations: ExplanationCache | None = None,
    ) -> None:
        self._endpoints = endpoints
        self._in_flight = in_flight
        self._explanations = ExplanationCache() if explanations is None else explanations
        # Of requests that any endpoint may serve: the same until the endpoints or their loads are read again.
        self._any = LeastLoadedPick((), {}, None, {}, ANY_ENDPOINT)

    def choose(self, request: InferenceRequest) -> Choice:
        known, subset, selector = self._endpoints.current.endpoints, request.subset, request.selector
        if subset is None and not selector:
            in_flight = self._in_flight()
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
        return Choice(candidates, LeastLoadedPick(known, self._in_flight(), subset, selector, candidates))

    def unscored(self, request: InferenceRequest) -> Choice:
        return self.choose(request)

    def placed(
        self, request: InferenceRequest, choice: Choice, endpoints: tuple[str, ...], live: str = ""
    ) -> None:
        self._explanations.add(request.id, choice.basis, endpoints, live)

    def refused(self, request: InferenceRequest, choice: Choice) -> None:
        self._explanations.add(request.id, choice.basis, ())

    def ended(self, completion: Completion) -> None:
        pass

    def session_token(self, endpoint: str) -> str:
        return ""

    def session_endpoint(self, session: str, subset: tuple[str, ...] | None) -> str:
        return ""

    def explain(self, request_id: str) -> Explanation | None:
        return self._explanations.get(request_id)


class SessionTokens:
    """Session tokens of the endpoints known at the moment. One event loop.

    A client that sends back the token of its last answer asks for the endpoint that gave the answer. A token
    is the fleet's signature of that endpoint's address. So clients learn nothing of the pool, and can ask
    only for an endpoint that has served them (or someone who gave them the token).
    """

    def __init__(self, keys: Keyring, endpoints: SnapshotCell) -> None:
        self._keys = keys
        self._endpoints = endpoints
        self._tokens: dict[str, str] = {}  # by address; under the key that signs now
        self._tokens_version = -1
        self._signed: dict[str, tuple[str, ...]] = {}  # by address; under any key
        self._addresses: dict[str, str] = {}  # by token, under any key
        self._addresses_version = ("", -1)

    def token_of(self, address: str) -> str:
        """The token for a client that `address` serves."""
        if self._tokens_version != self._keys.version or len(self._tokens) > _MAX_TOKENS:
            self._tokens, self._tokens_version = {}, self._keys.version
        token = self._tokens.get(address)
        if token is None:
            token = self._tokens[address] = self._keys.sign(_SESSION_PURPOSE, address)
        return token

    def endpoint_of(self, token: str) -> str:
        """The endpoint whose token it is; '' if the fleet did not sign it, or the endpoint has left."""
        known = self._endpoints.current
        version = (known.version, self._keys.version)
        if version != self._addresses_version:
            former = self._signed if version[1] == self._addresses_version[1] else {}
            self._signed = {
                address: former.get(address) or tuple(self._keys.signatures(_SESSION_PURPOSE, address))
                for address in (endpoint.address for endpoint in known.endpoints)
            }
            self._addresses = {token: address for address, tokens in self._signed.items() for token in tokens}
            self._addresses_version = version
        return self._addresses.get(token, "")


class SessionKeys:
    """The endpoint of each key by which clients name their sessions, the same at all replicas.

    Consistent hashing with several probes (Appleton and O'Reilly 2015): each endpoint that takes requests has
    one point on a ring, each key several, and the endpoint that follows one of them most closely gets it. So
    a change of the pool moves only the keys of what has changed. One event loop.
    """

    _PROBES = 21  # the most loaded endpoint then has 1.05 of the mean
    _ROUND = 2**64

    def __init__(self, endpoints: SnapshotCell) -> None:
        self._endpoints = endpoints
        self._version = ""
        self._ring: list[tuple[int, str]] = []

    def endpoint_of(
        self, key: str, subset: Collection[str] | None, selector: Mapping[str, str] | None = None
    ) -> str:
        """Among those of `subset` that have the labels of `selector`; '' if there is none."""
        known = self._endpoints.current
        if known.version != self._version:
            ready = (each.address for each in known.endpoints if each.ready)
            self._ring = sorted((xxh3_64_intdigest(address.encode()), address) for address in ready)
            self._version = known.version
        ring = self._ring
        if subset is not None or selector:
            wanted = (selector or {}).items()
            able = {each.address for each in known.endpoints if wanted <= each.labels.items()}
            ring = [each for each in ring if each[1] in able and (subset is None or each[1] in subset)]
        if not ring:
            return ""
        points = [xxh3_64_intdigest(key.encode(), probe) for probe in range(self._PROBES)]
        following = [(ring[bisect(ring, (point, "")) % len(ring)], point) for point in points]
        return min(following, key=lambda found: (found[0][0] - found[1]) % self._ROUND)[0][1]


def session_token_of(headers: Mapping[str, bytes]) -> str:
    """The session token in a request's headers. '' if it is malformed: affinity is a preference, so no
    request is refused for it."""
    raw = headers.get(SESSION_HEADER, b"").strip()
    return raw.decode() if len(raw) == LENGTH and raw.isalnum() else ""


def with_in_flight(scorers: Mapping[str, float]) -> dict[str, float]:
    """`scorers` (name -> weight) and the load in flight among them: without it replicas would all pick the
    same endpoint at once."""
    return {IN_FLIGHT: _IN_FLIGHT_WEIGHT, **scorers}


class ScoringChooser:
    """Ranks by the configured scorers over what this replica knows of all endpoints. One event loop.

    Without a scheduler it leaves the choice to the script, as `LeastLoadedChooser` does. `readings` gives the
    scraped metrics, `in_flight` the fleet's requests by endpoint as last read. `routes` gets the routes and
    completions while a scorer needs those of all replicas. `adapters` are names of LoRA adapters besides
    those in the readings. `latency_weights` are those of the scorer `latency`. `needs_prefix_hashes` says
    whether a scorer needs the hashes of prompts.
    """

    def __init__(
        self,
        scheduler: Scheduler | None,
        endpoints: SnapshotCell,
        *,
        readings: Callable[[], Readings],
        in_flight: Callable[[], Mapping[str, int]],
        index: PrefixIndex,
        latencies: LatencyTracker,
        routes: "RouteStream | None",
        clock: Callable[[], float],
        adapters: Collection[str] = (),
        latency_weights: LatencyWeights = DEFAULT_LATENCY_WEIGHTS,
        sessions: SessionTokens | None = None,
        fallbacks: int = 0,
    ) -> None:
        self._index, self._fallbacks = index, fallbacks
        self._latency_weights = latency_weights
        self._routes = routes
        self._sessions = sessions or SessionTokens(Keyring(), endpoints)
        self._session_keys, self._endpoints = SessionKeys(endpoints), endpoints
        self._explanations = ExplanationCache()
        self._least_loaded = LeastLoadedChooser(endpoints, in_flight, self._explanations)
        self._in_flight = in_flight
        self._routes_needed = asyncio.Event()
        self._states = EndpointStates(
            endpoints,
            readings=readings,
            in_flight=in_flight,
            latencies=latencies,
            index=index,
            clock=clock,
            adapters=adapters,
        )
        # Choices from the states `_drawn_from`, by what they depend on: at most `_DRAWS` of a kind.
        self._drawn: dict[tuple[object, ...], list[Choice]] = {}
        self._drawn_from: Sequence[EndpointState] = ()
        self.use_scheduler(scheduler)

    def use_scheduler(self, scheduler: Scheduler | None) -> None:
        """Rank by `scheduler` from now on; None leaves the choice to the script."""
        self._scheduler = scheduler
        self._drawn_from = ()
        weights = scheduler.weights if scheduler is not None else {}
        self.live_weight = scheduler.live_weight if scheduler is not None else 0.0
        self.needs_prefix_hashes = "prefix-affinity" in weights
        self._gives_tokens = "session-affinity" in weights
        self._shares_routes = not _ROUTE_SCORERS.isdisjoint(weights)
        self._shares_completions = "latency" in weights
        if self._shares_routes:
            self._routes_needed.set()

    async def routes_needed(self) -> None:
        """Wait, without a deadline, until a scorer needs what other replicas routed."""
        await self._routes_needed.wait()

    def choose(self, request: InferenceRequest) -> Choice:
        if request.origin and self._is_able(request, request.origin):
            known = LeastLoadedPick(
                self._endpoints.current.endpoints,
                self._in_flight(),
                (request.origin,),
                request.selector,
                request.origin,
                has_state=True,
            )
            return Choice(request.origin, known)
        if self._scheduler is None:
            return self._least_loaded.choose(request)
        states = self._states
        states.refresh()
        session_endpoint = ""
        if request.session:
            session_endpoint = self.session_endpoint(request.session, request.subset, request.selector)
        looked_at = states.looked_at(request, session_endpoint)
        among = [state.address for state in looked_at] if states.samples else None
        pick = PickRequest(
            subset=None if request.subset is None else frozenset(request.subset),
            adapter=request.target_model if request.target_model in states.adapters else "",
            selector=request.selector,
            session_endpoint=session_endpoint,
            prefix_blocks=len(request.prefix),
            prefix_matches=self._index.match(request.prefix, among),
            latency_weights=self._latency_weights,
        )
        drawn: list[Choice] = []
        if looked_at is states.common and self._scheduler.can_share(pick) and not request.limit:
            drawn = self._drawn_for(pick, looked_at)
            if len(drawn) == _DRAWS:
                return drawn[int(random.random() * _DRAWS)]
        if request.limit:
            limit = len(looked_at)  # a limit per endpoint may leave only candidates that rank low
        else:
            limit = max(_MAX_OF_A_SAMPLE if states.samples else _MAX_SCORED, 1 + self._fallbacks)
        ranking = self._scheduler.rank(pick, looked_at, limit=limit)
        choice = Choice(",".join(f"{best.address}={best.base:.4f}" for best in ranking.best), ranking)
        drawn.append(choice)
        return choice

    def _is_able(self, request: InferenceRequest, address: str) -> bool:
        """Whether the endpoint takes requests, and this one may go there."""
        if request.subset is not None and address not in request.subset:
            return False
        known, wanted = self._endpoints.current.endpoints, request.selector.items()
        return any(e.address == address and e.ready and wanted <= e.labels.items() for e in known)

    def session_endpoint(
        self, session: str, subset: tuple[str, ...] | None, selector: Mapping[str, str] | None = None
    ) -> str:
        if not self._gives_tokens:
            return ""
        if session[0] == KEY_MARK:
            return self._session_keys.endpoint_of(session, subset, selector)
        return self._sessions.endpoint_of(session)

    def _drawn_for(self, pick: PickRequest, looked_at: Sequence[EndpointState]) -> list[Choice]:
        """The choices that were made from these states for requests like `pick`."""
        if looked_at is not self._drawn_from:
            self._drawn, self._drawn_from = {}, looked_at
        matches = pick.prefix_matches
        likeness = pick.adapter, pick.session_endpoint, pick.prefix_blocks if matches else 0, *matches.items()
        return self._drawn.setdefault(likeness, [])

    def unscored(self, request: InferenceRequest) -> Choice:
        return self._least_loaded.choose(request)

    def placed(
        self, request: InferenceRequest, choice: Choice, endpoints: tuple[str, ...], live: str = ""
    ) -> None:
        self._explanations.add(request.id, choice.basis, endpoints, live)
        if self._routes is not None and self._shares_routes and request.prefix:
            self._routes.add_route(endpoints[0], request.prefix)

    def refused(self, request: InferenceRequest, choice: Choice) -> None:
        self._explanations.add(request.id, choice.basis, ())

    def ended(self, completion: Completion) -> None:
        if not self._shares_completions or self._routes is None:
            return
        if completion.outcome is not Outcome.COMPLETED:
            return
        if not 200 <= completion.status < 300:
            return  # a refusal is quick, and says nothing about how long answers take
        # Without the wait in our own queue, which says nothing about the endpoint.
        seconds = completion.duration_s if completion.service_s is None else completion.service_s
        if completion.served and seconds is not None:
            self._routes.add_completion(completion.served, seconds)

    def session_token(self, endpoint: str) -> str:
        return self._sessions.token_of(endpoint) if self._gives_tokens else ""

    def explain(self, request_id: str) -> Explanation | None:
        return self._explanations.get(request_id)

    def scores(self) -> Mapping[str, Mapping[str, float]]:
        """What each scorer gives each eligible endpoint (`ip:port` -> scorer -> 0 to 1) for a request without
        any preference; `total` is the weighted sum."""
        if self._scheduler is None:
            return {}
        self._states.refresh()
        pick = PickRequest(latency_weights=self._latency_weights)
        ranking = self._scheduler.rank(pick, self._states.everything(), limit=0)
        columns = {**ranking.parts, "total": ranking.totals}
        return {
            endpoint.address: {name: scores[at] for name, scores in columns.items()}
            for at, endpoint in enumerate(ranking.eligible)
        }
