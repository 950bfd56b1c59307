"""The project's Prometheus configuration, by Prometheus's own tool."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "rules/recording.yml", "rules/alerts.yml"),
        ("test", "rules", "rules_test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_has_nothing_to_say_against_it(arguments: tuple[str, ...]) -> None:
    # Given Debian's promtool
    promtool = shutil.which("promtool")
    assert promtool is not None, "promtool is missing: Debian's package prometheus has it (.ci/packages)"
    # When it looks at the configuration, the rules, and the rules' own tests
    done = subprocess.run(
        [promtool, *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=100, check=False
    )
    # Then everything is in order
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test_in_which_it_fires() -> None:
    # Given the alerts, and the tests of the rules
    groups = yaml.safe_load((FOLDER / "rules" / "alerts.yml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    tests = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
    # When those are listed that some test expects to fire
    fired = {
        case["alertname"] for test in tests for case in test.get("alert_rule_test", []) if case["exp_alerts"]
    }
    for test in tests:
        for case in test.get("promql_expr_test", []):
            for sample in case["exp_samples"]:
                fired |= set(re.findall(r'alertname="(\w+)"', sample["labels"]))
    # Then all are
    assert fired == alerts
