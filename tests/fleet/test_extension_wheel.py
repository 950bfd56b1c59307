"""The example of an extension, from its wheel: its own test, `picker check`, and a fleet, which also has
scorers that sleep and that raise."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from extension_folder import install, scorers
from fleet_load import complete, metric
from model_servers import failing_servers

EXAMPLE = Path(__file__).parents[2] / "examples" / "extension"
BY_PRICE = {"name": "by-price", "weight": 50, "parameters": {"otherwise": 9}}
BAD = {
    "sleeps": "time.sleep(0.05); return [1.0] * len(candidates)",
    "raises": "raise RuntimeError('no such rack')",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Variables with which Python finds the wheel of the example, and the scorers of `BAD`."""
    folder = tmp_path_factory.mktemp("extension")
    source, wheels, target = folder / "source", folder / "wheels", folder / "installed"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__", "dist"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", wheels, source]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = wheels.iterdir()
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", target, wheel], check=True)
    install(target, scorers(BAD), {name: f"EXTENSION_{name}" for name in BAD})
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(target), os.environ.get("PYTHONPATH"))))}


def run(environment: Mapping[str, str], *arguments: str | Path, folder: Path) -> tuple[int, str]:
    """Run Python with `arguments` in `folder`; return exit status and output."""
    variables = {**os.environ, **environment}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_the_examples_own_test_passes_on_its_wheel(environment: Mapping[str, str], tmp_path: Path) -> None:
    shutil.copy(EXAMPLE / "tests" / "test_by_price.py", tmp_path)
    status, output = run(environment, "pytest", "-q", "-p", "no:cacheprovider", ".", folder=tmp_path)
    assert (status, "2 passed" in output) == (0, True), output


def test_the_command_check_knows_the_extension_and_its_parameters(
    environment: Mapping[str, str], tmp_path: Path
) -> None:
    for parameters, status, told in (
        ({"otherwise": 9}, 0, "valid"),
        ({"otherwise": 9, "lable": "cost"}, 2, "scorer by-price: parameters.lable: Extra inputs are not"),
    ):
        (tmp_path / "picker.yaml").write_text(
            yaml.safe_dump({"scheduling": {"scorers": [{"name": "by-price", "parameters": parameters}]}})
        )
        found, output = run(environment, "picker_fleet.cli", "check", "picker.yaml", folder=tmp_path)
        assert found == status, output
        assert told in output


async def test_a_fleet_serves_by_the_extension_and_without_those_that_sleep_or_raise(
    fleet: Any, environment: Mapping[str, str]
) -> None:
    async with failing_servers(3, service_s=0.0) as servers:
        prices = dict(zip(servers.addresses, ("4", "1", "x"), strict=True))
        config = {
            "discovery": {
                "static": [{"address": a, "labels": {"price": price}} for a, price in prices.items()]
            },
            "scheduling": {"scorers": [BY_PRICE, *({"name": name, "weight": 1} for name in BAD)]},
        }
        # On a loaded machine even the good scorer's thread may get a CPU late.
        slow = {"PICKER_SCHEDULING__EXTENSION_BUDGET": "20ms"}
        options = ("--endpoints", "0", "--replicas", "2")
        here = fleet(*options, config=config, environment={**environment, **slow})
        answers = [await complete(here.url, f"prompt {number}", 1) for number in range(40)]
        assert [answer for answer in answers if not answer.served] == []
        cheap = servers.addresses[1]
        assert servers.hits[cheap] >= 36, servers.hits
        faults = "epp_extension_faults_total"
        assert await metric(here, faults, extension="scorer raises", reason="raised") > 0
        assert await metric(here, faults, extension="scorer sleeps", reason="late") > 0
        assert await metric(here, faults, extension="scorer raises", reason="suspended") > 0
        changed = await here.patch({"scheduling": {"scorers": {"by-price": 7}}})
        assert changed["changes"]["scheduling"]["scorers"] == {"by-price": 7}
