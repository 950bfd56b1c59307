"""The model of an engine's prefix cache: the order of eviction, and the capacity that answers teach."""

import itertools
import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker_fleet.scheduling.endpoint_history import PrefixIndex
from picker_fleet.scheduling.engine_cache import Evidence, Expectation, Step, evidence_of
from picker_tools.simulator.engine import PrefixCache

A = "10.0.0.1:8000"


def links(name: int, blocks: int) -> tuple[bytes, ...]:
    """A chain of hashes for a prompt; equal names have equal prefixes."""
    return tuple(f"{name}/{at}".encode() for at in range(blocks))


prompts = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 9)), max_size=40)


@given(prompts, st.integers(9, 30))
def test_with_the_right_capacity_the_prefix_index_predicts_exactly_what_an_lru_cache_has(
    served: list[tuple[int, int]], capacity: int
) -> None:
    cache, index = PrefixCache(capacity), PrefixIndex(per_endpoint=capacity)
    for prompt in itertools.starmap(links, served):
        assert index.match(prompt).get(A, 0) == cache.cached(prompt)
        cache.use(prompt)
        index.add(A, prompt)


@given(prompts, st.tuples(st.integers(0, 8), st.integers(1, 9)))
def test_the_rank_of_a_prompts_blocks_is_the_number_of_blocks_used_since_their_last_use(
    served: list[tuple[int, int]], asked: tuple[int, int]
) -> None:
    index, order = PrefixIndex(per_endpoint=20, in_total=1000), OrderedDict[bytes, None]()
    for prompt in itertools.starmap(links, served):
        index.add(A, prompt)
        for link in reversed(prompt):
            order[link] = None
            order.move_to_end(link)
    newest_first = list(reversed(order))[:31]  # cached blocks, and half as many evicted blocks
    prompt = links(*asked)
    known = sum(1 for _ in itertools.takewhile(newest_first.__contains__, prompt))

    expected = index.expect(A, prompt)

    if expected is None:
        assert known == 0
        return
    assert expected.steps[-1].blocks == known
    for step in expected.steps:
        # Blocks that were last used by the same request have the rank of its last block.
        assert newest_first.index(prompt[step.blocks - 1]) < step.rank


def test_the_evidence_of_an_answer_names_the_block_ranks_between_which_the_cache_ends() -> None:
    settled = Expectation(1, (Step(20, 100, 60.0), Step(50, 900, 60.0), Step(90, 3000, 60.0)))

    assert evidence_of(settled, 90) == Evidence(2989, 0), "blocks and tokens are not the same size"
    assert evidence_of(settled, 50) == Evidence(893, 2968)
    assert evidence_of(settled, 70) == Evidence(2971, 2990), "the cache ends within these blocks"
    assert evidence_of(settled, 0) == Evidence(0, 83)


def test_blocks_that_the_engine_may_still_compute_are_no_evidence_of_eviction() -> None:
    fresh = Expectation(1, (Step(20, 100, 60.0), Step(50, 900, 0.5)))

    assert evidence_of(fresh, 20) == Evidence(96, 0)


class Engine:
    """An engine with room for `capacity` blocks, which gets random prompts and reports cached blocks."""

    def __init__(self, capacity: int, index: PrefixIndex, clock: list[float]) -> None:
        self.cache, self.index, self.clock = PrefixCache(capacity), index, clock
        self.dice = random.Random(7)

    def answer(self, requests: int) -> None:
        for _ in range(requests):
            prompt = links(self.dice.randrange(400), self.dice.randint(10, 60))
            expected = self.index.expect(A, prompt)
            if expected is not None:
                evidence = evidence_of(expected, self.cache.cached(prompt))
                if self.index.teaches(A, evidence, expected.life):
                    self.index.learn(A, evidence, 4.0)
            self.index.add(A, prompt)
            self.cache.use(prompt)
            self.clock[0] += 1.0


@pytest.mark.parametrize("capacity", [300, 1500, 9000])
def test_answers_correct_an_estimated_capacity_that_is_far_too_high_or_far_too_low(capacity: int) -> None:
    clock = [0.0]
    index = PrefixIndex(per_endpoint=2000, clock=lambda: clock[0])
    engine = Engine(capacity, index, clock)

    engine.answer(3000)

    assert 0.8 * capacity < index.capacity(A) < 1.25 * capacity


def test_the_metrics_page_gives_the_first_estimate_of_a_capacity_and_answers_correct_it() -> None:
    index = PrefixIndex()
    assert index.capacity(A) == 31_250
    index.report_size(A, 64_000.0)
    index.add(A, links(1, 4))
    assert index.capacity(A) == 1000, "64 tokens of 4 bytes in a block of 256 bytes"

    index.learn(A, Evidence(0, 500), 4.0)
    assert 850 <= index.capacity(A) < 1000, "one answer moves the estimate by at most 15 %"
    for _ in range(50):
        index.learn(A, Evidence(700, 710), 4.0)
    assert 690 <= index.capacity(A) <= 710


def test_a_cleared_cache_is_forgotten_after_three_contradicting_answers_in_a_row() -> None:
    index = PrefixIndex()
    index.name_holders()
    prompt = links(1, 40)
    index.add(A, prompt)
    expected = index.expect(A, prompt)
    assert expected is not None
    lost = Evidence(0, 40)
    for evidence in (lost, lost, Evidence(40, 0), lost, lost):
        assert index.teaches(A, evidence, expected.life)
        index.learn(A, evidence, 4.0)
    assert index.match(prompt) == {A: 40}, "an answer between had its blocks"

    index.learn(A, lost, 4.0)

    assert index.match(prompt) == {}
    assert index.holders(prompt, 8) == []
    assert len(index) == 0
    assert not index.teaches(A, lost, expected.life), "the request was placed before the loss"
