"""Cores of a Valkey by the size of a fleet: a formula of a few parameters. Times in µs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy

# Measured: what each replica sends a second at rest (heartbeat and at once a read of the state, a sweep, two
# pings), and what a replica that scrapes publishes (endpoints/scraping.py).
_CALLS_A_REPLICA = 4
_PUBLISHED_A_SCRAPER = 2.5
_SCRAPERS = 8
_TOLD = 256  # `state` and `view_replicas` tell of no more replicas
_SETTLE_DELAY_S = 0.002  # ends wait so long for others (state/batching.py)
_MAX_BATCH = 16


@dataclass(frozen=True, slots=True)
class Fleet:
    """`queued`: each request waits for its turn. `dashboards`: how many are open."""

    replicas: int
    requests_per_s: float
    queued: bool = False
    dashboards: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """A fleet, and the cores that it took of Valkey."""

    fleet: Fleet
    cores: float


@dataclass(frozen=True, slots=True)
class Formula:
    """`direct`, `waiting`: a request, fixed and for each call of it, when Valkey is busy. `dashboard`: a
    second of one, fixed and for each replica told of. `told`: what reading the state takes for each replica
    that it tells of. Fitted: `replica`, a second of one; `wake`, what a message takes more that finds Valkey
    idle, and its caches taken by others; `calm`, the messages a second of which half find it so."""

    direct: tuple[float, float]
    waiting: tuple[float, float]
    dashboard: tuple[float, float]
    told: float
    replica: float = 0.0
    wake: float = 0.0
    calm: float = 1.0

    def fitted(self, points: Sequence[Point]) -> "Formula":
        """With the other parameters of the least relative errors at `points`."""
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
        """Of a second, without what is fitted."""
        told = min(fleet.replicas, _TOLD)
        return (
            fleet.replicas * self.told * told
            + fleet.dashboards * (self.dashboard[0] + self.dashboard[1] * told)
            + fleet.requests_per_s * self.request_us(fleet)
        )

    def cores(self, fleet: Fleet) -> float:
        """Above 1 it does not fit."""
        fitted_us = fleet.replicas * self.replica + _woken(fleet, self.calm) * self.wake
        return (self._known_us(fleet) + fitted_us) / 1e6


_CALM = (15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0)


def _woken(fleet: Fleet, calm: float) -> float:
    """How many messages of a second find Valkey idle."""
    count = messages(fleet)
    return count / (1 + count / calm)


def messages_a_second(replicas: int) -> float:
    """On the channel of scraped figures; each reaches every replica."""
    return min(replicas, _SCRAPERS) * _PUBLISHED_A_SCRAPER


def messages(fleet: Fleet) -> float:
    """That reach Valkey in a second; what comes at once after another counts as one with it."""
    requests = fleet.requests_per_s * calls_a_request(fleet)
    return fleet.replicas * _CALLS_A_REPLICA + messages_a_second(fleet.replicas) + requests


def calls_a_request(fleet: Fleet) -> float:
    """Admissions go out at once, ends with those of the next 2 ms; a grant's placement is a call, too.

    Above some thousand requests a second of one replica admissions share calls, too: then it is less.
    """
    ends = 1 + _SETTLE_DELAY_S * fleet.requests_per_s / fleet.replicas
    return 1 + 1 / min(ends, _MAX_BATCH) + fleet.queued


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope of the least relative errors at `points`."""
    fixed, each = _least_squares([[1 / y, x / y] for x, y in points], [1.0] * len(points))
    return fixed, each


def _least_squares(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    solution: list[float] = numpy.linalg.lstsq(rows, wanted)[0].tolist()
    return solution
