"""Envoy's listener: the connection manager, its one route, and the access log that reports back."""

from collections.abc import Iterable, Mapping

from picker_fleet.config import Settings
from picker_fleet.extproc.codec import PRESSURE as PRESSURE_HEADER
from picker_fleet.header_trust import untrusted
from picker_fleet.paths import NOT_LISTED, PathRule, rules
from picker_fleet.scheduling.chooser import SESSION_HEADER
from picker_tools.local_fleet.clusters import DESTINATION_HEADER, POOL, picker_grpc
from picker_tools.local_fleet.envoy_types import (
    OTHER_HOST_DRAWS,
    AccessLog,
    ApiVersion,
    CidrRange,
    CommonGrpcAccessLogConfig,
    CommonHttpProtocolOptions,
    DataSource,
    DirectResponseAction,
    EarlyHeaderMutation,
    Filter,
    FilterChain,
    FilterConfig,
    HeaderMatcher,
    HeaderMutation,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    HttpConnectionManager,
    HttpConnectionManagerHcmAccessLogOptions,
    HttpConnectionManagerInternalAddressConfig,
    HttpConnectionManagerPathWithEscapedSlashesAction,
    HttpGrpcAccessLogConfig,
    Listener,
    PreviousHostsPredicate,
    RegexMatcher,
    Route,
    RouteAction,
    RouteConfiguration,
    RouteMatch,
    RouteRetryHostPredicate,
    RouteRetryPolicy,
    StringMatcher,
    VirtualHost,
    address,
    extension,
    packed,
    seconds,
)
from picker_tools.local_fleet.http_filters import PICKER_NAMESPACE, READERS, chain, redrive
from picker_tools.local_fleet.modes import Mode

# What Envoy reads at once, and so the largest part of a body that reaches the picker as one message.
_CHUNK_BYTES = 1024 * 1024
# Bodies are held whole for retries (G9) and, in `headers` mode, to be read; plain answers to be read for
# their usage. Past it a request is refused in that mode (413) and a plain answer outside `standard` (500).
_BODY_BYTES = 32 * 1024 * 1024
_NEVER = seconds(0)
_HEADERS_S = 10.0  # from a request's first byte to the end of its headers
_BODY_S = 60.0  # for the whole body, and for a client to take the last of its answer
_IDLE_S = 120.0  # of a connection without a request; longer than the usual 60 s of balancers in front
_SILENT_S = 3600.0  # of a request, without a byte in either direction
_NOT_FOUND = (
    b'{"error":{"message":"%s","type":"invalid_request_error","code":"unknown_path"}}\n' % NOT_LISTED.encode()
)


def listener(
    mode: Mode,
    settings: Settings,
    listen: tuple[str, int],
    *,
    trusted: Iterable[str],
    debug_headers: bool,
) -> Listener:
    """The listener of `mode` at `listen` (host, port). Of the headers that steer clients may
    set those of `trusted`."""
    manager = _manager(mode, settings, trusted, debug_headers=debug_headers)
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


# The token of a session, where the picker gives one (picker_fleet/scheduling/chooser.py), and how full the
# queue was. In `standard` the picker tells both itself.
_TOLD = {
    SESSION_HEADER: f"%DYNAMIC_METADATA({PICKER_NAMESPACE}:session)%",
    PRESSURE_HEADER: f"%DYNAMIC_METADATA({PICKER_NAMESPACE}:pressure)%",
}


def _debug(namespace: str) -> dict[str, str]:
    """What the picker chose, as header and as metadata, and who served: for tests and for looking."""
    return {
        "x-picker-header": f"%REQ({DESTINATION_HEADER})%",
        "x-picker-endpoint": f"%DYNAMIC_METADATA({namespace}:{DESTINATION_HEADER})%",
        "x-picker-served": "%UPSTREAM_REMOTE_ADDRESS%",
        "x-picker-request-id": "%REQ(x-request-id)%",
    }


def _manager(
    mode: Mode, settings: Settings, trusted: Iterable[str], *, debug_headers: bool
) -> HttpConnectionManager:
    # Envoy's clock for a body runs on while the request waits in the queue.
    waits_s = settings.fair_request_queue.queue_ttl + _BODY_S
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
        # What steers is gone before any filter could take it for the gateway's word, or the picker's.
        early_header_mutation_extensions=[
            extension(
                "envoy.http.early_header_mutation.header_mutation",
                EarlyHeaderMutation(mutations=[HeaderMutation(remove=name) for name in untrusted(trusted)]),
            )
        ],
        # How long a request may wait is the picker's to say, and a model may think long before its next byte.
        stream_idle_timeout=seconds(max(_SILENT_S, waits_s)),
        # What a client sends comes soon, and it takes what it is sent: else it would hold its place for ever.
        request_headers_timeout=seconds(_HEADERS_S),
        request_timeout=seconds(waits_s),
        stream_flush_timeout=seconds(_BODY_S),
        common_http_protocol_options=CommonHttpProtocolOptions(idle_timeout=seconds(_IDLE_S)),
        # One spelling of a path for Envoy's routes, the picker and the model server. An escaped slash stays:
        # the list of paths has it in names of models only.
        normalize_path=True,
        merge_slashes=True,
        path_with_escaped_slashes_action=HttpConnectionManagerPathWithEscapedSlashesAction.KEEP_UNCHANGED,
        route_config=_routes(mode, settings, debug_headers=debug_headers),
        http_filters=chain(mode, settings),
    )
    if mode != "standard":
        manager.access_log = [_access_log()]
        manager.access_log_options = HttpConnectionManagerHcmAccessLogOptions(
            access_log_flush_interval=seconds(settings.leases.access_log_interval)
        )
    return manager


def _routes(mode: Mode, settings: Settings, *, debug_headers: bool) -> RouteConfiguration:
    served = [_served(rule) for rule in rules(settings.extproc.paths)]
    host = VirtualHost(
        name=POOL,
        domains=["*"],
        routes=[*served, _elsewhere()],
        request_body_buffer_limit=max(_BODY_BYTES, settings.extproc.max_body_bytes),
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
    )
    return RouteConfiguration(
        name=POOL,
        virtual_hosts=[host],
        response_headers_to_add=_added(
            ({} if mode == "standard" else _TOLD)
            | (_debug(settings.extproc.metadata_namespace) if debug_headers else {})
        ),
    )


def _served(rule: PathRule) -> Route:
    match = RouteMatch(
        headers=[HeaderMatcher(name=":method", string_match=StringMatcher(exact=rule.method))],
        **({"path": rule.path} if rule.is_exact else {"safe_regex": RegexMatcher(regex=rule.regex)}),
    )
    return Route(match=match, route=RouteAction(cluster=POOL, timeout=_NEVER))


def _elsewhere() -> Route:
    """Anything else: 404 from Envoy itself, which neither reads the body nor asks a picker."""
    return Route(
        match=RouteMatch(prefix="/"),
        direct_response=DirectResponseAction(status=404, body=DataSource(inline_bytes=_NOT_FOUND)),
        response_headers_to_add=_added({"content-type": "application/json"}),
        typed_per_filter_config={name: packed(FilterConfig(disabled=True)) for name in READERS},
    )


def _added(texts: Mapping[str, str]) -> list[HeaderValueOption]:
    """Headers of answers; what the request has no value for is left out."""
    once = HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
    return [
        HeaderValueOption(header=HeaderValue(key=key, value=text), append_action=once)
        for key, text in texts.items()
    ]


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
