"""One run: honest clients while all is calm, beside every attack, what is left then, and calm again."""

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field

import httpx

from bench.hostile.honest import Seen, asking
from bench.hostile.stage import limit_mib, running
from bench.hostile.target import Target
from bench.rig.child import Child

_CALL_S = 10.0
_RESTS_S = 40.0  # longer than a lease and the wait for a client's body
_ATTACKERS = "bench.hostile.attackers"


@dataclass(slots=True)
class Report:
    """What a run showed. `left` is what the fleet still counts long after its last client."""

    calm: Seen = field(default_factory=Seen)
    hostile: Seen = field(default_factory=Seen)
    came: dict[str, Counter[str]] = field(default_factory=dict)
    peaks_mib: dict[str, float] = field(default_factory=dict)
    left: dict[str, float] = field(default_factory=dict)

    def faults(self) -> list[str]:
        """What must not be, but for times: failed requests, memory past its limit, counts that stay."""
        found = [f"calm: {failed}" for failed in self.calm.failed]
        found += [f"under attack: {failed}" for failed in self.hostile.failed]
        for name, peak in self.peaks_mib.items():
            limit = limit_mib(name)
            if not peak:
                found.append(f"{name} has ended")
            elif limit is not None and peak > limit:
                found.append(f"{name} took {peak:.0f} MiB; it may have {limit}")
        found += [f"{name} is {count:g} at rest" for name, count in self.left.items() if count]
        found += [f"nothing came of: {name}" for name, came in self.came.items() if not came]
        return found


async def run(*, replicas: int, simulators: int, per_s: float, calm_s: float, hostile_s: float) -> Report:
    """`per_s` honest requests a second: `hostile_s` seconds beside attackers, `calm_s` before and after."""
    report = Report()
    async with running(replicas, simulators) as stage:
        await _calm(stage.target, report, per_s, calm_s / 2)
        attackers = await Child.started("attackers", _ATTACKERS, json.dumps(stage.target))
        try:
            await attackers.hear("attacking", within_s=_RESTS_S)
            async with asking(stage.target.envoy, per_s, report.hostile):
                await asyncio.sleep(hostile_s)
        finally:
            said = await attackers.end()
        report.came = {name: Counter(came) for name, came in json.loads(said).items()}
        report.left = await _left(stage.target)
        await _calm(stage.target, report, per_s, calm_s / 2)
        report.peaks_mib = stage.peaks_mib()
    return report


async def _calm(target: Target, report: Report, per_s: float, lasts_s: float) -> None:
    if lasts_s:
        async with asking(target.envoy, per_s, report.calm):
            await asyncio.sleep(lasts_s)


async def _left(target: Target) -> dict[str, float]:
    """What the fleet counts once it is at rest, or after so long."""
    async with httpx.AsyncClient(trust_env=False, timeout=_CALL_S) as client:
        clock = asyncio.get_running_loop().time
        until_s = clock() + _RESTS_S
        while True:
            state = (await client.get(f"http://{target.admin[0]}/api/v1/state")).json()
            left = {name: float(state[name]) for name in ("stock", "queued", "leases")}
            if not any(left.values()) or clock() >= until_s:
                return left
            await asyncio.sleep(0.2)
