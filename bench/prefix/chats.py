"""Conversations of several turns through a fleet, by a client that speaks ext_proc as Envoy does."""

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import orjson
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from picker_fleet.extproc.server import SERVICE

_DUPLEX = 4  # FULL_DUPLEX_STREAMED
_WAIT_S = 60.0


class NotPicked(Exception):
    """The picker refused the request; the message is the picker's."""


@dataclass(slots=True)
class Exchange:
    """One request at one replica: `begin`, `pick`, `end`, in that order."""

    call: Any

    async def begin(self) -> None:
        """Send the headers."""
        message = ProcessingRequest()
        message.protocol_config.request_body_mode = _DUPLEX
        message.protocol_config.response_body_mode = _DUPLEX
        message.request_headers.headers.headers.add(key=":method", raw_value=b"POST")
        message.request_headers.headers.headers.add(key=":path", raw_value=b"/v1/completions")
        await self.call.write(message)

    async def pick(self, body: bytes) -> str:
        """Send the body; returns the chosen endpoint (`ip:port`).

        Raises:
            NotPicked: it is refused.
        """
        message = ProcessingRequest()
        message.request_body.body = body
        message.request_body.end_of_stream = True
        await self.call.write(message)
        answer = await self.call.read()
        if answer.WhichOneof("response") == "immediate_response":
            raise NotPicked(answer.immediate_response.body.decode())
        mutation = answer.request_headers.response.header_mutation
        picked = next(o for o in mutation.set_headers if o.header.key == "x-gateway-destination-endpoint")
        while not self._is_end(await self.call.read()):
            pass
        return str(picked.header.raw_value.decode().split(",")[0])

    async def end(self, served: str) -> None:
        """Report that `served` answered, and end the exchange."""
        message = ProcessingRequest()
        message.response_headers.headers.headers.add(key=":status", raw_value=b"200")
        served_by = {"x-gateway-destination-endpoint-served": served}
        message.metadata_context.filter_metadata["envoy.lb"].update(served_by)
        await self.call.write(message)
        await self.call.read()
        message = ProcessingRequest()
        message.response_body.end_of_stream = True
        await self.call.write(message)
        await self.call.read()

    @staticmethod
    def _is_end(answer: ProcessingResponse) -> bool:
        return bool(answer.request_body.response.body_mutation.streamed_response.end_of_stream)


class Client:
    """Streams to replicas, by their number."""

    def __init__(self, channels: Sequence[grpc.aio.Channel]) -> None:
        self._processes = [
            channel.stream_stream(
                f"/{SERVICE}/Process", ProcessingRequest.SerializeToString, ProcessingResponse.FromString
            )
            for channel in channels
        ]

    def exchange(self, replica: int) -> Exchange:
        """A new exchange with replica `replica` modulo their number."""
        return Exchange(self._processes[replica % len(self._processes)](timeout=_WAIT_S))


@contextlib.asynccontextmanager
async def connected(addresses: Sequence[str]) -> AsyncIterator[Client]:
    """A client of the replicas at `addresses` (gRPC, host:port)."""
    async with contextlib.AsyncExitStack() as channels:
        opened = [
            await channels.enter_async_context(grpc.aio.insecure_channel(address)) for address in addresses
        ]
        async with asyncio.timeout(_WAIT_S):
            for channel in opened:
                await channel.channel_ready()
        yield Client(opened)


_WORDS = [f"word{number:x}" for number in range(512)]
_ANSWER_TOKENS = 24
_ASK_S = 60.0


def _text(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(_WORDS, k=words))


class Chats:
    """`count` conversations at once, of `turns` turns each, some with a common beginning.

    Each turn goes to another replica than the one before.
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
        """Run them all; returns how many requests were answered."""
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(trust_env=False, timeout=_ASK_S, limits=limits) as http,
            asyncio.TaskGroup() as group,
        ):
            for number in range(self._count):
                group.create_task(self._converse(http, number))
        return self._count * self._turns

    async def _converse(self, http: httpx.AsyncClient, number: int) -> None:
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
