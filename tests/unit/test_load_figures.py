"""Percentiles and fair shares of `picker load`."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker_fleet.request import Band
from picker_tools.load.result import fair, quantile, quantiles
from picker_tools.load.scenarios import Source


def test_a_quantile_is_one_of_the_values() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [quantile(values, part) for part in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert quantile([7.0], 0.5) == 7
    assert math.isnan(quantile([], 0.5))
    assert quantiles([]) == {}
    assert quantiles([3, 1, 2]) == {"p50": 2, "p90": 3, "p95": 3, "p99": 3, "max": 3}


def test_a_flow_gets_at_most_its_demand_and_others_share_the_rest() -> None:
    # Flow a asks for little, c weighs twice as much as b.
    sources = (
        Source("small", 1, "small"),
        Source("big", 1, "big"),
        Source("heavy", 1, "heavy", weight=2.0),
    )
    due = fair(sources, {"small": 10, "big": 200, "heavy": 200}, 100)
    assert due == pytest.approx({"small": 10, "big": 30, "heavy": 60})


def test_a_higher_band_comes_first() -> None:
    sources = (
        Source("critical", 1, "critical", band=Band.CRITICAL),
        Source("default", 1, "default"),
        Source("sheddable", 1, "sheddable", band=Band.SHEDDABLE),
    )
    due = fair(sources, {"critical": 60, "default": 60, "sheddable": 60}, 100)
    assert due == pytest.approx({"critical": 60, "default": 40, "sheddable": 0})


@given(
    demand=st.lists(st.floats(0, 1000), min_size=1, max_size=6),
    weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=6, max_size=6),
    part=st.floats(0, 1),
)
def test_fair_parts_exceed_neither_demand_nor_service(
    demand: list[float], weights: list[float], part: float
) -> None:
    sources = [Source(f"f{place}", 1, f"f{place}", weight=weights[place]) for place in range(len(demand))]
    asked = {source.flow: amount for source, amount in zip(sources, demand, strict=True)}
    served = part * sum(demand)
    due = fair(sources, asked, served)
    assert all(due[flow] <= asked[flow] + 1e-6 for flow in due)
    assert sum(due.values()) == pytest.approx(served, abs=1e-6)
