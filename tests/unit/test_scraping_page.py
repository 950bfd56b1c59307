"""Metrics pages: how one comes over one kept connection, and what is read of it."""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from background import until
from hypothesis import given
from hypothesis import strategies as st
from page_server import PAGE, PageServer, answered, serving
from prometheus_client.parser import text_string_to_metric_families

from picker_fleet.endpoints import metrics_page
from picker_fleet.endpoints.metrics_page import BadPage, Connection, FetchError
from picker_fleet.endpoints.readings import EndpointMetrics
from picker_fleet.errors import ConfigError
from picker_fleet.sections import ENGINES, SGLANG, TENSORRT_LLM, VLLM, Engine, engine_of


@pytest.fixture
async def server() -> AsyncIterator[PageServer]:
    async with serving() as server:
        yield server


@pytest.fixture
async def connection(server: PageServer) -> AsyncIterator[Connection]:
    connection = Connection(server.address, "/metrics", max_page_bytes=1000)
    yield connection
    connection.close()


async def fetch(connection: Connection) -> bytes:
    async with asyncio.timeout(20):
        return await connection.fetch()


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n"
INTERIM = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "page", "connections"),
    [
        (answered(PAGE), PAGE, 1),
        (CHUNKED, b"abcde", 1),
        (INTERIM + answered(b"abc"), b"abc", 1),
        (answered(PAGE, "Connection: close"), PAGE, 2),
    ],
)
async def test_pages_come_over_one_connection_unless_the_server_closes_it(
    server: PageServer, connection: Connection, answer: bytes, page: bytes, connections: int
) -> None:
    server.answer = answer
    assert [await fetch(connection) for _ in range(2)] == [page] * 2
    assert server.connections == connections
    assert server.requests[0].startswith(f"GET /metrics HTTP/1.1\r\nHost: {server.address}\r\n")


async def test_a_page_may_end_with_its_connection(server: PageServer, connection: Connection) -> None:
    server.act = server.cut(b"HTTP/1.0 200 OK\r\n\r\nabc")
    assert [await fetch(connection) for _ in range(2)] == [b"abc"] * 2
    assert server.connections == 2


async def test_a_connection_closed_while_idle_costs_nothing(
    server: PageServer, connection: Connection
) -> None:
    async def act(writer: asyncio.StreamWriter) -> None:
        if len(server.requests) == 2:
            writer.transport.abort()
        else:
            writer.write(answered(PAGE))

    server.act = act
    assert [await fetch(connection) for _ in range(2)] == [PAGE] * 2
    assert server.connections == 2
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (answered(b"no", status="503 Service Unavailable"), "status", "answered 503"),
        (answered(b"", "Location: /metrics/", status="307 Temporary Redirect"), "status", "answered 307"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "page", "no HTTP answer"),
        (answered(b"x" * 1001), "page", "more than 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "page", "no HTTP answer"),
    ],
)
async def test_a_wrong_answer_is_a_fault_and_ends_its_connection(
    server: PageServer, connection: Connection, answer: bytes, kind: str, said: str
) -> None:
    server.answer = answer
    with pytest.raises(FetchError, match=said) as raised:
        await fetch(connection)
    assert raised.value.kind == kind
    server.answer = answered(PAGE)
    assert await fetch(connection) == PAGE
    assert server.connections == 2


@pytest.mark.parametrize("part", [b"", b"HTTP/1.1 200 OK\r\nContent-Le", answered(PAGE)[:-1], None])
async def test_an_answer_cut_short_or_a_missing_server_is_a_fault(
    server: PageServer, connection: Connection, part: bytes | None
) -> None:
    if part is None:
        server.stop()
    else:
        server.act = server.cut(part)
    said = "no connection" if part is None else "closed before the page was complete"
    with pytest.raises(FetchError, match=said) as raised:
        await fetch(connection)
    assert raised.value.kind == "connection"


async def test_a_fetch_that_is_given_up_ends_its_connection(
    server: PageServer, connection: Connection
) -> None:
    server.act = server.hang
    task = asyncio.create_task(connection.fetch())
    await until(lambda: len(server.requests) == 1)
    task.cancel()
    await asyncio.wait((task,), timeout=10)
    assert task.cancelled()
    server.release()
    await until(lambda: server.open == 0)
    assert await fetch(connection) == PAGE


DATA = Path(__file__).parents[1] / "data"
SIMPLE = Engine("simple", waiting=("queue",), running=("run",), kv_utilisation=("kv",), adapters=("lora",))


def read(text: str, engine: Engine = SIMPLE) -> EndpointMetrics:
    return metrics_page.read(text.encode(), engine, scraped_ms=5)


@pytest.mark.parametrize(
    ("file", "engine", "waiting", "running", "kv_utilisation", "adapters"),
    [
        (
            "vllm.prom",
            VLLM,
            7.0,
            23.0,
            0.6171875,
            (4, frozenset({"sql-lora", "chat-lora"}), frozenset({"code-lora"})),
        ),
        ("vllm-older.prom", VLLM, 2.0, 8.0, 0.31254, ()),
        ("sglang.prom", SGLANG, 2826.0, 162.0, 0.28, ()),
        ("tensorrt-llm.prom", TENSORRT_LLM, 1.0, 6.0, 0.1953125, ()),
    ],
)
def test_the_page_of_an_engine_says_what_it_means(
    file: str,
    engine: Engine,
    waiting: float,
    running: float,
    kv_utilisation: float,
    adapters: tuple[Any, ...],
) -> None:
    found = metrics_page.read((DATA / file).read_bytes(), engine, scraped_ms=5)
    assert found == EndpointMetrics(5, waiting, running, kv_utilisation, *adapters)


def test_the_pages_are_legal_for_a_full_parser() -> None:
    for path in DATA.glob("*.prom"):
        assert list(text_string_to_metric_families(path.read_text()))


@pytest.mark.parametrize(
    ("text", "waiting"),
    [
        ("queue 3\n", 3.0),
        ("queue\t3\n", 3.0),
        ("  queue 3  \n", 3.0),
        ("queue 3 1700000000000\n", 3.0),
        ("queue 3\r\n", 3.0),
        ("queue{} 3\n", 3.0),
        ('queue{a="b"}3\n', 3.0),
        ('queue {a="b" , c = "d",} 3\n', 3.0),
        ('queue{a="}"} 3\n', 3.0),
        ('queue{a="\\"} 9"} 3\n', 3.0),
        ('queue{a="queue 9"} 3\n', 3.0),
        ("queue 1.5e+02\n", 150.0),
        ("queue 3\nqueue_length 9\nmy_queue 9\nqueue:x 9\n", 3.0),
        ("# HELP queue 9\n# TYPE queue gauge\nqueue 3\n", 3.0),
        ('queue{a="1"} 3\nqueue{a="2"} 4\n', 7.0),
        ('queue{a="1",b="2"} 3\nqueue{b="2",a="1"} 4\n', 4.0),
        ('queue{a="1"} NaN\nqueue{a="2"} 4\n', 4.0),
        ("queue NaN\nrun 1\n", None),
        ("queue +Inf\nrun 1\n", None),
        ("queue -1\nrun 1\n", None),
        ("run 1\nqueue 3", None),
        ("run 1\n", None),
    ],
)
def test_a_line_is_read_by_the_rules_of_the_format(text: str, waiting: float | None) -> None:
    assert read(text).waiting == waiting


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("kv 0.5\n", 0.5),
        ("kv 1.0000001\n", 1.0),
        ('kv{e="0"} 0.2\nkv{e="1"} 0.9\n', 0.9),
        ("run 1\nkv 87\n", None),
        ("run 1\nkv -1\n", None),
    ],
)
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
    metrics = read(text)
    assert metrics.active_adapters == {"a", 'b"c\\d'}
    assert metrics.waiting_adapters == {"e"}
    assert metrics.max_adapters == 2


@pytest.mark.parametrize("limit", ["", "many", "-1", "²", "9" * 5000])
def test_a_limit_of_adapters_that_is_no_number_is_unknown(limit: str) -> None:
    metrics = read(f'run 1\nlora{{max_lora="{limit}",running_lora_adapters="a"}} 1\n')
    assert metrics.max_adapters is None
    assert metrics.active_adapters == {"a"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "none of the series of simple"),
        ("<html>not here</html>\n", "none of the series"),
        ("queue three\n", "value b'three'"),
        ("queue 1_000\n", "value b'1_000'"),
        ("queue\n", "followed by b''"),
        ('queue{a="b} 3\n', "followed by"),
        ("queue 3 and more\n", "followed by"),
        ("queue{a} 3\nqueue{b} 4\n", "no name=value pairs"),
        ("queue{a=b} 3\nqueue 4\n", "no name=value pairs"),
        ("queue 1\n" * 1001, "queue has more than 1000 series"),
        ('queue{a="' + "b" * 70_000 + '"} 1\n', "queue has a line of more than 65536 bytes"),
    ],
)
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
    kind = draw(st.sampled_from(("sample", "sample", "sample", "help", "type", "blank", "comment")))
    name = draw(st.sampled_from(NAMES))
    if kind == "help":
        return f"# HELP {name} queue 12 {{}} words"
    if kind == "type":
        return f"# TYPE {name} gauge"
    if kind == "blank":
        return draw(st.sampled_from(("", " ", "\t")))
    if kind == "comment":
        return f"# {name} 12"
    labels = draw(LABELS)
    shown = ""
    if labels or draw(st.booleans()):
        escaped = {
            key: value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            for key, value in labels.items()
        }
        shown = "{" + ",".join(f'{key}="{value}"' for key, value in escaped.items()) + "}"
    stamp = draw(st.sampled_from(("", "", " 1700000000000")))
    return f"{name}{shown} {draw(VALUES)}{stamp}"


@given(st.lists(lines(), max_size=12))
def test_wanted_series_are_read_as_a_full_parser_reads_them(page_lines: list[str]) -> None:
    text = "".join(f"{line}\n" for line in page_lines)
    expected = [
        (sample.name, sample.labels, repr(float(sample.value)))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in ("queue", "run", "kv")
    ]
    found = [
        (name, sample.labels(), repr(sample.value))
        for name in ("queue", "run", "kv")
        for sample in metrics_page.samples(text.encode(), name.encode())
    ]

    def ordered(samples: list[tuple[str, dict[str, str], str]]) -> list[tuple[str, dict[str, str], str]]:
        return sorted(samples, key=repr)

    assert ordered(found) == ordered(expected)


@given(st.lists(lines(), min_size=1, max_size=6), st.integers(0, 10_000))
def test_a_page_cut_anywhere_says_no_more_than_its_whole_lines(page_lines: list[str], cut: int) -> None:
    text = "".join(f"{line}\n" for line in page_lines).encode()
    part = text[: cut % (len(text) + 1)]
    whole = part[: part.rfind(b"\n") + 1]
    for name in (b"queue", b"run"):
        said = [repr(sample) for sample in metrics_page.samples(part, name)]
        assert said == [repr(sample) for sample in metrics_page.samples(whole, name)]


def test_an_engine_is_known_by_name_or_a_matter_of_configuration() -> None:
    assert {engine_of(name).waiting for name in ENGINES} == {engine.waiting for engine in ENGINES.values()}
    engine = engine_of("mine", {"waiting": "my_queue", "kv_utilisation": "my:kv", "path": "/stats"})
    assert engine.path == "/stats"
    assert read("my_queue 4\nmy:kv 0.25\n", engine) == EndpointMetrics(5, waiting=4.0, kv_utilisation=0.25)
    # Names replace those of a known engine one by one.
    engine = engine_of("vllm", {"waiting": "vllm:other"})
    assert (engine.waiting, engine.running, engine.path) == (("vllm:other",), VLLM.running, VLLM.path)


@pytest.mark.parametrize(
    ("name", "names", "said"),
    [
        ("tgi", {}, "'tgi' is not one of vllm, sglang, tensorrt-llm"),
        ("tgi", {"queue": "x"}, "'queue' of engine 'tgi' is not one of waiting, running"),
        ("tgi", {"waiting": "a b"}, "'a b' of engine 'tgi' is no name"),
        ("tgi", {"waiting": ""}, "no name"),
        ("tgi", {"waiting": "9a"}, "no name"),
        ("tgi", {"path": "metrics"}, "no path"),
        ("tgi", {"path": "/a b"}, "no path"),
        ("tgi", {"path": "/a\r\nX: y"}, "no path"),
    ],
)
def test_what_cannot_be_an_engine_is_a_configuration_error(
    name: str, names: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        engine_of(name, names)
