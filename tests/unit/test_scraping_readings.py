"""The replicas and intervals of scrapes, and the encoding and caching of readings."""

from typing import Any

import pytest
from choosers import fleet_with
from clocks import Clock
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tables import cases

from picker_fleet.domain.config import parse
from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.endpoints.metrics_channel import decode_message, encode_message
from picker_fleet.endpoints.pacing import PROBE_S, REST_PROBE_S, IntervalPolicy, ScrapeCost
from picker_fleet.endpoints.readings import (
    BadReading,
    EndpointMetrics,
    MetricsCache,
    decode_reading,
    encode_reading,
)
from picker_fleet.endpoints.scraping import Assignment, Scrapers, assigned_replica, scrapers_wanted

AMOUNTS = st.none() | st.floats(0, 1e12)
NAMES = st.frozensets(st.text(st.characters(codec="utf-8"), max_size=10), max_size=4)


FIGURES = st.builds(
    EndpointMetrics, scraped_ms=st.integers(0, 2**40), waiting=AMOUNTS, running=AMOUNTS,
    kv_utilisation=st.none() | st.floats(0, 1), max_adapters=st.none() | st.integers(0, 10_000),
    preemptions=AMOUNTS,
    active_adapters=NAMES, waiting_adapters=NAMES, idle_adapters=NAMES,
    remark=st.none() | st.text(st.characters(codec="utf-8")), unready=st.sampled_from((None, "asleep")),
)  # fmt: skip


@st.composite
def readings(draw: st.DrawFn) -> EndpointMetrics:
    fault = draw(st.none() | st.text(st.characters(codec="utf-8")))
    failures = 0 if fault is None else draw(st.integers(1, 1000))
    return replace(draw(FIGURES), fault=fault, failures=failures)


@given(readings(), st.integers(0, 2**41))
def test_an_endpoints_reading_survives_encoding_and_decoding(reading: EndpointMetrics, shift_ms: int) -> None:
    assert decode_reading(encode_reading(reading, shift_ms), -shift_ms) == reading


def test_unknown_values_of_readings_are_not_encoded_and_unknown_keys_are_ignored() -> None:
    assert encode_reading(EndpointMetrics(scraped_ms=7, waiting=2.0), 3) == b'{"at":10,"waiting":2.0}'
    assert decode_reading('{"at":1,"speed":9}', 0) == EndpointMetrics(scraped_ms=1)


NO_READINGS = {
    "{": "no JSON",
    "[]": "`object`",
    "{}": "field `at`",
    '{"at":-1}': r"\$\.at",
    '{"at":1,"waiting":"2"}': r"float.*\$\.waiting",
    '{"at":1,"kv":1.5}': r"<= 1.*\$\.kv",
    '{"at":1,"active":[1]}': r"str.*\$\.active",
}


@pytest.mark.parametrize(("text", "said"), NO_READINGS.items())
def test_a_malformed_reading_of_an_endpoint_is_refused_with_a_reason(text: str, said: str) -> None:
    with pytest.raises(BadReading, match=said):
        decode_reading(text, 0)


def test_readings_from_a_peers_message_keep_their_age() -> None:
    sent = encode_message("one", 1_700_000_000_040, {"a:1": encode_reading(reading_at(1_700_000_000_000), 0)})
    message = decode_message(sent, 5000)
    assert (message.sender, message.readings, message.faults) == ("one", {"a:1": reading_at(4960)}, ())


def test_a_malformed_reading_does_not_affect_other_readings_of_a_message() -> None:
    message = decode_message('{"from":"one","sent":5,"readings":{"a:1":{"at":5},"b:1":{"at":"x"}}}', 5)
    assert message.readings.keys() == {"a:1"}
    assert message.faults == ("b:1: not a reading: Expected `int`, got `str` - at `$.at`",)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"from":1,"sent":1,"readings":{}}', '{"from":"a"}'])
def test_a_malformed_message_of_readings_is_refused(text: str) -> None:
    with pytest.raises(BadReading, match="a message"):
        decode_message(text, 0)


def reading_at(scraped_ms: int, **more: object) -> EndpointMetrics:
    figures: dict[str, Any] = {"waiting": 2.0, "running": 1.0, "kv_utilisation": 0.5}
    figures |= {"preemptions": 3.0, "max_adapters": 4}
    return EndpointMetrics(scraped_ms, **figures | more)


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def cache(clock: Clock) -> MetricsCache:
    return MetricsCache(stale_after_s=1.0, clock=clock)


def test_an_endpoints_reading_is_known_until_it_is_stale(cache: MetricsCache, clock: Clock) -> None:
    fresh = reading_at(100_000, active_adapters=frozenset({"x"}))
    cache.update({"a:1": fresh})
    for now_s, known, metrics in ((100.75, True, fresh), (101.25, False, EndpointMetrics(100_000))):
        clock.now_s = now_s
        reading = cache.snapshot()["a:1"]
        assert (reading.age_s, reading.known, reading.metrics) == (now_s - 100, known, metrics)


def test_after_a_failed_scrape_values_are_used_until_stale_and_the_fault_is_shown(
    cache: MetricsCache, clock: Clock
) -> None:
    worked = reading_at(100_000)
    cache.update({"a:1": worked})
    clock.now_s = 100.9
    cache.update({"a:1": EndpointMetrics(100_500, fault="no page", failures=1)})
    reading = cache.snapshot()["a:1"]
    assert (reading.known, reading.age_s) == (True, pytest.approx(0.9))
    assert reading.metrics == replace(worked, fault="no page", failures=1)
    clock.now_s = 101.1
    reading = cache.snapshot()["a:1"]
    assert not reading.known
    assert reading.metrics == EndpointMetrics(100_000, fault="no page", failures=1)


def test_an_older_reading_does_not_replace_a_newer_one(cache: MetricsCache, clock: Clock) -> None:
    def waiting(scraped_ms: int, amount: float) -> float | None:
        cache.update({"a:1": reading_at(scraped_ms, waiting=amount)})
        return cache.snapshot()["a:1"].metrics.waiting

    assert [waiting(*at) for at in ((99_500, 9.0), (99_400, 1.0), (99_500, 3.0))] == [9.0, 9.0, 3.0]
    # A reading with a timestamp in the future does not block later readings.
    assert waiting(3_700_000, 9.0) == 9.0
    assert cache.snapshot()["a:1"].age_s == 0.0
    clock.now_s = 100.5
    assert waiting(100_400, 1.0) == 1.0


def test_the_readings_of_departed_endpoints_are_forgotten(cache: MetricsCache) -> None:
    cache.update({"a:1": reading_at(100_000), "b:1": reading_at(100_000)})
    assert cache.snapshot().keys() == {"a:1", "b:1"}
    cache.retain(["b:1", "c:1"])
    assert (set(cache.snapshot()), set(cache.addresses)) == ({"b:1"}, {"b:1"})


ADDRESSES = [f"10.0.{number // 250}.{number % 250}:8000" for number in range(2000)]
REPLICAS = [f"host-{number:08x}" for number in range(8)]


def test_exactly_one_replica_owns_each_endpoint_for_scraping() -> None:
    shares = [Assignment(REPLICAS).of(replica, ADDRESSES) for replica in REPLICAS]
    assert sorted(address for share in shares for address in share) == sorted(ADDRESSES)
    for replicas in (REPLICAS, []):
        assert Assignment(replicas).of("stranger", ADDRESSES) == frozenset()


def test_a_replica_that_leaves_or_joins_moves_only_its_own_endpoints_to_other_owners() -> None:
    few, all_ = (
        [assigned_replica(address, replicas) for address in ADDRESSES]
        for replicas in (REPLICAS[1:], REPLICAS)
    )
    moved = [(before, after) for before, after in zip(few, all_, strict=True) if before != after]
    assert {after for _, after in moved} == {REPLICAS[0]}
    assert {before for before, _ in moved} == set(REPLICAS[1:])


def test_owners_of_endpoints_are_the_same_in_every_process() -> None:
    # If the hash changed, replicas of two versions would disagree about the owners of endpoints.
    owners = [assigned_replica(address, REPLICAS) for address in ADDRESSES[:4]]
    assert owners == [f"host-0000000{number}" for number in (2, 2, 4, 5)]


def test_a_replica_that_joins_has_a_second_to_publish_before_it_counts_as_silent() -> None:
    scrapers = Scrapers("b", 1.0)
    for moment_s, alive in ((10.0, ("b", "c")), (10.9, ("b", "c")), (11.1, ("b",))):
        scrapers.seen("b", moment_s)
        assert scrapers.among(["b", "c"], 8, moment_s) == alive


def test_every_replica_is_a_scraper_while_no_replica_publishes_readings() -> None:
    scrapers = Scrapers("b", 1.0)
    scrapers.among(["a", "b"], 8, 0.0)
    scrapers.seen("b", 0.5)
    assert scrapers.among(["a", "b"], 8, 60.0) == ("a", "b")
    scrapers.on_subscribed(60.0)
    scrapers.seen("b", 60.1)
    assert scrapers.among(["a", "b"], 8, 60.1) == ("a", "b")


def test_without_other_live_replicas_this_replica_scrapes_alone() -> None:
    scrapers = Scrapers("b", 1.0)
    scrapers.seen("a", 100.0)
    for live, alive in ((["a", "b"], ("a", "b")), (["a"], ("a",)), ([], ("b",))):
        assert scrapers.among(live, 8, 100.0) == alive


def test_a_large_fleet_has_few_scrapers_and_replaces_silent_scrapers() -> None:
    live = [f"r{number}" for number in range(100)]
    scrapers = Scrapers("r0", 1.0)
    first = scrapers.among(live, 8, 0.0)
    assert len(first) == 8
    # All replicas choose the same scrapers, whatever the order of the list of replicas.
    assert Scrapers("r1", 1.0).among(live[::-1], 8, 0.0) == first
    # One scraper falls silent; another replica replaces the silent one, and gets time to publish.
    silent, *others = first
    for moment_s in (0.5, 1.0, 1.5, 2.0):
        for each in others:
            scrapers.seen(each, moment_s)
    second = scrapers.among(live, 8, 2.0)
    assert set(others) < set(second)
    assert len(second) == 8
    assert silent not in second
    # The silent replica publishes again and becomes a scraper again.
    scrapers.seen(silent, 2.1)
    assert scrapers.among(live, 8, 2.1) == first


@pytest.mark.parametrize(("endpoints", "wanted"), [(0, 8), (128, 8), (129, 9), (1000, 63), (10_000, 64)])
def test_the_number_of_scrapers_grows_with_the_number_of_endpoints(endpoints: int, wanted: int) -> None:
    assert scrapers_wanted(endpoints) == wanted


def cost(page_s: float, probe_s: float = 0.0, read_s: float = 0.0, pages: int = 3) -> ScrapeCost:
    """The cost of scrapes: pages took `page_s` seconds at best, probes `probe_s` seconds."""
    made = ScrapeCost()
    for late_s in (0.0, 0.5, 2.0)[:pages]:
        made.add_page(page_s + late_s, read_s)
        made.add_probe(probe_s + late_s)
    return made


@cases("page, owned, used, expected_s", {
    "a page of unknown cost": (ScrapeCost(), 1, True, 0.1),
    "two slow pages of a busy host": (cost(2.0, pages=2), 1, True, 0.1),
    "a page of unknown cost, for views only": (ScrapeCost(), 1, False, 5.0),
    "a cheap page": (cost(0.0005), 1, True, 0.1),
    "a real vLLM, 8 ms of its API server": (cost(0.008), 1, True, 0.8),
    "a real vLLM, 20 ms away": (cost(0.028, probe_s=0.020), 1, True, 0.8),
    "a real vLLM, for views only": (cost(0.008), 1, False, 5.0),
    "an expensive page, for views only": (cost(0.1), 1, False, 10.0),
    "10 pages of 0.5 ms of this replica": (cost(0.0, read_s=0.0003), 10, True, 0.5),
    "the longest interval": (cost(2.0), 1, True, 30.0),
})  # fmt: skip
def test_the_scrape_interval_follows_use_and_cost_of_metrics_pages(
    page: ScrapeCost, owned: int, used: bool, expected_s: float
) -> None:
    assert IntervalPolicy(None, fleet_with("queue-depth") if used else fleet_with()).interval_s(
        page, owned
    ) == pytest.approx(expected_s)


def test_pages_that_decide_the_limits_of_endpoints_are_read_twice_a_second() -> None:
    fleet = KnownFleet(parse({}))
    pacing = IntervalPolicy(None, fleet)
    assert pacing.interval_s(cost(0.001), 1) == 5.0  # no request is in flight
    fleet.busy = True
    assert pacing.interval_s(cost(0.001), 1) == 0.5
    assert pacing.interval_s(cost(0.008), 1) == pytest.approx(0.8)


def test_a_configured_interval_does_not_depend_on_the_cost_of_pages() -> None:
    assert IntervalPolicy(0.05, fleet_with()).interval_s(cost(2.0), 100) == 0.05


def test_suspected_endpoints_are_scraped_sooner_but_take_no_larger_share_of_the_servers_time() -> None:
    unused = IntervalPolicy(None, fleet_with())
    assert unused.interval_s(cost(0.001), 1, suspect=True) == 0.1
    assert unused.interval_s(cost(0.008), 1, suspect=True) == pytest.approx(0.8)


def test_probes_are_frequent_unless_there_are_very_many_endpoints() -> None:
    pacing = IntervalPolicy(None, fleet_with("queue-depth"))
    assert [pacing.tick_s(5.0, owned) for owned in (1, 10, 100)] == [PROBE_S, PROBE_S, pytest.approx(1.0)]
    assert pacing.tick_s(0.1, 1) == 0.1  # frequent scrapes make probes unnecessary
    at_rest = IntervalPolicy(None, fleet_with("queue-depth", busy=False))
    assert [at_rest.tick_s(5.0, owned) for owned in (1, 100)] == [REST_PROBE_S, pytest.approx(1.0)]
