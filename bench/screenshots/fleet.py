"""A fleet of `picker up` for the time of a context."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

_READY_S = 120.0
_STOP_S = 30.0


@asynccontextmanager
async def fleet(config: Mapping[str, Any], *options: str) -> AsyncIterator[dict[str, Any]]:
    """The state file of a fleet that is ready; it has ended on leaving.

    Raises:
        RuntimeError: it ended before it was ready; its output was shown.
        TimeoutError: it was not ready within two minutes.
    """
    with TemporaryDirectory(prefix="screenshots-") as folder:
        file, state = Path(folder, "config.yaml"), Path(folder, "state.json")
        file.write_text(yaml.safe_dump(dict(config)))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "app.cli", "up", "--port", "0"),
            *("--config", str(file), "--state-file", str(state), *options),
            env={**os.environ, "PICKER_EXTPROC__DRAIN_GRACE": "100ms"},
        )
        try:
            async with asyncio.timeout(_READY_S):
                while not state.exists():
                    if process.returncode is not None:
                        raise RuntimeError(f"picker up ended with {process.returncode}")
                    await asyncio.sleep(0.1)
            yield json.loads(state.read_text())
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
                async with asyncio.timeout(_STOP_S):
                    await process.wait()
