"""Flows are served by their weights, whichever replicas receive their requests."""

import pytest
from script_fleet import Fleet, OpenFleet, Replica

HEAVY, LIGHT = 40, 10  # of 50 turns, the turns of a flow of weight 4 and of a flow of weight 1


async def queue(by: list[Replica], flow: str, weight: float, numbers: range) -> dict[str, Replica]:
    """Queue a request for each number, at the replicas `by` in turn; return request id -> replica."""
    received = {f"{flow} {number}": by[number % len(by)] for number in numbers}
    for request_id, replica in received.items():
        await replica.admit(request_id, flow=flow, weight=weight)
    return received


async def granted_flow(it: Fleet, received: dict[str, Replica]) -> str:
    """Place and end the request that was granted last; return the request's flow."""
    entry = next(each for each in reversed(await it.log(last=10)) if each.event == "granted")
    replica = received[entry.request]
    await replica.place(entry.request)
    await replica.settle(entry.request)
    return entry.flow


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
async def test_weights_four_to_one_hold_although_each_replica_receives_one_flow_at_a_time(
    fleet: OpenFleet, replicas: int
) -> None:
    async with fleet(*"abcdefgh"[:replicas], upper_per=1, lower_per=1) as it:
        first, second = list(it.replicas[: (replicas + 1) // 2]), list(it.replicas[replicas // 2 :])
        await first[0].admit("running")
        received: dict[str, Replica] = {}
        # One half of the replicas receives a flow's earlier requests, the other half the later requests.
        for flow, weight, served, halves in (
            ("heavy", 4.0, HEAVY, (first, second)),
            ("light", 1.0, LIGHT, (second, first)),
        ):
            received |= await queue(halves[0], flow, weight, range(served // 2))
            received |= await queue(halves[1], flow, weight, range(served // 2, served + 10))
        await first[0].settle("running")
        flows = [await granted_flow(it, received) for _ in range(HEAVY + LIGHT)]
        for turns in (flows, flows[: len(flows) // 2]):
            assert turns.count("heavy") == 4 * turns.count("light")
