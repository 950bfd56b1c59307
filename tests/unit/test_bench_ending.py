"""bench.rig.ending: how the measurements' processes are ended."""

import asyncio
import signal
import sys

from bench.rig import ending

LONG_S = 60.0


async def _child(code: str) -> asyncio.subprocess.Process:
    """A process that runs `code` and has said so."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", f"print(flush=True); {code}"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert await process.stdout.readline()
    return process


async def test_given_a_process_that_reads_when_ended_then_it_ends_by_itself() -> None:
    process = await _child("import sys; sys.stdin.read()")
    await ending.end(process, LONG_S)
    assert process.returncode == 0


async def test_given_a_process_that_does_not_read_when_ended_then_it_is_killed() -> None:
    process = await _child("import signal; signal.pause()")
    await ending.end(process, 0.01)
    assert process.returncode == -signal.SIGKILL


async def test_given_a_process_that_has_ended_when_killed_then_that_is_no_fault() -> None:
    process = await _child("")
    await process.wait()
    await ending.kill(process)
    assert process.returncode == 0
