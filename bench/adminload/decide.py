"""Decisions of the replica while the queue is long: streams as Envoy opens them, always more than fit."""

import asyncio
import time

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from bench.adminload.scene import SLOTS

_METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_DEADLINE_S = 20.0
_FULL_DUPLEX = 4
_BODY = b'{"model": "llama", "prompt": "hi", "max_tokens": 1}'


class Decider:
    """Twice as many users as there are slots ask at once; each waits for the decision and then ends."""

    def __init__(self, grpc_at: str) -> None:
        self._channel = grpc.aio.insecure_channel(grpc_at)
        self._process = self._channel.stream_stream(
            _METHOD,
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )
        self.latencies_ms: list[float] = []

    async def run(self, seconds: float) -> None:
        """Add the latencies of the decisions of `seconds`. RuntimeError for an answer that places nothing."""
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            for _ in range(2 * SLOTS):
                tasks.create_task(self._user(end))

    async def close(self) -> None:
        await self._channel.close()

    async def _user(self, end: float) -> None:
        while time.monotonic() < end:
            begun = time.monotonic()
            await self._decide()
            self.latencies_ms.append((time.monotonic() - begun) * 1000)

    async def _decide(self) -> None:
        async with asyncio.timeout(_DEADLINE_S):
            call = self._process()
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
            if (
                not isinstance(answer, ProcessingResponse)
                or answer.WhichOneof("response") != "request_headers"
            ):
                raise RuntimeError(f"not placed: {answer}")
            for message in _answer():
                await call.write(message)
            await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass


def _answer() -> list[ProcessingRequest]:
    """The model server's answer, whole."""
    head = ProcessingRequest()
    head.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    head.response_headers.end_of_stream = True
    return [head]
