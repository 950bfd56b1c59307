"""Compares prefix hits of real vLLM servers with a fixed and a learnt capacity of their caches, and with KV
events.

Twice as many conversations run as fit into the servers' caches; a client sends the next turn of a random
conversation. Each round starts a new fleet for each index in turn. vLLM's own counters give the hits of the
second half of a run. *Fixed*: the index assumes 31 250 blocks for each server. *Oracle*: one cache has the
blocks of all servers. First, two checks of the KV events on their own.
"""

import argparse
import asyncio
import os
import random
import statistics
import string
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from crowd import http_client
from fleet_load import explanation

from bench.rig.fleet import picker_up
from long.findings import Findings
from long.vllm_servers import BASE, Server, installed, made_model, servers
from picker_fleet.scheduling.endpoint_history import block_hashes
from picker_tools.simulator.engine import PrefixCache

FIXED, LEARNT, PRECISE = "fixed", "learnt", "precise"
_SCORERS = {"queue-depth": 2, "kv-cache": 2, "prefix-affinity": 3}
_BLOCK_TOKENS = 128  # block size of vLLM on the CPU; the tokenizer makes a token of each byte
_QUESTION_BYTES, _ANSWER_BYTES = (64, 160), 64
_TIMES_WHAT_FITS = 2
_TOKENS = 16  # tokens of an answer
_KV_BLOCKS, _SERVERS, _CLIENTS = 128, 2, 14
_LONG_BYTES = 1800
_CALL_S = 120.0
_UP = ("--replicas", "2", "--endpoints", "0")
# Replaces the methods by which the index learns; Python imports a module of this name at its start.
_UNTAUGHT = """
from picker_fleet.scheduling.endpoint_history import PrefixIndex
PrefixIndex.learn = PrefixIndex.report_size = lambda *_, **__: None
"""


class Case(NamedTuple):
    """Conversations of `turns` turns that begin with one of `systems` system prompts of `system_bytes`."""

    name: str
    systems: int
    system_bytes: tuple[int, int]
    turns: int

    @property
    def mean_bytes(self) -> float:
        turn_bytes = sum(_QUESTION_BYTES) / 2 + _ANSWER_BYTES
        return sum(self.system_bytes) / 2 + self.turns / 2 * turn_bytes


# With agents, the system prompts alone fill the caches of two servers once.
CASES = (Case("chats", 4, (256, 512), 6), Case("agents", 32, (800, 1200), 3))


class _Conversations:
    """Makes prompts of random conversations; a conversation waits for its answer before its next prompt."""

    def __init__(self, case: Case, count: int, mark: str, dice: random.Random) -> None:
        self._case, self._dice = case, dice
        texts = (self._text(case.system_bytes) for _ in range(case.systems))
        self._systems = [f"{mark} {number} {text}" for number, text in enumerate(texts)]
        self._idle = [(self._begun(), turn % case.turns) for turn in range(count)]

    def _begun(self) -> str:
        return self._dice.choice(self._systems)

    def _text(self, length: tuple[int, int]) -> str:
        return "".join(self._dice.choices(string.ascii_lowercase, k=self._dice.randint(*length)))

    def take(self) -> tuple[str, int]:
        text, turn = self._idle.pop(self._dice.randrange(len(self._idle)))
        if turn == self._case.turns:
            text, turn = self._begun(), 0
        return text + self._text(_QUESTION_BYTES), turn + 1

    def give_back(self, text: str, turn: int) -> None:
        self._idle.append((text + self._text((_ANSWER_BYTES, _ANSWER_BYTES)), turn))


def _config(running: Sequence[Server], index: str) -> dict[str, Any]:
    static = [
        {"address": each.address, "labels": {"picker-fleet/kv-events-port": str(each.events_port)}}
        for each in running
    ]
    scheduling: dict[str, Any] = {"scorers": _SCORERS}
    if index == PRECISE:
        scheduling["kv_events_port"] = running[0].events_port
    return {
        "discovery": {"static": static},
        "scheduling": scheduling,
        "request_queue_controller": {"watermark_per_backend": 16},
        "fair_request_queue": {"queue_ttl": "60s"},
    }


def _body(prompt: str, tokens: int = _TOKENS) -> dict[str, Any]:
    return {"model": BASE, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}


async def _run(
    running: Sequence[Server], case: Case, index: str, seed: int, options: argparse.Namespace, folder: Path
) -> tuple[float, float]:
    """The share of the prompts' tokens that were hits in the second half of the run; the same share if one
    cache had the blocks of all servers."""
    dice = random.Random(seed)
    count = round(_TIMES_WHAT_FITS * len(running) * _KV_BLOCKS * _BLOCK_TOKENS / case.mean_bytes)
    conversations = _Conversations(case, count, f"{index} {seed}", dice)
    environment = None
    if index == FIXED:
        (folder / "sitecustomize.py").write_text(_UNTAUGHT, encoding="utf-8")
        environment = {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    left, whole, found = options.requests, PrefixCache(len(running) * _KV_BLOCKS), Counter[str]()
    async with (
        picker_up(_config(running, index), *_UP, environment=environment) as fleet,
        http_client(timeout=_CALL_S) as client,
    ):

        async def ask(rest: int) -> None:
            nonlocal left
            while left > rest:
                left -= 1
                prompt, turn = conversations.take()
                blocks = block_hashes("", prompt.encode(), block_bytes=_BLOCK_TOKENS)
                if not rest:
                    found.update(asked=len(prompt), had=_BLOCK_TOKENS * whole.cached(blocks))
                whole.use(blocks)
                answer = await client.post(f"{fleet.url}/v1/completions", json=_body(prompt))
                answer.raise_for_status()
                conversations.give_back(prompt, turn)

        for rest in (options.requests // 2, 0):
            before = await _hits(running)
            await asyncio.gather(*(ask(rest) for _ in range(_CLIENTS)))
        after = await _hits(running)
    return (after[0] - before[0]) / (after[1] - before[1]), found["had"] / found["asked"]


async def _hits(running: Sequence[Server]) -> tuple[float, float]:
    """The numbers of tokens found in the servers' caches and looked up there, so far."""
    hits = [await server.counted("vllm:prefix_cache_hits_total") for server in running]
    queries = [await server.counted("vllm:prefix_cache_queries_total") for server in running]
    return sum(hits), sum(queries)


async def _events_are_followed(running: Sequence[Server], findings: Findings) -> None:
    """Check that choices take into account within a second that a server has removed blocks or cleared its
    cache."""
    dice = random.Random(1)

    def prompt() -> str:
        return "".join(dice.choices(string.ascii_lowercase, k=_LONG_BYTES))

    config = _config(running, PRECISE) | {"decision_log": {"enabled": True}}
    async with picker_up(config, *_UP) as fleet, http_client(timeout=_CALL_S) as client:

        async def ask(text: str, url: str = fleet.url) -> None:
            (await client.post(f"{url}/v1/completions", json=_body(text, 1))).raise_for_status()

        async def shares(text: str) -> dict[str, float]:
            """By server, the share of `text` that the choice for `text` assumed to be cached."""
            await ask(text)
            _, explained = await explanation(fleet)
            return {each["address"]: each["parts"]["prefix-affinity"] for each in explained["candidates"]}

        asked = [prompt() for _ in range(8)]
        for text in asked + asked:  # a server's first event gives the size of its blocks
            await ask(text)
            await asyncio.sleep(0.3)
        first, second = [await shares(text) for text in asked[:2]]
        holds = max(first.values()) > 0.7 and max(second.values()) > 0.7
        findings.check("prompts that were served are predicted to be cached", holds, f"{first} {second}")
        for server in running:
            for _ in range(2 * _KV_BLOCKS * _BLOCK_TOKENS // _LONG_BYTES):
                await ask(prompt(), f"http://{server.address}")
        await asyncio.sleep(1)
        found = await shares(asked[2])
        findings.check(
            "1 s after requests that bypass the fleet have evicted a prompt, it is predicted to be gone",
            max(found.values()) == 0,
            f"{found}",
        )
        for _ in range(2):
            await ask(asked[3])
            await asyncio.sleep(0.3)
        for server in running:
            (await client.post(f"http://{server.address}/reset_prefix_cache")).raise_for_status()
            await ask("x", f"http://{server.address}")  # vLLM publishes events with its next step
        await asyncio.sleep(1)
        found = await shares(asked[3])
        findings.check("1 s after POST /reset_prefix_cache, too", max(found.values()) == 0, f"{found}")


async def _compare(options: argparse.Namespace, folder: Path, findings: Findings) -> None:
    python, model = await asyncio.to_thread(installed), made_model(folder / "model")
    size = {"count": _SERVERS, "kv_blocks": _KV_BLOCKS}
    async with servers(python, model, folder, **size, with_events=True) as running:
        await _events_are_followed(running, findings)
        for case in (each for each in CASES if options.case in (None, each.name)):
            hits: dict[str, list[tuple[float, float]]] = {FIXED: [], LEARNT: [], PRECISE: []}
            for seed in range(1, options.rounds + 1):
                for index in tuple(hits)[:: 1 if seed % 2 else -1]:
                    hits[index].append(await _run(running, case, index, seed, options, folder))
                    print(f"{case.name}, {index}, round {seed}: {hits[index][-1]}", flush=True)
            fixed, learnt, precise = (statistics.median(share for share, _ in each) for each in hits.values())
            oracle = statistics.median(share for each in hits.values() for _, share in each)
            seen = f"fixed {fixed:.1%}, learnt {learnt:.1%}, precise {precise:.1%}, oracle {oracle:.1%}"
            for name, least, other in ((FIXED, 1.15, fixed), (PRECISE, 0.95, precise)):
                check = f"{case.name}: hits with index learnt ≥ {least} × hits with index {name}"
                findings.check(check, learnt >= least * other, f"{learnt / other:.2f}; {seen}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", choices=[each.name for each in CASES], help="run only this case")
    parser.add_argument("--requests", type=int, default=600, metavar="N", help="requests in each run")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")


def run(options: argparse.Namespace, findings: Findings) -> None:
    with tempfile.TemporaryDirectory(prefix="picker-vllm-") as name:
        asyncio.run(_compare(options, Path(name), findings))
