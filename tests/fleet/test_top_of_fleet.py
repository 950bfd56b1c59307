"""`picker top` on a real fleet: one frame to a pipe, and on a terminal with keys that change the fleet."""

import asyncio
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from typing import Any

import pytest
from fleet_load import shared

LINES, CELLS = 24, 80
TOP = (sys.executable, "-P", "-m", "app.cli", "top", "--admin")


@pytest.fixture(scope="module")
def here(shared_fleet: Any) -> Any:
    return shared_fleet("--no-restart", "--endpoints", "2", "--replicas", "2")


class Terminal:
    """`picker top` on a pseudo-terminal of 80 by 24; what it wrote is in `seen`."""

    def __init__(self, url: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, CELLS, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        self.process = subprocess.Popen(
            [*TOP, url],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color"},
        )
        self.seen = ""
        asyncio.get_running_loop().add_reader(self._ours, self._read)

    def _read(self) -> None:
        self.seen += os.read(self._ours, 65536).decode(errors="replace")

    async def press(self, keys: str, then: str) -> None:
        """Press keys and wait until something new on the screen has `then` in it."""
        self.seen = ""
        os.write(self._ours, keys.encode())
        await self.shows(then)

    async def shows(self, part: str) -> None:
        async with asyncio.timeout(30):
            while part not in self.seen:
                assert self.process.poll() is None, self.seen
                await asyncio.sleep(0.02)

    async def left_by(self, key: str) -> int:
        os.write(self._ours, key.encode())
        return await asyncio.to_thread(self.process.wait, 15)

    def settings(self) -> list[Any]:
        return termios.tcgetattr(self._theirs)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._ours)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


async def test_one_frame_goes_to_a_pipe(here: Any) -> None:
    # Given a script, when it asks for one frame of each view
    url = here.state["replicas"][1]["admin"]
    for view in ("flows", "workloads", "endpoints", "replicas"):
        done = await asyncio.to_thread(
            subprocess.run, [*TOP, url, "--once", "--view", view], capture_output=True, text=True, timeout=60
        )
        # Then it has it, and no escape sequences
        assert (done.returncode, done.stderr) == (0, "")
        assert "2 of 2 ready" in done.stdout
        assert "2 of 2 live" in done.stdout
        assert "\x1b" not in done.stdout
        if view == "endpoints":
            assert all(endpoint["address"] in done.stdout for endpoint in here.state["endpoints"])


async def test_a_replica_that_is_not_there_is_told_at_once() -> None:
    done = await asyncio.to_thread(
        subprocess.run, [*TOP, "127.0.0.1:1", "--once"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "refused" in done.stderr
    assert done.stderr.count("\n") == 1


async def test_on_a_terminal_keys_drain_and_pause_and_the_terminal_is_left_as_it_was(here: Any) -> None:
    terminal = Terminal(here.state["replicas"][0]["admin"])
    try:
        # Given the live view, when the endpoints are looked at and the first is drained
        await terminal.shows("Picker Fleet")
        await terminal.press("3", then="Runs + waits")
        address = (await here.admin("/api/v1/endpoints")).json()[0]["address"]
        await terminal.press("d", then=f"Send nothing new to {address}?")
        # Then nothing has happened until it is confirmed
        assert await status_of(here, address) == "ready"
        await terminal.press("y", then="gets nothing new")
        assert await status_of(here, address) == "drained"
        # And the same key takes it back
        await terminal.press("\x1b[A", then="drained")
        await terminal.press("d", then=f"Give {address} requests again?")
        await terminal.press("y", then="takes requests")
        assert await status_of(here, address) != "drained"
        # When dispatch is paused, then the whole fleet is, and the screen says so
        await terminal.press("p", then="Pause dispatch")
        await terminal.press("y", then="PAUSED")
        assert (await shared(here, 1))["paused"]
        await terminal.press("p", then="Resume dispatch?")
        await terminal.press("y", then="dispatches again")
        assert not (await shared(here, 1))["paused"]
        # When it is left, then the terminal is as it was
        assert await terminal.left_by("q") == 0
        assert terminal.settings() == terminal.before
    finally:
        terminal.close()


async def status_of(fleet: Any, address: str) -> str:
    listed = (await fleet.admin("/api/v1/endpoints", 1)).json()
    return str(next(each["status"] for each in listed if each["address"] == address))
