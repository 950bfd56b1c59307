"""The project's Prometheus configuration, checked by promtool."""

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
def test_promtool_accepts_configuration_and_rules(arguments: tuple[str, ...]) -> None:
    promtool = shutil.which("promtool")
    assert promtool is not None, "promtool is missing: Debian's package prometheus has it (.ci/packages)"
    done = subprocess.run(
        [promtool, *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_rule_has_a_test_in_which_the_alert_fires() -> None:
    groups = yaml.safe_load((FOLDER / "rules" / "alerts.yml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    tests = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
    fired = {
        case["alertname"] for test in tests for case in test.get("alert_rule_test", []) if case["exp_alerts"]
    }
    for test in tests:
        for case in test.get("promql_expr_test", []):
            for sample in case["exp_samples"]:
                fired |= set(re.findall(r'alertname="(\w+)"', sample["labels"]))
    assert fired == alerts
