"""Which ends Redis cannot have seen: what a replica that goes by itself may count as free (G8)."""

import asyncio

import pytest
from script_backends import wire
from script_fleet import DEADLINE_S, OpenFleet, until

from picker_fleet.errors import StateUnavailable
from picker_fleet.request import Outcome


async def test_an_end_that_was_on_its_way_may_have_arrived_and_a_later_one_cannot(
    fleet: OpenFleet, redis_url: str
) -> None:
    async with (
        wire(redis_url) as between,
        fleet("a", through={"a": between.url}, silence_s=1.5) as it,
    ):
        (a,) = it.replicas
        await a.admit("r1")
        await a.admit("r2")
        # Given a server that takes everything and answers nothing, and an end that is on its way
        between.mute()
        first = a.store.settle("r1", Outcome.COMPLETED)
        deciding = asyncio.create_task(a.admit("r3"))
        await until(lambda: _is(a.store._link.waits and not a.store.unsent_ends()))
        # When another request ends, then only this end cannot be known there
        second = a.store.settle("r2", Outcome.COMPLETED)
        assert a.store.unsent_ends() == ["r2"]
        # And so it stays when the first one has been put back to be sent again
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(StateUnavailable):
                await deciding
        assert a.store.unsent_ends() == ["r2"]
        assert a.lost == ["silence"]
        # And when there is a new connection to a server that is as silent, though decisions go out on it
        lives = a.store.lives
        await until(lambda: _is(a.store.lives > lives))
        deciding = asyncio.create_task(a.admit("r4"))
        with pytest.raises(StateUnavailable):
            await deciding
        assert a.store.unsent_ends() == ["r2"]
        # When the server answers again, then it takes both
        between.unmute()
        async with asyncio.timeout(DEADLINE_S):
            assert [await first, await second] == ["settled llama"] * 2
        assert a.store.unsent_ends() == []
        for undecided in ("r3", "r4"):
            await a.store.cancel(undecided, 1, "cancelled")
        assert await it.at_rest()


async def _is(condition: bool) -> bool:
    return condition
