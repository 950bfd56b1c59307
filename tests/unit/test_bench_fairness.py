"""The figures of bench.fairness, on logs written by hand."""

from collections.abc import Iterable

import pytest

from bench.fairness import measure, readings
from bench.fairness.control import configured
from bench.fairness.job import Job, Source, pinned
from bench.fairness.log import Entry
from bench.fairness.readings import Run
from bench.fairness.scenarios import WEIGHTS, weights


class Log:
    """Writes entries one millisecond apart; requests are called SOURCE.door.NUMBER."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._arrived: dict[str, int] = {}

    def write(
        self, event: str, *requests: str, band: int = 1, cost: float = 1, weight: float = 1, by: str = ""
    ) -> "Log":
        for request in requests:
            now_us = 1000 * (len(self.entries) + 1)
            arrived_us = self._arrived.setdefault(request, now_us)
            flow = request.partition(".")[0]
            self.entries.append(Entry(now_us, event, request, flow, band, cost, weight, arrived_us, by))
        return self


def names(source: str, numbers: Iterable[int]) -> list[str]:
    return [f"{source}.door.{number}" for number in numbers]


def test_gap_is_the_widest_of_any_interval_within_the_backlog() -> None:
    # Given two backlogged flows, one of which is served thrice in a row in between
    log = Log().write("queued", *names("a", range(9)), *names("b", range(9)))
    log.write("granted", "b.door.0", "a.door.0", "a.door.1", "a.door.2", "b.door.1")
    # When the gaps are measured
    (gap,) = measure.gaps(log.entries)
    # Then the interval of those three is found, and is past the bound of 1/1 + 1/1
    assert (set(gap.flows), gap.widest, gap.bound) == ({"a", "b"}, 3, 2)
    assert gap.violated


def test_gap_counts_service_by_weight() -> None:
    # Given a flow of weight 4 that is served four times as often
    log = Log().write("queued", *names("a", range(3)), *names("b", range(9)))
    for turn in range(2):
        log.write("granted", f"a.door.{turn}", weight=1)
        log.write("granted", *names("b", range(4 * turn, 4 * turn + 4)), weight=4)
    # When the gaps are measured
    (gap,) = measure.gaps(log.entries)
    # Then it is within the bound of 1/1 + 1/4
    assert (gap.widest, gap.bound) == (1, 1.25)
    assert not gap.violated


def test_service_while_the_other_flow_is_idle_is_no_gap() -> None:
    # Given a flow that has the fleet to itself until another comes, and again after it is served
    log = Log().write("queued", *names("a", range(9))).write("granted", *names("a", range(3)))
    log.write("queued", "b.door.0").write("granted", "b.door.0").write("granted", *names("a", range(3, 8)))
    # When the gaps are measured
    (gap,) = measure.gaps(log.entries)
    # Then only the dispatch while both waited counts
    assert gap.widest == 1


def test_flows_of_different_bands_are_not_compared() -> None:
    log = Log().write("queued", *names("a", range(9)), band=0).write("queued", *names("b", range(9)))
    log.write("granted", *names("a", range(5)), band=0)
    assert measure.gaps(log.entries) == []


def test_window_is_the_longest_in_which_all_wait() -> None:
    # Given that all wait for one dispatch, then again for three
    log = Log().write("queued", "a.door.0", *names("b", range(9))).write("granted", "a.door.0")
    log.write("granted", *names("b", range(4))).write("queued", *names("a", range(1, 9)))
    log.write("granted", "a.door.1", "b.door.4", "a.door.2").write("cancelled", *names("b", range(5, 9)))
    log.write("granted", *names("a", range(3, 9)))
    # When the window is looked for
    window = measure.window(log.entries, {"a", "b"})
    # Then it is the second, and nothing outside it counts
    assert (window.grants, dict(window.served)) == (3, {"a": 2, "b": 1})


def test_shares_are_one_where_service_follows_weights() -> None:
    shares = measure.normalised({"a": 100, "b": 200}, {"a": 1, "b": 2})
    assert shares == {"a": 1, "b": 1}
    assert (measure.jain(shares.values()), measure.min_by_max(shares.values())) == (1, 1)


def test_shares_of_one_that_has_all() -> None:
    shares = measure.normalised({"a": 100}, {"a": 1, "b": 1})
    assert shares == {"a": 2, "b": 0}
    assert (measure.jain(shares.values()), measure.min_by_max(shares.values())) == (0.5, 0)


@pytest.mark.parametrize(("by", "inverted"), [("turn", (1, 0)), ("guard", (0, 1))])
def test_inversion_is_a_dispatch_past_a_higher_band(by: str, inverted: tuple[int, int]) -> None:
    # Given a Critical and a Sheddable request that wait
    log = Log().write("queued", "a.door.0", band=0).write("queued", "b.door.0", "b.door.1", band=2)
    # When the Sheddable one goes first, and another once no Critical one is left
    log.write("granted", "b.door.0", band=2, by=by).write("granted", "a.door.0", band=0, by="turn")
    log.write("granted", "b.door.1", band=2, by="turn")
    # Then that is one inversion, of a turn or of the guard
    found = measure.order(log.entries)
    assert (found.inverted_turns, found.inverted_guards) == inverted


def test_held_requests_do_not_wait() -> None:
    # Given a Critical request held for adoption
    log = Log().write("queued", "a.door.0", band=0).write("queued", "b.door.0", "b.door.1", band=2)
    log.write("held", "a.door.0", band=0).write("granted", "b.door.0", band=2, by="turn")
    # When it is adopted and passed over
    log.write("adopted", "a.door.0", band=0).write("granted", "b.door.1", band=2, by="turn")
    # Then only the dispatch after its return is an inversion
    assert measure.order(log.entries).inverted_turns == 1


def test_a_running_request_that_is_adopted_does_not_wait() -> None:
    # Given a Critical request that runs, and a Sheddable one that waits
    log = Log().write("queued", "a.door.0", band=0).write("queued", "b.door.0", band=2)
    log.write("granted", "a.door.0", band=0, by="turn")
    # When the former is asked for again through another replica
    log.write("adopted", "a.door.0", band=0).write("granted", "b.door.0", band=2, by="turn")
    # Then the latter goes past nobody
    assert measure.order(log.entries).inverted_turns == 0


def test_highest_wait_is_also_of_those_that_expired_or_still_wait() -> None:
    # Given a request that is served after 2 ms, one that expires after 3 and one that waits since 4
    log = (
        Log().write("queued", "a.door.0", "a.door.1").write("granted", "a.door.0").write("queued", "a.door.2")
    )
    log.write("expired", "a.door.1").write("queued", *names("b", range(3)))
    # When waits are measured
    # Then all three count for the highest, those served for the mean
    assert measure.highest_wait_ms(log.entries[:5], "a") == 3
    assert measure.highest_wait_ms(log.entries, "a") == 4
    assert measure.waits_ms(log.entries, "a") == [2]


def test_deviation_from_one_replica_is_the_largest_of_all_figures() -> None:
    # Given the shares of four flows with one replica and with four
    def reading(replicas: int, **shares: float) -> readings.Weights:
        return readings.Weights(Run(replicas, 1), shares, 100, 6, 0, 0.5)

    alone = reading(1, one=1, two=1, four=1, split=1)
    fleet = reading(4, one=1.02, two=0.98, four=1, split=1)
    # When they are compared
    # Then min/max differs most, more than any flow by itself
    assert fleet.deviation(alone) == pytest.approx(1 - 0.98 / 1.02)
    assert fleet.split_gain == pytest.approx(1 / 1.02)


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_each_flow_comes_through_replicas_of_its_own(replicas: int) -> None:
    # Given four flows and any number of replicas
    doors = pinned(4, replicas)
    # When they are spread over them
    # Then every replica has one, and with enough of them none has two
    assert {door for through in doors for door in through} == set(range(replicas))
    assert sum(map(len, doors)) == max(4, replicas)


def test_parts_of_a_source_add_up() -> None:
    source = Source("a", callers=7, rate_per_s=3)
    parts = [source.part(which, 3) for which in range(3)]
    assert sum(part.callers for part in parts) == 7
    assert sum(part.rate_per_s for part in parts) == pytest.approx(3)


def test_control_divides_the_bounds_among_its_queues() -> None:
    # Given the configuration of a run, and the control with eight queues
    tree = weights(100).config
    # When a replica is configured for either
    one, eighth = (configured(tree, "redis://127.0.0.1:1/0", "pool", pools) for pools in (1, 8))
    # Then together the eight let through as much as the one
    for bound in ("watermark_per_backend", "lower_bound_per_backend", "upper_bound_per_backend"):
        assert 8 * eighth["request_queue_controller"][bound] == one["request_queue_controller"][bound]


def test_job_survives_the_pipe() -> None:
    scenario = weights(100)
    job = Job("replica-0", scenario.config, scenario.sources, scenario.service_ms, "1")
    assert Job.read(job.written()) == job
    assert [source.weight for source in job.sources] == list(WEIGHTS.values())
