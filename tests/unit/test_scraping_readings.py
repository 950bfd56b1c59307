"""Readings on the wire and on the cache: nothing is lost, nothing bad gets in, and ages are the reader's."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker_fleet.endpoints.metrics_channel import decode_message, encode_message
from picker_fleet.endpoints.readings import (
    BadReading,
    EndpointMetrics,
    MetricsCache,
    decode_reading,
    encode_reading,
)

AMOUNTS = st.none() | st.floats(0, 1e12)
NAMES = st.frozensets(st.text(st.characters(codec="utf-8"), max_size=10), max_size=4)


@st.composite
def readings(draw: st.DrawFn) -> EndpointMetrics:
    fault = draw(st.none() | st.text(st.characters(codec="utf-8")))
    return EndpointMetrics(
        scraped_ms=draw(st.integers(0, 2**40)),
        waiting=draw(AMOUNTS),
        running=draw(AMOUNTS),
        kv_utilisation=draw(st.none() | st.floats(0, 1)),
        max_adapters=draw(st.none() | st.integers(0, 10_000)),
        active_adapters=draw(NAMES),
        waiting_adapters=draw(NAMES),
        fault=fault,
        failures=0 if fault is None else draw(st.integers(1, 1000)),
    )


@given(readings(), st.integers(0, 2**41))
def test_a_reading_survives_the_wire(reading: EndpointMetrics, shift_ms: int) -> None:
    assert decode_reading(encode_reading(reading, shift_ms), -shift_ms) == reading


def test_what_is_unknown_takes_no_room() -> None:
    assert encode_reading(EndpointMetrics(scraped_ms=7, waiting=2.0), 3) == b'{"at":10,"waiting":2.0}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("[]", "an object"),
        ("{}", "at of a reading"),
        ('{"at":-1}', "at of a reading"),
        ('{"at":true}', "at of a reading"),
        ('{"at":1,"waiting":"2"}', "waiting of a reading is a number"),
        ('{"at":1,"running":-2}', "running of a reading"),
        ('{"at":1,"kv":1.5}', "kv of a reading is a number from 0 to 1"),
        ('{"at":1,"max_adapters":null}', "max_adapters"),
        ('{"at":1,"active":"a"}', "list of names"),
        ('{"at":1,"active":[1]}', "list of names"),
        ('{"at":1,"fault":1}', "fault of a reading"),
    ],
)
def test_a_text_that_is_no_reading_is_refused_with_a_reason(text: str, said: str) -> None:
    with pytest.raises(BadReading, match=said):
        decode_reading(text, 0)


def test_a_newer_versions_keys_are_passed_over() -> None:
    assert decode_reading('{"at":1,"speed":9}', 0) == EndpointMetrics(scraped_ms=1)


def test_readings_of_a_message_keep_their_age() -> None:
    sent = encode_message("one", 1_700_000_000_040, {"a:1": encode_reading(reading_at(1_700_000_000_000), 0)})
    message = decode_message(sent, 5000)
    assert message.sender == "one"
    assert message.readings == {"a:1": reading_at(4960)}
    assert message.faults == ()


def test_one_bad_reading_leaves_the_others() -> None:
    message = decode_message('{"from":"one","sent":5,"readings":{"a:1":{"at":5},"b:1":{"at":"x"}}}', 5)
    assert message.readings.keys() == {"a:1"}
    assert message.faults == ("b:1: at of a reading is a whole number, not 'x'",)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"from":1,"sent":1,"readings":{}}', '{"from":"a"}'])
def test_a_text_that_is_no_message_is_refused(text: str) -> None:
    with pytest.raises(BadReading, match="a message"):
        decode_message(text, 0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def reading_at(scraped_ms: int, **more: object) -> EndpointMetrics:
    return dataclasses.replace(
        EndpointMetrics(scraped_ms, waiting=2.0, running=1.0, kv_utilisation=0.5, max_adapters=4), **more
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(clock: Clock) -> MetricsCache:
    return MetricsCache(stale_after_s=1.0, clock=clock)


def test_a_fresh_reading_is_known_and_has_its_age(cache: MetricsCache, clock: Clock) -> None:
    cache.update({"a:1": reading_at(100_000, active_adapters=frozenset({"x"}))})
    clock.now_s = 100.75
    reading = cache.snapshot()["a:1"]
    assert (reading.age_s, reading.known) == (0.75, True)
    assert reading.metrics == reading_at(100_000, active_adapters=frozenset({"x"}))


def test_a_stale_reading_counts_as_unknown(cache: MetricsCache, clock: Clock) -> None:
    cache.update({"a:1": reading_at(100_000, active_adapters=frozenset({"x"}))})
    clock.now_s = 101.25
    reading = cache.snapshot()["a:1"]
    assert (reading.age_s, reading.known) == (1.25, False)
    assert reading.metrics == EndpointMetrics(100_000)


def test_a_failed_scrape_is_unknown_at_once_and_stays_a_fault(cache: MetricsCache, clock: Clock) -> None:
    cache.update({"a:1": reading_at(100_000)})
    cache.update({"a:1": EndpointMetrics(100_000, fault="no page", failures=1)})
    assert not cache.snapshot()["a:1"].known
    clock.now_s = 105.0
    assert cache.snapshot()["a:1"].metrics.fault == "no page"


def test_an_older_reading_does_not_take_the_place_of_a_newer(cache: MetricsCache) -> None:
    cache.update({"a:1": reading_at(99_500, waiting=9.0)})
    cache.update({"a:1": reading_at(99_400, waiting=1.0)})
    assert cache.snapshot()["a:1"].metrics.waiting == 9.0
    cache.update({"a:1": reading_at(99_500, waiting=3.0)})
    assert cache.snapshot()["a:1"].metrics.waiting == 3.0


def test_a_reading_of_the_future_does_not_hide_those_to_come(cache: MetricsCache, clock: Clock) -> None:
    cache.update({"a:1": reading_at(3_700_000, waiting=9.0)})
    assert cache.snapshot()["a:1"].age_s == 0.0
    clock.now_s = 100.5
    cache.update({"a:1": reading_at(100_400, waiting=1.0)})
    assert cache.snapshot()["a:1"].metrics.waiting == 1.0


def test_endpoints_that_left_are_forgotten(cache: MetricsCache) -> None:
    cache.update({"a:1": reading_at(100_000), "b:1": reading_at(100_000)})
    assert cache.snapshot().keys() == {"a:1", "b:1"}
    cache.retain(["b:1", "c:1"])
    assert cache.snapshot().keys() == cache.addresses == {"b:1"}


def test_a_snapshot_is_shared_for_a_moment_and_remade_after_an_update(
    cache: MetricsCache, clock: Clock
) -> None:
    cache.update({"a:1": reading_at(100_000)})
    first = cache.snapshot()
    clock.now_s = 100.005
    assert cache.snapshot() is first
    cache.update({"a:1": reading_at(100_004, waiting=7.0)})
    second = cache.snapshot()
    assert second["a:1"].metrics.waiting == 7.0
    clock.now_s = 100.016
    assert cache.snapshot() is not second
