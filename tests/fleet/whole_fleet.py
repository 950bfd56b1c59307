"""Runs `picker up` for tests, and reads its state.

At its end its decision log must keep every promise, its exit status must be 0, and no process may be left.
"""

import asyncio
import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import audited_log
import httpx
import psutil
import pytest
import redis.asyncio
import yaml
from crowd import Crowd, http_client
from forked_up import ForkedUp

from picker_fleet.state import primary
from picker_fleet.state.keys import Keys

READY_S = 90.0
STOP_S = 30.0
_POLL_S, _LONGEST_POLL_S = 0.01, 0.1
_ADMIN_PATIENCE_S = 30.0
_COUNTED_AFTER_S = 6.0


class Fleet:
    """A running `picker up`. Ports, pids and addresses are read from its state file each time.

    Its decision log is on unless `config` turns it off, and is audited when the fleet ends: a broken promise
    fails the test. `unaudited` says why that is impossible (Redis ends sooner, the state is damaged on
    purpose). `spawned` fleets start a new interpreter, as a user does; so do those with an `environment`,
    which an interpreter may read when it starts. All others are forked from a process that has imported
    everything (forked_up.py), which is faster.
    """

    def __init__(
        self,
        folder: Path,
        options: tuple[str, ...],
        config: dict[str, Any] | None,
        environment: Mapping[str, str] | None = None,
        unaudited: str = "",
        spawned: bool = False,
    ) -> None:
        self.state_file = folder / "state.json"
        arguments = ["--port", "0", "--state-file", str(self.state_file), *options]
        if config is not None:
            file = folder / "config.yaml"
            file.write_text(yaml.safe_dump(config))
            arguments += ["--config", str(file)]
        # No request is sent when a fleet ends, so its replicas need not announce the end for long.
        given = config or {}
        grace = {} if "drain_grace" in given.get("extproc", {}) else {"PICKER_EXTPROC__DRAIN_GRACE": "100ms"}
        log = audited_log.environment(given)
        self._pools = tuple(given.get("pools", ("default",)))
        is_logged = given.get("decision_log", {}).get("enabled", True)
        self._audit_due = is_logged and not unaudited
        self._name = f"`picker up {' '.join(options)}`"
        self._killed = False
        self._lines: list[str] = []
        self._line_read = threading.Condition()
        inherited = {**os.environ, **grace, **log, "TMPDIR": str(folder), **(environment or {})}
        self.process = (_spawned if spawned or environment else ForkedUp)(arguments, inherited)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def state(self) -> dict[str, Any]:
        """The state file as it is now."""
        state: dict[str, Any] = json.loads(self.state_file.read_text())
        return state

    @property
    def url(self) -> str:
        """Where clients send requests: Envoy."""
        return str(self.state["envoy"])

    @property
    def output(self) -> str:
        with self._line_read:
            return "\n".join(self._lines)

    def wait_line(self, part: str, within_s: float = READY_S) -> str:
        """The first line of its output that contains `part`; waits for it."""

        def found() -> str | None:
            return next((line for line in self._lines if part in line), None)

        with self._line_read:
            self._line_read.wait_for(lambda: found() is not None or not self._reader.is_alive(), within_s)
            line = found()
        assert line is not None, f"no line with {part!r} came:\n{self.output}"
        return line

    def client(self, **options: Any) -> httpx.AsyncClient:
        """HTTP through Envoy; to be closed by its user (`async with`)."""
        return httpx.AsyncClient(base_url=self.url, transport=Crowd(), **{"timeout": 90.0, **options})

    def redis(self) -> redis.asyncio.Redis:
        """A client of the fleet's Redis; to be closed by its user (`async with`)."""
        return primary.client(self.state["redis"], Keys.of("default").pool, decode_responses=True)

    def admin_url(self, replica: int = 0) -> str:
        return str(self.state["replicas"][replica]["admin"])

    async def admin(self, path: str, replica: int = 0, *, method: str = "GET", **how: Any) -> httpx.Response:
        """Answer of one replica's admin API to a read, or to a change that may be made twice.

        A replica gives Redis 2 s and then answers `state_unavailable`, also when the machine paused. So the
        call is repeated for up to 30 s while it is answered so.
        """
        async with http_client(timeout=10.0) as client:
            return await self.eventually(  # type: ignore[no-any-return]
                lambda: client.request(method, f"{self.admin_url(replica)}{path}", **how),
                lambda answer: not says_unavailable(answer),
                within_s=_ADMIN_PATIENCE_S,
                what="an answer of Redis",
            )

    async def get(self, path: str, replica: int = 0, *, pool: str = "") -> Any:
        """What one replica answers to a read of /api/v1/`path`, which must succeed; of the default pool if no
        other is named."""
        return _of_success(await self.admin(_api(pool, path), replica))

    async def post(self, path: str, replica: int = 0, *, pool: str = "") -> Any:
        """The answer to a change through one replica, which must accept it."""
        return _of_success(await self.admin(_api(pool, path), replica, method="POST"))

    async def patch(self, changes: dict[str, Any], replica: int = 0, *, pool: str = "") -> Any:
        """The configuration after a live change through one replica, which must accept it."""
        return _of_success(await self.admin(_api(pool, "config"), replica, method="PATCH", json=changes))

    async def endpoint_status(self, address: str, replica: int = 0) -> str:
        """What one replica says of an endpoint, such as `ready`."""
        listed = await self.get("endpoints", replica)
        return str(next(each["status"] for each in listed if each["address"] == address))

    async def envoy_admin(self, path: str) -> httpx.Response:
        """Answer of Envoy's admin interface."""
        async with http_client(timeout=10.0) as client:
            return await client.get(f"{self.state['envoy_admin']}{path}")

    async def eventually(
        self,
        look: Callable[[], Any],
        holds: Callable[[Any], object] = bool,
        *,
        within_s: float = 15.0,
        what: str = "it",
    ) -> Any:
        """The first result of `look` that `holds`. It may be asynchronous, and is called until then, less and
        less often: a look costs CPU that the fleet could use."""
        last: Any = None
        pause_s = _POLL_S
        try:
            async with asyncio.timeout(within_s):
                while True:
                    last = look()
                    if inspect.isawaitable(last):
                        last = await last
                    if holds(last):
                        return last
                    await asyncio.sleep(pause_s)
                    pause_s = min(1.5 * pause_s, _LONGEST_POLL_S)
        except TimeoutError:
            pytest.fail(f"{what} did not come within {within_s:g} s; last seen: {last!r}\n{self.output}")

    async def until(
        self, path: str, holds: Callable[[Any], object], *, replica: int = 0, pool: str = "", **more: Any
    ) -> Any:
        """The first answer of one replica to a read of /api/v1/`path` that `holds`."""
        return await self.eventually(lambda: self.get(path, replica, pool=pool), holds, **more)

    async def until_state(
        self, *, within_s: float = 15.0, replica: int = 0, pool: str = "", **wanted: Any
    ) -> None:
        """Wait until /api/v1/state has these values, such as `queued=5`."""

        def has_them(state: dict[str, Any]) -> bool:
            return all(state.get(name) == value for name, value in wanted.items())

        what = f"{pool} {wanted}"
        await self.until("state", has_them, replica=replica, pool=pool, within_s=within_s, what=what)

    async def until_counted(self) -> None:
        """Wait until each replica has a part of the bound when it loses Redis; a young one has none."""

        def are_counted(found: dict[str, Any]) -> bool:
            old = [each for each in found["replicas"] if each["started_s_ago"] > _COUNTED_AFTER_S]
            return len(old) == len(found["replicas"]) == len(self.state["replicas"])

        await self.until("replicas", are_counted, within_s=60, what="replicas that count")

    def replica(self, index: int) -> psutil.Process:
        return psutil.Process(int(self.state["replicas"][index]["pid"]))

    def endpoint(self, index: int) -> psutil.Process:
        """The process of a simulator."""
        return psutil.Process(int(self.state["endpoints"][index]["pid"]))

    def child(self, name: str) -> psutil.Process:
        """The process that executes a program called so: `envoy`, `valkey-server`."""
        (found,) = (child for child in self.children() if child.name() == name)
        return found

    def children(self) -> list[psutil.Process]:
        """Every running process that it has started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def audit(self) -> None:
        """Replay its decision log, which must be complete and keep every promise."""
        for pool in self._pools:
            audited_log.assert_no_violation(self.state["redis"], self._name, pool)

    def stop(self) -> None:
        """End it as Ctrl-C does: its log passes the audit, it exits with 0, and no child is left."""
        if self._killed:
            return
        children = self.children() if self.process.poll() is None else []
        try:
            self._audit_once()
        finally:
            try:
                self.process.send_signal(signal.SIGINT)
                code = self.process.wait(STOP_S)
            finally:
                self.discard()
        _, alive = psutil.wait_procs(children, timeout=0)
        assert code == 0, self.output
        assert not alive, f"left behind: {[child.cmdline() for child in alive]}"

    def _audit_once(self) -> None:
        due, self._audit_due = self._audit_due, False
        if due:
            self.audit()

    def kill(self) -> None:
        """Audit its log, then SIGKILL to `picker up` itself; `stop` has nothing left to check."""
        self._killed = True
        try:
            self._audit_once()
        finally:
            self.discard()

    def discard(self) -> None:
        """End the process whatever its state."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(STOP_S)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._line_read:
                self._lines.append(line.rstrip("\n"))
                self._line_read.notify_all()
        with self._line_read:
            self._line_read.notify_all()


def _spawned(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "picker_fleet.cli", "up", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


@contextlib.contextmanager
def suspended(process: psutil.Process) -> Iterator[None]:
    """`process` is stopped within the block."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def exact_bounds(per_backend: float) -> dict[str, float]:
    """Settings of the queue controller for one bound without hysteresis."""
    return {f"{bound}_per_backend": per_backend for bound in ("lower_bound", "watermark", "upper_bound")}


def _api(pool: str, path: str) -> str:
    return f"/pools/{pool}/api/v1/{path}" if pool else f"/api/v1/{path}"


def _of_success(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def says_unavailable(answer: Any) -> bool:
    """Whether an answer of the admin API says that Redis did not answer in time."""
    return answer.status_code == 503 and answer.json().get("code") == "state_unavailable"


def started(folder: Path, options: tuple[str, ...], config: dict[str, Any] | None, **more: Any) -> Fleet:
    """A fleet that is ready; `more` are Fleet's other arguments."""
    fleet = Fleet(folder, options, config, **more)
    try:
        fleet.wait_line("dashboard:")
    except BaseException:
        fleet.discard()
        raise
    return fleet


@contextlib.asynccontextmanager
async def running(folder: Path, *options: str, config: dict[str, Any], **more: Any) -> AsyncIterator[Fleet]:
    """A fleet that is ready, and is stopped and checked at the end, without blocking the event loop."""
    here = await asyncio.to_thread(lambda: started(folder, options, config, **more))
    try:
        yield here
    finally:
        await asyncio.to_thread(here.stop)


@contextlib.contextmanager
def fleets(folders: pytest.TempPathFactory, *always: str) -> Iterator[Callable[..., Fleet]]:
    """What starts fleets that end with the block, with the options `always` and those that it is given."""
    running: list[Fleet] = []

    def start(*options: str, config: dict[str, Any] | None = None, **more: Any) -> Fleet:
        running.append(started(folders.mktemp("fleet"), (*always, *options), config, **more))
        return running[-1]

    yield start
    stop_all(running)


def stop_all(fleets: list[Fleet]) -> None:
    faults = []
    for fleet in fleets:
        try:
            fleet.stop()
        except Exception as fault:
            faults.append(fault)
    if faults:
        raise ExceptionGroup("fleets that did not end well", faults)
