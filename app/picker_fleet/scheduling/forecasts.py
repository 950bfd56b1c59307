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
from picker_fleet.scheduling.latency_model import Forecast, LatencyModel, Load, Prediction
from picker_fleet.scheduling.route_stream import ObservationRecord, RouteStream
from picker_fleet.scheduling.scorers import EndpointState
from picker_fleet.scheduling.splitting import StageTimes
from picker_fleet.state import accounting_token

_BYTES_A_TOKEN = 4  # the fit corrects this estimate, so only its ratio between requests matters
# Put before a model's name, which has no control characters: split requests of the model, whose times to the
# first token are those of their prefill endpoints.
_SPLIT: Final = "\x1f"
_FEWEST_TOKENS = 8  # a shorter answer says little about the time per token
# Most observations a second that one replica shares. Each costs every replica about 25 µs.
_OBSERVATIONS_A_SECOND: Final = 50.0


class MetLoads(NamedTuple):
    """The loads that a placed request met on its endpoint and on its prefill endpoint, for the latency model;
    None if nothing is to be learnt. Nine in ten requests like a split one have their first token within
    `prefill_s`, None if unknown."""

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

    def of(
        self, request: InferenceRequest, states: Iterable[EndpointState], matches: Mapping[str, int]
    ) -> dict[str, Forecast]:
        """The forecast for `request` on each endpoint in `states`. `matches` has the number of the prompt's
        blocks that an endpoint has served."""
        predict = self._routes.model.forecast
        return {
            state.address: predict(request.model, state.address, self._load(request, state, matches))
            for state in states
        }

    def placed(self, request: InferenceRequest, state: EndpointState, matches: Mapping[str, int]) -> MetLoads:
        """Count the prompt of `request`, which was placed on the endpoint in `state`. Returns the load that
        the request met; no load if its times say nothing, because its answer is not streamed."""
        load = self._load(request, state, matches)
        ttft = self._routes.model.forecast(request.model, state.address, load).ttft
        if ttft is not None:
            own = load.prefill_tokens - self._backlog(state.address)
            self._routes.add_placement(state.address, own, ttft.median_s)
        return MetLoads(load) if request.stream else MetLoads()

    def of_split(
        self,
        request: InferenceRequest,
        prefillers: Iterable[EndpointState],
        matches: Mapping[str, int],
        whole: Sequence[Forecast],
    ) -> list[Forecast]:
        """The forecasts for `request` if one of `prefillers` computes its prompt, and the fastest endpoint of
        those with the forecasts `whole` writes the answer."""
        known = (each.tpot for each in whole if each.tpot is not None)
        tpot = min(known, key=lambda prediction: prediction.median_s, default=None)
        return [
            Forecast(self._split_ttft(request, state, self._load(request, state, matches)), tpot)
            for state in prefillers
        ]

    def stage_times(
        self,
        request: InferenceRequest,
        decoder: EndpointState,
        prefiller: EndpointState,
        prefiller_decodes: EndpointState | None,
        matches: Mapping[str, int],
    ) -> StageTimes:
        """The predicted times of `request` on the endpoint of `decoder`, without and with `prefiller`, whose
        state in the decode stage is `prefiller_decodes`, None if it writes no answers."""
        whole_s, whole_own_s = self._time_and_own(request.model, request, decoder, matches)
        split_s, split_own_s = self._time_and_own(_SPLIT + request.model, request, prefiller, matches)
        # A fit that has seen little variation does not show a prompt's own time: take the longer one.
        own_s = max(whole_own_s, split_own_s)
        delayed_split = 0.0 if prefiller_decodes is None else _delayed(prefiller_decodes)
        return StageTimes(whole_s, split_s, own_s, _delayed(decoder), delayed_split)

    def _time_and_own(
        self, model: str, request: InferenceRequest, state: EndpointState, matches: Mapping[str, int]
    ) -> tuple[float | None, float]:
        """The predicted time to the first token, None if unknown, and the part that the prompt takes."""
        load = self._load(request, state, matches)
        rest = load._replace(prefill_tokens=self._backlog(state.address))
        whole, others = (
            self._routes.model.forecast(model, state.address, each).ttft for each in (load, rest)
        )
        if whole is None:
            return None, 0.0
        return whole.median_s, whole.median_s - (0.0 if others is None else others.median_s)

    def placed_split(
        self,
        request: InferenceRequest,
        decoder: EndpointState,
        prefiller: EndpointState,
        matches: Mapping[str, int],
    ) -> MetLoads:
        """As `placed`, of a split request."""
        load = self._load(request, prefiller, matches)
        ttft = self._split_ttft(request, prefiller, load)
        if ttft is not None:
            own = load.prefill_tokens - self._backlog(prefiller.address)
            self._routes.add_placement(prefiller.address, own, ttft.median_s)
        prefill_s = None if ttft is None else ttft.p90_s
        if not request.stream:
            return MetLoads(prefill_s=prefill_s)
        decode_load = self._load(request, decoder, matches)
        decode_load = decode_load._replace(prefill_tokens=self._backlog(decoder.address))
        return MetLoads(decode_load, load, prefill_s)

    def _split_ttft(
        self, request: InferenceRequest, prefiller: EndpointState, load: Load
    ) -> Prediction | None:
        return self._routes.model.forecast(_SPLIT + request.model, prefiller.address, load).ttft

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
                self._routes.add(
                    ObservationRecord(prefiller, _SPLIT + model, Load(*prefill_load), ttft_s, 0.0)
                )
            ttft_s = 0.0  # this time says nothing about the decode endpoint
        self._routes.add(ObservationRecord(address, model, Load(*load), ttft_s, tpot_s))

    def _load(self, request: InferenceRequest, state: EndpointState, matches: Mapping[str, int]) -> Load:
        cached_bytes = matches.get(state.address, 0) * BLOCK_BYTES
        return Load(
            max(request.body_bytes - cached_bytes, 0) / _BYTES_A_TOKEN + self._backlog(state.address),
            state.in_flight,
            state.kv_utilisation or 0.0,
            state.waiting or 0.0,
        )

    def _backlog(self, address: str) -> float:
        return self._routes.backlogs.tokens(address, self._clock())


def _delayed(state: EndpointState) -> float:
    """How many answers a prompt's whole prefill on the endpoint in `state` delays by its time. The engine's
    page tells how many run; other requests in flight wait for their prefill elsewhere, and arrive on average
    in the middle of this one: two of them count as one."""
    running = state.in_flight if state.running is None else min(state.running, state.in_flight)
    return (running + state.in_flight) / 2


def shortfall_s(objective: LatencyObjective, forecasts: Sequence[Forecast]) -> float | None:
    """Seconds by which the fastest endpoint's TTFT misses `objective`, if at every endpoint the request is
    more likely to miss `objective` than to keep it. None if an endpoint may keep it or is unknown."""
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
    address: str,
    in_flight: float,
    *,
    prefill: bool = False,
) -> str:
    """Why the endpoint `address` would break a latency objective with `in_flight` requests in flight, or, if
    `prefill`, with as many prompts to prefill for others: for some model, one request in ten would take
    longer than `promised` for it. '' if the endpoint keeps all objectives, or too little is known."""
    for model in latencies.models:
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
