"""Kills replicas, changes settings and lets clients leave; then the audit must find no broken promise.

The run also sends requests of killed replicas to others, pauses the fleet and evicts requests. Afterwards
whole replicas run under schedules of faults (tests/fleet/schedules.py); a failure is reported with its seed
and its faults. Finally the Lua scripts and their model get random calls (tests/model/test_queue_machine.py),
twenty times as many as in `make test`.
"""

import argparse
import asyncio
import logging
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from redis.asyncio import Redis
from schedule_faults import FIRST_SEED
from schedules import report_of

from bench.fairness.scenarios import Job
from bench.rig.child import Child
from bench.rig.report import table
from bench.rig.server import server
from long.chaos_replica import POOL, change, configuration
from long.findings import Findings
from picker_fleet.state.connection import FailureDetector, PauseDetector
from picker_fleet.state.keys import Keys
from picker_fleet.state.store import Store
from picker_fleet.telemetry.metrics import Metrics
from picker_tools.audit.log import ENDS
from picker_tools.local_fleet.network import LOOPBACK
from picker_tools.local_fleet.processes import picker_command

_REPLICAS = 4
_AUDIT_S = 1800.0
_READY_S = 30.0
_ENDS_S = 60.0
_KILL_EVERY_S = (2.0, 5.0)
_CHANGE_EVERY_S = (0.2, 1.0)
_PAUSE_S = 0.3
_ADOPTED = 0.8  # share of a killed replica's requests that are sent again; the other clients have left
_CHUNK = 2000
_LOOK_S = 0.05
_CALL_S = 5.0
_SCHEDULES_A_PROCESS = 25  # limits the memory that schedules leak in a process
_RECORDS = f"epp:{{{POOL}}}:requests"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--schedules", type=int, default=500)
    parser.add_argument("--examples", type=int, default=2000, help="runs of the queue machine")


def run(options: argparse.Namespace, findings: Findings) -> None:
    if options.requests:
        _audit_requests(options, findings)
    if options.schedules:
        half = options.schedules // 2
        _run_schedules(range(FIRST_SEED - half, FIRST_SEED + half), findings)
    if options.examples:
        _run_queue_machine(options.examples, findings)


def _run_queue_machine(examples: int, findings: Findings) -> None:
    ran = subprocess.run(
        (sys.executable, "-m", "pytest", "-n0", "tests/model/test_queue_machine.py"),
        env={**os.environ, "PICKER_MODEL_EXAMPLES": str(examples)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    what = f"in {examples} runs of random calls the scripts agree with the model"
    findings.check(what, not ran.returncode, ran.stdout[-3000:])


def _run_schedules(seeds: range, findings: Findings) -> None:
    failed = []
    # Python 3.11's ProcessPoolExecutor may hang when a process reaches its maximum number of tasks.
    with multiprocessing.get_context("spawn").Pool(
        initializer=logging.disable,  # silences the replicas' log lines about injected faults
        maxtasksperchild=_SCHEDULES_A_PROCESS,
    ) as processes:
        for seed, found in zip(seeds, processes.imap(report_of, seeds), strict=True):
            if found:
                failed.append(seed)
                findings.add(f"Schedule {seed}:\n\n```\n{found}\n```")
                print(f"schedule {seed}: {found}", flush=True)
    what = f"{len(seeds)} schedules break no promise"
    findings.check(what, not failed, ", ".join(map(str, failed)))


def _audit_requests(options: argparse.Namespace, findings: Findings) -> None:
    with server() as redis:
        began = time.monotonic()
        actions = asyncio.run(_chaos(redis.port, options))
        lasted_s = time.monotonic() - began
        url = f"redis://{LOOPBACK}:{redis.port}/0"
        audit = subprocess.run(
            picker_command("audit", "--redis", url, "--pool", POOL),
            capture_output=True, text=True, check=False, timeout=_AUDIT_S,
        )  # fmt: skip
    findings.add(
        f"{_REPLICAS} replicas, {lasted_s:.0f} s, until no request was left: {actions.kills} replicas "
        f"killed and replaced, {actions.sent_again} of their requests sent to another, {actions.changes} "
        f"live changes, {actions.pauses} pauses, {actions.evictions} evictions by the operator."
    )
    events = [[event, str(times)] for event, times in actions.events.most_common()]
    findings.add(table(["event", "times"], events))
    findings.add(f"`picker audit`:\n\n```\n{audit.stdout.rstrip()}\n```")
    findings.check("the audit finds no broken promise", not audit.returncode, audit.stderr.strip()[-500:])


@dataclass(slots=True)
class Actions:
    """Numbers of actions on the fleet, and of entries in the decision log by event."""

    kills: int = 0
    sent_again: int = 0
    changes: int = 0
    pauses: int = 0
    evictions: int = 0
    events: Counter[str] = field(default_factory=Counter)


class ChaosRun:
    """One chaos run. After `run` returns, the decision log is complete."""

    def __init__(self, port: int, seed: int) -> None:
        self._url = f"redis://{LOOPBACK}:{port}/0"
        self._redis = Redis(host=LOOPBACK, port=port, decode_responses=True, socket_timeout=_CALL_S)
        self._dice = random.Random(seed)
        self._names = (f"replica-{number}" for number in range(1_000_000))
        self._children: list[Child] = []
        self._open: dict[str, str] = {}  # request → owner, for requests without an end in the log so far
        self._last = "-"
        self._ending = False
        self.actions = Actions()
        self._store = Store(
            self._url, pool=POOL, replica="operator", failure_detector=FailureDetector(_CALL_S, _CALL_S),
            pause_detector=PauseDetector(), connect_timeout_s=_CALL_S, metrics=Metrics(),
        )  # fmt: skip

    async def run(self, requests: int) -> None:
        """Run until `requests` requests have been admitted, then until no request is left."""
        try:
            for _ in range(_REPLICAS):
                self._children.append(await self._start_replica())
            async with asyncio.TaskGroup() as tasks:
                actions = [
                    tasks.create_task(action)
                    for action in (self._store.run(), self._kill(), self._change(), self._evict())
                ]
                while self._admitted() < requests:
                    await self._read()
                self._ending = True  # `_kill` ends after it has started the replacement of a killed replica
                for action in actions[2:]:
                    action.cancel()
                await asyncio.wait(actions[1:])
                await self._store.set_live_config({"paused": None}, {})
                await self._wait_for_rest()
                actions[0].cancel()
        finally:
            await asyncio.gather(*(child.kill() for child in self._children))
            await self._redis.aclose()

    async def _start_replica(self) -> Child:
        child = await Child.started(next(self._names), "long.chaos_replica")
        child.send(Job(child.name, configuration(self._url), (), (0.0, 0.0), child.name).written())
        await child.expect("ready", _READY_S)
        return child

    def _admitted(self) -> int:
        events = self.actions.events
        return events["queued"] + events["bypassed"]

    async def _read(self) -> None:
        answer = await self._redis.xrange(Keys.of(POOL).log, min=self._last, count=_CHUNK)
        if len(answer) < _CHUNK:
            await asyncio.sleep(_LOOK_S)
        for at, entry in answer:
            self._last = f"({at}"
            event, request = entry["event"], entry["request"]
            self.actions.events[event] += 1
            if event in ENDS:
                self._open.pop(request, None)
            elif request:
                self._open[request] = entry["owner"]

    async def _wait_for_rest(self) -> None:
        """Let clients finish, and leases expire. RuntimeError if requests are left after _ENDS_S."""
        for child in self._children:
            child.send("end")
        async with asyncio.TaskGroup() as tasks:
            for child in self._children:
                tasks.create_task(child.expect("done", _ENDS_S))
        try:
            async with asyncio.timeout(_ENDS_S):
                while self._open or await self._redis.hlen(_RECORDS):
                    await self._read()
        except TimeoutError:
            left = await self._redis.hkeys(_RECORDS)
            raise RuntimeError(
                f"requests are left: {len(self._open)} by the log, {list(self._open.items())[:5]};"
                f" {len(left)} by the records, {left[:5]}"
            ) from None
        await self._read()

    async def _kill(self) -> None:
        while True:
            await asyncio.sleep(self._dice.uniform(*_KILL_EVERY_S))
            if self._ending:
                return
            killed = self._children.pop(self._dice.randrange(len(self._children)))
            await killed.kill()
            self.actions.kills += 1
            for request in [request for request, owner in self._open.items() if owner == killed.name]:
                if self._dice.random() < _ADOPTED:
                    self._dice.choice(self._children).send(f"adopt {request}")
                    self.actions.sent_again += 1
            self._children.append(await self._start_replica())

    async def _change(self) -> None:
        while True:
            await asyncio.sleep(self._dice.uniform(*_CHANGE_EVERY_S))
            if self._dice.random() < 0.1:
                await self._store.set_live_config({"paused": 1}, {})
                await asyncio.sleep(_PAUSE_S)
                await self._store.set_live_config({"paused": None}, {})
                self.actions.pauses += 1
            else:
                await self._store.set_live_config(change(self._dice), {})
                self.actions.changes += 1

    async def _evict(self) -> None:
        while True:
            await asyncio.sleep(self._dice.uniform(0.1, 0.5))
            if self._open:
                request = self._dice.choice(list(self._open))
                self.actions.evictions += await self._store.evict(request) == "evicted"


async def _chaos(port: int, options: argparse.Namespace) -> Actions:
    run = ChaosRun(port, options.seed)
    await run.run(options.requests)
    return run.actions
