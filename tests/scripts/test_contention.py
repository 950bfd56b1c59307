"""Many requests, few places: the ledger of decisions holds, and at rest every count is 0 (G1, G4, G6)."""

import asyncio
import random
from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from script_fleet import OpenFleet, Replica, ask, ended, until

CONFIG = {
    "leases": {"heartbeat": "100ms"},
    "decision_log": {"enabled": True},
    "request_queue_controller": {"watermark_per_backend": 2},
    "fair_request_queue": {"flow_capacity": 300},
}


async def test_three_hundred_requests_on_three_replicas_share_eight_places(fleet: OpenFleet) -> None:
    # Given three replicas, four endpoints and a watermark of 2 each
    async with fleet("a", "b", "c", endpoints=4, joined=CONFIG, listening=True) as it:
        chance = random.Random(7)
        served: Counter[str] = Counter()

        async def one(number: int) -> None:
            name, flow = f"r{number}", f"flow{number % 5}"
            here, there = chance.sample(it.replicas, 2)
            placement = await here.gate.admit(
                ask(name, flow=flow, workload=flow), stream_owned=number % 2 == 0
            )
            served[placement.endpoints[0]] += 1
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            (here if number % 2 == 0 else there).gate.settle(ended(name))

        # When 300 come at once
        async with asyncio.TaskGroup() as tasks:
            for number in range(300):
                tasks.create_task(one(number))
        await until(it.at_rest)
        # Then each has lived once, every rule of the ledger has held, and each endpoint had its part
        ledger = await it.ledger()
        assert ledger.started == {f"r{number}": 1 for number in range(300)}
        assert ledger.ends == {"completed": 300}
        assert max(entry.stock for entry in await it.log()) == 8
        assert len(served) == 4
        # And nothing is left but what the pool, its endpoints, replicas and workloads are
        for replica in it.replicas:
            await replica.beat()
        await it.replicas[0].sweep()
        left = {key.removeprefix(it.keys.prefix) for key in await it.redis.keys(it.keys.prefix + "*")}
        assert left == {"pool", "load", "endpoints", "workloads", "replicas", "about", "log"}


_OWNERS = 3
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ("admit", "admit", "admit", "place", "settle", "settle", "cancel", "renew", "publish")
        ),
        st.integers(0, _OWNERS - 1),
        st.integers(0, 11),
    ),
    max_size=60,
)


# On the real server only: hundreds of fleets and calls, and nothing here is particular to a backend.
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=_STEPS)
async def test_the_ledger_balances_whatever_owners_do_in_whatever_order(
    valkey_fleet: OpenFleet, steps: list[tuple[str, int, int]]
) -> None:
    # Given three replicas, two flows of different weight, requests of different cost, few places
    async with valkey_fleet("a", "b", "c", endpoints=2, upper_per=2, lower_per=1, flow_capacity=3) as it:
        await it.redis.flushall()
        await it.replicas[0].publish(
            "10.0.0.1:8000", "10.0.0.2:8000", upper_per=2, lower_per=1, flow_capacity=3
        )
        for replica in it.replicas:
            await replica.beat()
        # When they admit, place, settle, cancel and renew, their own requests and each other's
        for what, owner, number in steps:
            await _do(it.replicas[owner], what, f"r{number}", number)
        # Then the log adds up, entry by entry, and what it says is what the state says
        ledger = await it.ledger()
        stock, queued, loads = await it.counts()
        assert stock == sum(ledger.running.values())
        assert queued == len(ledger.queued)
        assert sum(loads) == len(ledger.placed)
        # And when all end, every count is 0
        for number in range(12):
            await it.replicas[0].settle(f"r{number}")
        assert await it.at_rest()
        await it.ledger()


async def _do(replica: Replica, what: str, name: str, number: int) -> None:
    attempt = 1
    if what == "admit":
        flow = number % 2
        fields = {
            "flow": f"f{flow}",
            "weight": 1.0 + flow,
            "cost": (0.5, 1.0, 2.0)[number % 3],
            "workload": "w",
        }
        await replica.admit(name, attempt, **fields)
    elif what == "place":
        await replica.place(name, attempt)
    elif what == "settle":
        await replica.settle(name)
    elif what == "cancel":
        await replica.store.cancel(name, attempt, ("cancelled", "expired", "withdrawn")[number % 3])
    elif what == "renew":
        await replica.store.renew(name, attempt, "10.0.0.2:8000", "")
    else:
        ready = ["10.0.0.1:8000", "10.0.0.2:8000"][: 1 + number % 2]
        await replica.publish(*ready, upper_per=2, lower_per=1, flow_capacity=3)
