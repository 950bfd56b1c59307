"""The picking table: headers, filter metadata and metrics pages, and the endpoints or refusal expected."""

import json
from pathlib import Path
from typing import Any

from picking_case import (
    LAST_TOKEN,
    NOWHERE,
    PROMPT,
    Case,
    Expected,
    Request,
    Server,
    ask,
    lora,
    ranked,
    server,
    sglang,
    tensorrt,
    vllm,
)

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
_OBJECTIVE, _OBJECTIVE_2 = "x-gateway-inference-objective", "x-llm-d-inference-objective"
_FAIRNESS, _FAIRNESS_2 = "x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id"
_REWRITE, _REWRITE_2 = "x-gateway-model-name-rewrite", "x-llm-d-model-name-rewrite"
_WORKLOAD, _BATCH = "x-workload-context", '{"workload_id": "batch-7", "criticality": 5}'
_LONG = {**PROMPT, "prompt": "The quick brown fox jumps over the lazy dog. " * 60}
_LARGE = {**PROMPT, "prompt": "x" * 200_000}
_TWO = (vllm(), vllm())
_THREE = (vllm(3, 0.2), vllm(1, 0.1), vllm(10, 0.2))
_BUSY, _FULL = vllm(9, 0.9), lora("b", slots=1)
_LABELLED = (
    vllm(0, labels={"gpu": "a10", "zone": "b"}),
    vllm(9, labels={"gpu": "h100", "zone": "a"}),
    vllm(5, labels={"gpu": "h100", "zone": "b"}),
)
_ANY = Expected("AB")
_NO_ENDPOINT = Expected(status=503, reason="rejected-no-endpoints")
_SSE = (
    b'data: {"model":"food-v2","choices":[{"delta": {"content": "a"}}]}\n\n',
    b'data: {"model": "food-v2","choices":[],"usage": {"prompt_tokens": 7, "completion_tokens": 2}}\n\n',
    b"data: [DONE]\n\n",
)
_WHOLE = b"".join(_SSE)
_CLIENT_NAME = _WHOLE.replace(b'"model":"food-v2"', b'"model":"food"').replace(
    b'"model": "food-v2"', b'"model":"food"'
)
_PLAIN = b'{"model":"llama","usage":{"prompt_tokens":5,"completion_tokens":9}}'


def _page(name: str) -> Server:
    """A server with the recorded page of a real one."""
    return Server((_DATA / f"{name}.prom").read_bytes())


def _own(waiting: float, kv: float) -> Server:
    """A server of an engine without built-in series."""
    return server({"acme_backlog": waiting, "acme_cache_fill": kv})


def _error(name: str, body: Any, message: str, status: int = 400, **fields: Any) -> Case:
    return Case(name, _TWO, Expected(status=status, message=message), Request(body, **fields))


def _adapter(name: str, expected: Expected, *servers: Server, model: str = "poet") -> Case:
    """A request for an adapter, or for another model."""
    return Case(name, servers, expected, ask(model))


def _accounted(name: str, headers: dict[str, str], model: str = "llama", **token: str) -> Case:
    """A request whose accounting token must have the fields `token`."""
    return Case(name, _TWO, Expected("AB", token=token), ask(model, headers=headers))


def _rewritten(name: str, headers: dict[str, str], model: str, **fields: Any) -> Case:
    expected = Expected("AB", models=(model,), token={"model": model})
    return Case(name, _TWO, expected, ask(headers=headers, **fields))


def _streamed(name: str, *answer: bytes) -> Case:
    """The model server's stream is counted, and the client reads the name it asked for."""
    expected = Expected("AB", models=("food-v2",), reply=_CLIENT_NAME, usage=(7, 2))
    return Case(name, _TWO, expected, ask("food", mode="standard", answer=answer))


def _by_prefix(name: str, servers: tuple[Server, ...], first: str, **changed: str) -> Case:
    """The long prompt was served by A; then one follows that differs in `changed`."""
    return Case(
        name, servers, Expected(first), Request({**_LONG, **changed}), before=(Request(_LONG, subset=["A"]),)
    )


_LOAD = (
    Case("lower queue, same KV", (vllm(8), vllm(2), vllm(5)), ranked("BCA")),
    Case("lower KV, same queue", (vllm(2, 0.9), vllm(2, 0.5), vllm(2, 0.2)), ranked("CBA")),
    Case("lower queue and KV", _THREE, ranked("BAC")),
    Case("a long queue outweighs an empty cache", (vllm(10, 0.0), vllm(0, 0.6)), ranked("BA")),
    Case("an idle one, beside a real busy one", (_page("vllm"), vllm(1, 0.1)), ranked("BA")),
    Case("an older vLLM's KV name", (vllm(2, 0.8, older=True), vllm(2, 0.3, older=True)), ranked("BA")),
    Case("the real page of an older vLLM", (_BUSY, _page("vllm-older")), ranked("BA")),
    Case("two fallbacks of four, in order", (*_THREE, vllm(5, 0.3)), ranked("BAD")),
    Case("in standard as in lean", _THREE, ranked("BAC"), ask(mode="standard")),
    Case(
        "in headers mode by what Envoy read",
        _THREE,
        ranked("BAC"),
        ask(mode="headers", metadata={"model": "llama"}),
    ),
)
_ADAPTERS = (
    _adapter(
        "active adapter, low queue", Expected("A"), lora("poet", 0, 0.2), lora("other"), lora("poet", 10)
    ),
    _adapter(
        "adapter affinity over KV",
        ranked("AB"),
        lora("poet", 5, 0.4),
        lora("b,c", 5, 0.2, slots=3),
        lora("b,c,d,e", 5, 0.3),
    ),
    _adapter(
        "a free slot before none",
        Expected("BC"),
        lora("b,c", slots=2),
        lora("b", 5, 0.5, slots=2),
        lora("poet,b", 9),
    ),
    _adapter(
        "no slot anywhere: where it is queued", Expected("B"), _FULL, lora("b", queued="poet", slots=1), _FULL
    ),
    _adapter(
        "an unknown adapter goes by load",
        Expected("B"),
        lora("b", 9, slots=1),
        lora("c", 1, slots=1),
        model="new",
    ),
    _adapter("a configured adapter needs a slot", ranked("B"), _FULL, lora("c", 9, slots=2), model="rare"),
    _adapter(
        "the base model may go to full ones", Expected("A"), lora("b", 1, slots=1), lora("", 9), model="llama"
    ),
    _adapter(
        "the adapters of a real page",
        Expected("B"),
        lora("b", 7, 0.6),
        _page("vllm"),
        lora("", 7, 0.6),
        model="sql-lora",
    ),
    Case(
        "a model sent as an adapter",
        (lora("b"), lora("food-v2", 0, 0.3), lora("")),
        Expected("B", models=("food-v2",)),
        ask("food"),
    ),
)
_SUBSETS = (
    Case("subset of three", (*_THREE, vllm(0, 0.0)), ranked("BAC"), ask(subset=["A", "B", "C"])),
    Case("partial subset", _THREE, ranked("C"), ask(subset=["C", NOWHERE])),
    Case("subset as one string", _THREE, ranked("AC"), ask(subset="A,C")),
    Case("unknown subset", _THREE, _NO_ENDPOINT, ask(subset=[NOWHERE])),
    Case("empty subset", _THREE, _NO_ENDPOINT, ask(subset=[])),
    Case("a subset that is no list", _THREE, _NO_ENDPOINT, ask(subset=7.0)),
    Case("subset by an adapter's slots", _TWO, ranked("A"), ask("rare", subset=["A"])),
    Case("subset of a drained one", _THREE, _NO_ENDPOINT, ask(subset=["B"]), drained="B"),
    Case(
        "empty subset in headers mode",
        _THREE,
        _NO_ENDPOINT,
        ask(mode="headers", subset=[], metadata={"model": "m"}),
    ),
)
_BODIES = (
    _rewritten("two chunks, rewritten", {_REWRITE: "llama-tuned"}, "llama-tuned", chunks=2),
    _rewritten("rewrite by the other spelling", {_REWRITE_2: "llama-tuned"}, "llama-tuned"),
    _rewritten(
        "the gateway's spelling first",
        {_REWRITE_2: "x", _REWRITE: "y"},
        "y",
    ),
    Case("a large body in chunks, unchanged", _TWO, _ANY, Request(_LARGE, chunks=7)),
    Case(
        "a large body rewritten",
        _TWO,
        Expected("AB", models=("food-v2",)),
        Request({**_LARGE, "model": "food"}, chunks=7),
    ),
    Case(
        "target models by weight", _TWO, Expected("AB", models=("split-a", "split-b")), ask("split"), times=40
    ),
    _streamed("streamed usage, the client's own name back", *_SSE),
    _streamed(
        "an event cut in two, name and usage across the cut", _WHOLE[:16], _WHOLE[16:150], _WHOLE[150:]
    ),
    Case(
        "usage of a plain answer",
        _TWO,
        Expected("AB", reply=_PLAIN, usage=(5, 9)),
        ask(mode="standard", answer=(_PLAIN,)),
    ),
    _error("malformed JSON in chunks", b'{"model": "llama", "prompt": [}', "not valid JSON", chunks=3),
    _error("an empty body", b"", "empty"),
    _error("missing model in headers mode", b"", "no model", mode="headers", metadata={"stream": True}),
    _error("rewrite in headers mode", b"", "cannot send", 500, mode="headers", metadata={"model": "food"}),
)
_HEADERS = (
    _accounted("a known objective", {_OBJECTIVE: "premium"}, band="0", weight="3.0"),
    _accounted("an objective by the other spelling", {_OBJECTIVE_2: "premium"}, band="0", weight="3.0"),
    _accounted("an unknown objective is Default", {_OBJECTIVE: "nobody's"}, "vip", band="1", weight="1.0"),
    _accounted("no objective: the model's own band", {}, "vip", band="0", weight="2.0"),
    _accounted("fairness id", {_FAIRNESS: "tenant-1"}, flow="tenant-1"),
    _accounted("fairness id by the other spelling", {_FAIRNESS_2: "tenant-2"}, flow="tenant-2"),
    _accounted("no fairness id: the model is the flow", {}, flow="llama"),
    _accounted("a workload", {_WORKLOAD: _BATCH}, workload="batch-7", criticality="5"),
    _accounted("a workload that is no JSON is ignored", {_WORKLOAD: "x"}, workload="", criticality="3"),
    _accounted("a deadline", {"x-llm-d-inference-ttl": "500ms"}),
    Case("GET is not admitted", _TWO, _ANY, ask(get=True)),
    Case("GET in standard", _TWO, _ANY, ask(get=True, mode="standard")),
    Case("GET keeps to the subset", _TWO, ranked("B"), ask(get=True, subset=["B"])),
)
_ENDPOINTS = (
    Case("no endpoints", (), _NO_ENDPOINT),
    Case("no endpoints for GET", (), _NO_ENDPOINT, ask(get=True)),
    Case("all stale", (vllm(1, state="stale"), vllm(2, state="stale")), _ANY),
    Case("a stale one counts as loaded", (vllm(0, 0.0, state="failing"), _BUSY), ranked("BA")),
    Case("a page that is HTML", (Server(b"<html>busy</html>", "broken"), _BUSY), ranked("BA")),
    Case(
        "a value that is no number",
        (Server(b"vllm:num_requests_waiting few\n", "broken"), _BUSY),
        ranked("BA"),
    ),
    Case(
        "a page with an error's status",
        (vllm(0, 0.0, status="500 Oops", state="broken"), _BUSY),
        ranked("BA"),
    ),
    Case("only malformed pages", (Server(b"?\n", "broken"),) * 2, _ANY),
    Case("a page without KV", (Server(b"vllm:num_requests_waiting 0\n"), vllm(9, 0.5)), ranked("AB")),
    Case("one that is down", (vllm(state="down"), _BUSY), ranked("B")),
    Case("all down", (vllm(state="down"), vllm(state="down")), _NO_ENDPOINT),
    Case("one that is drained", (vllm(0, 0.0), _BUSY), ranked("B"), drained="A"),
    Case("all drained", _TWO, _NO_ENDPOINT, drained="AB"),
    Case("GET with one drained", _TWO, ranked("B"), ask(get=True), drained="A"),
    Case("IPv6", (vllm(0, 0.0, host="::1"), vllm(9, 0.9, host="::1")), ranked("AB")),
    Case("IPv6 and IPv4", (vllm(5), vllm(0, host="::1")), ranked("BA"), ask(subset=["A", "B"])),
    Case(
        "all full: it waits until one of its flow ends",
        _TWO,
        Expected("AB", queued=True),
        ask("one-each"),
        running=(ask("one-each"), ask("one-each")),
    ),
    Case(
        "all full, and the deadline passes first",
        _TWO,
        Expected(status=503, reason="rejected-ttl-expired"),
        ask("one-each", headers={"x-llm-d-inference-ttl": "100ms"}),
        running=(ask("one-each"), ask("one-each")),
    ),
    Case(
        "one full: the other, however loaded",
        (vllm(0, 0.0), _BUSY),
        ranked("B"),
        ask("one-each"),
        running=(ask("one-each"),),
    ),
    Case("equal scores: the fewest in flight", _TWO, ranked("BA"), running=(ask(subset=["A"]),)),
)
_LABELS = (
    Case("a label", _LABELLED, ranked("CB"), ask("big")),
    Case("two labels", _LABELLED, ranked("C"), ask("biggest")),
    Case("a label that no endpoint has", _TWO, _NO_ENDPOINT, ask("big")),
    Case("a label and a subset", _LABELLED, ranked("B"), ask("big", subset=["A", "B"])),
    Case("a label outside the subset", _LABELLED, _NO_ENDPOINT, ask("biggest", subset=["A", "B"])),
    Case("a label, its endpoint drained", _LABELLED, _NO_ENDPOINT, ask("biggest"), drained="C"),
    Case("a label without scorers", _LABELLED, ranked("C"), ask("biggest"), "unscored"),
    Case("a label that no endpoint has, without scorers", _TWO, _NO_ENDPOINT, ask("big"), "unscored"),
    Case(
        "least in flight without scorers", _TWO, ranked("BA"), ask(), "unscored", running=(ask(subset=["A"]),)
    ),
    Case("no endpoints without scorers", (), _NO_ENDPOINT, ask(), "unscored"),
)
_SAME_SESSION = {"x-session-token": LAST_TOKEN}
_AFFINITY = (
    Case(
        "a session whose endpoint is outside the subset goes elsewhere",
        _TWO,
        Expected("A"),
        ask(headers=_SAME_SESSION, subset=["A"]),
        before=(ask(headers=_SAME_SESSION, subset=["B"]),),
    ),
    _by_prefix(
        "a prompt goes where its beginning went, despite a longer queue",
        (vllm(9, 0.5), vllm(0, 0.5)),
        "A",
        prompt=f"{_LONG['prompt']} And then?",
    ),
    _by_prefix("no prefix is shared with another model", (vllm(9, 0.5), vllm(0, 0.4)), "B", model="other"),
    _by_prefix(
        "no prefix is shared with another tenant's salt", (vllm(8, 0.5), vllm(0, 0.4)), "B", cache_salt="mine"
    ),
)
_ENGINES = (
    Case("SGLang", (sglang(8, 0.5), sglang(1, 0.2), sglang(1, 0.9)), ranked("BCA"), group="sglang"),
    Case("a real SGLang page", (_page("sglang"), sglang(2000, 0.5)), ranked("BA"), group="sglang"),
    Case(
        "TensorRT-LLM",
        (tensorrt(4, 0.1), tensorrt(0, 0.8), tensorrt(0, 0.3)),
        ranked("CBA"),
        group="tensorrt-llm",
    ),
    Case(
        "a real TensorRT-LLM page",
        (tensorrt(5, 0.9), _page("tensorrt-llm")),
        ranked("BA"),
        group="tensorrt-llm",
    ),
    Case("series of one's own", (_own(7, 0.5), _own(2, 0.5), _own(3, 0.5)), ranked("BCA"), group="own"),
    Case("another engine's page", (vllm(0, 0.0, state="broken"), _own(7, 0.5)), ranked("BA"), group="own"),
)
TABLE = tuple(
    sorted(
        (*_LOAD, *_ADAPTERS, *_SUBSETS, *_BODIES, *_HEADERS, *_ENDPOINTS, *_LABELS, *_AFFINITY, *_ENGINES),
        key=lambda case: list(GROUPS).index(case.group),
    )
)
assert len({json.dumps(case.name) for case in TABLE}) == len(TABLE)
