"""Applies the latency model to requests: forecasts for scores and refusals, and observations to learn from.

The fleet shares placements and observations through the stream of routes, so that all replicas predict
alike. A replica observes and shares nothing before the first call of `use`: a pool without latency objectives
pays nothing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from picker_fleet.domain.rates import Rates
from picker_fleet.domain.request import Completion, InferenceRequest, LatencyObjective
from picker_fleet.scheduling.endpoint_history import BLOCK_BYTES
from picker_fleet.scheduling.latency_model import MOST_GAP_S, Forecast, LatencyModel, Load, Prediction
from picker_fleet.scheduling.route_stream import ObservationRecord, RouteStream
from picker_fleet.scheduling.scorers import EndpointState
from picker_fleet.scheduling.splitting import StageTimes
from picker_fleet.state import accounting_token

BYTES_A_TOKEN: Final = 4  # the fit corrects this estimate, so only its ratio between requests matters
# A model's name with this prefix stands for the model's split requests; real names have no control
# characters. TTFT of split requests is learnt without the predicted wait at the decode endpoint.
_SPLIT: Final = "\x1f"
_SHORTEST_PREFILL_S = 1e-3  # a prefill's time if the predicted wait exceeds the time to the first token
_FEWEST_TOKENS = 8  # a shorter answer says little about the time per token
# Most observations a second that one replica shares, each at a cost of about 25 µs for every replica.
_OBSERVATIONS_A_SECOND: Final = 50.0


class MetLoads(NamedTuple):
    """The loads of a placed request's endpoint and prefill endpoint at the placement, for the latency model;
    None if its times are not to be learnt. Nine in ten requests like a split one have their first token
    within `prefill_s`, None if unknown."""

    decode: Load | None = None
    prefill: Load | None = None
    prefill_s: float | None = None


class Forecasts:
    """The forecasts and observations of one replica. One event loop.

    `routes` has the model and the prefill backlogs; `clock` is in seconds.
    """

    def __init__(self, routes: RouteStream, clock: Callable[[], float]) -> None:
        self._routes, self._clock = routes, clock
        self._rates = Rates(_OBSERVATIONS_A_SECOND, 2 * _OBSERVATIONS_A_SECOND, 1, clock)
        self.used = False

    def use(self) -> None:
        """From now on, observe requests and share the observations."""
        if not self.used:
            self.used = True
            self._routes.share()

    def are_current(self, model: str) -> bool:
        """Whether the fleet has observed a request of `model` recently."""
        return self._clock() - self._routes.model.learnt_s(model) <= MOST_GAP_S

    def of(
        self, request: InferenceRequest, states: Iterable[EndpointState], matches: Mapping[str, int]
    ) -> dict[str, Forecast]:
        """The forecast for `request` on each endpoint in `states`. `matches` has the number of the prompt's
        blocks that an endpoint has served."""
        return {
            state.address: self._forecast(request.model, state, _own_tokens(request, state, matches))
            for state in states
        }

    def placed(self, request: InferenceRequest, state: EndpointState, matches: Mapping[str, int]) -> MetLoads:
        """Count the prompt of `request`, which was placed on the endpoint in `state`. Returns the endpoint's
        load for this request, or no load if the answer is not streamed and thus shows no times."""
        load, _ = self._place(request.model, request, state, matches)
        return MetLoads(load) if request.stream else MetLoads()

    def of_split(
        self,
        request: InferenceRequest,
        decoders: Iterable[EndpointState],
        prefillers: Iterable[EndpointState],
        matches: Mapping[str, int],
    ) -> list[Forecast]:
        """The forecasts for `request` if one of `prefillers` computes its prompt, and the fastest of
        `decoders` writes the answer."""
        arrivals = [self._forecast(request.model, each) for each in decoders]
        known = (each.tpot for each in arrivals if each.tpot is not None)
        tpot = min(known, key=lambda prediction: prediction.median_s, default=None)
        wait_s = min(filter(None, map(_ttft_s, arrivals)), default=0.0)
        prefills = (
            self._forecast(_SPLIT + request.model, each, _own_tokens(request, each, matches)).ttft
            for each in prefillers
        )
        return [
            Forecast(ttft and Prediction(wait_s + ttft.median_s, wait_s + ttft.p90_s), tpot)
            for ttft in prefills
        ]

    def stage_times(
        self,
        request: InferenceRequest,
        decoder: EndpointState,
        prefiller: EndpointState,
        prefiller_decodes: EndpointState | None,
        matches: Mapping[str, int],
    ) -> StageTimes:
        """The predicted times of `request` on the endpoint of `decoder`, without and with `prefiller`.
        `prefiller_decodes` is the prefiller's state in the stage decode, None if it writes no answers."""
        whole, split = request.model, _SPLIT + request.model
        whole_s = _ttft_s(self._forecast(whole, decoder, _own_tokens(request, decoder, matches)))
        wait_s = _ttft_s(self._forecast(whole, decoder))
        prefill_s = _ttft_s(self._forecast(split, prefiller, _own_tokens(request, prefiller, matches)))
        # A fit with little variation hides a prompt's own time: take the longer time of both fits.
        own_s = max(whole_s - wait_s, prefill_s - _ttft_s(self._forecast(split, prefiller)))
        delayed_split = 0.0 if prefiller_decodes is None else _delayed(prefiller_decodes)
        split_s = wait_s + prefill_s if prefill_s else None
        return StageTimes(whole_s or None, split_s, own_s, _delayed(decoder), delayed_split)

    def placed_split(
        self,
        request: InferenceRequest,
        decoder: EndpointState,
        prefiller: EndpointState,
        matches: Mapping[str, int],
    ) -> MetLoads:
        """Like `placed`, but for a split request."""
        load, prefill = self._place(_SPLIT + request.model, request, prefiller, matches)
        prefill_s = prefill and prefill.p90_s + _ttft_s(self._forecast(request.model, decoder))
        met = MetLoads(prefill_s=prefill_s)
        return met._replace(decode=self._load(decoder), prefill=load) if request.stream else met

    def _place(
        self, model: str, request: InferenceRequest, state: EndpointState, matches: Mapping[str, int]
    ) -> tuple[Load, Prediction | None]:
        """Count the prompt of `request` on the endpoint in `state`. Returns the endpoint's load for this
        request, and the request's predicted time to the first token."""
        own_tokens = _own_tokens(request, state, matches)
        load = self._load(state, own_tokens)
        ttft = self._routes.model.forecast(model, state.address, load).ttft
        if ttft is not None:
            self._routes.add_placement(state.address, own_tokens, ttft.median_s)
        return load, ttft

    def learn(self, completion: Completion, token: str) -> None:
        """Share the times of a completed request; `token` is its accounting token."""
        load, address = accounting_token.load_of(token), accounting_token.endpoint_of(token)
        if len(load) != len(Load._fields) or completion.ttft_s is None or not completion.answered:
            return
        if completion.served not in (None, address) or self._rates.take():
            return
        self.use()
        tokens, tpot_s = completion.completion_tokens, 0.0
        if completion.service_s is not None and tokens is not None and tokens >= _FEWEST_TOKENS:
            tpot_s = max(completion.service_s - completion.ttft_s, 0.0) / (tokens - 1)
        model, ttft_s = accounting_token.model_of(token), completion.ttft_s
        prefiller, prefill_load = accounting_token.prefill_of(token)
        if prefiller:
            if len(prefill_load) == len(Load._fields):
                wait_s = _ttft_s(self._routes.model.forecast(model, address, Load(*load)))
                prefill_s = max(ttft_s - wait_s, _SHORTEST_PREFILL_S)
                self._routes.add(
                    ObservationRecord(prefiller, _SPLIT + model, Load(*prefill_load), prefill_s, 0.0)
                )
            ttft_s = 0.0  # 0: unknown, since the decode endpoint did not compute the prompt
        self._routes.add(ObservationRecord(address, model, Load(*load), ttft_s, tpot_s))

    def _forecast(self, model: str, state: EndpointState, own_tokens: float = 0.0) -> Forecast:
        return self._routes.model.forecast(model, state.address, self._load(state, own_tokens))

    def _load(self, state: EndpointState, own_tokens: float = 0.0) -> Load:
        """The load of the endpoint in `state` for a request of whose prompt it computes `own_tokens`."""
        return Load(
            own_tokens + self._routes.backlogs.tokens(state.address, self._clock()),
            state.in_flight,
            state.kv_utilisation or 0.0,
            state.waiting or 0.0,
        )


def _own_tokens(request: InferenceRequest, state: EndpointState, matches: Mapping[str, int]) -> float:
    """The tokens of the prompt that are not cached on the endpoint in `state`."""
    cached = matches.get(state.address, 0) * BLOCK_BYTES / max(request.body_bytes, 1)
    return (request.prompt_bytes or request.body_bytes) * max(1.0 - cached, 0.0) / BYTES_A_TOKEN


def _ttft_s(forecast: Forecast) -> float:
    """The predicted median of TTFT in seconds; 0 if unknown."""
    return 0.0 if forecast.ttft is None else forecast.ttft.median_s


def _delayed(state: EndpointState) -> float:
    """How many answers are delayed if the endpoint in `state` prefills a whole prompt, each by the prefill's
    time. The engine's page shows how many answers run. The other requests in flight wait for their prefill
    elsewhere, and on average arrive in the middle of this prefill: two of them count as one."""
    running = state.in_flight if state.running is None else min(state.running, state.in_flight)
    return (running + state.in_flight) / 2


def shortfall_s(objective: LatencyObjective, forecasts: Sequence[Forecast]) -> float | None:
    """Seconds by which the fastest endpoint's TTFT misses `objective`, if at every endpoint the request is
    more likely to miss `objective` than to keep it. None if an endpoint is unknown, or likely to keep it."""
    misses_s = []
    for forecast in forecasts:
        missed_s = [
            prediction.median_s - most_s
            for prediction, most_s in zip(forecast, objective, strict=True)
            if prediction is not None and prediction.median_s > most_s
        ]
        if not missed_s:
            return None
        misses_s.append(max(missed_s))
    return min(misses_s, default=None)


def broken_promise(
    latencies: LatencyModel,
    promised: Callable[[str], LatencyObjective],
    now_s: float,
    address: str,
    in_flight: float,
    *,
    prefill: bool = False,
) -> str:
    """Why the endpoint `address` would break a latency objective with `in_flight` requests in flight (with
    `prefill`: this many prompts to prefill for others), that is, for some model one request in ten would take
    longer than `promised`. '' if the endpoint keeps all objectives, or too little is known."""
    for model in latencies.current_models(now_s):
        if model.startswith(_SPLIT) is not prefill:
            continue
        forecast = latencies.forecast_at(model, address, in_flight)
        for name, prediction, most_s in zip(
            ("TTFT", "time per token"), forecast, promised(model.removeprefix(_SPLIT)), strict=True
        ):
            if prediction is not None and prediction.p90_s > most_s:
                return (
                    f"predicted {name} {prediction.p90_s * 1000:.0f} ms exceeds {most_s * 1000:.0f} ms "
                    f"at {in_flight:g} in flight"
                )
    return ""
