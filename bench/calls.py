"""`python -m bench.calls BASE`: what a call of the scripts costs Valkey, here and in the checkout BASE.

Both libraries are on one server, each with an idle pool of its own, and are called in turns, so that a change
of the machine's speed affects both. Writes bench/results/calls.md. `bench.versions` compares whole fleets,
where a version with fewer requests a call makes more calls.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.lifecycle.workload import SETTINGS
from bench.rig.machine import describe_machine
from bench.rig.page import interval, table
from bench.rig.server import Server, server
from bench.versions import commit_of, package_of
from picker_fleet.state.scripts import load_library
from picker_fleet.state.store import pack_arrival

ROUNDS = 20
_CALLS = 1500  # of each kind, version and round
_SIZES = (1, 2, 4)  # requests a call
_OWNER = "x2k4p-9f3c1a7e"
_ABOUT = '{"labels":{},"draining":false}'
_SOURCE = "from {}.state.scripts import load_library; x = load_library(); print(x.version); print(x.source)"
_SETTINGS = {**SETTINGS, "upper_per": 1e5, "lower_per": 9e4, "lease_ms": 15_000, "silence_ms": 10_000_000}


class Version:
    """One library with a pool of its own."""

    def __init__(self, it: Server, name: str, version: str, source: str) -> None:
        self._client, self._key, self._version = it.client, f"epp:{{{name}}}:pool", version
        self._client.function_load(source, replace=True)
        self._ids = itertools.count()
        hosts = [part for n in range(2) for part in (f"10.0.0.{n}:8000", _ABOUT)]
        self.call("heartbeat", _OWNER, "{}", 10_000_000, "")
        self.call("publish", _OWNER, "c", "e", json.dumps(_SETTINGS), *hosts)

    def call(self, name: str, *args: object) -> None:
        self._client.fcall(f"{name}_{self._version}", 1, self._key, *args)  # type: ignore[arg-type]

    def costs(self, size: int, cpu_us: Callable[[], float]) -> dict[str, float]:
        """CPU of the server for a call of each kind with `size` requests, in microseconds."""
        ids = [[f"{next(self._ids):036d}" for _ in range(size)] for _ in range(_CALLS)]
        admits, settles = [], []
        for each in ids:
            admits.append(
                [
                    pack_arrival((id, "1", "llama", "", "llama", "*"), (0, 1, 1, 30_000, 0, 3, 0, 0))
                    for id in each
                ]
            )
            settles.append([part for id in each for part in (id, "completed", "", "")])
        found = {}
        for name, calls in (("admit", admits), ("settle", settles)):
            before = cpu_us()
            for args in calls:
                self.call(name, _OWNER, *args)
            found[name] = (cpu_us() - before) / _CALLS
        return found


def measure(base: Path) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """For each kind of call and size, base and present in each round."""
    package, path = package_of(base)
    command = [sys.executable, "-P", "-c", _SOURCE.format(package)]
    environment = {**os.environ, "PYTHONPATH": str(path)}
    output = subprocess.run(
        command, cwd=base, env=environment, capture_output=True, text=True, check=True
    ).stdout
    version, _, source = output.partition("\n")
    present = load_library()
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with server() as it:
        both = Version(it, "base", version, source), Version(it, "present", present.version, present.source)
        for number, size in itertools.product(range(-1, ROUNDS), _SIZES):
            costs = {each: each.costs(size, it.cpu_us) for each in (both if number % 2 else both[::-1])}
            if number >= 0:  # the first round warms up
                for name in costs[both[0]]:
                    pair = costs[both[0]][name], costs[both[1]][name]
                    found.setdefault((name, size), []).append(pair)
    return found


def page(found: dict[tuple[str, int], list[tuple[float, float]]], base: str) -> str:
    made = describe_machine("bench.calls")
    lines = [
        "# What a call of the scripts costs Valkey, this version beside an earlier one",
        "",
        f"`python -m bench.calls`, base {base}, {made.date}, {made.cores} cores, load {made.load:.2f} at the "
        f"end. CPU of the server in microseconds a call, means of {ROUNDS} rounds of {_CALLS} calls; both "
        "libraries on one server, in turns; a pool in which nothing waits. A ratio is present by base within "
        "a round: geometric mean, and its 95 % interval.",
        "",
    ]
    rows = []
    for (name, size), pairs in found.items():
        mean, low, high = interval([new / old for old, new in pairs])
        old, new = (sum(each) / len(pairs) for each in zip(*pairs, strict=True))
        costs = [f"{old:.1f}", f"{new:.1f}", f"{mean:.3f}", f"{low:.3f} to {high:.3f}"]
        rows.append([name, str(size), *costs])
    head = ["call", "requests", "base", "present", "ratio", "interval"]
    return "\n".join([*lines, table(head, rows)]) + "\n"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.calls", description=__doc__)
    parser.add_argument("base", type=Path, help="a checkout of the version to compare with")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    args = parser.parse_args(arguments)
    base = args.base.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "calls.md").write_text(page(measure(base), commit_of(base)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
