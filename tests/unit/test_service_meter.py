"""A replica's service by flow: the last ten whole seconds, the busiest flows, no more."""

from picker_fleet.telemetry.series import ServiceMeter


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_service_counts_for_ten_whole_seconds() -> None:
    clock = Clock()
    meter = ServiceMeter(clock)
    meter.record(1, "a", 2.0)
    meter.record(1, "a", 1.0)
    meter.record(1, "b", 1.0)
    meter.record(0, "a", 5.0)
    # The present second does not count yet.
    assert meter.report() == {"bands": [0.0, 0.0, 0.0], "flows": [], "cut": False}
    report = {"bands": [5.0, 4.0, 0.0], "flows": [[0, "a", 5.0], [1, "a", 3.0], [1, "b", 1.0]], "cut": False}
    clock.now_s = 101.5
    assert meter.report() == report
    clock.now_s = 110.9
    assert meter.report() == report
    clock.now_s = 111.0
    assert meter.report() == {"bands": [0.0, 0.0, 0.0], "flows": [], "cut": False}


def test_only_the_busiest_flows_are_told_of_and_bands_of_all() -> None:
    # More flows than are listed.
    clock = Clock()
    meter = ServiceMeter(clock)
    for number in range(7000):
        meter.record(2, f"flow-{number}", 1.0)
    meter.record(2, "flow-77", 10.0)
    clock.now_s += 1
    report = meter.report()
    # The list is cut and says so; the band has everything.
    assert report["flows"][0] == [2, "flow-77", 11.0]
    assert len(report["flows"]) == 200
    assert report["cut"] is True
    assert report["bands"] == [0.0, 0.0, 7010.0]


def test_long_names_make_the_list_shorter() -> None:
    clock = Clock()
    meter = ServiceMeter(clock)
    for number in range(100):
        meter.record(1, f"{number:03d}" * 500, 1.0)
    clock.now_s += 1
    report = meter.report()
    assert len(report["flows"]) == 10
    assert report["cut"] is True
