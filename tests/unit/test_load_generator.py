"""The load generator: its arguments, its arrivals, its client, its figures and its report."""

import asyncio
import contextlib
import functools
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from statistics import mean, pvariance
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from load_runs import answer, refusal, run, sample
from tables import cases

from picker_fleet.bands import Band
from picker_fleet.cli import main
from picker_fleet.errors import ConfigError
from picker_tools.load import report, result
from picker_tools.load.checks import check_promises
from picker_tools.load.client import Answer, Client, HttpRequest, Kind, answer_of
from picker_tools.load.generator import (
    Arrival,
    LoadGenerator,
    arrivals,
    completion_request,
    conversation_turn,
    rates_by_capacity,
    rates_by_total,
)
from picker_tools.load.report import show, write
from picker_tools.load.scenarios import SCENARIOS, Conversation, Plan, Scenario, Source, Wave
from picker_tools.load.session import kill_moments
from picker_tools.load.target import OwnFleet, Size, check_url


def test_loopback_targets_are_accepted_and_others_with_an_option() -> None:
    for url in ("http://127.0.0.1:8080", "http://localhost:1", "http://[::1]:9", "http://127.9.9.9"):
        assert check_url(url, "--target", allow_remote=False) == url
        assert check_url(f"{url}/", "--target", allow_remote=False) == url
    assert check_url("http://10.0.0.1:80", "--target", allow_remote=True) == "http://10.0.0.1:80"


REFUSED_TARGETS = {
    "http://10.0.0.1:80": "is not this machine's loopback",
    "http://example.com": "--allow-remote",
    **dict.fromkeys(
        ("https://127.0.0.1", "127.0.0.1:80", "http://127.0.0.1:99999", "http://127.0.0.1:80/v1"),
        "no http://host:port",
    ),
}


@pytest.mark.parametrize(("url", "words"), REFUSED_TARGETS.items(), ids=REFUSED_TARGETS)
def test_other_targets_are_refused_with_a_reason(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_url(url, "--target", allow_remote=False)


BAD_USAGE = {
    "nope": "invalid choice",
    "steady --rate 0": "is no rate",
    "steady --duration 601": "up to 600",
    "steady --duration nan": "up to 600",
    "steady --replicas 0": "from 1 to 100",
    "steady --max-requests x": "no whole number",
    "steady --target http://10.0.0.1": "--allow-remote",
    "steady --own --target http://127.0.0.1:1": "for a fleet of its own",
    "replica-crash --target http://127.0.0.1:1": "has to kill replicas",
    "redis-outage --admin http://127.0.0.1:1": "has to stop Redis",
    "steady --own --state-file nowhere.json": "for a fleet of its own",
    "steady --state-file nowhere.json": "cannot be read",
    "steady --own --report /dev/null": "--report",
}


@pytest.mark.parametrize(("words", "said"), BAD_USAGE.items(), ids=BAD_USAGE)
def test_bad_usage_is_exit_status_2(
    words: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    try:
        status: object = main(["load", "--report", str(tmp_path), *words.split()])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_scenario_has_a_configuration_that_is_valid(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    settings = OwnFleet(scenario, Size(3, 4, "lean", 1), tmp_path, print).settings
    assert settings.decision_log.enabled
    assert scenario.objectives <= {objective.name for objective in settings.objectives}
    for key, wanted in scenario.needs:
        section, _, leaf = key.partition(".")
        assert getattr(getattr(settings, section), leaf) == wanted
    # No source's TTL is longer than the queue's.
    assert all(source.ttl_s <= settings.fair_request_queue.queue_ttl for source in scenario.sources)


def test_a_sample_of_the_state() -> None:
    state = {
        "stock": 3, "bounds": {"lower": 7.2, "upper": 8.8}, "in_flight": {"a": 3}, "leases": 3,
        "queue_length": {"Critical": 1, "Default": 2, "Sheddable": 0}, "replicas": ["x", "y"],
        "degraded": False,
    }  # fmt: skip
    found = result.Sample.read(1.5, json.dumps(state).encode())
    assert found is not None
    assert (found.stock, found.total_queued, found.replicas, found.at_rest) == (3, 3, 2, False)
    for page in (b"", b"{", b"[]", b"{}", b'{"stock": "x"}', b"null"):
        assert result.Sample.read(0.0, page) is None


EVEN = Source("plain", 1.0, "plain")
WAVY = Source("wavy", 1.0, "wavy", wave=Wave(period_s=4, high_s=1, factor=5))


def test_the_same_seed_brings_the_same_arrivals() -> None:
    limits = {"duration_s": 10, "max_requests": 10_000}
    drawn, again, other = (arrivals((EVEN, WAVY), (20, 5), **limits, seed=seed) for seed in (7, 7, 8))
    assert drawn == again != other
    # In order, within the duration, numbered from 0 in each source.
    moments = [each.at_s for each in drawn]
    assert moments == sorted(moments)
    assert 0 < moments[0] < moments[-1] < 10
    for source in (0, 1):
        numbers = [each.number for each in drawn if each.source == source]
        assert numbers == list(range(len(numbers)))


def test_arrivals_are_a_poisson_process() -> None:
    found = arrivals((EVEN,), (50,), duration_s=400, max_requests=100_000, seed=3)
    # The variance of a Poisson process is its mean.
    by_second = Counter(int(each.at_s) for each in found)
    counts = [by_second[second] for second in range(400)]
    assert mean(counts) == pytest.approx(50, rel=0.05)
    assert pvariance(counts) == pytest.approx(50, rel=0.25)


def test_a_wave_multiplies_the_rate() -> None:
    found = arrivals((WAVY,), (40,), duration_s=400, max_requests=100_000, seed=3)
    high = sum(each.at_s % 4 < 1 for each in found)
    assert high / 100 == pytest.approx(200, rel=0.05)
    assert (len(found) - high) / 300 == pytest.approx(40, rel=0.05)


@given(seed=st.integers(0, 50), rate=st.just(0.0) | st.floats(0.1, 200), max_requests=st.integers(1, 300))
def test_arrivals_are_bounded_in_number_and_time(seed: int, rate: float, max_requests: int) -> None:
    found = arrivals((EVEN, WAVY), (rate, rate), duration_s=3, max_requests=max_requests, seed=seed)
    assert len(found) <= max_requests
    assert all(each.at_s < 3 for each in found)
    assert rate or not found


def test_rates_follow_from_what_the_fleet_can_serve() -> None:
    # The fleet keeps 8 requests in flight: it dispatches below 7.2.
    steady = SCENARIOS["steady"]
    found = rates_by_capacity(steady, 7.2, [0.24] * 4)
    # The load is 0.7.
    assert sum(found.rates_per_s) == pytest.approx(0.7 * 8 / 0.24)
    assert found.capacity_per_s == pytest.approx(8 / 0.24)
    # A given rate is spread over the sources by their loads.
    assert rates_by_total(steady, 10, [0.24] * 4).rates_per_s == pytest.approx((2.5,) * 4)


def test_rates_in_tokens_count_costs_and_a_conversation_all_its_turns() -> None:
    scenario = SCENARIOS["long-prompts"]
    found = rates_by_capacity(scenario, 57_600, [0.3, 0.2])
    # A source's rate is its load times what fits of it, by its mean cost.
    for rate, source, seconds in zip(found.rates_per_s, scenario.sources, (0.3, 0.2), strict=True):
        assert rate == pytest.approx(source.load * 57_600 / source.cost_tokens / seconds)
    found = rates_by_capacity(SCENARIOS["multi-turn"], 8, [0.24])
    assert found.rates_per_s == pytest.approx((0.5 * 8 / 0.24 / 5,))


def test_the_mean_cost_is_that_of_the_sent_requests() -> None:
    source = SCENARIOS["long-prompts"].sources[0]
    sizes = [len(completion_request(source, "llama", number, 1).body) for number in range(2000)]
    assert mean(sizes) / 4 + source.answer_tokens == pytest.approx(source.cost_tokens, rel=0.05)
    assert min(sizes) >= source.prompt_bytes[0]
    assert max(sizes) <= source.prompt_bytes[1] + 200


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_request_names_its_flow_ttl_and_workload(name: str) -> None:
    for source in SCENARIOS[name].sources:
        ask = completion_request(source, "llama", 5, 1)
        headers = dict(ask.headers)
        assert json.loads(ask.body)["model"] == "llama"
        assert headers["x-gateway-inference-fairness-id"] == source.flow
        assert headers["x-llm-d-inference-ttl"] == f"{source.ttl_s:g}s"
        assert headers.get("x-gateway-inference-objective", "") == source.objective
        assert ask == completion_request(source, "llama", 5, 1) != completion_request(source, "llama", 6, 1)
        if source.workload:
            assert json.loads(headers["x-workload-context"])["criticality"] == source.criticality


def test_a_turn_has_all_earlier_messages() -> None:
    source, chance = SCENARIOS["multi-turn"].sources[0], Random(1)
    first, words = conversation_turn(source, "llama", [], chance)
    second, _ = conversation_turn(source, "llama", [words, "an answer"], chance)
    before, after = (json.loads(each.body)["messages"] for each in (first, second))
    assert [message["role"] for message in after] == ["user", "assistant", "user"]
    assert after[0] == before[0]


@given(seed=st.integers(0, 200), duration_s=st.floats(1, 120), replicas=st.integers(1, 8))
def test_replicas_are_killed_at_random_moments(seed: int, duration_s: float, replicas: int) -> None:
    moments = kill_moments(duration_s, replicas, seed)
    # At least once, within the load, and the same for the same seed.
    assert moments
    assert all(0 < at_s < duration_s and 0 <= number < replicas for at_s, number in moments)
    assert moments == kill_moments(duration_s, replicas, seed)
    assert all(math.isfinite(at_s) for at_s, _ in moments)


Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter

EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"
PLAIN = b'{"usage": {"completion_tokens": 16}}'
FULL = b"retry-after: 3\r\nx-llm-d-request-dropped-reason: rejected-saturated\r\n"


def chunked(*parts: bytes, end: bool = True) -> bytes:
    chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in parts]
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    return b"".join((head, *chunks, b"0\r\n\r\n" if end else b""))


def whole(body: bytes, status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    return b"HTTP/1.1 %s\r\n%scontent-length: %d\r\n\r\n%s" % (status, more, len(body), body)


@asynccontextmanager
async def serving(answer: Callable[[int], bytes | None]) -> AsyncIterator[tuple[Client, list[int]]]:
    """A server whose answer to request `n` (from 0) is `answer(n)`; empty: it hangs up; None: it is silent.

    Gives a client of it, and the number of connections as the one entry of a list.
    """
    numbers, connections = itertools.count(), [0]

    async def serve(reader: Reader, writer: Writer) -> None:
        connections[0] += 1
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                await reader.readexactly(length)
                reply = answer(next(numbers))
                if reply == b"":
                    return
                if reply is not None:
                    writer.write(reply)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        with Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
            yield client, connections


async def sent(client: Client, streamed: bool = True, within_s: float = 10.0) -> Answer:
    asked = HttpRequest("/v1/completions", (("x-a", "b"),), b'{"model": "llama"}', streamed, 2)
    exchange = await client.send(asked, within_s=within_s)
    return answer_of(exchange, asked, source="s", number=0, turn=0, due_s=0.0, began=exchange.sent_at)


SERVED, REFUSED, FAILED = Kind.SERVED, Kind.REFUSED, Kind.FAILED


@cases("reply, streamed, kind, what", {
    "a stream": (chunked(EVENT, EVENT, USAGE, DONE), True, SERVED, "served"),
    "a whole answer": (whole(PLAIN), False, SERVED, "served"),
    "a refusal": (whole(b"{}", b"503 No", FULL), True, REFUSED, "503 rejected-saturated"),
    "too many requests": (whole(b"{}", b"429 No", FULL), True, REFUSED, "429 rejected-saturated"),
    "an error": (whole(b"{}", b"500 No"), True, FAILED, "500 without a reason"),
    "a stream without its end": (chunked(EVENT, EVENT), True, FAILED, "a stream that ended without [DONE]"),
    "a bad chunk": (chunked(EVENT, end=False)[:-3] + b"zz", True, FAILED, "the answer is not HTTP"),
    "nothing": (b"", True, FAILED, "the connection was closed without a whole answer"),
})  # fmt: skip
async def test_each_answer_has_its_kind_and_outcome(
    reply: bytes, streamed: bool, kind: Kind, what: str
) -> None:
    async with serving(lambda _: reply) as (client, _):
        answer = await sent(client, streamed)
    assert answer.kind is kind
    assert answer.outcome.startswith(what)
    if kind is REFUSED:
        assert answer.retry_after_s == 3
    if kind is SERVED:
        assert (answer.tokens, answer.answers) == (2 if streamed else 16, 1)
        assert 0 < (answer.first_s or 0) <= answer.last_s


async def test_a_second_answer_to_one_request_is_counted_and_its_connection_not_used_again() -> None:
    async with serving(lambda _: whole(PLAIN) * 2) as (client, connections):
        assert [(await sent(client, streamed=False)).kind for _ in range(2)] == [SERVED] * 2
        assert (client.surplus_answers, connections) == (2, [2])


async def test_connections_are_reused_unless_broken() -> None:
    # The server hangs up after its second answer.
    replies = [whole(PLAIN), whole(PLAIN), b"", whole(PLAIN)]
    async with serving(lambda number: replies[number]) as (client, connections):
        kinds = [(await sent(client, streamed=False)).kind for _ in replies]
    # A failed request is not sent again; the others share connections.
    assert (kinds, connections) == ([SERVED, SERVED, FAILED, SERVED], [2])


async def test_a_silent_or_missing_server_is_a_failure_in_time() -> None:
    async with serving(lambda _: None) as (client, _):
        answer = await sent(client, within_s=0.05)
    assert (answer.kind, answer.fault) == (FAILED, "no whole answer within 0.05 s")
    assert (await sent(client)).fault.startswith("no connection")
    assert await client.get("/", within_s=1.0) is None


def generator(client: Client, source: Source, duration_s: float = 0.2) -> LoadGenerator:
    plan = Plan(Scenario("one", "", (source,), ()), duration_s, seed=1, max_requests=100)
    return LoadGenerator(client, plan, "llama")


async def test_the_load_does_not_wait_for_answers() -> None:
    # The server is silent; twenty requests are due within 40 ms.
    coming = [Arrival(0.002 * number, 0, number) for number in range(20)]
    all_in = asyncio.Event()
    async with serving(lambda number: all_in.set() if number == 19 else None) as (client, _):
        load = generator(client, Source("s", 1, "s"))
        running = asyncio.create_task(load.run(coming))
        # All are sent though none is answered.
        async with asyncio.timeout(30):
            await all_in.wait()
        assert load.counts.open == 20
        # When the load stops, each has left and is counted once.
        load.stop()
        await running
    assert load.counts.ended[Kind.LEFT] == load.counts.sent == len(load.counts.answers) == 20


async def test_a_conversation_goes_on_with_the_answer() -> None:
    # The server serves two turns of five and refuses the third.
    replies = [whole(PLAIN), whole(PLAIN), whole(b"{}", b"503 No", FULL)]
    source = Source("s", 1, "s", streamed=0.0, conversation=Conversation(turns=5, think_s=0.001))
    async with serving(lambda number: replies[number]) as (client, _):
        load = generator(client, source, duration_s=2.0)
        await load.run([Arrival(0.0, 0, 0)])
    assert [each.turn for each in load.counts.answers] == [0, 1, 2]
    assert load.counts.ended[Kind.SERVED] == 2
    # Each turn carries more than the one before.
    sizes = [each.prompt_bytes for each in load.counts.answers]
    assert sizes == sorted(sizes)


def test_a_quantile_is_one_of_the_values() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [result.quantile(values, part) for part in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert result.quantile([7.0], 0.5) == 7
    assert math.isnan(result.quantile([], 0.5))
    assert result.quantiles([]) == {}
    assert result.quantiles([3, 1, 2]) == {"p50": 2, "p90": 3, "p95": 3, "p99": 3, "max": 3}


@cases("fields, demand, due", {
    "a asks for little, c weighs twice as much as b": (
        [{}, {}, {"weight": 2.0}], (10, 200, 200), (10, 30, 60)),
    "a higher band comes first": (
        [{"band": Band.CRITICAL}, {}, {"band": Band.SHEDDABLE}], (60, 60, 60), (60, 40, 0)),
})  # fmt: skip
def test_a_flow_gets_at_most_its_demand_and_others_share_the_rest_by_band_and_weight(
    fields: list[dict[str, Any]], demand: tuple[float, ...], due: tuple[float, ...]
) -> None:
    sources = [Source(name, 1, name, **more) for name, more in zip("abc", fields, strict=True)]
    found = result.fair(sources, dict(zip("abc", demand, strict=True)), 100)
    assert [found[name] for name in "abc"] == pytest.approx(due)


@given(
    demand=st.lists(st.floats(0, 1000), min_size=1, max_size=6),
    weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=6, max_size=6),
    part=st.floats(0, 1),
)
def test_fair_parts_exceed_neither_demand_nor_service(
    demand: list[float], weights: list[float], part: float
) -> None:
    sources = [Source(f"f{place}", 1, f"f{place}", weight=weights[place]) for place in range(len(demand))]
    asked = {source.flow: amount for source, amount in zip(sources, demand, strict=True)}
    served = part * sum(demand)
    due = result.fair(sources, asked, served)
    assert all(due[flow] <= asked[flow] + 1e-6 for flow in due)
    assert sum(due.values()) == pytest.approx(served, abs=1e-6)


FAULTS = result.FaultsInjected(kills=[(3.0, "replica-1")], outages=[(5.0, 8.0)])


class Tags(HTMLParser):
    """The tags of a page; fails if one is not closed in order."""

    VOID = frozenset({"meta", "br", "path", "use", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.all: list[str] = []
        self.texts: list[str] = []
        self.handle_data = self.texts.append  # type: ignore[method-assign]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


# They have every plot: of requests and of tokens, of one flow and of several, of conversations.
DRAWN = ("noisy-neighbour", "long-prompts", "multi-turn")


def written(evidence: result.RunResult, folder: Path) -> tuple[dict[str, Any], str]:
    write(evidence, check_promises(evidence), folder)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary, (folder / "report.html").read_text()


Reports = Callable[[str], tuple[dict[str, Any], str]]


@pytest.fixture(scope="module")
def report_of(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Summary and page of a run with faults, by its scenario; drawing takes most of the time."""
    return functools.cache(
        lambda name: written(run(name, faults_injected=FAULTS), tmp_path_factory.mktemp(name))
    )


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_page_is_self_contained(name: str, report_of: Reports) -> None:
    if name in DRAWN:
        _, page = report_of(name)
    else:
        evidence = run(name, faults_injected=FAULTS)
        promises = check_promises(evidence)
        page = report.page(report.summarise(evidence, promises), promises, {})
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert name not in DRAWN or tags.all.count("svg") >= 4
    assert not {"script", "link", "img", "image", "iframe"} & set(tags.all)
    assert not re.search(r'(?:href|src)="(?!#)', page)
    assert "url(" not in re.sub(r"url\(#", "", page)
    # It follows the reader's choice of light or dark, its pictures too.
    assert "prefers-color-scheme: dark" in page
    assert name not in DRAWN or "currentColor" in page
    assert not re.search("#010203|#040506", page)
    # It is small enough to send.
    assert len(page) < 300_000


def test_a_broken_promise_is_reported_with_its_evidence(tmp_path: Path) -> None:
    answers = (refusal("client-1", reason="<b>full</b>"), refusal("client-2"), *run().answers[2:])
    evidence = run(answers=answers)
    summary, page = written(evidence, tmp_path)
    # The markup is shown as text.
    tags = Tags()
    tags.feed(page)
    text = " ".join(tags.texts)
    assert "1 promise broken" in text
    assert "client-1 #0: sent at 0.000 s, 503 <b>full</b>" in text
    assert "<b>full</b>" not in page
    assert summary["verdict"] == "broken"
    promises = {each["name"]: each for each in summary["promises"]}
    assert promises["no-errors"]["verdict"] == "broken"
    assert len(promises["no-errors"]["cases"]) == 2
    assert summary["counts"]["ends"]["503 rejected-saturated"] == 1


def test_the_summary_has_what_is_needed_to_repeat_the_run(report_of: Reports) -> None:
    summary, _ = report_of("noisy-neighbour")
    assert (summary["scenario"], summary["seed"]) == ("noisy-neighbour", 1)
    assert summary["parameters"]["rates_per_s"] == {"noisy": 2.0, "quiet": 2.0}
    assert summary["versions"]["picker-fleet"]
    quiet = summary["sources"]["quiet"]
    assert quiet["sent"] == quiet["served"] == 40
    assert quiet["ttft_s"] == {"p50": 0.1, "p90": 0.1, "p95": 0.1, "p99": 0.1, "max": 0.1}
    assert summary["shares"]["quiet"]["served"] == pytest.approx(0.5)
    assert summary["faults"]["kills"] == [{"at_s": 3.0, "replica": "replica-1"}]
    assert summary["faults"]["redis_away"] == [{"from_s": 5.0, "to_s": 8.0}]


def test_what_was_asked_while_redis_was_away_is_in_no_fair_share() -> None:
    asked = tuple(each for each in run("demo").answers if each.source == "noisy" or each.number % 4 == 0)
    harmed = run("demo", answers=asked, faults_injected=result.FaultsInjected(outages=[(10.0, 12.0)]))
    logged = tuple(
        result.Dispatch(harmed.wall_s + each.sent_s, each.source, 1, "", 1.0, 0.1)
        for each in asked
        if each.number % 2 == 0 and not harmed.disturbed(each.sent_s, 1.0)
    )
    shares = result.flow_shares(replace(harmed, log_audits=[result.LogAudit(None, logged)]))
    assert shares["quiet"]["fair"] == shares["quiet"]["served"]


NO_CONNECTION = answer("client-1", status=0, first_s=None, head_s=None, fault="no connection")


@cases("evidence", {
    "nothing": [run(answers=(), samples=(), rest=None)],
    "one failure": [run(answers=(NO_CONNECTION,))],
    "one sample": [replace(run(samples=(sample(0.1),)), interrupted=True)],
})  # fmt: skip
def test_every_run_has_a_report(evidence: result.RunResult, tmp_path: Path) -> None:
    summary, page = written(evidence, tmp_path)
    assert summary["counts"]["sent"] == evidence.sent
    assert ("INTERRUPTED" in page) is evidence.interrupted


def test_the_terminal_shows_every_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    evidence = run(rest=None)
    show(evidence, check_promises(evidence))
    # One line a promise, and one that says what is broken and why.
    lines = capsys.readouterr().out.splitlines()
    kept = [line.split()[1] for line in lines if line.startswith("held")]
    assert kept[:2] == ["no-errors", "nothing-expires"]
    assert any(line.startswith("broken") and "at-rest" in line for line in lines)
    assert any(line.startswith("BROKEN at-rest: after the load every count is exactly 0") for line in lines)
