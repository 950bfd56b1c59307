"""Short runs with tenants, on the Lua scripts and on the model at once, with results calculated by hand."""

import json
from typing import Any

import pytest
from by_hand import Pool, many
from script_side import ScriptSide

from picker_fleet.state.store import PACKED_USAGE
from picker_tools.audit.auditor import audit

ROOMY: dict[str, Any] = {"upper_per": 100, "lower_per": 100}


def pool_of(side: ScriptSide, nodes: dict[str, dict[str, Any]], **settings: Any) -> Pool:
    """A pool with the tenants' `nodes`, by path; `settings` as in `Pool`."""
    pool = Pool(side, tenants={"separator": "/", "prices": {"m": {"answer": 3.0}}}, **settings)
    pool.call("set_tenants", "tenants", {path: json.dumps(node) for path, node in nodes.items()})
    return pool


def limit(unit: str, amount: int, per_ms: int = 1000, burst: int | None = None) -> dict[str, Any]:
    return {"unit": unit, "amount": amount, "per_ms": per_ms, "burst": amount if burst is None else burst}


def use(pool: Pool, name: str, usage: tuple[int, ...], outcome: str = "completed") -> None:
    pool.call("settle", [(name, outcome, None, None, PACKED_USAGE.pack(*usage) if usage else b"")])


def test_tenants_share_turns_first_and_then_teams_share_their_tenants_turns(side: ScriptSide) -> None:
    pool = pool_of(side, {"a": {"weight": 2}, "a/y": {"weight": 3}})
    pool.admit("runs")
    for flow in ("a/x/1", "a/x/2", "a/y/1", "b/z"):
        pool.admit(", ".join(f"{flow}-{n} flow={flow}" for n in range(12)))
    order = [name.rpartition("-")[0] for name in pool.serve(24)]
    # Of 24 turns tenant a gets two thirds, tenant b a third; team a/y gets three quarters of a's turns.
    assert {flow: order.count(flow) for flow in order} == {"b/z": 8, "a/y/1": 12, "a/x/1": 2, "a/x/2": 2}
    pool.tune(upper_per=100, lower_per=100)
    assert len(pool.granted) == 24 + 16, "a call grants at most 16 requests of tenants"


def test_a_tenant_over_its_limit_keeps_its_position_while_others_pass(side: ScriptSide) -> None:
    pool = pool_of(side, {"a": {"limits": [limit("tokens", 100, burst=20)]}}, **ROOMY, guard_share=1.0)
    text = "{flow}{n} flow={flow} prompt_tokens=9 answer_tokens=1 ttl_ms=600"
    pool.admit(many(text.replace("{flow}", "a/x"), 4))
    assert pool.granted == []  # two requests were placed without a grant
    assert pool.admit("b0 flow=b") == ["placed e1 2"]
    pool.passes(99)
    pool.beat()
    assert pool.granted == []
    pool.passes(2)  # ten tokens are refilled, enough for one request
    pool.beat()
    assert pool.granted == ["a/x2"]
    # The starvation guard does not grant the overdue request of the tenant over its limit either.
    pool.passes(99)
    pool.beat()
    assert pool.granted == ["a/x2"]


def test_reported_usage_corrects_a_charge_and_a_failure_without_usage_refunds_it(side: ScriptSide) -> None:
    node = {"limits": [limit("tokens", 60, 60_000)], "budget": {"units": 1000, "period": "month"}}
    pool = pool_of(side, {"a": node | {"over_limit": "reject", "max_parallel": 3}, "*/*": node}, **ROOMY)
    arrival = "{name} flow=a/{name} prompt_tokens=10 answer_tokens=5"
    pool.admit(", ".join(arrival.format(name=name) for name in ("used", "failed", "paid")))

    def taken() -> dict[str, float]:
        balances = pool.model.quotas.balances
        return {key.partition("\x1f")[0]: each[0] for key, each in balances.items() if "tokens" in key}

    assert taken() == {"a": 45, "a/used": 15, "a/failed": 15, "a/paid": 15}
    assert pool.admit(arrival.format(name="more")) == [
        "refused over-limit 1\x1fparallel 0 a\x1ftokens=60,15,45000"
    ]
    use(pool, "used", (20, 10, 8))
    use(pool, "used", (20, 10, 8))  # the end is reported again
    use(pool, "failed", (), "upstream_failed")
    assert taken() == {"a": 43, "a/used": 28, "a/failed": 0, "a/paid": 15}
    use(pool, "paid", (30, 0, 0), "upstream_failed")  # usage was reported, so the failed answer is charged
    assert taken() == {"a": 58, "a/used": 28, "a/failed": 0, "a/paid": 30}
    left = "\x1ftokens=60,2,58000"
    assert pool.admit(arrival.format(name="more")) == [f"refused over-limit 13\x1ftokens 60000 a{left}"]
    assert pool.admit("huge flow=a/huge prompt_tokens=61") == [
        f"refused over-burst 0\x1ftokens 60000 a{left}"
    ]
    spent = {key: values[1] for key, values in pool.model.quotas.balances.items() if "budget" in key}
    assert spent["a\x1fbudget:month"] == 20 + 3 * 8 + 30
    pool.passes(13_000)
    assert pool.admit(arrival.format(name="more"))[0].startswith("placed")


@pytest.mark.parametrize("swept", [False, True])
def test_a_limit_on_requests_in_flight_that_comes_back_counts_the_running_requests(
    side: ScriptSide, *, swept: bool
) -> None:
    node = {"a": {"max_parallel": 2, "over_limit": "reject"}}
    pool = pool_of(side, node, **ROOMY)
    pool.admit("ends flow=a/k, stays flow=a/k")
    pool.call("set_tenants", "tenants", {"a": ""})
    if swept:
        pool.sweep()
    pool.end("ends")
    pool.call("set_tenants", "tenants", {"a": json.dumps(node["a"])})
    assert pool.admit("more flow=a/k")[0].startswith("placed")
    assert pool.admit("most flow=a/k")[0].startswith("refused over-limit 1\x1fparallel 0 a")
    assert pool.model.quotas.balances["a\x1fparallel"] == (2,)


def test_a_refusal_names_the_limit_for_which_a_request_must_wait_longest(side: ScriptSide) -> None:
    reject = {"over_limit": "reject"}
    keys = reject | {"limits": [limit("requests", 1, 60_000), limit("tokens", 9)]}
    pool = pool_of(side, {"a": reject | {"max_parallel": 1}, "a/*": keys}, **ROOMY)
    pool.admit("runs flow=a/k")
    for asked, told in (
        ("flow=a/k", "over-limit 60\x1frequests 60000 a/k"),
        ("flow=a/other", "over-limit 1\x1fparallel 0 a"),
        ("flow=a/other prompt_tokens=10", "over-burst 0\x1ftokens 1000 a/other"),
    ):
        assert pool.admit(f"more {asked}")[0].startswith(f"refused {told}\x1f")


def test_the_answer_to_an_expired_request_names_the_limit_for_which_it_waited(side: ScriptSide) -> None:
    nodes = {"a": {"limits": [limit("requests", 2, 60_000)]}, "b": {"limits": [limit("requests", 9, 60_000)]}}
    pool = pool_of(side, nodes, upper_per=3)
    pool.admit("one flow=a/x, two flow=a/y, runs flow=b/x")
    pool.admit("told flow=a/x ttl_ms=600, timed flow=a/y ttl_ms=600, no-room flow=b/x ttl_ms=600", by="b")
    pool.passes(601)
    refusal = "refused over-limit 30\x1frequests 60000 a\x1frequests=2,0,59399"
    assert pool.cancel("timed", "expired", by="b") == refusal
    assert pool.told["b"][-2:] == ["expired no-room", f"{refusal}\x1f told"]
    assert [pool.of(name)[-1] for name in ("told", "timed", "no-room")] == ["expired"] * 3
    # Another replica's call ends the request before the request's own replica asks.
    pool.admit("late flow=a/x ttl_ms=600", by="b")
    pool.passes(600)
    pool.beat("a")
    assert pool.cancel("late", "expired", by="b").startswith("refused over-limit 29")
    assert audit(side.log()).violations == 0


def test_the_answer_to_a_request_that_expired_behind_a_larger_one_names_the_limit(side: ScriptSide) -> None:
    pool = pool_of(side, {"a": {"limits": [limit("tokens", 100, 60_000), limit("requests", 9)]}}, **ROOMY)
    pool.admit("runs flow=a/x prompt_tokens=60")
    pool.admit("large flow=a/x prompt_tokens=90")
    pool.admit("small flow=a/y prompt_tokens=9 ttl_ms=500")
    pool.passes(501)
    pool.beat()
    told = next(each for each in pool.told["a"] if each.endswith(" small"))
    assert told.startswith("refused over-limit 30\x1ftokens 60000 a\x1f")


def test_a_request_over_the_limit_of_a_lenient_tenant_goes_to_the_lowest_band(side: ScriptSide) -> None:
    pool = pool_of(side, {"a": {"limits": [limit("requests", 1)], "over_limit": "demote"}}, upper_per=2)
    pool.admit("first flow=a band=0, runs flow=b")
    assert pool.admit("second flow=a band=0") == ["queued 10000"]
    pool.admit("default flow=b")
    assert pool.end("first") == ["default"]
    assert pool.end("runs") == ["second"]
    assert pool.told["a"][-1].split("\x1f")[1].startswith("requests=1,0,1000;demoted=1")
    pool.admit("third flow=a band=0")
    pool.call("set_tenants", "tenants", {"a": ""})
    assert pool.end("second") == ["third"]
    assert pool.told["a"][-1].split("\x1f")[1].startswith("demoted=1"), "without the limit, too"


@pytest.mark.parametrize("end", ["settle", "cancel", "expire"])
def test_the_end_of_a_request_lets_the_next_request_of_its_tenant_start(side: ScriptSide, end: str) -> None:
    pool = pool_of(side, {"a": {"max_parallel": 1}}, **ROOMY, lease_ms=1000)
    pool.admit("one flow=a/x, two flow=a/y, other flow=b")
    assert pool.granted == ["other"]
    if end == "settle":
        pool.end("one")
    elif end == "cancel":
        pool.cancel("one")
    else:
        pool.passes(1000)
        pool.sweep()
    assert pool.granted[-1] == "two"


@pytest.mark.parametrize(("how", "granted"), [("used less", "big"), ("unserved", "big"), ("left", "two")])
def test_freed_balance_starts_a_waiting_request_at_once(side: ScriptSide, how: str, granted: str) -> None:
    pool = pool_of(side, {"a": {"budget": {"units": 30, "period": "month"}}}, **ROOMY)
    for name, tokens in (("one", 20), ("big", 25), ("two", 10)):
        pool.admit(f"{name} flow=a/{name} prompt_tokens={tokens}")
    assert pool.granted == []  # `one` is placed; `big` waits for the next month, `two` waits behind `big`
    if how == "left":
        pool.cancel("big")
    else:
        use(pool, "one", *[((5, 0, 0),), ((), "upstream_failed")][how == "unserved"])
    assert pool.granted == [granted]


def test_a_changed_limit_applies_to_waiting_requests_and_grants_no_second_burst(side: ScriptSide) -> None:
    pool = pool_of(side, {"a/*": {"limits": [limit("requests", 60, 60_000, burst=1)]}}, **ROOMY)
    pool.admit("one flow=a/x, two flow=a/x, three flow=a/y")
    assert pool.model.queue.bands[0].inner["a"].throttled.keys() == {"a/x"}
    node = json.dumps({"limits": [limit("requests", 60, 60_000, 2)]})
    pool.call("set_tenants", "tenant_changes", {"a/x": node})
    assert pool.granted == ["three", "two"]
    pool.admit("four flow=a/x")
    pool.call("set_tenants", "tenant_changes", {"a/x": ""})
    assert pool.granted == ["three", "two"]
    pool.passes(2001)
    pool.beat()
    assert pool.granted == ["three", "two", "four"]


def test_a_waiting_request_is_charged_once_through_changes_of_over_limit(side: ScriptSide) -> None:
    queueing = {"limits": [limit("requests", 3, 60_000)]}
    pool = pool_of(side, {"a": queueing}, upper_per=1)

    def change(over_limit: str) -> float:
        pool.call("set_tenants", "tenant_changes", {"a": json.dumps(queueing | {"over_limit": over_limit})})
        return pool.model.quotas.balances["a\x1frequests:60000"][0]

    pool.admit("one flow=a/x, two flow=a/y, three flow=a/z, four flow=a/x")
    assert change("reject") == 1
    pool.admit("five flow=a/y")
    assert change("queue") == 2  # requests `one` and `five` are charged
    assert pool.end("one") == ["four"]
    assert change("reject") == 3
    assert pool.end("four") == ["five"]
    assert change("demote") == 3
    use(pool, "five", "", "upstream_failed")
    assert change("queue") == 3  # request three is charged instead of request five
    assert pool.those("evicted") == ["two"]  # request two may no longer wait when its turn comes
    assert any(told.startswith("refused over-limit ") and told.endswith(" two") for told in pool.told["a"])
    assert audit(side.log()).violations == 0


def test_a_waiting_request_above_a_lowered_burst_is_refused_and_others_go_on(side: ScriptSide) -> None:
    pool = pool_of(side, {"a": {"limits": [limit("tokens", 100, 60_000)]}}, **ROOMY)
    pool.admit("one flow=a/x prompt_tokens=30, big flow=a/y prompt_tokens=80, two flow=a/z prompt_tokens=10")
    pool.admit("three flow=a/z prompt_tokens=25")
    assert pool.granted == []
    pool.call("set_tenants", "tenants", {"a": json.dumps({"limits": [limit("tokens", 100, 60_000, 50)]})})
    assert pool.granted == ["two"]
    assert "evicted big " in pool.events
    assert any(told.startswith("refused over-burst 0\x1ftokens 60000 a") for told in pool.told["a"])
    pool.events.clear()
    pool.beat()
    assert pool.events == [], "request three goes on waiting"


def test_a_new_limit_on_requests_in_flight_counts_running_before_waiting_requests(side: ScriptSide) -> None:
    pool = pool_of(side, {"a": {"weight": 1}}, upper_per=2)
    pool.admit("one flow=a/x, two flow=a/y, three flow=a/z, four flow=a/x")
    pool.call("set_tenants", "tenants", {"a": json.dumps({"max_parallel": 2, "over_limit": "reject"})})
    assert pool.end("one") == ["four"]
    pool.call("set_tenants", "tenants", {"a": json.dumps({"max_parallel": 1, "over_limit": "reject"})})
    assert pool.end("two") == []
    assert pool.those("evicted") == ["three"]
    assert audit(side.log()).violations == 0


def test_a_request_that_returns_to_the_queue_lets_its_tenants_next_request_start(side: ScriptSide) -> None:
    caps = {"e1": 1, "e2": 1, "e3": 1}
    pool = pool_of(side, {"a": {"max_parallel": 1}}, endpoints=3, **ROOMY, caps=caps)
    pool.admit("runs flow=b candidates=e1, one flow=a/x candidates=e1")
    pool.admit("two flow=a/y")
    assert pool.granted == ["one"]
    assert pool.place("one", "e1").startswith("queued")
    assert pool.granted == ["one", "two"]


@pytest.mark.parametrize("over_limit", ["queue", "reject", "demote"])
def test_a_new_limit_of_a_tenant_charges_waiting_requests(side: ScriptSide, over_limit: str) -> None:
    pool = pool_of(side, {}, upper_per=1)
    pool.admit("runs flow=b, " + many("a{n} flow=a prompt_tokens=10", 3))
    node = json.dumps({"limits": [limit("tokens", 20, 60_000)], "over_limit": over_limit})
    pool.call("set_tenants", "tenants", {"a": node})
    pool.serve()
    assert pool.granted == ["a0", "a1"]
    refused = [told.split("\x1f")[1] for told in pool.told["a"] if told.startswith("refused over-limit")]
    assert pool.those("evicted") == ([] if over_limit == "queue" else ["a2"])
    assert refused == ([] if over_limit == "queue" else ["tokens 60000 a"])
    assert audit(side.log()).violations == 0
