"""Runs the real Dockerfile and docker-compose.yml on a container engine, under load.

Builds and checks every image, starts the whole fleet, scales it, kills a picker and Redis while clients send
requests, reads the admin API, and always removes every container. Grafana is not started.
"""

import argparse
import asyncio
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from long.compose.engine import BASE, ROOT, Engine, enter_namespace, find_engine, restrict
from long.compose.fleet import REQUESTS, Fleet, is_allowed
from long.compose.images import PROMETHEUS, REDIS, examine, fetch_or_make
from long.findings import Findings
from picker_tools.load.generator import Load, closed_loop
from picker_tools.local_fleet.network import ensure_free

_TOOLS = ROOT / ".venv" / "containers"  # holds podman-compose if none is on the PATH
_PORTS = (8080, 8081, 8089, 9090, 3000)
_IMAGES = {"picker": "picker-fleet", "edge": "picker-fleet-edge", "load": "picker-fleet-load"}
_SERVICES = ("redis", "simulator", "picker", "envoy", "prometheus", "locust")
_HEALTHY_S = 180.0
_READY_LINE = "picker_fleet.serve ready"
_READY_MOST_S = 1.5  # limit of the CPU time that a start takes
# A program that prints the CPU seconds of all other processes in its container.
_CPU_SECONDS = """
import glob, os
ticks = 0
for file in glob.glob('/proc/[0-9]*/stat'):
    if file != f'/proc/{os.getpid()}/stat':
        ticks += sum(int(word) for word in open(file).read().rpartition(')')[2].split()[11:13])
print(ticks / os.sysconf('SC_CLK_TCK'))
"""
_CLIENTS = 12
_OUTAGE_S = 3.0


class Steps:
    """Measures how long each step of the run takes, and reports each step as a check."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings

    @contextmanager
    def step(self, name: str) -> Iterator[list[str]]:
        """Measure the block's time, and report it with the notes that the block adds to the yielded list."""
        print(f"{name} …", flush=True)
        notes: list[str] = []
        began_s = time.monotonic()
        yield notes
        self._findings.check(name, True, "; ".join([f"{time.monotonic() - began_s:.1f} s", *notes]))

    def fault(self, text: str) -> None:
        self._findings.check(text, False)


def add_options(parser: argparse.ArgumentParser) -> None:
    switches = {
        "--images": "build and examine the images only",
        "--no-build": "use the images of an earlier run",
    }
    for flag, what in switches.items():
        parser.add_argument(flag, action="store_true", help=what)


def run(options: argparse.Namespace, findings: Findings) -> None:
    enter_namespace()
    log = Steps(findings)
    subprocess.run(["bash", ROOT / ".ci" / "containers", _TOOLS], check=True)
    engine = find_engine(_TOOLS)
    ensure_free(dict.fromkeys(_PORTS, "docker-compose.yml"))
    if options.no_build:
        restrict(engine)
    else:
        _images(engine, log)
    if not options.images:
        _run_fleet(engine, log)


def _images(engine: Engine, log: Steps) -> None:
    for name, what in ((BASE, "base image"), (REDIS, "Redis"), (PROMETHEUS, "Prometheus")):
        with log.step(f"image: {what}") as notes:
            notes.append(fetch_or_make(engine, name))
        if name == BASE and (restricted := restrict(engine)):
            print(f"  {restricted}", flush=True)
    for target, name in _IMAGES.items():
        with log.step(f"build {target}"):
            engine.build(target, name)
    with log.step("examine the images") as notes:
        for target, name in _IMAGES.items():
            quality = examine(engine, name, is_small=target == "picker")
            above_mb = quality.above_base_bytes / 1e6
            notes.append(f"{target} {above_mb:.0f} MB above the base, {quality.packages} packages")
            for fault in quality.faults[:10]:
                log.fault(f"image {target}: {fault}")


async def _under_load(fleet: Fleet, log: Steps) -> None:
    engine = fleet.engine
    with log.step("40 requests through Envoy") as notes:
        async with closed_loop(REQUESTS, clients=8, seed=2) as few:
            await few.wait_for_served(40)
        served_by = {record.endpoint for record in few.history if record.served}
        notes.append(f"served by {len(served_by)} model servers")
        _check(few, (0.0, 0.0), log, notes)
        if len(served_by) != 4:
            log.fault(f"only {len(served_by)} of 4 model servers served requests")
    with log.step("all under load") as all_notes:
        async with closed_loop(REQUESTS, clients=_CLIENTS) as load:
            await load.wait_for_served(50)
            for count in (2, 5):
                with log.step(f"scale to {count} pickers") as notes:
                    before = load.served
                    await asyncio.to_thread(engine.scale_pickers, count)
                    await fleet.until_live(count)
                    notes.append(f"{load.served - before} served meanwhile")
                await load.wait_for_served(50)
            with log.step("kill a picker container") as notes:
                target = engine.containers("picker")[0]
                await asyncio.to_thread(engine.kill, target)
                await fleet.until_live(4)
                before = load.served
                await load.wait_for_served(100)
                notes.append("4 live")
            with log.step("start it again") as notes:
                await asyncio.to_thread(engine.start, target)
                await fleet.until_live(5)
                ready_s = await asyncio.to_thread(engine.seconds_to, target, _READY_LINE)
                notes.append(
                    "5 live; log line `ready` "
                    + ("not found" if ready_s is None else f"after {ready_s:.2f} s")
                )
            with log.step(f"kill the Redis container, start it {_OUTAGE_S:g} s later") as notes:
                redis = engine.containers("redis")[0]
                before, began_s = load.served, time.monotonic()
                await asyncio.to_thread(engine.kill, redis)
                await asyncio.sleep(_OUTAGE_S)
                await asyncio.to_thread(engine.start, redis)
                await fleet.until_state("shared again", lambda state: not state["degraded"])
                await fleet.until_live(5)
                outage = (began_s, time.monotonic())
                notes.append(f"{load.served - before} served meanwhile")
            await load.wait_for_served(100)
        _check(load, outage, log, all_notes)
    with log.step("at rest") as notes:
        await fleet.until_state(
            "all counts 0", lambda s: not s["stock"] and not s["queued"] and not s["leases"]
        )
        notes.append("stock, queue and leases are 0")


def _check(load: Load, outage: tuple[float, float], log: Steps, notes: list[str]) -> None:
    """Report the clients' errors. Refusals that G8 allows during `outage` are no errors, and are counted."""
    failed = load.unserved
    bad = [record for record in failed if not is_allowed(record, outage)]
    left = sum(record.left for record in load.history)
    notes.append(
        f"{len(load.history)} requests: {load.served} served, {left} left by their client, "
        f"{len(failed) - len(bad)} refused as G8 allows, **{len(bad)} errors**"
    )
    for record in bad[:5]:
        log.fault(f"status {record.status}, {record.reason or record.fault or 'half an answer'}")


async def _fleet(engine: Engine, log: Steps, token: str) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:
        fleet = Fleet(engine, client, token)
        with log.step("up with 5 pickers") as notes:
            began_s = time.monotonic()
            await asyncio.to_thread(engine.up, _SERVICES, 5)
            notes.append(
                f"{len(engine.containers())} containers created after {time.monotonic() - began_s:.1f} s"
            )
            await asyncio.to_thread(engine.wait_healthy, engine.containers(), _HEALTHY_S)
            notes.append("all healthy")
            await fleet.until_live(5)
        with log.step("start to ready") as notes:
            waits = [engine.seconds_to(name, _READY_LINE) for name in engine.containers("picker")]
            notes.append(
                "five at once: " + ", ".join("?" if wait is None else f"{wait:.2f} s" for wait in waits)
            )
            notes.append(await _ready_alone(fleet, log))
        await _under_load(fleet, log)
        with log.step("admin API through Envoy") as notes:
            notes.append(await fleet.admin_api())
        with log.step("Prometheus") as notes:
            notes.append(await fleet.prometheus(Counter(picker=5, simulator=4, envoy=1)))
        with log.step("Locust by its page") as notes:
            notes.append(await fleet.locust(60))


async def _ready_alone(fleet: Fleet, log: Steps) -> str:
    """Restart one picker, and measure wall time and CPU time until it is ready."""
    name = fleet.engine.containers("picker")[-1]
    await asyncio.to_thread(fleet.engine.run, "restart", "--time", "10", name)
    ready_s: float | None = None

    async def is_ready() -> bool:
        nonlocal ready_s
        ready_s = await asyncio.to_thread(fleet.engine.seconds_to, name, _READY_LINE)
        return ready_s is not None

    await fleet.until(f"{name} is ready", is_ready)
    cpu_s = float(
        await asyncio.to_thread(fleet.engine.run, "exec", name, "python", "-I", "-S", "-c", _CPU_SECONDS)
    )
    await fleet.until_live(5)
    if cpu_s > _READY_MOST_S:
        log.fault(f"start to ready took {cpu_s:.2f} s of CPU time, more than {_READY_MOST_S} s")
    return f"one picker alone: {ready_s:.2f} s, {cpu_s:.2f} s of CPU time"


def _run_fleet(engine: Engine, log: Steps) -> None:
    with tempfile.TemporaryDirectory() as folder:
        token = secrets.token_hex(16)
        file = Path(folder) / "admin-token"
        file.write_text(token)
        Path(folder).chmod(0o755)
        file.chmod(0o644)  # the container's user must read the token
        engine.environment["PICKER_ADMIN_TOKEN_FILE"] = str(file)
        try:
            engine.down()
            asyncio.run(_fleet(engine, log, token))
        except (Exception, KeyboardInterrupt):
            for name in engine.containers("envoy") + engine.containers("picker")[:1]:
                print(f"--- {name}\n{engine.log(name)}", file=sys.stderr)
            raise
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing may interrupt the short clean-up
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with log.step("remove everything"):
                engine.down()
            if left := engine.containers():
                log.fault(f"containers are left: {', '.join(left)}")
