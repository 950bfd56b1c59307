"""How a process that reads its stdin is ended."""

import asyncio


async def end(process: asyncio.subprocess.Process, within_s: float) -> None:
    """Close its stdin, which ends it; SIGKILL past `within_s`. Returns when it is gone."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(within_s):
            await process.wait()
    except TimeoutError:
        await kill(process)


async def kill(process: asyncio.subprocess.Process) -> None:
    """SIGKILL, if it has not ended by itself; returns when it is gone."""
    if process.returncode is None:
        process.kill()
    await process.wait()
