"""Envoy's configuration messages, as typed by `envoy-data-plane`, and helpers to pack extensions.

Only this module imports the package, which takes half a second; so only commands that configure Envoy import
this module. The generated classes use a form that pydantic has deprecated: the warning is silenced during the
import. Other modules import the messages from here, so the linters allow unused imports in this file.
"""

import warnings
from datetime import timedelta

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import betterproto2
    from envoy_data_plane.envoy.config.accesslog import v3 as accesslog_v3
    from envoy_data_plane.envoy.config.bootstrap import v3 as bootstrap_v3
    from envoy_data_plane.envoy.config.cluster import v3 as cluster_v3
    from envoy_data_plane.envoy.config.common.mutation_rules import v3 as mutation_rules_v3
    from envoy_data_plane.envoy.config.core import v3 as core_v3
    from envoy_data_plane.envoy.config.endpoint import v3 as endpoint_v3
    from envoy_data_plane.envoy.config.listener import v3 as listener_v3
    from envoy_data_plane.envoy.config.overload import v3 as overload_v3
    from envoy_data_plane.envoy.config.route import v3 as route_v3
    from envoy_data_plane.envoy.extensions.access_loggers.grpc import v3 as grpc_access_log_v3
    from envoy_data_plane.envoy.extensions.common.matching import v3 as matching_v3
    from envoy_data_plane.envoy.extensions.common.ratelimit import v3 as ratelimit_v3
    from envoy_data_plane.envoy.extensions.content_parsers.json import v3 as json_parser_v3
    from envoy_data_plane.envoy.extensions.filters.common.matcher.action import v3 as filter_action_v3
    from envoy_data_plane.envoy.extensions.filters.http.cors import v3 as cors_v3
    from envoy_data_plane.envoy.extensions.filters.http.ext_authz import v3 as ext_authz_v3
    from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc_v3
    from envoy_data_plane.envoy.extensions.filters.http.json_to_metadata import v3 as json_rules_v3
    from envoy_data_plane.envoy.extensions.filters.http.local_ratelimit import v3 as local_ratelimit_v3
    from envoy_data_plane.envoy.extensions.filters.http.router import v3 as router_v3
    from envoy_data_plane.envoy.extensions.filters.http.sse_to_metadata import v3 as sse_rules_v3
    from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import (
        v3 as hcm_v3,
    )
    from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation import (
        v3 as early_mutation_v3,
    )
    from envoy_data_plane.envoy.extensions.load_balancing_policies.least_request import v3 as least_request_v3
    from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host import v3 as override_host_v3
    from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections import (
        v3 as connections_v3,
    )
    from envoy_data_plane.envoy.extensions.resource_monitors.fixed_heap import v3 as fixed_heap_v3
    from envoy_data_plane.envoy.extensions.retry.host.previous_hosts import v3 as previous_hosts_v3
    from envoy_data_plane.envoy.extensions.transport_sockets.tls import v3 as tls_v3
    from envoy_data_plane.envoy.extensions.upstreams.http import v3 as upstream_http_v3
    from envoy_data_plane.envoy.type import v3 as type_v3
    from envoy_data_plane.envoy.type.matcher import v3 as matcher_v3
    from envoy_data_plane.envoy.type.metadata import v3 as metadata_v3
    from envoy_data_plane.envoy.type.tracing import v3 as tracing_v3
    from envoy_data_plane.google import protobuf
    from envoy_data_plane.xds.core import v3 as xds_core_v3
    from envoy_data_plane.xds.type.matcher import v3 as xds_matcher_v3

# How often Envoy's balancer draws again to find a host that a retry has not tried. A dead host has the fewest
# streams, so of two hosts it is drawn three times in four: with five draws, a retry in six still goes there.
OTHER_HOST_DRAWS = 30


def packed(message: betterproto2.Message) -> protobuf.Any:
    """`message` packed as an Any with its type URL, the form in which Envoy nests extensions."""
    return protobuf.Any.pack(message)


def extension(name: str, message: betterproto2.Message) -> core_v3.TypedExtensionConfig:
    """The extension `name` with the configuration `message`."""
    return core_v3.TypedExtensionConfig(name=name, typed_config=packed(message))


def address(host: str, port: int) -> core_v3.Address:
    """A TCP address; with port 0 Envoy takes any free port."""
    return core_v3.Address(socket_address=core_v3.SocketAddress(address=host, port_value=port))


def seconds(value_s: float) -> timedelta:
    return timedelta(seconds=value_s)
