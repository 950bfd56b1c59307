"""`picker top` on a real fleet: one frame to a pipe, and on a terminal with keys that change the fleet."""

import asyncio
import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest
from admin_calls import waiting

from picker_tools.local_fleet.processes import picker_command

LINES, CELLS = 24, 80
ROWS = 14  # of the queue, on so many lines
PLAIN = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
OPTIONS = ("--no-restart", "--endpoints", "2", "--replicas", "2")


@pytest.fixture(scope="module")
def here(shared_fleet: Any) -> Any:
    # One frame says that the decision log is off.
    return shared_fleet(*OPTIONS, config={"decision_log": {"enabled": False}})


@pytest.fixture
def logged(fleet: Any) -> Any:
    """A fleet with a decision log, whose requests wait as long as the test needs."""
    return fleet(*OPTIONS, config={"fair_request_queue": {"queue_ttl": "60s"}})


class Terminal:
    """`picker top` on a pseudo-terminal of 80 by 24; `seen` is what it has written."""

    def __init__(self, url: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, CELLS, 0, 0))
        self._slave = slave
        self._before = termios.tcgetattr(slave)
        command = picker_command("top", "--admin", url)
        environment = {**PLAIN, "TERM": "xterm-256color"}
        self._process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        self.seen = ""
        asyncio.get_running_loop().add_reader(self._master, self._read)

    def _read(self) -> None:
        self.seen += os.read(self._master, 65536).decode(errors="replace")

    async def press(self, keys: str, then: str) -> None:
        """Press keys and wait until the screen shows `then` anew."""
        self.seen = ""
        os.write(self._master, keys.encode())
        await self.shows(then)

    async def shows(self, part: str) -> None:
        try:
            async with asyncio.timeout(30):
                while part not in self.seen:
                    assert self._process.poll() is None, self.seen
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pytest.fail(f"{part!r} is not on the screen: {self.seen[-4000:]!r}")

    async def quit(self) -> None:
        """It ends well by a key, and the terminal is as it was."""
        os.write(self._master, b"q")
        assert await asyncio.to_thread(self._process.wait, 15) == 0
        assert termios.tcgetattr(self._slave) == self._before

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._master)
        self._process.kill()
        self._process.wait()
        os.close(self._master)
        os.close(self._slave)


@asynccontextmanager
async def terminal_of(fleet: Any) -> AsyncIterator[Terminal]:
    """A terminal that shows a fleet, and quits at the end."""
    with closing(Terminal(fleet.admin_url())) as terminal:
        await terminal.shows("Picker Fleet")
        yield terminal
        await terminal.quit()


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        ("flows", "no flows"),
        ("workloads", "no workloads"),
        ("endpoints", "Adapters"),  # to a pipe every column is shown
        ("replicas", "Version"),
        ("queue", "nothing waits"),
        ("log", "the decision log is off"),
        ("stock", "in flight 0 requests now"),
    ],
)
async def test_one_frame_goes_to_a_pipe(here: Any, view: str, expected: str) -> None:
    done = await once(here.admin_url(1), view)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 of 2 ready" in done.stdout
    assert "2 of 2 live" in done.stdout
    assert "\x1b" not in done.stdout
    assert expected in done.stdout
    if view == "endpoints":
        assert all(endpoint["address"] in done.stdout for endpoint in here.state["endpoints"])


async def once(url: str, view: str) -> subprocess.CompletedProcess[str]:
    """One frame of a view, printed to a pipe."""
    command = picker_command("top", "--admin", url, "--once", "--view", view)
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60, env=PLAIN
    )


async def test_an_unreachable_replica_is_exit_code_1_at_once() -> None:
    done = await once("127.0.0.1:1", "flows")
    assert done.returncode == 1
    assert "refused" in done.stderr
    assert done.stderr.count("\n") == 1


async def test_keys_drain_and_pause_and_the_terminal_is_restored(here: Any) -> None:
    async with terminal_of(here) as terminal:
        await terminal.press("3", then="Runs + waits")
        address = (await here.get("endpoints"))[0]["address"]
        await terminal.press("d", then=f"Send nothing new to {address}?")
        # Nothing happens before it is confirmed.
        assert await here.endpoint_status(address, 1) == "ready"
        await terminal.press("y", then="gets nothing new")
        assert await here.endpoint_status(address, 1) == "drained"
        # The same key undrains it.
        await terminal.press("\x1b[A", then="drained")
        await terminal.press("d", then=f"Give {address} requests again?")
        await terminal.press("y", then="takes requests")
        assert await here.endpoint_status(address, 1) != "drained"
        # A pause holds for the whole fleet.
        await terminal.press("p", then="Pause dispatch")
        await terminal.press("y", then="PAUSED")
        assert (await here.get("state", 1))["paused"]
        await terminal.press("p", then="Resume dispatch?")
        await terminal.press("y", then="dispatches again")
        assert not (await here.get("state", 1))["paused"]


async def test_the_queue_is_paged_in_dispatch_order_and_a_request_is_evicted(logged: Any) -> None:
    names = [f"flow-{number:02}" for number in range(30)]
    async with waiting(logged, *names):
        order = [(each["flow"], each["id"]) for each in (await logged.get("queue"))["requests"]]
        assert sorted(flow for flow, _ in order) == names
        # One frame to a pipe has every request, in the API's order.
        frame = await once(logged.admin_url(), "queue")
        rows = [line.split() for line in frame.stdout.splitlines() if "flow-" in line]
        assert [row[1] for row in rows] == [flow for flow, _ in order]
        assert all(request in frame.stdout for _, request in order)
        async with terminal_of(logged) as terminal:
            # A terminal of 24 lines shows the first ones; the others are on the next pages.
            # The view of flows, which may still be written, has no ids; this one has their beginnings.
            shown = [request[:20] for _, request in order]
            await terminal.press("5", then=shown[ROWS - 1])
            assert shown[ROWS] not in terminal.seen
            await terminal.press("\x1b[6~", then=shown[2 * ROWS - 1])
            await terminal.press("b", then=shown[0])
            flow, request = order[1]
            await terminal.press("j", then=request)
            await terminal.press("e", then=f"Evict {request} of {flow}?")
            assert (await logged.get("state", 1))["queued"] == 30
            await terminal.press("y", then="has left the queue")
            assert (await logged.get("state", 1))["queued"] == 29
            await terminal.press("6", then="evicted")
            await terminal.press("7", then="requests now")
            assert "bounds" in terminal.seen
