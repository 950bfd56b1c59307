"""An OpenTelemetry collector for tests: receives OTLP over gRPC on the loopback, keeps spans in memory."""

from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages

_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A received span. Trace and span ids are hexadecimal; `replica` is the sender."""

    name: str
    trace: str
    span: str
    parent: str
    replica: str
    attributes: dict[str, str]


class Collector:
    """After `start`, collects received spans in `spans`."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.address = ""
        self._server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(
            self._export,
            messages.ExportTraceServiceRequest.FromString,
            messages.ExportTraceServiceResponse.SerializeToString,
        )
        service = grpc.method_handlers_generic_handler(_SERVICE, {"Export": handler})
        self._server.add_generic_rpc_handlers((service,))

    async def start(self) -> None:
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.address = f"http://127.0.0.1:{port}"

    async def stop(self) -> None:
        await self._server.stop(1)

    async def _export(self, request: Any, _: Any) -> Any:
        for group in request.resource_spans:
            who = _plain(group.resource.attributes)["service.instance.id"]
            for scope in group.scope_spans:
                for span in scope.spans:
                    ids = (each.hex() for each in (span.trace_id, span.span_id, span.parent_span_id))
                    self.spans.append(ReceivedSpan(span.name, *ids, who, _plain(span.attributes)))
        return messages.ExportTraceServiceResponse()


def _plain(attributes: Any) -> dict[str, str]:
    return {each.key: str(getattr(each.value, each.value.WhichOneof("value"))) for each in attributes}
