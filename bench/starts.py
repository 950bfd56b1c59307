"""`python -m bench.starts`: how long a replica takes from its start to the log line `ready`.

One `picker serve` after the other against a Valkey of the bench's own, which has the library already. By the
clock, by CPU time, and for how long its main thread was ready to run while others had the cores
(proc_pid_schedstat(5)). Writes bench/results/starts.md. Exit status 1 if the CPU time misses its target.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.rig.machine import cpu_ns, describe_machine
from bench.rig.page import options_parser, percentile, table, write_page
from bench.rig.server import server
from picker_tools.local_fleet.network import LOOPBACK, free_port

_WANTED_S = 1.5
_DEADLINE_S = 60.0
_READY = b"picker_fleet.serve ready"
_CONFIG = """\
redis: {{url: "redis://{host}:{redis}"}}
extproc: {{listen: "{host}:0"}}
admin: {{listen: "{host}:0"}}
discovery: {{static: [{{address: "{host}:{endpoint}"}}]}}
"""


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds until ready: by the clock, of CPU of all threads, and waited for a core."""

    clock_s: float
    cpu_s: float
    waited_s: float


def _start(config: Path) -> Start:
    """Start a replica, wait until it is ready, end it. RuntimeError if it does not become ready."""
    began_s = time.monotonic()
    replica = subprocess.Popen(
        [sys.executable, "-m", "picker_fleet.cli", "serve", "--config", str(config)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert replica.stderr is not None
    try:
        for line in replica.stderr:
            if _READY in line:
                break
        else:
            raise RuntimeError(f"the replica ended with exit status {replica.wait(_DEADLINE_S)}")
        clock_s, cpu_s = time.monotonic() - began_s, cpu_ns([replica.pid]) / 1e9
        waited_ns = Path(f"/proc/{replica.pid}/schedstat").read_text(encoding="ascii").split()[1]
        return Start(clock_s, cpu_s, int(waited_ns) / 1e9)
    finally:
        replica.terminate()
        replica.communicate(timeout=_DEADLINE_S)


def _page(starts: Sequence[Start]) -> str:
    here = describe_machine("bench.starts", sys.argv[1:])
    columns = {
        "by the clock": [each.clock_s for each in starts],
        "CPU time": [each.cpu_s for each in starts],
        "waited for a core": [each.waited_s for each in starts],
        "neither ran nor waited": [max(each.clock_s - each.cpu_s - each.waited_s, 0.0) for each in starts],
    }
    rows = [
        [what, *(f"{percentile(found, share):.2f}" for share in (0.5, 0.95, 0.0, 1.0))]
        for what, found in columns.items()
    ]
    return f"""\
# From the start of a replica to `ready`

`{here.command}`, {here.date}, {here.cores} cores ({here.processor}), load average {here.load:.1f} at the
end. {len(starts)} starts, one after the other; seconds. Wanted: at most {_WANTED_S} s.

{table(["", "median", "p95", "least", "most"], rows)}
"""


def main() -> int:
    parser = options_parser("python -m bench.starts")
    parser.add_argument("--starts", type=int, default=20)
    options = parser.parse_args()
    with server() as it, tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        text = _CONFIG.format(host=LOOPBACK, redis=it.port, endpoint=free_port())
        config.write_text(text, encoding="utf-8")
        _start(config)  # reads the files into the page cache
        starts = [_start(config) for _ in range(options.starts)]
    write_page(options.out / "starts.md", _page(starts))
    return 0 if percentile([each.cpu_s for each in starts], 0.95) <= _WANTED_S else 1


if __name__ == "__main__":
    sys.exit(main())
