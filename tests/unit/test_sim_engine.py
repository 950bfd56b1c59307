"""Internals of the simulated model server: request parsing, engine limits, prefix cache and pace."""

import asyncio

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import cases

from picker_tools.simulator.batch import BatchSimulator, step_s
from picker_tools.simulator.engine import (
    Engine,
    Limits,
    Phase,
    PrefixCache,
    Sequence,
    prompt_blocks,
)
from picker_tools.simulator.generation import Simulator
from picker_tools.simulator.openai_api import (
    BYTES_PER_TOKEN,
    ApiError,
    CompletionRequest,
    parse,
)

HI = [{"role": "user", "content": "hi"}]


def completion(**keys: object) -> CompletionRequest:
    body = {"model": "llama", "prompt": "hello to you", **keys}
    return parse(orjson.dumps(body), chat=False, models={"llama"})


def chat(**keys: object) -> CompletionRequest:
    return parse(orjson.dumps({"model": "llama", "messages": HI, **keys}), chat=True, models={"llama"})


PROMPTS = [("", 1), ("abc", 1), ("é" * 8, 4), ("x" * 400_000, 100_000), (["one text"], 2)]
IDS = [([1, 2, 3], 3), ([[4, 5]], 2), ([7], 1)]


@pytest.mark.parametrize(("prompt", "tokens"), [*PROMPTS, *IDS], ids=lambda value: str(value)[:20])
def test_the_simulator_counts_prompt_tokens_from_bytes_or_token_ids(prompt: object, tokens: int) -> None:
    assert completion(prompt=prompt).prompt_tokens == tokens


def test_a_chats_prompt_tokens_include_the_text_of_every_message() -> None:
    parts = [{"type": "text", "text": "b" * 40}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    contents = {"system": "a" * 40, "user": parts, "assistant": None}
    request = chat(messages=[{"role": role, "content": content} for role, content in contents.items()])
    assert all(text * 40 in request.prompt for text in (b"a", b"b"))
    assert request.prompt_tokens >= 20
    assert request.finish_reason == "stop"


def test_max_completion_tokens_takes_precedence_over_max_tokens_in_a_chat() -> None:
    named = ({"max_tokens": 3}, {"max_completion_tokens": 4}, {"max_completion_tokens": 4, "max_tokens": 9})
    assert [chat(**each).max_tokens for each in (*named, {"max_tokens": None})] == [3, 4, 4, 16]
    assert chat(max_tokens=3).finish_reason == "length"


# Malformed bodies, or keys that make a body malformed, by the words of the refusal.
MALFORMED: dict[str, list[bytes | dict[str, object]]] = {
    "not JSON": [b"", b'{"model": "llama"', b"\xff\xfe", b'{"x":' + b"[" * 5000],
    "the body: Expected `object`": [b"[]"],
    "^model: ": [b'{"prompt": "x"}', {"model": 7}],
    "^prompt: ": [b'{"model": "llama"}', *({"prompt": bad} for bad in ([], ["a", "b"], [1, True]))],
    "^max_tokens: ": [{"max_tokens": bad} for bad in (0, -1, 1.5, "8", True)],
    "^n: ": [{"n": 2}],
    "^stream: ": [{"stream": "yes"}],
    "^stream_options: ": [{"stream_options": 1}],
}


@cases("said, body", {
    f"{said}, {str(body)[:40]}": (said, body) for said, bodies in MALFORMED.items() for body in bodies
})  # fmt: skip
def test_a_malformed_completion_request_is_refused_and_the_key_named(
    said: str, body: bytes | dict[str, object]
) -> None:
    with pytest.raises(ApiError, match=said) as refused:
        completion(**body) if isinstance(body, dict) else parse(body, chat=False, models={"llama"})
    assert refused.value.status == 400


BAD_CONTENTS = [{"role": "user", "content": content} for content in (7, ["x"], [{"text": 1}])]


@pytest.mark.parametrize(
    "messages", [None, [], "hi", ["hi"], [{"content": "hi"}], *([m] for m in BAD_CONTENTS)]
)
def test_the_simulated_server_refuses_malformed_chat_messages(messages: object) -> None:
    with pytest.raises(ApiError) as refused:
        chat(messages=messages)
    assert (refused.value.status, refused.value.param) == (400, "messages")


def sequence(prompt_tokens: int = 4, max_tokens: int = 4, adapter: str | None = None) -> Sequence:
    return Sequence(prompt_tokens=prompt_tokens, max_tokens=max_tokens, adapter=adapter)


def engine_with(limits: Limits, *sequences: Sequence) -> tuple[Engine, *tuple[Sequence, ...]]:
    """Returns an engine to which `sequences` were submitted in order, and then each sequence."""
    engine = Engine(limits)
    for one in sequences:
        engine.submit(one)
    return engine, *sequences


def test_a_request_that_does_not_fit_into_the_kv_cache_delays_all_later_requests() -> None:
    few = Limits(kv_blocks=4, block_size_tokens=4)
    engine, holder, large, small = engine_with(few, sequence(11, 1), sequence(8), sequence(2))
    assert engine.schedule() == [holder]
    assert engine.schedule() == []
    engine.release(holder)
    assert engine.schedule() == [large, small]


def test_in_the_simulated_engine_requests_overtake_a_request_without_a_lora_slot() -> None:
    wanted = (sequence(adapter=adapter) for adapter in ("a", "b", None, "a"))
    engine, a, b, base, a_again = engine_with(Limits(max_loras=1), *wanted)
    assert engine.schedule() == [a, base, a_again]
    assert (engine.load().running_adapters, engine.load().waiting_adapters) == (("a",), ("b",))
    engine.release(a)
    assert engine.schedule() == []
    engine.release(a_again)
    assert engine.schedule() == [b]


def test_the_newest_request_is_preempted_when_blocks_run_out_and_resumes_first() -> None:
    few = Limits(max_num_seqs=2, kv_blocks=3, block_size_tokens=4)
    engine, old, new, waiting = engine_with(few, *(sequence(3, 6) for _ in range(3)))
    engine.schedule()
    assert engine.grow(new, 2) == 2
    # The preempted request keeps the tokens generated so far.
    assert engine.grow(old, 5) == 5
    assert (new.phase, new.generated_tokens, engine.load().preemptions) == (Phase.WAITING, 2, 1)
    engine.release(old)
    assert engine.schedule() == [new, waiting]


TOKENS = st.integers(1, 20)
LIMITS = st.builds(
    Limits, max_num_seqs=st.integers(1, 5), kv_blocks=st.integers(10, 20), block_size_tokens=st.just(4),
    max_loras=st.integers(1, 2),
)  # fmt: skip


@given(
    asks=st.lists(st.tuples(TOKENS, TOKENS, st.sampled_from([None, "a", "b", "c"])), max_size=30),
    limits=LIMITS,
    stride=st.integers(1, 7),
    data=st.data(),
)
@settings(max_examples=40)
def test_no_limit_of_the_engine_is_exceeded_and_every_request_ends(
    asks: list[tuple[int, int, str | None]], limits: Limits, stride: int, data: st.DataObject
) -> None:
    engine, *everyone = engine_with(limits, *(sequence(*ask) for ask in asks))
    ended = 0
    engine.schedule()
    while running := [one for one in everyone if one.phase is Phase.RUNNING]:
        one = data.draw(st.sampled_from(running))
        leaves = data.draw(st.integers(0, 9)) == 0
        if not leaves:
            count = engine.grow(one, min(stride, one.remaining_tokens))
            assert count or one.phase is Phase.WAITING
        if leaves or not one.remaining_tokens:
            engine.release(one)
            ended += 1
            engine.schedule()
        load = engine.load()
        needed = sum(-(-one.context_tokens // 4) for one in everyone if one.phase is Phase.RUNNING)
        blocks = sum(one.blocks for one in everyone)
        assert load.running <= limits.max_num_seqs
        assert len(load.running_adapters) <= limits.max_loras
        assert needed <= blocks <= limits.kv_blocks
        assert load.kv_usage == pytest.approx(blocks / limits.kv_blocks)
    assert ended == len(everyone)
    load = engine.load()
    assert (load.waiting, load.kv_usage, load.running_adapters) == (0, 0, ())


def test_a_step_decodes_and_prefills_prompts_in_chunks_within_its_budget() -> None:
    engine, short, long, last = engine_with(Limits(), sequence(3, 9), sequence(20, 9), sequence(5, 9))
    # The budget ends within the long prompt, so the last request waits.
    first = engine.begin_step(10)
    assert (first.tokens, engine.load().waiting) == ({short: 3, long: 7}, 1)
    assert engine.end_step(first) == [short]
    second = engine.begin_step(10)
    assert second.tokens == {short: 1, long: 9}
    assert (second.decoding, second.kv_tokens, second.prefill_tokens) == (1, 3, 9)
    engine.end_step(second)
    third = engine.begin_step(10)
    assert third.tokens == {short: 1, long: 4, last: 5}
    assert engine.end_step(third) == [short, long, last]
    # Published figures: the base time of a step, and times per sequence, token of context, token of prompts.
    assert step_s(second) == pytest.approx(19.56e-3 + 50.6e-6 + 3 * 0.494e-6 + 9 * 150.5e-6)


def test_a_preempted_request_is_computed_again_and_not_admitted_in_the_next_step() -> None:
    few = Limits(kv_blocks=4, block_size_tokens=4)
    engine, old, new = engine_with(few, sequence(7, 9), sequence(6, 9))
    for _ in range(2):
        engine.end_step(engine.begin_step(100))
    assert (new.phase, new.computed_tokens, engine.load().preemptions) == (Phase.WAITING, 0, 1)
    assert engine.begin_step(100).tokens == {old: 1}
    engine.release(old)
    assert engine.begin_step(100).tokens == {new: new.context_tokens}


@given(
    asks=st.lists(st.tuples(TOKENS, TOKENS, st.sampled_from([None, "a", "b", "c"])), max_size=30),
    limits=LIMITS,
    budget=st.integers(6, 30),
)
def test_steps_keep_within_the_engines_limits_and_every_request_ends(
    asks: list[tuple[int, int, str | None]], limits: Limits, budget: int
) -> None:
    engine, *everyone = engine_with(limits, *(sequence(*ask) for ask in asks))
    while (step := engine.begin_step(budget)).tokens:
        load = engine.load()
        assert step.decoding + step.prefill_tokens + step.left_tokens == budget
        assert len(step.tokens) == load.running <= limits.max_num_seqs
        assert sum(one.blocks for one in everyone) <= limits.kv_blocks
        before = sum(one.generated_tokens for one in everyone)
        grown = engine.end_step(step)
        assert sum(one.generated_tokens for one in everyone) == before + len(grown)
    assert all(one.phase is Phase.ENDED and not one.remaining_tokens for one in everyone)
    load = engine.load()
    assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0)


@pytest.mark.parametrize("size_bytes", range(256, 261))
def test_a_step_computes_the_last_token_of_a_prompt_whose_blocks_are_all_cached(size_bytes: int) -> None:
    blocks = prompt_blocks(b"x" * size_bytes, 16, None)
    engine = Engine(Limits())
    for _ in range(2):
        again = Sequence(size_bytes // BYTES_PER_TOKEN, 1, prompt_blocks=blocks)
        engine.submit(again)
        assert engine.end_step(engine.begin_step(2048)) == [again]


def test_the_prefix_cache_drops_the_least_recently_used_blocks() -> None:
    cache = PrefixCache(4)
    for chain in ((b"a1", b"a2"), (b"b1", b"b2"), (b"a1", b"a2"), (b"c1",)):
        cache.use(chain)
    # The last block of a chain is dropped before the first block.
    assert (cache.cached((b"a1", b"a2")), cache.cached((b"b1", b"b2")), len(cache)) == (2, 1, 4)
    cache.use((b"c1", b"c2"))
    assert (cache.cached((b"a1", b"a2")), cache.cached((b"b1", b"b2"))) == (2, 0)


def test_blocks_of_a_prompt_are_chained_and_leave_out_the_last_token() -> None:
    # Each block has two tokens of four bytes each.
    def blocks(text: str, adapter: str | None = None) -> tuple[bytes, ...]:
        return prompt_blocks(text.encode(), 2, adapter)

    # A whole block counts only if more text follows the block.
    assert [len(blocks("x" * size)) for size in (0, 8, 9, 16, 17)] == [0, 0, 1, 1, 2]
    # A block's hash includes the adapter and all earlier blocks.
    assert blocks("a" * 8 + "b" * 9)[1] != blocks("c" * 8 + "b" * 9)[1]
    assert blocks("a" * 9) != blocks("a" * 9, "poet")
    assert blocks("a" * 17)[0] == blocks("a" * 9)[0]


async def generate(
    simulator: Simulator | BatchSimulator, *, prompt_tokens: int, max_tokens: int, stride: int = 1
) -> int:
    tokens = 0
    with simulator.begin(Sequence(prompt_tokens, max_tokens)) as generation:
        while count := await generation.next_tokens(stride):
            tokens += count
            await asyncio.sleep(0)  # lets other tasks run, as a write to a client does
        assert generation.is_over
    return tokens


@pytest.mark.parametrize("itl_s", [0.0, 0.0005, None], ids=["at once", "paced", "in steps"])
@pytest.mark.parametrize("stride", [1, 3, 64])
async def test_all_requests_get_their_tokens_when_memory_forces_preemption(
    itl_s: float | None, stride: int
) -> None:
    # Six requests run at once, with memory for fewer than two requests.
    limits = Limits(kv_blocks=10, block_size_tokens=4)
    simulator: Simulator | BatchSimulator = (
        BatchSimulator(limits, slowdown=0.001)
        if itl_s is None
        else Simulator(limits, ttft_s=itl_s, itl_s=itl_s)
    )
    asks = (generate(simulator, prompt_tokens=5, max_tokens=30, stride=stride) for _ in range(6))
    assert await asyncio.gather(*asks) == [30] * 6
    load = simulator.engine.load()
    assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0)
    assert load.preemptions >= (stride == 1 or itl_s is None)


async def test_without_simulated_delays_tokens_come_in_as_few_bursts_as_possible() -> None:
    simulator = Simulator(Limits(), ttft_s=0, itl_s=0)
    with simulator.begin(Sequence(1, 600)) as generation:
        assert [await generation.next_tokens(256) for _ in range(4)] == [256, 256, 88, 0]
