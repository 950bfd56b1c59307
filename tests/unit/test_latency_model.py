"""Predictions of TTFT and TPOT: on a queueing model of engines, and on arbitrary observations."""

import math
import random
from collections.abc import Iterator
from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from picker_fleet.scheduling.latency_model import (
    MIN_OBSERVATIONS,
    UNKNOWN,
    Forecast,
    LatencyModel,
    Load,
    PrefillBacklogs,
)

MODEL, FAST, SLOW = "llama", ("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"), "10.0.0.4:8000"


class Engines:
    """Engines that prefill prompts first come first served, and decode slower the more requests run.

    `slow` multiplies the times of the endpoint SLOW; `speed` multiplies all times.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.now_s, self.slow, self.speed = 0.0, 1.0, 1.0
        self.model = LatencyModel()
        self._backlogs = PrefillBacklogs()
        self._prefilled_s = dict.fromkeys((*FAST, SLOW), 0.0)  # time when the endpoint's last prefill ends
        self._ends_s: dict[str, list[float]] = {address: [] for address in (*FAST, SLOW)}

    def load(self, address: str, tokens: float) -> Load:
        self._ends_s[address] = [end_s for end_s in self._ends_s[address] if end_s > self.now_s]
        return Load(tokens + self._backlogs.tokens(address, self.now_s), len(self._ends_s[address]), 0.5)

    def requests(self, count: int) -> Iterator[tuple[str, Forecast, float, float]]:
        """Place `count` requests; yields address, forecast, TTFT and TPOT of each, and then learns the
        times."""
        draw = self._random
        for _ in range(count):
            self.now_s += draw.expovariate(12.0)
            address = draw.choice((*FAST, SLOW))
            tokens = draw.lognormvariate(6.0, 0.8)
            load = self.load(address, tokens)
            forecast = self.model.forecast(MODEL, address, load)
            speed = self.speed * (self.slow if address == SLOW else 1.0)
            step_s = speed * (0.03 + 0.001 * load.in_flight) * draw.lognormvariate(0.0, 0.1)
            begin_s = max(self.now_s, self._prefilled_s[address])
            self._prefilled_s[address] = begin_s + speed * 1e-4 * tokens
            ttft_s = self._prefilled_s[address] - self.now_s + step_s
            tpot_s = step_s * draw.lognormvariate(0.0, 0.1)
            self._ends_s[address].append(self.now_s + ttft_s + 100 * tpot_s)
            if forecast.ttft is not None:
                self._backlogs.add(address, tokens, forecast.ttft.median_s, self.now_s)
            yield address, forecast, ttft_s, tpot_s
            self.model.learn(MODEL, address, load, ttft_s, tpot_s, self.now_s)


def test_a_model_is_learnt_anew_after_a_minute_without_observations() -> None:
    engines = Engines(1)
    list(engines.requests(400))
    engines.now_s += 61.0
    seen = [forecast for _, forecast, _, _ in engines.requests(MIN_OBSERVATIONS)]
    assert seen[1:] == [UNKNOWN] * (MIN_OBSERVATIONS - 1)


def test_predictions_are_good_after_500_requests_and_again_after_engines_change() -> None:
    for seed in range(3):
        engines = Engines(seed)
        before = [forecast for _, forecast, _, _ in engines.requests(MIN_OBSERVATIONS)]
        assert before == [UNKNOWN] * MIN_OBSERVATIONS, "no prediction without observations"
        list(engines.requests(500 - MIN_OBSERVATIONS))
        assert_good(list(engines.requests(500)))

        engines.slow = 3.0
        seen = [forecast for address, forecast, _, _ in engines.requests(120) if address == SLOW]
        assert len(seen) < 40
        met = Load(400, 8, 0.5)
        fast, slow = (engines.model.forecast(MODEL, address, met).tpot for address in (FAST[0], SLOW))
        assert fast is not None
        assert slow is not None
        assert slow.median_s > 2 * fast.median_s, "the slow endpoint is found"
        list(engines.requests(400))
        assert_good(list(engines.requests(500)))

        engines.speed = 0.5
        list(engines.requests(800))
        assert_good(list(engines.requests(500)))


def assert_good(requests: list[tuple[str, Forecast, float, float]]) -> None:
    for at, most_error in ((0, 0.15), (1, 0.15)):
        errors, covered = [], 0
        for _, forecast, *times in requests:
            prediction = forecast[at]
            assert prediction is not None
            errors.append(abs(prediction.median_s - times[at]) / times[at])
            covered += times[at] <= prediction.p90_s
        assert median(errors) <= most_error
        assert 0.85 <= covered / len(requests) <= 0.95


loads = st.builds(
    Load, st.floats(0, 1e7), st.integers(0, 2000).map(float), st.floats(0, 1), st.integers(0, 2000).map(float)
)
impossible = st.just(Load(math.inf, math.nan))
observations = st.tuples(st.sampled_from((*FAST, SLOW)), loads | impossible, st.floats(), st.floats())


@given(st.lists(observations, max_size=30), loads)
def test_after_any_observations_a_prediction_is_positive_and_grows_with_the_load(
    observed: list[tuple[str, Load, float, float]], load: Load
) -> None:
    models = LatencyModel(), LatencyModel()
    for _ in range(4):
        for address, met, ttft_s, tpot_s in observed:
            for model in models:
                model.learn(MODEL, address, met, ttft_s, tpot_s)

    higher = load._replace(in_flight=load.in_flight + 10)
    for at in (0, 1):
        found, again = (model.forecast(MODEL, SLOW, load)[at] for model in models)
        assert found == again
        more = models[0].forecast(MODEL, SLOW, higher)[at]
        at_limit = models[0].forecast_at(MODEL, SLOW, load.in_flight)[at]
        assert (at_limit is None) == (found is None)
        if found is not None and more is not None:
            assert 0.0 < found.median_s <= found.p90_s
            assert found.median_s <= more.median_s


def test_with_few_requests_in_flight_few_prompts_in_prefill_are_predicted() -> None:
    # In an overload many prompts wait for their prefill; under a lower limit they would wait in the queue.
    model, draw = LatencyModel(), random.Random(1)
    assert model.forecast_at(MODEL, SLOW, 2) == UNKNOWN
    for _ in range(400):
        others = float(draw.randint(10, 40))
        load = Load(200 + 250 * others * draw.uniform(0.9, 1.1), others, others / 50)
        model.learn(MODEL, SLOW, load, 0.03 + 1e-4 * load.prefill_tokens + 1e-3 * others, 0.01)

    few, many = (model.forecast_at(MODEL, SLOW, in_flight).ttft for in_flight in (2, 30))
    assert few is not None
    assert many is not None
    assert 0.03 <= few.median_s <= 0.15
    assert 0.6 <= many.median_s <= 1.0


def test_a_prefill_backlog_shrinks_steadily_to_zero() -> None:
    backlogs = PrefillBacklogs()
    backlogs.add(SLOW, 1000, 1.0, 0.0)
    backlogs.add(SLOW, 500, 1.5, 0.5)  # begins at 1.0 s, when the first prefill ends

    left = [round(backlogs.tokens(SLOW, now_s)) for now_s in (0.5, 1.0, 1.5, 2.0)]
    assert left == [1000, 500, 250, 0]
    assert backlogs.tokens(FAST[0], 0.5) == 0
