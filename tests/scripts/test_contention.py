"""Under contention the decision log is consistent, and every count ends at 0 (G1, G4, G6)."""

import asyncio
import random
from collections import Counter

from script_fleet import OpenFleet, ask, config, ended, until


async def test_of_300_requests_on_three_replicas_at_most_eight_run_at_once(fleet: OpenFleet) -> None:
    joined = config(2, "100ms", fair_request_queue={"flow_capacity": 300})
    async with fleet("a", "b", "c", endpoints=4, joined=joined, listening=True) as it:
        chance = random.Random(7)
        served: Counter[str] = Counter()

        async def one(number: int) -> None:
            name, flow = f"r{number}", f"flow{number % 5}"
            here, there = chance.sample(it.replicas, 2)
            owned = number % 2 == 0
            placement = await here.gate.admit(ask(name, flow=flow, workload=flow), stream_owned=owned)
            served[placement.endpoints[0]] += 1
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            (here if owned else there).gate.settle(ended(name))

        await asyncio.gather(*map(one, range(300)))
        await until(it.at_rest)
        ledger = await it.ledger()
        assert ledger.started == {f"r{number}": 1 for number in range(300)}
        assert ledger.ends == {"completed": 300}
        assert max(entry.stock for entry in await it.log()) == 8
        assert len(served) == 4
        # At the end only the keys of the pool, its endpoints, workloads, replicas and decision log are left.
        for replica in it.replicas:
            await replica.beat()
        await it.replicas[0].sweep()
        left = {key.removeprefix(it.keys.prefix) for key in await it.redis.keys(it.keys.prefix + "*")}
        assert left == {"pool", "load", "endpoints", "workloads", "replicas", "replica_info", "log"}
