"""Names become parts of keys: different names never share a key, whatever characters are in the names."""

import asyncio
import itertools
from functools import partial
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from names import NAMES, REQUEST_IDS, distinct
from script_fleet import UNKNOWN_END, Fleet, OpenFleet, Replica, running

from picker_fleet.domain.bands import Band
from picker_fleet.domain.request import Outcome
from picker_fleet.state.reads import RankRange
from picker_fleet.state.replies import name_of

_POOLS = itertools.count(1)


async def _serve_all(it: Fleet, replica: Replica, first: str) -> list[str]:
    """End `first`, then each request that is placed, until none is left; return ids in the order of ends."""
    ends, served = [first], []
    while ends:
        replica.notifications.clear()
        await replica.settle(*ends)
        ends = [request_id for what, request_id in replica.notifications if what == "placed"]
        for request_id in ends:
            assert name_of(await replica.place(request_id)) == "placed"
        served += ends
    return served


@settings(max_examples=12, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(
    flows=["llama3", "llama3:8b"], workloads=["8b:chat", "chat"], replica="a", ids=["1", "2", "3", "4"],
    fairness="weighted-fair",
)  # fmt: skip
@given(
    flows=distinct(2), workloads=distinct(2), replica=NAMES,
    ids=st.lists(REQUEST_IDS, min_size=4, max_size=4, unique=True),
    fairness=st.sampled_from(["weighted-fair", "none"]),
)  # fmt: skip
def test_all_scripts_accept_names_with_any_characters(valkey_url: str, **drawn: Any) -> None:
    asyncio.run(_use_all_scripts(partial(running, valkey_url, f"names-{next(_POOLS)}"), **drawn))


async def _use_all_scripts(
    fleet: OpenFleet, flows: list[str], workloads: list[str], replica: str, ids: list[str], fairness: str
) -> None:
    async with fleet(replica, upper_per=1, ordering="workload-aware", fairness=fairness) as (it, one):
        store, pairs = one.store, list(itertools.product(flows, workloads))
        await one.admit("runs:", flow=flows[0], workload=workloads[0], limit=9)
        for request_id, (flow, workload) in zip(ids, pairs, strict=True):
            verdict = await one.admit(request_id, flow=flow, workload=workload, limit=9, band=Band.SHEDDABLE)
            assert name_of(verdict) == "queued"
        await store.set_live_config({"weights": {flows[1]: 3.0}}, {f"weights.{flows[1]}": 3.0})
        queues = (await store.reads.flow_queues(100)).queues
        assert sorted(queue.name for queue in queues) == (sorted(flows) if fairness != "none" else [""])
        surveyed = (await store.queue_snapshots.read(100)).page.queues
        assert [queue.name for queue in surveyed] == [queue.name for queue in queues]
        for queue in queues:
            assert [each.queued for each in await store.reads.flow_queue(queue.name)] == [queue.queued]
        found = await store.reads.queued([RankRange(queue.priority, queue.name, 0, 9) for queue in queues])
        names = {entry.id: (entry.flow, entry.workload) for entries in found for entry in entries}
        assert names == dict(zip(ids, pairs, strict=True))
        for request_id in ids:
            entry = (await store.reads.request(request_id)).entry
            assert (entry.id, entry.owner) == (request_id, replica)
        running_now, _ = await store.reads.in_flight(9)
        assert [each.entry.flow for each in running_now] == [flows[0]]
        registered, _, _ = await store.reads.workloads(9)
        assert {row.id for row in registered} == set(workloads)
        for workload in workloads:
            assert (await store.reads.workload(workload)).id == workload
        assert [row.id for row in await store.reads.replicas()] == [replica]
        # One request is cancelled, one is evicted, and the others are served in turn: no request is left.
        gone, evicted, *others = ids
        assert await store.cancel(gone, 1, "cancelled") == "ended"
        assert await store.evict(evicted) == "evicted"
        assert await store.renew("runs:", 1, "", "") == "renewed"
        assert await store.mark_endpoint("10.0.0.1:8000", "down", True) == "marked"
        await one.sweep()
        assert await store.mark_endpoint("10.0.0.1:8000", "down", False) == "marked"
        assert sorted(await _serve_all(it, one, "runs:")) == sorted(others)
        await store.tombstone("runs:")
        assert await store.settle(evicted, Outcome.COMPLETED) == UNKNOWN_END
        await one.beat()
        assert await store.notifications() == []
        assert await it.at_rest()
