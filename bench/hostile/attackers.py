"""The attackers' process: `python -m bench.hostile.attackers TARGET`, TARGET a Target as JSON.

It attacks until its stdin ends, then says in one line of JSON what came of it.
"""

import asyncio
import contextlib
import json
import sys

from bench.hostile.attacks import Attackers
from bench.hostile.target import Target


async def _main(target: Target) -> None:
    attackers = Attackers(target)
    attacking = asyncio.create_task(attackers.run())
    print("attacking", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    attacking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await attacking
    print(json.dumps(attackers.came))


if __name__ == "__main__":
    envoy, grpc, admin = json.loads(sys.argv[1])
    asyncio.run(_main(Target(envoy, tuple(grpc), tuple(admin))))
