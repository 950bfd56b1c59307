"""`picker up` fails to start: it prints one clear error and leaves no process running."""

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from picker_fleet import cli
from picker_tools.local_fleet.network import free_port
from picker_tools.local_fleet.processes import picker_command

SMALL = ("--replicas", "1", "--endpoints", "1")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


@pytest.mark.parametrize(
    ("envoy", "admin", "said"),
    [
        ("taken", "free", "port {taken} is in use; it is wanted for Envoy (--port)\n"),
        ("free", "taken", "port {taken} is in use; it is wanted for the admin API of replica-1"),
        ("free", "free", "port {free} is wanted for Envoy (--port) and for the admin API"),
    ],
)
def test_a_port_that_cannot_be_used_is_named(
    taken_port: int, envoy: str, admin: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ports = {"taken": taken_port, "free": free_port()}
    asked = ("--port", str(ports[envoy]), "--admin-port", str(ports[admin]))
    assert cli.main(["up", *SMALL, *asked]) == 1
    assert capsys.readouterr().err.startswith(said.format(**ports))


@pytest.mark.parametrize(
    ("endpoints", "text", "part", "said"),
    [
        # A simulator cannot serve these model names: a comma separates names.
        pytest.param(
            *("1", "models: [{name: a}, {name: 'a,b'}]", "endpoint-1", "distinct names"), id="a model server"
        ),
        # The replica reads the missing discovery file only after it listens.
        pytest.param(
            *("0", "discovery: {file: none.yaml}", "replica-1", "none.yaml: cannot be read"), id="a replica"
        ),
    ],
)
def test_a_process_that_fails_is_named_with_the_end_of_its_log(
    tmp_path: Path, endpoints: str, text: str, part: str, said: str
) -> None:
    config = tmp_path / "picker.yaml"
    config.write_text(text)
    options = ("--replicas", "1", "--endpoints", endpoints, "--port", "0", "--config", str(config))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        picker_command("up", *options), capture_output=True, text=True, timeout=90, env=environment
    )
    # The error names the process, shows the end of its log, and gives the log's path.
    first, *tail, last = done.stderr.splitlines()
    assert done.returncode == 1
    assert first == f"{part}: exited with 1 before the fleet was ready"
    assert any(said in line for line in tail)
    folder = Path(last.removeprefix("logs: "))
    assert folder.parent == tmp_path
    assert (folder / f"{part}.log").exists()


def test_an_unreachable_redis_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"redis://:secret@127.0.0.1:{free_port()}/0"
    assert cli.main(["up", *SMALL, "--port", "0", "--redis", url]) == 1
    said = capsys.readouterr().err
    assert said.startswith("redis: nothing accepts connections")
    assert "secret" not in said


def test_a_bad_configuration_is_reported_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "picker.yaml"
    config.write_text("pol: default\n")
    assert cli.main(["up", "--port", "0", "--config", str(config)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("pol: unknown key")
    assert said.out == ""


@pytest.mark.parametrize(
    "options",
    [["--replicas", "0"], ["--endpoints", "-1"], ["--port", "70000"], ["--mode", "fat"], ["--sim-itl", "x"]],
)
def test_a_bad_option_is_reported(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["up", *options])
    assert options[0] in capsys.readouterr().err
