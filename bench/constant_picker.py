"""The baseline of the benchmarks: a picker that answers a constant.

It uses the usual message pattern in every mode (waits for the whole body, answers the headers, echoes the
body in chunks); with `--terse` that of the real picker in `lean` (one answer with headers and body once the
body is whole by its content-length; then the stream ends). It discards access logs, serves one fixed list of
endpoints for the cluster `pool`, and reports that it is healthy. `python -m bench.constant_picker --listen
127.0.0.1:0 --endpoint 127.0.0.1:8000` prints one line of JSON with the bound address once it listens.
"""

import argparse
import asyncio
import itertools
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop
from envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage, StreamAccessLogsResponse
from envoy.service.discovery.v3.discovery_pb2 import DiscoveryRequest, DiscoveryResponse
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    CommonResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

HEADER = "x-gateway-destination-endpoint"
CHUNK_BYTES = 62_000
ENDPOINTS_TYPE = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
)


class ConstantPicker:
    """Answers every exchange with the next of `endpoints`."""

    def __init__(self, endpoints: list[str]) -> None:
        self._answers = itertools.cycle([_headers_answer(endpoint) for endpoint in endpoints])

    async def process(self, _: object, context: Any) -> None:
        body: list[bytes] = []
        stream_owned = True
        while (message := await context.read()) is not grpc.aio.EOF:
            part = message.WhichOneof("request")
            if part == "request_headers":
                stream_owned = message.protocol_config.response_body_mode != 0 or not message.HasField(
                    "protocol_config"
                )
                bodiless = (
                    message.HasField("protocol_config") and message.protocol_config.request_body_mode == 0
                )
                if message.request_headers.end_of_stream or bodiless:
                    await context.write(next(self._answers))
                    if not stream_owned:
                        return
            elif part == "request_body":
                body.append(message.request_body.body)
                if message.request_body.end_of_stream:
                    await self._place(context, body, ended=True)
                    if not stream_owned:
                        return
            elif part == "request_trailers":
                await self._place(context, body, ended=False)
                await context.write(_trailers(request=True))
                if not stream_owned:
                    return
            elif part == "response_headers":
                answer = ProcessingResponse()
                answer.response_headers.SetInParent()
                await context.write(answer)
            elif part == "response_body":
                chunk = message.response_body
                answer = ProcessingResponse()
                echo = answer.response_body.response.body_mutation.streamed_response
                echo.body = chunk.body
                echo.end_of_stream = chunk.end_of_stream
                await context.write(answer)
            elif part == "response_trailers":
                await context.write(_trailers(request=False))

    async def _place(self, context: Any, parts: list[bytes], *, ended: bool) -> None:
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        await context.write(next(self._answers))
        last = max(len(body) - 1, 0) // CHUNK_BYTES * CHUNK_BYTES
        for start in range(0, last + 1, CHUNK_BYTES):
            answer = ProcessingResponse()
            echo = answer.request_body.response.body_mutation.streamed_response
            echo.body = body[start : start + CHUNK_BYTES]
            echo.end_of_stream = ended and start == last
            await context.write(answer)


class TersePicker:
    """As `ConstantPicker` with as few messages as Envoy accepts, for `lean`."""

    def __init__(self, endpoints: list[str]) -> None:
        self._answers = itertools.cycle([_headers_answer(endpoint) for endpoint in endpoints])

    async def process(self, _: object, context: Any) -> ProcessingResponse:
        body, length = b"", -1
        while (message := await context.read()) is not grpc.aio.EOF:
            if message.HasField("request_headers"):
                length = _content_length(message)
            else:
                body += message.request_body.body
            ended = message.request_headers.end_of_stream or message.request_body.end_of_stream
            if ended or len(body) == length:
                answer = ProcessingResponse()
                answer.CopyFrom(next(self._answers))
                if body:
                    answer.request_headers.response.status = CommonResponse.CONTINUE_AND_REPLACE
                    answer.request_headers.response.body_mutation.body = body
                return answer
        return ProcessingResponse()


def _content_length(message: ProcessingRequest) -> int:
    fields = message.request_headers.headers.headers
    return next((int(field.raw_value) for field in fields if field.key == "content-length"), -1)


def _headers_answer(endpoint: str) -> ProcessingResponse:
    answer = ProcessingResponse()
    common = answer.request_headers.response
    common.clear_route_cache = True
    option = common.header_mutation.set_headers.add()
    option.header.key = HEADER
    option.header.raw_value = endpoint.encode()
    option.append_action = option.OVERWRITE_IF_EXISTS_OR_ADD
    answer.dynamic_metadata.fields["envoy.lb"].struct_value.fields[HEADER].string_value = endpoint
    return answer


def _trailers(*, request: bool) -> ProcessingResponse:
    answer = ProcessingResponse()
    (answer.request_trailers if request else answer.response_trailers).SetInParent()
    return answer


def _assignment(endpoints: list[str]) -> ClusterLoadAssignment:
    assignment = ClusterLoadAssignment(cluster_name="pool")
    locality = assignment.endpoints.add()
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        address = locality.lb_endpoints.add().endpoint.address.socket_address
        address.address = host.strip("[]")
        address.port_value = int(port)
    return assignment


def _handlers(endpoints: list[str], terse: bool) -> list[grpc.GenericRpcHandler]:
    async def access_logs(
        messages: AsyncIterator[StreamAccessLogsMessage], _: Any
    ) -> StreamAccessLogsResponse:
        async for _message in messages:
            pass
        return StreamAccessLogsResponse()

    async def stream_endpoints(_: object, context: Any) -> None:
        if await context.read() is grpc.aio.EOF:
            return
        answer = DiscoveryResponse(version_info="1", nonce="1", type_url=ENDPOINTS_TYPE)
        answer.resources.add().Pack(_assignment(endpoints))
        await context.write(answer)
        while await context.read() is not grpc.aio.EOF:
            pass

    picker = (TersePicker if terse else ConstantPicker)(endpoints)
    method = grpc.stream_unary_rpc_method_handler if terse else grpc.stream_stream_rpc_method_handler

    def service(name: str, **methods: grpc.RpcMethodHandler) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(name, methods)

    return [
        service(
            "envoy.service.ext_proc.v3.ExternalProcessor",
            Process=method(
                picker.process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
            ),
        ),
        service(
            "envoy.service.accesslog.v3.AccessLogService",
            StreamAccessLogs=grpc.stream_unary_rpc_method_handler(
                access_logs,
                StreamAccessLogsMessage.FromString,
                StreamAccessLogsResponse.SerializeToString,
            ),
        ),
        service(
            "envoy.service.endpoint.v3.EndpointDiscoveryService",
            StreamEndpoints=grpc.stream_stream_rpc_method_handler(
                stream_endpoints, DiscoveryRequest.FromString, DiscoveryResponse.SerializeToString
            ),
        ),
    ]


async def serve(listen: str, endpoints: list[str], terse: bool) -> None:
    """Serve on `listen` until SIGTERM or SIGINT."""
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers(tuple(_handlers(endpoints, terse)))
    health = health_aio.HealthServicer()
    for name in ("", "envoy.service.ext_proc.v3.ExternalProcessor", "liveness", "readiness"):
        await health.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port(listen)
    await server.start()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    print(json.dumps({"ready": True, "grpc": f"{listen.rpartition(':')[0]}:{port}"}), flush=True)
    await stopped.wait()
    await server.stop(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:0", help="host:port; port 0 takes any free one")
    parser.add_argument("--endpoint", action="append", required=True, help="ip:port; give it again for more")
    parser.add_argument("--terse", action="store_true", help="for lean: one message an answer")
    args = parser.parse_args()
    uvloop.run(serve(args.listen, args.endpoint, args.terse))


if __name__ == "__main__":
    main()
