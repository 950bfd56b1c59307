"""The arguments of `picker load`: what it accepts, and what it refuses and why."""

import json
from pathlib import Path

import pytest

from picker_fleet.cli import main
from picker_fleet.errors import ConfigError
from picker_tools.load.result import Sample
from picker_tools.load.scenarios import SCENARIOS
from picker_tools.load.target import OwnFleet, Size, check_url


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8080", "http://localhost:1", "http://[::1]:9", "http://127.9.9.9"]
)
def test_loopback_targets_are_accepted(url: str) -> None:
    assert check_url(url, "--target", allow_remote=False) == url
    assert check_url(f"{url}/", "--target", allow_remote=False) == url


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://10.0.0.1:80", "is not this machine's loopback"),
        ("http://example.com", "--allow-remote"),
        ("https://127.0.0.1", "no http://host:port"),
        ("127.0.0.1:80", "no http://host:port"),
        ("http://127.0.0.1:99999", "no http://host:port"),
        ("http://127.0.0.1:80/v1", "no http://host:port"),
    ],
)
def test_other_targets_are_refused_with_a_reason(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_url(url, "--target", allow_remote=False)


def test_a_remote_fleet_needs_an_option() -> None:
    assert check_url("http://10.0.0.1:80", "--target", allow_remote=True) == "http://10.0.0.1:80"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nope"], "invalid choice"),
        (["steady", "--rate", "0"], "is no rate"),
        (["steady", "--duration", "601"], "up to 600"),
        (["steady", "--duration", "nan"], "up to 600"),
        (["steady", "--replicas", "0"], "from 1 to 100"),
        (["steady", "--max-requests", "x"], "no whole number"),
        (["steady", "--target", "http://10.0.0.1"], "--allow-remote"),
        (["steady", "--own", "--target", "http://127.0.0.1:1"], "for a fleet of its own"),
        (["replica-crash", "--target", "http://127.0.0.1:1"], "has to kill replicas"),
        (["redis-outage", "--admin", "http://127.0.0.1:1"], "has to stop Redis"),
        (["steady", "--own", "--state-file", "nowhere.json"], "for a fleet of its own"),
        (["steady", "--state-file", "nowhere.json"], "cannot be read"),
    ],
)
def test_bad_usage_is_exit_status_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    try:
        status: object = main(["load", *words, "--report", str(tmp_path)])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert said in capsys.readouterr().err


def test_a_report_needs_a_writable_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert main(["load", "steady", "--own", "--report", str(file)]) == 2
    assert "--report" in capsys.readouterr().err


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_scenario_has_a_configuration_that_is_valid(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    settings = OwnFleet(scenario, Size(3, 4, "lean", 1), tmp_path, print).settings
    assert settings.decision_log.enabled
    assert scenario.objectives <= {objective.name for objective in settings.objectives}
    for key, wanted in scenario.needs:
        section, _, leaf = key.partition(".")
        assert getattr(getattr(settings, section), leaf) == wanted
    # No source's TTL is longer than the queue's.
    assert all(source.ttl_s <= settings.fair_request_queue.queue_ttl for source in scenario.sources)


@pytest.mark.parametrize("page", [b"", b"{", b"[]", b"{}", b'{"stock": "x"}', b"null"])
def test_a_page_that_is_no_state_is_no_sample(page: bytes) -> None:
    assert Sample.read(0.0, page) is None


def test_a_sample_of_the_state() -> None:
    state = {
        "stock": 3,
        "bounds": {"lower": 7.2, "upper": 8.8},
        "queue_length": {"Critical": 1, "Default": 2, "Sheddable": 0},
        "in_flight": {"a": 3},
        "leases": 3,
        "replicas": ["x", "y"],
        "degraded": False,
    }
    found = Sample.read(1.5, json.dumps(state).encode())
    assert found is not None
    assert (found.stock, found.total_queued, found.replicas, found.at_rest) == (3, 3, 2, False)
