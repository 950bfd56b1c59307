"""The SVG that plays a run's lines."""

from pathlib import Path
from xml.etree import ElementTree

from picker_tools.load.recording import Recording

SVG = "{http://www.w3.org/2000/svg}"


def test_lines_appear_in_the_order_and_at_the_times_at_which_they_came(tmp_path: Path) -> None:
    now_s = [0.0]
    recording = Recording(speed=2.0, clock=lambda: now_s[0])
    recording.line("starts")
    now_s[0] = 24.0
    recording.line("kill -9 of replica-2\nand <more>")
    recording.write(tmp_path / "new" / "run.svg")
    rows = ElementTree.parse(tmp_path / "new" / "run.svg").getroot().findall(f"{SVG}text")
    assert [row.text for row in rows] == ["starts", "kill -9 of replica-2", "and <more>"]
    shown = [row.find(f"{SVG}animate") for row in rows]
    # Twelve seconds of twenty, the last eight of which show the whole.
    times = [each.get("keyTimes") if each is not None else "" for each in shown]
    assert times == ["", "0;0.6000", "0;0.6000"]
    assert [row.get("class") for row in rows] == ["", "fault", ""]


def test_verdicts_and_faults_have_their_colours_and_a_long_line_ends_with_an_ellipsis(tmp_path: Path) -> None:
    recording = Recording(clock=lambda: 0.0)
    recording.line("held        G1    stock and limits: 9 checks, 0 broken")
    recording.line("broken      G2    9 checks, 1 broken")
    recording.line(" 30.4 s  kill -9 of Redis\nDOWN  replica-2\nready envoy\n" + 200 * "x")
    recording.write(tmp_path / "run.svg")
    rows = ElementTree.parse(tmp_path / "run.svg").getroot().findall(f"{SVG}text")
    assert [row.get("class") for row in rows] == ["held", "fault", "fault", "fault", "ready", ""]
    assert rows[-1].text == 117 * "x" + "…"
