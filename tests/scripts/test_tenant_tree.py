"""Tenants on simulated time: shares at each level of the tree, and limits that hold over all replicas."""

import itertools
import json
from collections import Counter
from typing import Any

import pytest
import redis
from direct_calls import ClockedPool, arrival
from script_fleet import OpenFleet, addresses, ask, until

from picker_fleet.admin.queue_order import predicted_order
from picker_fleet.state.store import PACKED_USAGE

A = addresses(1)[0]
TREE = {"separator": "/"}


class TenantPool(ClockedPool):
    """A pool with one endpoint; `place` requests until the pool is full."""

    def __init__(self, client: redis.Redis, pool: str) -> None:
        super().__init__(client, pool)
        self.numbers = 0

    def passes(self, ms: int) -> None:
        super().passes(ms)
        self.client.zadd(f"{self.prefix}replicas", {"a": self.now_ms})

    def start(self, bound: int, nodes: dict[str, Any], **settings: Any) -> None:
        self.publish(A, upper_per=bound, tenants=TREE, **settings)
        self.set_nodes(nodes)

    def set_nodes(self, nodes: dict[str, Any], kind: str = "tenants") -> Any:
        pairs = [text for path, node in nodes.items() for text in (path, json.dumps(node) if node else "")]
        return self.call("set_tenants", "a", kind, *pairs)

    def ask(self, flow: str, **fields: Any) -> str:
        """Admit a request of `flow`; return the first word of the verdict, or the whole text of a refusal."""
        self.numbers += 1
        reply = self.call("admit", "a", arrival(f"r{self.numbers}", flow=flow, **fields))
        text = bytes(reply[4]).decode()
        return text if text.startswith("refused") else text.split(" ")[0]

    def end(self, request_id: str, outcome: str = "completed", usage: tuple[int, ...] = ()) -> list[str]:
        """End a request; return the ids that this call has placed."""
        packed = PACKED_USAGE.pack(*usage) if usage else ""
        reply = self.call("settle", "a", request_id, outcome, "", "", "", packed)
        lines = [bytes(line).decode() for line in reply[1]]
        return [line.rpartition(" ")[2] for line in lines if line.startswith("placed")]

    def serve(self, count: int) -> list[str]:
        """End one running request after another; return the flows that are placed, in order."""
        served = []
        for _ in range(count):
            running = self.client.zrange(f"{self.prefix}inflight", 0, 0)[0].decode()
            self.passes(1)
            for each in self.end(running):
                record = bytes(self.client.hget(f"{self.prefix}requests", each) or b"")
                served.append(record[1:].split(b"\0")[2].decode())
        return served

    def rebuild(self, **settings: Any) -> None:
        """Sweep, which detects the loss, and publish again, as replicas do at the end of an epoch."""
        self.passes(1000)
        self.call("sweep", "a", 0, 60_000, 300_000, 60_000)
        self.publish(A, upper_per=1, **settings)

    def queued(self) -> int:
        return int(self.call("state", 60_000)[3])


@pytest.fixture
def it(client: redis.Redis, pool: str) -> TenantPool:
    return TenantPool(client, pool)


def test_a_new_bound_counts_each_running_request_of_a_large_fleet_once(it: TenantPool) -> None:
    it.start(5100, {"acme": {"weight": 2}})
    for first in range(0, 5100, 300):
        it.call("admit", "a", *(arrival(f"old{first + number}", flow="acme/a") for number in range(300)))
    it.set_nodes({"acme": {"max_parallel": 5100, "over_limit": "reject"}})
    it.end("old1")
    it.passes(1000)
    sweeps = 0
    while it.call("sweep", "b", 1000, 60_000, 300_000, 60_000)[7]:  # the replica that set the bound has gone
        it.end(f"old{sweeps + 2}")
        sweeps += 1
    assert sweeps > 50
    assert [it.ask("acme/a")[:7] for _ in range(sweeps + 2)] == ["placed"] * (sweeps + 1) + ["refused"]


def test_a_changed_over_limit_grants_no_waiting_request_beyond_the_limit(it: TenantPool) -> None:
    node = {"limits": [{"unit": "requests", "amount": 6, "per_ms": 86_400_000}]}
    it.start(1, {"acme": node}, total_capacity=9000)
    for first in range(0, 6000, 300):
        it.call("admit", "a", *(arrival(f"w{first + number}", flow="acme/a") for number in range(300)))
    it.set_nodes({"acme": node | {"over_limit": "reject"}})
    assert it.serve(6) == ["acme/a"] * 5
    for _ in range(250):
        it.call("cancel", "a")  # each call serves 24 turns, at which the other requests must leave
    assert it.queued() == 0


LEAVES = [f"acme/{number}" for number in range(40)]


def limited(amount: int) -> dict[str, Any]:
    return {"limits": [{"unit": "requests", "amount": amount, "per_ms": 86_400_000}]}


def use_up(it: TenantPool, nodes: dict[str, Any]) -> None:
    """For each leaf start one request, which uses up the leaf's limit, and queue another request."""
    it.start(100, nodes)
    assert Counter(it.ask(leaf) for leaf in LEAVES * 2) == {"placed": 40, "queued": 40}


def test_a_raised_limit_of_a_node_starts_the_nodes_request_although_other_nodes_wait(it: TenantPool) -> None:
    use_up(it, {leaf: limited(1) for leaf in LEAVES})
    it.set_nodes({LEAVES[-1]: limited(2)}, "tenant_changes")
    assert it.queued() == 39


def test_repeated_sweeps_start_the_requests_of_all_nodes_whose_default_limit_rises(it: TenantPool) -> None:
    use_up(it, {"acme/*": limited(1)})
    it.set_nodes({"acme/*": limited(2)}, "tenant_changes")
    while it.call("sweep", "b", 1000, 60_000, 300_000, 60_000)[7]:
        pass
    assert it.queued() == 0


def test_successive_sweeps_reach_every_throttled_flow(it: TenantPool) -> None:
    use_up(it, {leaf: limited(1) for leaf in LEAVES})
    assert [it.ask("last", limit=1) for _ in range(2)] == ["placed", "queued"]
    it.publish(*addresses(2), version="f", upper_per=100, tenants=TREE)  # flow `last` may now run two
    for _ in range(3):
        it.passes(1000)
        it.call("sweep", "a", 1000, 60_000, 300_000, 60_000)
    assert it.queued() == 40


def test_a_pool_that_lost_its_counters_rebuilds_the_tree_and_its_running_requests(it: TenantPool) -> None:
    it.start(2, {"acme": {"max_parallel": 5}})
    flows = ("acme/a/x", "acme/b/x", "zeta/a")
    for flow in flows * 3:
        it.ask(flow)
    it.client.hdel(f"{it.prefix}pool", "counters")
    it.call("state", 60_000)
    it.publish(A, upper_per=2, tenants=TREE)
    assert it.queued() == 7
    assert it.client.hget(f"{it.prefix}balances", "acme\x1fparallel").split()[1] == b"2"
    assert sorted(it.serve(7)) == sorted((flows * 3)[2:])


def test_tenants_can_be_switched_on_and_off_while_requests_wait(it: TenantPool) -> None:
    it.publish(A, upper_per=1)
    for flow in ("acme/a", "acme/b", "zeta/a") * 2:
        it.ask(flow)
    it.publish(A, upper_per=1, tenants=TREE)
    it.rebuild(tenants=TREE)
    for flow in ("acme/a", "acme/b", "zeta/a") * 2:
        it.ask(flow)
    served = it.serve(3)
    it.publish(A, upper_per=1)
    it.rebuild()
    assert len(served) + len(it.serve(8)) == 11
    assert it.queued() == 0


def test_tenants_switched_on_again_count_each_running_request_once(it: TenantPool) -> None:
    it.start(4, {"acme": {"max_parallel": 2}})
    it.ask("acme/a")
    it.publish(A, upper_per=4)
    it.ask("acme/a")
    it.publish(A, upper_per=4, tenants=TREE)
    assert it.ask("acme/a") == "queued"
    assert it.end("r1") == ["r3"]
    assert it.client.hget(f"{it.prefix}balances", "acme\x1fparallel").split()[1] == b"2"


async def test_a_waiting_request_starts_as_soon_as_its_balance_suffices(fleet: OpenFleet) -> None:
    limit = {"unit": "requests", "amount": 20, "per_ms": 1000, "burst": 1}
    async with fleet("a", upper_per=100, tenants=TREE, checked=False) as (it, a):
        await a.store.set_tenants("tenants", {"acme": json.dumps({"limits": [limit]})})
        requests = [ask(f"r{number}", flow="acme/a", prompt_tokens=1.0) for number in range(5)]
        for request in requests:
            await a.store.admit(request, "1", "*")
        # The replica itself calls Redis when the balance suffices; no other call triggers a dispatch.
        await until(lambda: len([1 for what, _ in a.notifications if what == "placed"]) == 4)
        assert await it.queued() == 0


async def test_the_predicted_order_of_the_queue_is_the_order_of_service(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1, guard_share=0, tenants=TREE) as (_, a):
        await a.store.set_tenants("tenants", {"acme": '{"weight": 3}', "acme/search": '{"weight": 2}'})
        await a.admit("runs")
        flows = ("acme/search/x", "acme/ads/x", "acme/ads/y", "zeta/x", "zeta/y")
        for number, flow in enumerate(flows * 8):
            await a.admit(f"r{number}", flow=flow)
        rows = (await a.store.reads.flow_queues(1000)).queues
        assert sorted(row.name for row in rows) == sorted(flows)
        predicted = Counter(each.queue.name for each in predicted_order(rows, None, 16))
        # By weight, acme gets 12 of 16 turns, and acme/search gets 8 of these 12.
        assert predicted == {"acme/search/x": 8, "acme/ads/x": 2, "acme/ads/y": 2, "zeta/x": 2, "zeta/y": 2}
        page = (await a.store.reads.flow_queues(2)).queues
        behind = (repr(page[-1].start), page[-1].name)
        rest = (await a.store.reads.flow_queues(9, group=page[-1].group, behind=behind)).queues
        assert [row.name for row in (*page, *rest)] == [row.name for row in rows]
        (row,) = await a.store.reads.flow_queue("acme/ads/x")
        assert row == next(each for each in rows if each.name == row.name)._replace(oldest_s=row.oldest_s)


def test_a_call_grants_fewer_requests_while_more_requests_wait_than_nodes_are_cached(it: TenantPool) -> None:
    it.start(1, {}, total_capacity=10**6, flow_capacity=10**6, max_flows=10**6)
    for first in range(0, 4128, 16):
        it.call("admit", "a", *(arrival(f"w{n}", flow=f"acme/{n}") for n in range(first, first + 16)))
    roomy = {"upper_per": 10**4, "lower_per": 10**4}
    it.call("tune", "a", json.dumps(roomy), "{}")
    waiting = [it.queued()]
    while waiting[-1] > 4060:
        it.call("cancel", "a")
        waiting.append(it.queued())
    granted = {before: before - after for before, after in itertools.pairwise(waiting)}
    assert {count for before, count in granted.items() if before > 4096} == {8}
    assert {count for before, count in granted.items() if before <= 4096} == {16}
