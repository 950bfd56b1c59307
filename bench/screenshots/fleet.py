"""A fleet of `picker up` for the time of a context."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

_READY_S = 120.0
_STOP_S = 30.0


@contextmanager
def fleet(config: Mapping[str, Any], *options: str) -> Iterator[dict[str, Any]]:
    """The state file of a fleet that is ready; it has ended on leaving.

    Raises:
        RuntimeError: it ended before it was ready, or was not ready within two minutes.
    """
    with TemporaryDirectory(prefix="screenshots-") as folder:
        file, state = Path(folder, "config.yaml"), Path(folder, "state.json")
        file.write_text(yaml.safe_dump(dict(config)))
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "picker_fleet.cli", "up", "--port", "0"),
                *("--config", str(file), "--state-file", str(state), *options),
            ],
            env={**os.environ, "PICKER_EXTPROC__DRAIN_GRACE": "100ms"},
        )
        try:
            since = time.monotonic()
            while not state.exists():
                if process.poll() is not None or time.monotonic() - since > _READY_S:
                    raise RuntimeError(f"picker up is not ready; its exit status is {process.returncode}")
                time.sleep(0.1)
            yield json.loads(state.read_text())
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(_STOP_S)
