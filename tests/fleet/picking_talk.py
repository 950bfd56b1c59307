"""One request of the picking table over real gRPC: what Envoy says, what it is told, and how it all ends."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    CommonResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from extproc_client import body, headers, response_body, response_headers, set_headers
from picking_case import GIVEN, Ask

from picker_fleet.extproc import accesslog
from picker_fleet.extproc.server import SERVICE

PATIENT_S = 30.0
_TOKEN_FIELDS = (
    "flow", "band", "weight", "cost", "workload", "criticality", "model", "endpoint", "limit", "signature",
)  # fmt: skip


@dataclass(slots=True)
class Played:
    """What came of one request; `picked` are letters of servers, best first, '?' for any other address."""

    status: int = 200
    reason: str = ""
    retry_after: str = ""
    says: str = ""
    picked: str = ""
    header: str = ""
    told: str = ""  # the same, in dynamic metadata
    id: str = ""
    accounting_token: dict[str, str] = field(default_factory=dict)
    raw_token: str = ""
    content_length: str | None = None
    chunks: list[bytes] = field(default_factory=list)
    whole: bool = False  # the body came with the headers' answer
    reply: bytes = b""

    @property
    def sent(self) -> bytes:
        """The body that goes on to the model server."""
        return b"".join(self.chunks)


class Names:
    """The letters of a case's model servers, and the token of its session."""

    def __init__(self, addresses: Sequence[str] = ()) -> None:
        self.addresses = addresses
        self.session = ""  # as the last answer told it

    def in_hint(self, hint: object) -> object:
        """`hint` with addresses in place of letters."""
        if isinstance(hint, list):
            return [self.address(each) for each in hint]
        return ",".join(map(self.address, hint.split(","))) if isinstance(hint, str) else hint

    def letter_of(self, address: str) -> str:
        """'?' if it is nobody's."""
        return chr(ord("A") + self.addresses.index(address)) if address in self.addresses else "?"

    def address(self, name: str) -> str:
        """Of the server called `name`; `name` itself if there is none."""
        at = ord(name) - ord("A") if len(name) == 1 else -1
        return self.addresses[at] if 0 <= at < len(self.addresses) else name


class Talk:
    """One ext_proc exchange of `ask`, as Envoy leads it."""

    def __init__(self, channel: grpc.aio.Channel, names: Names, ask: Ask, number: int) -> None:
        self._channel = channel
        self._names = names
        self._ask = ask
        self._call = channel.stream_stream(
            f"/{SERVICE}/Process", ProcessingRequest.SerializeToString, ProcessingResponse.FromString
        )()
        self._number = number
        self.played = Played()

    async def begin(self) -> None:
        """Send all of the request."""
        ask = self._ask
        metadata: dict[str, Mapping[str, Any]] = {}
        if ask.subset is not None:
            hint = self._names.in_hint(ask.subset)
            metadata["envoy.lb.subset_hint"] = {"x-gateway-destination-endpoint-subset": hint}
        if ask.metadata is not None:
            metadata["picker.request"] = ask.metadata
        fields = {"x-request-id": f"request-{self._number}", **ask.headers}
        if fields.get("x-session-token") == GIVEN:
            fields["x-session-token"] = self._names.session
        await self._call.write(headers(ask.mode, fields, ended=ask.get, metadata=metadata))
        if ask.get or ask.mode == "headers":
            return
        raw = ask.raw
        size = max(1, -(-len(raw) // ask.chunks))
        pieces = [raw[at : at + size] for at in range(0, len(raw), size)] or [b""]
        for at, piece in enumerate(pieces):
            await self._call.write(body(piece, ended=at == len(pieces) - 1))

    async def decided(self) -> Played:
        """Read the decision, to its last part."""
        async with asyncio.timeout(PATIENT_S):
            answer = await self._call.read()
            assert answer is not grpc.aio.EOF, "the stream ended without an answer"
            played = self._read(answer)
            if answer.request_headers.response.status == CommonResponse.CONTINUE_AND_REPLACE:
                played.chunks.append(answer.request_headers.response.body_mutation.body)
                played.whole = True
                return played
            while played.status == 200 and self._has_body:
                echo = (await self._call.read()).request_body.response.body_mutation.streamed_response
                played.chunks.append(echo.body)
                if echo.end_of_stream:
                    break
        return played

    async def finish(self) -> None:
        """End the request as Envoy would: by its response, or by the access log."""
        async with asyncio.timeout(PATIENT_S):
            if self.played.status == 200 and self._ask.mode == "standard":
                await self._respond()
            elif self.played.status == 200 and self.played.id:
                await self._log_end()
            assert await self._call.read() is grpc.aio.EOF

    @property
    def _has_body(self) -> bool:
        return not self._ask.get and self._ask.mode != "headers"

    def _read(self, answer: ProcessingResponse) -> Played:
        played = self.played
        if answer.WhichOneof("response") == "immediate_response":
            refusal = answer.immediate_response
            told = set_headers(refusal.headers)
            played.status = refusal.status.code
            played.reason = told.get("x-llm-d-request-dropped-reason", "")
            played.retry_after = told.get("retry-after", "")
            played.says = json.loads(refusal.body)["error"]["message"]
            return played
        common = answer.request_headers.response
        assert common.clear_route_cache
        told = set_headers(common.header_mutation)
        played.header = told["x-gateway-destination-endpoint"]
        played.content_length = told.get("content-length")
        spaces = {name: dict(space.struct_value) for name, space in answer.dynamic_metadata.fields.items()}
        played.told = spaces["envoy.lb"]["x-gateway-destination-endpoint"]
        tries = played.header.split(",")
        named = list(dict.fromkeys(tries))
        # Where only some may serve, they are named again until each of Envoy's three tries has one.
        assert tries == named or tries == [*named, *named, *named][:3]
        played.picked = "".join(map(self._names.letter_of, named))
        if "id" in spaces.get("picker", {}):  # it is not for a request without a body
            played.id, played.raw_token = spaces["picker"]["id"], spaces["picker"]["ticket"]
            self._names.session = spaces["picker"].get("session", "")
            played.accounting_token = dict(zip(_TOKEN_FIELDS, played.raw_token.split("\t"), strict=True))
        return played

    async def _respond(self) -> None:
        served = self.played.header.split(",")[0]
        await self._call.write(response_headers(served=served))
        (await self._call.read()).response_headers  # noqa: B018
        parts = self._ask.answer
        for at, part in enumerate(parts):
            await self._call.write(response_body(part, ended=at == len(parts) - 1))
            echo = (await self._call.read()).response_body.response.body_mutation.streamed_response
            self.played.reply += echo.body

    async def _log_end(self) -> None:
        """The access-log entry of a request that was answered."""
        played = self.played
        entry = accesslog_pb2.HTTPAccessLogEntry()
        entry.response.response_code.value = 200
        entry.common_properties.access_log_type = accesslog_pb2.AccessLogType.Value("DownstreamEnd")
        metadata = entry.common_properties.metadata.filter_metadata
        metadata["picker"].update({"id": played.id, "ticket": played.raw_token})
        metadata["envoy.lb"].update({accesslog.SERVED_KEY: played.header.split(",")[0]})
        message = als_pb2.StreamAccessLogsMessage()
        message.http_logs.log_entry.append(entry)
        stream = self._channel.stream_unary(
            f"/{accesslog.SERVICE}/StreamAccessLogs",
            als_pb2.StreamAccessLogsMessage.SerializeToString,
            als_pb2.StreamAccessLogsResponse.FromString,
        )
        await stream(iter([message]))
