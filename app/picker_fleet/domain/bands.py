"""Bands and policies of the queue, which decide how requests of each priority are treated. Pure.

A priority is any int32; the highest is served first. Three bands always exist, named after the criticalities
of spec 003; a configuration may add others. The band of any other priority is made on first use, with the
attributes of the nearest configured band at or below the priority, or else of the lowest band.
"""

import enum
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

# The band policies and flow policies, named as in the configuration.
Fairness = Literal["weighted-fair", "round-robin", "none"]
Ordering = Literal["fcfs", "edf", "workload-aware"]
Overload = Literal["preempt", "reject-noncritical"]
BandPolicy = Literal["strict", "weighted"]
WaitSignal = Literal["request", "workload_average"]

LEAST_PRIORITY, MOST_PRIORITY = -(2**31), 2**31 - 1
_INTEGER = re.compile(r"[+-]?[0-9]{1,10}")
_MOST_REMEMBERED = 1000  # maximum bands in the cache, since objectives may use any number of priorities


class Criticality(enum.StrEnum):
    """The names of the three bands, the highest first."""

    CRITICAL = "Critical"
    DEFAULT = "Default"
    SHEDDABLE = "Sheddable"

    @classmethod
    def parse(cls, value: object) -> "Criticality":
        """The criticality named `value`, in upper or lower case.

        Raises:
            ValueError: no criticality has the name `value`.
        """
        try:
            return cls(str(value).capitalize())
        except ValueError:
            names = ", ".join(cls)
            raise ValueError(f"{str(value)[:40]!r} is no criticality; valid: {names}") from None


@dataclass(frozen=True, slots=True)
class Band:
    """The band of one priority. Configurations, metrics and the API use its `name`.

    `weight` is the band's share under `band_policy: weighted`. In a full queue, requests of a `preemptible`
    band make room for requests of higher bands. Requests of a `guaranteed` band are not refused because of
    the number of waiting flows, nor because of their criticality. At most `capacity` requests wait in the
    band, with bodies of at most `bytes` bytes in total; None: no limit. `criticality` names the nearest of
    the three bands named after criticalities; `is_named` is True for the three named bands.
    """

    CRITICAL: ClassVar["Band"]
    DEFAULT: ClassVar["Band"]
    SHEDDABLE: ClassVar["Band"]

    priority: int
    name: str
    weight: float
    preemptible: bool
    guaranteed: bool
    criticality: Criticality
    capacity: int | None = None
    bytes: int | None = None
    is_named: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_named", self.name == self.criticality)


Band.CRITICAL = Band(10, "Critical", 70.0, False, True, Criticality.CRITICAL)
Band.DEFAULT = Band(0, "Default", 20.0, True, False, Criticality.DEFAULT)
Band.SHEDDABLE = Band(-10, "Sheddable", 10.0, True, False, Criticality.SHEDDABLE)
NAMED = (Band.CRITICAL, Band.DEFAULT, Band.SHEDDABLE)


class Bands:
    """Finds the band of any priority. `configured` includes the three named bands, without duplicates."""

    def __init__(self, configured: Iterable[Band] = NAMED) -> None:
        self._configured = tuple(sorted(configured, key=lambda band: -band.priority))
        self._by_priority = {band.priority: band for band in self._configured}
        self._by_name = {band.name: band for band in self._configured}

    def __iter__(self) -> Iterator[Band]:
        """Iterate over the configured bands, highest priority first."""
        return iter(self._configured)

    def of(self, priority: int) -> Band:
        band = self._by_priority.get(priority)
        return band if band is not None else self._made(priority)

    def named(self, criticality: Criticality) -> Band:
        """The band named after `criticality`."""
        return self._by_name[criticality]

    def find(self, name: str) -> Band | None:
        """The configured band called `name`, or the band of the priority that `name` spells in decimal."""
        found = self._by_name.get(name) or self._by_name.get(name.capitalize())
        if found is not None or not _INTEGER.fullmatch(name):
            return found
        priority = int(name)
        return self.of(priority) if LEAST_PRIORITY <= priority <= MOST_PRIORITY else None

    def _made(self, priority: int) -> Band:
        like = nearest(self._configured, priority)
        named = (band for band in self._configured if band.is_named)
        criticality = nearest(named, priority).criticality
        band = replace(like, priority=priority, name=str(priority), criticality=criticality)
        if len(self._by_priority) >= _MOST_REMEMBERED:
            self._by_priority = {each.priority: each for each in self._configured}
        self._by_priority[priority] = band
        return band


def nearest(bands: Iterable[Band], priority: int) -> Band:
    """The highest of `bands` at or below `priority`, or else the lowest of `bands`."""
    found = sorted(bands, key=lambda band: -band.priority)
    return next((band for band in found if band.priority <= priority), found[-1])
