"""EDS: sends the fleet's endpoints to Envoy's cluster `pool`, since `override_host` needs known hosts.

Each Envoy opens one state-of-the-world xDS stream. The replica sends no endpoints before it has its first
snapshot: an empty assignment would tell Envoy that every model server is gone. Delta and fetch calls get
UNIMPLEMENTED. The replica's gRPC server runs this service.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from envoy.config.core.v3 import health_check_pb2
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.service.discovery.v3 import discovery_pb2
from google.protobuf import any_pb2  # type: ignore[import-untyped, unused-ignore]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]

from picker_fleet.domain.request import Endpoint
from picker_fleet.domain.units import split_host_port
from picker_fleet.endpoints.snapshot import Snapshot, SnapshotCell
from picker_fleet.grpc.transport import Handler, RpcError, Status, Stream, Streaming

SERVICE: Final = "envoy.service.endpoint.v3.EndpointDiscoveryService"
TYPE_URL: Final = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
STREAM: Final = f"/{SERVICE}/StreamEndpoints"
CLUSTER: Final = "pool"

_MOST_NAMES = 16  # maximum clusters of one request; Envoy subscribes to one
_WRITE_S = 10.0  # a stream ends if Envoy does not accept an update within this time

_log = logging.getLogger(__name__)


def handlers(cell: SnapshotCell) -> Mapping[str, Handler]:
    """The handlers of the endpoint discovery service over `cell`, by path."""

    made: dict[str, Any] = {}  # the resource of cluster `pool`, by the version of its endpoints

    def resource(name: str, snapshot: Snapshot) -> Any:
        """The packed assignment of cluster `name`. With 1000 endpoints it takes 5 ms to make: all streams
        share it."""
        if name == CLUSTER and snapshot.version in made:
            return made[snapshot.version]
        packed = any_pb2.Any()
        packed.Pack(assignment(name, snapshot))
        if name == CLUSTER:
            made.clear()
            made[snapshot.version] = packed
        return packed

    async def follow(stream: Stream) -> None:
        await _Subscription(cell, stream, resource).run()

    return {STREAM: Streaming(follow)}


def assignment(name: str, snapshot: Snapshot) -> Any:
    """The ClusterLoadAssignment of cluster `name`; only the cluster `pool` gets the snapshot's endpoints.

    An endpoint that drains, or was removed a short time ago (`SnapshotCell.listed`), is DRAINING: requests
    already placed there, and their retries, still find the endpoint by `override_host` (seen with Envoy
    1.40), and no fallback chooses it. An endpoint that is down is UNHEALTHY, so Envoy's own balancing avoids
    it; Envoy still tries this endpoint first for a request that names it.
    """
    message = endpoint_pb2.ClusterLoadAssignment(cluster_name=name)
    if name == CLUSTER:
        locality = message.endpoints.add()
        for endpoint in snapshot.decoders:
            _describe(locality.lb_endpoints.add(), endpoint)
    return message


def _describe(message: Any, endpoint: Endpoint) -> None:
    host, port = split_host_port(endpoint.address)
    socket = message.endpoint.address.socket_address
    socket.address = host
    socket.port_value = port
    if endpoint.down:
        message.health_status = health_check_pb2.UNHEALTHY
    else:
        message.health_status = health_check_pb2.HEALTHY if endpoint.ready else health_check_pb2.DRAINING


def _request(data: bytes) -> Any:
    try:
        return discovery_pb2.DiscoveryRequest.FromString(data)
    except DecodeError:
        raise RpcError(Status.INVALID_ARGUMENT, "no DiscoveryRequest") from None


class _Subscription:
    """The stream of one Envoy: the names to which Envoy subscribes, and the last version sent."""

    def __init__(self, cell: SnapshotCell, stream: Stream, resource: Callable[[str, Snapshot], Any]) -> None:
        self._cell, self._stream, self._resource = cell, stream, resource
        self._names: tuple[str, ...] | None = None  # Envoy's cluster names; None before the first request
        self._nonce = 0
        self._sent_version = ""

    async def run(self) -> None:
        """Serve until Envoy ends the stream or the server stops (which cancels this)."""
        read = asyncio.ensure_future(self._stream.read())
        change = asyncio.ensure_future(self._cell.listed_after(""))
        try:
            while True:
                await asyncio.wait((read, change), return_when=asyncio.FIRST_COMPLETED)
                due = False
                if change.done():
                    change = asyncio.ensure_future(self._cell.listed_after(change.result().version))
                    due = True
                if read.done():
                    data = read.result()
                    if data is None:
                        return
                    read = asyncio.ensure_future(self._stream.read())
                    due = self._on_request(_request(data)) or due
                if due:
                    await self._send()
        finally:
            self._cell.acknowledge(self, None)
            read.cancel()
            change.cancel()
            await asyncio.wait((read, change), timeout=1)

    def _on_request(self, request: Any) -> bool:
        """Record a request. Returns whether the subscribed names change, so that Envoy needs an answer."""
        if request.type_url and request.type_url != TYPE_URL:
            raise RpcError(Status.INVALID_ARGUMENT, f"only {TYPE_URL} is served here")
        if self._nonce and request.response_nonce and request.response_nonce != str(self._nonce):
            return False  # Envoy acknowledges an older response, and will acknowledge the latest one later
        if request.HasField("error_detail"):
            # Do not send these endpoints again, since Envoy would refuse them again; send the next snapshot.
            _log.warning(
                "Envoy refused the endpoints: %s",
                request.error_detail.message[:300],
                extra={"version": self._sent_version, "node": request.node.id},
            )
        if len(request.resource_names) > _MOST_NAMES:
            raise RpcError(Status.INVALID_ARGUMENT, f"a request names at most {_MOST_NAMES} clusters")
        names = tuple(dict.fromkeys(request.resource_names)) or (CLUSTER,)
        if CLUSTER in names and not request.HasField("error_detail"):
            self._cell.acknowledge(self, self._sent_version if request.response_nonce else "")
        asked, self._names = self._names, names
        return names != asked

    async def _send(self) -> None:
        snapshot = self._cell.listed()
        if self._names is None or snapshot.version == "":
            return
        self._nonce += 1
        self._sent_version = snapshot.version
        response = discovery_pb2.DiscoveryResponse(
            version_info=snapshot.version,
            type_url=TYPE_URL,
            nonce=str(self._nonce),
            resources=(self._resource(name, snapshot) for name in self._names),
        )
        async with asyncio.timeout(_WRITE_S):
            await self._stream.write(response.SerializeToString())
