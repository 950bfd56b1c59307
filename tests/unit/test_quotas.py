"""Tenants without Redis: shares at each level of the tree, and each replica's share of the limits."""

import asyncio
import datetime
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from local_requests import ask, rules, start, waiting
from metrics_page import samples

from picker_fleet.admission.local_gate import LocalGate
from picker_fleet.admission.local_queue import LocalQueue
from picker_fleet.admission.quotas import Quotas, Usage, period_of
from picker_fleet.domain.bands import Band
from picker_fleet.domain.errors import DeadlineExceeded, OverBurst, OverLimit
from picker_fleet.domain.tenants import Node, Price, Tree
from picker_fleet.telemetry.metrics import Metrics

PATHS = ("a", "a/x", "a/y", "a/x/1", "a/x/2", "b", "b/z", "b/z/1", "c")


def tree(**nodes: dict[str, Any]) -> Tree:
    """The tree of the nodes given by path; `any` stands for `*`."""
    return Tree([Node(path="*" if path == "any" else path, **settings) for path, settings in nodes.items()])


@given(
    st.lists(st.sampled_from(PATHS), min_size=2, unique=True),
    st.dictionaries(st.sampled_from(PATHS), st.sampled_from([0.5, 1.0, 3.0])),
    st.lists(st.sampled_from([1.0, 2.0, 7.0]), min_size=5, max_size=5),
)
def test_sibling_tenants_share_service_by_weight_at_each_level_of_the_tree(
    flows: Sequence[str], weights: dict[str, float], costs: Sequence[float]
) -> None:
    found = Tree([Node(path=path, weight=weight) for path, weight in weights.items()])
    queue = LocalQueue(rules(tree=found, total_capacity=10**6, flow_capacity=10**6))
    numbers = itertools.count()
    for flow in flows:
        for _ in range(30):
            cost = costs[next(numbers) % len(costs)]
            queue.offer(ask(f"r{next(numbers)}", flow=flow), cost, 0.0)
    served = Counter[str]()
    most = max(costs)
    for _ in range(30):  # after so few turns every flow still has waiting requests
        turn = queue.turn(0.0)
        assert turn is not None
        queue.serve(*turn)
        for path in found.paths(turn[0].flow):
            served[path] += turn[0].cost
        # Leave out paths that are both a flow and above other flows, since such a path has two children.
        leaves = [flow for flow in flows if not any(each.startswith(f"{flow}/") for each in flows)]
        nodes = {path for flow in leaves for path in found.paths(flow)} - (set(flows) - set(leaves))
        for one, other in itertools.combinations(sorted(nodes), 2):
            if one.rpartition("/")[0] == other.rpartition("/")[0]:
                w, u = weights.get(one, 1.0), weights.get(other, 1.0)
                assert abs(served[one] / w - served[other] / u) <= most / w + most / u + 1e-9


ARRIVALS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 400), st.integers(1, 60)), max_size=60)


@given(ARRIVALS, st.integers(1, 4), st.sampled_from(["queue", "reject"]))
def test_all_replicas_together_grant_the_burst_and_the_rate_of_a_limit(
    arrivals: list[tuple[int, int, int]], live: int, over_limit: str
) -> None:
    now_ms = [0.0]
    limit = {"tokens": 100, "per": "1s", "burst": 50}
    found = tree(acme={"limits": [limit], "over_limit": over_limit})
    replicas = [Quotas(found, {}, lambda: now_ms[0], live=live) for _ in range(live)]
    granted = 0.0
    for number, (replica, step_ms, tokens) in enumerate(arrivals):
        now_ms[0] += step_ms
        quotas, name = replicas[replica % live], str(number)
        lack = quotas.arrive(ask(name, flow="acme/key", prompt_tokens=tokens - 1, answer_tokens=1))
        assert (lack is not None and lack.over_burst) == (tokens > 50)
        if lack is None and quotas.lacking(name) is None:
            quotas.start(name)
            granted += tokens
        # A replica may grant one request that is larger than its share of the burst.
        assert granted <= 50 + 0.1 * now_ms[0] + (50 * live if live > 1 else 0) + 1e-6


def test_reported_usage_corrects_a_charge_and_a_failure_without_usage_refunds_it() -> None:
    budget = {"units": 1000.0, "period": "day"}
    node = {"limits": [{"tokens": 100, "per": "1m"}], "budget": budget, "max_parallel_requests": 2}
    prices = {"m": Price(prompt=1.0, cached=0.1, answer=3.0)}
    quotas = Quotas(tree(acme=node), prices, lambda: 86_400_000.0)
    for name in ("served", "failed", "gone"):
        assert quotas.arrive(ask(name, flow="acme", prompt_tokens=30, answer_tokens=10)) is None
    for name in ("served", "failed"):
        assert quotas.lacking(name) is None
        quotas.start(name)
        quotas.start(name)  # a retry is not charged again
    assert quotas.lacking("gone") == ("acme", float("inf"))  # the limit of two in flight is reached
    assert quotas.quota("served") == "tokens=100,20,48000"
    quotas.use("served", Usage(20, 10, 5))
    assert quotas.eased() == ["acme", "acme\x1e"]
    quotas.end("served", unserved=False)
    assert quotas.eased() == ["acme", "acme\x1e"]
    quotas.end("served", unserved=True)
    assert quotas.eased() == []
    quotas.end("failed", unserved=True)
    assert quotas.balances["acme\x1fbudget:day"] == (1, 10 + 10 * 0.1 + 15)
    quotas.end("gone", unserved=True)  # request `gone` was never charged
    assert quotas.balances["acme\x1ftokens:60000"] == (25, 86_400_000)


@given(st.datetimes(datetime.datetime(1970, 1, 1), datetime.datetime(2199, 12, 31)))
def test_a_budgets_period_ends_where_the_next_period_begins(time: datetime.datetime) -> None:
    now_ms = (time - datetime.datetime(1970, 1, 1)) // datetime.timedelta(milliseconds=1)
    for name in ("day", "week", "month"):
        number, left_ms = period_of(name, now_ms)
        assert 0 < left_ms <= 31 * 86_400_000
        assert period_of(name, now_ms + left_ms - 1)[0] == number
        assert period_of(name, now_ms + left_ms)[0] == number + 1
    month = time.replace(day=1) + datetime.timedelta(days=32)
    assert period_of("month", now_ms)[0] == time.year * 12 + time.month - 1
    assert now_ms + period_of("month", now_ms)[1] == (
        month.replace(day=1, hour=0, minute=0, second=0, microsecond=0) - datetime.datetime(1970, 1, 1)
    ) // datetime.timedelta(milliseconds=1)


def gate_of(found: Tree, **fields: Any) -> tuple[LocalGate, Quotas]:
    quotas = Quotas(found, {}, lambda: asyncio.get_running_loop().time() * 1000, **fields)
    return LocalGate(Metrics(), 100.0, 100.0, rules(tree=found, guard_share=0), quotas=quotas), quotas


async def test_a_request_over_its_tenants_limit_waits_and_others_pass() -> None:
    gate, _ = gate_of(tree(acme={"limits": [{"requests": 20, "per": "1s", "burst": 2}]}))
    assert await start(gate, "a1", flow="acme/x")
    assert await start(gate, "a2", flow="acme/y")
    [third] = await waiting(gate, "a3", flow="acme/z")
    [fourth] = await waiting(gate, "a4", flow="acme/x")
    assert await start(gate, "other", flow="beta")
    assert gate.waiting == 2
    assert await third  # 50 ms later the limit has room for one more request
    assert await fourth
    assert gate.free == 95.0


async def test_the_answer_to_a_request_that_waited_its_ttl_for_a_limit_names_the_limit() -> None:
    gate, quotas = gate_of(tree(acme={"limits": [{"requests": 1, "per": "1h"}]}))
    assert await start(gate, "runs", flow="acme/x")
    [late] = await waiting(gate, "late", flow="acme/y", ttl_s=0.05)
    [own] = await waiting(gate, "own", flow="acme/y", ttl_s=0.05, by_client=True)
    with pytest.raises(OverLimit, match=r"acme: 1 requests per 1h; retry in 3600 s") as refused:
        await late
    assert (refused.value.retry_after_s, refused.value.quota[:13]) == (3600, "requests=1,0,")
    with pytest.raises(DeadlineExceeded):
        await own
    assert quotas.charges.keys() == {"runs"}


async def test_the_answer_to_a_request_that_expired_behind_a_larger_request_names_the_limit() -> None:
    gate, _ = gate_of(tree(acme={"limits": [{"tokens": 100, "per": "1h"}]}))
    assert await start(gate, "runs", flow="acme/x", prompt_tokens=60)
    [large] = await waiting(gate, "large", flow="acme/x", prompt_tokens=90)
    [small] = await waiting(gate, "small", flow="acme/y", prompt_tokens=9, ttl_s=0.05)
    with pytest.raises(OverLimit, match=r"acme: 100 tokens per 1h; retry in 1800 s"):
        await small
    large.cancel()


async def test_a_tenants_next_request_starts_when_one_in_flight_ends() -> None:
    # This replica's share is one of two requests in flight.
    gate, quotas = gate_of(tree(any={"max_parallel_requests": 2}), live=2)
    assert await start(gate, "a1", flow="acme/x")
    [second, cancelled] = await waiting(gate, "a2", "a3", flow="acme/y")
    cancelled.cancel()
    gate.end_charge("a1", unserved=False)
    gate.release(1.0)
    assert await second
    [third] = await waiting(gate, "a4", flow="acme/z")
    # The end of a request that another replica started frees a slot only there.
    gate.end_charge("elsewhere", unserved=False)
    gate.release(1.0)
    assert not third.done()
    gate.end_charge("a2", unserved=False)
    gate.release(1.0)
    assert await third
    assert quotas.charges.keys() == {"a4"}


async def test_freed_balance_starts_a_waiting_request_at_once() -> None:
    gate, _ = gate_of(tree(acme={"budget": {"units": 30.0, "period": "month"}}))
    assert await start(gate, "one", flow="acme/x", prompt_tokens=20)
    [big] = await waiting(gate, "big", flow="acme/y", prompt_tokens=25)
    [two] = await waiting(gate, "two", flow="acme/z", prompt_tokens=10)
    big.cancel()
    assert await two
    [last] = await waiting(gate, "last", flow="acme/z", prompt_tokens=15)
    gate.end_charge("one", unserved=False, usage=Usage(5, 0, 0))
    gate.release(1.0)
    assert await last


async def test_a_request_over_the_limit_is_refused_or_demoted_as_its_tenant_chooses() -> None:
    limit = [{"tokens": 100, "per": "1h"}]
    strict, lax = {"limits": limit, "over_limit": "reject"}, {"limits": limit, "over_limit": "demote"}
    gate, quotas = gate_of(tree(strict=strict, lax=lax))
    for flow in ("strict/x", "lax/x"):
        assert await start(gate, flow, flow=flow, prompt_tokens=90)
    with pytest.raises(OverLimit, match="strict: 100 tokens per 1h") as refused:
        await start(gate, "r", flow="strict/y", prompt_tokens=20)
    assert refused.value.retry_after_s == 360
    with pytest.raises(OverBurst):
        await start(gate, "r", flow="strict/y", prompt_tokens=101)
    assert quotas.charges.keys() == {"strict/x", "lax/x"}
    gate.limit_budget(0.0)
    [demoted] = await waiting(gate, "demoted", flow="lax/y", prompt_tokens=500, band=Band.CRITICAL)
    [plain] = await waiting(gate, "plain", flow="beta")
    assert gate.lengths() == {"Critical": 0, "Default": 1, "Sheddable": 1}
    gate.release(1.0)
    assert await plain
    gate.release(1.0)
    assert await demoted
    counts = {
        key[1:]: n for key, n in samples(gate._metrics).items() if key[0] == "epp_tenant_over_limit_total"
    }
    assert counts == {
        ("action=reject", "tenant=strict", "unit=tokens"): 2,
        ("action=demote", "tenant=lax"): 1,
    }


async def test_an_outage_begins_with_the_balances_that_redis_reported() -> None:
    now_ms = 1_000_000.0
    found = tree(
        acme={"limits": [{"tokens": 600, "per": "1m"}, {"requests": 600, "per": "1m"}]},
        any={"limits": [{"requests": 60, "per": "1m"}]},
    )
    whole, share = (Quotas(found, {}, lambda: now_ms, live=live) for live in (1, 3))
    for n in range(2):
        whole.arrive(ask(str(n), flow="acme/x", prompt_tokens=240))
        whole.start(str(n))
    share.take_over("acme/x", whole.quota("1"), now_ms)
    share.take_over("acme/x", "demoted=1", now_ms)
    # Of 120 tokens and 598 requests this replica has a third.
    assert share.arrive(ask("a", flow="acme/y", prompt_tokens=40)) is None
    assert share.lacking("a") is None
    assert share.arrive(ask("b", flow="acme/y", prompt_tokens=41)) is None
    assert share.lacking("b") == ("acme\x1e", pytest.approx(1 / 600 * 60_000 * 3))
    # The balances of another tenant are unknown, so this replica has a third of the burst.
    for n in range(20):
        assert share.arrive(ask(f"o{n}", flow="other/x")) is None
        assert share.lacking(f"o{n}") is None
        share.start(f"o{n}")
    assert share.arrive(ask("more", flow="other/x")) is None
    assert share.lacking("more") is not None
