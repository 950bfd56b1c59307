"""Parsing of metrics pages, whole or malformed, of an engine that is configured or found from the page."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError
from tables import cases

from picker_fleet.domain.engines import ENGINES, Engine
from picker_fleet.domain.scraping import Scraping
from picker_fleet.endpoints import metrics_page
from picker_fleet.endpoints.metrics_page import BadPage, PageReader
from picker_fleet.endpoints.readings import EndpointMetrics

PAGES = Path(__file__).parents[1] / "data" / "pages"
SIMPLE = Engine("simple", waiting=("queue",), running=("run",), kv_utilisation=("kv",), adapters=("lora",))
OLDER, NEWER = {"started_s": 1760356823.84}, {"started_s": 1780356823.84, "kv_tokens": 439568.0}
ALL = Scraping().engines()
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
PART = 32 * 1024


def fed(text: bytes, engines: Sequence[Engine] = (SIMPLE,), part: int = PART) -> PageReader:
    """A page reader that was fed `text` in parts of `part` bytes."""
    reader = PageReader(engines)
    for at in range(0, len(text), part):
        if not reader.feed(text[at : at + part]):
            break
    return reader


def read(text: str, *engines: Engine) -> EndpointMetrics:
    return fed(text.encode(), engines or (SIMPLE,)).result(scraped_ms=5)


def adapters(most: int | None, active: str = "", waiting: str = "") -> dict[str, Any]:
    names = {"active_adapters": active, "waiting_adapters": waiting}
    return {"max_adapters": most, **{key: frozenset(text.split()) for key, text in names.items()}}


@cases("file, engine, expected", {
    file: (file, engine, EndpointMetrics(
        5, waiting, running, share, models=frozenset(models.split()), **more,
    ))
    for file, engine, models, waiting, running, share, more in (
        ("vllm-0.6", "vllm", "llama", 2.0, 8.0, 0.31254, OLDER),
        ("vllm-0.9-api-servers", "vllm", LLAMA, 2.0, 5.0, 0.1875, {"prefix_queries": 91230.0}),
        ("vllm-0.10-lora", "vllm", LLAMA, 7.0, 23.0, 0.6171875,
         adapters(4, "sql-lora chat-lora", "code-lora") | OLDER | {"preemptions": 2.0, "kv_tokens": 439568.0}
         | {"prefix_queries": 2488544.0, "prefix_hits": 1714176.0}),
        ("vllm-0.29-two-engines", "vllm", LLAMA, 7.0, 23.0, 0.4375,
         adapters(4, "sql-lora chat-lora code-lora", "poet-lora") | {"preemptions": 0.0, **NEWER}),
        ("vllm-0.29-asleep", "vllm", LLAMA, 0.0, 0.0, 0.0,
         {"unready": "asleep", "preemptions": 0.0, **NEWER}),
        ("sglang-priority", "sglang", LLAMA, 2826.0, 162.0, 0.28, {"prefix_queries": 8128902.0}),
        ("sglang-tp8", "sglang", "glm", 5.0, 12.0, 0.41, {}),
        ("sglang-dp2-tp2", "sglang", "glm", 4.0, 8.0, 0.5, {"preemptions": 4.0, "kv_tokens": 196608.0}),
        ("tensorrt-llm", "tensorrt-llm", "TinyLlama-1.1B-Chat-v1.0", 1.0, 6.0, 0.1953125, {}),
        ("triton-tensorrt-llm", "triton-tensorrt-llm", "tensorrt_llm", 4.0, 7.0, 0.3125,
         {"kv_tokens": 400000.0}),
        ("triton", "triton", "embedder llama", 7.0, None, None, {}),
        ("tgi", "tgi", "", 9.0, 17.0, None, {}),
        ("llama.cpp-b4000", "llama.cpp", "", 46.0, 4.0, 0.625, {}),
        ("llama.cpp-b6500", "llama.cpp", "", 46.0, 4.0, None, {}),
    )
})  # fmt: skip
def test_engine_and_values_are_read_from_a_page(file: str, engine: str, expected: EndpointMetrics) -> None:
    text = (PAGES / f"{file}.prom").read_bytes()
    for engines in (ALL, (ENGINES[engine],)):
        for part in (PART, 101):
            reader = fed(text, engines, part)
            assert reader.result(scraped_ms=5) == expected
            assert reader.engine is not None
            assert reader.engine.name == engine


def test_model_names_are_ignored_if_a_metrics_page_has_more_than_16() -> None:
    assert read("".join(f'queue{{model_name="{number}"}} 1\n' for number in range(17))).models == frozenset()


@pytest.mark.parametrize("name", ["m" * 257, "\N{GRINNING FACE}" * 65, "a\x1fb", "a\\nb", " "])
def test_a_model_name_that_no_request_can_have_is_ignored(name: str) -> None:
    assert read(f'run{{model_name="{name}"}} 1\nrun{{model_name="llama"}} 1\n').models == {"llama"}


THREE = [
    "queue 3\n", "queue\t3\n", "  queue 3  \n", "queue 3 1700000000000\n", "queue 3\r\n", "queue{} 3\n",
    'queue{a="b"}3\n', 'queue {a="b" , c = "d",} 3\n', 'queue{a="}"} 3\n', 'queue{a="\\"} 9"} 3\n',
    'queue{a="queue 9"} 3\n', "queue 3\nqueue_length 9\nmy_queue 9\nqueue:x 9\n",
    "# HELP queue 9\n# TYPE queue gauge\nqueue 3\n", 'queue 3 # {trace_id="a"} 9 1.5\n',
    'queue 3 17 # {trace_id="a"} 9\n',
]  # fmt: skip
OTHERS = {
    "queue 1.5e+02\n": 150.0,
    'queue{a="1"} 3\nqueue{a="2"} 4\n': 7.0,
    'queue{a="1",b="2"} 3\nqueue{b="2",a="1"} 4\n': 4.0,
    'queue{a="1"} NaN\nqueue{a="2"} 4\n': 4.0,
    'queue{tp_rank="0"} 3\nqueue{tp_rank="1"} 4\n': 4.0,
    'queue{a="1"} 1e308\nqueue{a="2"} 4\n': 4.0,
    'queue{dp_rank="0",tp_rank="0"} 3\nqueue{dp_rank="1",tp_rank="1"} 4\n': 7.0,
}
UNKNOWN = ["queue NaN\nrun 1\n", "queue +Inf\nrun 1\n", "queue -1\nrun 1\n", "run 1\nqueue 3", "run 1\n"]


@pytest.mark.parametrize(
    ("text", "waiting"), (dict.fromkeys(THREE, 3.0) | OTHERS | dict.fromkeys(UNKNOWN)).items()
)
def test_a_line_of_a_page_is_read_by_the_rules_of_the_format(text: str, waiting: float | None) -> None:
    metrics = read(text)
    assert (metrics.waiting, metrics.remark) == (waiting, None)


@cases("text, share", {
    "a share": ("kv 0.5\n", 0.5),
    "a share just above 1": ("kv 1.0000001\n", 1.0),
    "the highest of several": ('kv{e="0"} 0.2\nkv{e="1"} 0.9\n', 0.9),
    "a value above 1": ("run 1\nkv 87\n", None),
    "a value below 0": ("run 1\nkv -1\n", None),
})  # fmt: skip
def test_kv_cache_utilisation_is_the_highest_share_on_the_page(text: str, share: float | None) -> None:
    assert read(text).kv_utilisation == share


@cases("bad, said", {
    "a word": ("queue three\n", "queue has the value b'three'"),
    "an underscore": ("queue 1_000\n", "value b'1_000'"),
    "no value": ("queue\n", "queue is followed by b''"),
    "an open quote": ('queue{a="b} 3\n', "followed by"),
    "too many words": ("queue 3 and more\n", "followed by"),
    "labels without values": ("queue{a} 3\n", "no name=value pairs"),
    "values without quotes": ("queue{a=b} 3\n", "no name=value pairs"),
    "hundreds of labels": ("queue{" + 'a="",' * 200 + "} 3\n", "more than 256 quotes and backslashes"),
    "a long line": ('queue{a="' + "b" * 300_000 + '"} 1\n', "a line of more than 262144 bytes begins with"),
    "adapters without end": (
        'lora{running_lora_adapters="' + "a," * 70_000 + '"} 1\n', "lora names more adapters than are read"
    ),
})  # fmt: skip
def test_the_remark_names_a_malformed_line_and_the_other_lines_are_read(bad: str, said: str) -> None:
    text = f'run 1\n{bad}queue{{a="1"}} 2\nkv 0.5\n'
    metrics = read(text)
    assert (metrics.waiting, metrics.running, metrics.kv_utilisation) == (2.0, 1.0, 0.5)
    assert said in (metrics.remark or "")
    with pytest.raises(BadPage, match=re.escape(said)):
        read(bad)


@pytest.mark.parametrize("text", ["", "<html>not here</html>\n"])
def test_a_metrics_page_without_any_known_metric_series_is_refused(text: str) -> None:
    with pytest.raises(BadPage, match="none of the series of simple"):
        read(text)


def test_the_remark_on_a_page_names_the_first_three_of_many_faults() -> None:
    told = ["queue has the value b'x'"] * 3 + ["97 more"]
    assert read("run 1\n" + "queue x\n" * 100).remark == "; ".join(told)


def test_a_metrics_page_of_any_length_is_read_in_steps_and_the_work_for_it_is_bounded() -> None:
    noise = b"".join(b'other_bucket{le="%d"} 1\n' % at for at in range(2000))
    long = b'queue{engine="0"} 3\n' + noise * 80 + b'run 2\nqueue{engine="1"} 4\n'
    assert len(long) > 3_000_000
    reader = fed(long)
    assert reader.result(5) == EndpointMetrics(5, 7.0, 2.0)
    # A reader stops on an endless metrics page: it keeps complete values, and no sum that may lack series.
    endless = b'run 2\nqueue{engine="0"} 3\n' + noise
    reader = PageReader((SIMPLE,))
    assert any(not reader.feed(endless if at == 0 else noise) for at in range(2000))
    metrics = reader.result(5)
    assert (metrics.running, metrics.waiting) == (2.0, 3.0)
    assert "its rest is left out" in (metrics.remark or "")
    reader = PageReader((SIMPLE,))
    assert not all(
        reader.feed(b"run 2\n" + b"".join(b'queue{a="%d"} 1\n' % (at * 500 + n) for n in range(500)))
        for at in range(1000)
    )
    assert (reader.result(5).running, reader.result(5).waiting) == (2.0, None)


@cases("line", {
    "malformed lines": ("queue x\n",),
    "long labels": ('queue{a="' + "\N{GRINNING FACE}" * 50_000 + '"} 1\n',),
    "long names of labels": ("queue{" + "a" * 200_000 + '="a"} 1\n',),
})  # fmt: skip
def test_the_number_of_page_lines_that_take_time_or_memory_is_limited(line: str) -> None:
    reader, fed_bytes, part = PageReader((SIMPLE,)), 0, line.encode() * (1 + PART // len(line))
    while reader.feed(part):
        fed_bytes += len(part)
    assert fed_bytes < 8 * 1024 * 1024


def lora(running: str, waiting: str, value: float, **labels: str) -> str:
    named = {**labels, "max_lora": "4", "running_lora_adapters": running, "waiting_lora_adapters": waiting}
    return "lora{" + ",".join(f'{key}="{text}"' for key, text in named.items()) + f"}} {value}\n"


@cases("lines, active, waiting", {
    "the latest sample only": (lora("x", "", 1) + lora("a", "b", 9) + lora("y", "", 0.5), "a", "b"),
    "the latest sample of each engine": (
        lora("a", "", 5, engine="0") + lora("x", "", 1, engine="1") + lora("b", "", 4, engine="1"), "a b", ""
    ),
    "an adapter that runs and waits": (lora("a,b", "b,c", 1), "a b", "c"),
    "a value that is no time": (lora("a", "", 1) + lora("b", "", math.nan), "a", ""),
    "escapes": (lora('a, b\\"c\\\\d', "", 1), 'a b"c\\d', ""),
    "more label sets than there are names": (
        "".join(lora(f"a{at}", "", at) for at in range(1001)), "a1000", ""
    ),
})  # fmt: skip
def test_the_adapters_of_all_engines_on_a_metrics_page_count(lines: str, active: str, waiting: str) -> None:
    assert read(f"run 1\nqueue 2\n{lines}") == EndpointMetrics(5, 2.0, 1.0, **adapters(4, active, waiting))


@pytest.mark.parametrize("limit", ["", "many", "-1", "²", "9" * 5000])
def test_an_adapter_limit_that_is_not_a_number_is_unknown(limit: str) -> None:
    metrics = read(f'run 1\nlora{{max_lora="{limit}",running_lora_adapters="a"}} 1\n')
    assert (metrics.max_adapters, metrics.active_adapters) == (None, {"a"})


NAMES = ("queue", "queue_x", "queue:", "run", "kv", "prequeue")
VALUES = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True).map(
        lambda value: {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, repr(value).replace("nan", "NaN"))
    ),
    st.integers(-10, 10_000).map(str),
    st.floats(0, 1e9).map(lambda value: f"{value:.6e}"),
)
LABEL_VALUES = st.text(st.sampled_from('ab "\\\n{},=é#'), max_size=8)
LABELS = st.dictionaries(st.sampled_from(("a", "b_1", "le", "priority")), LABEL_VALUES, max_size=3)


@st.composite
def lines(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from(NAMES))
    others = (f"# HELP {name} queue 12 {{}} words", f"# TYPE {name} gauge", "", " ", "\t", f"# {name} 12")
    if draw(st.integers(0, 6)) > 2:  # in four of seven draws, a line without a value
        return draw(st.sampled_from(others))
    labels = draw(LABELS)
    shown = ""
    if labels or draw(st.booleans()):
        escape = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
        shown = "{" + ",".join(f'{key}="{value.translate(escape)}"' for key, value in labels.items()) + "}"
    stamp = draw(st.sampled_from(("", "", " 1700000000000")))
    return f"{name}{shown} {draw(VALUES)}{stamp}"


@given(st.lists(lines(), max_size=12))
def test_wanted_metric_series_are_read_as_by_a_full_parser(page_lines: list[str]) -> None:
    text = "".join(f"{line}\n" for line in page_lines)
    wanted = ("queue", "run", "kv")
    expected = [
        repr((sample.name, sample.labels, float(sample.value)))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in wanted
    ]
    faults: list[str] = []
    found = [
        repr((name, sample.labels, sample.value))
        for name in wanted
        for sample in metrics_page.samples(text.encode(), name.encode(), faults.append)
    ]
    assert sorted(found) == sorted(expected)
    assert not faults


TRTLLM = {"llm-d.ai/engine-type": "trtllm-serve"}
SGLANG = {"inference.networking.k8s.io/engine-type": "SGLang"}


@cases("settings, labels, engines", {
    "found from the page": ({}, {}, list(ENGINES)),
    "a label": ({}, TRTLLM, ["tensorrt-llm"]),
    "another label": ({}, SGLANG, ["sglang"]),
    "a configured label": ({"engine_label": "e"}, TRTLLM | {"e": "vllm"}, ["vllm"]),
    "an unknown engine in a label": ({}, {"llm-d.ai/engine-type": "acme"}, list(ENGINES)),
    "a configured engine": ({"engine": "sglang"}, {}, ["sglang"]),
    "a label and a configured engine": ({"engine": "sglang"}, TRTLLM, ["tensorrt-llm"]),
    "configured series alone": ({"engine": "acme", "series": {"waiting": "q"}}, {}, ["acme"]),
    "series besides known engines": ({"series": {"waiting": "q"}}, {}, [*ENGINES, "series"]),
})  # fmt: skip
def test_the_engine_is_known_from_a_label_or_the_configuration_or_the_page(
    settings: dict[str, Any], labels: dict[str, str], engines: list[str]
) -> None:
    scraping = Scraping(**settings)
    assert [each.name for each in scraping.engines(scraping.engine_named(labels))] == engines


def test_configured_series_replace_series_of_a_configured_engine_and_precede_found_engines() -> None:
    own = {"waiting": 'q{kind="waiting"}', "path": "/stats"}
    (engine,) = Scraping(engine="vllm", series=own).engines()
    assert (engine.waiting, engine.path) == ((own["waiting"],), "/stats")
    assert engine.running == ENGINES["vllm"].running
    text = 'q{kind="all"} 531\nq{kind="waiting"} 4\nsglang:num_queue_reqs 7\nsglang:num_running_reqs 2\n'
    metrics = read(text, *Scraping(series=own).engines())
    assert (metrics.waiting, metrics.running) == (4.0, 2.0)


def test_the_aggregation_of_series_by_label_is_configurable() -> None:
    text = 'queue{shard="0",tp_rank="0"} 3\nqueue{shard="1",tp_rank="1"} 4\n'
    for aggregation, waiting in (({}, 7.0), ({"shard": "same"}, 4.0), ({"tp_rank": "sum"}, 7.0)):
        settings = Scraping(engine="x", series={"waiting": "queue"}, aggregation=aggregation)
        assert read(text, *settings.engines()).waiting == waiting


@cases("settings, said", {
    "an unknown name": ({"engine": "acme"}, "'acme' is not one of auto, vllm, sglang, tensorrt-llm"),
    "an unknown key": ({"series": {"queue": "x"}}, "'queue' is not one of waiting, running"),
    "a series with a blank": ({"series": {"waiting": "a b"}}, "'a b' is no name"),
    "a selector without a value": ({"series": {"waiting": "a{b}"}}, "has no valid label=value pairs"),
    **{f"a series {name!r}": ({"series": {"waiting": name}}, "no name") for name in ("", "9a")},
    **{f"a path {at!r}": ({"series": {"path": at}}, "no path") for at in ("metrics", "/a b", "/a\r\nX: y")},
})  # fmt: skip
def test_an_invalid_engine_setting_raises_a_configuration_error(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Scraping(**settings)
