"""Envoy's clusters: the picker replicas, and each pool's model servers."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from types import MappingProxyType

from picker_fleet.domain.budgets import POOL_HEADER
from picker_fleet.domain.sections import Tls
from picker_fleet.ingress.http.server import HEALTH_PATH
from picker_tools.local_fleet.envoy_types import (
    address,
    betterproto2,
    cluster_v3,
    core_v3,
    endpoint_v3,
    extension,
    least_request_v3,
    metadata_v3,
    override_host_v3,
    packed,
    protobuf,
    seconds,
    tls_v3,
    type_v3,
    upstream_http_v3,
)

POOL = "pool"  # cluster of the only or default pool; also the resource name in the fleet's EDS
PICKER = "picker"
PICKER_HTTP = "picker-http"  # the same replicas, at the port of mode `http`
PICKER_ADMIN = "picker-admin"  # the same replicas, at the port of their admin API
DESTINATION_HEADER = "x-gateway-destination-endpoint"
SERVED_KEY = "x-gateway-destination-endpoint-served"

_HEALTH_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
# The picker queues requests, so Envoy's own limits (1024 by default) must never refuse one.
_NO_LIMIT = 100_000
_STREAM_WINDOW_BYTES = 1024 * 1024
_CONNECTION_WINDOW_BYTES = 16 * 1024 * 1024
_IDLE_S = 4  # uvicorn, common for model servers, closes connections idle for 5 s, even as a request arrives
_LOST_MS = 20_000


def cluster_of(name: str, default: str) -> str:
    """The cluster of the pool `name`; `default` is the pool of requests that name none."""
    return POOL if name == default else f"{POOL}-{name}"


def pool(
    namespace: str, cluster: str = POOL, name: str | None = None, *, retry_percent: int = 20
) -> cluster_v3.Cluster:
    """A pool's model servers, discovered by EDS from the fleet and tried in the picker header's order.

    The metadata `namespace` records the endpoint that served. `name` is the pool's name, None in a fleet with
    one pool. Retries may be at most `retry_percent` of active requests, or `_FEW_RETRIES` if that is more.
    """
    override = override_host_v3.OverrideHost(
        override_host_sources=[override_host_v3.OverrideHostOverrideHostSource(header=DESTINATION_HEADER)],
        selected_host_key=metadata_v3.MetadataKey(
            key=namespace, path=[metadata_v3.MetadataKeyPathSegment(key=SERVED_KEY)]
        ),
        fallback_policy=_policy("least_request", least_request_v3.LeastRequest()),
    )
    return cluster_v3.Cluster(
        name=cluster,
        type=cluster_v3.ClusterDiscoveryType.EDS,
        eds_cluster_config=cluster_v3.ClusterEdsClusterConfig(
            service_name=POOL, eds_config=_fleet_source({} if name is None else {POOL_HEADER: name})
        ),
        connect_timeout=seconds(1),
        upstream_connection_options=cluster_v3.UpstreamConnectionOptions(
            tcp_keepalive=core_v3.TcpKeepalive(keepalive_time=10, keepalive_interval=5, keepalive_probes=3)
        ),
        upstream_bind_config=core_v3.BindConfig(socket_options=_lost_data()),
        typed_extension_protocol_options=_speaking(
            _HTTP1, core_v3.HttpProtocolOptions(idle_timeout=seconds(_IDLE_S))
        ),
        circuit_breakers=_no_circuit_breakers(retry_percent),
        common_lb_config=cluster_v3.ClusterCommonLbConfig(
            healthy_panic_threshold=type_v3.Percent(value=0),
            # The picker gives a draining endpoint no new requests; requests already placed still go there.
            override_host_status=core_v3.HealthStatusSet(
                statuses=[
                    core_v3.HealthStatus.UNKNOWN,
                    core_v3.HealthStatus.HEALTHY,
                    core_v3.HealthStatus.DEGRADED,
                    core_v3.HealthStatus.DRAINING,
                ]
            ),
        ),
        load_balancing_policy=_policy("override_host", override),
    )


_HTTP1 = upstream_http_v3.HttpProtocolOptionsExplicitHttpConfig(
    http_protocol_options=core_v3.Http1ProtocolOptions()
)


def _speaking(
    protocol: upstream_http_v3.HttpProtocolOptionsExplicitHttpConfig,
    options: core_v3.HttpProtocolOptions | None = None,
) -> dict[str, protobuf.Any]:
    """Protocol options: the HTTP version and `options` by which a cluster speaks to its hosts."""
    http = upstream_http_v3.HttpProtocolOptions(
        common_http_protocol_options=options, explicit_http_config=protocol
    )
    return {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": packed(http)}


def _lost_data() -> list[core_v3.SocketOption]:
    """Socket option to give up data unacknowledged for 20 s, if the system has it; TCP retries for 15 min.

    It detects a host that vanished after Envoy sent data; keepalive detects one while Envoy only waits.
    """
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is None:
        return []
    return [
        core_v3.SocketOption(
            description="TCP_USER_TIMEOUT",
            level=socket.IPPROTO_TCP,
            name=option,
            int_value=_LOST_MS,
            state=core_v3.SocketOptionSocketState.STATE_PREBIND,
        )
    ]


@dataclass(frozen=True, slots=True)
class PickerTls:
    """Files by which Envoy speaks TLS to the replicas. Without `ca` Envoy accepts any certificate; `cert` and
    `key` are Envoy's own, for replicas that require client certificates."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    @classmethod
    def of_local(cls, tls: Tls | None) -> "PickerTls | None":
        """For an Envoy on the replicas' machine, which uses their own certificate if they require one."""
        if tls is None:
            return None
        if tls.client_ca is None or tls.cert is None:
            return cls()
        return cls(cert=str(tls.cert), key=str(tls.key))

    def socket(self, protocol: str) -> core_v3.TransportSocket:
        """The transport socket of a cluster that speaks `protocol`."""
        own = []
        if self.cert is not None and self.key is not None:
            chain, key = core_v3.DataSource(filename=self.cert), core_v3.DataSource(filename=self.key)
            own = [tls_v3.TlsCertificate(certificate_chain=chain, private_key=key)]
        trusted = None
        if self.ca is not None:
            trusted = tls_v3.CertificateValidationContext(trusted_ca=core_v3.DataSource(filename=self.ca))
        context = tls_v3.UpstreamTlsContext(
            common_tls_context=tls_v3.CommonTlsContext(
                alpn_protocols=[protocol], tls_certificates=own, validation_context=trusted
            )
        )
        return core_v3.TransportSocket(name="envoy.transport_sockets.tls", typed_config=packed(context))


def picker(hosts: Sequence[tuple[str, int]], tls: PickerTls | None = None) -> cluster_v3.Cluster:
    """The replicas' gRPC ports at `hosts`. Envoy resolves names repeatedly; IP addresses stay fixed."""
    http2 = core_v3.Http2ProtocolOptions(
        connection_keepalive=core_v3.KeepaliveSettings(interval=seconds(5), timeout=seconds(2)),
        initial_stream_window_size=_STREAM_WINDOW_BYTES,
        initial_connection_window_size=_CONNECTION_WINDOW_BYTES,
    )
    return _replicas(
        PICKER,
        hosts,
        upstream_http_v3.HttpProtocolOptionsExplicitHttpConfig(http2_protocol_options=http2),
        grpc_health_check=core_v3.HealthCheckGrpcHealthCheck(service_name=_HEALTH_SERVICE),
        transport_socket=tls.socket("h2") if tls is not None else None,
    )


def picker_http(hosts: Sequence[tuple[str, int]], tls: PickerTls | None = None) -> cluster_v3.Cluster:
    """The replicas' HTTP/1.1 ports at `hosts`, for mode `http`."""
    return _replicas(
        PICKER_HTTP,
        hosts,
        _HTTP1,
        http_health_check=core_v3.HealthCheckHttpHealthCheck(path=HEALTH_PATH.decode()),
        transport_socket=tls.socket("http/1.1") if tls is not None else None,
    )


def picker_admin(hosts: Sequence[tuple[str, int]], tls: PickerTls | None = None) -> cluster_v3.Cluster:
    """The replicas' admin API at `hosts`; Envoy skips replicas that are not ready or drain."""
    return _replicas(
        PICKER_ADMIN,
        hosts,
        _HTTP1,
        http_health_check=core_v3.HealthCheckHttpHealthCheck(path="/readyz"),
        transport_socket=tls.socket("http/1.1") if tls is not None else None,
    )


def _replicas(
    name: str,
    hosts: Sequence[tuple[str, int]],
    protocol: upstream_http_v3.HttpProtocolOptionsExplicitHttpConfig,
    *,
    grpc_health_check: core_v3.HealthCheckGrpcHealthCheck | None = None,
    http_health_check: core_v3.HealthCheckHttpHealthCheck | None = None,
    transport_socket: core_v3.TransportSocket | None = None,
) -> cluster_v3.Cluster:
    endpoints = [
        endpoint_v3.LbEndpoint(endpoint=endpoint_v3.Endpoint(address=address(*host))) for host in hosts
    ]
    return cluster_v3.Cluster(
        name=name,
        transport_socket=transport_socket,
        type=_discovery_type(hosts),
        connect_timeout=seconds(1),
        lb_policy=cluster_v3.ClusterLbPolicy.LEAST_REQUEST,
        common_lb_config=cluster_v3.ClusterCommonLbConfig(healthy_panic_threshold=type_v3.Percent(value=0)),
        circuit_breakers=_no_circuit_breakers(),
        typed_extension_protocol_options=_speaking(protocol),
        health_checks=[
            core_v3.HealthCheck(
                timeout=seconds(1),
                interval=seconds(1),
                # By default Envoy checks a cluster without traffic only once a minute.
                no_traffic_interval=seconds(1),
                unhealthy_threshold=2,
                healthy_threshold=1,
                grpc_health_check=grpc_health_check,
                http_health_check=http_health_check,
            )
        ],
        load_assignment=endpoint_v3.ClusterLoadAssignment(
            cluster_name=name, endpoints=[endpoint_v3.LocalityLbEndpoints(lb_endpoints=endpoints)]
        ),
    )


def picker_grpc(
    retry: core_v3.RetryPolicy | None = None, metadata: Mapping[str, str] = MappingProxyType({})
) -> core_v3.GrpcService:
    """The gRPC service of any healthy replica; Envoy sends `metadata` with each stream."""
    return core_v3.GrpcService(
        envoy_grpc=core_v3.GrpcServiceEnvoyGrpc(cluster_name=PICKER),
        retry_policy=retry,
        initial_metadata=[core_v3.HeaderValue(key=key, value=value) for key, value in metadata.items()],
    )


def _fleet_source(metadata: Mapping[str, str]) -> core_v3.ConfigSource:
    # Reconnect quickly: the default back-off of up to 30 s would leave Envoy with stale endpoints.
    retry = core_v3.RetryPolicy(
        retry_back_off=core_v3.BackoffStrategy(base_interval=seconds(0.1), max_interval=seconds(1)),
    )
    return core_v3.ConfigSource(
        resource_api_version=core_v3.ApiVersion.V3,
        api_config_source=core_v3.ApiConfigSource(
            api_type=core_v3.ApiConfigSourceApiType.GRPC,
            transport_api_version=core_v3.ApiVersion.V3,
            grpc_services=[picker_grpc(retry, metadata)],
        ),
    )


def _policy(kind: str, message: betterproto2.Message) -> cluster_v3.LoadBalancingPolicy:
    policy = extension(f"envoy.load_balancing_policies.{kind}", message)
    return cluster_v3.LoadBalancingPolicy(
        policies=[cluster_v3.LoadBalancingPolicyPolicy(typed_extension_config=policy)]
    )


# Concurrent retries always allowed: a small pool may lose half its endpoints with all their requests.
_FEW_RETRIES = 128


def _no_circuit_breakers(retry_percent: int | None = None) -> cluster_v3.CircuitBreakers:
    """Circuit breakers that limit only retries, and only if `retry_percent` is given."""
    budget = None
    if retry_percent is not None:
        budget = cluster_v3.CircuitBreakersThresholdsRetryBudget(
            budget_percent=type_v3.Percent(value=retry_percent), min_retry_concurrency=_FEW_RETRIES
        )
    return cluster_v3.CircuitBreakers(
        thresholds=[
            cluster_v3.CircuitBreakersThresholds(
                priority=priority,
                max_connections=_NO_LIMIT,
                max_pending_requests=_NO_LIMIT,
                max_requests=_NO_LIMIT,
                max_retries=_NO_LIMIT,
                retry_budget=budget,
            )
            for priority in (core_v3.RoutingPriority.DEFAULT, core_v3.RoutingPriority.HIGH)
        ]
    )


def _discovery_type(hosts: Sequence[tuple[str, int]]) -> cluster_v3.ClusterDiscoveryType:
    try:
        for host, _ in hosts:
            ip_address(host)
    except ValueError:
        return cluster_v3.ClusterDiscoveryType.STRICT_DNS
    return cluster_v3.ClusterDiscoveryType.STATIC
