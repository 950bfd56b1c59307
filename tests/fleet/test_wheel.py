"""Installs the wheel into its own virtual environment, as in production, and runs its commands there."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from extproc_client import parts
from own_replica import served
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
        # With hashes in the constraints, pip would also require a hash of the wheel.
        locked, versions = (ROOT / "requirements.lock").read_text(), folder / "versions"
        versions.write_text("\n".join(re.findall(r"^[\w.-]+==[^\\\n]+", locked, re.MULTILINE)))
        install = ["install", "--no-compile", "--constraint", versions, wheel]
        subprocess.run([*pip, "--python", self.python, *install], check=True)

    def run(self, *command: str | Path) -> tuple[int, str]:
        """Run a command of the wheel's environment outside the checkout; return exit status and output."""
        done = subprocess.run(command, **self.options, capture_output=True, text=True, timeout=READY_S)
        return done.returncode, done.stdout + done.stderr

    @property
    def options(self) -> dict[str, Any]:
        return {"cwd": self._folder, "env": {"PATH": os.defpath}}

    @property
    def scripts(self) -> Path:
        (folder,) = self._folder.glob("venv/lib/*/site-packages/picker_fleet/_lua")
        return folder


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


def test_the_wheel_contains_every_lua_file(installed: Installed) -> None:
    scripts = {path.relative_to(ROOT / "lua") for path in (ROOT / "lua").rglob("*.lua")}
    assert {path.relative_to(installed.scripts) for path in installed.scripts.rglob("*.lua")} == scripts


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


@pytest.mark.parametrize("command", ["serve", "check", "sim"])
def test_a_command_that_needs_no_extra_shows_its_help(installed: Installed, command: str) -> None:
    status, output = installed.run(installed.picker, command, "--help")
    assert status == 0, output


def test_nothing_is_installed_under_the_name_app(installed: Installed) -> None:
    for module, found in (("picker_fleet.serve", 0), ("picker_tools", 0), ("app", 1), ("rich", 1)):
        status, output = installed.run(installed.python, "-c", f"import {module}")
        assert status == found, output
