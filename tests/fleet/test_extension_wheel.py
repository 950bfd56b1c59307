"""Installs the example extension from its wheel; runs its own test, and fleets with it and other extensions:
scorers that sleep or raise, a filter, an ordering."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from extension_folder import IMPORTS, install, scorers
from fleet_load import at_rest, complete, metric
from model_servers import COMPLETION, Ends, Received, failing_servers, http_answer, listening
from whole_fleet import exact_bounds

EXAMPLE = Path(__file__).parents[2] / "examples" / "extension"
BY_PRICE = {"name": "by-price", "weight": 50, "parameters": {"otherwise": 9}}
BAD = {
    "sleeps": "time.sleep(0.05); return [1.0] * len(candidates)",
    "raises": "raise RuntimeError('no such rack')",
}

# A filter that keeps one rack's endpoints, and an ordering by which a body's bytes are its milliseconds.
ORDER = (
    IMPORTS
    + """
def keep_rack(parameters):
    return lambda pick, endpoints: [
        None if each.labels["rack"] == "1" else "in another rack" for each in endpoints]
def shortest(parameters):
    return lambda request: request.body_bytes / 1000
RACK = Extension(version=1, make=keep_rack, parameters=NoParameters)
SHORTEST = Extension(version=1, make=shortest, parameters=NoParameters)
"""
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Variables with which Python finds the example's wheel, and the extensions of `BAD` and `ORDER`."""
    folder = tmp_path_factory.mktemp("extension")
    source, wheels, target = folder / "source", folder / "wheels", folder / "installed"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__", "dist"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", wheels, source]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = wheels.iterdir()
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", target, wheel], check=True)
    install(target, scorers(BAD), {name: f"EXTENSION_{name}" for name in BAD})
    install(target, ORDER, {"rack-1": "RACK"}, "filters", "rack_filter")
    install(target, ORDER, {"shortest-first": "SHORTEST"}, "orderings", "shortest")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(target), os.environ.get("PYTHONPATH"))))}


def test_the_example_extension_passes_its_own_test(environment: Mapping[str, str], tmp_path: Path) -> None:
    shutil.copy(EXAMPLE / "tests" / "test_by_price.py", tmp_path)
    alone = {**os.environ, **environment, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins start slowly
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    done = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "2 passed" in done.stdout) == (0, True), done


async def test_a_fleet_uses_a_working_scorer_and_ignores_scorers_that_sleep_or_raise(
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


async def test_an_extensions_ordering_orders_the_queue_and_its_filter_removes_endpoints(
    fleet: Any, environment: Mapping[str, str]
) -> None:
    served: list[tuple[str, int]] = []

    async def serve(request: Received, ends: Ends) -> bool:
        is_page = request.method == "GET"
        if not is_page:
            address = "{}:{}".format(*ends[1].get_extra_info("sockname"))
            served.append((address, len(json.loads(request.body)["prompt"])))
        ends[1].write(http_answer(b"" if is_page else COMPLETION))
        return True

    async with listening(serve) as kept, listening(serve) as other:
        racks = [{"address": kept, "labels": {"rack": "1"}}, {"address": other, "labels": {"rack": "2"}}]
        config = {
            "discovery": {"static": racks},
            "request_queue_controller": exact_bounds(0.5),  # the pool runs one request at a time
            "fair_request_queue": {"ordering": "edf", "due": {"name": "shortest-first"}},
            "scheduling": {"filters": [{"name": "rack-1"}], "extension_budget": "100ms"},
        }
        options = ("--endpoints", "0", "--replicas", "2")
        here = fleet(*options, config=config, environment=environment)
        await here.post("pause")
        sizes = [4000, 1000, 3000, 20, 2000]
        async with asyncio.TaskGroup() as tasks:
            for queued, size in enumerate(sizes, 1):
                tasks.create_task(complete(here.url, "x" * size, 1))
                await here.until_state(queued=queued)
            await here.post("resume")
        assert served == [(kept, size) for size in sorted(sizes)]
        await at_rest(here)
