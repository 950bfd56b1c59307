"""`confirm`: does a request whose body has not ended still have its lease, with and without Redis?"""

import pytest
from failover_bench import Bench, resyncing
from local_requests import ask

from picker_fleet.errors import StateUnavailable
from picker_fleet.failover.gate import FailoverState
from picker_fleet.request import Placement

LEASE_S = 15.0  # as configured by default


@pytest.mark.parametrize(
    ("answer", "own"),
    [("renewed", True), ("unknown", False), ("waiting", False)],
)
async def test_redis_says_whether_the_lease_is_still_the_requests_own(answer: str, own: bool) -> None:
    bench = Bench()
    placement = await bench.gate.admit(ask("r"), stream_owned=False)
    bench.store.renewing = answer
    assert await bench.gate.confirm("r", placement, 2.0) is own
    # The call has no accounting token: a lost lease must not be restored past the bound.
    assert bench.store.notes == [""]


@pytest.mark.parametrize("age_s", [2.0, LEASE_S + 1.0])
async def test_without_redis_a_shared_lease_is_valid_until_it_expires(
    age_s: float,
) -> None:
    bench = Bench()
    placement = await bench.gate.admit(ask("r"), stream_owned=False)
    bench.store.deaf = True
    assert await bench.gate.confirm("r", placement, age_s) is (age_s < LEASE_S)
    # It takes nothing of the local budget: it already counts as in flight.
    assert bench.gate.state is FailoverState.LOCAL
    free = bench.free
    assert await bench.gate.confirm("r", placement, age_s) is (age_s < LEASE_S)
    assert bench.free == free


async def test_without_redis_a_lease_of_the_local_budget_never_expires() -> None:
    bench = Bench()
    bench.store.away = True
    placement = await bench.gate.admit(ask("r"), stream_owned=False)
    free = bench.free
    assert await bench.gate.confirm("r", placement, 2 * LEASE_S)
    assert bench.free == free


async def test_without_redis_and_a_known_bound_the_state_is_unavailable() -> None:
    bench = Bench(pulse=None)
    bench.store.deaf = True
    with pytest.raises(StateUnavailable):
        await bench.gate.confirm("r", Placement(("10.0.0.1:8000",), "", 1), 2.0)


async def test_during_resync_redis_counts_only_leases_of_the_local_budget() -> None:
    bench = Bench(wait_s=60.0)  # however slow the machine is
    bench.store.away = True
    placement = await bench.gate.admit(ask("mine"), stream_owned=False)
    async with resyncing(bench):
        bench.store.renewing = "unknown"
        bench.store.notes.clear()
        assert await bench.gate.confirm("mine", placement, 2 * LEASE_S)
        assert bench.store.notes == [placement.accounting_token]
        # A shared lease that has expired is lost and is not restored.
        assert not await bench.gate.confirm("old", placement, 2 * LEASE_S)
        assert bench.store.notes == [placement.accounting_token, ""]
