"""Weights, costs and tags stay within what the arithmetic of the queue bears, whoever has let in what."""

import math

import pytest
from packed import doubles
from script_fleet import Fleet, OpenFleet

from app.admission import tuning
from app.config import parse
from app.errors import ConfigError

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
