"""`picker load` as users run it, and its scenarios in Locust, against real fleets."""

import csv
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import psutil
import pytest
from redis_servers import wait

from picker_fleet import cli
from picker_tools.local_fleet.processes import picker_command

ROOT = Path(__file__).parents[2]
SMALL = ("--own", "--replicas", "2", "--endpoints", "2")
END_S = 200.0  # on a busy machine some scenarios take more than a minute


@pytest.fixture
def load(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs `picker load` in this process, with its report in `tmp_path`; returns exit status and output."""

    def run_here(*arguments: str) -> tuple[int, str]:
        status = cli.main(["load", *arguments, "--report", str(tmp_path)])
        return status, "".join(capfd.readouterr())

    return run_here


def summary_of(report: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((report / "summary.json").read_text())
    return found


def verdicts(report: Path) -> dict[str, str]:
    return {promise["name"]: promise["verdict"] for promise in summary_of(report)["promises"]}


@pytest.fixture(scope="module")
def here(shared_fleet: Any) -> Any:
    """A fleet for all tests; after each test no request is left."""
    return shared_fleet("--replicas", "1", "--endpoints", "2", "--sim-ttft", "150")


def test_no_client_notices_killed_replicas_of_a_fleet_that_option_own_starts_and_stops(
    load: Any, tmp_path: Path
) -> None:
    status, said = load("replica-crash", *SMALL, "--duration", "4")
    found, summary = verdicts(tmp_path), summary_of(tmp_path)
    assert summary["kills"]
    # `picker load` also audits the decision log, in which G1, G2 and G6 hold.
    assert {found[name] for name in ("one-answer", "at-rest", "G1", "G2", "G6")} == {"held"}, said
    unserved = sum(source["sent"] - source["served"] for source in summary["sources"].values())
    assert (status, unserved) == (0, 0), said
    assert "![waits](waits.svg)" in (tmp_path / "report.md").read_text()
    children = psutil.Process().children(recursive=True)
    assert [child for child in children if "picker-load-" in str(child.cmdline())] == []


def test_a_running_fleet_keeps_the_promises_of_a_steady_load(here: Any, load: Any, tmp_path: Path) -> None:
    status, said = load("steady", "--state-file", str(here.state_file), "--duration", "4")
    found = verdicts(tmp_path)
    assert (status, found["no-errors"], found["one-answer"], found["at-rest"]) == (0, *("held",) * 3), said


def test_a_fleet_that_is_not_configured_for_a_scenario_is_refused(here: Any, load: Any) -> None:
    status, said = load("starvation", "--state-file", str(here.state_file))
    assert status == 2
    assert "needs a fleet with an objective 'sheddable', fair_request_queue.ordering: workload-aware" in said


def test_an_interrupted_load_still_writes_its_report(here: Any, tmp_path: Path) -> None:
    where = ("--state-file", str(here.state_file), "--duration", "300", "--report", str(tmp_path))
    command = picker_command("load", "steady", *where)
    with subprocess.Popen(command, stdout=PIPE, stderr=STDOUT, text=True, cwd=ROOT) as process:
        deadline = threading.Timer(END_S, process.kill)
        deadline.start()
        assert process.stdout is not None
        while "served 0" in (line := process.stdout.readline()) or " sent " not in line:
            assert line, "`picker load` ended before the interrupt"
        process.send_signal(signal.SIGINT)
        said = process.stdout.read()
        status = process.wait()
        deadline.cancel()
    # The report covers the requests sent before the interrupt.
    assert status == 130, said
    summary = summary_of(tmp_path)
    assert summary["interrupted"] is True
    assert summary["counts"]["served"] > 0
    assert "broken" not in verdicts(tmp_path).values()


def test_locust_runs_the_scenarios_of_picker_load(here: Any, tmp_path: Path) -> None:
    # Locust runs two scenarios without its web page until both have sent requests.
    file, stats = ROOT / "deploy" / "locust" / "locustfile.py", tmp_path / "stats_stats.csv"
    command = [
        *(sys.executable, "-P", "-m", "locust", "-f", file, "--headless", "--host", here.url),
        *("--only-summary", "-u", "8", "-r", "8", "--csv", tmp_path / "stats"),
        *("SteadyUser", "DemoUser"),
    ]

    def both_sent() -> bool:
        with stats.open() as rows:
            return {row["Name"] for row in csv.DictReader(rows)} >= {"client-1", "noisy"}

    with subprocess.Popen(command, stdout=PIPE, stderr=STDOUT, text=True, cwd=ROOT) as process:
        try:
            wait(lambda: process.poll() is not None or both_sent(), "requests of both scenarios", END_S)
            process.terminate()
            said = process.communicate(timeout=END_S)[0]
        finally:
            process.kill()
    assert (process.returncode, both_sent()) == (0, True), said  # Locust exits with 1 if a request has failed
