"""A replica of the local fleet: `picker serve` as a child, with a configuration file of its own."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from picker_fleet.units import split_host_port
from picker_tools.local_fleet.child import Child
from picker_tools.local_fleet.part import READY_S, picker_command
from picker_tools.local_fleet.ports import LOOPBACK


@dataclass(frozen=True, slots=True)
class Announcement:
    """The line a replica prints once its listeners are bound: `{"ready": true, "id", "grpc", "admin"}`."""

    id: str
    grpc: str  # host:port
    admin: str  # http://host:port


class Replica:
    """Replica `number`. `tree` gives its configuration but for the listeners, asked for at each start."""

    def __init__(
        self, number: int, admin_port: int, folder: Path, tree: Callable[[], Mapping[str, Any]]
    ) -> None:
        self.name = f"replica-{number}"
        self._file = folder / f"{self.name}.yaml"
        self._tree = tree
        self._admin = f"{LOOPBACK}:{admin_port}"
        self._grpc = f"{LOOPBACK}:0"
        self._announced = Announcement(id="", grpc=self._grpc, admin="")

    @property
    def announced(self) -> Announcement:
        """What it last said of itself; its id is new at each start, its addresses stay."""
        return self._announced

    @property
    def host(self) -> tuple[str, int]:
        """Where Envoy reaches it."""
        return split_host_port(self._announced.grpc)

    def command(self) -> list[str]:
        tree = dict(self._tree())
        tree["extproc"] = {**tree.get("extproc", {}), "listen": self._grpc}
        tree["admin"] = {**tree.get("admin", {}), "listen": self._admin}
        self._file.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
        return picker_command("serve", "--config", str(self._file))

    async def ready(self, child: Child) -> str:
        async def announced() -> Announcement | None:
            return next(filter(None, map(_announcement, child.lines())), None)

        self._announced = await child.until(announced, within_s=READY_S, what="its ready line")
        self._grpc = self._announced.grpc
        self._admin = self._announced.admin.removeprefix("http://")
        return f"grpc {self._announced.grpc}, admin {self._announced.admin}"


def _announcement(line: str) -> Announcement | None:
    if not line.startswith('{"ready"'):  # its other lines are log entries
        return None
    try:
        said = json.loads(line)
        return Announcement(id=str(said["id"]), grpc=str(said["grpc"]), admin=str(said["admin"]))
    except (ValueError, KeyError, TypeError):
        return None
