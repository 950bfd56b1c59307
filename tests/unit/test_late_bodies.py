"""A place whose request's body has not ended yet: whose it is, with and without the shared state."""

import pytest
from local_requests import ask
from sturdy_bench import PULSE, Bench, eventually, watched

from picker_fleet.errors import StateUnavailable
from picker_fleet.failover import outage
from picker_fleet.failover.outage import Mode
from picker_fleet.request import Placement

LEASE_S = 15.0  # as configured by default


@pytest.mark.parametrize(
    ("answer", "own"),
    [("renewed", True), ("unknown", False), ("waiting", False)],
)
async def test_given_the_shared_state_when_asked_then_it_says_whose_the_place_is(
    answer: str, own: bool
) -> None:
    bench = Bench()
    placement = await bench.gate.admit(ask("r"), stream_owned=False)
    bench.store.renewing = answer
    assert await bench.gate.confirm("r", placement, 2.0) is own
    # And what is lost is not restored past the bound
    assert bench.store.notes == [""]


@pytest.mark.parametrize("age_s", [2.0, LEASE_S + 1.0])
async def test_given_a_shared_place_when_redis_is_away_then_it_is_kept_while_its_lease_lasts(
    age_s: float,
) -> None:
    bench = Bench()
    placement = await bench.gate.admit(ask("r"), stream_owned=False)
    bench.store.deaf = True
    assert await bench.gate.confirm("r", placement, age_s) is (age_s < LEASE_S)
    # And it costs the replica's own purse nothing: it is in flight as far as that counts
    assert bench.gate.mode is Mode.LOCAL
    free = bench.free
    assert await bench.gate.confirm("r", placement, age_s) is (age_s < LEASE_S)
    assert bench.free == free


async def test_given_a_place_paid_for_here_when_redis_is_away_then_it_is_kept_however_old() -> None:
    bench = Bench()
    bench.store.away = True
    placement = await bench.gate.admit(ask("r"), stream_owned=False)
    free = bench.free
    assert await bench.gate.confirm("r", placement, 2 * LEASE_S)
    assert bench.free == free


async def test_given_no_bound_known_when_redis_is_away_then_nobody_can_tell() -> None:
    bench = Bench(pulse=None)
    bench.store.deaf = True
    with pytest.raises(StateUnavailable):
        await bench.gate.confirm("r", Placement(("10.0.0.1:8000",), "", 1), 2.0)


async def test_given_the_way_back_when_asked_then_the_shared_state_is_told_of_own_places_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outage, "_LONGEST_RETURN_S", 60.0)  # however long the machine stands still
    # Given a replica on its way back, which has let one go by itself
    bench = Bench()
    bench.store.away = True
    placement = await bench.gate.admit(ask("mine"), stream_owned=False)
    bench.store.away = False
    bench.tell_peers(b=True)
    async with watched(bench):
        for _ in range(2):
            bench.gate.beat(PULSE, 0.001)
        await eventually(lambda: bench.gate.mode is Mode.RETURNING and not bench.gate.degraded)
        bench.store.renewing = "unknown"
        bench.store.notes.clear()
        # When its body ends late, then it is its own, and the shared state counts it
        assert await bench.gate.confirm("mine", placement, 2 * LEASE_S)
        assert bench.store.notes == [placement.accounting_token]
        # And one whose lease has run out is not, and does not come back
        assert not await bench.gate.confirm("old", placement, 2 * LEASE_S)
        assert bench.store.notes == [placement.accounting_token, ""]
