"""Which paths reach a model server, and which headers a client may set."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker_fleet.domain.allowlist import (
    FAIRNESS_ID,
    NEVER_TRUSTED,
    OBJECTIVE,
    REWRITE,
    Paths,
    administers,
    api_of,
    trusted,
    untrusted,
)
from picker_fleet.domain.config import parse
from picker_fleet.domain.errors import BadRequest, ConfigError
from picker_fleet.ingress.context import AllowedPaths

PATHS, PASSING = AllowedPaths(), AllowedPaths(passes=True)

# Each case has method and path of a request, how the path is served, and the model that the path names.
SERVED = [
    *(
        ("POST", path, "inference", "")
        for path in (
            "/v1/chat/completions", "/chat/completions", "/team-a/v1/chat/completions",
            "/v1/chat/completions/", "/v1/projects/p/locations/l/endpoints/e/chat/completions",
            "/v1/completions?x=/../metrics", "/v1/rerank", "/tokenize", "/v2/embed", "/classify",
            "/pooling", "/invocations", "/inference/v1/generate", "/generate", "/encode", "/",
            "/generate_stream", "/api/chat", "/api/generate", "/api/embed", "/v1/messages",
        )
    ),
    ("PUT", "/v1/rerank", "inference", ""),
    ("POST", "/openai/deployments/gpt-4o/chat/completions?api-version=1", "inference", "gpt-4o"),
    ("POST", "/v2/models/bert/infer", "inference", "bert"),
    ("POST", "/v2/models/bert/generate", "inference", "bert"),
    ("POST", "/v1beta/models/gemini-2:generateContent", "inference", "gemini-2"),
    ("POST", "/model/anthropic.claude-v2%3A1/invoke", "inference", "anthropic.claude-v2:1"),
    ("GET", "/v1/realtime?model=voice%2Da&x=1", "session", "voice-a"),
    *(
        (method, path, "read", "")
        for method, path in (
            ("GET", "/v1/models"), ("HEAD", "/v1/models"), ("OPTIONS", "/v1/chat/completions"),
            ("GET", "/v1/responses/resp_1"), ("DELETE", "/v1/responses/resp_1"),
            ("POST", "/v1/responses/resp_1/cancel"), ("GET", "/tokenizer_info"), ("GET", "/ping"),
            ("GET", "/version"), ("GET", "/load"), ("GET", "/info"), ("GET", "/v1/conversations/c/items/i"),
        )
    ),
    ("GET", "/v1/models/meta-llama/Llama-3.1:8b", "read", "meta-llama/Llama-3.1:8b"),
    ("GET", "/v1/models/meta-llama%2fLlama-3.1%3A8b", "read", "meta-llama/Llama-3.1:8b"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "kind", "model"), SERVED)
def test_paths_of_the_apis_of_engines_reach_a_server(method: str, path: str, kind: str, model: str) -> None:
    way = PATHS.way(method.encode(), path.encode())
    assert way is not None
    assert (way.kind, way.model) == (kind, model)


ELSEWHERE = {
    b"POST": [b"/v1/models", b"/team-a/generate", b"/x/"],
    b"GET": [b"/v1/chat/completions", b"/x/load", b"/x/version"],
    b"get": [b"/v1/models"],
    b"DELETE": [b"/v1/models/llama"],
    b"CONNECT": [b""],
    b"": [b""],
}
# Spellings that a server, or a proxy before it, might read as another path.
SPELLINGS = {
    b"POST": [
        b"/v1/Completions", b"//v1/completions", b"/v1//completions",
        b"/v1/./completions", b"/v1/x/../completions", b"/v1/completions/../../flush_cache",
        b"/v1/completions%2f..%2f..%2fflush_cache", b"/v1/complet%69ons",
        b"/v1/completions;/../../flush_cache", b"/v1/completions;a=b", b"/v1/completions#/flush_cache",
        b"/v1/completions\x00", b"/v1/completions ", b"/v1/completions\n", b"\\v1\\completions",
        b"http://server/v1/completions", b"/v1/completions//",
    ],
    b"GET": [
        b"/v1/models/..", b"/v1/models/../../metrics", b"/v1/models/llama/../../../metrics",
        b"/v1/models/llama/..%2f..%2f..%2fmetrics", b"/v1/models/llama%2f%2e%2e%2fmetrics",
        b"/v1/models/%252e%252e", b"/v1/models/..;/metrics", b"/v1/models/llama;x",
        b"/v1/models/llama\\..\\metrics", b"/v1/models/llama//x", b"/v1/models/\xff",
        b"/a" * 5000 + b"/v1/models",
    ],
}  # fmt: skip


REFUSED = [(method, path) for table in (ELSEWHERE, SPELLINGS) for method in table for path in table[method]]


@pytest.mark.parametrize(("method", "path"), REFUSED)
def test_a_path_of_no_engines_api_reaches_no_model_server_in_any_spelling(method: bytes, path: bytes) -> None:
    assert PATHS.way(method, path) is None


ADMINISTRATION = [
    "/sleep", "/wake_up", "/collective_rpc", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    "/flush_cache", "/reset_prefix_cache", "/reset_mm_cache", "/start_profile",
    "/update_weights_from_disk", "/abort_request", "/release_memory_occupation", "/pause_generation",
    "/v2/repository/models/m/load", "/v2/repository/index", "/v2/trace/setting",
    "/v2/models/m/trace/setting", "/v2/logging", "/v2/cudasharedmemory/region/r/register", "/api/pull",
    "/api/delete", "/models/load", "/slots/1", "/props", "/lora-adapters", "/metrics", "/models",
    "/adapters/a", "/scale_elastic_ep", "/set_internal_state", "/open_session",
    "/init_weights_update_group",
]  # fmt: skip


def spellings(path: str) -> list[str]:
    """Spellings that some server or proxy might read as `path`."""
    first, last = path[1], path.rpartition("/")[2]
    encoded, twice = f"%{ord(first):02x}", f"%25{ord(first):02X}"
    head = path.removesuffix(last)
    return [
        *(path, f"/team{path}", f"/a/b/c{path}", path.upper(), f"{path}/", f"{path}//", f"/{path}"),
        *(f"/x/.{path}", f"/x/..{path}", f"/{encoded}{path[2:]}", f"/{twice}{path[2:]}", f"{path};a=b"),
        *(f"{path}%2f", f"{path}%3bx", f"/%2e%2e{path}", f"/a%2f{path[1:]}", f"{head}{last.title()}"),
        *(
            path.replace("/", "\\"),
            f"{path}%20",
            f"/v1/chat/completions/..{path}",
            f"{path}/.",
            f"{path}/x/..",
        ),
    ]


@pytest.mark.parametrize(
    "word", ["weights_", "weight_", "load_", "a/", "debug/", "%3A", "models/", "v2/models/a/"]
)
def test_a_long_path_is_checked_in_less_than_a_millisecond(word: str) -> None:
    def cpu_s(path: str) -> float:
        began_s = time.thread_time()
        administers("POST", path)
        return time.thread_time() - began_s

    for end in ("v1/completions", "x:generateContent", "-"):
        path = f"/{word * (2000 // len(word))}/{end}"
        assert min(cpu_s(path) for _ in range(3)) < 0.001


@pytest.mark.parametrize("path", ADMINISTRATION)
def test_no_spelling_of_a_path_for_an_engines_administration_passes(path: str) -> None:
    for each in spellings(path):
        assert (each, PASSING.way(b"POST", each.encode())) == (each, None)
        assert PATHS.way(b"POST", each.encode()) is None
    with pytest.raises(ConfigError, match=r"extproc\.paths.*administers"):
        parse({"extproc": {"paths": [f"POST /team{path}"]}})


@given(st.text(st.sampled_from("/.%2eEfF;\\am?#\x00"), max_size=40))
def test_a_model_name_cannot_lead_out_of_the_path_of_models(name: str) -> None:
    path = f"/v1/models/{name}".encode()
    if PATHS.way(b"GET", path) is not None:
        # No segment means `..`, however often a server decodes the path.
        bare = path.partition(b"?")[0].lower().replace(b"%2f", b"/")
        assert b"%" not in re.sub(rb"%(3a|40|2b)", b"", bare)
        assert all(part[:1].isalnum() for part in bare.strip(b"/").split(b"/"))
        assert not re.search(rb"[;\\#\x00]", bare)


# Each case has a configured path, a request, how this is served, and the model that its path names.
CONFIGURED = [
    ("POST /v1/custom", "POST", "/v1/custom", "inference", ""),
    ("GET /v1/adaptations/{id}", "GET", "/v1/adaptations/a", "read", ""),
    ("POST /jobs/{id}/run", "POST", "/jobs/7/run", "inference", ""),
    ("GET,PUT /jobs/{id}:state", "PUT", "/jobs/7:state", "inference", ""),
    ("* /any/thing/", "PATCH", "/any/thing", "inference", ""),
    ("POST /team-a/generate", "POST", "/team-a/generate", "inference", ""),
    ("GET /team-a/load", "GET", "/team-a/load", "read", ""),
    ("POST /x/{model}/ask", "POST", "/x/llama/ask", "inference", "llama"),
]


@pytest.mark.parametrize(("entry", "method", "path", "kind", "model"), CONFIGURED)
def test_the_configuration_can_allow_further_paths(
    entry: str, method: str, path: str, kind: str, model: str
) -> None:
    extra = parse({"extproc": {"paths": [entry]}}).extproc.paths
    assert PATHS.way(method.encode(), path.encode()) is None
    way = AllowedPaths(extra).way(method.encode(), path.encode())
    assert way is not None
    assert (way.kind, way.model) == (kind, model)
    assert AllowedPaths(extra).way(method.encode(), f"/x{path}".encode()) is None


def test_a_query_or_configured_path_that_names_the_model_twice_is_refused() -> None:
    for query in (b"model=a&model=b", b"model=&model=b", b"mod%65l=a&model=a"):
        with pytest.raises(BadRequest, match="model twice"):
            PATHS.way(b"GET", b"/v1/realtime?" + query)
    with pytest.raises(ConfigError, match=r"extproc\.paths.*\{model\} twice"):
        parse({"extproc": {"paths": ["POST /x/{model}/{model}"]}})


def test_an_unknown_path_passes_if_the_configuration_allows_unknown_paths() -> None:
    way = PASSING.way(b"PATCH", b"/no/such/path")
    assert way is not None
    assert (way.kind, way.is_known) == ("inference", False)
    for unclear in (b"/a/../b", b"/a\\b", b"/a/%2e%2e/b", b"/a\x01b", b"no-slash"):
        assert PASSING.way(b"POST", unclear) is None


def test_envoys_routes_match_the_requests_that_the_picker_accepts() -> None:
    extra = parse({"extproc": {"paths": [entry for entry, *_ in CONFIGURED]}}).extproc.paths
    routes = Paths(extra).routes
    requests = [row[:2] for row in SERVED] + [row[1:3] for row in CONFIGURED]
    requests += [(method.decode(), path.decode("latin-1")) for method, path in REFUSED]
    for method, path in requests:
        bare = path.partition("?")[0]
        bare = bare[:-1] if bare.endswith("/") and len(bare) > 1 else bare
        taken = [
            regex for (methods, _), regex in routes.items()
            if (methods == "*" or method in methods.split(",")) and re.fullmatch(f"(?:{regex})", bare)
        ]  # fmt: skip
        way = AllowedPaths(extra).way(method.encode(), path.encode("latin-1"))
        assert bool(taken) == (way is not None) or len(path) > 2048, (method, path)


TRUSTED = [
    ([], frozenset()),  # by default no client's steering header is trusted
    ([FAIRNESS_ID[0]], frozenset(FAIRNESS_ID)),
    ([FAIRNESS_ID[1]], frozenset(FAIRNESS_ID)),
    (["X-Gateway-Inference-Fairness-Id"], frozenset(FAIRNESS_ID)),
    (["x-workload-context"], frozenset()),  # Envoy never removes this header, so trust does not apply
]


@pytest.mark.parametrize(("named", "expected"), TRUSTED)
def test_trusting_a_header_in_one_spelling_trusts_both(named: list[str], expected: frozenset[str]) -> None:
    names = parse({"extproc": {"trusted_headers": named}}).extproc.trusted_headers
    assert trusted(names) == expected
    assert set(untrusted(names)) == {*FAIRNESS_ID, *OBJECTIVE, *REWRITE, *NEVER_TRUSTED} - expected


@pytest.mark.parametrize(
    ("method", "path", "ref"),
    [
        ("GET", "/v1/responses/resp_1", "resp_1"),
        ("POST", "/a/v1/responses/resp_1/cancel/", "resp_1"),
        ("GET", "/v1/responses/resp%3A1/input_items?limit=1", "resp:1"),
        ("POST", "/v1/conversations/conv_1/items", "conv_1"),
        ("DELETE", "/v1/conversations/conv_1/items/msg_1", "conv_1"),
        ("POST", "/v1/responses", ""),
        ("POST", "/v1/responses/compact", ""),
        ("POST", "/v1/conversations", ""),
    ],
)
def test_paths_of_the_responses_api_name_stored_state_by_its_id(method: str, path: str, ref: str) -> None:
    way = PATHS.way(method.encode(), path.encode())
    assert way is not None
    assert (way.has_state, way.ref) == (True, ref)
    # A configured path that ends like a path of the Responses API belongs to this API, too.
    configured = AllowedPaths(
        [api_of("GET /t/{ref}/responses/{ref}"), api_of("DELETE /c/conversations/{x}/items/{id}")]
    )
    for asked in ((b"GET", b"/t/a/responses/made"), (b"DELETE", b"/c/conversations/made/items/m")):
        way = configured.way(*asked)
        assert way is not None
        assert (way.has_state, way.ref) == (True, "made")
    plain = PATHS.way(b"POST", b"/v1/chat/completions")
    assert plain is not None
    assert (plain.has_state, plain.ref) == (False, "")
