"""An endpoint's wrong answers are found by comparison with other endpoints; good answers are never odd."""

import random
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from tables import cases

from picker_fleet.domain.request import Completion, Outcome
from picker_fleet.scheduling.answer_comparison import AnswerComparison
from picker_fleet.state import accounting_token
from picker_fleet.state.accounting_token import Keyring

JSON, STREAM = "application/json", "text/event-stream; charset=utf-8"
KEYS = Keyring()
PATH = "/v1/chat/completions"


class Seen(NamedTuple):
    """An answer as a replica sees it."""

    status: int = 200
    content_type: str = JSON
    body_bytes: int = 400
    seconds: float = 0.3
    tokens: int | None = 7
    path: str = PATH


Server = Callable[[random.Random], Seen]


class Pool:
    """Servers that answer requests of `flows` in turn; each request goes to a random server, or, if they are
    `sticky`, to its flow's server."""

    def __init__(self, servers: Sequence[Server], *, flows: int = 20, sticky: bool = False) -> None:
        self._servers, self._sticky = servers, sticky
        self._tokens = [
            accounting_token.signed(f"f{flow}\t1\t1.0\t1.0\t\t3\tllama\te\t0", "r", KEYS)
            for flow in range(flows)
        ]
        self._dice = random.Random(1)
        self.comparison = AnswerComparison()
        self.answers = Counter[int]()

    def answer(self, count: int) -> Counter[int]:
        """Let the servers answer `count` requests; returns how many answers showed each server as failing."""
        failing = Counter[int]()
        for _ in range(count):
            flow = self._dice.randrange(len(self._tokens))
            at = (flow if self._sticky else self._dice.randrange(1 << 30)) % len(self._servers)
            seen = self._servers[at](self._dice)
            self.answers[at] += 1
            failing[at] += bool(self.comparison.compare(completion(f"e{at}", seen), self._tokens[flow]).fault)
        return failing


def completion(endpoint: str, seen: Seen) -> Completion:
    return Completion(
        "r", Outcome.COMPLETED, seen.status, endpoint, 7, seen.tokens, None, None,
        service_s=seen.seconds, path=seen.path, content_type=seen.content_type, body_bytes=seen.body_bytes,
    )  # fmt: skip


def chat(dice: random.Random) -> Seen:
    """A good server's answer: a stream, or JSON with usage; rarely one token, or the refusal of a request."""
    if dice.random() < 0.02:
        return Seen(400, JSON, 150, 0.003, None)
    tokens = 1 if dice.random() < 0.01 else int(dice.lognormvariate(4.5, 1.0)) + 1
    seconds = (0.05 + tokens * 0.02) * dice.uniform(0.8, 1.3)
    if dice.random() < 0.5:
        return Seen(200, STREAM, 200 + 300 * tokens, seconds, None)
    return Seen(200, JSON, 400 + 4 * tokens, seconds, tokens)


BAD: dict[str, Seen] = {
    "a web page": Seen(200, "text/html", 5000, 0.002, None),
    "a slow web page of a proxy": Seen(200, "text/html", 100, 0.3, None),
    "no content": Seen(204, "", 0, 0.002, None),
    "an error as text": Seen(200, JSON, 40, 0.002, None),
    "a long error as text": Seen(200, JSON, 2000, 0.002, None),
    "half an answer": Seen(200, JSON, 60, 0.3, None),
    "tokens of the prompt alone": Seen(200, JSON, 400, 0.002, 0),
    "a stream of comments": Seen(200, STREAM, 50, 0.002, None),
    "an upgrade": Seen(101, "", 0, 0.002, None),
    "an unknown model": Seen(404, JSON, 90, 0.002, None),
}


@pytest.mark.parametrize("servers", [2, 4, 8])
@cases("bad", {name: (seen,) for name, seen in BAD.items()})
def test_a_server_that_reports_success_without_an_answer_counts_as_failing(bad: Seen, servers: int) -> None:
    turned = [False]

    def fails(dice: random.Random) -> Seen:
        return bad if turned[0] else chat(dice)

    pool = Pool([fails, *[chat] * (servers - 1)])
    assert pool.answer(200 * servers).total() == 0
    turned[0] = True
    pool.answers.clear()
    failing = pool.answer(100 * servers)
    # A wrong refusal must repeat more often, since clients cause refusals, too.
    assert failing[0] >= pool.answers[0] - (25 if 400 <= bad.status < 500 else 15), (failing, pool.answers)
    assert failing.total() == failing[0]
    turned[0] = False
    pool.answer(200 * servers)
    assert pool.answer(100 * servers).total() == 0


def test_a_server_that_fails_every_second_request_counts_as_failing() -> None:
    def half(dice: random.Random) -> Seen:
        return BAD["an error as text"] if turned[0] and dice.random() < 0.5 else chat(dice)

    turned = [False]
    pool = Pool([half, chat, chat, chat])
    pool.answer(800)
    turned[0] = True
    failing = pool.answer(800)
    assert failing[0] > 20
    assert failing.total() == failing[0]


def tokenize(dice: random.Random) -> Seen:
    size = int(dice.lognormvariate(5, 2))
    return Seen(200, JSON, 20 + 6 * size, 0.001 + size * 1e-5, None, "/tokenize")


def embed(dice: random.Random) -> Seen:
    return Seen(200, JSON, 10_000 * dice.randint(1, 50), 0.005 + dice.random() / 10, None, "/v1/embeddings")


def speech(dice: random.Random) -> Seen:
    kind = dice.choices(["audio/mpeg", "audio/wav"], [97, 3])[0]
    return Seen(
        200, kind, 1000 * int(dice.lognormvariate(4, 1)), 0.2 + dice.random(), None, "/v1/audio/speech"
    )


def without_usage(dice: random.Random) -> Seen:
    return chat(dice)._replace(tokens=None)


def eight_times_faster(dice: random.Random) -> Seen:
    seen = chat(dice)
    return seen._replace(seconds=seen.seconds / 8)


def with_a_cache(dice: random.Random) -> Seen:
    return chat(dice)._replace(seconds=0.002)


def one_token(dice: random.Random) -> Seen:
    return Seen(200, STREAM, 500, 0.05, None)


def nothing(dice: random.Random) -> Seen:
    return Seen(204, "", 0, 0.001, None, "/flush")


def bad_requests(dice: random.Random) -> Seen:
    return Seen(400, JSON, 150, 0.003, None) if dice.random() < 0.9 else chat(dice)


GOOD: dict[str, tuple[Sequence[Server], bool]] = {
    "of a chat": ([chat] * 4, False),
    "of a chat, two servers with sessions": ([chat] * 2, True),
    "of a tokenizer": ([tokenize] * 4, True),
    "of embeddings": ([embed] * 4, True),
    "of speech in several formats": ([speech] * 4, True),
    "of one token or no content": ([nothing, nothing, one_token, one_token], False),
    "of an engine without usage": ([without_usage, chat, chat, chat], False),
    "of a faster engine": ([eight_times_faster, chat, chat, chat], False),
    "of an engine with a cache": ([with_a_cache, chat, chat, chat], False),
    "to bad requests": ([bad_requests] * 4, False),
}


@cases("servers, sticky", GOOD)
def test_good_answers_never_make_a_server_count_as_failing(servers: Sequence[Server], sticky: bool) -> None:
    assert Pool(servers, sticky=sticky).answer(20_000).total() == 0


@cases("flows, tries", {"at ninety percent of the traffic": (20, 1), "of three flows that retry": (3, 50)})
@pytest.mark.parametrize("servers", [2, 4, 8])
def test_bad_requests_never_make_a_good_server_count_as_failing(servers: int, flows: int, tries: int) -> None:
    pool = Pool([chat] * servers, flows=20)
    dice, failing = random.Random(2), 0
    for number in range(9_000 // tries):  # nine bad requests for each good one; all tries reach one server
        endpoint = f"e{dice.randrange(servers)}"
        for _ in range(tries):
            token = pool._tokens[dice.randrange(flows)]
            bad = Seen(400, JSON, 150, 0.003, None)
            failing += bool(pool.comparison.compare(completion(endpoint, bad), token).fault)
        failing += pool.answer(100 if number % 50 == 0 else max(tries // 9, number % 9 == 0)).total()
    assert failing == 0


def test_bad_requests_of_one_client_to_one_server_do_not_make_the_server_count_as_failing() -> None:
    def refuses(dice: random.Random) -> Seen:
        return BAD["an unknown model"]

    # Each flow's server refuses or answers; three flows may be of one client.
    assert Pool([refuses, chat, chat, chat], flows=12, sticky=True).answer(2000).total() == 0
    assert Pool([refuses, chat, chat, chat], flows=16, sticky=True).answer(2000)[0] > 0
    # Failures of one flow eject an endpoint only if the flow has the pool alone (lua/lib/outliers.lua).
    assert Pool([refuses, chat, chat, chat], flows=1).answer(2000)[0] > 0


def test_an_answer_that_most_servers_give_is_not_odd() -> None:
    def page(dice: random.Random) -> Seen:
        return BAD["a web page"]

    assert Pool([page, page, page, chat]).answer(4000).total() == 0


def test_an_answer_that_is_already_known_as_a_failure_is_not_compared() -> None:
    pool = Pool([chat] * 4)
    pool.answer(800)
    seen = completion("e0", BAD["an error as text"])
    for known in (
        seen._replace(fault="empty"),
        seen._replace(outcome=Outcome.CLIENT_GONE),
        seen._replace(service_s=None),
    ):
        assert {pool.comparison.compare(known, pool._tokens[0]) for _ in range(20)} == {known}


def test_memory_for_compared_answers_is_bounded_whatever_paths_clients_send() -> None:
    comparison = AnswerComparison(most_endpoints=100)
    token = accounting_token.signed("f\t1\t1.0\t1.0\t\t3\tllama\te\t0", "r", KEYS)
    for number in range(2000):
        for endpoint in ("e0", "e1", "e2"):
            comparison.compare(completion(endpoint, Seen(path=f"/v1/{number}?q={number}")), token)
    assert sum(len(each) for each in comparison._compared.values()) <= 100
    for number in range(1000):
        comparison.compare(completion("e0", Seen(content_type=f"text/{number}")), token)
    assert len(comparison._compared[PATH, "llama"]["e0"].answers) <= 16
    tracemalloc.start()
    for number in range(100):
        comparison.compare(completion("e0", Seen(200, f"{number}" + "x" * 50_000, tokens=None)), token)
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes < 200_000
