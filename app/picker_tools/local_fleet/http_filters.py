"""Envoy's HTTP filters for each mode: what it reads itself, what it asks the picker, what it sends on.

The modes (docs/protocol.md): `standard` sends the picker both directions; `lean` the request only;
`headers` no body at all, but what Envoy's own JSON parser found in it.
"""

from collections.abc import Iterable, Mapping, Sequence

from picker_fleet.config import Settings
from picker_fleet.errors import ConfigError
from picker_fleet.header_trust import STEERING
from picker_fleet.intake import wanted_headers
from picker_tools.local_fleet.clusters import picker_grpc
from picker_tools.local_fleet.envoy_types import (
    OTHER_HOST_DRAWS,
    BackoffStrategy,
    ExternalProcessor,
    HeaderForwardingRules,
    HttpFilter,
    HttpStatus,
    JsonContentParser,
    JsonContentParserRuleConfig,
    JsonToMetadata,
    JsonToMetadataKeyValuePair,
    JsonToMetadataMatchRules,
    JsonToMetadataRule,
    JsonToMetadataSelector,
    JsonToMetadataValueType,
    ListStringMatcher,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    PreviousHostsPredicate,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
    RegexMatcher,
    RetryPolicy,
    RetryPolicyRetryHostPredicate,
    Router,
    SseToMetadata,
    SseToMetadataProcessingRules,
    StatusCode,
    StringMatcher,
    Value,
    extension,
    packed,
    seconds,
)
from picker_tools.local_fleet.modes import Mode

USAGE_NAMESPACE = "picker.usage"
REQUEST_NAMESPACE = "picker.request"
PICKER_NAMESPACE = "picker"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"

_EXT_PROC = "envoy.filters.http.ext_proc"
_JSON_TO_METADATA = "envoy.filters.http.json_to_metadata"
READERS = (_EXT_PROC, _JSON_TO_METADATA)  # that want a request's body

# All that may steer: what is not trusted is removed from clients, or passed over by the picker.
_STEERING = frozenset(name for pair in STEERING for name in pair)
_SEND = ProcessingModeHeaderSendMode.SEND
_SKIP = ProcessingModeHeaderSendMode.SKIP
_DUPLEX = ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED
_NONE = ProcessingModeBodySendMode.NONE

# The last event of a Responses API stream repeats the whole answer; the default is 8 KiB.
_MAX_EVENT_BYTES = 4 * 1024 * 1024
# Only `headers` mode is bound by it: while a request waits in the queue, Envoy waits for this one message.
# Envoy takes no longer one; the picker answers before it.
_MESSAGE_TIMEOUT_S = 3600.0
_ANSWER_MARGIN_S = 60.0

# Where usage is: completions and chat, the Responses API, and the latter's last streamed event.
_USAGE_IN_ANSWER = {
    "prompt_tokens": (("usage", "prompt_tokens"), ("usage", "input_tokens")),
    "completion_tokens": (("usage", "completion_tokens"), ("usage", "output_tokens")),
}
_USAGE_IN_EVENTS = {
    "prompt_tokens": (*_USAGE_IN_ANSWER["prompt_tokens"], ("response", "usage", "input_tokens")),
    "completion_tokens": (*_USAGE_IN_ANSWER["completion_tokens"], ("response", "usage", "output_tokens")),
}


def chain(mode: Mode, settings: Settings) -> list[HttpFilter]:
    """The filters of `mode` in the order a request meets them; answers meet them in reverse.

    Raises:
        ConfigError: requests may queue for longer than Envoy waits in this mode.
    """
    longest_s = _MESSAGE_TIMEOUT_S - _ANSWER_MARGIN_S
    if mode == "headers" and settings.fair_request_queue.queue_ttl > longest_s:
        raise ConfigError(
            "fair_request_queue.queue_ttl: in headers mode Envoy waits an hour at most; "
            f"valid: up to {longest_s:g}s"
        )
    filters: list[HttpFilter] = []
    if mode != "standard":  # there the picker reads the answer itself
        filters.append(_named("envoy.filters.http.sse_to_metadata", _sse_usage()))
        filters.append(_named(_JSON_TO_METADATA, _json(read_request=mode == "headers")))
    filters.append(_named(_EXT_PROC, _ext_proc(mode, settings)))
    filters.append(_named("envoy.filters.http.router", Router()))
    return filters


def _ext_proc(mode: Mode, settings: Settings) -> ExternalProcessor:
    namespace = settings.extproc.metadata_namespace
    forwarded = [SUBSET_NAMESPACE]
    if mode == "headers":
        forwarded.append(REQUEST_NAMESPACE)
    elif mode == "standard":
        forwarded.append(namespace)  # with an answer: who served
    return ExternalProcessor(
        grpc_service=picker_grpc(redrive()),
        # A request that goes on without a decision names no endpoint: the pool's own balancing takes it.
        failure_mode_allow=settings.extproc.on_failure == "balance",
        status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
        message_timeout=seconds(_MESSAGE_TIMEOUT_S),
        metadata_options=MetadataOptions(
            forwarding_namespaces=MetadataOptionsMetadataNamespaces(untyped=forwarded),
            receiving_namespaces=MetadataOptionsMetadataNamespaces(untyped=[namespace, PICKER_NAMESPACE]),
        ),
        processing_mode=_processing_mode(mode),
        # Each header costs the picker time; gateways that speak `standard` send them all, so there it is so.
        forward_rules=None if mode == "standard" else _only(wanted_headers(settings) | _STEERING),
    )


def _only(names: Iterable[str]) -> HeaderForwardingRules:
    patterns = [StringMatcher(exact=name) for name in sorted(names)]
    return HeaderForwardingRules(allowed_headers=ListStringMatcher(patterns=patterns))


def _processing_mode(mode: Mode) -> ProcessingMode:
    body = _NONE if mode == "headers" else _DUPLEX
    answer = mode == "standard"
    return ProcessingMode(
        request_header_mode=_SEND,
        request_body_mode=body,
        request_trailer_mode=_SKIP if mode == "headers" else _SEND,
        response_header_mode=_SEND if answer else _SKIP,
        response_body_mode=_DUPLEX if answer else _NONE,
        response_trailer_mode=_SEND if answer else _SKIP,
    )


def redrive() -> RetryPolicy:
    """A request queued on a replica that dies is asked again of another (G7).

    Never of the same one: until its health check fails, a dead replica has the fewest streams and would
    be chosen again and again.
    """
    return RetryPolicy(
        retry_on="reset,connect-failure,unavailable,refused-stream,cancelled,internal",
        num_retries=3,
        retry_back_off=BackoffStrategy(base_interval=seconds(0.05), max_interval=seconds(0.5)),
        retry_host_predicate=[
            RetryPolicyRetryHostPredicate(
                name="envoy.retry_host_predicates.previous_hosts",
                typed_config=packed(PreviousHostsPredicate()),
            )
        ],
        host_selection_retry_max_attempts=OTHER_HOST_DRAWS,
    )


def _sse_usage() -> SseToMetadata:
    rules = [JsonContentParserRuleConfig(rule=rule) for rule in _usage_rules(_USAGE_IN_EVENTS)]
    return SseToMetadata(
        response_rules=SseToMetadataProcessingRules(
            content_parser=extension("envoy.content_parsers.json", JsonContentParser(rules=rules)),
            max_event_size=_MAX_EVENT_BYTES,
        )
    )


def _json(*, read_request: bool) -> JsonToMetadata:
    request = None
    if read_request:
        # Any content type: a body is JSON or the picker refuses it, whatever it says it is.
        request = JsonToMetadataMatchRules(
            rules=_request_rules(),
            allow_empty_content_type=True,
            allow_content_types_regex=RegexMatcher(regex=".*"),
        )
    answer = JsonToMetadataMatchRules(
        rules=_usage_rules(_USAGE_IN_ANSWER),
        allow_content_types_regex=RegexMatcher(regex=r"(?i)application/json\s*(;.*)?"),
    )
    return JsonToMetadata(request_rules=request, response_rules=answer)


def _request_rules() -> list[JsonToMetadataRule]:
    model = _rule(("model",), REQUEST_NAMESPACE, "model")
    model.on_missing = _constant("model", "")
    model.on_error = _constant("error", "invalid-json")
    number = JsonToMetadataValueType.NUMBER
    return [
        model,
        _rule(("stream",), REQUEST_NAMESPACE, "stream"),
        _rule(("max_tokens",), REQUEST_NAMESPACE, "max_tokens", number),
        _rule(("max_completion_tokens",), REQUEST_NAMESPACE, "max_tokens", number),
    ]


def _usage_rules(paths: Mapping[str, Sequence[tuple[str, ...]]]) -> list[JsonToMetadataRule]:
    number = JsonToMetadataValueType.NUMBER
    return [_rule(path, USAGE_NAMESPACE, key, number) for key, ways in paths.items() for path in ways]


def _rule(
    path: tuple[str, ...],
    namespace: str,
    key: str,
    kind: JsonToMetadataValueType = JsonToMetadataValueType.PROTOBUF_VALUE,
) -> JsonToMetadataRule:
    return JsonToMetadataRule(
        selectors=[JsonToMetadataSelector(key=step) for step in path],
        on_present=JsonToMetadataKeyValuePair(metadata_namespace=namespace, key=key, type=kind),
    )


def _constant(key: str, text: str) -> JsonToMetadataKeyValuePair:
    return JsonToMetadataKeyValuePair(
        metadata_namespace=REQUEST_NAMESPACE, key=key, value=Value(string_value=text)
    )


def _named(name: str, message: ExternalProcessor | JsonToMetadata | SseToMetadata | Router) -> HttpFilter:
    return HttpFilter(name=name, typed_config=packed(message))
