"""Arrivals: seeded, Poisson, bounded; what each source sends."""

import json
import math
from random import Random
from statistics import mean, pvariance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker_tools.load.generator import (
    arrivals,
    completion_request,
    conversation_turn,
    rates_by_capacity,
    rates_by_total,
)
from picker_tools.load.scenarios import SCENARIOS, Source, Wave
from picker_tools.load.session import kill_moments

PLAIN = Source("plain", 1.0, "plain")
WAVY = Source("wavy", 1.0, "wavy", wave=Wave(period_s=4, high_s=1, factor=5))


def test_the_same_seed_brings_the_same_arrivals() -> None:
    drawn = [
        arrivals((PLAIN, WAVY), (20, 5), duration_s=10, max_requests=10_000, seed=seed) for seed in (7, 7, 8)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    # In order, within the duration, numbered from 0 in each source.
    moments = [each.at_s for each in drawn[0]]
    assert moments == sorted(moments)
    assert moments[0] > 0
    assert moments[-1] < 10
    for source in (0, 1):
        numbers = [each.number for each in drawn[0] if each.source == source]
        assert numbers == list(range(len(numbers)))


def test_arrivals_are_a_poisson_process() -> None:
    found = arrivals((PLAIN,), (50,), duration_s=400, max_requests=100_000, seed=3)
    # The variance of a Poisson process is its mean.
    counts = [0] * 400
    for each in found:
        counts[int(each.at_s)] += 1
    assert mean(counts) == pytest.approx(50, rel=0.05)
    assert pvariance(counts) == pytest.approx(50, rel=0.25)


def test_a_wave_multiplies_the_rate() -> None:
    found = arrivals((WAVY,), (40,), duration_s=400, max_requests=100_000, seed=3)
    high = sum(each.at_s % 4 < 1 for each in found)
    assert high / 100 == pytest.approx(200, rel=0.05)
    assert (len(found) - high) / 300 == pytest.approx(40, rel=0.05)


@given(seed=st.integers(0, 50), rate=st.floats(0.1, 200), max_requests=st.integers(1, 300))
def test_arrivals_are_bounded_in_number_and_time(seed: int, rate: float, max_requests: int) -> None:
    found = arrivals((PLAIN, WAVY), (rate, rate), duration_s=3, max_requests=max_requests, seed=seed)
    assert len(found) <= max_requests
    assert all(each.at_s < 3 for each in found)


def test_a_source_without_a_rate_has_no_arrivals() -> None:
    assert arrivals((PLAIN,), (0.0,), duration_s=10, max_requests=10, seed=1) == []


def test_rates_follow_from_what_the_fleet_can_serve() -> None:
    # The fleet keeps 8 requests in flight: it dispatches below 7.2.
    steady = SCENARIOS["steady"]
    found = rates_by_capacity(steady, 7.2, [0.24] * 4)
    # The load is 0.7.
    assert sum(found.rates_per_s) == pytest.approx(0.7 * 8 / 0.24)
    assert found.capacity_per_s == pytest.approx(8 / 0.24)
    # A given rate is spread over the sources by their loads.
    assert rates_by_total(steady, 10, [0.24] * 4).rates_per_s == pytest.approx((2.5,) * 4)


def test_rates_in_tokens_count_costs() -> None:
    scenario = SCENARIOS["long-prompts"]
    found = rates_by_capacity(scenario, 57_600, [0.3, 0.2])
    # A source's rate is its load times what fits of it, by its mean cost.
    long, short = scenario.sources
    assert found.rates_per_s[0] == pytest.approx(long.load * 57_600 / long.cost_tokens / 0.3)
    assert found.rates_per_s[1] == pytest.approx(short.load * 57_600 / short.cost_tokens / 0.2)


def test_a_conversation_counts_as_all_its_turns() -> None:
    scenario = SCENARIOS["multi-turn"]
    assert rates_by_capacity(scenario, 8, [0.24]).rates_per_s == pytest.approx((0.5 * 8 / 0.24 / 5,))


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
