"""Installs the wheel into its own virtual environment, and runs its commands there.

The environment has links to the packages that the wheel requires, of this environment's versions.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from extproc_client import parts
from own_replica import served
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from redis_servers import Server

ROOT = Path(__file__).parents[2]
READY_S = 30.0


class Installed:
    """The wheel in a virtual environment, without extras. The wheel's commands run outside the checkout."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        environment, wheels = folder / "venv", folder / "wheels"
        self.python, self.picker = environment / "bin" / "python", str(environment / "bin" / "picker")
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run(
            [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, ROOT], check=True
        )
        (wheel,) = wheels.glob("picker_fleet-*.whl")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
        install = ["install", "--no-compile", "--no-deps", wheel]
        subprocess.run([*pip, "--python", self.python, *install], check=True)
        (site,) = environment.glob("lib/*/site-packages")
        (own,) = metadata.distributions(name="picker-fleet", path=[str(site)])
        for needed in _needs(own):
            for file in needed.files or ():
                if ".." not in file.parts:
                    (site / file).parent.mkdir(parents=True, exist_ok=True)
                    (site / file).symlink_to(needed.locate_file(file))

    def run(self, *command: str | Path) -> tuple[int, str]:
        """Run a command of the wheel's environment outside the checkout; return exit status and output."""
        done = subprocess.run(command, **self.options, capture_output=True, text=True, timeout=READY_S)
        return done.returncode, done.stdout + done.stderr

    @property
    def options(self) -> dict[str, Any]:
        return {"cwd": self._folder, "env": {"PATH": os.defpath}}


def _needs(of: metadata.Distribution) -> Iterable[metadata.Distribution]:
    """The distributions of this environment that `of` requires without extras, directly or not."""
    found: dict[str, metadata.Distribution] = {}
    waiting: list[tuple[metadata.Distribution, set[str]]] = [(of, set())]
    while waiting:
        each, extras = waiting.pop()
        for requirement in map(Requirement, each.requires or ()):
            is_needed = requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in (*extras, "")
            )
            name = canonicalize_name(requirement.name)
            if is_needed and name not in found:
                found[name] = metadata.distribution(name)
                waiting.append((found[name], requirement.extras))
    return found.values()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"))


async def test_a_replica_from_the_wheel_decides_and_drains_if_no_extra_is_installed(
    installed: Installed, tmp_path: Path, valkey: Server
) -> None:
    async with served(valkey.url, tmp_path, command=[installed.picker], **installed.options) as replica:
        await replica.ready()
        assert parts([await replica.decide()]) == ["request_headers"]
        assert await replica.stopped() == 0


EXTRAS = {"up": "local", "load steady": "tools", "top": "tools", "audit": "tools"}


@pytest.mark.parametrize("command", EXTRAS)
def test_a_command_names_its_missing_extra_in_one_line(installed: Installed, command: str) -> None:
    status, output = installed.run(installed.picker, *command.split())
    assert status == 2, output
    assert output.count("\n") == 1
    assert "is not installed" in output
    assert f"pip install 'picker-fleet[{EXTRAS[command]}]'" in output


def test_the_command_envoy_config_works_if_no_extra_of_the_package_is_installed(installed: Installed) -> None:
    status, output = installed.run(installed.picker, "envoy-config")
    assert (status, output.splitlines()[0]) == (0, "node:"), output


@pytest.mark.parametrize("command", ["check", "sim"])  # another test runs `picker serve`
def test_a_command_that_needs_no_extra_shows_its_help(installed: Installed, command: str) -> None:
    status, output = installed.run(installed.picker, command, "--help")
    assert status == 0, output


def test_nothing_is_installed_under_the_name_app(installed: Installed) -> None:
    modules = ("picker_fleet", "picker_tools", "app", "rich")
    found = f"from importlib.util import find_spec; print([bool(find_spec(name)) for name in {modules}])"
    assert installed.run(installed.python, "-c", found) == (0, "[True, True, False, False]\n")
