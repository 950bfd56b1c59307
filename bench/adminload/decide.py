"""Decisions of the replicas while the queue is long: streams as Envoy opens them, each at once admitted.

A few users, each with a pause between its requests: the fleet is never busy, so that what anything else costs
shows in how long a decision takes, and is not hidden by waiting for room.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

_METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_DEADLINE_S = 20.0
_FULL_DUPLEX = 4
USERS = 2  # of each replica
PAUSE_S = 0.03
_BODY = b'{"model": "llama", "prompt": "hi", "max_tokens": 1}'


class Decider:
    """Users of the replicas at `grpc_at` (`host:port`); each waits for its decision, ends, and rests."""

    def __init__(self, grpc_at: Sequence[str]) -> None:
        self._channels = [grpc.aio.insecure_channel(address) for address in grpc_at]
        self._processes = [
            channel.stream_stream(
                _METHOD,
                request_serializer=ProcessingRequest.SerializeToString,
                response_deserializer=ProcessingResponse.FromString,
            )
            for channel in self._channels
        ]
        self.latencies_ms: list[float] = []

    async def run(self, seconds: float) -> None:
        """Add the latencies of the decisions of `seconds`. RuntimeError for an answer that places nothing."""
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            for number in range(USERS * len(self._processes)):
                tasks.create_task(self._user(self._processes[number % len(self._processes)], end))

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def _user(self, process: Any, end: float) -> None:
        while time.monotonic() < end:
            begun = time.monotonic()
            call = process()
            async with asyncio.timeout(_DEADLINE_S):
                await self._decide(call)
                self.latencies_ms.append((time.monotonic() - begun) * 1000)
                await self._end(call)
            await asyncio.sleep(PAUSE_S)

    async def _decide(self, call: Any) -> None:
        first = ProcessingRequest()
        for name, value in (
            (":method", b"POST"),
            (":path", b"/v1/completions"),
            ("x-gateway-inference-objective", b"gold"),
        ):
            first.request_headers.headers.headers.add(key=name, raw_value=value)
        first.protocol_config.request_body_mode = _FULL_DUPLEX
        first.protocol_config.response_body_mode = _FULL_DUPLEX
        await call.write(first)
        body = ProcessingRequest()
        body.request_body.body = _BODY
        body.request_body.end_of_stream = True
        await call.write(body)
        answer = await call.read()
        if not isinstance(answer, ProcessingResponse) or answer.WhichOneof("response") != "request_headers":
            raise RuntimeError(f"not placed: {answer}")

    async def _end(self, call: Any) -> None:
        """The model server's answer, whole."""
        head = ProcessingRequest()
        head.response_headers.headers.headers.add(key=":status", raw_value=b"200")
        head.response_headers.end_of_stream = True
        await call.write(head)
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
