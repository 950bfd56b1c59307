"""Percentiles and shares. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence

from picker_tools.load.scenario import Source

QUANTILES = (0.5, 0.9, 0.95, 0.99)


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest of `values` (sorted) that `part` of them do not exceed (nearest rank); NaN of none."""
    if not values:
        return math.nan
    return values[max(0, math.ceil(part * len(values)) - 1)]


def quantiles(values: Iterable[float]) -> dict[str, float]:
    """p50, p90, p95, p99 and max of `values`, in seconds as they come; empty if there are none."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {f"p{100 * part:g}": quantile(ordered, part) for part in QUANTILES} | {"max": ordered[-1]}


def mean(values: Sequence[float]) -> float:
    """NaN of none."""
    return sum(values) / len(values) if values else math.nan


def fair(sources: Sequence[Source], demand: Mapping[str, float], served: float) -> dict[str, float]:
    """What each flow was due of `served`, by flow: the higher band first, in a band by weight, and nobody
    more than its `demand` (max-min fairness; what one does not want, the others share).
    """
    due = dict.fromkeys(demand, 0.0)
    for band in sorted({source.band for source in sources}):
        weights = {source.flow: source.weight for source in sources if source.band == band}
        got = _filled({flow: demand.get(flow, 0.0) for flow in weights}, weights, served)
        due |= got
        served -= sum(got.values())
    return due


def _filled(demand: Mapping[str, float], weights: Mapping[str, float], amount: float) -> dict[str, float]:
    """`amount` poured over flows of such weights, each up to its demand."""
    got: dict[str, float] = {}
    open_flows = set(demand)
    while open_flows:
        level = max(0.0, amount - sum(got.values())) / sum(weights[flow] for flow in open_flows)
        full = {flow for flow in open_flows if demand[flow] <= level * weights[flow] * (1 + 1e-12)}
        if not full:
            return got | {flow: level * weights[flow] for flow in open_flows}
        got |= {flow: demand[flow] for flow in full}
        open_flows -= full
    return got
