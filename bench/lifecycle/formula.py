"""Computes the cores that Valkey needs for a fleet, from a few measured parameters. All times are in µs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy

# Measured: the calls per second of a replica at rest (heartbeat with a read of the state, sweep, two pings),
# and the messages per second that a scraping replica publishes (endpoints/scraping.py).
_CALLS_A_REPLICA = 4
_PUBLISHED_A_SCRAPER = 2.5
_SCRAPERS = 8
_TOLD = 256  # maximum replicas in a reply of the scripts `state` and `view_replicas`
_SETTLE_DELAY_S = 0.002  # seconds that completions wait to share a call (state/batching.py)
_MAX_BATCH = 16


@dataclass(frozen=True, slots=True)
class Fleet:
    """Size and load of a fleet. If `queued`, every request waits in the queue. `dashboards` is the number of
    open dashboards."""

    replicas: int
    requests_per_s: float
    queued: bool = False
    dashboards: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """A measurement: the cores that Valkey used for `fleet`."""

    fleet: Fleet
    cores: float


@dataclass(frozen=True, slots=True)
class Formula:
    """The parameters (µs). `direct`, `waiting`: cost of a request, fixed and per call, when Valkey is busy.
    `dashboard`: cost of a dashboard per second, fixed and per replica in the reply. `told`: extra cost of
    reading the state, per replica in the reply. Fitted: `replica`, cost of a replica per second; `wake`,
    extra cost of a message to an idle Valkey; `calm`, messages/s at which half find Valkey idle."""

    direct: tuple[float, float]
    waiting: tuple[float, float]
    dashboard: tuple[float, float]
    told: float
    replica: float = 0.0
    wake: float = 0.0
    calm: float = 1.0

    def fitted(self, points: Sequence[Point]) -> "Formula":
        """A copy whose `replica`, `wake` and `calm` minimise the squared relative errors at `points`."""
        found = [self._fitted(points, calm) for calm in _CALM]
        return min(found, key=lambda each: sum((each.cores(p.fleet) / p.cores - 1) ** 2 for p in points))

    def _fitted(self, points: Sequence[Point], calm: float) -> "Formula":
        rows, wanted = [], []
        for point in points:
            fleet, us = point.fleet, point.cores * 1e6
            rows.append([fleet.replicas / us, _woken(fleet, calm) / us])
            wanted.append(1 - self._known_us(fleet) / us)
        replica, wake = _least_squares(rows, wanted)
        return replace(self, replica=replica, wake=wake, calm=calm)

    def request_us(self, fleet: Fleet) -> float:
        fixed, each = self.waiting if fleet.queued else self.direct
        return fixed + each * calls_a_request(fleet)

    def _known_us(self, fleet: Fleet) -> float:
        """Valkey's CPU per second in µs, without the fitted terms."""
        told = min(fleet.replicas, _TOLD)
        return (
            fleet.replicas * self.told * told
            + fleet.dashboards * (self.dashboard[0] + self.dashboard[1] * told)
            + fleet.requests_per_s * self.request_us(fleet)
        )

    def cores(self, fleet: Fleet) -> float:
        """The cores that Valkey needs for `fleet`. A result above 1: one Valkey is not enough."""
        fitted_us = fleet.replicas * self.replica + _woken(fleet, self.calm) * self.wake
        return (self._known_us(fleet) + fitted_us) / 1e6


_CALM = (15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0)


def _woken(fleet: Fleet, calm: float) -> float:
    """The number of messages per second that find Valkey idle."""
    count = messages(fleet)
    return count / (1 + count / calm)


def messages_a_second(replicas: int) -> float:
    """Messages per second on the channel of scraped metrics; each message reaches every replica."""
    return min(replicas, _SCRAPERS) * _PUBLISHED_A_SCRAPER


def messages(fleet: Fleet) -> float:
    """The messages per second that reach Valkey; two messages in direct succession count as one."""
    requests = fleet.requests_per_s * calls_a_request(fleet)
    return fleet.replicas * _CALLS_A_REPLICA + messages_a_second(fleet.replicas) + requests


def calls_a_request(fleet: Fleet) -> float:
    """Script calls per request: admission, part of a settling call, and placement if it was queued.

    Above some thousand requests/s per replica the result is too high, because admissions also share calls.
    """
    ends = 1 + _SETTLE_DELAY_S * fleet.requests_per_s / fleet.replicas
    return 1 + 1 / min(ends, _MAX_BATCH) + fleet.queued


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope of the line with the least squared relative errors at `points`."""
    fixed, each = _least_squares([[1 / y, x / y] for x, y in points], [1.0] * len(points))
    return fixed, each


def _least_squares(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    solution: list[float] = numpy.linalg.lstsq(rows, wanted)[0].tolist()
    return solution
