"""The paths that reach a model server, and the request headers that a client may set (docs/security.md).

The picker applies these rules to each request; the configuration and Envoy's routes follow the same rules.

Each row of `APIS` is an API of an engine. A row matches whole segments at the end of a path, so that a
route may strip a prefix later. The client's path, up to the `?` and without one trailing slash, is compared
byte for byte. Model servers get the path unchanged, so a path that needs normalising (`//`, `..`, `%2e`,
`;x=1`) matches no row. Requests that could administer an engine are refused in any spelling.

Steering headers decide a request's flow, band or model. Steering headers, and the headers of `tenants`, count
only if trusted. The setting `extproc.trusted_headers` lists the trusted headers for the picker; the Envoy
that `picker envoy-config` sets up removes all steering headers except the headers in `--trust-headers`. A
trusted header is trusted in both spellings, `x-gateway-…` and `x-llm-d-…`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple
from urllib.parse import parse_qsl, unquote

# Regexes of a path segment and of a model's name. Segment and name may have `:`, `@` and `+` percent-encoded;
# a model's name may also have an encoded slash, if a letter or digit follows.
_SEGMENT = "[A-Za-z0-9_~-](?:[A-Za-z0-9._:@+=~-]|%3[Aa]|%40|%2[Bb])*"
_NAME = "[A-Za-z0-9](?:[A-Za-z0-9._:@+=~-]|%3[Aa]|%40|%2[Bb]|%2[Ff][A-Za-z0-9])*"
_NAMES = f"{_NAME}(?:/{_NAME})*"
_PREFIX = f"(?:/{_SEGMENT})*"
_MOST_SEGMENTS = 32
_MOST_QUERY_FIELDS = 64
_MAX_PATH_BYTES = 2048
NOT_LISTED = "this method and path are not on the list of allowed paths"  # the refusal's message
_ENTRY = re.compile(
    r"(\*|[A-Z]+(?:,[A-Z]+)*) "
    r"(/|(?:/(?:[A-Za-z0-9_~:@+=-]|\{[a-z]+\})(?:[A-Za-z0-9._~:@+=-]|\{[a-z]+\})*)+/?)"
)
_PLACEHOLDER = re.compile(r"(\{[a-z]+\})")
_GROUP = re.compile(r"\?P<[a-z]+>")
ANY_METHOD: Final = "*"

# How a request is served. An `inference` request needs admission and a body, a `session` needs admission and
# has no body (a WebSocket, in flight while it is open), a `read` needs no admission.
Kind = Literal["inference", "session", "read"]
Source = Literal["body", "form", "path", "query"]


class Api(NamedTuple):
    """Methods and path of an engine's API. `path` is the end of the path, in whole segments, where `{model}`
    stands for a model's name, `{ref}` for an id of state that one server has, `{id}` for any other id.

    `source` says where the request names its model: in the JSON body (or else the path), in a form's field,
    only in the path, or in the query. If `is_whole`, `path` is the whole path, because the path's end alone
    is too common.
    """

    methods: str
    path: str
    kind: Kind = "inference"
    source: Source = "body"
    is_whole: bool = False

    @property
    def end(self) -> str:
        """The regex for the end of a path."""
        pieces = [piece for piece in _PLACEHOLDER.split(self.path) if piece]
        return "".join(
            _placeholder(piece[1:-1], is_last=at == len(pieces) - 1) if piece[0] == "{" else re.escape(piece)
            for at, piece in enumerate(pieces)
        )

    @property
    def regex(self) -> str:
        """The regex for a whole path without its query and trailing slash, for both RE2 and Python."""
        return self.end if self.is_whole else _PREFIX + self.end

    def takes(self, method: str) -> bool:
        return self.methods == ANY_METHOD or method in self.methods.split(",")


def _placeholder(name: str, *, is_last: bool) -> str:
    name = name if name in ("model", "ref") else ""
    return f"({f'?P<{name}>' if name else '?:'}{_NAMES if is_last else _NAME})"


def _apis(
    kind: Kind, methods: str, paths: str, source: Source = "body", *, whole: bool = False
) -> tuple[Api, ...]:
    return tuple(Api(methods, f"/{path.lstrip('/')}", kind, source, whole) for path in paths.split())


_READS = "GET,HEAD"
APIS: Final = (
    # The APIs of OpenAI and Anthropic, and additions of vLLM, SGLang, llama.cpp and TGI.
    *_apis("inference", "POST", "chat/completions completions responses messages messages/count_tokens"),
    *_apis("inference", "POST", "embeddings score tokenize detokenize classify pooling moderations"),
    *_apis("inference", "POST,PUT", "rerank reranking"),
    *_apis("inference", "POST", "chat/completions/render completions/render responses/compact"),
    *_apis("inference", "POST", "audio/speech images/generations inference/v1/generate"),
    *_apis("inference", "POST", "audio/transcriptions audio/translations", source="form"),
    *_apis("inference", "POST", "images/edits images/variations", source="form"),
    *_apis("inference", "POST", "v2/embed embed embed_all embed_sparse predict similarity"),  # Cohere, TEI
    *_apis("inference", "POST", "completion infill embedding apply-template"),  # llama.cpp
    *_apis("inference", "POST", "generate_stream chat_tokenize"),  # TGI
    *_apis("inference", "POST", "vertex_generate invocations invocations-response-stream"),
    *_apis("inference", "POST", "api/chat api/generate api/embed api/embeddings"),  # Ollama
    *_apis("inference", "POST,PUT", "generate encode", whole=True),  # SGLang
    *_apis("inference", "POST", "/", whole=True),  # TGI
    *_apis("session", "GET", "realtime", source="query"),
    *_apis(
        "inference", "POST",
        "openai/deployments/{model}/chat/completions openai/deployments/{model}/completions"
        " openai/deployments/{model}/embeddings openai/deployments/{model}/images/generations"
        " openai/deployments/{model}/audio/speech",
    ),
    *_apis(
        "inference", "POST",
        "openai/deployments/{model}/audio/transcriptions openai/deployments/{model}/audio/translations"
        " openai/deployments/{model}/images/edits",
        source="form",
    ),
    *_apis(  # the APIs of Triton, KServe, Gemini, Vertex and Bedrock
        "inference", "POST",
        "v2/models/{model}/infer v2/models/{model}/generate v2/models/{model}/generate_stream"
        " v2/models/{model}/versions/{id}/infer v2/models/{model}/versions/{id}/generate"
        " v2/models/{model}/versions/{id}/generate_stream models/{model}:predict models/{model}:explain"
        " models/{model}:generateContent models/{model}:streamGenerateContent models/{model}:countTokens"
        " models/{model}:embedContent models/{model}:batchEmbedContents models/{model}:rawPredict"
        " models/{model}:streamRawPredict endpoints/{id}:predict model/{model}/invoke"
        " model/{model}/invoke-with-response-stream model/{model}/converse model/{model}/converse-stream",
        source="path",
    ),
    *_apis("read", _READS, "models models/{model} responses/{ref}/input_items tokenizer_info get_model_info"),
    *_apis("read", "GET,HEAD,DELETE", "responses/{ref}"),
    *_apis("read", "POST", "responses/{ref}/cancel conversations api/show"),
    *_apis("read", "GET,HEAD,POST,DELETE", "conversations/{ref} conversations/{ref}/items"),
    *_apis("read", "GET,HEAD,DELETE", "conversations/{ref}/items/{id}"),
    *_apis("read", _READS, "api/tags api/version api/ps v2/health/live v2/health/ready"),
    *_apis("read", _READS, "v2/models/{model}/ready v2/models/{model}/config"),
    *_apis("read", _READS, "load info version model_info", whole=True),
    *_apis("read", "GET,HEAD,POST", "ping", whole=True),
)  # fmt: skip

_WEIGHTS: Final = r"\w*_?weights?(?:_\w+)?"
# Paths (whole, in lower case) that administer an engine or show other clients' requests.
ADMINISTRATION: Final = (
    r"(?:.*/)?(?:sleep|is_sleeping|wake_?up|pause|resume|is_paused|shutdown|kill|collective_rpc|slow_down"
    r"|metrics|slots(?:/[^/]*)?|props|lora-adapters|server_info|get_server_info|cluster_info|freeze_gc|dumper"
    r"|(?:un)?load_\w+|(?:start|stop|dump|end|finish|abort|pause|continue|resume|release|destroy)_\w+"
    rf"|(?:flush|reset|clear)_\w+|{_WEIGHTS}|init_\w+|scale_\w+|is_scaling_\w+|configure_\w+"
    r"|(?:open|close)_session|(?:get|set)_(?:internal_state|world_size|trace_level)|(?:add|remove)_external\w+"
    r"|kv_cache_events|perf_metrics|models/(?:un)?load|trace/setting"
    r"|api/(?:pull|push|create|copy|delete|blobs/.*)|v1/(?:un)?load)"
    r"|(?:.*/)?(?:v2/(?:repository|logging|trace|systemsharedmemory|cudasharedmemory|tpusharedmemory)"
    r"|hicache|debug|dumper)(?:/.*)?"
)
# In Python, `_WEIGHTS` takes time by the square of a segment that repeats `weights_`: look for it apart.
_ADMINISTERS: Final = re.compile(ADMINISTRATION.replace(f"|{_WEIGHTS}", ""))
_WORD, _OF_WEIGHTS = re.compile(r"\w+"), re.compile(r"weights?(?:_\w|\Z)")
_WRITTEN_LISTS: Final = re.compile(r"(?:.*/)?(?:models|adapters)(?:/[^/:]+)?")  # SageMaker: read-only
_SAFE_METHODS: Final = frozenset(("GET", "HEAD", "OPTIONS"))
_MOST_DECODINGS = 4


def _resolved(path: str) -> tuple[str, bool] | None:
    """Normalise `path` as a server may: decoded, in lower case, without empty and dot segments, parameters
    and first slash. Also returns whether all servers agree on `path`; None for a `path` encoded too often."""
    for _ in range(_MOST_DECODINGS):
        decoded = unquote(path, "latin-1")
        if decoded == path:
            break
        path = decoded
    else:
        return None
    is_clear = "\\" not in path and path.isprintable()
    segments: list[str] = []
    for segment in path.lower().replace("\\", "/").split("/"):
        name = segment.partition(";")[0].strip()
        if name in (".", ".."):
            is_clear = False
        elif name:
            segments.append(name)
    return "/".join(segments), is_clear


def administers(method: str, path: str) -> bool:
    """Whether a request for `path` (without its query) could administer an engine, behind any prefix and in
    any spelling. Dot segments are ignored: they cannot change the last name."""
    resolved = _resolved(path)
    if resolved is None:
        return True
    if method not in _SAFE_METHODS and _WRITTEN_LISTS.fullmatch(resolved[0]):
        return True
    last = resolved[0].rpartition("/")[2]
    if _WORD.fullmatch(last) and _OF_WEIGHTS.search(last):
        return True
    return _ADMINISTERS.fullmatch(resolved[0]) is not None


class Way(NamedTuple):
    """How a request is served, by its method and path. `model` is the model in the path, or ''. `is_known`
    is False for a path of no API, which needs no model (`extproc.unknown_paths: pass`). `has_state`: servers
    store this API's results under ids. `ref` is the id in the path, or ''. `can_split`: another endpoint may
    prefill the prompt, because llm-d's sidecar reads the header of the prefill endpoint on this path.
    `generates`: the answer has generated tokens."""

    kind: Kind
    source: Source = "body"
    model: str = ""
    is_known: bool = True
    has_state: bool = False
    ref: str = ""
    can_split: bool = False
    generates: bool = True


_SPLIT: Final = ("/chat/completions", "/completions", "/responses")
_NO_ANSWER: Final = frozenset((  # ends of paths (`_end`) whose answers have no generated tokens
    *("embeddings", "embedding", "embed", "embed_all", "embed_sparse", "pooling", "encode", "similarity"),
    *("rerank", "reranking", "score", "classify", "moderations", "predict", "count_tokens", "render"),
    *("tokenize", "detokenize", "chat_tokenize", "apply-template"),
    *(":embedContent", ":batchEmbedContents", ":countTokens"),
))  # fmt: skip
_OF_STATE: Final = ("responses", "conversations")  # path segments of the Responses API


def has_state(path: str) -> bool:
    """Whether `path` may belong to the Responses API."""
    return _OF_STATE[0] in path or _OF_STATE[1] in path


def api_of(text: object) -> Api:
    """Parse an entry of `extproc.paths`, such as `POST /v1/classify`, `GET,PUT /adapters/{id}/state` or `*
    /v1/x:y`.

    A path that ends in the path of a row of `APIS` is served as that row.

    Raises:
        ValueError: the text is no method and path, needs normalising, has two models or administers engines.
    """
    if isinstance(text, Api):
        return text
    match = _ENTRY.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{str(text)[:60]!r} is no method and path; write POST /v1/classify or GET /version")
    methods, path = match[1], match[2].rstrip("/").replace("{ref}", "{id}") or "/"
    if path.count("{model}") > 1:
        raise ValueError(f"{text!r} has {{model}} twice; write {{id}} for a segment that names no model")
    example = _PLACEHOLDER.sub("x", path)
    if any(administers(method, example) for method in methods.split(",")):
        raise ValueError(f"{text!r} administers the model server, which no client may do")
    for api in _longest_first(APIS):
        alike = methods == ANY_METHOD or any(api.takes(method) for method in methods.split(","))
        if alike and re.fullmatch(_PREFIX + api.end, example):
            return api._replace(methods=methods, path=_with_ref(path, api.path), is_whole=True)
    is_read = methods != ANY_METHOD and _SAFE_METHODS.issuperset(methods.split(","))
    return Api(methods, path, "read" if is_read else "inference", is_whole=True)


def _with_ref(path: str, like: str) -> str:
    """The paths `path` and `like` end alike: rename the placeholder of `path` that stands where `like` has
    `{ref}` to `{ref}`."""
    ends = like.split("/")
    if "{ref}" not in ends:
        return path
    segments, at = path.split("/"), ends.index("{ref}") - len(ends)
    if _PLACEHOLDER.fullmatch(segments[at]):
        segments[at] = "{ref}"
    return "/".join(segments)


def _longest_first(apis: Iterable[Api]) -> list[Api]:
    return sorted(apis, key=lambda api: -api.path.count("/"))


class Paths:
    """The allowed paths: rows of `APIS`, `configured` APIs and, with `passes`, unknown paths."""

    def __init__(self, configured: Iterable[Api] = (), *, passes: bool = False) -> None:
        self.passes = passes
        self.apis = (*configured, *APIS)
        self._by_end: dict[str, list[tuple[Api, re.Pattern[str]]]] = {}
        for api in (*configured, *_longest_first(APIS)):
            self._by_end.setdefault(_end(api.path), []).append((api, re.compile(api.regex)))

    def way(self, method: str, path: str) -> Way | None:
        """How to serve a request for `path` (without its query); None if the picker must refuse it."""
        if len(path) > _MAX_PATH_BYTES or path.count("/") > _MOST_SEGMENTS:
            return None
        bare = path[:-1] if path.endswith("/") and len(path) > 1 else path
        way = self._listed(method, bare)
        if way is not None and (method in _SAFE_METHODS or not administers(method, path)):
            return way
        if not self.passes or not path.startswith("/") or administers(method, path):
            return None
        resolved = _resolved(path)
        return Way("inference", is_known=False) if resolved is not None and resolved[1] else None

    def _listed(self, method: str, path: str) -> Way | None:
        last = path.rpartition("/")[2]
        for end in (last, f":{last.rpartition(':')[2]}", ""):
            for api, pattern in self._by_end.get(end, ()):
                if (api.takes(method) or method == "OPTIONS") and (match := pattern.fullmatch(path)):
                    kind = "read" if method == "OPTIONS" else api.kind
                    named = match.groupdict()
                    model, ref = (unquote(named.get(each) or "") for each in ("model", "ref"))
                    can_split, stores = kind == "inference" and api.path in _SPLIT, has_state(api.path)
                    return Way(kind, api.source, model, True, stores, ref, can_split, end not in _NO_ANSWER)
        return None

    @property
    def routes(self) -> Mapping[tuple[str, bool], str]:
        """The regexes for Envoy's routes, for whole paths without a trailing slash, by the methods and by
        whether the requests are sessions."""
        ways: dict[tuple[str, bool], tuple[list[str], list[str]]] = {}
        for api in self.apis:
            methods = api.methods if api.methods == ANY_METHOD else f"{api.methods},OPTIONS"
            whole, ends = ways.setdefault((methods, api.kind == "session"), ([], []))
            (whole if api.is_whole else ends).append(_GROUP.sub("?:", api.end))
        return {
            way: "|".join([*whole, f"{_PREFIX}(?:{'|'.join(ends)})"] if ends else whole)
            for way, (whole, ends) in ways.items()
        }


def _end(path: str) -> str:
    """The end of a path's last segment: the text after the last placeholder, or all text; may be ''."""
    last = path.rpartition("/")[2]
    return last.rpartition("}")[2] if "{" in last else last


def model_in_query(query: str) -> str:
    """The model in a path's query, or ''.

    Raises:
        ValueError: the query has too many fields, or `model` twice.
    """
    fields = parse_qsl(query, keep_blank_values=True, max_num_fields=_MOST_QUERY_FIELDS)
    models = [value for name, value in fields if name == "model"]
    if len(models) > 1:
        raise ValueError("it has model twice")
    return "".join(models)


FAIRNESS_ID = ("x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id")
OBJECTIVE = ("x-gateway-inference-objective", "x-llm-d-inference-objective")
REWRITE = ("x-gateway-model-name-rewrite", "x-llm-d-model-name-rewrite")
STEERING = (FAIRNESS_ID, OBJECTIVE, REWRITE)

# Only the picker and Envoy set these headers; a value from a client is never trusted.
DESTINATION: Final = "x-gateway-destination-endpoint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
SERVED: Final = "x-gateway-destination-endpoint-served"
PREFILLER: Final = "x-prefiller-host-port"
ENCODERS: Final = "x-encoder-hosts-ports"
# Headers by which llm-d's sidecar also learns hosts (llm-d-router, pkg/common/routing); not set here.
OF_SIDECAR: Final = ("x-data-parallel-host-port", "x-kv-cache-source-host-port", "x-prefiller-url")
NEVER_TRUSTED = (DESTINATION, SUBSET, SERVED, PREFILLER, ENCODERS, *OF_SIDECAR)
# Headers that any client may set for its own request, even if `extproc.trusted_headers` lacks them.
ALWAYS_KEPT = (
    "x-workload-context",
    "x-llm-d-inference-ttl",
    "x-request-timeout",
    "grpc-timeout",
    "x-envoy-expected-rq-timeout-ms",
    "x-session-token",
    "traceparent",
)

_TRUSTABLE = frozenset((*ALWAYS_KEPT, *(name for pair in STEERING for name in pair)))
# Headers of an operator's own, such as `x-tenant`: no header with a meaning to the picker, Envoy or clients.
_CUSTOM = re.compile(
    r"x-(?!(?:client-)?request-|forwarded|envoy-|gateway-|llm-d-|picker-|queue-|ratelimit-|slo-|session-"
    r"|workload-|prefiller-|encoder-|api-key|real-ip|stainless-|should-retry)[a-z0-9_-]{1,61}"
)


def is_custom(name: object) -> bool:
    """Whether `name` is the lower-case name of a header that operators may use for tenants."""
    return isinstance(name, str) and _CUSTOM.fullmatch(name) is not None and name not in NEVER_TRUSTED


def trusted_name(value: object) -> str:
    """`value` as the lower-case name of a header that can be trusted.

    Raises:
        ValueError: the header cannot be trusted; the message lists valid ones.
    """
    name = value.strip().lower() if isinstance(value, str) else ""
    if name not in _TRUSTABLE and not is_custom(name):
        valid = ", ".join(spelling for pair in STEERING for spelling in pair)
        why = "is never taken from a client" if name in NEVER_TRUSTED else "is not a steering header"
        raise ValueError(f"{str(value)[:60]!r} {why}; valid: {valid}")
    return name


def stage_header(value: object) -> str:
    """`value` as the lower-case name of a header that may name a request's prefill endpoint or its encoders.

    Raises:
        ValueError: the header has another meaning; the message says which names may be used.
    """
    name = value.strip().lower() if isinstance(value, str) else ""
    if name not in (PREFILLER, ENCODERS) and not is_custom(name):
        raise ValueError(f"{str(value)[:60]!r} is not free; use the default or an x- header of your own")
    return name


def trusted(named: Iterable[str]) -> frozenset[str]:
    """The steering headers that count if the headers `named` are trusted, in both spellings."""
    names = frozenset(named)
    return frozenset(name for pair in STEERING if names & frozenset(pair) for name in pair)


def untrusted(named: Iterable[str], custom: Iterable[str] = ()) -> tuple[str, ...]:
    """The headers that Envoy must remove from a client's request if only the headers `named` are trusted;
    `custom` are the headers of tenants."""
    names = frozenset(named)
    kept = trusted(names)
    steering = (name for pair in STEERING for name in pair if name not in kept)
    return (*steering, *(name for name in custom if name not in names), *NEVER_TRUSTED)
