"""The admin API shows and changes the tree of tenants, as the scripts see the tree."""

import asyncio
from collections import Counter
from typing import Any

import orjson
import pytest
from metrics_page import samples
from proxy import proxy_to
from script_fleet import OpenFleet, Replica
from starlette.requests import Request

from picker_fleet.admin import models, tenants
from picker_fleet.admin.fleet_state import FleetStateCache
from picker_fleet.admin.protection import Refused
from picker_fleet.admin.tenants import PAGE, TenantTree
from picker_fleet.domain.config import Settings
from picker_fleet.domain.errors import ConfigError
from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.domain.tenants import Budget, Limit, Node, Tenants, Tree
from picker_fleet.fleet.tenant_metrics import TenantMetrics
from picker_fleet.fleet.tenant_nodes import TenantNodes
from picker_fleet.state.reads import QueueSnapshots, SnapshotTimes

TENANTS = {"separator": "/", "prices": {}}
TOKENS = Limit(tokens=60, per="1h", burst=100)


async def views_of(a: Replica, *nodes: Node) -> tuple[TenantTree, FleetStateCache]:
    """The uncached views of a replica whose configuration has `nodes`; the nodes are published."""
    store, times = a.store, SnapshotTimes(max_age_per_queue_s=0.0)
    store.queue_snapshots = QueueSnapshots(store._client, store.reads, store.keys.queue_snapshot, times)
    assert await a.store.set_tenants("tenants", {node.path: node.shared() for node in nodes})
    cache = FleetStateCache(a.store, 5)
    settings = Settings(tenants=Tenants(nodes=nodes))
    known, followed = KnownFleet(settings), TenantNodes(store, settings)

    async def follow() -> None:
        known.tenants = await followed.follow("1") or known.tenants

    return TenantTree(store, cache, known, follow), cache


async def node(views: TenantTree, path: str) -> models.Tenant:
    found = (await views.page(path)).tenant
    assert found is not None
    return found


async def test_a_node_shows_settings_balances_shares_and_how_long_its_requests_wait(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1, tenants=TENANTS, checked=False) as (_, a):
        acme = Node(path="acme", weight=3.0, limits=(TOKENS,), budget=Budget(units=1000.0, period="month"))
        teams = Node(path="acme/*", max_parallel_requests=2, over_limit="reject")
        views, cache = await views_of(a, acme, teams, Node(path="umbra"))
        await a.admit("runs", flow="acme/search/k1", prompt_tokens=60.0, answer_tokens=20.0)
        await a.admit("w1", flow="acme/search/k1", prompt_tokens=40.0)
        await a.admit("w2", flow="acme/chat/k2", prompt_tokens=40.0)
        for name in ("w3", "w4"):
            await a.admit(name, flow="umbra/k3")
        top, umbra = (await views.page("")).children
        assert (top.path, top.source, top.weight) == ("acme", "configuration", 3)
        assert (top.queued, top.fair_share) == (2, 0.75)
        assert (umbra.path, umbra.queued, umbra.fair_share, umbra.limits) == ("umbra", 2, 0.25, [])
        tokens, month = top.limits
        assert (tokens.unit, tokens.per, tokens.amount, tokens.burst) == ("tokens", "1h", 60.0, 100.0)
        assert 20 <= tokens.remaining < 21
        assert tokens.reset_s == pytest.approx(4800, abs=60)
        assert (month.unit, month.per, month.burst, month.remaining) == ("budget", "month", 1000.0, 920.0)
        assert not top.waits
        await a.settle("runs")  # request w1's turn has come, but acme lacks 20 tokens
        below = await views.page("acme")
        assert below.tenant is not None
        assert below.tenant.waits_s == pytest.approx(1200, abs=60)
        assert below.tenant.served_cost == 1.0
        of = [(each.path, each.source, each.settings_of) for each in below.children]
        assert of == [(f"acme/{name}", "configuration", "acme/*") for name in ("*", "chat", "search")]
        search = below.children[-1]
        (parallel,) = search.limits
        assert (search.over_limit, search.in_flight, parallel.burst, parallel.per) == ("reject", 1, 2.0, None)
        leaf = await node(views, "acme/search/k1")
        assert (leaf.source, leaf.queued, leaf.limits, leaf.fair_share) == ("default", 1, [], None)
        # The list of flows has the leaves, and says that all flows below acme wait.
        queues = (await cache.get()).queues
        shown = [(each.name, each.throttled) for each in queues]
        assert shown == [("umbra/k3", False), ("acme/chat/k2", True), ("acme/search/k1", True)]
        (row,) = await a.store.reads.flow_queue("acme/chat/k2")
        assert row.throttled
        with pytest.raises(Refused):
            await views.page("nobody")
        # Only nodes with settings for their own path have metrics, which the leader shows.
        clock_s = [0.0]
        shown_metrics = TenantMetrics(a.store, a.metrics, lambda: clock_s[0])
        await shown_metrics.look(views.tree(), "1")
        a.metrics.over_limit("tokens 3600000 acme", Tree([Node(path="acme")]))
        a.metrics.over_limit("parallel 0 acme/chat", Tree([Node(path="acme/*")]))
        a.metrics.demoted("acme/chat/k2", Tree([Node(path="acme", over_limit="demote")]))
        page = {key: value for key, value in samples(a.metrics).items() if key[0].startswith("epp_tenant")}
        left = page.pop(("epp_tenant_remaining", "per=1h", "tenant=acme", "unit=tokens"))
        assert left == pytest.approx(20, abs=2)
        assert page == {
            ("epp_tenant_remaining", "per=month", "tenant=acme", "unit=budget"): 920,
            ("epp_tenant_served_cost_total", "tenant=acme"): 1,
            ("epp_tenant_served_cost_total", "tenant=umbra"): 1,
            ("epp_tenant_over_limit_total", "action=reject", "tenant=acme", "unit=tokens"): 1,
            ("epp_tenant_over_limit_total", "action=reject", "tenant=other", "unit=parallel"): 1,
            ("epp_tenant_over_limit_total", "action=demote", "tenant=acme"): 1,
        }
        # After Redis has lost charges, the leader charges them again, once, less the tokens since regained.
        for unit, per in (("tokens", "3600000"), ("budget", "month")):
            assert await a.store.top_up_tenant("acme", unit, per, 1000.0)  # as if Redis had lost the charges
        clock_s[0] = 1800.0
        for epoch in ("2", "2", "3"):
            await shown_metrics.look(views.tree(), epoch)
            tokens, month = (await node(views, "acme")).limits
            assert tokens.remaining == pytest.approx(50, abs=2)
            assert month.remaining == 920
        await shown_metrics.look(None, "3")
        assert not [key for key in samples(a.metrics) if key[0] == "epp_tenant_remaining"]


@pytest.mark.parametrize(("most", "waits"), [(1, True), (2, False)])
async def test_a_leaf_that_waits_for_its_flows_limit_does_not_wait_for_its_tenants_limit(
    fleet: OpenFleet, most: int, waits: bool
) -> None:
    async with fleet("a", upper_per=9, tenants=TENANTS) as (_, a):
        views, _ = await views_of(a, Node(path="acme/k", max_parallel_requests=most))
        for name in ("runs", "queued"):
            await a.admit(name, flow="acme/k", limit=1)
        leaf = await node(views, "acme/k")
        assert (leaf.queued, leaf.waits, leaf.waits_s) == (1, waits, None)


async def test_a_flow_without_a_tenant_is_listed_at_the_top(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1, tenants=TENANTS) as (_, a):
        views, _ = await views_of(a, Node(path="acme"))
        for name, flow in (("runs", "acme/k"), ("w1", "/k"), ("w2", "//k"), ("w3", "acme/k")):
            await a.admit(name, flow=flow)
        top = (await views.page("")).children
        assert [(each.path, each.queued) for each in top] == [("/", 1), ("/k", 1), ("acme", 1)]
        assert [each.fair_share for each in top] == pytest.approx([1 / 3] * 3)
        assert [each.path for each in (await views.page("/")).children] == ["//k"]
        assert (await node(views, "/k")).queued == 1


async def test_a_top_up_whose_reply_was_lost_counts_once(fleet: OpenFleet, valkey_url: str) -> None:
    async with proxy_to(valkey_url) as proxy, fleet("a", through={"a": proxy.url}, tenants=TENANTS) as (_, a):
        await views_of(a, Node(path="acme", budget=Budget(units=100.0, period="month")))
        proxy.lose_replies = 1
        assert await a.store.top_up_tenant("acme", "budget", "month", -30.0) == 70.0


async def test_a_change_of_a_node_and_a_top_up_are_in_force_at_once_and_name_both_values(
    fleet: OpenFleet,
) -> None:
    async with fleet("a", tenants=TENANTS) as (_, a):
        views, _ = await views_of(a, Node(path="acme", limits=(Limit(tokens=60, per="1m", burst=100),)))
        call = Request({"type": "http", "state": {}})
        await a.admit("r1", flow="acme/k", prompt_tokens=90.0)
        await a.admit("r2", flow="acme/k", prompt_tokens=60.0)
        assert (await node(views, "acme")).waits
        change = await views.top_up(call, "acme", models.TopUp(unit="tokens", per="1m", amount=5000))
        assert change.old is not None
        assert change.new == {"unit": "tokens", "per": "1m", "remaining": pytest.approx(100, abs=0.1)}
        assert orjson.loads(call.state.detail) == change.model_dump()
        await a.settle("r1")
        shown = await node(views, "acme")
        assert (shown.waits, shown.queued) == (False, 0)  # no request waits: r2 runs
        with pytest.raises(Refused, match="no limit of requests per 1h"):
            await views.top_up(call, "acme", models.TopUp(unit="requests", per="1h", amount=1))
        with pytest.raises(Refused, match="acme/\\* stands for other nodes"):
            await views.top_up(call, "acme/*", models.TopUp(unit="tokens", per="1m", amount=1))

        body: Any = {"over_limit": "reject", "limits": [{"tokens": 10, "per": "1m"}]}
        put = await views.put(call, "acme/k", body)
        assert (put.old, put.new) == (None, {**body, "limits": [{**body["limits"][0], "burst": 10}]})
        assert (await node(views, "acme/k")).source == "operator"
        above, below = ({"limits": [{"tokens": tokens, "per": "1m"}]} for tokens in (61, 9))
        for path, bad in (
            *(("acme/k", each) for each in (above, {"wait": 1}, {"limits": [{"per": "1m"}]}, {"path": "b"})),
            ("acme", below),
        ):
            with pytest.raises(ConfigError, match="acme/k"):
                await views.put(call, path, bad)
        undone = await views.undo(call, "acme/k")
        assert (undone.old, undone.new) == (put.new, None)
        with pytest.raises(Refused, match="no settings"):
            await node(views, "acme/k")
        with pytest.raises(Refused, match="no operator"):
            await views.undo(call, "acme/k")


async def test_a_change_is_checked_against_the_last_change_by_another_replica(fleet: OpenFleet) -> None:
    async with fleet("a", "b", tenants=TENANTS) as (_, a, b):
        acme = Node(path="acme", limits=(Limit(tokens=60, per="1m"),))
        (views, _), (others, _) = await views_of(a, acme), await views_of(b, acme)
        call = Request({"type": "http", "state": {}})
        assert [each.path for each in (await others.page("")).children] == ["acme"]
        for tokens in (600, 500):
            body: Any = {"limits": [{"tokens": tokens, "per": "1m"}]}
            await views.put(call, "acme", body)
            await others.put(call, "acme/k", body)
            await others.undo(call, "acme/k")
        with pytest.raises(ConfigError, match="acme/k"):
            await others.put(call, "acme/k", {"limits": [{"tokens": 501, "per": "1m"}]})
        await views.put(call, "umbra", {})
        assert [each.path for each in (await others.page("")).children] == ["acme", "umbra"]


async def test_of_two_changes_at_once_the_later_is_checked_against_the_earlier(fleet: OpenFleet) -> None:
    async with fleet("a", "b", tenants=TENANTS) as (_, a, b):
        (views, _), (others, _) = await views_of(a, Node(path="acme")), await views_of(b, Node(path="acme"))

        async def put(through: TenantTree, path: str, tokens: int) -> models.TenantChange:
            call = Request({"type": "http", "state": {}})
            return await through.put(call, path, {"limits": [{"tokens": tokens, "per": "1m"}]})

        for _ in range(10):
            for above in (views, others):
                await put(views, "acme", 100)
                await put(views, "acme/k", 50)
                changes = put(above, "acme", 60), put(views, "acme/k", 90)
                made = await asyncio.gather(*changes, return_exceptions=True)
                assert [type(each) for each in made].count(ConfigError) == 1, made
                await put(views, "acme/k", 1)


async def test_the_flows_of_a_large_tree_are_read_in_few_calls_and_children_by_pages(
    fleet: OpenFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet("a", full=True, tenants=TENANTS, total_capacity=3000, checked=False) as (_, a):
        names = [f"t{n % 60:02d}/team{n % 3}/k{n}" for n in range(240)]
        for at, name in enumerate(names):
            await a.admit(f"r{at}", flow=name, band=at % 2)
        views, cache = await views_of(a, Node(path="t00"))
        queues = (await cache.get()).queues
        assert sorted(each.name for each in queues) == sorted(names)
        assert [each.order_key for each in queues] == sorted(each.order_key for each in queues)
        weighed = Counter[str]()
        monkeypatch.setattr(tenants, "_weight", lambda path, *_: weighed.update([path]) or 1.0)
        first = await views.page("")
        assert (len(first.children), first.total) == (PAGE, 60)
        assert weighed.total() == 60 + PAGE, "the work grows with the children, not with their square"
        second = await views.page("", first.cursor)
        assert [each.path for each in (*first.children, *second.children)] == [f"t{n:02d}" for n in range(60)]
        assert second.cursor is None
