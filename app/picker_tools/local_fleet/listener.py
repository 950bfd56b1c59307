"""Envoy's listener for each mode: the connection manager, its HTTP filters, its routes, and the access log.

The modes (docs/protocol.md): in `standard` Envoy sends the picker requests and answers, in `lean` requests
only; in `http` it asks by ext_authz instead of ext_proc.

If the fleet serves several pools (docs/protocol.md), a request's host names its pool: Envoy passes the pool
to the picker as metadata of the matched route.

An optional operators' listener leads to the admin API and dashboard of any ready replica. A fleet whose
replicas come and go has no other fixed address for them. Envoy checks no access there: the replicas' own
tokens decide who may do what (docs/admin-api.md).
"""

from collections.abc import Iterable, Mapping, Sequence

from picker_fleet.domain.allowlist import ADMINISTRATION, ANY_METHOD, NOT_LISTED, STEERING, Paths, untrusted
from picker_fleet.domain.budgets import POOL_HEADER
from picker_fleet.domain.config import Settings, pools_of
from picker_fleet.ingress.ext_proc.accesslog import (
    CONTENT_TYPE,
    FAULT_TAG,
    METADATA_HEADERS,
    RETRY_AFTER,
    STATE_IDS,
)
from picker_fleet.ingress.ext_proc.codec import LENGTH_HEADER, SUBSET
from picker_fleet.ingress.ext_proc.codec import PRESSURE as PRESSURE_HEADER
from picker_fleet.ingress.http.check import CARRIED, CLIENT_HEADERS, REFUSAL_HEADERS
from picker_fleet.ingress.http.server import PREFIX
from picker_fleet.ingress.intake import METHOD, PATH, wanted_headers
from picker_fleet.scheduling.chooser import SESSION_HEADER
from picker_tools.local_fleet.clusters import (
    DESTINATION_HEADER,
    PICKER_ADMIN,
    PICKER_HTTP,
    POOL,
    cluster_of,
    picker_grpc,
)
from picker_tools.local_fleet.envoy_types import (
    OTHER_HOST_DRAWS,
    accesslog_v3,
    address,
    betterproto2,
    core_v3,
    cors_v3,
    early_mutation_v3,
    ext_authz_v3,
    ext_proc_v3,
    extension,
    filter_action_v3,
    grpc_access_log_v3,
    hcm_v3,
    json_parser_v3,
    json_rules_v3,
    listener_v3,
    local_ratelimit_v3,
    matcher_v3,
    matching_v3,
    mutation_rules_v3,
    packed,
    previous_hosts_v3,
    protobuf,
    ratelimit_v3,
    route_v3,
    router_v3,
    seconds,
    sse_rules_v3,
    tracing_v3,
    type_v3,
    xds_core_v3,
    xds_matcher_v3,
)
from picker_tools.local_fleet.parts import Mode

USAGE_NAMESPACE = "picker.usage"
PICKER_NAMESPACE = "picker"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"

_CORS = "envoy.filters.http.cors"
_EXT_AUTHZ = "envoy.filters.http.ext_authz"
_EXT_PROC = "envoy.filters.http.ext_proc"
_ROUTER = "envoy.filters.http.router"
_JSON_TO_METADATA = "envoy.filters.http.json_to_metadata"
_BODY_READERS = (_EXT_AUTHZ, _EXT_PROC)  # filters that need a request's body

# All steering headers. Envoy removes the untrusted ones, or the picker ignores them.
_STEERING = frozenset(name for pair in STEERING for name in pair)
_SEND = ext_proc_v3.ProcessingModeHeaderSendMode.SEND
_SKIP = ext_proc_v3.ProcessingModeHeaderSendMode.SKIP
_DUPLEX = ext_proc_v3.ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED
_NONE = ext_proc_v3.ProcessingModeBodySendMode.NONE

# The last event of a Responses API stream repeats the whole answer: Envoy's default of 8 KiB is too small.
_MAX_EVENT_BYTES = 4 * 1024 * 1024
# Envoy's maximum. The timeout applies only to requests without a body, which do not queue.
_MESSAGE_TIMEOUT_S = 3600.0
_GRPC_FAILURES = "reset,connect-failure,unavailable,refused-stream,cancelled,internal"
_HTTP_FAILURES = "reset,connect-failure,refused-stream"
_ANSWER_MARGIN_S = 60.0

# Token usage by JSON path: _USAGE covers answers and events of OpenAI, Anthropic, SGLang and TGI. Whole
# answers add Ollama's fields; events add the Responses API's last event and Anthropic's first event.
# `accesslog._counts` combines the fields.
_USAGE = {
    "prompt_tokens": (
        "usage.prompt_tokens",
        "usage.input_tokens",
        "meta_info.prompt_tokens",
        "details.input_length",
    ),
    "completion_tokens": (
        *("usage.completion_tokens", "usage.output_tokens", "meta_info.completion_tokens"),
        "details.generated_tokens",
    ),
}
_USAGE_IN_ANSWER = {
    "prompt_tokens": (*_USAGE["prompt_tokens"], "prompt_eval_count"),
    "completion_tokens": (*_USAGE["completion_tokens"], "eval_count"),
    "total_tokens": ("usage.total_tokens",),
    "cache_read_tokens": ("usage.cache_read_input_tokens",),
    "cache_creation_tokens": ("usage.cache_creation_input_tokens",),
}
_USAGE_IN_EVENTS = {
    "prompt_tokens": (*_USAGE["prompt_tokens"], "response.usage.input_tokens"),
    "completion_tokens": (*_USAGE["completion_tokens"], "response.usage.output_tokens"),
    "first_prompt_tokens": ("message.usage.input_tokens",),
    "first_cache_read_tokens": ("message.usage.cache_read_input_tokens",),
    "first_cache_creation_tokens": ("message.usage.cache_creation_input_tokens",),
}

# JSON paths of response and conversation ids in the Responses API (picker_fleet/admission/origins.py).
_IDS_IN_ANSWER = dict(zip(STATE_IDS, (("id",), ("conversation.id",)), strict=True))
_IDS_IN_EVENTS = dict(zip(STATE_IDS, (("response.id",), ("response.conversation.id",)), strict=True))


def _longest_wait_s(settings: Settings) -> float:
    """The longest time that a request may queue, over all pools."""
    return max(each.fair_request_queue.queue_ttl for each in pools_of(settings).values())


def _read_headers(settings: Settings) -> frozenset[str]:
    """The headers that the picker reads in any pool, and all steering headers."""
    return _STEERING.union(*(wanted_headers(each) for each in pools_of(settings).values()))


def _naming(settings: Settings, pool: str | None) -> dict[str, str]:
    """The header or gRPC metadata that names a request's pool: `pool`, or the pool of its route."""
    if pool is not None:
        return {POOL_HEADER: pool}
    return {POOL_HEADER: f"%METADATA(ROUTE:{PICKER_NAMESPACE}:pool)%"} if settings.pools else {}


def _http_filters(
    mode: Mode, settings: Settings, pool: str | None, client_rate: int | None
) -> list[hcm_v3.HttpFilter]:
    """The HTTP filters of `mode`. Requests pass them in this order, answers in reverse."""
    filters: list[hcm_v3.HttpFilter] = []
    if client_rate is not None:
        filters.append(_named("envoy.filters.http.local_ratelimit", _per_address(client_rate)))
    if mode != "standard":  # in `standard` the picker itself reads usage in the answer
        filters.append(_named("envoy.filters.http.sse_to_metadata", _sse_usage()))
        filters.append(_named(_JSON_TO_METADATA, _json_usage()))
    naming = _naming(settings, pool)
    if mode == "http":
        filters.append(_named(_EXT_AUTHZ, _ext_authz(settings, naming)))
    else:
        processor = _ext_proc(mode, settings, naming)
        filters.append(_named(_EXT_PROC, _without_own_4xx(processor) if mode == "standard" else processor))
    attempts = [] if mode == "standard" else [_access_log(_failed_attempts())]
    return [*filters, _named(_ROUTER, router_v3.Router(upstream_log=attempts))]


_ADDRESSES = 10_000  # most client addresses whose rate limits Envoy remembers
_WITHOUT_ADDRESS = 1_000_000  # requests a second that match no address: in effect no limit


def _per_address(per_s: int) -> local_ratelimit_v3.LocalRateLimit:
    """Limit each client address to `per_s` requests a second, in bursts of up to twice that; answer 429."""

    def bucket(tokens: int) -> type_v3.TokenBucket:
        return type_v3.TokenBucket(max_tokens=2 * tokens, tokens_per_fill=tokens, fill_interval=seconds(1))

    always = core_v3.RuntimeFractionalPercent(default_value=type_v3.FractionalPercent(numerator=100))
    by_address = route_v3.RateLimitAction(remote_address=route_v3.RateLimitActionRemoteAddress())
    return local_ratelimit_v3.LocalRateLimit(
        stat_prefix="per_address",
        token_bucket=bucket(_WITHOUT_ADDRESS),
        filter_enabled=always,
        filter_enforced=always,
        response_headers_to_add=_added({"retry-after": "1"}),
        rate_limits=[route_v3.RateLimit(actions=[by_address])],
        descriptors=[
            ratelimit_v3.LocalRateLimitDescriptor(
                entries=[ratelimit_v3.RateLimitDescriptorEntry(key="remote_address")],
                token_bucket=bucket(per_s),
            )
        ],
        always_consume_default_token_bucket=False,
        max_dynamic_descriptors=_ADDRESSES,
    )


def _without_own_4xx(processor: ext_proc_v3.ExternalProcessor) -> matching_v3.ExtensionWithMatcher:
    """`processor`, skipped for 4xx answers that Envoy itself generates.

    Envoy answers a malformed request with 4xx and closes the connection at once, which would cut off the
    exchange with the picker about that answer.
    """

    def named(name: str, message: betterproto2.Message) -> xds_core_v3.TypedExtensionConfig:
        return xds_core_v3.TypedExtensionConfig(name=name, typed_config=packed(message))

    def is_(name: str, data: betterproto2.Message, value: str) -> xds_matcher_v3.MatcherMatcherListPredicate:
        return xds_matcher_v3.MatcherMatcherListPredicate(
            single_predicate=xds_matcher_v3.MatcherMatcherListPredicateSinglePredicate(
                input=named(f"envoy.matching.inputs.{name}", data),
                value_match=xds_matcher_v3.StringMatcher(exact=value),
            )
        )

    own_4xx = xds_matcher_v3.MatcherMatcherListPredicatePredicateList(
        predicate=[
            is_("local_reply", matcher_v3.HttpResponseLocalReplyMatchInput(), "true"),
            is_("status_code_class_input", matcher_v3.HttpResponseStatusCodeClassMatchInput(), "4xx"),
        ]
    )
    skip = xds_matcher_v3.MatcherOnMatch(action=named("skip", filter_action_v3.SkipFilter()))
    return matching_v3.ExtensionWithMatcher(
        xds_matcher=xds_matcher_v3.Matcher(
            matcher_list=xds_matcher_v3.MatcherMatcherList(
                matchers=[
                    xds_matcher_v3.MatcherMatcherListFieldMatcher(
                        predicate=xds_matcher_v3.MatcherMatcherListPredicate(and_matcher=own_4xx),
                        on_match=skip,
                    )
                ]
            )
        ),
        extension_config=extension(_EXT_PROC, processor),
    )


def _ext_proc(mode: Mode, settings: Settings, naming: Mapping[str, str]) -> ext_proc_v3.ExternalProcessor:
    namespace = settings.extproc.metadata_namespace
    forwarded = [SUBSET_NAMESPACE]
    if mode == "standard":
        forwarded.append(namespace)  # this namespace names the endpoint that served
    return ext_proc_v3.ExternalProcessor(
        grpc_service=picker_grpc(_redrive(), naming),
        # Without a decision a request names no endpoint: Envoy's load balancing of the pool places it.
        failure_mode_allow=settings.extproc.on_failure == "balance",
        status_on_error=type_v3.HttpStatus(code=type_v3.StatusCode.ServiceUnavailable),
        message_timeout=seconds(_MESSAGE_TIMEOUT_S),
        metadata_options=ext_proc_v3.MetadataOptions(
            forwarding_namespaces=ext_proc_v3.MetadataOptionsMetadataNamespaces(untyped=forwarded),
            receiving_namespaces=ext_proc_v3.MetadataOptionsMetadataNamespaces(
                untyped=[namespace, PICKER_NAMESPACE]
            ),
        ),
        processing_mode=_processing_mode(mode),
        allow_content_length_header=True,  # the picker sets content-length when it changes a body
        # Each header costs the picker time. Gateways that use `standard` forward all headers, so this Envoy
        # does too.
        forward_rules=None
        if mode == "standard"
        else ext_proc_v3.HeaderForwardingRules(allowed_headers=_exactly(_read_headers(settings))),
    )


def _exactly(names: Iterable[str]) -> matcher_v3.ListStringMatcher:
    return matcher_v3.ListStringMatcher(
        patterns=[matcher_v3.StringMatcher(exact=name) for name in sorted(names)]
    )


def _ext_authz(settings: Settings, naming: Mapping[str, str]) -> ext_authz_v3.ExtAuthz:
    wait_s = _longest_wait_s(settings) + _ANSWER_MARGIN_S
    retry = _redrive(_HTTP_FAILURES)
    # Envoy uses the longest back-off (max_interval) also as the timeout of each try, which includes the wait
    # in the queue. Four tries back off for less than a second in all.
    retry.retry_back_off = core_v3.BackoffStrategy(base_interval=seconds(0.05), max_interval=seconds(wait_s))
    hint = f"%DYNAMIC_METADATA({SUBSET_NAMESPACE}:{SUBSET})%"
    service = ext_authz_v3.HttpService(
        server_uri=core_v3.HttpUri(uri=f"http://{PICKER_HTTP}", cluster=PICKER_HTTP, timeout=seconds(wait_s)),
        path_prefix=PREFIX.decode(),
        authorization_request=ext_authz_v3.AuthorizationRequest(
            headers_to_add=[
                core_v3.HeaderValue(key=key, value=value) for key, value in {SUBSET: hint, **naming}.items()
            ]
        ),
        authorization_response=ext_authz_v3.AuthorizationResponse(
            allowed_upstream_headers=_exactly((DESTINATION_HEADER,)),
            allowed_client_headers=_exactly(REFUSAL_HEADERS),
            allowed_client_headers_on_success=_exactly(CLIENT_HEADERS),
            dynamic_metadata_from_headers=_exactly(METADATA_HEADERS),
        ),
        retry_policy=retry,
    )
    return ext_authz_v3.ExtAuthz(
        http_service=service,
        failure_mode_allow=settings.extproc.on_failure == "balance",
        status_on_error=type_v3.HttpStatus(code=type_v3.StatusCode.ServiceUnavailable),
        encode_raw_headers=True,  # otherwise Envoy alters bytes that are not UTF-8
        allowed_headers=_exactly(_read_headers(settings) - {METHOD, PATH}),
        # Send one byte more than the limit, so that the picker can see and refuse a body that is too long.
        with_request_body=ext_authz_v3.BufferSettings(
            max_request_bytes=settings.extproc.max_body_bytes + 1, allow_partial_message=True
        ),
    )


def _processing_mode(mode: Mode) -> ext_proc_v3.ProcessingMode:
    answer_head, answer_body = (_SEND, _DUPLEX) if mode == "standard" else (_SKIP, _NONE)
    return ext_proc_v3.ProcessingMode(
        request_header_mode=_SEND,
        request_body_mode=_DUPLEX,
        request_trailer_mode=_SEND,
        response_header_mode=answer_head,
        response_body_mode=answer_body,
        response_trailer_mode=answer_head,
    )


def _redrive(retry_on: str = _GRPC_FAILURES) -> core_v3.RetryPolicy:
    """Retry a request on another replica if the replica that queues it dies (G7).

    Exclude replicas already tried: until its health check fails, a dead replica has the fewest streams, so
    least-request balancing would choose it again and again.
    """
    return core_v3.RetryPolicy(
        retry_on=retry_on,
        num_retries=3,
        retry_back_off=core_v3.BackoffStrategy(base_interval=seconds(0.05), max_interval=seconds(0.5)),
        retry_host_predicate=[
            core_v3.RetryPolicyRetryHostPredicate(
                name="envoy.retry_host_predicates.previous_hosts",
                typed_config=packed(previous_hosts_v3.PreviousHostsPredicate()),
            )
        ],
        host_selection_retry_max_attempts=OTHER_HOST_DRAWS,
    )


def _sse_usage() -> sse_rules_v3.SseToMetadata:
    told = _rules(_USAGE_IN_EVENTS, _IDS_IN_EVENTS)
    rules = [json_parser_v3.JsonContentParserRuleConfig(rule=rule) for rule in told]
    return sse_rules_v3.SseToMetadata(
        response_rules=sse_rules_v3.SseToMetadataProcessingRules(
            content_parser=extension(
                "envoy.content_parsers.json", json_parser_v3.JsonContentParser(rules=rules)
            ),
            max_event_size=_MAX_EVENT_BYTES,
        )
    )


def _json_usage() -> json_rules_v3.JsonToMetadata:
    answer = json_rules_v3.JsonToMetadataMatchRules(
        rules=_rules(_USAGE_IN_ANSWER, _IDS_IN_ANSWER),
        allow_content_types_regex=matcher_v3.RegexMatcher(regex=r"(?i)application/json\s*(;.*)?"),
    )
    return json_rules_v3.JsonToMetadata(response_rules=answer)


_NUMBER, _STRING = json_rules_v3.JsonToMetadataValueType.NUMBER, json_rules_v3.JsonToMetadataValueType.STRING


def _rules(
    usage: Mapping[str, Sequence[str]], ids: Mapping[str, Sequence[str]]
) -> list[json_rules_v3.JsonToMetadataRule]:
    numbers = {**usage, "error_code": ("error.code",)}
    rules = [_rule(path, key, _NUMBER) for key, ways in numbers.items() for path in ways]
    rules += [_rule(path, key, _STRING) for key, ways in ids.items() for path in ways]
    # Record only that the answer is an error, not its text, which may be long.
    told = protobuf.Value(bool_value=True)
    return [*rules, *(_rule(f"error.{field}", "error", told) for field in ("message", "type"))]


def _rule(
    path: str, key: str, kept: json_rules_v3.JsonToMetadataValueType | protobuf.Value
) -> json_rules_v3.JsonToMetadataRule:
    """Store the JSON value at `path` under `key`, if it has the type `kept`; or store the value `kept`."""
    pair = json_rules_v3.JsonToMetadataKeyValuePair(metadata_namespace=USAGE_NAMESPACE, key=key)
    if isinstance(kept, protobuf.Value):
        pair.value = kept
    else:
        pair.type = kept
    return json_rules_v3.JsonToMetadataRule(
        selectors=[json_rules_v3.JsonToMetadataSelector(key=step) for step in path.split(".")],
        on_present=pair,
    )


def _named(name: str, message: betterproto2.Message) -> hcm_v3.HttpFilter:
    return hcm_v3.HttpFilter(name=name, typed_config=packed(message))


# The most that Envoy reads at once; no message to the picker holds a larger part of a body.
_CHUNK_BYTES = 1024 * 1024
# Envoy buffers whole bodies for retries (G9), and, outside `standard`, JSON answers to read their usage; it
# answers 500 in place of a longer answer there.
_BODY_BYTES = 32 * 1024 * 1024
# Limits of a client's connection; the windows bound how much Envoy buffers of bodies the picker has not read.
_STREAMS = 128
_STREAM_WINDOW_BYTES = 256 * 1024
_CONNECTION_WINDOW_BYTES = 1024 * 1024
_NEVER = seconds(0)
_HEADERS_S = 10.0  # from a request's first byte to the end of its headers
_BODY_S = 60.0  # time for a client to send its whole body, and to read the end of its answer
_IDLE_S = 120.0  # for a connection without requests; balancers in front usually allow 60 s
_SILENT_S = 3600.0  # for a request that transfers no byte in either direction
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
    client_rate: int | None,
    pool: str | None = None,
    origins: Sequence[str] = (),
) -> listener_v3.Listener:
    """The listener for `mode` at `listen` (host, port). Clients may set the `trusted` steering headers; each
    client address may begin `client_rate` requests a second (None: no limit).

    Web pages of `origins` may read answers. All requests are for `pool`; if None, their hosts name the pool.
    """
    manager = _manager(
        *(mode, settings, trusted),
        debug_headers=debug_headers,
        client_rate=client_rate,
        pool=pool,
        origins=origins,
    )
    made = _listener(mode if pool is None else f"{mode}-{pool}", listen, manager)
    made.per_connection_buffer_limit_bytes = _CHUNK_BYTES
    return made


def _listener(
    name: str, listen: tuple[str, int], manager: hcm_v3.HttpConnectionManager
) -> listener_v3.Listener:
    http = listener_v3.Filter(
        name="envoy.filters.network.http_connection_manager", typed_config=packed(manager)
    )
    chain = listener_v3.FilterChain(filters=[http])
    return listener_v3.Listener(name=name, address=address(*listen), filter_chains=[chain])


# Envoy adds the session token, if the picker issues one (picker_fleet/scheduling/chooser.py), and the queue
# pressure to answers. In `standard` the picker itself sets both headers.
_PICKER_HEADERS = {
    SESSION_HEADER: f"%DYNAMIC_METADATA({PICKER_NAMESPACE}:session)%",
    PRESSURE_HEADER: f"%DYNAMIC_METADATA({PICKER_NAMESPACE}:pressure)%",
}


def _debug(namespace: str) -> dict[str, str]:
    """Answer headers for debugging: the picker's choice, as header and metadata, and the serving endpoint."""
    return {
        "x-picker-header": f"%REQ({DESTINATION_HEADER})%",
        "x-picker-endpoint": f"%DYNAMIC_METADATA({namespace}:{DESTINATION_HEADER})%",
        "x-picker-served": "%UPSTREAM_REMOTE_ADDRESS%",
        "x-picker-request-id": "%REQ(x-request-id)%",
    }


# Headers that SDKs in browsers send, and headers that they may read.
_CORS_HEADERS = (
    "authorization,content-type,x-api-key,api-key,anthropic-version,anthropic-beta,"
    "anthropic-dangerous-direct-browser-access,openai-organization,openai-project,openai-beta,x-request-id,"
    "x-session-token,x-workload-context,x-stainless-arch,x-stainless-async,x-stainless-helper-method,"
    "x-stainless-lang,x-stainless-os,x-stainless-package-version,x-stainless-poll-helper,"
    "x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout"
)
_CORS_EXPOSED = f"x-request-id,retry-after,{SESSION_HEADER},{PRESSURE_HEADER}"


def _cors(origins: Iterable[str]) -> cors_v3.CorsPolicy:
    """The CORS policy for web pages of `origins`; `*` allows any origin."""
    return cors_v3.CorsPolicy(
        allow_origin_string_match=[
            matcher_v3.StringMatcher(safe_regex=matcher_v3.RegexMatcher(regex=".*"))
            if origin == "*"
            else matcher_v3.StringMatcher(exact=origin)
            for origin in origins
        ],
        allow_methods="GET,HEAD,POST,PUT,DELETE,OPTIONS",
        allow_headers=_CORS_HEADERS,
        expose_headers=_CORS_EXPOSED,
        max_age="7200",
    )


# Keeps the client's own x-request-id, to return it with the answer: Envoy replaces x-request-id.
_CLIENT_ID = "x-client-request-id"
_RETURNED_ID = {"x-request-id": f"%REQ({_CLIENT_ID})%"}


def _manager(
    mode: Mode,
    settings: Settings,
    trusted: Iterable[str],
    *,
    debug_headers: bool,
    client_rate: int | None,
    pool: str | None,
    origins: Sequence[str],
) -> hcm_v3.HttpConnectionManager:
    # Envoy's request timeout includes the time in the queue.
    waits_s = _longest_wait_s(settings) + _BODY_S
    manager = hcm_v3.HttpConnectionManager(
        stat_prefix=mode,
        # Envoy would let clients with internal addresses keep their own x-request-id, but only Envoy may set
        # request ids. An empty list means all private addresses, so list an address that no client can have.
        use_remote_address=True,
        internal_address_config=hcm_v3.HttpConnectionManagerInternalAddressConfig(
            cidr_ranges=[core_v3.CidrRange(address_prefix="255.255.255.255", prefix_len=32)]
        ),
        generate_request_id=True,
        preserve_external_request_id=False,
        # Remove untrusted steering headers before any filter reads them.
        early_header_mutation_extensions=[
            extension(
                "envoy.http.early_header_mutation.header_mutation",
                early_mutation_v3.HeaderMutation(
                    mutations=[
                        *(mutation_rules_v3.HeaderMutation(remove=name) for name in untrusted(trusted)),
                        mutation_rules_v3.HeaderMutation(remove=_CLIENT_ID),
                        mutation_rules_v3.HeaderMutation(remove=LENGTH_HEADER),
                        *(
                            mutation_rules_v3.HeaderMutation(append=option)
                            for option in _added(
                                {_CLIENT_ID: "%REQ(x-request-id)%", LENGTH_HEADER: "%REQ(content-length)%"}
                            )
                        ),
                    ]
                ),
            )
        ],
        http2_protocol_options=core_v3.Http2ProtocolOptions(
            max_concurrent_streams=_STREAMS,
            initial_stream_window_size=_STREAM_WINDOW_BYTES,
            initial_connection_window_size=_CONNECTION_WINDOW_BYTES,
        ),
        # The picker decides how long a request waits, and a model may be silent for long between bytes.
        stream_idle_timeout=seconds(max(_SILENT_S, waits_s)),
        # Disconnect a client that sends or reads too slowly, so that it does not hold an endpoint's slot
        # for ever.
        request_headers_timeout=seconds(_HEADERS_S),
        request_timeout=seconds(waits_s),
        stream_flush_timeout=seconds(_BODY_S),
        common_http_protocol_options=core_v3.HttpProtocolOptions(idle_timeout=seconds(_IDLE_S)),
        # Accept HTTP/1.0 clients, which need not send a Host.
        http_protocol_options=core_v3.Http1ProtocolOptions(
            accept_http_10=True, default_host_for_http_10=settings.pool
        ),
        # Give Envoy's routes, the picker and the model server the same normalised path. Keep escaped slashes:
        # the allowed paths have them only in model names.
        normalize_path=True,
        merge_slashes=True,
        path_with_escaped_slashes_action=hcm_v3.HttpConnectionManagerPathWithEscapedSlashesAction.KEEP_UNCHANGED,
        route_config=_routes(mode, settings, debug_headers=debug_headers, pool=pool),
        http_filters=_http_filters(mode, settings, pool, client_rate),
        local_reply_config=hcm_v3.LocalReplyConfig(
            mappers=[
                _any_mapper(503, _EQ, _added({"retry-after": "1"}, _IF_ABSENT)),
                *(_status_mapper(carried, status) for status, carried in CARRIED.items() if mode == "http"),
                _any_mapper(),
            ]
        ),
    )
    if origins:
        manager.http_filters.insert(0, _named(_CORS, cors_v3.Cors()))
        assert manager.route_config is not None
        for host in manager.route_config.virtual_hosts:
            host.typed_per_filter_config = {_CORS: packed(_cors(origins))}
    if mode == "standard":
        # The picker reads the answer, but cannot tell an answer that was cut from a client that left.
        manager.access_log = [_access_log(_cut())]
    else:
        manager.access_log = [_access_log()]
        manager.access_log_options = hcm_v3.HttpConnectionManagerHcmAccessLogOptions(
            access_log_flush_interval=seconds(settings.leases.access_log_interval)
        )
    return manager


def _status_mapper(carried: int, status: int) -> hcm_v3.ResponseMapper:
    """Maps a refusal's `carried` status, sent in place of the real one, to the real `status`."""
    mapper = _any_mapper(carried, _EQ)
    mapper.status_code = status
    return mapper


def _any_mapper(
    status: int = 100,
    op: accesslog_v3.ComparisonFilterOp = accesslog_v3.ComparisonFilterOp.GE,
    added: Sequence[core_v3.HeaderValueOption] = (),
) -> hcm_v3.ResponseMapper:
    """Adds the client's x-request-id and `added` to Envoy's own answers whose status is `op` `status`."""
    return hcm_v3.ResponseMapper(filter=_status(op, status), headers_to_add=[*_added(_RETURNED_ID), *added])


def _routes(
    mode: Mode, settings: Settings, *, debug_headers: bool, pool: str | None
) -> route_v3.RouteConfiguration:
    pools = pools_of(settings)
    if pool is not None:
        hosts = [_host(settings, pools[pool], ("*",), mode)]
    else:
        # Match the pool's name, alone or as a first label: `batch`, `batch:8080`, `batch.example.org`.
        hosts = [
            _host(settings, each, ("*",) if name == settings.pool else (name, f"{name}:*", f"{name}.*"), mode)
            for name, each in pools.items()
        ]
    return route_v3.RouteConfiguration(
        name=POOL,
        virtual_hosts=hosts,
        request_headers_to_remove=[LENGTH_HEADER],
        response_headers_to_add=_added(
            _RETURNED_ID
            | (_PICKER_HEADERS if mode == "lean" else {})
            | (_debug(settings.extproc.metadata_namespace) if debug_headers else {})
        ),
    )


def _host(settings: Settings, pool: Settings, domains: Sequence[str], mode: Mode) -> route_v3.VirtualHost:
    """The virtual host that routes `domains` to `pool`; `settings` are the fleet's."""
    cluster = cluster_of(pool.pool, settings.pool)
    metadata = None
    if settings.pools:
        named = protobuf.Struct.from_dict({"pool": pool.pool})
        metadata = core_v3.Metadata(filter_metadata={PICKER_NAMESPACE: named})
    return route_v3.VirtualHost(
        name=cluster,
        domains=list(domains),
        routes=_ways(settings, mode, cluster, metadata),
        # Envoy drops content-length when the picker returns a body: restore it from LENGTH_HEADER.
        request_headers_to_add=_added({"content-length": f"%REQ({LENGTH_HEADER})%"})
        if mode == "lean"
        else [],
        request_body_buffer_limit=max(_BODY_BYTES, settings.extproc.max_body_bytes),
        # Retry an attempt that fails before its first byte: the endpoint dies, answers 5xx, is full (429), or
        # redirects. Try each endpoint that the picker lists once. In `standard` a 429 is not retried: the
        # picker sees only the last answer, and must learn that the endpoint is full.
        retry_policy=_other_hosts(
            f"{_NOT_SENT},reset,5xx,retriable-status-codes",
            pool.scheduling.fallbacks,
            _REDIRECTS if mode == "standard" else (*_REDIRECTS, 429),
        ),
    )


_NOT_SENT = "connect-failure,refused-stream,reset-before-request"
_REDIRECTS = (300, 301, 302, 303, 307, 308)


def _other_hosts(retry_on: str, tries: int, statuses: Sequence[int] = ()) -> route_v3.RetryPolicy:
    """A policy of up to `tries` retries, each on a host that has not been tried."""
    return route_v3.RetryPolicy(
        retry_on=retry_on,
        retriable_status_codes=list(statuses),
        num_retries=tries,
        retry_host_predicate=[
            route_v3.RetryPolicyRetryHostPredicate(
                name="envoy.retry_host_predicates.previous_hosts",
                typed_config=packed(previous_hosts_v3.PreviousHostsPredicate()),
            )
        ],
        host_selection_retry_max_attempts=OTHER_HOST_DRAWS,
    )


def _ways(
    settings: Settings, mode: Mode, cluster: str, metadata: core_v3.Metadata | None
) -> list[route_v3.Route]:
    """The routes of the paths that model servers get; other paths get 404, or pass if so configured."""
    passes = settings.extproc.unknown_paths == "pass"
    routes = []
    for (methods, is_session), paths in Paths(settings.extproc.paths).routes.items():
        headers = [] if methods == ANY_METHOD else _method(*methods.split(","))
        for end in ("", "/"):
            match = route_v3.RouteMatch(
                safe_regex=matcher_v3.RegexMatcher(regex=f"(?:{paths}){end}"), headers=headers
            )
            action = route_v3.RouteAction(cluster=cluster, timeout=_NEVER)
            if end:  # remove the final slash: servers answer it with a redirect or 404
                action.regex_rewrite = matcher_v3.RegexMatchAndSubstitute(
                    pattern=matcher_v3.RegexMatcher(regex="/$"), substitution=""
                )
            route = route_v3.Route(match=match, route=action, metadata=metadata)
            if is_session:
                action.upgrade_configs = [route_v3.RouteActionUpgradeConfig(upgrade_type="websocket")]
                if mode == "lean":  # WebSocket messages do not pass through the picker
                    route.typed_per_filter_config = {_EXT_PROC: packed(_HEADERS_ALONE)}
            routes.append(route)
    if passes:
        # The picker refuses administrative paths in any spelling. Envoy must, too, while no picker answers
        # (`extproc.on_failure`); it does not decode paths, so it refuses every unusual spelling.
        any_spelling = matcher_v3.RegexMatcher(regex=f"(?i)/(?:{ADMINISTRATION})/*|.*[%;\\\\].*")
        routes.append(_not_found(route_v3.RouteMatch(safe_regex=any_spelling)))
        rest = route_v3.RouteAction(cluster=cluster, timeout=_NEVER)
        routes.append(route_v3.Route(match=route_v3.RouteMatch(prefix="/"), route=rest, metadata=metadata))
    else:
        routes.append(_not_found(route_v3.RouteMatch(prefix="/")))
    return routes


_HEADERS_ALONE = ext_proc_v3.ExtProcPerRoute(
    overrides=ext_proc_v3.ExtProcOverrides(
        processing_mode=ext_proc_v3.ProcessingMode(
            request_header_mode=_SEND,
            request_body_mode=_NONE,
            request_trailer_mode=_SKIP,
            response_header_mode=_SKIP,
            response_body_mode=_NONE,
            response_trailer_mode=_SKIP,
        )
    )
)


def _method(*names: str) -> list[route_v3.HeaderMatcher]:
    regex = matcher_v3.RegexMatcher(regex="|".join(names))
    return [route_v3.HeaderMatcher(name=":method", string_match=matcher_v3.StringMatcher(safe_regex=regex))]


def _not_found(match: route_v3.RouteMatch) -> route_v3.Route:
    """A route that Envoy answers with 404, without reading the body or calling a picker."""
    return route_v3.Route(
        match=match,
        direct_response=route_v3.DirectResponseAction(
            status=404, body=core_v3.DataSource(inline_bytes=_NOT_FOUND)
        ),
        response_headers_to_add=_added({"content-type": "application/json"}),
        typed_per_filter_config={
            name: packed(route_v3.FilterConfig(disabled=True)) for name in _BODY_READERS
        },
    )


_ONCE = core_v3.HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
_IF_ABSENT = core_v3.HeaderValueOptionHeaderAppendAction.ADD_IF_ABSENT


def _added(
    texts: Mapping[str, str], how: core_v3.HeaderValueOptionHeaderAppendAction = _ONCE
) -> list[core_v3.HeaderValueOption]:
    """Options that set each header of `texts`; Envoy omits a header whose value is empty."""
    return [
        core_v3.HeaderValueOption(header=core_v3.HeaderValue(key=key, value=text), append_action=how)
        for key, text in texts.items()
    ]


def _cut(*more: str) -> accesslog_v3.AccessLogFilter:
    """An access-log filter for answers that the endpoint cut off, or that have one of the flags `more`."""
    flags = accesslog_v3.ResponseFlagFilter(flags=["UC", "UR", "UPE", *more])
    return accesslog_v3.AccessLogFilter(response_flag_filter=flags)


def _failed_attempts() -> accesslog_v3.AccessLogFilter:
    """An access-log filter for attempts that failed at the endpoint, or found it full (429)."""
    redirects = _and(_status(_GE, 300), _status(_LE, 399))
    filters = [_status(_GE, 500), _status(_EQ, 429), redirects, _cut("UF")]
    return accesslog_v3.AccessLogFilter(or_filter=accesslog_v3.OrFilter(filters=filters))


_EQ, _GE, _LE = (getattr(accesslog_v3.ComparisonFilterOp, name) for name in ("EQ", "GE", "LE"))


def _and(*filters: accesslog_v3.AccessLogFilter) -> accesslog_v3.AccessLogFilter:
    return accesslog_v3.AccessLogFilter(and_filter=accesslog_v3.AndFilter(filters=list(filters)))


def _status(op: accesslog_v3.ComparisonFilterOp, status: int) -> accesslog_v3.AccessLogFilter:
    value = core_v3.RuntimeUInt32(default_value=status, runtime_key=f"picker.status_{status}")
    comparison = accesslog_v3.ComparisonFilter(op=op, value=value)
    return accesslog_v3.AccessLogFilter(
        status_code_filter=accesslog_v3.StatusCodeFilter(comparison=comparison)
    )


_FAULT = tracing_v3.CustomTagLiteral(value="1")


def _access_log(only: accesslog_v3.AccessLogFilter | None = None) -> accesslog_v3.AccessLog:
    """Access log to any one replica. With `only`, log the faults that pass this filter; without, log each
    request at its end and once per flush interval before."""
    marks = [] if only is None else [tracing_v3.CustomTag(tag=FAULT_TAG, literal=_FAULT)]
    return accesslog_v3.AccessLog(
        filter=only,
        name="envoy.access_loggers.http_grpc",
        typed_config=packed(
            grpc_access_log_v3.HttpGrpcAccessLogConfig(
                additional_response_headers_to_log=[CONTENT_TYPE if only is None else RETRY_AFTER],
                common_config=grpc_access_log_v3.CommonGrpcAccessLogConfig(
                    log_name="picker",
                    transport_api_version=core_v3.ApiVersion.V3,
                    buffer_size_bytes=0,  # send each entry at once: it releases a request in flight
                    grpc_service=picker_grpc(),
                    grpc_stream_retry_policy=_redrive(),
                    custom_tags=marks,
                ),
            )
        ),
    )


_ADMIN = "admin"
_SLOW_S = 15.0  # for a client to send a whole request, and between events, which come each second
_ADMIN_TRIES = 2


def admin_listener(listen: tuple[str, int]) -> listener_v3.Listener:
    """The operators' listener at `listen` (host, port)."""
    # Retry any failed read, but a change only if no replica has received it.
    routes = [_admin_route(f"{_NOT_SENT},reset", _method("GET")), _admin_route(_NOT_SENT, [])]
    manager = hcm_v3.HttpConnectionManager(
        stat_prefix=_ADMIN,
        use_remote_address=True,  # adds x-forwarded-for, so that replicas treat no client as local
        request_headers_timeout=seconds(_SLOW_S),
        request_timeout=seconds(_SLOW_S),
        stream_idle_timeout=seconds(_SLOW_S),
        common_http_protocol_options=core_v3.HttpProtocolOptions(idle_timeout=seconds(_IDLE_S)),
        route_config=route_v3.RouteConfiguration(
            name=_ADMIN, virtual_hosts=[route_v3.VirtualHost(name=_ADMIN, domains=["*"], routes=routes)]
        ),
        http_filters=[_named(_ROUTER, router_v3.Router())],
    )
    return _listener(_ADMIN, listen, manager)


def _admin_route(retry_on: str, headers: list[route_v3.HeaderMatcher]) -> route_v3.Route:
    """Route all paths of requests with `headers` to a replica; retry on another as `retry_on` says."""
    return route_v3.Route(
        match=route_v3.RouteMatch(prefix="/", headers=headers),
        route=route_v3.RouteAction(
            cluster=PICKER_ADMIN,
            timeout=_NEVER,  # event streams do not end; replicas limit their other answers themselves
            retry_policy=_other_hosts(retry_on, _ADMIN_TRIES),
        ),
    )
