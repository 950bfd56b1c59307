"""The engine in real time: every request gets all its tokens, and one that leaves frees its memory."""

import asyncio

import pytest

from picker_tools.simulator.answer import VOCABULARY, Words
from picker_tools.simulator.engine import Limits
from picker_tools.simulator.generation import Simulator


async def generate(simulator: Simulator, *, prompt_tokens: int, max_tokens: int, stride: int = 1) -> int:
    tokens = 0
    with simulator.begin(prompt_tokens=prompt_tokens, max_tokens=max_tokens, adapter=None) as generation:
        while count := await generation.next_tokens(stride):
            tokens += count
            await asyncio.sleep(0)  # as a write to a client would
        assert generation.is_over
    return tokens


async def until_queue(simulator: Simulator, *, running: int, waiting: int) -> None:
    async with asyncio.timeout(10):
        while True:
            if (simulator.load.running, simulator.load.waiting) == (running, waiting):
                return
            await asyncio.sleep(0)


@pytest.mark.parametrize("itl_s", [0.0, 0.0005])
@pytest.mark.parametrize("stride", [1, 3, 64])
async def test_all_requests_get_their_tokens_when_memory_forces_preemption(itl_s: float, stride: int) -> None:
    # Memory for fewer than two whole requests, and six at once.
    simulator = Simulator(Limits(kv_blocks=10, block_size_tokens=4), ttft_s=itl_s, itl_s=itl_s)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(generate(simulator, prompt_tokens=5, max_tokens=30, stride=stride))
            for _ in range(6)
        ]
    assert [task.result() for task in tasks] == [30] * 6
    assert (simulator.load.running, simulator.load.waiting, simulator.load.kv_usage) == (0, 0, 0)


async def test_too_little_memory_for_two_requests_preempts_one() -> None:
    simulator = Simulator(Limits(kv_blocks=10, block_size_tokens=4), ttft_s=0, itl_s=0)
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(generate(simulator, prompt_tokens=5, max_tokens=30))
    assert simulator.load.preemptions >= 1


async def test_without_delays_tokens_come_in_as_few_bursts_as_possible() -> None:
    simulator = Simulator(Limits(), ttft_s=0, itl_s=0)
    with simulator.begin(prompt_tokens=1, max_tokens=600, adapter=None) as generation:
        assert [await generation.next_tokens(256) for _ in range(4)] == [256, 256, 88, 0]


async def test_a_request_that_leaves_queued_or_running_frees_its_slot() -> None:
    # One slot, taken for an hour, and two requests that wait.
    simulator = Simulator(Limits(max_num_seqs=1), ttft_s=3600, itl_s=0)
    tasks = [
        asyncio.create_task(generate(simulator, prompt_tokens=1, max_tokens=1), name=str(number))
        for number in range(3)
    ]
    await until_queue(simulator, running=1, waiting=2)
    tasks[1].cancel()
    await until_queue(simulator, running=1, waiting=1)
    tasks[0].cancel()
    await until_queue(simulator, running=1, waiting=0)
    tasks[2].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    assert (simulator.load.running, simulator.load.kv_usage) == (0, 0)


def test_words_depend_on_seed_and_prompt_only() -> None:
    whole = Words(seed=1, prompt=b"tell me").take(50)
    assert set(whole) <= set(VOCABULARY)
    assert all(word[:1] == b" " and word[1:].isalpha() for word in VOCABULARY)
    again = Words(seed=1, prompt=b"tell me")
    assert again.take(7) + again.take(43) == whole
    assert Words(seed=2, prompt=b"tell me").take(50) != whole
    assert Words(seed=1, prompt=b"tell us").take(50) != whole
