"""Requests are split by a threshold, or by the predicted times of both choices."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from choosers import chooser_of, fleet_with
from local_requests import ask
from tables import cases
from test_chooser import A, B, C, Knowledge

from bench.stages import CASES, Pool, level
from picker_fleet.domain.config import EffectiveConfig, parse
from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.domain.request import (
    Completion,
    Endpoint,
    InferenceRequest,
    LatencyObjective,
    Outcome,
    Placement,
)
from picker_fleet.endpoints.readings import EndpointMetrics, MetricsCache
from picker_fleet.endpoints.snapshot import Snapshot, SnapshotCell
from picker_fleet.scheduling.splitting import StageTimes, decide
from picker_fleet.state import accounting_token
from picker_fleet.state.accounting_token import Keyring

D = "10.0.0.4:8000"
KNOWN = StageTimes(whole_s=1.0, split_s=0.8, own_s=0.9, delayed=4)


def never() -> float:
    """A random draw that never makes the chooser explore the slower choice."""
    return 1.0


@cases("tokens, threshold, times, is_split", {
    "above the threshold": (501, 500, StageTimes(), True),
    "at the threshold": (500, 500, StageTimes(), False),
    "a threshold ignores predictions": (501, 500, StageTimes(0.1, 9.0), True),
    "unknown times, a long prompt": (1001, None, StageTimes(), True),
    "unknown times, a short prompt": (1000, None, StageTimes(), False),
    "one time unknown": (1001, None, StageTimes(whole_s=0.1), True),
    "a split is predicted to be faster": (100, None, StageTimes(1.0, 0.95), True),
    "a split is predicted to be as fast": (9000, None, StageTimes(1.0, 1.0), False),
    "slower, but it would delay running answers": (9000, None, StageTimes(1.0, 1.7, 0.9, 1), True),
    "a split would delay answers elsewhere": (9000, None, StageTimes(1.0, 0.1, 0.9, 1, 2), False),
    "a prompt too short for a transfer": (15, None, StageTimes(1.0, 0.5), False),
    "the shortest prompt for a transfer": (16, None, StageTimes(1.0, 0.5), True),
})  # fmt: skip
def test_a_request_is_split_if_that_costs_less_time(
    tokens: float, threshold: int, times: StageTimes, is_split: bool
) -> None:
    assert decide(tokens, threshold, times, never).is_split is is_split


@pytest.mark.parametrize(
    ("times", "least", "most"),
    [(KNOWN, 10, 50), (StageTimes(1.0, 0.89), 100, 190), (StageTimes(), 1000, 1500)],
)
def test_a_few_requests_take_the_slower_choice_and_more_while_its_time_is_unknown(
    times: StageTimes, least: int, most: int
) -> None:
    draw = random.Random(50).random
    found = [decide(2000, None, times, draw) for _ in range(10_000)]
    explored = [each for each in found if each.explores]
    assert least <= len(explored) <= most
    assert all(each.is_split is not each.explores for each in found)
    assert not decide(2000, 1000, times, lambda: 0.0).explores, "a threshold is kept"
    assert not decide(2000, None, times, None).explores, "an answer that is no stream teaches nothing"


def test_the_decision_whether_to_split_a_request_is_explained_in_words() -> None:
    assert str(decide(3100, None, KNOWN, never)) == (
        "split: 3100 uncached tokens, whole 1.00 s and 0.90 s for each of 4 answers, split 0.80 s"
    )
    assert str(decide(3100, None, StageTimes(1.9, 2.0), lambda: 0.0)) == (
        "split: 3100 uncached tokens, whole 1.90 s, split 2.00 s; chosen to learn its time"
    )
    assert str(decide(90, 100, StageTimes(), never)) == "whole: 90 uncached tokens"


class Staged(Knowledge):
    """A chooser over decode endpoints A and B and prefill endpoints C and D, which never explores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, threshold: object = 100, **scorers: float) -> None:
        super().__init__(
            *(Endpoint(each) for each in (A, B)),
            *(Endpoint(each, prefills=True, decodes=False) for each in (C, D)),
            **scorers,
        )
        weights = {name.replace("_", "-"): weight for name, weight in scorers.items()}
        settings = parse({"scheduling": {"scorers": weights, "stages": {"threshold": threshold}}})
        self.chooser.follow(EffectiveConfig(settings, {}))
        monkeypatch.setattr("random.random", never)

    def prefill(self, **fields: object) -> str:
        return self.chooser.choose(self.ask(**fields)).prefill

    @staticmethod
    def ask(**fields: object) -> InferenceRequest:
        return ask(**{"can_split": True, "body_bytes": 4000, **fields})


def test_only_prompts_beyond_the_threshold_and_on_paths_that_can_be_split_get_prefill_candidates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    staged = Staged(monkeypatch)
    assert staged.prefill() == "*"
    assert staged.chooser.choose(staged.ask()).candidates == "*", "the script knows the stages"
    assert staged.prefill(body_bytes=399) == ""
    assert staged.prefill(can_split=False) == ""
    assert staged.prefill(origin=A) == "", "the endpoint that stores the state prefills itself"
    assert staged.prefill(prompt_tokens=50.0) == "", "an estimate of tokens counts before the body's size"
    # A subset hint or labels also restrict the prefill endpoints.
    assert staged.prefill(subset=(A, D)) == D
    assert staged.prefill(subset=(A, B)) == ""
    assert staged.prefill(selector={"gpu": "h100"}) == ""
    assert staged.chooser.choose(staged.ask(subset=(A, D))).candidates == f"{A},{D}"


@pytest.mark.parametrize("threshold", [100, "auto"])
def test_a_request_is_split_also_if_it_waits_for_a_decode_endpoint(
    monkeypatch: pytest.MonkeyPatch, threshold: object
) -> None:
    for scorers, prefill in ({}, "*"), ({"in_flight": 1.0}, f"{C}=0.0000"):
        staged = Staged(monkeypatch, threshold, **scorers)
        staged.cell.publish(Snapshot("2", (Endpoint(C, prefills=True, decodes=False),)))
        assert staged.prefill(prompt_tokens=1001.0) == prefill
        assert staged.prefill(prompt_tokens=100.0) == ""


def test_no_request_is_split_while_no_prefill_endpoint_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    staged = Staged(monkeypatch)
    gone = (Endpoint(C, down=True, prefills=True, decodes=False), Endpoint(D, drained=True, prefills=True))
    staged.cell.publish(Snapshot("2", (Endpoint(A), *gone)))
    assert staged.prefill() == ""
    staged.cell.publish(Snapshot("3", (Endpoint(A),)))
    assert staged.prefill() == ""
    assert staged.chooser.choose(staged.ask()).split is None


def test_prefill_endpoints_are_scored_by_prefixes_and_never_candidates_of_whole_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    staged = Staged(monkeypatch, prefix_affinity=3)
    prompt = tuple(b"block-%02d" % number for number in range(15))
    asked = staged.ask(prefix=prompt)
    choice = staged.chooser.choose(asked)
    staged.chooser.placed(asked, choice, (A,), "0", (D,))
    explained = staged.chooser.explain("r")
    assert explained is not None
    assert (explained.stages, explained.prefillers) == ("split: 1000 uncached tokens", (D,))
    staged.chooser.placed(asked._replace(id="s", prefix=()), choice, (A,), "0")
    explained = staged.chooser.explain("s")
    assert explained is not None
    assert explained.stages.startswith("whole, since no prefill endpoint could be reserved; split: ")
    again = staged.chooser.choose(asked)
    assert {each.split("=")[0] for each in again.candidates.split(",")} == {A, B}
    # 15 blocks of 256 bytes are cached on A, which leaves 40 tokens of 1000.
    assert again.prefill == ""
    assert str(again.split) == "whole: 40 uncached tokens"
    longer = staged.chooser.choose(staged.ask(prefix=(*prompt, b"block-15", b"block-16"), body_bytes=8000))
    assert longer.prefill.split("=")[0] == D
    assert {each.split("=")[0] for each in longer.prefill.split(",")} == {C, D}


def test_cached_prompts_do_not_count_if_decode_endpoints_are_not_scored_by_prefixes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    staged = Staged(monkeypatch)
    stages = {"threshold": 100, "prefill": {"scorers": {"prefix-affinity": 3}}}
    staged.chooser.follow(EffectiveConfig(parse({"scheduling": {"stages": stages}}), {}))
    asked = staged.ask(prefix=tuple(b"block-%02d" % number for number in range(15)))
    staged.chooser.placed(asked, staged.chooser.choose(asked), (A,), "0", (D,))
    again = staged.chooser.choose(asked)
    assert again.candidates == "*", "B may decode it, too"
    assert str(again.split) == "split: 1000 uncached tokens"
    assert again.prefill.split("=")[0] == D


@pytest.mark.parametrize(("zone", "near"), [("a", C), ("b", D), ("", "")])
def test_a_prefill_endpoint_near_the_decode_endpoint_is_preferred(zone: str, near: str) -> None:
    cell = SnapshotCell()
    stages = (
        Endpoint(A, labels={"zone": zone} if zone else {}),
        Endpoint(C, labels={"zone": "a"}, prefills=True, decodes=False),
        Endpoint(D, labels={"zone": "b"}, prefills=True, decodes=False),
    )
    cell.publish(Snapshot("1", stages))
    prefer = {"prefer": {"zone": "same"}, "stages": {"threshold": 100}}
    chooser = chooser_of(cell, KnownFleet(parse({"labels": {"zone": "a"}, "scheduling": prefer})))
    prefill = chooser.choose(Staged.ask()).prefill.split(",")
    scores = {address: float(score) for address, _, score in (each.partition("=") for each in prefill)}
    assert {address for address in scores if scores[address] > 0} == ({near} if near else set())


def test_each_decode_endpoint_prefers_prefill_endpoints_with_its_own_labels() -> None:
    cell = SnapshotCell()
    decoders = (Endpoint(A, labels={"zone": "a"}), Endpoint(B, labels={"zone": "b"}))
    prefillers = (
        Endpoint(each, labels={"zone": zone}, prefills=True, decodes=False)
        for each, zone in ((C, "a"), (D, "b"))
    )
    cell.publish(Snapshot("1", (*decoders, *prefillers)))
    prefer = {"prefer": {"zone": "same"}, "stages": {"threshold": 100}}
    chooser = chooser_of(cell, KnownFleet(parse({"labels": {"zone": "a"}, "scheduling": prefer})))
    parts = (part.split(">") for part in chooser.choose(Staged.ask()).prefill.split(";"))
    near = {decoders: prefill.partition("=")[0] for decoders, prefill in parts}
    assert near == {A: C, B: D}


def test_threshold_auto_learns_the_times_of_both_choices_and_splits_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    staged = Staged(monkeypatch, "auto")
    end = Completion("r", Outcome.COMPLETED, 200, None, 10_000, 11, 1.0, 0.4, service_s=1.4)

    def run(size: int, prefiller: str, ttft_s: float) -> None:
        """Serve a streamed request of `size` bytes, split if there is a `prefiller`."""
        request = staged.ask(stream=True, body_bytes=size)
        choice = staged.chooser.choose(request)
        prefillers = (prefiller,) if prefiller else ()
        loads = staged.chooser.placed(request, choice, (A,), "0", prefillers)
        written = accounting_token.write(
            request, A, load=loads.decode or (), prefiller=prefiller, prefill_load=loads.prefill or ()
        )
        token = accounting_token.signed(written, "r", Keyring())
        assert accounting_token.prefill_of(token) == (prefiller, loads.prefill or ())
        staged.chooser.ended(end._replace(ttft_s=ttft_s), token)
        staged.routes._apply(staged.routes._completions)
        staged.routes._completions.clear()
        staged.tick()

    assert staged.prefill(body_bytes=4004) == "*", "as by the default threshold"
    assert staged.prefill(body_bytes=4000) == ""
    # Whole, 1000 bytes take 100 ms; split, they take 50 ms, after 100 ms for the transfer.
    for turn in range(150):
        size = 1000 + 100 * (turn % 60)
        run(size, "", size * 1e-4)
        run(size, C, 0.1 + size * 0.5e-4)
    for size, is_split in ((1000, False), (1500, False), (2600, True), (4000, True), (40_000, True)):
        assert (staged.prefill(body_bytes=size) != "") is is_split, size
    explained = staged.chooser.choose(staged.ask(body_bytes=4000)).split
    assert explained is not None
    assert explained.times.whole_s == pytest.approx(0.4, rel=0.1)
    assert explained.times.split_s == pytest.approx(0.3, rel=0.1)
    # A prompt that would delay four running answers is split although that is slower for itself.
    staged.fleet.in_flight = {A: 4, B: 4}
    staged.tick()
    assert staged.prefill(body_bytes=1500) == "*"
    for address in (A, B):  # all four requests wait for their own prefill elsewhere
        staged.scraped(address, running=0.0)
    staged.tick()
    found = staged.chooser.choose(staged.ask(body_bytes=1500)).split
    assert found is not None
    assert found.times.delayed == 2
    loads = staged.chooser.placed(staged.ask(), staged.chooser.choose(staged.ask()), (A,), "0", (C,))
    assert loads.prefill_s == pytest.approx(0.3, rel=0.3)
    assert (loads.decode, loads.prefill) == (None, None), "the answer is not streamed"
    # A request is refused for its objective only if neither choice is predicted to keep it.
    slow = staged.ask(body_bytes=40_000, latency=LatencyObjective(ttft_s=3.0))
    assert staged.chooser.shortfall_s(slow) is None
    assert staged.chooser.shortfall_s(slow._replace(can_split=False)) == pytest.approx(1.0, rel=0.2)
    assert staged.chooser.shortfall_s(slow, 2.0) == pytest.approx(1.1, rel=0.3)


def test_the_configured_settings_for_stages_reach_the_chooser() -> None:
    scheduling = fleet_with("queue-depth", "kv-cache", "prefix-affinity").config.settings.scheduling
    assert scheduling.prefill_weights == {"queue-depth": 1, "prefix-affinity": 1}
    own = parse({"scheduling": {"stages": {"prefill": {"scorers": {"random": 1}}}}}).scheduling
    assert (own.prefill_weights, own.weights) == ({"random": 1}, {})


# In each case the best threshold keeps 90 % of the objectives at `rate` requests a second.
@cases("prefill, decode, both, case, rate", {
    "enough prefill endpoints": (4, 4, False, "long-strict", 4.7),
    "all endpoints do both": (4, 4, True, "long-strict", 2.9),
    "all do both and have full KV caches": (4, 4, True, "long-relaxed", 13.0),
})  # fmt: skip
def test_threshold_auto_has_nearly_the_goodput_of_the_best_fixed_threshold(
    prefill: int, decode: int, both: bool, case: str, rate: float
) -> None:
    """Uses simulated engines whose steps take the times measured for vLLM with OPT-13B."""
    pool = partial(Pool, prefill, decode, {}, both=both)
    assert level(replace(CASES[case], requests=300), 0.95 * rate, pool, learns=True).attained >= 0.9


def test_media_of_a_request_are_encoded_by_several_endpoints_with_little_load() -> None:
    encoders = [
        Endpoint(f"10.0.1.{n}:8000", {"gpu": "ab"[n % 2]}, encodes=True, decodes=False) for n in range(6)
    ]
    cell, readings = SnapshotCell(), MetricsCache(None, lambda: 0.0)
    readings.update(
        {each.address: EndpointMetrics(1, waiting=n, running=n) for n, each in enumerate(encoders)}
    )
    cell.publish(Snapshot("1", (Endpoint(A), *encoders)))
    chooser = chooser_of(cell, readings=readings)
    addresses = [each.address for each in encoders]

    def named(media: int, prefiller: str = "", **fields: Any) -> tuple[str, ...]:
        return chooser.encoders(
            ask()._replace(media=media, **fields), Placement((A,), "", prefillers=(prefiller,))
        )

    assert named(3) == tuple(addresses[:3]), "all are drawn"
    once = Counter(each for _ in range(400) for each in named(1))
    assert once[addresses[0]] > once[addresses[3]] > 0 == once[addresses[5]], "one of two drawn at random"
    assert named(100) == tuple(addresses)
    assert set(named(9, selector={"gpu": "b"})) == set(addresses[1::2])
    chooser.placed(ask(), chooser.choose(ask()), (A,))
    explained = chooser.explain("r")
    assert explained is not None
    assert set(explained.encoders) == set(addresses[1::2])
    assert set(named(9, subset=(A, addresses[2]))) == {addresses[2]}
    assert named(9, addresses[1]) == (), "its prefill endpoint encodes"
    marked = (replace(encoders[0], down=True), replace(encoders[1], draining=True), *encoders[2:4])
    cell.publish(Snapshot("2", (Endpoint(A), *marked)))
    assert named(9) == tuple(addresses[2:4])
    cell.publish(Snapshot("3", (Endpoint(A), *marked[:2])))
    assert named(9) == ()
