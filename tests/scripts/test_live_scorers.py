"""Scorers changed while the fleet runs: every replica ranks by them, with the data that they need."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from script_fleet import addresses, ask, until

from picker_fleet.admin.fleet_controls import FleetControls
from picker_fleet.assembly import Parts, assemble
from picker_fleet.config import parse
from picker_fleet.endpoints.snapshot import Endpoint
from picker_fleet.request import InferenceRequest

E1, E2, E3 = addresses(3)
PROMPT = (b"a" * 8, b"b" * 8)


@contextlib.asynccontextmanager
async def replica(url: str, pool: str, name: str) -> AsyncIterator[tuple[Parts, FleetControls]]:
    """A whole replica but for its listeners and its scraping."""
    settings = parse(
        {"redis": {"url": url}, "pool": pool, "leases": {"heartbeat": 0.1, "replica_silence": 5}}
    )
    parts = assemble(settings, name)
    parts.membership.discovered([Endpoint(address) for address in (E1, E2, E3)])
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(part.run()) for part in (parts.store, parts.membership)]
        running.append(tasks.create_task(parts.follow_routes()))
        try:
            await parts.membership.known()
            yield parts, FleetControls(parts.store, parts.membership, settings)
        finally:
            for task in running:
                task.cancel()


def prompted(request_id: str) -> InferenceRequest:
    return ask(request_id)._replace(prefix=PROMPT)


async def test_scorers_changed_through_one_replica_rank_at_every_other_with_what_all_have_routed(
    valkey_url: str, pool: str
) -> None:
    async with replica(valkey_url, pool, "a") as (a, controls), replica(valkey_url, pool, "b") as (b, others):
        # Given a fleet without scorers: nobody asks for prompts, and the fewest in flight is chosen
        assert a.chooser.choose(prompted("r1")).candidates == "*"
        assert not b.chooser.hashes
        # When one is added through one replica, then every replica ranks by it within a heartbeat
        shown = await controls.change({"scheduling": {"scorers": {"prefix-affinity": 9}}})
        assert shown["changes"] == {"scheduling": {"scorers": {"prefix-affinity": 9}}}
        await until(lambda: a.chooser.hashes and b.chooser.hashes)
        # And what one has routed, the other knows: the data is there without a restart
        await asyncio.gather(a.feed.caught_up(), b.feed.caught_up())
        placement = await a.sturdy.admit(prompted("r2"), held=False)

        has_it = f"{placement.endpoints[0]}=0.9000,"
        await until(lambda: b.chooser.choose(prompted("r3")).candidates.startswith(has_it))
        for number in range(8):
            same = await b.sturdy.admit(prompted(f"r4-{number}"), held=False)
            assert same.endpoints[0] == placement.endpoints[0]
            b.sturdy.withdraw(f"r4-{number}", same)
        # And at weight 0 it is off again, for all
        await others.change({"scheduling": {"scorers": {"prefix-affinity": 0}}})
        await until(lambda: not (a.chooser.hashes or b.chooser.hashes))
        assert b.chooser.choose(prompted("r5")).candidates == "*"
        a.sturdy.withdraw("r2", placement)
