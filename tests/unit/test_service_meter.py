"""A replica's service by flow: the last ten whole seconds, the busiest flows, no more."""

from picker_fleet.replica.info import ServiceMeter


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_service_counts_for_ten_whole_seconds() -> None:
    # Given service in one second, by two flows of one band and one of another
    clock = Clock()
    meter = ServiceMeter(clock)
    meter.record(1, "a", 2.0)
    meter.record(1, "a", 1.0)
    meter.record(1, "b", 1.0)
    meter.record(0, "a", 5.0)
    # Then the second that has begun does not count yet
    assert meter.report() == {"bands": [0.0, 0.0, 0.0], "flows": [], "cut": False}
    # And after it, for ten seconds, it does
    told = {"bands": [5.0, 4.0, 0.0], "flows": [[0, "a", 5.0], [1, "a", 3.0], [1, "b", 1.0]], "cut": False}
    clock.now_s = 101.5
    assert meter.report() == told
    clock.now_s = 110.9
    assert meter.report() == told
    clock.now_s = 111.0
    assert meter.report() == {"bands": [0.0, 0.0, 0.0], "flows": [], "cut": False}


def test_only_the_busiest_flows_are_told_of_and_bands_of_all() -> None:
    # Given more flows than are told of, and one that has more than the others
    clock = Clock()
    meter = ServiceMeter(clock)
    for number in range(7000):
        meter.record(2, f"flow-{number}", 1.0)
    meter.record(2, "flow-77", 10.0)
    clock.now_s += 1
    told = meter.report()
    # Then the list is short and says so, and the band has all
    assert told["flows"][0] == [2, "flow-77", 11.0]
    assert len(told["flows"]) == 200
    assert told["cut"] is True
    assert told["bands"] == [0.0, 0.0, 7010.0]


def test_long_names_make_the_list_shorter() -> None:
    clock = Clock()
    meter = ServiceMeter(clock)
    for number in range(100):
        meter.record(1, f"{number:03d}" * 500, 1.0)
    clock.now_s += 1
    told = meter.report()
    assert len(told["flows"]) == 10
    assert told["cut"] is True
