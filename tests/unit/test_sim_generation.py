"""The engine in real time: everyone gets all tokens, and whoever leaves leaves nothing behind."""

import asyncio

import pytest

from picker_tools.simulator.engine import Limits
from picker_tools.simulator.generation import Simulator
from picker_tools.simulator.words import VOCABULARY, Words


async def generate(simulator: Simulator, *, prompt_tokens: int, max_tokens: int, stride: int = 1) -> int:
    tokens = 0
    with simulator.begin(prompt_tokens=prompt_tokens, max_tokens=max_tokens, adapter=None) as generation:
        while came := await generation.next_tokens(stride):
            tokens += came
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
async def test_all_tokens_come_though_memory_forces_preemption(itl_s: float, stride: int) -> None:
    # Given memory for less than two whole requests
    simulator = Simulator(Limits(kv_blocks=10, block_size_tokens=4), ttft_s=itl_s, itl_s=itl_s)
    # When six run at once
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(generate(simulator, prompt_tokens=5, max_tokens=30, stride=stride))
            for _ in range(6)
        ]
    # Then each has all its tokens and nothing is held
    assert [task.result() for task in tasks] == [30] * 6
    assert (simulator.load.running, simulator.load.waiting, simulator.load.kv_usage) == (0, 0, 0)


async def test_memory_really_forced_preemption() -> None:
    # Given the same, with a token at a time
    simulator = Simulator(Limits(kv_blocks=10, block_size_tokens=4), ttft_s=0, itl_s=0)
    # When two run side by side
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(generate(simulator, prompt_tokens=5, max_tokens=30))
    # Then one had to give way
    assert simulator.load.preemptions >= 1


async def test_no_wait_at_all_without_times() -> None:
    # Given a server that needs no time
    simulator = Simulator(Limits(), ttft_s=0, itl_s=0)
    # When a request asks for tokens in bursts, then they come in as many calls as there are bursts
    with simulator.begin(prompt_tokens=1, max_tokens=600, adapter=None) as generation:
        assert [await generation.next_tokens(256) for _ in range(4)] == [256, 256, 88, 0]


async def test_leaving_while_queued_or_running_frees_the_place() -> None:
    # Given one place, taken for an hour, and two that wait
    simulator = Simulator(Limits(max_num_seqs=1), ttft_s=3600, itl_s=0)
    tasks = [
        asyncio.create_task(generate(simulator, prompt_tokens=1, max_tokens=1), name=str(number))
        for number in range(3)
    ]
    await until_queue(simulator, running=1, waiting=2)
    # When the second leaves, then one waits; when the first leaves, then the third runs
    tasks[1].cancel()
    await until_queue(simulator, running=1, waiting=1)
    tasks[0].cancel()
    await until_queue(simulator, running=1, waiting=0)
    # When the last leaves, then nothing is held
    tasks[2].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    assert (simulator.load.running, simulator.load.kv_usage) == (0, 0)


def test_words_follow_from_seed_and_prompt_however_they_are_taken() -> None:
    # Given the words of one seed and prompt
    whole = Words(seed=1, prompt=b"tell me").take(50)
    # Then they are single words, safe in JSON
    assert set(whole) <= set(VOCABULARY)
    assert all(word[:1] == b" " and word[1:].isalpha() for word in VOCABULARY)
    # When they are taken in pieces, then they are the same; another seed or prompt gives others
    again = Words(seed=1, prompt=b"tell me")
    assert again.take(7) + again.take(43) == whole
    assert Words(seed=2, prompt=b"tell me").take(50) != whole
    assert Words(seed=1, prompt=b"tell us").take(50) != whole
