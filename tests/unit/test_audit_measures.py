"""Measures of fairness on decision logs written by hand."""

from collections.abc import Iterable

import pytest

from picker_tools.audit import measures
from picker_tools.audit.log import Entry


class Log:
    """Writes entries one millisecond apart. Request ids are SOURCE.NUMBER."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._arrived: dict[str, int] = {}

    def write(
        self, event: str, *requests: str, band: int = 1, cost: float = 1, weight: float = 1, by: str = ""
    ) -> "Log":
        for request in requests:
            now_us = 1000 * (len(self.entries) + 1)
            arrived = self._arrived.setdefault(request, now_us)
            self.entries.append(
                Entry(
                    seq=len(self.entries) + 1, time_us=now_us, event=event, request=request,
                    flow=source_of(request), band=band, workload="", cost=cost, weight=weight,
                    arrived=arrived, deadline_ms=0, due_ms=None, limit=0, tag=None, v=0, by=by, owner="",
                    endpoint="", stock=0, queued=0, upper=100, lower=100, note="",
                )
            )  # fmt: skip
        return self


def source_of(request: str) -> str:
    return request.partition(".")[0]


def names(source: str, numbers: Iterable[int]) -> list[str]:
    return [f"{source}.{number}" for number in numbers]


def test_the_gap_is_the_widest_of_any_interval_within_the_backlog() -> None:
    # The widest interval has the three dispatches of `a`; the bound is 1/1 + 1/1.
    log = Log().write("queued", *names("a", range(9)), *names("b", range(9)))
    log.write("granted", "b.0", "a.0", "a.1", "a.2", "b.1")
    (gap,) = measures.gaps(log.entries)
    assert (set(gap.flows), gap.widest, gap.bound) == ({"a", "b"}, 3, 2)
    assert gap.violated


def test_the_gap_counts_service_by_weight() -> None:
    log = Log().write("queued", *names("a", range(3)), *names("b", range(9)))
    for turn in range(2):
        log.write("granted", f"a.{turn}", weight=1)
        log.write("granted", *names("b", range(4 * turn, 4 * turn + 4)), weight=4)
    (gap,) = measures.gaps(log.entries)
    # The bound is 1/1 + 1/4.
    assert (gap.widest, gap.bound) == (1, 1.25)
    assert not gap.violated


def test_service_while_the_other_flow_is_idle_makes_no_gap() -> None:
    log = Log().write("queued", *names("a", range(9))).write("granted", *names("a", range(3)))
    log.write("queued", "b.0").write("granted", "b.0").write("granted", *names("a", range(3, 8)))
    (gap,) = measures.gaps(log.entries)
    # Only one dispatch happens while both wait.
    assert gap.widest == 1


def test_flows_of_different_bands_are_not_compared() -> None:
    log = Log().write("queued", *names("a", range(9)), band=0).write("queued", *names("b", range(9)))
    log.write("granted", *names("a", range(5)), band=0)
    assert measures.gaps(log.entries) == []


def test_the_window_is_the_longest_time_in_which_all_flows_wait() -> None:
    # All wait for one dispatch, then again for three.
    log = Log().write("queued", "a.0", *names("b", range(9))).write("granted", "a.0")
    log.write("granted", *names("b", range(4))).write("queued", *names("a", range(1, 9)))
    log.write("granted", "a.1", "b.4", "a.2").write("cancelled", *names("b", range(5, 9)))
    log.write("granted", *names("a", range(3, 9)))
    window = measures.window(log.entries, {"a", "b"}, source_of)
    assert (window.grants, dict(window.served)) == (3, {"a": 2, "b": 1})


def test_shares_are_one_where_service_follows_weights() -> None:
    shares = measures.normalised({"a": 100, "b": 200}, {"a": 1, "b": 2})
    assert shares == {"a": 1, "b": 1}
    assert (measures.jain(shares.values()), measures.min_by_max(shares.values())) == (1, 1)


def test_shares_when_one_flow_has_all_service() -> None:
    shares = measures.normalised({"a": 100}, {"a": 1, "b": 1})
    assert shares == {"a": 2, "b": 0}
    assert (measures.jain(shares.values()), measures.min_by_max(shares.values())) == (0.5, 0)


@pytest.mark.parametrize(("by", "inverted"), [("turn", (1, 0)), ("guard", (0, 1))])
def test_an_inversion_is_a_dispatch_past_a_higher_band(by: str, inverted: tuple[int, int]) -> None:
    log = Log().write("queued", "a.0", band=0).write("queued", "b.0", "b.1", band=2)
    log.write("granted", "b.0", band=2, by=by).write("granted", "a.0", band=0, by="turn")
    log.write("granted", "b.1", band=2, by="turn")
    found = measures.order(log.entries)
    assert (found.inverted_turns, found.inverted_guards) == inverted


def test_orphaned_requests_do_not_wait() -> None:
    log = Log().write("queued", "a.0", band=0).write("queued", "b.0", "b.1", band=2)
    log.write("held", "a.0", band=0).write("granted", "b.0", band=2, by="turn")
    # After its adoption it waits again.
    log.write("adopted", "a.0", band=0).write("granted", "b.1", band=2, by="turn")
    assert measures.order(log.entries).inverted_turns == 1


def test_a_running_request_that_is_adopted_does_not_wait() -> None:
    log = Log().write("queued", "a.0", band=0).write("queued", "b.0", band=2)
    log.write("granted", "a.0", band=0, by="turn")
    log.write("adopted", "a.0", band=0).write("granted", "b.0", band=2, by="turn")
    assert measures.order(log.entries).inverted_turns == 0


def test_the_highest_wait_includes_requests_that_expired_or_still_wait() -> None:
    # One is served after 2 ms, one expires after 3, one still waits after 4.
    log = Log().write("queued", "a.0", "a.1").write("granted", "a.0").write("queued", "a.2")
    log.write("expired", "a.1").write("queued", *names("b", range(3)))
    assert measures.highest_wait_ms(log.entries[:5], "a", source_of) == 3
    assert measures.highest_wait_ms(log.entries, "a", source_of) == 4
    assert measures.waits_ms(log.entries, "a", source_of) == [2]
