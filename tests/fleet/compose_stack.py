"""The services of docker-compose.yml as local processes, without containers.

Each process runs its service's command with only the service's environment. Container settings are replaced:

- every container has a loopback address, which replaces `0.0.0.0` and `127.0.0.1`;
- `service:port` becomes the addresses of the service's containers, an option before it is repeated; in
  configuration files DNS discovery becomes the static list that DNS would return;
- mounted files are copied to the container's folder, folders are used in place, a secret is `TOKEN`;
- `picker`, `envoy`, `locust` and `python` come from this environment; `redis-server` is Valkey with
  `--bind` added (in a container it binds all addresses).
"""

import os
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path

import yaml

from picker_tools.local_fleet import die_with_parent
from picker_tools.local_fleet.processes import envoy_binary, valkey_binary

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
TOKEN = "the-token-of-the-test"
_HEALTHY_S = 120.0  # seconds for a service to become healthy on a busy machine
_STOP_S = 30.0
_POLL_S = 0.2  # not shorter: each health check starts a process, which takes CPU


@dataclass(slots=True)
class Container:
    """One process that stands for a container of `service`."""

    service: str
    address: str
    folder: Path
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def output(self) -> str:
        return (self.folder / "log").read_text(errors="replace")


class Stack:
    """The compose services as processes; `scale` is the number of containers of each service."""

    def __init__(self, folder: Path, scale: dict[str, int]) -> None:
        self._folder, self._scale = folder, scale
        self._services = yaml.safe_load(FILE.read_text())["services"]
        self._started: list[Container] = []
        net = f"127.{random.randint(2, 250)}.{random.randint(2, 250)}"
        services = [service for service, count in scale.items() for _ in range(count)]
        self.containers = [
            Container(service, f"{net}.{number}", folder / f"{service}-{number}")
            for number, service in enumerate(services, 1)
        ]
        for container in self.containers:
            container.folder.mkdir()
        (folder / "secret").write_text(f"{TOKEN}\n")
        self._programs()

    def of(self, service: str) -> list[Container]:
        return [each for each in self.containers if each.service == service]

    def start(self) -> None:
        """Start all services in the order of depends_on, each after its dependencies are healthy."""
        waits_for = {service: self._services[service].get("depends_on", {}) for service in self._scale}
        for needs in waits_for.values():
            assert {each["condition"] for each in needs.values()} <= {"service_healthy"}
        order = TopologicalSorter(waits_for)
        order.prepare()
        while services := order.get_ready():
            containers = [container for service in services for container in self.of(service)]
            for container in containers:
                self._start(container)
            for container in containers:
                self._until_healthy(container)
            order.done(*services)

    def stop(self) -> dict[str, int]:
        """Stop all processes in reverse order, as Docker does; return exit codes by folder name."""
        codes: dict[str, int] = {}
        for container in reversed(self._started):
            container.process.terminate()
            try:
                codes[container.folder.name] = container.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                container.process.kill()
                codes[container.folder.name] = container.process.wait()
        return codes

    def _programs(self) -> None:
        programs = self._folder / "bin"
        programs.mkdir()
        python = f'#!/bin/sh\nPYTHONPATH="{ROOT}/app" exec "{sys.executable}"'
        for name, how in (("picker", "-P -m picker_fleet.cli "), ("locust", "-m locust "), ("python", "")):
            (programs / name).write_text(f'{python} {how}"$@"\n')
            (programs / name).chmod(0o755)
        (programs / "envoy").symlink_to(envoy_binary())
        (programs / "redis-server").symlink_to(valkey_binary())

    def _start(self, container: Container) -> None:
        service = self._services[container.service]
        # The picker image has the entry point `picker`; other images run the given command.
        image = ["picker"] if service.get("build", {}).get("target") == "picker" else []
        command = [*image, *self._translated_command(container, service["command"])]
        if command[0] == "redis-server":
            command += ["--bind", container.address]
        given = service.get("environment", {})
        environment = {name: self._translated(container, value) for name, value in given.items()}
        guard = [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), "SIGKILL"]
        with (container.folder / "log").open("wb") as log:
            container.process = subprocess.Popen(
                [*guard, *self._found(command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=container.folder,
                env={"PATH": self._path, **environment},
            )
        self._started.append(container)

    def _until_healthy(self, container: Container) -> None:
        """Run the service's health check until the check succeeds."""
        kind, *words = self._services[container.service]["healthcheck"]["test"]
        assert kind == "CMD"
        if words[0] == "redis-cli":  # redis-cli is not installed; this connection sends the same PING
            ask = "import socket, sys; s = socket.create_connection((sys.argv[1], 6379))"
            ask += "; s.sendall(b'PING\\r\\n'); assert s.recv(16) == b'+PONG\\r\\n'"
            words = ["python", "-c", ask, "127.0.0.1"]
        command = self._found(self._translated_command(container, words))
        deadline_s = time.monotonic() + _HEALTHY_S
        while True:
            done = subprocess.run(command, env={"PATH": self._path}, capture_output=True, timeout=30)
            if done.returncode == 0:
                return
            assert container.process.poll() is None, f"{container.service} ended:\n{container.output}"
            seen = f"{done.stderr.decode(errors='replace')[-500:]}\n{container.output}"
            assert time.monotonic() < deadline_s, f"{container.service} is not healthy:\n{seen}"
            time.sleep(_POLL_S)

    @property
    def _path(self) -> str:
        return f"{self._folder / 'bin'}:/usr/local/bin:/usr/bin:/bin"

    def _found(self, command: list[str]) -> list[str]:
        own = self._folder / "bin" / command[0]
        return [str(own) if own.exists() else f"/bin/{command[0]}", *command[1:]]

    def _translated_command(self, container: Container, words: list[str]) -> list[str]:
        return [self._translated(container, word) for word in words]

    def _translated(self, container: Container, text: str) -> str:
        service = self._services[container.service]
        folders = {path.partition(":")[0]: container.folder for path in service.get("tmpfs", [])}
        folders |= {f"/run/secrets/{name}": self._folder / "secret" for name in service.get("secrets", [])}
        for mount in service.get("volumes", []):
            source, target, mode = mount.split(":")
            assert mode == "ro"
            path = ROOT / source
            folders[target] = path if path.is_dir() else self._mounted(container, path)
        for inside, outside in folders.items():
            text = re.sub(rf"(?<![\w./-]){re.escape(inside)}(?=/|$|\s)", f"\0{outside}", text)
        return self._addressed(container, text).replace("\0", "")

    def _mounted(self, container: Container, source: Path) -> Path:
        copy = container.folder / source.name
        tree = yaml.safe_load(self._addressed(container, source.read_text()))
        dns = tree["discovery"].pop("dns")
        hosts = [each.address for each in self.of(dns["name"])]
        tree["discovery"]["static"] = [{"address": f"{host}:{dns['port']}"} for host in hosts]
        copy.write_text(yaml.safe_dump(tree))
        return copy

    def _addressed(self, container: Container, text: str) -> str:
        def named(found: re.Match[str]) -> str:
            option, service, port = found.groups()
            return " ".join(f"{option or ''}{each.address}:{port}" for each in self.of(service))

        text = re.sub(r"\b(?:0\.0\.0\.0|127\.0\.0\.1)\b", container.address, text)
        return re.sub(rf"(--[a-z-]+ )?(?<![\w.-])({'|'.join(self._scale)}):(\d+)", named, text)
