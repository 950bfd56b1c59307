"""`picker up` as its user runs it, and ways to look into it. Its end is checked: the decision log keeps every
promise, exit status 0, and no process left.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import judged_log
import psutil
import pytest
import redis.asyncio
import yaml
from begun_up import BegunUp
from crowd import Crowd

from picker_fleet.state import primary
from picker_fleet.state.keys import Keys

if TYPE_CHECKING:
    import openai

DRAIN_GRACE = "PICKER_EXTPROC__DRAIN_GRACE"
READY_S = 90.0
STOP_S = 30.0
_POLL_S = 0.02
_ADMIN_PATIENCE_S = 30.0
_ADMIN_PAUSE_S = 0.1


class Fleet:
    """A running `picker up`. Ports, pids and addresses are read from its state file each time.

    Its decision log is on unless `config` turns it off, and is judged when it ends: a broken promise fails
    the test. `unjudged` says why that cannot be (Redis ends sooner, the state is spoilt on purpose). `typed`:
    each of its processes is executed, as a user's is, and not begun the quicker way (begun_up.py); so it is
    with an `environment`, which an interpreter may read as it starts.
    """

    def __init__(
        self,
        folder: Path,
        options: tuple[str, ...],
        config: dict[str, Any] | None,
        environment: Mapping[str, str] | None = None,
        unjudged: str = "",
        typed: bool = False,
    ) -> None:
        self.state_file = folder / "state.json"
        arguments = ["--port", "0", "--state-file", str(self.state_file), *options]
        if config is not None:
            file = folder / "config.yaml"
            file.write_text(yaml.safe_dump(config))
            arguments += ["--config", str(file)]
        # Nothing is sent any more when a test's fleet ends: its replicas need not announce it for long.
        given = config or {}
        grace = {} if "drain_grace" in given.get("extproc", {}) else {DRAIN_GRACE: "100ms"}
        log = judged_log.environment(given)
        self._to_judge = judged_log.is_on(given) and not unjudged
        self._name = f"`picker up {' '.join(options)}`"
        self._killed = False
        self._said: list[str] = []
        self._news = threading.Condition()
        inherited = {**os.environ, **grace, **log, "TMPDIR": str(folder), **(environment or {})}
        self.process = (_typed if typed or environment else BegunUp)(arguments, inherited)
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
        with self._news:
            return "\n".join(self._said)

    def wait_line(self, part: str, within_s: float = READY_S) -> str:
        """The first line of its output that contains `part`; waits for it."""

        def found() -> str | None:
            return next((line for line in self._said if part in line), None)

        with self._news:
            self._news.wait_for(lambda: found() is not None or not self._reader.is_alive(), within_s)
            line = found()
        assert line is not None, f"no line with {part!r} came:\n{self.output}"
        return line

    def client(self, **options: Any) -> httpx.AsyncClient:
        """HTTP through Envoy; to be closed by its user (`async with`)."""
        return httpx.AsyncClient(base_url=self.url, transport=Crowd(), **{"timeout": 60.0, **options})

    def openai(self, **options: Any) -> "openai.AsyncOpenAI":
        """The official client through Envoy, without its own retries; to be closed by its user."""
        import openai  # half a second, which only who uses it is to pay

        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", **{"max_retries": 0, "timeout": 60.0, **options}
        )

    def redis(self) -> redis.asyncio.Redis:
        """A client of the fleet's Redis; to be closed by its user (`async with`)."""
        return primary.client(self.state["redis"], Keys.of("default").pool, decode_responses=True)

    async def admin(
        self, path: str, replica: int = 0, *, method: str = "GET", patient: bool = True
    ) -> httpx.Response:
        """Answer of one replica's admin API to a read, or to a change that may be made twice.

        It gives Redis 2 s and then says `state_unavailable`, rightly, also when all that happened is that the
        machine stood still. So it is asked again while it says so, for 30 s; not for who is not `patient`.
        """
        clock = asyncio.get_running_loop().time
        end_s = clock() + _ADMIN_PATIENCE_S
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=10.0) as client:
            while True:
                answer = await client.request(method, f"{self.state['replicas'][replica]['admin']}{path}")
                if not patient or not says_unavailable(answer) or clock() >= end_s:
                    return answer
                await asyncio.sleep(_ADMIN_PAUSE_S)

    async def envoy_admin(self, path: str) -> httpx.Response:
        """Answer of Envoy's admin interface."""
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=10.0) as client:
            return await client.get(f"{self.state['envoy_admin']}{path}")

    async def eventually(
        self, look: Callable[[], Awaitable[Any]], *, within_s: float = 15.0, what: str = "it"
    ) -> Any:
        """The first true thing that `look` finds, asked again and again."""
        last: Any = None
        try:
            async with asyncio.timeout(within_s):
                while True:
                    last = await look()
                    if last:
                        return last
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            pytest.fail(f"{what} did not come within {within_s:g} s; last seen: {last!r}\n{self.output}")

    def kill_replica(self, index: int) -> int:
        """SIGKILL to a replica; the pid it had."""
        pid = int(self.state["replicas"][index]["pid"])
        psutil.Process(pid).kill()
        return pid

    def terminate_replica(self, index: int) -> None:
        """SIGTERM to a replica."""
        psutil.Process(int(self.state["replicas"][index]["pid"])).terminate()

    def kill_endpoint(self, index: int) -> str:
        """SIGKILL to a simulator; its address."""
        endpoint = self.state["endpoints"][index]
        psutil.Process(int(endpoint["pid"])).kill()
        return str(endpoint["address"])

    def stop_endpoint(self, index: int) -> str:
        """SIGSTOP to a simulator, which `continue_endpoint` ends; its address."""
        endpoint = self.state["endpoints"][index]
        psutil.Process(int(endpoint["pid"])).suspend()
        return str(endpoint["address"])

    def continue_endpoint(self, index: int) -> None:
        """SIGCONT to a simulator."""
        psutil.Process(int(self.state["endpoints"][index]["pid"])).resume()

    def children(self) -> list[psutil.Process]:
        """Every process that it has started and that lives."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def judge(self) -> None:
        """Replay its decision log, which must be whole and keep every promise."""
        judged_log.judge(self.state["redis"], self._name)

    def stop(self) -> None:
        """End it as Ctrl-C does; its log is judged, it must exit with 0 and take every child with it."""
        if self._killed:
            return
        children = self.children() if self.process.poll() is None else []
        try:
            self._judge_once()
        finally:
            self._end(children)

    def _judge_once(self) -> None:
        due, self._to_judge = self._to_judge, False
        if due:
            self.judge()

    def _end(self, children: list[psutil.Process]) -> None:
        try:
            self.process.send_signal(signal.SIGINT)
            code = self.process.wait(STOP_S)
        finally:
            self.discard()
        _, alive = psutil.wait_procs(children, timeout=0)
        assert code == 0, self.output
        assert not alive, f"left behind: {[child.cmdline() for child in alive]}"

    def kill(self) -> None:
        """SIGKILL to `picker up` itself, its log judged before; then there is no end left to check."""
        self._killed = True
        try:
            self._judge_once()
        finally:
            self.discard()

    def discard(self) -> None:
        """Make sure that it is gone, whatever happened."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(STOP_S)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self._said.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()


def _typed(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "picker_fleet.cli", "up", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def says_unavailable(answer: Any) -> bool:
    """Whether this answer of an admin API (`status_code`, `json()`) is that the shared state did not answer
    in time."""
    return answer.status_code == 503 and answer.json().get("code") == "state_unavailable"


def started(
    folder: Path,
    options: tuple[str, ...],
    config: dict[str, Any] | None,
    environment: Mapping[str, str] | None = None,
    unjudged: str = "",
    typed: bool = False,
) -> Fleet:
    """A fleet that is ready. `environment` is added to what its processes inherit."""
    fleet = Fleet(folder, options, config, environment, unjudged, typed)
    try:
        fleet.wait_line("dashboard:")
    except BaseException:
        fleet.discard()
        raise
    return fleet


def stop_all(fleets: list[Fleet]) -> None:
    faults = []
    for fleet in fleets:
        try:
            fleet.stop()
        except Exception as fault:
            faults.append(fault)
    if faults:
        raise ExceptionGroup("fleets that did not end well", faults)
