"""One load run: sends the load, injects the scenario's faults, and samples the fleet until it is at rest."""

import asyncio
import itertools
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from picker_fleet.domain.errors import StartupError
from picker_tools.load.fleet import OwnFleet, Target
from picker_tools.load.generator import Client, Load
from picker_tools.load.result import (
    EndpointSample,
    FaultsInjected,
    LogAudit,
    RunResult,
    Sample,
    read_log,
)
from picker_tools.load.scenarios import ANSWER_S, Fault, Plan, planned, source_request
from picker_tools.local_fleet.network import ADMIN_TOKEN, get, until

# The mean seconds between kills, and the least time as a part of the mean, so that the fleet can recover.
_KILL_EVERY_S, _LEAST_PART = 5.0, 0.5
# The start and length of an outage as parts of the run's duration; the second line has the times for a run
# that also kills a replica.
_OUTAGE_AT, _OUTAGE_FOR = 0.3, 1 / 3
_FIRST_KILL_AT, _LATER_OUTAGE_AT, _LATER_OUTAGE_FOR = 0.25, 0.5, 1 / 5


def kill_moments(duration_s: float, replicas: int, seed: int) -> list[tuple[float, int]]:
    """The time and replica number (from 0) of each kill: random, but the same for the same seed."""
    chance = Random(f"{seed}/kills")
    moments: list[tuple[float, int]] = []
    at_s = 0.0
    while True:
        at_s += _KILL_EVERY_S * (_LEAST_PART + chance.expovariate(1 / (1 - _LEAST_PART)))
        if at_s >= 0.9 * duration_s:
            return moments or [(0.3 * duration_s, chance.randrange(replicas))]
        moments.append((at_s, chance.randrange(replicas)))


INTERVAL_S = 0.25
_ON_ENDPOINT = re.compile(rb"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


class Sampler:
    """Samples the fleet every INTERVAL_S seconds: one of `admins` in turn, and all `endpoints` at once."""

    def __init__(self, admins: Sequence[str], endpoints: Sequence[str], now_s: Callable[[], float]) -> None:
        self._admins = itertools.cycle(admins)
        self._replicas = len(admins)
        self._endpoints = endpoints
        self._now_s = now_s
        self.samples: list[Sample] = []
        self.endpoint_samples: list[EndpointSample] = []

    async def run(self) -> None:
        """Take samples of the fleet until cancelled."""
        while True:
            next_s = self._now_s() + INTERVAL_S
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.take_sample())
                tasks.create_task(self._sample_endpoints())
            await asyncio.sleep(max(0.0, next_s - self._now_s()))

    async def take_sample(self) -> Sample | None:
        """Take a sample of the fleet; None if no replica answers."""
        for admin in itertools.islice(self._admins, self._replicas):
            reply = await get(f"{admin}/api/v1/state", os.environ.get(ADMIN_TOKEN, ""))
            sample = Sample.read(self._now_s(), reply.body) if reply and reply.status == 200 else None
            if sample is not None:
                self.samples.append(sample)
                return sample
        return None

    async def _sample_endpoints(self) -> None:
        if not self._endpoints:
            return
        replies = await asyncio.gather(*(get(f"http://{each}/metrics") for each in self._endpoints))
        pages = [reply.body for reply in replies if reply and reply.status == 200]
        requests = sum(int(float(count)) for page in pages for count in _ON_ENDPOINT.findall(page))
        self.endpoint_samples.append(EndpointSample(self._now_s(), requests, len(pages)))


_REST_S = 20.0  # wait so long for all counts to be 0: a lease's duration, with a margin for the sweep
_REST_LEFT_S = 5.0  # after Ctrl-C, wait only so many seconds for all counts to be 0
_MEASURE_S, _MOST_CLIENTS = 3.0, 64  # seconds and maximum clients for measuring a running fleet's capacity
_PROBE_S = 30.0
_LOG_S = 60.0
_SHOW_S = 0.2

# A callback that gets the load so far and the latest sample of the fleet.
Show = Callable[[Load, Sample | None], None]


class Session:
    """One run of a load. `fleet` is None if the run did not start the fleet. The session calls `show` a few
    times a second while the load runs, and `say` with a line for each injected fault.
    """

    def __init__(
        self, plan: Plan, target: Target, fleet: OwnFleet | None, show: Show, say: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._target = target
        self._fleet = fleet
        self._show = show
        self._say = say
        self._load: Load | None = None

    def stop(self) -> bool:
        """End the load now. Returns False if the load has not begun."""
        if self._load is None:
            return False
        self._load.stop()
        return True

    async def run(self) -> RunResult:
        """Send the load, then wait for the last answer and until all counts are 0. Returns the record.

        Raises:
            StartupError: the fleet's answers do not suffice to plan the load.
        """
        plan, fault = self._plan, self._plan.scenario.fault
        capacity_per_s = await self._capacity_per_s()
        load_average = os.getloadavg()[0]
        faults_injected = FaultsInjected()
        with Client(self._target.url, exact=self._target.own) as client:
            load = self._load = Load(client)
            endpoints = self._target.endpoints if fault.stops_redis else ()
            sampler = Sampler(self._target.admins, endpoints, lambda: load.now_s)
            wall_s = time.time()
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(sampler.run()),
                    tasks.create_task(self._show_on(load, sampler)),
                ]
                injecting = tasks.create_task(self._inject_faults(faults_injected, load))
                await load.send_open(planned(plan, capacity_per_s, self._target.model))
                if await load.stopped_within(plan.duration_s - load.now_s):
                    injecting.cancel()
                await asyncio.wait([injecting])
                rest_within_s = _REST_LEFT_S if load.is_stopped else _REST_S
                rest = await self._rest(sampler, load, rest_within_s)
                for task in background:
                    task.cancel()
            answers = (
                replace(each, due_s=each.due_s - load.began_s, sent_s=each.sent_s - load.began_s)
                for each in load.history
            )
            return RunResult(
                plan=plan,
                target=self._target,
                capacity_per_s=capacity_per_s,
                wall_s=wall_s,
                sent=load.sent,
                answers=tuple(sorted(answers, key=lambda answer: answer.sent_s)),
                surplus_answers=client.surplus_answers,
                samples=tuple(sampler.samples),
                endpoint_samples=tuple(sampler.endpoint_samples),
                rest=rest,
                rest_within_s=rest_within_s,
                faults_injected=faults_injected,
                log_audits=(*faults_injected.log_audits, *await self._log()),
                interrupted=load.is_stopped,
                load_average=load_average,
            )

    async def _capacity_per_s(self) -> float:
        """The fleet's capacity in requests a second: known if this run started the fleet, else measured."""
        plan = self._plan
        if plan.rate_per_s is not None:
            return plan.rate_per_s / sum(source.load for source in plan.scenario.sources)
        if self._fleet is not None:
            per = self._fleet.settings.request_queue_controller.lower_per_backend
            return math.ceil(per * len(self._target.endpoints)) / ANSWER_S
        state = await Sampler(self._target.admins, (), lambda: 0.0).take_sample()
        if state is None or state.lower <= 0:
            raise StartupError(
                "the fleet's capacity is unknown without its admin API: "
                "give --admin URL, --state-file FILE or --rate N"
            )
        # The endpoints may run fewer requests at once than the limits that the fleet has found so far.
        return await self._answers_per_s(min(math.ceil(state.lower), _MOST_CLIENTS))

    async def _answers_per_s(self, clients: int) -> float:
        """Measure how many answers a second `clients` clients get, each with one request at a time."""
        source, sent, began_s = self._plan.scenario.sources[0], 0, time.monotonic()

        async def ask(client: Client) -> None:
            nonlocal sent
            while sent < clients or time.monotonic() < began_s + _MEASURE_S:
                sent += 1
                request = source_request(source, self._target.model, -sent, self._plan.seed)
                answer = await client.send(request, within_s=_PROBE_S)
                if not answer.served:
                    raise StartupError(f"a probe request of {source.name}: {answer.outcome} {answer.text}")

        with Client(self._target.url, exact=False) as client:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(clients):
                    tasks.create_task(ask(client))
        return sent / (time.monotonic() - began_s)

    async def _inject_faults(self, faults_injected: FaultsInjected, load: Load) -> None:
        """Inject the scenario's fault while the load runs, and record it in `faults_injected`."""
        if self._fleet is None:
            return
        plan, replicas = self._plan, len(self._target.admins)
        duration_s, fault = plan.duration_s, plan.scenario.fault
        outage_at, outage_for = _OUTAGE_AT, _OUTAGE_FOR
        kills: Sequence[tuple[float, int]] = ()
        if fault is Fault.KILL_REPLICAS:
            kills = kill_moments(duration_s, replicas, plan.seed)
        elif fault is Fault.KILL_AND_STOP:
            kills = [(_FIRST_KILL_AT * duration_s, plan.seed % replicas)]
            outage_at, outage_for = _LATER_OUTAGE_AT, _LATER_OUTAGE_FOR
        for at_s, number in kills:
            await asyncio.sleep(at_s - load.now_s)
            name = self._fleet.kill_replica(number)
            if name is not None:
                faults_injected.kills.append((load.now_s, name))
                self._say(f"{load.now_s:5.1f} s  kill -9 of {name}")
        if fault.stops_redis:
            await asyncio.sleep(outage_at * duration_s - load.now_s)
            await self._stop_redis(faults_injected, load, outage_for * duration_s)

    async def _stop_redis(self, faults_injected: FaultsInjected, load: Load, lasts_s: float) -> None:
        assert self._fleet is not None
        faults_injected.log_audits.append(await asyncio.to_thread(read_log, self._target.redis))
        began_s = load.now_s
        await self._fleet.stop_redis()
        faults_injected.outages.append((began_s, None))
        self._say(f"{load.now_s:5.1f} s  kill -9 of Redis: each replica admits alone, within its share")
        try:
            await asyncio.sleep(began_s + lasts_s - load.now_s)
        finally:
            await self._fleet.start_redis()
        faults_injected.outages[-1] = (began_s, load.now_s)
        self._say(f"{load.now_s:5.1f} s  Redis is back, empty: replicas restore their requests")

    async def _show_on(self, load: Load, sampler: Sampler) -> None:
        while True:
            self._show(load, sampler.samples[-1] if sampler.samples else None)
            await asyncio.sleep(_SHOW_S)

    async def _rest(self, sampler: Sampler, load: Load, within_s: float) -> Sample | None:
        since_s = load.now_s

        async def at_rest() -> Sample | None:
            if not sampler.samples or sampler.samples[-1].at_s <= since_s:
                return None
            last = sampler.samples[-1]
            return last if last.at_rest and not last.degraded else None

        return await until(at_rest, within_s=within_s) if self._target.admins else None

    async def _log(self) -> tuple[LogAudit, ...]:
        if self._fleet is None:
            return ()
        try:
            async with asyncio.timeout(_LOG_S):
                return (await asyncio.to_thread(read_log, self._target.redis),)
        except TimeoutError:
            return (LogAudit(None, why=f"the decision log could not be read within {_LOG_S:g} s"),)
