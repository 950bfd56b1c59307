"""A long steady load on a whole fleet: does anything grow, does any count drift? `python -m bench.soak`.

Loads, pauses, reads, again; then writes bench/results/soak.md. Exits with 0 if nothing grew and nothing
drifted.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
import yaml
from redis.asyncio import Redis

from bench.rig.machine import Machine, describe_machine
from picker_tools.load.client_history import ClientRequest, closed_loop, mixed_request

_READY_S = 90.0
_STOP_S = 60.0
_CALL_S = 10.0
_CONFIG: Mapping[str, Any] = {
    "request_queue_controller": {"watermark_per_backend": 4},
    "fair_request_queue": {"flow_capacity": 500},
}
_SIM = ("--sim-ttft", "20", "--sim-itl", "5")


@dataclass(frozen=True, slots=True)
class Reading:
    """`at_s` since the load began. Sizes in bytes: of the largest replica, of Envoy, of Redis's data.

    `keys` Redis has, `files` the replicas have open, `served` clients were until then. `drift` is by how much
    the fleet's counts differ from the simulators' own, all endpoints' differences added: looked at in a pause
    of the load, when both must be 0.
    """

    at_s: float
    replica_bytes: int
    envoy_bytes: int
    redis_bytes: int
    keys: int
    files: int
    served: int
    drift: int


class Fleet:
    """A running fleet; see `running_fleet`."""

    def __init__(self, state: dict[str, Any], process: psutil.Process, client: httpx.AsyncClient) -> None:
        self.url = str(state["envoy"])
        self._state = state
        self._client = client
        self._redis = Redis.from_url(state["redis"], socket_timeout=_CALL_S)
        self.replicas = [psutil.Process(replica["pid"]) for replica in state["replicas"]]
        children = process.children(recursive=True)
        self._envoy = next(child for child in children if "envoy" in child.name())
        self.redis = next(child for child in children if "valkey" in child.name())

    async def read(self, at_s: float, served: int) -> Reading:
        """A reading now."""
        memory = await self._redis.info("memory")
        return Reading(
            at_s,
            max(replica.memory_info().rss for replica in self.replicas),
            self._envoy.memory_info().rss,
            int(memory["used_memory"]),
            int(await self._redis.dbsize()),
            sum(replica.num_fds() for replica in self.replicas),
            served,
            await self.drift(),
        )

    async def drift(self) -> int:
        """Differences of the fleet's and the simulators' in-flight counts, plus all other counts."""
        state = (await self._client.get(f"{self._state['replicas'][0]['admin']}/api/v1/state")).json()
        differences = 0
        for endpoint in self._state["endpoints"]:
            address = endpoint["address"]
            page = (await self._client.get(f"http://{address}/metrics")).text
            differences += abs(state["in_flight"].get(address, 0) - _busy(page))
        return int(differences + state["stock"] + state["queued"] + state["leases"])

    async def at_model_servers(self) -> int:
        """Requests that the simulators have at this moment, by their own pages."""
        pages = await asyncio.gather(
            *(self._client.get(f"http://{each['address']}/metrics") for each in self._state["endpoints"])
        )
        return sum(_busy(page.text) for page in pages)

    async def page(self, replica: int) -> str:
        """A replica's metrics."""
        return (await self._client.get(f"{self._state['replicas'][replica]['admin']}/metrics")).text

    async def finished(self) -> int:
        """Requests that the simulators themselves count as finished."""
        total = 0.0
        for endpoint in self._state["endpoints"]:
            page = (await self._client.get(f"http://{endpoint['address']}/metrics")).text
            total += sum(_values(page, "vllm:request_success_total"))
        return int(total)

    async def close(self) -> None:
        await self._redis.aclose()


@contextlib.asynccontextmanager
async def running_fleet(
    config: Mapping[str, Any] = _CONFIG, options: Sequence[str] = _SIM
) -> AsyncIterator[Fleet]:
    """Three replicas, four simulators, Envoy in `lean`, a Valkey, unless `options` of `picker up` say
    otherwise; ended with the block.

    Raises:
        RuntimeError: it did not become ready, or did not end well.
    """
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
        files = ["--config", str(folder / "config.yaml"), "--state-file", str(folder / "state.json")]
        arguments = ["--port", "0", *files, "--debug-headers", *options]
        with (folder / "up.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "picker_fleet.cli", "up", *arguments), stdout=log, stderr=log
            )
        try:
            state = await _until_ready(process, folder)
            async with httpx.AsyncClient(trust_env=False, timeout=_CALL_S) as client:
                fleet = Fleet(state, psutil.Process(process.pid), client)
                try:
                    yield fleet
                finally:
                    await fleet.close()
        finally:
            if process.returncode is None:
                process.terminate()
            async with asyncio.timeout(_STOP_S):
                code = await process.wait()
        if code:
            raise RuntimeError(f"picker up exited with {code}")


async def _until_ready(process: asyncio.subprocess.Process, folder: Path) -> dict[str, Any]:
    """What its state file says, once it is there."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_READY_S):
            while process.returncode is None:
                if state := _text(folder / "state.json"):
                    return dict(json.loads(state))
                await asyncio.sleep(0.1)
    raise RuntimeError(f"the fleet did not become ready: {_text(folder / 'up.log')[-2000:]}")


def _text(file: Path) -> str:
    """What is in `file`; '' if there is none."""
    return file.read_text(encoding="utf-8") if file.exists() else ""


def _busy(page: str) -> int:
    return int(sum(_values(page, "vllm:num_requests_running") + _values(page, "vllm:num_requests_waiting")))


def _values(page: str, name: str) -> list[float]:
    return [float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(f"{name}{{")]


_MOST_GROWTH = 0.05  # of what a size was in the second quarter of the run, until its last quarter
_SIZES = (("replica_bytes", "a replica"), ("envoy_bytes", "Envoy"), ("redis_bytes", "Redis's data"),
          ("files", "open files"))  # fmt: skip


def growth(readings: Sequence[Reading], what: str) -> float:
    """By what share `what` grew from the second quarter of the run to the last."""
    quarter = len(readings) // 4
    values = [float(getattr(reading, what)) for reading in readings]
    early, late = median(values[quarter : 2 * quarter]), median(values[-quarter:])
    return late / early - 1


def faults_of(readings: Sequence[Reading], counts: Mapping[str, int]) -> list[str]:
    """What grew, drifted or failed in the run."""
    faults = [
        f"{name} grew by {growth(readings, what):.1%}, {_MOST_GROWTH:.0%} at most"
        for what, name in _SIZES
        if growth(readings, what) > _MOST_GROWTH
    ]
    late = readings[len(readings) // 4 :]
    if late[-1].keys > max(reading.keys for reading in late[: len(late) // 2]):
        faults.append(f"keys in Redis grew to {late[-1].keys}")
    drifted = sum(reading.drift for reading in readings)
    if drifted:
        faults.append(f"counts drifted by {drifted}")
    if counts["failed"]:
        faults.append(f"{counts['failed']} requests failed")
    if not counts["served"] <= counts["finished"] <= counts["served"] + counts["left"]:
        faults.append(f"simulators finished {counts['finished']}, clients were served {counts['served']}")
    return faults


def page(
    command: str,
    date: str,
    readings: Sequence[Reading],
    counts: Mapping[str, int],
    faults: Sequence[str],
) -> str:
    """The results as Markdown."""
    mib = 1024 * 1024
    rows = [
        f"| {r.at_s / 60:.1f} | {r.served} | {r.replica_bytes / mib:.1f} | {r.envoy_bytes / mib:.1f} | "
        f"{r.redis_bytes / mib:.2f} | {r.keys} | {r.files} | {r.drift} |"
        for r in readings
    ]
    grew = ", ".join(f"{name} {growth(readings, what):+.1%}" for what, name in _SIZES)
    return "\n".join(
        [
            "# Soak", "",
            f"`{command}`, {date}: three replicas, four simulators, Envoy in `lean`, a Valkey; a closed",
            "loop of plain and streamed requests of six flows, bodies up to 60 KB, one client in ten leaves.",
            "Twelve times the load pauses, and everything is read: drift is the difference between the",
            "fleet's counts and the simulators' own, which must both be 0 then.", "",
            f"- requests {counts['asked']}: served {counts['served']}, left by their clients",
            f"  {counts['left']}, failed {counts['failed']}; the simulators finished {counts['finished']}",
            f"- growth from the second quarter to the last: {grew}",
            f"- drift: {sum(reading.drift for reading in readings)}",
            f"- **{'as it should be' if not faults else '; '.join(faults)}**", "",
            "| minutes | served | largest replica MiB | Envoy MiB | Redis MiB | keys | open files | drift |",
            "|---|---|---|---|---|---|---|---|",
            *rows, "",
        ]
    )  # fmt: skip


_RESULTS = Path(__file__).parent / "results"
_PAUSES = 12  # in a run, however long
_REST_WITHIN_S = 20.0  # longer than a lease: what has not ended then never will


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--out", type=Path, default=_RESULTS)
    options = parser.parse_args()
    here = describe_machine("bench.soak", sys.argv[1:])
    readings, figures = asyncio.run(_soak(options.minutes * 60, options.clients))
    faults = faults_of(readings, figures)
    text = page(_command(here), here.date, readings, figures, faults)
    (options.out / "soak.md").write_text(text, encoding="utf-8")
    print(text)
    return 1 if faults else 0


async def _soak(lasts_s: float, clients: int) -> tuple[list[Reading], dict[str, int]]:
    """Readings, and how many requests were asked, served, left by their clients, failed, finished."""
    readings: list[Reading] = []
    counts = dict.fromkeys(("asked", "served", "left", "failed"), 0)
    async with running_fleet() as fleet:
        before, began = await fleet.finished(), time.monotonic()
        for part in range(_PAUSES):
            async with closed_loop(fleet.url, clients=clients, seed=part, make_request=_make_request) as load:
                await asyncio.sleep(max(0.0, began + lasts_s * (part + 1) / _PAUSES - time.monotonic()))
            counts["asked"] += len(load.history)
            counts["served"] += load.served
            counts["left"] += sum(record.left for record in load.history)
            counts["failed"] += len(load.failed)
            await _wait_for_rest(fleet)
            readings.append(await fleet.read(time.monotonic() - began, counts["served"]))
            print(readings[-1], flush=True)
        return readings, {**counts, "finished": await fleet.finished() - before}


async def _wait_for_rest(fleet: Fleet) -> None:
    """Wait until all counts agree, for _REST_WITHIN_S at most; the reading shows what remains."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_REST_WITHIN_S):
            while await fleet.drift():  # noqa: ASYNC110 - the fleet notifies nobody of it
                await asyncio.sleep(0.2)


def _make_request(dice: random.Random, number: int) -> ClientRequest:
    """A mixed request; one client in ten hangs up."""
    request = mixed_request(dice, number)
    leaves_s = dice.uniform(0, 0.4) if dice.random() < 0.1 else None
    return replace(request, leaves_s=leaves_s)


def _command(here: Machine) -> str:
    return here.command


if __name__ == "__main__":
    sys.exit(main())
