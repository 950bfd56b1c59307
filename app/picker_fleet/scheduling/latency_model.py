"""Predicts the time to the first token (TTFT) and the time per output token (TPOT) of a request on an
endpoint, from the endpoint's load at the placement. Pure; the caller passes the time.

For each model and each of the two times, a linear model of the load is fitted online by weighted least
squares with exponential forgetting (Haykin, Adaptive Filter Theory, chapter on recursive least squares). The
weights minimise relative errors. A larger load never makes a request faster, so the coefficients are
non-negative (Franc, Hlaváč, Navara 2005, sequential coordinate-wise NNLS). Each endpoint has a factor, the
geometric mean of its own ratios of actual to fitted times, so that a slow endpoint is found within some
twenty requests. A decayed histogram of the ratios of actual to predicted times gives the quantiles.

The load's terms follow published models: prefill is bound by compute and takes time by prompt tokens, first
come first served, and a decode step takes time by batch size and KV cache (Vidur, Agrawal et al. 2024;
DistServe, Zhong et al. 2024). Prompts that wait for their prefill on the same endpoint explain most of the
variation of TTFT: on a simulated engine with mixed prompts the median error is 12 % with them, 36 % without.

All statistics are sums of earlier observations, and the result depends only on the sequence of observations
and its gaps: replicas that learn the same sequence predict alike.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from itertools import accumulate
from typing import Final, NamedTuple

MIN_OBSERVATIONS: Final = 50  # fewer observations of a model give no prediction
# After so many seconds without an observation, a model's predictions refuse no request and lower no limit,
# and learning begins anew: if all requests were refused, nothing would correct the predictions.
MOST_GAP_S: Final = 60.0
MAX_MODELS: Final = 64  # maximum models kept, the most recently observed

_TERMS = 5  # terms of the linear model: a constant and the fields of `Load`
_PREFILL, _IN_FLIGHT, _KV = 1, 2, 3  # positions of the terms prefill, in flight, KV cache
_FIT_EVERY = 8  # observations between two fits
_SWEEPS = 5  # maximum passes of a fit over the coefficients; a fit continues from the previous one
# The number of observations that a fit remembers grows (Ljung, System Identification, on recursive methods):
# the first ones are inexact, since waiting prompts are counted only once times are predicted.
_FIRST_MEMORY, _MEMORY_GROWTH, _MOST_MEMORY = 20.0, 1 / 3, 333.0
_FORGET_RATIOS = 0.99  # an observation's weight falls by this factor with each further observation
_FORGET_FACTOR = 0.95
_EVEN_ODDS = 2.0  # weight, in observations, of the assumption that an endpoint is as fast as the others
_MOST_GAIN = 1e9  # weights grow instead of shrinking the sums; at this weight the sums are scaled down
_MOST_RATIO = 8.0  # ratios of actual to predicted time are capped at this
_BINS_A_DOUBLING = 16
_ZERO_BIN = round(math.log2(_MOST_RATIO)) * _BINS_A_DOUBLING  # the bin of ratio 1
_MOST_TERM = 1e9
_LEAST_VARIANCE = 0.01  # least variance of the number in flight; below, the slope would be a rounding error
_SHORTEST_S, _LONGEST_S = 1e-5, 1e5
_MOST_PENDING = 4096


class Load(NamedTuple):
    """An endpoint's load when a request is placed there.

    `prefill_tokens` are the prompt tokens that the endpoint computes until the request's first token: its own
    without the cached prefix, and the tokens of earlier requests whose first token is still due. `in_flight`
    counts the fleet's requests on the endpoint. `kv_utilisation` (0 to 1) and `waiting`, the requests in the
    engine's own queue, are the last scraped figures, 0 if unknown.
    """

    prefill_tokens: float
    in_flight: float
    kv_utilisation: float = 0.0
    waiting: float = 0.0


class Prediction(NamedTuple):
    """A predicted time: half of such requests take less than `median_s`, nine in ten less than `p90_s`."""

    median_s: float
    p90_s: float


class Forecast(NamedTuple):
    """The predicted TTFT and TPOT of a request; None if too few requests of its model have been observed."""

    ttft: Prediction | None
    tpot: Prediction | None


UNKNOWN: Final = Forecast(None, None)


class LatencyModel:
    """The TTFT and TPOT of each model, learnt from completed requests. One event loop; no I/O."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, _Model] = OrderedDict()

    def learn(
        self, model: str, address: str, load: Load, ttft_s: float, tpot_s: float, now_s: float = 0.0
    ) -> None:
        """Add the times (s) of one request of `model` that was placed on `address` under `load`. `tpot_s` is
        0 if unknown. Ignores impossible values."""
        terms = (1.0, *load)
        if not all(0.0 <= term <= _MOST_TERM for term in terms):
            return
        known = self._models.pop(model, None)
        fits = known.fits if known and now_s - known.learnt_s <= MOST_GAP_S else (_Fit(), _Fit())
        self._models[model] = _Model(fits, now_s)
        if len(self._models) > MAX_MODELS:
            self._models.popitem(last=False)
        for fit, actual_s in zip(fits, (ttft_s, tpot_s), strict=True):
            if _SHORTEST_S <= actual_s <= _LONGEST_S:
                fit.add(address, terms, actual_s)

    def forecast(self, model: str, address: str, load: Load) -> Forecast:
        """The times that a request of `model` would take on `address` under `load`."""
        known = self._models.get(model)
        if known is None:
            return UNKNOWN
        terms = (1.0, *load)
        return Forecast(*(fit.predict(address, terms) for fit in known.fits))

    def forecast_at(self, model: str, address: str, in_flight: float) -> Forecast:
        """The times of a request of `model` if `address` had `in_flight` requests in flight, this one
        included, and none in its own queue. Assumes the usual prefills and KV cache for `in_flight`."""
        known = self._models.get(model)
        if known is None:
            return UNKNOWN
        others = max(in_flight - 1.0, 0.0)
        prefill_tokens, kv_utilisation = (known.fits[0].usual(field, others) for field in (_PREFILL, _KV))
        return self.forecast(model, address, Load(prefill_tokens, others, kv_utilisation))

    def current_models(self, now_s: float) -> Iterator[str]:
        """The models with recent observations; a model without recent observations is learnt anew."""
        return (name for name, known in self._models.items() if now_s - known.learnt_s <= MOST_GAP_S)

    def learnt_s(self, model: str) -> float:
        """When a request of `model` was last learnt; long ago if never."""
        known = self._models.get(model)
        return -math.inf if known is None else known.learnt_s

    def retain(self, addresses: Collection[str]) -> None:
        """Forget the factors of endpoints that are not in `addresses`."""
        for known in self._models.values():
            for fit in known.fits:
                fit.retain(addresses)


class _Fit:
    """The regression for TTFT or TPOT of one model.

    Each observation adds to the sums with the weight `_gain`, which grows by 1/forgetting each time. So the
    sums need not be scaled down to forget old observations.
    """

    def __init__(self) -> None:
        self._count = 0
        self._gain = 1.0
        self._products = [[0.0] * _TERMS for _ in range(_TERMS)]  # sum of weight · terms · terms'
        self._targets = [0.0] * _TERMS  # sum of weight · terms · actual
        self._coefficients = [0.0] * _TERMS
        self._factors: dict[str, tuple[float, float]] = {}  # address -> weight and sum of log ratios
        self._mean_log = 0.0  # mean over endpoints of the logarithms of their factors
        self._ratios = [0.0] * (2 * _ZERO_BIN + 1)  # weights of log ratios of actual to predicted times
        self._ratio_gain = 1.0
        self._median = self._p90 = 1.0  # quantiles of actual time / predicted time
        self._scales: dict[str, tuple[float, float]] = {}  # cache: address -> factor times each quantile

    def add(self, address: str, terms: tuple[float, ...], actual_s: float) -> None:
        fitted_s, factor = self._fitted_s(terms), self._factor(address)
        if fitted_s > 0.0:
            least, most = fitted_s * factor / _MOST_RATIO, fitted_s * factor * _MOST_RATIO
            actual_s = min(max(actual_s, least), most)
            self._note_ratio(actual_s / (fitted_s * factor))
            weight, logs = self._factors.get(address, (0.0, 0.0))
            log = math.log(actual_s / fitted_s)
            self._factors[address] = weight * _FORGET_FACTOR + 1.0, logs * _FORGET_FACTOR + log
            self._scales.pop(address, None)
        self._gain /= 1.0 - 1.0 / min(_FIRST_MEMORY + _MEMORY_GROWTH * self._count, _MOST_MEMORY)
        typical_s = actual_s / factor  # the time that a typical endpoint would have taken
        weight = self._gain / (fitted_s or typical_s) ** 2
        for row, term in enumerate(terms):
            weighted = weight * term
            self._targets[row] += weighted * typical_s
            products = self._products[row]
            for column, other in enumerate(terms):
                products[column] += weighted * other
        self._count += 1
        if self._count % _FIT_EVERY == 0:
            self._refit()

    def predict(self, address: str, terms: tuple[float, ...]) -> Prediction | None:
        fitted_s = self._fitted_s(terms)
        if self._count < MIN_OBSERVATIONS or fitted_s <= 0.0:
            return None
        scales = self._scales.get(address)
        if scales is None:
            factor = self._factor(address)
            scales = self._scales[address] = factor * self._median, factor * self._p90
        return Prediction(fitted_s * scales[0], fitted_s * scales[1])

    def usual(self, term: int, in_flight: float) -> float:
        """The usual value of a term at `in_flight` requests, by linear regression over the observations."""
        total = self._products[0][0]
        if not total:
            return 0.0
        mean = self._products[0][term] / total
        mean_in_flight = self._products[0][_IN_FLIGHT] / total
        variance = self._products[_IN_FLIGHT][_IN_FLIGHT] / total - mean_in_flight**2
        covariance = self._products[_IN_FLIGHT][term] / total - mean_in_flight * mean
        slope = covariance / variance if variance > _LEAST_VARIANCE else 0.0
        return max(mean + max(slope, 0.0) * (in_flight - mean_in_flight), 0.0)

    def retain(self, addresses: Collection[str]) -> None:
        for gone in self._factors.keys() - set(addresses):
            del self._factors[gone]
        self._scales = {}

    def _fitted_s(self, terms: tuple[float, ...]) -> float:
        a, b, c, d, e = self._coefficients
        return a + b * terms[1] + c * terms[2] + d * terms[3] + e * terms[4]

    def _factor(self, address: str) -> float:
        return math.exp(_log_factor(self._factors.get(address)) - self._mean_log)

    def _note_ratio(self, ratio: float) -> None:
        self._ratio_gain /= _FORGET_RATIOS
        self._ratios[_ZERO_BIN + round(math.log2(ratio) * _BINS_A_DOUBLING)] += self._ratio_gain

    def _refit(self) -> None:
        """Improve the coefficients by coordinate descent, and look up the quantiles."""
        if self._gain > _MOST_GAIN:
            self._targets = [target / self._gain for target in self._targets]
            self._products = [[product / self._gain for product in row] for row in self._products]
            self._gain = 1.0
        if self._ratio_gain > _MOST_GAIN:
            self._ratios = [weight / self._ratio_gain for weight in self._ratios]
            self._ratio_gain = 1.0
        self._scales = {}
        found = self._coefficients
        for _ in range(_SWEEPS):
            for at, (row, target) in enumerate(zip(self._products, self._targets, strict=True)):
                if row[at] > 0.0:
                    rest = target - sum(map(float.__mul__, row, found))
                    found[at] = max(0.0, found[at] + rest / row[at])
        self._mean_log = sum(map(_log_factor, self._factors.values())) / max(len(self._factors), 1)
        sums = list(accumulate(self._ratios))
        if sums[-1] > 0.0:
            self._median, self._p90 = self._quantile(sums, 0.5), self._quantile(sums, 0.9)

    def _quantile(self, sums: list[float], share: float) -> float:
        wanted = share * sums[-1]
        at = next(at for at, total in enumerate(sums) if total >= wanted)
        within = (wanted - (sums[at] - self._ratios[at])) / self._ratios[at]
        return float(2.0 ** ((at - 0.5 + within - _ZERO_BIN) / _BINS_A_DOUBLING))


class _Model(NamedTuple):
    """The fits of TTFT and TPOT, and the time of the last observation."""

    fits: tuple[_Fit, _Fit]
    learnt_s: float


def _log_factor(sums: tuple[float, float] | None) -> float:
    return 0.0 if sums is None else sums[1] / (sums[0] + _EVEN_ODDS)


class PrefillBacklogs:
    """For each endpoint, the tokens of placed prompts whose requests have no first token yet. Times are
    seconds."""

    def __init__(self) -> None:
        self._backlogs: dict[str, _Backlog] = {}

    def tokens(self, address: str, now_s: float) -> float:
        """The tokens that `address` still has to compute at `now_s`."""
        backlog = self._backlogs.get(address)
        return 0.0 if backlog is None else backlog.tokens(now_s)

    def add(self, address: str, tokens: float, ttft_s: float, now_s: float) -> None:
        """Add the prompt of a request placed at `now_s` whose first token is due `ttft_s` later."""
        backlog = self._backlogs.get(address)
        if backlog is None:
            backlog = self._backlogs[address] = _Backlog()
        backlog.add(tokens, ttft_s, now_s)

    def retain(self, addresses: Collection[str]) -> None:
        for gone in self._backlogs.keys() - set(addresses):
            del self._backlogs[gone]


class _Backlog:
    """The backlog of one endpoint.

    An engine prefills prompts in the order of their arrival. A prefill is assumed to begin when the previous
    one ends, and to end at the predicted time of the request's first token.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[float, float, float]] = deque()  # tokens, begin and end of the prefill
        self._tokens = 0.0  # sum over `_pending`

    def tokens(self, now_s: float) -> float:
        while self._pending and self._pending[0][2] <= now_s:
            self._tokens -= self._pending.popleft()[0]
        if not self._pending:
            self._tokens = 0.0  # drops rounding errors
            return 0.0
        tokens, begin_s, end_s = self._pending[0]
        done = max(now_s - begin_s, 0.0) / (end_s - begin_s)
        return self._tokens - tokens * done

    def add(self, tokens: float, ttft_s: float, now_s: float) -> None:
        begin_s = max(self._pending[-1][2], now_s) if self._pending else now_s
        end_s = max(begin_s, now_s + ttft_s)
        if end_s > begin_s and len(self._pending) < _MOST_PENDING:
            self._pending.append((tokens, begin_s, end_s))
            self._tokens += tokens
