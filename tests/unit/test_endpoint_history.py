"""A replica's history of endpoints: the prompts that each has served, and the times of completions."""

import gc
import itertools
import statistics
import tracemalloc
from itertools import count

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker_fleet.ingress.json_body import Body
from picker_fleet.scheduling import endpoint_history
from picker_fleet.scheduling.endpoint_history import BLOCK_BYTES, PrefixIndex, block_hashes

PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=30)}))
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=60) | PARTS},
    optional={"name": st.text(max_size=5)},
)
MESSAGES = st.lists(MESSAGE, min_size=1, max_size=6)


def chat(*said: object, **more: object) -> dict[str, object]:
    return {"model": "m", "messages": list(said), **more}


def prompt_of(document: dict[str, object]) -> bytes:
    """The bytes of the prompt of a request with the body `document`."""
    return endpoint_history.prompt_bytes(Body(orjson.dumps(document)).values)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@given(MESSAGES, MESSAGES)
def test_the_prompt_of_a_continued_chat_begins_with_the_earlier_prompt(
    said: list[object], more: list[object]
) -> None:
    shorter, longer = prompt_of(chat(*said)), prompt_of(chat(*said, *more))

    assert longer.startswith(shorter)
    hashes = block_hashes("m", shorter, block_bytes=16)
    assert block_hashes("m", longer, block_bytes=16)[: len(hashes)] == hashes


DIFFERENT = [
    (chat(user("a"), user("b")), chat(user("ab"))),
    (chat({"role": "user", "content": "a"}), chat({"role": "system", "content": "a"})),
    (chat(user("a")), chat(user("a"), tools=[{"type": "function"}])),
    ({"prompt": "a"}, {"prompt": "b"}),
    ({"prompt": [1, 23]}, {"prompt": [12, 3]}),
    ({"input": "a"}, {"input": "a", "instructions": "be brief"}),
    ({"prompt": ["a", "b"]}, {"prompt": ["ab"]}),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_prompts_have_different_bytes(one: dict[str, object], other: dict[str, object]) -> None:
    assert prompt_of(one) != prompt_of(other)


def test_a_body_without_a_prompt_has_no_blocks_and_a_malformed_prompt_still_has_bytes() -> None:
    for document in ({}, {"prompt": ""}, {"messages": []}, {"prompt": None}):
        assert block_hashes("m", prompt_of(document)) == ()
    for said in ("text", [None, 1, "x", {"content": 5}], [{"role": {}, "content": "x"}]):
        assert prompt_of({"messages": said})
    for prompt in ({"a": [1]}, [1, "x", 2], 7):
        assert prompt_of({"prompt": prompt})
    assert prompt_of({"input": [[1, 2], [3]]})


HUGE = [
    {"prompt": "é" * 1_000_000},
    {"prompt": list(range(500_000))},
    chat(*[user("some words")] * 50_000),
    chat(user("word " * 200_000)),
]


@pytest.mark.parametrize("document", HUGE)
def test_a_huge_prompt_is_read_up_to_the_limit_of_bytes(document: dict[str, object]) -> None:
    prompt = prompt_of(document)
    assert len(prompt) == endpoint_history.MAX_PROMPT_BYTES
    assert len(block_hashes("m", prompt)) == endpoint_history.MAX_PROMPT_BYTES // BLOCK_BYTES


def test_only_whole_blocks_count_and_their_hashes_differ_by_position_model_and_salt() -> None:
    sizes = (BLOCK_BYTES - 1, 3 * BLOCK_BYTES - 1, 3 * BLOCK_BYTES)
    assert [len(block_hashes("m", b"x" * size)) for size in sizes] == [0, 2, 3]
    prompt = b"x" * (50 * BLOCK_BYTES)
    chains = [block_hashes("m", prompt), block_hashes("n", prompt), block_hashes("m", prompt, salt=b"t1")]
    assert len({one for hashes in chains for one in hashes}) == 150


def chain(name: str, length: int) -> tuple[bytes, ...]:
    return block_hashes(name, b"x" * (BLOCK_BYTES * length))


MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def marked(said: dict[str, str], first: bool = False) -> dict[str, object]:
    """A message with Anthropic's mark for the end of a cached prefix."""
    text = {"type": "text", "text": said["content"]}
    return {**said, "content": [{**MARK, **text} if first else {**text, **MARK}]}


def claudes(system: object, *said: object, **more: object) -> tuple[bytes, ...]:
    return block_hashes("m", prompt_of({"messages": said, "system": system, **more}))


def test_anthropics_system_prompt_begins_the_prompt_and_cache_marks_are_ignored() -> None:
    system, one, two = "You are brief. " * 1400, user("one " * 200), user("two " * 200)
    blocks = [{"type": "text", "text": system}]
    index = PrefixIndex()
    index.add("a", claudes(system, one))
    assert index.match(claudes(system, user("hi")))["a"] >= len(system) // BLOCK_BYTES
    assert index.match(claudes("Another. " * 2400, one)) == {}
    # As a conversation continues, the client moves the cache mark to later texts and removes earlier marks.
    tools = [{"name": "t", "input_schema": {"p": "q" * 600}}]
    turns = (
        claudes([{**blocks[0], **MARK}], marked(one), tools=[{**tools[0], **MARK}]),
        claudes([{**blocks[0], **MARK}], one, marked(two, first=True), tools=tools),
        claudes(system, one, two, marked(user("three")), tools=tools),
    )
    assert all(longer[: len(former)] == former for former, longer in itertools.pairwise(turns))
    assert len(turns[0]) > (len(system) + 600) // BLOCK_BYTES


def served_by(addresses: str, max_size: int) -> st.SearchStrategy[list[tuple[str, list[int]]]]:
    paths = st.lists(st.integers(0, 2), min_size=1, max_size=8)
    return st.lists(st.tuples(st.sampled_from(addresses), paths), max_size=max_size)


def links_of(path: list[int]) -> tuple[bytes, ...]:
    """A chain of hashes, one for each step of `path`; paths with equal beginnings share the first hashes."""
    return tuple(bytes(path[:end]) for end in range(1, len(path) + 1))


@given(served_by("abc", max_size=40))
def test_the_prefix_index_keeps_the_latest_blocks_and_whole_beginnings_of_chains(
    served: list[tuple[str, list[int]]],
) -> None:
    index = PrefixIndex(per_endpoint=12, in_total=24)
    chains = [(address, links_of(path)) for address, path in served]
    for address, links in chains:
        index.add(address, links)
        assert len(index) <= 24
        assert index.match(links)[address] == min(len(links), index.capacity(address))
    for _, links in chains:
        found = index.match(links)
        for address in index.addresses:
            kept = [address in index.match(links[at : at + 1]) for at in range(len(links))]
            assert kept == [at < found.get(address, 0) for at in range(len(links))]


def test_endpoints_share_the_total_capacity_and_departed_endpoints_are_forgotten() -> None:
    # Each of four endpoints keeps 25 blocks, an equal share of 100 blocks.
    index = PrefixIndex(per_endpoint=60, in_total=100)
    for address in "abcd":
        index.add(address, chain(address, 60))
    assert [index.match(chain(address, 60)).get(address) for address in "abcd"] == [25] * 4
    index.retain({"b"})
    assert [index.match(chain(address, 60)).get(address) for address in "abcd"] == [None, 25, None, None]


def test_the_holders_of_the_longest_prefix_are_named_first() -> None:
    index = PrefixIndex()
    shared = chain("chat", 12)
    index.add("short", shared[:3])
    index.name_holders()  # the count includes the blocks added earlier
    index.add("long", shared)
    index.add("middle", shared[:9])
    index.add("other", chain("other", 5))
    assert index.holders((*shared, b"more"), 8)[0] == "long"
    assert set(index.holders(shared, 8)) == {"long", "middle", "short"}
    assert index.holders(shared[:9], 1) == ["middle"], "the endpoint that got the block last"
    assert (index.holders(chain("unknown", 5), 8), index.holders((), 8)) == ([], [])
    index.retain({"short", "middle"})
    assert set(index.holders(shared, 8)) == {"middle", "short"}
    assert index.match(shared, ["short", "unknown"]) == {"short": 3}


@pytest.mark.parametrize("names_holders", [False, True])
def test_memory_of_the_prefix_index_stays_within_the_stated_bound(names_holders: bool) -> None:
    numbers, blocks = count(), 22_000  # with so many blocks the index takes most memory for each
    gc.collect()
    tracemalloc.start()
    try:
        index = PrefixIndex(per_endpoint=blocks)
        if names_holders:
            index.name_holders()
        for _ in range(3 * blocks // 100):
            index.add("a", [next(numbers).to_bytes(8) for _ in range(100)])
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(index) == 3 * blocks // 2 + 1, "evicted blocks are kept, too"
    bound = endpoint_history.BYTES_PER_BLOCK + names_holders * endpoint_history.HOLDER_BYTES_PER_BLOCK
    assert used / len(index) <= bound


@given(st.lists(st.floats(min_value=0, max_value=3600), min_size=1, max_size=250))
def test_latency_statistics_cover_the_last_window_of_durations(seconds: list[float]) -> None:
    tracker, last = endpoint_history.LatencyTracker(), seconds[-endpoint_history.LATENCY_WINDOW :]
    for each in seconds:
        tracker.add("a", each)
    stats = tracker.stats("a")
    assert stats is not None
    assert stats.count == len(last)
    assert stats.mean_s == pytest.approx(statistics.fmean(last), abs=1e-6)
    assert stats.std_s == pytest.approx(statistics.pstdev(last), abs=1e-6)


def test_latency_statistics_ignore_values_that_are_not_valid_durations() -> None:
    tracker = endpoint_history.LatencyTracker()
    for each in (float("nan"), float("inf"), -1.0):
        tracker.add("a", each)
    assert tracker.stats("a") is None


def test_the_endpoint_that_is_silent_longest_and_departed_endpoints_are_forgotten() -> None:
    tracker = endpoint_history.LatencyTracker(max_endpoints=2)
    for address in "abac":
        tracker.add(address, 1.0)
    assert [tracker.stats(address) is not None for address in "abc"] == [True, False, True]
    tracker.retain({"c"})
    assert [tracker.stats(address) is not None for address in "abc"] == [False, False, True]
