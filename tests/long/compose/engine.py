"""Drives this machine's container engine, Docker (compose plugin) or podman (podman-compose).

`deploy/compose/podman.yml` and `no-cgroups.yml` remove settings of docker-compose.yml that podman does not
support. For podman this module itself runs health checks and removes surplus containers.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROJECT = "picker-compose-test"
BASE = "docker.io/library/python:3.11-slim"
_INSIDE = "PICKER_COMPOSE_TEST_INSIDE"
_HYBRID = Path("/sys/fs/cgroup/unified")  # podman's runtimes refuse this second cgroup hierarchy
_STOP_S = 80  # longer than each stop_grace_period of the compose file
_COMMAND_S = 1500.0
_POLL_S = 0.5
_REMOVALS = 10  # attempts, because podman removes a container only after its dependents


class EngineFault(Exception):
    """A command failed; the message has the last lines of the command's output."""


def command(*words: str, environment: dict[str, str] | None = None, within_s: float = _COMMAND_S) -> str:
    """Run a command and return its output. Raises EngineFault if the command fails."""
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=None if environment is None else os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise EngineFault(f"{' '.join(words)[:200]} ended with {done.returncode}:\n{said}")
    return done.stdout


def _works(*words: str) -> bool:
    return shutil.which(words[0]) is not None and not subprocess.run(words, capture_output=True).returncode


@dataclass(slots=True)
class Engine:
    """A container engine. `program`: docker or podman. `environment`: additional variables for compose."""

    program: str
    compose_command: tuple[str, ...]
    files: tuple[str, ...] = ("docker-compose.yml",)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_podman(self) -> bool:
        return self.program == "podman"

    def run(self, *words: str, within_s: float = _COMMAND_S) -> str:
        return command(self.program, *words, within_s=within_s)

    def compose(self, *words: str) -> str:
        files = [word for file in self.files for word in ("-f", file)]
        return command(*self.compose_command, "-p", PROJECT, *files, *words, environment=self.environment)

    def build(self, target: str, name: str) -> None:
        """Build the Dockerfile's stage `target` as image `name`."""
        isolated = ("--isolation", "chroot", "--layers") if self.is_podman else ()
        self.run("build", *isolated, "--target", target, "-t", name, ".")

    def containers(self, service: str = "") -> list[str]:
        """Names of the containers of `service` (default: all services), running or not, sorted by number."""
        labels = [f"com.docker.compose.project={PROJECT}"]
        if service:
            labels.append(f"com.docker.compose.service={service}")
        filters = [word for label in labels for word in ("--filter", f"label={label}")]
        found = self.run("ps", "--all", "--format", "{{.Names}}", *filters).split()
        return sorted(found, key=lambda name: (len(name), name))

    def up(self, services: Sequence[str], pickers: int) -> None:
        """Start `services` without building images."""
        if self.is_podman:  # podman-compose's `--scale` drops the replicas of other services
            self._up(*(name for name in services if name != "picker"))
            self.scale_pickers(pickers)
        else:
            self._up("--scale", f"picker={pickers}", *services)

    def scale_pickers(self, count: int) -> None:
        """Stop surplus pickers or start missing pickers, so that `count` pickers run."""
        surplus = self.containers("picker")[count:]
        if self.is_podman and surplus:  # podman-compose 1.6 leaves surplus containers running
            with ThreadPoolExecutor(len(surplus)) as stopping:
                list(stopping.map(lambda name: self.run("stop", "--time", str(_STOP_S), name), surplus))
            self.run("rm", *surplus)
        else:
            self._up("--no-deps", "--scale", f"picker={count}", "picker")

    def _up(self, *words: str) -> None:
        self.compose("up", "-d", "--no-build", "--no-recreate", *words)

    def kill(self, container: str) -> None:
        self.run("kill", "--signal", "KILL", container)

    def start(self, container: str) -> None:
        self.run("start", container)

    def is_healthy(self, container: str) -> bool:
        """Whether the container's health check passes. Podman does not schedule checks: run the check now."""
        if self.is_podman:
            try:
                self.run("healthcheck", "run", container, within_s=30)
            except (EngineFault, subprocess.TimeoutExpired):
                return False
            return True
        return self.run("inspect", "--format", "{{.State.Health.Status}}", container).strip() == "healthy"

    def wait_healthy(self, containers: Sequence[str], within_s: float) -> None:
        """Wait until all containers are healthy. EngineFault has the log of an unhealthy container."""
        deadline_s = time.monotonic() + within_s
        for container in containers:
            while not self.is_healthy(container):
                if time.monotonic() > deadline_s:
                    health = self.run("inspect", "--format", "{{json .State.Health}}", container)
                    raise EngineFault(f"{container} is not healthy:\n{health}\n{self.log(container)}")
                time.sleep(_POLL_S)

    def log(self, container: str) -> str:
        return self._logs("--tail", "30", container)

    def seconds_to(self, container: str, line: str) -> float | None:
        """Seconds from the last start of `container` to the first later log line that contains `line`, by the
        engine's timestamps; None if there is no such line yet.
        """
        started = _moment(
            self.run("inspect", "--format", "{{json .State.StartedAt}}", container).strip('"\n')
        )
        for said in self._logs("-t", container).splitlines():
            moment, _, text = said.partition(" ")
            if line in text and (at := _moment(moment)) >= started:
                return at - started
        return None

    def _logs(self, *words: str) -> str:
        done = subprocess.run((self.program, "logs", *words), capture_output=True, text=True)
        return done.stdout + done.stderr

    def down(self) -> None:
        """Remove every container of the compose project, and the project's network."""
        names = self.containers()
        for _ in range(_REMOVALS):
            if not names:
                break
            with suppress(EngineFault):
                self.run("rm", "--force", *(("--time", "1") if self.is_podman else ()), *names)
            names = self.containers()
        with suppress(EngineFault):
            self.run("network", "rm", f"{PROJECT}_default")


def _moment(text: str) -> float:
    """Unix time of `text`, an engine's timestamp with nanoseconds and a time zone."""
    head, _, rest = text.replace("Z", "+00:00").partition(".")
    digits = len(rest) - len(rest.lstrip("0123456789"))
    zone = rest[digits:] or "+00:00"
    return datetime.fromisoformat(f"{head}.{rest[:6]:0<6}{zone[:6]}").astimezone(UTC).timestamp()


def enter_namespace() -> None:
    """If the machine has a second cgroup hierarchy, re-execute this program in a mount namespace without it.

    Podman's networks exist only in the new namespace, so the whole program runs there.
    """
    if _works("docker", "info") or os.environ.get(_INSIDE) or os.geteuid() or not _HYBRID.is_mount():
        return
    again = [sys.executable, *sys.orig_argv[1:]]
    os.environ[_INSIDE] = "1"
    os.execvp("unshare", ["unshare", "-m", "sh", "-c", f'umount {_HYBRID} && exec "$@"', "sh", *again])


def find_engine(tools: Path) -> Engine:
    """Find Docker or podman; podman-compose may be in `tools`. Raises EngineFault if neither is installed."""
    if _works("docker", "info") and _works("docker", "compose", "version"):
        return Engine("docker", ("docker", "compose"))
    if not _works("podman", "--version"):
        raise EngineFault("neither Docker with its compose plugin nor podman is installed (.ci/containers)")
    own = tools / "bin" / "podman-compose"
    compose = str(own) if own.exists() else "podman-compose"
    return Engine("podman", (compose,), ("docker-compose.yml", "deploy/compose/podman.yml"))


def restrict(engine: Engine) -> str:
    """If podman cannot run containers with its default settings, let it run them without cgroups and with
    fixed ulimits. Returns a text about the change; '' without a change. The base image must exist.
    """
    if not engine.is_podman or _works("podman", "run", "--rm", BASE, "true"):
        return ""
    lines = [
        "[containers]",
        'cgroups = "disabled"',
        'default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]',
        f"init_path = {json.dumps(shutil.which('catatonit') or '/usr/libexec/podman/catatonit')}",
        "[network]",
        'network_backend = "netavark"',
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".conf", prefix="compose-test-", delete=False) as file:
        file.write("\n".join(lines) + "\n")
    os.environ["CONTAINERS_CONF"] = file.name
    engine.files += ("deploy/compose/no-cgroups.yml",)
    command("podman", "run", "--rm", BASE, "true")
    return "containers run without cgroups here: no limits of CPU and memory"
