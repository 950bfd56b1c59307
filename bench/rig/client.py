"""Envoy's part of an exchange in `standard` mode: a request is in flight until its end is told."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from picker_fleet.extproc.server import SERVICE

_DUPLEX = 4  # FULL_DUPLEX_STREAMED
_WAIT_S = 60.0


class NotPicked(Exception):
    """The picker refused; the message is its own."""


@dataclass(slots=True)
class Exchange:
    """One request at one replica: `begin`, `pick`, `end`, in that order."""

    call: Any

    async def begin(self) -> None:
        """Send the headers: the replica waits for the body now."""
        message = ProcessingRequest()
        message.protocol_config.request_body_mode = _DUPLEX
        message.protocol_config.response_body_mode = _DUPLEX
        message.request_headers.headers.headers.add(key=":method", raw_value=b"POST")
        message.request_headers.headers.headers.add(key=":path", raw_value=b"/v1/completions")
        await self.call.write(message)

    async def pick(self, body: bytes) -> str:
        """Send the body; the endpoint (`ip:port`) that the request is to go to.

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
        """Tell that `served` has answered, and settle the request."""
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
        """A new one at the replica of this number, counted round."""
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
