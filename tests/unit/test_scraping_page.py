"""Metrics pages: what is read of one."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tables import cases

from picker_fleet.endpoints import metrics_page
from picker_fleet.endpoints.metrics_page import BadPage
from picker_fleet.endpoints.readings import EndpointMetrics
from picker_fleet.errors import ConfigError
from picker_fleet.sections import ENGINES, SGLANG, TENSORRT_LLM, VLLM, Engine, engine_of

DATA = Path(__file__).parents[1] / "data"
SIMPLE = Engine("simple", waiting=("queue",), running=("run",), kv_utilisation=("kv",), adapters=("lora",))


def read(text: str, engine: Engine = SIMPLE) -> EndpointMetrics:
    return metrics_page.read(text.encode(), engine, scraped_ms=5)


ADAPTERS = (4, frozenset({"sql-lora", "chat-lora"}), frozenset({"code-lora"}))


@cases("file, engine, expected", {
    "vLLM": ("vllm.prom", VLLM, EndpointMetrics(5, 7.0, 23.0, 0.6171875, *ADAPTERS)),
    "an older vLLM": ("vllm-older.prom", VLLM, EndpointMetrics(5, 2.0, 8.0, 0.31254)),
    "SGLang": ("sglang.prom", SGLANG, EndpointMetrics(5, 2826.0, 162.0, 0.28)),
    "TensorRT-LLM": ("tensorrt-llm.prom", TENSORRT_LLM, EndpointMetrics(5, 1.0, 6.0, 0.1953125)),
})  # fmt: skip
def test_the_page_of_an_engine_says_what_it_means(
    file: str, engine: Engine, expected: EndpointMetrics
) -> None:
    assert metrics_page.read((DATA / file).read_bytes(), engine, scraped_ms=5) == expected


THREE = [
    "queue 3\n", "queue\t3\n", "  queue 3  \n", "queue 3 1700000000000\n", "queue 3\r\n", "queue{} 3\n",
    'queue{a="b"}3\n', 'queue {a="b" , c = "d",} 3\n', 'queue{a="}"} 3\n', 'queue{a="\\"} 9"} 3\n',
    'queue{a="queue 9"} 3\n', "queue 3\nqueue_length 9\nmy_queue 9\nqueue:x 9\n",
    "# HELP queue 9\n# TYPE queue gauge\nqueue 3\n",
]  # fmt: skip
OTHERS = {
    "queue 1.5e+02\n": 150.0,
    'queue{a="1"} 3\nqueue{a="2"} 4\n': 7.0,
    'queue{a="1",b="2"} 3\nqueue{b="2",a="1"} 4\n': 4.0,
    'queue{a="1"} NaN\nqueue{a="2"} 4\n': 4.0,
}
UNKNOWN = ["queue NaN\nrun 1\n", "queue +Inf\nrun 1\n", "queue -1\nrun 1\n", "run 1\nqueue 3", "run 1\n"]


@pytest.mark.parametrize(
    ("text", "waiting"), (dict.fromkeys(THREE, 3.0) | OTHERS | dict.fromkeys(UNKNOWN)).items()
)
def test_a_line_is_read_by_the_rules_of_the_format(text: str, waiting: float | None) -> None:
    assert read(text).waiting == waiting


@cases("text, share", {
    "a share": ("kv 0.5\n", 0.5),
    "hardly more than all": ("kv 1.0000001\n", 1.0),
    "of several the highest": ('kv{e="0"} 0.2\nkv{e="1"} 0.9\n', 0.9),
    "no share above 1": ("run 1\nkv 87\n", None),
    "none below 0": ("run 1\nkv -1\n", None),
})  # fmt: skip
def test_utilisation_is_the_highest_share(text: str, share: float | None) -> None:
    assert read(text).kv_utilisation == share


def test_a_line_that_names_a_series_without_end_is_read_once() -> None:
    comment = "# " + "queue " * 350_000
    assert read(f"{comment}\nqueue 3\n").waiting == 3


def test_the_latest_adapters_count_and_names_are_unescaped() -> None:
    text = (
        'run 1\nlora{max_lora="2",running_lora_adapters="old",waiting_lora_adapters=""} 1\n'
        'lora{running_lora_adapters="a, b\\"c\\\\d",max_lora="2",waiting_lora_adapters="e"} 3.5e9\n'
        'lora{max_lora="2",running_lora_adapters="older",waiting_lora_adapters=""} NaN\n'
    )
    adapters = (2, frozenset({"a", 'b"c\\d'}), frozenset({"e"}))
    assert read(text) == EndpointMetrics(5, None, 1.0, None, *adapters)


@pytest.mark.parametrize("limit", ["", "many", "-1", "²", "9" * 5000])
def test_a_limit_of_adapters_that_is_no_number_is_unknown(limit: str) -> None:
    metrics = read(f'run 1\nlora{{max_lora="{limit}",running_lora_adapters="a"}} 1\n')
    assert (metrics.max_adapters, metrics.active_adapters) == (None, {"a"})


@cases("text, said", {
    "nothing": ("", "none of the series of simple"),
    "another page": ("<html>not here</html>\n", "none of the series"),
    "a word": ("queue three\n", "value b'three'"),
    "an underscore": ("queue 1_000\n", "value b'1_000'"),
    "no value": ("queue\n", "followed by b''"),
    "an open quote": ('queue{a="b} 3\n', "followed by"),
    "too many words": ("queue 3 and more\n", "followed by"),
    "labels without values": ("queue{a} 3\nqueue{b} 4\n", "no name=value pairs"),
    "values without quotes": ("queue{a=b} 3\nqueue 4\n", "no name=value pairs"),
    "many series": ("queue 1\n" * 1001, "queue has more than 1000 series"),
    "a long line": ('queue{a="' + "b" * 70_000 + '"} 1\n', "queue has a line of more than 65536 bytes"),
})  # fmt: skip
def test_a_page_that_cannot_be_believed_is_refused_with_a_reason(text: str, said: str) -> None:
    with pytest.raises(BadPage, match=said):
        read(text)


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
    if draw(st.integers(0, 6)) > 2:  # four of seven lines
        return draw(st.sampled_from(others))
    labels = draw(LABELS)
    shown = ""
    if labels or draw(st.booleans()):
        escape = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
        shown = "{" + ",".join(f'{key}="{value.translate(escape)}"' for key, value in labels.items()) + "}"
    stamp = draw(st.sampled_from(("", "", " 1700000000000")))
    return f"{name}{shown} {draw(VALUES)}{stamp}"


@given(st.lists(lines(), max_size=12))
def test_wanted_series_are_read_as_a_full_parser_reads_them(page_lines: list[str]) -> None:
    text = "".join(f"{line}\n" for line in page_lines)
    wanted = ("queue", "run", "kv")
    expected = [
        repr((sample.name, sample.labels, float(sample.value)))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in wanted
    ]
    found = [
        repr((name, sample.labels(), sample.value))
        for name in wanted
        for sample in metrics_page.samples(text.encode(), name.encode())
    ]
    assert sorted(found) == sorted(expected)


def test_an_engine_is_known_by_name_or_a_matter_of_configuration() -> None:
    assert {engine_of(name).waiting for name in ENGINES} == {engine.waiting for engine in ENGINES.values()}
    engine = engine_of("mine", {"waiting": "my_queue", "kv_utilisation": "my:kv", "path": "/stats"})
    assert engine.path == "/stats"
    assert read("my_queue 4\nmy:kv 0.25\n", engine) == EndpointMetrics(5, waiting=4.0, kv_utilisation=0.25)
    # Names replace those of a known engine one by one.
    engine = engine_of("vllm", {"waiting": "vllm:other"})
    assert (engine.waiting, engine.running, engine.path) == (("vllm:other",), VLLM.running, VLLM.path)


@cases("names, said", {
    "an unknown name": ({}, "'tgi' is not one of vllm, sglang, tensorrt-llm"),
    "an unknown key": ({"queue": "x"}, "'queue' of engine 'tgi' is not one of waiting, running"),
    "a series with a blank": ({"waiting": "a b"}, "'a b' of engine 'tgi' is no name"),
    **{f"a series {name!r}": ({"waiting": name}, "no name") for name in ("", "9a")},
    **{f"a path {path!r}": ({"path": path}, "no path") for path in ("metrics", "/a b", "/a\r\nX: y")},
})  # fmt: skip
def test_what_cannot_be_an_engine_is_a_configuration_error(names: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        engine_of("tgi", names)
