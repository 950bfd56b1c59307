"""Which paths reach a model server, and which headers a client may set."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker_fleet.allowlist import FAIRNESS_ID, NEVER_TRUSTED, OBJECTIVE, REWRITE, rules, trusted, untrusted
from picker_fleet.config import parse
from picker_fleet.extproc.context import AllowedPaths

PATHS = AllowedPaths()


SERVED = [
    (b"POST", b"/v1/chat/completions", "inference"),
    (b"POST", b"/v1/completions?api-version=1&x=/../metrics", "inference"),
    (b"POST", b"/v1/rerank", "inference"),
    (b"POST", b"/tokenize", "inference"),
    (b"GET", b"/v1/models", "read"),
    (b"GET", b"/v1/models/llama", "read"),
    (b"GET", b"/v1/models/meta-llama/Llama-3.1:8b", "read"),
    (b"GET", b"/v1/models/meta-llama%2fLlama-3.1%3A8b", "read"),
]


@pytest.mark.parametrize(("method", "path", "kind"), SERVED)
def test_inference_and_lists_of_models_reach_a_model_server(method: bytes, path: bytes, kind: str) -> None:
    assert PATHS.kind(method, path) == kind


ELSEWHERE = {
    b"POST": [b"/flush_cache", b"/v1/load_lora_adapter", b"/v1/models"],
    b"GET": [b"/metrics", b"/v1/chat/completions"],
    b"get": [b"/v1/models"],
    b"DELETE": [b"/v1/models/llama"],
    b"CONNECT": [b""],
    b"": [b""],
}
# What a server, or a proxy before it, might take for something else.
SPELLINGS = {
    b"POST": [
        b"/v1/Completions", b"/v1/completions/", b"//v1/completions", b"/v1//completions",
        b"/v1/./completions", b"/v1/x/../completions", b"/v1/completions/../../flush_cache",
        b"/v1/completions%2f..%2f..%2fflush_cache", b"/v1/complet%69ons",
        b"/v1/completions;/../../flush_cache", b"/v1/completions;a=b", b"/v1/completions#/flush_cache",
        b"/v1/completions\x00", b"/v1/completions ", b"/v1/completions\n", b"\\v1\\completions",
        b"http://server/v1/completions",
    ],
    b"GET": [
        b"/v1/models/", b"/v1/models/..", b"/v1/models/../../metrics", b"/v1/models/llama/../../../metrics",
        b"/v1/models/llama/..%2f..%2f..%2fmetrics", b"/v1/models/llama%2f%2e%2e%2fmetrics",
        b"/v1/models/%252e%252e", b"/v1/models/..;/metrics", b"/v1/models/llama;x",
        b"/v1/models/llama\\..\\metrics", b"/v1/models/llama//x", b"/v1/models/\xff",
    ],
}  # fmt: skip


REFUSED = [(method, path) for table in (ELSEWHERE, SPELLINGS) for method in table for path in table[method]]


@pytest.mark.parametrize(("method", "path"), REFUSED)
def test_nothing_else_does_however_it_is_spelt(method: bytes, path: bytes) -> None:
    assert PATHS.kind(method, path) is None


@given(st.text(st.sampled_from("/.%2eEfF;\\am?#\x00"), max_size=40))
def test_no_name_of_a_model_leads_out_of_the_list_of_models(name: str) -> None:
    path = f"/v1/models/{name}".encode()
    if PATHS.kind(b"GET", path) is not None:
        # No part could mean a step up, however often a server decodes it.
        bare = path.partition(b"?")[0].lower().replace(b"%2f", b"/")
        assert b"%" not in re.sub(rb"%(3a|40|2b)", b"", bare)
        assert all(part[:1].isalnum() for part in bare.removeprefix(b"/").split(b"/"))
        assert not re.search(rb"[;\\#\x00]", bare)


def test_a_configuration_adds_paths() -> None:
    extra = parse({"extproc": {"paths": ["POST /v1/classify", "GET /v1/adapters/{id}"]}}).extproc.paths
    paths = AllowedPaths(extra)
    assert paths.kind(b"POST", b"/v1/classify") == "inference"
    assert paths.kind(b"GET", b"/v1/adapters/a") == "read"
    assert paths.kind(b"POST", b"/v1/completions") == "inference"
    assert PATHS.kind(b"POST", b"/v1/classify") is None


def test_each_rule_is_a_regular_expression_for_its_own_paths_alone() -> None:
    # Envoy's routes are made of these
    for rule in rules(()):
        path = rule.path.replace("{id}", "meta-llama/Llama-3")
        assert [other.path for other in rules(()) if re.fullmatch(other.regex, path)] == [rule.path]
        assert re.fullmatch(rule.regex, f"{path}/") is None


TRUSTED = [
    ([], frozenset()),  # by default nothing that steers is taken from a client
    ([FAIRNESS_ID[0]], frozenset(FAIRNESS_ID)),
    ([FAIRNESS_ID[1]], frozenset(FAIRNESS_ID)),
    (["X-Gateway-Inference-Fairness-Id"], frozenset(FAIRNESS_ID)),
    (["x-workload-context"], frozenset()),  # which is kept anyway
]


@pytest.mark.parametrize(("named", "expected"), TRUSTED)
def test_both_spellings_of_a_header_are_trusted_together(named: list[str], expected: frozenset[str]) -> None:
    names = parse({"extproc": {"trusted_headers": named}}).extproc.trusted_headers
    assert trusted(names) == expected
    assert set(untrusted(names)) == {*FAIRNESS_ID, *OBJECTIVE, *REWRITE, *NEVER_TRUSTED} - expected
