"""Runs `picker up` for tests, and reads its state.

When a fleet ends, its decision log must show no violation, its exit status be 0, and no process remain.
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
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pytest
import redis.asyncio
import yaml
from crowd import Crowd, http_client
from forked_up import ForkedUp

from picker_fleet.state import primary
from picker_fleet.state.keys import Keys
from picker_tools.audit.auditor import audited

READY_S = 90.0
STOP_S = 30.0
_POLL_S, _LONGEST_POLL_S = 0.01, 0.1
_ADMIN_PATIENCE_S = 30.0
_COUNTED_AFTER_S = 3.0  # equals `newcomer_s` in admission/failover.py
_WHOLE_LOG = {
    "PICKER_DECISION_LOG__ENABLED": "true",
    "PICKER_DECISION_LOG__MAX_ENTRIES": "3000000",  # more entries than any test writes: none is trimmed
}


class Fleet:
    """A running `picker up`. Every access reads ports, process ids and addresses from the fleet's state file.

    The decision log is enabled unless `config` disables it, and is audited when the fleet ends: a violation
    fails the test. The text `unaudited` says why an audit is impossible (Redis ends sooner, the state is
    damaged on purpose). With `spawned` a fleet starts a new interpreter, as for a user. All other fleets are
    forked from a process that has imported everything (forked_up.py), which is faster.
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
        # No client sends requests when a fleet ends, so its replicas need no long drain grace.
        given = config or {}
        grace = {} if "drain_grace" in given.get("extproc", {}) else {"PICKER_EXTPROC__DRAIN_GRACE": "100ms"}
        log = {} if "decision_log" in given else _WHOLE_LOG
        self._pools = tuple(given.get("pools", ("default",)))
        is_logged = given.get("decision_log", {}).get("enabled", True)
        self._audit_due = is_logged and not unaudited
        self._name = f"`picker up {' '.join(options)}`"
        self._killed = False
        self._lines: list[str] = []
        self._line_read = threading.Condition()
        inherited = {**os.environ, **grace, **log, "TMPDIR": str(folder), **(environment or {})}
        self.process = (_spawned if spawned else ForkedUp)(arguments, inherited)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def state(self) -> dict[str, Any]:
        """The current content of the state file."""
        state: dict[str, Any] = json.loads(self.state_file.read_text())
        return state

    @property
    def url(self) -> str:
        """Envoy's URL, to which clients send requests."""
        return str(self.state["envoy"])

    @property
    def output(self) -> str:
        with self._line_read:
            return "\n".join(self._lines)

    def wait_line(self, part: str, within_s: float = READY_S) -> str:
        """Wait for an output line that contains `part`; return the first such line."""

        def found() -> str | None:
            return next((line for line in self._lines if part in line), None)

        with self._line_read:
            self._line_read.wait_for(lambda: found() is not None or not self._reader.is_alive(), within_s)
            line = found()
        assert line is not None, f"no output line contains {part!r}:\n{self.output}"
        return line

    def client(self, **options: Any) -> httpx.AsyncClient:
        """An HTTP client of Envoy; the caller closes it (`async with`)."""
        return httpx.AsyncClient(base_url=self.url, transport=Crowd(), **{"timeout": 90.0, **options})

    def redis(self) -> redis.asyncio.Redis:
        """A client of the fleet's Redis; the caller closes it (`async with`)."""
        return primary.client(self.state["redis"], Keys.of("default").pool, decode_responses=True)

    def admin_url(self, replica: int = 0) -> str:
        return str(self.state["replicas"][replica]["admin"])

    async def admin(self, path: str, replica: int = 0, *, method: str = "GET", **how: Any) -> httpx.Response:
        """The answer of one replica's admin API to a read or an idempotent change.

        A replica answers `state_unavailable` if Redis does not reply within 2 s, also because the machine
        pauses. The call is repeated for up to 30 s while it gets the answer `state_unavailable`.
        """
        async with http_client(timeout=10.0) as client:
            return await self.eventually(  # type: ignore[no-any-return]
                lambda: client.request(method, f"{self.admin_url(replica)}{path}", **how),
                lambda answer: not says_unavailable(answer),
                within_s=_ADMIN_PATIENCE_S,
                what="an answer of Redis",
            )

    async def get(self, path: str, replica: int = 0, *, pool: str = "") -> Any:
        """Read /api/v1/`path` from one replica and assert success; `pool` defaults to the default pool."""
        return _of_success(await self.admin(_api(pool, path), replica))

    async def post(self, path: str, replica: int = 0, *, pool: str = "") -> Any:
        """Post a change to one replica; assert success and return the answer."""
        return _of_success(await self.admin(_api(pool, path), replica, method="POST"))

    async def patch(self, changes: dict[str, Any], replica: int = 0, *, pool: str = "") -> Any:
        """Make a live change through one replica; assert success and return the configuration."""
        return _of_success(await self.admin(_api(pool, "config"), replica, method="PATCH", json=changes))

    async def endpoint_status(self, address: str, replica: int = 0) -> str:
        """An endpoint's status as one replica reports it, such as `ready`."""
        listed = await self.get("endpoints", replica)
        return str(next(each["status"] for each in listed if each["address"] == address))

    async def envoy_admin(self, path: str) -> httpx.Response:
        """An answer of Envoy's admin interface."""
        async with http_client(timeout=10.0) as client:
            return await client.get(f"{self.state['envoy_admin']}{path}")

    async def eventually(
        self,
        look: Callable[[], Any],
        holds: Callable[[Any], object] = bool,
        *,
        within_s: float = 15.0,
        what: str = "the result",
    ) -> Any:
        """Call `look`, which may be asynchronous, until the function `holds` accepts the result; return this
        result. The pauses between calls grow, because each call costs CPU that the fleet could use."""
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
        """Read /api/v1/`path` from one replica until the function `holds` accepts the answer; return it."""
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
        """Wait until every replica is in the pool for long enough to get a share of the bound without
        Redis."""

        def are_listed(found: dict[str, Any]) -> bool:
            return len(found["replicas"]) == len(self.state["replicas"])

        await self.until("replicas", are_listed, within_s=60, what="all replicas")
        listed_s = time.monotonic()
        await self.eventually(lambda: time.monotonic() - listed_s > _COUNTED_AFTER_S)

    def replica(self, index: int) -> psutil.Process:
        return psutil.Process(int(self.state["replicas"][index]["pid"]))

    def endpoint(self, index: int) -> psutil.Process:
        """The process of a simulated endpoint."""
        return psutil.Process(int(self.state["endpoints"][index]["pid"]))

    def child(self, name: str) -> psutil.Process:
        """The child process whose program is `name`: `envoy`, `valkey-server`."""
        (found,) = (child for child in self.children() if child.name() == name)
        return found

    def children(self) -> list[psutil.Process]:
        """All running descendants of `picker up`."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def audit(self) -> None:
        """Audit the decision log: it must be complete and keep every guarantee."""
        for pool in self._pools:
            assert_no_violation(self.state["redis"], self._name, pool)

    def stop(self) -> None:
        """Send SIGINT; assert that the log passes the audit, the exit status is 0, and no child remains."""
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
        assert not alive, f"still running: {[child.cmdline() for child in alive]}"

    def _audit_once(self) -> None:
        due, self._audit_due = self._audit_due, False
        if due:
            self.audit()

    def kill(self) -> None:
        """Audit the decision log, then kill `picker up` with SIGKILL; `stop` then does nothing."""
        self._killed = True
        try:
            self._audit_once()
        finally:
            self.discard()

    def discard(self) -> None:
        """Kill `picker up` if it still runs, and stop reading its output."""
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


def assert_no_violation(redis_url: str, fleet_name: str, pool: str = "default") -> None:
    """Audit the decision log of `pool` in Redis.

    Raises:
        AssertionError: raised if the log violates a guarantee (the message shows where) or lacks its start.
        LogUnreadable: raised if there is no log or Redis does not answer.
    """
    report = audited(redis_url, pool)
    problems = [
        "\n    ".join([f"{violation.promise}: {violation.what}", *map(str, violation.evidence)])
        for finding in report.findings
        for violation in finding.violations
    ]
    if report.first_seq != 1:
        problems.append(f"log: it begins at entry {report.first_seq}")
    log = f"{report.entries} entries of the decision log of {fleet_name}, pool {pool}"
    what = f"{report.violations} violations in {log}"
    assert not problems, "\n".join([what, *report.remarks, *problems])


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
    """Suspend `process` (SIGSTOP) within the `with` block."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def exact_bounds(per_backend: float) -> dict[str, float]:
    """Queue controller settings that set all bounds to `per_backend` requests, so without hysteresis."""
    return {f"{bound}_per_backend": per_backend for bound in ("lower_bound", "watermark", "upper_bound")}


def _api(pool: str, path: str) -> str:
    return f"/pools/{pool}/api/v1/{path}" if pool else f"/api/v1/{path}"


def _of_success(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def says_unavailable(answer: Any) -> bool:
    """Whether an admin API answer says that Redis did not reply in time."""
    return answer.status_code == 503 and answer.json().get("code") == "state_unavailable"


Kind = TypeVar("Kind", bound=Fleet)


def started(
    folder: Path,
    options: tuple[str, ...],
    config: dict[str, Any] | None,
    *,
    kind: type[Kind] = Fleet,  # type: ignore[assignment]
    **more: Any,
) -> Kind:
    """Start a fleet and wait until the fleet is ready; `more` are further arguments of `Fleet`."""
    fleet = kind(folder, options, config, **more)
    try:
        fleet.wait_line("dashboard:")
    except BaseException:
        fleet.discard()
        raise
    return fleet


@contextlib.asynccontextmanager
async def running(folder: Path, *options: str, config: dict[str, Any], **more: Any) -> AsyncIterator[Any]:
    """Start a fleet, yield it when it is ready, then stop and audit it, without blocking the event loop.
    `more` are further arguments of `started`."""
    here = await asyncio.to_thread(lambda: started(folder, options, config, **more))
    try:
        yield here
    finally:
        await asyncio.to_thread(here.stop)


@contextlib.contextmanager
def fleets(folders: pytest.TempPathFactory, *always: str) -> Iterator[Callable[..., Fleet]]:
    """Yield a function that starts fleets with the options `always` and its own options; stop the fleets at
    the end."""
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
        raise ExceptionGroup("fleets that ended with a fault", faults)
