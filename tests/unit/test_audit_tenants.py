"""The audit of tenants: correct and broken logs of quotas, and of fairness at each level of the tree."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from queue_simulator import POLICY, START_US, Request, raw_entry
from tables import cases

from picker_fleet.domain.bands import NAMED
from picker_tools.audit.auditor import Report, audit
from picker_tools.audit.log import EntryError

LOWEST = len(NAMED) - 1


class Log:
    """A decision log of tenants. Entries with equal times belong to one decision."""

    def __init__(self, nodes: Mapping[str, Mapping[str, Any]], **settings: Any) -> None:
        self.entries: list[dict[str, str]] = []
        self.now_us = START_US
        self.stock, self.queued = 0, 0
        self.requests: dict[str, Request] = {}
        rules = {**POLICY, "tenants": {"separator": "/"}, "upper_per": 100, **settings}
        self.write("tuned", note=json.dumps(rules))
        for path, node in nodes.items():
            self.write("tenant", note=f"{path}\x1ftenants\x1f{json.dumps(node)}")

    def request(self, name: str, flow: str, **fields: Any) -> Request:
        deadline_ms = self.now_us // 1000 + 60_000
        request = Request(name, flow, arrived=self.now_us, deadline_ms=deadline_ms, **fields)
        self.requests[name] = request
        return request

    def write(
        self, event: str, name: str = "", *, flow: str = "", note: str = "", v: float = 0.0, **fields: str
    ) -> None:
        request = self.requests.get(name) or Request("", flow)
        numbers = {
            "seq": len(self.entries) + 1, "time_us": self.now_us, "v": v, "stock": self.stock,
            "queued": self.queued, "upper": 100, "lower": 100,
        }  # fmt: skip
        self.entries.append(raw_entry(event, request, numbers, {"tag": "", "by": "", "note": note, **fields}))


NODES: Mapping[str, Mapping[str, Any]] = {
    "acme": {"limits": [{"unit": "tokens", "amount": 60, "per_ms": 60_000, "burst": 30}]},
    "acme/*": {"max_parallel": 2, "over_limit": "reject"},
    "*/*/*": {"over_limit": "demote", "limits": [{"unit": "answer_tokens", "amount": 10, "per_ms": 1000}]},
    "acme/search/k2": {"budget": {"units": 40, "period": "day"}},
}


def starts(name: str) -> str:
    """The entries of a request that starts at once: 5 prompt tokens, and an estimate of 10 answer tokens."""
    return f"charged {name} arrival 5 10 15, bypassed {name}, charged {name} grant 5 10 15"


# Each case is a log of quotas and the violation in the log, or None. An entry is EVENT REQUEST [NOTE], or
# `tenant` PATH [SETTINGS]; `+S` lets S seconds pass. Requests are of the flow acme/search/k1, or
# acme/search/k2 if their name has a 2.
QUOTAS: dict[str, tuple[str, str | None]] = {
    "a correct log": (
        f"{starts('r')}, used r 5 0 4 9, completed r, +1, {starts('s')}, upstream_failed s, "
        "refunded s all 5 10 15",
        None,
    ),
    "a limit refills": (
        f"{starts('r')}, completed r, +20, {starts('s')}, +15, {starts('t')}", None
    ),
    "a request is sent back, and starts again": (
        "charged r arrival 5 10 15, queued r, granted r, charged r grant 5 10 15, requeued r, "
        "refunded r grant 5 10 15, granted r, charged r grant 5 10 15, placed r",
        None,
    ),
    "one of its nodes has lost its limit when a request is refunded": (
        f"{starts('r')}, tenant acme/search/k1 {{}}, upstream_failed r, refunded r all 5 10 15", None
    ),
    "a refused request is refunded": (
        f"charged r arrival 5 10 15, refused r, refunded r arrival 5 10 15, {starts('s')}",
        None,
    ),
    "a demoted request pays no node that demotes": (
        f"{starts('r')}, charged d arrival 5 10 15 demoted, bypassed d, charged d grant 5 10 15", None
    ),
    "a lowered limit applies since the last change of its balance": (
        'tenant acme/search/k1 {"limits":[{"unit":"requests","amount":900,"per_ms":9000,"burst":2}]}, '
        "charged r arrival 1 1 2, bypassed r, charged r grant 1 1 2, charged s arrival 1 1 2, bypassed s, "
        "charged s grant 1 1 2, +1, used r 1 0 1 2, completed r, "
        'tenant acme/search/k1 {"over_limit":"demote","limits":[{"unit":"requests","amount":2,'
        '"per_ms":9000}]}, '
        "charged d arrival 1 1 2 demoted, bypassed d, charged d grant 1 1 2",
        None,
    ),
    "a level above is skipped": (
        f"{starts('r')}, +1, {starts('s')}, completed r, completed s, +1, {starts('t')}",
        "acme is charged 15 tokens",
    ),
    "a level in the middle is skipped": (
        "charged r arrival 1 1 2, bypassed r, charged r grant 1 1 2, charged s arrival 1 1 2, bypassed s, "
        "charged s grant 1 1 2, charged t arrival 1 1 2",
        "acme/search is charged 1 requests in flight",
    ),
    "the estimate only": (
        f"{starts('r')}, used r 15 10 15 30, completed r, +12, {starts('s')}",
        "acme is charged 15 tokens",
    ),
    "a refund twice": (
        f"{starts('r')}, upstream_failed r, refunded r all 5 10 15, refunded r all 5 10 15",
        "was not charged",
    ),
    "a charge twice": (f"{starts('r')}, charged r grant 5 10 15", "is charged twice"),
    "usage twice": (f"{starts('r')}, used r 5 0 5 10, used r 5 0 5 10", "usage of request r is charged"),
    "a refund of a request that was served": (
        f"{starts('r')}, completed r, refunded r all 5 10 15", "was served and is refunded"
    ),
    "a refund in spite of usage": (
        f"{starts('r')}, used r 5 0 1 6, upstream_failed r, refunded r all 5 10 15", "its usage is known"
    ),
    "no refund": (f"{starts('r')}, upstream_failed r", "was not served and is not refunded"),
    "no charge at arrival": ("queued r", "arrives and is not charged"),
    "no charge at the grant": (
        "charged r arrival 5 10 15, queued r, granted r, placed r", "starts and is not charged"
    ),
    "a node that demotes is charged beyond its limit": (
        "charged r arrival 1 9 10, bypassed r, charged r grant 1 9 10, charged s arrival 1 9 10",
        "acme/search/k1 is charged 9",
    ),
    "a demotion without need": (
        "charged d arrival 1 1 2 demoted, bypassed d, charged d grant 1 1 2", "no limit is short"
    ),
    "a demoted request keeps its band": (
        "charged r arrival 1 9 10, bypassed r, charged r grant 1 9 10, charged s arrival 1 9 10 demoted",
        "demoted to priority 0, not -10",
    ),
    "a budget is passed": (
        f"{starts('r2')}, used r2 30 0 5 35, completed r2, +3600, charged s2 arrival 5 1 6, bypassed s2, "
        "charged s2 grant 5 1 6",
        "acme/search/k2 is charged 6 units (per day)",
    ),
    "an operator tops a limit up": (
        f"{starts('r2')}, used r2 30 0 5 35, topped_up acme tokens 60000 35, "
        f"topped_up acme/search/k2 budget day 40, +1, {starts('s2')}",
        None,
    ),
    "a replica charges a limit that Redis has lost": (
        f"topped_up acme tokens 60000 -20, +3, {starts('s')}", "acme is charged 15 tokens"
    ),
    "a replica charges a budget that Redis has lost": (
        f"topped_up acme/search/k2 budget day -35, {starts('s2')}",
        "acme/search/k2 is charged 15 units",
    ),
    "nodes lose their limits while a request waits": (
        "charged r arrival 5 10 15, queued r, tenant acme, tenant acme/*, tenant */*/*, granted r, placed r",
        None,
    ),
    "a node that rejects now queues, and has charged no waiting request": (
        "charged r arrival 1 1 2, queued r, charged s arrival 1 1 2, queued s, "
        'tenant acme/* {"max_parallel":1}, granted r, charged r grant 1 1 2, placed r',
        None,
    ),
    "a new day begins a budget": (
        f"{starts('r2')}, used r2 30 0 5 35, completed r2, +86400, {starts('s2')}", None
    ),
}  # fmt: skip


def quota_log(events: str) -> Log:
    log = Log(NODES, fairness="none")
    for event in events.split(", "):
        if event.startswith("+"):
            log.now_us += int(event[1:]) * 1_000_000
            continue
        what, name, *note = event.split()
        if what == "tenant":
            log.write(what, note="\x1f".join([name, "tenants", *(note or [""])]))
            continue
        if what == "topped_up":
            log.write(what, note="\x1f".join([name, *note]))
            continue
        if name not in log.requests:
            leaf = "k2" if "2" in name else "k1"
            log.request(name, f"acme/search/{leaf}", band=LOWEST if name == "d" else 1)
        log.write(what, name, note=" ".join(note))
    return log


@cases("events, says", QUOTAS)
def test_the_audit_finds_each_broken_rule_of_quotas(events: str, says: str | None) -> None:
    found = [violation.what for violation in audit(quota_log(events).entries).of("quotas").violations]
    assert (found == []) if says is None else (len(found) == 1 and says in found[0]), found


@pytest.mark.parametrize(
    "entry", ["charged r arrival 5 1", "refunded r some 1 1 2", "used r 5 0 5", "used r 5 x 1 6"]
)
def test_an_unreadable_charge_is_an_entry_error(entry: str) -> None:
    with pytest.raises(EntryError, match="note is"):
        audit(quota_log(f"charged r arrival 1 1 2, queued r, {entry}").entries)


INNER, ROOT = "\x1e", "\x1e\x1e"
WEIGHTS = {"acme": 3.0, "acme/search": 2.0, "acme/search/k2": 4.0, "umbrella": 1.0}


class TreeQueue(Log):
    """A tree of tenants in one band, served by hierarchical start-time fair queueing. Each subclass breaks
    one rule."""

    def __init__(self) -> None:
        super().__init__({path: {"weight": weight} for path, weight in WEIGHTS.items()})
        self.v: dict[str, float] = {}  # inner node -> virtual time of its children
        self.orders: dict[str, dict[str, float]] = {}  # inner node -> its children's tags
        self.finish: dict[str, float] = {}
        self.waiting: dict[str, list[Request]] = {}

    def members(self, flow: str) -> list[tuple[str, str]]:
        """Each member of a flow's path and the inner node above, from the leaf up."""
        names = flow.split("/")
        inner = ["/".join(names[:depth]) + INNER for depth in range(len(names))]
        inner[0] = ROOT
        return list(zip([*inner[1:], flow], inner, strict=True))[::-1]

    def share(self, member: str, r: Request) -> float:
        return r.cost / WEIGHTS.get(member.removesuffix(INNER), 1.0)

    def choose(self) -> str:
        node = ROOT
        while node.endswith(INNER):
            order = self.orders[node]
            node = min(order, key=lambda member: (order[member], member))
        return node

    def admit(self, name: str, flow: str, cost: float) -> None:
        waiting = self.waiting.setdefault(flow, [])
        waiting.append(self.request(name, flow, cost=cost))
        start = None
        for member, node in self.members(flow) if len(waiting) == 1 else ():
            order = self.orders.setdefault(node, {})
            if member in order:
                break
            order[member] = max(self.v.get(node, 0.0), self.finish.get(member, 0.0))
            start = order[member] if start is None else start
        self.queued += 1
        self.show("queued", name, start)

    def serve(self) -> None:
        flow = self.choose()
        r = self.waiting[flow].pop(0)
        tags = {member: self.orders[node].pop(member) for member, node in self.members(flow)}
        for member, node in self.members(flow):
            self.v[node] = max(self.v.get(node, 0.0), tags[member])
            self.finish[member] = tags[member] + self.share(member, r)
            if self.waiting[flow] if member == flow else self.orders[member]:
                self.orders[node][member] = self.finish[member]
        self.queued -= 1
        self.stock += 1
        self.show("granted", r.id, tags[flow], by="turn", note=f"{self.share(flow, r):.17g}")

    def throttle(self, member: str, node: str) -> None:
        self.write("throttled", flow=member, tag=f"{self.orders[node].pop(member):.17g}")

    def show(self, event: str, name: str, tag: float | None, **fields: str) -> None:
        shown = "" if tag is None else f"{tag:.17g}"
        self.write(event, name, v=self.v.get(ROOT, 0.0), tag=shown, **fields)


class SkipsInnerNodes(TreeQueue):
    """All flows share alike, as if each were a child of the root."""

    def choose(self) -> str:
        return min(
            (flow for flow, waiting in self.waiting.items() if waiting),
            key=lambda flow: self.finish.get(flow, 0),
        )


class IgnoresWeightsOfNodes(TreeQueue):
    def share(self, member: str, r: Request) -> float:
        return r.cost if member.endswith(INNER) else r.cost / WEIGHTS.get(member, 1.0)


class StarvesATeam(TreeQueue):
    def choose(self) -> str:
        self.orders["acme" + INNER]["acme/search" + INNER] += 1000
        return super().choose()


def serve_tenants(queue: TreeQueue) -> Report:
    """Serve seven flows on three levels; four of the flows come late, and all are backlogged at the end."""
    flows = ["acme/search/k1", "acme/search/k2", "acme/chat/k1", "umbrella/k1", "umbrella/k2", "alone", "/k1"]
    for number in range(300):
        flow = flows[number % (3 if number < 60 else 7)]
        queue.admit(f"r{number}", flow, cost=1 + number % 3)
        if number % 2:
            queue.serve()
    return audit(queue.entries)


def test_a_correct_tree_of_tenants_shows_no_violation_at_any_level() -> None:
    report = serve_tenants(TreeQueue())
    assert [violation.what for violation in report.of("G2").violations] == []
    assert report.of("G2").checked > 300


@pytest.mark.parametrize("queue", [SkipsInnerNodes, IgnoresWeightsOfNodes, StarvesATeam])
def test_the_audit_finds_unfair_service_of_inner_nodes(queue: type[TreeQueue]) -> None:
    found = [violation.what for violation in serve_tenants(queue()).of("G2").violations]
    assert any(f"service of 'acme{more}'" in what for what in found for more in ("", "/search")), found


def test_the_audit_finds_a_turn_that_passes_a_tenant_with_a_lesser_tag() -> None:
    (first, *_) = serve_tenants(StarvesATeam()).of("G2").violations
    assert first.what == "tenant 'acme/chat' served at tag 3 while tenant 'acme/search' waits at 0.5"


def test_a_flow_of_a_throttled_tenant_is_not_served() -> None:
    queue = TreeQueue()
    for number in range(4):
        queue.admit(f"r{number}", "acme/search/k1" if number % 2 else "umbrella/k1", cost=1)
    queue.throttle("acme" + INNER, ROOT)
    queue.serve()
    assert audit(queue.entries).of("G2").violations == []
    queue.orders[ROOT]["acme" + INNER] = -1.0
    queue.serve()
    (first, *_) = audit(queue.entries).of("G2").violations
    assert first.what == "flow 'acme/search/k1' served while 'acme' is throttled"
