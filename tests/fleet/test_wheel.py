"""The wheel, installed into a virtual environment of its own: what a replica has in production."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_valkey import OwnValkey

from picker_tools.local_fleet.network import LOOPBACK, free_port, get, until

ROOT = Path(__file__).parents[2]
READY_S = 30.0


class Installed:
    """The wheel in its own environment, without any extra. Commands run outside the checkout."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bin = folder / "venv" / "bin"
        wheels = folder / "wheels"
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(ROOT)], check=True)
        (wheel,) = wheels.glob("picker_fleet-*.whl")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self._bin.parent)], check=True)
        lock = ["--constraint", str(ROOT / "requirements.lock")]
        subprocess.run([*pip, "--python", str(self.python), "install", *lock, str(wheel)], check=True)

    @property
    def python(self) -> Path:
        return self._bin / "python"

    def begin(self, *arguments: str | Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self._bin / "picker", *arguments],
            cwd=self._folder,
            env={"PATH": os.defpath},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str | Path) -> tuple[int, str]:
        """Exit status and output."""
        process = self.begin(*arguments)
        output, _ = process.communicate(timeout=READY_S)
        return process.returncode, output

    def importable(self, module: str) -> bool:
        command = [self.python, "-c", f"import {module}"]
        return not subprocess.run(
            command, cwd=self._folder, stderr=subprocess.DEVNULL, check=False
        ).returncode


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"))


@contextlib.contextmanager
def serving(installed: Installed, config: Path) -> Iterator[subprocess.Popen[str]]:
    replica = installed.begin("serve", "--config", config)
    try:
        yield replica
    finally:
        replica.kill()
        replica.communicate()


async def test_a_replica_runs_from_the_wheel_without_any_extra(installed: Installed, tmp_path: Path) -> None:
    # Given a Valkey, and a replica started from the wheel
    valkey = OwnValkey(tmp_path)
    await valkey.start()
    admin = f"{LOOPBACK}:{free_port()}"
    config = tmp_path / "picker.yaml"
    settings = {
        "redis": {"url": valkey.url},
        "extproc": {"listen": f"{LOOPBACK}:{free_port()}", "drain_grace": "100ms"},
        "admin": {"listen": admin},
        "discovery": {"static": [{"address": f"{LOOPBACK}:{free_port()}"}]},
    }
    config.write_text(json.dumps(settings), encoding="utf-8")

    async def ready() -> bool | None:
        reply = await get(f"http://{admin}/readyz")
        return (reply is not None and reply.status == 200) or None

    try:
        with serving(installed, config) as replica:
            # When it is asked, then it becomes ready, and ends without a fault when it is told to
            assert await until(ready, within_s=READY_S), replica.poll()
            replica.send_signal(signal.SIGTERM)
            output, _ = await asyncio.to_thread(replica.communicate, timeout=READY_S)
            assert replica.returncode == 0, output
    finally:
        valkey.kill()


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (("up",), "local"),
        (("load", "steady"), "tools"),
        (("top",), "tools"),
        (("audit",), "tools"),
        (("envoy-config",), "tools"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_a_command_without_its_extra_names_it_in_one_line(
    installed: Installed, command: tuple[str, ...], extra: str
) -> None:
    status, output = installed.run(*command)
    assert status == 2, output
    assert output.count("\n") == 1
    assert "is not installed" in output
    assert f"pip install 'picker-fleet[{extra}]'" in output


@pytest.mark.parametrize("command", ["serve", "check", "sim"])
def test_a_command_that_needs_no_extra_shows_its_help(installed: Installed, command: str) -> None:
    status, output = installed.run(command, "--help")
    assert status == 0, output


def test_nothing_is_installed_under_the_name_app(installed: Installed) -> None:
    assert installed.importable("picker_fleet.serve")
    assert installed.importable("picker_tools")
    assert not installed.importable("app")
    assert not installed.importable("rich")
