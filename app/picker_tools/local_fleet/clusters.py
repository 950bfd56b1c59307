"""Envoy's two clusters: the pickers it asks and the pool it sends requests to."""

import socket
from collections.abc import Sequence
from ipaddress import ip_address

from picker_tools.local_fleet.envoy_types import (
    ApiConfigSource,
    ApiConfigSourceApiType,
    ApiVersion,
    BackoffStrategy,
    BindConfig,
    CircuitBreakers,
    CircuitBreakersThresholds,
    Cluster,
    ClusterCommonLbConfig,
    ClusterDiscoveryType,
    ClusterEdsClusterConfig,
    ClusterLbPolicy,
    ClusterLoadAssignment,
    CommonHttpProtocolOptions,
    ConfigSource,
    Endpoint,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    HealthCheck,
    HealthCheckGrpcHealthCheck,
    HealthStatus,
    HealthStatusSet,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    HttpProtocolOptions,
    HttpProtocolOptionsExplicitHttpConfig,
    KeepaliveSettings,
    LbEndpoint,
    LeastRequest,
    LoadBalancingPolicy,
    LoadBalancingPolicyPolicy,
    LocalityLbEndpoints,
    MetadataKey,
    MetadataKeyPathSegment,
    OverrideHost,
    OverrideHostOverrideHostSource,
    Percent,
    RetryPolicy,
    RoutingPriority,
    SocketOption,
    SocketOptionSocketState,
    TcpKeepalive,
    UpstreamConnectionOptions,
    address,
    extension,
    packed,
    seconds,
)

POOL = "pool"  # also the name the fleet's endpoint discovery answers to
PICKER = "picker"
DESTINATION_HEADER = "x-gateway-destination-endpoint"
SERVED_KEY = "x-gateway-destination-endpoint-served"

_HEALTH_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
# Queueing is the picker's work: Envoy's own limits (1024 by default) must never be what refuses.
_NO_LIMIT = 100_000
_STREAM_WINDOW_BYTES = 1024 * 1024
_CONNECTION_WINDOW_BYTES = 16 * 1024 * 1024
_IDLE_S = 4  # uvicorn, which most model servers run on, closes what was idle for 5 s, maybe under a request
_LOST_MS = 20_000


def pool(namespace: str) -> Cluster:
    """The model servers, told by the fleet itself, tried in the order the picker's header names them.

    The metadata `namespace` tells who served.
    """
    override = OverrideHost(
        override_host_sources=[OverrideHostOverrideHostSource(header=DESTINATION_HEADER)],
        selected_host_key=MetadataKey(key=namespace, path=[MetadataKeyPathSegment(key=SERVED_KEY)]),
        fallback_policy=LoadBalancingPolicy(
            policies=[_policy("envoy.load_balancing_policies.least_request", LeastRequest())]
        ),
    )
    return Cluster(
        name=POOL,
        type=ClusterDiscoveryType.EDS,
        eds_cluster_config=ClusterEdsClusterConfig(service_name=POOL, eds_config=_fleet_source()),
        connect_timeout=seconds(1),
        upstream_connection_options=UpstreamConnectionOptions(
            tcp_keepalive=TcpKeepalive(keepalive_time=10, keepalive_interval=5, keepalive_probes=3)
        ),
        upstream_bind_config=BindConfig(socket_options=_lost_data()),
        typed_extension_protocol_options={
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": packed(
                HttpProtocolOptions(
                    common_http_protocol_options=CommonHttpProtocolOptions(idle_timeout=seconds(_IDLE_S)),
                    explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(
                        http_protocol_options=Http1ProtocolOptions()
                    ),
                )
            )
        },
        circuit_breakers=_no_circuit_breakers(),
        common_lb_config=ClusterCommonLbConfig(
            healthy_panic_threshold=Percent(value=0),
            # A draining endpoint gets nothing new from the picker, but what it was given still goes there.
            override_host_status=HealthStatusSet(
                statuses=[
                    HealthStatus.UNKNOWN,
                    HealthStatus.HEALTHY,
                    HealthStatus.DEGRADED,
                    HealthStatus.DRAINING,
                ]
            ),
        ),
        load_balancing_policy=LoadBalancingPolicy(
            policies=[_policy("envoy.load_balancing_policies.override_host", override)]
        ),
    )


def _lost_data() -> list[SocketOption]:
    """What a model server has not acknowledged is given up, where the system can: else TCP tries for 15 min.

    A host that vanishes says nothing. Keepalive finds it where Envoy only waits, this where it has sent.
    """
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is None:
        return []
    return [
        SocketOption(
            description="TCP_USER_TIMEOUT",
            level=socket.IPPROTO_TCP,
            name=option,
            int_value=_LOST_MS,
            state=SocketOptionSocketState.STATE_PREBIND,
        )
    ]


def picker(hosts: Sequence[tuple[str, int]]) -> Cluster:
    """The replicas at `hosts`; names are resolved again and again, addresses are taken as they are."""
    http2 = Http2ProtocolOptions(
        connection_keepalive=KeepaliveSettings(interval=seconds(5), timeout=seconds(2)),
        initial_stream_window_size=_STREAM_WINDOW_BYTES,
        initial_connection_window_size=_CONNECTION_WINDOW_BYTES,
    )
    every_s = seconds(1)
    return Cluster(
        name=PICKER,
        type=_discovery_type(hosts),
        connect_timeout=seconds(1),
        lb_policy=ClusterLbPolicy.LEAST_REQUEST,
        common_lb_config=ClusterCommonLbConfig(healthy_panic_threshold=Percent(value=0)),
        circuit_breakers=_no_circuit_breakers(),
        typed_extension_protocol_options={
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": packed(
                HttpProtocolOptions(
                    explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(http2_protocol_options=http2)
                )
            )
        },
        health_checks=[
            HealthCheck(
                timeout=seconds(1),
                interval=every_s,
                # A cluster without traffic is otherwise looked at once a minute.
                no_traffic_interval=every_s,
                unhealthy_threshold=2,
                healthy_threshold=1,
                grpc_health_check=HealthCheckGrpcHealthCheck(service_name=_HEALTH_SERVICE),
            )
        ],
        load_assignment=ClusterLoadAssignment(
            cluster_name=PICKER,
            endpoints=[
                LocalityLbEndpoints(
                    lb_endpoints=[LbEndpoint(endpoint=Endpoint(address=address(*host))) for host in hosts]
                )
            ],
        ),
    )


def picker_grpc(retry: RetryPolicy | None = None) -> GrpcService:
    """gRPC to any healthy replica."""
    return GrpcService(envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=PICKER), retry_policy=retry)


def _fleet_source() -> ConfigSource:
    # Reconnecting is quick: the default back-off of up to 30 s would leave Envoy with a stale pool.
    retry = RetryPolicy(
        retry_back_off=BackoffStrategy(base_interval=seconds(0.1), max_interval=seconds(1)),
    )
    return ConfigSource(
        resource_api_version=ApiVersion.V3,
        api_config_source=ApiConfigSource(
            api_type=ApiConfigSourceApiType.GRPC,
            transport_api_version=ApiVersion.V3,
            grpc_services=[picker_grpc(retry)],
        ),
    )


def _policy(name: str, message: LeastRequest | OverrideHost) -> LoadBalancingPolicyPolicy:
    return LoadBalancingPolicyPolicy(typed_extension_config=extension(name, message))


def _no_circuit_breakers() -> CircuitBreakers:
    return CircuitBreakers(
        thresholds=[
            CircuitBreakersThresholds(
                priority=priority,
                max_connections=_NO_LIMIT,
                max_pending_requests=_NO_LIMIT,
                max_requests=_NO_LIMIT,
                max_retries=_NO_LIMIT,
            )
            for priority in (RoutingPriority.DEFAULT, RoutingPriority.HIGH)
        ]
    )


def _discovery_type(hosts: Sequence[tuple[str, int]]) -> ClusterDiscoveryType:
    for host, _ in hosts:
        try:
            ip_address(host)
        except ValueError:
            return ClusterDiscoveryType.STRICT_DNS
    return ClusterDiscoveryType.STATIC
