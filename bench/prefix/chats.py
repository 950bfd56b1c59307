"""Conversations of several turns, made from a seed, and who leads them through a fleet."""

import asyncio
import itertools
import random
from collections.abc import Iterator

import httpx
import orjson

from bench.rig.client import Client

_WORDS = [f"word{number:x}" for number in range(512)]
_ANSWER_TOKENS = 24
_ASK_S = 60.0


def _text(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(_WORDS, k=words))


class Chats:
    """`count` conversations at once, of `turns` turns each; some of them share what is said first.

    Each turn goes to another replica than the one before: what one has routed, another must know.
    """

    def __init__(self, client: Client, *, count: int, turns: int, seed: int) -> None:
        self._client = client
        self._count = count
        self._turns = turns
        self._seed = seed
        self._replicas: Iterator[int] = itertools.count()
        chance = random.Random(seed)
        self._openings = [_text(chance, 150) for _ in range(5)]

    async def run(self) -> int:
        """Lead them all to their end; how many requests were answered."""
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(trust_env=False, timeout=_ASK_S, limits=limits) as http,
            asyncio.TaskGroup() as group,
        ):
            for number in range(self._count):
                group.create_task(self._lead(http, number))
        return self._count * self._turns

    async def _lead(self, http: httpx.AsyncClient, number: int) -> None:
        chance = random.Random(self._seed * 1000 + number)
        messages = [{"role": "system", "content": self._openings[number % len(self._openings)]}]
        await asyncio.sleep(chance.uniform(0, 2))
        for _ in range(self._turns):
            messages.append({"role": "user", "content": _text(chance, chance.randrange(40, 160))})
            answer = await self._ask(http, messages)
            messages.append({"role": "assistant", "content": answer})
            await asyncio.sleep(chance.uniform(0.1, 0.5))

    async def _ask(self, http: httpx.AsyncClient, messages: list[dict[str, str]]) -> str:
        body = orjson.dumps({"model": "llama", "messages": messages, "max_tokens": _ANSWER_TOKENS})
        exchange = self._client.exchange(next(self._replicas))
        await exchange.begin()
        endpoint = await exchange.pick(body)
        reply = await http.post(f"http://{endpoint}/v1/chat/completions", content=body)
        reply.raise_for_status()
        await exchange.end(endpoint)
        return str(reply.json()["choices"][0]["message"]["content"])
