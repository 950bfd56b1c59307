"""One run: the load against a target, what is seen of it meanwhile, and what is there at the end."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from picker_fleet.errors import StartupError
from picker_tools.load import payload
from picker_tools.load.arrivals import arrivals
from picker_tools.load.client import Client
from picker_tools.load.drive import Counts, Drive
from picker_tools.load.evidence import Evidence, Parameters
from picker_tools.load.faults import inflict
from picker_tools.load.harm import Harm
from picker_tools.load.ledger import Ledger, read
from picker_tools.load.own_fleet import OwnFleet
from picker_tools.load.pace import Pace, fixed, pace
from picker_tools.load.sample import Sample, Sampler
from picker_tools.load.scenario import Fault, Scenario
from picker_tools.load.target import Target

_REST_S = 20.0  # a lease, and some for the sweep
_REST_LEFT_S = 5.0  # after Ctrl-C
_LOOK_S = 0.05
_PROBES = 3  # requests of each source, one at a time, to learn how long an answer takes
_PROBE_S = 30.0
_LOG_S = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for. `rate_per_s` None: by what the fleet can serve. `most` requests at most."""

    scenario: Scenario
    duration_s: float
    seed: int
    most: int
    rate_per_s: float | None = None
    slo_ttft_p95_s: float | None = None
    slo_latency_p95_s: float | None = None


Show = Callable[
    [float, Counts, Sample | None], None
]  # seconds since the load began, counts, the latest state


class Session:
    """`fleet` is None for one that was found. `show` is called a few times a second while the load runs."""

    def __init__(self, plan: Plan, target: Target, fleet: OwnFleet | None, show: Show) -> None:
        self._plan = plan
        self._target = target
        self._fleet = fleet
        self._show = show
        self._drive: Drive | None = None

    def stop(self) -> bool:
        """End the load now; False if it has not begun."""
        if self._drive is None:
            return False
        self._drive.stop()
        return True

    async def run(self) -> Evidence:
        """Send the load, wait for the last answer and for rest; what was seen.

        Raises:
            StartupError: the fleet does not answer as it must for the load to be planned.
        """
        plan, scenario = self._plan, self._plan.scenario
        found_pace = await self._pace()
        coming = arrivals(
            scenario.sources,
            found_pace.rates_per_s,
            duration_s=plan.duration_s,
            most=plan.most,
            seed=plan.seed,
        )
        load_average = os.getloadavg()[0]
        harm = Harm()
        with Client(self._target.url) as client:
            drive = self._drive = Drive(
                client,
                scenario.sources,
                model=self._target.model,
                seed=plan.seed,
                duration_s=plan.duration_s,
                most=plan.most,
            )
            endpoints = self._target.endpoints if scenario.fault is Fault.STOP_REDIS else ()
            sampler = Sampler(self._target.admins, endpoints, lambda: drive.now_s)
            wall_s = time.time()
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(sampler.run()), tasks.create_task(self._show_on(drive, sampler))]
                harming = tasks.create_task(self._harm(harm, drive))
                await drive.run(coming)
                if drive.is_stopped:
                    harming.cancel()
                await asyncio.wait([harming])
                rest_within_s = _REST_LEFT_S if drive.is_stopped else _REST_S
                rest = await self._rest(sampler, drive, rest_within_s)
                for task in beside:
                    task.cancel()
            ledgers = (*harm.ledgers, *await self._log())
            return Evidence(
                scenario=scenario,
                parameters=self._parameters(found_pace),
                wall_s=wall_s,
                sent=drive.counts.sent,
                answers=tuple(sorted(drive.counts.answers, key=lambda answer: answer.sent_s)),
                surplus_answers=client.surplus_answers,
                samples=tuple(sampler.samples),
                on_endpoints=tuple(sampler.on_endpoints),
                rest=rest,
                rest_within_s=rest_within_s,
                harm=harm,
                ledgers=ledgers,
                interrupted=drive.is_stopped,
                load_average=load_average,
            )

    async def _pace(self) -> Pace:
        plan = self._plan
        if self._fleet is not None:
            speed = plan.scenario.speed
            answers_s = [speed.answer_s(source.answer_tokens) for source in plan.scenario.sources]
            per = self._fleet.settings.request_queue_controller.lower_per_backend
            lower = per * len(self._target.endpoints)
        else:
            answers_s = await self._probe()
            state = await self._state()
            lower = state.lower if state is not None else 0.0
        if plan.rate_per_s is not None:
            return fixed(plan.scenario, plan.rate_per_s, answers_s)
        if lower <= 0:
            raise StartupError(
                "what the fleet can serve is not known without its admin API: "
                "give --admin URL, --state-file FILE or --rate N"
            )
        return pace(plan.scenario, lower, answers_s)

    async def _probe(self) -> list[float]:
        """How long an answer takes each source while nothing else is asked, as measured."""
        found: list[float] = []
        with Client(self._target.url) as client:
            for source in self._plan.scenario.sources:
                times: list[float] = []
                for number in range(_PROBES):
                    ask = payload.ask(source, self._target.model, -1 - number, self._plan.seed)
                    exchange = await client.send(ask, within_s=_PROBE_S)
                    if exchange.status != 200 or exchange.fault:
                        said = (
                            exchange.fault
                            or f"{exchange.status} {exchange.tail[:200].decode(errors='replace')}"
                        )
                        raise StartupError(f"a first request of {source.name} got {said}")
                    times.append(exchange.last_at - exchange.sent_at)
                found.append(median(times))
        return found

    async def _state(self) -> Sample | None:
        sampler = Sampler(self._target.admins, (), lambda: 0.0)
        try:
            return await sampler.look()
        finally:
            sampler.close()

    async def _harm(self, harm: Harm, drive: Drive) -> None:
        if self._fleet is not None:
            await inflict(
                self._plan.scenario.fault,
                self._fleet,
                self._target,
                harm,
                duration_s=self._plan.duration_s,
                seed=self._plan.seed,
                now_s=lambda: drive.now_s,
            )

    async def _show_on(self, drive: Drive, sampler: Sampler) -> None:
        while True:
            self._show(drive.now_s, drive.counts, sampler.samples[-1] if sampler.samples else None)
            await asyncio.sleep(0.2)

    async def _rest(self, sampler: Sampler, drive: Drive, within_s: float) -> Sample | None:
        since_s = drive.now_s
        if not self._target.admins:
            return None
        try:
            async with asyncio.timeout(within_s):
                while True:
                    last = sampler.samples[-1] if sampler.samples else None
                    if last is not None and last.at_s > since_s and last.at_rest and not last.degraded:
                        return last
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            return None

    async def _log(self) -> tuple[Ledger, ...]:
        if self._fleet is None:
            return ()
        try:
            async with asyncio.timeout(_LOG_S):
                return (await asyncio.to_thread(read, self._target.redis),)
        except TimeoutError:
            return (Ledger(None, why=f"the decision log could not be read within {_LOG_S:g} s"),)

    def _parameters(self, found: Pace) -> Parameters:
        plan = self._plan
        return Parameters(
            seed=plan.seed,
            duration_s=plan.duration_s,
            capacity_per_s=found.capacity_per_s,
            rates_per_s=found.rates_per_s,
            own=self._target.own,
            mode=self._target.mode,
            replicas=len(self._target.admins) if self._target.own else 0,
            endpoints=len(self._target.endpoints),
            slo_ttft_p95_s=plan.slo_ttft_p95_s,
            slo_latency_p95_s=plan.slo_latency_p95_s,
        )
