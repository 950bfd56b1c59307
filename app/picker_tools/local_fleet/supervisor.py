"""Starts parts, watches them, starts again what died, and stops them in order."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

from picker_fleet.errors import StartupError
from picker_tools.local_fleet.child import Child
from picker_tools.local_fleet.part import Part
from picker_tools.local_fleet.report import Report
from picker_tools.local_fleet.together import together

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 8.0
_SETTLED_S = 30.0  # having lived so long, its next end is no longer the same trouble


class Supervisor:
    """The fleet's children by their part's name. One event loop."""

    def __init__(self, logs: Path, report: Report) -> None:
        self._logs = logs
        self._report = report
        self._running: dict[str, tuple[Part, Child]] = {}

    def pid(self, part: Part) -> int:
        """Process id of the started `part`, also of one that has ended."""
        return self._running[part.name][1].pid

    async def bring_up(self, parts: Iterable[Part], *, attempts: int = 1) -> None:
        """Start `parts` side by side and wait until each is ready; one line each.

        Raises:
            StartupError: of the first that failed; `attempts` is how often each is tried.
        """
        await together(*(self._bring_up(part, attempts) for part in parts))

    def check(self) -> None:
        """Raise StartupError if a part has ended: for the time before `watch` looks after them."""
        for _, child in self._running.values():
            child.check()

    async def watch(self, *, restart: bool, changed: Callable[[], None]) -> None:
        """Report each part that ends; with `restart`, start it again. Runs until it is cancelled.

        `changed` is called whenever a part's process has been replaced.
        """
        await together(*(self._keep(part, restart, changed) for part, _ in self._running.values()))

    async def stop(self, parts: Iterable[Part], grace_s: float) -> None:
        """TERM to those of `parts` that were started; KILL to what lives after `grace_s`."""
        children = [self._running[part.name][1] for part in parts if part.name in self._running]
        await together(*(child.stop(grace_s) for child in children))

    def kill(self) -> None:
        """KILL to all; what waits for their end goes on."""
        for _, child in self._running.values():
            child.kill()

    async def _bring_up(self, part: Part, attempts: int) -> None:
        for attempt in range(1, attempts + 1):
            try:
                where = await self._start(part)
            except StartupError:
                if attempt == attempts:
                    raise
            else:
                self._report.ready(part.name, where)
                return

    async def _start(self, part: Part) -> str:
        child = await Child.start(part.name, part.command(), self._logs / f"{part.name}.log")
        self._running[part.name] = (part, child)
        try:
            return await part.ready(child)
        except StartupError:
            await child.stop(0)
            raise

    async def _keep(self, part: Part, restart: bool, changed: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        pause_s = _FIRST_PAUSE_S
        while True:
            child = self._running[part.name][1]
            since = loop.time()
            how = await child.ended()
            if not restart:
                self._report.trouble(part.name, f"{how} and is not started again")
                return
            if loop.time() - since > _SETTLED_S:
                pause_s = _FIRST_PAUSE_S
            self._report.trouble(part.name, f"{how}; starting it again in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            try:
                where = await self._start(part)
            except StartupError as fault:
                self._report.trouble(part.name, str(fault).splitlines()[0])
                continue
            changed()
            self._report.ready(part.name, where)
