"""Envoy's listener: the connection manager, its one route, and the access log that reports back."""

from app.config import Settings
from app.fleet.clusters import DESTINATION_HEADER, LB_NAMESPACE, POOL, picker_grpc
from app.fleet.envoy_types import (
    OTHER_HOST_DRAWS,
    AccessLog,
    ApiVersion,
    CidrRange,
    CommonGrpcAccessLogConfig,
    EarlyHeaderMutation,
    Filter,
    FilterChain,
    HeaderMutation,
    HeaderValue,
    HeaderValueOption,
    HttpConnectionManager,
    HttpConnectionManagerHcmAccessLogOptions,
    HttpConnectionManagerInternalAddressConfig,
    HttpGrpcAccessLogConfig,
    Listener,
    PreviousHostsPredicate,
    Route,
    RouteAction,
    RouteConfiguration,
    RouteMatch,
    RouteRetryHostPredicate,
    RouteRetryPolicy,
    VirtualHost,
    address,
    extension,
    packed,
    seconds,
)
from app.fleet.http_filters import chain, redrive
from app.fleet.modes import Mode

# What Envoy reads at once, and so the largest part of a body that reaches the picker as one message.
_CHUNK_BYTES = 1024 * 1024
# Bodies are held whole for retries (G9) and, in `headers` mode, to be read; plain answers to be read for
# their usage. Past it a request is refused in that mode (413) and a plain answer outside `standard` (500).
_BODY_BYTES = 32 * 1024 * 1024
_NEVER = seconds(0)


def listener(mode: Mode, settings: Settings, listen: tuple[str, int], *, debug_headers: bool) -> Listener:
    """The listener of `mode` at `listen` (host, port)."""
    manager = _manager(mode, settings, debug_headers=debug_headers)
    return Listener(
        name=mode,
        address=address(*listen),
        per_connection_buffer_limit_bytes=_CHUNK_BYTES,
        filter_chains=[
            FilterChain(
                filters=[
                    Filter(
                        name="envoy.filters.network.http_connection_manager",
                        typed_config=packed(manager),
                    )
                ]
            )
        ],
    )


def _manager(mode: Mode, settings: Settings, *, debug_headers: bool) -> HttpConnectionManager:
    manager = HttpConnectionManager(
        stat_prefix=mode,
        # Whose address is internal keeps its own x-request-id, and what names a request in the shared
        # state must come from Envoy alone. An empty list would mean every private address; so it lists
        # one that no client can have.
        use_remote_address=True,
        internal_address_config=HttpConnectionManagerInternalAddressConfig(
            cidr_ranges=[CidrRange(address_prefix="255.255.255.255", prefix_len=32)]
        ),
        generate_request_id=True,
        preserve_external_request_id=False,
        # A client's own idea of its endpoint is gone before any filter could take it for the picker's.
        early_header_mutation_extensions=[
            extension(
                "envoy.http.early_header_mutation.header_mutation",
                EarlyHeaderMutation(mutations=[HeaderMutation(remove=DESTINATION_HEADER)]),
            )
        ],
        # How long a request may wait or stream is the picker's and the client's to say.
        stream_idle_timeout=_NEVER,
        request_timeout=_NEVER,
        route_config=_routes(settings, debug_headers=debug_headers),
        http_filters=chain(mode, settings),
    )
    if mode != "standard":
        manager.access_log = [_access_log()]
        manager.access_log_options = HttpConnectionManagerHcmAccessLogOptions(
            access_log_flush_interval=seconds(settings.leases.access_log_interval)
        )
    return manager


def _routes(settings: Settings, *, debug_headers: bool) -> RouteConfiguration:
    route = Route(
        match=RouteMatch(prefix="/"),
        request_body_buffer_limit=max(_BODY_BYTES, settings.extproc.max_body_bytes),
        route=RouteAction(
            cluster=POOL,
            timeout=_NEVER,
            idle_timeout=_NEVER,
            retry_policy=RouteRetryPolicy(
                # `reset` too: an endpoint may die after it took the request and before its first byte.
                retry_on="connect-failure,refused-stream,reset-before-request,reset",
                num_retries=settings.scheduling.fallbacks,  # one try for each endpoint that the picker lists
                retry_host_predicate=[
                    RouteRetryHostPredicate(
                        name="envoy.retry_host_predicates.previous_hosts",
                        typed_config=packed(PreviousHostsPredicate()),
                    )
                ],
                host_selection_retry_max_attempts=OTHER_HOST_DRAWS,
            ),
        ),
    )
    return RouteConfiguration(
        name=POOL,
        virtual_hosts=[VirtualHost(name=POOL, domains=["*"], routes=[route])],
        response_headers_to_add=_debug_headers() if debug_headers else [],
    )


def _debug_headers() -> list[HeaderValueOption]:
    """What the picker chose, as header and as metadata, and who served: for tests and for looking."""
    texts = {
        "x-picker-header": f"%REQ({DESTINATION_HEADER})%",
        "x-picker-endpoint": f"%DYNAMIC_METADATA({LB_NAMESPACE}:{DESTINATION_HEADER})%",
        "x-picker-served": "%UPSTREAM_REMOTE_ADDRESS%",
        "x-picker-request-id": "%REQ(x-request-id)%",
    }
    return [HeaderValueOption(header=HeaderValue(key=key, value=text)) for key, text in texts.items()]


def _access_log() -> AccessLog:
    """One entry a flush interval while a request lives, one at its end, to any one replica."""
    return AccessLog(
        name="envoy.access_loggers.http_grpc",
        typed_config=packed(
            HttpGrpcAccessLogConfig(
                common_config=CommonGrpcAccessLogConfig(
                    log_name="picker",
                    transport_api_version=ApiVersion.V3,
                    buffer_flush_interval=seconds(0.01),
                    buffer_size_bytes=16 * 1024,
                    grpc_service=picker_grpc(),
                    grpc_stream_retry_policy=redrive(),
                )
            )
        ),
    )
