"""The picking table: from headers, filter metadata and metrics pages to endpoints, or to a refusal."""

import json
from pathlib import Path
from typing import Any

from picking_case import GIVEN, NOWHERE, PROMPT, Ask, Case, Server, Want, ask, own, sglang, tensorrt, vllm

_SCORERS = {"queue-depth": 2, "kv-cache": 2, "lora-affinity": 3, "session-affinity": 4, "prefix-affinity": 6}
_COMMON: dict[str, Any] = {
    "models": [
        {"name": "food", "target_models": [{"name": "food-v2"}]},
        {"name": "split", "target_models": [{"name": "split-a"}, {"name": "split-b"}]},
        {"name": "big", "endpoint_labels": {"gpu": "h100"}},
        {"name": "biggest", "endpoint_labels": {"gpu": "h100", "zone": "b"}},
        {"name": "one-each", "max_inflight_per_endpoint": 1},
        {"name": "vip", "criticality": "Critical", "weight": 2},
    ],
    "objectives": [{"name": "premium", "criticality": "Critical", "weight": 3}],
    "request_queue_controller": {"watermark_per_backend": 50},
    "scraping": {"interval": "50ms", "stale_after": "4s"},  # patient with a busy machine
    "leases": {"heartbeat": "300ms"},
}


def _config(engine: str, **scraping: Any) -> dict[str, Any]:
    scorers = [{"name": name, "weight": weight} for name, weight in _SCORERS.items()]
    return {
        **_COMMON,
        "scheduling": {"scorers": scorers, "adapters": ["rare"]},
        "scraping": {**_COMMON["scraping"], "engine": engine, **scraping},
    }


# Configurations of replicas; cases of one group share a replica.
GROUPS: dict[str, dict[str, Any]] = {
    "scored": _config("vllm"),
    "sglang": _config("sglang"),
    "tensorrt-llm": _config("tensorrt-llm"),
    "own": _config("own", series={"waiting": "acme_backlog", "kv_utilisation": "acme_cache_fill"}),
    "unscored": _COMMON,
}

_DATA = Path(__file__).parents[1] / "data"
_GATEWAY, _LLM_D = "x-gateway-", "x-llm-d-"
_LONG = {**PROMPT, "prompt": "The quick brown fox jumps over the lazy dog. " * 60}
_LARGE = {**PROMPT, "prompt": "x" * 200_000}
_TWO = (vllm(), vllm())
_THREE = (vllm(3, 0.2), vllm(1, 0.1), vllm(10, 0.2))
_LABELLED = (
    vllm(0, labels={"gpu": "a10", "zone": "b"}),
    vllm(9, labels={"gpu": "h100", "zone": "a"}),
    vllm(5, labels={"gpu": "h100", "zone": "b"}),
)
_NOBODY = Want(status=503, reason="rejected-no-endpoints")
_SSE = (
    b'data: {"model":"food-v2","choices":[{"delta": {"content": "a"}}]}\n\n',
    b'data: {"model": "food-v2","choices":[],"usage": {"prompt_tokens": 7, "completion_tokens": 2}}\n\n',
    b"data: [DONE]\n\n",
)
_WHOLE = b"".join(_SSE)
_BACK = _WHOLE.replace(b'"model":"food-v2"', b'"model":"food"').replace(
    b'"model": "food-v2"', b'"model":"food"'
)


def _page(name: str) -> Server:
    """A server with the page of a real one."""
    return Server((_DATA / f"{name}.prom").read_bytes())


def _error(name: str, body: Any, says: str, status: int = 400, **fields: Any) -> Case:
    return Case(name, _TWO, Ask(body, **fields), Want(status=status, says=says))


_LOAD = (
    Case("lower queue, same KV", (vllm(8), vllm(2), vllm(5)), ask(), Want("B", order="BCA")),
    Case("lower KV, same queue", (vllm(2, 0.9), vllm(2, 0.5), vllm(2, 0.2)), ask(), Want("C", order="CBA")),
    Case("lower queue and KV", _THREE, ask(), Want("B", order="BAC")),
    Case("a long queue outweighs an empty cache", (vllm(10, 0.0), vllm(0, 0.6)), ask(), Want("B")),
    Case("an idle one, beside a real busy one", (_page("vllm"), vllm(1, 0.1)), ask(), Want("B")),
    Case("an older vLLM's KV name", (vllm(2, 0.8, older=True), vllm(2, 0.3, older=True)), ask(), Want("B")),
    Case("the real page of an older vLLM", (vllm(9, 0.9), _page("vllm-older")), ask(), Want("B")),
    Case("two fallbacks of four, in order", (*_THREE, vllm(5, 0.3)), ask(), Want("B", order="BAD")),
    Case("in standard as in lean", _THREE, ask(mode="standard"), Want("B", order="BAC")),
    Case(
        "in headers mode by what Envoy read",
        _THREE,
        ask(mode="headers", metadata={"model": "llama"}),
        Want("B", order="BAC"),
    ),
)
_ADAPTERS = (
    Case(
        "active adapter, low queue",
        (vllm(0, 0.2, loras="poet"), vllm(0, 0.1, loras="other"), vllm(10, 0.1, loras="poet")),
        ask("poet"),
        Want("A"),
    ),
    Case(
        "adapter affinity over KV",
        (vllm(5, 0.4, loras="poet"), vllm(5, 0.2, loras="b,c", max_lora=3), vllm(5, 0.3, loras="b,c,d,e")),
        ask("poet"),
        Want("A", order="AB"),
    ),
    Case(
        "a free slot before none",
        (vllm(0, 0.1, loras="b,c", max_lora=2), vllm(5, 0.5, loras="b", max_lora=2), vllm(9, loras="poet,b")),
        ask("poet"),
        Want("BC"),
    ),
    Case(
        "no slot anywhere: where it waits already",
        (
            vllm(loras="b", max_lora=1),
            vllm(loras="b", queued_loras="poet", max_lora=1),
            vllm(loras="b", max_lora=1),
        ),
        ask("poet"),
        Want("B"),
    ),
    Case(
        "an unknown adapter goes by load",
        (vllm(9, loras="b", max_lora=1), vllm(1, loras="c", max_lora=1)),
        ask("unheard-of"),
        Want("B"),
    ),
    Case(
        "an adapter known by configuration needs a slot",
        (vllm(0, loras="b", max_lora=1), vllm(9, loras="c", max_lora=2)),
        ask("rare"),
        Want("B", order="B"),
    ),
    Case(
        "the base model is not kept from full ones",
        (vllm(1, loras="b", max_lora=1), vllm(9, loras="")),
        ask(),
        Want("A"),
    ),
    Case(
        "a model sent as an adapter",
        (vllm(loras="b"), vllm(kv=0.3, loras="food-v2"), vllm(loras="")),
        ask("food"),
        Want("B", model="food-v2"),
    ),
    Case(
        "the adapters of a real page",
        (vllm(7, 0.6, loras="b"), _page("vllm"), vllm(7, 0.6, loras="")),
        ask("sql-lora"),
        Want("B"),
    ),
)
_SUBSETS = (
    Case("subset of three", (*_THREE, vllm(0, 0.0)), ask(subset=["A", "B", "C"]), Want("B", order="BAC")),
    Case("partial subset", _THREE, ask(subset=["C", NOWHERE]), Want("C", order="C")),
    Case("subset as one string", _THREE, ask(subset="A,C"), Want("A", order="AC")),
    Case("unknown subset", _THREE, ask(subset=[NOWHERE]), _NOBODY),
    Case("empty subset", _THREE, ask(subset=[]), _NOBODY),
    Case("a subset that is no list", _THREE, ask(subset=7.0), _NOBODY),
    Case("subset by an adapter's slots", _TWO, ask("rare", subset=["A"]), Want("A", order="A")),
    Case("subset of what is drained", _THREE, ask(subset=["B"]), _NOBODY, drained="B"),
    Case(
        "no subset in headers mode", _THREE, ask(mode="headers", subset=[], metadata={"model": "m"}), _NOBODY
    ),
)
_BODIES = (
    Case(
        "two chunks, rewritten",
        _TWO,
        ask(headers={f"{_GATEWAY}model-name-rewrite": "llama-tuned"}, chunks=2),
        Want("AB", model="llama-tuned", accounting_token={"model": "llama-tuned"}),
    ),
    Case(
        "rewrite by the other spelling",
        _TWO,
        ask(headers={f"{_LLM_D}model-name-rewrite": "llama-tuned"}),
        Want("AB", model="llama-tuned"),
    ),
    Case(
        "the gateway's spelling first",
        _TWO,
        ask(headers={f"{_LLM_D}model-name-rewrite": "x", f"{_GATEWAY}model-name-rewrite": "y"}),
        Want("AB", model="y"),
    ),
    Case("a large body in chunks, unchanged", _TWO, Ask(_LARGE, chunks=7), Want("AB")),
    Case(
        "a large body rewritten",
        _TWO,
        Ask({**_LARGE, "model": "food"}, chunks=7),
        Want("AB", model="food-v2"),
    ),
    Case("target models by weight", _TWO, ask("split"), Want("AB", model=("split-a", "split-b")), times=40),
    Case(
        "streamed usage, the client's own name back",
        _TWO,
        ask("food", mode="standard", answer=_SSE),
        Want("AB", model="food-v2", reply=_BACK, tokens=(7, 2)),
    ),
    Case(
        "an event cut in two, name and usage across the cut",
        _TWO,
        ask("food", mode="standard", answer=(_WHOLE[:16], _WHOLE[16:150], _WHOLE[150:])),
        Want("AB", model="food-v2", reply=_BACK, tokens=(7, 2)),
    ),
    Case(
        "usage of a plain answer",
        _TWO,
        ask(
            mode="standard", answer=(b'{"model":"llama","usage":{"prompt_tokens":5,"completion_tokens":9}}',)
        ),
        Want(
            "AB", reply=b'{"model":"llama","usage":{"prompt_tokens":5,"completion_tokens":9}}', tokens=(5, 9)
        ),
    ),
    _error("malformed JSON", b'{"model": "llama"', "not valid JSON"),
    _error("malformed JSON in chunks", b'{"model": "llama", "prompt": [}', "not valid JSON", chunks=3),
    _error("an empty body", b"", "empty"),
    _error("no object", b'["llama"]', "JSON object"),
    _error("missing model", {"prompt": "p"}, "no model"),
    _error("a model that is no string", {"model": 7}, "must be a string"),
    _error("a model that is empty", {"model": " "}, "is empty"),
    _error("missing model in headers mode", b"", "no model", mode="headers", metadata={"stream": True}),
    _error("rewrite in headers mode", b"", "cannot send", 500, mode="headers", metadata={"model": "food"}),
)
_HEADERS = (
    Case(
        "a known objective",
        _TWO,
        ask(headers={f"{_GATEWAY}inference-objective": "premium"}),
        Want("AB", accounting_token={"band": "0", "weight": "3.0"}),
    ),
    Case(
        "a known objective by the other spelling",
        _TWO,
        ask(headers={f"{_LLM_D}inference-objective": "premium"}),
        Want("AB", accounting_token={"band": "0", "weight": "3.0"}),
    ),
    Case(
        "an unknown objective is Default",
        _TWO,
        ask("vip", headers={f"{_GATEWAY}inference-objective": "nobody's"}),
        Want("AB", accounting_token={"band": "1", "weight": "1.0"}),
    ),
    Case(
        "no objective: the model's own band",
        _TWO,
        ask("vip"),
        Want("AB", accounting_token={"band": "0", "weight": "2.0"}),
    ),
    Case(
        "fairness id",
        _TWO,
        ask(headers={f"{_GATEWAY}inference-fairness-id": "tenant-1"}),
        Want("AB", accounting_token={"flow": "tenant-1"}),
    ),
    Case(
        "fairness id by the other spelling",
        _TWO,
        ask(headers={f"{_LLM_D}inference-fairness-id": "tenant-2"}),
        Want("AB", accounting_token={"flow": "tenant-2"}),
    ),
    Case(
        "no fairness id: the model is the flow", _TWO, ask(), Want("AB", accounting_token={"flow": "llama"})
    ),
    Case(
        "a workload",
        _TWO,
        ask(headers={"x-workload-context": '{"workload_id": "batch-7", "criticality": 5}'}),
        Want("AB", accounting_token={"workload": "batch-7", "criticality": "5"}),
    ),
    Case(
        "a workload that is no JSON goes on without",
        _TWO,
        ask(headers={"x-workload-context": "batch"}),
        Want("AB", accounting_token={"workload": "", "criticality": "3"}),
    ),
    Case("a deadline", _TWO, ask(headers={"x-llm-d-inference-ttl": "500ms"}), Want("AB")),
    _error("a deadline that is none", PROMPT, "inference-ttl", headers={"x-llm-d-inference-ttl": "soon"}),
    _error("a fairness id of bytes", PROMPT, "UTF-8", headers={f"{_GATEWAY}inference-fairness-id": b"\xff"}),
    Case("GET is not admitted", _TWO, ask(get=True), Want("AB", accounting_token={})),
    Case("GET in standard", _TWO, ask(get=True, mode="standard"), Want("AB", accounting_token={})),
    Case(
        "GET keeps to the subset",
        _TWO,
        ask(get=True, subset=["B"]),
        Want("B", order="B", accounting_token={}),
    ),
)
_ENDPOINTS = (
    Case("no pods", (), ask(), _NOBODY),
    Case("no pods for GET", (), ask(get=True), _NOBODY),
    Case("all stale", (vllm(1, state="stale"), vllm(2, state="stale")), ask(), Want("AB")),
    Case(
        "what is stale counts as loaded",
        (vllm(0, 0.0, state="failing"), vllm(9, 0.9)),
        ask(),
        Want(order="BA", to="B"),
    ),
    Case(
        "a page that is none",
        (Server(b"<html>busy</html>", state="broken"), vllm(9, 0.9)),
        ask(),
        Want("B", order="BA"),
    ),
    Case(
        "a value that is none",
        (Server(b"vllm:num_requests_waiting few\n", state="broken"), vllm(9, 0.9)),
        ask(),
        Want("B", order="BA"),
    ),
    Case(
        "a page with an error's status",
        (vllm(0, 0.0, status="500 Oops", state="broken"), vllm(9, 0.9)),
        ask(),
        Want("B", order="BA"),
    ),
    Case("only malformed pages", (Server(b"?\n", state="broken"),) * 2, ask(), Want("AB")),
    Case("a page without KV", (Server(b"vllm:num_requests_waiting 0\n"), vllm(9, 0.5)), ask(), Want("A")),
    Case("one that is down", (vllm(state="down"), vllm(9, 0.9)), ask(), Want("B", order="B")),
    Case("all down", (vllm(state="down"), vllm(state="down")), ask(), _NOBODY),
    Case("one that is drained", (vllm(0, 0.0), vllm(9, 0.9)), ask(), Want("B", order="B"), drained="A"),
    Case("all drained", _TWO, ask(), _NOBODY, drained="AB"),
    Case("GET with one drained", _TWO, ask(get=True), Want("B", order="B", accounting_token={}), drained="A"),
    Case("IPv6", (vllm(0, 0.0, host="::1"), vllm(9, 0.9, host="::1")), ask(), Want("A", order="AB")),
    Case("IPv6 and IPv4", (vllm(5), vllm(0, host="::1")), ask(subset=["A", "B"]), Want("B", order="BA")),
    Case(
        "all full: it waits for a place of its flow",
        _TWO,
        ask("one-each"),
        Want("AB", queued=True),
        held=(ask("one-each"), ask("one-each")),
    ),
    Case(
        "all full, and the deadline comes first",
        _TWO,
        ask("one-each", headers={"x-llm-d-inference-ttl": "100ms"}),
        Want(status=503, reason="rejected-ttl-expired"),
        held=(ask("one-each"), ask("one-each")),
    ),
    Case(
        "one full: the other, however loaded",
        (vllm(0, 0.0), vllm(9, 0.9)),
        ask("one-each"),
        Want("B", order="B"),
        held=(ask("one-each"),),
    ),
    Case("load in flight parts equals", _TWO, ask(), Want("B"), held=(ask(subset=["A"]),)),
)
_LABELS = (
    Case("a label", _LABELLED, ask("big"), Want("C", order="CB")),
    Case("two labels", _LABELLED, ask("biggest"), Want("C", order="C")),
    Case("a label that nobody has", _TWO, ask("big"), _NOBODY),
    Case("a label and a subset", _LABELLED, ask("big", subset=["A", "B"]), Want("B", order="B")),
    Case("a label outside the subset", _LABELLED, ask("biggest", subset=["A", "B"]), _NOBODY),
    Case("a label, its endpoint drained", _LABELLED, ask("biggest"), _NOBODY, drained="C"),
    Case("a label without scorers", _LABELLED, ask("biggest"), Want("C", order="C"), group="unscored"),
    Case("a label that nobody has, without scorers", _TWO, ask("big"), _NOBODY, group="unscored"),
    Case(
        "least in flight without scorers", _TWO, ask(), Want("B"), group="unscored", held=(ask(subset=["A"]),)
    ),
    Case("no pods without scorers", (), ask(), _NOBODY, group="unscored"),
)
_AFFINITY = (
    Case(
        "a session stays",
        (vllm(), vllm(), vllm(), vllm()),
        ask(headers={"x-session-token": GIVEN}),
        Want("ABCD", same=True),
        before=(ask(headers={"x-session-token": GIVEN}),) * 5,
    ),
    Case(
        "a session whose endpoint is out of the subset goes elsewhere",
        _TWO,
        ask(headers={"x-session-token": GIVEN}, subset=["A"]),
        Want("A"),
        before=(ask(headers={"x-session-token": GIVEN}, subset=["B"]),),
    ),
    Case(
        "a prompt goes where its beginning went, longer queue or not",
        (vllm(9, 0.5), vllm(0, 0.5)),
        Ask({**_LONG, "prompt": f"{_LONG['prompt']} And then?"}),
        Want("A"),
        before=(Ask(_LONG, subset=["A"]),),
    ),
    Case(
        "of another model nothing is shared",
        (vllm(9, 0.5), vllm(0, 0.4)),
        Ask({**_LONG, "model": "other"}),
        Want("B"),
        before=(Ask(_LONG, subset=["A"]),),
    ),
    Case(
        "of another tenant's salt neither",
        (vllm(8, 0.5), vllm(0, 0.4)),
        Ask({**_LONG, "cache_salt": "mine"}),
        Want("B"),
        before=(Ask(_LONG, subset=["A"]),),
    ),
)
_ENGINES = (
    Case("SGLang", (sglang(8, 0.5), sglang(1, 0.2), sglang(1, 0.9)), ask(), Want("B", order="BCA"), "sglang"),
    Case("a real SGLang page", (_page("sglang"), sglang(2000, 0.5)), ask(), Want("B"), "sglang"),
    Case(
        "TensorRT-LLM",
        (tensorrt(4, 0.1), tensorrt(0, 0.8), tensorrt(0, 0.3)),
        ask(),
        Want("C", order="CBA"),
        "tensorrt-llm",
    ),
    Case(
        "a real TensorRT-LLM page",
        (tensorrt(5, 0.9), _page("tensorrt-llm")),
        ask(),
        Want("B"),
        "tensorrt-llm",
    ),
    Case("names of one's own", (own(7, 0.5), own(2, 0.5), own(3, 0.5)), ask(), Want("B", order="BCA"), "own"),
    Case(
        "another engine's page",
        (vllm(0, 0.0, state="broken"), own(7, 0.5)),
        ask(),
        Want("B", order="BA"),
        "own",
    ),
)
TABLE = tuple(
    sorted(
        (*_LOAD, *_ADAPTERS, *_SUBSETS, *_BODIES, *_HEADERS, *_ENDPOINTS, *_LABELS, *_AFFINITY, *_ENGINES),
        key=lambda case: list(GROUPS).index(case.group),
    )
)
assert len({json.dumps(case.name) for case in TABLE}) == len(TABLE)
