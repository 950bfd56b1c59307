"""The fleet's prefix index follows the caches of its model servers: answers correct the index in each mode,
and no replica sends a prompt to a restarted server for a lost prefix."""

import asyncio
from functools import partial
from typing import Any

import pytest
from fleet_load import at_rest, complete, explanation

from picker_fleet.scheduling.route_stream import EvidenceRecord, unpack

CONFIG = {"scheduling": {"scorers": {"prefix-affinity": 6}}}
PROMPTS = 80


def prompt(number: int) -> str:
    return f"Conversation {number}. " * 60


async def shares(fleet: Any, number: int) -> tuple[int, dict[str, float]]:
    """Send the conversation's next turn. Returns the replica that placed the turn, and by endpoint the share
    of the prompt that this replica assumed to be cached."""
    assert (await complete(fleet.url, prompt(number) + "And then?", 2)).served
    replica, explained = await explanation(fleet)
    return replica, {each["address"]: each["parts"]["prefix-affinity"] for each in explained["candidates"]}


@pytest.mark.parametrize("mode", ["standard", "http"])
async def test_answers_show_the_index_how_much_a_server_has_cached(fleet: Any, mode: str) -> None:
    here = fleet("--replicas", "2", "--endpoints", "2", "--mode", mode, "--sim-ttft", "50", config=CONFIG)

    async def evidence() -> list[EvidenceRecord]:
        await asyncio.gather(*(complete(here.url, prompt(number), 2) for number in range(16)))
        async with here.redis() as redis:
            found = await redis.execute_command("XRANGE", "epp:{default}:routes", "-", "+", NEVER_DECODE=True)
        records = [record for _, fields in found for record in unpack(fields[b"body"])]
        return [record for record in records if isinstance(record, EvidenceRecord)]

    taught = await here.eventually(evidence, within_s=60, what="a record of cached tokens")
    assert taught[0].kept > 0, "the server had cached a part of the prompt"
    assert 3 < taught[0].bytes_per_token < 6, "the simulator's tokens have four bytes"
    await at_rest(here)


async def test_every_replica_forgets_the_prefixes_of_a_restarted_server(fleet: Any) -> None:
    here = fleet("--endpoints", "2", "--sim-ttft", "5", "--sim-itl", "1", config=CONFIG)
    address = here.state["endpoints"][0]["address"]
    served = [(await complete(here.url, prompt(number), 2)).endpoint for number in range(PROMPTS)]
    there = [number for number, endpoint in enumerate(served) if endpoint == address]
    assert min([(await shares(here, number))[1][address] for number in there[:6]]) > 0.7

    here.endpoint(0).kill()

    await here.eventually(
        lambda: here.endpoint_status(address), lambda found: found == "down", what="the kill"
    )
    for replica in range(3):
        status = partial(here.endpoint_status, address, replica)
        await here.eventually(status, lambda found: found == "ready", within_s=60, what="the restart")
    numbers, forgot = there[6:], set[int]()

    async def replicas_that_forgot() -> set[int]:
        replica, found = await shares(here, numbers[-1])
        if address in found:  # the endpoint may be marked down once more while its server starts
            numbers.pop()
            forgot.update({replica} if found[address] == 0.0 else ())
        return forgot

    await here.eventually(replicas_that_forgot, lambda found: len(found) == 3, what="news of the restart")
    for number in numbers:
        _, found = await here.eventually(
            partial(shares, here, number), lambda found: address in found[1], what="the server as candidate"
        )
        assert found[address] == 0.0
    await at_rest(here)
