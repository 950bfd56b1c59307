"""Weights, costs and tags stay within what the arithmetic of the queue bears, whoever has let in what."""

import math

import pytest
from packed import doubles
from script_fleet import Fleet, OpenFleet

from picker_fleet.admission import tuning
from picker_fleet.config import parse
from picker_fleet.errors import ConfigError

HUGE = 1e308


async def order(it: Fleet, waiting: int) -> list[str]:
    """Who is served next, one after the other, once `running` ends; each is placed and ends at once."""
    (a,) = it.replicas
    served: list[str] = []
    await a.settle("running")
    for _ in range(waiting):
        await a.sweep()
        name = a.news[-1][1]
        served.append(name)
        await a.place(name)
        await a.settle(name)
    return served


async def serve(it: Fleet, turns: int) -> list[str]:
    """So many who are granted one after the other; each is placed and ends at once."""
    (a,) = it.replicas
    served = []
    for _ in range(turns):
        served.append(a.news[-1][1])
        await a.place(served[-1])
        await a.settle(served[-1])
    return served


@pytest.mark.parametrize("weight", [1e-308, 1e-12, HUGE])
async def test_given_a_weight_out_of_bounds_when_others_wait_then_tags_stay_finite_and_turns_are_taken(
    fleet: OpenFleet, weight: float
) -> None:
    # Given a flow whose weight an older version or nobody has checked, and one beside it
    async with fleet("a", upper_per=1, lower_per=1, weights={"bad": weight}) as it:
        (a,) = it.replicas
        await a.admit("running")
        for number in range(2):
            await a.admit(f"bad {number}", flow="bad")
            await a.admit(f"good {number}", flow="good")
        # When all are served
        served = await order(it, 4)
        # Then each was, in its flow's order, and every tag is a number
        assert [name for name in served if name.startswith("good")] == ["good 0", "good 1"]
        assert len(served) == 4
        tags = await it.redis.zrange(it.keys.prefix + "finish:1", 0, -1, withscores=True)
        assert all(math.isfinite(tag) for _, tag in tags)


async def test_given_tags_that_are_infinite_already_when_the_sweep_comes_then_flows_take_turns_again(
    fleet: OpenFleet,
) -> None:
    async with fleet("a", upper_per=1, lower_per=1) as it:
        (a,) = it.replicas
        await a.admit("running")
        for number in range(2):
            for flow in ("a", "z"):
                await a.admit(f"{flow} {number}", flow=flow)
        # Given tags as a weight of 1e-308 left them, by which flows were served by name
        for kind in ("flows:1", "finish:1"):
            await it.redis.zadd(it.keys.prefix + kind, {"a": math.inf, "z": math.inf, "idle": -math.inf})
        await it.redis.zrem(it.keys.prefix + "flows:1", "idle")
        # When the sweep has come by
        await a.sweep()
        # Then they take turns
        assert await order(it, 4) == ["a 0", "z 0", "a 1", "z 1"]
        for kind in ("flows:1", "finish:1"):
            scores = await it.redis.zrange(it.keys.prefix + kind, 0, -1, withscores=True)
            assert all(math.isfinite(tag) for _, tag in scores)
        packed = await it.redis.hget(it.keys.pool, "counters")
        assert all(math.isfinite(number) for number in doubles(packed))


async def test_given_virtual_time_that_has_come_far_when_it_is_swept_then_heavy_flows_have_their_shares_again(
    fleet: OpenFleet,
) -> None:
    async with fleet("a", upper_per=1, lower_per=1) as it:
        (a,) = it.replicas
        # Given turns of the lightest flow that there may be, of the dearest requests, and one that waits
        await a.admit("running")
        for number in range(3):
            await a.admit(f"light {number}", flow="light", weight=1e-3, cost=1e9)
        await a.settle("running")
        await serve(it, 1)
        # Then a turn of the heaviest is less than what a sum of such numbers shows
        assert (await it.state())["virtual_times"]["Default"] == 1e12
        assert 1e12 + 1e-6 == 1e12
        await a.sweep()
        assert (await it.state())["virtual_times"]["Default"] == 2**20
        # When two of the heaviest wait, one of half the weight
        for number in range(40):
            await a.admit(f"half {number}", flow="half", weight=5e5)
            await a.admit(f"whole {number}", flow="whole", weight=1e6)
        # Then they have their shares, to one turn in a hundred, and the light one its turn after them
        assert await serve(it, 1) == ["light 1"]
        served = await serve(it, 60)
        assert [sum(name.startswith(flow) for name in served) for flow in ("half", "whole", "light")] == [
            20, 40, 0,
        ]  # fmt: skip


@pytest.mark.parametrize("weight", [1e-308, 9e-4, 2e6, HUGE, math.inf, math.nan])
def test_weights_out_of_bounds_are_refused_in_the_configuration_and_live(weight: float) -> None:
    for section in ("models", "objectives"):
        with pytest.raises(ConfigError, match="weight"):
            parse({section: [{"name": "x", "weight": weight}]})
    with pytest.raises(ConfigError, match="weight"):
        parse({"fair_request_queue": {"band_weights": {"Default": weight}}})
    with pytest.raises(ConfigError, match="gold: must be a number from"):
        tuning.applied(parse({}), {"weights.gold": weight})


def test_bounds_beyond_what_the_stock_can_count_are_refused() -> None:
    with pytest.raises(ConfigError, match="watermark_per_backend"):
        parse({"request_queue_controller": {"watermark_per_backend": 1e10}})
