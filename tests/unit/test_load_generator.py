"""The load generator `picker load`, namely its HTTP client, open and closed loops, planned requests and
report."""

import asyncio
import contextlib
import itertools
import json
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, pvariance
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from load_runs import answer, refusal, run, sample
from tables import cases

from picker_fleet.admin.examples import EXAMPLES
from picker_fleet.cli import main
from picker_fleet.domain.bands import Band
from picker_fleet.domain.errors import ConfigError
from picker_tools.load import command, generator, result
from picker_tools.load.checks import check_promises
from picker_tools.load.fleet import OwnFleet, check_url
from picker_tools.load.generator import Answer, Client, Kind, Load, Request
from picker_tools.load.scenarios import SCENARIOS, Plan, Source, planned, source_request
from picker_tools.load.session import kill_moments
from picker_tools.local_fleet.local_fleet import UpOptions
from picker_tools.local_fleet.parts import SimOptions
from picker_tools.local_fleet.processes import Report


def test_loopback_targets_are_accepted_and_other_targets_require_an_option() -> None:
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
def test_picker_load_refuses_an_unsuitable_target_with_a_reason(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_url(url, "--target", allow_remote=False)


BAD_USAGE = {
    "nope": "invalid choice",
    "burst": "invalid choice",
    "steady --rate 0": "is no rate",
    "steady --duration 601": "up to 600",
    "steady --duration nan": "up to 600",
    "steady --replicas 0": "from 1 to 100",
    "steady --max-requests x": "no whole number",
    "steady --target http://10.0.0.1": "--allow-remote",
    "steady --own --target http://127.0.0.1:1": "start a fleet; ",
    "replica-crash --target http://127.0.0.1:1": "has to kill replicas",
    "redis-outage --admin http://127.0.0.1:1": "has to stop Redis",
    "steady --own --state-file nowhere.json": "start a fleet; ",
    "steady --state-file nowhere.json": "nowhere.json unreadable: No such file",
    "steady --own --report /dev/null": "--report",
}


@pytest.mark.parametrize(("words", "said"), BAD_USAGE.items(), ids=BAD_USAGE)
def test_wrong_arguments_of_picker_load_end_with_exit_status_2(
    words: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    try:
        status: object = main(["load", "--report", str(tmp_path), *words.split()])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_load_scenario_has_a_valid_configuration(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    settings = OwnFleet(scenario, UpOptions(3, 4, "lean", SimOptions()), tmp_path, Report()).settings
    assert settings.decision_log.enabled
    assert scenario.objectives <= {objective.name for objective in settings.objectives}
    for key, wanted in scenario.needs:
        section, _, leaf = key.partition(".")
        assert getattr(getattr(settings, section), leaf) == wanted
    # No source's TTL is longer than the queue's.
    assert all(source.ttl_s <= settings.fair_request_queue.queue_ttl for source in scenario.sources)


def test_a_state_page_becomes_a_sample_of_the_fleet_unless_it_is_malformed() -> None:
    found = result.Sample.read(1.5, json.dumps(EXAMPLES["State"]).encode())
    assert found is not None
    assert (found.stock, found.queued, found.replicas, found.at_rest) == (7, 16, 3, False)
    assert (found.lower, found.upper, found.leases, found.degraded) == (7.2, 8.8, 7, False)
    for page in (b"", b"{", b"[]", b"{}", b'{"stock": "x"}', b"null"):
        assert result.Sample.read(0.0, page) is None


def sent_by(name: str, **fields: Any) -> list[generator.Planned]:
    """The requests planned by a scenario against a fleet that can serve 100 requests a second."""
    plan = Plan(SCENARIOS[name], duration_s=10, seed=7, max_requests=100_000)
    return list(planned(replace(plan, **fields), 100.0, "llama"))


def test_a_load_of_equal_seed_sends_equal_requests_at_equal_times() -> None:
    drawn, again, other = (sent_by("noisy-neighbour", seed=seed) for seed in (7, 7, 8))
    assert drawn == again
    assert drawn != other
    # Times are sorted and within the duration; request numbers begin at 0 per source; prompts are distinct.
    moments = [each.at_s for each in drawn]
    assert moments == sorted(moments)
    assert 0 < moments[0] < moments[-1] < 10
    numbers = [each.number for each in drawn if each.source == "quiet"]
    assert numbers == list(range(len(numbers)))
    assert len({each.request.prompt for each in drawn}) == len(drawn)
    assert len(sent_by("noisy-neighbour", max_requests=30)) == 30


def test_the_arrivals_of_each_source_are_a_poisson_process() -> None:
    found = sent_by("noisy-neighbour", duration_s=100)
    by_second = Counter(int(each.at_s) for each in found)
    counts = [by_second[second] for second in range(100)]
    assert mean(counts) == pytest.approx(170, rel=0.05)
    # The variance of a Poisson process equals the mean.
    assert pvariance(counts) == pytest.approx(170, rel=0.25)
    assert sum(each.source == "quiet" for each in found) == pytest.approx(100 * 20, rel=0.1)


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_request_names_its_flow_ttl_and_workload(name: str) -> None:
    for source in SCENARIOS[name].sources:
        request = source_request(source, "llama", 5, 1)
        headers = dict(request.headers)
        assert headers["x-gateway-inference-fairness-id"] == source.flow
        assert headers["x-llm-d-inference-ttl"] == f"{source.ttl_s:g}s"
        assert headers.get("x-gateway-inference-objective", "") == source.objective
        if source.workload:
            assert json.loads(headers["x-workload-context"])["criticality"] == source.criticality


@given(seed=st.integers(0, 200), duration_s=st.floats(1, 120), replicas=st.integers(1, 8))
def test_replicas_are_killed_at_random_moments(seed: int, duration_s: float, replicas: int) -> None:
    moments = kill_moments(duration_s, replicas, seed)
    # There is at least one kill, all kills are within the duration, and one seed gives the same kills.
    assert moments
    assert all(0 < at_s < duration_s and 0 <= number < replicas for at_s, number in moments)
    assert moments == kill_moments(duration_s, replicas, seed)
    assert all(math.isfinite(at_s) for at_s, _ in moments)


EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"
PLAIN = b'{"usage": {"completion_tokens": 2}}'
FULL = b"retry-after: 3\r\nx-llm-d-request-dropped-reason: rejected-saturated\r\n"


HANG_UP = b"\0"


def chunked(*parts: bytes, end: bool = True) -> bytes:
    chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in parts]
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    return b"".join((head, *chunks, b"0\r\n\r\n" if end else b""))


def whole(body: bytes, status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    return b"HTTP/1.1 %s\r\n%scontent-length: %d\r\n\r\n%s" % (status, more, len(body), body)


@asynccontextmanager
async def serving(
    answer: Callable[[int], bytes | None], **options: bool
) -> AsyncIterator[tuple[Client, list[int]]]:
    """Serve request number `n` (from 0) with `answer(n)`; None sends nothing, HANG_UP at the end disconnects.

    Yields a client of the server, and a list whose only entry is the number of connections.
    """
    numbers, connections = itertools.count(), [0]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections[0] += 1
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                await reader.readexactly(length)
                reply = answer(next(numbers))
                if reply is not None:
                    writer.write(reply.removesuffix(HANG_UP))
                    if reply.endswith(HANG_UP):
                        return

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        with Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", **options) as client:
            yield client, connections


async def sent(client: Client, streamed: bool = True, within_s: float = 10.0) -> Answer:
    return await client.send(Request("hi", 2, streamed, headers=(("x-a", "b"),)), within_s=within_s)


SERVED, REFUSED, FAILED = Kind.SERVED, Kind.REFUSED, Kind.FAILED
CUT = "the connection was closed without a whole answer"


@cases("reply, streamed, kind, what", {
    "a stream": (chunked(EVENT, EVENT, USAGE, DONE), True, SERVED, "served"),
    "a whole answer": (whole(PLAIN), False, SERVED, "served"),
    "a refusal": (whole(b"{}", b"503 No", FULL), True, REFUSED, "503 rejected-saturated"),
    "too many requests": (whole(b"{}", b"429 No", FULL), True, REFUSED, "429 rejected-saturated"),
    "an error": (whole(b"{}", b"500 No"), True, FAILED, "500 without a reason"),
    "a stream without its end": (chunked(EVENT, EVENT), True, FAILED, "the stream ended without [DONE]"),
    "a stream that is cut": (chunked(EVENT, EVENT, DONE, end=False) + HANG_UP, True, FAILED, CUT),
    "a token missing": (chunked(EVENT, USAGE, DONE), True, FAILED, "the answer has 1 of 2 tokens"),
    "no usage": (whole(b"{}"), False, FAILED, "the answer has None of 2 tokens"),
    "a byte missing": (whole(PLAIN)[:-1] + HANG_UP, False, FAILED, CUT),
    "a bad chunk": (chunked(EVENT, end=False)[:-3] + b"zz", True, FAILED, "the answer is not HTTP"),
    "nothing": (HANG_UP, True, FAILED, CUT),
})  # fmt: skip
async def test_each_answer_is_classified_by_kind_and_outcome(
    reply: bytes, streamed: bool, kind: Kind, what: str
) -> None:
    async with serving(lambda _: reply) as (client, _):
        answer = await sent(client, streamed)
    assert answer.kind is kind
    assert answer.unserved is (kind is not SERVED)
    assert answer.outcome.startswith(what)
    if kind is REFUSED:
        assert (answer.retry_after, answer.text) == ("3", "{}")
    if kind is SERVED:
        assert answer.tokens == 2
        assert 0 < (answer.first_s or 0) <= answer.took_s


async def test_a_server_that_may_stop_early_may_send_fewer_tokens() -> None:
    async with serving(lambda _: chunked(EVENT, DONE), exact=False) as (client, _):
        assert (await sent(client)).served


async def test_a_second_answer_to_one_request_is_counted_and_the_connection_not_reused() -> None:
    async with serving(lambda _: whole(PLAIN) * 2) as (client, connections):
        assert [(await sent(client, streamed=False)).kind for _ in range(2)] == [SERVED] * 2
        assert (client.surplus_answers, connections) == (2, [2])


async def test_the_load_generators_connections_are_reused_unless_broken() -> None:
    # The server closes the connection at the third request.
    replies = [whole(PLAIN), whole(PLAIN), HANG_UP, whole(PLAIN)]
    async with serving(lambda number: replies[number]) as (client, connections):
        kinds = [(await sent(client, streamed=False)).kind for _ in replies]
    # A failed request is not sent again; other requests share connections.
    assert (kinds, connections) == ([SERVED, SERVED, FAILED, SERVED], [2])


async def test_silent_and_missing_servers_count_as_failures_and_a_leaving_client_does_not() -> None:
    async with serving(lambda _: None) as (client, _):
        answer = await sent(client, within_s=0.05)
        left = await client.send(Request("hi", 2, leaves_s=0.05))
    assert (answer.kind, answer.fault) == (FAILED, "no whole answer within 0.05 s")
    assert (left.kind, left.unserved, left.fault) == (Kind.LEFT, False, "")
    assert (await sent(client)).fault.startswith("no connection")


async def test_an_open_loop_sends_requests_without_waiting_for_answers() -> None:
    # The server is silent; twenty requests are due within 40 ms.
    all_in = asyncio.Event()
    async with serving(lambda number: all_in.set() if number == 19 else None) as (client, _):
        load = Load(client)
        plan = generator.steady(500, lambda _, number: Request(f"{number}", 2))
        running = asyncio.create_task(load.send_open(itertools.islice(plan, 20)))
        # All requests are sent although none is answered.
        async with asyncio.timeout(30):
            await all_in.wait()
        assert load.open == 20
        # When the load stops, each open request counts once, with the kind LEFT.
        load.stop()
        await running
    assert (load.ended[Kind.LEFT], load.sent, len(load.history)) == (20, 20, 20)
    due_s = sorted(each.due_s - load.began_s for each in load.history)
    assert due_s[:2] == pytest.approx([0, 0.002])


async def test_a_closed_loop_sends_the_given_number_of_requests_over_one_connection_per_client() -> None:
    async with serving(lambda _: whole(PLAIN)) as (client, connections):
        load = Load(client)
        await load.send_closed(3, lambda _, number: Request(f"{number}", 2), requests=40)
    assert (load.served, load.sent, connections) == (40, 40, [3])
    assert [one.sent_s < two.done_s for one, two in pairwise(load.history)] == [True] * 39


async def test_a_closed_loop_ends_after_the_last_answers_when_its_block_ends() -> None:
    async with serving(lambda _: whole(b"{}", b"503 No", FULL)) as (client, connections):
        url = f"http://{client.address}"
        began_s = time.monotonic()
        async with generator.closed_loop(
            url, clients=2, make_request=generator.requests_of_flows(2), pause_s=0.02
        ) as load:
            await load.wait_until(lambda: len(load.unserved) >= 10)
    # Each request uses its own connection, and a client pauses after a refusal.
    assert (connections, load.sent) == ([len(load.history)], len(load.history))
    assert time.monotonic() - began_s >= 4 * 0.02


@given(seed=st.integers(0, 1000))
def test_a_request_of_the_scenario_mixed_is_short_enough_for_a_retry_by_envoy(seed: int) -> None:
    request = generator.mixed_request(random.Random(seed), seed)
    body = request.body()
    assert len(body) <= generator.LONGEST_BODY_BYTES
    assert json.loads(body)["max_tokens"] == request.tokens


def test_a_quantile_is_one_of_the_given_values() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [generator.quantile(values, part) for part in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert generator.quantile([7.0], 0.5) == 7
    assert math.isnan(generator.quantile([], 0.5))
    assert generator.quantiles([]) == {}
    assert generator.quantiles([3, 1, 2]) == {"p50": 2, "p90": 3, "p95": 3, "p99": 3, "max": 3}


@cases("fields, demand, due", {
    "a asks for little, b and c share the rest": ([{}, {}, {}], (10, 200, 200), (10, 45, 45)),
    "a higher band comes first": (
        [{"band": Band.CRITICAL}, {}, {"band": Band.SHEDDABLE}], (60, 60, 60), (60, 40, 0)),
})  # fmt: skip
def test_a_flow_gets_at_most_its_demand_and_others_share_the_rest_by_band(
    fields: list[dict[str, Any]], demand: tuple[float, ...], due: tuple[float, ...]
) -> None:
    sources = [Source(name, 1, name, **more) for name, more in zip("abc", fields, strict=True)]
    found = result.fair(sources, dict(zip("abc", demand, strict=True)), 100)
    assert [found[name] for name in "abc"] == pytest.approx(due)


FAULTS = result.FaultsInjected(kills=[(3.0, "replica-1")], outages=[(5.0, 8.0)])


def written(evidence: result.RunResult, folder: Path) -> tuple[dict[str, Any], str]:
    from picker_tools.load.report import write  # imports matplotlib, which takes a second in each worker

    write(evidence, check_promises(evidence), folder)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary, (folder / "report.md").read_text()


def test_the_report_has_figures_by_source_and_links_plots_beside_it(tmp_path: Path) -> None:
    summary, page = written(run("noisy-neighbour", faults_injected=FAULTS), tmp_path)
    plots = {file.stem for file in tmp_path.glob("*.svg")}
    assert plots == {"waits", "stock", "shares", "latency"}
    for name in plots:
        assert f"![{name}]({name}.svg)" in page
        ElementTree.parse(tmp_path / f"{name}.svg")
    assert (summary["scenario"], summary["seed"]) == ("noisy-neighbour", 1)
    assert summary["versions"]["picker-fleet"]
    quiet = summary["sources"]["quiet"]
    assert quiet["sent"] == quiet["served"] == 40
    assert quiet["ttft_s"] == {"p50": 0.1, "p90": 0.1, "p95": 0.1, "p99": 0.1, "max": 0.1}
    assert "| quiet | Default | 40 | 40 |" in page
    assert summary["shares"]["quiet"]["served"] == pytest.approx(0.5)
    assert summary["kills"] == [{"at_s": 3.0, "replica": "replica-1"}]
    assert summary["redis_away"] == [{"from_s": 5.0, "to_s": 8.0}]


def test_the_load_report_shows_the_requests_that_broke_a_guarantee(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = (refusal("client-1", reason="a|b"), refusal("client-2"), *run().answers[2:])
    evidence = run(answers=answers)
    summary, page = written(evidence, tmp_path)
    assert "1 promises broken" in page
    assert "| broken | no-errors | every request is served |" in page
    assert "client-1 #0: sent at 0.000 s, 503 a\\|b" in page
    assert summary["verdict"] == "broken"
    promises = {each["name"]: each for each in summary["promises"]}
    assert len(promises["no-errors"]["cases"]) == 2
    assert summary["ends"]["503 rejected-saturated"] == 1
    # The terminal shows one line for each promise, and the cases of a broken promise.
    assert command.write_report(evidence, tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    kept = [line.split()[1] for line in lines if line.startswith("held")]
    assert kept[:2] == ["nothing-expires", "one-answer"]
    assert any(line.startswith("BROKEN no-errors: every request is served") for line in lines)


def test_requests_during_a_redis_outage_are_left_out_of_fair_shares() -> None:
    asked = tuple(each for each in run("demo").answers if each.source == "noisy" or each.number % 4 == 0)
    harmed = run("demo", answers=asked, faults_injected=result.FaultsInjected(outages=[(10.0, 12.0)]))
    logged = tuple(
        result.Dispatch(harmed.wall_s + each.sent_s, each.source, "", 0.1)
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
def test_every_load_run_has_a_report(evidence: result.RunResult, tmp_path: Path) -> None:
    summary, page = written(evidence, tmp_path)
    assert summary["counts"]["sent"] == evidence.sent
    assert ("**interrupted**" in page) is evidence.interrupted
