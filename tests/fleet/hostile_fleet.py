"""Runs every attack of docs/security.md on a fleet at once, while honest clients send requests.

tests/fleet/test_hostile.py attacks for seconds, `make hostile` (tests/long/hostile.py) for minutes. `picker
up` runs the fleet, whose model servers are simulators and two hostile servers. A second Envoy selects the
flow by API key (deploy/examples); attackers have a valid key.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import math
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import hostile_attacks
import hostile_servers
import httpx
import psutil
import yaml
from crowd import http_client
from edge_envoy import bootstrap, started
from hostile_attacks import ATTACKER, HONEST, MODEL, REDIS_USER, TRAP, Target
from model_servers import process_at, simulators
from redis_servers import documented_user
from tls_files import authority
from whole_fleet import running

from picker_fleet.domain.allowlist import FAIRNESS_ID
from picker_fleet.domain.units import split_host_port
from picker_tools.load.generator import Answer, Request, open_loop
from picker_tools.local_fleet.bootstrap import Tree, to_yaml
from picker_tools.local_fleet.network import LOOPBACK, free_port
from picker_tools.local_fleet.parts import Mode

MIB = 1024 * 1024
# The memory limits in deploy/kubernetes and docker-compose.yml.
LIMITS_MIB = {"replica": 512, "envoy": 512, "valkey": 640, "endpoint": 256}

_EXAMPLE = Path(__file__).parents[2] / "deploy" / "examples" / "api_key.py"
_HEAP_BYTES = 400 * MIB
_CONFIG: dict[str, Any] = {
    "extproc": {"trusted_headers": [FAIRNESS_ID[0]]},
    "models": [
        {"name": MODEL, "endpoint_labels": {"kind": "good"}},
        {"name": TRAP, "endpoint_labels": {"kind": "bad"}},
    ],
    "objectives": [{"name": "gold", "criticality": "Critical", "weight": 9.0}],
    "scheduling": {"scorers": [{"name": "queue-depth", "weight": 2}, {"name": "kv-cache", "weight": 2}]},
}


def _flow_by_api_key(keys: Path, bootstrap: str) -> str:
    """Edit Envoy's bootstrap so that a client's API key selects its flow."""
    table = {hashlib.sha256(key.encode()).hexdigest(): key for key in (HONEST, ATTACKER)}
    keys.write_text(yaml.safe_dump(table))
    command = [sys.executable, str(_EXAMPLE), str(keys)]
    done = subprocess.run(command, input=bootstrap, capture_output=True, text=True, check=True)
    return done.stdout


def _without_picker(bootstrap: Tree, servers: Sequence[str]) -> Tree:
    """Edit Envoy's bootstrap so that Envoy chooses a model server itself."""
    manager = bootstrap["staticResources"]["listeners"][0]["filterChains"][0]["filters"][0]["typedConfig"]
    manager["httpFilters"] = manager["httpFilters"][-1:]  # the router
    del manager["accessLog"]
    parted = [split_host_port(server) for server in servers]
    addresses = [{"socketAddress": {"address": host, "portValue": port}} for host, port in parted]
    found = [{"endpoint": {"address": address}} for address in addresses]
    pool = {
        "name": "pool",
        "lbPolicy": "LEAST_REQUEST",
        "circuitBreakers": {"thresholds": [{"maxConnections": 10_000, "maxRequests": 10_000}]},
        "loadAssignment": {"clusterName": "pool", "endpoints": [{"lbEndpoints": found}]},
    }
    clusters = bootstrap["staticResources"]["clusters"]
    clusters[:] = [pool if cluster["name"] == "pool" else cluster for cluster in clusters]
    return bootstrap


def limit_mib(name: str) -> int | None:
    """The memory limit in MiB of process `name`; None for a process that is not part of the product."""
    return next((limit for kind, limit in LIMITS_MIB.items() if name.startswith(kind)), None)


def _peak_bytes(pid: int) -> int:
    """The peak memory of a process in MiB; 0 if the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)


@contextlib.asynccontextmanager
async def _running_fleet(
    replicas: int, servers: int, mode: Mode, rate: float, client_rate: int | None, asks: bool
) -> AsyncIterator[tuple[Target, dict[str, int]]]:
    """Run the fleet within the `with` block. Yields attackers' addresses, and process ids by name. If not
    `asks`, Envoy asks no picker."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hostile-")))
        hosts = [f"127.0.0.{number}" for number in range(81, 81 + servers)]
        quick = ("--ttft", "40", "--itl", "10", "--max-num-seqs", "32", "--model", MODEL)
        honest = await stack.enter_async_context(simulators(hosts, *quick))
        hostile = {}
        for number, kind in enumerate(("big", "slow"), 91):
            address = f"127.0.0.{number}:{free_port()}"  # clients' own ports are at 127.0.0.1
            command = [sys.executable, hostile_servers.__file__, kind, address]
            hostile[address] = await stack.enter_async_context(process_at(f"http://{address}/", command))
        endpoints = [
            {"address": address, "labels": {"kind": kind}}
            for kind, addresses in (("good", honest), ("bad", hostile))
            for address in addresses
        ]
        config = {**_CONFIG, "discovery": {"static": endpoints}}
        certificate = ""
        if mode == "standard":
            own = authority(folder, "picker")
            config["extproc"] = {**config["extproc"], "tls": {"cert": str(own.cert), "key": str(own.key)}}
            certificate = own.cert.read_text()
        options = ("--replicas", str(replicas), "--endpoints", "0", "--mode", mode)
        fleet = await stack.enter_async_context(running(folder, *options, config=config))
        limits = {"max_heap_bytes": _HEAP_BYTES, "client_rate": client_rate}
        tree = bootstrap(fleet, mode, config, **limits)
        plain = to_yaml(tree if asks else _without_picker(tree, list(honest)))
        keyed = _flow_by_api_key(folder / "keys.yaml", plain)
        envoy = stack.enter_context(started(keyed, folder / "edge", threads=2))  # as in docker-compose.yml
        async with fleet.redis() as redis:
            rules = documented_user("picker").replace("epp:*", "epp:{other}:*").split()
            await redis.execute_command("ACL", "SETUSER", REDIS_USER, "on", "nopass", *rules)
        parts = fleet.state["replicas"]
        grpc = tuple(part["grpc"] for part in parts)
        target = Target(
            envoy=(f"{LOOPBACK}:{envoy.port}",),
            grpc=grpc,
            admin=tuple(part["admin"].removeprefix("http://") for part in parts),
            http=tuple(part["http"] for part in parts if mode == "http"),
            tls=grpc if certificate else (),
            certificate=certificate,
            redis=(urlsplit(fleet.state["redis"]).netloc,),
            rate=rate,
        )
        pids = {f"replica-{number}": int(part["pid"]) for number, part in enumerate(parts, 1)}
        pids |= {f"endpoint-{number}": each.pid for number, each in enumerate(honest.values(), 1)}
        yield target, {**pids, "envoy": envoy.pid, "valkey": fleet.child("valkey-server").pid}


_TOKENS = 16


@dataclass(slots=True)
class ClientTimes:
    """Seconds from request to first and to last byte of each answer, and descriptions of the failures."""

    first_s: list[float] = field(default_factory=list)
    last_s: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(self, answer: Answer) -> None:
        if answer.served:
            self.first_s.append(answer.first_s or answer.took_s)
            self.last_s.append(answer.took_s)
        else:
            self.failed.append(f"{answer.outcome} {answer.text}")


def _make_request(_: random.Random, number: int) -> Request:
    headers = (("authorization", f"Bearer {HONEST}"),)
    return Request(f"question {number}", _TOKENS, number % 2 == 0, headers=headers, model=MODEL)


@contextlib.asynccontextmanager
async def _honest_clients(envoy: str, per_s: float, times: ClientTimes) -> AsyncIterator[None]:
    """Run honest clients of `envoy` (host:port) within the `with` block; the block's end awaits answers."""
    ended = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_http2_clients(envoy, per_s / 2, times, ended))
        try:
            async with open_loop(f"http://{envoy}", per_s, _make_request, keep=True) as load:
                yield
        finally:
            ended.set()
    for answer in load.history:
        times.add(answer)


async def _http2_clients(envoy: str, per_s: float, times: ClientTimes, ended: asyncio.Event) -> None:
    """Send `per_s` requests a second on one HTTP/2 connection, every other one streamed."""
    headers = {"authorization": f"Bearer {HONEST}"}

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        body = {
            "model": MODEL,
            "prompt": f"question {number}",
            "max_tokens": _TOKENS,
            "stream": number % 2 == 0,
        }
        try:
            answer = await client.post("/v1/completions", json=body, headers=headers)
        except httpx.HTTPError as fault:
            times.failed.append(f"HTTP/2: {fault!r}")
            return
        if answer.status_code != 200 or (body["stream"] and "[DONE]" not in answer.text):
            times.failed.append(f"HTTP/2: {answer.status_code} {answer.text[-100:]}")
        else:
            times.last_s.append(answer.elapsed.total_seconds())

    options: Any = {"timeout": _RESTS_S, "http1": False, "http2": True}
    async with http_client(f"http://{envoy}", **options) as client, asyncio.TaskGroup() as tasks:
        for number in itertools.count():
            tasks.create_task(ask(client, number))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1 / per_s):
                    await ended.wait()
                return


_RESTS_S = 40.0  # seconds: longer than a lease and than the wait for a client's body


@dataclass(slots=True)
class HostileReport:
    """Results of honest clients before the attack (`calm`), during the attack (`hostile`), and afterwards,
    beside processes that use as many CPU cores as the attack did (`control`). `burnt`: the number of CPU
    cores that the attack used. `left`: the fleet's counts after the attack.
    """

    calm: ClientTimes = field(default_factory=ClientTimes)
    hostile: ClientTimes = field(default_factory=ClientTimes)
    control: ClientTimes = field(default_factory=ClientTimes)
    burnt: float = 0.0
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    peaks_mib: dict[str, float] = field(default_factory=dict)
    left: dict[str, float] = field(default_factory=dict)

    def faults(self) -> list[str]:
        """Lists failed requests, memory above its limit, counts above 0 at rest; latency is not checked."""
        found = [f"calm: {failed}" for failed in self.calm.failed + self.control.failed]
        found += [f"under attack: {failed}" for failed in self.hostile.failed]
        for name, peak in self.peaks_mib.items():
            limit = limit_mib(name)
            if not peak:
                found.append(f"{name} has ended")
            elif limit is not None and peak > limit:
                found.append(f"{name} used {peak:.0f} MiB; its limit is {limit}")
        found += [f"{name} is {count:g} at rest" for name, count in self.left.items() if count]
        found += [f"never attempted: {name}" for name, outcomes in self.outcomes.items() if not outcomes]
        return found


async def attack_fleet(
    *,
    replicas: int,
    servers: int,
    per_s: float,
    calm_s: float,
    hostile_s: float,
    mode: Mode,
    only: str = "",
    each: bool = False,
    rate: float = 1.0,
    client_rate: int | None = None,
    asks: bool = True,
) -> HostileReport:
    """Send `per_s` honest requests a second by HTTP/1.1 and half of that by HTTP/2: `calm_s` seconds without
    attacks, `hostile_s` during the attacks whose names contain `only`, then `calm_s` as the control. If
    `each`, the attacks run one after another. `rate` divides their pauses; with inf they use half a core.
    Envoy limits each client address to `client_rate` requests a second; all attackers have one address.
    If not `asks`, Envoy asks no picker and chooses a model server itself."""
    report = HostileReport()
    async with _running_fleet(replicas, servers, mode, rate, client_rate, asks) as (target, pids):
        before_s = _cpu_s(pids)
        await _calm(target, report.calm, per_s, calm_s)
        calm_cores = (_cpu_s(pids) - before_s) / calm_s if calm_s else 0.0
        names = [attack.name for attack in hostile_attacks.possible(target, only)] if each else [only]
        for name in names:
            await _attack(name, target, pids, report, per_s, hostile_s)
        report.burnt = max(report.burnt / hostile_s / len(names) - calm_cores, 0.0)
        report.left = await _left(target)
        report.peaks_mib = {name: _peak_bytes(pid) / MIB for name, pid in pids.items()}
        async with _burning(report.burnt if calm_s else 0.0):
            await _calm(target, report.control, per_s, calm_s)
    return report


async def _attack(
    only: str,
    target: Target,
    pids: Mapping[str, int],
    report: HostileReport,
    per_s: float,
    lasts_s: float,
) -> None:
    """Attack for `lasts_s` while honest clients send requests. Adds the CPU seconds to `report.burnt`."""
    attackers = await asyncio.create_subprocess_exec(
        *(sys.executable, hostile_attacks.__file__, json.dumps(target._asdict()), only),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert attackers.stdout is not None
    times = ClientTimes(report.hostile.first_s, report.hostile.last_s)
    try:
        async with asyncio.timeout(_RESTS_S):
            assert await attackers.stdout.readline() == b"attacking\n"
        everybody = {**pids, "attackers": attackers.pid}
        before_s = _cpu_s(everybody)
        async with _honest_clients(target.envoy[0], per_s, times):
            await asyncio.sleep(lasts_s)
            report.burnt += _cpu_s(everybody) - before_s
        async with asyncio.timeout(_RESTS_S):
            said, _ = await attackers.communicate(b"")  # closes the attackers' stdin
    finally:
        if attackers.returncode is None:
            attackers.kill()
            await attackers.wait()
    report.hostile.failed += [f"{only}: {failed}" for failed in times.failed]
    report.outcomes |= {name: Counter(outcomes) for name, outcomes in json.loads(said).items()}


async def _calm(target: Target, times: ClientTimes, per_s: float, lasts_s: float) -> None:
    if lasts_s:
        async with _honest_clients(target.envoy[0], per_s, times):
            await asyncio.sleep(lasts_s)


def _cpu_s(pids: Mapping[str, int]) -> float:
    """CPU seconds that the processes have used so far."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids.values())


_BURN = """
import sys, time
while True:
    begun_s = time.monotonic()
    while time.monotonic() < begun_s + 0.02 * float(sys.argv[1]):
        pass
    time.sleep(max(begun_s + 0.02 - time.monotonic(), 0))
"""


@contextlib.asynccontextmanager
async def _burning(cores: float) -> AsyncIterator[None]:
    """Within the `with` block, run processes that together use `cores` CPU cores."""
    count = math.ceil(cores)
    command = (sys.executable, "-c", _BURN, str(cores / count if count else 0.0))
    burners = [await asyncio.create_subprocess_exec(*command) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            await burner.wait()


async def _left(target: Target) -> dict[str, float]:
    """Read the fleet's counts until all are 0 or _RESTS_S have passed; return the last."""
    async with http_client() as client:
        clock = asyncio.get_running_loop().time
        until_s = clock() + _RESTS_S
        while True:
            state = (await client.get(f"http://{target.admin[0]}/api/v1/state")).json()
            left = {name: float(state[name]) for name in ("stock", "queued", "leases")}
            if not any(left.values()) or clock() >= until_s:
                return left
            await asyncio.sleep(0.2)
