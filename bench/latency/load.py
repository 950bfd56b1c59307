"""Requests that arrive at random, whatever becomes of those before them, and how long each takes."""

import asyncio
import random
from dataclasses import dataclass

import httpx
import orjson

from bench.rig.client import Client

_ANSWER_TOKENS = 16
_ASK_S = 120.0
_BODY = orjson.dumps({"model": "llama", "prompt": "Say something.", "max_tokens": _ANSWER_TOKENS})


@dataclass(frozen=True, slots=True)
class Taken:
    """One request: `endpoint` that served it, `seconds` from its arrival to the end of its answer."""

    endpoint: str
    seconds: float


class Load:
    """`rate_per_s` for `for_s` seconds, replica after replica; the same arrivals for the same seed."""

    def __init__(self, client: Client, *, rate_per_s: float, for_s: float, seed: int) -> None:
        self._client = client
        self._rate_per_s = rate_per_s
        self._for_s = for_s
        self._chance = random.Random(seed)
        self._loop = asyncio.get_running_loop()
        self._taken: list[Taken] = []

    async def run(self) -> list[Taken]:
        """All of its requests, once they have ended."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        due_s = begun_s = self._loop.time()
        async with (
            httpx.AsyncClient(trust_env=False, timeout=_ASK_S, limits=limits) as http,
            asyncio.TaskGroup() as group,
        ):
            number = 0
            while due_s < begun_s + self._for_s:
                await asyncio.sleep(due_s - self._loop.time())
                group.create_task(self._ask(http, number))
                number += 1
                due_s += self._chance.expovariate(self._rate_per_s)
        return self._taken

    async def _ask(self, http: httpx.AsyncClient, number: int) -> None:
        begun_s = self._loop.time()
        exchange = self._client.exchange(number)
        await exchange.begin()
        endpoint = await exchange.pick(_BODY)
        reply = await http.post(f"http://{endpoint}/v1/completions", content=_BODY)
        reply.raise_for_status()
        self._taken.append(Taken(endpoint, self._loop.time() - begun_s))
        await exchange.end(endpoint)
