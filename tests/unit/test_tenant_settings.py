"""Tenants: their configuration, the flows that headers name, and the limits that clients are shown."""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import orjson
import pytest
from extproc_client import PLACEMENT, Talk, body, headers, response_headers, set_headers
from tables import cases

from picker_fleet.admission.reports import Reports
from picker_fleet.admission.waits import refusal
from picker_fleet.domain.config import Settings, parse
from picker_fleet.domain.errors import BadRequest, ConfigError, OverBurst, OverLimit
from picker_fleet.domain.request import Completion, InferenceRequest, Outcome
from picker_fleet.domain.tenants import Node, Tenants, Tree
from picker_fleet.endpoints.discovery import FileFault
from picker_fleet.fleet.tenant_nodes import TenantNodes, nodes_in
from picker_fleet.ingress.intake import Intake, read_body
from picker_fleet.ingress.quota_headers import NAMES, quota_headers
from picker_fleet.state.accounting_token import Keyring
from picker_fleet.state.replies import HeartbeatReply, Refused, Verdict
from picker_fleet.state.schema import Refusal
from picker_fleet.state.store import Store
from picker_fleet.telemetry.logs import OneASecond

LEADER = cast(HeartbeatReply, Mock(leader=True, epoch="1"))
FOLLOWER = cast(HeartbeatReply, Mock(leader=False, epoch="1"))
ASK = orjson.dumps({"model": "m", "prompt": "p"})
LIMIT = {"tokens": 1000, "per": "1m"}
BUDGET = {"units": 5, "period": "day"}


def node(path: str = "acme", **members: Any) -> dict[str, Any]:
    return {"path": path, **members}


def fault(settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(settings)
    return str(caught.value)


def asked(values: Mapping[str, str] | None = None, settings: Settings | None = None) -> InferenceRequest:
    raw = {key: value.encode() for key, value in (values or {}).items()}
    intake = Intake(settings or parse({}), new_id=lambda: "made", keys=Keyring())
    return intake.request(read_body(ASK), raw, subset=None, trusted=False)


def tree(*nodes: dict[str, Any]) -> Tree:
    return Tree(Tenants.model_validate({"nodes": nodes}).nodes)


@cases("section, told", {
    "a path twice": ({"nodes": [node(), node()]}, "node acme: is there twice"),
    "an empty segment": ({"nodes": [node("acme//key")]}, "node 'acme//key': has an empty segment"),
    "a longer path than a flow": ({"nodes": [node("a" * 128 + "/" + "b" * 128)]}, "is longer than 256 bytes"),
    "nine levels": ({"nodes": [node("1/2/3/4/5/6/7/8/9")]}, "has 9 levels; at most 8"),
    "a control character": ({"nodes": [node("a\x1fb")]}, "contains a control character"),
    "a pattern": ({"nodes": [node("acme/key-*")]}, "node 'acme/key-*': '*' must be a whole segment (acme/*)"),
    "a * within": ({"nodes": [node("acme/*/key")]}, "'*' stands only in the last segment"),
    "an unknown member": ({"nodes": [node(children=[])]}, "nodes.0 (acme).children: unknown key"),
    "a limit of no unit": ({"nodes": [node(limits=[{"per": "1m"}])]}, "tenants.nodes.0 (acme).limits.0: "),
    "a limit of two units": ({"nodes": [node(limits=[{**LIMIT, "requests": 1}])]}, "has requests and tok"),
    "two limits of one kind": ({"nodes": [node(limits=[LIMIT, LIMIT])]}, "two limits of tokens per 1m"),
    "no amount": ({"nodes": [node(limits=[{**LIMIT, "tokens": 0}])]}, "(acme).limits.0.tokens: "),
    "no burst": ({"nodes": [node(limits=[{**LIMIT, "burst": 0}])]}, "(acme).limits.0.burst: "),
    "another period": ({"nodes": [node(limits=[{**LIMIT, "per": "2m"}])]}, "(acme).limits.0.per: "),
    "no weight": ({"nodes": [node(weight=0)]}, "tenants.nodes.0 (acme).weight: "),
    "a limit above": (
        {"nodes": [node(limits=[LIMIT]), node("acme/a/b", limits=[{**LIMIT, "tokens": 1001}])]},
        "node acme/a/b: its limit of 1001 tokens per 1m is above the limit of acme, 1000",
    ),
    "a limit above a level's": (
        {"nodes": [node("*", limits=[LIMIT]), node("acme/a", limits=[{**LIMIT, "tokens": 1001}])]},
        "node acme/a: its limit of 1001 tokens per 1m is above the limit of acme, 1000",
    ),
    "a limit that one of another period precedes": (
        {"nodes": [node(limits=[LIMIT]), node("acme/a", limits=[{"prompt_tokens": 1001, "per": "1s"}])]},
        "node acme/a: its limit of 1001 prompt_tokens per 1s is never reached: acme has a limit of 1000 tok",
    ),
    "more in flight than above": (
        {"nodes": [node(max_parallel_requests=5), node("acme/a", max_parallel_requests=6)]},
        "node acme/a: its limit of 6 max_parallel_requests is above the limit of acme, 5",
    ),
    "a budget above": (
        {"nodes": [node(budget=BUDGET), node("acme/a", budget={**BUDGET, "units": 6.5})]},
        "node acme/a: its limit of 6.5 budget units per day is above the limit of acme, 5.0",
    ),
    "a budget that one of a longer period precedes": (
        {"nodes": [node(budget={**BUDGET, "period": "week"}), node("acme/a", budget={**BUDGET, "units": 6})]},
        "node acme/a: its limit of 6 budget units per day is never reached: acme has a limit of 5 budget uni",
    ),
    "a budget that one of a shorter period precedes": (
        {"nodes": [node(budget=BUDGET), node("acme/a", budget={"units": 156, "period": "month"})]},
        "node acme/a: its limit of 156 budget units per month is never reached: acme has a limit of 5 budget",
    ),
    "a long separator": ({"separator": "::"}, "tenants.separator: "),
    "a letter as separator": ({"separator": "a"}, "tenants.separator: must be one character: no letter"),
    "a header that is not trusted": ({"headers": ["x-team"]}, "trusted_headers does not name x-team"),
    "a header with a meaning": ({"headers": ["x-request-id"]}, "'x-request-id' is not a header of"),
    "a price below 0": ({"prices": {"llama": {"prompt": -1}}}, "tenants.prices.llama.prompt: "),
    "nodes twice": ({"nodes": [node()], "file": "nodes.yaml"}, "tenants: give one of nodes, file"),
})  # fmt: skip
def test_the_error_for_invalid_tenants_names_the_node(section: dict[str, Any], told: str) -> None:
    assert told in fault({"tenants": section})


@pytest.mark.parametrize("limit", [
    {"tokens": 999, "per": "1s"}, {"tokens": 1_440_000, "per": "1d"}, {"requests": 1001, "per": "1s"},
])  # fmt: skip
def test_a_nodes_limit_may_exceed_its_parents_limit_if_their_periods_differ(limit: dict[str, Any]) -> None:
    assert len(tree(node(limits=[LIMIT]), node("acme/a", limits=[limit])).nodes) == 2


@pytest.mark.parametrize(("period", "units"), [("day", 5), ("week", 35), ("month", 155)])
def test_a_budget_may_be_as_high_as_the_days_of_its_period_allow(period: str, units: float) -> None:
    assert (
        len(tree(node(budget=BUDGET), node("acme/a", budget={"units": units, "period": period})).nodes) == 2
    )


def test_tenants_need_flows() -> None:
    queue = {"fair_request_queue": {"fairness": "none"}}
    assert "fairness none keeps no flows apart, so tenants" in fault({"tenants": {}, **queue})
    trusted = {"extproc": {"trusted_headers": ["X-Team"]}, "tenants": {"headers": ["x-team"]}}
    assert parse(trusted).tenants == Tenants(headers=("x-team",))
    by_model = {"fair_request_queue": {"flow_key": "model"}}
    assert "flow_key model ignores tenants.headers" in fault({**trusted, **by_model})


def test_a_million_nodes_are_refused_before_they_are_read() -> None:
    nodes = [node(f"acme/{number}") for number in range(1_000_000)]
    began_s = time.thread_time()
    assert fault({"tenants": {"nodes": nodes}}) == (
        "tenants.nodes: 1000000 nodes; at most 10000 (the next would be acme/10000)"
    )
    assert time.thread_time() - began_s < 10


def test_the_error_for_a_file_of_a_million_nodes_names_the_node_at_its_limit() -> None:
    text = "\n".join(f"- {{path: acme/key-{number}}}" for number in range(1_000_000))
    with pytest.raises(FileFault, match=r"is longer than 4 MiB at the node acme/key-\d+$") as raised:
        nodes_in(text, parse({}))
    node_at_limit = str(raised.value).rpartition(" ")[2]
    assert 4 * 2**20 - 60 < text.index(f"{node_at_limit}}}") < 4 * 2**20


@cases("path, expected", {
    "itself": ("acme/search", "acme/search"),
    "a child of its parent": ("acme/chat", "acme/*"),
    "its level": ("other/chat", "*/*"),
    "the top level": ("other", "*"),
    "none": ("acme/search/key", None),
    "the eighth level has the rest": ("1/2/3/4/5/6/7/8/9", "1/2/3/4/5/6/7/*"),
})  # fmt: skip
def test_a_node_without_settings_gets_its_parents_default_or_else_its_levels_default(
    path: str, expected: str | None
) -> None:
    found = tree(*map(node, ("acme/search", "acme/*", "*/*", "*", "1/2/3/4/5/6/7/*"))).node(path)
    assert (found and found.path) == expected


def test_a_node_read_back_from_the_shared_state_has_the_same_settings() -> None:
    budget = {"units": 500.5, "period": "month"}
    given = node(weight=3, over_limit="reject", max_parallel_requests=10, limits=[LIMIT], budget=budget)
    (read,) = Tenants.model_validate({"nodes": [given]}).nodes
    assert read.shared() == (
        '{"budget":{"period":"month","units":500.5},'
        '"limits":[{"amount":1000,"burst":1000,"per_ms":60000,"unit":"tokens"}],'
        '"max_parallel":10,"over_limit":"reject","weight":3.0}'
    )
    assert Node.of_shared("acme", read.shared()).shared() == read.shared()
    assert Node(path="acme").shared() == "{}"


HEADERS = ["x-tenant", "x-team", "x-user"]
BY_HEADERS = parse({
    "extproc": {"trusted_headers": [*HEADERS, "x-llm-d-inference-fairness-id"]},
    "tenants": {"headers": HEADERS},
})  # fmt: skip


@cases("values, flow", {
    "all": ({"x-tenant": "acme", "x-team": "search", "x-user": "7"}, "acme/search/7"),
    "one is missing": ({"x-tenant": "acme", "x-team": " ", "x-user": "7"}, "acme"),
    "the first is missing": ({"x-team": "search", "x-llm-d-inference-fairness-id": "b"}, "b"),
    "none": ({}, "m"),
})  # fmt: skip
def test_the_headers_of_tenants_name_the_flow(values: Mapping[str, str], flow: str) -> None:
    assert asked(values, BY_HEADERS).flow == flow


@pytest.mark.parametrize("value", ["a/b", "a\x1fb", "a" * 513])
def test_a_header_cannot_name_a_tenant_of_another_level(value: str) -> None:
    with pytest.raises(BadRequest, match="x-team"):
        asked({"x-tenant": "acme", "x-team": value}, BY_HEADERS)


@pytest.mark.parametrize("unit", ["requests", "tokens"])
def test_with_tenants_a_request_has_estimates_in_tokens_in_either_unit_of_the_stock(unit: str) -> None:
    controller = {"request_queue_controller": {"mode": "adaptive", "unit": unit}}
    found = asked(settings=parse({**controller, "tenants": {}}))
    assert found.prompt_tokens >= 1
    if unit == "tokens":  # the scripts add the flow's mean answer tokens
        assert (found.learn, found.cost, found.answer_tokens) == (True, found.prompt_tokens, 0)
    else:
        assert (found.learn, found.cost, found.answer_tokens) == (False, 1, 256)
    without = asked(settings=parse(controller))
    assert (without.cost, without.prompt_tokens, without.answer_tokens) == (found.cost, 0, 0)


QUOTA = "requests=60,59,1000;tokens=200000,12,366500;demoted=1"
OF_OPENAI = {
    "x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "59",
    "x-ratelimit-reset-requests": "1s", "x-ratelimit-limit-tokens": "200000",
    "x-ratelimit-remaining-tokens": "12", "x-ratelimit-reset-tokens": "6m6.5s", "x-picker-demoted": "true",
}  # fmt: skip
OF_ANTHROPIC = {
    "anthropic-ratelimit-requests-limit": "60", "anthropic-ratelimit-requests-remaining": "59",
    "anthropic-ratelimit-requests-reset": "1970-01-01T00:00:02Z",
    "anthropic-ratelimit-tokens-limit": "200000",
    "anthropic-ratelimit-tokens-remaining": "12", "anthropic-ratelimit-tokens-reset": "1970-01-01T00:06:08Z",
    "x-picker-demoted": "true",
}  # fmt: skip


def test_tenants_limits_are_shown_in_the_form_that_each_vendors_clients_read() -> None:
    assert quota_headers(QUOTA, is_anthropic=False, now_s=1.0) == OF_OPENAI
    assert quota_headers(QUOTA, is_anthropic=True, now_s=1.0) == OF_ANTHROPIC
    assert {*OF_OPENAI, *OF_ANTHROPIC} == {*NAMES}


@pytest.mark.parametrize(("ms", "told"), [(0, "0ms"), (12, "12ms"), (360_000, "6m0s"), (3_600_000, "1h0m0s")])
def test_the_time_until_a_limits_reset_is_shown_in_openais_form(ms: int, told: str) -> None:
    found = quota_headers(f"tokens=1,0,{ms}", is_anthropic=False, now_s=0.0)
    assert found["x-ratelimit-reset-tokens"] == told


@pytest.mark.parametrize(
    ("path", "told"), [("/v1/messages", "9999-12-31T23:59:59Z"), ("/v1/completions", "277777777h46m39.999s")]
)
async def test_a_reset_beyond_the_calendar_is_still_shown(path: str, told: str) -> None:
    talk, most = Talk(settings={"tenants": {}}), 10**15 - 1
    talk.gate.placement = PLACEMENT._replace(quota=f"requests={most},{most},{most}")
    answers = await talk.say(headers("lean", ask=("POST", path)), body(ASK))
    assert told in dict(answers[0].dynamic_metadata["picker"]).values()


@pytest.mark.parametrize("text", ["", "tokens=1", "tokens=1,2,-3", "pages=1,2,3", "tokens=a,b,c;x"])
def test_a_malformed_quota_is_not_shown_to_the_client(text: str) -> None:
    assert quota_headers(text, is_anthropic=False, now_s=0.0) == {}


@pytest.mark.parametrize("mode", ["standard", "lean"])
async def test_a_client_gets_its_tenants_limits_in_place_of_the_model_servers_limits(mode: str) -> None:
    talk = Talk(settings={"tenants": {}})
    talk.gate.placement = PLACEMENT._replace(quota=QUOTA)
    answers = await talk.say(headers(mode), body(ASK))
    if mode == "lean":
        # In `lean`, Envoy makes response headers of these metadata values.
        told = dict(answers[0].dynamic_metadata["picker"])
        assert {name: told.get(name) for name in OF_OPENAI} == OF_OPENAI
        return
    own = {"x-ratelimit-limit-requests": "5", "anthropic-ratelimit-tokens-limit": "5"}
    [answer] = await talk.say(response_headers(fields=own))
    mutation = answer.response_headers.response.header_mutation
    assert OF_OPENAI.items() <= set_headers(mutation).items()
    assert {*mutation.remove_headers} == {*NAMES} - {*OF_OPENAI}


NODES = tree(
    node(limits=[LIMIT, {"prompt_tokens": 500, "per": "1h", "burst": 50}], max_parallel_requests=4,
         budget={"units": 20.5, "period": "day"}),
    node("acme/*", limits=[{"requests": 7, "per": "1s"}]),
)  # fmt: skip


def test_a_request_that_expires_names_the_nodes_for_whose_limits_it_may_have_waited() -> None:
    told = {
        flow: str(refusal(Verdict.EXPIRED, asked()._replace(flow=flow), 1, NODES)) for flow in ("acme/x", "b")
    }
    waited = f"waited longer than {asked().ttl_s:g} s"
    assert told == {"acme/x": f"{waited}, for its turn or for a limit of acme or acme/x", "b": waited}


@cases("limit, told", {
    "tokens": ("tokens 60000 acme", "acme: 1000 tokens per 1m; retry in 12 s"),
    "a pattern's": ("requests 1000 acme/a b", "acme/a b: 7 requests per 1s; retry in 12 s"),
    "parallel": ("parallel 0 acme", "acme: 4 requests at once; retry in 12 s"),
    "budget": ("budget day acme", "acme: 20.5 units a day; retry in 12 s"),
    "changed meanwhile": ("tokens 1000 b", "b: its limit of tokens is used up; retry in 12 s"),
})  # fmt: skip
def test_a_refusal_over_a_limit_names_node_and_limit_and_the_wait(limit: str, told: str) -> None:
    error = refusal(Refused(Refusal.OVER_LIMIT, 12, limit), asked(), 1, NODES)
    assert type(error) is OverLimit
    assert (str(error), error.retry_after_s, error.reason) == (told, 12, "over-limit")


@cases("limit, told", {
    "tokens": ("tokens 60000 acme", "about 1300 tokens; acme allows 1000 at once"),
    "burst": ("prompt_tokens 3600000 acme", "about 800 prompt tokens; acme allows 50 at once"),
    "budget": ("budget day acme", "more than the budget of acme, which allows 20.5 at once"),
    "unknown": ("tokens 1000 b", "about 1300 tokens; b has a lower limit"),
    "mean": ("answer_tokens 1 b", "more than the answer tokens of b, which has a lower limit"),
})  # fmt: skip
def test_a_refusal_of_a_request_above_a_burst_names_the_needed_burst(limit: str, told: str) -> None:
    learn = limit.startswith("answer")
    request = asked()._replace(prompt_tokens=799.5, answer_tokens=500, learn=learn)
    error = refusal(Refused(Refusal.OVER_BURST, 0, limit), request, 1, NODES)
    assert type(error) is OverBurst
    assert (str(error), error.reason) == (f"the request needs {told}", "over-burst")


@cases("status, prompt, answer, cached, usage, size", {
    "all": (200, 7, 9, 5, (7, 5, 9), 9999),
    "no cached tokens": (200, 7, 9, None, (7, 0, 9), 0),
    "more cached than prompt tokens": (200, 7, 9, 8, (7, 7, 9), 0),
    "no prompt": (200, None, 9, None, (-1, -1, 9), 0),
    "a stream without usage": (200, None, None, None, (-1, -1, 1000), 256_000),
    "refused by the engine": (400, None, None, None, (0, 0, 0), 300),
    "refused by a full engine": (429, None, None, None, None, 0),
    "failed": (500, None, None, None, None, 0),
})  # fmt: skip
def test_an_end_reports_the_usage_that_corrects_the_charges_of_tenants(
    status: int, prompt: int | None, answer: int | None, cached: int | None, usage: object, size: int
) -> None:
    outcome = Outcome.UPSTREAM_FAILED if status in (429, 500) else Outcome.COMPLETED
    end = Completion(
        "r", outcome, status, None, prompt, answer, None, None, cached_tokens=cached,
        content_type="text/event-stream; charset=utf-8", body_bytes=size,
    )  # fmt: skip
    assert reported(end, has_tenants=True) == usage
    assert reported(end, has_tenants=False) is None


def test_a_client_that_leaves_before_the_usage_pays_for_the_stream_that_it_got() -> None:
    begun = Completion("r", Outcome.CLIENT_GONE, 200, None, 7, 1, None, None, body_bytes=256_000)
    assert reported(begun._replace(content_type="text/event-stream"), has_tenants=True) == (7, 0, 1000)
    assert reported(begun._replace(content_type="audio/mpeg"), has_tenants=True) == (7, 0, 1)


def reported(end: Completion, *, has_tenants: bool) -> object:
    """The usage in the report of a request's end."""
    store, others = Mock(), {name: Mock() for name in ("metrics", "endpoints", "chooser")}
    reports = Reports(
        store, Mock(), **others, counts_tokens=False, has_tenants=has_tenants, are_places_awaited=bool
    )
    reports.tell_end(end)
    return store.settle.call_args.kwargs["usage"]


class Nodes:
    """The nodes in the shared state, and the sizes of the calls that changed them."""

    def __init__(self) -> None:
        self.hashes: dict[str, dict[str, str]] = defaultdict(dict)
        self.calls: list[int] = []
        self.noted: list[dict[str, Any]] = []

    async def note_change(self, text: str) -> None:
        self.noted.append(json.loads(text))

    async def nodes_of(self, kind: str) -> Mapping[str, str]:
        return dict(self.hashes[kind])

    async def tenants_version(self) -> str:
        return str(len(self.calls) or "")

    async def set_tenants(self, kind: str, nodes: Mapping[str, str]) -> None:
        self.calls.append(len(nodes))
        merged = {**self.hashes[kind], **nodes}
        self.hashes[kind] = {path: text for path, text in merged.items() if text}


def nodes_of(shared: Nodes, *nodes: dict[str, Any]) -> TenantNodes:
    return TenantNodes(cast(Store, shared), parse({"tenants": {"nodes": nodes}}))


async def test_the_leader_alone_publishes_the_tenants_nodes_that_have_changed() -> None:
    shared = Nodes()
    own = nodes_of(shared, *(node(f"a{number}", weight=2) for number in range(1200)))
    await own.publish(FOLLOWER)
    assert shared.calls == []
    await own.publish(LEADER)
    await own.publish(LEADER)
    assert (len(shared.hashes["tenants"]), shared.noted) == (1200, [])
    shared.calls.clear()
    other = nodes_of(shared, *(node(f"a{number}", weight=2) for number in range(1, 1200)), node("b"))
    await other.publish(LEADER)
    assert (shared.calls, shared.hashes["tenants"].keys() - {f"a{n}" for n in range(1200)}) == ([2], {"b"})
    (noted,) = shared.noted
    assert (noted["by"], noted["change"]) == ("configuration", "2 nodes of tenants")
    assert json.loads(noted["detail"])["a0"] == {"old": '{"weight":2.0}', "new": ""}
    await own.publish(FOLLOWER)  # another replica has become the leader
    await own.publish(LEADER)
    assert "b" not in shared.hashes["tenants"]
    shared.noted.clear()
    for nodes in ((), (Node(path="c"),)):
        own.found(nodes)
        await own.publish(LEADER)
    assert [each["change"] for each in shared.noted] == ["1200 nodes of tenants", "1 nodes of tenants"]


async def test_the_log_has_the_old_and_new_settings_of_each_changed_node(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nodes = nodes_of(Nodes(), node("a0"))
    await nodes.publish(LEADER)
    nodes.found([Node(path=f"a{number}", weight=number) for number in range(1, 200)])
    with caplog.filtering(OneASecond()):
        await nodes.publish(LEADER)
    lines = [line.message for line in caplog.records]
    assert len(lines) == 200
    assert lines[-1] == ('change by configuration: tenant "a99": {"old": "", "new": "{\\"weight\\":99.0}"}')


async def test_without_tenants_no_nodes_are_published_or_read() -> None:
    nodes = TenantNodes(cast(Store, Mock(spec=())), parse({}))
    await nodes.publish(LEADER)
    assert await nodes.follow("1") is None


async def test_replicas_follow_live_changes_of_tenants_and_restore_them_after_a_loss() -> None:
    shared = Nodes()
    own = nodes_of(shared, node("a", limits=[LIMIT]), node("b", weight=2))
    await own.publish(LEADER)
    await shared.set_tenants("tenant_changes", {"b": '{"weight":5}'})
    found = await own.follow("1")
    assert found is not None
    assert [getattr(found.node(path), "weight", None) for path in ("a", "b", "c")] == [1, 5, None]
    assert await own.follow("1") is None
    shared.hashes.clear()
    shared.calls.clear()
    assert await own.follow("1") is None  # the next heartbeat will return another epoch
    await own.publish(cast(HeartbeatReply, Mock(leader=True, epoch="2")))
    restored = await own.follow("2")
    assert shared.hashes["tenant_changes"] == {"b": '{"weight":5}'}
    assert restored is not None
    assert restored.node("b") == found.node("b")


async def test_changes_of_tenants_that_an_old_dump_lacks_are_made_again() -> None:
    shared = Nodes()
    own = nodes_of(shared, node("a", weight=2))
    await own.publish(LEADER)
    await shared.set_tenants("tenant_changes", {"b": '{"weight":5}', "c": '{"weight":6}'})
    await own.follow("1")
    dump = {kind: dict(nodes) for kind, nodes in shared.hashes.items()}, list(shared.calls)
    # An operator changes one node and undoes the change of the other; a watched file has a new node.
    await shared.set_tenants("tenant_changes", {"b": '{"weight":7}', "c": ""})
    own.found([Node(path="a"), Node(path="d", weight=3)])
    await own.publish(LEADER)
    await own.follow("1")
    latest = {kind: dict(nodes) for kind, nodes in shared.hashes.items()}
    shared.hashes, shared.calls = defaultdict(dict, dump[0]), dump[1]
    await own.publish(LEADER)  # the leader does not know yet that Redis has an old dump
    tree = await own.follow("1")
    await own.publish(LEADER)
    assert shared.hashes == latest
    assert tree is not None
    assert getattr(tree.node("b"), "weight", None) == 7


async def test_requests_do_not_wait_while_a_replica_parses_many_nodes() -> None:
    shared = Nodes()
    await shared.set_tenants("tenants", {f"a{number}": '{"weight":2}' for number in range(1000)})
    nodes = nodes_of(shared)
    reading = asyncio.create_task(nodes.follow("1"))
    for _ in range(500):
        await asyncio.sleep(0)
    assert not reading.done()
    reading.cancel()  # as if the call of the admin API timed out
    await asyncio.wait([reading])
    found = await nodes.follow("1")
    assert found is not None
    assert len(found.nodes) == 1000


def test_a_file_of_nodes_has_the_same_faults_as_the_configuration(tmp_path: Path) -> None:
    settings = parse({"tenants": {"separator": ":", "file": str(tmp_path / "nodes.yaml")}})
    assert [each.path for each in nodes_in("- {path: 'a:b', weight: 2}", settings)] == ["a:b"]
    for text, told in (
        ("- {path: a, weight: 0}", "tenants.nodes.0 (a).weight: "),
        ("", "is empty; a tree without nodes is written []"),
        ("- {", "is not YAML"),
        ("x" * 9_000_000, "is longer than 4 MiB"),
    ):
        with pytest.raises(FileFault) as caught:
            nodes_in(text, settings)
        assert told in str(caught.value)
