"""Envoy's configuration messages, as `envoy-data-plane` types them, and how extensions are packed.

The one place that imports the package, for two reasons: it takes half a second, so only the commands
that configure Envoy may come here; and its generated classes still use a form that pydantic has
deprecated, which is silenced here for the import alone.
"""

import warnings
from datetime import timedelta

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import betterproto2
    from envoy_data_plane.envoy.config.accesslog.v3 import AccessLog
    from envoy_data_plane.envoy.config.bootstrap.v3 import Admin, Bootstrap, BootstrapStaticResources
    from envoy_data_plane.envoy.config.cluster.v3 import (
        CircuitBreakers,
        CircuitBreakersThresholds,
        Cluster,
        ClusterCommonLbConfig,
        ClusterDiscoveryType,
        ClusterEdsClusterConfig,
        ClusterLbPolicy,
        LoadBalancingPolicy,
        LoadBalancingPolicyPolicy,
        UpstreamConnectionOptions,
    )
    from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation
    from envoy_data_plane.envoy.config.core.v3 import (
        Address,
        ApiConfigSource,
        ApiConfigSourceApiType,
        ApiVersion,
        BackoffStrategy,
        BindConfig,
        CidrRange,
        ConfigSource,
        DataSource,
        GrpcService,
        GrpcServiceEnvoyGrpc,
        HeaderValue,
        HeaderValueOption,
        HeaderValueOptionHeaderAppendAction,
        HealthCheck,
        HealthCheckGrpcHealthCheck,
        HealthStatus,
        HealthStatusSet,
        Http1ProtocolOptions,
        Http2ProtocolOptions,
        KeepaliveSettings,
        Node,
        RetryPolicy,
        RetryPolicyRetryHostPredicate,
        RoutingPriority,
        SocketAddress,
        SocketOption,
        SocketOptionSocketState,
        TcpKeepalive,
        TypedExtensionConfig,
    )
    from envoy_data_plane.envoy.config.core.v3 import HttpProtocolOptions as CommonHttpProtocolOptions
    from envoy_data_plane.envoy.config.endpoint.v3 import (
        ClusterLoadAssignment,
        Endpoint,
        LbEndpoint,
        LocalityLbEndpoints,
    )
    from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
    from envoy_data_plane.envoy.config.overload.v3 import (
        OverloadAction,
        OverloadManager,
        ResourceMonitor,
        ThresholdTrigger,
        Trigger,
    )
    from envoy_data_plane.envoy.config.route.v3 import (
        DirectResponseAction,
        FilterConfig,
        HeaderMatcher,
        Route,
        RouteAction,
        RouteConfiguration,
        RouteMatch,
        VirtualHost,
    )
    from envoy_data_plane.envoy.config.route.v3 import RetryPolicy as RouteRetryPolicy
    from envoy_data_plane.envoy.config.route.v3 import (
        RetryPolicyRetryHostPredicate as RouteRetryHostPredicate,
    )
    from envoy_data_plane.envoy.extensions.access_loggers.grpc.v3 import (
        CommonGrpcAccessLogConfig,
        HttpGrpcAccessLogConfig,
    )
    from envoy_data_plane.envoy.extensions.content_parsers.json.v3 import (
        JsonContentParser,
        JsonContentParserRuleConfig,
    )
    from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
        ExternalProcessor,
        HeaderForwardingRules,
        MetadataOptions,
        MetadataOptionsMetadataNamespaces,
        ProcessingMode,
        ProcessingModeBodySendMode,
        ProcessingModeHeaderSendMode,
    )
    from envoy_data_plane.envoy.extensions.filters.http.json_to_metadata.v3 import (
        JsonToMetadata,
        JsonToMetadataKeyValuePair,
        JsonToMetadataMatchRules,
        JsonToMetadataRule,
        JsonToMetadataSelector,
        JsonToMetadataValueType,
    )
    from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
    from envoy_data_plane.envoy.extensions.filters.http.sse_to_metadata.v3 import (
        SseToMetadata,
        SseToMetadataProcessingRules,
    )
    from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
        HttpConnectionManager,
        HttpConnectionManagerHcmAccessLogOptions,
        HttpConnectionManagerInternalAddressConfig,
        HttpConnectionManagerPathWithEscapedSlashesAction,
        HttpFilter,
    )
    from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import (
        HeaderMutation as EarlyHeaderMutation,
    )
    from envoy_data_plane.envoy.extensions.load_balancing_policies.least_request.v3 import LeastRequest
    from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import (
        OverrideHost,
        OverrideHostOverrideHostSource,
    )
    from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections.v3 import (
        DownstreamConnectionsConfig,
    )
    from envoy_data_plane.envoy.extensions.resource_monitors.fixed_heap.v3 import FixedHeapConfig
    from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
    from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
        HttpProtocolOptions,
        HttpProtocolOptionsExplicitHttpConfig,
    )
    from envoy_data_plane.envoy.type.matcher.v3 import ListStringMatcher, RegexMatcher, StringMatcher
    from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey, MetadataKeyPathSegment
    from envoy_data_plane.envoy.type.v3 import HttpStatus, Percent, StatusCode
    from envoy_data_plane.google.protobuf import Any, Value

__all__ = [
    "AccessLog",
    "Address",
    "Admin",
    "Any",
    "ApiConfigSource",
    "ApiConfigSourceApiType",
    "ApiVersion",
    "BackoffStrategy",
    "BindConfig",
    "Bootstrap",
    "BootstrapStaticResources",
    "CidrRange",
    "CircuitBreakers",
    "CircuitBreakersThresholds",
    "Cluster",
    "ClusterCommonLbConfig",
    "ClusterDiscoveryType",
    "ClusterEdsClusterConfig",
    "ClusterLbPolicy",
    "ClusterLoadAssignment",
    "CommonGrpcAccessLogConfig",
    "CommonHttpProtocolOptions",
    "ConfigSource",
    "DataSource",
    "DirectResponseAction",
    "DownstreamConnectionsConfig",
    "EarlyHeaderMutation",
    "Endpoint",
    "ExternalProcessor",
    "Filter",
    "FilterChain",
    "FilterConfig",
    "FixedHeapConfig",
    "GrpcService",
    "GrpcServiceEnvoyGrpc",
    "HeaderForwardingRules",
    "HeaderMatcher",
    "HeaderMutation",
    "HeaderValue",
    "HeaderValueOption",
    "HeaderValueOptionHeaderAppendAction",
    "HealthCheck",
    "HealthCheckGrpcHealthCheck",
    "HealthStatus",
    "HealthStatusSet",
    "Http1ProtocolOptions",
    "Http2ProtocolOptions",
    "HttpConnectionManager",
    "HttpConnectionManagerHcmAccessLogOptions",
    "HttpConnectionManagerInternalAddressConfig",
    "HttpConnectionManagerPathWithEscapedSlashesAction",
    "HttpFilter",
    "HttpGrpcAccessLogConfig",
    "HttpProtocolOptions",
    "HttpProtocolOptionsExplicitHttpConfig",
    "HttpStatus",
    "JsonContentParser",
    "JsonContentParserRuleConfig",
    "JsonToMetadata",
    "JsonToMetadataKeyValuePair",
    "JsonToMetadataMatchRules",
    "JsonToMetadataRule",
    "JsonToMetadataSelector",
    "JsonToMetadataValueType",
    "KeepaliveSettings",
    "LbEndpoint",
    "LeastRequest",
    "ListStringMatcher",
    "Listener",
    "LoadBalancingPolicy",
    "LoadBalancingPolicyPolicy",
    "LocalityLbEndpoints",
    "MetadataKey",
    "MetadataKeyPathSegment",
    "MetadataOptions",
    "MetadataOptionsMetadataNamespaces",
    "Node",
    "OverloadAction",
    "OverloadManager",
    "OverrideHost",
    "OverrideHostOverrideHostSource",
    "Percent",
    "PreviousHostsPredicate",
    "ProcessingMode",
    "ProcessingModeBodySendMode",
    "ProcessingModeHeaderSendMode",
    "RegexMatcher",
    "ResourceMonitor",
    "RetryPolicy",
    "RetryPolicyRetryHostPredicate",
    "Route",
    "RouteAction",
    "RouteConfiguration",
    "RouteMatch",
    "RouteRetryHostPredicate",
    "RouteRetryPolicy",
    "Router",
    "RoutingPriority",
    "SocketAddress",
    "SocketOption",
    "SocketOptionSocketState",
    "SseToMetadata",
    "SseToMetadataProcessingRules",
    "StatusCode",
    "StringMatcher",
    "TcpKeepalive",
    "ThresholdTrigger",
    "Trigger",
    "UpstreamConnectionOptions",
    "Value",
    "VirtualHost",
    "address",
    "extension",
    "packed",
    "seconds",
]


# How often balancing is asked for a host that a retry has not been to. A dead one has the fewest streams, so
# of two hosts it is drawn three times in four: with five draws more, one retry in six still went to it, and
# six of 900 requests were lost that came just after a kill.
OTHER_HOST_DRAWS = 30


def packed(message: betterproto2.Message) -> Any:
    """`message` with its type URL, as Envoy nests extensions."""
    return Any.pack(message)


def extension(name: str, message: betterproto2.Message) -> TypedExtensionConfig:
    """The extension `name`, configured by `message`."""
    return TypedExtensionConfig(name=name, typed_config=packed(message))


def address(host: str, port: int) -> Address:
    """A TCP address; port 0 lets Envoy take any free one."""
    return Address(socket_address=SocketAddress(address=host, port_value=port))


def seconds(value_s: float) -> timedelta:
    return timedelta(seconds=value_s)
