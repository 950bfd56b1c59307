"""The picking table: metrics pages, a request with its hints, and the expected endpoints or refusal.

The table covers each row of docs/picking.md. Unit tests cover the details of pages, bodies and headers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

NOWHERE = "192.0.2.1:8000"  # an address that no endpoint has
NO_ENDPOINT = "rejected-no-endpoints"


@dataclass(frozen=True, slots=True)
class Server:
    """A model server and its metrics page. `broken`: the metrics page is malformed; `down`: nothing listens;
    `unready`: the page or the status of `/health` says that the server is not ready."""

    page: bytes = b""
    state: Literal["well", "broken", "down", "unready"] = "well"
    health: str = "200 OK"
    labels: Mapping[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. `subset` is the gateway's hint: letters of servers, addresses, or an invalid value. With
    `same_session` the request has the last answer's session token. A `get` request has no body.
    """

    model: str = "llama"
    prompt: str = "Say something."
    subset: object = None
    same_session: bool = False
    salt: str = ""
    get: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table: letters name the servers, from A. `expected` is a regular expression for the
    letters of the answer's endpoints, best first, or the reason of a refusal.

    `group` names the replica's configuration. Requests in `before` have ended, those in `running` are in
    flight; an operator drains the servers in `drained`. With `waits` the request waits in the queue first.
    """

    name: str
    servers: tuple[Server, ...]
    expected: str
    ask: Ask = field(default_factory=Ask)
    group: str = "scored"
    before: tuple[Ask, ...] = ()
    running: tuple[Ask, ...] = ()
    drained: str = ""
    waits: bool = False


_SCORERS = {"queue-depth": 2, "kv-cache": 2, "lora-affinity": 3, "session-affinity": 4, "prefix-affinity": 6}
_COMMON: dict[str, Any] = {
    "models": [
        {"name": "food", "target_models": [{"name": "food-v2"}]},
        {"name": "big", "endpoint_labels": {"gpu": "h100"}},
        {"name": "biggest", "endpoint_labels": {"gpu": "h100", "zone": "b"}},
        {"name": "one-each", "max_inflight_per_endpoint": 1},
    ],
    "request_queue_controller": {"watermark_per_backend": 50},
    "scraping": {"interval": "50ms", "stale_after": "4s"},  # a long timeout, for busy machines
    "leases": {"heartbeat": "300ms"},
}


def _config(engine: str, **scraping: Any) -> dict[str, Any]:
    scorers = [{"name": name, "weight": weight} for name, weight in _SCORERS.items()]
    return {
        **_COMMON,
        "scheduling": {"scorers": scorers, "adapters": ["rare"]},
        "scraping": {**_COMMON["scraping"], "engine": engine, **scraping},
    }


# Configurations of replicas; the cases of a group share one replica.
GROUPS: dict[str, dict[str, Any]] = {
    "scored": _config("auto"),
    "sglang": _config("sglang"),
    "trt": _config("tensorrt-llm"),
    "own": _config("own", series={"waiting": "acme_backlog", "kv_utilisation": "acme_cache_fill"}),
    "unscored": _COMMON,
}


def _server(series: Mapping[str, float], **fields: Any) -> Server:
    """A server whose metrics page has these series."""
    return Server("".join(f"{name} {value}\n" for name, value in series.items()).encode(), **fields)


def _real(name: str) -> Server:
    """A server whose metrics page was recorded from a real server."""
    return Server((Path(__file__).parents[1] / "data" / "pages" / f"{name}.prom").read_bytes())


def _vllm(waiting: float = 0, kv: float = 0.1, info: str = "", **fields: Any) -> Server:
    series = {
        'vllm:num_requests_waiting{model_name="llama"}': waiting,
        'vllm:num_requests_running{model_name="llama"}': 0,
        'vllm:kv_cache_usage_perc{model_name="llama"}': kv,
        **({f"vllm:lora_requests_info{{{info}}}": 1.7e9} if info else {}),
    }
    return _server(series, **fields)


def _lora(adapters: str, waiting: float = 0, kv: float = 0.1, *, queued: str = "", slots: int = 4) -> Server:
    """A vLLM server with `slots` adapter slots, which runs `adapters`."""
    info = f'max_lora="{slots}",running_lora_adapters="{adapters}",waiting_lora_adapters="{queued}"'
    return _vllm(waiting, kv, info)


def _of(waiting: str, kv: str) -> Callable[[float, float], Server]:
    """Make servers whose metrics pages have these two series."""
    return lambda waits, fill: _server({waiting: waits, kv: fill})


_sglang = _of("sglang:num_queue_reqs", "sglang:token_usage")
_tensorrt = _of("trtllm_num_requests_waiting", "trtllm_kv_cache_utilization")
_own = _of("acme_backlog", "acme_cache_fill")  # series of an engine that the picker does not know
_TWO = (_vllm(), _vllm())
_THREE = (_vllm(3, 0.2), _vllm(1, 0.1), _vllm(10, 0.2))
_BUSY = _vllm(9, 0.9)
_ASLEEP = Server(_real("vllm-0.29-asleep").page, "unready")
_LABELLED = (
    _vllm(0, labels={"gpu": "a10", "zone": "b"}),
    _vllm(9, labels={"gpu": "h100", "zone": "a"}),
    _vllm(5, labels={"gpu": "h100", "zone": "b"}),
)
_LONG = "The quick brown fox jumps over the lazy dog. " * 60
_SERVED_BY_A = (Ask(prompt=_LONG, subset=["A"]),)
_ONE_EACH = Ask("one-each")
_POET, _SQL = Ask("poet"), Ask("sql-lora")
_ON_B = (Ask(subset=["B"]),)
_ELSEWHERE = _lora("b", 7, 0.6)
_NO_SLOT, _SLOT = _lora("b", slots=1), _lora("b", slots=2)
_QUEUED = _lora("b", queued="poet", slots=1)

TABLE = (
    # Scraped load
    Case("the shorter queue wins at equal KV use", (_vllm(8), _vllm(2), _vllm(5)), "BCA"),
    Case("the emptier KV cache wins at equal queues", (_vllm(2, 0.9), _vllm(2, 0.5), _vllm(2, 0.2)), "CBA"),
    Case("a long queue outweighs an empty KV cache", (_vllm(10, 0.0), _vllm(0, 0.6)), "BA"),
    Case("an idle server beats a busy recorded page", (_real("vllm-0.10-lora"), _vllm(1, 0.1)), "BA"),
    Case("an older vLLM's recorded page is read", (_BUSY, _real("vllm-0.6")), "BA"),
    Case("two fallbacks out of four servers, best first", (*_THREE, _vllm(5, 0.3)), "BAD"),
    # Adapters
    Case("active adapter, low queue", (_lora("poet", 0, 0.2), _lora("c"), _lora("poet", 10)), "A.*", _POET),
    Case("a free slot beats no slot", (_SLOT, _NO_SLOT, _lora("poet", 9)), "A.*", _POET),
    Case("no free slot: where the adapter waits", (_NO_SLOT, _QUEUED, _NO_SLOT), "B.*", _POET),
    Case("an unknown adapter: lowest load", (_lora("b", 9, slots=1), _NO_SLOT), "B.*", Ask("new")),
    Case("a configured adapter needs a slot", (_NO_SLOT, _lora("c", 9, slots=2)), "B", Ask("rare")),
    Case("the base model needs no adapter slot", (_lora("b", 1, slots=1), _lora("", 9)), "A.*"),
    Case("adapters on a real page", (_ELSEWHERE, _real("vllm-0.10-lora"), _lora("", 7, 0.6)), "B.*", _SQL),
    Case("a target model's adapter", (_lora("b"), _lora("food-v2", 0, 0.3), _lora("")), "B.*", Ask("food")),
    # The gateway's subset
    Case("only the subset is picked", (*_THREE, _vllm(0, 0.0)), "BAC", Ask(subset=["A", "B", "C"])),
    Case("a subset's unknown address is ignored", _THREE, "C", Ask(subset=["C", NOWHERE])),
    Case("a subset may be one string", _THREE, "AC", Ask(subset="A,C")),
    Case("a subset of unknown addresses is refused", _THREE, NO_ENDPOINT, Ask(subset=[NOWHERE])),
    Case("an empty subset is refused", _THREE, NO_ENDPOINT, Ask(subset=[])),
    Case("a subset that is a number is refused", _THREE, NO_ENDPOINT, Ask(subset=7.0)),
    Case("an adapter's request keeps to the subset", _TWO, "A", Ask("rare", subset=["A"])),
    Case("a subset of one drained server is refused", _THREE, NO_ENDPOINT, Ask(subset=["B"]), drained="B"),
    Case("a GET request keeps to the subset", _TWO, "B", Ask(get=True, subset=["B"])),
    # Cases: endpoints that may not be picked now
    Case("a POST without endpoints is refused", (), NO_ENDPOINT),
    Case("a GET without endpoints is refused", (), NO_ENDPOINT, Ask(get=True)),
    Case("no readable page: average load", (Server(b"<html>x</html>", "broken"), _BUSY, _vllm()), "CAB"),
    Case("a bad line is ignored", (_BUSY, Server(_vllm(1).page + b"vllm:num_requests_waiting x\n")), "BA"),
    Case("a sleeping server is not picked", (_ASLEEP, _BUSY), "B"),
    Case("no pick while loading", (Server(_vllm().page, "unready", "503 Service Unavailable"), _BUSY), "B"),
    Case("all servers sleep", (_ASLEEP, _ASLEEP), NO_ENDPOINT),
    Case("servers are picked despite malformed pages", (Server(b"?\n", "broken"),) * 2, ".."),
    Case("a page without KV", (_server({"vllm:num_requests_waiting": 0}), _vllm(9, 0.5)), "AB"),
    Case("a server that is down is not picked", (_vllm(state="down"), _BUSY), "B"),
    Case("all servers are down", (_vllm(state="down"), _vllm(state="down")), NO_ENDPOINT),
    Case("a drained server is not picked", (_vllm(0, 0.0), _BUSY), "B", drained="A"),
    Case("all servers are drained", _TWO, NO_ENDPOINT, drained="AB"),
    Case("IPv6 and IPv4 in one subset", (_vllm(5), _vllm(0, host="::1")), "BA", Ask(subset=["A", "B"])),
    Case("all servers full: wait until one ends", _TWO, ".", _ONE_EACH, running=(_ONE_EACH,) * 2, waits=True),
    Case("one full: the other, even if busy", (_vllm(0, 0.0), _BUSY), "B", _ONE_EACH, running=(_ONE_EACH,)),
    Case("equal scores: fewest in flight first", _TWO, "BA", running=(Ask(subset=["A"]),)),
    # Labels
    Case("a model that needs one label", _LABELLED, "CB", Ask("big")),
    Case("a model that needs two labels", _LABELLED, "C", Ask("biggest")),
    Case("a label that no endpoint has", _TWO, NO_ENDPOINT, Ask("big")),
    Case("a label and a subset", _LABELLED, "B", Ask("big", subset=["A", "B"])),
    Case("the only labelled endpoint is drained", _LABELLED, NO_ENDPOINT, Ask("biggest"), drained="C"),
    # Affinity
    Case(
        "a session whose endpoint is outside the subset goes elsewhere", _TWO, "A",
        Ask(same_session=True, subset=["A"]),
        before=_ON_B,
    ),
    Case("a session stays on its endpoint", _TWO, "B.*", Ask(same_session=True), before=_ON_B),
    Case(
        "a prompt follows its prefix", (_vllm(9, 0.5), _vllm(0, 0.5)), "AB",
        Ask(prompt=f"{_LONG} And then?"),
        before=_SERVED_BY_A,
    ),
    Case(
        "no prefix is shared with another model", (_vllm(9, 0.5), _vllm(0, 0.4)), "BA",
        Ask("other", _LONG),
        before=_SERVED_BY_A,
    ),
    Case(
        "no prefix is shared with another tenant's salt", (_vllm(8, 0.5), _vllm(0, 0.4)), "BA",
        Ask(prompt=_LONG, salt="mine"),
        before=_SERVED_BY_A,
    ),
    # Engines
    Case("SGLang's metrics", (_sglang(8, 0.5), _sglang(1, 0.2), _sglang(1, 0.9)), "BCA", group="sglang"),
    Case("a recorded SGLang page", (_real("sglang-priority"), _sglang(2000, 0.5)), "BA", group="sglang"),
    Case("TensorRT-LLM", (_tensorrt(4, 0.1), _tensorrt(0, 0.8), _tensorrt(0, 0.3)), "CBA", group="trt"),
    Case("a recorded TensorRT-LLM page", (_tensorrt(5, 0.9), _real("tensorrt-llm")), "BA", group="trt"),
    Case("configured names of series", (_own(7, 0.5), _own(2, 0.5), _own(3, 0.5)), "BCA", group="own"),
    Case("another engine", (_vllm(0, 0, state="broken"), _own(7, 0.9), _own(1, 0.1)), "CAB", group="own"),
    Case("engines side by side", (_sglang(8, 0.5), _vllm(5, 0.5), _tensorrt(2, 0.5), _BUSY), "CBA"),
    Case("Triton's and llama.cpp's pages", (_real("llama.cpp-b4000"), _real("triton-tensorrt-llm")), "BA"),
    # Without scorers
    Case("a label without scorers", _LABELLED, "C", Ask("biggest"), "unscored"),
    Case("a label that no endpoint has, without scorers", _TWO, NO_ENDPOINT, Ask("big"), "unscored"),
    Case("least in flight without scorers", _TWO, "BA", Ask(), "unscored", running=(Ask(subset=["A"]),)),
    Case("no endpoints without scorers", (), NO_ENDPOINT, Ask(), "unscored"),
)  # fmt: skip
