"""How often pages are read: as often as they are used, at a hundredth of either side's time at most."""

import pytest

from picker_fleet.endpoints.scraper import PROBE_S, IntervalPolicy, ScrapeCost


def cost(page_s: float, probe_s: float = 0.0, read_s: float = 0.0) -> ScrapeCost:
    """Of pages that came after `page_s` at best, now and then later."""
    made = ScrapeCost()
    for late_s in (0.0, 0.5, 2.0):
        made.add_page(page_s + late_s, read_s)
        made.add_probe(probe_s + late_s)
    return made


@pytest.mark.parametrize(
    ("page", "owned", "used", "expected_s"),
    [
        (ScrapeCost(), 1, True, 0.1),  # nothing is known of it yet
        (ScrapeCost(), 1, False, 5.0),  # for views and health only
        (cost(0.0005), 1, True, 0.1),
        (cost(0.008), 1, True, 0.8),  # a real vLLM: 8 ms of its API server
        (cost(0.028, probe_s=0.020), 1, True, 0.8),  # the same, 20 ms away
        (cost(0.008), 1, False, 5.0),
        (cost(0.1), 1, False, 10.0),
        (cost(0.0, read_s=0.0003), 10, True, 0.5),  # 10 pages of 0.5 ms of this replica
        (cost(2.0), 1, True, 30.0),  # the longest
    ],
)
def test_the_interval_follows_use_and_cost(
    page: ScrapeCost, owned: int, used: bool, expected_s: float
) -> None:
    assert IntervalPolicy(None, lambda: used).interval_s(page, owned) == pytest.approx(expected_s)


def test_a_configured_interval_is_kept_whatever_a_page_costs() -> None:
    assert IntervalPolicy(0.05, lambda: False).interval_s(cost(2.0), 100) == 0.05


def test_pages_of_suspects_are_read_sooner_at_the_same_share() -> None:
    unused = IntervalPolicy(None, lambda: False)
    assert unused.interval_s(cost(0.001), 1, suspect=True) == 0.25
    assert unused.interval_s(cost(0.008), 1, suspect=True) == pytest.approx(0.8)


def test_signs_of_life_stay_frequent_until_there_are_too_many_endpoints() -> None:
    pacing = IntervalPolicy(None, lambda: True)
    assert [pacing.tick_s(5.0, owned) for owned in (1, 10, 100)] == [PROBE_S, PROBE_S, pytest.approx(1.0)]
    assert pacing.tick_s(0.1, 1) == 0.1  # the pages themselves are signs of life
