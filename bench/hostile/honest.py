"""Honest clients: a steady pace of requests, half of them streamed, each of which must be served."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from bench.hostile.target import HONEST, MODEL
from picker_tools.load.client import Ask, Client, Exchange
from picker_tools.load.generator import COMPLETIONS

_PATIENCE_S = 30.0
_TOKENS = 16


@dataclass(slots=True)
class Seen:
    """What honest clients saw: seconds to the first byte and to the last, and what failed, in words."""

    first_s: list[float] = field(default_factory=list)
    last_s: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def take(self, exchange: Exchange, streamed: bool) -> None:
        whole = exchange.tokens == _TOKENS and (exchange.is_done or not streamed)
        if exchange.fault or exchange.status != 200 or not whole:
            self.failed.append(exchange.fault or f"{exchange.status} {exchange.tail[:200]!r}")
            return
        self.first_s.append((exchange.first_at or exchange.last_at) - exchange.sent_at)
        self.last_s.append(exchange.last_at - exchange.sent_at)


def _ask(number: int) -> Ask:
    streamed = number % 2 == 0
    body: dict[str, object] = {"model": MODEL, "prompt": f"question {number}", "max_tokens": _TOKENS}
    if streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    headers = (("authorization", f"Bearer {HONEST}"),)
    return Ask(COMPLETIONS, headers, json.dumps(body).encode(), streamed, _TOKENS)


@contextlib.asynccontextmanager
async def asking(envoy: str, per_s: float, seen: Seen) -> AsyncIterator[None]:
    """Honest clients of `envoy` (host:port) within the block; when it ends, all have been answered."""
    with Client(f"http://{envoy}") as client:

        async def one(number: int) -> None:
            ask = _ask(number)
            seen.take(await client.send(ask, within_s=_PATIENCE_S), ask.streamed)

        async with asyncio.TaskGroup() as group:

            async def paced() -> None:
                clock = asyncio.get_running_loop().time
                begun_s = clock()
                for number in itertools.count():
                    group.create_task(one(number))
                    await asyncio.sleep(begun_s + (number + 1) / per_s - clock())

            pacing = group.create_task(paced())
            try:
                yield
            finally:
                pacing.cancel()
