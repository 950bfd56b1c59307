"""A fleet of the load's own: a local one, and the Valkey beside it, which can be taken away."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picker_fleet import config
from picker_tools.load.scenario import Scenario
from picker_tools.load.target import Target
from picker_tools.local_fleet.local_fleet import LocalFleet, UpOptions
from picker_tools.local_fleet.parts import Mode, SimOptions, Valkey
from picker_tools.local_fleet.processes import Report, Supervisor

_LOG_ENTRIES = 1_000_000  # more than a run can write, so that nothing is trimmed before it is audited
_VALKEY_ATTEMPTS = 3
_VALKEY_GRACE_S = 4.0


@dataclass(frozen=True, slots=True)
class Size:
    """What the fleet is made of."""

    replicas: int
    endpoints: int
    mode: Mode
    seed: int


class Lines(Report):
    """What the parts of the fleet have to say, handed to `say` line by line."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._tell = say

    def ready(self, name: str, where: str) -> None:
        self._tell(f"ready {name:<12} {where}")

    def trouble(self, name: str, what: str) -> None:
        self._tell(f"DOWN  {name:<12} {what}")

    def text(self, text: str) -> None:
        self._tell(text)


class OwnFleet:
    """To be started and stopped once. Files and logs of its parts are in `folder`."""

    def __init__(self, scenario: Scenario, size: Size, folder: Path, say: Callable[[str], None]) -> None:
        self._scenario = scenario
        self._size = size
        self._folder = folder
        self._report = Lines(say)
        self._state_file = folder / "state.json"
        # The Valkey is not the fleet's own child: that one would be started again at once when it is stopped.
        self._valkey = Valkey(folder)
        self._valkeys = Supervisor(folder, self._report)
        self._fleet: LocalFleet | None = None

    @property
    def settings(self) -> config.Settings:
        """What its replicas run with, but for addresses."""
        tree: dict[str, Any] = {
            "decision_log": {"enabled": True, "max_entries": _LOG_ENTRIES},
            "extproc": {"drain_grace": "100ms"},  # nothing is sent any more when it ends
            **self._scenario.config,
        }
        return config.parse(tree)

    async def start(self) -> Target:
        """Bring everything up.

        Raises:
            StartupError: a part did not become ready.
        """
        await self._valkeys.bring_up([self._valkey], attempts=_VALKEY_ATTEMPTS)
        speed = self._scenario.speed
        options = UpOptions(
            replicas=self._size.replicas,
            endpoints=self._size.endpoints,
            mode=self._size.mode,
            redis=self._valkey.url,
            port=0,
            admin_port=0,
            config=None,
            state_file=self._state_file,
            restart=True,
            debug_headers=False,
            sim=SimOptions(ttft_ms=speed.ttft_ms, itl_ms=speed.itl_ms, seed=self._size.seed),
        )
        self._fleet = LocalFleet(options, self.settings, self._folder, self._report)
        await self._fleet.start()
        state = self._state()
        return Target(
            url=self._fleet.envoy_url,
            model=await self._fleet.model(),
            admins=tuple(replica["admin"] for replica in state["replicas"]),
            endpoints=tuple(endpoint["address"] for endpoint in state["endpoints"]),
            redis=self._valkey.url,
            mode=self._size.mode,
            own=True,
        )

    async def watch(self) -> None:
        """Start again what dies, until cancelled."""
        assert self._fleet is not None
        await self._fleet.watch()

    async def stop(self) -> None:
        """Returns with every child gone."""
        if self._fleet is not None:
            await self._fleet.stop()
        await self._valkeys.stop([self._valkey], _VALKEY_GRACE_S)

    def kill(self) -> None:
        """End all children now; `stop` returns soon after."""
        if self._fleet is not None:
            self._fleet.kill()
        self._valkeys.kill()

    def kill_replica(self, number: int) -> str | None:
        """SIGKILL to replica `number` (from 0); its name, or None if it is not running just now."""
        pid = int(self._state()["replicas"][number]["pid"])
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return None
        return f"replica-{number + 1}"

    async def stop_redis(self) -> None:
        """End the Valkey at once: what it held is gone."""
        await self._valkeys.stop([self._valkey], 0.0)

    async def start_redis(self) -> None:
        """Start it again, empty, at the same address. Raises StartupError as `start` does."""
        await self._valkeys.bring_up([self._valkey], attempts=_VALKEY_ATTEMPTS)

    def _state(self) -> Any:
        return json.loads(self._state_file.read_text(encoding="utf-8"))


async def stopped(fleet: OwnFleet) -> None:
    """Stop `fleet`, also when whoever waits is cancelled meanwhile: then at once."""
    ending = asyncio.ensure_future(fleet.stop())
    try:
        await asyncio.shield(ending)
    except asyncio.CancelledError:
        fleet.kill()
        await ending
        raise
